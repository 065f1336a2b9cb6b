"""Loads batches of puzzles: `inputs` and `labels`, int32 [rows, cells], and `puzzles` (identifiers), int32 [rows].

A group is a puzzle with its augmented forms. Each training epoch visits every group once, in random order, and takes a
random example from it. With `augment`, Sudokus also get a new random symmetry. The global batch of a step depends only
on the data, the seed, the batch size and the step number, so a run resumes exactly on any number of processes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from valkyrie.data.batches import Batch, BatchPlan, DataPosition, IndexedLoader, hash_seed
from valkyrie.data.sources.puzzles.folder import PreparedPuzzles
from valkyrie.data.sources.puzzles.symmetries import draw_symmetries

NO_LABEL = -100
"""The label of a cell that does not count in the loss."""
_ENDLESS_LENGTH = 2**31 - 1


class _PuzzleSampler:
    """Random-access data source for grain: this process's rows of each global batch."""

    def __init__(self, data: PreparedPuzzles, name: str, plan: BatchPlan) -> None:
        self._data, self._split, self._local_rows, self._batch = data, data.split(name), plan.rows, plan.batch
        self._seed, self._endless = plan.seed, plan.repeat
        self._orders: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return _ENDLESS_LENGTH if self._endless else -(-len(self._split.inputs) // self._batch)

    def __getitem__(self, index: int) -> Batch:
        return self._training_batch(index) if self._endless else self._evaluation_batch(index)

    def _training_batch(self, step: int) -> Batch:
        split, rng = self._split, np.random.default_rng([hash_seed("puzzle order", self._seed), 1, step])
        epochs, numbers = np.divmod(step * self._batch + np.arange(self._batch), split.group_count)
        groups = np.concatenate([self._order(int(e))[numbers[epochs == e]] for e in np.unique(epochs)])
        puzzles = _random_member(rng, split.group_indices, groups)
        examples = _random_member(rng, split.puzzle_indices, puzzles)[self._local_rows]
        symmetries = None if self._data.side is None else draw_symmetries(rng, self._batch, self._data.side)
        inputs, labels = split.inputs[examples], split.labels[examples]
        if symmetries is not None:
            local_symmetries = symmetries[self._local_rows]
            inputs, labels = local_symmetries.apply(inputs), local_symmetries.apply(labels)
        return self._as_batch(inputs, labels, split.puzzle_identifiers[puzzles[self._local_rows]])

    def _evaluation_batch(self, step: int) -> Batch:
        split, rows = self._split, step * self._batch + self._local_rows
        examples = rows[rows < len(split.inputs)]
        puzzles = np.searchsorted(split.puzzle_indices, examples, side="right") - 1
        batch = self._as_batch(split.inputs[examples], split.labels[examples], split.puzzle_identifiers[puzzles])
        missing_rows = len(rows) - len(examples)
        padding = {"inputs": 0, "labels": NO_LABEL, "puzzles": split.blank_identifier}
        pad_widths = {name: [(0, missing_rows)] + [(0, 0)] * (array.ndim - 1) for name, array in batch.items()}
        return {name: np.pad(batch[name], pad_widths[name], constant_values=padding[name]) for name in batch}

    def _as_batch(self, inputs: np.ndarray, labels: np.ndarray, puzzles: np.ndarray) -> Batch:
        masked_labels = labels.astype(np.int32)
        if self._split.ignored_label is not None:
            masked_labels = np.where(masked_labels == self._split.ignored_label, np.int32(NO_LABEL), masked_labels)
        return {"inputs": inputs.astype(np.int32), "labels": masked_labels, "puzzles": puzzles.astype(np.int32)}

    def _order(self, epoch: int) -> np.ndarray:
        """Return the random order of the groups in an epoch. Caches it for the next batches."""
        if epoch not in self._orders:
            self._orders = {e: order for e, order in self._orders.items() if e >= epoch - 1}
            rng = np.random.default_rng([hash_seed("puzzle order", self._seed), 0, epoch])
            self._orders[epoch] = rng.permutation(self._split.group_count)
        return self._orders[epoch]


@dataclass(frozen=True)
class PuzzlePosition(DataPosition):
    """Position in the puzzles, in steps.

    The batch size `batch` must not change when a run resumes, because partly solved puzzles are in the train state.
    """

    progress_fields: ClassVar[tuple[str, ...]] = ("step",)

    batch: int
    step: int

    def to_step(self, batch: int) -> int:
        return self.step

    def at_step(self, step: int, batch: int) -> PuzzlePosition:
        return replace(self, step=step)


class PuzzleLoader(IndexedLoader[PuzzlePosition]):
    """Loads batches of puzzles: random and endless for training, all examples once in order for evaluation.

    Raises ValueError if `plan.seq` is not the number of cells per puzzle.
    """

    def __init__(self, data: PreparedPuzzles, split: str, plan: BatchPlan) -> None:
        cell_count = data.split(split).cell_count
        if cell_count != plan.seq:
            raise ValueError(f"seq={plan.seq} does not match the puzzles of data={data.name}. Use seq={cell_count}.")
        start = PuzzlePosition(PuzzlePosition.current_version, split, plan.seed, data.content, plan.batch, 0)
        super().__init__(plan, start, _PuzzleSampler(data, split, plan))


def _random_member(rng: np.random.Generator, starts: np.ndarray, range_indices: np.ndarray) -> np.ndarray:
    """Return a random index in each of the selected ranges. Range i is `starts[i]` up to `starts[i + 1]`."""
    start, stop = starts[range_indices], starts[range_indices + 1]
    return start + (rng.random(len(range_indices)) * (stop - start)).astype(np.int64)
