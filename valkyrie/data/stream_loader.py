"""Loads batches of text that is tokenised while it is read.

grain workers read the lanes of the stream (see `valkyrie.data.stream`). This process joins their rows.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import grain
import numpy as np
from absl import flags

from valkyrie.data.batches import Batch, BatchPlan, Loader, RowPosition, make_batch
from valkyrie.data.packing import make_packer, row_batches
from valkyrie.data.stream import Lane, LanePosition, StreamedText
from valkyrie.records import decode, encode

_BATCHES_AHEAD = 4
_MAX_WORKERS = 8
_POSITIONS = "positions"


@dataclass(frozen=True)
class StreamPosition(RowPosition):
    """Position in a stream.

    Args:
        lanes: number of lanes.
        packing: value of `data.packing`.
        pool: documents per lane that `packing=best_fit` reads ahead.
        places: maps the number of each lane to its position, or to None before its first row. Empty in `Loader.start`.
    """

    progress_fields: ClassVar[tuple[str, ...]] = ("row", "places")
    current_version: ClassVar[int] = 2

    lanes: int
    packing: str
    pool: int
    places: dict[str, LanePosition | None]


class StreamLoader(Loader[StreamPosition]):
    """Loads this process's rows of the global batches of a stream.

    Training lanes are read by `data.workers` processes, at most one per lane, or by a thread of this process if
    `data.workers` is 0. The validation lane is always read by a thread. Workers start with the first batch.
    """

    def __init__(self, data: StreamedText, split: str, plan: BatchPlan) -> None:
        config, batch = data.config, plan.batch
        lane_count = data.lane_count(batch) if plan.repeat else 1
        start = StreamPosition(
            StreamPosition.current_version,
            split,
            plan.seed,
            data.content,
            plan.seq,
            0,
            lane_count,
            config.packing.value,
            config.pool,
            {},
        )
        super().__init__(batch, start)
        rows_per_lane = batch // lane_count
        self._data, self._seq, self._rows_per_lane = data, plan.seq, rows_per_lane
        self._lane_numbers = sorted({int(row) // rows_per_lane for row in plan.rows})
        first_rows = {lane: i * rows_per_lane for i, lane in enumerate(self._lane_numbers)}
        self._row_indices = np.array(
            [first_rows[int(row) // rows_per_lane] + int(row) % rows_per_lane for row in plan.rows]
        )
        cores = os.cpu_count() or 1
        worker_count = min(_MAX_WORKERS, cores) if config.workers is None else config.workers
        self._worker_count = min(worker_count, len(self._lane_numbers)) if plan.repeat else 0
        self._lanes = [
            Lane(
                data.units(split),
                config,
                data.tokenizer,
                lane,
                lane_count,
                plan.seed if plan.repeat else None,
                threads=1 if self._worker_count else min(_MAX_WORKERS, cores),
            )
            for lane in self._lane_numbers
        ]
        self._positions: list[LanePosition | None] = [None] * len(self._lanes)
        self._step, self._closed = 0, False
        self._iterators: list[Any] | None = None

    def __next__(self) -> Batch:
        if self._closed:
            raise StopIteration
        if self._iterators is None:
            self._iterators = [*map(iter, self._datasets())]
        parts = [next(iterator) for iterator in self._iterators]
        count = len(self._iterators)
        for worker, part in enumerate(parts):
            self._positions[worker::count] = part.pop(_POSITIONS).lanes
        self._step += 1
        return {name: self._join([part[name] for part in parts]) for name in parts[0]}

    def _datasets(self) -> list[Any]:
        """Return one grain dataset per worker. Lanes are assigned to the workers in turn.

        Without workers, returns one dataset that a thread of this process reads.
        """
        if not flags.FLAGS.is_parsed():  # grain reads absl flags, which only absl programs parse
            flags.FLAGS.mark_as_parsed()
        count = max(1, self._worker_count)
        datasets = []
        for worker in range(count):
            lanes, positions = self._lanes[worker::count], self._positions[worker::count]
            dataset = _LaneBatches(
                lanes, _Positions(tuple(positions)), self._seq, self._rows_per_lane, self._data.bos_id
            )
            options = grain.MultiprocessingOptions(num_workers=1, per_worker_buffer_size=_BATCHES_AHEAD)
            prefetched_dataset = (
                dataset.mp_prefetch(options, worker_init_fn=_ignore_interrupts) if self._worker_count else None
            )
            datasets.append(
                prefetched_dataset or grain.experimental.ThreadPrefetchIterDataset(dataset, prefetch_buffer_size=2)
            )
        return datasets

    def _join(self, parts: list[np.ndarray]) -> np.ndarray:
        """Join the workers' arrays into an array with this process's rows, in the order of `BatchPlan.rows`."""
        blocks = np.empty((len(self._lane_numbers), self._rows_per_lane, *parts[0].shape[1:]), parts[0].dtype)
        for worker, part in enumerate(parts):
            blocks[worker :: len(parts)] = part.reshape(-1, self._rows_per_lane, *part.shape[1:])
        return blocks.reshape(-1, *parts[0].shape[1:])[self._row_indices]

    @property
    def step(self) -> int:
        return self._step

    def position(self) -> StreamPosition:
        """Return the position of the next batch in every lane.

        All processes must call this, because each process knows only its own lanes.
        """
        my_positions = {
            str(lane): encode(position) for lane, position in zip(self._lane_numbers, self._positions, strict=True)
        }
        places: dict[str, LanePosition | None] = {}
        for positions_of_process in self._data.team.exchange("positions of the lanes", my_positions):
            places |= {
                lane: position and decode(LanePosition, position, lane)
                for lane, position in positions_of_process.items()
            }
        return replace(super().position(), places=places)

    def go_to(self, position: StreamPosition) -> None:
        self._step = position.to_step(self.batch)
        self._positions = [position.places[str(lane)] for lane in self._lane_numbers]
        self._end_iterators()

    def close(self) -> None:
        self._closed = True
        self._end_iterators()

    def _end_iterators(self) -> None:
        for iterator in self._iterators or ():
            iterator.close()
        self._iterators = None


@dataclass(frozen=True)
class _Positions:
    """Positions of lanes, wrapped in a class because grain flattens lists and tuples when it passes them on."""

    lanes: tuple[LanePosition | None, ...]


class _LaneBatches(grain.IterDataset):
    """Batches with `rows_per_lane` rows of each of the given lanes, in lane order.

    Each batch also has the position of every lane after the batch, for checkpoints.
    """

    def __init__(self, lanes: list[Lane], start: _Positions, seq: int, rows_per_lane: int, bos_id: int) -> None:
        super().__init__()
        self.lanes, self.start, self.seq, self.rows_per_lane, self.bos_id = lanes, start, seq, rows_per_lane, bos_id

    def __iter__(self) -> grain.DatasetIterator:
        return _LaneBatchesIterator(self)


class _LaneBatchesIterator(grain.DatasetIterator):
    def __init__(self, dataset: _LaneBatches) -> None:
        super().__init__()
        self._dataset = dataset
        self._go_to(dataset.start)

    def __next__(self) -> Mapping[str, Any]:
        windows = next(self._batches)
        self._positions = _Positions(tuple(packer.position() for packer in self._packers))
        return {**make_batch(windows, self._dataset.seq, self._dataset.bos_id), _POSITIONS: self._positions}

    def get_state(self) -> dict[str, _Positions]:
        return {_POSITIONS: self._positions}

    def set_state(self, state: dict[str, _Positions]) -> None:
        self._go_to(state[_POSITIONS])

    def _go_to(self, start: _Positions) -> None:
        dataset = self._dataset
        self._packers = [
            make_packer(lane, dataset.seq, position or LanePosition())
            for lane, position in zip(dataset.lanes, start.lanes, strict=True)
        ]
        self._batches, self._positions = row_batches(self._packers, dataset.rows_per_lane), start


def _ignore_interrupts(worker: int, count: int) -> None:
    """Ignore Ctrl-C, which reaches every process of a terminal. The training process stops its workers itself."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
