"""The data loader: which row of a dataset goes to which step, place in the batch and process, read ahead of the loop.

Row i of a split is the window of tokens from i * seq to (i + 1) * seq, and its targets are the tokens one further:
windows are packed documents, and every token but the first is a target once. Training draws a new order of the rows
every epoch from the seed; evaluation keeps their order and pads the last ones. The global batch of a step depends on
nothing but the data, the seed, `batch` and `seq`: processes only divide it, so a run may continue on another number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import numpy as np
from jaxtyping import Int32

from valkyrie.data.manifest import Prepared

Batch = dict[str, np.ndarray]
"""`tokens`, `targets`, `segment_ids` (int32) and `weights` (float32), each [rows, seq]."""

STATE_VERSION = 1
_BATCHES_AHEAD = 2


class TokenStream:
    """The tokens of a split as one long array that lies in several files."""

    def __init__(self, prepared: Prepared, split: str) -> None:
        self.prepared = prepared
        self.name = split
        self._shards = [
            np.memmap(prepared.shard_path(shard), dtype=np.dtype(prepared.dtype).newbyteorder("<"), mode="r")
            for shard in prepared.split(split).shards
        ]
        self._starts = np.concatenate([[0], np.cumsum([len(shard) for shard in self._shards], dtype=np.int64)])

    def __len__(self) -> int:
        """Tokens in the split."""
        return int(self._starts[-1])

    def read(self, start: int, stop: int) -> Int32[np.ndarray, " tokens"]:
        """Return the tokens from `start` up to `stop`; fewer at the end of the stream."""
        stop = min(stop, len(self))
        parts = [np.zeros(0, np.int32)]
        while start < stop:
            number = int(np.searchsorted(self._starts, start, side="right")) - 1
            offset, end = int(self._starts[number]), min(stop, int(self._starts[number + 1]))
            parts.append(self._shards[number][start - offset : end - offset].astype(np.int32))
            start = end
        return np.concatenate(parts)


class _Rows:
    """The windows of a stream, for grain; beyond the last come empty ones, which are all padding."""

    def __init__(self, stream: TokenStream, seq: int, rows: int) -> None:
        self._stream, self._seq, self._rows = stream, seq, rows

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> np.ndarray:
        start = index * self._seq
        return self._stream.read(start, start + self._seq + 1)


class _Steps:
    """The share of one process in every global batch, for grain."""

    def __init__(self, rows: Any, places: np.ndarray, batch: int, seq: int, bos_id: int) -> None:
        self._rows, self._places, self._batch, self._seq, self._bos_id = rows, places, batch, seq, bos_id

    def __len__(self) -> int:
        return len(self._rows) // self._batch

    def __getitem__(self, index: int) -> Batch:
        first = index * self._batch
        return make_batch([self._rows[first + int(place)] for place in self._places], self._seq, self._bos_id)


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


class Loader(Iterator[Batch]):
    """An iterator over batches that knows its place; close it (or use it in a `with`) to end its thread."""

    def __init__(
        self, stream: TokenStream, rows: int, places: np.ndarray, batch: int, seq: int, seed: int, repeat: bool
    ) -> None:
        import grain

        prepared = stream.prepared
        source = grain.MapDataset.source(_Rows(stream, seq, rows))
        ordered = source.shuffle(seed=_mixed(seed)).repeat() if repeat else source
        steps = grain.MapDataset.source(_Steps(ordered, places, batch, seq, prepared.bos_id))
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=_BATCHES_AHEAD)
        self._iterator = iter(steps.to_iter_dataset(options))
        self._identity = {"split": stream.name, "seq": seq, "seed": seed, "content": prepared.content}
        self._closed = False
        self.batch = batch
        self.batches = None if repeat else len(steps)
        """Batches until the end; None if there is none."""
        self.rows = rows
        """Rows of an epoch (with the padding rows of an evaluation)."""

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
        """Times the rows of the split were given out, all processes together."""
        return self.step * self.batch / self.rows

    def state(self) -> dict[str, Any]:
        """Return the place of the next batch, as JSON values; the same on every process."""
        return {"version": STATE_VERSION, "row": self.step * self.batch, **self._identity}

    def restore(self, state: dict[str, Any]) -> None:
        """Go to a place that `state` returned, here or on another number of processes.

        ValueError if the data, seed, seq or split differ, or if the place is no multiple of this batch.
        """
        if state.get("version") != STATE_VERSION:
            raise ValueError(
                f"the data position has version {state.get('version')}; this program reads version {STATE_VERSION}."
            )
        for name, mine in self._identity.items():
            if state[name] != mine and name == "content":
                raise ValueError(
                    "the data are not those that the run was trained on: other files, other text in them, another "
                    "tokenizer or another split. Use the same data, or another name=."
                )
            if state[name] != mine:
                raise ValueError(
                    f"the data position was saved with {_WORDS[name]}={state[name]}, this run has {mine}: its rows "
                    f"come in another order. Use the same {_WORDS[name]}, or another name=."
                )
        step, rest = divmod(state["row"], self.batch)
        if rest:
            raise ValueError(
                f"the data position is row {state['row']:,}, not a multiple of batch={self.batch}. "
                f"Use a batch that divides it, such as {_divisor(state['row'], self.batch)}."
            )
        self._iterator.set_state({"next_index": step})

    def close(self) -> None:
        """End the reading thread; afterwards there are no more batches."""
        if not self._closed:
            self._closed = True
            self._iterator.close()

    def __enter__(self) -> Loader:
        """Return the loader itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()


