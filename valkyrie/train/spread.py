"""Sharding of the optimizer's stacks of matrices: like their parameters, or split by whole matrices."""

from __future__ import annotations

import jax

from valkyrie.axes import LAYERS, Parameter
from valkyrie.optim.muon import Spread
from valkyrie.parallel.sharding import MeshShard

Split = tuple[tuple[str, ...], ...]
"""The mesh axes of each dimension."""


def matrix_spread(shard: MeshShard) -> Spread:
    """Return the sharding of a layout's stacks, which are split over all axes of the mesh by whole matrices."""
    sizes = shard.layout.mesh.axes
    mesh_axes = tuple(axis for axis in sizes if sizes[axis] > 1)

    def rows_columns(spec: Parameter) -> Split:
        first, *others = (axis for axis in spec.axes if axis != LAYERS)
        rows, *columns = shard.layout.stored((first, *others))
        return rows, tuple(axis for entry in columns for axis in entry)

    def constrain(stack: jax.Array, split: Split) -> jax.Array:
        return jax.lax.with_sharding_constraint(stack, shard.sharding(split))

    return Spread(
        devices=shard.layout.parts(mesh_axes),
        sharding_key=rows_columns,
        as_stored=lambda stack, spec: constrain(stack, ((), *rows_columns(spec))),
        by_matrix=lambda stack: constrain(stack, (mesh_axes, (), ())),
    )
