"""Prepares puzzles: generates Sudokus or converts CSV files to a cached folder of arrays, and opens such folders."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from valkyrie.data.cached import ensure_cached_folder
from valkyrie.data.sources import sudoku
from valkyrie.data.sources.puzzles import Config, PuzzleConfig, SampleConfig
from valkyrie.data.sources.puzzles.folder import FOLDERS, METADATA_FILE, PreparedPuzzles, open_puzzles
from valkyrie.data.sources.puzzles.generate import canonical_forms, generate
from valkyrie.data.sources.puzzles.tables import PuzzleTable, find_tables
from valkyrie.paths import write_atomic

_ALGORITHM_VERSION = 1
"""Part of the cache key. Increase it whenever the same settings would give different puzzles."""
_PUZZLES_AT_ONCE = 1000


def prepare_sudoku(config: sudoku.Config, say: Callable[[str], object] | None = None) -> PreparedPuzzles:
    """Open generated puzzles, generating them if they are not in the cache.

    Before generating 9x9 puzzles, which takes minutes, calls `say` with a message. Raises ValueError for mistakes in
    the settings, and DiskError if the cache cannot be written.
    """
    options = config.sudoku
    settings = [options.side, options.train, options.validation, options.guesses, options.clues, options.seed]
    return _open_cached(config, settings, partial(_generate_splits, options, say), options.side)


def prepare_published(config: Config) -> PreparedPuzzles:
    """Open a folder of puzzle arrays. A folder of CSV files is first converted to arrays in the cache.

    Raises ValueError for mistakes in the settings or files, and DiskError if the cache cannot be written.
    """
    config.raise_problems()
    tables, options = find_tables(config.folder), config.sudoku
    if tables is None:
        return open_puzzles(config.folder, config.name)
    settings = [options.train, options.validation, options.guesses, options.seed]
    files = [table.signature for table in tables.values()]
    return _open_cached(config, [*settings, *files], partial(_convert, options, tables), tables["train"].alphabet.side)


def _open_cached(
    config: PuzzleConfig, settings: Sequence[object], write: Callable[[Path], None], side: int | None
) -> PreparedPuzzles:
    values = [_ALGORITHM_VERSION, config.source, config.shape(), settings]
    key = hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]
    folder = ensure_cached_folder(Path(config.cache_dir).expanduser(), f"{config.name}-{key}", write)
    return open_puzzles(folder, config.name, side if config.augment else None)


def write_folder(path: Path, inputs: np.ndarray, labels: np.ndarray, vocab_size: int) -> None:
    """Write one split as arrays to a new folder `path`, in the format of `valkyrie.data.sources.puzzles.folder`.

    `inputs` and `labels` are cell values below 256, [puzzles, cells]. Every puzzle is a separate group. Cells with
    label 0 do not count in the loss.
    """
    path.mkdir()
    indices = np.arange(len(inputs) + 1, dtype=np.int32)
    arrays = {"inputs": inputs.astype(np.uint8), "labels": labels.astype(np.uint8)}
    arrays |= {"puzzle_indices": indices, "group_indices": indices}
    arrays["puzzle_identifiers"] = np.zeros(len(inputs), np.int32)
    for name, array in arrays.items():
        np.save(path / f"all__{name}.npy", array)
    metadata = {"pad_id": 0, "ignore_label_id": 0, "blank_identifier_id": 0, "vocab_size": vocab_size}
    metadata |= {"seq_len": inputs.shape[1], "num_puzzle_identifiers": 1, "total_groups": len(inputs)}
    metadata |= {"mean_puzzle_examples": 1, "total_puzzles": len(inputs), "sets": ["all"]}
    write_atomic(path / METADATA_FILE, json.dumps(metadata))


def _generate_splits(config: sudoku.SudokuConfig, say: Callable[[str], object] | None, path: Path) -> None:
    """Generate puzzles and write both splits below `path`.

    All copies of a puzzle, and for 4x4 all its symmetric forms, are in the same split. A split may have fewer puzzles
    than the settings request. Raises ValueError if a split has none.
    """
    rng, total = np.random.default_rng([config.seed, config.side]), config.train + config.validation
    if say is not None and config.side > 4:
        duration = f"about {total / 1000:.0f} min" if total >= 1000 else "less than a minute"
        say(f"generating and caching {total:,} Sudoku puzzles: {duration} on one core")
    givens, solutions = np.zeros((0, config.side**2), np.int64), np.zeros((0, config.side**2), np.int64)
    while len(givens) < total:
        puzzles = generate(rng, min(_PUZZLES_AT_ONCE, 2 * (total - len(givens)) + 50), config.side, config.clues)
        is_hard = puzzles.guesses >= config.guesses
        givens = np.concatenate([givens, puzzles.givens[is_hard]])
        solutions = np.concatenate([solutions, puzzles.solutions[is_hard]])
    puzzle_keys = [grid.tobytes() for grid in givens] if config.side > 4 else canonical_forms(givens, config.side)
    first_by_key = {key: i for i, key in reversed(list(enumerate(puzzle_keys)))}  # the first index of each key
    first_indices = np.array([first_by_key[key] for key in puzzle_keys])
    validation_share = config.validation / total
    is_held_out = (
        rng.random(len(puzzle_keys))[first_indices] < validation_share
    )  # puzzles with the same key are in the same split
    for split, is_in_split in (("validation", is_held_out), ("train", ~is_held_out)):
        selected_indices = np.flatnonzero(is_in_split)[: getattr(config, split)]
        if not len(selected_indices):
            raise ValueError(
                f"data.sudoku.{split}={getattr(config, split)}: there are too few different puzzles to fill two "
                "splits. Increase data.sudoku.train or data.sudoku.validation."
            )
        write_folder(
            path / FOLDERS[split], givens[selected_indices] + 1, solutions[selected_indices] + 1, config.side + 2
        )


def _convert(config: SampleConfig, tables: dict[str, PuzzleTable], path: Path) -> None:
    """Write the puzzles of CSV files, or a sample of them, as arrays."""
    rng = np.random.default_rng(config.seed)
    for split, table in tables.items():
        inputs, labels = table.read(config.guesses)
        selected_indices = np.arange(len(inputs))
        if len(inputs) > getattr(config, split):
            selected_indices = np.sort(rng.choice(len(inputs), getattr(config, split), replace=False))
        write_folder(
            path / FOLDERS[split], inputs[selected_indices], labels[selected_indices], table.alphabet.vocab_size
        )
