"""Links that each mesh axis can use under a placement: strides, rings and hops. Needs no device.

A mesh axis is a product of factors, each on a physical axis: between slices, along the torus, or over the cores of a
chip. On platforms without a torus, the physical axes are the devices of a host, and the hosts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from valkyrie.hardware.target import Topology

DCN, CORE, HOST = "dcn", "core", "host"
"""Names of physical axes outside the torus: between slices or hosts, over a chip's cores, over a host's devices."""
TORUS_AXES = ("a", "b", "c", "d")
"""Names of a slice's torus axes, in the order of a device's coordinates."""
MAX_SHARING_AXES = 2
"""Maximum number of mesh axes that share a physical axis. More would share the same links without any gain.

The last physical axis takes all remaining mesh axes, without a maximum.
"""
SCATTERED_LINKS = 1.75
"""Links per chip of an axis whose devices form no box, from replays of JAX's meshes on v5e-8 (1.2 to 1.9)."""
SCATTERED_EXCHANGE_LINKS = 0.5
"""Links per chip of such an axis for messages to one other device and for all-gathers: two pairs of chips share a link.

In the only replay with such an axis (sequence shards on v5e-8), 6.3 GB at 0.5 links would take 280 ms. 198 ms of them
are exposed.
"""
INTERLEAVED_LINKS = 0.8
"""Minimum links per chip of each factor of an axis that spans several torus axes, even if its lines are interleaved.

From replays of axes of 8 on v5e-16: 1.8 links, where 4 positions of one torus axis and every other of 4 form a block.
"""
MAX_PLACEMENTS = 4000
"""Maximum number of placements of a mesh to compare. Limits the time that a search spends on one mesh."""


class Factor(NamedTuple):
    """A factor of a mesh axis, placed on a physical axis.

    Args:
        physical_axis: Name of the physical axis.
        size: Number of positions along the factor.
        stride: Distance from one position to the next along the physical axis.
        length: Number of positions of the whole physical axis.
        is_ring: Whether the positions form a ring around the physical axis.
    """

    physical_axis: str
    size: int
    stride: int
    length: int
    is_ring: bool

    @property
    def links_per_chip(self) -> float:
        """One-way links per chip, or 0 if the factor is not on the torus.

        A ring uses two links and a line one. `stride` interleaved rings or lines share these links.
        """
        return (2 if self.is_ring else 1) / self.stride if self.physical_axis in TORUS_AXES else 0.0

    @property
    def hops(self) -> float:
        """Hops to reach all positions, or 0 if the factor is not on the torus.

        `size * stride` along a line. A ring needs half of that, because data travels in both directions.
        """
        return self.size * self.stride / (2 if self.is_ring else 1) if self.physical_axis in TORUS_AXES else 0.0

    def __str__(self) -> str:
        span_text = self.physical_axis if self.size == self.length else f"{self.physical_axis}*{self.size}"
        return span_text if self.stride == 1 else f"{span_text} by {self.stride}"


