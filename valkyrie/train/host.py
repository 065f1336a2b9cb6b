"""Properties of this host: the number of devices that it can simulate, and the flags of its XLA."""

from __future__ import annotations

import mmap
import os
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

DEVICES_A_CORE = 128
"""Most simulated devices per core. On two cores, 256 took 12 s per step, and 512 finished no step in 3 minutes."""


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
