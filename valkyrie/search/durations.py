"""How long a compile of a search probably takes, from earlier compiles on this machine or for its platform."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from valkyrie.hardware.platforms import get_platform
from valkyrie.hardware.target import TargetConfig, usable_hbm
from valkyrie.search.compile.cache import earlier_compile_seconds
from valkyrie.search.request import SearchRequest
from valkyrie.units import count_text, range_text


@dataclass(frozen=True)
class CompileDurations:
    """Quartiles of the seconds that a compile for a chip takes, and the number of earlier compiles of such models.

    Without earlier compiles, the quartiles are those of the platform (`Platform.usual_compile_s`), multiplied by
    `ChipConfig.compile_time_ratio`. `on_chip` is a text such as ` for v6e`, or empty if all slices have the same chip.
    """

    low_s: float
    high_s: float
    count: int
    on_chip: str = ""

    def describe(self) -> str:
        """Return a sentence without its full stop, such as `30 earlier compiles ... took about 76 to 160 s`."""
        seconds = f"{range_text(self.low_s, self.high_s)} s"
        if self.count:
            text = f"{count_text(self.count, 'earlier compile')} of models of this size{self.on_chip}"
            return f"{text} took about {seconds}"
        return f"No model of this size was compiled here before{self.on_chip}. A compile often takes {seconds}"


def compile_durations(request: SearchRequest, targets: Sequence[TargetConfig]) -> CompileDurations:
    """Return how long a compile of a search probably takes, on that of `targets` where it takes longest."""
    return max((durations_on(request, target) for target in targets), key=lambda each: each.high_s)


def durations_on(request: SearchRequest, target: TargetConfig) -> CompileDurations:
    """Return the probable duration of a compile for a slice."""
    chips = {each.chip.name if each.chip else "" for each in request.targets}
    on_chip = f" for {target.chip.name}" if target.chip and len(chips) > 1 else ""
    seconds = earlier_compile_seconds(request.run.model.parameter_count(), usable_hbm(target.chip))
    if seconds:
        low_s, high_s = np.quantile(seconds, (0.25, 0.75)).tolist()
    else:
        ratio = target.chip.compile_time_ratio if target.chip else 1.0
        low_s, high_s = (ratio * s for s in get_platform(target.platform).usual_compile_s)
    return CompileDurations(low_s, high_s, len(seconds), on_chip)
