"""Checks of this host: chips, package versions, memory, open files. Does not import JAX."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement

from valkyrie.config.compose import count_accelerators
from valkyrie.doctor.disks import state_bytes
from valkyrie.doctor.findings import FAILURE, OK, WARNING, CheckContext, CheckResults
from valkyrie.hardware.platforms import get_platform
from valkyrie.host_memory import free_memory
from valkyrie.processes.locks import LockState, lock
from valkyrie.runs.folder import installed_version
from valkyrie.train.devices import device_problems, environment_problems
from valkyrie.units import count_text, memory_text

PROC, LOCK_FILE = Path("/proc"), Path("/tmp/libtpu_lockfile")
_CHIP_DEVICE = re.compile(r"/dev/(accel\d+|vfio/\d+|nvidia\d+)")
_OPEN_FILES, _FILES_PER_PROCESS = 256, 8
"""Estimated open files of a training run, and additional open files and sockets for each of its processes."""
_SHOWN_PACKAGES = ("jax", "jaxlib", "libtpu", "flax", "optax", "orbax-checkpoint")
_CHECKED_PACKAGES = ("valkyrie-jax", "jax")
"""Packages that must have their requirements installed."""


def check_environment(_: CheckContext) -> CheckResults:
    """Check the environment variables of JAX and XLA. Yields only failures."""
    yield from ((FAILURE, str(problem)) for problem in environment_problems())


def check_chips(context: CheckContext) -> CheckResults:
    """Check that this host has the chips of a host of the target. Chips are counted by their device files.

    Fails if `device_problems` finds a problem, or if the number of chips differs on a platform where a program must use
    every device of a slice. Warns if there are no chips, so that the CPU simulates the devices, unless the target is
    the CPU itself.
    """
    if problems := device_problems(context.run):
        yield from ((FAILURE, str(problem)) for problem in problems)
        return
    target, mesh, count = context.run.config.target, context.run.config.mesh, count_accelerators()
    platform = get_platform(target.platform)
    if not count:
        share = f" ({mesh.size // context.process_count} per process)" if context.process_count > 1 else ""
        devices, cores = count_text(mesh.size, "simulated CPU device"), count_text(os.cpu_count() or 1, "core")
        text = f"JAX finds no accelerator: using {devices}{share} on {cores}"
        yield OK if platform.runs_on_host else WARNING, text
    elif target.chips is None or target.chip is None or not platform.uses_every_device:
        yield OK, f"{count_text(count, 'chip')} on this host"
    elif count != (expected := target.chips // target.hosts):
        text = f"{count_text(count, 'chip')} on this host, but target={target.describe()} has {expected} per host"
        yield FAILURE, text, "Start the run on the hosts of that slice, or correct target=."
    else:
        yield OK, f"{count_text(count, f'{target.chip.name} chip')} on this host"


def check_processes(context: CheckContext) -> CheckResults:
    """Check that the number of processes is the number of hosts of the target. Yields only failures.

    Skipped on hosts without chips, and on platforms where a program may use a part of the devices.
    """
    target = context.run.config.target
    if not count_accelerators() or target.chip is None or not get_platform(target.platform).uses_every_device:
        return
    host_count = target.hosts * target.slices
    if target.chips is not None and context.process_count != host_count and not device_problems(context.run):
        count = f"{context.process_count} process{'es' * (context.process_count > 1)}"
        text = f"{count}, but target={target.describe()} has {count_text(host_count, 'host')}"
        yield FAILURE, text, "Start one process on every host of the slice. valkyrie-launch prints the commands."


def check_chips_free(_: CheckContext) -> CheckResults:
    """Check that no other process uses the chips. Skipped on hosts without chips."""
    if not count_accelerators():
        return
    in_use = [(pid, file) for pid, file in _list_open_chips() if pid != os.getpid()]
    tpu_pids = sorted({pid for pid, file in in_use if "nvidia" not in file})
    gpu_pids = sorted({pid for pid, file in in_use if "nvidia" in file})
    pids = tpu_pids or gpu_pids
    processes = f"process{'es' * (len(pids) > 1)} " + ", ".join(f"{pid} ({_command(pid)})" for pid in pids[:4])
    if tpu_pids:
        stop = f"kill {' '.join(map(str, tpu_pids))}"
        remedy = f"Only one process can use a TPU. Wait until the TPU is free, or free it: {stop}"
        yield FAILURE, f"the TPU is in use by {processes}", remedy
    elif gpu_pids:
        yield (
            WARNING,
            f"a GPU is also in use by {processes}",
            "The run cannot use GPU memory that other processes occupy.",
        )
    else:
        yield _check_lock_file() or (OK, "no other process uses them")


def _list_open_chips() -> Iterator[tuple[int, str]]:
    """Yield the process id and device file of every open chip. Skips processes that this user may not inspect."""
    for folder in PROC.glob("[0-9]*/fd"):
        try:
            targets = [os.readlink(entry) for entry in folder.iterdir()]
        except OSError:
            continue  # the process belongs to another user or has ended
        yield from ((int(folder.parent.name), target) for target in targets if _CHIP_DEVICE.fullmatch(target))


def _command(pid: int) -> str:
    try:
        words = (PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return "?"
    return " ".join(words).strip()[:60] or "?"


def _check_lock_file() -> tuple[str, ...] | None:
    """Return a failure if libtpu's lock file prevents a start, else None."""
    try:
        with LOCK_FILE.open("r+") as file:
            if lock(file, wait=False) is not LockState.held:
                return None
    except FileNotFoundError:
        return None
    except OSError as error:
        text = f"{LOCK_FILE} belongs to another user ({(error.strerror or '').lower()}), so libtpu cannot start"
        return FAILURE, text, f"If nobody else uses the TPU: sudo rm {LOCK_FILE}"
    text = f"{LOCK_FILE} is locked by a process that this user cannot see"
    return FAILURE, text, "Find the process with: sudo lsof -w /dev/accel* /dev/vfio/*"


