"""Decides what a collective costs: its bytes on each mesh axis and torus axis, and its seconds on links and network.

Traffic is routed: every algorithm is a set of messages between chips, each message goes dimension by dimension the
shorter way round, and the busiest link of an axis gives the time. A ring of N sends (N-1)/N of the array in each of
two directions, half the array each; where an axis does not close, both directions share its links.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from valkyrie.hardware import ChipConfig, Topology
from valkyrie.search import assumptions

TORUS_AXES = ("X", "Y", "Z", "W")
"""Names of a slice's torus axes, in the order of a device's coordinates."""
CORE, DCN = "core", "DCN"
"""What two devices of one chip talk over, and what slices talk over."""

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)


@dataclass(frozen=True)
class Position:
    """Where a device of the mesh lies: its slice, its chip's coordinates on the torus, its core on the chip."""

    slice: int
    coords: tuple[int, ...]
    core: int


@dataclass(frozen=True)
class Machine:
    """The devices of a mesh, flattened in row-major order of `mesh_axes`, on a topology of chips."""

    chip: ChipConfig
    topology: Topology
    positions: tuple[Position, ...]
    mesh_axes: dict[str, int]


@dataclass(frozen=True)
class Traffic:
    """One run of a collective: `seconds` where nothing else uses the links, of which `latency` moves no bytes.

    `busy`: seconds that the busiest link of each torus axis (or `core`, `DCN`) is occupied. `bytes_sent`: of one
    device. `bytes_by_axis`: of those, the bytes that travel along each torus axis.
    """

    seconds: float = 0.0
    latency: float = 0.0
    busy: dict[str, float] = field(default_factory=dict)
    bytes_sent: float = 0.0
    bytes_by_axis: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class _Algorithm:
    """What `collective_algorithm_config` says: one ring through the whole group, or rings along each dimension."""

    one_ring: bool = False
    reordered: bool = True
    sizes: tuple[int, ...] = ()
    orders: tuple[tuple[int, ...], ...] = ()


def payload(kind: str, full_bytes: float, members: int) -> float:
    """Return the bytes that each of `members` devices sends in a collective.

    `full_bytes`: the whole array, that is what an all-gather returns and what the others take. A ring's bytes: the
    least possible for each kind; TPU v4 paper (arXiv 2304.01433), scaling book.
    """
    share = (members - 1) / members
    return {"all-reduce": 2 * share, "collective-permute": 1.0, "collective-broadcast": 1.0}.get(
        kind, share
    ) * full_bytes


def algorithm(config: Mapping[str, Any]) -> _Algorithm | None:
    """Return what an instruction's backend configuration says of the algorithm, or None where it says nothing."""
    chosen = config.get("collective_algorithm_config", {})
    text = chosen.get("debug", "")
    if chosen.get("emitter", "").startswith("1DAllGather"):
        return _Algorithm(one_ring=True, reordered="has_reordering_map: true" in text)
    sizes = re.search(r"dim_sizes:([\d,]+)", text)
    if "phases:1 " in text:
        return _Algorithm(one_ring=True)
    if not sizes:
        return None
    used = re.search(r"dim_used:((?:\{[\d ]+\},?)+)", text)
    orders = re.findall(r"\{([\d ]+)\}", used[1]) if used else []
    return _Algorithm(
        sizes=tuple(int(n) for n in sizes[1].split(",")),
        orders=tuple(tuple(int(d) for d in order.split()) for order in orders),
    )


