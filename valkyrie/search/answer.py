"""Ranks the estimated and compiled layouts of a search, prints the best, and builds the commands that train them."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console

from valkyrie.axes import axes_text
from valkyrie.hardware.platforms import get_platform
from valkyrie.hardware.target import usable_hbm
from valkyrie.models import is_dense_transformer
from valkyrie.parts import PART_LABELS, PartKind, StepPart
from valkyrie.runs.columns import terminal_table
from valkyrie.runs.folder import key_values, split_override
from valkyrie.search.answer_record import Bottleneck, RankedLayout, SearchAnswer, Stage, answer_columns
from valkyrie.search.compile.correction import step_interval
from valkyrie.search.compiling import CompiledLayout, CompiledLayouts
from valkyrie.search.correcting import CorrectedTime
from valkyrie.search.estimate.rank import EstimatedLayout
from valkyrie.search.estimate.space import Candidate
from valkyrie.search.request import SearchRequest, affordable_seconds, compute_price
from valkyrie.search.shortlist import Shortlist, describe_chips, without_torus
from valkyrie.units import memory_text, parameters_text

NEAR_LIMIT_SHARE = 0.95
"""The bottleneck of a layout also names memory if the peak exceeds this share of the usable memory."""
_UNLIMITED_WIDTH = 10_000
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
"""Bottleneck that the answer names for each part of an estimated step."""
_COMPILED_BOTTLENECKS = {
    PartKind.matmul: "compute",
    PartKind.kernel: "compute",
    PartKind.compute: "compute",
    PartKind.memory: "HBM bandwidth",
}


def rank_layouts(
    request: SearchRequest, shortlist: Shortlist, compiled_layouts: CompiledLayouts, count: int
) -> list[RankedLayout]:
    """Return the best `count` layouts, compiled or estimated, ordered by `SearchRequest.cost`.

    Estimates are corrected by compiled layouts. The best compiled layout is the first one, unless an estimate
    is below it by more than the error of estimates. The best layout on each kind and number of chips, and of
    slices, is always included, even beyond `count`.
    """
    chip_kinds = list(dict.fromkeys(map(describe_chips, request.targets)))
    count_per_kind = max(-(-count // len(chip_kinds)), 2)
    by_chips = [_best_on_chips(request, chips, shortlist, compiled_layouts, count_per_kind) for chips in chip_kinds]
    by_chips = [_order_rows(request, pairs) for pairs in by_chips if pairs]
    best_per_kind = [pairs[0] for pairs in by_chips]
    others = (pair for pairs in by_chips for pair in pairs[1:])
    remaining = sorted(others, key=lambda pair: request.cost(pair[0], pair[1].step_s))
    ordered = _order_rows(request, [*best_per_kind, *remaining[: max(count - len(best_per_kind), 0)]])
    return [replace(row, as_fast_on=shortlist.equally_fast_slices(layout)) for layout, row in ordered]


def _order_rows(
    request: SearchRequest, pairs: Sequence[tuple[EstimatedLayout, RankedLayout]]
) -> list[tuple[EstimatedLayout, RankedLayout]]:
    """Return rows by cost, but the best compiled one first, unless an estimate with its error is below its time."""
    ordered = sorted(pairs, key=lambda pair: request.cost(pair[0], pair[1].step_s))
    best = next((pair for pair in ordered if pair[1].stage is Stage.compile), None)
    if best is None:
        return ordered
    best_cost = request.cost(best[0], best[1].step_s)
    estimated = (pair for pair in ordered if pair[1].stage is Stage.estimate)
    if any(request.cost(layout, row.step_s * row.compiled_ratios[1]) < best_cost for layout, row in estimated):
        return ordered
    return [best, *(pair for pair in ordered if pair is not best)]


def _best_on_chips(
    request: SearchRequest, chips_text: str, shortlist: Shortlist, compiled_layouts: CompiledLayouts, count: int
) -> list[tuple[EstimatedLayout, RankedLayout]]:
    """Return the best `count` layouts on one kind and number of chips, with the best compiled one in any case.

    Leaves out an estimated layout if it was compiled with another torus, placement or batch, and its estimate with
    those is at least as fast.
    """
    timed_layouts = [
        c for c in compiled_layouts.layouts if c.step_s is not None and describe_chips(c.target) == chips_text
    ]
    timed_layouts.sort(key=lambda layout: layout.estimate.per_sequence(layout.step_s or 0.0))
    compiled_by_layout: dict[Candidate, CompiledLayout] = {}
    for layout in timed_layouts:  # of several searched batches, only the fastest
        compiled_by_layout.setdefault(replace(layout.estimate.candidate, batch=None), layout)
    rows = [
        (layout.estimate, make_answer_row(request, layout.estimate, layout)) for layout in compiled_by_layout.values()
    ]
    compiled_candidates = {layout.estimate.candidate for layout in compiled_layouts.layouts}
    compiled_s: dict[Candidate, float] = {}
    for layout in timed_layouts:
        variant = without_torus(layout.estimate)
        compiled_s[variant] = min(layout.estimate.ranking_s, compiled_s.get(variant, math.inf))
    estimated_layouts = [
        layout
        for layout in shortlist.on_chips(chips_text)
        if layout.candidate not in compiled_candidates
        and layout.ranking_s < compiled_s.get(without_torus(layout), math.inf)
    ]
    times = dict(
        zip((e.candidate for e in estimated_layouts), compiled_layouts.correct(estimated_layouts), strict=True)
    )
    estimated_layouts.sort(key=lambda layout: layout.per_sequence(times[layout.candidate].step_s))
    estimated_rows = [
        (layout, make_answer_row(request, layout, corrected=times[layout.candidate]))
        for layout in shortlist.select_distinct(estimated_layouts, count)
    ]
    best_compiled = rows[:1]
    ordered = sorted([*rows[1:], *estimated_rows], key=lambda pair: pair[0].per_sequence(pair[1].step_s))
    return [*best_compiled, *ordered[: count - len(best_compiled)]]


def make_answer_row(
    request: SearchRequest,
    layout: EstimatedLayout,
    compiled_layout: CompiledLayout | None = None,
    corrected: CorrectedTime | None = None,
) -> RankedLayout:
    """Return the row of a layout in the answer, with its compiled step time or, if it has none, the estimated one.

    `corrected` is the estimated time as corrected by compiled layouts, or None to use the estimate itself.
    """
    target, tokens = layout.group.target, request.step_tokens(layout.batch)
    time = corrected or CompiledLayouts().correct([layout])[0]
    step_s, low_s, high_s = time.step_s, time.low_s, time.high_s
    compiled_ratios = (low_s / step_s, high_s / step_s)
    is_dense = is_dense_transformer(request.run.model)
    errors = None if target.chip is None else step_interval(step_s, target.chip, trains_dense_transformer=is_dense)
    if errors is None:
        low_s = high_s = step_s  # that of a compiled step would be unknown
    else:  # errors of the estimate and of compiled steps are independent
        low_s = step_s * math.exp(-math.hypot(math.log(compiled_ratios[0]), math.log(errors.low)))
        high_s = step_s * math.exp(math.hypot(math.log(compiled_ratios[1]), math.log(errors.high)))
    if compiled_layout is not None:
        step_s, interval = compiled_layout.step_s or layout.step_s, compiled_layout.trial.results.step.interval
        low_s, high_s = (interval.low_s, interval.high_s) if interval else (step_s, step_s)
        compiled_ratios = (1.0, 1.0)
    rate = tokens / step_s
    affordable_s = None if request.budget_usd is None else affordable_seconds(target, request.budget_usd)
    return RankedLayout(
        candidate=layout.candidate,
        overrides=layout.candidate.overrides,
        stage=Stage.estimate if compiled_layout is None else Stage.compile,
        step_s=step_s,
        low_s=low_s,
        high_s=high_s,
        memory=layout.peak_bytes if compiled_layout is None else compiled_layout.peak,
        usable=usable_hbm(target.chip),
        tokens_per_second_per_chip=rate / ((target.chips or 1) * target.slices),
        mfu=_mfu(request, layout, step_s),
        usd_per_million_tokens=compute_price(target, 1e6 / rate),
        bottleneck=_bottleneck(layout, compiled_layout),
        parts_s=layout.parts,
        hours=None if request.tokens is None else request.tokens / rate / 3600,
        dollars=None if request.tokens is None else compute_price(target, request.tokens / rate),
        spot_dollars=None if request.tokens is None else compute_price(target, request.tokens / rate, spot=True),
        tokens_for_budget=None if affordable_s is None else rate * affordable_s,
        compiled_ratios=compiled_ratios,
    )


def _mfu(request: SearchRequest, layout: EstimatedLayout, step_s: float) -> float | None:
    """Return the model FLOPs utilisation, or None if the chip's peak is unknown."""
    target, run = layout.group.target, request.run
    peak = None if target.chip is None else target.chip.peak_flops(run.config.precision.compute)
    run = layout.group.settings.apply(run)
    flops = run.changed(batch=layout.batch or run.config.batch).step_flops
    return flops / (step_s * peak * (target.chips or 1) * target.slices) if peak else None


