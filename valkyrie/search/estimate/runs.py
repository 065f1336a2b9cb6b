"""Estimates of composed runs, each with a separate mesh and placement."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from valkyrie.config.run import Run
from valkyrie.hardware.platforms import platform_of
from valkyrie.hardware.target import TargetConfig, topology_of
from valkyrie.parallel.axis_links import AxisPlacement
from valkyrie.parallel.candidates import Candidates
from valkyrie.parallel.layout import Layout
from valkyrie.parallel.placement import describe_entries, describe_places
from valkyrie.parallel.slice import Slice
from valkyrie.search.estimate.efficiency import Efficiency
from valkyrie.search.estimate.network import network_of
from valkyrie.search.estimate.spans import LEAST_LINKS, host_spans, spans_of
from valkyrie.search.estimate.times import Step
from valkyrie.search.estimate.work import work_of
from valkyrie.train.memory import layouts_of


def estimated(runs: Sequence[Run], efficiency: Efficiency) -> list[dict[str, float]]:
    """Return the seconds of each run's step by part, and their sum as `step`. All runs have the same workload."""
    groups: dict[str, list[int]] = defaultdict(list)
    for i, run in enumerate(runs):
        groups[repr((run.config.partition, run.config.remat, list(run.config.mesh.axes)))].append(i)
    results: list[dict[str, float]] = [{} for _ in runs]
    work = work_of(runs[0])
    chip = runs[0].config.target.chip
    assert chip is not None
    network = network_of(chip, efficiency)
    for numbers in groups.values():
        layouts = candidates_of([runs[i] for i in numbers])
        times = Step(work, layouts, chip, efficiency, network).under(runs[numbers[0]].config.remat)
        for place, i in enumerate(numbers):
            results[i] = {name: float(seconds[place]) for name, seconds in times.parts.items()}
            results[i]["step"] = float(times.step_s[place])
    return results


def candidates_of(runs: Sequence[Run]) -> Candidates:
    """Return runs of one partition and remat policy, with the same mesh axes, as arrays."""
    layouts, chip = layouts_of(runs), runs[0].config.target.chip
    assert chip is not None
    if platform_of(chip.platform).has_torus:
        placed = [axis_placements(run.config.target, run.layout) for run in runs]
        axes = list(layouts.sizes)
        spans = spans_of([[p[axis] for axis in axes] for p in placed], axes, chip, least_links=LEAST_LINKS)
    else:
        spans = host_spans(layouts.sizes, chip)
    return replace(layouts, spans=spans)


def axis_placements(target: TargetConfig, layout: Layout) -> dict[str, AxisPlacement]:
    """Return the placement of each axis of a layout on the torus of a target."""
    axes, placement = dict(layout.mesh.axes), layout.mesh.placement
    topology = topology_of(target)
    if placement is not None:
        return describe_entries(placement, axes, topology)
    return describe_places(Slice.of(target).places(list(axes.values()), list(axes)), axes, topology)
