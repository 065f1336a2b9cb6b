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
from valkyrie.parallel.axis_links import pareto_placements
from valkyrie.parallel.placement import describe_entries
from valkyrie.search.request import parse_request

SHAPES = [(4, 4, 8), (4, 8, 8)]


def make_topology(shape: tuple[int, ...], twisted: bool = True) -> Topology:
    return Topology(shape, (True,) * 3, (2, 2, 1), twisted=twisted)


def make_torus(shape: tuple[int, ...], twisted: bool = True) -> Torus:
    positions = [Position(0, position, 0) for position in itertools.product(*map(range, shape))]
    return Torus(make_topology(shape, twisted), positions)


def all_to_all_crossings(shape: tuple[int, ...], twisted: bool) -> float:
    """Return how often the busiest link is crossed when every chip sends to every other."""
    chips = int(np.prod(shape))
    sources, targets = (side.ravel() for side in np.meshgrid(np.arange(chips), np.arange(chips)))
    crossings = make_torus(shape, twisted).crossings(sources[sources != targets], targets[sources != targets])
    return max(direction.max_load for direction in crossings.values())


def neighbours(position: tuple[int, ...], shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the six neighbours of a chip. Wrapping around a shortest axis moves halfway along the longer axes."""
    n, positions = shape[0], []
    for axis, step in itertools.product(range(3), (1, -1)):
        neighbour = list(position)
        neighbour[axis] += step
        if shape[axis] == n and not 0 <= neighbour[axis] < n:
            neighbour = [
                coordinate + (n if length == 2 * n else 0) for coordinate, length in zip(neighbour, shape, strict=True)
            ]
        positions.append(tuple(coordinate % length for coordinate, length in zip(neighbour, shape, strict=True)))
    return positions


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_paths_are_as_short_as_those_of_breadth_first_search(shape: tuple[int, ...]) -> None:
    origin = (1, 2, 3)
    distances, queue = {origin: 0}, deque([origin])
    while queue:
        position = queue.popleft()
        for neighbour in neighbours(position, shape):
            if neighbour not in distances:
                distances[neighbour] = distances[position] + 1
                queue.append(neighbour)
    chips, torus = list(itertools.product(*map(range, shape))), make_torus(shape)
    for index, chip in enumerate(chips):
        crossings = torus.crossings(np.array([chips.index(origin)]), np.array([index]))
        assert sum(c.loads.sum() for c in crossings.values()) == pytest.approx(distances[chip]), chip


@pytest.mark.parametrize(("shape", "ours", "published"), [((4, 4, 8), 1.745, 1.63), ((4, 8, 8), 1.391, 1.31)], ids=str)
def test_twisting_speeds_up_all_to_all_as_in_the_tpu_v4_paper(
    shape: tuple[int, ...], ours: float, published: float
) -> None:
    gain = all_to_all_crossings(shape, False) / all_to_all_crossings(shape, True)
    assert gain == pytest.approx(ours, abs=1e-3)
    assert gain == pytest.approx(published, rel=0.08)  # arXiv 2304.01433, figure 6: measured


def test_an_untwisted_torus_has_no_shift() -> None:
    assert make_topology((4, 4, 8), False).wrap_shifts == ((0, 0, 0),) * 3
    assert make_topology((4, 4, 8)).wrap_shifts == ((0, 0, 4), (0, 0, 4), (0, 0, 0))
    assert make_topology((4, 8, 8)).wrap_shifts == ((0, 4, 4), (0, 0, 0), (0, 0, 0))


def test_an_axis_that_wraps_to_other_chips_is_a_line() -> None:
    axes = {"x": 4, "y": 4, "z": 8}
    axis_links = describe_entries(["x", "y", "z"], axes, make_topology((4, 4, 8)))
    assert {name: (axis.is_ring, axis.links_per_chip) for name, axis in axis_links.items()} == {
        "x": (False, 1),
        "y": (False, 1),
        "z": (True, 2),
    }
    plane_links = describe_entries(["x", "y"], {"x": 4, "y": 32}, make_topology((4, 4, 8)))
    assert (plane_links["y"].is_ring, plane_links["y"].links_per_chip) == (True, 4)


def test_a_collective_over_a_plane_uses_a_ring_around_it() -> None:
    plane_groups = np.array([[x * 32 + y * 8 + z for y in range(4) for z in range(8)] for x in range(4)])
    line_groups = np.array([[x * 32 + y * 8 + z for y in range(4)] for x in range(4) for z in range(8)])
    plane_dimensions, line_dimensions = (
        make_torus((4, 4, 8)).dimensions(groups) for groups in (plane_groups, line_groups)
    )
    assert plane_dimensions is not None and {d.axis: d.load for d in plane_dimensions} == {"b": 0.5, "c": 0.5}
    assert line_dimensions is not None and {d.axis: d.load for d in line_dimensions} == {"b": 1.0}


@pytest.mark.parametrize("sizes", [(4, 4, 8), (16, 8), (4, 32), (2, 8, 8), (128,)], ids=str)
def test_estimates_place_mesh_axes_like_layouts(sizes: tuple[int, ...]) -> None:
    names = ["x", "y", "z"][: len(sizes)]
    for placement in pareto_placements(sizes, make_topology((4, 4, 8)), True):
        entries = placement.entries(names, sizes)
        axis_links = describe_entries(entries, dict(zip(names, sizes, strict=True)), make_topology((4, 4, 8)))
        assert [axis.links_per_chip for axis in placement.axes] == [
            axis_links[name].links_per_chip for name in names
        ], entries


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