class Network:
    """The links between the devices of a machine, and what crossing them costs."""

    def __init__(self, machine: Machine, own: np.ndarray | None = None) -> None:
        """`own`: of the machine's devices those that groups count; all where not given."""
        chip = machine.chip
        if chip.ici_link_gbs is None:
            raise ValueError(
                f"A replay on {chip.name} needs its link bandwidth: ici_link_gbs is not set in "
                f"conf/target/chip/{chip.name}.yaml. Set it, or use a target whose chip has it."
            )
        self._shape = machine.topology.shape
        self._wrap = machine.topology.wrap
        counted = [p for i, p in enumerate(machine.positions) if own is None or own[i]]
        self._coords = np.array([p.coords[: len(self._shape)] for p in counted])
        self._core = np.array([p.core for p in counted])
        self._slice = np.array([p.slice for p in counted])
        self._link = chip.ici_link_gbs * 1e9 * assumptions.ICI_EFFICIENCY
        self._hop = (chip.hop_us or 1.0) * 1e-6
        self._dcn = (chip.dcn_gbs_per_host or math.inf) * 1e9 * assumptions.DCN_EFFICIENCY
        self._host_devices = math.prod(machine.topology.host_bounds) * machine.topology.devices_per_chip
        self._known: dict[Any, Any] = {}

    def collective(self, kind: str, groups: np.ndarray, full_bytes: float, how: _Algorithm | None) -> Traffic:
        """Return the cost of one collective that all groups run at once; `full_bytes` as in `payload`."""
        members = groups.shape[1]
        if members < 2 or full_bytes <= 0:
            return Traffic()
        slices = len(np.unique(self._slice[groups[0]]))
        if slices == 1:
            return self._within(kind, groups, full_bytes, how)
        return self._between(kind, groups, full_bytes, slices)

    def permute(self, pairs: np.ndarray, each_bytes: float) -> Traffic:
        """Return the cost of messages of `each_bytes` between (source, target) pairs, all at once."""
        if not len(pairs) or each_bytes <= 0:
            return Traffic()
        source, target = pairs.T
        far = self._slice[source] != self._slice[target]
        near = self._routes(source[~far], target[~far])
        busy = {axis: route.load * each_bytes / self._rate(axis) for axis, route in near.items()}
        by_axis = dict.fromkeys(near, each_bytes)
        hops = sum(route.hops for route in near.values())
        latency = assumptions.COLLECTIVE_START_S + hops * self._hop
        if far.any():
            busy[DCN] = each_bytes * self._host_devices / self._dcn
            by_axis[DCN] = each_bytes
            latency += assumptions.DCN_LATENCY_S
        return Traffic(latency + max(busy.values(), default=0.0), latency, busy, each_bytes, by_axis)

    def between_slices(self, kind: str, each_bytes: float, slices: int) -> Traffic:
        """Return the cost of a collective of one device in each of `slices` slices, all devices at once.

        `each_bytes`: what a device hands in. The host's runtime sends it over the host's network, through PCIe.
        """
        full = each_bytes * slices if kind == "all-gather" else each_bytes
        sent = payload(kind, full, slices)
        busy = sent * self._host_devices / self._dcn
        latency = assumptions.DCN_LATENCY_S * (2 if kind == "all-reduce" else 1)
        return Traffic(latency + busy, latency, {DCN: busy}, sent, {DCN: sent})

    def _within(self, kind: str, groups: np.ndarray, full: float, how: _Algorithm | None) -> Traffic:
        if kind in ("all-to-all", "ragged-all-to-all"):
            return self._all_to_all(groups, full)
        dims = self._dimensions(groups)
        if dims is None or (how is not None and how.one_ring and len(dims) > 1):
            phases = [self._one_ring(groups, full, how)]
        else:
            phases = self._ring_phases(dims, full, how)
        passes = 2 if kind == "all-reduce" else 1
        busy: dict[str, float] = {}
        by_axis: dict[str, float] = {}
        hops = 0.0
        for phase in phases:
            for axis, (seconds, sent) in phase.loads.items():
                busy[axis] = busy.get(axis, 0.0) + passes * seconds
                by_axis[axis] = by_axis.get(axis, 0.0) + passes * sent
            hops += passes * phase.hops
        latency = assumptions.COLLECTIVE_START_S + hops * self._hop
        transfer = passes * sum(max((s for s, _ in phase.loads.values()), default=0.0) for phase in phases)
        return Traffic(latency + transfer, latency, busy, payload(kind, full, groups.shape[1]), by_axis)

    def _between(self, kind: str, groups: np.ndarray, full: float, slices: int) -> Traffic:
        """Between slices: scatter within each, exchange the parts over the network, gather within each."""
        members = groups.shape[1]
        inside = members // slices
        order = np.argsort(self._slice[groups], axis=1, kind="stable")
        local = np.take_along_axis(groups, order, axis=1).reshape(-1, inside)
        sent = payload(kind, full / inside if kind != "all-to-all" else full, slices)
        near = Traffic()
        if inside > 1:
            near = self._within(kind, local, full, None)
        far = sent * self._host_devices / self._dcn
        latency = near.latency + assumptions.DCN_LATENCY_S * (2 if kind == "all-reduce" else 1)
        return Traffic(
            seconds=near.seconds + latency - near.latency + far,
            latency=latency,
            busy=near.busy | {DCN: far},
            bytes_sent=near.bytes_sent + sent,
            bytes_by_axis=near.bytes_by_axis | {DCN: sent},
        )

    def _all_to_all(self, groups: np.ndarray, full: float) -> Traffic:
        members = groups.shape[1]
        each = full / members
        key = ("all", groups.tobytes())
        if key not in self._known:
            sums: dict[str, _Crossings] = {}
            for shift in range(1, members):
                for axis, new in self._crossings(groups.ravel(), np.roll(groups, -shift, axis=1).ravel()).items():
                    sums[axis] = sums[axis].plus(new) if axis in sums else new
            self._known[key] = {axis: crossings.route() for axis, crossings in sums.items()}
        routes = self._known[key]
        busy = {axis: route.load * each / self._rate(axis) for axis, route in routes.items()}
        latency = assumptions.COLLECTIVE_START_S + sum(r.hops for r in routes.values()) * self._hop
        by_axis = {axis: route.share * each for axis, route in routes.items()}
        sent = payload("all-to-all", full, members)
        return Traffic(latency + max(busy.values()), latency, busy, sent, by_axis)

    def _one_ring(self, groups: np.ndarray, full: float, how: _Algorithm | None) -> _Phase:
        """One ring through all members, in both directions, as long as the group."""
        members = groups.shape[1]
        sent = full * (members - 1) / members
        axes = self._axes(groups)
        if how is None or how.reordered:
            loads = {axis: (sent / 2 / self._rate(axis), sent / len(axes)) for axis in axes}
            return _Phase(loads, members / 2)
        routes = self._ring_routes(groups)
        share = sum(route.share for route in routes.values())
        loads = {
            axis: (sent * route.load / 2 / self._rate(axis), sent * route.share / share)
            for axis, route in routes.items()
        }
        return _Phase(loads, sum(route.hops for route in routes.values()) * members / 2)

    def _ring_phases(self, dims: Sequence[_Dimension], full: float, how: _Algorithm | None) -> list[_Phase]:
        """Rings along each dimension in turn; parts of the array start with different dimensions."""
        orders = _orders(dims, how)
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

    def _dimensions(self, groups: np.ndarray) -> list[_Dimension] | None:
        """The torus axes of groups that are boxes, with the load of a ring along each; None where they are not boxes."""
        key = ("dims", groups.tobytes())
        if key not in self._known:
            self._known[key] = self._find_dimensions(groups)
        return self._known[key]

    def _find_dimensions(self, groups: np.ndarray) -> list[_Dimension] | None:
        places = np.concatenate([self._coords[groups], self._core[groups][..., None]], axis=-1)
        names = [*TORUS_AXES[: len(self._shape)], CORE]
        sizes = [len(np.unique(places[0, :, d])) for d in range(len(names))]
        if math.prod(sizes) != groups.shape[1]:
            return None
        found = []
        for d, size in enumerate(sizes):
            if size == 1:
                continue
            others = [places[..., e] for e in reversed(range(len(names))) if e != d]
            order = np.lexsort((places[..., d], *others))
            lines = np.take_along_axis(groups, order, axis=1).reshape(-1, size)
            routes = self._ring_routes(lines)
            if set(routes) != {names[d]}:
                return None
            route = routes[names[d]]
            span = int(np.ptp(places[0, :, d]))
            hops = 0 if names[d] == CORE else size * route.hops / 2 if self._is_ring(d, places[0, :, d]) else span
            found.append(_Dimension(names[d], size, route.load / 2, hops))
        return found

    def _ring_routes(self, rings: np.ndarray) -> dict[str, _Route]:
        """Routes of a message from every member to the next and of one to the one before."""
        there, back = np.roll(rings, -1, axis=1), np.roll(rings, 1, axis=1)
        return self._routes(
            np.concatenate([rings.ravel(), rings.ravel()]),
            np.concatenate([there.ravel(), back.ravel()]),
            np.repeat([1, -1], rings.size),
        )

    def _routes(self, source: np.ndarray, target: np.ndarray, sense: np.ndarray | None = None) -> dict[str, _Route]:
        """How often the busiest link of each axis is crossed by one message from each source to its target."""
        return {axis: crossings.route() for axis, crossings in self._crossings(source, target, sense).items()}

    def _crossings(
        self, source: np.ndarray, target: np.ndarray, sense: np.ndarray | None = None
    ) -> dict[str, _Crossings]:
        """How often every link of each axis is crossed. Halfway round a ring `sense` (+1 or -1) says which way.

        Chips of different slices have links of their own.
        """
        found: dict[str, _Crossings] = {}
        at = self._coords[source].copy()
        sense = np.where(at.sum(axis=1) % 2, -1, 1) if sense is None else sense
        senders = max(len(np.unique(source)), 1)
        for axis, (length, wrap) in enumerate(zip(self._shape, self._wrap, strict=True)):
            distance = self._coords[target][:, axis] - at[:, axis]
            if wrap:
                distance = (distance + length // 2) % length - length // 2
                halfway = 2 * np.abs(distance) == length
                distance = np.where(halfway, sense * np.abs(distance), distance)
            if not distance.any():
                continue
            step = np.sign(distance)
            loads = np.zeros((2, int(self._slice.max()) + 1, *self._shape))
            for hop in range(int(np.abs(distance).max())):
                moving = np.abs(distance) > hop
                place = at[moving].copy()
                place[:, axis] = (place[:, axis] + hop * step[moving]) % length
                np.add.at(loads, ((step[moving] > 0).astype(int), self._slice[source][moving], *place.T), 1)
            share = float(np.count_nonzero(distance)) / senders
            found[TORUS_AXES[axis]] = _Crossings(loads, int(np.abs(distance).max()), share)
            at[:, axis] = self._coords[target][:, axis]
        across = self._core[source] != self._core[target]
        if across.any():
            loads = np.full((1,), np.count_nonzero(across) / senders)
            found[CORE] = _Crossings(loads, 0, float(np.count_nonzero(across)) / senders)
        return found

    def _axes(self, groups: np.ndarray) -> list[str]:
        places = np.concatenate([self._coords[groups[0]], self._core[groups[0]][:, None]], axis=-1)
        names = [*TORUS_AXES[: len(self._shape)], CORE]
        return [name for d, name in enumerate(names) if len(np.unique(places[:, d])) > 1]

    def _is_ring(self, d: int, places: np.ndarray) -> bool:
        """Whether equally spaced places along an axis go once round it."""
        at = np.unique(places)
        steps = np.diff(at, append=at[0] + self._shape[d])
        return self._wrap[d] and self._shape[d] > 2 and bool((steps == steps[0]).all())

    def _rate(self, axis: str) -> float:
        return self._link * (assumptions.CORE_LINKS if axis == CORE else 1.0)


@dataclass(frozen=True)
class _Route:
    """Crossings of an axis' busiest link, the longest way in hops, and messages per sender along the axis."""

    load: float
    hops: int
    share: float


@dataclass(frozen=True)
class _Crossings:
    """Crossings of every directed link of an axis, the longest way in hops, and messages per sender along the axis."""

    loads: np.ndarray
    hops: int
    share: float

    def plus(self, other: _Crossings) -> _Crossings:
        """Return both together, at the same time."""
        return _Crossings(self.loads + other.loads, max(self.hops, other.hops), self.share + other.share)

    def route(self) -> _Route:
        """Return what matters of them."""
        return _Route(float(self.loads.max()), self.hops, self.share)


@dataclass(frozen=True)
class _Dimension:
    """A torus axis of a group: members along it, load of its busiest link per byte sent, hops of a ring's pass."""

    axis: str
    size: int
    load: float
    hops: float


@dataclass(frozen=True)
class _Phase:
    """One phase of an algorithm: by axis the seconds of its busiest link and the bytes a device sends, and hops."""

    loads: dict[str, tuple[float, float]]
    hops: float


def _orders(dims: Sequence[_Dimension], how: _Algorithm | None) -> list[tuple[int, ...]]:
    """The order in which each part of the array visits the dimensions: the compiler's, else every rotation."""
    count = len(dims)
    if how is not None and how.orders and sorted(how.sizes) == sorted(d.size for d in dims):
        free = list(range(count))
        match = {}
        for theirs, size in enumerate(how.sizes):
            ours = next(i for i in free if dims[i].size == size)
            free.remove(ours)
            match[theirs] = ours
        if all(len(order) == count for order in how.orders):
            return [tuple(match[d] for d in order) for order in how.orders]
    return [tuple((first + i) % count for i in range(count)) for first in range(count)]
