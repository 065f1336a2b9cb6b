"""Several processes on this machine that train one model together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from valkyrie.launch.engines import host


@dataclass(frozen=True, kw_only=True)
class Config(host.Config):
    """Keys of `target=local`.

    Args:
        processes: number of processes.
    """

    processes: int = 2

    runs_at_once: ClassVar[bool] = True
