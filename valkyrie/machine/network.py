"""Cost of a collective: bytes on each torus axis, and seconds on links and on the network between slices.

An algorithm is a set of messages between chips. Messages use dimension-order routing, in the shorter direction around
each ring, and the busiest link of an axis determines the time. A ring of N chips sends (N-1)/N of half the array in
each of two directions; on an axis that does not close, both directions share its links.
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
    """The devices of a mesh, flattened in row-major order of `mesh_axes`, on a topology of chips."""

    chip: ChipConfig
    topology: Topology
    positions: tuple[Position, ...]
    mesh_axes: dict[str, int]


@dataclass(frozen=True)
class LinkTraffic:
    """Cost of one run of a collective.

    Args:
        seconds: Duration if nothing else uses the links, including `latency`.
        latency: Seconds during which no bytes move.
        busy: Seconds that the busiest link is in use, by torus axis and direction (`a+`, `a-`, or `dcn`).
        bytes_sent: Bytes that one device sends.
        bytes_by_axis: Bytes that one device sends along each torus axis.
    """

    seconds: float = 0.0
    latency: float = 0.0
    busy: dict[str, float] = field(default_factory=dict)
    bytes_sent: float = 0.0
    bytes_by_axis: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class _Algorithm:
    """The compiler's `collective_algorithm_config`: one ring through the whole group, or rings along each dimension.

    Args:
        one_ring: Whether there is a single ring.
        reordered: Whether the ring connects neighbours on the torus. Otherwise, it follows the order of the group.
        sizes: Size of the group along each dimension.
        orders: For each part of the array, the order of the dimensions.
    """

    one_ring: bool = False
    reordered: bool = True
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
        return _Algorithm(one_ring=True, reordered="has_reordering_map: true" in text)
    sizes = re.search(r"dim_sizes:([\d,]+)", text)
    if "phases:1 " in text:
        return _Algorithm(one_ring=True)
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
        if chip.ici_link_gbs is None:
            raise ValueError(
                f"A replay on {chip.name} needs its link bandwidth: ici_link_gbs is not set in "
                f"conf/target/chip/{chip.name}.yaml. Set it, or use a target whose chip has it."
            )
        positions = [p for i, p in enumerate(machine.positions) if mask is None or mask[i]]
        self._torus = Torus(machine.topology, positions)
        self._link = chip.ici_link_gbs * 1e9
        self._hop = (chip.hop_us or 1.0) * 1e-6
        host_devices = math.prod(chip.host_bounds) * chip.devices
        self._dcn = (chip.dcn_gbs_per_host or math.inf) * 1e9 * assumptions.DCN_EFFICIENCY / host_devices
        self._cache: dict[Collective, LinkTraffic] = {}
        self._all_to_all_crossings: dict[bytes, dict[str, Crossings]] = {}

    def traffic(self, collective: Collective) -> LinkTraffic:
        """Return the cost of one run of a collective, cached by collective."""
        if collective not in self._cache:
            self._cache[collective] = self._traffic(collective)
        return self._cache[collective]

    def _traffic(self, collective: Collective) -> LinkTraffic:
        if collective.slices is not None:
            return self.between_slices(collective.kind, collective.full_bytes, collective.slices)
        if collective.pairs is not None:
            return self.permute(collective.pairs, collective.full_bytes)
        if collective.groups is None:
            return LinkTraffic()
        algorithm = parse_algorithm(collective.config)
        return self.collective(collective.kind, collective.groups, collective.full_bytes, algorithm)

    def collective(
        self, kind: str, groups: np.ndarray, full_bytes: float, algorithm: _Algorithm | None = None
    ) -> LinkTraffic:
        """Return the cost of one collective that all groups run at the same time.

        `full_bytes`: Size of a group's whole array, as in `min_bytes_sent`.
        """
        members = groups.shape[1]
        if members < 2 or full_bytes <= 0:
            return LinkTraffic()
        slices = len(np.unique(self._torus.slices(groups[0])))
        if slices > 1:
            return self._across_slices(kind, groups, full_bytes, slices)
        return _apply_efficiency(kind, self._within_slice(kind, groups, full_bytes, algorithm))

    def permute(self, pairs: np.ndarray, message_bytes: float) -> LinkTraffic:
        """Return the cost of simultaneous messages of `message_bytes` between (source, target) pairs."""
        if not len(pairs) or message_bytes <= 0:
            return LinkTraffic()
        source, target = pairs.T
        crosses_slices = self._torus.slices(source) != self._torus.slices(target)
        crossings = self._torus.crossings(source[~crosses_slices], target[~crosses_slices])
        busy = self._busy(crossings, message_bytes)
        by_axis = dict.fromkeys(crossings, message_bytes)
        hops = sum(c.hops for c in crossings.values())
        latency = assumptions.COLLECTIVE_START_S + hops * self._hop
        if crosses_slices.any():
            busy[DCN] = message_bytes / self._dcn
            by_axis[DCN] = message_bytes
            latency += assumptions.DCN_LATENCY_S
        traffic = LinkTraffic(latency + max(busy.values(), default=0.0), latency, busy, message_bytes, by_axis)
        return _apply_efficiency("collective-permute", traffic)

    def between_slices(self, kind: str, input_bytes: float, slices: int) -> LinkTraffic:
        """Return the cost of a collective between slices. Each group has one device of each slice.

        All devices of a host send at the same time, through the host's runtime and its network. `input_bytes`: Bytes of
        the input of each device.
        """
        full = input_bytes * slices if kind == "all-gather" else input_bytes
        sent = min_bytes_sent(kind, full, slices)
        busy = sent / self._dcn
        latency = assumptions.DCN_LATENCY_S * (2 if kind == "all-reduce" else 1)
        return LinkTraffic(latency + busy, latency, {DCN: busy}, sent, {DCN: sent})

    def _within_slice(self, kind: str, groups: np.ndarray, full: float, algorithm: _Algorithm | None) -> LinkTraffic:
        if kind in ("all-to-all", "ragged-all-to-all"):
            return self._all_to_all(groups, full)
        dims = self._torus.dimensions(groups)
        if dims is None or (algorithm is not None and algorithm.one_ring and len(dims) > 1):
            phases = [self._one_ring(groups, full, algorithm)]
        else:
            phases = self._ring_phases(dims, full, algorithm)
        passes = 2 if kind == "all-reduce" else 1
        busy: dict[str, float] = {}
        by_axis: dict[str, float] = {}
        hops = 0.0
        for phase in phases:
            for axis, (seconds, sent) in phase.loads.items():
                for link in _directions(axis):
                    busy[link] = busy.get(link, 0.0) + passes * seconds
                by_axis[axis] = by_axis.get(axis, 0.0) + passes * sent
            hops += passes * phase.hops
        latency = assumptions.COLLECTIVE_START_S + hops * self._hop
        transfer = passes * sum(max((s for s, _ in phase.loads.values()), default=0.0) for phase in phases)
        return LinkTraffic(latency + transfer, latency, busy, min_bytes_sent(kind, full, groups.shape[1]), by_axis)

    def _across_slices(self, kind: str, groups: np.ndarray, full: float, slices: int) -> LinkTraffic:
        """Return the cost of a scatter within slices, an exchange over the network, and a gather within slices."""
        members = groups.shape[1]
        slice_members = members // slices
        order = np.argsort(self._torus.slices(groups), axis=1, kind="stable")
        local = np.take_along_axis(groups, order, axis=1).reshape(-1, slice_members)
        sent = min_bytes_sent(kind, full / slice_members if kind != "all-to-all" else full, slices)
        inner_traffic = LinkTraffic()
        if slice_members > 1:
            inner_traffic = _apply_efficiency(kind, self._within_slice(kind, local, full, None))
        between_s = sent / self._dcn
        latency = inner_traffic.latency + assumptions.DCN_LATENCY_S * (2 if kind == "all-reduce" else 1)
        return LinkTraffic(
            seconds=inner_traffic.seconds + latency - inner_traffic.latency + between_s,
            latency=latency,
            busy=inner_traffic.busy | {DCN: between_s},
            bytes_sent=inner_traffic.bytes_sent + sent,
            bytes_by_axis=inner_traffic.bytes_by_axis | {DCN: sent},
        )

    def _all_to_all(self, groups: np.ndarray, full: float) -> LinkTraffic:
        members = groups.shape[1]
        message_bytes = full / members
        key = groups.tobytes()
        if key not in self._all_to_all_crossings:
            sums: dict[str, Crossings] = {}
            for shift in range(1, members):
                for axis, new in self._torus.crossings(groups.ravel(), np.roll(groups, -shift, axis=1).ravel()).items():
                    sums[axis] = sums[axis].plus(new) if axis in sums else new
            self._all_to_all_crossings[key] = sums
        by_axis = self._all_to_all_crossings[key]
        busy = self._busy(by_axis, message_bytes)
        latency = assumptions.COLLECTIVE_START_S + sum(c.hops for c in by_axis.values()) * self._hop
        bytes_by_axis = {axis: crossings.share * message_bytes for axis, crossings in by_axis.items()}
        sent = min_bytes_sent("all-to-all", full, members)
        return LinkTraffic(latency + max(busy.values()), latency, busy, sent, bytes_by_axis)

    def _one_ring(self, groups: np.ndarray, full: float, algorithm: _Algorithm | None) -> _Phase:
        """Return the link loads and hops of a collective on one ring through all members, in both directions."""
        members = groups.shape[1]
        sent = full * (members - 1) / members
        axes = self._torus.axes(groups)
        if algorithm is None or algorithm.reordered:
            loads = {axis: (sent / 2 / self._rate(axis), sent / len(axes)) for axis in axes}
            return _Phase(loads, members / 2)
        by_axis = self._torus.ring_crossings(groups)
        share = sum(c.share for c in by_axis.values())
        loads = {axis: (sent * c.load / 2 / self._rate(axis), sent * c.share / share) for axis, c in by_axis.items()}
        return _Phase(loads, sum(c.hops for c in by_axis.values()) * members / 2)

    def _ring_phases(self, dims: Sequence[Dimension], full: float, algorithm: _Algorithm | None) -> list[_Phase]:
        """Return the phases of rings along one dimension after another.

        The array is divided into parts that use the dimensions in different orders at the same time.
        """
        orders = _orders(dims, algorithm)
        pieces = [full / len(orders)] * len(orders)
        phases = []
        for step in range(len(dims)):
            loads: dict[str, tuple[float, float]] = {}
            hops = 0.0
            for i, order in enumerate(orders):
                dim = dims[order[step]]
                sent = pieces[i] * (dim.size - 1) / dim.size
                seconds, bytes_ = loads.get(dim.axis, (0.0, 0.0))
                loads[dim.axis] = (seconds + sent * dim.load / self._rate(dim.axis), bytes_ + sent)
                pieces[i] /= dim.size
                hops = max(hops, dim.hops)
            phases.append(_Phase(loads, hops))
        return phases

    def _busy(self, by_axis: dict[str, Crossings], message_bytes: float) -> dict[str, float]:
        """Return the seconds of the busiest link, by axis and direction, for messages of `message_bytes`."""
        busy = {}
        for axis, crossings in by_axis.items():
            up, down = _directions(axis)
            busy |= {
                up: crossings.up * message_bytes / self._rate(axis),
                down: crossings.down * message_bytes / self._rate(axis),
            }
        return {link: seconds for link, seconds in busy.items() if seconds > 0}

    def _rate(self, axis: str) -> float:
        return self._link * (assumptions.CORE_LINKS if axis == CORE else 1.0)


@dataclass(frozen=True)
class _Phase:
    """A phase of a collective: for each axis, (seconds of its busiest link, bytes that a device sends), and hops."""

    loads: dict[str, tuple[float, float]]
    hops: float


def _directions(axis: str) -> tuple[str, str]:
    """Return the two directions of an axis, which carry messages independently."""
    return f"{axis}+", f"{axis}-"


def _apply_efficiency(kind: str, traffic: LinkTraffic) -> LinkTraffic:
    """Divide transfer times by the share of the ICI bandwidth that is reached in practice (`ICI_EFFICIENCY`).

    The latency, and `busy` of the network between slices, do not change.
    """
    efficiency = assumptions.ICI_EFFICIENCY.get(kind, assumptions.DEFAULT_ICI_EFFICIENCY)
    busy = {axis: seconds / (1.0 if axis == DCN else efficiency) for axis, seconds in traffic.busy.items()}
    transfer = (traffic.seconds - traffic.latency) / efficiency
    return replace(traffic, seconds=traffic.latency + transfer, busy=busy)


def _orders(dims: Sequence[Dimension], algorithm: _Algorithm | None) -> list[tuple[int, ...]]:
    """Return the order of dimensions for each part of the array.

    These are the compiler's orders if they are known and match `dims`. Otherwise, each part uses another rotation.
    """
    count = len(dims)
    if algorithm is not None and algorithm.orders and sorted(algorithm.sizes) == sorted(d.size for d in dims):
        unmatched = list(range(count))
        index_map = {}
        for compiler_index, size in enumerate(algorithm.sizes):
            index = next(i for i in unmatched if dims[i].size == size)
            unmatched.remove(index)
            index_map[compiler_index] = index
        if all(len(order) == count for order in algorithm.orders):
            return [tuple(index_map[d] for d in order) for order in algorithm.orders]
    return [tuple((first + i) % count for i in range(count)) for first in range(count)]
