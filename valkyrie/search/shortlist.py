"""Selects the layouts that a search may compile: the fastest by estimate that fit or might fit."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from valkyrie.hardware.target import TargetConfig, usable_hbm
from valkyrie.records import load
from valkyrie.search.estimate.rank import EstimatedLayout, Ranking
from valkyrie.search.estimate.space import Candidate

ERRORS_FILE = Path(__file__).parent / "estimate" / "errors.json"
"""File with the errors of estimates relative to compiled steps, written by experiments/search/table.py."""
MAX_CANDIDATES = 500
"""Maximum number of fitting layouts per slice in a shortlist, and separately of those that may fit.

Layouts slower than the last of these fitting ones are ignored, even if they may fit.
"""
MAX_EXAMINED = 10_000
"""Number of layouts per slice to examine, the fastest by estimate. Slower ones are ignored, even if they fit."""
MAX_BATCHES = 3
"""Maximum number of batches per layout if the search varies the batch. Keeps those that are fastest per sequence.

More than one, because a compile may show that a batch does not fit.
"""
MAX_VARIANTS = 3
"""Maximum number of estimated layouts in an answer with the same chips, mesh and partition."""
BATCH_ERROR = 0.05
"""Error of the estimated ratio of tokens/s of a batch and the next larger one: the largest of five compiled pairs,
rounded up.

Compiled, the larger batch is 2.9% slower to 4.2% faster than by estimate (experiments/LOG.md).
"""
EQUALLY_FAST_RATIO = 1.01
"""A layout counts as equally fast on another torus if a step there is estimated to take at most 1% longer."""


class MeshPartition(NamedTuple):
    """A layout's chips, mesh and partition with schedule, such as `1 x 64 v4`, `4x4x4` and `fsdp gpipe`.

    The partition also has the settings of the model that differ from the command (`Candidate.settings`).
    """

    chips: str
    mesh: str
    partition: str


def mesh_partition(layout: EstimatedLayout) -> MeshPartition:
    """Return the chips, mesh and partition of a layout.

    The estimates of layouts that agree in all three have similar errors. After one of them is compiled, its ratio of
    compiled to estimated step time therefore corrects the estimates of the others. The ratio of measured to predicted
    step time corrects them only to choose the next layout to measure. In the answer, the times of all layouts that were
    not measured are multiplied by the median ratio over all measured layouts.
    """
    candidate, chips_text = layout.candidate, describe_chips(layout.group.target)
    partition = " ".join((candidate.partition, candidate.schedule.value, *candidate.settings))
    return MeshPartition(chips_text, candidate.mesh, partition)


def describe_chips(target: TargetConfig) -> str:
    """Format the slices, the chips of each and their kind, without the topology: `1 x 64 v4`."""
    return f"{target.slices} x {target.chips} {target.chip.name if target.chip else target.name}"


def chip_name(layout: EstimatedLayout) -> str:
    """Return the name of a layout's chip, or of its slice if the chip is unknown."""
    return layout.group.target.chip.name if layout.group.target.chip else layout.group.target.name


def without_torus(layout: EstimatedLayout) -> Candidate:
    """Return a layout without its torus, its placement and, if the search varies it, its batch.

    The same layout on two tori with the same number and kind of chips then compares equal. `target` becomes the text of
    `describe_chips`.
    """
    return replace(layout.candidate, target=describe_chips(layout.group.target), placement=None, batch=None)


def find_batch_rival(batch: int, rates: Mapping[int, float]) -> int | None:
    """Return the next larger batch of a layout, or None if there is none or it is slower by more than `BATCH_ERROR`.

    Args:
        batch: The batch with the highest rate.
        rates: Tokens/s by batch, or numbers proportional to it, of the batches that fit.
    """
    rival = min((other for other in rates if other > batch), default=None)
    may_be_faster = rival is not None and batch in rates and rates[rival] > (1 - BATCH_ERROR) * rates[batch]
    return rival if may_be_faster else None


@dataclass(frozen=True)
class EstimateErrors:
    """Quantiles of the ratio of compiled to estimated values, over layouts compiled for TPUs.

    Computed by `experiments/search/table.py`, except those of pipelines. GPUs and CPUs use the same values, although no
    layouts were compiled for them.

    Args:
        low, high: 5% and 95% quantiles for step times without a pipeline.
        pipeline_low, pipeline_high: The same for pipelines. Assumed, because only seven compiled ones were compared,
            which took 0.96 to 1.08 times their estimate.
        memory_low, memory_high: 25% and 75% quantiles for peak memory.
    """

    low: float
    high: float
    pipeline_low: float
    pipeline_high: float
    memory_low: float
    memory_high: float

    def time_quantiles(self, has_pipeline: bool) -> tuple[float, float]:
        """Return the 5% and 95% quantiles for step times."""
        return (self.pipeline_low, self.pipeline_high) if has_pipeline else (self.low, self.high)


