"""Builds JAX meshes of slices for compiling without their devices, and computes the positions of these devices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from numbers import Integral
from typing import TYPE_CHECKING

from valkyrie.hardware.platforms import get_platform, replayed_devices
from valkyrie.hardware.position import Position
from valkyrie.hardware.target import TargetConfig, build_topology
from valkyrie.parallel.mesh import place_devices, place_mesh
from valkyrie.parallel.placement import placement_problems
from valkyrie.precision import DType
from valkyrie.problems import raise_problems, require_type
from valkyrie.runs.columns import html_facts
from valkyrie.units import count_text

if TYPE_CHECKING:
    import jax


class Slice(TargetConfig):
    """A slice of TPUs, or a number of GPUs, that builds JAX meshes of its devices, to compile programs without them."""

    def __repr__(self) -> str:
        return f"<Slice {self.describe()}>"

    def _repr_html_(self) -> str:
        chip = self.chip
        facts: dict[str, object] = {"slice": self.describe()}
        if chip is not None:
            peak = chip.peak_flops(DType.bfloat16)
            facts |= {
                "memory": f"{chip.hbm_gib:g} GiB per device" if chip.hbm_gib else None,
                "peak": f"{peak / 1e12:,.0f} bfloat16 TFLOP/s per chip" if peak else None,
                "price": None if chip.usd_per_hour is None else f"${chip.usd_per_hour:g} per chip and hour",
            }
        return html_facts(facts)

    @classmethod
    def from_target(cls, target: TargetConfig) -> Slice:
        """Return a `Slice` with the fields of a target."""
        return cls(**{field.name: getattr(target, field.name) for field in fields(target)})

    def mesh(
        self, shape: Sequence[int], names: Sequence[str], *, placement: Sequence[str] | None = None
    ) -> jax.sharding.Mesh:
        """Return a JAX mesh of this slice's devices, placed on its torus as in training.

        Programs can be compiled for these devices, but not run, because the compiler only describes them. If there are
        several slices and no `placement`, the first axis spans them. Raises ValueError if the mesh or `placement` does
        not fit this slice, if its platform has no compiler or it is missing, and TypeError for an argument of a wrong
        type.

        Args:
            shape: Sizes of the axes.
            names: Names of the axes.
            placement: Axes, or factors of them (`["x:2", "y", "x:2"]`), from the slowest to the fastest over the
                torus. None lets `jax.experimental.mesh_utils` choose.
        """
        for value in (shape, names):
            require_type(
                value, list | tuple, 'mesh takes lists of sizes and names, such as mesh((4, 2), ("data", "model"))'
            )
        axes = self.axes(shape, names, placement)
        platform = get_platform(self.platform)
        platform.refuse_wrong_flags()
        devices = platform.devices_to_compile_for(self, math.prod(shape))
        return place_mesh(axes, devices, placement, self.slices)

    def positions(self, shape: Sequence[int], names: Sequence[str]) -> tuple[Position, ...]:
        """Return the positions of a mesh's devices, flattened in row-major order. Needs no compiler.

        Raises ValueError if the mesh does not fit this slice.
        """
        grid = place_devices(self.axes(shape, names, None), list_device_stubs(self), slices=self.slices)
        return tuple(Position(d.slice_index, tuple(d.coords), d.core_on_chip) for d in grid.flat)

    def axes(self, shape: Sequence[int], names: Sequence[str], placement: Sequence[str] | None) -> dict[str, int]:
        """Return the sizes of a mesh's axes by name.

        Raises ValueError if the mesh or `placement` does not fit this slice, or if its platform has no compiler. Raises
        TypeError if a size is not an integer or a name is not a string.
        """
        mesh_text = f"a mesh of {' x '.join(str(n) for n in shape)}"
        for size in shape:
            require_type(size, Integral, f"{mesh_text}: sizes are whole numbers")
        for axis in names:
            require_type(axis, str, f"{mesh_text}: names of axes are strings")
        if not get_platform(self.platform).compiles_without_devices or self.devices is None:
            kinds = " or ".join(replayed_devices())
            raise ValueError(f"{self.describe()} has no compiler that works without its devices. Use {kinds}.")
        if not shape:
            raise ValueError('a mesh needs at least one axis, such as mesh((4, 2), ("data", "model")).')
        if len(shape) != len(names) or len(set(names)) != len(names):
            needed = "1 axis name" if len(shape) == 1 else f"{len(shape)} different axis names"
            raise ValueError(f"{mesh_text} needs {needed}, not ({', '.join(names)}).")
        if any(n < 1 for n in shape):
            raise ValueError(f"{mesh_text} has a size below 1. Use sizes of at least 1.")
        if math.prod(shape) != self.devices:
            resized = self.resized(math.prod(shape)) if self.slices == 1 else None
            alternative = "" if resized is None else f", or {resized.name}"
            raise ValueError(
                f"{mesh_text} has {count_text(math.prod(shape), 'device')}, but {self.describe()} has {self.devices}. "
                f"Use a mesh of {count_text(self.devices, 'device')}{alternative}."
            )
        axes = dict(zip(names, map(int, shape), strict=True))
        if placement is not None:
            raise_problems(placement_problems(placement, axes, "x".join(map(str, shape))))
        if placement is None and shape[0] % self.slices:
            raise ValueError(
                f"{mesh_text}: the first axis spans the slices, but {names[0]}={shape[0]} is not divisible by "
                f"{self.slices} slices."
            )
        return axes


@dataclass(frozen=True)
class DeviceStub:
    """Stand-in for a JAX device, with the attributes that `jax.experimental.mesh_utils` reads."""

    id: int
    device_kind: str
    coords: tuple[int, ...]
    core_on_chip: int
    slice_index: int
    process_index: int = 0
    platform: str = "tpu"


def list_device_stubs(target: TargetConfig) -> list[DeviceStub]:
    """Return stubs of the devices of one or more slices, computed from the topology.

    Ids and order are the same as in the compilers, which list the devices host by host.
    """
    topology, chip = build_topology(target), target.chip
    assert chip is not None
    kind = chip.device_kinds[0] if chip.device_kinds else chip.name
    shape = (*topology.shape, *(1,) * (3 - len(topology.shape)))
    positions = (
        (slice_, (a, b, c), core)
        for slice_ in range(topology.slices)
        for c in range(shape[2])
        for b in range(shape[1])
        for a in range(shape[0])
        for core in range(topology.devices_per_chip)
    )
    devices = [DeviceStub(i, kind, coords, core, slice_) for i, (slice_, coords, core) in enumerate(positions)]
    if chip.ici_axes is None:  # the coordinates of a GPU are its domain, its host there, and its number in the host
        per_host, domain_hosts = topology.host_bounds[0], topology.domain_hosts
        hosts = ((i, *divmod(i // per_host, domain_hosts)) for i in range(topology.devices))
        return [
            DeviceStub(i, kind, (domain, host, i % per_host), 0, 0, i // per_host, target.platform)
            for i, domain, host in hosts
        ]
    bounds = (*topology.host_bounds, *(1,) * (3 - len(topology.host_bounds)))

    def host_key(device: DeviceStub) -> tuple[int, ...]:
        return device.slice_index, *(n // bound for n, bound in zip(device.coords[::-1], bounds[::-1], strict=True))

    return sorted(devices, key=lambda device: (host_key(device), device.id))
