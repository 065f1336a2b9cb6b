"""`mode=figures`: times matmuls, memory and collectives on the devices of this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from valkyrie.config.modes import SHAPING_KEYS, TRAINING_KEYS, ModeConfig

if TYPE_CHECKING:
    from valkyrie.config.run import Run


@dataclass
class Config(ModeConfig):
    """Settings of `mode=figures`."""

    description: ClassVar[str] = "time matrix products, memory and collectives on the devices of this machine"
    timed: ClassVar[bool] = True
    accepts_untrainable_models: ClassVar[bool] = True
    ignores_layout: ClassVar[bool] = True
    trial_limit_s: ClassVar[float | None] = 600.0

    unread: ClassVar[frozenset[str]] = TRAINING_KEYS | (set(SHAPING_KEYS) - {"target", "mesh", "precision"})

    name: str = "figures"

    def run(self, run: Run) -> int:
        """Time the devices. Returns the exit status."""
        from valkyrie.search.measure.figures import figures_mode

        return figures_mode(run)
