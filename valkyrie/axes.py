"""Decides the vocabulary of logical axes and how single-device model code asks for a placement.

A model never names a mesh axis. It names the logical axes of an array and calls the `Shard` it was given;
`UNSHARDED` does nothing, so every model runs without a mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import jax

LOGICAL_AXES: dict[str, str] = {
    "batch": "sequences of the global batch",
    "seq": "positions in a sequence",
    "embed": "the residual stream",
    "mlp": "the hidden side of a feed-forward or gating product",
    "heads": "query heads",
    "kv_heads": "key and value heads",
    "head_dim": "the width of one head",
    "vocab": "rows of the token embedding, padded to a multiple",
    "state": "complex states of an S5 layer",
    "layers": "repetitions of a block, stacked for a scan",
}
"""Every logical axis a parameter or an activation may carry, with what it counts."""

Axis = str | tuple[str, ...] | None
"""What splits one dimension: a logical axis, several of them in turn, or nothing."""

Axes = tuple[str | None, ...]
"""One entry per array dimension: a logical axis, or None for a dimension that is never split."""

Placed = tuple[Axis, ...]
"""The same where one dimension may be split over several logical axes."""


@runtime_checkable
class Shard(Protocol):
    """How a model asks for a placement; implemented by `valkyrie.parallel` for a mesh, by `Unsharded` without one."""

    @property
    def backend(self) -> str | None:
        """The platform the program will run on (cpu, gpu, tpu); None is where JAX runs now."""
        ...

    def __call__(self, x: jax.Array, *axes: Axis) -> jax.Array:
        """Return `x` constrained to lie as the partition puts these logical axes (one per dimension)."""
        ...

    def computed(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Return a parameter as it lies while it is used: gathered over the mesh axes that split data."""
        ...

    def stored(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Return a parameter, or its gradient, as it rests between steps."""
        ...

    def mesh_axes(self, axis: str) -> tuple[str, ...]:
        """Return the mesh axes, of size above 1, over which the partition splits a logical axis of activations."""
        ...

    def size(self, axis: str) -> int:
        """Return into how many shards a logical axis of activations is split."""
        ...

    def map(
        self,
        f: Callable[..., Any],
        in_axes: Sequence[Placed | None],
        out_axes: Any,
        *,
        checked: bool | None = None,
    ) -> Callable[..., Any]:
        """Return `f` run once per device on its local shards (`jax.shard_map`).

        `in_axes` gives the logical axes of each argument (None: replicated), `out_axes` those of the result
        (a tuple of axes for one array, a list of such tuples for several). `checked`: whether JAX follows along which
        mesh axes values vary, without which gradients are summed over those along which they do not
        (None: wherever every kernel can be followed).
        """
        ...


class Unsharded:
    """The `Shard` of a single device: every request is granted by doing nothing."""

    backend: str | None = None

    def __call__(self, x: jax.Array, *axes: Axis) -> jax.Array:
        """Return `x` itself."""
        return x

    def computed(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Return `x` itself."""
        return x

    def stored(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Return `x` itself."""
        return x

    def mesh_axes(self, axis: str) -> tuple[str, ...]:
        """Return no axes: nothing is split."""
        return ()

    def size(self, axis: str) -> int:
        """Return 1: nothing is split."""
        return 1

    def map(
        self,
        f: Callable[..., Any],
        in_axes: Sequence[Placed | None],
        out_axes: Any,
        *,
        checked: bool | None = None,
    ) -> Callable[..., Any]:
        """Return `f` itself."""
        return f


UNSHARDED = Unsharded()
