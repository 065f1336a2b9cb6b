"""Checks of this host: free chips, package versions, memory, open files. Imports no JAX."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement

from valkyrie.config.compose import accelerators
from valkyrie.doctor.disks import state_bytes
from valkyrie.doctor.findings import FAILS, FINE, WARNING, Answers, Examined
from valkyrie.hardware.platforms import get_platform
from valkyrie.host_memory import free_memory
from valkyrie.processes.locks import LockState, lock
from valkyrie.runs.folder import installed_version
from valkyrie.train.devices import missing_devices
from valkyrie.units import memory_text

PROC, LOCKFILE = Path("/proc"), Path("/tmp/libtpu_lockfile")
_CHIP_FILES = re.compile(r"/dev/(accel\d+|vfio/\d+|nvidia\d+)")
_FILES, _FILES_A_PROCESS = 256, 8
"""Files that a training opens, and connections that process 0 has per process."""
_SHOWN = ("jax", "jaxlib", "libtpu", "flax", "optax", "orbax-checkpoint")
_REQUIRING = ("valkyrie-jax", "jax")
"""Packages with requirements to check."""


def chips(examined: Examined) -> Answers:
    """Compare the chips of this host, counted by device files, with those of the target's hosts."""
    if problems := missing_devices(examined.run):
        yield from ((FAILS, str(problem)) for problem in problems)
        return
    target, mesh, count = examined.run.config.target, examined.run.config.mesh, accelerators()
    platform = get_platform(target.platform)
    if not count:
        each = f", {mesh.size // examined.processes} a process," if examined.processes > 1 else ""
        text = f"no accelerator that JAX can use: {mesh.size} simulated CPU devices{each} on {os.cpu_count()} cores"
        yield FINE if platform.runs_on_host else WARNING, text
    elif target.chips is None or target.chip is None or not platform.uses_every_device:
        yield FINE, f"{count} on this host"
    elif count != (each := target.chips // target.hosts):
        text = f"{count} on this host; target={target.describe()} has {each} a host"
        yield FAILS, text, "Start it on the hosts of that slice, or correct target=."
    else:
        yield FINE, f"{count} {target.chip.name} chips on this host"


def expected_processes(examined: Examined) -> Answers:
    """Compare the number of processes with the hosts of the target."""
    target = examined.run.config.target
    if not accelerators() or target.chip is None or not get_platform(target.platform).uses_every_device:
        return
    hosts = target.hosts * target.slices
    if target.chips is not None and examined.processes != hosts and not missing_devices(examined.run):
        count = f"{examined.processes} process{'es' * (examined.processes > 1)}"
        text = f"{count}; target={target.describe()} has {hosts} hosts"
        yield FAILS, text, "Start one on every host of the slice: valkyrie-launch prints how."


def chips_free(_: Examined) -> Answers:
    """Look for other processes that use the chips. Skipped without chips."""
    if not accelerators():
        return
    held = [(pid, file) for pid, file in _open_devices() if pid != os.getpid()]
    tpu = sorted({pid for pid, file in held if "nvidia" not in file})
    gpu = sorted({pid for pid, file in held if "nvidia" in file})
    named = ", ".join(f"{pid} ({_command(pid)})" for pid in (tpu or gpu)[:4])
    if tpu:
        remedy = f"A TPU serves one process: wait for it, or end it: kill {' '.join(map(str, tpu))}"
        yield FAILS, f"the TPU is in use by process {named}", remedy
    elif gpu:
        yield WARNING, f"process {named} has a GPU open too", "Its memory is not ours."
    else:
        yield _locked() or (FINE, "no other process has them")


def _open_devices() -> Iterator[tuple[int, str]]:
    """Yield process and device file for every open chip. Skips processes that this user may not inspect."""
    for folder in PROC.glob("[0-9]*/fd"):
        try:
            targets = [os.readlink(entry) for entry in folder.iterdir()]
        except OSError:
            continue  # of another user, or ended meanwhile
        yield from ((int(folder.parent.name), target) for target in targets if _CHIP_FILES.fullmatch(target))


def _command(pid: int) -> str:
    try:
        words = (PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return "?"
    return " ".join(words).strip()[:60] or "?"


def _locked() -> tuple[str, ...] | None:
    """Return the finding if libtpu's lock file prevents a start."""
    try:
        with LOCKFILE.open("r+") as file:
            if lock(file, wait=False) is not LockState.another:
                return None
    except FileNotFoundError:
        return None
    except OSError as error:
        text = f"{LOCKFILE} is of another user ({(error.strerror or '').lower()}): libtpu will not start"
        return FAILS, text, f"If nobody else uses the TPU: sudo rm {LOCKFILE}"
    text = f"{LOCKFILE} is locked by a process that this user cannot see"
    return FAILS, text, "Look for it: sudo lsof -w /dev/accel* /dev/vfio/*"


def versions(examined: Examined) -> Answers:
    """Check that the installed packages are those that Valkyrie and JAX require."""
    wrong = list(dict.fromkeys(_unmet_requirements()))
    platform = get_platform(examined.run.config.target.platform)
    if platform.plugins and not any(map(installed_version, platform.plugins)):
        wrong.append(f"{platform.plugins[0]} is not installed, without which JAX finds no {platform.name.upper()}")
    shown = ", ".join(f"{name} {found}" for name in _SHOWN if (found := installed_version(name)))
    extra = "" if platform.extra is None else f" --extra {platform.extra}"
    failure = FAILS, f"{'; '.join(wrong)} (here: {shown})", f"Install what fits: uv sync{extra}"
    yield failure if wrong else (FINE, shown)


def _unmet_requirements() -> Iterator[str]:
    """Yield each unmet requirement of the installed packages. Of optional ones, checks only installed JAX plugins."""
    for who in _REQUIRING:
        if installed_version(who) is None:
            yield f"{who} is not installed"
            continue
        for wanted in map(Requirement, requires(who) or []):
            optional = wanted.marker is not None and "extra" in str(wanted.marker)
            if not optional and wanted.marker is not None and not wanted.marker.evaluate():
                continue
            is_plugin = wanted.name == "libtpu" or re.fullmatch("jax-.*-(plugin|pjrt)", wanted.name)
            if optional and not is_plugin:
                continue
            installed = installed_version(wanted.name)
            if installed is None and not optional:
                yield f"{wanted.name} is not installed, and {who} needs it"
            if installed is not None and not wanted.specifier.contains(installed, prereleases=True):
                yield f"{wanted.name} {installed} is not {wanted.specifier}, as {who} {installed_version(who)} needs it"


def host_memory(examined: Examined) -> Answers:
    """Check that this host's memory can hold its share of the state, which is copied there for checkpoints."""
    free = free_memory()
    if free is None:
        yield WARNING, "this system does not tell how much is free"
        return
    simulated = not accelerators() and get_platform(examined.run.config.target.platform).is_simulated(0)
    needed = (3 if simulated else 1) * state_bytes(examined.run) // examined.processes
    what = "the state, gradients and a copy to save" if simulated else "the copy of the state that is saved"
    text = f"{memory_text(free)} free; {what} take {memory_text(needed)}"
    remedy = "Use more hosts, a smaller model=, or a machine with more memory."
    yield (FAILS, text, remedy) if needed > free else (FINE, text)


def open_files(examined: Examined) -> Answers:
    """Check how many files and connections this process may open."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    needed = _FILES + _FILES_A_PROCESS * examined.processes
    failure = FAILS, f"at most {limit}, and about {needed} are needed", "ulimit -n 65536"
    fine = FINE, "no limit" if limit < 0 or limit > 2**40 else f"up to {limit:,}"
    yield failure if 0 <= limit < needed else fine
