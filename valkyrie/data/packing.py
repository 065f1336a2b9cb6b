"""Packs documents into rows of seq + 1 tokens: windows of one stream, or best-fit rows that begin with a document.

The documents come from a lane, which is a share of the data that is read in order (`valkyrie.data.stream`). Both kinds
of packing can resume after any row.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterator

import numpy as np

from valkyrie.data.sources.parquet_stream import Packing
from valkyrie.data.stream import Lane, LaneDocument, LanePosition

_EMPTY = np.zeros(0, np.int32)


class StreamPacker:
    """Consecutive windows of the concatenated documents. Each row begins with the last token of the previous one.

    Every token except the first is a target once.
    """

    def __init__(self, lane: Lane, seq: int, pool_size: int, start: LanePosition) -> None:
        self._seq = seq
        self._next_position, self._offset = start.next, start.offset
        self._documents = lane.documents(self._next_position)
        self._buffered_documents: deque[LaneDocument] = deque()
        self._buffered_tokens = -self._offset

    def next_row(self) -> np.ndarray:
        """Return the next row of seq + 1 tokens, which begins with the last token of the previous row.

        The last row may be shorter. Rows after it are empty.
        """
        while self._buffered_tokens <= self._seq and (document := next(self._documents, None)) is not None:
            self._buffered_documents.append(document)
            self._buffered_tokens += document[1].size
        starts = [self._offset, *[0] * (len(self._buffered_documents) - 1)]
        pieces = [
            ids[start : start + self._seq + 1]
            for start, (_, ids) in zip(starts, self._buffered_documents, strict=False)
        ]
        row = np.concatenate([_EMPTY, *pieces])[: self._seq + 1]
        if row.size <= self._seq:
            self._buffered_documents.clear()
            self._buffered_tokens = self._offset = 0
            return row if row.size > 1 else _EMPTY
        self._offset += self._seq
        self._buffered_tokens -= self._seq
        while self._offset >= self._buffered_documents[0][1].size:
            self._offset -= self._buffered_documents.popleft()[1].size
        self._next_position = self._buffered_documents[0][0]
        return row

    def position(self) -> LanePosition:
        """Return the position of the next row. A new packer can start there."""
        return LanePosition(self._next_position, self._offset)


class BestFitPacker:
    """Rows that begin with a document and are packed best-fit from `pool_size` documents read ahead.

    The next document of a row is the longest one that fits. If none fits, the shortest one is truncated to the space
    left in the row, as in nanochat. Documents longer than a row are always truncated.
    """

    def __init__(self, lane: Lane, seq: int, pool_size: int, start: LanePosition) -> None:
        self._capacity, self._pool_size, self._next_number = seq + 1, pool_size, 0
        self._next_position = start.next
        self._documents = lane.documents(self._next_position)
        self._pool: list[tuple[int, int, LaneDocument]] = []
        for document in lane.fetch(start.pool):
            self._add(document)

    def next_row(self) -> np.ndarray:
        """Return the next row of seq + 1 tokens. The last row may be shorter, and rows after it are empty."""
        parts, space = [_EMPTY], self._capacity
        while space and self._fill():
            fitting_count = bisect_right(self._pool, space, key=_length)
            if fitting_count:
                oldest = bisect_left(
                    self._pool, self._pool[fitting_count - 1][0], key=_length
                )  # the oldest of that size
                parts.append(self._pool.pop(oldest)[2][1])
            else:
                parts.append(self._pool.pop(0)[2][1][:space])
            space -= parts[-1].size
        row = np.concatenate(parts)
        return row if row.size > 1 else _EMPTY

    def position(self) -> LanePosition:
        """Return the position of the next row, with the documents in the pool. A new packer can start there."""
        pool_in_order = sorted(self._pool, key=lambda entry: entry[1])
        return LanePosition(self._next_position, pool=tuple(document[0] for _, _, document in pool_in_order))

    def _fill(self) -> bool:
        while len(self._pool) < self._pool_size and (document := next(self._documents, None)) is not None:
            position = document[0]
            self._next_position = position._replace(document=position.document + 1)
            self._add(document)
        return bool(self._pool)

    def _add(self, document: LaneDocument) -> None:
        position, ids = document
        ids = ids[: self._capacity]
        insort(self._pool, (ids.size, self._next_number, (position, ids)), key=lambda entry: entry[:2])
        self._next_number += 1


def _length(entry: tuple[int, int, LaneDocument]) -> int:
    return entry[0]


PACKERS = {Packing.stream: StreamPacker, Packing.best_fit: BestFitPacker}


def make_packer(lane: Lane, seq: int, start: LanePosition) -> StreamPacker | BestFitPacker:
    """Return the packer that `data.packing` selects, for the documents of a lane, starting at a position."""
    return PACKERS[lane.config.packing](lane, seq, lane.config.pool, start)


def row_batches(packers: list[StreamPacker | BestFitPacker], rows_per_lane: int) -> Iterator[list[np.ndarray]]:
    """Yield lists with `rows_per_lane` rows of each lane, in lane order, until all lanes are exhausted.

    The rows of a lane that is exhausted earlier are empty.
    """
    while True:
        batch = [packer.next_row() for packer in packers for _ in range(rows_per_lane)]
        if not any(row.size for row in batch):
            return
        yield batch