@dataclass(frozen=True)
class AxisPlacement:
    """Placement of a mesh axis on physical axes.

    `is_straight` is False if the devices of the axis fill only a part of the block that `factors` span.
    """

    size: int
    factors: tuple[Factor, ...]
    is_straight: bool = True

    @property
    def torus_factors(self) -> tuple[Factor, ...]:
        """The factors on torus axes. Their traffic uses the links between chips."""
        return tuple(factor for factor in self.factors if factor.physical_axis in TORUS_AXES)

    @property
    def is_ring(self) -> bool:
        """Whether the mesh axis forms a ring along each torus axis that it spans. False if it is not on the torus."""
        return bool(self.torus_factors) and self.is_straight and all(factor.is_ring for factor in self.torus_factors)

    @property
    def links_per_chip(self) -> float:
        """One-way links per chip that a collective over the axis uses.

        0 if the axis is not on the torus, and `SCATTERED_LINKS` if it is not `is_straight`.
        """
        if self.torus_factors and not self.is_straight:
            return SCATTERED_LINKS
        least = INTERLEAVED_LINKS if len(self.torus_factors) > 1 else 0.0
        return sum((max(factor.links_per_chip, least) for factor in self.torus_factors), 0.0)

    @property
    def ring_links(self) -> float:
        """One-way links per chip that a single ring through all devices uses: at most those of one torus axis."""
        return min(self.links_per_chip, max((factor.links_per_chip for factor in self.factors), default=0.0))

    @property
    def gather_links(self) -> float:
        """One-way links per chip that XLA's all-gathers of weights use.

        They have a ring along each torus axis if the devices form a torus or a square of 2 x 2. Otherwise a single ring
        passes through all: in boxes of 2 x 2 x 2 and 2 x 4 x 4 on v5p (`1DAllGather` in HLO).
        """
        if not self.is_straight:
            return self.exchange_links
        is_square = [(factor.size, factor.stride) for factor in self.torus_factors] == [(2, 1), (2, 1)]
        is_torus = all(factor.is_ring for factor in self.torus_factors)
        return self.links_per_chip if is_square or is_torus else self.ring_links

    @property
    def exchange_links(self) -> float:
        """One-way links per chip that messages to the next device of the axis use."""
        return self.ring_links if self.is_straight else SCATTERED_EXCHANGE_LINKS

    @property
    def hops(self) -> float:
        """Hops until data from one device has reached all others, one torus axis after another."""
        return sum((factor.hops for factor in self.factors), 0.0)

    @property
    def outer_size(self) -> int:
        """Number of slices or hosts that the axis spans."""
        return math.prod(factor.size for factor in self.factors if factor.physical_axis == DCN)

    def __str__(self) -> str:
        """Describe size and placement, such as `4 on torus b (ring, 2 links)`."""
        parts = []
        if self.torus_factors:
            shape = "ring" if self.is_ring else "line" if len(self.torus_factors) == 1 else "no ring"
            if any(factor.is_ring for factor in self.torus_factors) and not self.is_ring:
                rings = ",".join(factor.physical_axis for factor in self.torus_factors if factor.is_ring)
                shape = f"ring on {rings} only"
            links = f"{self.links_per_chip:.3g} link{'s' * (self.links_per_chip != 1)}"
            factor_text = ",".join(
                str(factor) if self.is_straight else factor.physical_axis for factor in self.torus_factors
            )
            parts.append(f"torus {factor_text} ({shape if self.is_straight else 'scattered'}, {links})")
        if any(factor.physical_axis == CORE for factor in self.factors):
            parts.append("the cores of a chip")
        if any(factor.physical_axis == DCN for factor in self.factors):
            parts.append("dcn")
        return f"{self.size} on {' and '.join(parts) or 'one device'}"


@dataclass(frozen=True)
class Placement:
    """A placement of the axes of a mesh.

    Args:
        factors: (index of a mesh axis, size) of each factor, from the slowest to the fastest varying over the devices.
        axes: Placement of each mesh axis.
    """

    factors: tuple[tuple[int, int], ...]
    axes: tuple[AxisPlacement, ...]

    def entries(self, names: Sequence[str], sizes: Sequence[int]) -> list[str]:
        """Format the placement as entries of `mesh.placement`, for mesh axes with these names and sizes."""
        return placement_entries(
            [(names[axis], factor) for axis, factor in self.factors], dict(zip(names, sizes, strict=True))
        )


def placement_entries(factors: Sequence[tuple[str, int]], axes: Mapping[str, int]) -> list[str]:
    """Format factors as in `mesh.placement`. Joins adjacent factors of an axis, and names whole axes without a size."""
    joined_factors: list[tuple[str, int]] = []
    for axis, factor in factors:
        if joined_factors and joined_factors[-1][0] == axis:
            joined_factors[-1] = (axis, joined_factors[-1][1] * factor)
        else:
            joined_factors.append((axis, factor))
    return [axis if factor == axes[axis] else f"{axis}:{factor}" for axis, factor in joined_factors]


