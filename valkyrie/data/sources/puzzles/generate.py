"""Generates Sudoku puzzles with a unique solution, using a solver that also counts the guesses that they need.

Everything is vectorised over many grids. A cell is a bit mask of its possible digits (bit 0 is the digit 1).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Puzzles(NamedTuple):
    """Puzzles and their solutions.

    Args:
        givens: digits of the given cells, 0 for a blank, [count, cells].
        solutions: digits of all cells, [count, cells].
        guesses: number of guesses that a solver needs for each puzzle (`count_guesses`), [count].
    """

    givens: np.ndarray
    solutions: np.ndarray
    guesses: np.ndarray


def generate(rng: np.random.Generator, count: int, side: int, clues: int = 0) -> Puzzles:
    """Return `count` random puzzles with a unique solution.

    Starts from full grids and visits the cells of each grid in random order. Removes the digit of a cell if the
    solution stays unique and the grid has more than `clues` digits.
    """
    solutions = _generate_full_grids(rng, count, side)
    givens, cell_order = solutions.copy(), rng.random(solutions.shape).argsort(1)
    grid_indices = np.arange(count)
    for cells in cell_order.T:
        bits = _to_bits(solutions[grid_indices, cells])
        trial_givens = givens.copy()
        trial_givens[grid_indices, cells] = 0
        masks = _to_masks(trial_givens, side)
        masks[grid_indices, cells] &= ~bits
        candidates = np.flatnonzero((givens > 0).sum(1) > clues)
        removable = candidates[_search(masks[candidates], side, max_solutions=1)[0] == 0]
        givens[removable, cells[removable]] = 0
    return Puzzles(givens, solutions, count_guesses(givens, side))


def count_guesses(givens: np.ndarray, side: int) -> np.ndarray:
    """Return the number of guesses that the solver (see `_search`) needs to find all solutions of each puzzle."""
    return _search(_to_masks(givens, side), side)[1]


def count_solutions(givens: np.ndarray, side: int, max_solutions: int = 2) -> np.ndarray:
    """Count the solutions of each puzzle, up to `max_solutions`."""
    return _search(_to_masks(givens, side), side, max_solutions)[0]


def _search(masks: np.ndarray, side: int, max_solutions: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of solutions of each puzzle, and the number of guesses needed to find them.

    Counts up to `max_solutions` solutions of each puzzle, or all of them if `max_solutions` is None.

    The solver fills in all forced digits (a cell with one possible digit, or a digit with one possible cell in a row,
    column or box). Then it picks a cell with the fewest possible digits and tries all of them, which counts as a guess.
    """
    solution_counts, guess_counts, puzzle_indices = (*np.zeros((2, len(masks)), np.int64), np.arange(len(masks)))
    while len(masks):
        masks, is_possible = _fill_forced_digits(masks, side)
        is_solved = is_possible & _is_solved(masks)
        np.add.at(solution_counts, puzzle_indices[is_solved], 1)
        is_unfinished = is_possible & ~is_solved
        if max_solutions is not None:
            is_unfinished &= solution_counts[puzzle_indices] < max_solutions
        masks, puzzle_indices = masks[is_unfinished], puzzle_indices[is_unfinished]
        np.add.at(guess_counts, puzzle_indices, 1)
        masks, parents = _expand_branches(masks)
        puzzle_indices = puzzle_indices[parents]
    return solution_counts if max_solutions is None else np.minimum(solution_counts, max_solutions), guess_counts


def canonical_forms(givens: np.ndarray, side: int) -> list[bytes]:
    """Return a canonical form of each puzzle, shared by all its symmetric forms. Feasible for 4x4 only."""
    forms = np.stack([_renumber_digits(givens[:, cells], side) for cells in _cell_permutations(side)])
    return [min(form.tobytes() for form in forms[:, i]) for i in range(len(givens))]


