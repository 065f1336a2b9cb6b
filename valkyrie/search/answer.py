"""Ranks the estimated and compiled layouts of a search, prints the best, and names the commands to train them."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console

from valkyrie.axes import axes_text
from valkyrie.hardware.platforms import platform_of
from valkyrie.hardware.target import usable_hbm
from valkyrie.parts import PartKind, StepPart
from valkyrie.runs.columns import terminal_table
from valkyrie.search.answer_record import Bottleneck, RankedLayout, SearchAnswer, Stage, answer_columns
from valkyrie.search.compiling import CompiledLayout, Compiles
from valkyrie.search.estimate.rank import Estimated
from valkyrie.search.request import SearchRequest, affordable, dollars, tokens_of
from valkyrie.search.shortlist import Shortlist, chips_of, errors, mesh_partition, on_any_torus

NEAR_LIMIT = 0.95
"""Share of the usable memory above which a layout also counts as bound by memory."""
_ESTIMATED_BOTTLENECKS = {
    "products": "compute",
    "mixing": "compute",
    "head": "compute",
    "launching": "compute",
    "moving": "HBM bandwidth",
    "optimizer": "HBM bandwidth",
    "bubble": "pipeline bubble",
    "weights": "gathering weights",
    "gradients": "summing gradients",
    "activations": "communication of activations",
    "stages": "communication between stages",
    "host": "host memory",
}
"""The resource that each part of an estimated step occupies."""
_COMPILED_BOTTLENECKS = {PartKind.matmul: "compute", PartKind.kernel: "compute", PartKind.memory: "HBM bandwidth"}


def rank_layouts(request: SearchRequest, listed: Shortlist, compiles: Compiles, count: int) -> list[RankedLayout]:
    """Return the best layouts in order: compiled ones by their replayed step, then estimates.

    Slices of other chips, or with another number of chips, each get a share of the rows, and the best of each is always
    included. An estimate ranks among the compiled layouts only if the slow end of its interval still beats the best
    compiled one.
    """
    places = list(dict.fromkeys(map(chips_of, request.targets)))
    share = max(-(-count // len(places)), 2)
    by_place = [_best_on_chips(request, chips, listed, compiles, share) for chips in places]

    def cost(estimate: Estimated, seconds: float) -> float:
        return request.cost(estimate.group.target, seconds)

    pairs = [pair for some in by_place for pair in some]
    best = min((cost(one, row.step_s) for one, row in pairs if row.stage is Stage.compile), default=0.0)

    def sort_key(pair: tuple[Estimated, RankedLayout]) -> tuple[bool, float]:
        one, row = pair
        return row.stage is Stage.estimate and cost(one, row.high_s) >= best, cost(one, row.step_s)

    firsts = [min(some, key=sort_key) for some in by_place if some]
    others = sorted((pair for pair in pairs if not any(pair is first for first in firsts)), key=sort_key)
    shown = sorted([*firsts, *others[: max(count - len(firsts), 0)]], key=sort_key)
    return [replace(row, as_fast_on=listed.as_fast_on(one)) for one, row in shown]


def _best_on_chips(
    request: SearchRequest, chips: str, listed: Shortlist, compiles: Compiles, count: int
) -> list[tuple[Estimated, RankedLayout]]:
    """Return the best layouts on one kind and number of chips, the compiled ones first."""
    compiled = [c for c in compiles.done if c.step_s is not None and chips_of(c.target) == chips]
    compiled.sort(key=lambda one: one.step_s or 0.0)
    done = {one.estimate.candidate for one in compiles.done}
    others = [one for one in listed.best(chips, 2 * count) if one.candidate not in done]
    compiled_s = {on_any_torus(one.estimate): one.estimate.step_s for one in compiled}
    others = [one for one in others if one.step_s < compiled_s.get(on_any_torus(one), math.inf)]
    rows = [(one.estimate, rank_layout(request, one.estimate, one)) for one in compiled[:count]]
    return rows + [
        (one, rank_layout(request, one, ratio=compiles.ratio(mesh_partition(one))))
        for one in others[: count - len(rows)]
    ]


def rank_layout(
    request: SearchRequest, one: Estimated, compiled: CompiledLayout | None = None, ratio: float | None = None
) -> RankedLayout:
    """Return the record of an estimated or compiled layout.

    `ratio` is the compiled over the estimated step time of another layout with the same mesh and partition.
    """
    target, tokens = one.group.target, tokens_of(request.run)
    step_s = one.step_s * (ratio or 1.0) if compiled is None else compiled.step_s or one.step_s
    low, high = errors().low * step_s, errors().high * step_s
    interval = None if compiled is None else compiled.trial.results.step.interval
    if compiled is not None:
        low, high = (interval.low_s, interval.high_s) if interval else (step_s, step_s)
    rate = tokens / step_s
    budget_s = None if request.budget_usd is None else affordable(target, request.budget_usd)
    return RankedLayout(
        candidate=one.candidate,
        overrides=one.candidate.overrides,
        stage=Stage.estimate if compiled is None else Stage.compile,
        step_s=step_s,
        low_s=low,
        high_s=high,
        memory=one.bytes if compiled is None else compiled.peak,
        usable=usable_hbm(target.chip),
        tokens_per_second_per_chip=rate / ((target.chips or 1) * target.slices),
        mfu=_mfu(request, one, step_s),
        usd_per_million_tokens=dollars(target, 1e6 / rate),
        bottleneck=_bottleneck(one, compiled),
        parts_s=one.parts,
        hours=None if request.tokens is None else request.tokens / rate / 3600,
        dollars=None if request.tokens is None else dollars(target, request.tokens / rate),
        tokens_for_budget=None if budget_s is None else rate * budget_s,
    )


def _mfu(request: SearchRequest, one: Estimated, step_s: float) -> float | None:
    """Return the model FLOPs utilisation, or None if the chip's peak is unknown."""
    target, run = one.group.target, request.run
    peak = None if target.chip is None else target.chip.peak_flops(run.config.precision.compute)
    return run.step_flops / (step_s * peak * (target.chips or 1) * target.slices) if peak else None


