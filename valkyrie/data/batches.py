"""What every loader is: an iterator over batches that knows its place; and the arrays of a batch from its rows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import numpy as np

Batch = dict[str, np.ndarray]
"""`tokens`, `targets`, `segment_ids` (int32) and `weights` (float32), each [rows, seq]."""


class Loader(Iterator[Batch]):
    """An iterator over batches that knows its place; close it (or use it in a `with`) to end what reads ahead.

    `batch`: rows of a global batch. `identity`: what decides the order of the rows, kept with the place.
    """

    version = 1
    """Of the place as it is kept: raised when `state` changes."""

    def __init__(self, batch: int, identity: dict[str, Any]) -> None:
        self.batch = batch
        self._identity = identity

    @property
    @abstractmethod
    def step(self) -> int:
        """Batches given out so far, over all processes and restarts."""

    @abstractmethod
    def close(self) -> None:
        """End what reads ahead; afterwards there are no more batches."""

    def state(self) -> dict[str, Any]:
        """Return the place of the next batch, as JSON values; the same on every process, and called by all."""
        return {"version": self.version, "row": self.step * self.batch, **self._identity}

    @abstractmethod
    def restore(self, state: dict[str, Any]) -> None:
        """Go to a place that `state` returned, here or on another number of processes.

        ValueError if the data or what orders its rows differ, or if the place is no multiple of this batch.
        """

    def _step_of(self, state: dict[str, Any]) -> int:
        """Return the step of a place; ValueError as `restore` raises it."""
        if state.get("version") != self.version:
            raise ValueError(
                f"the data position has version {state.get('version')}; this program reads version {self.version}."
            )
        for name, mine in self._identity.items():
            if state.get(name) != mine and name == "content":
                raise ValueError(
                    "the data are not those that the run was trained on: other files, other text in them, another "
                    "tokenizer or another split. Use the same data, or another name=."
                )
            if state.get(name) != mine:
                word = _WORDS.get(name, name)
                raise ValueError(
                    f"the data position was saved with {word}={state.get(name)}, this run has {mine}: its rows "
                    f"come in another order. Use the same {word}, or another name=."
                )
        step, rest = divmod(state["row"], self.batch)
        if rest:
            raise ValueError(
                f"the data position is row {state['row']:,}, not a multiple of batch={self.batch}. "
                f"Use a batch that divides it, such as {_divisor(state['row'], self.batch)}."
            )
        return step

    def __enter__(self) -> Loader:
        """Return the loader itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()


_WORDS = {"seed": "data.shuffle_seed", "lanes": "data.lanes", "packing": "data.packing", "pool": "data.pool"}


def make_batch(windows: Sequence[np.ndarray], seq: int, bos_id: int) -> Batch:
    """Return the arrays of a batch from windows of at most seq + 1 tokens.

    `segment_ids` number the documents of a row from 1, a new one at every BOS; padding is segment 0. `weights` are 1
    for targets and 0 for padding. The BOS of the next document is a target too: it is how a document ends.
    """
    filled = np.full((len(windows), seq + 1), bos_id, np.int32)
    lengths = np.array([len(window) for window in windows], np.int64)
    for row, window in zip(filled, windows, strict=True):
        row[: len(window)] = window
    tokens, targets = filled[:, :-1], filled[:, 1:]
    real = (np.arange(seq) < (lengths - 1)[:, None]).astype(np.float32)
    begins = tokens == bos_id
    segments = np.cumsum(begins, axis=1, dtype=np.int32) + ~begins[:, :1]
    return {
        "tokens": np.ascontiguousarray(tokens),
        "targets": np.ascontiguousarray(targets),
        "segment_ids": segments * real.astype(np.int32),
        "weights": real,
    }


def places_of(batch: int, places: Sequence[int] | None) -> np.ndarray:
    """Return the rows of the global batch that a process feeds; None means all. ValueError for one outside it."""
    given = np.arange(batch) if places is None else np.asarray(places, np.int64)
    if not given.size or given.min() < 0 or given.max() >= batch:
        raise ValueError(f"places={given.tolist()} are not all places of batch={batch}, which are 0 to {batch - 1}.")
    return given


def _divisor(row: int, batch: int) -> int:
    """Return the largest batch below `batch` that ends at `row`."""
    return next(size for size in range(batch - 1, 0, -1) if row % size == 0)
