"""Estimates the step times of given runs, rather than of all layouts of a search."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from valkyrie.config.run import Run
from valkyrie.hardware.platforms import get_platform
from valkyrie.hardware.target import TargetConfig, build_topology
from valkyrie.models import LayeredModel
from valkyrie.models.attention import Attention
from valkyrie.parallel.axis_links import AxisPlacement
from valkyrie.parallel.candidates import Candidates
from valkyrie.parallel.layout import Layout
from valkyrie.parallel.placement import describe_entries, describe_positions
from valkyrie.parallel.slice import Slice
from valkyrie.search.estimate.efficiency import Efficiency, chip_efficiency
from valkyrie.search.estimate.links import MIN_LINKS, axis_links, host_axis_links
from valkyrie.search.estimate.network import collective_model
from valkyrie.search.estimate.times import StepEstimator
from valkyrie.search.estimate.work import step_work
from valkyrie.train.memory import MemoryEstimator
from valkyrie.train.run_memory import to_candidates
from valkyrie.trees import with_value
from valkyrie.units import duration_text, memory_text


def estimate_runs(runs: Sequence[Run], efficiency: Efficiency) -> list[dict[str, float]]:
    """Return the estimated seconds per step of each run by part, and in total as `step`.

    Runs must share model, batch, precision and chip. Their layouts may differ.
    """
    groups: dict[str, list[int]] = defaultdict(list)
    for i, run in enumerate(runs):
        groups[repr((run.config.partition, run.config.remat, list(run.config.mesh.axes)))].append(i)
    results: list[dict[str, float]] = [{} for _ in runs]
    work = step_work(runs[0])
    chip = runs[0].config.target.chip
    assert chip is not None
    network = collective_model(chip, efficiency)
    for indices in groups.values():
        layouts = stack_runs([runs[i] for i in indices])
        times = StepEstimator(work, layouts, chip, efficiency, network).estimate(runs[indices[0]].config.remat)
        for row, i in enumerate(indices):
            results[i] = {name: float(seconds[row]) for name, seconds in times.parts.items()}
            results[i]["step"] = float(times.step_s[row])
    return results


MIN_SPEEDUP = 1.05
"""Unpadded heads are suggested only if a step is estimated to be at least this many times as fast."""


class UnpaddedHeads(NamedTuple):
    """Another number of attention heads, which are not padded.

    Args:
        head_dim: Dimensions of the padded heads of the run.
        padded_dim: Their dimensions with padding.
        changes: Overrides that set the unpadded heads.
        seconds: Estimated step times of the run and with unpadded heads.
        peaks: Estimated peak memory per device of the run and with unpadded heads, in bytes.
        source: Source of the run's own time and peak, such as `compiled`. Empty if they are estimates.
    """

    head_dim: int
    padded_dim: int
    changes: tuple[str, ...]
    seconds: tuple[float, float]
    peaks: tuple[int, int]
    source: str = ""

    @property
    def speedup(self) -> float:
        """Estimated step time of the run divided by that with unpadded heads."""
        return self.seconds[0] / self.seconds[1]

    def scaled_to(self, step_s: float, peak: int | None, source: str) -> UnpaddedHeads:
        """Return a copy with the ratios of times and of peaks, for a run with this step time and peak in bytes.

        A more accurate prediction of the run, from `source`, corrects that with unpadded heads by the same ratio.
        """
        peak = peak or self.peaks[0]
        peaks = (peak, round(peak * self.peaks[1] / self.peaks[0]))
        return self._replace(seconds=(step_s, step_s / self.speedup), peaks=peaks, source=source)

    def __str__(self) -> str:
        (padded_s, step_s), (padded_peak, peak) = map(duration_text, self.seconds), map(memory_text, self.peaks)
        about, source = ("about ", f"the {self.source} ") if self.source else ("", "")
        memory = "" if peak == padded_peak else f", and its peak is {about}{peak} per device instead of {padded_peak}"
        return (
            f"Attention heads of {self.head_dim} dimensions are padded to {self.padded_dim}. {' '.join(self.changes)} "
            f"makes another model, with projections of the same size. By estimates of both, its step is "
            f"{self.speedup:.2f} times as fast ({about}{step_s} instead of {source}{padded_s}){memory}."
        )


def suggest_unpadded_heads(run: Run) -> UnpaddedHeads | None:
    """Suggest attention heads of `Platform.lanes` dimensions instead of heads padded to a multiple of that width.

    The projections keep their sizes. Returns None if the heads are not padded, if the projections do not divide into
    heads of that width, if only one head would remain, if the run with these heads is illegal, if the model is not a
    `LayeredModel` or has no `attention`, if the chip is unknown, or if the estimated speedup is below `MIN_SPEEDUP`.
    """
    attention, chip = getattr(run.model, "attention", None), run.config.target.chip
    lanes = get_platform(run.config.target.platform).lanes
    if not isinstance(attention, Attention) or not isinstance(run.model, LayeredModel) or chip is None:
        return None
    width, key_width = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    if attention.head_dim % lanes == 0 or width % lanes or key_width % lanes:
        return None
    sizes = {"heads": width // lanes, "kv_heads": key_width // lanes, "head_dim": lanes}
    if sizes["heads"] < 2 or sizes["heads"] % sizes["kv_heads"]:
        return None
    config = with_value(run.config, "model.attention", replace(attention, **sizes))
    unpadded, efficiency = replace(run, config=config, model=config.model), chip_efficiency(chip)
    if unpadded.problems():
        return None
    seconds = [estimate_runs([each], efficiency)[0]["step"] for each in (run, unpadded)]
    if seconds[0] / seconds[1] < MIN_SPEEDUP:
        return None
    peaks = [
        int(MemoryEstimator(each, stack_runs([each])).estimate(each.config.remat).total[0]) for each in (run, unpadded)
    ]
    changes = tuple(f"model.attention.{name}={value}" for name, value in sizes.items())
    return UnpaddedHeads(
        head_dim=attention.head_dim,
        padded_dim=-(-attention.head_dim // lanes) * lanes,
        changes=changes,
        seconds=(seconds[0], seconds[1]),
        peaks=(peaks[0], peaks[1]),
    )


def stack_runs(runs: Sequence[Run]) -> Candidates:
    """Stack the layouts of runs into arrays. The runs must share partition, remat policy and names of mesh axes."""
    layouts, chip = to_candidates(runs), runs[0].config.target.chip
    assert chip is not None
    if get_platform(chip.platform).has_torus:
        placements = [axis_placements(run.config.target, run.layout) for run in runs]
        axes = list(layouts.sizes)
        links = axis_links(
            [[axes_by_name[axis] for axis in axes] for axes_by_name in placements], axes, chip, min_links=MIN_LINKS
        )
    else:
        links = host_axis_links(layouts.sizes, chip, domain_hosts=runs[0].config.target.domain_hosts)
    return replace(layouts, links=links)


def axis_placements(target: TargetConfig, layout: Layout) -> dict[str, AxisPlacement]:
    """Return the placement of each mesh axis on the torus of a target, by name."""
    axes, placement = dict(layout.mesh.axes), layout.mesh.placement
    topology = build_topology(target)
    if placement is not None:
        return describe_entries(placement, axes, topology)
    return describe_positions(Slice.from_target(target).positions(list(axes.values()), list(axes)), axes, topology)