def physical_axes(topology: Topology) -> list[tuple[str, int, bool]]:
    """Return (name, length, wraps) for each physical axis, slowest first."""
    torus = zip(TORUS_AXES, topology.shape, topology.wrap, strict=False)
    return [(DCN, topology.slices, False), *torus, (CORE, topology.devices_per_chip, False)]


def make_factor(physical_axis: str, size: int, stride: int, length: int, wrap: bool) -> Factor:
    """Return a factor. It is a ring if it spans a physical axis that wraps.

    Two chips are never a ring, because they have only one link between them.
    """
    return Factor(physical_axis, size, stride, length, wrap and size * stride == length and length > 2)


def close_rings(factors: Sequence[Factor], topology: Topology) -> tuple[Factor, ...]:
    """Return the factors of a mesh axis, with `is_ring` cleared where a twisted torus does not close the ring.

    On a twisted torus, the link past the end of an axis leads to other positions on the longer axes. The ring closes
    only if the mesh axis includes these positions.
    """
    if not topology.twisted:
        return tuple(factors)
    axis_spans = {TORUS_AXES.index(f.physical_axis): (f.size, f.stride) for f in factors if f.is_ring}
    return tuple(
        f._replace(is_ring=f.is_ring and topology.closes_ring(TORUS_AXES.index(f.physical_axis), axis_spans))
        for f in factors
    )


@cache
def pareto_placements(sizes: tuple[int, ...], topology: Topology, has_torus: bool) -> tuple[Placement, ...]:
    """Return the Pareto-optimal placements of mesh axes on one slice.

    Drops every placement for which another one is at least as good for each mesh axis, in `links_per_chip`,
    `ring_links`, `hops` and `outer_size` of `AxisPlacement`. Only the first `MAX_PLACEMENTS` placements are compared.

    Args:
        sizes: Sizes of the mesh axes.
        topology: The slice.
        has_torus: Whether a torus joins the chips. Otherwise, a switch joins the devices of each host.
    """
    order = sorted(range(len(sizes)), key=lambda axis: -sizes[axis])
    position_in_order = {axis: number for number, axis in enumerate(order)}
    sorted_placements = _sorted_placements(tuple(sizes[axis] for axis in order), topology, has_torus)
    return tuple(
        Placement(
            tuple((order[axis], factor) for axis, factor in placement.factors),
            tuple(placement.axes[position_in_order[axis]] for axis in range(len(sizes))),
        )
        for placement in sorted_placements
    )


@cache
def _sorted_placements(sizes: tuple[int, ...], topology: Topology, has_torus: bool) -> tuple[Placement, ...]:
    """Return the Pareto-optimal placements for sizes in descending order.

    Cached separately from `pareto_placements`, so that all orders of the same sizes share the result.
    """
    axis_specs = physical_axes(topology)[1:] if has_torus else [(HOST, topology.devices, False)]
    best_placements: dict[tuple[float, ...], Placement] = {}
    for number, filling in enumerate(
        iterate_fillings(tuple(length for _, length, _ in axis_specs), sizes, MAX_SHARING_AXES)
    ):
        if number == MAX_PLACEMENTS:
            break
        axes = tuple(
            AxisPlacement(size, _torus_factors(i, filling, axis_specs, topology))
            if has_torus
            else AxisPlacement(size, _host_factors(i, filling, topology))
            for i, size in enumerate(sizes)
        )
        score = tuple(x for axis in axes for x in (axis.links_per_chip, axis.ring_links, -axis.outer_size, -axis.hops))
        if score not in best_placements:
            best_placements[score] = Placement(
                tuple(factor for axis_factors in filling for factor in axis_factors), axes
            )
    undominated = []
    for score, placement in sorted(best_placements.items(), key=lambda item: -sum(item[0])):
        if not any(all(a >= b for a, b in zip(other, score, strict=True)) for other, _ in undominated):
            undominated.append((score, placement))
    return tuple(placement for _, placement in undominated)


