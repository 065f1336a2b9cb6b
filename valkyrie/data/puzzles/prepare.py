"""Prepares puzzles: generates Sudoku or reads CSV into the cache, once, in the published form; opens such folders."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from valkyrie.data.cached import kept_in_cache
from valkyrie.data.config import DataConfig, Source, SudokuConfig
from valkyrie.data.puzzles.folder import FOLDERS, METADATA, PreparedPuzzles, open_puzzles
from valkyrie.data.puzzles.sudoku import classes, generate
from valkyrie.data.puzzles.tables import Table, find_tables
from valkyrie.paths import write_whole

_ALGORITHM = 1
"""Part of the cache key: raised when the same settings would give other puzzles than before."""
_AT_ONCE = 1000


class Shape(NamedTuple):
    """What a model must be made for: cells of a puzzle, values of a cell, identifiers of puzzles."""

    cells: int
    vocab_size: int
    identifiers: int


def shape_of(config: DataConfig) -> Shape:
    """Return the shape of the puzzles, by the settings or the beginning of the files; ValueError for a wrong one."""
    if problems := config.problems():
        raise ValueError("\n".join(problems))
    if config.source is Source.sudoku:
        return Shape(config.sudoku.side**2, config.sudoku.side + 2, 1)
    if tables := find_tables(_folder(config)):
        return Shape(tables["train"].cells, tables["train"].alphabet.vocab_size, 1)
    train = open_puzzles(_folder(config), config.name).train
    return Shape(train.cells, train.vocab_size, train.identifiers)


def prepare_puzzles(config: DataConfig, say: Callable[[str], Any] | None = None) -> PreparedPuzzles:
    """Return the puzzles of a configuration, from the cache if they were made before.

    `say` is given a line before puzzles are generated, which takes minutes. ValueError for every mistake in the
    configuration or the files, DiskError where the cache cannot be written.
    """
    shape, sudoku = shape_of(config), config.sudoku
    if config.source is Source.sudoku:
        write: Callable[[Path], None] = partial(_generated, sudoku, say)
        told: list[Any] = [sudoku.side, sudoku.train, sudoku.validation, sudoku.guesses, sudoku.clues, sudoku.seed]
        side = sudoku.side
    elif tables := find_tables(_folder(config)):
        write = partial(_converted, sudoku, tables)
        told = [sudoku.train, sudoku.validation, sudoku.guesses, sudoku.seed, *(t.signature for t in tables.values())]
        side = tables["train"].alphabet.side
    else:
        return open_puzzles(_folder(config), config.name)
    key = hashlib.sha256(json.dumps([_ALGORITHM, config.source.value, shape, told]).encode()).hexdigest()[:16]
    folder = kept_in_cache(Path(config.cache_dir).expanduser(), f"{config.name}-{key}", write)
    return open_puzzles(folder, config.name, side if config.augment else None)


def write_folder(path: Path, inputs: np.ndarray, labels: np.ndarray, vocab_size: int) -> None:
    """Write one split in the published form: every puzzle a group of its own, 0 in a label not counted."""
    path.mkdir()
    count = np.arange(len(inputs) + 1, dtype=np.int32)
    arrays = {"inputs": inputs.astype(np.uint8), "labels": labels.astype(np.uint8)}
    arrays |= {"puzzle_indices": count, "group_indices": count}
    arrays["puzzle_identifiers"] = np.zeros(len(inputs), np.int32)
    for name, array in arrays.items():
        np.save(path / f"all__{name}.npy", array)
    said = {"pad_id": 0, "ignore_label_id": 0, "blank_identifier_id": 0, "vocab_size": vocab_size}
    said |= {"seq_len": inputs.shape[1], "num_puzzle_identifiers": 1, "total_groups": len(inputs)}
    said |= {"mean_puzzle_examples": 1, "total_puzzles": len(inputs), "sets": ["all"]}
    write_whole(path / METADATA, json.dumps(said))


def _folder(config: DataConfig) -> Path:
    path = Path(config.paths[0]).expanduser()
    if not path.is_dir():
        raise ValueError(f"data.paths={config.paths[0]} is no folder: puzzles are a folder with train and test in it.")
    return path


def _generated(config: SudokuConfig, say: Callable[[str], Any] | None, path: Path) -> None:
    """Write generated puzzles: those of validation are none of training, nor for 4x4 symmetric forms of one."""
    rng, wanted = np.random.default_rng([config.seed, config.side]), config.train + config.validation
    if say is not None and config.side > 4:
        say(f"generating {wanted:,} Sudoku puzzles of one solution, once: about {wanted / 1000:.0f} min on one core")
    givens, solutions = np.zeros((0, config.side**2), np.int64), np.zeros((0, config.side**2), np.int64)
    while len(givens) < wanted:
        found = generate(rng, min(_AT_ONCE, 2 * (wanted - len(givens)) + 50), config.side, config.clues)
        hard = found.guesses >= config.guesses
        givens = np.concatenate([givens, found.givens[hard]])
        solutions = np.concatenate([solutions, found.solutions[hard]])
    names = [grid.tobytes() for grid in givens] if config.side > 4 else classes(givens, config.side)
    known = {name: i for i, name in reversed(list(enumerate(names)))}  # the first of each name
    first = np.array([known[name] for name in names])
    share = config.validation / wanted
    held_out = rng.random(len(names))[first] < share  # all of a name, or none
    for split, rows in (("validation", held_out), ("train", ~held_out)):
        chosen = np.flatnonzero(rows)[: getattr(config, split)]
        if not len(chosen):
            raise ValueError(f"data.sudoku.{split}={getattr(config, split)}: too few puzzles for two splits.")
        write_folder(path / FOLDERS[split], givens[chosen] + 1, solutions[chosen] + 1, config.side + 2)


def _converted(config: SudokuConfig, tables: dict[str, Table], path: Path) -> None:
    """Write what CSV holds, or a sample of it, in the published form."""
    rng = np.random.default_rng(config.seed)
    for split, table in tables.items():
        inputs, labels = table.read(config.guesses)
        chosen = np.arange(len(inputs))
        if len(inputs) > getattr(config, split):
            chosen = np.sort(rng.choice(len(inputs), getattr(config, split), replace=False))
        write_folder(path / FOLDERS[split], inputs[chosen], labels[chosen], table.alphabet.vocab_size)
