"""Tokenizers: bytes, the GPT-2 vocabulary kept in this package, any tiktoken encoding, files, trained ones by name.

A tokenizer has three answers that cost nothing (`vocab_size_of`, `fingerprint_of`, `check_name`) and one that loads
its vocabulary (`load_tokenizer`), so that a cached dataset opens without it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import lzma
from pathlib import Path

import numpy as np
import tiktoken

from valkyrie.data.config import BYTES_VOCAB, NO_TOKENIZER, VOCAB_SIZES
from valkyrie.data.tokenizer_json import json_fingerprint, json_path, json_vocab_size, load_json, trained_names
from valkyrie.data.vocabulary import PATTERNS, Ids, TiktokenTokenizer, Tokenizer, checked_ids

END_OF_TEXT = "<|endoftext|>"
_GPT2_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes as ids 0 to 255, and 256 for BOS."""

    name = "bytes"
    vocab_size = BYTES_VOCAB
    bos_id = 256

    def __init__(self) -> None:
        self.fingerprint = fingerprint_of("bytes")
        self.token_bytes = (np.arange(BYTES_VOCAB) < self.bos_id).astype(np.int32)

    def encode_ordinary(self, text: str) -> np.ndarray:
        """Return the UTF-8 bytes of a text; lone surrogates become `?`."""
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8)

    def decode_bytes(self, ids: Ids) -> bytes:
        """Return the bytes of ids, without BOS."""
        array = checked_ids(ids, self)
        return array[array != self.bos_id].astype(np.uint8).tobytes()


def load_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer called `bytes`, `gpt2`, a tiktoken encoding name, or that of a file.

    Files are `FILE.tiktoken[:PATTERN]` and `tokenizer.json`, by path, by folder or by the name it was trained under.
    `bytes`, `gpt2` and files need no network. Other encodings are fetched by tiktoken once; where that fails, or the
    name or file does not exist, ValueError says what to do.
    """
    check_name(name)
    if name == "bytes":
        return ByteTokenizer()
    if name == "gpt2":
        packed = (Path(__file__).parent / "gpt2.tiktoken.xz").read_bytes()
        return _from_ranks(name, _parse_ranks(lzma.decompress(packed), "gpt2.tiktoken.xz"), "r50k")
    if _is_file_name(name):
        path, pattern = _file_and_pattern(name)
        return _from_ranks(name, _parse_ranks(path.read_bytes(), str(path)), pattern)
    if (file := json_path(name)) is not None:
        return load_json(name, file, fingerprint_of(name))
    return _from_tiktoken(name)


def vocab_size_of(name: str) -> int:
    """Return how many ids a tokenizer has; a well-known one is not loaded for it."""
    if name in VOCAB_SIZES:
        return VOCAB_SIZES[name]
    file = None if _is_file_name(name) else json_path(name)
    return load_tokenizer(name).vocab_size if file is None else json_vocab_size(file)


def fingerprint_of(name: str) -> str:
    """Return a tokenizer's fingerprint without loading it: tiktoken pins what a name holds, a file is hashed."""
    check_name(name)
    if name == "gpt2":
        identity = f"gpt2 {_GPT2_SHA256}"
    elif _is_file_name(name):
        path, pattern = _file_and_pattern(name)
        identity = f"file {hashlib.sha256(path.read_bytes()).hexdigest()} {PATTERNS[pattern]}"
    elif name != "bytes" and (file := json_path(name)) is not None:
        identity = json_fingerprint(file)
    else:
        identity = name
    return hashlib.sha256(f"tokenizer {identity}".encode()).hexdigest()[:16]


def identity_of(name: str) -> dict[str, str]:
    """Return what a checkpoint says of its tokenizer: the name it was asked by, and its fingerprint."""
    return {"name": name, "fingerprint": name if name == NO_TOKENIZER else fingerprint_of(name)}


def check_name(name: str) -> None:
    """Raise ValueError, with the choices, for a name that is neither known to tiktoken nor a file."""
    if name in VOCAB_SIZES:
        return
    if _is_file_name(name):
        _file_and_pattern(name)
        return
    if json_path(name) is not None:
        return
    known = tiktoken.list_encoding_names()
    if name not in known:
        choices = ", ".join(["bytes", *sorted(known), *trained_names()])
        raise ValueError(
            f"tokenizer={name} is not known. Use one of {choices}, or the path of a .tiktoken file or tokenizer.json."
        )


def _is_file_name(name: str) -> bool:
    return name.endswith(".tiktoken") or ".tiktoken:" in name


def _file_and_pattern(name: str) -> tuple[Path, str]:
    stem, _, pattern = name.rpartition(".tiktoken")
    pattern = pattern.removeprefix(":") or "r50k"
    path = Path(f"{stem}.tiktoken").expanduser()
    if pattern not in PATTERNS:
        raise ValueError(f"tokenizer={name}: pattern {pattern!r} is not one of {', '.join(PATTERNS)}.")
    if not path.is_file():
        raise ValueError(f"tokenizer={name}: there is no file {path} (looked from {Path.cwd()}).")
    return path, pattern


def _parse_ranks(data: bytes, what: str) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise ValueError(
                f"{what}, line {number}: expected a base64 token and its rank, found {line[:60]!r}."
            ) from None
    missing = [value for value in range(256) if bytes([value]) not in ranks]
    if missing:
        raise ValueError(f"{what} lacks {len(missing)} of the 256 single bytes, so it cannot encode every text.")
    return ranks


def _from_ranks(name: str, ranks: dict[bytes, int], pattern: str) -> TiktokenTokenizer:
    bos_id = max(ranks.values()) + 1
    encoding = tiktoken.Encoding(
        name, pat_str=PATTERNS[pattern], mergeable_ranks=ranks, special_tokens={END_OF_TEXT: bos_id}
    )
    return TiktokenTokenizer(name, encoding, bos_id, fingerprint_of(name))


def _from_tiktoken(name: str) -> TiktokenTokenizer:
    import requests

    try:
        encoding = tiktoken.get_encoding(name)
    except (requests.RequestException, OSError) as error:
        raise ValueError(
            f"tokenizer={name} has to be fetched once and the network did not answer ({type(error).__name__}). Set "
            f"TIKTOKEN_CACHE_DIR to a folder that has it, give a local FILE.tiktoken:PATTERN, or use gpt2 or bytes."
        ) from None
    if END_OF_TEXT not in encoding.special_tokens_set:
        raise ValueError(f"tokenizer={name} has no {END_OF_TEXT} to start a document with. Use gpt2 or cl100k_base.")
    return TiktokenTokenizer(name, encoding, encoding.encode_single_token(END_OF_TEXT), fingerprint_of(name))
