"""Reads the free memory of this host, within the limits of its containers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_CGROUP_FILES = {  # by version: files of the limit and the use, and the key of cached files, which can be evicted
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


def free_memory(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int | None:
    """Return the free memory in bytes, within the limits of this process's cgroups.

    On systems that do not report free memory, such as macOS, returns the total memory, or None if that is unknown too.
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
        limit_file, used_file, cached_key = _CGROUP_FILES[1 if controllers else 2]
        innermost = root / path.strip("/")
        for folder in (innermost, *innermost.parents):
            if not folder.is_relative_to(root):
                break
            try:
                limit, used = int((folder / limit_file).read_text()), int((folder / used_file).read_text())
                stat = dict(entry.split() for entry in (folder / "memory.stat").read_text().splitlines())
            except (OSError, ValueError):  # no limit ("max"), or invisible inside a container
                continue
            yield limit - used + int(stat.get(cached_key, 0))
