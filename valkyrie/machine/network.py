"""Cost of a collective: bytes on each torus axis, and seconds on links and on the network between slices.

An algorithm is a set of messages between chips. Messages use dimension-order routing, in the shorter direction around
each ring, and the busiest link of an axis determines the time. On a ring of N chips, each chip sends (N-1)/N of the
array, half of it in each direction; an all-reduce sends this twice. On an axis that does not wrap around, the ring in
one direction closes over the links of the other direction, so each link carries both.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from valkyrie.compiled.collectives import Collective, min_bytes_sent
from valkyrie.hardware.position import Position
from valkyrie.hardware.target import ChipConfig, Topology
from valkyrie.machine import assumptions
from valkyrie.machine.torus import Crossings, Dimension, Torus
from valkyrie.parallel.axis_links import CORE, DCN

ONE_RING_EMITTERS = ("1DAllGather", "BarnaCoreAllGather")
"""Prefixes of `emitter` in a collective's backend configuration that mean a single ring through the whole group."""


@dataclass(frozen=True)
class Machine:
    """The devices of a mesh, flattened in row-major order of `mesh_axes`, on a topology of chips.

    `routing_imbalance` is `TargetConfig.routing_imbalance`.
    """

    chip: ChipConfig
    topology: Topology
    positions: tuple[Position, ...]
    mesh_axes: dict[str, int]
    routing_imbalance: float = 1.0


@dataclass(frozen=True)
class CollectiveCost:
    """Cost of one run of a collective.

    Args:
        total_s: Duration if nothing else uses the links, including `latency_s`.
        latency_s: Seconds during which no bytes move.
        busy_s: Seconds that the busiest link is in use: by torus axis and direction (`a+`, `a-`), between the cores of
            a chip (`core+`, `core-`), and between slices (`dcn`).
        bytes_sent: Bytes that one device sends.
        bytes_by_axis: Bytes that one device sends along each torus axis, between cores (`core`), and between slices
            (`dcn`).
    """

    total_s: float = 0.0
    latency_s: float = 0.0
    busy_s: dict[str, float] = field(default_factory=dict)
    bytes_sent: float = 0.0
    bytes_by_axis: dict[str, float] = field(default_factory=dict)

    def reduced(self, share: float) -> CollectiveCost:
        """Return the cost of a collective that sends only this share of the bytes. 0 removes the latency as well."""
        if not share:
            return CollectiveCost()
        total_s = self.latency_s + share * (self.total_s - self.latency_s)
        busy_s, bytes_by_axis = (
            {name: share * value for name, value in values.items()} for values in (self.busy_s, self.bytes_by_axis)
        )
        return CollectiveCost(total_s, self.latency_s, busy_s, share * self.bytes_sent, bytes_by_axis)


@dataclass(frozen=True)
class _Algorithm:
    """The compiler's `collective_algorithm_config`: one ring through the whole group, or rings along each dimension.

    Args:
        is_one_ring: Whether there is a single ring.
        is_reordered: Whether the ring connects neighbours on the torus. Otherwise, it follows the order of the group.
        sizes: Size of the group along each dimension.
        orders: For each part of the array, the order of the dimensions.
    """

    is_one_ring: bool = False
    is_reordered: bool = True
    sizes: tuple[int, ...] = ()
    orders: tuple[tuple[int, ...], ...] = ()


def parse_algorithm(config: Mapping[str, Any]) -> _Algorithm | None:
    """Parse the algorithm from an instruction's backend configuration. Returns None if there is none.

    The emitters `1DAllGather*` use a single ring, as do `BarnaCore*`, the all-gathers on v4 that run on a separate core
    and overlap with matrix products.
    """
    settings = config.get("collective_algorithm_config", {})
    text = settings.get("debug", "")
    if settings.get("emitter", "").startswith(ONE_RING_EMITTERS):
        return _Algorithm(is_one_ring=True, is_reordered="has_reordering_map: true" in text)
    sizes = re.search(r"dim_sizes:([\d,]+)", text)
    if "phases:1 " in text:
        return _Algorithm(is_one_ring=True)
    if not sizes:
        return None
    order_lists = re.search(r"dim_used:((?:\{[\d ]+\},?)+)", text)
    listed_orders = (
        [tuple(map(int, order.split())) for order in re.findall(r"\{([\d ]+)\}", order_lists[1])] if order_lists else []
    )
    orders = [order for order in listed_orders if len(set(order)) == len(order)]  # an unused part is written {0 0}
    dims = sorted({d for order in orders for d in order})
    return _Algorithm(
        sizes=tuple(int(n) for n in sizes[1].split(",")),
        orders=tuple(tuple(dims.index(d) for d in order) for order in orders),
    )


