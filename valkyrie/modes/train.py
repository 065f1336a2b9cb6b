"""`mode=train`: trains a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from valkyrie.config.modes import METRICS_FILE, NEUTRAL_KEYS, ModeConfig

if TYPE_CHECKING:
    from valkyrie.config.run import Run

_METRIC_NEUTRAL_KEYS = frozenset({"mode", "checkpoint", "log_every", "prompt", "sample_tokens", "temperature", "top_k"})
"""Keys that do not change the metrics of a training run."""


@dataclass
class Config(ModeConfig):
    """Settings of `mode=train`."""

    description: ClassVar[str] = "train, evaluate and print a sample"
    results: ClassVar[str | None] = METRICS_FILE
    tracked: ClassVar[bool] = True
    neutral_keys: ClassVar[frozenset[str]] = NEUTRAL_KEYS | _METRIC_NEUTRAL_KEYS
    grace_s: ClassVar[float] = 60.0  # a training run saves its state before it stops
    trial_limit_s: ClassVar[float | None] = None

    name: str = "train"

    def run(self, run: Run) -> int:
        """Train the model. Returns the exit status."""
        from valkyrie.train.modes import train

        return train(run)
