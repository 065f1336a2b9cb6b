"""Writes tokenised pieces as one flat stream of tokens, cut into shard files."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from io import BufferedWriter
from pathlib import Path

import numpy as np

from valkyrie.data.cut import PIECE_CHARS, Piece
from valkyrie.data.manifest import Shard, Split
from valkyrie.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Tokens:
    """What some pieces of one split became; BOS stands before every document."""

    split: str
    ids: np.ndarray
    documents: int
    bytes: int


def encode(pieces: list[Piece], tokenizer: Tokenizer, token_bytes: np.ndarray, dtype: np.dtype) -> list[Tokens]:
    """Return the tokens of some pieces, one entry a split, in the order of the pieces."""
    bos = np.array([tokenizer.bos_id], dtype)
    encoded = []
    for split in dict.fromkeys(piece.split for piece in pieces):
        parts: list[np.ndarray] = []
        documents = size = 0
        for piece in pieces:
            if piece.split != split:
                continue
            if piece.first:
                parts.append(bos)
                documents += 1
            if isinstance(piece.content, str):
                parts.append(tokenizer.encode_ordinary(piece.content).astype(dtype))
                size += len(piece.content.encode("utf-8", errors="replace"))
            else:
                parts.append(piece.content.astype(dtype))
                size += int(token_bytes[piece.content].sum())
        encoded.append(Tokens(split, np.concatenate(parts), documents, size))
    return encoded


def encode_all(pieces: Iterable[Piece], tokenizer: Tokenizer, dtype: np.dtype, workers: int) -> Iterator[Tokens]:
    """Yield the tokens of all pieces in their order, encoded by `workers` threads, a few pieces a thread in memory."""
    token_bytes = tokenizer.token_bytes
    pool = ThreadPoolExecutor(workers, thread_name_prefix="valkyrie-tokenise")
    waiting: deque[Future[list[Tokens]]] = deque()
    try:
        for group in _groups(pieces):
            waiting.append(pool.submit(encode, group, tokenizer, token_bytes, dtype))
            if len(waiting) > 2 * workers:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _groups(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    group: list[Piece] = []
    size = 0
    for piece in pieces:
        group.append(piece)
        size += len(piece.content)
        if size >= PIECE_CHARS:
            yield group
            group, size = [], 0
    if group:
        yield group


class ShardWriter:
    """Writes the stream of one split; every shard but the last holds `shard_tokens`."""

    def __init__(self, path: Path, split: str, dtype: np.dtype, shard_tokens: int) -> None:
        self._path = path
        self._split = split
        self._dtype = dtype
        self._shard_tokens = shard_tokens
        self._shards: list[Shard] = []
        self._file: BufferedWriter | None = None
        self._sum = hashlib.sha256()
        self._in_shard = 0
        self.documents = 0
        self.tokens = 0
        self.bytes = 0

    def add(self, tokens: Tokens) -> None:
        """Append to the stream."""
        self.documents += tokens.documents
        self.bytes += tokens.bytes
        self.tokens += tokens.ids.size
        rest = tokens.ids
        while rest.size:
            if self._file is None:
                self._file = (self._path / self._name()).open("wb")
            now, rest = np.split(rest, [self._shard_tokens - self._in_shard])
            data = now.astype(self._dtype).tobytes()
            self._file.write(data)
            self._sum.update(data)
            self._in_shard += now.size
            if self._in_shard == self._shard_tokens:
                self._close_shard()

    def finish(self) -> Split:
        """Close the last shard and return the counts."""
        self._close_shard()
        return Split(self.documents, self.tokens, self.bytes, tuple(self._shards))

    def abort(self) -> None:
        """Close the open file and leave the rest."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _name(self) -> str:
        return f"{self._split}-{len(self._shards):05d}.bin"

    def _close_shard(self) -> None:
        if self._file is None:
            return
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        self._shards.append(Shard(self._name(), self._in_shard, self._sum.hexdigest()))
        self._sum = hashlib.sha256()
        self._in_shard = 0
