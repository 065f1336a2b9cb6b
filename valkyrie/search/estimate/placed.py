"""Placements of meshes on a target's links by arithmetic alone: what links each axis gets, without a device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from valkyrie.hardware.platforms import platform_of
from valkyrie.hardware.target import ChipConfig, TargetConfig, Topology
from valkyrie.machine import assumptions
from valkyrie.parallel.candidates import Span

MOST_FACTORS = 2
"""Into how many factors a physical axis is split among mesh axes; more share links without gaining any."""
MOST_TRIED = 4000
"""Placements of one mesh that are looked at, of which those with the most links stay."""


@dataclass(frozen=True)
class Lying:
    """How a mesh axis lies: `links` of a torus that it can use at once, `hops` round it, and devices that share a chip.

    `ring_links`: those of one ring through all its devices, which are no more than one axis of the torus has.
    Of GPUs: `inner` devices of a host, `outer` hosts.
    """

    size: int
    inner: int
    outer: int
    links: float
    ring_links: float
    hops: float


@dataclass(frozen=True)
class Placement:
    """A placement as `mesh.placement` lists it (numbers of axes with factors), and how each axis then lies."""

    factors: tuple[tuple[int, int], ...]
    lies: tuple[Lying, ...]

    def entries(self, names: Sequence[str], sizes: Sequence[int]) -> list[str]:
        """Return the entries of `mesh.placement` for axes of these names and sizes."""
        joined: list[list[int]] = []
        for axis, factor in self.factors:
            if joined and joined[-1][0] == axis:
                joined[-1][1] *= factor
            else:
                joined.append([axis, factor])
        return [names[a] if factor == sizes[a] else f"{names[a]}:{factor}" for a, factor in joined]


@cache
def placements_of(sizes: tuple[int, ...], topology: Topology, torus: bool) -> tuple[Placement, ...]:
    """Return the placements of axes of these sizes of which none has as many links or more for every axis."""
    order = sorted(range(len(sizes)), key=lambda axis: -sizes[axis])
    place = {axis: number for number, axis in enumerate(order)}
    ordered = _ordered(tuple(sizes[axis] for axis in order), topology, torus)
    return tuple(
        Placement(
            tuple((order[axis], factor) for axis, factor in placement.factors),
            tuple(placement.lies[place[axis]] for axis in range(len(sizes))),
        )
        for placement in ordered
    )


@cache
def _ordered(sizes: tuple[int, ...], topology: Topology, torus: bool) -> tuple[Placement, ...]:
    """Return the same for sizes in descending order, which stand for every other order of them."""
    lengths = [*topology.shape, topology.devices_per_chip] if torus else [topology.devices]
    wraps = [*topology.wrap, False] if torus else [False]
    of_host = math.prod(topology.host_bounds)
    best: dict[tuple[float, ...], Placement] = {}
    for number, filled in enumerate(_filled(tuple(lengths), sizes)):
        if number == MOST_TRIED:
            break
        closing = [wraps if not topology.twisted else _closing(axis, filled, topology) for axis in range(len(sizes))]
        lies = tuple(_lying(i, size, filled, lengths, closing[i], of_host, torus) for i, size in enumerate(sizes))
        key = tuple(x for lying in lies for x in (lying.links, lying.ring_links, -lying.outer, -lying.hops))
        if key not in best:
            factors = tuple(factor for on_axis in filled for factor in on_axis)
            best[key] = Placement(factors, lies)
    undominated = []
    for key, placement in sorted(best.items(), key=lambda item: -sum(item[0])):
        if not any(all(a >= b for a, b in zip(other, key, strict=True)) for other, _ in undominated):
            undominated.append((key, placement))
    return tuple(placement for _, placement in undominated)


def spans_of(lies: Sequence[Sequence[Lying]], names: Sequence[str], chip: ChipConfig) -> Mapping[str, Span]:
    """Return the spans of mesh axes that lie so, one entry a layout."""
    of_host = max(math.prod(chip.host_bounds or [1]), 1)
    outside = (chip.dcn_gbs_per_host or 1.0) * 1e9 / of_host / chip.devices
    torus, spans = platform_of(chip.platform).has_torus, {}
    link = (chip.ici_link_gbs or 0.0) * 1e9 / chip.devices if torus else (chip.switch_gbs or 1.0) * 1e9
    for number, name in enumerate(names):
        column = [of_layout[number] for of_layout in lies]
        rates = [
            [link * (links or assumptions.CORE_LINKS) if torus else link for links in (lying.links, lying.ring_links)]
            for lying in column
        ]
        spans[name] = Span(
            np.array([lying.inner for lying in column], float),
            np.array([rate for rate, _ in rates]),
            np.array([lying.outer for lying in column], float),
            np.full(len(column), outside),
            np.array([lying.hops for lying in column], float),
            np.array([rate for _, rate in rates]),
        )
    return spans


def between_slices(count: int, target: TargetConfig) -> Span:
    """Return the span of the axis between slices, one entry for each of `count` layouts."""
    chip, one = target.chip, np.ones(count)
    assert chip is not None
    of_host = max(math.prod(chip.host_bounds or [1]), 1) * chip.devices
    rate = (chip.dcn_gbs_per_host or 1.0) * 1e9 / of_host
    return Span(one, one, one * target.slices, one * rate, 0 * one, one)


Filled = tuple[tuple[tuple[int, int], ...], ...]
"""For every physical axis the factors of mesh axes on it, slowest first."""


def _filled(lengths: tuple[int, ...], sizes: tuple[int, ...]) -> Iterator[Filled]:
    """Yield every way to spend mesh axes on physical axes, whole axes first."""
    if not lengths:
        if math.prod(sizes) == 1:
            yield ()
        return
    for on_first in _on_one(lengths[0], sizes, MOST_FACTORS if len(lengths) > 1 or len(sizes) < 2 else len(sizes)):
        left = list(sizes)
        for axis, factor in on_first:
            left[axis] //= factor
        for rest in _filled(lengths[1:], tuple(left)):
            yield (on_first, *rest)


def _on_one(length: int, sizes: tuple[int, ...], most: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield factors of different mesh axes whose product is the length of a physical axis."""
    if length == 1:
        yield ()
        return
    if most == 0:
        return
    for axis, size in enumerate(sizes):
        whole = math.gcd(length, size)
        for factor in (d for d in range(whole, 1, -1) if whole % d == 0):
            left = tuple(1 if a == axis else n for a, n in enumerate(sizes))
            for rest in _on_one(length // factor, left, most - 1):
                yield ((axis, factor), *rest)


def _closing(axis: int, filled: Filled, topology: Topology) -> list[bool]:
    """Return on which axes of a twisted torus a mesh axis that goes round them makes rings."""
    cover = {}
    for on, factors in enumerate(filled[: len(topology.shape)]):
        stride = 1
        for other, factor in reversed(factors):
            if other == axis:
                cover[on] = (factor, stride)
            stride *= factor
    return [*(wrap and topology.closes(on, cover) for on, wrap in enumerate(topology.wrap)), False]


def _lying(
    axis: int,
    size: int,
    filled: Filled,
    lengths: Sequence[int],
    wraps: Sequence[bool],
    of_host: int,
    torus: bool,
) -> Lying:
    links, ring_links, hops, inner = 0.0, 0.0, 0.0, 1
    for on, (factors, length, wrap) in enumerate(zip(filled, lengths, wraps, strict=True)):
        stride = 1
        for other, factor in reversed(factors):
            if other == axis:
                ring = wrap and factor * stride == length and length > 2
                if torus and on < len(lengths) - 1:
                    links += (2 if ring else 1) / stride
                    ring_links = max(ring_links, (2 if ring else 1) / stride)
                    hops += factor * stride / (2 if ring else 1)
                elif not torus:
                    inner = max(min(of_host // stride, factor), 1)
            stride *= factor
    if torus:
        return Lying(size, size, 1, links, ring_links, hops)
    return Lying(size, inner, size // inner, 0.0, 0.0, 0.0)
