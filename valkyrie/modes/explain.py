"""`mode=explain`: explains why one of two layouts is faster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from valkyrie.config.modes import TRAINING_KEYS, CompilingMode, Needs

if TYPE_CHECKING:
    from valkyrie.config.run import Run


@dataclass
class Config(CompilingMode):
    """Settings of `mode=explain`.

    Args:
        first: one layout: a run folder with its prediction, or overrides to add to those of the command.
        second: the other layout, in the same form.
    """

    description: ClassVar[str] = "explain why one of two layouts is faster: what each waits for, recomputes and saves"
    needs: ClassVar[Needs] = Needs.nothing
    short_keys: ClassVar[tuple[str, ...]] = ("first", "second")
    ignores_layout: ClassVar[bool] = True
    trial_limit_s: ClassVar[float | None] = None

    unread: ClassVar[frozenset[str]] = TRAINING_KEYS

    name: str = "explain"
    first: str | None = None
    second: str | None = None

    def run(self, run: Run) -> int:
        """Compare the two layouts. Returns the exit status."""
        from valkyrie.search.explain.mode import explain_mode

        return explain_mode(run)
