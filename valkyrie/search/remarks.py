"""Sentences below the answer of a search: costs, baselines, and what to try next."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from valkyrie.config.run import Run
from valkyrie.hardware.chips import describe_price
from valkyrie.hardware.target import TargetConfig
from valkyrie.models import LayeredModel
from valkyrie.report.words import EQUAL_RATIO
from valkyrie.runs.folder import key_values, split_override
from valkyrie.search.answer import compile_command
from valkyrie.search.answer_record import RankedLayout, Stage
from valkyrie.search.baselines import describe_other_parallelism, find_baselines, format_comparison
from valkyrie.search.batches import explain_batch
from valkyrie.search.compile.prediction import HintCode
from valkyrie.search.compile.show import describe_interval
from valkyrie.search.compiling import CompiledLayouts, make_compile_run
from valkyrie.search.estimate.efficiency import chip_efficiency
from valkyrie.search.estimate.rank import EstimatedLayout, Ranking
from valkyrie.search.estimate.runs import estimate_runs, suggest_unpadded_heads
from valkyrie.search.estimate.slow_dispatch import describe_slow_dispatch
from valkyrie.search.measuring import MeasuredTrials
from valkyrie.search.request import SearchRequest, compute_price
from valkyrie.search.shortlist import EQUALLY_FAST_RATIO, Shortlist, describe_chips
from valkyrie.units import count_text, number_text, percent_text


def collect_remarks(
    request: SearchRequest,
    rows: Sequence[RankedLayout],
    ranking: Ranking,
    shortlist: Shortlist,
    compiled_layouts: CompiledLayouts,
    measured_trials: MeasuredTrials,
) -> list[str]:
    """Return the sentences below the table of an answer.

    They state why an interval is unknown and costs by kind of chip, compare the best layout with baselines, and suggest
    unpadded attention heads if useful. `rows` is the table, the best first.
    """
    best = rows[0]
    is_estimate = best.stage is Stage.estimate
    best_run = _find_run(request, best, shortlist, compiled_layouts)
    target = target_slice(request, best)
    chips = (target.chips or 1) * target.slices
    lines = [f"#1: {chips * best.tokens_per_second_per_chip:,.0f} tokens/s on {count_text(chips, 'chip')}."]
    lines += [*describe_choices(request, best), *describe_placement(best_run)]
    lines += describe_policies(request, rows, shortlist, compiled_layouts)
    lines += [*explain_batch(best), *describe_intervals(request, rows)]
    lines += describe_costs(request, rows)
    if is_estimate and (ratios := compiled_layouts.describe_ratios()) is not None:
        lines.append(f"The best layout is only estimated. {ratios}")
    if best.candidate.partition == "fsdp" and len({partition.name for partition in request.partitions}) > 1:
        lines.append(f"Plain FSDP is the best layout {'by estimate' if is_estimate else 'found'}.")
    baselines = find_baselines(request, ranking, target, best.candidate)
    for baseline in baselines:
        if baseline.layout is not None and baseline.layout.candidate == best.candidate:
            continue
        measured_s = None if baseline.layout is None else measured_trials.step_s(baseline.layout)
        lines.append(format_comparison(baseline, compiled_layouts, best, measured_s))
    lines += describe_other_parallelism(ranking.for_target(target.name), compiled_layouts, best)
    if best_run is not None and (warning := describe_slow_dispatch(best_run)) is not None:
        lines.append(f"#1: {warning}")
    if best_run is not None and (unpadded := suggest_unpadded_heads(best_run)) is not None:
        source = "" if is_estimate else best.stage.adjective
        unpadded = unpadded.scaled_to(best.step_s, best.memory, source)
        lines.append(f"{unpadded} To compile it: {compile_command(request, best, unpadded.changes)}")
    return lines


def describe_choices(request: SearchRequest, best: RankedLayout) -> list[str]:
    """Return a line with the settings of the best layout that the command leaves open although it names a mesh.

    Another line has the batch, if it is the default.
    """
    keys, lines = {*key_values(request.run.arguments)}, []
    chosen = [o for o in best.overrides[1:] if split_override(o)[0] not in keys]
    if request.mesh is not None and chosen:
        lines.append(f"mesh={request.mesh.name} is from the command. Chosen by the search for #1: {' '.join(chosen)}.")
    if not request.search_batch and not keys & {"batch", "batch_tokens", "experiment"}:
        lines.append(f"batch={request.run.config.batch} is the default. To search the batch: batch=auto.")
    return lines


def describe_policies(
    request: SearchRequest, rows: Sequence[RankedLayout], shortlist: Shortlist, compiled_layouts: CompiledLayouts
) -> list[str]:
    """Return remarks on other remat policies for the best layout, if it is compiled.

    They name the policies that may be faster but are not in the table, which has few rows per mesh and partition, and
    repeat the compile's hint to save another activation, because a search tries only the shipped policies.
    """
    best, lines = rows[0], list[str]()
    compiled = compiled_layouts.get(best.candidate)
    if best.stage is not Stage.compile or compiled is None:
        return lines
    shown = {replace(row.candidate, batch=None) for row in rows}
    hidden: dict[str, EstimatedLayout] = {}
    for layout in shortlist.fitting:
        candidate = layout.candidate
        is_variant = replace(candidate, remat=best.candidate.remat) == best.candidate
        if is_variant and replace(candidate, batch=None) not in shown and compiled_layouts.get(candidate) is None:
            hidden.setdefault(candidate.remat, layout)
    best_s, times = compiled.estimate.per_sequence(best.step_s), compiled_layouts.correct([*hidden.values()])
    ratios = {
        name: layout.per_sequence(time.step_s) / best_s
        for (name, layout), time in zip(hidden.items(), times, strict=True)
        if layout.per_sequence(time.low_s) * EQUAL_RATIO < best_s
    }
    if ratios:
        shortest, longest = f"{min(ratios.values()):.2f}", f"{max(ratios.values()):.2f}"
        times_text = shortest if shortest == longest else f"{shortest} to {longest}"
        lines.append(
            f"Not in the table: #1 with remat={' or '.join(ratios)}. By estimate, its step takes {times_text} times as "
            f"long, but it may be more than {percent_text(EQUAL_RATIO - 1)} faster, because estimates have errors."
        )
    for hint in compiled.hints:
        if hint.code is HintCode.save_activation:
            command = compile_command(request, best, hint.changes)
            lines.append(f"The compile of #1 hints: {hint.text} To compile it: {command}")
    return lines


def describe_placement(run: Run | None) -> list[str]:
    """Return a line with the estimated cost of the default placement, or [] if the run has it or is None."""
    if run is None or run.config.mesh.placement is None or (chip := run.config.target.chip) is None:
        return []
    mesh = run.config.mesh
    runs = [run, run.changed(mesh=replace(mesh, placement=None))]
    step_s, default_s = (estimate["step"] for estimate in estimate_runs(runs, chip_efficiency(chip)))
    cost = "is as fast" if default_s <= EQUALLY_FAST_RATIO * step_s else f"takes {default_s / step_s:.2f} times as long"
    return [f"Without mesh.placement=[{','.join(run.config.mesh.placement or ())}], #1 {cost} by estimate."]


def describe_prices(request: SearchRequest) -> list[str]:
    """Return the price of a chip-hour with its source for each kind of chip, on demand and, if it is set, spot."""
    chips = {target.chip.name: target.chip for target in request.targets if target.chip is not None}
    lines = []
    for name, chip in chips.items():
        if text := describe_price(chip):
            spot = chip.spot_usd_per_hour
            spot_text = "" if spot is None else f"; ${spot:,.2f} spot (set by target.chip.spot_usd_per_hour)"
            lines.append(f"{name} {text}{spot_text}")
    return lines


def describe_costs(request: SearchRequest, rows: Sequence[RankedLayout]) -> list[str]:
    """Return a line for the best layout on each kind and number of chips, with the price of a chip-hour.

    The line has the hours and tokens that `budget_usd` pays for, and the hours and dollars of `tokens`, with their
    ranges. If the chip has a spot price, another line repeats them at this price. Chips without a price get no line.
    Further lines compare numbers of chips of the same kind, and have the price at which another kind is cheaper.
    Returns an empty list if neither setting is used.
    """
    lines, described_chips = list[str](), set[str]()
    if request.budget_usd is None and request.tokens is None:
        return lines
    for place, row in enumerate(rows, start=1):
        target = target_slice(request, row)
        if (chips_text := describe_chips(target)) in described_chips:
            continue
        described_chips.add(chips_text)
        for is_spot in (False, True):
            hour_usd = compute_price(target, 3600.0, spot=is_spot)
            if hour_usd:
                lines.append(f"#{place} on {target.name} at {_describe_cost(request, row, target, hour_usd, is_spot)}")
    targets = [target for target in request.targets if compute_price(target, 3600.0) is None]
    if names := list(dict.fromkeys(target.chip.name for target in targets if target.chip is not None)):
        lines.append(
            f"No price of {' or '.join(names)} is known, so rows are ordered by speed instead of cost. "
            "target.chip.usd_per_hour= sets a price, in a search of one kind of chip."
        )
    return [*lines, *_compare_slices(request, rows), *_describe_price_limit(request, rows)]


def _describe_price_limit(request: SearchRequest, rows: Sequence[RankedLayout]) -> list[str]:
    """Return a line with the price up to which the chip of the first row stays the cheapest.

    Empty with one chip, or if the price is already higher: the first row may be a compiled one, with a cheaper estimate
    below it.
    """
    best, chip = rows[0], target_slice(request, rows[0]).chip
    others = [(place, row) for place, row in enumerate(rows, start=1) if target_slice(request, row).chip != chip]
    if not request.ranks_by_price or chip is None or not others:
        return []
    place, rival = min(others, key=lambda pair: pair[1].usd_per_million_tokens or math.inf)
    usd = (chip.usd_per_hour or 0.0) * (rival.usd_per_million_tokens or 0.0) / (best.usd_per_million_tokens or 1.0)
    if usd <= (chip.usd_per_hour or 0.0):
        return []
    low_usd = usd * (rival.low_s / rival.step_s) / (best.high_s / best.step_s)
    low_text = ""
    if best.interval and rival.interval:
        low_text = f", or ${low_usd:,.2f} if #1 is as slow and #{place} as fast as their intervals allow"
    return [
        f"{chip.name} stays the cheapest up to ${usd:,.2f} per chip-hour{low_text}. Above that, #{place} on "
        f"{rival.candidate.target} is cheaper."
    ]


def _compare_slices(request: SearchRequest, rows: Sequence[RankedLayout]) -> list[str]:
    """Return a line for each other number of chips of the same kind as those of the first row.

    The line has the hours of both rows, how many more or fewer tokens the other one buys (or what `tokens` cost more or
    less), and whether this sign is sure. The errors of compiled steps cancel, so that the range has only those of
    estimates. Leaves out measured rows, whose errors do not cancel, and rows without a price.
    """
    best, lines = rows[0], list[str]()
    best_target = target_slice(request, best)
    compared = {describe_chips(best_target)}
    for place, row in enumerate(rows, start=1):
        target = target_slice(request, row)
        chips = [each.chip.name if each.chip else None for each in (target, best_target)]
        is_measured = Stage.measure in (best.stage, row.stage)
        if None in chips or chips[0] != chips[1] or is_measured or describe_chips(target) in compared:
            continue
        compared.add(describe_chips(target))
        if row.usd_per_million_tokens and best.usd_per_million_tokens:
            lines.append(_compare_costs(request, best, row, place))
    return lines


def _compare_costs(request: SearchRequest, best: RankedLayout, row: RankedLayout, place: int) -> str:
    price = (row.usd_per_million_tokens or 0.0) / (best.usd_per_million_tokens or 1.0)
    (best_low, best_high), (low, high) = best.compiled_ratios, row.compiled_ratios
    prices = [  # as if errors of estimates on different numbers of chips were independent
        price * math.exp(-math.hypot(math.log(low), math.log(best_high))),
        price,
        price * math.exp(math.hypot(math.log(high), math.log(best_low))),
    ]
    if request.budget_usd is not None:
        changes, less, noun = [1 / each - 1 for each in reversed(prices)], "fewer", "tokens"
    else:
        changes, less, noun = [each - 1 for each in prices], "less", "dollars"

    def describe(change: float) -> str:
        return f"{percent_text(abs(change))} {less if change < 0 else 'more'}"

    lowest, change, highest = changes
    is_exact, tolerance = lowest == highest, EQUAL_RATIO - 1
    if lowest * highest > 0 and min(abs(lowest), abs(highest)) > tolerance:
        certainty = "so this order is sure"
    elif is_exact:
        certainty = f"and their costs are equal within {percent_text(tolerance)}"
    else:
        certainty = "but estimates may be off by more than this difference"
    span = "" if is_exact else f" ({describe(lowest)} to {describe(highest)} once compiled)"
    slices = [target_slice(request, each) for each in (row, best)]
    hours = [
        number_text(_training_hours(request, each, target)) for each, target in zip((row, best), slices, strict=True)
    ]
    chip_name = slices[0].chip.name if slices[0].chip else ""
    return (
        f"#{place} on {slices[0].name} instead of #1: {hours[0]} hours instead of {hours[1]}, and {describe(change)} "
        f"{noun}{span}. Both share the error of predictions for {chip_name}, {certainty}."
    )


def _training_hours(request: SearchRequest, row: RankedLayout, target: TargetConfig) -> float:
    """Return the hours that `budget_usd` pays for or, without a budget, those that `tokens` take."""
    if request.budget_usd is not None:
        return request.budget_usd / (compute_price(target, 3600.0) or math.inf)
    return row.hours or 0.0


def _describe_cost(
    request: SearchRequest, row: RankedLayout, target: TargetConfig, hour_usd: float, is_spot: bool
) -> str:
    chips = (target.chips or 1) * target.slices
    tokens_per_hour = 3600 * chips * row.tokens_per_second_per_chip
    low, high = row.low_s / row.step_s, row.high_s / row.step_s
    facts = []
    if request.budget_usd is not None:
        hours = request.budget_usd / hour_usd
        tokens_text = _with_range(hours * tokens_per_hour / 1e9, 1 / high, 1 / low)
        facts.append(
            f"${number_text(request.budget_usd)} pays for {number_text(hours)} hours: {tokens_text} billion tokens"
        )
    if request.tokens is not None:
        hours = request.tokens / tokens_per_hour
        facts.append(
            f"{number_text(request.tokens / 1e9)} billion tokens take {_with_range(hours, low, high)} hours and cost "
            f"{_with_range(hours * hour_usd, low, high)} dollars"
        )
    return f"${hour_usd / chips:,.2f} per chip-hour{' (spot)' if is_spot else ' (on demand)'}: {'; '.join(facts)}"


def _with_range(value: float, low: float, high: float) -> str:
    """Format a number and its range, such as `17.5 (13.5 to 19.1)`. `low` and `high` are relative to `value`."""
    if low == high:
        return number_text(value)
    return f"{number_text(value)} ({number_text(low * value)} to {number_text(high * value)})"


def describe_intervals(request: SearchRequest, rows: Sequence[RankedLayout]) -> list[str]:
    """Return a line for each reason why predicted steps have no interval. It names their slices if there are others.

    Returns an empty list if all have one.
    """
    slices_by_reason: dict[str, list[str]] = {}
    for row in rows:
        if row.stage is not Stage.measure and row.interval is None:
            target = target_slice(request, row)
            slices = slices_by_reason.setdefault(describe_interval(None, platform=target.platform), [])
            slices += [] if target.name in slices else [target.name]
    lines = []
    for reason, slices in slices_by_reason.items():
        place = f" for {', '.join(slices)}" if len(slices) < len(request.targets) else ""
        lines.append(f"The interval of predicted steps{place} is {reason}.")
    if lines and not isinstance(request.run.model, LayeredModel):
        lines.append(
            "Published runs are of Valkyrie's own layers, so a model of other layers has no interval, even if it is a "
            "dense transformer. mode=measure of at least four layouts with two batches, then mode=calibrate, "
            "gives it one."
        )
    return lines


def _find_run(
    request: SearchRequest, best: RankedLayout, shortlist: Shortlist, compiled_layouts: CompiledLayouts
) -> Run | None:
    """Return the run that compiles the best layout, or None if it is neither compiled nor in the shortlist."""
    compiled = (layout.estimate for layout in compiled_layouts.layouts)
    layouts = [*compiled, *shortlist.fitting, *shortlist.may_fit]
    layout = next((layout for layout in layouts if layout.candidate == best.candidate), None)
    return None if layout is None else make_compile_run(request, layout)


def target_slice(request: SearchRequest, row: RankedLayout) -> TargetConfig:
    """Return the requested slice of a row."""
    return next(target for target in request.targets if target.name == row.candidate.target)