class LinkModel:
    """Computes the costs of collectives on the links of a machine."""

    def __init__(self, machine: Machine, mask: np.ndarray | None = None) -> None:
        """`mask`: True for the devices that the program's replica groups refer to, or None for all devices.

        Raises ValueError if the chip's `ici_link_gbs` is unknown.
        """
        chip = machine.chip
        self.notes: dict[str, None] = {}
        if chip.ici_link_gbs is None:
            raise ValueError(
                f"target.chip={chip.name} sets no ici_link_gbs, the link bandwidth, which a replay needs. Set "
                "ici_link_gbs, or use another chip."
            )
        positions = [p for i, p in enumerate(machine.positions) if mask is None or mask[i]]
        self._torus = Torus(machine.topology, positions)
        self._link_rate, self._routing_imbalance = chip.ici_link_gbs * 1e9, machine.routing_imbalance
        self._hop_s = (chip.hop_us or 1.0) * 1e-6
        host_devices = math.prod(chip.host_bounds) * chip.devices
        self._dcn_rate = (chip.dcn_gbs_per_host or math.inf) * 1e9 * assumptions.DCN_EFFICIENCY / host_devices
        self._cache: dict[Collective, CollectiveCost] = {}
        self._all_to_all_crossings: dict[bytes, dict[str, Crossings]] = {}

    def cost(self, collective: Collective) -> CollectiveCost:
        """Return the cost of one run of a collective, cached by collective."""
        if collective not in self._cache:
            self._cache[collective] = self._cost(collective)
        return self._cache[collective]

    def _cost(self, collective: Collective) -> CollectiveCost:
        if collective.slices is not None:
            return self.between_slices_cost(collective.kind, collective.full_bytes, collective.slices)
        if collective.pairs is not None:
            return self.permute_cost(collective.pairs, collective.full_bytes)
        if collective.groups is None:
            return CollectiveCost()
        algorithm = parse_algorithm(collective.config)
        return self.collective_cost(collective.kind, collective.groups, collective.full_bytes, algorithm)

    def collective_cost(
        self, kind: str, groups: np.ndarray, full_bytes: float, algorithm: _Algorithm | None = None
    ) -> CollectiveCost:
        """Return the cost of one collective that all groups run at the same time.

        `full_bytes`: Size of a group's whole array, as in `min_bytes_sent`.
        """
        group_size = groups.shape[1]
        if group_size < 2 or full_bytes <= 0:
            return CollectiveCost()
        slice_count = len(np.unique(self._torus.slice_indices(groups[0])))
        if slice_count > 1:
            return self._across_slices_cost(kind, groups, full_bytes, slice_count)
        return _apply_efficiency(kind, self._within_slice_cost(kind, groups, full_bytes, algorithm))

    def permute_cost(self, pairs: np.ndarray, message_bytes: float) -> CollectiveCost:
        """Return the cost of simultaneous messages of `message_bytes` between (source, target) pairs."""
        if not len(pairs) or message_bytes <= 0:
            return CollectiveCost()
        source, target = pairs.T
        crosses_slices = self._torus.slice_indices(source) != self._torus.slice_indices(target)
        crossings = self._torus.crossings(source[~crosses_slices], target[~crosses_slices])
        busy_s = self._link_busy_s(crossings, message_bytes)
        bytes_by_axis = dict.fromkeys(crossings, message_bytes)
        hops = sum(axis_crossings.hops for axis_crossings in crossings.values())
        latency_s = assumptions.COLLECTIVE_START_S + hops * self._hop_s
        if crosses_slices.any():
            busy_s[DCN] = message_bytes / self._dcn_rate
            bytes_by_axis[DCN] = message_bytes
            latency_s += assumptions.DCN_LATENCY_S
        cost = CollectiveCost(latency_s, latency_s, busy_s, message_bytes, bytes_by_axis)
        cost = _apply_efficiency("collective-permute", cost)
        return replace(cost, total_s=latency_s + max(cost.busy_s.values(), default=0.0))

    def between_slices_cost(self, kind: str, input_bytes: float, slice_count: int) -> CollectiveCost:
        """Return the cost of a collective between slices. Each group has one device of each slice.

        All devices of a host send at the same time, through the host's runtime and its network. `input_bytes`: Bytes of
        the input of each device.
        """
        full_bytes = input_bytes * slice_count if kind == "all-gather" else input_bytes
        bytes_sent = min_bytes_sent(kind, full_bytes, slice_count)
        busy_s = bytes_sent / self._dcn_rate
        latency_s = assumptions.DCN_LATENCY_S * (2 if kind == "all-reduce" else 1)
        return CollectiveCost(latency_s + busy_s, latency_s, {DCN: busy_s}, bytes_sent, {DCN: bytes_sent})

    def _within_slice_cost(
        self, kind: str, groups: np.ndarray, full_bytes: float, algorithm: _Algorithm | None
    ) -> CollectiveCost:
        if kind == "ragged-all-to-all":
            return self._all_to_all_cost(groups, full_bytes * self._routing_imbalance)
        if kind == "all-to-all":
            return self._all_to_all_cost(groups, full_bytes)
        dims = self._torus.dimensions(groups)
        if dims is None or (algorithm is not None and algorithm.is_one_ring and len(dims) > 1):
            phases = [self._one_ring_phase(groups, full_bytes, algorithm)]
        else:
            phases = self._ring_phases(dims, full_bytes, algorithm)
        passes = 2 if kind == "all-reduce" else 1
        busy_s: dict[str, float] = {}
        bytes_by_axis: dict[str, float] = {}
        hops = 0.0
        for phase in phases:
            for axis, (seconds, bytes_sent) in phase.traffic_by_axis.items():
                for link in _directions(axis):
                    busy_s[link] = busy_s.get(link, 0.0) + passes * seconds
                bytes_by_axis[axis] = bytes_by_axis.get(axis, 0.0) + passes * bytes_sent
            hops += passes * phase.hops
        latency_s = assumptions.COLLECTIVE_START_S + hops * self._hop_s
        transfer_s = passes * sum(
            max((axis_s for axis_s, _ in phase.traffic_by_axis.values()), default=0.0) for phase in phases
        )
        return CollectiveCost(
            latency_s + transfer_s, latency_s, busy_s, min_bytes_sent(kind, full_bytes, groups.shape[1]), bytes_by_axis
        )

    def _across_slices_cost(self, kind: str, groups: np.ndarray, full_bytes: float, slice_count: int) -> CollectiveCost:
        """Return the cost of a collective whose groups span several slices.

        The cost is that of the same collective within each slice, plus an exchange over the network. In the exchange,
        each device handles its share of the array. In an all-to-all, it instead sends all its data for other slices.
        """
        group_size = groups.shape[1]
        members_per_slice = group_size // slice_count
        order = np.argsort(self._torus.slice_indices(groups), axis=1, kind="stable")
        slice_groups = np.take_along_axis(groups, order, axis=1).reshape(-1, members_per_slice)
        sharer_count = 1 if kind in ("all-to-all", "ragged-all-to-all") else members_per_slice
        bytes_sent = min_bytes_sent(kind, full_bytes / sharer_count, slice_count)
        inner_cost = CollectiveCost()
        if members_per_slice > 1:
            inner_cost = _apply_efficiency(kind, self._within_slice_cost(kind, slice_groups, full_bytes, None))
        between_s = bytes_sent / self._dcn_rate
        latency_s = inner_cost.latency_s + assumptions.DCN_LATENCY_S * (2 if kind == "all-reduce" else 1)
        return CollectiveCost(
            total_s=inner_cost.total_s + latency_s - inner_cost.latency_s + between_s,
            latency_s=latency_s,
            busy_s=inner_cost.busy_s | {DCN: between_s},
            bytes_sent=inner_cost.bytes_sent + bytes_sent,
            bytes_by_axis=inner_cost.bytes_by_axis | {DCN: bytes_sent},
        )

    def _all_to_all_cost(self, groups: np.ndarray, full_bytes: float) -> CollectiveCost:
        group_size = groups.shape[1]
        message_bytes = full_bytes / group_size
        key = groups.tobytes()
        if key not in self._all_to_all_crossings:
            sum_by_axis: dict[str, Crossings] = {}
            for shift in range(1, group_size):
                for axis, shift_crossings in self._torus.crossings(
                    groups.ravel(), np.roll(groups, -shift, axis=1).ravel()
                ).items():
                    sum_by_axis[axis] = (
                        sum_by_axis[axis].plus(shift_crossings) if axis in sum_by_axis else shift_crossings
                    )
            self._all_to_all_crossings[key] = sum_by_axis
        crossings_by_axis = self._all_to_all_crossings[key]
        busy_s = self._link_busy_s(crossings_by_axis, message_bytes)
        latency_s = (
            assumptions.COLLECTIVE_START_S
            + sum(crossings.hops for crossings in crossings_by_axis.values()) * self._hop_s
        )
        bytes_by_axis = {
            axis: crossings.messages_per_sender * message_bytes for axis, crossings in crossings_by_axis.items()
        }
        bytes_sent = min_bytes_sent("all-to-all", full_bytes, group_size)
        return CollectiveCost(latency_s + max(busy_s.values()), latency_s, busy_s, bytes_sent, bytes_by_axis)

    def _one_ring_phase(self, groups: np.ndarray, full_bytes: float, algorithm: _Algorithm | None) -> _Phase:
        """Return the link loads and hops of a collective on one ring through all members, in both directions."""
        group_size = groups.shape[1]
        bytes_sent = full_bytes * (group_size - 1) / group_size
        axes = self._torus.spanned_axes(groups)
        if algorithm is None or algorithm.is_reordered:
            traffic_by_axis = {axis: (bytes_sent / 2 / self._rate(axis), bytes_sent / len(axes)) for axis in axes}
            return _Phase(traffic_by_axis, group_size / 2)
        crossings_by_axis = self._torus.ring_crossings(groups)
        share_sum = sum(crossings.messages_per_sender for crossings in crossings_by_axis.values())
        traffic_by_axis = {
            axis: (
                bytes_sent * crossings.max_load / 2 / self._rate(axis),
                bytes_sent * crossings.messages_per_sender / share_sum,
            )
            for axis, crossings in crossings_by_axis.items()
        }
        return _Phase(traffic_by_axis, sum(crossings.hops for crossings in crossings_by_axis.values()) * group_size / 2)

    def _ring_phases(self, dims: Sequence[Dimension], full_bytes: float, algorithm: _Algorithm | None) -> list[_Phase]:
        """Return the phases of rings along one dimension after another.

        The array is divided into parts that use the dimensions in different orders at the same time.
        """
        orders = _dimension_orders(dims, algorithm)
        part_bytes = [full_bytes / len(orders)] * len(orders)
        phases = []
        for step in range(len(dims)):
            traffic_by_axis: dict[str, tuple[float, float]] = {}
            hops = 0.0
            for part, order in enumerate(orders):
                dim = dims[order[step]]
                bytes_sent = part_bytes[part] * (dim.size - 1) / dim.size
                axis_s, axis_bytes = traffic_by_axis.get(dim.axis, (0.0, 0.0))
                traffic_by_axis[dim.axis] = (
                    axis_s + bytes_sent * dim.load / self._rate(dim.axis),
                    axis_bytes + bytes_sent,
                )
                part_bytes[part] /= dim.size
                hops = max(hops, dim.hops)
            phases.append(_Phase(traffic_by_axis, hops))
        return phases

    def _link_busy_s(self, crossings_by_axis: dict[str, Crossings], message_bytes: float) -> dict[str, float]:
        """Return the seconds of the busiest link, by axis and direction, for messages of `message_bytes`."""
        busy_s = {}
        for axis, crossings in crossings_by_axis.items():
            ascending, descending = _directions(axis)
            busy_s |= {
                ascending: crossings.ascending_load * message_bytes / self._rate(axis),
                descending: crossings.descending_load * message_bytes / self._rate(axis),
            }
        return {link: seconds for link, seconds in busy_s.items() if seconds > 0}

    def _rate(self, axis: str) -> float:
        return self._link_rate * (assumptions.CORE_BANDWIDTH_RATIO if axis == CORE else 1.0)


