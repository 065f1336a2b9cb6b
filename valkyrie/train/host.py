"""What this host has: the memory that is free, how many devices its cores can simulate, which flags its XLA knows."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

DEVICES_A_CORE = 128
"""More simulated devices than this on a core are refused. On two cores 256 took 12 s a step, 512 none in 3 minutes."""

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_OF_CGROUPS = {  # by version: the limit, what is used, and what of that is cached files, which make room
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


def too_many_simulated(mesh: str, devices: int) -> str | None:
    """Return why this host cannot simulate so many devices; None where it can."""
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
    """Return why XLA would end the process at the value of `XLA_FLAGS`; None where it knows all of its names.

    Their names are looked for in its library, which takes 10 ms for one that it has.
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
    """Return the bytes of memory that a process here may still take, the limits of its cgroups included.

    Where the system does not tell what is free, as macOS, all that it has; None where not even that is known.
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
    """Yield the free bytes of each cgroup with a limit that this process is in, from its own to the outermost."""
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
            except (OSError, ValueError):  # no limit ("max"), or not seen from inside a container
                continue
            yield limit - used + int(stat.get(cached, 0))
