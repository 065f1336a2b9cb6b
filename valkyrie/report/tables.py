"""Builds the tables of the HTML and Markdown reports, and the details that the HTML report shows for a layout."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from valkyrie.report.rank import SweepComparison, pareto_ids, peak_memory, simplest_partitions
from valkyrie.report.values import label_rows, part_name, round_digits
from valkyrie.runs.columns import Column
from valkyrie.sweep.columns import BEST_COLUMNS, COLUMNS, MARKDOWN_COLUMNS, PAGE_COLUMNS
from valkyrie.sweep.names import without_run_folder
from valkyrie.sweep.rows import Row, SpeedKind, with_ranks
from valkyrie.sweep.trial import Status
from valkyrie.units import decimal_bytes_text, duration_text, long_duration_text, memory_text, share_text

Facts = dict[str, str | Sequence[str]]
_DIGITS = 6
"""Significant digits of numbers in the data of the HTML report."""
_MIN_LISTED_SHARE = 0.001
"""Parts that take less than this share of the step time are omitted from a layout's details."""


class ColumnHead(NamedTuple):
    """Heading of a column. `kind` is the CSS class of its cells: `number` is right-aligned, `work` may wrap."""

    label: str
    kind: str = ""


@dataclass(frozen=True)
class TextTable:
    """A table of texts. Each row has one cell per heading."""

    caption: str
    heads: Sequence[ColumnHead]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> list[str]:
        """Return the lines of the table in Markdown."""
        rule = ["---:" if head.kind == "number" else "---" for head in self.heads]
        body = ([text.replace("|", "\\|") for text in row] for row in self.rows)
        rows = [[head.label for head in self.heads], rule, *body]
        return [f"| {' | '.join(row)} |" for row in rows]


def best_table(rows: Sequence[Row]) -> TextTable:
    """Return the table of the best layouts, given the rows of `best_per_workload`."""
    return _table("Best layout for each target", BEST_COLUMNS, rows)


def ranked_table(rows: Sequence[Row]) -> TextTable:
    """Return the table of rows of one kind of speed, in the given order. Omits rows without results."""
    listed_rows = [row for row in rows if has_results(row)]
    return _table("Ranked layouts", MARKDOWN_COLUMNS, rank_rows(listed_rows))


def _table(caption: str, columns: Sequence[Column[Row]], rows: Sequence[Row]) -> TextTable:
    css_classes = {"seen": "work", "work": "work"}
    heads = [ColumnHead(c.label, "number" if c.is_number else css_classes.get(c.name, "")) for c in columns]
    return TextTable(caption, heads, [[_cell(column, row) for column in columns] for row in rows])


def _cell(column: Column[Row], row: Row) -> str:
    text = column.text(row)
    return row.status if not text and column.unit == "speed" and row.trial.status is not Status.ok else text


def training_table(rows: Sequence[Row]) -> TextTable:
    """Return a table of the wall time, goodput and overheads of training runs, longest run first."""
    heads = [
        ColumnHead("training"),
        *(ColumnHead(label, "number") for label in ("steps", "wall time", "goodput", "restarts")),
    ]
    heads += [
        ColumnHead("data wait", "number"),
        ColumnHead("sent per step", "number"),
        ColumnHead("other time", "work"),
    ]
    trainings = sorted(((row, row.goodput) for row in rows if row.goodput), key=lambda pair: -pair[1].wall_s)
    body = [
        [row.trial.name, f"{row.trial.results.steps or 0:,}", long_duration_text(goodput.wall_s)]
        + ["" if goodput.share is None else share_text(goodput.share), str(goodput.restarts)]
        + ["" if row.data_wait is None else share_text(row.data_wait)]
        + [
            decimal_bytes_text(sum(row.bytes_by_axes.values())) if row.bytes_by_axes else "nothing",
            goodput.describe_other_time(),
        ]
        for row, goodput in trainings
    ]
    return TextTable("How training runs spent their time", heads, body)


def has_results(row: Row) -> bool:
    """Return whether the trial of a row is ok and has a speed, peak memory or bytes sent."""
    return row.has_speed or (row.trial.status is Status.ok and bool(row.peak_bytes or row.bytes_by_axes))


