"""Columns of tables: a name, a unit, and how a value of that unit is written on a terminal, a page and at W&B."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from valkyrie.units import duration, memory, sent

R = TypeVar("R")

FORMATS: dict[str, Callable[[Any], str]] = {
    "text": str,
    "layout": str,
    "count": "{:,}".format,
    "speed": "{:,.0f}".format,
    "seconds": duration,
    "share": lambda share: f"{100 * share:.1f}%",
    "bytes": memory,
    "sent": sent,
    "dollars": "{:.3g}".format,
    "loss": "{:.4f}".format,
}
"""How people read a value of each unit. `sent` are bytes on a link, in powers of ten; `layout` opens its details."""
WORDS = ("text", "layout")
"""Units that are no numbers."""
TIMED = ("speed", "seconds")
"""Units that depend on the devices: of simulated ones they are marked."""


@dataclass(frozen=True)
class Column(Generic[R]):
    """A column of rows of one type.

    Args:
        name: Its key in CSV files and on the page.
        label: Its head, for people.
        unit: One of `FORMATS`.
        value: Takes the value from a row; None or an empty text if unknown.
        help: Its tooltip.
        wandb: Its key at W&B, where the value is multiplied by `scale`. None: its name.
    """

    name: str
    label: str
    unit: str
    value: Callable[[R], Any]
    help: str = ""
    wandb: str | None = None
    scale: float = 1.0

    @property
    def is_number(self) -> bool:
        """Whether cells are aligned to the right."""
        return self.unit not in WORDS

    @property
    def key(self) -> str:
        """Its key at W&B."""
        return self.wandb or self.name

    def text(self, row: R) -> str:
        """Return the cell for people, empty if unknown."""
        value = self.value(row)
        return "" if value in (None, "") else FORMATS[self.unit](value)

    def scaled(self, row: R) -> Any:
        """Return the value at W&B."""
        value = self.value(row)
        return value if value is None or self.scale == 1.0 else self.scale * value
