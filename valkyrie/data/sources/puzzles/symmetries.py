"""Symmetries of a Sudoku: permuting the digits, the bands of boxes and the lines within them, and transposing."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

FIRST_DIGIT = 2
"""Cell value of the digit 1. Value 0 is padding and 1 is a blank."""


class Symmetries(NamedTuple):
    """One symmetry per grid.

    Args:
        cells: index of the cell that moves to each position, [count, cells].
        values: new value for each cell value, [count, side + 2].
    """

    cells: np.ndarray
    values: np.ndarray

    def __getitem__(self, rows: object) -> Symmetries:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the symmetries of the selected grids."""
        return Symmetries(self.cells[rows], self.values[rows])  # pyright: ignore[reportCallIssue, reportArgumentType]

    def apply(self, grids: np.ndarray) -> np.ndarray:
        """Return the grids, [count, cells], after applying their symmetries."""
        moved_grids = np.take_along_axis(grids, self.cells, axis=1)
        return np.take_along_axis(self.values, moved_grids.astype(np.int64), axis=1)


def draw_symmetries(rng: np.random.Generator, count: int, side: int) -> Symmetries:
    """Return a random symmetry for each of `count` grids of side x side cells."""
    rows, columns = _draw_line_orders(rng, count, side), _draw_line_orders(rng, count, side)
    cells = rows[:, :, None] * side + columns[:, None, :]
    transposed_cells = columns[:, None, :] * side + rows[:, :, None]
    is_transposed = rng.random(count) < 0.5
    cells = np.where(is_transposed[:, None, None], transposed_cells, cells).reshape(count, side * side)
    digits = rng.random((count, side)).argsort(1) + FIRST_DIGIT
    unchanged_values = np.tile(np.arange(FIRST_DIGIT), (count, 1))
    return Symmetries(cells, np.concatenate([unchanged_values, digits], axis=1).astype(np.int32))


def _draw_line_orders(rng: np.random.Generator, count: int, side: int) -> np.ndarray:
    """Return a random order of rows for each grid: shuffled bands, and shuffled rows within each band."""
    box_side = int(side**0.5)
    bands = rng.random((count, box_side)).argsort(1)
    rows_in_band = rng.random((count, box_side, box_side)).argsort(2)
    return (bands[:, :, None] * box_side + rows_in_band).reshape(count, side)
