"""Links that each mesh axis can use under a placement: strides, rings and hops. Needs no device.

A mesh axis is placed in factors on physical axes: between slices, along the torus, and over the cores of a chip. On
platforms without a torus, the physical axes are the devices of a host, and the hosts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from valkyrie.hardware.target import Topology

DCN, CORE, HOST = "dcn", "core", "host"
"""Physical axes in addition to those of the torus: between slices or hosts, within a chip, within a host."""
TORUS_AXES = ("a", "b", "c", "d")
"""Names of a slice's torus axes, in the order of a device's coordinates."""
MOST_FACTORS = 2
"""Most mesh axes on one physical axis; more would share its links without any gain."""
MOST_TRIED = 4000
"""Most placements of a mesh to compare."""


class Factor(NamedTuple):
    """A factor of a mesh axis on the physical axis `on`, which has `length` positions.

    Args:
        on: Physical axis.
        size: Positions of the factor.
        stride: Distance from one position to the next.
        length: Positions of the physical axis.
        ring: The positions close into a ring around the physical axis.
    """

    on: str
    size: int
    stride: int
    length: int
    ring: bool

    @property
    def links(self) -> float:
        """One-way links per chip: two around a ring, one along a line, shared by `stride` interleaved factors."""
        return (2 if self.ring else 1) / self.stride if self.on in TORUS_AXES else 0.0

    @property
    def hops(self) -> float:
        """Hops to reach all positions, in both directions of a ring at once."""
        return self.size * self.stride / (2 if self.ring else 1) if self.on in TORUS_AXES else 0.0

    def __str__(self) -> str:
        whole = self.on if self.size == self.length else f"{self.on}*{self.size}"
        return whole if self.stride == 1 else f"{whole} by {self.stride}"


@dataclass(frozen=True)
class AxisPlacement:
    """Placement of a mesh axis. `straight` is False if its devices fill only a part of the block of `factors`."""

    size: int
    factors: tuple[Factor, ...]
    straight: bool = True

    @property
    def torus(self) -> tuple[Factor, ...]:
        """The factors on torus axes. Their traffic uses the links between chips."""
        return tuple(factor for factor in self.factors if factor.on in TORUS_AXES)

    @property
    def ring(self) -> bool:
        """Whether it has links between chips, and closes into a ring on all of its torus axes."""
        return bool(self.torus) and self.straight and all(factor.ring for factor in self.torus)

    @property
    def links(self) -> float:
        """One-way links per chip, that is the bandwidth of a collective over it as a multiple of a link's."""
        if not self.torus:
            return 0.0
        return sum((factor.links for factor in self.factors), 0.0) if self.straight else 1.0

    @property
    def ring_links(self) -> float:
        """Links of a single ring through all its devices: at most those of one torus axis."""
        return min(self.links, max((factor.links for factor in self.factors), default=0.0))

    @property
    def hops(self) -> float:
        """Hops around all its devices."""
        return sum((factor.hops for factor in self.factors), 0.0)

    @property
    def outer(self) -> int:
        """Number of slices or hosts that it spans."""
        return math.prod(factor.size for factor in self.factors if factor.on == DCN)

    def __str__(self) -> str:
        """Describe size and placement, such as `4 on torus b (ring, 2 links)`."""
        parts = []
        if self.torus:
            shape = "ring" if self.ring else "line" if len(self.torus) == 1 else "no ring"
            if any(factor.ring for factor in self.torus) and not self.ring:
                shape = f"ring on {','.join(factor.on for factor in self.torus if factor.ring)} only"
            links = f"{self.links:.3g} link{'s' * (self.links != 1)}"
            where = ",".join(str(factor) if self.straight else factor.on for factor in self.torus)
            parts.append(f"torus {where} ({f'{shape}, {links}' if self.straight else 'scattered, 1 link'})")
        if any(factor.on == CORE for factor in self.factors):
            parts.append("the cores of a chip")
        if any(factor.on == DCN for factor in self.factors):
            parts.append("dcn")
        return f"{self.size} on {' and '.join(parts) or 'one device'}"


@dataclass(frozen=True)
class Placement:
    """A placement of mesh axes: `factors` (axis number, size) from the slowest to the fastest, and each axis' links."""

    factors: tuple[tuple[int, int], ...]
    axes: tuple[AxisPlacement, ...]

    def entries(self, names: Sequence[str], sizes: Sequence[int]) -> list[str]:
        """Return the entries of `mesh.placement` for axes of these names and sizes."""
        return entries_of(
            [(names[axis], factor) for axis, factor in self.factors], dict(zip(names, sizes, strict=True))
        )


def entries_of(factors: Sequence[tuple[str, int]], axes: Mapping[str, int]) -> list[str]:
    """Return factors as `mesh.placement` lists them: adjacent ones of one axis joined, whole axes by name only."""
    joined: list[tuple[str, int]] = []
    for axis, factor in factors:
        if joined and joined[-1][0] == axis:
            joined[-1] = (axis, joined[-1][1] * factor)
        else:
            joined.append((axis, factor))
    return [axis if factor == axes[axis] else f"{axis}:{factor}" for axis, factor in joined]


def physical_axes(topology: Topology) -> list[tuple[str, int, bool]]:
    """Return (name, length, whether it wraps) of each physical axis, slowest first."""
    torus = zip(TORUS_AXES, topology.shape, topology.wrap, strict=False)
    return [(DCN, topology.slices, False), *torus, (CORE, topology.devices_per_chip, False)]


