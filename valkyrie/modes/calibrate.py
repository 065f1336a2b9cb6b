"""`mode=calibrate`: fits the constants of the estimate, and the correction of replays, to known step times."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from valkyrie.config.modes import SHAPING_KEYS, TRAINING_KEYS, ModeConfig, Needs

if TYPE_CHECKING:
    from valkyrie.config.run import Run


@dataclass
class Config(ModeConfig):
    """Settings of `mode=calibrate`.

    Args:
        paths: folders of sweeps, searches or runs. Their trials provide the step times.
    """

    description: ClassVar[str] = "fit the estimate's constants and the replay correction to compiled or measured trials"
    needs: ClassVar[Needs] = Needs.nothing
    short_keys: ClassVar[tuple[str, ...]] = ("paths",)
    ignores_layout: ClassVar[bool] = True
    trial_limit_s: ClassVar[float | None] = None

    unread: ClassVar[frozenset[str]] = TRAINING_KEYS | set(SHAPING_KEYS)

    name: str = "calibrate"
    paths: list[str] = field(default_factory=list)

    def run(self, run: Run) -> int:
        """Fit the constants. Returns the exit status."""
        from valkyrie.search.calibrate.mode import calibrate_mode

        return calibrate_mode(run)