Filling = tuple[tuple[tuple[int, int], ...], ...]
"""Factors (mesh axis number, size) on each physical axis, slowest first."""


def _torus_factors(
    axis: int, filling: Filling, axis_specs: Sequence[tuple[str, int, bool]], topology: Topology
) -> tuple[Factor, ...]:
    factors = []
    for (physical_axis, length, wrap), axis_factors in zip(axis_specs, filling, strict=True):
        stride = 1
        for factor_axis, size in reversed(axis_factors):
            if factor_axis == axis:
                factors.append(make_factor(physical_axis, size, stride, length, wrap))
            stride *= size
    return close_rings(factors, topology)


def _host_factors(axis: int, filling: Filling, topology: Topology) -> tuple[Factor, ...]:
    """Return a mesh axis's factors over hosts and over the devices of a host, or () for an axis of size 1.

    Hosts that a switch joins (`Topology.domain_hosts`) count as one.
    """
    stride, host_size = 1, topology.domain_chips
    for factor_axis, size in reversed(filling[0]):
        if factor_axis == axis:
            host_part = max(min(host_size // stride, size), 1)
            hosts = topology.devices // host_size
            return Factor(DCN, size // host_part, 1, hosts, False), Factor(HOST, host_part, stride, host_size, False)
        stride *= size
    return ()


def iterate_fillings(
    lengths: tuple[int, ...], sizes: tuple[int, ...], max_axes: int | None = None
) -> Iterator[Filling]:
    """Yield all ways to fill physical axes of these lengths with factors of mesh axes of these sizes.

    - Without `max_axes`, any number of mesh axes share a physical axis, each with one or more factors. Small factors
      are tried first.
    - With `max_axes`, at most that many mesh axes share a physical axis, each with one factor. The last physical axis
      takes all remaining mesh axes. Large factors are tried first.
    """
    if not lengths:
        if math.prod(sizes) == 1:
            yield ()
        return
    axis_limit = len(sizes) if max_axes is not None and len(lengths) == 1 and len(sizes) > 1 else max_axes
    for first_filling, remaining in _fill_axis(lengths[0], sizes, axis_limit, frozenset()):
        for other_fillings in iterate_fillings(lengths[1:], remaining, max_axes):
            yield (first_filling, *other_fillings)


def _fill_axis(
    length: int, sizes: tuple[int, ...], max_axes: int | None, used_axes: frozenset[int]
) -> Iterator[tuple[tuple[tuple[int, int], ...], tuple[int, ...]]]:
    """Yield every way to fill a physical axis of this length with mesh axes.

    Yields (factors, remaining sizes). The factors are pairs (axis number, factor), slowest first, and multiply to
    `length`. The remaining sizes are those of the mesh axes divided by these factors.

    Args:
        length: Number of positions of the physical axis.
        sizes: Sizes of the mesh axes.
        max_axes: Maximum number of mesh axes, or None. Sets the order of the factors too (`iterate_fillings`).
        used_axes: Numbers of the mesh axes that the next factor cannot come from.
    """
    if length == 1:
        yield (), sizes
        return
    if max_axes == 0:
        return
    for axis, size in enumerate(sizes):
        divisor = 1 if axis in used_axes else math.gcd(length, size)
        factors = [d for d in range(2, divisor + 1) if divisor % d == 0]
        next_used = frozenset({axis}) if max_axes is None else used_axes | {axis}
        for factor in factors if max_axes is None else reversed(factors):
            remaining = (*sizes[:axis], size // factor, *sizes[axis + 1 :])
            for other_factors, final_sizes in _fill_axis(
                length // factor, remaining, None if max_axes is None else max_axes - 1, next_used
            ):
                yield ((axis, factor), *other_factors), final_sizes