@cache
def estimate_errors() -> EstimateErrors:
    """Load the quantiles of the errors of estimates, which ship with the package."""
    return load(EstimateErrors, ERRORS_FILE.read_text(), str(ERRORS_FILE))


@dataclass
class Shortlist:
    """The layouts that may be the best.

    Args:
        fitting: Layouts that fit by estimate, the fastest first.
        may_fit: Layouts that do not fit by estimate, but whose estimated peak times `EstimateErrors.memory_low` (a 25%
            quantile) is at most the usable memory. Always empty if the search varies the batch.
        smallest: For each kind of chip, the layout that needs the least memory.
    """

    fitting: list[EstimatedLayout] = field(default_factory=list)
    may_fit: list[EstimatedLayout] = field(default_factory=list)
    smallest: list[EstimatedLayout] = field(default_factory=list)

    def for_targets(self, targets: Collection[str]) -> Shortlist:
        """Return a copy with only the layouts on these slices."""
        fitting, may_fit, smallest = (
            [layout for layout in layouts if layout.group.target.name in targets]
            for layouts in (self.fitting, self.may_fit, self.smallest)
        )
        return Shortlist(fitting, may_fit, smallest)

    def select(self, condition: Callable[[EstimatedLayout], bool]) -> Shortlist:
        """Return a copy with only the layouts that meet a condition, and the same `smallest`."""
        return replace(self, fitting=[*filter(condition, self.fitting)], may_fit=[*filter(condition, self.may_fit)])

    def on_chips(self, chips_text: str) -> list[EstimatedLayout]:
        """Return the fitting layouts on a kind and number of chips, as formatted by `describe_chips` (`1 x 64 v4`)."""
        return [layout for layout in self.fitting if describe_chips(layout.group.target) == chips_text]

    @staticmethod
    def select_distinct(layouts: Iterable[EstimatedLayout], count: int) -> list[EstimatedLayout]:
        """Return the first `count` layouts, at most `MAX_VARIANTS` with the same mesh and partition.

        Of layouts that differ only in torus, placement or searched batch, keeps the first.
        """
        variant_counts: dict[MeshPartition, int] = {}
        best: dict[Candidate, EstimatedLayout] = {}
        for layout in layouts:
            key = mesh_partition(layout)
            if without_torus(layout) in best:
                continue
            variant_counts[key] = variant_counts.get(key, 0) + 1
            if variant_counts[key] <= MAX_VARIANTS:
                best[without_torus(layout)] = layout
            if len(best) == count:
                break
        return list(best.values())

    def equally_fast_slices(self, layout: EstimatedLayout) -> list[str]:
        """Return the names of other slices where a layout with the same batch is as fast by estimate.

        These slices have the same number and kind of chips, but another torus. See `EQUALLY_FAST_RATIO`.
        """
        candidate, longest = without_torus(layout), EQUALLY_FAST_RATIO * layout.step_s
        same_batch = (e for e in self.fitting if e.batch == layout.batch and e.step_s <= longest)
        same_candidates = (e for e in same_batch if without_torus(e) == candidate)
        return [
            target
            for target in dict.fromkeys(e.group.target.name for e in same_candidates)
            if target != layout.group.target.name
        ]


def build_shortlist(ranking: Ranking) -> Shortlist:
    """Select the layouts of a ranking that may be the best, allowing for the errors of memory estimates."""
    result, memory_low = Shortlist(), estimate_errors().memory_low
    smallest: dict[str, EstimatedLayout] = {}
    for target in dict.fromkeys(e.group.target.name for e in ranking.estimates):
        if (layout := ranking.for_target(target).smallest_layout()) is not None:
            smallest_so_far = smallest.setdefault(chip_name(layout), layout)
            smallest[chip_name(layout)] = min(smallest_so_far, layout, key=lambda e: e.peak_bytes)
        fitting, may_fit, batch_counts = [], [], Counter[Candidate]()
        for layout in itertools.islice(ranking.for_target(target), MAX_EXAMINED):
            usable = usable_hbm(layout.group.target.chip)
            if layout.batch is not None:
                batch_counts[replace(layout.candidate, batch=None)] += 1
                if batch_counts[replace(layout.candidate, batch=None)] > MAX_BATCHES:
                    continue
            if layout.fits:
                fitting.append(layout)
            elif usable is not None and layout.peak_bytes * memory_low <= usable and len(may_fit) < MAX_CANDIDATES:
                may_fit.append(layout)
            if len(fitting) == MAX_CANDIDATES:
                break
        result.fitting += fitting
        result.may_fit += may_fit
    result.fitting.sort(key=lambda layout: layout.ranking_s)
    result.smallest = list(smallest.values())
    return result
