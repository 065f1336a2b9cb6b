"""Tables that the page and Markdown both show: the best layouts, the ranking of one kind of speed, two sweeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from valkyrie.report.rank import Comparison, memory_of, unbeaten
from valkyrie.report.records import Row
from valkyrie.report.values import labels
from valkyrie.runs.goodput import share_text, span
from valkyrie.sweep.noise import places
from valkyrie.sweep.trial import Status
from valkyrie.units import duration, memory, sent


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
    heads = [Head("best layout"), *(Head(label, "number") for label in ("tokens/s/chip", "step"))]
    heads += [Head("speed is", "work"), Head("work", "work"), Head("peak memory", "number"), Head("$/Mtok", "number")]
    body = [
        [Cell(row.layout), _speed(row, row.rate_per_chip), _step(row), Cell(row.group.label), Cell(row.work.label)]
        + [Cell(_memory(row)), Cell(_price(row))]
        for row in rows
    ]
    return Table("The best layout of each target", heads, body)


def ranked(rows: Sequence[Row]) -> Table:
    """Return the rows of one kind of speed that ended well with something to show, in the order given."""
    named, light, shown = labels(rows), unbeaten(rows, memory_of), [row for row in rows if has_results(row)]
    heads = [Head("#", "number"), Head("layout")]
    heads += [
        Head(label, "number") for label in ("tokens/s/chip", "tokens/s", "step", "MFU", "memory", "sent", "$/Mtok")
    ]
    body = [
        [
            Cell(str(place) if row.ok else ""),
            Cell(named[row.id]),
            _speed(row, row.rate_per_chip),
            _speed(row, row.rate),
            _step(row),
            Cell("" if row.mfu is None else f"{100 * row.mfu:.1f}%"),
            Cell("" if row.peak is None else memory(row.peak)),
            Cell(sent(sum(row.sent.values())) if row.sent else ""),
            Cell(_price(row)),
            Cell("*" if row.id in light else ""),
        ]
        for place, row in zip(places([row.trial for row in shown]), shown, strict=True)
    ]
    return Table("Ranked layouts", [*heads, Head("front")], body)


def trained(rows: Sequence[Row]) -> Table:
    """Return what became of the wall time of trainings, the longest first."""
    heads = [Head("training"), *(Head(label, "number") for label in ("steps", "wall time", "goodput", "restarts"))]
    heads += [Head("data wait", "number"), Head("sent in a step", "number"), Head("the rest of the time", "work")]
    shown = sorted(((row, row.goodput) for row in rows if row.goodput), key=lambda pair: -pair[1].wall_s)
    body = [
        [Cell(row.trial.name), Cell(f"{row.trial.results.get('steps', 0):,}"), Cell(span(spent.wall_s))]
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
        + [_speed(row, row.rate_per_chip) for row in (pair.a, pair.b)]
        + [Cell(f"{pair.ratio:.2f}x" if pair.ratio else "")]
        for pair in comparison.pairs
    ]
    return Table(f"{comparison.a} against {comparison.b}", [*heads, Head("ratio", "number")], body)


def _speed(row: Row, value: float | None) -> Cell:
    """Return a speed, or why there is none."""
    if value is None:
        return Cell("" if row.trial.status is Status.ok else row.status)
    return Cell(f"{value:,.0f}", row.group.simulated)


def _step(row: Row) -> Cell:
    return Cell("") if row.step_s is None else Cell(duration(row.step_s), row.group.simulated)


def _memory(row: Row) -> str:
    usable = f" of {memory(row.usable)}" if row.usable is not None else ""
    return f"{memory(row.peak)}{usable}"


def _price(row: Row) -> str:
    return f"{row.per_million:.3g}" if row.per_million else ""
