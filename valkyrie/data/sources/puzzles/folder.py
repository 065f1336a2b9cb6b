"""Opens and checks a folder of puzzles in the format of SamsungSAILMontreal/TinyRecursiveModels.

Its folders `train` and `test` each have `dataset.json`, `all__inputs.npy` and `all__labels.npy` [examples, cells],
`all__puzzle_identifiers.npy` [puzzles], `all__puzzle_indices.npy` (the first example of each puzzle) and
`all__group_indices.npy` (the first puzzle of each group). A group is a puzzle with its augmented forms.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from valkyrie.data.batches import BatchPlan, Loader
from valkyrie.records import RecordError, read_record
from valkyrie.units import count_text

METADATA_FILE = "dataset.json"
_INDEX_ARRAYS = ("puzzle_identifiers", "puzzle_indices", "group_indices")
FOLDERS = {"train": "train", "validation": "test"}
"""The subfolder of each split in a folder of puzzles."""
_CHECKED_BYTES = 64 * 1024 * 1024
"""Bytes at the beginning of each array file that are checked for invalid values and hashed."""


@dataclass(frozen=True)
class _Metadata:
    """The fields read from `dataset.json`."""

    seq_len: int
    vocab_size: int
    num_puzzle_identifiers: int
    sets: list[str]
    ignore_label_id: int | None = None
    blank_identifier_id: int = 0


@dataclass(frozen=True, eq=False)
class PuzzleSplit:
    """The puzzles of one split. Its array files are mapped into memory.

    Args:
        inputs: cell values of the unsolved puzzles, [examples, cells].
        labels: cell values of the solutions, [examples, cells].
        puzzle_identifiers: the index of the learned embedding that the model uses for each puzzle, [puzzles].
        puzzle_indices: the first example of each puzzle, then the number of examples, [puzzles + 1].
        group_indices: the first puzzle of each group, then the number of puzzles, [groups + 1].
        vocab_size: cell values are below this.
        identifier_count: identifiers are below this.
        ignored_label: the label of cells that do not count in the loss, or None.
        blank_identifier: the identifier of padding.
    """

    inputs: np.ndarray
    labels: np.ndarray
    puzzle_identifiers: np.ndarray
    puzzle_indices: np.ndarray
    group_indices: np.ndarray
    vocab_size: int
    identifier_count: int
    ignored_label: int | None
    blank_identifier: int

    @property
    def cell_count(self) -> int:
        """Number of cells per puzzle."""
        return self.inputs.shape[1]

    @property
    def group_count(self) -> int:
        """Number of groups. A puzzle and its augmented forms count as one."""
        return len(self.group_indices) - 1


@dataclass(frozen=True)
class PreparedPuzzles:
    """An opened folder of puzzles.

    Args:
        path: the folder.
        name: name of the data config, for messages.
        content: hash of the puzzles.
        side: number of cells in a row of the Sudokus, which are then augmented with random symmetries; or None for no
            augmentation.
    """

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
        from valkyrie.data.sources.puzzles.loader import PuzzleLoader

        return PuzzleLoader(self, split, plan)

    def describe(self) -> str:
        """Return one line with the numbers of training groups, of validation examples, and of cells per puzzle."""
        symmetries = " (with new random symmetries in every epoch)" if self.side else ""
        return (
            f"data {self.name}: {count_text(self.train.group_count, 'training puzzle')}{symmetries} and "
            f"{count_text(len(self.validation.inputs), 'validation puzzle')} of {self.train.cell_count} cells"
        )


def open_puzzles(path: Path, name: str, side: int | None = None) -> PreparedPuzzles:
    """Open the puzzles in a folder. See `PreparedPuzzles` for `name` and `side`.

    Raises ValueError, naming the file, if a file is missing or inconsistent with the others.
    """
    splits = {split: _open_split(path / folder) for split, folder in FOLDERS.items()}
    train, validation = splits["train"], splits["validation"]
    for key, attribute in (("seq_len", "cell_count"), ("vocab_size", "vocab_size")):
        training_size, validation_size = getattr(train, attribute), getattr(validation, attribute)
        if training_size != validation_size:
            raise ValueError(
                f"{path}: {key} is {training_size} in train/{METADATA_FILE}, but {validation_size} in "
                f"test/{METADATA_FILE}."
            )
    return PreparedPuzzles(path.resolve(), name, _content_hash(path), train, validation, side)


def _open_split(path: Path) -> PuzzleSplit:
    file = path / METADATA_FILE
    if not file.is_file():
        raise ValueError(
            f"{file} is missing. A folder of puzzles needs train/{METADATA_FILE} and test/{METADATA_FILE}."
        )
    try:
        metadata = read_record(_Metadata, file)
    except RecordError:
        raise ValueError(
            f"{file} does not describe puzzles: it needs seq_len, vocab_size, num_puzzle_identifiers and sets."
        ) from None
    if len(metadata.sets) != 1:
        sets = f"the sets {', '.join(metadata.sets)}" if metadata.sets else "no sets"
        raise ValueError(f"{file} lists {sets}, but only folders with one set are supported.")
    files = {name: path / f"{metadata.sets[0]}__{name}.npy" for name in ("inputs", "labels", *_INDEX_ARRAYS)}
    arrays = {name: _check_cells(_load(files[name]), files[name], metadata) for name in ("inputs", "labels")}
    arrays |= {name: np.asarray(_load(files[name])) for name in _INDEX_ARRAYS}
    split = PuzzleSplit(
        **arrays,
        vocab_size=metadata.vocab_size,
        identifier_count=metadata.num_puzzle_identifiers,
        ignored_label=metadata.ignore_label_id,
        blank_identifier=metadata.blank_identifier_id,
    )
    _check_indices(split, path)
    return split


def _load(file: Path) -> np.ndarray:
    try:
        return np.load(file, mmap_mode="r")
    except (OSError, ValueError, EOFError):
        raise ValueError(
            f"{file} is missing or not a NumPy array, but the set in {METADATA_FILE} needs it. Restore the file, or "
            "build the folder again."
        ) from None


def _check_cells(array: np.ndarray, file: Path, metadata: _Metadata) -> np.ndarray:
    """Return `array`, which was read from `file`, unchanged.

    Raises ValueError if it is not an integer array of shape [examples, seq_len], or if a value in the first
    `_CHECKED_BYTES` is negative or at least `vocab_size`.
    """
    if array.ndim != 2 or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(
            f"{file} is {array.dtype}{list(array.shape)}, but must be an integer array of shape [examples, cells]."
        )
    if array.shape[1] != metadata.seq_len:
        raise ValueError(
            f"{file} has puzzles of {array.shape[1]} cells, but {file.parent / METADATA_FILE} has "
            f"seq_len={metadata.seq_len}."
        )
    rows = array[: max(_CHECKED_BYTES // (array.dtype.itemsize * metadata.seq_len), 1)]
    if rows.size and (rows.max() >= metadata.vocab_size or rows.min() < 0):
        invalid_value = rows.max() if rows.max() >= metadata.vocab_size else rows.min()
        raise ValueError(
            f"{file} has the value {invalid_value}, but values must be at least 0 and below "
            f"vocab_size={metadata.vocab_size} of {METADATA_FILE}."
        )
    return array


def _check_indices(split: PuzzleSplit, path: Path) -> None:
    """Raise ValueError if lengths or indices do not match, there are no examples, or an identifier is out of range."""
    example_count, puzzle_count = len(split.inputs), len(split.puzzle_identifiers)
    has_valid_puzzles = len(split.labels) == example_count and _is_index(
        split.puzzle_indices, puzzle_count, example_count
    )
    if not has_valid_puzzles or not _is_index(split.group_indices, split.group_count, puzzle_count):
        raise ValueError(
            f"{path}: the lengths or indices of the arrays do not match ({example_count} inputs, {len(split.labels)} "
            f"labels, {puzzle_count} puzzles, {split.group_count} groups). Build the folder again."
        )
    if not example_count:
        raise ValueError(f"{path} has no puzzles.")
    for identifier, name in (
        (split.puzzle_identifiers.min(), f"{path} has puzzle identifier "),
        (split.puzzle_identifiers.max(), f"{path} has puzzle identifier "),
        (split.blank_identifier, f"{path / METADATA_FILE} has blank_identifier_id="),
    ):
        if not 0 <= identifier < split.identifier_count:
            raise ValueError(
                f"{name}{identifier}, but identifiers must be at least 0 and below "
                f"num_puzzle_identifiers={split.identifier_count} of {METADATA_FILE}."
            )


def _is_index(starts: np.ndarray, count: int, last: int) -> bool:
    is_increasing = starts.ndim == 1 and len(starts) == count + 1 and bool((np.diff(starts) > 0).all())
    return is_increasing and int(starts[0]) == 0 and int(starts[-1]) == last


def _content_hash(path: Path) -> str:
    """Return a hash of the puzzles, computed from the size and the first `_CHECKED_BYTES` of each array file."""
    hasher = hashlib.sha256()
    for folder in FOLDERS.values():
        for file in sorted((path / folder).glob("*.npy")):
            with file.open("rb") as array_file:
                hasher.update(f"{folder}/{file.name} {file.stat().st_size}".encode())
                hasher.update(array_file.read(_CHECKED_BYTES))
    return hasher.hexdigest()[:32]
