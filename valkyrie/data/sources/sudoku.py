"""Data source for Sudoku puzzles, which are generated on this machine and cached."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from valkyrie.data.sources.puzzles import PuzzleConfig, PuzzleShape, SampleConfig
from valkyrie.problems import Problem, ProblemCode, check_range
from valkyrie.processes.team import ALONE, Team

if TYPE_CHECKING:
    from valkyrie.data.sources.puzzles.folder import PreparedPuzzles


@dataclass
class SudokuConfig(SampleConfig):
    """Settings of generated Sudokus, each with a unique solution.

    Args:
        side: number of cells in a row, 4 or 9.
        clues: minimum number of given cells. 0 removes digits for as long as the solution stays unique.
    """

    train: int = 1000
    validation: int = 1000
    guesses: int = 1
    side: int = 9
    clues: int = 0

    def problems(self) -> list[Problem]:
        problems = super().problems()
        if self.side not in (4, 9):
            text = f"data.sudoku.side={self.side} is not supported. Use data.sudoku.side=4 or data.sudoku.side=9."
            problems.append(Problem(ProblemCode.out_of_range, "data.sudoku.side", self.side, text))
        problems += check_range("data.sudoku.clues", self.clues, least=0, below=self.side**2)
        if self.side == 4 and self.guesses:
            text = f"data.sudoku.guesses={self.guesses}: 4x4 puzzles never need a guess. Use data.sudoku.guesses=0."
            problems.append(Problem(ProblemCode.conflict, "data.sudoku.guesses", self.guesses, text))
        return problems


@dataclass
class Config(PuzzleConfig):
    """Generated Sudoku puzzles."""

    name: str = "sudoku"
    source: str = "sudoku"
    sudoku: SudokuConfig = field(default_factory=SudokuConfig)

    def problems(self) -> list[Problem]:
        return [*super().problems(), *self.sudoku.problems()]

    def shape(self) -> PuzzleShape:
        self.raise_problems()
        return PuzzleShape(self.sudoku.side**2, self.sudoku.side + 2, 1)

    def open(self, tokenizer: str, team: Team = ALONE, say: Callable[[str], object] | None = None) -> PreparedPuzzles:
        """Open the puzzles, generating them first if they are not in the cache (minutes for 9x9)."""
        from valkyrie.data.sources.puzzles.prepare import prepare_sudoku

        return prepare_sudoku(self, say)
