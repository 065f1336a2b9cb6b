"""Pipelines: the schedule of microbatches over stages, and its costs. Imports no JAX."""

from __future__ import annotations

from dataclasses import dataclass

from valkyrie.parallel.partition import PipelineSchedule


@dataclass(frozen=True)
class PipelineRecord:
    """A pipeline and its costs (see `Pipeline`), as run folders store it. `described` is for display only."""

    axis: str
    stages: int
    microbatches: int
    schedule: PipelineSchedule
    rounds: int
    bubble: float
    permutes: int
    kept: int
    described: str


@dataclass(frozen=True)
class Pipeline:
    """Stages along a mesh axis. Each has `rounds` stretches of the stacked layers."""

    axis: str
    stages: int
    microbatches: int
    schedule: PipelineSchedule
    rounds: int

    def describe(self) -> str:
        """Describe the pipeline in one line, as commands print it."""
        rounds = f" of {self.rounds} rounds" if self.rounds > 1 else ""
        return (
            f"{self.stages} stages over {self.axis}, {self.schedule.value}{rounds}, microbatches={self.microbatches}: "
            f"stages wait {100 * self.bubble:.1f}% of the time in which they work, send {self.permutes} times a step, "
            f"and keep inputs of {self.kept} microbatches"
        )

    def record(self) -> PipelineRecord:
        """Return the record for run folders."""
        return PipelineRecord(
            **vars(self), bubble=self.bubble, permutes=self.permutes, kept=self.kept, described=self.describe()
        )

    @property
    def label(self) -> str:
        """Suffix for the layout's name; empty for the default schedule."""
        return {"gpipe": "", "1f1b": "1f1b", "circular": f"circular{self.rounds}"}[self.schedule.value]

    @property
    def alternates(self) -> bool:
        """Whether microbatches go backward while others still go forward."""
        return self.schedule is PipelineSchedule["1f1b"]

    @property
    def forward_turns(self) -> int:
        """Forward passes of a stage through one of its stretches, including idle turns."""
        return self.rounds * self.microbatches + self.stages - 1

    @property
    def turns(self) -> int:
        """Turns of 1f1b. The first stages - 1 are only forward, and the last stages - 1 only backward."""
        return self.microbatches + 2 * (self.stages - 1)

    @property
    def bubble(self) -> float:
        """Idle time of a stage, as a share of its working time (arXiv 2104.04473, section 2.2)."""
        return (self.stages - 1) / (self.rounds * self.microbatches)

    @property
    def permutes(self) -> int:
        """Times that a stage sends a microbatch per step, forward and backward."""
        return 2 * self.forward_turns

    @property
    def kept(self) -> int:
        """Microbatches for which a stage stores the layer inputs of each stretch.

        Under gpipe and circular, those of all turns, including idle ones. Under 1f1b, a microbatch returns to the first
        stage 2 (stages - 1) turns after it left, because all stages take each turn (a forward and a backward pass)
        together. Stages without this lockstep would store only `stages` microbatches.
        """
        if self.alternates:
            return min(2 * self.stages - 1, self.microbatches)
        return self.forward_turns
