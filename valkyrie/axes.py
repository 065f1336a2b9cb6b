"""Logical axes: the named dimensions of a model's arrays, and how single-device model code asks for a placement.

A block declares its axes, and its parameters with them (`Parameter`). A model never names a mesh axis: it names the
logical axes of an array and calls the `Shard` it was given. `UNSHARDED` does nothing: every model runs without a mesh.
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
"""What splits one dimension: a logical axis, several of them in turn, or nothing."""

Axes = tuple[str | None, ...]
"""One entry per array dimension: a logical axis, or None for a dimension that is never split."""

Repeated = Callable[[Any, Any, Any, "Shard"], Any]
"""What a stack repeats: (stream, one of its layers, what stands beside the stream's rows, a Shard) -> the stream."""


class End(NamedTuple):
    """What becomes of a stream after the last layer: `f(parameters, stream, rows, shard)` -> (sums, values by row).

    The first of the sums is the objective. `rows` is a tree of arrays whose first dimension is the batch.
    """

    f: Callable[[Any, Any, Any, Shard], tuple[Any, Any]]
    parameters: Any
    rows: Any


Placed = tuple[Axis, ...]
"""The same where one dimension may be split over several logical axes."""


UNATTRIBUTED = "unattributed"
"""What stands in the place of mesh axes for bytes that go between devices whose groups no axes make."""


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
    """What a layout splits of a model.

    `axes`: every logical axis, with what it counts; `follows`: axes that are split like another one as far as their
    length divides. `parameters` and `activations` (those whose placement is asked for): every different tensor with
    the names that messages use for it. `stacked`: how often each stack of equal layers repeats, first to last.
    """

    axes: dict[str, str]
    parameters: dict[Tensor, list[str]]
    activations: dict[Tensor, list[str]]
    follows: dict[str, str] = field(default_factory=dict)
    stacked: tuple[int, ...] = ()


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

    def looked_up(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Return a parameter as it lies while rows of it are looked up."""
        ...

    def stored(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Return a parameter, or its gradient, as it rests between steps."""
        ...

    def gradient(
        self,
        f: Callable[..., jax.Array],
        operands: Sequence[jax.Array],
        *axes: str | None,
        reduction: str,
        whole: bool = False,
    ) -> jax.Array:
        """Return the gradient of a parameter with these logical axes, summed over devices and laid as it rests.

        `f` makes it of operands whose first two dimensions are batch and seq. What devices send of their sums is in the
        dtype `reduction`. `whole`: no compiler is to move operands to where their part of the gradient rests.
        """
        ...

    def mesh_axes(self, axis: str) -> tuple[str, ...]:
        """Return the mesh axes, of size above 1, over which the partition splits a logical axis of activations."""
        ...

    def size(self, axis: str) -> int:
        """Return into how many shards a logical axis of activations is split."""
        ...

    def repeat(self, f: Repeated, layers: Any, x: Any, rows: Any, end: End | None = None) -> Any:
        """Return the stream after `f` for each of `layers`, stacked on their leading axis, or what `end` makes of it.

        `x` and `rows` are trees of arrays whose first dimension is the batch; so is the stream. Where the partition
        splits `layers`, the devices along that axis are stages that each hold some of them, and parts of the batch
        pass from one to the next. Of what `end` makes, only the objective may be differentiated.
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

    def looked_up(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Return `x` itself."""
        return x

    def stored(self, x: jax.Array, *axes: str | None) -> jax.Array:
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

    def mesh_axes(self, axis: str) -> tuple[str, ...]:
        """Return no axes: nothing is split."""
        return ()

    def size(self, axis: str) -> int:
        """Return 1: nothing is split."""
        return 1

    def repeat(self, f: Repeated, layers: Any, x: Any, rows: Any, end: End | None = None) -> Any:
        """Return the stream after `f` for each of `layers` in turn, by one scan, or what `end` makes of it."""
        return ended(end, in_turn(f, layers, x, rows, self), self)

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


def in_turn(f: Repeated, layers: Any, x: Any, rows: Any, shard: Shard) -> Any:
    """Return the stream after `f` for each of `layers`, stacked on their leading axis, by one scan."""
    import jax

    def body(x: Any, layer: Any) -> tuple[Any, None]:
        return f(x, layer, rows, shard), None

    return jax.lax.scan(body, x, layers)[0]


def ended(end: End | None, x: Any, shard: Shard) -> Any:
    """Return what an end makes of the stream; the stream itself without one."""
    return x if end is None else end.f(end.parameters, x, end.rows, shard)
