"""Markdown tables that compare predicted with published step times: rows, errors by chip and family, pairs."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from guesses import Row, constant_mfu, ordered_pairs, roofline

from valkyrie.search.compile.correction import PublishedRun, published_correction, published_interval

Result = dict[str, Any]
KINDS = ("predicted", "replayed", "mfu", "roofline")
_MIN_RATE_DIFFERENCE = 0.02
"""Published rates that differ by less than this fraction may differ only by the noise of repeated runs."""
TITLES = {"predicted": "prediction", "replayed": "replay alone", "mfu": "constant MFU", "roofline": "roofline"}


def add_guesses(result: Result, row: Row, rows: Sequence[Row], published: Sequence[PublishedRun]) -> Result:
    """Add measured, predicted and guessed times to a result.

    `seconds_by` and `errors` are dicts with `KINDS` as keys. The prediction is the replay, corrected by the published
    runs of other families. An error is seconds over measured seconds, minus 1. Both are None if a time is unknown.
    """
    replayed = result.get("replayed_s")
    correction = published_correction(published, row.chip, row.slices, without=row.family).factor
    seconds = {"predicted": correction * replayed if replayed else None, "replayed": replayed}
    seconds |= {"mfu": constant_mfu(row, rows), "roofline": roofline(row)}
    errors = {kind: None if s is None else s / row.measured_s - 1 for kind, s in seconds.items()}
    facts = {"family": row.family, "model": row.model, "chip": row.chip, "layout": row.layout, "slices": row.slices}
    return result | facts | {"measured_s": row.measured_s, "seconds_by": seconds, "errors": errors}


def format_tables(results: Sequence[Result], published: Sequence[PublishedRun]) -> str:
    """Return the table of rows in Markdown, followed by the tables of `error_summary` and `interval_coverage`."""
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
    return "\n".join([*lines, "", *error_summary(results), "", interval_coverage(published)])


def error_summary(results: Sequence[Result]) -> list[str]:
    """Return the lines of a table of errors by chip and family: median, p90 and worst for each of `KINDS`."""
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
    versions = ", ".join(sorted({r["libtpu"] for r in predicted}))
    return [*lines, "", f"{len(predicted)} of {len(results)} rows predicted, by libtpu {versions}."]


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
    """Return the ratio of measured to replayed seconds of every replayed row, for the corrections in reports."""
    return [
        PublishedRun(
            r["row"], row.model, row.family, row.chip, row.slices, row.measured_s / r["replayed_s"], r["libtpu"]
        )
        for r in results
        if r.get("replayed_s") and (row := rows.get(r["row"])) is not None
    ]


def interval_coverage(published: Sequence[PublishedRun]) -> str:
    """Return a sentence with the number of measured steps within the report's interval, by chip.

    The prediction and the interval of each run are computed from the runs of other families.
    """
    inside_by_chip: dict[str, list[bool]] = defaultdict(list)
    for row in published:
        others = [other for other in published if other.family != row.family]
        ratio = row.ratio / published_correction(others, row.chip, row.slices).factor
        if (interval := published_interval(others, row.chip, 1.0)) is not None:
            inside_by_chip[row.chip].append(interval.low <= ratio <= interval.high)
    counts = ", ".join(f"{chip} {sum(flags)} of {len(flags)}" for chip, flags in sorted(inside_by_chip.items()))
    return f"Measured within the interval computed without the runs of its recipe: {counts}."


def format_pair_table(results: Iterable[Result], rows: Iterable[Row]) -> str:
    """Return a table of the number of pairs that are predicted in the measured order, by model and chip.

    A pair is two rows of the same model and chip, ordered by tokens/s/chip. Equal predictions count as missed. Missed
    pairs are listed below the table. The constant MFU is left out, because it predicts each layout of a pair from the
    measured time of the other.
    """
    by_name = {row.row: row for row in rows}
    predictions = {r["row"]: r.get("seconds_by", {}).get("predicted") for r in results if r["row"] in by_name}
    predicted = {name: seconds for name, seconds in predictions.items() if seconds}
    compared = [by_name[name] for name in predicted]
    all_pairs, distinct_pairs = ordered_pairs(compared), ordered_pairs(compared, _MIN_RATE_DIFFERENCE)
    share = f"{100 * _MIN_RATE_DIFFERENCE:.0f}%"
    lines = [f"| order of pairs of one model | more than {share} apart: right | all: right |", "|---|---:|---:|"]
    kinds = sorted({(fast.chip, fast.model) for fast, _ in all_pairs})
    for name, group_kinds in [*((f"{model} on {chip}", {(chip, model)}) for chip, model in kinds), ("all", {*kinds})]:
        cells = []
        for group in (distinct_pairs, all_pairs):
            group_pairs = [pair for pair in group if (pair[0].chip, pair[0].model) in group_kinds]
            cells.append(f"{sum(_is_predicted_faster(*pair, predicted) for pair in group_pairs)} of {len(group_pairs)}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    missed = [(fast, slow) for fast, slow in all_pairs if not _is_predicted_faster(fast, slow, predicted)]
    return "\n".join([*lines, "", *(f"missed: {fast.row} is faster than {slow.row}" for fast, slow in missed)])


def _is_predicted_faster(fast: Row, slow: Row, predicted: dict[str, float]) -> bool:
    return fast.tokens_per_chip / predicted[fast.row] > slow.tokens_per_chip / predicted[slow.row]
