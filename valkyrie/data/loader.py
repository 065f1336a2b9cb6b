"""The data loader: which row of a dataset goes to which step, place in the batch and process, read ahead of the loop.

Row i of a split is the window of tokens from i * seq to (i + 1) * seq, and its targets are the tokens one further:
windows are packed documents, and every token but the first is a target once. Training draws a new order of the rows
every epoch from the seed; evaluation keeps their order and pads the last ones. The global batch of a step depends on
nothing but the data, the seed, `batch` and `seq`: processes only divide it, so a run may continue on another number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int32

from valkyrie.data.batches import Batch, Loader, make_batch, places_of
from valkyrie.data.manifest import Prepared
from valkyrie.data.stream import Streamed

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


class PreparedLoader(Loader):
    """Batches of a split of token shards."""

    def __init__(
        self, stream: TokenStream, rows: int, places: np.ndarray, batch: int, seq: int, seed: int, repeat: bool
    ) -> None:
        import grain

        prepared = stream.prepared
        super().__init__(batch, {"split": stream.name, "seq": seq, "seed": seed, "content": prepared.content})
        source = grain.MapDataset.source(_Rows(stream, seq, rows))
        ordered = source.shuffle(seed=_mixed(seed)).repeat() if repeat else source
        steps = grain.MapDataset.source(_Steps(ordered, places, batch, seq, prepared.bos_id))
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=_BATCHES_AHEAD)
        self._iterator = iter(steps.to_iter_dataset(options))
        self._closed = False
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

    def restore(self, state: dict[str, Any]) -> None:
        """Go to a place that `state` returned, here or on another number of processes.

        ValueError if the data, seed, seq or split differ, or if the place is no multiple of this batch.
        """
        self._iterator.set_state({"next_index": self._step_of(state)})

    def close(self) -> None:
        """End the reading thread; afterwards there are no more batches."""
        if not self._closed:
            self._closed = True
            self._iterator.close()


def open_split(prepared: Prepared, split: str) -> TokenStream:
    """Return the tokens of the split `train` or `validation`; ValueError if there are fewer than two."""
    stream = TokenStream(prepared, split)
    if len(stream) < 2:
        raise ValueError(f"data={prepared.name} has {len(stream)} tokens in its {split} split; it needs 2 or more.")
    return stream


def make_loader(
    prepared: Prepared | Streamed,
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
    if isinstance(prepared, Streamed):
        from valkyrie.data.stream_loader import StreamLoader

        return StreamLoader(prepared, split, places_of(batch, places), batch, seq, seed, repeat)
    stream = open_split(prepared, split)
    targets = len(stream) - 1
    rows = check_enough(prepared, split, batch, seq) if repeat else -(-targets // (seq * batch)) * batch
    return PreparedLoader(stream, rows, places_of(batch, places), batch, seq, seed, repeat)


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


def _mixed(seed: int) -> int:
    """Return 32 bits of the seed's hash: grain adds the epoch to a seed, and two seeds must not share orders."""
    return int.from_bytes(hashlib.sha256(f"row order {seed}".encode()).digest()[:4], "big")
