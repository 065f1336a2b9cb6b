"""What a run asks of its checkpoints: how often they are saved, and which of them are kept."""

from __future__ import annotations

from dataclasses import dataclass, field

from valkyrie.buckets import scheme_of
from valkyrie.checkpoint.place import place_problems
from valkyrie.problems import Problem, ProblemCode, check_range


@dataclass
class FastConfig:
    """The fast tier: each host saves what its own devices hold every `every` steps (null: never), the newest `keep`.

    `folder` is on each host, and outlives a process, not the host: null for the system's temporary files;
    `/dev/shm/valkyrie` is memory. Of several processes one may be killed between two saves, so that they have only an
    older one in common: hence two.
    """

    every: int | None = None
    folder: str | None = None
    keep: int = 2

    def problems(self) -> list[Problem]:
        """Return everything that is wrong with these settings."""
        problems = check_range("checkpoint.fast.every", self.every, least=1, otherwise="null for no fast tier")
        problems += check_range("checkpoint.fast.keep", self.keep, least=1)
        if self.folder is not None and scheme_of(self.folder) is not None:
            text = f"checkpoint.fast.folder={self.folder}: fast checkpoints lie on each host. Use a folder."
            problems.append(Problem(ProblemCode.unsupported, "checkpoint.fast.folder", self.folder, text))
        return problems


@dataclass
class CheckpointConfig:
    """The durable tier: saved in the background every `every` steps (null: only at the end), kept by policy.

    They lie in the run folder, or in `folder`, a path or a bucket (gs://, s3://) that all hosts reach, under the run's
    name.

    Kept are the newest `keep`, one for every `keep_every_h` hours (null: none), and the `keep_best` with the lowest
    `best`, or with the highest where `highest_is_best`: a name of the evaluation, which is then made before such a
    save where both are due.
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
        """Return everything that is wrong with these settings."""
        problems = check_range("checkpoint.every", self.every, least=1, otherwise="null to save only at the end")
        problems += check_range("checkpoint.keep", self.keep, least=1)
        problems += check_range("checkpoint.keep_every_h", self.keep_every_h, above=0, otherwise="null for none")
        problems += check_range("checkpoint.keep_best", self.keep_best, least=0)
        return [*problems, *place_problems(self.folder), *self.fast.problems()]
