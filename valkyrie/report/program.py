"""Renders HTML pages: the report and timeline of a predicted or measured step, and comparisons of predictions."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NamedTuple

from markupsafe import Markup
from rich.console import Console
from rich.table import Table

from valkyrie.machine.timeline import COMPUTE, trace_events
from valkyrie.parts import PartKind, sum_seconds
from valkyrie.report.colours import axes_colour, part_colour
from valkyrie.report.page import read_asset, template_environment
from valkyrie.report.tables import ColumnHead, TextTable
from valkyrie.report.trace import Timeline, make_timeline
from valkyrie.report.words import BigNumber
from valkyrie.search.compile.fault import Fault
from valkyrie.search.compile.prediction import CompileStatus, Hint, HintCode, Measurement, Prediction
from valkyrie.search.compile.show import print_record
from valkyrie.units import duration_text, memory_text, percent_text

if TYPE_CHECKING:
    from valkyrie.machine.replay import TimelineSpan

STEP_WIDTH, TRACK_HEIGHT, LABEL_WIDTH = 1000, 26, 190
"""Sizes in the drawing, in pixels: width of a step, height of a track, and width of the track names."""
TICK_COUNT = 5
"""Number of labels on the time axis of the drawing."""
_WRAPPED_COLUMNS = ("cause", "source", "operation", "code", "what")
"""Headings of the columns with texts that may wrap."""


class Rectangle(NamedTuple):
    """A span in the drawing, in pixels, with its colour and tooltip."""

    left: float
    top: int
    width: float
    colour: str
    tooltip: str


class Drawing(NamedTuple):
    """The drawing of a step's timeline.

    Args:
        tracks: Names of the tracks, from top to bottom.
        spans: A rectangle for each span.
        ticks: Positions in pixels and labels on the time axis.
        legend: Colours of step parts, by label.
    """

    tracks: list[str]
    spans: list[Rectangle]
    ticks: list[tuple[float, str]]
    legend: dict[str, str]


class _Recorder(Console):
    """A console that collects the printed lines and tables."""

    def __init__(self) -> None:
        super().__init__(file=io.StringIO())
        self.blocks: list[str | TextTable] = []

    def print(self, *objects: Any, **_: Any) -> None:
        """Collect tables as `TextTable` and other objects as text."""
        self.blocks += [_text_table(item) if isinstance(item, Table) else str(item) for item in objects]


def program_page(record: Prediction | Measurement, title: str, spans: Sequence[TimelineSpan]) -> str:
    """Return a self-contained HTML page with the report of a prediction or measurement, and a drawing of its timeline.

    `spans` are the spans of the timeline. If there are none, the page has no drawing.
    """
    faults, hints = tuple[Fault, ...](), tuple[Hint, ...]()
    if isinstance(record, Prediction):
        faults, hints = record.faults, record.hints
    print_record(_without_advice(record), console := _Recorder())
    step_timeline = make_timeline([dict(event) for event in trace_events(spans, title)])
    return (
        template_environment()
        .get_template("program.html")
        .render(
            title=title,
            subject=console.blocks[0],
            step_numbers=big_numbers(record),
            faults=faults,
            hints=[hint.text for hint in hints],
            hints_title=_hints_title(hints),
            blocks=console.blocks[1:],
            details_title="",
            details=[],
            drawing=None if step_timeline is None else _draw_timeline(step_timeline),
            sizes={"width": STEP_WIDTH, "lane": TRACK_HEIGHT, "label": LABEL_WIDTH},
            version=version("valkyrie-jax"),
            css=Markup(read_asset("page.css")),
        )
    )


def comparison_page(
    title: str,
    subject: str,
    table: Table,
    lines: Sequence[str],
    records: Mapping[str, Prediction],
    best: tuple[str, str | None],
) -> str:
    """Return a self-contained HTML page with the table of several predictions and the report of the best one.

    Args:
        title: Title of the page.
        subject: Line below the title.
        table: Table of the predictions, one per row.
        lines: Lines below the table.
        records: Predictions by name.
        best: Label of the best prediction, such as `fastest`, and its name, or None if none fits.
    """
    label, best_name = best
    details, faults, hints = list[str | TextTable](), tuple[Fault, ...](), tuple[Hint, ...]()
    numbers = [BigNumber(label, best_name or ("none fits" if records else "none compiled"))]
    if best_name is not None:
        print_record(_without_advice(records[best_name]), console := _Recorder())
        details, faults, hints = console.blocks[1:], records[best_name].faults, records[best_name].hints
        numbers = [*numbers, *big_numbers(records[best_name])]
    return (
        template_environment()
        .get_template("program.html")
        .render(
            title=title,
            subject=subject,
            step_numbers=numbers,
            faults=faults,
            hints=[hint.text for hint in hints],
            hints_title=_hints_title(hints),
            blocks=[_text_table(table), *lines],
            details_title=f"The {label} layout: {best_name}",
            details=details,
            drawing=None,
            version=version("valkyrie-jax"),
            css=Markup(read_asset("page.css")),
        )
    )


def _without_advice(record: Prediction | Measurement) -> Prediction | Measurement:
    """Return a record without faults and hints, which pages show in sections above the report."""
    return replace(record, faults=(), hints=()) if isinstance(record, Prediction) else record


def _hints_title(hints: Sequence[Hint]) -> str:
    """Return the heading of the hints. Hints on exposed communication and on the largest part may suggest nothing."""
    without_change = (HintCode.exposed, HintCode.largest_part)
    has_change = any(hint.changes or hint.code not in without_change for hint in hints)
    return "What to change" if has_change else "What takes the time"


def big_numbers(record: Prediction | Measurement) -> list[BigNumber]:
    """Return the numbers in large print: step time, speed, waiting, faults and memory. Omits those that are unknown."""
    numbers, step, memory_report = [], record.step, record.memory
    if step is not None:
        interval = getattr(step, "interval", None)
        interval_text = f"{duration_text(interval.low_s)} to {duration_text(interval.high_s)}" if interval else ""
        numbers.append(BigNumber("step", duration_text(step.step_s), interval_text))
        if step.tokens_per_second is not None:
            utilisation = "" if step.mfu is None else f"MFU {percent_text(step.mfu)}"
            numbers.append(BigNumber(f"{record.unit}/s", f"{step.tokens_per_second:,.0f}", utilisation))
        if isinstance(record, Prediction) and record.parts:
            share = sum_seconds(record.parts, PartKind.exposed) / step.step_s
            numbers.append(BigNumber("waiting for communication", percent_text(share), "of the step"))
    if isinstance(record, Prediction) and record.faults:
        seconds = record.faults[0].seconds  # of the most expensive one
        subject = "it costs" if len(record.faults) == 1 else "the largest costs"
        cost = "" if seconds is None else f"{subject} about {duration_text(seconds)}"
        numbers.append(BigNumber("faults in the sharding", str(len(record.faults)), cost))
    if memory_report is not None and memory_report.required is not None:
        verdict = "does not fit" if record.status is CompileStatus.does_not_fit else "fits"
        usable = "" if memory_report.usable is None else f"{verdict}: {memory_text(memory_report.usable)} usable"
        numbers.append(BigNumber("peak memory per device", memory_text(memory_report.required), usable))
    return numbers


def _text_table(table: Table) -> TextTable:
    columns = [(str(column.header), column.justify == "right", list(column.cells)) for column in table.columns]
    kinds = ["number" if is_number else "work" if name in _WRAPPED_COLUMNS else "" for name, is_number, _ in columns]
    heads = [ColumnHead(name, kind) for (name, *_), kind in zip(columns, kinds, strict=True)]
    cells = (map(str, column) for *_, column in columns)
    return TextTable(str(table.title or ""), heads, list(zip(*cells, strict=True)))


def _draw_timeline(step_timeline: Timeline) -> Drawing:
    tracks, names, step_us = step_timeline.tracks, step_timeline.names, step_timeline.step_us
    rectangles, legend = [], {}
    for track, start, length, part, name, merged_count in step_timeline.spans:
        colour = _span_colour(step_timeline, tracks[track], names[part])
        if tracks[track] == COMPUTE:
            legend[names[part]] = colour
        merged = f" and {merged_count - 1} more" if merged_count > 1 else ""
        tooltip = f"{names[part]}: {names[name]}{merged}, {duration_text(length * 1e-6)}"
        left, width = LABEL_WIDTH + STEP_WIDTH * start / step_us, max(STEP_WIDTH * length / step_us, 0.3)
        rectangles.append(Rectangle(round(left, 1), TRACK_HEIGHT * track + 3, round(width, 1), colour, tooltip))
    shares = [tick / (TICK_COUNT - 1) for tick in range(TICK_COUNT)]
    ticks = [(LABEL_WIDTH + STEP_WIDTH * share, duration_text(step_us * share * 1e-6)) for share in shares]
    return Drawing(tracks, rectangles, ticks, legend)


def _span_colour(step_timeline: Timeline, track: str, part: str) -> str:
    if track in step_timeline.axes:
        return axes_colour(step_timeline.axes[track])
    return part_colour(part if track == COMPUTE else track, step_timeline.axes.get(part))
