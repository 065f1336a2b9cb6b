"""`mode=generate`: continues a prompt with a trained run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from valkyrie.config.modes import LOOP_KEYS, ModeConfig

if TYPE_CHECKING:
    from valkyrie.config.run import Run


@dataclass
class Config(ModeConfig):
    """Settings of `mode=generate`.

    Args:
        keep: name under which to save the text and the model's state in the run folder. The next call with
            this name continues the text. null to save nothing.
    """

    description: ClassVar[str] = "continue a prompt with a trained run"
    reads_run: ClassVar[bool] = True

    unread: ClassVar[frozenset[str]] = LOOP_KEYS | {"code_eval", "steps"}

    name: str = "generate"
    keep: str | None = None

    def run(self, run: Run) -> int:
        """Print a continuation of the prompt. Returns the exit status."""
        from valkyrie.train.modes import generate

        return generate(run)