def _bottleneck(layout: EstimatedLayout, compiled_layout: CompiledLayout | None) -> Bottleneck:
    """Return the resource that takes the largest share of the step.

    Uses the parts of the replay if there is one, otherwise those of the estimate.
    """
    usable = usable_hbm(layout.group.target.chip)
    seconds_by_resource: dict[str, float] = {}
    is_replayed = compiled_layout is not None and bool(compiled_layout.trial.results.parts)
    if compiled_layout is not None and is_replayed:
        resource_seconds = [(_limiting_resource(part), part.seconds) for part in compiled_layout.trial.results.parts]
    else:
        resource_seconds = [(_ESTIMATED_BOTTLENECKS[name], seconds) for name, seconds in layout.parts.items()]
    for resource_name, seconds in resource_seconds:
        seconds_by_resource[resource_name] = seconds_by_resource.get(resource_name, 0.0) + seconds
    resource, seconds = max(seconds_by_resource.items(), key=lambda item: item[1])
    peak = layout.peak_bytes if compiled_layout is None else compiled_layout.peak or layout.peak_bytes
    share, is_near_limit = (
        seconds / sum(seconds_by_resource.values()),
        bool(usable and peak > NEAR_LIMIT_SHARE * usable),
    )
    return Bottleneck(resource, share, is_near_limit, is_replayed)