_WORDS = {"split": "split", "seq": "seq", "seed": "data.shuffle_seed"}


def open_split(prepared: Prepared, split: str) -> TokenStream:
    """Return the tokens of the split `train` or `validation`; ValueError if there are fewer than two."""
    stream = TokenStream(prepared, split)
    if len(stream) < 2:
        raise ValueError(f"data={prepared.name} has {len(stream)} tokens in its {split} split; it needs 2 or more.")
    return stream


def make_loader(
    prepared: Prepared,
    split: str,
    *,
    batch: int,
    seq: int,
    seed: int = 0,
    places: Sequence[int] | None = None,
    repeat: bool,
) -> Loader:
    """Return an iterator over this process's part of global batches of `batch` rows of `seq` tokens.

    `repeat=True` (training): rows in a new order every epoch, for ever. `repeat=False` (evaluation): rows in their
    order, once, the last ones padded with weight 0, so that every target counts exactly once.
    `places` are the rows of the global batch that this process feeds; None means all of them.
    ValueError, with the numbers, if the split has not one batch of rows.
    """
    for name, value in (("batch", batch), ("seq", seq)):
        if value < 1:
            raise ValueError(f"{name}={value}: use 1 or more.")
    stream = open_split(prepared, split)
    targets = len(stream) - 1
    rows = check_enough(prepared, split, batch, seq) if repeat else -(-targets // (seq * batch)) * batch
    return Loader(stream, rows, _places(batch, places), batch, seq, seed, repeat)


def check_enough(prepared: Prepared, split: str, batch: int, seq: int) -> int:
    """Return the rows of `seq` tokens that a split has; ValueError, with the numbers, if they are not one batch."""
    tokens = prepared.split(split).tokens
    has = f"data={prepared.name} has {tokens:,} tokens in its {split} split"
    targets = tokens - 1
    rows = targets // seq
    if rows < 1:
        raise ValueError(f"{has}: too few for one row of seq={seq}. Use seq<={targets}, or more text.")
    if rows < batch:
        shorter = f" or seq<={targets // batch}" if targets >= batch else ""
        raise ValueError(
            f"{has}: {rows:,} rows of seq={seq}, fewer than batch={batch}. Use batch<={rows}{shorter}, or more text."
        )
    return rows


def _places(batch: int, places: Sequence[int] | None) -> np.ndarray:
    given = np.arange(batch) if places is None else np.asarray(places, np.int64)
    if not given.size or given.min() < 0 or given.max() >= batch:
        raise ValueError(f"places={given.tolist()} are not all places of batch={batch}, which are 0 to {batch - 1}.")
    return given


def _mixed(seed: int) -> int:
    """Return 32 bits of the seed's hash: grain adds the epoch to a seed, and two seeds must not share orders."""
    return int.from_bytes(hashlib.sha256(f"row order {seed}".encode()).digest()[:4], "big")


def _divisor(row: int, batch: int) -> int:
    """Return the largest batch below `batch` that ends at `row`."""
    return next(size for size in range(batch - 1, 0, -1) if row % size == 0)
