"""Checkpoint settings: how often to save, and which checkpoints to keep."""

from __future__ import annotations

from dataclasses import dataclass, field

from valkyrie.buckets import url_scheme
from valkyrie.checkpoint.location import folder_problems
from valkyrie.problems import Problem, ProblemCode, check_range


@dataclass
class FastConfig:
    """The fast tier: each process saves the arrays of its own devices on its host.

    Fast checkpoints survive the death of a process, but not of its host.

    Args:
        every: Steps between saves; null for no fast tier.
        folder: Folder on each host, such as `/dev/shm/valkyrie` for memory; null for the system's temporary folder.
        keep: Number of newest checkpoints to keep. Use at least 2: if a process is killed before it finishes a save
            that others have finished, only the previous checkpoint is complete everywhere.
    """

    every: int | None = None
    folder: str | None = None
    keep: int = 2

    def problems(self) -> list[Problem]:
        """Return a problem for each invalid setting."""
        problems = check_range("checkpoint.fast.every", self.every, least=1, otherwise="null for no fast tier")
        problems += check_range("checkpoint.fast.keep", self.keep, least=1)
        if self.folder is not None and url_scheme(self.folder) is not None:
            text = (
                f"checkpoint.fast.folder={self.folder}: fast checkpoints are stored on each host. Use a local folder."
            )
            problems.append(Problem(ProblemCode.unsupported, "checkpoint.fast.folder", self.folder, text))
        return problems


@dataclass
class CheckpointConfig:
    """The durable tier: checkpoints saved in the background by all processes together.

    A checkpoint is kept if it is among the newest `keep`, is kept by `keep_every_h`, or is among the `keep_best` best.

    Args:
        every: Steps between saves; null to save only at the end.
        keep: Number of newest checkpoints to keep.
        keep_every_h: Also keep one checkpoint per this many hours; null for none.
        keep_best: Also keep this many checkpoints with the best value of `best`. If an evaluation and a save are due at
            the same step, the evaluation runs first.
        best: Name of the evaluation metric for `keep_best`.
        highest_is_best: Whether the highest value of `best` is the best one, instead of the lowest.
        folder: Folder or bucket (gs://, s3://) that all hosts reach. Checkpoints are stored there under the run's name;
            null for the run folder.
        fast: The fast tier.
    """

    name: str = "async"
    every: int | None = 100
    keep: int = 2
    keep_every_h: float | None = None
    keep_best: int = 0
    best: str = "eval_loss"
    highest_is_best: bool = False
    folder: str | None = None
    fast: FastConfig = field(default_factory=FastConfig)

    def problems(self) -> list[Problem]:
        """Return a problem for each invalid setting."""
        problems = check_range("checkpoint.every", self.every, least=1, otherwise="null to save only at the end")
        problems += check_range("checkpoint.keep", self.keep, least=1)
        problems += check_range("checkpoint.keep_every_h", self.keep_every_h, above=0, otherwise="null for none")
        problems += check_range("checkpoint.keep_best", self.keep_best, least=0)
        return [*problems, *folder_problems(self.folder), *self.fast.problems()]
