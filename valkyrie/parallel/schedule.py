"""Pipelines: the schedule of microbatches over stages, and its costs. Does not import JAX."""

from __future__ import annotations

from dataclasses import dataclass

from valkyrie.parallel.partition import PipelineSchedule


@dataclass(frozen=True)
class PipelineRecord:
    """A pipeline and its costs, as stored in run folders.

    `kept` is `Pipeline.stored_microbatches`. `described` is the text of `Pipeline.describe`, for display only.
    """

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
    """A pipeline of stages along a mesh axis. Each stage has `rounds` groups of the stacked layers."""

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
            f"idle time is {100 * self.bubble:.1f}% of working time; each stage sends {self.sends_per_step} times per "
            f"step and stores the layer inputs of {self.stored_microbatches} microbatches"
        )

    def to_record(self) -> PipelineRecord:
        """Return the settings and derived values (bubble, stored microbatches, ...) as saved in a run folder."""
        return PipelineRecord(
            **vars(self),
            bubble=self.bubble,
            permutes=self.sends_per_step,
            kept=self.stored_microbatches,
            described=self.describe(),
        )

    @property
    def label(self) -> str:
        """Suffix for the layout's name; empty for the default schedule."""
        return {"gpipe": "", "1f1b": "1f1b", "circular": f"circular{self.rounds}"}[self.schedule.value]

    @property
    def is_1f1b(self) -> bool:
        """Whether backward passes of microbatches start before all forward passes are finished (1f1b)."""
        return self.schedule is PipelineSchedule["1f1b"]

    @property
    def forward_turns(self) -> int:
        """Number of forward turns of a stage, each through one group of layers, including idle turns."""
        return self.rounds * self.microbatches + self.stages - 1

    @property
    def turns(self) -> int:
        """Number of turns under 1f1b.

        In a turn, each stage runs a forward and then a backward pass, except that the first `stages - 1` turns have no
        backward pass and the last `stages - 1` turns no forward pass.
        """
        return self.microbatches + 2 * (self.stages - 1)

    @property
    def bubble(self) -> float:
        """Idle time of a stage, as a share of its working time (arXiv 2104.04473, section 2.2)."""
        return (self.stages - 1) / (self.rounds * self.microbatches)

    @property
    def sends_per_step(self) -> int:
        """Number of times that a stage sends a microbatch per step, forward and backward, including idle turns."""
        return 2 * self.forward_turns

    @property
    def stored_microbatches(self) -> int:
        """Number of microbatches for which a stage stores layer inputs. A microbatch counts once per round.

        Under gpipe and circular, a stage stores the inputs of all turns, including idle ones. Under 1f1b, all stages
        run each turn (a forward and a backward pass) at the same time, so a microbatch returns to the first stage
        2 (stages - 1) turns after it left. Stages that do not wait for each other would store only `stages`
        microbatches.
        """
        if self.is_1f1b:
            return min(2 * self.stages - 1, self.microbatches)
        return self.forward_turns
