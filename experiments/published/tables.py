"""Markdown tables that compare predicted with published step times: rows, errors by chip and family, pairs."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from guesses import Row, constant_mfu_s, ordered_pairs, roofline_s

from valkyrie.hardware.chips import known_chips
from valkyrie.hardware.platforms import get_platform
from valkyrie.search.compile.correction import PublishedRun, published_correction, published_interval

Result = dict[str, Any]
KINDS = ("predicted", "replayed", "mfu", "roofline")
_MIN_RATE_DIFFERENCE = 0.02
"""Published rates that differ by less than this fraction may differ only by the noise of repeated runs."""
TITLES = {"predicted": "prediction", "replayed": "replay alone", "mfu": "constant MFU", "roofline": "roofline"}


def add_guesses(result: Result, row: Row, rows: Sequence[Row], published: Sequence[PublishedRun]) -> Result:
    """Return a copy of a result with facts about its row, the measured seconds, and the time and error of each guess.

    `seconds_by` and `errors` are dicts with `KINDS` as keys. The prediction is the replayed time, corrected by the
    published runs of other families. The constant MFU comes from the other `rows`. An error is a guess over measured
    seconds, minus 1. The seconds and the error of a guess are None if unknown.
    """
    replayed = result.get("replayed_s")
    correction = published_correction(published, row.chip, row.slices, held_out_family=row.family).factor
    seconds = {"predicted": correction * replayed if replayed else None, "replayed": replayed}
    seconds |= {"mfu": constant_mfu_s(row, rows), "roofline": roofline_s(row)}
    errors = {kind: None if s is None else s / row.measured_s - 1 for kind, s in seconds.items()}
    facts = {"family": row.family, "model": row.model, "chip": row.chip, "layout": row.layout, "slices": row.slices}
    return result | facts | {"measured_s": row.measured_s, "seconds_by": seconds, "errors": errors}


def format_tables(results: Sequence[Result], published: Sequence[PublishedRun]) -> str:
    """Return a Markdown table of all results, and the tables of `error_summary` and `format_intervals`."""
    lines = [
        "| published run | layout | measured s | predicted s | error | replay alone s | error | constant MFU s | error "
        "| roofline s | error |"
    ]
    lines.append("|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    for r in results:
        cells = [f"{r['measured_s']:.3f}" if "measured_s" in r else ""]
        for kind in KINDS:
            seconds, error = (r.get(key, {}).get(kind) for key in ("seconds_by", "errors"))
            mark = "†" if kind == "replayed" and r.get("earlier") else ""
            cells += ["", ""] if seconds is None else [f"{seconds:.3f}{mark}", f"{100 * error:+.1f}%"]
        if r["status"] != "ok":
            cells[1] = f"{r['status']}: {r['reason']}"
        lines.append(f"| {r['row']} | {r.get('layout', '')} | {' | '.join(cells)} |")
    if any(r.get("earlier") for r in results):
        lines += ["", "†: of an earlier program, replay or compiler than this one."]
    return "\n".join([*lines, "", *error_summary(results), "", *format_intervals(published)])


def error_summary(results: Sequence[Result]) -> list[str]:
    """Return the lines of a Markdown table of absolute errors: median, 90th percentile and worst for each of `KINDS`.

    The table has a row for each chip, for each family and for all results. It covers only results with a prediction.
    The last line has their number and the versions of the compilers. If there are none, a single line says so.
    """
    predicted = [r for r in results if r.get("errors", {}).get("predicted") is not None]
    if not predicted:
        return ["No row was predicted."]
    lines = [f"| rows | n | {' | '.join(f'{TITLES[kind]}: median, p90, worst' for kind in KINDS)} |"]
    lines.append("|---|---:|---:|---:|---:|---:|")
    chips, families = (sorted({r[key] for r in predicted}) for key in ("chip", "family"))
    groups: list[tuple[str, Callable[[Result], bool]]] = [(chip, lambda r, c=chip: r["chip"] == c) for chip in chips]
    groups += [(family, lambda r, f=family: r["family"] == f) for family in families]
    for name, is_in_group in [*groups, ("all", lambda r: True)]:
        rows = [r for r in predicted if is_in_group(r)]
        lines.append(f"| {name} | {len(rows)} | {' | '.join(_format_errors(rows, kind) for kind in KINDS)} |")
    versions = ", ".join(sorted({f"{_compiler_package(r['chip'])} {r['libtpu']}" for r in predicted}))
    return [
        *lines,
        "",
        f"{len(predicted)} of {len(results)} rows predicted, by {versions}.",
    ]


def _compiler_package(chip: str) -> str:
    known = known_chips().get(chip)
    return get_platform(known.platform if known else "tpu").compiler_packages[0]


def _format_errors(results: Iterable[Result], kind: str) -> str:
    """Return the median, 90th percentile and worst absolute error of one of `KINDS`, in percent.

    The percentile is the smallest error that 90% of the rows do not exceed. Rows without a time of this kind are left
    out. If no row has one, returns a text that says so.
    """
    errors = sorted(100 * abs(r["errors"][kind]) for r in results if r["errors"][kind] is not None)
    if not errors:
        return "no other row on the chip"
    return f"{statistics.median(errors):.1f}%, {errors[math.ceil(0.9 * len(errors)) - 1]:.1f}%, {errors[-1]:.1f}%"


def published_ratios(results: Iterable[Result], rows: dict[str, Row]) -> list[PublishedRun]:
    """Return the replayed results as published runs, with the ratio of measured to replayed seconds.

    Reports derive their corrections from these ratios. Results that were not replayed, or that have no row in `rows`,
    are left out.
    """
    return [
        PublishedRun(
            r["row"], row.model, row.family, row.chip, row.slices, row.measured_s / r["replayed_s"], r["libtpu"]
        )
        for r in results
        if r.get("replayed_s") and (row := rows.get(r["row"])) is not None
    ]


def interval_coverage(published: Sequence[PublishedRun]) -> list[tuple[str, int, int]]:
    """Count the published runs of each chip with a measured time within the predicted interval.

    Returns the chips with the number of such runs and that of all runs. The prediction and the interval of a run are
    computed from the runs of other families. A run is not counted if those are too few for an interval
    (`published_interval`).
    """
    inside_by_chip: dict[str, list[bool]] = defaultdict(list)
    for row in published:
        others = [other for other in published if other.family != row.family]
        ratio = row.ratio / published_correction(others, row.chip, row.slices).factor
        if (interval := published_interval(others, row.chip, 1.0)) is not None:
            inside_by_chip[row.chip].append(interval.low <= ratio <= interval.high)
    return [(chip, sum(flags), len(flags)) for chip, flags in sorted(inside_by_chip.items())]


def format_intervals(published: Sequence[PublishedRun]) -> list[str]:
    """Return the lines of a Markdown table of the intervals by chip, and the shares of `interval_coverage`."""
    lines = ["| chip | interval | measured within the interval computed without the runs of its recipe |"]
    lines.append("|---|---:|---:|")
    for chip, inside, count in interval_coverage(published):
        interval = published_interval(published, chip, 1.0)
        assert interval is not None  # it has no fewer runs than those without a recipe
        ends = f"{100 * (interval.low - 1):+.0f}% to {100 * (interval.high - 1):+.0f}%"
        lines.append(f"| {chip} | {ends} | {inside} of {count} ({100 * inside / count:.0f}%) |")
    return lines


def format_pair_table(results: Iterable[Result], rows: Iterable[Row]) -> str:
    """Return a Markdown table that counts the pairs of rows with the right predicted order, by model and chip.

    A pair is two predicted rows of one model and chip with different measured tokens/s/chip. The first column counts
    only pairs that differ by more than `_MIN_RATE_DIFFERENCE`, the second all pairs. Equal predictions count as missed.
    All missed pairs are listed below the table. The constant-MFU guess is left out, because it predicts a
    row from the measured times of other rows, including the other row of the pair.
    """
    by_name = {row.row: row for row in rows}
    predictions = {r["row"]: r.get("seconds_by", {}).get("predicted") for r in results if r["row"] in by_name}
    predicted = {name: seconds for name, seconds in predictions.items() if seconds}
    compared = [by_name[name] for name in predicted]
    all_pairs, distinct_pairs = ordered_pairs(compared), ordered_pairs(compared, _MIN_RATE_DIFFERENCE)
    share = f"{100 * _MIN_RATE_DIFFERENCE:.0f}%"
    lines = [f"| order of pairs of one model | more than {share} apart: right | all: right |", "|---|---:|---:|"]
    chip_models = sorted({(fast.chip, fast.model) for fast, _ in all_pairs})
    for name, group_kinds in [
        *((f"{model} on {chip}", {(chip, model)}) for chip, model in chip_models),
        ("all", {*chip_models}),
    ]:
        cells = []
        for group in (distinct_pairs, all_pairs):
            group_pairs = [pair for pair in group if (pair[0].chip, pair[0].model) in group_kinds]
            cells.append(f"{sum(_is_predicted_faster(*pair, predicted) for pair in group_pairs)} of {len(group_pairs)}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    missed = [(fast, slow) for fast, slow in all_pairs if not _is_predicted_faster(fast, slow, predicted)]
    return "\n".join([*lines, "", *(f"missed: {fast.row} is faster than {slow.row}" for fast, slow in missed)])


def _is_predicted_faster(fast: Row, slow: Row, predicted: dict[str, float]) -> bool:
    return fast.tokens_per_chip / predicted[fast.row] > slow.tokens_per_chip / predicted[slow.row]
