"""`mode=eval`: evaluates a trained run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from valkyrie.config.modes import LOOP_KEYS, SAMPLE_KEYS, ModeConfig

if TYPE_CHECKING:
    from valkyrie.config.run import Run


@dataclass
class Config(ModeConfig):
    """Settings of `mode=eval`."""

    description: ClassVar[str] = "evaluate a trained run on its whole validation split"
    reads_run: ClassVar[bool] = True

    unread: ClassVar[frozenset[str]] = LOOP_KEYS | SAMPLE_KEYS | {"code_eval", "steps"}

    name: str = "eval"

    def run(self, run: Run) -> int:
        """Evaluate the run. Returns the exit status."""
        from valkyrie.train.modes import evaluate

        self._metrics = evaluate(run)
        return 0

    def trial_metrics(self) -> Mapping[str, float]:
        """Return the metrics of the evaluation."""
        return self._metrics
