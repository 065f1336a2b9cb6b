"""Table columns, and how their values are formatted on terminals, in HTML reports and at W&B."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from valkyrie.units import (
    decimal_bytes_text,
    duration_text,
    escape_control_characters,
    memory_text,
    number_text,
    percent_text,
)

if TYPE_CHECKING:
    from rich.console import OverflowMethod
    from rich.table import Table

Row = TypeVar("Row")

FORMATS: dict[str, Callable[[Any], str]] = {
    "text": str,
    "layout": str,
    "count": "{:,}".format,
    "speed": "{:,.0f}".format,
    "seconds": duration_text,
    "change": lambda share: f"{100 * share:+.1f}%",
    "share": lambda share: f"{100 * share:.1f}%",
    "percent": percent_text,
    "range": lambda ends: "{:+.0f} to {:+.0f}%".format(*(100 * end for end in ends)),
    "bytes": memory_text,
    "sent": decimal_bytes_text,
    "dollars": "{:.3g}".format,
    "amount": number_text,
    "loss": "{:.4f}".format,
}
"""Formatter of each unit. `bytes` is memory in powers of two, `sent` is bytes over a link in powers of ten."""
TEXT_UNITS = ("text", "layout")
"""Units of text columns. In the HTML report, clicking a cell of unit `layout` opens the details of that layout."""


@dataclass(frozen=True)
class Column(Generic[Row]):
    """A column of a table with rows of type `Row`.

    Args:
        name: Key in CSV files and in the HTML report.
        label: Heading.
        unit: A key of `FORMATS`.
        value: Returns the value for a row, or None or an empty text if it is unknown.
        help: Tooltip in the HTML report.
        wandb_key: Key at W&B, or None to use `name`.
        scale: Factor that converts a value to the unit used at W&B.
        unknown_text: Text on a terminal for an unknown value.
        min_width: Minimum width on a terminal, where longer cells wrap. None if cells must not wrap.
    """

    name: str
    label: str
    unit: str
    value: Callable[[Row], Any]
    help: str = ""
    wandb_key: str | None = None
    scale: float = 1.0
    unknown_text: str = ""
    min_width: int | None = None

    @property
    def is_number(self) -> bool:
        """Whether values are numbers, which are aligned to the right."""
        return self.unit not in TEXT_UNITS

    @property
    def key(self) -> str:
        """Key of the values in W&B: `wandb_key` if it is set, else `name`."""
        return self.wandb_key or self.name

    def text(self, row: Row) -> str:
        """Return the formatted value for a row, or `unknown_text` if there is none."""
        value = self.value(row)
        return self.unknown_text if value in (None, "") else FORMATS[self.unit](value)

    def wandb_value(self, row: Row) -> Any:
        """Return the value for a row in the unit used at W&B, or None if it is unknown."""
        value = self.value(row)
        return value if value is None or self.scale == 1.0 else self.scale * value


def terminal_table(
    columns: Iterable[Column[Row]],
    rows: Sequence[Row],
    style: Callable[[Row], str | None] = lambda _: None,
    overflow: OverflowMethod = "ellipsis",
    **options: Any,
) -> Table:
    """Return a table for a terminal.

    Args:
        columns: The columns. Cells of columns with a `min_width` wrap.
        rows: The rows.
        style: Returns rich's style of a row, or None.
        overflow: How rich shortens long cells in other columns.
        options: Passed to `rich.table.Table`.
    """
    from rich.box import SIMPLE
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE, pad_edge=False, **options)
    for column in columns:
        table.add_column(
            column.label,
            justify="right" if column.is_number else "left",
            overflow="fold" if column.min_width else overflow,
            no_wrap=column.min_width is None,
            min_width=column.min_width,
        )
    for row in rows:
        table.add_row(*(Text(escape_control_characters(column.text(row))) for column in columns), style=style(row))
    return table


def html_table(columns: Iterable[Column[Row]], rows: Sequence[Row]) -> str:
    """Return the rows as an HTML table for notebooks, with values formatted as on a terminal."""
    from html import escape

    columns = list(columns)
    alignments = [f' style="text-align: {"right" if column.is_number else "left"}"' for column in columns]
    head = "".join(
        f"<th{style}>{escape(' '.join(c.label.split()))}</th>" for c, style in zip(columns, alignments, strict=True)
    )
    body = "".join(
        f"<tr>{''.join(f'<td{s}>{escape(c.text(row))}</td>' for c, s in zip(columns, alignments, strict=True))}</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def html_facts(facts: Mapping[str, object]) -> str:
    """Return names and values as an HTML table for notebooks. Omits values that are None."""
    from html import escape

    left_aligned = 'style="text-align: left"'
    rows = (
        f"<tr><th {left_aligned}>{escape(name)}</th><td {left_aligned}>{escape(str(value))}</td></tr>"
        for name, value in facts.items()
        if value is not None
    )
    return f"<table><tbody>{''.join(rows)}</tbody></table>"


def terminal_line(columns: Sequence[Column[Row]], row: Row | None = None) -> str:
    """Return a row, or the headings if `row` is None, as a line of a table that is printed line by line.

    Pads cells to the column's `min_width`, except in the last column.
    """
    cells = [(column, column.label if row is None else column.text(row)) for column in columns]
    padded_cells = [
        text.rjust(c.min_width or 0) if c.is_number else text.ljust(c.min_width or 0) for c, text in cells[:-1]
    ]
    return "  ".join([*padded_cells, cells[-1][1]])
