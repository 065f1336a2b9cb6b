"""Several processes on this machine that train one model together."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import ClassVar

from valkyrie.launch.engines import host

PROCESSES_PER_CORE = 4
"""Most processes for each core without `force`."""


@dataclass(frozen=True, kw_only=True)
class Config(host.Config):
    """Keys of `target=local`.

    Args:
        processes: number of processes.
        force: start more than `PROCESSES_PER_CORE` processes for each core.
    """

    processes: int = 2
    force: bool = False

    runs_at_once: ClassVar[bool] = True

    def problems(self) -> list[str]:
        """Return the reasons why nothing can be launched."""
        most = PROCESSES_PER_CORE * (os.cpu_count() or 1)
        if self.processes <= most or self.force:
            return super().problems()
        text = f"processes={self.processes} is more than {most}, {PROCESSES_PER_CORE} for each core of this machine."
        return [*super().problems(), f"{text} Write processes={most}, or add force=true."]
