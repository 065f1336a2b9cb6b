"""Device meshes: names, axes, sizes, and the placement of devices. Only functions that build a mesh import JAX."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from valkyrie.hardware.platforms import get_platform
from valkyrie.parallel.placement import SLICE_AXIS, arrange, placement_problems
from valkyrie.problems import Problem, ProblemCode
from valkyrie.units import count_text

if TYPE_CHECKING:
    import jax
    import numpy as np

AXIS_NAMES = ("w", "x", "y", "z")
"""Mesh axes by position; a mesh of three axes has no `w`."""

_PATTERN = re.compile(r"(?:([0-9]+)s)?([0-9]+(?:x[0-9]+)*)")


@dataclass
class MeshConfig:
    """A device mesh.

    Args:
        shape: Three (x, y, z) or four (w, x, y, z) sizes.
        slices: Number of slices. More than one adds a leading axis `s`.
        placement: Mesh axes, or factors of them such as `x:2`, from the slowest to the fastest varying over the devices
            in physical order (slice, torus coordinates, core, id). null: chosen by `jax.experimental.mesh_utils`.
        names: Roles from the launch environment (`TPU_AXIS_NAMES`), one per axis of `shape`.
    """

    name: str = "1x1x1"
    shape: list[int] = field(default_factory=lambda: [1, 1, 1])
    slices: int = 1
    placement: list[str] | None = None
    names: list[str] | None = None

    @property
    def axes(self) -> dict[str, int]:
        """Mesh axes and sizes, slowest first."""
        named: dict[str, int] = dict(zip(AXIS_NAMES[-len(self.shape) :], self.shape, strict=True))
        return {SLICE_AXIS: self.slices, **named} if self.slices > 1 else named

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(self.shape) * self.slices

    def problems(self) -> list[Problem]:
        """Return the problems of the settings: illegal sizes, placement or number of names."""
        if len(self.shape) not in (3, 4) or any(n < 1 for n in self.shape) or self.slices < 1:
            return [Problem(ProblemCode.mesh_shape, "mesh.shape", self.shape, details={"slices": self.slices})]
        problems = [] if self.placement is None else placement_problems(self.placement, self.axes, self.name)
        if self.names is not None and len(self.names) != len(self.shape):
            axes = ", ".join(AXIS_NAMES[-len(self.shape) :])
            details = {"count": len(self.shape), "mesh": self.name, "own": axes}
            problems.append(Problem(ProblemCode.mesh_names, "mesh.names", ",".join(self.names), details=details))
        return problems


def resize_axis(mesh: MeshConfig, axis: str, size: int) -> MeshConfig:
    """Return a copy of a mesh with another size of one axis, and no placement. The name stays the same."""
    if axis == SLICE_AXIS:
        return replace(mesh, slices=size, placement=None)
    position = AXIS_NAMES[-len(mesh.shape) :].index(axis)
    shape = [size if i == position else n for i, n in enumerate(mesh.shape)]
    return replace(mesh, shape=shape, placement=None)


def parse_mesh(name: str) -> MeshConfig:
    """Parse a name like `4x4x2`, `2x4x4x1` or `2s4x4x2`. Other names raise ValueError, which suggests a correct one."""
    match = _PATTERN.fullmatch(name)
    if match is None:
        raise ValueError(f"mesh={name} is not a mesh. Join the sizes by x, such as mesh=4x4x2 or mesh=2s4x4x2.")
    slices = int(match[1]) if match[1] else 1
    shape = [int(n) for n in match[2].split("x")]
    prefix = f"{slices}s" if match[1] else ""
    if 0 in shape or slices == 0:
        raise ValueError(f"mesh={name} has an axis of size 0. Use sizes of at least 1, such as mesh=1x1x1.")
    if len(shape) < 3:
        padded = "x".join(str(n) for n in shape + [1] * (3 - len(shape)))
        raise ValueError(
            f"mesh={name} has {len(shape)} ax{'i' if len(shape) == 1 else 'e'}s, but a mesh has three (x, y, z) "
            f"or four (w, x, y, z). Use mesh={prefix}{padded}."
        )
    if len(shape) > 4:
        joined = prefix + "x".join(str(n) for n in [*shape[:3], math.prod(shape[3:])])
        raise ValueError(
            f"mesh={name} has {len(shape)} axes, but a mesh has at most four (w, x, y, z). Use mesh={joined}."
        )
    return MeshConfig(name=name, shape=shape, slices=slices)


def divisions(n: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to write n as an ordered product of `parts` factors, in lexicographic order."""
    if parts < 2:
        if parts == 1 or n == 1:
            yield (n,) * parts
        return
    for factor in (d for d in range(1, n + 1) if n % d == 0):
        for tail in divisions(n // factor, parts - 1):
            yield (factor, *tail)


def mesh_from_environment(environment: Mapping[str, str] = os.environ) -> MeshConfig | None:
    """Return the mesh of `TPU_MESH_CONFIG=4,4,2`, or None if this variable is unset.

    Fewer than three sizes are padded with 1. The roles in `TPU_AXIS_NAMES=data,model,fsdp` become `names`. Raises
    ValueError if the sizes are not a valid mesh, or if there are more or fewer names than sizes.
    """
    sizes_text = environment.get("TPU_MESH_CONFIG")
    if not sizes_text:
        return None
    try:
        shape = [int(n) for n in sizes_text.split(",")]
    except ValueError:
        raise ValueError(f"TPU_MESH_CONFIG={sizes_text}: separate the sizes by commas, such as 4,4,2.") from None
    axis_names = environment.get("TPU_AXIS_NAMES")
    names = [n.strip() for n in axis_names.split(",")] if axis_names else None
    if names is not None and len(names) != len(shape):
        raise ValueError(
            f"TPU_MESH_CONFIG={sizes_text} has {count_text(len(shape), 'size')}, but TPU_AXIS_NAMES={axis_names} has "
            f"{count_text(len(names), 'name')}. Give one name per size."
        )
    padding = 3 - len(shape)
    try:
        mesh = parse_mesh("x".join(str(n) for n in shape + [1] * padding))
    except ValueError as error:
        raise ValueError(f"TPU_MESH_CONFIG={sizes_text}: {error}") from None
    mesh.names = None if names is None else names + [f"unused{i}" for i in range(padding)]
    return mesh


def build_mesh(config: MeshConfig, devices: Sequence[Any]) -> jax.sharding.Mesh:
    """Return the JAX mesh over the first `config.size` devices.

    If `config.placement` is set, it maps the axes to the devices in physical order. Otherwise,
    `mesh_utils.create_device_mesh` places the axes on the torus, or `create_hybrid_device_mesh` if the devices are in
    several slices. Both may split a torus axis among several mesh axes.

    Raises ValueError if there are too few devices. Without a placement, also raises ValueError if the devices are in
    several slices and `config.slices` is another number. On platforms without a torus, `slices=1` is always accepted.
    """
    axes = config.axes
    mesh_devices = list(devices)[: config.size]
    if len(mesh_devices) < config.size:
        raise ValueError(f"mesh={config.name} needs {config.size} devices, but there are {len(mesh_devices)}.")
    slice_count = len({getattr(d, "slice_index", 0) or 0 for d in mesh_devices})
    if config.placement is not None:
        return place_mesh(axes, mesh_devices, config.placement)
    if slice_count > 1 and (config.slices > 1 or get_platform(mesh_devices[0].platform).has_torus):
        if config.slices != slice_count:
            raise ValueError(
                f"mesh={config.name} is for {count_text(config.slices, 'slice')}, but its {config.size} devices are in "
                f"{slice_count} slices. Write the number of slices first, such as "
                f"mesh={slice_count}s{config.size // slice_count}x1x1, or set mesh.placement."
            )
        return place_mesh(axes, mesh_devices, slices=config.slices)
    return place_mesh(axes, mesh_devices)


def place_mesh(
    axes: Mapping[str, int], devices: Sequence[Any], placement: Sequence[str] | None = None, slices: int = 1
) -> jax.sharding.Mesh:
    """Return the JAX mesh of these axes over all devices, placed by `place_devices`."""
    import jax

    grid = place_devices(axes, devices, placement, slices)
    return jax.sharding.Mesh(grid, tuple(axes), axis_types=(jax.sharding.AxisType.Auto,) * len(axes))


def place_devices(
    axes: Mapping[str, int], devices: Sequence[Any], placement: Sequence[str] | None = None, slices: int = 1
) -> np.ndarray:
    """Return the devices as an array with one dimension per axis, placed as described at `build_mesh`.

    `slices`: Number of slices that the first axis spans, a divisor of its size.
    """
    import numpy as np
    from jax.experimental import mesh_utils

    sizes = list(axes.values())
    if placement is not None:
        return arrange(np.asarray(sorted(devices, key=_physical_order)), placement, axes)
    if slices > 1:
        inner = [sizes[0] // slices, *sizes[1:]]
        outer = [slices] + [1] * (len(sizes) - 1)
        return mesh_utils.create_hybrid_device_mesh(inner, outer, devices=devices, allow_split_physical_axes=True)
    return mesh_utils.create_device_mesh(sizes, devices=devices, allow_split_physical_axes=True)


def abstract_mesh(config: MeshConfig) -> jax.sharding.AbstractMesh:
    """Return the mesh without devices, for specs, shardings and lowering.

    As in `place_mesh`, the compiler propagates shardings (`AxisType.Auto`). JAX's defaults for `Mesh` and
    `AbstractMesh` differ.
    """
    import jax

    axes = config.axes
    automatic = (jax.sharding.AxisType.Auto,) * len(axes)
    return jax.sharding.AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=automatic)


def _physical_order(device: Any) -> tuple[Any, ...]:
    coords = tuple(getattr(device, "coords", None) or ())
    return (getattr(device, "slice_index", 0) or 0, coords, getattr(device, "core_on_chip", 0) or 0, device.id)
