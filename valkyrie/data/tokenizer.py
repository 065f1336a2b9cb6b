"""Finds and loads tokenizers by name: built-in ones, tiktoken encodings, files, and tokenizers trained on this machine.

`read_fingerprint` does not load a vocabulary, so that a cached dataset opens quickly.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import lzma
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tiktoken

from valkyrie.checksums import digest
from valkyrie.data.config import BYTES_VOCAB, NO_TOKENIZER, VOCAB_SIZES
from valkyrie.data.tokenizer_json import (
    json_vocab_size,
    load_tokenizer_json,
    tokenizer_json_path,
    trained_tokenizer_names,
)
from valkyrie.data.vocabulary import SPLIT_PATTERNS, Ids, TiktokenTokenizer, Tokenizer, checked_ids
from valkyrie.problems import suggest

END_OF_TEXT = "<|endoftext|>"
_GPT2_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes as ids 0 to 255, and 256 for BOS."""

    name = "bytes"
    vocab_size = BYTES_VOCAB
    bos_id = 256

    def __init__(self) -> None:
        self.fingerprint = read_fingerprint("bytes")
        self.token_bytes = (np.arange(BYTES_VOCAB) < self.bos_id).astype(np.int32)

    def encode_ordinary(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8)

    def decode_bytes(self, ids: Ids) -> bytes:
        array = checked_ids(ids, self)
        return array[array != self.bos_id].astype(np.uint8).tobytes()


@dataclass(frozen=True)
class _TokenizerFile:
    """The file of a tokenizer.

    Args:
        path: path of the file.
        pattern: key in `SPLIT_PATTERNS` of the pattern that splits text, for a .tiktoken file. None for a
            tokenizer.json, which contains its pattern.
    """

    path: Path
    pattern: str | None

    @property
    def identity(self) -> str:
        """A string that changes with the content of the file and its pattern."""
        content = digest(self.path.read_bytes())
        return f"tokenizer.json {content}" if self.pattern is None else f"file {content} {SPLIT_PATTERNS[self.pattern]}"


def load_tokenizer(name: str) -> Tokenizer:
    """Load a tokenizer. tiktoken downloads encodings other than `gpt2` once; no other tokenizer needs the network.

    Raises ValueError if there is no such tokenizer, its file is invalid, the tokenizer lacks a BOS token or drops
    spaces, the download fails, or the package tokenizers is needed but not installed.

    Args:
        name: `bytes`, `gpt2`, another tiktoken encoding, `FILE.tiktoken[:PATTERN]` with a key of `SPLIT_PATTERNS`
            (default `r50k`), or a tokenizer.json, given by its path, its folder or the name it was trained under.
    """
    file = _find_file(name)
    if file is not None:
        if file.pattern is None:
            return load_tokenizer_json(name, file.path, read_fingerprint(name))
        return _tokenizer_from_ranks(name, _parse_ranks(file.path.read_bytes(), str(file.path)), file.pattern)
    if name == "bytes":
        return ByteTokenizer()
    if name == "gpt2":
        compressed_ranks = (Path(__file__).parent / "gpt2.tiktoken.xz").read_bytes()
        return _tokenizer_from_ranks(name, _parse_ranks(lzma.decompress(compressed_ranks), "gpt2.tiktoken.xz"), "r50k")
    return _tokenizer_from_tiktoken(name)


def read_vocab_size(name: str) -> int:
    """Return the vocabulary size of a tokenizer.

    Loads the tokenizer only if it is a .tiktoken file or an encoding that is not in `VOCAB_SIZES`.
    """
    if name in VOCAB_SIZES:
        return VOCAB_SIZES[name]
    file = _find_file(name)
    return json_vocab_size(file.path) if file and file.pattern is None else load_tokenizer(name).vocab_size


def read_fingerprint(name: str) -> str:
    """Return the fingerprint of a tokenizer: a hash of its file or, for `bytes` and tiktoken encodings, of its name.

    The fingerprint of a .tiktoken file also covers its pattern, and that of `gpt2` the packaged vocabulary. Raises
    ValueError if there is no such tokenizer.
    """
    file = _find_file(name)
    identity = file.identity if file else f"gpt2 {_GPT2_SHA256}" if name == "gpt2" else name
    return digest(f"tokenizer {identity}")[:16]


@contextlib.contextmanager
def tokenizer_errors(key: str) -> Iterator[None]:
    """Name the setting `key`, such as `data.tokenizer`, in each ValueError of this module, instead of `tokenizer`."""
    try:
        yield
    except ValueError as error:
        if type(error) is ValueError:  # changed in place, so that it keeps its notes and its traceback
            error.args = (re.sub(r"(?<![\w.])tokenizer(?==)", key, str(error)),)
        raise


