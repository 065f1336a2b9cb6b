"""Ranks the layouts of a search space by their estimated step time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from valkyrie.config.run import Run
from valkyrie.hardware.target import usable_hbm
from valkyrie.parallel.remat import RematConfig
from valkyrie.search.estimate.efficiency import chip_efficiency
from valkyrie.search.estimate.network import collective_model
from valkyrie.search.estimate.space import MAX_DEVICE_TOKENS, Candidate, LayoutGroup, LayoutSpace
from valkyrie.search.estimate.times import EstimatedTimes, StepEstimator
from valkyrie.search.estimate.work import StepWork, step_work
from valkyrie.train.memory import ExpectedMemory

SEARCHED_BATCH_MEMORY_SHARE = 0.95
"""Maximum estimated memory of a layout, as a share of the usable memory, if the search varies the batch.

Less than 1, because the next smaller batch is almost as fast, and a compile takes a minute to find that a layout does
not fit.
"""


@dataclass(frozen=True)
class EstimatedLayout:
    """One layout of a group, with the estimated step times and memory of the whole group.

    `index` is the position of the layout in the group.
    """

    group: LayoutGroup
    index: int
    remat: RematConfig
    times: EstimatedTimes
    memory: ExpectedMemory[np.ndarray]

    @property
    def step_s(self) -> float:
        """Estimated seconds per step."""
        return float(self.times.step_s[self.index])

    @property
    def batch(self) -> int | None:
        """Sequences of the global batch if the search varies it, else None."""
        return self.group.batch(self.index)

    @property
    def has_pipeline(self) -> bool:
        """Whether the layers are split into pipeline stages."""
        return int(self.group.candidates.stages[self.index]) > 1

    def per_sequence(self, step_s: float) -> float:
        """Return seconds per sequence if the search varies the batch, otherwise `step_s` itself."""
        return step_s / (self.batch or 1)

    @property
    def ranking_s(self) -> float:
        """Estimated seconds that rank the layouts: per sequence if the search varies the batch, else per step."""
        return self.per_sequence(self.step_s)

    @property
    def parts(self) -> dict[str, float]:
        """Estimated seconds per step by part, with the keys of `EstimatedTimes.parts`."""
        return {name: float(seconds[self.index]) for name, seconds in self.times.parts.items()}

    @property
    def peak_bytes(self) -> int:
        """Estimated peak memory per device, in bytes."""
        return int(self.memory.total[self.index])

    @property
    def fits(self) -> bool:
        """Whether the peak is at most `memory_limit`. True if the limit is unknown."""
        return self.memory_limit is None or self.peak_bytes <= self.memory_limit

    @property
    def memory_limit(self) -> float | None:
        """Maximum estimated peak memory per device in bytes, or None if unknown.

        The usable memory, or `SEARCHED_BATCH_MEMORY_SHARE` of it if the search varies the batch.
        """
        usable, share = usable_hbm(self.group.target.chip), 1.0 if self.batch is None else SEARCHED_BATCH_MEMORY_SHARE
        return None if usable is None else share * usable

    @cached_property
    def candidate(self) -> Candidate:
        """The layout without its estimate. Identifies the same layout in other rankings."""
        return self.group.candidate(self.index, self.remat)

    def run(self, run: Run) -> Run:
        """Return a run of this layout, with all other settings of `run`."""
        return self.group.run(self.index, self.remat, run)


@dataclass(frozen=True)
class GroupEstimates:
    """Estimates of a group of layouts with one remat policy."""

    group: LayoutGroup
    remat: RematConfig
    times: EstimatedTimes
    memory: ExpectedMemory[np.ndarray]

    @property
    def ranking_s(self) -> np.ndarray:
        """Times that rank the layouts, in seconds.

        The time of a step or, if the search varies the batch, of `MAX_DEVICE_TOKENS` sequences.
        """
        batches = self.group.candidates.batch_sizes
        # Not the time of one sequence, because `Ranking.order` rounds to 0.1 microseconds, which may be longer.
        return self.times.step_s if batches is None else self.times.step_s * (MAX_DEVICE_TOKENS / batches)

    @property
    def fit_mask(self) -> np.ndarray:
        """Mask of the layouts that fit, by the rule of `EstimatedLayout.fits`."""
        usable = usable_hbm(self.group.target.chip)
        if usable is None:
            return np.ones(len(self.times.step_s), bool)
        share = 1.0 if self.group.candidates.batch_sizes is None else SEARCHED_BATCH_MEMORY_SHARE
        return self.memory.total.astype(np.int64) <= share * usable


@dataclass(frozen=True)
class Ranking:
    """Estimates of all layouts of a space, by group and remat policy."""

    space: LayoutSpace
    estimates: list[GroupEstimates]

    @cached_property
    def order(self) -> list[tuple[int, int]]:
        """All layouts, fastest first, as pairs of an index into `estimates` and the index of a layout in that estimate.

        If the search varies the batch, the order is that of the step time per sequence, and layouts that do not fit
        are left out. Layouts with the same step time (to 0.1 microseconds) are ordered by
        `LayoutGroup.axis_class_count`, then by the number of activations that the remat policy offloads, the smallest
        first.
        """
        sizes = [len(e.times.step_s) for e in self.estimates]
        step_s = np.concatenate([e.ranking_s for e in self.estimates] or [np.zeros(0)])
        group_index, layout_index = (
            np.repeat(np.arange(len(sizes)), sizes),
            np.concatenate([np.arange(n) for n in sizes] or [[]]),
        )
        axis_class_counts = np.repeat([e.group.axis_class_count for e in self.estimates], sizes)
        offloads = np.repeat([len(e.remat.offload) for e in self.estimates], sizes)
        order = np.lexsort((layout_index, offloads, axis_class_counts, np.round(step_s, 7)))
        if any(e.group.candidates.batch_sizes is not None for e in self.estimates):
            order = order[np.concatenate([e.fit_mask for e in self.estimates])[order]]
        return list(zip(group_index[order].tolist(), layout_index[order].astype(int).tolist(), strict=True))

    def for_partition(self, partition: str) -> Ranking:
        """Return the ranking of only the layouts with the partition of this name."""
        return Ranking(self.space, [e for e in self.estimates if e.group.candidates.partition.name == partition])

    def for_target(self, target: str) -> Ranking:
        """Return the ranking of only the layouts on the slice of this name."""
        return Ranking(self.space, [e for e in self.estimates if e.group.target.name == target])

    def smallest_layout(self) -> EstimatedLayout | None:
        """Return the layout that needs the least memory, or None if there are no layouts."""
        smallest_peaks = [(float(e.memory.total.min()), i) for i, e in enumerate(self.estimates) if len(e.memory.total)]
        if not smallest_peaks:
            return None
        e = self.estimates[min(smallest_peaks)[1]]
        return EstimatedLayout(e.group, int(e.memory.total.argmin()), e.remat, e.times, e.memory)

    def __iter__(self) -> Iterator[EstimatedLayout]:
        """Yield layouts from the fastest to the slowest, without duplicates.

        Layouts are duplicates if they have the same target, step time, memory, microbatches, batch and model settings.
        """
        seen: set[tuple[object, ...]] = set()
        for group_index, layout_index in self.order:
            e = self.estimates[group_index]
            layout = EstimatedLayout(e.group, layout_index, e.remat, e.times, e.memory)
            microbatches = int(e.group.candidates.microbatches[layout_index])
            settings, sizes = e.group.settings.overrides, (round(layout.step_s, 7), layout.peak_bytes)
            key = (e.group.target.name, *sizes, microbatches, layout.batch, settings)
            if key not in seen:
                seen.add(key)
                yield layout


def rank(run: Run, space: LayoutSpace) -> Ranking:
    """Rank every layout of a space by its estimate for the model, batch and precision of a run."""
    work_by_settings, estimates = dict[tuple[str, ...], StepWork](), []
    for group in space.groups:
        if group.settings.overrides not in work_by_settings:
            work_by_settings[group.settings.overrides] = step_work(group.settings.apply(run))
        work = work_by_settings[group.settings.overrides]
        chip = group.target.chip
        assert chip is not None
        efficiency = chip_efficiency(chip)
        step_estimator = StepEstimator(work, group.candidates, chip, efficiency, collective_model(chip, efficiency))
        memory_estimator = step_estimator.memory
        estimates += [
            GroupEstimates(group, remat, step_estimator.estimate(remat), memory_estimator.estimate(remat))
            for remat in group.remats
        ]
    return Ranking(space, estimates)
