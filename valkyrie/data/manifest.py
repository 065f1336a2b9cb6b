"""Prepared token shards on disk: their manifest, and when their checksums are compared.

A directory holds `manifest.json` and flat little-endian token files. Sizes are compared whenever it is opened.
Checksums are compared the first time, and remembered in `verified.json` by size and modification time; `verify` reads
all again.
"""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from valkyrie.data.batches import BatchPlan, Loader
from valkyrie.paths import write_whole
from valkyrie.records import decode, encode

VERSION = 1
MANIFEST = "manifest.json"
_VERIFIED = "verified.json"
SPLITS = ("train", "validation")


@dataclass(frozen=True)
class Shard:
    """A token file: its name, how many tokens it holds, and its SHA-256."""

    file: str
    tokens: int
    sha256: str


@dataclass(frozen=True)
class Split:
    """Documents, tokens (with one BOS a document) and bytes of UTF-8 text of a split, and its shards in order."""

    documents: int
    tokens: int
    bytes: int
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class Manifest:
    """Record of prepared shards, `manifest.json`.

    Args:
        key: the cache key, of files by name, size and time, tokenizer and split.
        content: hash of the tokens, equal wherever the same text was prepared with the same tokenizer.
        source: what was read, for people.
        dtype: `uint16` or `uint32`, the type of a token.
    """

    name: str
    key: str
    content: str
    source: dict[str, Any]
    tokenizer: str
    tokenizer_fingerprint: str
    vocab_size: int
    bos_id: int
    dtype: str
    train: Split
    validation: Split


@dataclass(frozen=True)
class Prepared(Manifest):
    """A folder of shards."""

    path: Path = field(kw_only=True)

    def split(self, name: str) -> Split:
        """Return the split called `train` or `validation`."""
        if name not in SPLITS:
            raise ValueError(f"there is no split {name!r}: use {' or '.join(SPLITS)}.")
        return self.train if name == "train" else self.validation

    def loader(self, split: str, plan: BatchPlan) -> Loader[Any]:
        """Loader of the split `train` or `validation`."""
        from valkyrie.data.loader import PreparedLoader

        return PreparedLoader(self, split, plan)

    def describe(self) -> str:
        """Return how much text there is, in a line."""
        return (
            f"data {self.name}: {self.train.tokens:,} training tokens, {self.validation.tokens:,} validation tokens "
            f"({self.tokenizer})"
        )

    def shard_path(self, shard: Shard) -> Path:
        """Return where a shard lies."""
        return self.path / shard.file

    @property
    def token_size(self) -> int:
        """Bytes of a token in a shard."""
        return {"uint16": 2, "uint32": 4}[self.dtype]


def content_hash(shards: dict[str, list[Shard]], dtype: str, bos_id: int) -> str:
    """Return the hash of all tokens, from the checksums of their shards."""
    contents = [dtype, bos_id, [[shard.sha256 for shard in shards[name]] for name in SPLITS]]
    return hashlib.sha256(json.dumps(contents).encode()).hexdigest()[:32]


def write_manifest(prepared: Prepared) -> None:
    """Write `manifest.json`; the last file of a preparation."""
    values = {key: value for key, value in encode(prepared).items() if key != "path"}
    write_whole(prepared.path / MANIFEST, json.dumps({"version": VERSION, **values}, indent=1))


def open_prepared(path: Path | str) -> Prepared:
    """Return the dataset in a directory, after its files were compared with its manifest.

    ValueError names every file that is missing, has another size, or (the first time after a change) another checksum.
    """
    prepared = read_manifest(Path(path).expanduser())
    _raise_problems(prepared, size_problems(prepared))
    verified = _read_verified(prepared)
    unverified = [shard for shard in _shards(prepared) if verified.get(shard.file) != _stamp(prepared, shard)]
    if unverified:
        _raise_problems(prepared, checksum_problems(prepared, unverified))
        _remember(prepared)
    return prepared


def verify(path: Path | str) -> Prepared:
    """Return the dataset in a directory after every byte was read and compared with its checksum, else ValueError."""
    prepared = read_manifest(Path(path).expanduser())
    _raise_problems(prepared, size_problems(prepared))
    _raise_problems(prepared, checksum_problems(prepared, _shards(prepared)))
    return prepared


def read_manifest(path: Path) -> Prepared:
    """Return what `manifest.json` says; ValueError if it is missing, damaged or of another version."""
    file = path / MANIFEST
    if not file.is_file():
        raise ValueError(f"{path} has no {MANIFEST}: it is not a dataset written by valkyrie-data prepare.")
    try:
        values = json.loads(file.read_bytes())
        version = values.pop("version")
        if version == VERSION:
            return Prepared(**vars(decode(Manifest, values, str(file))), path=path.resolve())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is damaged ({error}). Remove {path} and prepare again.") from None
    raise ValueError(f"{file} has version {version}; this program reads version {VERSION}. Prepare the data again.")


def size_problems(prepared: Prepared) -> list[str]:
    """Return what is wrong with the presence and the sizes of the shards: nothing, if all is well."""
    problems = []
    for shard in _shards(prepared):
        path, expected = prepared.shard_path(shard), shard.tokens * prepared.token_size
        if not path.is_file():
            problems.append(f"{shard.file} is missing ({shard.tokens:,} tokens)")
        elif (size := path.stat().st_size) != expected:
            problems.append(f"{shard.file} has {size:,} bytes, its manifest says {expected:,}")
    return problems


def checksum_problems(prepared: Prepared, shards: list[Shard]) -> list[str]:
    """Return which of the shards do not hold what was written: none, if all is well."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        sums = pool.map(lambda shard: _sha256(prepared.shard_path(shard)), shards)
        return [
            f"{shard.file} has SHA-256 {actual[:12]}, its manifest says {shard.sha256[:12]}"
            for shard, actual in zip(shards, sums, strict=True)
            if actual != shard.sha256
        ]


def _shards(prepared: Prepared) -> list[Shard]:
    return [*prepared.train.shards, *prepared.validation.shards]


def _raise_problems(prepared: Prepared, problems: list[str]) -> None:
    if problems:
        total = len(_shards(prepared))
        raise ValueError(
            f"the dataset {prepared.path} is corrupt, {len(problems)} of {total} shards: {'; '.join(problems)}. "
            f"Remove the directory; it is prepared again from its source."
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _stamp(prepared: Prepared, shard: Shard) -> list[int | str]:
    status = prepared.shard_path(shard).stat()
    return [status.st_size, status.st_mtime_ns, shard.sha256]


def _read_verified(prepared: Prepared) -> dict[str, Any]:
    file = prepared.path / _VERIFIED
    if not file.is_file():
        return {}
    try:
        stamps = json.loads(file.read_bytes())
    except ValueError:
        return {}
    return stamps if isinstance(stamps, dict) else {}


def _remember(prepared: Prepared) -> None:
    if not os.access(prepared.path, os.W_OK):
        return
    stamps = {shard.file: _stamp(prepared, shard) for shard in _shards(prepared)}
    write_whole(prepared.path / _VERIFIED, json.dumps(stamps))
