"""Interfaces of prepared data: batches, data positions stored in checkpoints, and loaders."""

from __future__ import annotations

import dataclasses
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar, runtime_checkable

import numpy as np

from valkyrie.records import decode, encode

Batch = dict[str, np.ndarray]
"""The arrays of a batch, with rows as the first dimension. Text has `tokens`, `targets`, `segment_ids` (int32) and
`weights` (float32), each [rows, seq]."""
_BATCHES_AHEAD = 2
OTHER_DATA = (
    "data= differs from the data that this run was trained on: the files, their text, the tokenizer or the validation "
    "split changed. Use the same data, or start a new run with another name=."
)
"""The error message for a run that continues on other data."""


@dataclass(frozen=True)
class BatchPlan:
    """Defines the batches of a loader.

    Args:
        batch: number of rows in a global batch.
        seq: number of tokens (or puzzle cells) in a row.
        seed: seed of the row order.
        repeat: True for training: rows in a new order every epoch, forever. False for evaluation: every row once, in
            order, with the last batch padded.
        rows: indices of the rows of the global batch that this process loads.
    """

    batch: int
    seq: int
    seed: int
    repeat: bool
    rows: np.ndarray


@runtime_checkable
class Dataset(Protocol):
    """Data that is ready to be loaded in batches."""

    @property
    def name(self) -> str:
        """Name of the data config."""
        ...

    @property
    def content(self) -> str:
        """Hash of the content, equal on every machine with the same prepared data."""
        ...

    @property
    def tokenizer(self) -> str:
        """Name of the tokenizer, or `none` if the data is not text."""
        ...

    def describe(self) -> str:
        """Return a one-line summary for the user, such as the number of tokens in each split."""
        ...

    def loader(self, split: str, plan: BatchPlan) -> Loader[Any]:
        """Open the loader of the split `train` or `validation`.

        Raises ValueError if the split does not fit the plan, for example if it has less than one training batch.
        """
        ...


@dataclass(frozen=True)
class DataPosition(ABC):
    """A position in the batches of a split, stored in checkpoints as JSON. Equal on all processes of a run.

    The fields named in `progress_fields` advance during the run. All other fields determine the order of the rows and
    must not change.

    Args:
        version: format version of the position.
        split: `train` or `validation`.
        seed: seed of the row order.
        content: hash of the data (`Dataset.content`).
    """

    progress_fields: ClassVar[tuple[str, ...]] = ()
    current_version: ClassVar[int] = 1
    """Format version of new positions. `Loader.restore` refuses positions with another version."""

    version: int
    split: str
    seed: int
    content: str

    @abstractmethod
    def to_step(self, batch: int) -> int:
        """Return the step that begins at this position.

        Raises ValueError if no step begins here, because the position was saved with another batch size.
        """

    @abstractmethod
    def at_step(self, step: int, batch: int) -> DataPosition:
        """Return a copy of this position, moved to the beginning of `step`. `batch` is the size of a global batch."""


@dataclass(frozen=True)
class RowPosition(DataPosition):
    """A position in rows of tokens: all processes together have yielded `row` rows of `seq` tokens."""

    progress_fields: ClassVar[tuple[str, ...]] = ("row",)

    seq: int
    row: int

    def to_step(self, batch: int) -> int:
        step, remainder = divmod(self.row, batch)
        if remainder:
            divisor = next(size for size in range(batch - 1, 0, -1) if self.row % size == 0)
            raise ValueError(
                f"batch={batch}: the checkpoint was saved after row {self.row:,} of the data, which is not a multiple "
                f"of {batch}. Use a batch size that divides {self.row:,}, such as batch={divisor}."
            )
        return step

    def at_step(self, step: int, batch: int) -> RowPosition:
        return dataclasses.replace(self, row=step * batch)


Position = TypeVar("Position", bound=DataPosition)


class Loader(Iterator[Batch], AbstractContextManager["Loader[Any]"], Generic[Position]):
    """An iterator over this process's part of global batches, with a position that can be saved and restored.

    Close it, or use it in a `with`, to stop its background threads or processes.

    Args:
        batch: rows of a global batch.
        start: the position before the first batch.
    """

    def __init__(self, batch: int, start: Position) -> None:
        self.batch, self.start = batch, start

    @property
    @abstractmethod
    def step(self) -> int:
        """Number of global batches yielded so far, including those before a restart."""

    def position(self) -> Position:
        """Return the position of the next batch. Call it on all processes, because some loaders exchange positions."""
        position = self.start.at_step(self.step, self.batch)
        assert isinstance(position, type(self.start)), (
            f"{type(self.start).__name__}.at_step returned a {type(position).__name__}"
        )
        return position

    def state(self) -> Mapping[str, object]:
        """Return the position of the next batch, as JSON values for a checkpoint. Call it on all processes."""
        return encode(self.position())

    @abstractmethod
    def go_to(self, position: Position) -> None:
        """Continue with the batch at `position`, which must have the data and row order of `start`."""

    @abstractmethod
    def close(self) -> None:
        """Stop reading ahead. There are no more batches afterwards."""

    def restore(self, saved_position: Mapping[str, object], *, seed_key: str = "data.shuffle_seed") -> None:
        """Continue from a saved position. The number of processes may differ.

        Raises ValueError if the position is damaged or has another format version, if the data or anything else that
        determines the row order differs, or if no step begins at the position. `seed_key` is the setting of the seed,
        for error messages.
        """
        if saved_position.get("version") != self.start.current_version:
            raise ValueError(
                f"the data position in the checkpoint has format version {saved_position.get('version')}, but this "
                f"Valkyrie reads only version {self.start.current_version}. Resume with the Valkyrie that saved it, or "
                "start a new run."
            )
        position = decode(type(self.start), dict(saved_position), "the data position in the checkpoint")
        for field in dataclasses.fields(self.start):
            saved_value, current_value = getattr(position, field.name), getattr(self.start, field.name)
            if saved_value != current_value and field.name not in self.start.progress_fields:
                raise ValueError(_position_refusal(field.name, saved_value, current_value, seed_key))
        self.go_to(position)

    def __exit__(self, *error: object) -> None:
        self.close()


