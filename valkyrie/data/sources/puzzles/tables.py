"""Reads published puzzles in CSV (source, question, answer, rating): Sudoku-Extreme and the 30 x 30 mazes."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np

from valkyrie.data.sources.puzzles.folder import FOLDERS
from valkyrie.units import count_text

COLUMNS = ("source", "question", "answer", "rating")


class Alphabet(Enum):
    """The characters of cells. A character's index, counted from 1, is its cell value (0 is padding)."""

    sudoku_4x4 = "01234"
    sudoku_9x9 = "0123456789"
    maze = "# SGo"

    @property
    def vocab_size(self) -> int:
        """Number of values of a cell, including padding."""
        return len(self.value) + 1

    @property
    def side(self) -> int | None:
        """The side of a Sudoku, or None for a maze."""
        return None if self is Alphabet.maze else len(self.value) - 1


@dataclass(frozen=True)
class PuzzleTable:
    """One CSV file of puzzles."""

    path: Path

    @property
    def signature(self) -> list[str | int]:
        """File name, size in bytes and modification time in nanoseconds, for the cache key."""
        status = self.path.stat()
        return [self.path.name, status.st_size, status.st_mtime_ns]

    @cached_property
    def cell_count(self) -> int:
        """Number of cells of the first puzzle, or 0 if the file has no puzzles."""
        return len(next(islice(self._rows(), 1), (0, "", "", ""))[1])

    @cached_property
    def alphabet(self) -> Alphabet:
        """Alphabet of the first puzzle, a Sudoku or a maze. Raises ValueError for other puzzles."""
        sudoku_alphabets = {16: Alphabet.sudoku_4x4, 81: Alphabet.sudoku_9x9}
        line_number, question, _, _ = next(islice(self._rows(), 1), (0, "", "", "0"))
        puzzle_alphabet = sudoku_alphabets.get(len(question), Alphabet.maze)
        invalid_characters = sorted(
            set(question.replace(".", "0") if puzzle_alphabet is not Alphabet.maze else question)
            - set(puzzle_alphabet.value)
        )
        if not line_number:
            raise ValueError(f"{self.path} has no puzzles. Add at least one row.")
        if not question or int(len(question) ** 0.5) ** 2 != len(question) or invalid_characters:
            fault = (
                f"invalid characters ({''.join(invalid_characters)!r})"
                if invalid_characters
                else count_text(len(question), "cell")
            )
            raise ValueError(
                f"{self.path} line {line_number}: the puzzle has {fault}. Use a Sudoku of 16 cells (digits 0 to 4) or "
                f"81 cells (digits 0 to 9), where 0 or . is an empty cell, or a square maze of the characters "
                f"{Alphabet.maze.value!r}."
            )
        return puzzle_alphabet

    def read(self, min_rating: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the questions and answers of the puzzles with a rating of at least `min_rating`.

        Both arrays are uint8 [puzzles, cells] and contain the cell values of `Alphabet`. Raises ValueError for invalid
        rows, or if no puzzle is rated this high.
        """
        value_by_character = np.zeros(256, np.uint8)
        value_by_character[list(self.alphabet.value.encode())] = np.arange(len(self.alphabet.value)) + 1
        if self.alphabet is not Alphabet.maze:
            value_by_character[ord(".")] = value_by_character[ord("0")]
        texts: tuple[list[str], list[str]] = [], []
        for line_number, question, answer, rating in self._rows():
            for name, text, selected_texts in zip(("question", "answer"), (question, answer), texts, strict=True):
                if len(text) != self.cell_count:
                    raise ValueError(
                        f"{self.path} line {line_number}: the {name} has {len(text)} cells, but the first puzzle has "
                        f"{self.cell_count}."
                    )
                if not text.isascii():
                    raise ValueError(
                        f"{self.path} line {line_number}: the {name} has characters that are not ASCII. Use only "
                        f"{self.alphabet.value!r}."
                    )
                if int(rating) >= min_rating:
                    selected_texts.append(text)
        if not texts[0]:
            raise ValueError(
                f"data.sudoku.guesses={min_rating}: {self.path} has no puzzle with a rating this high. Use a lower "
                "value, or data.sudoku.guesses=0 for all puzzles."
            )
        questions, answers = (
            value_by_character[np.frombuffer("".join(column_texts).encode(), np.uint8)].reshape(-1, self.cell_count)
            for column_texts in texts
        )
        invalid_rows = np.flatnonzero((questions == 0).any(1) | (answers == 0).any(1))
        if invalid_rows.size:
            selection = f" (counting only ratings of {min_rating} or more)" if min_rating else ""
            raise ValueError(
                f"{self.path}: puzzle {invalid_rows[0] + 1}{selection} has a character that is not in "
                f"{self.alphabet.value!r}."
            )
        return questions, answers

    def _rows(self) -> Iterator[tuple[int, str, str, str]]:
        """Yield (line number, question, answer, rating) per row.

        Raises ValueError for missing columns or ratings, and for a file that is not CSV.
        """
        with self.path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
            reader = csv.DictReader(file)
            try:
                missing_columns = [name for name in COLUMNS[1:] if name not in (reader.fieldnames or [])]
                if missing_columns:
                    raise ValueError(
                        f"{self.path} has no column {' and no column '.join(missing_columns)}. A table of "
                        f"puzzles needs the columns {', '.join(COLUMNS[1:])}."
                    )
                for row in reader:
                    rating = row["rating"] or ""
                    if not re.fullmatch(r"\s*-?[0-9]+\s*", rating):
                        raise ValueError(
                            f"{self.path} line {reader.line_num}: the rating {rating!r} is not a whole number."
                        )
                    yield reader.line_num, row["question"] or "", row["answer"] or "", rating
            except csv.Error as error:
                raise ValueError(
                    f"{self.path} line {reader.line_num} is not CSV ({error}). Check whether a quote is not closed."
                ) from None


def find_tables(folder: Path) -> dict[str, PuzzleTable] | None:
    """Return `train.csv` and `test.csv` of a folder, by split (`train`, `validation`), or None if both are missing.

    Raises ValueError if only one is missing, or if their puzzles have different sizes.
    """
    tables = {split: PuzzleTable(folder / f"{name}.csv") for split, name in FOLDERS.items()}
    exists = {split: table.path.is_file() for split, table in tables.items()}
    if not any(exists.values()):
        return None
    for split, table in tables.items():
        if not exists[split]:
            raise ValueError(f"{table.path} is missing. A folder of CSV puzzles needs train.csv and test.csv.")
    if tables["train"].cell_count != tables["validation"].cell_count:
        sizes = {table.path.name: table.cell_count for table in tables.values()}
        raise ValueError(
            f"{folder}: puzzles have {sizes['train.csv']} cells in train.csv, but {sizes['test.csv']} in test.csv."
        )
    return tables
