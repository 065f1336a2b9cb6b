"""Pipelines: in what order microbatches pass the stages, and what that takes by the formulas. Imports no JAX."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from valkyrie.parallel.partition import PipelineSchedule


@dataclass(frozen=True)
class Pipeline:
    """The stages along a mesh axis: each holds `rounds` stretches of the stacked layers; `microbatches` pass them."""

    axis: str
    stages: int
    microbatches: int
    schedule: PipelineSchedule
    rounds: int

    @property
    def where(self) -> str:
        """Its axis with its size, as messages print it: `z=2`."""
        return f"{self.axis}={self.stages}"

    def describe(self) -> str:
        """Return the pipeline in a few words, as a command prints it."""
        rounds = f" of {self.rounds} rounds" if self.rounds > 1 else ""
        return (
            f"{self.stages} stages over {self.axis}, {self.schedule.value}{rounds}, microbatches={self.microbatches}: "
            f"stages wait {100 * self.bubble:.1f}% of the time in which they work, send {self.permutes} times a step, "
            f"and keep inputs of {self.kept} microbatches"
        )

    def record(self) -> dict[str, Any]:
        """Return it as plain values, with what it takes by the formulas."""
        own = asdict(self) | {"schedule": self.schedule.value}
        return own | {"bubble": self.bubble, "permutes": self.permutes, "kept": self.kept, "described": self.describe()}

    @property
    def label(self) -> str:
        """What a layout's name says of it: nothing of the usual schedule."""
        return {"gpipe": "", "1f1b": "1f1b", "circular": f"circular{self.rounds}"}[self.schedule.value]

    @property
    def rows(self) -> int:
        """Of what the rows of a device of the other axes are a multiple: both stages and microbatches split them.

        Under 1f1b stages share the losses of each microbatch, else those of the whole batch.
        """
        return self.stages * self.microbatches if self.alternates else math.lcm(self.stages, self.microbatches)

    @property
    def alternates(self) -> bool:
        """Whether a microbatch goes back while others still go forward."""
        return self.schedule is PipelineSchedule["1f1b"]

    @property
    def forward_turns(self) -> int:
        """How often a stage takes a microbatch forward through one of its stretches, idle turns included."""
        return self.rounds * self.microbatches + self.stages - 1

    @property
    def turns(self) -> int:
        """How many turns 1f1b takes, the first stages - 1 of them forward alone and the last as many backward."""
        return self.microbatches + 2 * (self.stages - 1)

    @property
    def bubble(self) -> float:
        """The time in which stages are idle, as a share of that in which they work (arXiv 2104.04473, section 2.2)."""
        return (self.stages - 1) / (self.rounds * self.microbatches)

    @property
    def permutes(self) -> int:
        """How often a stage sends a microbatch on in a step, forward and backward."""
        return 2 * self.forward_turns

    @property
    def kept(self) -> int:
        """For how many microbatches of each stretch a stage keeps the inputs of its layers.

        All turns under gpipe and circular, idle ones included. Under 1f1b a microbatch comes back to the first stage
        2 (stages - 1) turns after it left, whole turns of a forward and a backward that all stages take together; a
        stage that need not wait for the others' turns keeps `stages` of them.
        """
        if self.alternates:
            return min(2 * self.stages - 1, self.microbatches)
        return self.forward_turns
