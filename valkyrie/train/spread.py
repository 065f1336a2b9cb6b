"""Shardings of Muon's stacks of matrices: like their parameters, or split by whole matrices."""

from __future__ import annotations

import jax

from valkyrie.axes import LAYERS, Parameter
from valkyrie.optim.muon import Spread
from valkyrie.parallel.sharding import MeshShard

Split = tuple[tuple[str, ...], ...]
"""Mesh axes that split each dimension."""


def matrix_spread(shard: MeshShard) -> Spread:
    """Return the shardings of a layout's stacks; whole matrices are split over all mesh axes."""
    sizes = shard.layout.mesh.axes
    mesh_axes = tuple(axis for axis in sizes if sizes[axis] > 1)

    def rows_columns(spec: Parameter) -> Split:
        first, *others = (axis for axis in spec.axes if axis != LAYERS)
        rows, *columns = shard.layout.stored_axes((first, *others))
        return rows, tuple(axis for entry in columns for axis in entry)

    def constrain(stack: jax.Array, split: Split) -> jax.Array:
        return jax.lax.with_sharding_constraint(stack, shard.sharding(split))

    return Spread(
        devices=shard.layout.parts(mesh_axes),
        sharding_key=rows_columns,
        as_stored=lambda stack, spec: constrain(stack, ((), *rows_columns(spec))),
        by_matrix=lambda stack: constrain(stack, (mesh_axes, (), ())),
    )
