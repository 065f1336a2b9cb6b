"""The configuration of a dataset; imports little, so that it is checked before NumPy loads."""

from __future__ import annotations

import dataclasses
import os
from enum import Enum

from valkyrie.buckets import needs_disk, scheme_of

BYTES_VOCAB = 257
"""The ids of the tokenizer `bytes`: 256 bytes, and one that begins a document."""
NO_TOKENIZER = "none"
"""The tokenizer of a model that reads no text."""
VOCAB_SIZES = {
    "bytes": BYTES_VOCAB,
    "gpt2": 50257,
    "r50k_base": 50257,
    "p50k_base": 50281,
    "cl100k_base": 100277,
    "o200k_base": 200019,
}
"""How many ids the well-known tokenizers have; of others it is read from their vocabulary."""
SUCCESSOR_WEIGHTS = (0.6, 0.2, 0.15, 0.05)
"""The probabilities with which a state of the synthetic chain is followed by each of its four successors."""
MAX_STATES = 224
"""How many states the synthetic chain may have: the ids of the `bytes` vocabulary from a blank on."""
SEEDS = 2**31
"""Seeds are below it: JAX takes them as 32-bit integers."""


class Source(Enum):
    """Where the text comes from."""

    stdlib = "stdlib"
    text = "text"
    synthetic = "synthetic"
    sudoku = "sudoku"
    puzzles = "puzzles"
    parquet_stream = "parquet_stream"

    @property
    def is_text(self) -> bool:
        """Whether it has documents, not puzzles."""
        return self not in (Source.sudoku, Source.puzzles)


class Packing(Enum):
    """How a stream's documents become rows: one long stream cut, or rows that each begin with a document."""

    stream = "stream"
    best_fit = "best_fit"


class Chunk(Enum):
    """What a document is: a text as it was read, or, in C, C++ and Python, one function or class after the other."""

    whole = "whole"
    functions = "functions"


class Language(Enum):
    """The languages whose functions are told apart."""

    c = "c"
    cpp = "cpp"
    python = "python"


def full_path(path: str) -> str:
    """Return a path in full: from `~` and from the current directory; one that is empty, or a URL, stays so."""
    return path if not path or scheme_of(path) else os.path.abspath(os.path.expanduser(path))


@dataclasses.dataclass
class SudokuConfig:
    """Sudoku grids that are generated: of `side` x `side` cells, `train` and `validation` of them, each solved one way.

    `guesses`: how often a solver that fills in what is forced must guess, at least: 0 takes every puzzle. `clues`: how
    many cells are given at least, 0 for as few as leave one solution. `seed`: that of the generator. Of a CSV, `train`
    and `validation` are the sizes of samples, and `guesses` is the least rating.
    """

    side: int = 9
    train: int = 1000
    validation: int = 1000
    guesses: int = 1
    clues: int = 0
    seed: int = 0

    def problems(self) -> list[str]:
        """Return every reason why there are no such puzzles."""
        problems = []
        if self.side not in (4, 9):
            problems.append(f"data.sudoku.side={self.side}: use 4 or 9.")
        for key in ("train", "validation"):
            if getattr(self, key) < 1:
                problems.append(f"data.sudoku.{key}={getattr(self, key)}: at least 1 is needed.")
        for key in ("guesses", "clues", "seed"):
            if getattr(self, key) < 0:
                problems.append(f"data.sudoku.{key}={getattr(self, key)}: must be at least 0.")
        if self.clues >= self.side**2:
            problems.append(f"data.sudoku.clues={self.clues}: fewer than {self.side**2} cells can be given.")
        if self.side == 4 and self.guesses:
            problems.append(f"data.sudoku.guesses={self.guesses}: no puzzle of 4x4 needs a guess. Use 0.")
        return problems


