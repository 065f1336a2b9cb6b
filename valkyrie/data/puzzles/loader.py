"""Which puzzle goes to which row of which step: each group once an epoch, one of its forms, its symmetry drawn anew.

The batch of a step follows from the data, the seed and the number of the step alone, so that a run goes on exactly, and
on any number of processes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from valkyrie.data.puzzles.folder import PreparedPuzzles
from valkyrie.data.puzzles.symmetries import draw_symmetries

NO_LABEL = -100
"""The label of a cell that is not counted."""
STATE_VERSION = 1
_BATCHES_AHEAD = 2
_ENDLESS = 2**31 - 1

Batch = dict[str, np.ndarray]
"""`inputs` and `labels`, each int32 [rows, cells], and `puzzles`, int32 [rows]."""


class _Steps:
    """The share of one process in every global batch, for grain."""

    def __init__(self, data: PreparedPuzzles, name: str, places: np.ndarray, batch: int, seed: int, endless: bool):
        self._data, self._split, self._places, self._batch = data, data.split(name), places, batch
        self._seed, self._endless = seed, endless
        self._orders: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return _ENDLESS if self._endless else -(-len(self._split.inputs) // self._batch)

    def __getitem__(self, step: int) -> Batch:
        return self._drawn(step) if self._endless else self._in_order(step)

    def _drawn(self, step: int) -> Batch:
        split, rng = self._split, np.random.default_rng([_mixed(self._seed), 1, step])
        epochs, numbers = np.divmod(step * self._batch + np.arange(self._batch), split.groups)
        groups = np.concatenate([self._order(int(e))[numbers[epochs == e]] for e in np.unique(epochs)])
        puzzles = _one_of(rng, split.group_indices, groups)
        examples = _one_of(rng, split.puzzle_indices, puzzles)[self._places]
        symmetries = None if self._data.side is None else draw_symmetries(rng, self._batch, self._data.side)
        inputs, labels = split.inputs[examples], split.labels[examples]
        if symmetries is not None:
            own = symmetries[self._places]
            inputs, labels = own.of(inputs), own.of(labels)
        return self._made(inputs, labels, split.puzzle_identifiers[puzzles[self._places]])

    def _in_order(self, step: int) -> Batch:
        split, rows = self._split, step * self._batch + self._places
        examples = rows[rows < len(split.inputs)]
        puzzles = np.searchsorted(split.puzzle_indices, examples, side="right") - 1
        made = self._made(split.inputs[examples], split.labels[examples], split.puzzle_identifiers[puzzles])
        missing = len(rows) - len(examples)
        padding = {"inputs": 0, "labels": NO_LABEL, "puzzles": split.blank}
        wide = {name: [(0, missing)] + [(0, 0)] * (array.ndim - 1) for name, array in made.items()}
        return {name: np.pad(made[name], wide[name], constant_values=padding[name]) for name in made}

    def _made(self, inputs: np.ndarray, labels: np.ndarray, puzzles: np.ndarray) -> Batch:
        counted = labels.astype(np.int32)
        if self._split.ignored is not None:
            counted = np.where(counted == self._split.ignored, np.int32(NO_LABEL), counted)
        return {"inputs": inputs.astype(np.int32), "labels": counted, "puzzles": puzzles.astype(np.int32)}

    def _order(self, epoch: int) -> np.ndarray:
        """Return the groups in the order of an epoch."""
        if epoch not in self._orders:
            self._orders = {e: order for e, order in self._orders.items() if e >= epoch - 1}
            rng = np.random.default_rng([_mixed(self._seed), 0, epoch])
            self._orders[epoch] = rng.permutation(self._split.groups)
        return self._orders[epoch]


class PuzzleLoader(Iterator[Batch]):
    """An iterator over batches that knows its place; close it (or use it in a `with`) to end its thread."""

    def __init__(
        self,
        prepared: PreparedPuzzles,
        split: str,
        *,
        batch: int,
        seq: int,
        seed: int,
        repeat: bool,
        places: Sequence[int],
    ) -> None:
        """`repeat` draws without end (training); else all examples once, in order. ValueError for another `seq`."""
        import grain

        found = prepared.split(split)
        if found.cells != seq:
            raise ValueError(f"data={prepared.name} has puzzles of {found.cells} cells, and seq={seq}.")
        steps = _Steps(prepared, split, np.asarray(places, np.int64), batch, seed, repeat)
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=_BATCHES_AHEAD)
        self._iterator = iter(grain.MapDataset.source(steps).to_iter_dataset(options))  # pyright: ignore[reportArgumentType]
        self._identity = {"split": split, "batch": batch, "seed": seed, "content": prepared.content}
        self._closed = False
        self.batch, self.rows = batch, found.groups if repeat else len(steps) * batch
        self.batches = None if repeat else len(steps)
        """Batches until the end; None if there is none."""

    def __next__(self) -> Batch:
        """Return the next batch."""
        if self._closed:
            raise StopIteration
        return next(self._iterator)

    @property
    def step(self) -> int:
        """Batches given out so far, over all processes and restarts."""
        return int(self._iterator.get_state()["next_index"])

    @property
    def epoch(self) -> float:
        """Times the groups of the split were given out, all processes together."""
        return self.step * self.batch / self.rows

    def state(self) -> dict[str, Any]:
        """Return the place of the next batch, as JSON values; the same on every process."""
        return {"version": STATE_VERSION, "step": self.step, **self._identity}

    def restore(self, state: dict[str, Any]) -> None:
        """Go to a place that `state` returned; ValueError if the puzzles, the seed or the batch differ."""
        for name, mine in self._identity.items():
            if state.get(name) != mine:
                what = "the puzzles are others than those" if name == "content" else f"{name}={mine} is not the one"
                raise ValueError(
                    f"{what} that the run was trained with ({name}={state.get(name)}): puzzles that are half worked "
                    "on are part of its state. Use the same, or another name=."
                )
        self._iterator.set_state({"next_index": state["step"]})

    def close(self) -> None:
        """End the reading thread; afterwards there are no more batches."""
        if not self._closed:
            self._closed = True
            self._iterator.close()

    def __enter__(self) -> PuzzleLoader:
        """Return the loader itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()


def _one_of(rng: np.random.Generator, starts: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Return one member of each chosen range, whose first members are `starts`."""
    first, after = starts[chosen], starts[chosen + 1]
    return first + (rng.random(len(chosen)) * (after - first)).astype(np.int64)


def _mixed(seed: int) -> int:
    return int.from_bytes(hashlib.sha256(f"puzzle order {seed}".encode()).digest()[:4], "big")
