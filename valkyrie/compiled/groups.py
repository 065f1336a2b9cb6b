"""Parses the groups of devices of a collective, in each of the compiler's notations."""

from __future__ import annotations

from typing import Any

import numpy as np

from valkyrie.compiled.hlo import Instruction

Groups = np.ndarray
"""Integer array [groups, members] of positions in the mesh's flattened device list."""


def replica_groups(instruction: Instruction, num_partitions: int) -> list[Groups]:
    """Return the groups of devices that a collective communicates in, as one (groups, size) array per group size.

    Assumes a program with one replica, so a collective between replicas (without a channel) has no groups. A collective
    that lists no groups is over all devices.
    """
    message = instruction.message
    if message.channel_id <= 0 and not message.use_global_device_ids and num_partitions > 1:
        return []
    if message.HasField("mesh_groups"):
        return [_mesh_groups(message.mesh_groups)]
    for iota in (message.iota_groups, message.device_list.iota):
        if iota.size:
            return [_iota_ids(iota).reshape(iota.groups, iota.size)]
    listed_groups = [tuple(g.replica_ids) for g in (*message.replica_groups, *message.device_list.replica_groups)]
    if not any(listed_groups):
        return [np.arange(num_partitions)[None]]
    group_sizes = sorted({len(group) for group in listed_groups})
    return [np.array([group for group in listed_groups if len(group) == size]) for size in group_sizes]


def permute_pairs(instruction: Instruction) -> np.ndarray:
    """Return the (source, target) pairs of a collective-permute as integers [pairs, 2].

    Omits pairs of a device with itself.
    """
    pairs = [(p.source, p.target) for p in instruction.message.source_target_pairs]
    return np.array([pair for pair in pairs if pair[0] != pair[1]], dtype=int).reshape(-1, 2)


def _iota_ids(iota: Any) -> np.ndarray:
    """Return the device ids 0, 1, ... of an array of `iota.dimensions` after its transposition."""
    dims = tuple(iota.dimensions)
    return np.arange(int(np.prod(dims))).reshape(dims).transpose(tuple(iota.transpose))


def _mesh_groups(message: Any) -> Groups:
    """Return groups over axes of a mesh or parts of axes, such as `mesh['x'=4,'y'=8] {'y'}`.

    `message` is a protobuf message of a class created at run time (`valkyrie.compiled.schema`).
    """
    mesh, references = message.mesh, message.axes
    axis_sizes = [axis.size for axis in mesh.axes]
    ids = np.array(mesh.device_ids) if mesh.device_ids else np.arange(int(np.prod(axis_sizes)))
    if mesh.HasField("iota"):
        ids = _iota_ids(mesh.iota)
    cuts_by_axis: list[set[int]] = [{1, size} for size in axis_sizes]
    spans = []
    for reference in references:
        size = axis_sizes[reference.axis]
        sub_axis = reference.sub_axis
        start, length = (sub_axis.pre_size, sub_axis.size) if reference.HasField("sub_axis") else (1, size)
        cuts_by_axis[reference.axis] |= {start, start * length}
        spans.append((reference.axis, start, start * length))
    shape, dim_by_axis_cut = [], {}
    for axis, axis_cuts in enumerate(cuts_by_axis):
        sorted_cuts = sorted(axis_cuts)
        for start, end in zip(sorted_cuts, sorted_cuts[1:], strict=False):
            dim_by_axis_cut[axis, start] = len(shape)
            shape.append(end // start)
        dim_by_axis_cut[axis, sorted_cuts[-1]] = len(shape)
    group_dims = [
        d for axis, start, end in spans for d in range(dim_by_axis_cut[axis, start], dim_by_axis_cut[axis, end])
    ]
    other_dims = [d for d in range(len(shape)) if d not in group_dims]
    members = int(np.prod([shape[d] for d in group_dims]))
    return ids.reshape(shape).transpose(other_dims + group_dims).reshape(-1, members)