def _generate_full_grids(rng: np.random.Generator, count: int, side: int) -> np.ndarray:
    """Return random complete grids. Fills the boxes on the diagonal, then guesses cells; restarts impossible grids."""
    box_side = int(side**0.5)
    grids, unfinished_indices = np.zeros((count, side * side), np.int64), np.arange(count)
    masks = _to_masks(grids, side)
    is_restarted = np.ones(count, bool)
    while len(unfinished_indices):
        new_grids = np.zeros((int(is_restarted.sum()), side, side), np.int64)
        for b in range(box_side):
            digits = rng.random((len(new_grids), side)).argsort(1) + 1
            box = slice(b * box_side, (b + 1) * box_side)
            new_grids[:, box, box] = digits.reshape(-1, box_side, box_side)
        masks[is_restarted] = _to_masks(new_grids.reshape(-1, side * side), side)
        masks, is_possible = _fill_forced_digits(masks, side)
        is_solved = is_possible & _is_solved(masks)
        grids[unfinished_indices[is_solved]] = _to_digits(masks[is_solved])
        unfinished_indices, masks, is_possible = (
            unfinished_indices[~is_solved],
            masks[~is_solved],
            is_possible[~is_solved],
        )
        grid_indices, cells = np.arange(len(masks)), _branching_cells(masks)
        is_allowed = (masks[grid_indices, cells, None] >> np.arange(side)) & 1
        masks[grid_indices, cells] = 1 << (is_allowed * rng.random(is_allowed.shape)).argmax(1)
        is_restarted = ~is_possible
    return grids


