"""The loader of token shards: assigns rows to steps, batch positions and processes, and reads ahead.

Row i of a split is the window of tokens from i * seq to (i + 1) * seq, and its targets are shifted by one token. A
window may contain several documents. Every token except the first is a target once; training drops the tokens of an
incomplete last row. Training shuffles the rows every epoch using the seed; evaluation keeps their order and pads the
last batch. The global batch of a step depends only on the data, the seed, `batch` and `seq`. Processes divide it among
themselves, so a run may continue on another number of processes.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
from jaxtyping import Int32

from valkyrie.data.batches import Batch, BatchPlan, IndexedLoader, RowPosition, hash_seed, make_batch
from valkyrie.data.manifest import PreparedText
from valkyrie.units import count_text


class TokenStream:
    """The tokens of a split as one long array. Its shard files are memory-mapped."""

    def __init__(self, dataset: PreparedText, split: str) -> None:
        self._paths = [dataset.shard_path(shard) for shard in dataset.split(split).shards]
        self._shards = [
            np.memmap(path, dtype=np.dtype(dataset.dtype).newbyteorder("<"), mode="r") for path in self._paths
        ]
        self._starts = np.concatenate([[0], np.cumsum([len(shard) for shard in self._shards], dtype=np.int64)])

    def __len__(self) -> int:
        """Number of tokens in the split."""
        return int(self._starts[-1])

    def read(self, start: int, stop: int) -> Int32[np.ndarray, " tokens"]:
        """Return the tokens from `start` up to `stop`, or fewer at the end of the stream.

        Raises ValueError if a shard has become shorter, since reading behind the end of a mapped file ends the process.
        A shard that is truncated during the call still does.
        """
        stop = min(stop, len(self))
        parts = [np.zeros(0, np.int32)]
        while start < stop:
            shard_index = int(np.searchsorted(self._starts, start, side="right")) - 1
            self._check_length(shard_index)
            offset, end = int(self._starts[shard_index]), min(stop, int(self._starts[shard_index + 1]))
            parts.append(self._shards[shard_index][start - offset : end - offset].astype(np.int32))
            start = end
        return np.concatenate(parts)

    def _check_length(self, shard_index: int) -> None:
        path = self._paths[shard_index]
        with contextlib.suppress(OSError):  # a deleted file keeps its content while it is mapped
            if path.stat().st_size < self._shards[shard_index].nbytes:
                raise ValueError(
                    f"{path} was truncated while the run was reading it. If {path.parent} is in the cache, delete it, "
                    "and the next run prepares the data again. Otherwise, restore the folder or prepare it again."
                )


class _WindowSource:
    """Random-access data source for grain: the windows of a stream, each of seq + 1 tokens.

    A window at the end may be shorter. Windows beyond the end are empty and become padding.
    """

    def __init__(self, stream: TokenStream, seq: int, rows: int) -> None:
        self._stream, self._seq, self._rows = stream, seq, rows

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> np.ndarray:
        start = index * self._seq
        return self._stream.read(start, start + self._seq + 1)


class _TextSampler:
    """Random-access data source for grain: this process's rows of each global batch."""

    def __init__(self, rows: Any, plan: BatchPlan, bos_id: int) -> None:
        self._rows, self._plan, self._bos_id = rows, plan, bos_id

    def __len__(self) -> int:
        return len(self._rows) // self._plan.batch

    def __getitem__(self, index: int) -> Batch:
        first_row = index * self._plan.batch
        return make_batch([self._rows[first_row + int(row)] for row in self._plan.rows], self._plan.seq, self._bos_id)


class ShardLoader(IndexedLoader[RowPosition]):
    """Loads batches from one split of token shards.

    If `plan.repeat`, rows are shuffled every epoch and batches never end. Otherwise, each row is loaded once, in order.
    """

    def __init__(self, dataset: PreparedText, split: str, plan: BatchPlan) -> None:
        import grain

        stream = open_split(dataset, split)
        if plan.repeat:
            row_count = count_rows(dataset, split, plan.batch, plan.seq)
        else:
            row_count = -(-(len(stream) - 1) // (plan.seq * plan.batch)) * plan.batch
        rows = grain.MapDataset.source(_WindowSource(stream, plan.seq, row_count))
        ordered_rows = rows.shuffle(seed=hash_seed("row order", plan.seed)).repeat() if plan.repeat else rows
        start = RowPosition(RowPosition.current_version, split, plan.seed, dataset.content, plan.seq, 0)
        super().__init__(plan, start, _TextSampler(ordered_rows, plan, dataset.bos_id))


def open_split(dataset: PreparedText, split: str) -> TokenStream:
    """Open the tokens of the split `train` or `validation`.

    Raises ValueError for other splits or fewer than two tokens.
    """
    dataset.split(split)  # refuses other names
    stream = dataset.streams[split]
    if len(stream) < 2:
        size_text = count_text(len(stream), "token")
        raise ValueError(f"data={dataset.name} has {size_text} in its {split} split, but needs 2 or more.")
    return stream


def count_rows(dataset: PreparedText, split: str, batch: int, seq: int) -> int:
    """Return the number of complete rows of `seq` tokens in a split. Raises ValueError if it is below `batch`."""
    token_count = dataset.split(split).tokens
    size_text = f"data={dataset.name} has {count_text(token_count, 'token')} in its {split} split"
    target_count = token_count - 1
    row_count = target_count // seq
    if row_count < 1:
        raise ValueError(f"{size_text}, too few for one row of seq={seq}. Use seq<={target_count}, or more text.")
    if row_count < batch:
        shorter_rows_hint = f" or seq<={target_count // batch}" if target_count >= batch else ""
        raise ValueError(
            f"{size_text}, enough for {count_text(row_count, 'row')} of seq={seq}, but batch={batch}. Use "
            f"batch<={row_count}{shorter_rows_hint}, or more text."
        )
    return row_count
