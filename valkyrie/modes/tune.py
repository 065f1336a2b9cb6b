"""`mode=tune`: finds the compiler options and implementations with the shortest predicted step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from valkyrie.config.modes import TRAINING_KEYS, CompilingMode, Needs, check_time
from valkyrie.problems import Problem

if TYPE_CHECKING:
    from valkyrie.config.run import Run


@dataclass
class Config(CompilingMode):
    """Settings of `mode=tune`.

    Args:
        budget: time for trying options (`10min`, `90s`, `2h`), or null for no limit. The baseline compile is limited
            only by `time_limit_s`.
    """

    description: ClassVar[str] = "find the compiler options with the shortest predicted step"
    needs: ClassVar[Needs] = Needs.compiler
    predicts: ClassVar[bool] = True
    trial_limit_s: ClassVar[float | None] = None

    unread: ClassVar[frozenset[str]] = TRAINING_KEYS

    name: str = "tune"
    budget: str | None = None

    def problems(self) -> list[Problem]:
        """Return the problems of this mode's settings."""
        return [*super().problems(), *check_time("mode.budget", self.budget)]

    def run(self, run: Run) -> int:
        """Search for the best compiler options. Returns the exit status."""
        from valkyrie.search.tune.mode import tune_mode

        return tune_mode(run)