@dataclasses.dataclass
class DataConfig:
    """One dataset: where its documents come from, how they become tokens, and how they are split.

    `paths`: for `source=text` and `parquet_stream`, files, directories or globs (`~` and `**` known, relative to the
    current directory), and the same in buckets: `gs://bucket/books/*.txt`, `s3://`, and what else fsspec reads;
    a single directory written by `valkyrie-data prepare` is used as it is.
    `field`: the key that holds the text in .jsonl; `column`: the column that holds it in .parquet.
    `tokenizer`: `bytes`, `gpt2`, another tiktoken encoding, a .tiktoken file, a tokenizer.json of Hugging Face, or
    the name of one that `valkyrie-data tokenizer` trained; null is the model's.
    `validation_fraction`: expected share of documents kept for evaluation.
    `cache_dir`: where token shards are kept, and found again by content.
    `shard_tokens`: tokens in one shard file; `workers`: tokenising threads, null for one a CPU core; of a stream
    the processes that read and tokenise, 0 for none but this.
    `val_paths`: of a stream, the files for validation, in place of the last one; `packing`: how it fills rows (`stream`
    or `best_fit`), the latter from `pool` documents a lane read ahead; `lanes`: how many parts of the batch are read
    apart, each from files or row groups of its own, null for up to 16.
    `chunk`: `functions` makes each function or class of C, C++ and Python a document, with what stands before it;
    `language`: the one of .parquet, .jsonl and other files of many documents, whose suffix does not tell it.
    `shuffle_seed`: the order in which training rows are read; null takes the run's seed.
    `max_bytes`: stop after so many bytes of UTF-8 text, null for all.
    `sudoku`: for `source=sudoku`, the grids that are generated. `augment`: draw the symmetries of a Sudoku anew every
    epoch. For `source=puzzles`, `paths` is one folder in the published form (`train/dataset.json`, ...) or one with
    `train.csv` and `test.csv` (source, question, answer, rating).
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
    val_paths: list[str] = dataclasses.field(default_factory=list)
    packing: Packing = Packing.stream
    pool: int = 256
    lanes: int | None = None
    chunk: Chunk = Chunk.whole
    language: Language | None = None
    shuffle_seed: int | None = None
    max_bytes: int | None = None
    documents: int = 2000
    mean_length: int = 512
    states: int = 64
    generator_seed: int = 0
    sudoku: SudokuConfig = dataclasses.field(default_factory=SudokuConfig)
    augment: bool = True

    @property
    def is_text(self) -> bool:
        """Whether it has documents, not puzzles."""
        return self.source.is_text

    def anywhere(self) -> DataConfig:
        """Return this configuration with full paths, which mean the same from every directory."""
        tokenizer = self.tokenizer
        if tokenizer is not None and (tokenizer.endswith((".tiktoken", ".json")) or "/" in tokenizer):
            tokenizer = full_path(tokenizer)
        paths, validation = [[*map(full_path, given)] for given in (self.paths, self.val_paths)]
        places = {"paths": paths, "val_paths": validation, "cache_dir": full_path(self.cache_dir)}
        return dataclasses.replace(self, tokenizer=tokenizer, **places)

    def problems(self) -> list[str]:
        """Return every reason why no dataset can be made of this, in the words of the command line."""
        problems = [*self._path_problems(), *needs_disk("data.cache_dir", self.cache_dir)]
        if not 0 < self.validation_fraction < 1:
            share = self.validation_fraction
            problems.append(f"data.validation_fraction={share}: use a share above 0 and below 1, such as 0.05.")
        if self.shard_tokens < 1:
            problems.append(f"data.shard_tokens={self.shard_tokens}: use 1 or more.")
        if self.max_bytes is not None and self.max_bytes < 1:
            problems.append(f"data.max_bytes={self.max_bytes}: use 1 or more, or null for all.")
        if self.workers is not None and self.workers < (0 if self.source is Source.parquet_stream else 1):
            problems.append(f"data.workers={self.workers}: use 1 or more, or null for one a CPU core.")
        problems += [*self._stream_problems(), *self._chunk_problems()]
        if self.shuffle_seed is not None and not 0 <= self.shuffle_seed < SEEDS:
            problems.append(f"data.shuffle_seed={self.shuffle_seed}: must be from 0 to {SEEDS - 1}, or null for seed.")
        if not len(SUCCESSOR_WEIGHTS) <= self.states <= MAX_STATES:
            problems.append(f"data.states={self.states}: use {len(SUCCESSOR_WEIGHTS)} to {MAX_STATES}.")
        if self.generator_seed < 0:
            problems.append(f"data.generator_seed={self.generator_seed}: must be at least 0.")
        if self.documents < 2:
            few = f"data.documents={self.documents}"
            problems.append(f"{few}: use 2 or more, one for training and one for evaluation.")
        if self.source is Source.sudoku:
            problems += self.sudoku.problems()
        if not self.is_text and self.tokenizer is not None:
            problems.append(f"data.tokenizer={self.tokenizer}: puzzles have no tokenizer. Leave it out.")
        if self.source is Source.puzzles and len(self.paths) != 1:
            problems.append(
                f"data=puzzles needs one folder, and data.paths names {len(self.paths)}. Use data.paths=[DIR]."
            )
        if self.mean_length < 2:
            problems.append(f"data.mean_length={self.mean_length}: use 2 or more tokens.")
        return problems

    def _chunk_problems(self) -> list[str]:
        if self.chunk is Chunk.whole:
            return []
        if self.source not in (Source.text, Source.stdlib, Source.parquet_stream):
            return [f"data.chunk={self.chunk.value} is of code: data={self.name} has none. Leave it out."]
        from valkyrie.data.chunks import missing_package

        missing = missing_package()
        return [missing] if missing else []

    def _stream_problems(self) -> list[str]:
        problems = []
        if self.pool < 1:
            problems.append(f"data.pool={self.pool}: use 1 or more documents.")
        if self.lanes is not None and self.lanes < 1:
            problems.append(f"data.lanes={self.lanes}: use 1 or more, or null for up to 16.")
        if self.source is Source.parquet_stream:
            if not self.paths:
                problems.append(f"data={self.name} needs files: data.paths=[shards/*.parquet].")
            return problems
        for key, value, default in (("packing", self.packing.value, "stream"), ("val_paths", self.val_paths, [])):
            if value != default:
                problems.append(f"data.{key} is of text that is tokenised as it is read: use data=parquet_stream.")
        return problems

    def _path_problems(self) -> list[str]:
        paths = [*self.paths, *self.val_paths]
        if not any(map(scheme_of, paths)):
            return []
        from valkyrie.data.remote import path_problems

        return path_problems(paths)
