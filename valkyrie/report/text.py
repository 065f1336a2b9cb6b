"""Decides how a report looks without a browser: Markdown for people, CSV for programs."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from valkyrie.report import words
from valkyrie.report.rank import Comparison, best_per_target, groups, memory_of, refusals, unbeaten
from valkyrie.report.records import Row
from valkyrie.report.values import labels
from valkyrie.search.units import duration, memory, sent
from valkyrie.sweep.trial import Status

_CSV = {
    "sweep": lambda r: r.sweep,
    "name": lambda r: r.trial.name,
    "key": lambda r: r.trial.key,
    "stage": lambda r: r.trial.stage,
    "status": lambda r: r.trial.status.value,
    "simulated": lambda r: str(r.group.simulated).lower(),
    "target": lambda r: r.group.target,
    "chips": lambda r: r.chips,
    "model": lambda r: r.work.model,
    "batch": lambda r: r.work.batch,
    "seq": lambda r: r.work.seq,
    "precision": lambda r: r.work.precision,
    "varied": lambda r: " ".join(r.work.varied),
    "parameters": lambda r: r.trial.results.get("parameters"),
    "layout": lambda r: r.layout,
    "mesh": lambda r: r.mesh,
    "partition": lambda r: r.partition,
    "step_s": lambda r: r.step_s,
    "p90_s": lambda r: r.p90_s,
    "min_s": lambda r: r.min_s,
    "tokens_per_second": lambda r: r.rate,
    "tokens_per_second_per_chip": lambda r: r.rate_per_chip,
    "mfu": lambda r: r.mfu,
    "peak_bytes": lambda r: r.held,
    "usable_bytes": lambda r: r.usable,
    "sent_bytes": lambda r: sum(r.sent.values()) if r.sent else None,
    "exposed_s": lambda r: r.exposed_s,
    "dollars_per_million_tokens": lambda r: r.per_million,
    "reason": lambda r: r.reason,
}


def as_csv(rows: Sequence[Row]) -> str:
    """Return one line for each trial, ranked; seconds and bytes, degrees of the layout last, empty where unknown."""
    ordered = [row for members in groups(rows).values() for row in members]
    kinds = list(dict.fromkeys(kind for row in ordered for kind in row.degrees))
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([*_CSV, *kinds])
    for row in ordered:
        writer.writerow([*(value(row) for value in _CSV.values()), *(row.degrees.get(kind) for kind in kinds)])
    return stream.getvalue()


def as_markdown(rows: Sequence[Row], comparison: Comparison | None = None) -> str:
    """Return the report as Markdown: what the numbers say, a ranked table for each kind of speed, and refusals."""
    said = [f"# {', '.join(dict.fromkeys(row.sweep for row in rows))}", "", words.summary(rows), ""]
    best = best_per_target(rows)
    if len(best) > 1:
        heads = ["speed is", "work", "best layout", "tokens/s/chip", "$/Mtok"]
        body = [[r.group.label, r.work.label, r.layout, _speed(r, r.rate_per_chip), _price(r)] for r in best]
        said += ["## Best of each target", "", *_table(heads, body, "lllrr"), ""]
    for group, members in groups(rows).items():
        first, *others = words.answer(group, members)
        said += [f"## {group.label[0].upper()}{group.label[1:]}", "", first, ""]
        said += [*(f"- {line}" for line in others), ""] if others else []
        said += [*_ranked(members), ""] if any(map(_told, members)) else []
    said += [*(f"{line}\n" for line in words.price_lines(rows))]
    if comparison is not None:
        said += [*_compared(comparison), ""]
    without = refusals(rows)
    if without:
        said += ["## Without a result", ""]
        for _, reason, members in without:
            listed = ", ".join(dict.fromkeys(row.layout for row in members))
            said.append(f"- **{members[0].status}** ({len(members)}): {' '.join(reason.split())} — {listed}")
        said.append("")
    return "\n".join(said)


def _told(row: Row) -> bool:
    """Return whether a row has a speed, or ended well with something else to tell."""
    return row.ok or (row.trial.status is Status.ok and bool(row.held or row.sent))


def _ranked(rows: Sequence[Row]) -> list[str]:
    named, light = labels(rows), unbeaten(rows, memory_of)
    heads = ["#", "layout", "tokens/s/chip", "tokens/s", "step", "MFU", "memory", "sent", "$/Mtok", "front"]
    body = [
        [
            str(place) if row.ok else "",
            named[row.id],
            _speed(row, row.rate_per_chip),
            _speed(row, row.rate),
            _step(row),
            "" if row.mfu is None else f"{100 * row.mfu:.1f}%",
            "" if row.held is None else memory(row.held),
            sent(sum(row.sent.values())) if row.sent else "",
            _price(row),
            "*" if row.id in light else "",
        ]
        for place, row in enumerate(filter(_told, rows), 1)
    ]
    return _table(heads, body, "rlrrrrrrrl")


def _compared(comparison: Comparison) -> list[str]:
    a, b, named = comparison.a, comparison.b, labels([pair.a for pair in comparison.pairs])
    body = [
        [
            named[pair.a.id],
            pair.a.group.label,
            _speed(pair.a, pair.a.rate_per_chip),
            _speed(pair.b, pair.b.rate_per_chip),
            f"{pair.ratio:.2f}x" if pair.ratio else "",
        ]
        for pair in comparison.pairs
    ]
    heads = ["layout", "speed is", f"{a}, tokens/s/chip", f"{b}, tokens/s/chip", "ratio"]
    return [f"## {a} against {b}", "", comparison.said, "", *(_table(heads, body, "llrrr") if body else [])]


def _step(row: Row) -> str:
    if row.step_s is None:
        return ""
    return duration(row.step_s) + (" simulated" if row.group.simulated else "")


def _price(row: Row) -> str:
    return f"{row.per_million:.3g}" if row.per_million else ""


def _speed(row: Row, value: float | None) -> str:
    if value is None:
        return "" if row.trial.status is Status.ok else row.status
    return f"{value:,.0f}{' simulated' if row.group.simulated else ''}"


def _table(heads: Sequence[str], body: Sequence[Sequence[str]], align: str) -> list[str]:
    rule = ["---:" if side == "r" else "---" for side in align]
    rows = [heads, rule, *([cell.replace("|", "\\|") for cell in row] for row in body)]
    return [f"| {' | '.join(row)} |" for row in rows]