def placed_factor(on: str, size: int, stride: int, length: int, wrap: bool) -> Factor:
    """Return a factor, which is a ring if it spans a physical axis that wraps.

    An axis of two chips is no ring: they have one link between them, whether it wraps or not.
    """
    return Factor(on, size, stride, length, wrap and size * stride == length and length > 2)


def close_rings(factors: Sequence[Factor], topology: Topology) -> tuple[Factor, ...]:
    """Return the factors of a mesh axis without rings that do not close on a twisted torus.

    The link past the end of an axis leads to other positions on the longer axes, which the mesh axis must include.
    """
    if not topology.twisted:
        return tuple(factors)
    cover = {TORUS_AXES.index(f.on): (f.size, f.stride) for f in factors if f.ring}
    return tuple(f._replace(ring=f.ring and topology.closes(TORUS_AXES.index(f.on), cover)) for f in factors)


@cache
def placements_of(sizes: tuple[int, ...], topology: Topology, torus: bool) -> tuple[Placement, ...]:
    """Return the undominated placements of axes of these sizes on one slice.

    `torus`: whether a torus joins the chips. Otherwise, a switch joins the devices of each host.
    """
    order = sorted(range(len(sizes)), key=lambda axis: -sizes[axis])
    rank = {axis: number for number, axis in enumerate(order)}
    ordered = _ordered(tuple(sizes[axis] for axis in order), topology, torus)
    return tuple(
        Placement(
            tuple((order[axis], factor) for axis, factor in placement.factors),
            tuple(placement.axes[rank[axis]] for axis in range(len(sizes))),
        )
        for placement in ordered
    )


@cache
def _ordered(sizes: tuple[int, ...], topology: Topology, torus: bool) -> tuple[Placement, ...]:
    """Return the placements for sizes in descending order, cached for all other orders."""
    physical = physical_axes(topology)[1:] if torus else [(HOST, topology.devices, False)]
    best: dict[tuple[float, ...], Placement] = {}
    for number, filling in enumerate(fillings(tuple(length for _, length, _ in physical), sizes, MOST_FACTORS)):
        if number == MOST_TRIED:
            break
        axes = tuple(
            AxisPlacement(size, _torus_factors(i, filling, physical, topology))
            if torus
            else AxisPlacement(size, _host_factors(i, filling, topology))
            for i, size in enumerate(sizes)
        )
        key = tuple(x for axis in axes for x in (axis.links, axis.ring_links, -axis.outer, -axis.hops))
        if key not in best:
            best[key] = Placement(tuple(factor for on_axis in filling for factor in on_axis), axes)
    undominated = []
    for key, placement in sorted(best.items(), key=lambda item: -sum(item[0])):
        if not any(all(a >= b for a, b in zip(other, key, strict=True)) for other, _ in undominated):
            undominated.append((key, placement))
    return tuple(placement for _, placement in undominated)


Filling = tuple[tuple[tuple[int, int], ...], ...]
"""Factors (axis number, size) of mesh axes on each physical axis, slowest first."""


def _torus_factors(
    axis: int, filling: Filling, physical: Sequence[tuple[str, int, bool]], topology: Topology
) -> tuple[Factor, ...]:
    factors = []
    for (on, length, wrap), on_axis in zip(physical, filling, strict=True):
        stride = 1
        for other, size in reversed(on_axis):
            if other == axis:
                factors.append(placed_factor(on, size, stride, length, wrap))
            stride *= size
    return close_rings(factors, topology)


def _host_factors(axis: int, filling: Filling, topology: Topology) -> tuple[Factor, ...]:
    """Return the factors of an axis on the devices of a host and on hosts."""
    stride, of_host = 1, math.prod(topology.host_bounds)
    for other, size in reversed(filling[0]):
        if other == axis:
            inner = max(min(of_host // stride, size), 1)
            hosts = topology.devices // of_host
            return Factor(DCN, size // inner, 1, hosts, False), Factor(HOST, inner, stride, of_host, False)
        stride *= size
    return ()


def fillings(lengths: tuple[int, ...], sizes: tuple[int, ...], most: int | None = None) -> Iterator[Filling]:
    """Yield all ways to fill physical axes of these lengths with factors of mesh axes of these sizes.

    `most`: most mesh axes on one physical axis, each as a single factor, tried from the largest. The last physical axis
    takes all remaining axes. None: no limit; an axis may have several factors there, tried from the smallest.
    """
    if not lengths:
        if math.prod(sizes) == 1:
            yield ()
        return
    limit = len(sizes) if most is not None and len(lengths) == 1 and len(sizes) > 1 else most
    for on_first, left in _on_one(lengths[0], sizes, limit, frozenset()):
        for rest in fillings(lengths[1:], left, most):
            yield (on_first, *rest)


def _on_one(
    length: int, sizes: tuple[int, ...], most: int | None, used: frozenset[int]
) -> Iterator[tuple[tuple[tuple[int, int], ...], tuple[int, ...]]]:
    """Yield factors of mesh axes with the length of a physical axis as product, and the remaining sizes of the axes."""
    if length == 1:
        yield (), sizes
        return
    if most == 0:
        return
    for axis, size in enumerate(sizes):
        whole = 1 if axis in used else math.gcd(length, size)
        factors = [d for d in range(2, whole + 1) if whole % d == 0]
        others = frozenset({axis}) if most is None else used | {axis}
        for factor in factors if most is None else reversed(factors):
            left = (*sizes[:axis], size // factor, *sizes[axis + 1 :])
            for rest, after in _on_one(length // factor, left, None if most is None else most - 1, others):
                yield ((axis, factor), *rest), after