def comparison_table(comparison: SweepComparison) -> TextTable:
    """Return a table of the layouts in both sweeps, with the speed in the second divided by that in the first."""
    row_labels = label_rows([pair.a for pair in comparison.pairs])
    heads = [ColumnHead("layout"), ColumnHead("source")]
    heads += [ColumnHead(f"{sweep}, tokens/s/chip", "number") for sweep in (comparison.a, comparison.b)]
    body = [
        [row_labels[pair.a.id], pair.a.speed_kind.label]
        + [_cell(COLUMNS["tokens_per_second_per_chip"], row) for row in (pair.a, pair.b)]
        + [f"{pair.ratio:.2f}x" if pair.ratio else ""]
        for pair in comparison.pairs
    ]
    return TextTable(f"{comparison.a} against {comparison.b}", [*heads, ColumnHead("ratio", "number")], body)


def rank_rows(rows: Sequence[Row]) -> list[Row]:
    """Return copies of the rows with `label`, `rank`, `equivalent_partition` and `on_pareto_front` set.

    `rows` must be of one kind of speed and sorted, fastest first.
    """
    row_labels, pareto_front, simplest_by_id = (
        label_rows(rows),
        pareto_ids(rows, peak_memory),
        simplest_partitions(rows),
    )
    equivalents = {
        row.id: simplest_by_id[row.id]
        for row in rows
        if row.has_speed and simplest_by_id[row.id] != row.about.partition
    }
    return [
        replace(
            row,
            label=row_labels[row.id],
            equivalent_partition=equivalents.get(row.id, ""),
            on_pareto_front=row.id in pareto_front,
        )
        for row in with_ranks(rows)
    ]


def cells(rows_by_kind: Mapping[SpeedKind, Sequence[Row]]) -> list[list[Any]]:
    """Return the cells of the ranked table in the HTML report: one row per trial, with the columns of `PAGE_COLUMNS`.

    Times are in seconds and sizes in bytes.
    """
    ranked_rows = [row for rows in rows_by_kind.values() for row in rank_rows(rows)]
    return [[_rounded(column.value(row)) for column in PAGE_COLUMNS] for row in ranked_rows]


def _rounded(value: Any) -> Any:
    return round_digits(value, _DIGITS) if isinstance(value, float) else value


def details(row: Row) -> Facts:
    """Return the details of a layout in the HTML report: facts by name, each a text or a list of texts.

    Omits unknown facts.
    """
    about, results = row.about, row.trial.results
    compile_s, reported_peak = results.compile.compile_s, results.memory.reported_peak
    unfinished = "" if results.finished else ", not finished"
    facts: dict[str, str | Sequence[str] | None] = {
        "roles": about.roles,
        "on": about.described,
        "work": f"{row.work.label}, {row.work.precision}",
        "parameters": f"{results.parameters:,}" if results.parameters else None,
        "command": _command_words(row),
        "folder": row.trial.folder,
        "memory": ", ".join(f"{name} {memory_text(size)}" for name, size in results.memory.split.items()),
        "parts": [
            f"{part_name(part.kind, part.mesh_axes)} {duration_text(part.seconds)} "
            f"({share_text(part.seconds / row.step_s)})"
            for part in sorted(row.parts, key=lambda part: -part.seconds)
            if row.step_s and part.seconds >= _MIN_LISTED_SHARE * row.step_s
        ],
        "sent": ", ".join(f"{axes} {decimal_bytes_text(size)}" for axes, size in row.bytes_by_axes.items() if size),
        "goodput": row.goodput.describe() if row.goodput else None,
        "steps": None if results.finished is None else f"{results.steps or 0:,}{unfinished}",
        "reported": memory_text(reported_peak) if reported_peak else None,
        "compiled": duration_text(compile_s) if compile_s else None,
        "placement": results.placement,
        "hints": results.hints[:3],
    }
    return {name: fact for name, fact in facts.items() if fact}


def command(row: Row) -> str:
    """Return the shell command that repeats a trial as a single run, in a new run folder."""
    return " ".join(_command_words(row))


def _command_words(row: Row) -> list[str]:
    arguments = (*row.trial.flags, *without_run_folder(row.trial.overrides))
    return [shlex.quote(a) for a in ("valkyrie-train", *arguments, "hydra.mode=RUN")]
