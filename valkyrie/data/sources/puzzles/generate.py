"""Generates Sudoku puzzles with one solution, and the solver that verifies and rates them.

Everything is vectorised over many grids. A cell is a mask of the digits it may hold (bit 0 is the digit 1), so that a
reasoning step is a few NumPy operations for thousands of grids.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Puzzles(NamedTuple):
    """Puzzles and their solutions, [count, cells], as digits from 1 with 0 for a blank, and the guesses each needs."""

    givens: np.ndarray
    solutions: np.ndarray
    guesses: np.ndarray


def generate(rng: np.random.Generator, count: int, side: int, clues: int = 0) -> Puzzles:
    """Return `count` random puzzles with one solution each, and as few clues as possible, or `clues`.

    Removes the digits of a full grid in random order, except those that are needed to keep the solution unique.
    """
    solutions = _full_grids(rng, count, side)
    givens, order = solutions.copy(), rng.random(solutions.shape).argsort(1)
    every = np.arange(count)
    for cells in order.T:
        bits = _bits(solutions[every, cells])
        without = givens.copy()
        without[every, cells] = 0
        masks = _masks(without, side)
        masks[every, cells] &= ~bits
        try_it = np.flatnonzero((givens > 0).sum(1) > clues)
        gone = try_it[_search(masks[try_it], side, at_most=1)[0] == 0]
        givens[gone, cells[gone]] = 0
    return Puzzles(givens, solutions, count_guesses(givens, side))


def count_guesses(givens: np.ndarray, side: int) -> np.ndarray:
    """Return the number of guesses that a solver needs to find every solution, for each puzzle."""
    return _search(_masks(givens, side), side)[1]


def count_solutions(givens: np.ndarray, side: int, at_most: int = 2) -> np.ndarray:
    """Number of solutions of each puzzle, counted up to `at_most`."""
    return _search(_masks(givens, side), side, at_most)[0]


def _search(masks: np.ndarray, side: int, at_most: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of solutions of each puzzle, up to `at_most`, and the guesses needed to find them.

    The solver fills in forced digits (a cell with one digit left, a digit with one cell left in a row, column or box)
    as long as it can. Then it picks a cell with the fewest digits left and explores each of them to the end.
    """
    solutions, guesses, numbers = (*np.zeros((2, len(masks)), np.int64), np.arange(len(masks)))
    while len(masks):
        masks, alive = _reasoned(masks, side)
        done = alive & _solved(masks)
        np.add.at(solutions, numbers[done], 1)
        open_ = alive & ~done
        if at_most is not None:
            open_ &= solutions[numbers] < at_most
        masks, numbers = masks[open_], numbers[open_]
        np.add.at(guesses, numbers, 1)
        masks, parents = _branches(masks)
        numbers = numbers[parents]
    return solutions if at_most is None else np.minimum(solutions, at_most), guesses


def classes(givens: np.ndarray, side: int) -> list[bytes]:
    """Return a canonical form of each puzzle, shared by all its symmetric forms. Feasible for 4x4 only."""
    forms = np.stack([_renamed(givens[:, cells], side) for cells in _all_orders(side)])
    return [min(form.tobytes() for form in forms[:, i]) for i in range(len(givens))]


def _full_grids(rng: np.random.Generator, count: int, side: int) -> np.ndarray:
    """Return full grids: random boxes on the diagonal, then random guesses. A grid that fails is restarted."""
    box = int(side**0.5)
    grids, missing = np.zeros((count, side * side), np.int64), np.arange(count)
    masks = _masks(grids, side)
    fresh = np.ones(count, bool)
    while len(missing):
        begun = np.zeros((int(fresh.sum()), side, side), np.int64)
        for b in range(box):
            digits = rng.random((len(begun), side)).argsort(1) + 1
            begun[:, b * box : b * box + box, b * box : b * box + box] = digits.reshape(-1, box, box)
        masks[fresh] = _masks(begun.reshape(-1, side * side), side)
        masks, alive = _reasoned(masks, side)
        done = alive & _solved(masks)
        grids[missing[done]] = _digits(masks[done])
        missing, masks, alive = missing[~done], masks[~done], alive[~done]
        rows, cells = np.arange(len(masks)), _fewest(masks)
        possible = (masks[rows, cells, None] >> np.arange(side)) & 1
        masks[rows, cells] = 1 << (possible * rng.random(possible.shape)).argmax(1)
        fresh = ~alive
    return grids


