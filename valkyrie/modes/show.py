"""`mode=show`: lists the parameters of a model with their placement and bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from valkyrie.config.modes import TRAINING_KEYS, ModeConfig, Needs

if TYPE_CHECKING:
    from valkyrie.config.run import Run


@dataclass
class Config(ModeConfig):
    """Settings of `mode=show`."""

    description: ClassVar[str] = "print every parameter with its placement and bytes"
    needs: ClassVar[Needs] = Needs.nothing
    accepts_untrainable_models: ClassVar[bool] = True

    unread: ClassVar[frozenset[str]] = TRAINING_KEYS

    name: str = "show"

    def run(self, run: Run) -> int:
        """Print the parameters of the model. Returns the exit status."""
        from valkyrie.train.modes import show

        return show(run)
