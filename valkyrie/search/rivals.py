"""Rivals of the best layout on the same slice: plain FSDP, and the TPU v4 paper's rule of thumb."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from valkyrie.hardware.platforms import platform_of
from valkyrie.hardware.slices import parse_shape
from valkyrie.hardware.target import TargetConfig
from valkyrie.search.answer_record import RankedLayout, Stage
from valkyrie.search.compiling import Compiles
from valkyrie.search.estimate.rank import Estimated, Ranking
from valkyrie.search.request import SearchRequest
from valkyrie.units import duration

RULE = "the TPU v4 paper's rule (MP1 and MP2 on an axis each, data on the third)"
PLAIN_FSDP = "plain FSDP"


@dataclass(frozen=True)
class Rival:
    """The fastest layout of a kind that should fit on a slice, or None and the reason."""

    name: str
    layout: Estimated | None
    why: str = ""


def rivals_on(request: SearchRequest, ranked: Ranking, target: TargetConfig) -> list[Rival]:
    """Return the rivals on a slice that the search's partitions cover. The rule needs a torus with three axes."""
    partitions, here = {partition.name for partition in request.partitions}, ranked.on(target.name)
    rivals = []
    torus = parse_shape(target.topology) or () if platform_of(target.platform).has_torus else ()
    if "2d_tp" in partitions and len(torus) == 3:
        rivals.append(_fastest(RULE, (one for one in here.under("2d_tp") if _is_the_torus(one))))
    if "fsdp" in partitions:
        rivals.append(_fastest(PLAIN_FSDP, here.under("fsdp")))
    return rivals


def _fastest(name: str, layouts: Iterator[Estimated] | Ranking) -> Rival:
    why = "no layout of it is legal"
    for one in layouts:
        if one.fits:
            return Rival(name, one)
        why = "no layout of it fits"
    return Rival(name, None, why)


def _is_the_torus(one: Estimated) -> bool:
    """Check whether the mesh has the torus's sizes, the smallest for data (arXiv 2304.01433, section 2.7)."""
    sizes = [int(one.group.candidates.sizes[axis][one.number]) for axis in ("x", "y", "z")]
    return sorted(sizes) == sorted(parse_shape(one.group.target.topology) or ()) and sizes[2] == min(sizes)


def layouts_of(rivals: Sequence[Rival]) -> list[Estimated]:
    """Return the layouts of the rivals that have one."""
    return [rival.layout for rival in rivals if rival.layout is not None]


def format_comparison(rival: Rival, compiles: Compiles, best: RankedLayout, measured_s: float | None = None) -> str:
    """Format the speedup of the best layout over a rival. `measured_s` is the rival's measured step time, if any.

    Both times come from the same source: measured if both layouts are, else compiled if both are, else estimated.
    """
    name, one = rival.name, rival.layout
    if one is None:
        return f"{name}: {rival.why}"
    layout = " ".join(one.candidate.overrides[1:])
    if measured_s is not None and best.stage is Stage.measure:
        return f"{name}: {duration(measured_s)} (measured), {measured_s / best.step_s:.2f} times the best; {layout}"
    compiled = next((c for c in compiles.done if c.estimate.candidate == one.candidate), None)
    if compiled is not None and compiled.step_s is None:
        return f"{name}: {layout}: {compiled.trial.status.value.replace('_', ' ')}"
    of_best = next((c.step_s for c in compiles.done if c.estimate.candidate == best.candidate), None)
    if compiled is not None and compiled.step_s is not None and of_best is not None:
        times = compiled.step_s / of_best
        return f"{name}: {duration(compiled.step_s)} (by compile), {times:.2f} times the best; {layout}"
    times = one.step_s / sum(best.parts_s.values())
    return f"{name}: {duration(one.step_s)} (by estimate), {times:.2f} times the best by estimate; {layout}"
