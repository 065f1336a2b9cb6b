"""The tables of predicted against published step times: row by row, by chip, by family, and by order."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from guesses import Row, constant_mfu, pairs, roofline

from valkyrie.search.trust import Published, interval

Result = dict[str, Any]
KINDS = ("predicted", "mfu", "roofline")
TITLES = {"predicted": "prediction", "mfu": "constant MFU", "roofline": "roofline"}


def with_guesses(result: Result, row: Row, rows: Sequence[Row]) -> Result:
    """Return a result with what was measured and guessed, and the error of each: seconds over measured, less 1."""
    seconds = {"predicted": result.get("predicted_s"), "mfu": constant_mfu(row, rows), "roofline": roofline(row)}
    errors = {kind: None if s is None else s / row.measured_s - 1 for kind, s in seconds.items()}
    known = {"family": row.family, "model": row.model, "chip": row.chip, "layout": row.layout}
    return result | known | {"measured_s": row.measured_s, "seconds_by": seconds, "errors": errors}


def markdown(results: Sequence[Result]) -> str:
    """Return the table row by row, and its summary under it: errors by chip, by family, of all."""
    lines = [
        "| published run | layout | measured s | predicted s | error | constant MFU s | error | roofline s | error |"
    ]
    lines.append("|---|---|---:|---:|---:|---:|---:|---:|---:|")
    for r in results:
        cells = [f"{r['measured_s']:.3f}" if "measured_s" in r else ""]
        for kind in KINDS:
            seconds, error = (r.get(key, {}).get(kind) for key in ("seconds_by", "errors"))
            mark = "†" if kind == "predicted" and r.get("earlier") else ""
            cells += ["", ""] if seconds is None else [f"{seconds:.3f}{mark}", f"{100 * error:+.1f}%"]
        if r["status"] != "ok":
            cells[1] = f"{r['status']}: {r['reason']}"
        lines.append(f"| {r['row']} | {r.get('layout', '')} | {' | '.join(cells)} |")
    if any(r.get("earlier") for r in results):
        lines += ["", "†: of an earlier program, replay or compiler than this one."]
    return "\n".join([*lines, "", *summary(results), "", coverage(results)])


def summary(results: Sequence[Result]) -> list[str]:
    """Return the table of median absolute error, p90 and worst of the prediction and of both guesses."""
    predicted = [r for r in results if r.get("errors", {}).get("predicted") is not None]
    if not predicted:
        return ["No row was predicted."]
    lines = [f"| rows | n | {' | '.join(f'{TITLES[kind]}: median, p90, worst' for kind in KINDS)} |"]
    lines.append("|---|---:|---:|---:|---:|")
    chips, families = (sorted({r[key] for r in predicted}) for key in ("chip", "family"))
    groups: list[tuple[str, Callable[[Result], bool]]] = [(chip, lambda r, c=chip: r["chip"] == c) for chip in chips]
    groups += [(family, lambda r, f=family: r["family"] == f) for family in families]
    for name, within in [*groups, ("all", lambda r: True)]:
        rows = [r for r in predicted if within(r)]
        lines.append(f"| {name} | {len(rows)} | {' | '.join(_spread(rows, kind) for kind in KINDS)} |")
    versions = ", ".join(sorted({r["libtpu"] for r in predicted}))
    return [*lines, "", f"{len(predicted)} of {len(results)} rows predicted, by libtpu {versions}."]


def _spread(results: Iterable[Result], kind: str) -> str:
    """Return median, 90th percentile (the smallest error that nine tenths of the rows do not exceed) and worst."""
    errors = sorted(100 * abs(r["errors"][kind]) for r in results if r["errors"][kind] is not None)
    if not errors:
        return "no other row on the chip"
    return f"{statistics.median(errors):.1f}%, {errors[math.ceil(0.9 * len(errors)) - 1]:.1f}%, {errors[-1]:.1f}%"


def shipped_errors(results: Iterable[Result]) -> list[Published]:
    """Return what reports hold their predictions to: measured over predicted seconds of every row."""
    return [
        Published(r["row"], r["model"], r["family"], r["chip"], r["measured_s"] / r["predicted_s"], r["libtpu"])
        for r in results
        if r.get("predicted_s") and "measured_s" in r
    ]


def coverage(results: Sequence[Result]) -> str:
    """Return how many measured steps lie in the interval that a report would have given without the row's family."""
    inside, total, rows = 0, 0, shipped_errors(results)
    for row in rows:
        found = interval(rows, row.chip, row.model)
        if found is not None:
            total, inside = total + 1, inside + (found.low <= row.ratio <= found.high)
    return f"Measured within the interval earned on the other families: {inside} of {total}."


def order(results: Iterable[Result], rows: Iterable[Row]) -> str:
    """Return in how many pairs of rows of one model on one chip the faster one is predicted to be faster.

    By tokens/s/chip. Equal predictions name neither, and count as missed. The constant MFU is not asked: it ranks
    layouts of one model by what it was told of the other.
    """
    by_name = {row.row: row for row in rows}
    predicted = {r["row"]: r["predicted_s"] for r in results if r.get("predicted_s") and r["row"] in by_name}
    lines = []
    for share in (0.0, 0.02):
        found = pairs([by_name[name] for name in predicted], share)
        missed = [(fast, slow) for fast, slow in found if not _faster(fast, slow, predicted)]
        apart = f" that differ by more than {100 * share:.0f}%" if share else ""
        right = len(found) - len(missed)
        lines.append(f"Order: of {len(found)} pairs{apart} the measured faster one is named in {right}.")
        if not share:
            lines += [f"  missed: {fast.row} is faster than {slow.row}" for fast, slow in missed]
    return "\n".join(lines)


def _faster(fast: Row, slow: Row, predicted: dict[str, float]) -> bool:
    return fast.tokens_per_chip / predicted[fast.row] > slow.tokens_per_chip / predicted[slow.row]
