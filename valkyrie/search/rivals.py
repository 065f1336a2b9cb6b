"""How sure the order of a search's answer is: the layouts that may be better than #1, and what would settle it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from valkyrie.problems import format_alternatives
from valkyrie.report.words import EQUAL_RATIO
from valkyrie.runs.columns import FORMATS
from valkyrie.search.answer import launch_command, layout_command
from valkyrie.search.answer_record import RankedLayout, Stage
from valkyrie.search.batches import describe_batch_rival
from valkyrie.search.compile.correction import SHARED_ERRORS, published_interval, published_runs_on
from valkyrie.search.local_devices import has_devices
from valkyrie.search.remarks import target_slice
from valkyrie.search.request import SearchRequest
from valkyrie.search.shortlist import describe_chips
from valkyrie.units import count_text, duration_text, percent_text

MAX_NAMED_RIVALS = 3
"""Maximum number of rivals that a line names. It counts the others."""
UNKNOWN_ERROR = 0.2
"""Relative error that is assumed for a row without an interval: the largest that is shown for chips without runs."""

_UNKNOWN_TEXT = f"an error of {percent_text(UNKNOWN_ERROR)} is assumed for unknown intervals"
_Cost = Callable[[RankedLayout], float]


def describe_certainty(
    request: SearchRequest, rows: Sequence[RankedLayout], compile_time: str, options: Sequence[str] = ()
) -> list[str]:
    """Return sentences on how sure it is that the first row is the best one.

    They name the next larger batch of the first row if it may be faster, the strongest rivals on the same chips and on
    other chips, the slice with the least accurate predictions, if their errors may decide, and the commands that would
    settle which row is better. If the first row is only estimated, that is the command that compiles it.

    Args:
        request: The search.
        rows: The rows of the answer, with their commands.
        compile_time: How long a compile of the first row takes, such as `about 49 to 81 s`.
        options: Overrides with the compiler options that the first row was compiled with.
    """
    lines = [*describe_ties(request, rows), *_describe_other_chips(request, rows, options)]
    batch_lines = describe_batch_rival(request, rows[0])
    if text := _compile_text(rows[0], f"To be surer, compile #1 first ({compile_time})"):
        return [*lines, text, *batch_lines]
    return [*batch_lines, *lines]


def describe_ties(request: SearchRequest, rows: Sequence[RankedLayout]) -> list[str]:
    """Return lines with the rows on the same chips that are as good as the first one, or may be better.

    Only times of the same source, compiled or measured, are called equal. Compiled rows on the same chips share their
    errors, so overlapping intervals do not make their order unsure, and a line says so. The last lines have the
    estimated rows that are probably below the time of the first row once compiled, and those that may be below it by
    more than `EQUAL_RATIO` (`RankedLayout.compiled_ratios`), with the better ranked ones whose estimates are surer.
    """
    best, cost, better = rows[0], _cost_function(request), _better(request)
    tied, unsure, below, behind, surer = list[int](), list[int](), list[int](), list[int](), list[int]()
    for place, row in _on_chips(request, rows, _chips(request, best)):
        relative_cost = cost(row) / cost(best)
        low, high = row.compiled_ratios
        if row.stage is not Stage.estimate:
            if row.stage is best.stage and relative_cost <= EQUAL_RATIO:
                tied.append(place)
            elif row.stage is best.stage is Stage.compile and _intervals_overlap(relative_cost, best, row):
                behind.append(place)
        elif relative_cost * high < 1:
            below.append(place)
        elif relative_cost * low < 1 / EQUAL_RATIO:
            unsure.append(place)
        else:
            surer.append(place)
    highest_cost = max((cost(rows[place - 1]) for place in unsure), default=0.0)
    surer = [place for place in surer if cost(rows[place - 1]) < highest_cost]
    lines, tolerance = [], percent_text(EQUAL_RATIO - 1)
    if tied:
        lines.append(f"As {better.removesuffix('er')} as #1, within {tolerance}: {name_rivals(tied)}.")
    if behind:
        text = f"Intervals overlap, but {SHARED_ERRORS}, so the order is surer than the intervals"
        lines.append(f"#1 is {better} than {name_rivals(behind)}. {text}.")
    strongest = sorted(unsure, key=lambda place: _log_distance(request, best, rows[place - 1]))
    order = ", the likeliest first" if len(unsure) > 1 else ""
    for places, text, why in (
        (below, f"Estimated to be {better} than #1, but neither compiled nor measured", ""),
        (strongest, f"Only estimated, and may be more than {tolerance} {better} than #1{order}", _surer_text(surer)),
    ):
        if places:
            settle = _compile_text(rows[places[0] - 1], f" To settle it, compile #{places[0]}")
            lines.append(f"{text}: {name_rivals(places)}.{why}{settle if best.stage is not Stage.estimate else ''}")
    return lines


def find_estimated_rivals(request: SearchRequest, rows: Sequence[RankedLayout]) -> list[int]:
    """Return the places of the estimated rows that may be better than the first one.

    These are the estimated ones that `describe_certainty` names or counts: rows on the same chips, and the best row on
    each other kind and number of chips.
    """
    best, cost, places = rows[0], _cost_function(request), list[int]()
    own_chips, seen_chips = _chips(request, best), set[str]()
    for place, row in enumerate(rows[1:], start=2):
        chips, relative_cost, (low, high) = _chips(request, row), cost(row) / cost(best), row.compiled_ratios
        if chips == own_chips:
            is_rival = relative_cost * high < 1 or relative_cost * low < 1 / EQUAL_RATIO
        else:
            is_rival = chips not in seen_chips and may_be_better(request, best, row)
        seen_chips.add(chips)
        if is_rival and row.stage is Stage.estimate:
            places.append(place)
    return places


def name_rivals(places: Sequence[int]) -> str:
    """Name the first `MAX_NAMED_RIVALS` of these places, and count the others: `#2, #4, #5 and 1 more`."""
    named = [f"#{place}" for place in places[:MAX_NAMED_RIVALS]]
    others = len(places) - len(named)
    return f"{', '.join(named)} and {others} more" if others else ", ".join(named)


def _surer_text(places: Sequence[int]) -> str:
    """Return a sentence why these rows are no rivals although they are above one, or "" if there are none."""
    if not places:
        return ""
    why = "is less likely to be, because its estimate is" if len(places) == 1 else ""
    return f" {name_rivals(places)} {why or 'are less likely to be, because their estimates are'} surer."


def _describe_other_chips(request: SearchRequest, rows: Sequence[RankedLayout], options: Sequence[str]) -> list[str]:
    """Compare the first row with the best one on each other kind and number of chips. Empty without other chips."""
    best, better = rows[0], _better(request)
    places: dict[str, int] = {}
    for place, row in enumerate(rows, start=1):
        places.setdefault(_chips(request, row), place)
    others = sorted([*places.values()][1:], key=lambda place: _log_distance(request, best, rows[place - 1]))
    rivals = [place for place in others if may_be_better(request, best, rows[place - 1])]
    relevant_rows = [best, *(rows[place - 1] for place in rivals)]
    accuracy = _describe_accuracy(request, relevant_rows, [rows[place - 1] for place in others])
    if not rivals:
        return [*_describe_worse_chips(request, rows, others), *accuracy]
    place, rival, named = rivals[0], rows[rivals[0] - 1], rivals[:MAX_NAMED_RIVALS]
    text = format_alternatives(None, [_describe_row(rows[place - 1], place) for place in named])
    text += f" (and {count_text(len(rivals) - len(named), 'more slice')})" if len(rivals) > len(named) else ""
    why = "their intervals overlap" if best.interval and rival.interval else _UNKNOWN_TEXT
    why = "compiled steps may differ from estimates by as much" if _share_errors(request, best, rival) else why
    lines = [f"Not sure: {text} may really be {better} than {_describe_row(best, 1)}, because {why}.", *accuracy]
    if best.stage is Stage.estimate:
        return lines
    if settle := _compile_text(rival, f"To settle it, first compile #{place}"):
        return [*lines, settle]
    return [*lines, _measure_text(request, rows, place, options)]


def _describe_worse_chips(request: SearchRequest, rows: Sequence[RankedLayout], places: Sequence[int]) -> list[str]:
    """Return sentences that #1 is better than the rows at these places, which are the best ones on other slices."""
    best, better, lines = rows[0], _better(request), []
    for shares_errors, why in (
        (False, "even at the slow end of its interval and their fast ends"),
        (True, f"although intervals may overlap: {SHARED_ERRORS}"),
    ):
        worse = [place for place in places if _share_errors(request, best, rows[place - 1]) is shares_errors]
        names = [target_slice(request, rows[place - 1]).name for place in worse]
        if worse and (shares_errors or all(rows[place - 1].interval for place in [1, *worse])):
            lines.append(f"#1 is {better} than every row on {format_alternatives(None, names)}, {why}.")
    return lines


