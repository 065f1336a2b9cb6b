"""Logical axes: the named dimensions of a model's arrays, and `Shard`, which places arrays by their logical axes.

Blocks declare logical axes and parameters (`Parameter`). Models never name mesh axes; they pass the logical axes of an
array to their `shard` argument. `UNSHARDED` does nothing, so that every model also runs without a mesh.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    import jax

BATCH, SEQ, LAYERS, EXPERTS = "batch", "seq", "layers", "experts"
SHARED_AXES: dict[str, str] = {
    BATCH: "sequences of the global batch",
    SEQ: "positions in a sequence",
    LAYERS: "repetitions of a block, stacked for a scan",
}
"""Logical axes that all models have, with descriptions. Blocks and models declare the others."""


ROUTED_SHARE = "valkyrie_routed_share"
"""Attribute of a product of groups of rows, or of a ragged all-to-all.

The share of the rows of its operand that it uses if experts get equally many: for a product, `0.5` if another device
has half of the experts. The compiled program does not show it otherwise.
"""

GROUP_PADDING = "valkyrie_group_padding"
"""Attribute of a product of groups of rows: rows that fill the last tile of each group, relative to all its rows."""


class InUse(str):
    """A logical axis of an activation that is split like that axis of an expert's parameter in use.

    See `Layout.used_axes`. An expert's parameter also has the axes in `Arrays.dispatched_axes`.
    """


Axis = str | tuple[str, ...] | None
"""The logical axis of one dimension, a tuple if it combines several, or None if the dimension is never sharded."""

Axes = tuple[str | None, ...]
"""One logical axis per array dimension, or None for a dimension that is never sharded."""

LayerFunction = Callable[[Any, Any, Any, "Shard"], Any]
"""Applies one layer: (stream, parameters, arrays with one entry per row of the batch, Shard) -> stream."""


class LossHead(NamedTuple):
    """The loss head, applied to the last residual stream.

    Args:
        f: Takes (parameters, stream, rows, shard), and returns (sums, row values): a tree of sums over the batch, with
            the objective as its first leaf, and a tree of arrays with a leading batch dimension.
        parameters: Tree of the parameters that `f` uses.
        rows: Tree of arrays with a leading batch dimension, such as targets.
    """

    f: Callable[[Any, Any, Any, Shard], tuple[Any, Any]]
    parameters: Any
    rows: Any


CombinedAxes = tuple[Axis, ...]
"""Logical axes per array dimension, as in `Axes`, except that one dimension may combine several logical axes."""


UNATTRIBUTED = "unattributed"
"""Label for collectives with device groups that match no mesh axes."""


def axes_text(mesh_axes: Sequence[str]) -> str:
    """Format mesh axes as text, such as `x,y`, or `UNATTRIBUTED` if there are none."""
    return ",".join(mesh_axes) or UNATTRIBUTED


def parse_axes(text: str) -> tuple[str, ...]:
    """Parse the text of `axes_text`. Accepts `?`, which earlier versions wrote for `UNATTRIBUTED`."""
    return () if text in ("", "?", UNATTRIBUTED) else tuple(text.split(","))


class Size(NamedTuple):
    """The length of a logical axis and the config key that sets it, or None if no single key does."""

    length: int
    key: str | None = None


@dataclass(frozen=True)
class Tensor:
    """Description of an array: per dimension, its logical axis, its length and the config key that sets the length.

    The length of `batch` is 0, and so is that of `seq` unless the model fixes it, because they depend on the run.
    """

    axes: Axes
    shape: tuple[int, ...]
    config_keys: tuple[str | None, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


PARAMETER_GROUPS: dict[str, str] = {
    "matrix": "weights of matrix products; decayed",
    "embedding": "the token embedding; decayed",
    "unembedding": "the projection to logits, if it is separate from the embedding; decayed",
    "value_embedding": "tables of attention values by token; decayed",
    "vector": "scales of norms; not decayed",
    "residual_scale": "scales of the residual stream, one per layer; not decayed",
    "input_scale": "scales of the initial residual stream that is added to the input of each layer, one per layer; "
    "not decayed",
    "scalar": "other scales and small gates; not decayed",
    "ssm": "state space parameters; not decayed, with a separate learning rate",
    "puzzle": "puzzle embeddings; a step updates only the rows in its batch, by the signs of their gradients",
    "balance": "selection biases of routers; a step adds `optimizer.balance_rate`, or subtracts it if the gradient is "
    "positive",
    "fixed": "never changed",
}
"""Parameter groups for optimizers, with descriptions."""


def padding_ratio(shape: Sequence[int], lanes: int) -> float:
    """Return the ratio of padded to actual size of an activation of shape (batch, seq, ...).

    If several dimensions follow `seq`, as in (batch, seq, heads, head_dim), the last one is padded to a multiple of
    `lanes`. For other activations, compilers choose a layout without padding.
    """
    return -(-shape[-1] // lanes) * lanes / shape[-1] if len(shape) > 3 else 1.0


class GatheredRows(NamedTuple):
    """Rows of matrices such as experts, if a device has room for those of the tokens of several devices.

    Args:
        axis: The dispatched axis (`Block.dispatches`). A device has room for the rows of all devices along the mesh
            axes that split both it and the tokens.
        full_shards: Largest number of shards of the axis for which a device has room for all rows of a token. It is the
            number of matrices divided by those of a token: with more shards, a token cannot use all of them on one.
        capacity: Room for rows, relative to their number if all matrices get equally many, or None for all rows.
    """

    axis: str
    full_shards: float
    capacity: float | None = None

    def is_limited(self, shards: int) -> bool:
        """Check whether a device with one of `shards` parts of the axis may have no room for some rows."""
        return self.capacity is not None and self.capacity < min(shards, self.full_shards)


@dataclass(frozen=True)
class Parameter(Tensor):
    """Description of a parameter.

    Args:
        group: the optimizer's parameter group, one of `PARAMETER_GROUPS`.
        float32: whether it stays float32 under every precision policy.
        output_first: for a matrix, whether its first dimension is the output and the others together are the input. If
            false, the first is the input and the others are the output.
        matrices_per_token: for a stack of matrices along the first dimension (after `layers`), such as experts, the
            mean number of them that a token is multiplied by, including empty rows. None for a single matrix.
    """

    group: str = "matrix"
    float32: bool = False
    output_first: bool = False
    matrices_per_token: float | None = None

    @property
    def stack_dims(self) -> int:
        """Number of leading dimensions that stack matrices: `layers`, and that of `matrices_per_token`."""
        return (LAYERS in self.axes) + (self.matrices_per_token is not None)


@dataclass(frozen=True)
class Arrays:
    """The arrays of a model that a layout shards.

    Args:
        axes: Every logical axis, with a description.
        parameters: Every distinct parameter tensor, with its names in messages.
        activations: Every distinct activation that the model constrains, with its names in messages.
        sharded_like: Maps an axis to another whose sharding it copies, such as `kv_heads` to `heads`. The copying axis
            is replicated over mesh axes that do not divide its length.
        stack_lengths: Lengths of the `layers` axis: the repetitions of each scanned group of layers, first to last.
        dispatched_axes: Axes that are never gathered, such as `experts`. Tokens are sent to the shards of the
            parameters instead.
    """

    axes: dict[str, str]
    parameters: dict[Tensor, list[str]]
    activations: dict[Tensor, list[str]]
    sharded_like: dict[str, str] = field(default_factory=dict)
    stack_lengths: tuple[int, ...] = ()
    dispatched_axes: frozenset[str] = frozenset()


@runtime_checkable
class Shard(Protocol):
    """Places a model's arrays on a mesh (`valkyrie.parallel.sharding.MeshShard`), or not at all (`Unsharded`)."""

    @property
    def backend(self) -> str | None:
        """Platform the program will run on (cpu, gpu or tpu), or None for JAX's default backend."""
        ...

    @property
    def sums_head_first(self) -> bool:
        """Whether to sum the gradient of the loss head over devices before the backward pass of the layers.

        This saves memory, but the sum then overlaps with nothing.
        """
        ...

    @property
    def shares_gathers(self) -> bool:
        """Whether a product saves its gathered weight for its backward pass, which otherwise gathers it again.

        False if `remat` would save it from the forward to the backward pass of the whole step.
        """
        ...

    def __call__(self, x: jax.Array, *axes: Axis) -> jax.Array:
        """Constrain an activation to its sharding under the partition. `axes` has one logical axis per dimension."""
        ...

    def gather_for_use(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """All-gather a parameter over the mesh axes that also split the data, for use in a matmul.

        The result stays split over other mesh axes (`Layout.used_axes`).
        """
        ...

    def gather_table(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Gather an embedding table for row lookups, like `gather_for_use`.

        It is replicated where the step is manual over mesh axes: in pipeline stages and under `SumGradientsPer.hybrid`.
        """
        ...

    def shard_for_storage(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Shard a parameter or its gradient for storage between steps."""
        ...

    def compute_gradient(
        self,
        f: Callable[..., jax.Array],
        operands: Sequence[jax.Array],
        *axes: str | None,
        reduction_dtype: str,
        full_gradient: bool = False,
        row_axes: tuple[str, str] = (BATCH, SEQ),
    ) -> jax.Array:
        """Return the gradient of a parameter, summed over devices and sharded for storage.

        Args:
            f: computes the gradient from `operands`.
            operands: arrays with the leading dimensions `row_axes`.
            axes: logical axes of the parameter.
            reduction_dtype: dtype of the partial sums that devices exchange.
            full_gradient: whether each device computes a full-size gradient of its part of the batch before the sum. If
                False, the compiler may all-gather the operands instead, and compute only each device's shard.
            row_axes: logical axes of the leading dimensions of the operands. Not (batch, seq) for tokens that were sent
                to experts.
        """
        ...

    def activation_mesh_axes(self, axis: str, *, all_sizes: bool = False) -> tuple[str, ...]:
        """Return the mesh axes that shard a logical axis of activations, those of size 1 only with `all_sizes`.

        `jax.shard_map` checks sums over all of them.
        """
        ...

    def shard_count(self, axis: str) -> int:
        """Return the number of shards of a logical axis of activations."""
        ...

    def apply_layers(self, f: LayerFunction, layers: Any, x: Any, rows: Any, head: LossHead | None = None) -> Any:
        """Apply `f` to the stream `x` once per layer, then `head`.

        Returns the result of `head.f` (sums and row values), or the last stream if `head` is None.

        `layers` is stacked on a leading axis. `x`, `rows` and the stream are trees of arrays with a leading batch
        dimension. If the partition shards `layers`, the devices along that mesh axis are pipeline stages. Only the
        objective of `head` is differentiable.
        """
        ...

    def map(
        self,
        f: Callable[..., Any],
        in_axes: Sequence[CombinedAxes | None],
        out_axes: Any,
        *,
        check_vma: bool | None = None,
    ) -> Callable[..., Any]:
        """Map `f` over devices, each with its local shards (`jax.shard_map`).

        Args:
            f: the function.
            in_axes: logical axes of each argument, or None if replicated.
            out_axes: logical axes of the result: a tuple for one array, a list of tuples for several.
            check_vma: argument of `jax.shard_map`. None enables the check except on TPUs, where Pallas kernels do not
                support it. Without the check, gradients of replicated arguments are summed over the mesh.
        """
        ...


class Unsharded:
    """The `Shard` of a single device: returns arrays unchanged."""

    backend: str | None = None
    sums_head_first: bool = False
    shares_gathers: bool = False

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

    def compute_gradient(
        self,
        f: Callable[..., jax.Array],
        operands: Sequence[jax.Array],
        *axes: str | None,
        reduction_dtype: str,
        full_gradient: bool = False,
        row_axes: tuple[str, str] = (BATCH, SEQ),
    ) -> jax.Array:
        """Return `f(*operands)`."""
        return f(*operands)

    def activation_mesh_axes(self, axis: str, *, all_sizes: bool = False) -> tuple[str, ...]:
        """Return no axes, as nothing is sharded."""
        return ()

    def shard_count(self, axis: str) -> int:
        """Return 1, as nothing is sharded."""
        return 1

    def apply_layers(self, f: LayerFunction, layers: Any, x: Any, rows: Any, head: LossHead | None = None) -> Any:
        """Apply `f` once per layer in one scan, then `head`. Returns the same as `Shard.apply_layers`."""
        return apply_head(head, scan_layers(f, layers, x, rows, self), self)

    def map(
        self,
        f: Callable[..., Any],
        in_axes: Sequence[CombinedAxes | None],
        out_axes: Any,
        *,
        check_vma: bool | None = None,
    ) -> Callable[..., Any]:
        """Return `f` itself."""
        return f


UNSHARDED = Unsharded()


def scan_layers(f: LayerFunction, layers: Any, x: Any, rows: Any, shard: Shard) -> Any:
    """Apply `f` to the stream `x` once per layer, in one scan over the leading axis of `layers`.

    Returns the last stream. `rows` and `shard` are passed to every call.
    """
    import jax

    def body(x: Any, layer: Any) -> tuple[Any, None]:
        return f(x, layer, rows, shard), None

    return jax.lax.scan(body, x, layers)[0]


def apply_head(head: LossHead | None, x: Any, shard: Shard) -> Any:
    """Apply the loss head to the last stream. Returns its sums and row values, or the stream if `head` is None."""
    return x if head is None else head.f(head.parameters, x, head.rows, shard)
