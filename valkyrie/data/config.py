"""The configuration of a dataset; imports nothing, so that it is checked before NumPy loads."""

from __future__ import annotations

import dataclasses
from enum import Enum


class Source(Enum):
    """Where the text comes from."""

    stdlib = "stdlib"
    text = "text"
    synthetic = "synthetic"


@dataclasses.dataclass
class DataConfig:
    """One dataset: where its documents come from, how they become tokens, and how they are split.

    `paths`: for `source=text`, files, directories or globs (`~` and `**` known, relative to the current directory);
    a single directory written by `valkyrie-data prepare` is used as it is.
    `field`: the key that holds the text in .jsonl; `column`: the column that holds it in .parquet.
    `tokenizer`: `bytes`, `gpt2`, another tiktoken encoding, or a .tiktoken file; null is the model's.
    `validation_fraction`: expected share of documents kept for evaluation.
    `cache_dir`: where token shards are kept, and found again by content.
    `shard_tokens`: tokens in one shard file; `workers`: tokenising threads, null for one a CPU core.
    `shuffle_seed`: the order in which training rows are read; null takes the run's seed.
    `max_bytes`: stop after so many bytes of UTF-8 text, null for all.
    `documents`, `mean_length` (tokens), `states`, `generator_seed`: the size, alphabet and seed of the synthetic chain.
    """

    name: str = "stdlib"
    source: Source = Source.stdlib
    paths: list[str] = dataclasses.field(default_factory=list)
    field: str = "text"
    column: str = "text"
    tokenizer: str | None = None
    validation_fraction: float = 0.05
    cache_dir: str = "~/.cache/valkyrie/data"
    shard_tokens: int = 64 * 1024 * 1024
    workers: int | None = None
    shuffle_seed: int | None = None
    max_bytes: int | None = None
    documents: int = 2000
    mean_length: int = 512
    states: int = 64
    generator_seed: int = 0
