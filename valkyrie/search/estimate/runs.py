"""Estimates of runs that are composed already, each on the mesh and placement it asks for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from valkyrie.config.run import Run, known_axes
from valkyrie.hardware.platforms import platform_of
from valkyrie.hardware.target import TargetConfig, topology_of
from valkyrie.parallel.layout import Layout
from valkyrie.parallel.partition import resolve_rules
from valkyrie.parallel.placement import AxisPlacement, describe_entries, describe_places
from valkyrie.parallel.slice import Slice
from valkyrie.search.estimate.candidates import Candidates
from valkyrie.search.estimate.efficiency import Efficiency
from valkyrie.search.estimate.network import network_of
from valkyrie.search.estimate.spans import host_spans, torus_spans
from valkyrie.search.estimate.times import Step
from valkyrie.search.estimate.work import work_of


def estimated(runs: Sequence[Run], efficiency: Efficiency) -> list[dict[str, float]]:
    """Return the seconds of each run's step by part, with `step` for their sum; all runs do the same work."""
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
    """Return runs of one partition and remat, with the same mesh axes, as arrays."""
    first = runs[0]
    layouts = [run.layout for run in runs]
    sizes = {axis: np.array([layout.mesh.axes[axis] for layout in layouts]) for axis in layouts[0].mesh.axes}
    chip = first.config.target.chip
    assert chip is not None
    if platform_of(chip.platform).has_torus:
        spans = torus_spans([lies(run.config.target, layout) for run, layout in zip(runs, layouts, strict=True)], chip)
    else:
        spans = host_spans(sizes, chip)
    parameters, activations, _ = resolve_rules(
        first.config.partition, first.config.mesh, first.arrays.axes, known_axes()
    )
    return Candidates(
        first.config.partition,
        parameters,
        activations,
        first.arrays,
        sizes,
        spans,
        np.array([run.config.microbatches for run in runs]),
        np.full(len(runs), float(first.config.partition.rounds)),
    )


def lies(target: TargetConfig, layout: Layout) -> dict[str, AxisPlacement]:
    """Return how the axes of a layout lie on the torus of a target."""
    axes, placement = dict(layout.mesh.axes), layout.mesh.placement
    topology = topology_of(target)
    if placement is not None:
        return describe_entries(placement, axes, topology)
    return describe_places(Slice.of(target).places(list(axes.values()), list(axes)), axes, topology)
