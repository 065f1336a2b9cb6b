"""Batches of a dataset that is tokenised as it is read: lanes in worker processes of grain, put together here."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import grain
import numpy as np
from absl import flags

from valkyrie.data.batches import Batch, Loader, make_batch
from valkyrie.data.packing import batches_of, rows_of
from valkyrie.data.stream import Lane, Streamed

_BATCHES_AHEAD = 4
_MOST_WORKERS = 8
_STATES = "states"


class StreamLoader(Loader):
    """This process's rows of the global batches, and the place of its lanes.

    Training lanes are read by `data.workers` processes (0: by a thread of this one), which start with the first batch.
    """

    version = 2

    def __init__(
        self, data: Streamed, split: str, places: np.ndarray, batch: int, seq: int, seed: int, repeat: bool
    ) -> None:
        lanes = data.lanes(batch) if repeat else 1
        config = data.config
        identity = {"split": split, "seq": seq, "seed": seed, "content": data.content, "lanes": lanes}
        packing = {"packing": config.packing.value, "pool": config.pool}
        super().__init__(batch, identity | packing)
        each = batch // lanes
        self._data, self._seq, self._each, self._repeat = data, seq, each, repeat
        self._mine = sorted({int(place) // each for place in places})
        firsts = {lane: at * each for at, lane in enumerate(self._mine)}
        self._rows = np.array([firsts[int(place) // each] + int(place) % each for place in places])
        cores = os.cpu_count() or 1
        workers = min(_MOST_WORKERS, cores) if config.workers is None else config.workers
        self._workers = min(workers, len(self._mine)) if repeat else 0
        self._lanes = [
            Lane(
                data.units(split),
                config,
                data.tokenizer,
                lane,
                lanes,
                seed if repeat else None,
                threads=1 if self._workers else min(_MOST_WORKERS, cores),
            )
            for lane in self._mine
        ]
        self._states: list[Any] = [None] * len(self._lanes)
        self._step, self._closed = 0, False
        self._iterators: list[Any] | None = None

    def __next__(self) -> Batch:
        """Return the next batch."""
        if self._closed:
            raise StopIteration
        if self._iterators is None:
            self._iterators = [*map(iter, self._datasets())]
        parts = [next(iterator) for iterator in self._iterators]
        count = len(self._iterators)
        for worker, part in enumerate(parts):
            self._states[worker::count] = json.loads(part.pop(_STATES))
        self._step += 1
        return {name: self._joined([part[name] for part in parts]) for name in parts[0]}

    def _datasets(self) -> list[Any]:
        """Return what each worker reads: lanes dealt to them in turn."""
        if not flags.FLAGS.is_parsed():  # grain asks for some of its own, which only a program of absl reads
            flags.FLAGS.mark_as_parsed()
        count = max(1, self._workers)
        datasets = []
        for worker in range(count):
            lanes, states = self._lanes[worker::count], self._states[worker::count]
            rows = _Rows(lanes, states, self._seq, self._each, self._data.bos_id)
            options = grain.MultiprocessingOptions(num_workers=1, per_worker_buffer_size=_BATCHES_AHEAD)
            ahead = rows.mp_prefetch(options, worker_init_fn=_ignore_interrupts) if self._workers else None
            datasets.append(ahead or grain.experimental.ThreadPrefetchIterDataset(rows, prefetch_buffer_size=2))
        return datasets

    def _joined(self, parts: list[np.ndarray]) -> np.ndarray:
        """Return this process's rows, in their order, from those of the workers."""
        blocks = np.empty((len(self._mine), self._each, *parts[0].shape[1:]), parts[0].dtype)
        for worker, part in enumerate(parts):
            blocks[worker :: len(parts)] = part.reshape(-1, self._each, *part.shape[1:])
        return blocks.reshape(-1, *parts[0].shape[1:])[self._rows]

    @property
    def step(self) -> int:
        """Batches given out so far, over all processes and restarts."""
        return self._step

    def state(self) -> dict[str, Any]:
        """Return the place of the next batch in every lane; all processes call it, for each knows its own lanes."""
        mine = {str(lane): state for lane, state in zip(self._mine, self._states, strict=True)}
        known: dict[str, Any] = {}
        for theirs in self._data.team.exchange("places of the lanes", mine):
            known |= theirs
        return super().state() | {"places": known}

    def restore(self, state: dict[str, Any]) -> None:
        """Go to a place that `state` returned, here or on another number of processes.

        ValueError if the data, seed, seq, lanes or packing differ, or if the place is no multiple of this batch.
        """
        self._step = self._step_of(state)
        self._states = [state["places"][str(lane)] for lane in self._mine]
        self._end_iterators()

    def close(self) -> None:
        """End the workers; afterwards there are no more batches."""
        self._closed = True
        self._end_iterators()

    def _end_iterators(self) -> None:
        for iterator in self._iterators or ():
            iterator.close()
        self._iterators = None


class _Rows(grain.IterDataset):
    """The rows of some lanes in every batch, with the places of the lanes after them."""

    def __init__(self, lanes: list[Lane], states: list[Any], seq: int, each: int, bos_id: int) -> None:
        super().__init__()
        self.lanes, self.states, self.seq, self.each, self.bos_id = lanes, states, seq, each, bos_id

    def __iter__(self) -> grain.DatasetIterator:
        return _RowsIterator(self)


class _RowsIterator(grain.DatasetIterator):
    """Reads the lanes."""

    def __init__(self, rows: _Rows) -> None:
        super().__init__()
        self._rows = rows
        self._go_to(rows.states)

    def __next__(self) -> dict[str, Any]:
        windows = next(self._batches)
        self._places = json.dumps([lane.state() for lane in self._lanes])
        return {**make_batch(windows, self._rows.seq, self._rows.bos_id), _STATES: self._places}

    def get_state(self) -> dict[str, Any]:
        """Return the places of the lanes."""
        return {_STATES: self._places}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go to places that `get_state` returned."""
        self._go_to(json.loads(state[_STATES]))

    def _go_to(self, states: list[Any]) -> None:
        rows = self._rows
        self._lanes = [rows_of(lane, rows.seq, state) for lane, state in zip(rows.lanes, states, strict=True)]
        self._batches, self._places = batches_of(self._lanes, rows.each), json.dumps(states)


def _ignore_interrupts(worker: int, count: int) -> None:
    """Leave Ctrl-C, which reaches every process of a terminal, to the training, which ends its workers itself."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
