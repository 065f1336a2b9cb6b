"""Base config of all data sources. Does not import NumPy, so that settings can be checked in milliseconds."""

from __future__ import annotations

import dataclasses
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from valkyrie.buckets import url_scheme
from valkyrie.extensions import Families, has_key
from valkyrie.paths import cache_root
from valkyrie.problems import Problem, check_range, raise_problems
from valkyrie.processes.team import ALONE, Team

if TYPE_CHECKING:
    from valkyrie.data.batches import Dataset

TEXT = "text"
"""Kind of data with `tokens`, `targets`, `segment_ids` and `weights` in its batches (`valkyrie.data.batches`)."""
PUZZLES = "puzzles"
"""Kind of data with `inputs`, `labels` and `puzzles` in its batches (`valkyrie.data.sources.puzzles.loader`)."""

BYTES_VOCAB = 257
"""Vocabulary size of the tokenizer `bytes`: 256 bytes and BOS."""
NO_TOKENIZER = "none"
"""Tokenizer name of models and data without text."""
VOCAB_SIZES = {
    "bytes": BYTES_VOCAB,
    "gpt2": 50257,
    "r50k_base": 50257,
    "p50k_base": 50281,
    "cl100k_base": 100277,
    "o200k_base": 200019,
}
"""Vocabulary sizes of well-known tokenizers. For other tokenizers, `read_vocab_size` reads the vocabulary."""
MAX_SEED = 2**31 - 1
"""Maximum seed, because JAX takes seeds as signed 32-bit integers."""

# fmt: off
_FLAT_KEYS = frozenset({
    "name", "source", "paths", "field", "column", "tokenizer", "validation_fraction", "cache_dir", "shard_tokens",
    "workers", "val_paths", "packing", "pool", "lanes", "chunk", "language", "shuffle_seed", "max_bytes", "documents",
    "mean_length", "states", "generator_seed", "sudoku", "augment",
})
# fmt: on
"""The keys of `data` in old `run.yaml` files, which have all of these keys because all sources shared one config."""


class DataCheck(NamedTuple):
    """Result of checking a run's data without preparing it.

    Args:
        text: one line about the data, such as its number of tokens.
        advice: what to change if something looks wrong, or None.
        content: hash of the prepared data, which is compared between processes, or None if unknown.
    """

    text: str
    advice: str | None = None
    content: str | None = None


@dataclass
class DataConfig(ABC):
    """Base of the config of every data source.

    Args:
        name: name of the YAML in `conf/data`, for messages.
        source: the module that defines the config, one of `SOURCES`.
        shuffle_seed: seed of the order of the training rows, or None for the run's seed.
    """

    kind: ClassVar[str] = TEXT
    """Kind of the batches: `TEXT`, `PUZZLES` or another name. A task trains on one kind of data."""

    name: str
    source: str
    shuffle_seed: int | None = None

    def problems(self) -> list[Problem]:
        """Return the problems of the settings, found without reading the data."""
        limits = {"least": 0, "most": MAX_SEED}
        return check_range("data.shuffle_seed", self.shuffle_seed, **limits, otherwise="null for the seed of the run")

    def raise_problems(self) -> None:
        """Raise ProblemError, listing all `problems` of the settings, if there are any."""
        raise_problems(self.problems())

    def with_full_paths(self) -> DataConfig:
        """Return a copy of this config that is valid in any working directory.

        The fields `paths`, `val_paths` and `cache_dir`, if present, become absolute. URLs stay unchanged.
        """
        keys = {field.name for field in dataclasses.fields(self)}
        values = {key: getattr(self, key) for key in ("paths", "val_paths", "cache_dir") if key in keys}
        full_paths = {
            key: [*map(full_path, value)] if isinstance(value, list) else full_path(value)
            for key, value in values.items()
        }
        return dataclasses.replace(self, **full_paths)

    def tokenizer_for(self, default: str) -> str:
        """Return the name of the tokenizer set in this config, or `default` (the model's tokenizer) if none is set."""
        return default

    @abstractmethod
    def open(self, tokenizer: str, team: Team = ALONE, say: Callable[[str], object] | None = None) -> Dataset:
        """Open the data, preparing it first if necessary. Raises ValueError for mistakes in settings or files.

        Args:
            tokenizer: name of the tokenizer; sources without text ignore it.
            team: the processes of the run. Process 0 calls this first.
            say: called with messages for the user, such as before a slow operation; or None.
        """

    @abstractmethod
    def check(self, tokenizer: str, batch: int, seq: int, steps: int) -> DataCheck:
        """Check that the data exists and has at least one batch, as far as possible without preparing it.

        Raises ValueError or OSError if not.

        Args:
            tokenizer: name of the tokenizer.
            batch: number of rows in a global batch.
            seq: number of tokens (or puzzle cells) in a row.
            steps: number of steps of the run, to report how often the data repeats.
        """

    def note(self, data: Dataset) -> str | None:
        """Return a remark about the opened data for the user, or None."""
        return None


SOURCES = Families("data.source", "valkyrie.data.sources", DataConfig)
"""Data sources by name: modules with a dataclass `Config` derived from `DataConfig`."""


def default_cache_dir() -> str:
    """Return the default folder of prepared data, inside `cache_root`."""
    return str(cache_root() / "data")


def full_path(path: str) -> str:
    """Return the absolute path of a file, with `~` expanded. Returns an empty path or a URL unchanged."""
    return path if not path or url_scheme(path) else os.path.abspath(os.path.expanduser(path))


def is_tokenizer_file(tokenizer: str) -> bool:
    """Return whether a tokenizer is named by a path, such as `gpt2.tiktoken`, `mine.tiktoken:r50k` or `folder/mine`."""
    return tokenizer.endswith((".tiktoken", ".json")) or ".tiktoken:" in tokenizer or "/" in tokenizer


def trained_tokenizer_path(name: str) -> Path:
    """Return the path of a trained tokenizer. It is in the cache, so `data.tokenizer=NAME` works from every folder."""
    return cache_root() / "tokenizers" / f"{name}.json"


def source_names(kind: str) -> list[str]:
    """Return the names of Valkyrie's own sources with this `DataConfig.kind`."""
    return [name for name in SOURCES.names() if SOURCES.config_class(name).kind == kind]


def without_foreign_keys(data: Mapping[Any, Any]) -> Mapping[str, object]:
    """Return the `data` values of a `run.yaml` without the keys of other sources.

    Only old files have such keys: those with all of `_FLAT_KEYS`. Other files are returned unchanged.
    """
    if not data.keys() >= _FLAT_KEYS:
        return data
    config = SOURCES.config_class(str(data["source"]))

    def keep_valid(values: Mapping[Any, Any], prefix: str = "") -> Mapping[str, object]:
        valid = {key: value for key, value in values.items() if has_key(config, f"{prefix}{key}")}
        return {k: keep_valid(v, f"{prefix}{k}.") if isinstance(v, dict) else v for k, v in valid.items()}

    return keep_valid(data)
