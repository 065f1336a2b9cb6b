"""`mode=checkpoints`: lists and verifies the checkpoints of a trained run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from valkyrie.config.modes import LOOP_KEYS, SAMPLE_KEYS, ModeConfig, Needs

if TYPE_CHECKING:
    from valkyrie.config.run import Run


@dataclass
class Config(ModeConfig):
    """Settings of `mode=checkpoints`."""

    description: ClassVar[str] = "list the checkpoints of a trained run and verify their checksums"
    needs: ClassVar[Needs] = Needs.nothing
    reads_run: ClassVar[bool] = True
    accepts_untrainable_models: ClassVar[bool] = True

    unread: ClassVar[frozenset[str]] = LOOP_KEYS | SAMPLE_KEYS | {"code_eval"}

    name: str = "checkpoints"

    def run(self, run: Run) -> int:
        """List and verify the checkpoints of the run. Returns the exit status: 1 if any is damaged, else 0."""
        from valkyrie.train.modes import list_checkpoints

        return list_checkpoints(run)
