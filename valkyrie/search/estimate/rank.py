"""The layouts of a space, ranked by their estimated step time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from valkyrie.config.run import Run
from valkyrie.hardware.target import usable_hbm
from valkyrie.parallel.remat import RematConfig
from valkyrie.search.estimate.efficiency import efficiency_of
from valkyrie.search.estimate.network import network_of
from valkyrie.search.estimate.space import Candidate, Group, Space
from valkyrie.search.estimate.times import Step, Times
from valkyrie.search.estimate.work import work_of
from valkyrie.train.memory import ExpectedMemory, MemoryEstimator


@dataclass(frozen=True)
class Estimated:
    """A layout with its estimate: seconds per step by part, and peak bytes per device."""

    group: Group
    number: int
    remat: RematConfig
    times: Times
    memory: ExpectedMemory[np.ndarray]

    @property
    def step_s(self) -> float:
        """Seconds per step."""
        return float(self.times.step_s[self.number])

    @property
    def parts(self) -> dict[str, float]:
        """Seconds per step by part."""
        return {name: float(seconds[self.number]) for name, seconds in self.times.parts.items()}

    @property
    def bytes(self) -> int:
        """Peak bytes per device."""
        return int(self.memory.total[self.number])

    @property
    def fits(self) -> bool:
        """Whether the peak fits the usable memory. If that is unknown, every layout fits."""
        usable = usable_hbm(self.group.target.chip)
        return usable is None or self.bytes <= usable

    @cached_property
    def candidate(self) -> Candidate:
        """The layout without its estimate. Equal layouts of two rankings have equal candidates."""
        return self.group.candidate(self.number, self.remat)

    def run(self, run: Run) -> Run:
        """Return a run of this layout, with all other settings of `run`."""
        return self.group.run(self.number, self.remat, run)


@dataclass(frozen=True)
class Estimates:
    """Estimates of a group of layouts with one remat policy."""

    group: Group
    remat: RematConfig
    times: Times
    memory: ExpectedMemory[np.ndarray]


@dataclass(frozen=True)
class Ranking:
    """Estimates of a space, by group and remat policy."""

    space: Space
    estimates: list[Estimates]

    @cached_property
    def order(self) -> list[tuple[int, int]]:
        """Indices into `estimates` and into their layouts, the fastest first. Ties go to the plainest partition."""
        sizes = [len(e.times.step_s) for e in self.estimates]
        step = np.concatenate([e.times.step_s for e in self.estimates] or [np.zeros(0)])
        which, number = np.repeat(np.arange(len(sizes)), sizes), np.concatenate([np.arange(n) for n in sizes] or [[]])
        classes = np.repeat([e.group.classes for e in self.estimates], sizes)
        offloads = np.repeat([len(e.remat.offload) for e in self.estimates], sizes)
        order = np.lexsort((number, offloads, classes, np.round(step, 7)))
        return list(zip(which[order].tolist(), number[order].astype(int).tolist(), strict=True))

    def under(self, partition: str) -> Ranking:
        """Return the estimates of one partition."""
        return Ranking(self.space, [e for e in self.estimates if e.group.candidates.partition.name == partition])

    def on(self, target: str) -> Ranking:
        """Return the estimates of one slice."""
        return Ranking(self.space, [e for e in self.estimates if e.group.target.name == target])

    def smallest(self) -> Estimated | None:
        """Return the layout that needs the least memory, or None if there are no layouts."""
        least = [(float(e.memory.total.min()), i) for i, e in enumerate(self.estimates) if len(e.memory.total)]
        if not least:
            return None
        e = self.estimates[min(least)[1]]
        return Estimated(e.group, int(e.memory.total.argmin()), e.remat, e.times, e.memory)

    def __iter__(self) -> Iterator[Estimated]:
        """Yield every layout, the fastest first. Layouts on one slice with equal estimates count as the same layout."""
        seen: set[tuple[object, ...]] = set()
        for which, number in self.order:
            e = self.estimates[which]
            layout = Estimated(e.group, number, e.remat, e.times, e.memory)
            microbatches = int(e.group.candidates.microbatches[number])
            key = (e.group.target.name, round(layout.step_s, 7), layout.bytes, microbatches)
            if key not in seen:
                seen.add(key)
                yield layout


def rank(run: Run, space: Space) -> Ranking:
    """Estimate every layout of a space for the model, batch and precision of a run."""
    work, estimates = work_of(run), []
    for group in space.groups:
        chip = group.target.chip
        assert chip is not None
        efficiency = efficiency_of(chip)
        step = Step(work, group.candidates, chip, efficiency, network_of(chip, efficiency))
        need = MemoryEstimator(run, group.candidates)
        estimates += [Estimates(group, remat, step.under(remat), need.under(remat)) for remat in group.remats]
    return Ranking(space, estimates)
