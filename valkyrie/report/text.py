"""Writes the report as Markdown and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from valkyrie.report import tables, words
from valkyrie.report.rank import SweepComparison, best_per_workload, group_unsuccessful
from valkyrie.sweep.columns import CSV_COLUMNS
from valkyrie.sweep.rows import Row, group_by_kind
from valkyrie.units import escape_control_characters


def as_csv(rows: Sequence[Row]) -> str:
    """Return the trials as CSV, in ranked order, with a header. Units are seconds and bytes. Unknown cells are empty.

    The last columns are the number of devices of each kind of role.
    """
    ordered_rows = [row for members in group_by_kind(rows).values() for row in members]
    kinds = list(dict.fromkeys(kind for row in ordered_rows for kind in row.degrees))
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([*(column.name for column in CSV_COLUMNS), *kinds])
    for row in ordered_rows:
        values = [column.value(row) for column in CSV_COLUMNS]
        cells = [str(value).lower() if isinstance(value, bool) else value for value in values]
        writer.writerow([*map(_cell, cells), *(row.degrees.get(kind) for kind in kinds)])
    return stream.getvalue()


def _cell(value: object) -> object:
    """Escape a text so that no spreadsheet evaluates it as a formula. Trials may come from someone else."""
    if not isinstance(value, str):
        return value
    return escape_control_characters(f"'{value}" if value.startswith(("=", "+", "-", "@", "\t")) else value)


def as_markdown(rows: Sequence[Row], comparison: SweepComparison | None = None) -> str:
    """Return the report as Markdown: explanations, a ranked table per kind of speed, and trials without a result."""
    lines = [f"# {', '.join(dict.fromkeys(row.trial.sweep for row in rows))}", "", words.describe_counts(rows), ""]
    lines += [words.SIMULATED_NOTE, ""] if any(row.speed_kind.simulated and row.has_speed for row in rows) else []
    best = best_per_workload(rows)
    if len(best) > 1:
        lines += ["## Best layout for each target", "", *tables.best_table(best).markdown(), ""]
    for group, members in group_by_kind(rows).items():
        answer = words.summarise_kind(group, members)
        lines += [f"## {group.label[0].upper()}{group.label[1:]}", "", answer.sentence, ""]
        lines += [*(f"- {reason}" for reason in answer.reasons), ""] if answer.reasons else []
        lines += [*tables.ranked_table(members).markdown(), ""] if any(map(tables.has_results, members)) else []
    lines += [f"{line}\n" for line in words.price_lines(rows)]
    if comparison is not None:
        table = tables.comparison_table(comparison)
        lines += [f"## {table.caption}", "", comparison.summary, "", *(table.markdown() if table.rows else []), ""]
    if tables.training_table(rows).rows:
        table = tables.training_table(rows)
        lines += [f"## {table.caption}", "", *table.markdown(), ""]
    failures = group_unsuccessful(rows)
    if failures:
        lines += ["## Without a result", ""]
        for _, reason, members in failures:
            layouts = ", ".join(dict.fromkeys(row.layout for row in members))
            lines.append(f"- **{members[0].status}** ({len(members)}): {' '.join(reason.split())} — {layouts}")
        lines.append("")
    return escape_control_characters("\n".join(lines))
