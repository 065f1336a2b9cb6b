"""Chips, tori and meshes for replays without devices, and compiling for TPUs without a TPU."""

from __future__ import annotations

import importlib.util
import itertools
import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from valkyrie.compiled.hlo import Module, parse_module
from valkyrie.hardware.platforms import get_platform
from valkyrie.hardware.platforms.tpu import ENVIRONMENT
from valkyrie.hardware.position import Position
from valkyrie.hardware.target import ChipConfig, TargetConfig, Topology
from valkyrie.machine.network import Machine
from valkyrie.search.compile.executable import without_cache
from valkyrie.train.program import serialised_module

# libtpu has wheels for Linux on x86_64 only, so on other machines these tests cannot run. `.ci/run` installs the extra
# `tpu` where there is a wheel, so it skips none of them there.
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="compiles for a TPU: uv sync --extra tpu (Linux on x86_64; no TPU is needed)",
)

# The wheels are for Linux on x86_64 only. With 0.7 GB, they are too large for `.ci/run`, so tests of the compiler run
# where somebody has installed the extra.
needs_gpu_compiler = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="compiles for a GPU: uv sync --extra gpu-compile (Linux on x86_64; no GPU is needed)",
)


def compile_devices(target: TargetConfig) -> list[Any]:
    """Return the compile-only devices of a slice."""
    return get_platform(target.platform).devices_to_compile_for(target, target.devices or 1)


CHIPS = {
    "v4": ChipConfig(
        name="v4",
        peak_tflops={"bfloat16": 275.0},
        hbm_gbs=1200.0,
        clock_ghz=1.05,
        ici_link_gbs=45.0,
        hop_us=1.0,
        host_bounds=[2, 2, 1],
        dcn_gbs_per_host=25.0,
        cores=2,
    ),
    "v5e": ChipConfig(
        name="v5e",
        peak_tflops={"bfloat16": 197.0, "int8": 394.0},
        hbm_gbs=819.0,
        clock_ghz=1.5,
        ici_link_gbs=45.0,
        hop_us=1.0,
        host_bounds=[2, 2],
        dcn_gbs_per_host=25.0,
    ),
    "v6e": ChipConfig(
        name="v6e",
        peak_tflops={"bfloat16": 918.0},
        hbm_gbs=1638.0,
        clock_ghz=1.75,
        ici_link_gbs=90.0,
        hop_us=1.0,
        host_bounds=[2, 2],
        dcn_gbs_per_host=50.0,
    ),
}
"""Published figures of three chips, copied so that edits of `conf/target` do not change test results."""


def make_topology(shape: Sequence[int], slices: int = 1, wrap: Sequence[bool] | None = None) -> Topology:
    """Return the topology of one or more slices of a shape.

    `wrap` says which axes wrap around. By default, they do as on Cloud TPU: in two dimensions, each axis of 16 chips,
    otherwise all axes if the length of each is a multiple of 4.
    """
    if wrap is None:
        wrap = [n == 16 for n in shape] if len(shape) == 2 else [all(n % 4 == 0 for n in shape)] * len(shape)
    return Topology(tuple(shape), tuple(wrap), (2, 2, 1)[: len(shape)], slices)


def make_machine(chip: str, topology: Topology, mesh_axes: dict[str, int] | None = None) -> Machine:
    """Return a `Machine` of chips in `CHIPS`, with these mesh axes.

    By default, there is a mesh axis for each torus axis, after one for the slices if there are several.
    """
    coordinates = list(itertools.product(range(topology.slices), *map(range, topology.shape)))
    positions = tuple(Position(s, tuple(coords), 0) for s, *coords in coordinates)
    axes = dict(zip("xyzw", topology.shape, strict=False))
    if topology.slices > 1:
        axes = {"s": topology.slices, **axes}
    return Machine(CHIPS[chip], topology, positions, mesh_axes or axes)


def tpu_devices(name: str, slices: int = 1) -> list[Any]:
    """Return the compile-only devices of one or more equal TPU slices.

    `name` is libtpu's name for the topology of a slice, such as `v4:4x4x4`.
    """
    os.environ |= ENVIRONMENT
    from jax.experimental import topologies

    options: dict[str, Any] = {"num_slices": slices} if slices > 1 else {}
    if name.startswith("v4"):
        options |= {"chip_config_name": "megacore", "chips_per_host_bounds": (2, 2, 1)}
    return list(topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices)


@lru_cache
def tpu_mesh(name: str, slices: int = 1) -> tuple[Mesh, Machine]:
    """Return the mesh and machine of one or more slices such as `v4:4x4x4`.

    There is one mesh axis for each torus axis, after one for the slices if there are several.
    """
    chip, shape = name.split(":")
    topology = make_topology([int(n) for n in shape.split("x")], slices)
    devices = {
        (getattr(d, "slice_index", 0) or 0, *d.coords[: len(topology.shape)]): d for d in tpu_devices(name, slices)
    }
    slice_machine = make_machine(chip, topology)
    array = np.array([devices[p.slice_index, *p.coords] for p in slice_machine.positions], dtype=object)
    axes = slice_machine.mesh_axes
    mesh = Mesh(array.reshape(tuple(axes.values())), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    return mesh, slice_machine


def compile_module(
    function: Callable[..., Any],
    mesh: Mesh,
    *shapes: tuple[tuple[int, ...], Any],
    spec: Any = None,
    options: dict[str, str] | None = None,
) -> Module:
    """Compile a function for a mesh and return its HLO module.

    `shapes` are the shape and dtype of each argument, which is sharded by `spec` or replicated. `options` are compiler
    options.
    """
    sharding = NamedSharding(mesh, PartitionSpec() if spec is None else spec)
    arguments = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype in shapes]
    with without_cache():
        compiled = jax.jit(function, compiler_options=options).lower(*arguments).compile()
    return parse_module(serialised_module(compiled))