def _fill_forced_digits(masks: np.ndarray, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Fill in forced digits until none are left. Returns the masks, and False for each grid with a contradiction."""
    masks, is_possible, active_indices = masks.copy(), np.ones(len(masks), bool), np.arange(len(masks))
    while len(active_indices):
        old_masks = masks[active_indices]
        new_masks, is_consistent = _propagate_constraints_once(old_masks, side)
        masks[active_indices] = new_masks
        is_possible[active_indices] = is_consistent
        active_indices = active_indices[is_consistent & (new_masks != old_masks).any(1)]
    return masks, is_possible


def _propagate_constraints_once(masks: np.ndarray, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Run one pass of constraint propagation.

    If a cell's digit is known, rules that digit out in the other cells of its row, column and box. Then fills in digits
    that have only one possible cell in a row, column or box. Returns the new masks, and False for each grid with a
    contradiction.
    """
    is_known = _is_single(masks)
    known_digits = np.where(is_known, masks, 0)
    is_consistent, excluded_digits, all_digits = np.ones(len(masks), bool), np.zeros_like(masks), (1 << side) - 1
    for unit_type in _unit_types(known_digits, side):
        possible_digits, repeated_digits = _possible_and_repeated_digits(unit_type)
        is_consistent &= ~repeated_digits.any((1, 2))
        excluded_digits |= _broadcast_to_cells(possible_digits, unit_type, side)
    masks = np.where(is_known, masks, masks & ~excluded_digits)
    forced_digits = np.zeros_like(masks)
    for unit_type in _unit_types(masks, side):
        possible_digits, repeated_digits = _possible_and_repeated_digits(unit_type)
        is_consistent &= ((possible_digits | repeated_digits) == all_digits).all((1, 2))
        forced_digits |= _broadcast_to_cells(possible_digits & ~repeated_digits, unit_type, side)
    forced_digits &= masks
    masks = np.where(forced_digits > 0, forced_digits, masks)
    is_consistent &= (masks > 0).all(1) & (_is_single(forced_digits) | (forced_digits == 0)).all(1)
    return masks, is_consistent


class _UnitType(NamedTuple):
    """All units of one type: the rows, the columns or the boxes of the grids.

    `cells` has the masks as [grid, band, row in band, stack, column in stack]. `cell_axes` are the two axes that index
    the cells of a unit.
    """

    cells: np.ndarray
    cell_axes: tuple[int, int]


def _unit_types(masks: np.ndarray, side: int) -> list[_UnitType]:
    """Return the units of each type: rows, columns and boxes."""
    box_side = int(side**0.5)
    cells = masks.reshape(-1, box_side, box_side, box_side, box_side)
    return [_UnitType(cells, cell_axes) for cell_axes in ((3, 4), (1, 2), (2, 4))]


def _possible_and_repeated_digits(unit_type: _UnitType) -> tuple[np.ndarray, np.ndarray]:
    """Return two bit masks per unit: the digits possible in at least one cell, and in at least two cells."""
    cells = np.moveaxis(unit_type.cells, unit_type.cell_axes, (0, 1))
    cells = cells.reshape(-1, *cells.shape[2:])
    possible_digits, repeated_digits = np.zeros_like(cells[0]), np.zeros_like(cells[0])
    for cell in cells:
        repeated_digits |= possible_digits & cell
        possible_digits |= cell
    return possible_digits, repeated_digits


def _broadcast_to_cells(values: np.ndarray, unit_type: _UnitType, side: int) -> np.ndarray:
    """Broadcast a value of each unit to all cells of the unit."""
    expanded_values = np.expand_dims(values, unit_type.cell_axes)
    return np.broadcast_to(expanded_values, unit_type.cells.shape).reshape(-1, side * side)


def _expand_branches(masks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return copies of each grid: one for each possible digit of its branching cell, with the cell set to the digit.

    The second array has the index of each copy's original grid.
    """
    if not len(masks):
        return masks, np.zeros(0, np.int64)
    cells, rows = _branching_cells(masks), np.arange(len(masks))
    parents, digits = np.nonzero((masks[rows, cells, None] >> np.arange(16)) & 1)
    children = masks[parents]
    children[np.arange(len(parents)), cells[parents]] = 1 << digits
    return children, parents


def _branching_cells(masks: np.ndarray) -> np.ndarray:
    """Return one cell index per grid: the first of the undetermined cells with the fewest possible digits."""
    counts = np.bitwise_count(masks).astype(np.int64)
    return np.where(counts > 1, counts, 99).argmin(1)


def _is_single(masks: np.ndarray) -> np.ndarray:
    return (masks > 0) & (masks & (masks - 1) == 0)


def _is_solved(masks: np.ndarray) -> np.ndarray:
    return np.asarray(_is_single(masks).all(1))


def _to_masks(givens: np.ndarray, side: int) -> np.ndarray:
    return np.where(givens > 0, _to_bits(givens), (1 << side) - 1).astype(np.int16)


def _to_bits(digits: np.ndarray) -> np.ndarray:
    return (1 << np.maximum(digits.astype(np.int64) - 1, 0)).astype(np.int16)


def _to_digits(masks: np.ndarray) -> np.ndarray:
    return np.bitwise_count(masks - 1).astype(np.int64) + 1


def _renumber_digits(grids: np.ndarray, side: int) -> np.ndarray:
    """Return the grids with their digits renumbered in order of first appearance."""
    new_digits = np.zeros((len(grids), side + 1), np.uint8)
    used_count = np.zeros(len(grids), np.uint8)
    renumbered_grids = np.zeros(grids.shape, np.uint8)
    grid_indices = np.arange(len(grids))
    for i, cell in enumerate(grids.T):
        is_new = (cell > 0) & (new_digits[grid_indices, cell] == 0)
        used_count = used_count + is_new.astype(np.uint8)
        new_digits[grid_indices[is_new], cell[is_new]] = used_count[is_new]
        renumbered_grids[:, i] = new_digits[grid_indices, cell]
    return renumbered_grids


def _cell_permutations(side: int) -> list[np.ndarray]:
    """Return the cell permutations of a 4x4 grid: all its symmetries except those that renumber digits."""
    assert side == 4, "larger grids have too many permutations of cells"
    first_orders, second_orders = [(0, 1), (1, 0)], [(2, 3), (3, 2)]
    lines = [[*p, *q] for p in first_orders for q in second_orders] + [
        [*q, *p] for p in first_orders for q in second_orders
    ]
    grid = np.arange(16).reshape(4, 4)
    return [g[np.ix_(rows, columns)].ravel() for g in (grid, grid.T) for rows in lines for columns in lines]
