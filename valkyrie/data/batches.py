"""Prepared data, the loaders of its batches with a position that a checkpoint keeps, and the arrays of a batch."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar, Generic, Protocol, TypeVar, runtime_checkable

import numpy as np

from valkyrie.records import decode, encode

Batch = dict[str, np.ndarray]
"""The arrays of a batch, each with its rows first. Text has `tokens`, `targets`, `segment_ids` (int32) and `weights`
(float32), each [rows, seq]."""
_BATCHES_AHEAD = 2


@dataclass(frozen=True)
class BatchPlan:
    """Which batches a loader yields.

    Args:
        batch: rows of a global batch.
        seq: positions of a row.
        seed: seed of the order of the rows.
        repeat: True for training, rows in a new order every epoch, without end; False for evaluation, every row once
            in order, and the last batch padded.
        rows: the rows of the global batch that this process feeds.
    """

    batch: int
    seq: int
    seed: int
    repeat: bool
    rows: np.ndarray


@runtime_checkable
class Dataset(Protocol):
    """Prepared data."""

    @property
    def name(self) -> str:
        """Name of its config."""
        ...

    @property
    def content(self) -> str:
        """Hash of its content, equal wherever the same data was prepared."""
        ...

    @property
    def tokenizer(self) -> str:
        """Name of its tokenizer, or `none`."""
        ...

    def describe(self) -> str:
        """How much data there is, in a line."""
        ...

    def loader(self, split: str, plan: BatchPlan) -> Loader[Any]:
        """Loader of the split `train` or `validation`. ValueError if it has not one batch."""
        ...


@dataclass(frozen=True)
class DataPosition(ABC):
    """A position in the batches of a split, as a checkpoint keeps it in JSON. Equal on all processes of a run.

    Fields named in `progress` say how far the run is; the others decide the order of the rows and may not change.
    """

    progress: ClassVar[tuple[str, ...]] = ()
    newest: ClassVar[int] = 1
    """The version that is written and read."""

    version: int
    split: str
    seed: int
    content: str

    @abstractmethod
    def step_of(self, batch: int) -> int:
        """The step that begins here. ValueError if none does."""

    @abstractmethod
    def at_step(self, step: int, batch: int) -> DataPosition:
        """This position, moved to the beginning of a step."""


@dataclass(frozen=True)
class RowPosition(DataPosition):
    """Position in rows of tokens: `row` rows of `seq` tokens were given out by all processes together."""

    progress: ClassVar[tuple[str, ...]] = ("row",)

    seq: int
    row: int

    def step_of(self, batch: int) -> int:
        """The step that begins with this row. ValueError if the row is no multiple of the batch."""
        step, rest = divmod(self.row, batch)
        if rest:
            divisor = next(size for size in range(batch - 1, 0, -1) if self.row % size == 0)
            raise ValueError(
                f"the data position is row {self.row:,}, not a multiple of batch={batch}. "
                f"Use a batch that divides it, such as {divisor}."
            )
        return step

    def at_step(self, step: int, batch: int) -> RowPosition:
        """This position, moved to the first row of a step."""
        return dataclasses.replace(self, row=step * batch)


Position = TypeVar("Position", bound=DataPosition)


class Loader(Iterator[Batch], AbstractContextManager["Loader[Any]"], Generic[Position]):
    """An iterator over this process's part of global batches, with a position that can be saved and restored.

    Close it, or use it in a `with`, to end what reads ahead.

    Args:
        batch: rows of a global batch.
        start: the position before the first batch.
    """

    def __init__(self, batch: int, start: Position) -> None:
        self.batch, self.start = batch, start

    @property
    @abstractmethod
    def step(self) -> int:
        """Batches given out so far, over all processes and restarts."""

    def position(self) -> Position:
        """The position of the next batch. All processes call this."""
        position = self.start.at_step(self.step, self.batch)
        assert isinstance(position, type(self.start)), "positions stay of one class"
        return position

    def state(self) -> dict[str, Any]:
        """The position of the next batch, as JSON values for a checkpoint. All processes call this."""
        return encode(self.position())

    @abstractmethod
    def go_to(self, position: Position) -> None:
        """Continue from a position with the identity of `start`."""

    @abstractmethod
    def close(self) -> None:
        """End what reads ahead; afterwards there are no more batches."""

    def restore(self, saved: Mapping[str, object]) -> None:
        """Continue from a saved position, on this or another number of processes.

        ValueError if the data or anything else that orders the rows differs.
        """
        if saved.get("version") != self.start.newest:
            raise ValueError(
                f"the data position has version {saved.get('version')}; this program reads version {self.start.newest}."
            )
        position = decode(type(self.start), dict(saved), "the data position in the checkpoint")
        for field in dataclasses.fields(self.start):
            was, now = getattr(position, field.name), getattr(self.start, field.name)
            if was != now and field.name not in self.start.progress:
                raise ValueError(_position_refusal(field.name, was, now))
        self.go_to(position)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the loader."""
        self.close()


