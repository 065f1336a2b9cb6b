"""Baselines for the best layout on its slice: an `fsdp` layout, and the TPU v4 paper's rule of thumb.

Each is the layout of its kind with the shortest estimate, which need not be the fastest one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from valkyrie.hardware.platforms import get_platform
from valkyrie.hardware.slices import parse_shape
from valkyrie.hardware.target import TargetConfig
from valkyrie.parallel.candidates import Candidates
from valkyrie.parallel.mesh import MeshConfig, parse_mesh
from valkyrie.parallel.partition import Role, RoleKind, assign_roles
from valkyrie.search.answer_record import RankedLayout, Stage
from valkyrie.search.compiling import CompiledLayouts
from valkyrie.search.estimate.rank import EstimatedLayout, Ranking
from valkyrie.search.estimate.space import Candidate
from valkyrie.search.request import SearchRequest
from valkyrie.units import duration_text

PAPER_RULE = "The TPU v4 paper's rule (one torus axis each for MP1, MP2 and data)"
FSDP_BASELINE = "fsdp layout with the shortest estimate"
PARALLELISM = {
    RoleKind.MP1: "tensor parallelism",
    RoleKind.MP2: "tensor parallelism",
    RoleKind.SP: "sequence parallelism",
    RoleKind.PP: "a pipeline",
    RoleKind.EP: "expert parallelism",
}
"""Kinds of parallelism other than data parallelism, by the role of the mesh axis."""


@dataclass(frozen=True)
class Baseline:
    """A layout to compare the best layout with, or the reason why there is none.

    `name` is its label, such as `FSDP_BASELINE`. `layout` has the shortest estimate of this kind among those that
    fit. If no layout of the kind is legal or fits, it is None and `missing_reason` has the reason.
    """

    name: str
    layout: EstimatedLayout | None
    missing_reason: str = ""


def find_baselines(
    request: SearchRequest, ranking: Ranking, target: TargetConfig, best: Candidate | None = None
) -> list[Baseline]:
    """Return the baselines on a slice: the TPU v4 paper's rule, and the `fsdp` layout with the shortest estimate.

    The rule is left out if the torus does not have three axes, or if the command sets a mesh. The `fsdp` layout is left
    out if `best`, the best layout, is one itself. Each baseline is left out if the search does not include its
    partition (`2d_tp` or `fsdp`).
    """
    partitions, target_ranking = {partition.name for partition in request.partitions}, ranking.for_target(target.name)
    baselines = []
    torus = parse_shape(target.topology) or () if get_platform(target.platform).has_torus else ()
    if "2d_tp" in partitions and len(torus) == 3 and request.mesh is None:
        baselines.append(
            _make_baseline(
                PAPER_RULE, (layout for layout in target_ranking.for_partition("2d_tp") if _matches_torus(layout))
            )
        )
    can_split = (target.devices or 1) > target.slices  # with one device per slice, `fsdp` is `dp`
    if can_split and "fsdp" in partitions and (best is None or best.partition != "fsdp"):
        baselines.append(_make_baseline(FSDP_BASELINE, target_ranking.for_partition("fsdp")))
    return baselines


def find_other_parallelism(ranking: Ranking, best: Candidate) -> dict[str, EstimatedLayout]:
    """Return the layout with the shortest estimate for each kind of parallelism that the best layout does not use.

    Keys are the values of `PARALLELISM`. Leaves out kinds for which no layout of the ranking fits. The layouts are for
    comparison only: searches do not compile them for it.
    """
    group = next(e.group.candidates for e in ranking.for_partition(best.partition).estimates)
    used = {PARALLELISM.get(role.kind) for role in _assign_roles(group, parse_mesh(best.mesh)).values()}
    fastest: dict[str, tuple[float, EstimatedLayout]] = {}
    for e in ranking.estimates:
        candidates = e.group.candidates
        roles = _assign_roles(candidates, parse_mesh("2s2x2x2x2"))
        for name in {PARALLELISM[role.kind] for role in roles.values() if role.kind in PARALLELISM} - used:
            axes = [
                axis for axis, role in roles.items() if PARALLELISM.get(role.kind) == name and axis in candidates.sizes
            ]
            seconds = np.where(e.fit_mask & (candidates.axes_size(axes) > 1), e.ranking_s, np.inf)
            if seconds.min(initial=np.inf) < fastest.get(name, (np.inf,))[0]:
                layout = EstimatedLayout(e.group, int(seconds.argmin()), e.remat, e.times, e.memory)
                fastest[name] = float(seconds.min()), layout
    return {name: layout for name, (_, layout) in sorted(fastest.items(), key=lambda item: item[1][0])}


def _assign_roles(candidates: Candidates, mesh: MeshConfig) -> dict[str, Role]:
    return assign_roles(mesh, candidates.parameters, candidates.activations, candidates.arrays.dispatched_axes)


def _make_baseline(name: str, layouts: Iterator[EstimatedLayout] | Ranking) -> Baseline:
    missing_reason = "no legal layout"
    for layout in layouts:
        if layout.fits:
            return Baseline(name, layout)
        missing_reason = "no layout fits"
    return Baseline(name, None, missing_reason)


def _matches_torus(layout: EstimatedLayout) -> bool:
    """Return whether the mesh sizes are the torus sizes in some order, with the smallest on the data axis `z`.

    This is the rule of arXiv 2304.01433, section 2.7.
    """
    sizes = [int(layout.group.candidates.sizes[axis][layout.index]) for axis in ("x", "y", "z")]
    return sorted(sizes) == sorted(parse_shape(layout.group.target.topology) or ()) and sizes[2] == min(sizes)


def baseline_layouts(baselines: Sequence[Baseline]) -> list[EstimatedLayout]:
    """Return the layouts of the baselines that have one."""
    return [baseline.layout for baseline in baselines if baseline.layout is not None]


def format_comparison(
    baseline: Baseline, compiled_layouts: CompiledLayouts, best: RankedLayout, measured_s: float | None = None
) -> str:
    """Format the speedup of the best layout over a baseline. `measured_s` is the baseline's measured step time or None.

    Compares measured times if both layouts have one. Otherwise, compares the compiled time of each or, without one, its
    corrected estimate. If the best layout was measured but not compiled, compares uncorrected estimates, even if the
    baseline was compiled. With a searched batch, all comparisons are per token. An estimate is compared with a compiled
    time by the range of the ratio: 5% to 95% quantile.

    For a baseline without a layout, the line has the reason. For one that was not measured and did not compile, it has
    the status of the compile.
    """
    name, layout = baseline.name, baseline.layout
    if layout is None:
        return f"{name}: {baseline.missing_reason}"
    # With a searched batch, times are compared per token.
    as_long = "as long" if layout.batch is None else "as long per token"
    description = " ".join(layout.candidate.overrides[1:])
    if measured_s is not None and best.stage is Stage.measure:
        slowdown = (best.candidate.batch or 1) / (layout.batch or 1) * measured_s / best.step_s
        return (
            f"{name}: {duration_text(measured_s)} (measured), {slowdown:.2f} times {as_long} as the best; {description}"
        )
    compiled, compiled_best = compiled_layouts.get(layout.candidate), compiled_layouts.get(best.candidate)
    if compiled is not None and compiled.step_s is None:
        return f"{name}: {description}: {compiled.trial.status.value.replace('_', ' ')}"
    layout_s, best_s, slowdown = _predict(layout, compiled_layouts, best)
    source = "by estimate" if compiled is None or layout_s != compiled.step_s else "compiled step"
    best_source = "estimated" if compiled_best is None or compiled_best.step_s is None else "compiled"
    return (
        f"{name}: {duration_text(layout_s)} ({source}), {slowdown} times {as_long} as the best "
        f"({duration_text(best_s)} {best_source}); {description}"
    )


def _predict(
    layout: EstimatedLayout, compiled_layouts: CompiledLayouts, best: RankedLayout
) -> tuple[float, float, str]:
    """Return the predicted step times of a layout and of the best one, and their ratio or its range as text.

    The ratio is per token with a searched batch.
    """
    compiled, compiled_best = compiled_layouts.get(layout.candidate), compiled_layouts.get(best.candidate)
    compiled_best_s = None if compiled_best is None else compiled_best.step_s
    layout_s, best_s, range_s = layout.step_s, sum(best.parts_s.values()), ()
    if compiled_best_s is not None or best.stage is Stage.estimate:  # a measured best has no corrected estimate
        time, best_s = compiled_layouts.correct([layout])[0], compiled_best_s or best.step_s
        layout_s, range_s = time.step_s, (time.low_s, time.high_s) if compiled_best_s is not None else ()
        if compiled is not None and compiled.step_s is not None:
            layout_s, range_s = compiled.step_s, ()
    scale = (best.candidate.batch or 1) / (layout.batch or 1)
    return layout_s, best_s, " to ".join(f"{scale * seconds / best_s:.2f}" for seconds in range_s or [layout_s])


def describe_other_parallelism(ranking: Ranking, compiled_layouts: CompiledLayouts, best: RankedLayout) -> list[str]:
    """Return a line with the kinds of parallelism that the best layout does not use, and how much slower they are.

    Each is represented by `find_other_parallelism`. Empty if the search has none.
    """
    texts, as_long = list[str](), "as long" if best.candidate.batch is None else "as long per token"
    for name, layout in find_other_parallelism(ranking, best.candidate).items():
        compiled = compiled_layouts.get(layout.candidate)
        if compiled is None or compiled.step_s is not None:
            slowdown = f"{_predict(layout, compiled_layouts, best)[2]} times"
            slowdown += "" if texts else f" {as_long} as #1"
            mesh, partition = f"mesh={layout.candidate.mesh}", f"partition={layout.candidate.partition}"
            texts.append(f"{name} {slowdown} ({' '.join((mesh, partition, *layout.candidate.settings))})")
    return [f"Shortest estimates of other kinds: {', '.join(texts)}."] if texts else []
