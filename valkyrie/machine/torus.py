"""Routes of messages over a torus, and the load of its busiest links.

Messages use dimension-order routing, in the shorter direction around each ring. All groups of a collective send at the
same time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from valkyrie.hardware.position import Position
from valkyrie.hardware.target import Topology
from valkyrie.parallel.axis_links import CORE, TORUS_AXES


@dataclass(frozen=True)
class Crossings:
    """Load of the links of one torus axis.

    Args:
        loads: Number of messages that cross each link, of shape (2, slices, *torus): first the descending direction,
            then the ascending one. For the cores of a chip, a single entry: messages per sender.
        hops: Hops of the longest route.
        messages_per_sender: Messages per sender that use the axis.
    """

    loads: np.ndarray
    hops: int
    messages_per_sender: float

    @property
    def descending_load(self) -> float:
        """Messages over the busiest link in descending direction."""
        return float(self.loads[0].max())

    @property
    def ascending_load(self) -> float:
        """Messages over the busiest link in ascending direction."""
        return float(self.loads[-1].max())

    @property
    def max_load(self) -> float:
        """Messages over the busiest link in either direction."""
        return float(self.loads.max())

    def plus(self, other: Crossings) -> Crossings:
        """Return the load if the messages of `self` and `other` are sent at the same time."""
        return Crossings(
            self.loads + other.loads, max(self.hops, other.hops), self.messages_per_sender + other.messages_per_sender
        )


@dataclass(frozen=True)
class Dimension:
    """A torus axis along which a group extends.

    Args:
        axis: Name of the torus axis.
        size: Members along it.
        load: Bytes over its busiest link, per byte that a member sends.
        hops: Hops to the farthest member: half of a ring, or the whole line. 0 for the cores of a chip.
    """

    axis: str
    size: int
    load: float
    hops: float


class Torus:
    """The links between devices on a torus.

    Arrays of groups have the shape (groups, members) and contain indices into `positions`.
    """

    def __init__(self, topology: Topology, positions: Sequence[Position]) -> None:
        self._shape = topology.shape
        self._wrap = topology.wrap
        self._shifts = np.array(topology.wrap_shifts)
        self._twisted = topology.twisted
        self._coords = np.array([p.coords[: len(self._shape)] for p in positions])
        self._cores = np.array([p.core for p in positions])
        self._slices = np.array([p.slice_index for p in positions])
        self._dimensions_by_group: dict[bytes, list[Dimension] | None] = {}

    def slice_indices(self, group: np.ndarray) -> np.ndarray:
        """Return the slice of each device in `group`, an array of any shape."""
        return self._slices[group]

    def dimensions(self, groups: np.ndarray) -> list[Dimension] | None:
        """Return the torus axes along which groups extend, with the load of a ring along each.

        Returns None if the groups are not boxes on the torus.
        """
        key = groups.tobytes()
        if key not in self._dimensions_by_group:
            self._dimensions_by_group[key] = self._find_dimensions(groups)
        return self._dimensions_by_group[key]

    def _find_dimensions(self, groups: np.ndarray) -> list[Dimension] | None:
        coords = np.concatenate([self._coords[groups], self._cores[groups][..., None]], axis=-1)
        names = [*TORUS_AXES[: len(self._shape)], CORE]
        sizes = [len(np.unique(coords[0, :, d])) for d in range(len(names))]
        if math.prod(sizes) != groups.shape[1]:
            return None
        dimensions = []
        for d, size in enumerate(sizes):
            if size == 1:
                continue
            other_coords = [coords[..., other] for other in reversed(range(len(names))) if other != d]
            order = np.lexsort((coords[..., d], *other_coords))
            lines = np.take_along_axis(groups, order, axis=1).reshape(-1, size)
            is_twisted_ring = d < len(self._shape) and bool(self._shifts[d].any()) and self._is_ring(d, coords[0])
            crossings_by_axis = self.ring_crossings(self._join_lines(lines, d) if is_twisted_ring else lines)
            if set(crossings_by_axis) != {names[d]}:
                return None
            crossings = crossings_by_axis[names[d]]
            span = int(np.ptp(coords[0, :, d]))
            hops = 0 if names[d] == CORE else size * crossings.hops / 2 if self._is_ring(d, coords[0]) else span
            dimensions.append(Dimension(names[d], size, crossings.max_load / 2, float(hops)))
        return dimensions

    def ring_crossings(self, rings: np.ndarray) -> dict[str, Crossings]:
        """Return the load of each axis if every member sends a message to both of its neighbours in its ring."""
        successors, predecessors = np.roll(rings, -1, axis=1), np.roll(rings, 1, axis=1)
        return self.crossings(
            np.concatenate([rings.ravel(), rings.ravel()]),
            np.concatenate([successors.ravel(), predecessors.ravel()]),
            np.repeat([1, -1], rings.size),
        )

    def crossings(
        self, source: np.ndarray, target: np.ndarray, direction: np.ndarray | None = None
    ) -> dict[str, Crossings]:
        """Return the load of each torus axis if every source sends one message to its target.

        Axes that no message uses are left out. Messages between different cores also add an entry `core`. Chips of
        different slices have separate links.

        Args:
            source: Index of the sending device of each message.
            target: Index of the receiving device.
            direction: +1 or -1 for each message. Selects the route if several are shortest, such as halfway round a
                ring. None balances the directions.
        """
        crossings_by_axis: dict[str, Crossings] = {}
        senders = max(len(np.unique(source)), 1)
        message_index, distances, message_share = self._routes(self._coords[source], self._coords[target], direction)
        coords, slice_ = self._coords[source][message_index], self._slices[source][message_index]
        for axis, length in enumerate(self._shape):
            distance = distances[:, axis]
            if not distance.any():
                continue
            step = np.sign(distance)
            loads = np.zeros((2, int(self._slices.max()) + 1, *self._shape))
            for hop in range(int(np.abs(distance).max())):
                is_moving = np.abs(distance) > hop
                links = ((step[is_moving] > 0).astype(int), slice_[is_moving], *coords[is_moving].T)
                np.add.at(loads, links, message_share[is_moving])
                coords[is_moving, axis] += step[is_moving]
                wraps = np.where(is_moving, coords[:, axis] // length, 0)
                coords = (coords + wraps[:, None] * self._shifts[axis]) % self._shape
            messages_per_sender = float(message_share[distance != 0].sum()) / senders
            crossings_by_axis[TORUS_AXES[axis]] = Crossings(loads, int(np.abs(distance).max()), messages_per_sender)
        crosses_cores = self._cores[source] != self._cores[target]
        if crosses_cores.any():
            loads = np.full((1,), np.count_nonzero(crosses_cores) / senders)
            crossings_by_axis[CORE] = Crossings(loads, 0, float(np.count_nonzero(crosses_cores)) / senders)
        return crossings_by_axis

    def _routes(
        self, source: np.ndarray, target: np.ndarray, direction: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the shortest routes of messages between coordinates, as three arrays with one entry per route.

        They are the index of the message, the signed distance along each axis, and the share of the message.
        """
        if self._twisted:
            return self._twisted_routes(target - source, direction)
        direction = np.where(source.sum(axis=1) % 2, -1, 1) if direction is None else direction
        distances = target - source
        for axis, (length, wrap) in enumerate(zip(self._shape, self._wrap, strict=True)):
            if wrap:
                distance = (distances[:, axis] + length // 2) % length - length // 2
                is_halfway = 2 * np.abs(distance) == length
                distances[:, axis] = np.where(is_halfway, direction * np.abs(distance), distance)
        return np.arange(len(source)), distances, np.ones(len(source))

    def _twisted_routes(
        self, offsets: np.ndarray, direction: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the routes on a twisted torus, where passing the end of an axis shifts the other coordinates.

        The result is as in `_routes`. A message is spread evenly over all its shortest routes. With a `direction`, it
        takes the first of them for +1 and the last one for -1.
        """
        wrap_counts = np.array(list(itertools.product(range(-2, 3), repeat=len(self._shape))))
        routes = offsets[:, None, :] + wrap_counts * np.array(self._shape) - wrap_counts @ self._shifts
        lengths = np.abs(routes).sum(axis=-1)
        is_shortest = lengths == lengths.min(axis=1, keepdims=True)
        if direction is not None:
            shortest_count = is_shortest.cumsum(axis=1)
            is_shortest &= shortest_count == np.where(direction > 0, 1, shortest_count[:, -1])[:, None]
        message_index, route_index = np.nonzero(is_shortest)
        return message_index, routes[message_index, route_index], 1.0 / is_shortest.sum(axis=1)[message_index]

    def _join_lines(self, lines: np.ndarray, d: int) -> np.ndarray:
        """Join pairs of lines along axis `d` of a twisted torus into rings: past the end of one, the other begins."""
        device_by_coords = {
            tuple(coords): device for device, coords in zip(lines.ravel(), self._coords[lines.ravel()], strict=True)
        }
        line_by_device = {device: line for line in lines for device in line}
        rings = []
        for line in lines:
            next_coords = tuple((self._coords[line[0]] + self._shifts[d]) % self._shape)
            next_line = line_by_device[device_by_coords[next_coords]]
            if line[0] < next_line[0]:
                rings.append(np.concatenate([line, next_line]))
        return np.array(rings)

    def spanned_axes(self, groups: np.ndarray) -> list[str]:
        """Return the torus axes, and `core`, along which members of the first group differ."""
        coords = np.concatenate([self._coords[groups[0]], self._cores[groups[0]][:, None]], axis=-1)
        names = [*TORUS_AXES[: len(self._shape)], CORE]
        return [name for d, name in enumerate(names) if len(np.unique(coords[:, d])) > 1]

    def _is_ring(self, d: int, coords: np.ndarray) -> bool:
        """Return whether positions `coords` form a ring along torus axis `d`.

        They do if they are equally spaced, the axis wraps around and has more than two chips, and its wraparound leads
        back to them. On a twisted torus, the wraparound shifts the other coordinates.
        """
        values = np.unique(coords[:, d])
        steps = np.diff(values, append=values[0] + self._shape[d])
        if not self._wrap[d] or self._shape[d] <= 2 or not (steps == steps[0]).all():
            return False
        occupied = {tuple(coord) for coord in coords[:, : len(self._shape)]}
        shifted = (coords[:, : len(self._shape)] + self._shifts[d]) % self._shape
        return all(tuple(coord) in occupied for coord in shifted)