def _bottleneck(one: Estimated, compiled: CompiledLayout | None) -> Bottleneck:
    """Return the resource that takes most of the replayed step, or of the estimated step if it was not compiled."""
    usable = usable_hbm(one.group.target.chip)
    seconds_by: dict[str, float] = {}
    if compiled is not None and compiled.trial.results.parts:
        spent = [(_resource(part), part.seconds) for part in compiled.trial.results.parts]
    else:
        spent = [(_ESTIMATED_BOTTLENECKS[name], seconds) for name, seconds in one.parts.items()]
    for what, seconds in spent:
        seconds_by[what] = seconds_by.get(what, 0.0) + seconds
    resource, seconds = max(seconds_by.items(), key=lambda item: item[1])
    peak = one.bytes if compiled is None else compiled.peak or one.bytes
    return Bottleneck(resource, seconds / sum(seconds_by.values()), bool(usable and peak > NEAR_LIMIT * usable))


def _resource(part: StepPart) -> str:
    """Describe the resource that limits a part of a replayed step."""
    if part.kind is PartKind.exposed:
        return f"communication over {axes_text(part.mesh_axes)}"
    return _COMPILED_BOTTLENECKS.get(part.kind, part.kind.value)


def show(answer: SearchAnswer, console: Console) -> None:
    """Print the best layouts, one per row: step time, memory, tokens, cost and bottleneck."""
    style = {"header_style": "bold", "padding": (0, 1, 0, 0), "title": answer.title, "title_justify": "left"}
    console.print(terminal_table(answer_columns(answer), answer.best, **style))


def describe_work(request: SearchRequest) -> str:
    """Describe the model, the batch and the precision of a search."""
    config = request.run.config
    return f"{request.run.model.name}, batch {config.batch} x {config.seq:,} tokens, {config.precision.name}"


def command_of(request: SearchRequest, row: RankedLayout, tuned: Sequence[str] = ()) -> str:
    """Return the command that trains a layout. `tuned` are the overrides that tuning found for it."""
    overrides = [f"target={row.candidate.target}", *row.overrides[1:], *tuned]
    return "valkyrie-train " + shlex.join([*request.command, *overrides])


def launch_command_of(request: SearchRequest, row: RankedLayout, tuned: Sequence[str] = ()) -> str | None:
    """Return the command that prints how to rent a layout's slice and train on it. With `--run` it does both.

    Returns None for several slices of a platform whose launch engine does not join slices.
    """
    target = next(target for target in request.targets if target.name == row.candidate.target)
    rented = platform_of(target.platform).rented_as_slices
    if target.slices > 1 and not rented:
        return None
    words = [f"target={target.name}"] if rented else ["target=skypilot", f"slice={target.name}"]
    words += [f"slices={target.slices}"] if target.slices > 1 else []
    return f"valkyrie-launch {shlex.join(words)} -- {command_of(request, row, tuned).partition(' ')[2]}"
