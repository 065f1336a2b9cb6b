"""The meshes that a pattern such as `AxBxC` stands for, and which of them shard alike under a partition. No JAX."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum

from valkyrie.hardware.platforms import platform_of
from valkyrie.hardware.target import TargetConfig
from valkyrie.parallel.layout import Layout, fused
from valkyrie.parallel.mesh import MeshConfig
from valkyrie.parallel.partition import Role, RoleKind
from valkyrie.parallel.placement import SLICE_AXIS, arrange

_PATTERN = re.compile(r"(?:([0-9]+)s)?((?:[A-Z]|[0-9]+)(?:x(?:[A-Z]|[0-9]+)){2,3})")


class Same(Enum):
    """Which meshes count once under a partition.

    `none`: each is a cell. `sharding`: those that put every part of every array on the same device, so that the same
    step is compiled. `roles`: those that give every role as many devices, wherever these stand.
    """

    none = "none"
    sharding = "sharding"
    roles = "roles"


def is_pattern(name: str) -> bool:
    """Return whether a mesh leaves sizes free, as `AxBxC` and `2sAx4xB` do."""
    match = _PATTERN.fullmatch(name)
    return match is not None and any(letter.isupper() for letter in match[2])


def meshes_of(pattern: str, devices: int) -> list[str]:
    """Return the meshes of as many devices that a pattern stands for, ascending; one letter is one size.

    ValueError where there is none, as `Ax3xB` has for 8 devices.
    """
    match = _PATTERN.fullmatch(pattern)
    assert match is not None, pattern
    slices, sizes = int(match[1] or 1), match[2].split("x")
    prefix = f"{match[1]}s" if match[1] else ""
    shapes = [] if slices < 1 or devices % slices else [*_filled(sizes, devices // slices, {})]
    if not shapes:
        raise ValueError(
            f"meshes={pattern} stands for no mesh of {devices} devices. Write sizes that divide {devices} and letters "
            "for those to be found, such as AxBxC."
        )
    return [prefix + "x".join(str(n) for n in shape) for shape in shapes]


def _filled(sizes: list[str], devices: int, known: Mapping[str, int]) -> Iterator[list[int]]:
    if not sizes:
        if devices == 1:
            yield []
        return
    first, *rest = sizes
    tried = [int(first)] if first.isdigit() else [known[first]] if first in known else range(1, devices + 1)
    for size in tried:
        if size > 0 and devices % size == 0:
            for others in _filled(rest, devices // size, {**known, first: size}):
                yield [size, *others]


def unfit(layout: Layout) -> str | None:
    """Return why a mesh is none for a partition, whatever the model: an axis too many, or one too few."""
    mesh, partition = layout.mesh, layout.partition
    idle = [axis for axis, role in layout.roles.items() if role.kind is RoleKind.idle]
    if idle:
        return f"leaves {', '.join(f'{axis}={mesh.axes[axis]}' for axis in idle)} idle"
    rules = [*partition.parameters.values(), *partition.activations.values()]
    wanted = [entry for mesh_axes in rules for entry in mesh_axes]
    wanted += [entry for name in wanted for entry in partition.roles.get(name, [])]
    needed = {e for e in wanted if not e.endswith("?") and e not in partition.roles} - set(mesh.axes)
    return f"has no axis {', '.join(sorted(needed))}" if needed else None


def degrees(layout: Layout) -> frozenset[tuple[tuple[bool, Role], int]]:
    """Return how many devices each role has; roles between slices count apart from those within."""
    sizes: dict[tuple[bool, Role], int] = {}
    for axis, role in layout.roles.items():
        if layout.mesh.axes[axis] > 1:
            key = (axis == SLICE_AXIS, role)
            sizes[key] = sizes.get(key, 1) * layout.mesh.axes[axis]
    return frozenset(sizes.items())


def sharding(layout: Layout, torus: bool) -> tuple[object, ...]:
    """Return what two layouts of a partition share exactly when every part of every array lies on the same device.

    The order of mesh axes says nothing by itself: axes are taken in the order in which the rules name them, and the
    devices with them. Axes of one device are passed over; neighbours that stand side by side in every rule they are in
    split an array as one axis of their product does. With equal products, rules and devices, the layouts are equal.
    Where devices stand is known of a placement that is written down, and without one where there is no torus. On a
    torus JAX places axes by their sizes, so such a mesh is the same as itself alone; so is one under ZeRO-1, which
    takes data axes one by one.
    """
    mesh = layout.mesh
    known = not mesh.problems() and not layout.partition.zero1 and not (torus and mesh.placement is None)
    if not known:
        return ("itself", *mesh.axes.items(), *(mesh.placement or ()))
    rules = [
        tuple(axis for axis in mesh_axes if mesh.axes[axis] > 1)
        for rules_by_axis in (layout.parameters, layout.activations)
        for mesh_axes in rules_by_axis.values()
    ]
    axes = list(dict.fromkeys([*(axis for rule in rules for axis in rule), *mesh.axes]))
    return ("sharding", _devices(mesh, axes), *fused([a for a in axes if mesh.axes[a] > 1], mesh.axes, rules))


def may_be_a_torus(target: TargetConfig, accelerated: bool) -> bool:
    """Return whether devices of a target may lie on a torus; `accelerated` says that `target=auto` is no CPU."""
    platform = platform_of(target.platform)
    return platform.has_torus or (accelerated and platform.jax_name is None)


def _devices(mesh: MeshConfig, axes: Sequence[str]) -> bytes:
    """Return the devices of a placed mesh, its axes in this order; nothing for the devices' own order."""
    import numpy as np

    own = np.arange(mesh.size)
    placed = own.reshape([*mesh.axes.values()]) if mesh.placement is None else arrange(own, mesh.placement, mesh.axes)
    order = placed.transpose([[*mesh.axes].index(axis) for axis in axes]).ravel()
    return b"" if (order == own).all() else order.tobytes()
