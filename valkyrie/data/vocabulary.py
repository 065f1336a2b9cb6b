"""The tokenizer interface, the patterns that split text into words, and tokenizers that wrap a tiktoken encoding."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import SupportsIndex

import numpy as np
import tiktoken
from jaxtyping import Int32

Ids = Sequence[SupportsIndex] | np.ndarray
"""Token ids, as a list of integers or an array."""

SPLIT_PATTERNS = {
    "r50k": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",
    "cl100k": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
    "o200k": "|".join(
        [
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
            r"\p{N}{1,3}",
            r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        ]
    ),
}
SPLIT_PATTERNS["nanochat"] = SPLIT_PATTERNS["cl100k"].replace("{1,3}", "{1,2}")
"""Patterns that split a text before byte pairs are merged, by the name used in `FILE.tiktoken:PATTERN`. `nanochat`
limits numbers to two digits, which suits a small vocabulary."""


class Tokenizer(ABC):
    """Encodes text as token ids, and decodes ids to text.

    Attributes:
        name: the name or path that it was loaded from.
        vocab_size: ids are below this.
        bos_id: the id placed before every document; no text encodes to it.
        fingerprint: hash that changes whenever any text would get other ids.
        token_bytes: bytes of UTF-8 per id, 0 for special ids: the denominator of bits per byte.
    """

    name: str
    vocab_size: int
    bos_id: int
    fingerprint: str
    token_bytes: Int32[np.ndarray, " vocab"]

    @abstractmethod
    def encode_ordinary(self, text: str) -> np.ndarray:
        """Return the ids of a text as unsigned integers, without BOS.

        Encodes names of special tokens as ordinary text, and lone surrogates as `?`.
        """

    @abstractmethod
    def decode_bytes(self, ids: Ids) -> bytes:
        """Return the UTF-8 bytes of ids, leaving out BOS.

        Use this to stream text token by token, because a token may end inside a character.
        """

    def decode(self, ids: Ids) -> str:
        """Return the text of ids, without BOS. Bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")


class TiktokenTokenizer(Tokenizer):
    """A tiktoken encoding with `<|endoftext|>`, or another special token, as BOS."""

    def __init__(self, name: str, encoding: tiktoken.Encoding, bos_id: int, fingerprint: str) -> None:
        self.name = name
        self.encoding = encoding
        self.bos_id = bos_id
        self.fingerprint = fingerprint
        self.vocab_size = encoding.n_vocab
        self.token_bytes = _token_bytes(encoding)

    def encode_ordinary(self, text: str) -> np.ndarray:
        """Return the ids of a text. tiktoken releases the GIL, so threads can encode in parallel."""
        try:
            return self.encoding.encode_to_numpy(text, disallowed_special=())
        except UnicodeEncodeError:  # a lone surrogate has no UTF-8
            return self.encode_ordinary(text.encode("utf-8", errors="replace").decode("utf-8"))

    def decode_bytes(self, ids: Ids) -> bytes:
        array = checked_ids(ids, self)
        return self.encoding.decode_bytes(array[array != self.bos_id].tolist())


def _token_bytes(encoding: tiktoken.Encoding) -> Int32[np.ndarray, " vocab"]:
    """Return the number of bytes of each id, 0 for special ids and gaps in the vocabulary."""
    lengths = np.zeros(encoding.n_vocab, np.int32)
    values = encoding.token_byte_values()
    lengths[[encoding.encode_single_token(value) for value in values]] = [len(value) for value in values]
    return lengths


def checked_ids(ids: Ids, tokenizer: Tokenizer) -> np.ndarray:
    """Return ids as a one-dimensional int64 array. Raises ValueError if an id is not in 0 to `vocab_size` - 1."""
    array = np.asarray(ids, dtype=np.int64).reshape(-1)
    if array.size and not (array.min() >= 0 and array.max() < tokenizer.vocab_size):
        invalid_id = array[(array < 0) | (array >= tokenizer.vocab_size)][0]
        raise ValueError(
            f"token id {invalid_id} is outside the {tokenizer.vocab_size} ids of tokenizer={tokenizer.name}. "
            f"Mask the padding of the vocabulary before sampling."
        )
    return array
