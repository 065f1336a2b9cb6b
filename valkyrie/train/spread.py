"""Shardings of the stacks of matrices that Muon updates: like the parameters, or with whole matrices on each device."""

from __future__ import annotations

import jax

from valkyrie.axes import Parameter
from valkyrie.optim.muon import StackSharding
from valkyrie.parallel.sharding import MeshShard

AxisSplit = tuple[tuple[str, ...], ...]
"""Mesh axes that split each dimension of an array."""


def matrix_stack_sharding(shard: MeshShard) -> StackSharding:
    """Return the functions that shard Muon's stacks of matrices (parts, matrices, rows, columns) under a layout.

    The mesh axes that split experts split the parts. `shard_as_stored` splits rows and columns like the parameter.
    `shard_by_matrix` splits the matrices, over all other mesh axes.
    """
    sizes = shard.layout.mesh.axes
    mesh_axes = tuple(axis for axis in sizes if sizes[axis] > 1)

    def row_column_axes(spec: Parameter) -> AxisSplit:
        rows, *columns = shard.layout.stored_axes(spec.axes)[spec.stack_dims :]
        return rows, tuple(axis for entry in columns for axis in entry)

    def expert_axes(spec: Parameter) -> tuple[str, ...]:
        if spec.matrices_per_token is None:
            return ()
        return tuple(axis for axis in shard.layout.stored_axes(spec.axes)[spec.stack_dims - 1] if axis in mesh_axes)

    def shard_by_matrix(stack: jax.Array, spec: Parameter) -> jax.Array:
        parts = expert_axes(spec)
        return constrain(stack, (parts, tuple(axis for axis in mesh_axes if axis not in parts), (), ()))

    def constrain(stack: jax.Array, split: AxisSplit) -> jax.Array:
        return jax.lax.with_sharding_constraint(stack, shard.sharding(split))

    return StackSharding(
        device_count=shard.layout.axes_size(mesh_axes),
        sharding_key=row_column_axes,
        part_count=lambda spec: shard.layout.axes_size(expert_axes(spec)),
        shard_as_stored=lambda stack, spec: constrain(stack, (expert_axes(spec), (), *row_column_axes(spec))),
        shard_by_matrix=shard_by_matrix,
    )
