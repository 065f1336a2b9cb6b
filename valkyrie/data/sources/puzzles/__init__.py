"""Puzzles: published ones, as a folder of arrays or as CSV. What `sudoku` shares with them is here too."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from valkyrie.buckets import needs_disk
from valkyrie.data.config import PUZZLES, DataCheck, DataConfig
from valkyrie.data.remote import path_problems
from valkyrie.problems import Problem, ProblemCode, check_range
from valkyrie.processes.team import ALONE, Team

if TYPE_CHECKING:
    from valkyrie.data.sources.puzzles.folder import PreparedPuzzles

ALL = 1_000_000_000
"""Size of a sample that takes every puzzle."""


class PuzzleShape(NamedTuple):
    """What a model must be made for: cells of a puzzle, values of a cell, identifiers of puzzles."""

    cells: int
    vocab_size: int
    identifiers: int


@dataclass
class SampleConfig:
    """Which puzzles are taken.

    Args:
        train: how many for training.
        validation: how many for evaluation.
        guesses: how difficult they are at least: guesses that a solver needs, or the rating in a CSV. 0 takes all.
        seed: seed of the sample.
    """

    train: int = ALL
    validation: int = ALL
    guesses: int = 0
    seed: int = 0

    def problems(self) -> list[Problem]:
        """Problems of the settings."""
        counts = {"train": 1, "validation": 1, "guesses": 0, "seed": 0}
        found = (check_range(f"data.sudoku.{key}", getattr(self, key), least=least) for key, least in counts.items())
        return [problem for problems in found for problem in problems]


@dataclass
class PuzzleConfig(DataConfig):
    """Base of sources of puzzles.

    Args:
        cache_dir: folder in which generated or converted puzzles are kept.
        augment: draw the symmetries of Sudokus again in every epoch.
    """

    kind: ClassVar[str] = PUZZLES

    cache_dir: str = "~/.cache/valkyrie/data"
    augment: bool = True

    @abstractmethod
    def shape(self) -> PuzzleShape:
        """The shape of the puzzles, from the settings or the beginning of the files. ValueError for wrong ones."""

    def problems(self) -> list[Problem]:
        """Problems of the settings, found without reading the data."""
        return [*super().problems(), *needs_disk("data.cache_dir", self.cache_dir)]

    def check(self, tokenizer: str, batch: int, seq: int, steps: int) -> DataCheck:
        """Check that the beginning of the puzzles can be read."""
        return DataCheck(f"data={self.name}: puzzles of {self.shape().cells} cells")


@dataclass
class Config(PuzzleConfig):
    """Published puzzles: Sudoku-Extreme, mazes, ARC.

    Args:
        paths: one folder in the published form (`train/dataset.json`, ...), or with `train.csv` and `test.csv`
            (source, question, answer, rating).
        sudoku: which rows of a CSV are taken.
    """

    name: str = "puzzles"
    source: str = "puzzles"
    paths: list[str] = dataclasses.field(default_factory=list)
    sudoku: SampleConfig = dataclasses.field(default_factory=SampleConfig)

    def problems(self) -> list[Problem]:
        """Problems of the settings, found without reading the data."""
        problems = [*super().problems(), *path_problems(self.paths), *self.sudoku.problems()]
        if len(self.paths) != 1:
            text = f"data=puzzles needs one folder, and data.paths names {len(self.paths)}. Use data.paths=[DIR]."
            problems.append(Problem(ProblemCode.missing, "data.paths", self.paths, text))
        return problems

    def shape(self) -> PuzzleShape:
        """The shape of the puzzles, from the beginning of the files."""
        from valkyrie.data.sources.puzzles.folder import open_puzzles
        from valkyrie.data.sources.puzzles.tables import find_tables

        self.raise_problems()
        if tables := find_tables(self.folder):
            return PuzzleShape(tables["train"].cells, tables["train"].alphabet.vocab_size, 1)
        train = open_puzzles(self.folder, self.name).train
        return PuzzleShape(train.cells, train.vocab_size, train.identifiers)

    def open(self, tokenizer: str, team: Team = ALONE, say: Callable[[str], object] | None = None) -> PreparedPuzzles:
        """Open the folder, or the cached arrays of a CSV, made first if there are none."""
        from valkyrie.data.sources.puzzles.prepare import prepare_published

        return prepare_published(self)

    @property
    def folder(self) -> Path:
        """The folder. ValueError if there is none."""
        path = Path(self.paths[0]).expanduser()
        if not path.is_dir():
            raise ValueError(
                f"data.paths={self.paths[0]} is no folder: puzzles are a folder with train and test in it."
            )
        return path
