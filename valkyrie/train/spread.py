"""Where the optimizer's stacks of matrices lie on a mesh: as their parameters rest, or split by whole matrices."""

from __future__ import annotations

from collections.abc import Hashable

import jax

from valkyrie.axes import LAYERS, Parameter
from valkyrie.parallel.sharding import MeshShard

Split = tuple[tuple[str, ...], ...]
"""The mesh axes of each dimension."""


class MatrixSpread:
    """The `valkyrie.optim.muon.Spread` of a layout: a stack is split over all axes of the mesh by whole matrices."""

    def __init__(self, shard: MeshShard) -> None:
        self._shard, sizes = shard, shard.layout.mesh.axes
        self._axes = tuple(axis for axis in sizes if sizes[axis] > 1)
        self.devices = shard.layout.parts(self._axes)
        """Over how many devices a stack is split."""

    def lies(self, spec: Parameter) -> Hashable:
        """Return the mesh axes of the rows and of the columns of a parameter's matrices."""
        return self._matrix(spec)

    def at_rest(self, stack: jax.Array, spec: Parameter) -> jax.Array:
        """Return a stack (matrices, rows, columns) that lies as this parameter does between steps."""
        return self._laid(stack, ((), *self._matrix(spec)))

    def spread(self, stack: jax.Array) -> jax.Array:
        """Return a stack of whole matrices, split over all devices."""
        return self._laid(stack, (self._axes, (), ()))

    def _matrix(self, spec: Parameter) -> Split:
        first, *rest = (axis for axis in spec.axes if axis != LAYERS)
        rows, *columns = self._shard.layout.stored((first, *rest))
        return rows, tuple(axis for entry in columns for axis in entry)

    def _laid(self, stack: jax.Array, split: Split) -> jax.Array:
        return jax.lax.with_sharding_constraint(stack, self._shard.sharding(split))
