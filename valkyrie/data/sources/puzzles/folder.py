"""A folder of puzzles in the published form, checked when it is opened: `train` and `test`, each with its arrays.

Each has `dataset.json` and `all__inputs.npy`, `all__labels.npy` [examples, cells], `all__puzzle_identifiers.npy`
[puzzles], `all__puzzle_indices.npy` (the examples at which puzzles begin) and `all__group_indices.npy` (the puzzles at
which groups begin: a puzzle with its augmented forms), as SamsungSAILMontreal/TinyRecursiveModels builds them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from valkyrie.data.batches import BatchPlan, Loader
from valkyrie.records import RecordError, read_record

METADATA = "dataset.json"
FOLDERS = {"train": "train", "validation": "test"}
"""The folder of each split."""
_CHECKED_BYTES = 64 * 1024 * 1024
"""Arrays up to this size are read once as a whole: for their largest value, and for the hash of the content."""


@dataclass(frozen=True)
class _Metadata:
    """What is read of `dataset.json`."""

    seq_len: int
    vocab_size: int
    num_puzzle_identifiers: int
    sets: list[str]
    ignore_label_id: int | None = None
    blank_identifier_id: int = 0


@dataclass(frozen=True)
class PuzzleSplit:
    """The puzzles of one split: cells, labels, and at which rows puzzles and groups of them begin."""

    path: Path
    cells: int
    vocab_size: int
    identifiers: int
    ignored: int | None
    blank: int
    prefix: str

    @cached_property
    def inputs(self) -> np.ndarray:
        """What is given, [examples, cells]."""
        return self.array("inputs")

    @cached_property
    def labels(self) -> np.ndarray:
        """What is asked, [examples, cells]."""
        return self.array("labels")

    @cached_property
    def puzzle_identifiers(self) -> np.ndarray:
        """The identifier of each puzzle."""
        return np.asarray(self.array("puzzle_identifiers"))

    @cached_property
    def puzzle_indices(self) -> np.ndarray:
        """The example at which each puzzle begins, and how many there are."""
        return np.asarray(self.array("puzzle_indices"))

    @cached_property
    def group_indices(self) -> np.ndarray:
        """The puzzle at which each group begins, and how many there are."""
        return np.asarray(self.array("group_indices"))

    @property
    def groups(self) -> int:
        """How many groups there are: puzzles without their augmented forms."""
        return len(self.group_indices) - 1

    def array(self, name: str) -> np.ndarray:
        """Return one of the arrays, its file mapped into memory; ValueError where there is none."""
        file = self.path / f"{self.prefix}__{name}.npy"
        try:
            return np.load(file, mmap_mode="r")
        except (OSError, ValueError, EOFError):
            raise ValueError(f"{file} is missing or is no array of NumPy: a folder of puzzles has one.") from None


@dataclass(frozen=True)
class PreparedPuzzles:
    """A folder of puzzles: `side` is that of a Sudoku, whose symmetries are then drawn, else None."""

    path: Path
    name: str
    content: str
    train: PuzzleSplit
    validation: PuzzleSplit
    side: int | None = None
    tokenizer: str = "none"

    def split(self, name: str) -> PuzzleSplit:
        """Return the split called `train` or `validation`."""
        return self.train if name == "train" else self.validation

    def loader(self, split: str, plan: BatchPlan) -> Loader[Any]:
        """Loader of the split `train` or `validation`."""
        from valkyrie.data.sources.puzzles.loader import PuzzleLoader

        return PuzzleLoader(self, split, plan)

    def describe(self) -> str:
        """Return how many puzzles there are, in a line."""
        drawn = ", their symmetries drawn anew" if self.side else ""
        return (
            f"data {self.name}: {self.train.groups:,} training puzzles{drawn}, {len(self.validation.inputs):,} "
            f"validation puzzles of {self.train.cells} cells"
        )


def open_puzzles(path: Path, name: str, side: int | None = None) -> PreparedPuzzles:
    """Return the puzzles in a folder; ValueError says which file is not what it should be."""
    splits = {split: _open_split(path / folder) for split, folder in FOLDERS.items()}
    train, validation = splits["train"], splits["validation"]
    for what in ("cells", "vocab_size"):
        ours, theirs = getattr(train, what), getattr(validation, what)
        if ours != theirs:
            words = {"cells": "seq_len", "vocab_size": "vocab_size"}[what]
            raise ValueError(f"{path}: {words} is {ours} of the training puzzles and {theirs} of the others.")
    return PreparedPuzzles(path.resolve(), name, _content(path), train, validation, side)


def _open_split(path: Path) -> PuzzleSplit:
    file = path / METADATA
    if not file.is_file():
        raise ValueError(f"{file} is missing: a folder of puzzles has train/{METADATA} and test/{METADATA}.")
    try:
        known = read_record(_Metadata, file)
    except RecordError:
        raise ValueError(
            f"{file} is not the description of puzzles: it needs seq_len, vocab_size, num_puzzle_identifiers and sets."
        ) from None
    if len(known.sets) != 1:
        raise ValueError(f"{file} names the sets {', '.join(known.sets)}: only folders with one are supported.")
    sizes = known.seq_len, known.vocab_size, known.num_puzzle_identifiers
    split = PuzzleSplit(path, *sizes, known.ignore_label_id, known.blank_identifier_id, known.sets[0])
    _check(split)
    return split


def _check(split: PuzzleSplit) -> None:
    """Raise ValueError where the arrays do not fit together."""
    for name in ("inputs", "labels"):
        array, file = split.array(name), split.path / f"{split.prefix}__{name}.npy"
        if array.ndim != 2 or not np.issubdtype(array.dtype, np.integer):
            raise ValueError(f"{file} is {array.dtype}{list(array.shape)}: puzzles are whole numbers, a row each.")
        if array.shape[1] != split.cells:
            raise ValueError(
                f"{file} has puzzles of {array.shape[1]} cells, and {split.path / METADATA} says seq_len={split.cells}."
            )
        rows = array[: max(_CHECKED_BYTES // (array.dtype.itemsize * split.cells), 1)]
        if rows.size and (rows.max() >= split.vocab_size or rows.min() < 0):
            bad = rows.max() if rows.max() >= split.vocab_size else rows.min()
            raise ValueError(f"{file} has the value {bad}, and vocab_size={split.vocab_size} allows 0 to one below it.")
    examples, puzzles = len(split.inputs), len(split.puzzle_identifiers)
    fits = len(split.labels) == examples and _is_index(split.puzzle_indices, puzzles, examples)
    if not fits or not _is_index(split.group_indices, split.groups, puzzles):
        raise ValueError(
            f"{split.path}: the arrays do not fit together: {examples} inputs, {len(split.labels)} labels, {puzzles} "
            f"puzzles, {split.groups} groups. Build the folder again."
        )
    if not examples:
        raise ValueError(f"{split.path} has no puzzles.")
    if puzzles and split.puzzle_identifiers.max() >= split.identifiers:
        largest = split.puzzle_identifiers.max()
        raise ValueError(f"{split.path} names puzzle {largest}, and num_puzzle_identifiers={split.identifiers}.")


def _is_index(starts: np.ndarray, count: int, last: int) -> bool:
    rises = starts.ndim == 1 and len(starts) == count + 1 and bool((np.diff(starts) > 0).all())
    return rises and int(starts[0]) == 0 and int(starts[-1]) == last


def _content(path: Path) -> str:
    """Return a hash of the puzzles: of the bytes of each file, beyond the first 64 MiB of its size alone."""
    total = hashlib.sha256()
    for folder in FOLDERS.values():
        for file in sorted((path / folder).glob("*.npy")):
            with file.open("rb") as opened:
                total.update(f"{folder}/{file.name} {file.stat().st_size}".encode())
                total.update(opened.read(_CHECKED_BYTES))
    return total.hexdigest()[:32]
