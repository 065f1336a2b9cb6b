"""Tests of twisted tori: names, shortest paths, rings along mesh axes, estimates, and libtpu's devices."""

from __future__ import annotations

import itertools
from collections import deque

import numpy as np
import pytest

from machines import compile_devices, needs_libtpu
from valkyrie.config.arguments import parse_run
from valkyrie.hardware.names import parse_target
from valkyrie.hardware.position import Position
from valkyrie.hardware.target import Topology, build_topology
from valkyrie.machine.torus import Torus
from valkyrie.parallel.axis_links import undominated_placements
from valkyrie.parallel.placement import describe_entries
from valkyrie.search.request import parse_request

SHAPES = [(4, 4, 8), (4, 8, 8)]


def topology(shape: tuple[int, ...], twisted: bool = True) -> Topology:
    return Topology(shape, (True,) * 3, (2, 2, 1), twisted=twisted)


def torus(shape: tuple[int, ...], twisted: bool = True) -> Torus:
    places = [Position(0, at, 0) for at in itertools.product(*map(range, shape))]
    return Torus(topology(shape, twisted), places)


def all_to_all_crossings(shape: tuple[int, ...], twisted: bool) -> float:
    """Return how often the busiest link is crossed when every chip sends to every other."""
    chips = int(np.prod(shape))
    source, target = (side.ravel() for side in np.meshgrid(np.arange(chips), np.arange(chips)))
    crossings = torus(shape, twisted).crossings(source[source != target], target[source != target])
    return max(along.load for along in crossings.values())


def neighbours(at: tuple[int, ...], shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the six neighbours of a chip. Wrapping around a shortest axis moves halfway along the longer axes."""
    n, positions = shape[0], []
    for axis, step in itertools.product(range(3), (1, -1)):
        to = list(at)
        to[axis] += step
        if shape[axis] == n and not 0 <= to[axis] < n:
            to = [place + (n if length == 2 * n else 0) for place, length in zip(to, shape, strict=True)]
        positions.append(tuple(place % length for place, length in zip(to, shape, strict=True)))
    return positions


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_paths_are_as_short_as_those_of_breadth_first_search(shape: tuple[int, ...]) -> None:
    begin = (1, 2, 3)
    far, waiting = {begin: 0}, deque([begin])
    while waiting:
        at = waiting.popleft()
        for to in neighbours(at, shape):
            if to not in far:
                far[to] = far[at] + 1
                waiting.append(to)
    chips, of = list(itertools.product(*map(range, shape))), torus(shape)
    for number, chip in enumerate(chips):
        crossings = of.crossings(np.array([chips.index(begin)]), np.array([number]))
        assert sum(c.loads.sum() for c in crossings.values()) == pytest.approx(far[chip]), chip


@pytest.mark.parametrize(("shape", "ours", "published"), [((4, 4, 8), 1.745, 1.63), ((4, 8, 8), 1.391, 1.31)], ids=str)
def test_twisting_speeds_up_all_to_all_as_in_the_tpu_v4_paper(
    shape: tuple[int, ...], ours: float, published: float
) -> None:
    gain = all_to_all_crossings(shape, False) / all_to_all_crossings(shape, True)
    assert gain == pytest.approx(ours, abs=1e-3)
    assert gain == pytest.approx(published, rel=0.08)  # arXiv 2304.01433, figure 6: measured


def test_an_untwisted_torus_has_no_shift() -> None:
    assert topology((4, 4, 8), False).shifts == ((0, 0, 0),) * 3
    assert topology((4, 4, 8)).shifts == ((0, 0, 4), (0, 0, 4), (0, 0, 0))
    assert topology((4, 8, 8)).shifts == ((0, 4, 4), (0, 0, 0), (0, 0, 0))


def test_an_axis_that_wraps_to_other_chips_is_a_line() -> None:
    axes = {"x": 4, "y": 4, "z": 8}
    described = describe_entries(["x", "y", "z"], axes, topology((4, 4, 8)))
    assert {name: (axis.ring, axis.links) for name, axis in described.items()} == {
        "x": (False, 1),
        "y": (False, 1),
        "z": (True, 2),
    }
    plane = describe_entries(["x", "y"], {"x": 4, "y": 32}, topology((4, 4, 8)))
    assert (plane["y"].ring, plane["y"].links) == (True, 4)


def test_a_collective_over_a_plane_uses_a_ring_around_it() -> None:
    plane = np.array([[x * 32 + y * 8 + z for y in range(4) for z in range(8)] for x in range(4)])
    lines = np.array([[x * 32 + y * 8 + z for y in range(4)] for x in range(4) for z in range(8)])
    of_plane, of_lines = (torus((4, 4, 8)).dimensions(groups) for groups in (plane, lines))
    assert of_plane is not None and {d.axis: d.load for d in of_plane} == {"b": 0.5, "c": 0.5}
    assert of_lines is not None and {d.axis: d.load for d in of_lines} == {"b": 1.0}


@pytest.mark.parametrize("sizes", [(4, 4, 8), (16, 8), (4, 32), (2, 8, 8), (128,)], ids=str)
def test_estimates_place_mesh_axes_like_layouts(sizes: tuple[int, ...]) -> None:
    names = ["x", "y", "z"][: len(sizes)]
    for placed in undominated_placements(sizes, topology((4, 4, 8)), True):
        entries = placed.entries(names, sizes)
        described = describe_entries(entries, dict(zip(names, sizes, strict=True)), topology((4, 4, 8)))
        assert [axis.links for axis in placed.axes] == [described[name].links for name in names], entries


def test_a_twisted_slice_is_named_as_google_cloud_names_it() -> None:
    target = parse_target("v4-4x4x8_twisted")
    assert (target.name, target.topology, target.chips, target.hosts) == ("v4-4x4x8_twisted", "4x4x8_twisted", 128, 32)
    assert build_topology(target).twisted and not build_topology(parse_target("v4-256")).twisted
    for name, reason in {
        "v4-4x4x4_twisted": "n x n x 2n or n x 2n x 2n",
        "v4-8x4x4_twisted": "such as target=v4-4x4x8_twisted or target=v4-4x8x8_twisted,",
        "tpu7x-4x4x8_twisted": "tpu7x has no twisted slices. Leave out _twisted.",
    }.items():
        with pytest.raises(ValueError, match=reason):
            parse_target(name)


def test_a_search_over_topologies_includes_twisted_ones() -> None:
    run = parse_run(["mode=search", "target.chip=v4", "target.chips=256", "model=gpt3_175b", "batch=1024"])
    names = [target.name for target in parse_request(run).targets]
    assert names == ["v4-512", "v4-4x4x16", "v4-4x8x8_twisted"]


@needs_libtpu
@pytest.mark.parametrize("name", ["v4-4x4x8_twisted", "v5p-4x8x8_twisted"])
def test_libtpu_supports_the_twisted_slices(name: str) -> None:
    target = parse_target(name)
    devices = compile_devices(target)
    assert len(devices) == target.chips
    assert {tuple(d.coords) for d in devices} == set(itertools.product(*map(range, build_topology(target).shape)))
