"""What every kind of prepared data is, and every iterator over its batches: documents or puzzles, packed or drawn."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Protocol, runtime_checkable

import numpy as np


@runtime_checkable
class Dataset(Protocol):
    """Prepared data: its name, a hash of its content, the tokenizer it was made with, and a line that describes it."""

    @property
    def name(self) -> str:
        """The name of its configuration."""
        ...

    @property
    def content(self) -> str:
        """A hash of what is in it, equal wherever the same was prepared."""
        ...

    @property
    def tokenizer(self) -> str:
        """The name of its tokenizer; `none` where there is none."""
        ...

    def describe(self) -> str:
        """Return how much there is of it, in a line."""
        ...


@runtime_checkable
class Batches(Protocol):
    """An iterator over this process's part of global batches, which knows its place."""

    def __iter__(self) -> Any:
        """Return itself."""
        ...

    def __next__(self) -> dict[str, np.ndarray]:
        """Return the next batch."""
        ...

    def state(self) -> dict[str, Any]:
        """Return the place of the next batch, as JSON values; the same on every process."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Go to a place that `state` returned; ValueError where it is of other data."""
        ...

    def close(self) -> None:
        """End its threads; afterwards there are no more batches."""
        ...

    def __enter__(self) -> Any:
        """Return itself."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        ...