def _position_refusal(field: str, saved: object, now: object) -> str:
    if field == "content":
        return (
            "the data are not those that the run was trained on: other files, other text in them, another tokenizer or "
            "another split. Use the same data, or another name=."
        )
    key = field if field in ("seq", "split", "batch") else f"data.{'shuffle_seed' if field == 'seed' else field}"
    return (
        f"the data position was saved with {key}={saved}, this run has {now}: its rows come in another order. "
        f"Use the same {key}, or another name=."
    )


class IndexedLoader(Loader[Position]):
    """Loader of batches that follow from their number, read ahead by a thread of grain.

    Args:
        plan: which batches.
        start: the position before the first batch.
        steps: `steps[number]` is this process's part of a batch; it has a length.
        rows: rows of an epoch, those of padding included.
    """

    def __init__(self, plan: BatchPlan, start: Position, steps: Any, rows: int) -> None:
        import grain

        super().__init__(plan.batch, start)
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=_BATCHES_AHEAD)
        self._iterator = iter(grain.MapDataset.source(steps).to_iter_dataset(options))
        self._closed = False
        self.batches = None if plan.repeat else len(steps)
        """Batches until the end, or None if endless."""
        self.rows = rows

    def __next__(self) -> Batch:
        """Return the next batch."""
        if self._closed:
            raise StopIteration
        return next(self._iterator)

    @property
    def step(self) -> int:
        """Batches given out so far, over all processes and restarts."""
        return int(self._iterator.get_state()["next_index"])

    @property
    def epoch(self) -> float:
        """Times the rows of the split were given out, by all processes together."""
        return self.step * self.batch / self.rows

    def go_to(self, position: Position) -> None:
        """Continue from a position with the identity of `start`."""
        self._iterator.set_state({"next_index": position.step_of(self.batch)})

    def close(self) -> None:
        """End the reading thread; afterwards there are no more batches."""
        if not self._closed:
            self._closed = True
            self._iterator.close()


def make_loader(
    data: Dataset,
    split: str,
    *,
    batch: int,
    seq: int,
    seed: int = 0,
    places: Sequence[int] | None = None,
    repeat: bool,
) -> Loader[Any]:
    """Open the loader of a split (`BatchPlan` explains the arguments); `places` None feeds all rows of the batch.

    ValueError if the split has not one batch, or for a place outside the batch.
    """
    for name, value in (("batch", batch), ("seq", seq)):
        if value < 1:
            raise ValueError(f"{name}={value}: use 1 or more.")
    rows = np.arange(batch) if places is None else np.asarray(places, np.int64)
    if not rows.size or rows.min() < 0 or rows.max() >= batch:
        raise ValueError(f"places={rows.tolist()} are not all places of batch={batch}, which are 0 to {batch - 1}.")
    return data.loader(split, BatchPlan(batch, seq, seed, repeat, rows))


def make_batch(windows: Sequence[np.ndarray], seq: int, bos_id: int) -> Batch:
    """Arrays of a batch of text from windows of at most seq + 1 tokens.

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
