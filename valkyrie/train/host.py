"""Checks of this host: how many devices it can simulate, and which flags its XLA knows."""

from __future__ import annotations

import mmap
import os
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

DEVICES_PER_CORE = 128
"""Maximum number of simulated devices per core. On two cores, a step takes 12 s with 256 devices, over
3 minutes with 512."""


def simulation_refusal(mesh: str, device_count: int) -> str | None:
    """Return an error message if this host cannot simulate this many devices, else None."""
    cores = os.cpu_count() or 1
    limit = DEVICES_PER_CORE * cores
    if device_count <= limit:
        return None
    return (
        f"mesh={mesh} needs {device_count} devices, but this machine has no accelerator that JAX can use, and its "
        f"{cores} CPU core{'s' * (cores > 1)} can simulate at most {limit} devices at a usable speed. Use a smaller "
        "mesh, plan with mode=show or mode=compile, or set force=true to run anyway: a step takes minutes, or hangs."
    )


@cache
def unknown_flags_message(flags: str) -> str | None:
    """Return an error message if `flags`, the value of `XLA_FLAGS`, has a flag that XLA does not know, else None.

    XLA itself would abort the process. Searches XLA's binary, which takes 10 ms for an existing name.
    """
    names = [flag[2:].partition("=")[0] for flag in flags.split() if flag.startswith("--xla_")]
    spec = find_spec("jaxlib") if names else None
    library = None if spec is None or spec.origin is None else Path(spec.origin).parent / "libjax_common.so"
    if library is None or not library.is_file():
        return None
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        unknown_names = [name for name in dict.fromkeys(names) if content.find(name.encode() + b"\0") < 0]
    if not unknown_names:
        return None
    unknown_flags = ", ".join(f"--{name}" for name in unknown_names)
    remedy = "Remove them." if len(unknown_names) > 1 else "Remove it."
    return f"XLA_FLAGS sets {unknown_flags}, but jaxlib {version('jaxlib')} has no such flag. {remedy}"