def _limiting_resource(part: StepPart) -> str:
    """Name the resource that limits a part of a replayed step."""
    if part.kind is PartKind.exposed:
        return f"communication over {axes_text(part.mesh_axes)}"
    return _COMPILED_BOTTLENECKS.get(part.kind, PART_LABELS[part.kind])


def print_answer(answer: SearchAnswer, console: Console) -> None:
    """Print a table of the best layouts after any warning, and below it how sure their order is."""
    if answer.warning:
        console.print(answer.warning, style="bold yellow", soft_wrap=True)
    title = f"{answer.title}; {describe_peak(answer)}"
    style = {"header_style": "bold", "padding": (0, 1, 0, 0), "title": title, "title_justify": "left"}
    columns = answer_columns(answer)
    table = terminal_table(columns, answer.best, **style)
    if console.measure(table, options=console.options.update(width=_UNLIMITED_WIDTH)).minimum <= console.width:
        console.print(table)
    else:  # settings are never broken, so that they can be copied
        console.print(terminal_table([c for c in columns if c.name != "layout"], answer.best, **style))
        for place, row in enumerate(answer.best, start=1):
            console.print(f"  #{place} {' '.join(row.overrides[1:])}", soft_wrap=True)
    for line in answer.certainty:
        console.print(line, style="bold", soft_wrap=True)


def describe_peak(answer: SearchAnswer) -> str:
    """Describe the column `peak`: memory per device at its peak, with the usable memory on each kind of chip."""
    slices: dict[str, list[str]] = {}
    for row in answer.best:
        if row.usable:
            slices.setdefault(f"{memory_text(row.usable)} usable", []).append(row.candidate.target)
    limits = [
        f"{text} on {' and '.join(dict.fromkeys(names))}" if len(slices) > 1 else text for text, names in slices.items()
    ]
    return "peak: memory per device at its peak" + (f", of {', '.join(limits)}" if limits else "")


def describe_work(request: SearchRequest) -> str:
    """Describe the work of a search, such as `gpt_1b (1.1 billion parameters), batch 512 x 2,048 tokens, bf16`."""
    config, model = request.run.config, request.run.model
    batch = "searched batch of sequences of" if request.search_batch else f"batch {config.batch} x"
    size = parameters_text(model.parameter_count())
    return f"{model.name} ({size}), {batch} {config.seq:,} tokens, {config.precision.name}"


def train_command(request: SearchRequest, row: RankedLayout, options: Sequence[str] = ()) -> str:
    """Return the command that trains a layout. `options` are additional overrides (`SearchAnswer.options`)."""
    overrides = [f"target={row.candidate.target}", *row.overrides[1:], *options]
    arguments = request.train_arguments(row.candidate.batch, row.tokens_for_budget)
    return "valkyrie-train " + shlex.join([*arguments, *overrides])


def layout_command(request: SearchRequest, row: RankedLayout, mode: Sequence[str], options: Sequence[str] = ()) -> str:
    """Return the command that runs a mode on a layout, such as `mode=measure`.

    `options` are additional overrides. They replace those of the request with the same keys.
    """
    overrides = [f"target={row.candidate.target}", *row.overrides[1:], *options]
    replaced_keys = key_values(options).keys()
    arguments = [argument for argument in request.arguments if split_override(argument)[0] not in replaced_keys]
    return "valkyrie-train " + shlex.join([*mode, *arguments, *overrides])


def compile_command(request: SearchRequest, row: RankedLayout, changes: Sequence[str] = ()) -> str:
    """Return the `mode=compile` command of a layout. `changes` are additional overrides."""
    return layout_command(request, row, ["mode=compile"], changes)


def launch_command(request: SearchRequest, row: RankedLayout, command: str) -> str | None:
    """Return the `valkyrie-launch` command that rents the slices of a layout and runs a command of it there.

    None for several slices on a platform where Valkyrie can rent only one.
    """
    target = next(target for target in request.targets if target.name == row.candidate.target)
    rents_slices = get_platform(target.platform).rented_as_slices
    if target.slices > 1 and not rents_slices:
        return None
    words = [f"target={target.name}"] if rents_slices else ["target=skypilot", f"slice={target.name}"]
    words += [f"slices={target.slices}"] if target.slices > 1 else []
    return f"valkyrie-launch {shlex.join(words)} -- {command.partition(' ')[2]}"