def _describe_accuracy(
    request: SearchRequest, rows: Sequence[RankedLayout], others: Sequence[RankedLayout]
) -> list[str]:
    """Return a sentence that names the chip with the least accurate predictions, and the runs behind them.

    Empty if this is not the chip of one of `rows`, which are #1 and those that may be better, if the predictions for
    all chips are as accurate, or for chips or models without published runs. `others` are on the other chips.
    """
    errors: dict[str, float] = {}
    recipes: dict[str, int] = {}
    for row in [*rows, *others]:
        chip = target_slice(request, row).chip
        if chip is None or chip.replay.factor is not None or row.interval is None:
            return []
        runs = published_runs_on(chip.platform)
        if (interval := published_interval(runs, chip.name, 1.0)) is None:
            return []
        errors[chip.name] = interval.high - 1
        recipes[chip.name] = len({run.family for run in runs if run.chip == chip.name})
    if len(errors) < 2 or max(errors.values()) - min(errors.values()) < 0.005:
        return []
    worst = max(errors, key=lambda name: errors[name])
    if not any(chip and chip.name == worst for chip in (target_slice(request, row).chip for row in rows)):
        return []
    texts = {name: f"up to {percent_text(error)} ({_recipes_text(recipes[name])})" for name, error in errors.items()}
    other_texts = [f"those for {name} by {text}" for name, text in texts.items() if name != worst]
    return [
        f"Compiled predictions are the least accurate for {worst}: off by {texts[worst]}, {', '.join(other_texts)}."
    ]


