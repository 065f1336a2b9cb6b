"""Properties of this host: free memory, the number of devices that it can simulate, and the flags of its XLA."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

DEVICES_A_CORE = 128
"""Most simulated devices per core. On two cores, 256 took 12 s per step, and 512 finished no step in 3 minutes."""

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_OF_CGROUPS = {  # by version: files of the limit and the use, and the key of cached files, which can be evicted
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


def too_many_simulated(mesh: str, devices: int) -> str | None:
    """Return the reason why this host cannot simulate this many devices, or None if it can."""
    cores = os.cpu_count() or 1
    most = DEVICES_A_CORE * cores
    if devices <= most:
        return None
    return (
        f"mesh={mesh} needs {devices} devices, and this machine has no accelerator that JAX can use, only {cores} CPU "
        f"core{'s' * (cores > 1)}. More than {most} simulated devices wait for each other there without end. Use a "
        "smaller mesh, or plan for this one with mode=show or mode=compile; force=true goes on regardless."
    )


@cache
def unknown_flags(flags: str) -> str | None:
    """Return the error message for unknown names in `XLA_FLAGS`, at which XLA would end the process, or None.

    Searches for the names in XLA's library, which takes 10 ms for a known name.
    """
    names = [flag[2:].partition("=")[0] for flag in flags.split() if flag.startswith("--xla_")]
    found = find_spec("jaxlib") if names else None
    library = None if found is None or found.origin is None else Path(found.origin).parent / "libjax_common.so"
    if library is None or not library.is_file():
        return None
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        unknown = [name for name in dict.fromkeys(names) if content.find(name.encode() + b"\0") < 0]
    if not unknown:
        return None
    listed = ", ".join(f"--{name}" for name in unknown)
    return f"XLA_FLAGS has {listed}, which the XLA of jaxlib {version('jaxlib')} does not know. Take it out."


def free_memory(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int | None:
    """Return the free memory in bytes, within the limits of this process's cgroups.

    On systems that do not report free memory, such as macOS, this is all memory; None if that is unknown too.
    """
    try:
        lines = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        try:
            free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (OSError, ValueError):
            return None
    return min([free, *_free_in_cgroups(proc, cgroups)])


def _free_in_cgroups(proc: Path, cgroups: Path) -> Iterator[int]:
    """Yield the free bytes of each cgroup of this process that has a limit, from the innermost to the outermost."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = cgroups / "memory" if controllers else cgroups
        limit_file, used_file, cached = _OF_CGROUPS[1 if controllers else 2]
        inside = root / path.strip("/")
        for folder in (inside, *inside.parents):
            if not folder.is_relative_to(root):
                break
            try:
                limit, used = int((folder / limit_file).read_text()), int((folder / used_file).read_text())
                stat = dict(entry.split() for entry in (folder / "memory.stat").read_text().splitlines())
            except (OSError, ValueError):  # no limit ("max"), or invisible inside a container
                continue
            yield limit - used + int(stat.get(cached, 0))