def _reasoned(masks: np.ndarray, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Fill in all forced digits. Returns the masks, and whether each grid is free of contradictions."""
    masks, alive, working = masks.copy(), np.ones(len(masks), bool), np.arange(len(masks))
    while len(working):
        before = masks[working]
        after, sound = _forced(before, side)
        masks[working] = after
        alive[working] = sound
        working = working[sound & (after != before).any(1)]
    return masks, alive


def _forced(masks: np.ndarray, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Do one round: exclude the digits of peers, then set digits with one cell left. Returns as `_reasoned` does."""
    single = _is_single(masks)
    certain = np.where(single, masks, 0)
    sound, taken, full = np.ones(len(masks), bool), np.zeros_like(masks), (1 << side) - 1
    for unit in _units(certain, side):
        once, twice = _once_and_twice(unit)
        sound &= ~twice.any((1, 2))
        taken |= _spread(once, unit, side)
    masks = np.where(single, masks, masks & ~taken)
    hidden = np.zeros_like(masks)
    for unit in _units(masks, side):
        once, twice = _once_and_twice(unit)
        sound &= ((once | twice) == full).all((1, 2))
        hidden |= _spread(once & ~twice, unit, side)
    hidden &= masks
    masks = np.where(hidden > 0, hidden, masks)
    sound &= (masks > 0).all(1) & (_is_single(hidden) | (hidden == 0)).all(1)
    return masks, sound


class _Unit(NamedTuple):
    """Cells as [grids, a, b, c, d]. The axes `within` index the cells of a unit; the other two index the units."""

    cells: np.ndarray
    within: tuple[int, int]


def _units(masks: np.ndarray, side: int) -> list[_Unit]:
    """Return the rows, the columns and the boxes."""
    box = int(side**0.5)
    cells = masks.reshape(-1, box, box, box, box)
    return [_Unit(cells, within) for within in ((3, 4), (1, 2), (2, 4))]


def _once_and_twice(unit: _Unit) -> tuple[np.ndarray, np.ndarray]:
    """Return, for each unit, the digits possible in at least one cell, and those possible in at least two."""
    cells = np.moveaxis(unit.cells, unit.within, (0, 1))
    cells = cells.reshape(-1, *cells.shape[2:])
    once, twice = np.zeros_like(cells[0]), np.zeros_like(cells[0])
    for cell in cells:
        twice |= once & cell
        once |= cell
    return once, twice


def _spread(of_units: np.ndarray, unit: _Unit, side: int) -> np.ndarray:
    """Broadcast a value of each unit to all cells of the unit."""
    wide = np.expand_dims(of_units, unit.within)
    return np.broadcast_to(wide, unit.cells.shape).reshape(-1, side * side)


def _branches(masks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a grid for each digit of a cell with the fewest digits, and the index of its parent grid."""
    if not len(masks):
        return masks, np.zeros(0, np.int64)
    cells, rows = _fewest(masks), np.arange(len(masks))
    parents, digits = np.nonzero((masks[rows, cells, None] >> np.arange(16)) & 1)
    children = masks[parents]
    children[np.arange(len(parents)), cells[parents]] = 1 << digits
    return children, parents


def _fewest(masks: np.ndarray) -> np.ndarray:
    """Return the first undecided cell of each grid with the fewest digits left."""
    counts = np.bitwise_count(masks).astype(np.int64)
    return np.where(counts > 1, counts, 99).argmin(1)


def _is_single(masks: np.ndarray) -> np.ndarray:
    return (masks > 0) & (masks & (masks - 1) == 0)


def _solved(masks: np.ndarray) -> np.ndarray:
    return np.asarray(_is_single(masks).all(1))


def _masks(givens: np.ndarray, side: int) -> np.ndarray:
    return np.where(givens > 0, _bits(givens), (1 << side) - 1).astype(np.int16)


def _bits(digits: np.ndarray) -> np.ndarray:
    return (1 << np.maximum(digits.astype(np.int64) - 1, 0)).astype(np.int16)


def _digits(masks: np.ndarray) -> np.ndarray:
    return np.bitwise_count(masks - 1).astype(np.int64) + 1


def _renamed(grids: np.ndarray, side: int) -> np.ndarray:
    """Return the grids with their digits renumbered in order of first appearance."""
    names = np.zeros((len(grids), side + 1), np.uint8)
    used = np.zeros(len(grids), np.uint8)
    out = np.zeros(grids.shape, np.uint8)
    rows = np.arange(len(grids))
    for i, cell in enumerate(grids.T):
        new = (cell > 0) & (names[rows, cell] == 0)
        used = used + new.astype(np.uint8)
        names[rows[new], cell[new]] = used[new]
        out[:, i] = names[rows, cell]
    return out


def _all_orders(side: int) -> list[np.ndarray]:
    """Return every reordering of cells by a symmetry of a 4x4 grid, excluding renamed digits."""
    assert side == 4, "there are too many for larger grids"
    first, second = [(0, 1), (1, 0)], [(2, 3), (3, 2)]
    lines = [[*p, *q] for p in first for q in second] + [[*q, *p] for p in first for q in second]
    grid = np.arange(16).reshape(4, 4)
    return [g[np.ix_(rows, columns)].ravel() for g in (grid, grid.T) for rows in lines for columns in lines]
