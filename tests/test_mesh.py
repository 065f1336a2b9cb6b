"""Tests of meshes: their names and sizes, the mesh of the launch environment, and the positions of devices."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import assert_golden_message
from valkyrie.parallel.mesh import MeshConfig, abstract_mesh, build_mesh, mesh_from_environment, parse_mesh
from valkyrie.problems import ProblemCode

sizes = st.integers(1, 10_000)
shapes = st.lists(sizes, min_size=3, max_size=4)


@given(shapes, st.none() | st.integers(1, 64))
def test_a_mesh_name_gives_its_sizes(shape: list[int], slices: int | None):
    name = ("" if slices is None else f"{slices}s") + "x".join(str(n) for n in shape)
    mesh = parse_mesh(name)
    assert mesh == MeshConfig(name=name, shape=shape, slices=slices or 1)
    assert mesh.problems() == []
    assert mesh.size == math.prod(shape) * (slices or 1) == math.prod(mesh.axes.values())
    letters = ["x", "y", "z"] if len(shape) == 3 else ["w", "x", "y", "z"]
    assert list(mesh.axes.items()) == [("s", slices)] * ((slices or 1) > 1) + list(zip(letters, shape, strict=True))


@given(st.text("0123456789xs-. ", max_size=12))
def test_other_mesh_names_are_refused_with_a_valid_example(name: str):
    message = ""
    try:
        mesh = parse_mesh(name)
    except ValueError as error:
        message = str(error)
        suggested = re.findall(r"mesh=([0-9sx]+)\.$", message)
        mesh = parse_mesh(suggested[0])
    assert mesh.problems() == []
    assert message.startswith(f"mesh={name} ") or message == ""


@pytest.mark.parametrize(
    "name", ["banana", "4x4x2\n", "4x-4x2", "8", "2s8", "4x4", "2x2x2x2x2", "2s2x2x2x2x3", "4x0x2", "0s1x1x1"]
)
def test_refusals_of_a_mesh_say_what_to_write(name: str):
    with pytest.raises(ValueError) as error:
        parse_mesh(name)
    assert_golden_message("mesh", [f"mesh={name}"], str(error.value))


@pytest.mark.parametrize(
    ("mesh", "code"),
    [
        (MeshConfig(shape=[2, 2]), ProblemCode.mesh_shape),
        (MeshConfig(shape=[2, 0, 1]), ProblemCode.mesh_shape),
        (MeshConfig(slices=0), ProblemCode.mesh_shape),
        (MeshConfig(name="2x2x2", shape=[2, 2, 2], placement=["x", "y"]), ProblemCode.placement),
        (MeshConfig(name="2x2x2", shape=[2, 2, 2], placement=["x", "y", "y"]), ProblemCode.placement),
        (MeshConfig(name="2x2x2", shape=[2, 2, 2], names=["data"]), ProblemCode.mesh_names),
    ],
)
def test_an_impossible_mesh_is_refused_with_the_reason(mesh: MeshConfig, code: ProblemCode):
    (problem,) = mesh.problems()
    assert problem.code is code


def test_the_launch_environment_gives_sizes_and_roles():
    mesh = mesh_from_environment({"TPU_MESH_CONFIG": "4,4,2", "TPU_AXIS_NAMES": "data, model,fsdp"})
    assert mesh == MeshConfig(name="4x4x2", shape=[4, 4, 2], names=["data", "model", "fsdp"])
    assert mesh_from_environment({"TPU_MESH_CONFIG": "4,4,2"}) == MeshConfig(name="4x4x2", shape=[4, 4, 2])
    padded = mesh_from_environment({"TPU_MESH_CONFIG": "4,2", "TPU_AXIS_NAMES": "data,model"})
    assert padded is not None
    assert (padded.name, padded.names) == ("4x2x1", ["data", "model", "unused0"])
    assert mesh_from_environment({}) is None
    assert mesh_from_environment({"TPU_MESH_CONFIG": "", "TPU_AXIS_NAMES": "data"}) is None


@pytest.mark.parametrize(
    "environment",
    [
        {"TPU_MESH_CONFIG": "4x4x2"},
        {"TPU_MESH_CONFIG": "4,4,2", "TPU_AXIS_NAMES": "data,model"},
        {"TPU_MESH_CONFIG": "4,0,2"},
        {"TPU_MESH_CONFIG": "4,-4,2"},
    ],
)
def test_an_invalid_launch_environment_is_refused(environment: dict[str, str]):
    with pytest.raises(ValueError) as error:
        mesh_from_environment(environment)
    assert_golden_message("mesh", [f"{name}={value}" for name, value in environment.items()], str(error.value))


def device_ids(mesh: jax.sharding.Mesh) -> np.ndarray:
    return np.vectorize(lambda device: device.id)(mesh.devices)


def test_every_device_is_placed_once_and_axes_keep_their_names():
    for name in ("2x2x2", "8x1x1", "1x2x2x2", "2s2x2x1", "1s4x2x1"):
        config = parse_mesh(name)
        mesh = build_mesh(config, jax.devices())
        assert dict(mesh.shape) == config.axes == dict(abstract_mesh(config).shape)
        assert sorted(device_ids(mesh).flat) == list(range(8))


def test_a_mesh_takes_the_first_devices_and_refuses_too_few():
    assert sorted(device_ids(build_mesh(parse_mesh("2x2x1"), jax.devices())).flat) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match=r"mesh=4x4x2 needs 32"):
        build_mesh(parse_mesh("4x4x2"), jax.devices())


@given(st.permutations(["x", "y", "z"]))
def test_placement_lists_axes_from_the_slowest_to_the_fastest(placement: list[str]):
    config = MeshConfig(name="4x2x1", shape=[4, 2, 1], placement=placement)
    order = device_ids(build_mesh(config, list(reversed(jax.devices()))))
    stride, strides = 1, {}
    for axis in reversed(placement):
        strides[axis], stride = stride, stride * config.axes[axis]
    x, y, z = np.indices((4, 2, 1))
    np.testing.assert_array_equal(order, x * strides["x"] + y * strides["y"] + z * strides["z"])


def test_placement_uses_coordinates_before_ids(monkeypatch: pytest.MonkeyPatch):
    devices = [
        SimpleNamespace(id=100 - i, coords=(x, y, z), core_on_chip=0, slice_index=s)
        for i, (s, x, y, z) in enumerate(np.ndindex(2, 2, 2, 1))
    ]
    monkeypatch.setattr(jax.sharding, "Mesh", lambda grid, axes, **_: SimpleNamespace(devices=grid, axis_names=axes))
    config = MeshConfig(name="2s2x2x1", shape=[2, 2, 1], slices=2, placement=["s", "x", "y", "z"])
    grid = build_mesh(config, devices[::-1]).devices
    for s, x, y, z in np.ndindex(2, 2, 2, 1):
        assert (grid[s, x, y, z].slice_index, grid[s, x, y, z].coords) == (s, (x, y, z))


def test_slices_are_placed_along_the_slice_axis(monkeypatch: pytest.MonkeyPatch):
    devices = [
        SimpleNamespace(id=i, platform="cpu", device_kind="cpu", process_index=s, slice_index=s)
        for i, s in enumerate([0, 1, 0, 1, 0, 1, 0, 1])
    ]
    monkeypatch.setattr(jax.sharding, "Mesh", lambda grid, axes, **_: SimpleNamespace(devices=grid, axis_names=axes))
    mesh = build_mesh(parse_mesh("2s2x2x1"), devices)
    assert mesh.axis_names == ("s", "x", "y", "z")
    for s in (0, 1):
        assert {device.slice_index for device in mesh.devices[s].flat} == {s}


def tpu_slices(shape: tuple[int, int, int], slices: int) -> list[SimpleNamespace]:
    kind = {"platform": "tpu", "device_kind": "TPU v4", "core_on_chip": 0}
    places = enumerate(np.ndindex(slices, *shape))
    return [SimpleNamespace(id=i, process_index=i // 4, slice_index=s, coords=at, **kind) for i, (s, *at) in places]


@pytest.mark.parametrize("inner", ["8x8x1", "2x32x1", "4x4x4", "64x1x1", "2x4x4x2"])
def test_each_of_several_slices_has_the_mesh_of_a_single_slice(inner: str, monkeypatch: pytest.MonkeyPatch):
    """Each of two 4x4x4 slices orders its devices as a single slice does, also if mesh axes use parts of torus axes."""
    monkeypatch.setattr(jax.sharding, "Mesh", lambda grid, axes, **_: SimpleNamespace(devices=grid, axis_names=axes))
    alone = build_mesh(parse_mesh(inner), tpu_slices((4, 4, 4), 1))
    both = build_mesh(parse_mesh(f"2s{inner}"), tpu_slices((4, 4, 4), 2))
    assert both.axis_names == ("s", *alone.axis_names)
    for s in (0, 1):
        assert {device.slice_index for device in both.devices[s].flat} == {s}
        assert [d.coords for d in both.devices[s].flat] == [d.coords for d in alone.devices.flat]


@pytest.mark.parametrize(("name", "slices"), [("8x8x2", "1 slice"), ("4s4x4x2", "4 slices")])
def test_a_mesh_with_another_number_of_slices_than_the_devices_is_refused(name: str, slices: str):
    with pytest.raises(ValueError) as error:
        build_mesh(parse_mesh(name), tpu_slices((4, 4, 4), 2))
    for part in (f"mesh={name} is for {slices},", "such as mesh=2s64x1x1", "in 2 slices"):
        assert part in str(error.value)
