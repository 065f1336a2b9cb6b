"""What this host has for a run: chips that nobody else has, memory, open files. Imports no JAX."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

from valkyrie.config.compose import accelerators
from valkyrie.config.run import Run
from valkyrie.doctor.findings import FAILS, FINE, WARNING, Finding
from valkyrie.doctor.size import state_bytes
from valkyrie.hardware.platforms import platform_of
from valkyrie.processes.locks import Lock, lock
from valkyrie.train.devices import missing_devices
from valkyrie.train.host import free_memory
from valkyrie.units import memory

PROC, LOCKFILE = Path("/proc"), Path("/tmp/libtpu_lockfile")
_CHIP_FILES = re.compile(r"/dev/(accel\d+|vfio/\d+|nvidia\d+)")
_FILES, _FILES_A_PROCESS = 256, 8
"""Files that a training has open at a time, and those for each other process: process 0 hears from all of them."""


def chips(run: Run, processes: int) -> list[Finding]:
    """Return whether this host has the chips that the target's hosts have, as far as device files tell."""
    if problems := missing_devices(run):
        return [Finding("chips", FAILS, problem) for problem in problems]
    target, mesh, found = run.config.target, run.config.mesh, accelerators()
    if not found:
        verdict = FINE if platform_of(target.platform).runs_on_host else WARNING
        each = f", {mesh.size // processes} a process," if processes > 1 else ""
        text = f"no accelerator that JAX can use: {mesh.size} simulated CPU devices{each} on {os.cpu_count()} cores"
        return [Finding("chips", verdict, text)]
    if target.chips is None or target.chip is None or not platform_of(target.platform).uses_every_device:
        return [Finding("chips", FINE, f"{found} on this host")]
    hosts, each = target.hosts * target.slices, target.chips // target.hosts
    findings = [Finding("chips", FINE, f"{found} {target.chip.name} chips on this host")]
    if found != each:
        text = f"{found} on this host; target={target.describe()} has {each} a host"
        findings = [Finding("chips", FAILS, text, "Start it on the hosts of that slice, or correct target=.")]
    if processes != hosts:
        text = f"{processes} process{'es' * (processes > 1)}; target={target.describe()} has {hosts} hosts"
        remedy = "Start one on every host of the slice: valkyrie-launch prints how."
        findings.append(Finding("processes", FAILS, text, remedy))
    return findings


def holders(proc: Path = PROC, lockfile: Path = LOCKFILE, devices: int | None = None) -> list[Finding]:
    """Return whether another process has the chips; nothing where there are none.

    `devices` are the accelerators of this host, counted where None is given.
    """
    if not (accelerators() if devices is None else devices):
        return []
    held = [(pid, file) for pid, file in _open_devices(proc) if pid != os.getpid()]
    tpu = sorted({pid for pid, file in held if "nvidia" not in file})
    gpu = sorted({pid for pid, file in held if "nvidia" in file} - set(tpu))
    if tpu:
        named = ", ".join(f"{pid} ({_command(proc, pid)})" for pid in tpu[:4])
        remedy = f"A TPU serves one process: wait for it, or end it: kill {' '.join(map(str, tpu))}"
        return [Finding("chips free", FAILS, f"the TPU is in use by process {named}", remedy)]
    if gpu:
        named = ", ".join(f"{pid} ({_command(proc, pid)})" for pid in gpu[:4])
        return [Finding("chips free", WARNING, f"process {named} has a GPU open too", "Its memory is not ours.")]
    if trouble := _locked(lockfile):
        return [trouble]
    return [Finding("chips free", FINE, "no other process has them")]


def host_memory(run: Run, processes: int, free: int | None = None) -> Finding:
    """Return whether the memory of this host holds its part of a state, which is copied there to be saved.

    `free` are the bytes that are free, asked of the system where None is given.
    """
    free = free_memory() if free is None else free
    if free is None:
        return Finding("host memory", WARNING, "this system does not tell how much is free")
    simulated = not accelerators() and platform_of(run.config.target.platform).is_simulated(0)
    copies = 3 if simulated else 1  # the state itself and its gradients lie there too
    needed = copies * state_bytes(run) // processes
    what = "the state, gradients and a copy to save" if simulated else "the copy of the state that is saved"
    text = f"{memory(free)} free; {what} take {memory(needed)}"
    if needed > free:
        return Finding("host memory", FAILS, text, "Use more hosts, a smaller model=, or a machine with more memory.")
    return Finding("host memory", FINE, text)


def open_files(processes: int, limit: int | None = None) -> Finding:
    """Return whether this process may open enough files and connections; `limit` is asked of the system if None."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
    needed = _FILES + _FILES_A_PROCESS * processes
    if 0 <= limit < needed:
        return Finding("open files", FAILS, f"at most {limit}, and about {needed} are needed", "ulimit -n 65536")
    return Finding("open files", FINE, "no limit" if limit < 0 or limit > 2**40 else f"up to {limit:,}")


def _open_devices(proc: Path) -> Iterator[tuple[int, str]]:
    """Yield (process, device file) for every chip that a process has open, as far as this user may look."""
    for folder in proc.glob("[0-9]*/fd"):
        try:
            targets = [os.readlink(entry) for entry in folder.iterdir()]
        except OSError:
            continue  # of another user, or ended meanwhile
        for target in targets:
            if _CHIP_FILES.fullmatch(target):
                yield int(folder.parent.name), target


def _command(proc: Path, pid: int) -> str:
    try:
        words = (proc / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return "?"
    return " ".join(words).strip()[:60] or "?"


def _locked(lockfile: Path) -> Finding | None:
    """Return what libtpu's lock file says against a start; None where it says nothing."""
    try:
        with lockfile.open("r+") as file:
            if lock(file, wait=False) is not Lock.another:
                return None
    except FileNotFoundError:
        return None
    except OSError as error:
        text = f"{lockfile} is of another user ({(error.strerror or '').lower()}): libtpu will not start"
        return Finding("chips free", FAILS, text, f"If nobody else uses the TPU: sudo rm {lockfile}")
    text = f"{lockfile} is locked by a process that this user cannot see"
    return Finding("chips free", FAILS, text, "Look for it: sudo lsof -w /dev/accel* /dev/vfio/*")