def check_versions(context: CheckContext) -> CheckResults:
    """Check that the installed packages have the versions that Valkyrie and JAX require."""
    problems = list(dict.fromkeys(_unmet_requirements()))
    platform = get_platform(context.run.config.target.platform)
    if platform.plugins and not any(map(installed_version, platform.plugins)):
        problems.append(f"{platform.plugins[0]} is not installed, but JAX needs it to use a {platform.name.upper()}")
    versions_text = ", ".join(f"{name} {version}" for name in _SHOWN_PACKAGES if (version := installed_version(name)))
    extra = "" if platform.extra is None else f" --extra {platform.extra}"
    failure = (
        FAILURE,
        f"{'; '.join(problems)} (installed: {versions_text})",
        f"Install matching versions: uv sync{extra}",
    )
    yield failure if problems else (OK, versions_text)


def _unmet_requirements() -> Iterator[str]:
    """Yield a message for each unmet requirement. Of the optional requirements, checks only installed JAX plugins."""
    for package in _CHECKED_PACKAGES:
        if installed_version(package) is None:
            yield f"{package} is not installed"
            continue
        for requirement in map(Requirement, requires(package) or []):
            is_optional = requirement.marker is not None and "extra" in str(requirement.marker)
            if not is_optional and requirement.marker is not None and not requirement.marker.evaluate():
                continue
            is_plugin = requirement.name == "libtpu" or re.fullmatch("jax-.*-(plugin|pjrt)", requirement.name)
            if is_optional and not is_plugin:
                continue
            version = installed_version(requirement.name)
            if version is None and not is_optional:
                yield f"{requirement.name} is not installed, but {package} requires it"
            if version is not None and not requirement.specifier.contains(version, prereleases=True):
                needs = f"{package} {installed_version(package)} requires {requirement.name}{requirement.specifier}"
                yield f"{needs}, but {version} is installed"


def check_host_memory(context: CheckContext) -> CheckResults:
    """Check that this host's memory can hold its share of the state, which is copied there to save checkpoints.

    With simulated devices, it must also hold the state itself and the gradients.
    """
    free_bytes = free_memory()
    if free_bytes is None:
        yield WARNING, "this system does not report its free memory"
        return
    is_simulated = not count_accelerators() and get_platform(context.run.config.target.platform).is_simulated(0)
    needed_bytes = (3 if is_simulated else 1) * state_bytes(context.run) // context.process_count
    if is_simulated:
        text = (
            f"{memory_text(free_bytes)} free; the state, gradients and a copy to save need {memory_text(needed_bytes)}"
        )
    else:
        text = (
            f"{memory_text(free_bytes)} free; the copy of the state for checkpoints needs {memory_text(needed_bytes)}"
        )
    remedy = "Use more hosts, hosts with more memory, or a smaller model=."
    yield (FAILURE, text, remedy) if needed_bytes > free_bytes else (OK, text)


def check_open_files(context: CheckContext) -> CheckResults:
    """Check that this process may open enough files and connections."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    needed = _OPEN_FILES + _FILES_PER_PROCESS * context.process_count
    failure = FAILURE, f"the limit is {limit}, but about {needed} are needed", "Raise the limit: ulimit -n 65536"
    success = OK, "no limit" if limit < 0 or limit > 2**40 else f"up to {limit:,}"
    yield failure if 0 <= limit < needed else success