def _position_refusal(field: str, saved_value: object, current_value: object, seed_key: str) -> str:
    if field == "content":
        return OTHER_DATA
    key = seed_key if field == "seed" else field if field in ("seq", "split", "batch") else f"data.{field}"
    alternative = f" or data.shuffle_seed={saved_value}" if key == "seed" else ""
    return (
        f"{key}={current_value}, but the checkpoint was saved with {key}={saved_value}, which gives other rows. Use "
        f"{key}={saved_value}{alternative}, or start a new run with another name=."
    )


class IndexedLoader(Loader[Position]):
    """A loader that computes each batch from its step number. A grain thread reads ahead.

    Args:
        plan: the batches.
        start: the position before the first batch.
        batches: random-access data source for grain; `batches[step]` has this process's rows of that step.
    """

    def __init__(self, plan: BatchPlan, start: Position, batches: Any) -> None:
        import grain

        super().__init__(plan.batch, start)
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=_BATCHES_AHEAD)
        self._iterator = iter(grain.MapDataset.source(batches).to_iter_dataset(options))
        self._closed = False

    def __next__(self) -> Batch:
        if self._closed:
            raise StopIteration
        return next(self._iterator)

    @property
    def step(self) -> int:
        return int(self._iterator.get_state()["next_index"])

    def go_to(self, position: Position) -> None:
        self._iterator.set_state({"next_index": position.to_step(self.batch)})

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._iterator.close()


def hash_seed(purpose: str, seed: int) -> int:
    """Return a 32-bit hash of a purpose, such as `row order`, and a seed.

    grain adds the epoch to the seed. Without the hash, epoch 1 of seed 0 would have the order of epoch 0 of seed 1.
    """
    return int.from_bytes(hashlib.sha256(f"{purpose} {seed}".encode()).digest()[:4], "big")


def make_loader(
    data: Dataset,
    split: str,
    *,
    batch: int,
    seq: int,
    seed: int = 0,
    rows: Sequence[int] | None = None,
    repeat: bool,
) -> Loader[Any]:
    """Open the loader of a split. `batch`, `seq`, `seed` and `repeat` are those of `BatchPlan`.

    `rows` has the indices of the rows of the global batch to load (`BatchPlan.rows`), or is None for all rows. Raises
    ValueError if `batch` or `seq` is below 1, if `rows` is empty or has an index outside the batch, or if the split
    does not fit the plan (see `Dataset.loader`).
    """
    for name, value in (("batch", batch), ("seq", seq)):
        if value < 1:
            raise ValueError(f"{name}={value}: use 1 or more.")
    row_indices = np.arange(batch) if rows is None else np.asarray(rows, np.int64)
    if not row_indices.size or row_indices.min() < 0 or row_indices.max() >= batch:
        raise ValueError(f"rows={row_indices.tolist()} must be rows of batch={batch}, from 0 to {batch - 1}.")
    return data.loader(split, BatchPlan(batch, seq, seed, repeat, row_indices))


def make_batch(windows: Sequence[np.ndarray], seq: int, bos_id: int) -> Batch:
    """Build the arrays of a text batch from windows of at most seq + 1 tokens.

    `segment_ids` number the documents of a row from 1, increasing at every BOS; padding is segment 0. `weights` are 1
    for targets and 0 for padding. The BOS of the next document is a target too, so that models learn where a document
    ends.
    """
    padded_windows = np.full((len(windows), seq + 1), bos_id, np.int32)
    lengths = np.array([len(window) for window in windows], np.int64)
    for row, window in zip(padded_windows, windows, strict=True):
        row[: len(window)] = window
    tokens, targets = padded_windows[:, :-1], padded_windows[:, 1:]
    weights = (np.arange(seq) < (lengths - 1)[:, None]).astype(np.float32)
    is_bos = tokens == bos_id
    segments = np.cumsum(is_bos, axis=1, dtype=np.int32) + ~is_bos[:, :1]
    return {
        "tokens": np.ascontiguousarray(tokens),
        "targets": np.ascontiguousarray(targets),
        "segment_ids": segments * weights.astype(np.int32),
        "weights": weights,
    }
