"""`mode=code_eval`: evaluates the code that a trained run writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from valkyrie.config.modes import LOOP_KEYS, SAMPLE_KEYS, ModeConfig

if TYPE_CHECKING:
    from valkyrie.config.run import Run


@dataclass
class Config(ModeConfig):
    """Settings of `mode=code_eval`."""

    description: ClassVar[str] = "let a trained run complete functions, and compile and test them in a sandbox"
    reads_run: ClassVar[bool] = True

    unread: ClassVar[frozenset[str]] = LOOP_KEYS | SAMPLE_KEYS | {"steps"}

    name: str = "code_eval"

    def run(self, run: Run) -> int:
        """Evaluate the code that the run writes. Returns the exit status."""
        from valkyrie.train.modes import code_eval

        return code_eval(run)
