"""Tests of placements: the device order for a list of factors, enumeration, and recognition of JAX's order."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from machines import compile_devices, needs_libtpu
from valkyrie.hardware.names import parse_target
from valkyrie.hardware.target import Topology, build_topology
from valkyrie.parallel.axis_links import Factor
from valkyrie.parallel.mesh import MeshConfig, build_mesh, parse_mesh, place_mesh
from valkyrie.parallel.placement import (
    arrange,
    describe_entries,
    describe_placement,
    find_placement,
    list_placements,
    placement_problems,
)
from valkyrie.problems import ProblemCode


def torus(*shape: int, wrap: bool = False, slices: int = 1, cores: int = 1) -> Topology:
    return Topology(shape, (wrap,) * len(shape), (1,) * len(shape), slices, cores)


def grid(entries: Sequence[str], axes: Mapping[str, int], topology: Topology) -> tuple[int, ...]:
    return tuple(arrange(np.arange(topology.devices), entries, axes).flat)


def by_hand(axes: dict[str, int], topology: Topology) -> set[tuple[int, ...]]:
    """Return every assignment of devices by brute force: each prime factor of each torus axis goes to any mesh axis.

    An assignment is a tuple of device indices in the order of the mesh.
    """
    assignments = set()
    physical = [topology.slices, *topology.shape, topology.devices_per_chip]
    orders = [sorted(set(itertools.permutations(primes(length)))) for length in physical]
    for order in itertools.product(*orders):
        digits = list(itertools.chain(*order))
        for owners in itertools.product(axes, repeat=len(digits)):
            sizes = {axis: math.prod(d for d, o in zip(digits, owners, strict=True) if o == axis) for axis in axes}
            if sizes != axes:
                continue
            cells = {}
            for device in range(topology.devices):
                index, rest, weight = dict.fromkeys(axes, 0), device, dict.fromkeys(axes, 1)
                for digit, owner in zip(reversed(digits), reversed(owners), strict=True):
                    index[owner] += rest % digit * weight[owner]
                    weight[owner] *= digit
                    rest //= digit
                cells[tuple(index.values())] = device
            assignments.add(tuple(cells[cell] for cell in np.ndindex(*axes.values())))
    return assignments


def primes(n: int) -> list[int]:
    return next(([p, *primes(n // p)] for p in range(2, n + 1) if n % p == 0), [])


@pytest.mark.parametrize(
    ("axes", "topology"),
    [
        ({"x": 4, "y": 4, "z": 2}, torus(2, 4, 4)),
        ({"x": 2, "y": 2, "z": 2}, torus(2, 2, 2)),
        ({"x": 6, "y": 4, "z": 1}, torus(2, 12)),
        ({"x": 8, "y": 2, "z": 1}, torus(16, 1)),
        ({"x": 4, "y": 2, "z": 1}, torus(2, 2, cores=2)),
        ({"x": 4, "y": 2, "z": 1}, torus(2, 2, slices=2)),
        ({"x": 1, "y": 1, "z": 1}, torus(1, 1)),
    ],
    ids=str,
)
def test_every_placement_is_enumerated_once(axes: dict[str, int], topology: Topology):
    every_placement = list_placements(axes, topology)
    assigned = [grid(entries, axes, topology) for entries in every_placement]
    assert len(set(assigned)) == len(assigned)
    assert set(assigned) == by_hand(axes, topology)
    assert all(placement_problems(entries, axes, "mesh") == [] for entries in every_placement)


def test_the_slice_axis_is_always_placed_between_slices():
    axes, topology = {"s": 2, "x": 2, "y": 2, "z": 2}, torus(2, 4, slices=2)
    every_placement = list_placements(axes, topology)
    assert every_placement and all(entries[0] == "s" for entries in every_placement)
    assert all(str(describe_entries(entries, axes, topology)["s"]) == "2 on dcn" for entries in every_placement)
    inner = list_placements({"x": 2, "y": 2, "z": 2}, torus(2, 4))
    assert [entries[1:] for entries in every_placement] == inner


def test_placement_counts_equal_the_number_of_words():
    """If all sizes are powers of two, a placement is a sequence of mesh axes, with one entry for each factor of 2.

    The number of such sequences is a multinomial coefficient.
    """
    assert len(list_placements({"x": 4, "y": 4, "z": 2}, torus(2, 4, 4))) == math.factorial(5) // 4
    assert len(list_placements({"x": 16, "y": 16, "z": 1}, torus(4, 8, 8))) == math.comb(8, 4)


def test_a_mesh_of_another_size_has_no_placement():
    with pytest.raises(ValueError, match="16 .* 32"):
        list_placements({"x": 4, "y": 4, "z": 1}, torus(2, 4, 4))


def test_every_placement_is_recognised_after_building():
    topology = torus(2, 2, 2)
    for shape in ([2, 2, 2], [4, 2, 1], [8, 1, 1], [1, 2, 2, 2]):
        axes = MeshConfig(shape=shape).axes
        for entries in list_placements(axes, topology):
            config = MeshConfig(name="mesh", shape=shape, placement=entries)
            assert config.problems() == []
            mesh = build_mesh(config, jax.devices())
            assert dict(mesh.shape) == axes
            assert find_placement(mesh, topology) == entries
            assert describe_placement(mesh, topology) == describe_entries(entries, axes, topology)


def test_axes_may_have_any_name():
    axes, entries = {"fsdp_2": 4, "Model": 2}, ["fsdp_2:2", "Model", "fsdp_2:2"]
    assert placement_problems(entries, axes, "mesh") == []
    assert placement_problems(["fsdp_2:2", "Model", "fsdp"], axes, "mesh") != []
    assert find_placement(place_mesh(axes, jax.devices()[:8], entries), torus(2, 2, 2)) == entries


sides = st.sampled_from([1, 2, 3, 4, 6])


@settings(deadline=None, max_examples=40)
@given(st.lists(sides, min_size=2, max_size=3), st.booleans(), st.data())
def test_a_described_placement_matches_the_device_positions(shape: list[int], wrap: bool, data: st.DataObject):
    topology = torus(*shape, wrap=wrap)
    owners = [data.draw(st.sampled_from("xyz")) for _ in primes(topology.devices)]
    axes = dict.fromkeys("xyz", 1)
    for prime, owner in zip(primes(topology.devices), owners, strict=True):
        axes[owner] *= prime
    every_placement = list_placements(axes, topology)
    entries = every_placement[data.draw(st.integers(0, len(every_placement) - 1))]
    cells = arrange(np.arange(topology.devices), entries, axes)
    for dimension, (axis, axis_placement) in enumerate(describe_entries(entries, axes, topology).items()):
        assert axis_placement.is_straight and axis_placement.size == axes[axis]
        assert math.prod(factor.size for factor in axis_placement.factors) == axis_placement.size
        first = np.moveaxis(cells, dimension, -1).reshape(-1, axes[axis])[0]
        block = {(0,) * len(shape)}
        for factor in axis_placement.factors:
            torus_axis = "abc".index(factor.physical_axis)
            steps = [
                tuple(i * factor.stride * (k == torus_axis) for k in range(len(shape))) for i in range(factor.size)
            ]
            block = {tuple(a + b for a, b in zip(p, q, strict=True)) for p in block for q in steps}
            assert factor.is_ring == (wrap and factor.size * factor.stride == shape[torus_axis] > 2)
        assert {tuple(int(n) for n in np.unravel_index(cell, shape)) for cell in first} == block


@pytest.mark.parametrize(
    ("entries", "topology", "expected"),
    [
        (["z", "x", "y"], torus(2, 4, 4), ["x=4 on torus b (line, 1 link)", "y=4 on torus c (line, 1 link)"]),
        (
            ["x:2", "y", "x:2", "z"],
            torus(2, 4, 4),
            ["x=4 on torus a,c*2 by 2 (no ring, 1.8 links)", "y=4 on torus b (line, 1 link)"],
        ),
        (
            ["x", "y", "z"],
            torus(4, 4, 2, wrap=True),
            ["x=4 on torus a (ring, 2 links)", "y=4 on torus b (ring, 2 links)"],
        ),
        (
            ["x", "y", "z"],
            torus(4, 8, wrap=True),
            ["x=4 on torus a (ring, 2 links)", "y=4 on torus b*4 by 2 (ring, 1 link)"],
        ),
        (
            ["x", "z", "y"],
            torus(16, 2),
            ["x=4 on torus a*4 by 4 (line, 0.25 links)", "y=4 on torus a*2,b (no ring, 2 links)"],
        ),
        (["x", "y", "z"], torus(4, 4, cores=2), ["z=2 on the cores of a chip"]),
        (["x", "y", "z"], torus(2, 4, slices=4), ["x=4 on dcn", "z=2 on torus b*2 (line, 1 link)"]),
        (
            ["x", "y", "z"],
            torus(2, 8, slices=2),
            ["x=4 on torus a (line, 1 link) and dcn", "y=4 on torus b*4 by 2 (line, 0.5 links)"],
        ),
    ],
)
def test_a_placement_is_described_in_words(entries: list[str], topology: Topology, expected: list[str]):
    described = describe_entries(entries, {"x": 4, "y": 4, "z": 2}, topology)
    assert set(expected) <= {f"{axis}={placed}" for axis, placed in described.items()}


def test_links_are_counted_per_chip():
    axes = {"x": 16, "y": 4, "z": 1}
    axis_placements = describe_entries(["x", "y"], axes, torus(4, 4, 4, wrap=True))
    assert (axis_placements["x"].links_per_chip, axis_placements["x"].is_ring) == (4.0, True)
    assert axis_placements["y"].factors == (Factor("c", 4, 1, 4, True),)
    assert str(axis_placements["z"]).endswith("one device")
    assert (axis_placements["z"].links_per_chip, axis_placements["z"].is_ring) == (0, False)


@pytest.mark.parametrize(
    ("placement", "reason"),
    [
        (["x:2", "y", "z"], "the factors of x multiply to 2, not 4"),
        (["x:2", "y", "x:4", "z"], "the factors of x multiply to 8, not 4"),
        (["x:0", "x", "y", "z"], "x:0 is neither an axis (x) nor part of an axis (x:2)"),
        (["x", "y", "z", "q"], "q is neither an axis (x) nor part of an axis (x:2)"),
        (["x:-2", "y", "z"], "x:-2 is neither an axis (x) nor part of an axis (x:2); x is missing"),
        (["y"], "x is missing; z is missing"),
    ],
)
def test_an_impossible_placement_is_refused_with_the_reason(placement: list[str], reason: str):
    config = MeshConfig(name="4x4x2", shape=[4, 4, 2], placement=placement)
    (problem,) = config.problems()
    assert (problem.code, problem.key, problem.details["wrong"]) == (ProblemCode.placement, "mesh.placement", reason)


def test_devices_that_fill_no_block_are_called_scattered():
    corners = np.array([0, 3, 1, 2]).reshape(2, 2)
    devices = np.array([SimpleNamespace(id=i, coords=(i // 2, i % 2, 0), core_on_chip=0) for i in range(4)])
    mesh: Any = SimpleNamespace(devices=devices[corners], axis_names=("x", "y"))
    axis_placements = describe_placement(mesh, torus(2, 2))
    assert "a,b (scattered" in str(axis_placements["y"])
    assert not axis_placements["y"].is_straight
    assert find_placement(mesh, torus(2, 2)) is None


@needs_libtpu
@pytest.mark.parametrize(
    ("target", "mesh", "entries", "words"),
    [
        ("v4-64", "4x4x2", ["z", "y", "x"], "x=4 on torus c (line, 1 link)"),
        ("v4-128", "8x8x1", ["y:4", "x:2", "y:2", "x:4"], "x=8 on torus b*2 by 2,c (ring, 3 links)"),
        ("v5e-256", "16x16x1", ["y", "x"], "x=16 on torus b (ring, 2 links)"),
        ("tpu7x-128", "8x4x4", ["z", "y", "x"], "x=8 on torus c (ring, 2 links) and the cores of a chip"),
        ("v5e-8", "8x1x1", None, "x=8 on torus a,b (no ring, 2 links)"),
    ],
)
def test_the_placement_chosen_by_mesh_utils_is_described(target: str, mesh: str, entries: list[str] | None, words: str):
    """The torus axis that JAX picks for a mesh axis depends on its version. The description of a choice does not."""
    topology, devices = build_topology(parse_target(target)), compile_devices(parse_target(target))
    built = build_mesh(parse_mesh(mesh), devices)
    axis_placements = describe_placement(built, topology)
    placement = find_placement(built, topology)
    assert (placement is None) == (entries is None)
    if placement == entries:
        assert f"x={axis_placements['x']}" == words
    if placement is not None:
        again = parse_mesh(mesh)
        again.placement = placement
        assert (build_mesh(again, devices).devices == built.devices).all()
        assert placement in list_placements(again.axes, topology)
