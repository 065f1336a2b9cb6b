"""Checkpoint settings: how often to save, and which checkpoints to keep."""

from __future__ import annotations

from dataclasses import dataclass, field

from valkyrie.buckets import url_scheme
from valkyrie.checkpoint.location import folder_problems
from valkyrie.problems import Problem, ProblemCode, check_range


@dataclass
class FastConfig:
    """The fast tier: every `every` steps (null: never) each host saves its own devices' arrays; the newest `keep` stay.

    `folder` is a path on each host; null uses the system's temporary files, and `/dev/shm/valkyrie` is memory. Fast
    checkpoints survive the death of a process, but not of the host. If one of several processes is killed between two
    saves, only an older checkpoint is complete on all of them: hence `keep: 2`.
    """

    every: int | None = None
    folder: str | None = None
    keep: int = 2

    def problems(self) -> list[Problem]:
        """Return every problem with these settings."""
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
    """The durable tier: saved in the background every `every` steps (null: only at the end).

    Checkpoints are stored in the run folder, or under the run's name in `folder`: a path or bucket (gs://, s3://) that
    all hosts reach.

    These are kept: the newest `keep`, one for every `keep_every_h` hours (null: none), and the `keep_best` with the
    lowest `best` (the highest with `highest_is_best`). `best` is the name of an evaluation metric. With `keep_best`, if
    an evaluation and a save are due at the same step, the evaluation runs first.
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
        """Return every problem with these settings."""
        problems = check_range("checkpoint.every", self.every, least=1, otherwise="null to save only at the end")
        problems += check_range("checkpoint.keep", self.keep, least=1)
        problems += check_range("checkpoint.keep_every_h", self.keep_every_h, above=0, otherwise="null for none")
        problems += check_range("checkpoint.keep_best", self.keep_best, least=0)
        return [*problems, *folder_problems(self.folder), *self.fast.problems()]
