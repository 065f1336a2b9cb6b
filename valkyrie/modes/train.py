"""`mode=train`: trains a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from valkyrie.config.modes import METRICS, NO_RESULT, ModeConfig

if TYPE_CHECKING:
    from valkyrie.config.run import Run

_NO_TRAINING = frozenset({"mode", "checkpoint", "log_every", "prompt", "sample_tokens", "temperature", "top_k"})


@dataclass
class Config(ModeConfig):
    """Settings of `mode=train`."""

    description: ClassVar[str] = "train, evaluate and print a sample"
    results: ClassVar[str | None] = METRICS
    tracked: ClassVar[bool] = True
    not_decided_by: ClassVar[frozenset[str]] = NO_RESULT | _NO_TRAINING
    grace_s: ClassVar[float] = 60.0  # a training saves its state before it stops
    trial_limit_s: ClassVar[float | None] = None

    name: str = "train"

    def run(self, run: Run) -> int:
        """Carry out a run and return the exit status."""
        from valkyrie.train.modes import train

        return train(run)
