"""The layouts that a search may compile: the fastest by estimate that should fit, and those that might."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from valkyrie.hardware.target import TargetConfig, usable_hbm
from valkyrie.records import load
from valkyrie.search.estimate import rank as ranking
from valkyrie.search.estimate.rank import Estimated
from valkyrie.search.estimate.space import Candidate

FILE = Path(ranking.__file__).with_name("errors.json")
"""Errors of estimates compared with compiled steps, written by experiments/search/table.py."""
LOOKED_AT = 500
"""Number of layouts per slice that may be compiled, the fastest first."""
VARIANTS = 3
"""Largest number of listed layouts with the same slice, mesh and partition."""
AS_FAST = 1.01
"""Largest ratio of estimates for which a layout counts as equally fast on another torus with as many chips."""


class MeshPartition(NamedTuple):
    """Chips, mesh and partition of a layout by name, whatever torus the chips form."""

    chips: str
    mesh: str
    partition: str


def mesh_partition(one: Estimated) -> MeshPartition:
    """Return the chips, mesh and partition of a layout, on any torus."""
    layout = one.candidate
    return MeshPartition(chips_of(one.group.target), layout.mesh, f"{layout.partition} {layout.schedule.value}")


def chips_of(target: TargetConfig) -> str:
    """Return the number and kind of a slice's chips, on any torus: `1 x 64 v4`."""
    return f"{target.slices} x {target.chips} {target.chip.name if target.chip else target.name}"


def chip_of(one: Estimated) -> str:
    """Return the name of a layout's chip."""
    return one.group.target.chip.name if one.group.target.chip else one.group.target.name


def on_any_torus(one: Estimated) -> Candidate:
    """Return the candidate without its torus: equal for the same layout on every torus with as many chips."""
    return replace(one.candidate, target=chips_of(one.group.target), placement=None)


@dataclass(frozen=True)
class EstimateErrors:
    """Range of compiled over estimated step times, and the lower end of that range for peak memory."""

    low: float
    high: float
    memory_low: float


@cache
def errors() -> EstimateErrors:
    """Return the errors of estimates that ship with the package."""
    return load(EstimateErrors, FILE.read_text(), str(FILE))


@dataclass
class Shortlist:
    """The layouts that may be the best: those that should fit, and the fastest of those that fit only if estimates err.

    `smallest` is the layout of each chip that needs the least memory.
    """

    fitting: list[Estimated] = field(default_factory=list)
    doubtful: list[Estimated] = field(default_factory=list)
    smallest: list[Estimated] = field(default_factory=list)

    def on(self, targets: Collection[str]) -> Shortlist:
        """Return the layouts on these slices."""
        fitting, doubtful, smallest = (
            [one for one in some if one.group.target.name in targets]
            for some in (self.fitting, self.doubtful, self.smallest)
        )
        return Shortlist(fitting, doubtful, smallest)

    def best(self, chips: str, count: int) -> list[Estimated]:
        """Return the fastest fitting layouts on `chips`, at most `VARIANTS` with the same mesh and partition.

        A layout is listed only on the torus where it is fastest.
        """
        taken: dict[MeshPartition, int] = {}
        best: dict[Candidate, Estimated] = {}
        for one in (e for e in self.fitting if chips_of(e.group.target) == chips):
            place = mesh_partition(one)
            if on_any_torus(one) in best:
                continue
            taken[place] = taken.get(place, 0) + 1
            if taken[place] <= VARIANTS:
                best[on_any_torus(one)] = one
            if len(best) == count:
                break
        return list(best.values())

    def as_fast_on(self, one: Estimated) -> list[str]:
        """Return the other slices with as many chips where the same layout is estimated to be as fast."""
        layout, longest = on_any_torus(one), AS_FAST * one.step_s
        alike = (e for e in self.fitting if e.step_s <= longest and on_any_torus(e) == layout)
        return [
            target for target in dict.fromkeys(e.group.target.name for e in alike) if target != one.group.target.name
        ]


def shortlist(ranked: ranking.Ranking) -> Shortlist:
    """Return the layouts of a ranking that may be the best, allowing for the errors of memory estimates."""
    listed, low = Shortlist(), errors().memory_low
    smallest: dict[str, Estimated] = {}
    for target in dict.fromkeys(e.group.target.name for e in ranked.estimates):
        if (one := ranked.on(target).smallest()) is not None:
            known = smallest.setdefault(chip_of(one), one)
            smallest[chip_of(one)] = min(known, one, key=lambda e: e.bytes)
        fitting, doubtful = [], []
        for one in itertools.islice(ranked.on(target), 20 * LOOKED_AT):
            usable = usable_hbm(one.group.target.chip)
            if one.fits:
                fitting.append(one)
            elif usable is not None and one.bytes * low <= usable and len(doubtful) < LOOKED_AT:
                doubtful.append(one)
            if len(fitting) == LOOKED_AT:
                break
        listed.fitting += fitting
        listed.doubtful += doubtful
    listed.fitting.sort(key=lambda one: one.step_s)
    listed.smallest = list(smallest.values())
    return listed