def check_tokenizer_name(name: str) -> None:
    """Raise ValueError for names that cannot be given to a trained tokenizer, such as `gpt2` or `none`."""
    if name in ("", ".", "..", NO_TOKENIZER) or "/" in name or ".tiktoken" in name:
        raise ValueError(
            f"--save {name!r} is not a valid name. Use a name such as mine, or a path such as ./mine.json."
        )
    if name in VOCAB_SIZES or name in tiktoken.list_encoding_names():
        raise ValueError(f"--save {name}: tokenizer={name} is a built-in tokenizer. Use another name.")


def tokenizer_identity(name: str) -> dict[str, str]:
    """Return a dict with the `name` and `fingerprint` of a tokenizer, as stored in checkpoints."""
    return {"name": name, "fingerprint": name if name == NO_TOKENIZER else read_fingerprint(name)}


def _find_file(name: str) -> _TokenizerFile | None:
    """Return the file of a tokenizer, or None for `bytes` and tiktoken encodings.

    Raises ValueError if there is no such tokenizer.
    """
    if name in VOCAB_SIZES:
        return None
    if name.endswith(".tiktoken") or ".tiktoken:" in name:
        stem, _, pattern = name.rpartition(".tiktoken")
        file = _TokenizerFile(Path(f"{stem}.tiktoken").expanduser(), pattern.removeprefix(":") or "r50k")
        if file.pattern not in SPLIT_PATTERNS:
            raise ValueError(f"tokenizer={name}: pattern {file.pattern!r} is not one of {', '.join(SPLIT_PATTERNS)}.")
        if not file.path.is_file():
            raise ValueError(f"tokenizer={name}: there is no file {file.path} (current folder: {Path.cwd()}).")
        return file
    if (path := tokenizer_json_path(name)) is not None:
        return _TokenizerFile(path, None)
    encodings = tiktoken.list_encoding_names()
    if name not in encodings:
        choices = ["bytes", *sorted(encodings), *trained_tokenizer_names()]
        hint = f"Did you mean tokenizer={nearest}? " if (nearest := suggest(name, choices)) else ""
        path = Path(name).expanduser()
        fault = "is a folder without a tokenizer.json" if path.is_dir() else "is unknown"
        if path.is_file():
            fault = "is a file, but its name ends in neither .tiktoken nor .json"
        raise ValueError(
            f"tokenizer={name} {fault}. {hint}Use one of {', '.join(choices)}, or the path of a .tiktoken file or "
            "tokenizer.json."
        )
    return None


def _parse_ranks(data: bytes, source: str) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for line_number, line in enumerate(data.splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise ValueError(
                f"{source}, line {line_number}: expected a base64 token and its rank, not {line[:60]!r}."
            ) from None
    missing_bytes = [value for value in range(256) if bytes([value]) not in ranks]
    if missing_bytes:
        raise ValueError(
            f"{source} lacks {len(missing_bytes)} of the 256 single bytes, so it cannot encode every text."
        )
    return ranks


def _tokenizer_from_ranks(name: str, ranks: dict[bytes, int], pattern: str) -> TiktokenTokenizer:
    bos_id = max(ranks.values()) + 1
    encoding = tiktoken.Encoding(
        name, pat_str=SPLIT_PATTERNS[pattern], mergeable_ranks=ranks, special_tokens={END_OF_TEXT: bos_id}
    )
    return TiktokenTokenizer(name, encoding, bos_id, read_fingerprint(name))


def _tokenizer_from_tiktoken(name: str) -> TiktokenTokenizer:
    import requests

    try:
        encoding = tiktoken.get_encoding(name)
    except (requests.RequestException, OSError) as error:
        raise ValueError(
            f"tokenizer={name} must be downloaded once, but the download failed ({type(error).__name__}). Set "
            "TIKTOKEN_CACHE_DIR to a folder with the downloaded file, or use gpt2, bytes or a local file "
            "(FILE.tiktoken:PATTERN)."
        ) from None
    if END_OF_TEXT not in encoding.special_tokens_set:
        raise ValueError(
            f"tokenizer={name} has no token {END_OF_TEXT} to mark the beginning of a document. Use gpt2 or cl100k_base."
        )
    return TiktokenTokenizer(name, encoding, encoding.encode_single_token(END_OF_TEXT), read_fingerprint(name))
