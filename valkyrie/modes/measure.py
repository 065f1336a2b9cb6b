"""`mode=measure`: times the step on the devices of this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, ClassVar

from valkyrie.config.modes import MEASURE_FILE, SHAPING_KEYS, TRACE_FOLDER, MeasuringMode

if TYPE_CHECKING:
    from valkyrie.config.run import Run


class MeasuredData(Enum):
    """Input of a step: random tokens that are already on the devices, or the run's data from its loader."""

    random = "random"
    real = "real"


@dataclass
class Config(MeasuringMode):
    """Settings of `mode=measure`.

    Args:
        data: input of a step: `random` tokens that are already on the devices, or `real` batches from the run's loader.
        trace: whether to write the profiler's trace to the run folder.
    """

    description: ClassVar[str] = "time the step on the devices of this machine"
    results: ClassVar[str | None] = MEASURE_FILE
    files: ClassVar[Mapping[str, tuple[str, ...]]] = {"trace": (TRACE_FOLDER,)}
    timed: ClassVar[bool] = True

    name: str = "measure"
    data: MeasuredData = MeasuredData.random
    trace: bool = False

    def result_keys(self) -> Sequence[str]:
        """Return the config keys that affect the result of a trial."""
        data = ["data"] if self.data is MeasuredData.real else []
        return [*SHAPING_KEYS, "seed", "debug", *data, "mode.warmup", "mode.repeats", "mode.data"]

    def run(self, run: Run) -> int:
        """Time the step. Returns the exit status."""
        from valkyrie.search.modes import measure_mode

        return measure_mode(run)