@dataclass(frozen=True)
class _Phase:
    """A phase of a collective.

    Args:
        traffic_by_axis: (seconds of the busiest link, bytes that a device sends), by torus axis.
        hops: Hops until data from one member has reached all others of the phase.
    """

    traffic_by_axis: dict[str, tuple[float, float]]
    hops: float


def _directions(axis: str) -> tuple[str, str]:
    """Return the two directions of an axis, which carry messages independently."""
    return f"{axis}+", f"{axis}-"


def _apply_efficiency(kind: str, cost: CollectiveCost) -> CollectiveCost:
    """Divide transfer times by the share of the ICI bandwidth that is reached in practice (`ICI_EFFICIENCY`).

    The latency, and `busy_s` of the network between slices, do not change.
    """
    efficiency = assumptions.ICI_EFFICIENCY.get(kind, assumptions.DEFAULT_ICI_EFFICIENCY)
    busy_s = {axis: seconds / (1.0 if axis == DCN else efficiency) for axis, seconds in cost.busy_s.items()}
    transfer_s = (cost.total_s - cost.latency_s) / efficiency
    return replace(cost, total_s=cost.latency_s + transfer_s, busy_s=busy_s)


def _dimension_orders(dims: Sequence[Dimension], algorithm: _Algorithm | None) -> list[tuple[int, ...]]:
    """Return each part's order of dimensions, as indices into `dims`.

    These are the compiler's orders if they are known and match `dims`. Otherwise, there is one part per dimension, and
    each part starts with a different dimension and continues cyclically.
    """
    dim_count = len(dims)
    if algorithm is not None and algorithm.orders and sorted(algorithm.sizes) == sorted(d.size for d in dims):
        unmatched = list(range(dim_count))
        index_by_compiler_index = {}
        for compiler_index, size in enumerate(algorithm.sizes):
            index = next(i for i in unmatched if dims[i].size == size)
            unmatched.remove(index)
            index_by_compiler_index[compiler_index] = index
        if all(len(order) == dim_count for order in algorithm.orders):
            return [tuple(index_by_compiler_index[d] for d in order) for order in algorithm.orders]
    return [tuple((rotation + i) % dim_count for i in range(dim_count)) for rotation in range(dim_count)]
