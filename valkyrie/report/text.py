"""The report as text: Markdown for people, CSV for programs."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from valkyrie.report import tables, words
from valkyrie.report.rank import Comparison, best_per_target, groups, refusals
from valkyrie.report.records import Row

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
    "peak_bytes": lambda r: r.peak,
    "usable_bytes": lambda r: r.usable,
    "sent_bytes": lambda r: sum(r.sent.values()) if r.sent else None,
    "exposed_s": lambda r: r.exposed_s,
    "goodput": lambda r: r.goodput.share if r.goodput else None,
    "restarts": lambda r: r.goodput.restarts if r.goodput else None,
    "data_wait": lambda r: r.data_wait,
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
    lines = [f"# {', '.join(dict.fromkeys(row.sweep for row in rows))}", "", words.summary(rows), ""]
    best = best_per_target(rows)
    if len(best) > 1:
        lines += ["## Best of each target", "", *tables.best(best).markdown(), ""]
    for group, members in groups(rows).items():
        first, *others = words.answer(group, members)
        lines += [f"## {group.label[0].upper()}{group.label[1:]}", "", first, ""]
        lines += [*(f"- {line}" for line in others), ""] if others else []
        lines += [*tables.ranked(members).markdown(), ""] if any(map(tables.has_results, members)) else []
    lines += [f"{line}\n" for line in words.price_lines(rows)]
    if comparison is not None:
        table = tables.compared(comparison)
        lines += [f"## {table.caption}", "", comparison.summary, "", *(table.markdown() if table.rows else []), ""]
    if tables.trained(rows).rows:
        table = tables.trained(rows)
        lines += [f"## {table.caption}", "", *table.markdown(), ""]
    without = refusals(rows)
    if without:
        lines += ["## Without a result", ""]
        for _, reason, members in without:
            layouts = ", ".join(dict.fromkeys(row.layout for row in members))
            lines.append(f"- **{members[0].status}** ({len(members)}): {' '.join(reason.split())} — {layouts}")
        lines.append("")
    return "\n".join(lines)
