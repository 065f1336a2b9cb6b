"""Writes tokenised pieces as one flat stream of tokens, split into shard files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from io import BufferedWriter
from pathlib import Path

import numpy as np

from valkyrie.data.cut import PIECE_CHARS, DocumentPiece
from valkyrie.data.manifest import Split, TokenShard
from valkyrie.data.threads import map_ahead
from valkyrie.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class EncodedDocuments:
    """Encoded pieces of documents, all in one split. Each document is preceded by BOS.

    `documents` is the number of documents that begin in these pieces, and `bytes` the size of the text in UTF-8.
    """

    split: str
    ids: np.ndarray
    documents: int
    bytes: int


def encode_pieces(
    pieces: list[DocumentPiece], tokenizer: Tokenizer, token_bytes: np.ndarray, dtype: np.dtype
) -> list[EncodedDocuments]:
    """Encode pieces. Returns one entry per split that occurs, with the tokens in the order of the pieces.

    `token_bytes` has the number of bytes of each token, to compute the size of documents that are given as tokens.
    """
    bos = np.array([tokenizer.bos_id], dtype)
    encoded_documents = []
    for split in dict.fromkeys(piece.split for piece in pieces):
        parts: list[np.ndarray] = []
        document_count = size = 0
        for piece in pieces:
            if piece.split != split:
                continue
            if piece.is_first:
                parts.append(bos)
                document_count += 1
            if isinstance(piece.content, str):
                parts.append(tokenizer.encode_ordinary(piece.content).astype(dtype))
                size += len(piece.content.encode("utf-8", errors="replace"))
            else:
                parts.append(piece.content.astype(dtype))
                size += int(token_bytes[piece.content].sum())
        encoded_documents.append(EncodedDocuments(split, np.concatenate(parts), document_count, size))
    return encoded_documents


def encode_in_threads(
    pieces: Iterable[DocumentPiece], tokenizer: Tokenizer, dtype: np.dtype, workers: int
) -> Iterator[EncodedDocuments]:
    """Encode pieces with `workers` threads. Yields the results of `encode_pieces` for consecutive groups, in order.

    A group has at least `PIECE_CHARS` characters (or tokens), except the last one.
    """
    function = partial(encode_pieces, tokenizer=tokenizer, token_bytes=tokenizer.token_bytes, dtype=dtype)
    for encoded_documents in map_ahead(function, _group_pieces(pieces), workers=workers, ahead=2 * workers):
        yield from encoded_documents


def _group_pieces(pieces: Iterable[DocumentPiece]) -> Iterator[list[DocumentPiece]]:
    group: list[DocumentPiece] = []
    size = 0
    for piece in pieces:
        group.append(piece)
        size += len(piece.content)
        if size >= PIECE_CHARS:
            yield group
            group, size = [], 0
    if group:
        yield group


MAX_SHARDS = 10_000
"""Maximum number of shards per split, enough for 670 billion tokens with the default of 64 Mi tokens per shard."""
MAX_SMALL_SHARDS = 1_000
"""Maximum number of shards per split if a shard has less than `_SMALL_SHARD_TOKENS` tokens.

Disks write about 100 small files per second, so this many take 10 seconds.
"""
_SMALL_SHARD_TOKENS = 2**16


class ShardWriter:
    """Writes the tokens of one split to shards. Every shard except the last has `shard_tokens` tokens."""

    def __init__(self, path: Path, split: str, dtype: np.dtype, shard_tokens: int) -> None:
        self._path = path
        self._split = split
        self._dtype = dtype
        self._shard_tokens = shard_tokens
        self._shards: list[TokenShard] = []
        self._file: BufferedWriter | None = None
        self._hash = hashlib.sha256()
        self._tokens_in_shard = 0
        self.documents = 0
        self.tokens = 0
        self.bytes = 0

    def add(self, encoded_documents: EncodedDocuments) -> None:
        """Append encoded documents to the shards. Raises ValueError if they need too many shards."""
        limit = MAX_SMALL_SHARDS if self._shard_tokens < _SMALL_SHARD_TOKENS else MAX_SHARDS
        if self.tokens + encoded_documents.ids.size > limit * self._shard_tokens:
            raise ValueError(
                f"data.shard_tokens={self._shard_tokens}: this data needs more than {limit:,} files. Use a larger "
                "value, or leave it out."
            )
        self.documents += encoded_documents.documents
        self.bytes += encoded_documents.bytes
        self.tokens += encoded_documents.ids.size
        remaining_ids = encoded_documents.ids
        while remaining_ids.size:
            if self._file is None:
                self._file = (self._path / self._name()).open("wb")
            part, remaining_ids = np.split(remaining_ids, [self._shard_tokens - self._tokens_in_shard])
            data = part.astype(self._dtype).tobytes()
            self._file.write(data)
            self._hash.update(data)
            self._tokens_in_shard += part.size
            if self._tokens_in_shard == self._shard_tokens:
                self._close_shard()

    def finish(self) -> Split:
        """Close the last shard and return the split: its counts and shards."""
        self._close_shard()
        return Split(self.documents, self.tokens, self.bytes, tuple(self._shards))

    def abort(self) -> None:
        """Close the open file, leaving the shards incomplete."""
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
        self._shards.append(TokenShard(self._name(), self._tokens_in_shard, self._hash.hexdigest()))
        self._hash = hashlib.sha256()
        self._tokens_in_shard = 0
