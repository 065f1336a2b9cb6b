"""Placements of mesh axes on the torus: notation, device order, and enumeration.

A placement lists factors of mesh axes, from the slowest to the fastest varying over the devices in physical order. That
order is slice, torus axes a, b, c, then the cores of a chip. An entry is an axis (`x`) or a factor of one (`x:2`); the
first listed factor of an axis is the most significant part of its index.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from valkyrie.hardware.position import Position
from valkyrie.hardware.target import Topology
from valkyrie.parallel.axis_links import (
    AxisPlacement,
    Factor,
    close_rings,
    iterate_fillings,
    make_factor,
    physical_axes,
    placement_entries,
)
from valkyrie.problems import Problem, ProblemCode

if TYPE_CHECKING:
    import numpy as np

SLICE_AXIS = "s"
"""The mesh axis between slices, over the data-centre network. It is the first axis."""


def placement_problems(placement: Sequence[str], axes: Mapping[str, int], mesh: str) -> list[Problem]:
    """Check that the factors of a placement multiply to the axes of a mesh.

    Returns one problem that lists all mistakes, or an empty list. `mesh` is the mesh's name, for the message.
    """
    mistakes = []
    factors_by_axis: dict[str, list[int]] = {axis: [] for axis in axes}
    for entry in placement:
        match = re.fullmatch(r"([^:]+)(?::([1-9][0-9]*))?", entry)
        if match is None or match[1] not in axes:
            mistakes.append(f"{entry} is neither an axis (x) nor part of an axis (x:2)")
        else:
            factors_by_axis[match[1]].append(int(match[2] or axes[match[1]]))
    for axis, factors in factors_by_axis.items():
        if not factors and axes[axis] > 1:
            mistakes.append(f"{axis} is missing")
        elif factors and math.prod(factors) != axes[axis]:
            mistakes.append(f"the factors of {axis} multiply to {math.prod(factors)}, not {axes[axis]}")
    if not mistakes:
        return []
    details = {"wrong": "; ".join(mistakes), "mesh": mesh, "sizes": _format_sizes(axes)}
    return [Problem(ProblemCode.placement, "mesh.placement", ",".join(placement), details=details)]


def arrange(values: np.ndarray, placement: Sequence[str], axes: Mapping[str, int]) -> np.ndarray:
    """Arrange values in physical order into an array with one dimension per mesh axis, following a placement."""
    factors = _parse_factors(placement, axes)
    order = [i for axis in axes for i, (name, _) in enumerate(factors) if name == axis]
    grid = values.reshape([factor for _, factor in factors]).transpose(order)
    return grid.reshape(list(axes.values()))


def describe_placement(mesh: Any, topology: Topology) -> dict[str, AxisPlacement]:
    """Return the placement of each axis of a `jax.sharding.Mesh` on the torus.

    Uses the coordinates of the mesh's devices, or their ids if they have no coordinates. Raises ValueError if mesh and
    topology have different numbers of devices.
    """
    indices = _device_indices(mesh.devices, topology)
    return _describe_indices(indices, list(mesh.axis_names), topology)


def describe_entries(placement: Sequence[str], axes: Mapping[str, int], topology: Topology) -> dict[str, AxisPlacement]:
    """Return the placement of each mesh axis on the torus from `mesh.placement`, without devices."""
    import numpy as np

    return _describe_indices(arrange(np.arange(topology.devices), placement, axes), list(axes), topology)


def describe_positions(
    positions: Sequence[Position], axes: Mapping[str, int], topology: Topology
) -> dict[str, AxisPlacement]:
    """Return the placement of each mesh axis on the torus.

    `positions`: Positions of the mesh's devices, in row-major order.
    """
    import numpy as np

    coords = np.array([[p.slice_index, *p.coords[: len(topology.shape)], p.core] for p in positions])
    indices = np.ravel_multi_index(tuple(coords.T), _lengths(topology)).reshape(list(axes.values()))
    return _describe_indices(np.asarray(indices), list(axes), topology)


def find_placement(mesh: Any, topology: Topology) -> list[str] | None:
    """Return the `mesh.placement` that builds the same `jax.sharding.Mesh`, or None if no placement does.

    For example, no placement describes the snakes along which JAX's `mesh_utils` places axes on small v5e, v6e, v5p and
    tpu7x slices. Raises ValueError if mesh and topology have different numbers of devices.
    """
    import numpy as np

    indices, names = _device_indices(mesh.devices, topology), list(mesh.axis_names)
    mesh_coords = np.stack(np.unravel_index(np.argsort(indices, axis=None), indices.shape), axis=-1)
    factor_products = np.ones(len(names), int)
    stride, factors = 1, []
    while stride < len(mesh_coords):
        axis = int(np.argmax(mesh_coords[stride] > 0))
        step = np.eye(len(names), dtype=int)[axis] * factor_products[axis]
        repeats = mesh_coords[::stride] == step * np.arange(len(mesh_coords) // stride)[:, None]
        matches = repeats.all(axis=-1)
        factor = len(matches) if matches.all() else int(np.argmin(matches))
        if factor < 2 or len(mesh_coords) % (stride * factor):
            return None
        factors.append((names[axis], factor))
        factor_products[axis] *= factor
        stride *= factor
    axes = dict(zip(names, indices.shape, strict=True))
    entries = placement_entries(factors[::-1], axes)
    if placement_problems(entries, axes, "") or (arrange(np.arange(len(mesh_coords)), entries, axes) != indices).any():
        return None
    return entries


def list_placements(axes: Mapping[str, int], topology: Topology) -> list[list[str]]:
    """Return all distinct placements of mesh axes on a topology, each as the entries of `mesh.placement`.

    A mesh axis `s` with one position per slice is always placed between the slices. Raises ValueError if mesh and
    topology have different numbers of devices.
    """
    if math.prod(axes.values()) != topology.devices:
        raise ValueError(
            f"a mesh of {_format_sizes(axes)} has {math.prod(axes.values())} devices, but the topology has "
            f"{topology.devices}."
        )
    has_slice_axis = topology.slices > 1 and axes.get(SLICE_AXIS) == topology.slices
    inner_axes = {axis: size for axis, size in axes.items() if size > 1 and not (has_slice_axis and axis == SLICE_AXIS)}
    lengths = [*topology.shape, topology.devices_per_chip]
    if not has_slice_axis:
        lengths.insert(0, topology.slices)
    slice_factor = [(SLICE_AXIS, topology.slices)] if has_slice_axis else []
    names, sizes = list(inner_axes), tuple(inner_axes.values())
    return [
        placement_entries([*slice_factor, *((names[axis], n) for factors in filling for axis, n in factors)], axes)
        for filling in iterate_fillings(tuple(lengths), sizes)
    ]


def _parse_factors(placement: Sequence[str], axes: Mapping[str, int]) -> list[tuple[str, int]]:
    split = [entry.partition(":") for entry in placement]
    return [(axis, int(factor) if factor else axes[axis]) for axis, _, factor in split]


def _lengths(topology: Topology) -> tuple[int, ...]:
    return tuple(length for _, length, _ in physical_axes(topology))


def _device_indices(devices: np.ndarray, topology: Topology) -> np.ndarray:
    """Return the index in physical order of each device, in the shape of `devices`.

    Devices without coordinates are ordered by id. Raises ValueError if the topology has another number of devices.
    """
    import numpy as np

    flat = list(devices.flat)
    if len(flat) != topology.devices:
        raise ValueError(f"the mesh has {len(flat)} devices, but the topology has {topology.devices}.")
    if getattr(flat[0], "coords", None) is None:
        indices = np.argsort(np.argsort([device.id for device in flat]))
    else:
        axes = len(topology.shape)
        positions = [(getattr(d, "slice_index", 0) or 0, *d.coords[:axes], d.core_on_chip) for d in flat]
        coords = np.asarray(positions) - np.min(positions, axis=0)
        indices = np.ravel_multi_index(tuple(coords.T), _lengths(topology))
    return np.asarray(indices).reshape(devices.shape)


def _describe_indices(indices: np.ndarray, names: Sequence[str], topology: Topology) -> dict[str, AxisPlacement]:
    import numpy as np

    axis_specs = physical_axes(topology)
    coordinates = np.unravel_index(indices, _lengths(topology))
    described = {}
    for dimension, axis in enumerate(names):
        size = indices.shape[dimension]
        factors: list[Factor] = []
        is_straight, covered_size = True, 1
        for (physical_axis, length, wrap), coordinate in zip(axis_specs, coordinates, strict=True):
            groups = np.moveaxis(coordinate, dimension, -1).reshape(-1, size)
            values = np.sort(groups - groups.min(axis=1, keepdims=True), axis=1)
            progressions = _progressions(np.unique(values[0])) if (values == values[0]).all() else None
            if progressions is None:
                is_straight, progressions = False, [(len(np.unique(values)), 1)]
            covered_size *= math.prod(count for count, _ in progressions)
            factors += [make_factor(physical_axis, count, stride, length, wrap) for count, stride in progressions]
        described[axis] = AxisPlacement(size, close_rings(factors, topology), is_straight and covered_size == size)
    return described


def _progressions(values: np.ndarray) -> list[tuple[int, int]] | None:
    """Decompose sorted values into nested arithmetic progressions (length, stride), largest stride first.

    Returns None if that is impossible. For example, 0, 1, 4, 5 are `[(2, 4), (2, 1)]`.
    """
    import numpy as np

    progressions: list[tuple[int, int]] = []
    while len(values) > 1:
        stride = int(values[1] - values[0])
        matches = values - values[0] == stride * np.arange(len(values))
        factor = len(values) if matches.all() else int(np.argmin(matches))
        if len(values) % factor:
            return None
        blocks = values.reshape(-1, factor)
        if (blocks - blocks[:, :1] != stride * np.arange(factor)).any():
            return None
        progressions.insert(0, (factor, stride))
        values = blocks[:, 0]
    return progressions


def _format_sizes(axes: Mapping[str, int]) -> str:
    return ", ".join(f"{axis}={size}" for axis, size in axes.items())
