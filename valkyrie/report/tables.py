"""Tables that the page and Markdown both show: the best layouts, the ranking of one kind of speed, two sweeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from valkyrie.report.rank import Comparison
from valkyrie.report.ranking import compared_rows
from valkyrie.report.values import labels
from valkyrie.runs.columns import TIMED, Column
from valkyrie.runs.goodput import share_text, span
from valkyrie.sweep.columns import BEST, COLUMNS, MARKDOWN, Ranked
from valkyrie.sweep.rows import Row
from valkyrie.sweep.trial import Status
from valkyrie.units import sent


class Head(NamedTuple):
    """The head of a column; `kind` is the page's CSS class of its cells: `number` stands right, `work` may wrap."""

    label: str
    kind: str = ""


class Cell(NamedTuple):
    """A cell's text, and whether the speed in it was measured on simulated devices."""

    text: str
    simulated: bool = False


@dataclass(frozen=True)
class Table:
    """A table as text, with as many cells in each row as there are heads."""

    caption: str
    heads: Sequence[Head]
    rows: Sequence[Sequence[Cell]]

    def markdown(self) -> list[str]:
        """Return its lines in Markdown."""
        rule = ["---:" if head.kind == "number" else "---" for head in self.heads]
        body = [[cell.text + " simulated" * cell.simulated for cell in cells] for cells in self.rows]
        rows = [
            [head.label for head in self.heads],
            rule,
            *([text.replace("|", "\\|") for text in row] for row in body),
        ]
        return [f"| {' | '.join(row)} |" for row in rows]


def best(rows: Sequence[Row]) -> Table:
    """Return the best layout of each target and work; all rows have a speed."""
    return _table("The best layout of each target", BEST, [Ranked(row) for row in rows])


def ranked(rows: Sequence[Row]) -> Table:
    """Return the rows of one kind of speed that ended well with something to show, in the order given."""
    shown = [row for row in rows if has_results(row)]
    return _table("Ranked layouts", MARKDOWN, compared_rows(shown))


def _table(caption: str, columns: Sequence[Column[Ranked]], rows: Sequence[Ranked]) -> Table:
    kinds = {"seen": "work", "work": "work"}
    heads = [Head(c.label, "number" if c.is_number else kinds.get(c.name, "")) for c in columns]
    return Table(caption, heads, [[_cell(column, row) for column in columns] for row in rows])


def _cell(column: Column[Ranked], ranked: Ranked) -> Cell:
    text, row = column.text(ranked), ranked.row
    if not text and column.unit == "speed" and row.trial.status is not Status.ok:
        return Cell(row.status)
    return Cell(text, bool(text) and column.unit in TIMED and row.group.simulated)


def trained(rows: Sequence[Row]) -> Table:
    """Return what became of the wall time of trainings, the longest first."""
    heads = [Head("training"), *(Head(label, "number") for label in ("steps", "wall time", "goodput", "restarts"))]
    heads += [Head("data wait", "number"), Head("sent in a step", "number"), Head("the rest of the time", "work")]
    shown = sorted(((row, row.goodput) for row in rows if row.goodput), key=lambda pair: -pair[1].wall_s)
    body = [
        [Cell(row.trial.name), Cell(f"{row.trial.results.steps or 0:,}"), Cell(span(spent.wall_s))]
        + [Cell("" if spent.share is None else share_text(spent.share)), Cell(str(spent.restarts))]
        + [Cell("" if row.data_wait is None else share_text(row.data_wait))]
        + [Cell(sent(sum(row.sent.values())) if row.sent else "nothing"), Cell(spent.rest())]
        for row, spent in shown
    ]
    return Table("What the time of trainings went to", heads, body)


def has_results(row: Row) -> bool:
    """Return whether a row has a speed, or ended well with its memory or bytes sent."""
    return row.ok or (row.trial.status is Status.ok and bool(row.peak or row.sent))


def compared(comparison: Comparison) -> Table:
    """Return the layouts that are in both sweeps, with the ratio of their speeds."""
    named = labels([pair.a for pair in comparison.pairs])
    heads = [Head("layout"), Head("speed is")]
    heads += [Head(f"{sweep}, tokens/s/chip", "number") for sweep in (comparison.a, comparison.b)]
    body = [
        [Cell(named[pair.a.id]), Cell(pair.a.group.label)]
        + [_cell(COLUMNS["tokens_per_second_per_chip"], Ranked(row)) for row in (pair.a, pair.b)]
        + [Cell(f"{pair.ratio:.2f}x" if pair.ratio else "")]
        for pair in comparison.pairs
    ]
    return Table(f"{comparison.a} against {comparison.b}", [*heads, Head("ratio", "number")], body)
