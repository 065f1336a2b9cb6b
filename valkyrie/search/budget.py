"""Compares the budget of a search with how long its compiles probably take, and names a budget that suffices."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence

from valkyrie.config.arguments import abbreviate_search
from valkyrie.hardware.target import TargetConfig
from valkyrie.search import FIRST_RESULT_FACTOR
from valkyrie.search.answer_record import RankedLayout, Stage
from valkyrie.search.batches import find_uncompiled_batch
from valkyrie.search.compiling import CompiledLayouts, StopCause
from valkyrie.search.durations import compile_durations, durations_on
from valkyrie.search.local_devices import missing_compilers
from valkyrie.search.remarks import target_slice
from valkyrie.search.request import SearchRequest
from valkyrie.search.rivals import find_estimated_rivals, may_be_better, name_rivals
from valkyrie.search.shortlist import describe_chips
from valkyrie.units import range_text


def describe_compile_time(request: SearchRequest, row: RankedLayout, compiled_layouts: CompiledLayouts) -> str:
    """Describe how long the compile of a row takes: `about 49 to 81 s`, or `more than 542 s` if one was stopped then.

    A compile that was stopped counts if it was for the same chip.
    """
    target = target_slice(request, row)
    durations, stopped_s = durations_on(request, target), _stopped_s(target, compiled_layouts)
    is_longer = stopped_s > durations.high_s
    return f"more than {stopped_s:.0f} s" if is_longer else f"about {range_text(durations.low_s, durations.high_s)} s"


def _stopped_s(target: TargetConfig, compiled_layouts: CompiledLayouts) -> float:
    """Return the seconds after which a compile for the chip of a slice was stopped, or 0 if none was."""
    stopped_target = compiled_layouts.stopped_target
    is_same_chip = stopped_target is not None and stopped_target.chip == target.chip
    return (compiled_layouts.stopped_s or 0.0) if is_same_chip else 0.0


def sufficient_budget(request: SearchRequest, compiled_layouts: CompiledLayouts, stopped_s: float = 0.0) -> str:
    """Return a `mode.budget` that probably suffices for a compile on each kind of chips without one.

    `stopped_s` are the seconds after which a compile was stopped without a result. The budget is at least twice that,
    and at least that of the request.
    """
    minutes = max(_missing_s(request, compiled_layouts), 2 * stopped_s, request.budget_s or 0.0, 60.0) / 60
    return f"{math.ceil(minutes)}min"


def search_command(request: SearchRequest, *limits: str) -> str:
    """Return the command of a search with other limits, such as `mode.budget=9min`. It continues in the same folder."""
    keys = tuple(f"{limit.partition('=')[0]}=" for limit in limits)
    arguments = [argument for argument in request.run.arguments if not argument.startswith(keys)]
    return f"valkyrie-train {shlex.join(abbreviate_search([*arguments, *limits]))}"


def describe_plan(request: SearchRequest, compiled_layouts: CompiledLayouts) -> list[str]:
    """Return lines to print before the first compile: how long one takes, how many fit in the budget, and what to do.

    If the budget is probably too short for a compile on each kind of chips, the second line has one that suffices, and
    smaller questions.
    """
    missing_targets = _missing_targets(request, compiled_layouts)
    durations, missing = compile_durations(request, missing_targets), len(missing_targets)
    if request.budget_s is None:
        return [f"{durations.describe()}."]
    limit_s = compiled_layouts.budget_factor * request.budget_s
    fewest, most = (math.floor(request.budget_s / s) for s in (durations.high_s, durations.low_s))
    count = range_text(fewest, most) if most else "none"
    lines = [f"{durations.describe()}: {count} would fit in mode.budget={request.mode.budget}."]
    if limit_s < durations.high_s:
        compile_text = "next compile" if compiled_layouts.layouts else "first compile"
        problem = f"The {compile_text} may not end within {limit_s:.0f} s, and its result would then be lost"
    elif missing > 1 and request.budget_s < _missing_s(request, compiled_layouts):
        problem = f"The budget may end before each of the {missing} slices has a compile"
    else:
        return lines
    budget = sufficient_budget(request, compiled_layouts)
    remedy = f"mode.budget={budget} is probably enough. Finished compiles are kept."
    if missing > 1:
        remedy += f" For a smaller question, search one slice: target={request.targets[0].name}."
    return [*lines, f"{problem}. {remedy} For estimates alone, in seconds: mode.compiles=0."]


def describe_missing_compiles(
    request: SearchRequest, rows: Sequence[RankedLayout], compiled_layouts: CompiledLayouts
) -> str:
    """Return a line with the slices of an answer that have only estimates because of the budget or an interrupt.

    Leaves out slices where no row may be better than the first one, unless nothing was compiled. The line ends with the
    command of the same search with a budget that probably suffices. Returns "" if no slice is left, if a layout was
    measured, or if compiling ended for another reason.
    """
    reason, budget_s = compiled_layouts.stop_reason, request.budget_s
    compiled = {describe_chips(layout.target) for layout in compiled_layouts.layouts}
    shown = [row for row in rows if not compiled or may_be_better(request, rows[0], row)]
    shown_chips = {describe_chips(target_slice(request, row)) for row in shown}
    missing = [target for chips, target in _compiled_kinds(request).items() if chips in shown_chips - compiled]
    is_measured = any(row.stage is Stage.measure for row in rows)
    is_cut_short = compiled_layouts.stop_cause in (StopCause.budget, StopCause.interrupt)
    if budget_s is None or not missing or is_measured or not is_cut_short:
        return ""
    stopped_s = max(_stopped_s(target, compiled_layouts) for target in missing)
    if not compiled:
        stopped_s = min(compiled_layouts.stopped_s or math.inf, FIRST_RESULT_FACTOR * budget_s)
    budget, names = sufficient_budget(request, compiled_layouts, stopped_s), [target.name for target in missing]
    text = f"No layout on {', '.join(names)} was compiled, so its rows are estimates: {reason}"
    if not compiled:
        text = f"Every number is an estimate, because no layout was compiled: {reason}"
    return (
        f"{text}. Finished compiles are kept. To continue, with a budget that is probably enough: "
        f"{search_command(request, f'mode.budget={budget}')}"
    )


def describe_rival_budget(
    request: SearchRequest, rows: Sequence[RankedLayout], compiled_layouts: CompiledLayouts
) -> list[str]:
    """Return a sentence with the limits of a search that probably suffice to compile the estimated rivals of an answer.

    They include the first row if it is only estimated, and its next larger batch, which searches compile before other
    layouts. The budget is the sum of the upper quartiles of their compile times. A compile that was stopped is a lower
    bound for the others on its chip, and the budget is at least twice that. Returns an empty list without rivals, if
    nothing was compiled, or if compiling ended for another reason than `mode.budget`, `mode.compiles` or Ctrl-C.
    """
    is_cut_short = compiled_layouts.stop_cause in (StopCause.budget, StopCause.compiles, StopCause.interrupt)
    places = [*([1] if rows[0].stage is Stage.estimate else []), *find_estimated_rivals(request, rows)]
    rivals = [place for place in places if rows[place - 1].compile]
    names = [name_rivals(rivals)] if rivals else []
    if rows[0].compile and (batch := find_uncompiled_batch(rows[0])) is not None:
        rivals, names = [1, *rivals], [f"#1 with batch={batch.batch}", *names]
    if not rivals or not is_cut_short or not compiled_layouts.layouts:
        return []
    targets, limits = [target_slice(request, rows[place - 1]) for place in rivals], list[str]()
    stopped_s = [_stopped_s(target, compiled_layouts) for target in targets]
    total_s = sum(max(durations_on(request, t).high_s, s) for t, s in zip(targets, stopped_s, strict=True))
    if request.budget_s is not None:
        limits.append(f"mode.budget={math.ceil(max(total_s, 2 * max(stopped_s)) / 60)}min")
    if (count := len(compiled_layouts.layouts) + len(rivals)) > request.mode.compiles:
        limits.append(f"mode.compiles={count}")
    text = f"With {' and '.join(limits)}, this search probably compiles {', '.join(names)}"
    return [f"{text}. Finished compiles are kept: {search_command(request, *limits)}"] if limits else []


def _missing_targets(request: SearchRequest, compiled_layouts: CompiledLayouts) -> list[TargetConfig]:
    """Return a slice of each kind of chips without a compile. If there are none, return the first slice."""
    compiled = {describe_chips(layout.target) for layout in compiled_layouts.layouts}
    missing = [target for chips, target in _compiled_kinds(request).items() if chips not in compiled]
    return missing or [request.targets[0]]


def _missing_s(request: SearchRequest, compiled_layouts: CompiledLayouts) -> float:
    """Return how long a compile on each kind of chips without one probably takes, in total: sum of upper quartiles."""
    return sum(durations_on(request, target).high_s for target in _missing_targets(request, compiled_layouts))


def _compiled_kinds(request: SearchRequest) -> dict[str, TargetConfig]:
    """Return the kinds and numbers of chips that this machine can compile for, each with the first such slice."""
    without_compiler, kinds = missing_compilers(request), dict[str, TargetConfig]()
    for target in request.targets:
        if target.name not in without_compiler:
            kinds.setdefault(describe_chips(target), target)
    return kinds
