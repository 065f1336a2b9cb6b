"""Data source for published puzzles in a folder of arrays or CSV files, and the base config of puzzle sources."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from valkyrie.buckets import bucket_problems
from valkyrie.data.config import PUZZLES, DataCheck, DataConfig, default_cache_dir
from valkyrie.data.remote import path_problems
from valkyrie.problems import Problem, ProblemCode, check_range
from valkyrie.processes.team import ALONE, Team

if TYPE_CHECKING:
    from valkyrie.data.sources.puzzles.folder import PreparedPuzzles

ALL_PUZZLES = 1_000_000_000
"""Default sample size. It is larger than any data set, so that every puzzle is included."""


class PuzzleShape(NamedTuple):
    """Sizes that a model needs: the number of cells per puzzle, of cell values, and of puzzle identifiers."""

    cell_count: int
    vocab_size: int
    identifier_count: int


@dataclass
class SampleConfig:
    """Settings that select puzzles by number and difficulty.

    Args:
        train: maximum number of puzzles for training.
        validation: maximum number of puzzles for evaluation.
        guesses: minimum difficulty: the number of guesses that a solver needs, or the rating in a CSV. 0 selects all
            puzzles.
        seed: seed of the sample.
    """

    train: int = ALL_PUZZLES
    validation: int = ALL_PUZZLES
    guesses: int = 0
    seed: int = 0

    def problems(self) -> list[Problem]:
        minima = {"train": 1, "validation": 1, "guesses": 0, "seed": 0}
        checks = (check_range(f"data.sudoku.{key}", getattr(self, key), least=least) for key, least in minima.items())
        return [problem for problems in checks for problem in problems]


@dataclass
class PuzzleConfig(DataConfig):
    """Base of puzzle sources.

    Args:
        cache_dir: folder for generated or converted puzzles.
        augment: apply new random symmetries to Sudokus in every epoch.
    """

    kind: ClassVar[str] = PUZZLES

    cache_dir: str = dataclasses.field(default_factory=default_cache_dir)
    augment: bool = True

    @abstractmethod
    def shape(self) -> PuzzleShape:
        """Return the sizes of the puzzles, from the settings or the beginning of the files.

        Raises ValueError if the settings or files are invalid.
        """

    def problems(self) -> list[Problem]:
        return [*super().problems(), *bucket_problems("data.cache_dir", self.cache_dir)]

    def check(self, tokenizer: str, batch: int, seq: int, steps: int) -> DataCheck:
        """Check the settings and, for published puzzles, that the folder and its first puzzle can be read.

        Raises ValueError if not. All arguments are ignored.
        """
        return DataCheck(f"data={self.name}: puzzles of {self.shape().cell_count} cells")


@dataclass
class Config(PuzzleConfig):
    """Published puzzles: Sudoku-Extreme, mazes, ARC.

    Args:
        paths: one folder with either arrays (`train/dataset.json`, ...) or `train.csv` and `test.csv` (with columns
            question, answer and rating).
        sudoku: which rows of a CSV to use.
    """

    name: str = "puzzles"
    source: str = "puzzles"
    paths: list[str] = dataclasses.field(default_factory=list)
    sudoku: SampleConfig = dataclasses.field(default_factory=SampleConfig)

    def problems(self) -> list[Problem]:
        problems = [*super().problems(), *path_problems(self.paths), *self.sudoku.problems()]
        if len(self.paths) != 1:
            text = f"data=puzzles needs exactly one folder, but data.paths has {len(self.paths)}. Use data.paths=[DIR]."
            problems.append(Problem(ProblemCode.missing, "data.paths", self.paths, text))
        return problems

    def shape(self) -> PuzzleShape:
        """Return the sizes of the puzzles, read from the first puzzle in `train.csv` or from `dataset.json`."""
        from valkyrie.data.sources.puzzles.folder import open_puzzles
        from valkyrie.data.sources.puzzles.tables import find_tables

        self.raise_problems()
        if tables := find_tables(self.folder):
            return PuzzleShape(tables["train"].cell_count, tables["train"].alphabet.vocab_size, 1)
        puzzles = open_puzzles(self.folder, self.name)
        identifier_count = max(puzzles.train.identifier_count, puzzles.validation.identifier_count)
        return PuzzleShape(puzzles.train.cell_count, puzzles.train.vocab_size, identifier_count)

    def open(self, tokenizer: str, team: Team = ALONE, say: Callable[[str], object] | None = None) -> PreparedPuzzles:
        """Open the folder. CSV files are first converted to arrays in the cache, if they are not there yet."""
        from valkyrie.data.sources.puzzles.prepare import prepare_published

        return prepare_published(self)

    @property
    def folder(self) -> Path:
        """The folder in `paths`. Raises ValueError if it is not an existing folder."""
        path = Path(self.paths[0]).expanduser()
        if not path.is_dir():
            raise ValueError(
                f"data.paths={self.paths[0]} is not a folder. Use a folder of puzzles that contains train and test, or "
                "train.csv and test.csv."
            )
        return path
