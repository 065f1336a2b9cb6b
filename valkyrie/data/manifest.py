"""Prepared token shards on disk, with their manifest and checksum verification.

A dataset is a directory with `manifest.json` and flat little-endian token files. Opening it checks the sizes of all
files. Checksums are checked the first time; `verified.json` records the size and modification time of files that pass.
`verify` checks all checksums again.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from valkyrie.checksums import digest, file_problems
from valkyrie.data.batches import BatchPlan, Loader
from valkyrie.data.files import empty_rows_note
from valkyrie.paths import write_atomic
from valkyrie.problems import Problem
from valkyrie.records import decode, encode
from valkyrie.units import count_text

if TYPE_CHECKING:
    from valkyrie.data.loader import TokenStream

VERSION = 1
MANIFEST_FILE = "manifest.json"
_VERIFIED_FILE = "verified.json"
_TOKEN_SIZES = {"uint16": 2, "uint32": 4}
SPLITS = ("train", "validation")
UNDECODABLE = "undecodable"
"""Key in `Manifest.source` of the documents with the most undecodable characters. Its value maps the ID of each
document to [undecodable characters, all characters]."""
EMPTY_ROWS = "empty_rows"
"""Key in `Manifest.source` of the files with the most rows without text. Its value maps the name of each file to [rows
without text, all rows]. The key `total_empty_rows` has the number of rows without text in all files."""


@dataclass(frozen=True)
class TokenShard:
    """A token file: its name, its number of tokens and its SHA-256."""

    file: str
    tokens: int
    sha256: str


@dataclass(frozen=True)
class Split:
    """A split: its number of documents, tokens (including one BOS per document) and bytes of text, and its shards."""

    documents: int
    tokens: int
    bytes: int
    shards: tuple[TokenShard, ...]


@dataclass(frozen=True)
class Manifest:
    """Contents of `manifest.json`, which describes prepared shards.

    Args:
        key: the cache key, a hash of the files (name, size, modification time), the tokenizer and the settings.
        content: hash of the tokens, equal wherever the same text was prepared with the same tokenizer and settings.
        source: description of the source, for people.
        dtype: type of a token, `uint16` or `uint32`.
    """

    name: str
    key: str
    content: str
    source: Mapping[str, object]
    tokenizer: str
    tokenizer_fingerprint: str
    vocab_size: int
    bos_id: int
    dtype: str
    train: Split
    validation: Split


@dataclass(frozen=True)
class PreparedText(Manifest):
    """A folder of token shards, with the values of its manifest."""

    path: Path = field(kw_only=True)

    def split(self, name: str) -> Split:
        """Return the split called `train` or `validation`. Raises ValueError for other names."""
        if name not in SPLITS:
            raise ValueError(f"there is no split {name!r}: use {' or '.join(SPLITS)}.")
        return self.train if name == "train" else self.validation

    @cached_property
    def streams(self) -> dict[str, TokenStream]:
        """The tokens of each split, by split name.

        Both splits are opened together and stay open, so that a run can continue after the data cache is deleted.
        """
        from valkyrie.data.loader import TokenStream

        return {split: TokenStream(self, split) for split in SPLITS}

    def loader(self, split: str, plan: BatchPlan) -> Loader[Any]:
        from valkyrie.data.loader import ShardLoader

        return ShardLoader(self, split, plan)

    def describe(self) -> str:
        """Return one line with the number of tokens in each split and the tokenizer."""
        return (
            f"data {self.name}: {self.train.tokens:,} training tokens, {self.validation.tokens:,} validation tokens "
            f"({self.tokenizer})"
        )

    def undecodable_note(self) -> str | None:
        """Return a message about the document with the most undecodable characters, or None if all text is UTF-8."""
        documents = self.source.get(UNDECODABLE)
        if not isinstance(documents, Mapping) or not documents:
            return None
        name, (replaced, characters) = next(iter(documents.items()))
        total = self.source["undecodable_characters"]
        total_text = f" ({total:,} in all documents)" if total != replaced else ""
        share = 100 * replaced / characters
        characters_text = count_text(replaced, "U+FFFD character")
        return f"{name}: text that is not UTF-8 was replaced by {characters_text} ({share:.2g}%){total_text}"

    def empty_rows_note(self) -> str | None:
        """Return a note about the file with the most rows without text, or None if all rows have text."""
        files, total = self.source.get(EMPTY_ROWS), self.source.get(f"total_{EMPTY_ROWS}")
        return empty_rows_note(files, total) if isinstance(files, Mapping) and isinstance(total, int) else None

    @property
    def shards(self) -> tuple[TokenShard, ...]:
        """The shards of both splits."""
        return self.train.shards + self.validation.shards

    def shard_path(self, shard: TokenShard) -> Path:
        return self.path / shard.file

    @property
    def token_size(self) -> int:
        """Size of a token in a shard, in bytes."""
        return _TOKEN_SIZES[self.dtype]


def content_hash(train: Split, validation: Split, dtype: str, bos_id: int) -> str:
    """Return a hash of all tokens, computed from the checksums of the shards. It also depends on `shard_tokens`."""
    return digest([dtype, bos_id, [[shard.sha256 for shard in split.shards] for split in (train, validation)]])[:32]


def write_manifest(dataset: PreparedText) -> None:
    """Write `manifest.json`. Called after all shards are written, so that a folder with a manifest is complete."""
    values = {key: value for key, value in encode(dataset).items() if key != "path"}
    write_atomic(dataset.path / MANIFEST_FILE, json.dumps({"version": VERSION, **values}, indent=1))


class CorruptShardsError(ValueError):
    """Shards of a dataset are missing or damaged. `problems` has one problem for each such shard."""

    def __init__(self, dataset: PreparedText, problems: list[Problem]) -> None:
        self.problems = problems
        damaged_count = f"{len(problems)} of {count_text(len(dataset.shards), 'shard')}"
        super().__init__(
            f"the dataset {dataset.path} is corrupt: {damaged_count} {'is' if len(problems) == 1 else 'are'} damaged "
            f"({'; '.join(map(str, problems))}). Delete the folder, and the data is prepared again from its source."
        )


def open_dataset(path: Path | str) -> PreparedText:
    """Open the dataset in a directory, after checking its files against its manifest.

    Checks the sizes of all shards, but the checksums only of shards that are new or have changed since they were last
    verified. Raises CorruptShardsError if a shard is missing or damaged, and ValueError like `read_manifest`.
    """
    dataset = read_manifest(Path(path).expanduser())
    verified_stamps = _read_verified_stamps(dataset)
    trusted_files = [
        shard.file for shard in dataset.shards if verified_stamps.get(shard.file) == _stamp(dataset, shard)
    ]
    _check_shards(dataset, trusted_files)
    if len(trusted_files) < len(dataset.shards) and os.access(dataset.path, os.W_OK):
        stamps = {shard.file: _stamp(dataset, shard) for shard in dataset.shards}
        with contextlib.suppress(OSError):  # on a full disk, the next command checks them again
            write_atomic(dataset.path / _VERIFIED_FILE, json.dumps(stamps))
    return dataset


def verify(path: Path | str) -> PreparedText:
    """Open the dataset in a directory, after checking all sizes and checksums.

    If a shard is missing or damaged, deletes `verified.json`, so that `open_dataset` does not trust the shards, and
    raises CorruptShardsError. Raises ValueError like `read_manifest`.
    """
    dataset = read_manifest(Path(path).expanduser())
    try:
        _check_shards(dataset)
    except CorruptShardsError:
        with contextlib.suppress(OSError):  # the folder may be read-only
            (dataset.path / _VERIFIED_FILE).unlink()
        raise
    return dataset


def read_manifest(path: Path) -> PreparedText:
    """Read `manifest.json`. Raises ValueError if it is missing, damaged or of another version."""
    file = path / MANIFEST_FILE
    if not file.is_file():
        raise ValueError(f"{path} is not a dataset written by valkyrie-data prepare: {_describe_other_path(path)}")
    try:
        values = json.loads(file.read_bytes())
        if not isinstance(values, dict):
            raise ValueError("not a JSON object")
        if "version" not in values:
            raise ValueError("the key version is missing")
        version = values.pop("version")
        if version == VERSION:
            dataset = PreparedText(**vars(decode(Manifest, values, str(file))), path=path.resolve())
            if dataset.dtype not in _TOKEN_SIZES:
                raise ValueError(f"dtype={dataset.dtype} is not one of {', '.join(_TOKEN_SIZES)}")
            return dataset
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file} is damaged ({error}). Delete {path} and prepare the data again.") from None
    raise ValueError(
        f"{file} has version {version}, but this program reads only version {VERSION}. Prepare the data again."
    )


def _describe_other_path(path: Path) -> str:
    """Return the end of the error message for a path without a manifest: what it is, and which path to use instead."""
    if not path.exists():
        return f"there is no such folder (current folder: {Path.cwd()})."
    if not path.is_dir():
        return f"it is a file. Pass its folder: {path.parent}." if path.name == MANIFEST_FILE else "it is a file."
    if datasets := sorted(file.parent for file in path.glob(f"*/{MANIFEST_FILE}")):
        more_text = f" ({len(datasets) - 1} more)" if len(datasets) > 1 else ""
        pronoun = "one of them" if len(datasets) > 1 else "it"
        return f"it contains {count_text(len(datasets), 'dataset')}. Pass {pronoun}: {datasets[-1]}{more_text}."
    return f"it has no {MANIFEST_FILE}. Pass the path that `valkyrie-data prepare` printed."


def _check_shards(dataset: PreparedText, trusted_files: Sequence[str] = ()) -> None:
    expected = {shard.file: (shard.tokens * dataset.token_size, shard.sha256) for shard in dataset.shards}
    if problems := [*file_problems(dataset.path, expected, trusted_files)]:
        raise CorruptShardsError(dataset, problems)


def _stamp(dataset: PreparedText, shard: TokenShard) -> list[int | str] | None:
    path = dataset.shard_path(shard)
    if not path.is_file():
        return None
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, shard.sha256]


def _read_verified_stamps(dataset: PreparedText) -> Mapping[str, object]:
    try:
        stamps = json.loads((dataset.path / _VERIFIED_FILE).read_bytes())
    except (OSError, ValueError):
        return {}
    return stamps if isinstance(stamps, dict) else {}