def _recipes_text(count: int) -> str:
    return f"known from {count_text(count, 'published recipe')}" if count else "no published run"


def _describe_row(row: RankedLayout, place: int) -> str:
    interval = "interval unknown" if row.interval is None else FORMATS["range"](row.interval)
    return f"#{place} on {row.candidate.target} ({row.stage.adjective}, {interval})"


def _compile_text(row: RankedLayout, text: str) -> str:
    """Return `text` with the command that compiles an estimated row, or "" if it cannot be compiled on this machine."""
    return f"{text}: {row.compile}" if row.stage is Stage.estimate and row.compile else ""


def _measure_text(request: SearchRequest, rows: Sequence[RankedLayout], place: int, options: Sequence[str]) -> str:
    """Return a sentence with the command that measures the first row, and its step time above which a rival is better.

    Without the command, if Valkyrie cannot rent these slices.
    """
    best, cost, better = rows[0], _cost_function(request), _better(request)
    limit = duration_text(best.step_s * cost(rows[place - 1]) / cost(best))
    text = f"To settle it, measure #1 on {best.candidate.target}: above {limit} a step, #{place} is {better}"
    command = layout_command(request, best, ["mode=measure"], options)
    if not has_devices(target_slice(request, best)):
        command = launch_command(request, best, command)
    return f"{text}." if command is None else f"{text}: {command}"


def _better(request: SearchRequest) -> str:
    return "cheaper" if request.ranks_by_price else "faster"


def _cost_function(request: SearchRequest) -> _Cost:
    """Return the function that rows are ranked by: dollars per token, or else step time or chip-seconds per token."""
    if request.ranks_by_price:
        return lambda row: row.usd_per_million_tokens or math.inf
    return (lambda row: 1 / row.tokens_per_second_per_chip) if request.search_batch else (lambda row: row.step_s)


def _share_errors(request: SearchRequest, first: RankedLayout, second: RankedLayout) -> bool:
    """Return whether two rows are predicted for the same kind of chip, so that errors of compiled steps cancel."""
    if Stage.measure in (first.stage, second.stage):
        return False
    chips = [target_slice(request, row).chip for row in (first, second)]
    return chips[0] is not None and chips[1] is not None and chips[0].name == chips[1].name


def _ends(row: RankedLayout, *, shares_errors: bool) -> tuple[float, float]:
    """Return the ends of a row's interval, or of the assumed one, relative to its step time.

    With `shares_errors`, only the error of an estimate against a compiled step counts.
    """
    if shares_errors:
        return row.compiled_ratios
    if row.stage is not Stage.measure and row.interval is None:
        return 1 / (1 + UNKNOWN_ERROR), 1 + UNKNOWN_ERROR
    return row.low_s / row.step_s, row.high_s / row.step_s


def may_be_better(request: SearchRequest, best: RankedLayout, row: RankedLayout) -> bool:
    """Return whether the intervals of two rows overlap. Assumes `UNKNOWN_ERROR` for a row without one.

    Predictions for the same kind of chip share the errors of compiled steps, so only those of estimates count.
    """
    cost, shares_errors = _cost_function(request), _share_errors(request, best, row)
    low, high = _ends(row, shares_errors=shares_errors)[0], _ends(best, shares_errors=shares_errors)[1]
    return cost(row) * low < cost(best) * high


def _intervals_overlap(relative_cost: float, best: RankedLayout, row: RankedLayout) -> bool:
    """Return whether two rows have intervals that overlap. `relative_cost` is that of `row` relative to `best`."""
    has_intervals = best.interval is not None and row.interval is not None
    return has_intervals and relative_cost * row.low_s / row.step_s < best.high_s / best.step_s


def _log_distance(request: SearchRequest, best: RankedLayout, row: RankedLayout) -> float:
    """Return the distance of two rows in units of the widths of their intervals. Strong rivals have a small one."""
    cost, shares_errors = _cost_function(request), _share_errors(request, best, row)
    (best_low, best_high), (low, high) = (_ends(each, shares_errors=shares_errors) for each in (best, row))
    return math.log(cost(row) / cost(best)) / (math.hypot(math.log(best_high / best_low), math.log(high / low)) or 1e-9)


def _on_chips(request: SearchRequest, rows: Sequence[RankedLayout], chips: str) -> list[tuple[int, RankedLayout]]:
    """Return the places and rows after the first that are on these chips."""
    return [(place, row) for place, row in enumerate(rows[1:], start=2) if _chips(request, row) == chips]


def _chips(request: SearchRequest, row: RankedLayout) -> str:
    return describe_chips(target_slice(request, row))
