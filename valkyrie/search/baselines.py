"""Baselines for the best layout on its slice: an `fsdp` layout, and the TPU v4 paper's rule of thumb.

Each is the layout of its kind with the shortest estimate, which need not be the fastest one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from valkyrie.hardware.platforms import get_platform
from valkyrie.hardware.slices import parse_shape
from valkyrie.hardware.target import TargetConfig
from valkyrie.search.answer_record import RankedLayout, Stage
from valkyrie.search.compiling import CompiledLayouts
from valkyrie.search.estimate.rank import EstimatedLayout, Ranking
from valkyrie.search.estimate.space import Candidate
from valkyrie.search.request import SearchRequest
from valkyrie.units import duration_text

PAPER_RULE = "The TPU v4 paper's rule (one torus axis each for MP1, MP2 and data)"
FSDP_BASELINE = "fsdp layout with the shortest estimate"
EXPERT_BASELINE = "fsdp_ep layout with the shortest estimate"


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
    if "fsdp" in partitions and (best is None or best.partition != "fsdp"):
        baselines.append(_make_baseline(FSDP_BASELINE, target_ranking.for_partition("fsdp")))
    return baselines


def find_expert_baseline(ranking: Ranking, target: TargetConfig, best: Candidate) -> Baseline | None:
    """Return the `fsdp_ep` layout with the shortest estimate, for comparison only: searches do not compile it.

    Returns None if the best layout is one itself, or if none that splits experts is legal and fits.
    """
    if best.partition == "fsdp_ep":
        return None
    layouts = ranking.for_target(target.name).for_partition("fsdp_ep")
    layout = next((layout for layout in layouts if layout.fits and _splits_experts(layout)), None)
    return None if layout is None else Baseline(EXPERT_BASELINE, layout)


def _splits_experts(layout: EstimatedLayout) -> bool:
    candidates = layout.group.candidates
    axes = [m for logical in candidates.arrays.dispatched_axes for m in candidates.stored_axes(logical)]
    return any(candidates.sizes[axis][layout.index] > 1 for axis in axes)


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
    scale = (best.candidate.batch or 1) / (layout.batch or 1)
    as_long = "as long" if layout.batch is None else "as long per token"
    description = " ".join(layout.candidate.overrides[1:])
    if measured_s is not None and best.stage is Stage.measure:
        return (
            f"{name}: {duration_text(measured_s)} (measured), {scale * measured_s / best.step_s:.2f} times {as_long} "
            f"as the best; {description}"
        )
    compiled = compiled_layouts.get(layout.candidate)
    if compiled is not None and compiled.step_s is None:
        return f"{name}: {description}: {compiled.trial.status.value.replace('_', ' ')}"
    compiled_best = compiled_layouts.get(best.candidate)
    best_s = None if compiled_best is None else compiled_best.step_s
    baseline_s, predicted_best_s, source = layout.step_s, sum(best.parts_s.values()), "by estimate"
    range_s = ()
    if best_s is not None or best.stage is Stage.estimate:  # a measured best has no corrected estimate
        time, predicted_best_s = compiled_layouts.correct([layout])[0], best_s or best.step_s
        baseline_s, range_s = time.step_s, (time.low_s, time.high_s) if best_s is not None else ()
        if compiled is not None and compiled.step_s is not None:
            baseline_s, source, range_s = compiled.step_s, "compiled step", ()
    slowdown = " to ".join(f"{scale * seconds / predicted_best_s:.2f}" for seconds in range_s or [baseline_s])
    best_source = "estimated" if best_s is None else "compiled"
    best_text = f"the best ({duration_text(predicted_best_s)} {best_source})"
    return f"{name}: {duration_text(baseline_s)} ({source}), {slowdown} times {as_long} as {best_text}; {description}"
