"""Logical axes: the named dimensions of a model's arrays, and the `Shard` that places arrays by them.

Blocks declare logical axes and parameters (`Parameter`). A model never names a mesh axis: it passes the logical axes of
an array to its `shard` argument. `UNSHARDED` does nothing, so that every model also runs without a mesh.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    import jax

BATCH, SEQ, LAYERS = "batch", "seq", "layers"
SHARED_AXES: dict[str, str] = {
    BATCH: "sequences of the global batch",
    SEQ: "positions in a sequence",
    LAYERS: "repetitions of a block, stacked for a scan",
}
"""The logical axes of every model, with what each counts; the others are declared by blocks and models."""

Axis = str | tuple[str, ...] | None
"""The logical axis or axes that split one dimension, or None."""

Axes = tuple[str | None, ...]
"""One logical axis per array dimension, or None for a dimension that is never split."""

Repeated = Callable[[Any, Any, Any, "Shard"], Any]
"""One step of a stack: (stream, one layer, per-row arrays such as document boundaries, Shard) -> stream."""


class LossHead(NamedTuple):
    """The loss head, applied to the last stream: `f(parameters, stream, rows, shard)` -> (sums, per-row values).

    The first leaf of `sums` is the objective. `rows` is a tree of arrays whose first dimension is the batch.
    """

    f: Callable[[Any, Any, Any, Shard], tuple[Any, Any]]
    parameters: Any
    rows: Any


Placed = tuple[Axis, ...]
"""Like `Axes`, but a dimension may be split over several logical axes."""


UNATTRIBUTED = "unattributed"
"""Label for traffic whose device groups match no mesh axes."""


def axes_text(mesh_axes: Sequence[str]) -> str:
    """Return mesh axes as they are printed: `x,y`."""
    return ",".join(mesh_axes) or UNATTRIBUTED


def read_axes(text: str) -> tuple[str, ...]:
    """Return the mesh axes of such a text in a file; `?` is how versions before 6670094 wrote unknown ones."""
    return () if text in ("", "?", UNATTRIBUTED) else tuple(text.split(","))


class Size(NamedTuple):
    """The length of a logical axis, and the config key that sets it (None: no one key)."""

    length: int
    key: str | None = None


@dataclass(frozen=True)
class Tensor:
    """An array before it exists: per dimension its logical axis, its length, and the config key that sets it.

    Lengths of `batch` and `seq` are 0: they are a run's, not a model's.
    """

    axes: Axes
    shape: tuple[int, ...]
    keys: tuple[str | None, ...]

    @property
    def size(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)


GROUPS: dict[str, str] = {
    "matrix": "weights of products; decayed",
    "embedding": "the token embedding; decayed",
    "unembedding": "the matrix of the logits, where it is one of its own; decayed",
    "value_embedding": "tables of values by token; decayed",
    "vector": "scales of norms; not decayed",
    "residual_scale": "scales of the residual stream, one a layer; not decayed",
    "input_scale": "scales of the first stream, one a layer; not decayed",
    "scalar": "other scales and small gates; not decayed",
    "ssm": "state spaces; not decayed, at a rate of their own",
    "puzzle": "rows of which a batch uses a few; only those change, by their gradient's signs",
    "fixed": "never changed",
}
"""The groups of parameters that an optimizer may tell apart."""


@dataclass(frozen=True)
class Parameter(Tensor):
    """A parameter before it exists.

    `group` is what the optimizer goes by, one of `GROUPS`. `float32`: kept so whatever the precision policy says.
    `output_first`: of a matrix, that its first dimension (after `layers`) is that of what it makes, and the others
    together that of what it reads; else the other way round.
    """

    group: str = "matrix"
    float32: bool = False
    output_first: bool = False


@dataclass(frozen=True)
class Arrays:
    """The arrays of a model that a layout splits.

    Args:
        axes: Every logical axis, with what it counts.
        parameters: Every distinct parameter tensor, with its names in messages.
        activations: The same for activations whose placement the model requests.
        follows: Axes that are split like another one as far as their length divides.
        stacked: Repetitions of each stack of equal layers, first to last.
        dispatched: Axes whose shards receive data from other devices instead of being gathered (`experts`).
    """

    axes: dict[str, str]
    parameters: dict[Tensor, list[str]]
    activations: dict[Tensor, list[str]]
    follows: dict[str, str] = field(default_factory=dict)
    stacked: tuple[int, ...] = ()
    dispatched: frozenset[str] = frozenset()


@runtime_checkable
class Shard(Protocol):
    """Places a model's arrays: on a mesh (`valkyrie.parallel.sharding.MeshShard`), or nowhere (`Unsharded`)."""

    @property
    def backend(self) -> str | None:
        """Platform the program will run on (cpu, gpu or tpu), or None for JAX's default backend."""
        ...

    def __call__(self, x: jax.Array, *axes: Axis) -> jax.Array:
        """Constrain an activation to the partition's placement of these logical axes, one per dimension."""
        ...

    def gather_for_use(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Gather a parameter over the mesh axes that split data, as products use it (`Layout.computed`)."""
        ...

    def gather_table(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Gather a table for a look-up of its rows."""
        ...

    def shard_for_storage(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Shard a parameter, or its gradient, as it is stored between steps."""
        ...

    def gradient(
        self,
        f: Callable[..., jax.Array],
        operands: Sequence[jax.Array],
        *axes: str | None,
        reduction: str,
        whole: bool = False,
    ) -> jax.Array:
        """Return the gradient of a parameter with these logical axes, summed over devices and sharded for storage.

        `f` computes it from operands whose first two dimensions are batch and seq. Devices exchange partial sums in the
        dtype `reduction`. `whole` keeps the compiler from moving operands to the shards of the gradient instead.
        """
        ...

    def mesh_axes_of(self, axis: str) -> tuple[str, ...]:
        """Return the mesh axes larger than 1 that split a logical axis of activations."""
        ...

    def size(self, axis: str) -> int:
        """Return the number of shards of a logical axis of activations."""
        ...

    def repeat(self, f: Repeated, layers: Any, x: Any, rows: Any, head: LossHead | None = None) -> Any:
        """Apply `f` to the stream `x` once per layer, then `head`, if any.

        `layers` is stacked on a leading axis. `x`, `rows` and the stream are trees of arrays whose first dimension is
        the batch. If the partition splits `layers`, the devices along that mesh axis are pipeline stages. Only the
        objective of `head` may be differentiated.
        """
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

        `in_axes` are the logical axes of each argument (None: replicated), `out_axes` those of the result: a tuple for
        one array, a list of tuples for several. `checked` is `check_vma` of `jax.shard_map`; without it gradients of
        replicated arguments are summed over the mesh. None: on wherever every kernel supports it.
        """
        ...


class Unsharded:
    """The `Shard` of a single device: returns arrays unchanged."""

    backend: str | None = None

    def __call__(self, x: jax.Array, *axes: Axis) -> jax.Array:
        """Return `x` itself."""
        return x

    def gather_for_use(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Return `x` itself."""
        return x

    def gather_table(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Return `x` itself."""
        return x

    def shard_for_storage(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Return `x` itself."""
        return x

    def gradient(
        self,
        f: Callable[..., jax.Array],
        operands: Sequence[jax.Array],
        *axes: str | None,
        reduction: str,
        whole: bool = False,
    ) -> jax.Array:
        """Return the value of `f`."""
        return f(*operands)

    def mesh_axes_of(self, axis: str) -> tuple[str, ...]:
        """Return no axes: nothing is split."""
        return ()

    def size(self, axis: str) -> int:
        """Return 1: nothing is split."""
        return 1

    def repeat(self, f: Repeated, layers: Any, x: Any, rows: Any, head: LossHead | None = None) -> Any:
        """Apply `f` once per layer in one scan, then `head`, if any."""
        return apply_head(head, scan_layers(f, layers, x, rows, self), self)

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


def scan_layers(f: Repeated, layers: Any, x: Any, rows: Any, shard: Shard) -> Any:
    """Apply `f` to the stream once per layer, in one scan over the leading axis of `layers`."""
    import jax

    def body(x: Any, layer: Any) -> tuple[Any, None]:
        return f(x, layer, rows, shard), None

    return jax.lax.scan(body, x, layers)[0]


def apply_head(head: LossHead | None, x: Any, shard: Shard) -> Any:
    """Apply the loss head, if any, to the stream."""
    return x if head is None else head.f(head.parameters, x, head.rows, shard)
