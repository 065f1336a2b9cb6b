"""Launch engine that starts several processes on this machine, which train one model together."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import ClassVar

from valkyrie.launch.engines import host

PROCESSES_PER_CORE = 4
"""Maximum number of processes per core without `force`."""


@dataclass(frozen=True, kw_only=True)
class Config(host.Config):
    """Keys of `target=local`.

    Args:
        processes: number of processes.
        force: whether to allow more than `PROCESSES_PER_CORE` processes per core.
    """

    processes: int = 2
    force: bool = False

    runs_immediately: ClassVar[bool] = True

    def problems(self) -> list[str]:
        """Return an error message for each invalid key."""
        limit = PROCESSES_PER_CORE * (os.cpu_count() or 1)
        if self.processes <= limit or self.force:
            return super().problems()
        text = f"processes={self.processes} exceeds {PROCESSES_PER_CORE} per core of this machine, {limit} in total."
        return [*super().problems(), f"{text} Use at most processes={limit}, or add force=true."]
