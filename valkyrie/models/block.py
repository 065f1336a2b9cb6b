"""Base classes of blocks and layers, which declare their axes, parameters, FLOPs and saved activations.

A block is a dataclass that derives from `Block`. Its fields are configuration keys. Other code uses only the
methods of `Block`. Nothing here imports JAX except `Block.build`, so that layouts can be checked and their memory
estimated without it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Hashable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from valkyrie.axes import BATCH, SEQ, GatheredRows, Parameter, Size, Tensor, padding_ratio
from valkyrie.extensions import refuse_earlier_names
from valkyrie.hooks import check_hooks
from valkyrie.models.alternatives import Alternatives
from valkyrie.models.dispatch import DispatchWork
from valkyrie.problems import Problem, ProblemCode

if TYPE_CHECKING:
    from jaxtyping import Array

    from valkyrie.ops.linear import Numerics

BLOCK_INPUT = "block_input"
"""Checkpoint name (`jax.ad_checkpoint.checkpoint_name`) of the residual stream at the input of each layer.

The input of the first layer of each rematerialised group is always saved.
"""


@dataclass(frozen=True)
class BlockContext:
    """Position of a block in a stack, and sizes of the stack.

    Args:
        embed: Width of the residual stream.
        layers: Number of layers of the stack.
        number: Number of earlier layers with the same kind of mixer.
        key: Configuration key of the block, such as `model.s5`.
        vocab: Number of rows of the token embedding.
    """

    embed: int
    layers: int
    number: int = 0
    key: str = "model"
    vocab: int = 0


class Weight(NamedTuple):
    """A parameter declared by a block. The fields are the arguments of `weight`."""

    dims: tuple[str | int, ...]
    group: str
    float32: bool
    output_first: bool
    matrices_per_token: float | None


class ActivationSpec(NamedTuple):
    """Activations that a block saves. The fields are the arguments of `saved`; `dims` includes `batch` and `seq`."""

    dims: tuple[str | int, ...]
    name: str | None
    count: int | float
    float32: bool
    product: bool
    result: bool
    needed_for: str | None
    gathered_rows: GatheredRows | None = None
    saved_ratio: float | None = None


@dataclass(frozen=True)
class SavedActivation:
    """Activations that a backward pass may read: `count` arrays of the same shape, in memory at the same time.

    Args:
        tensor: Shape and logical axes of one array.
        count: Number of arrays.
        float32: Whether they are float32 instead of the compute dtype.
        positions: Maximum number of sequence positions per shard that are in memory at once (such as the logits of a
            chunked loss), or None if all are.
        name: Name for `remat`, which saves or offloads them, or None.
        product: Whether they are results of a matrix product.
        never_recomputed: Whether they are saved under every remat policy.
        needed_for: If the backward pass needs them only to recompute another activation, the name of that activation.
            Otherwise None.
        gathered_rows: The rows of all devices along a dispatched axis that a device has, or None.
        saved_ratio: Arrays that a compiled step saves under `remat=none`, relative to `count`, or None if unknown.
    """

    tensor: Tensor
    count: int | float
    float32: bool = False
    positions: int | None = None
    name: str | None = None
    product: bool = False
    never_recomputed: bool = False
    needed_for: str | None = None
    gathered_rows: GatheredRows | None = None
    saved_ratio: float | None = None


def weight(
    *dims: str | int,
    group: str = "matrix",
    float32: bool = False,
    output_first: bool = False,
    matrices_per_token: float | None = None,
) -> Weight:
    """Declare a parameter.

    Args:
        *dims: Logical axis of each dimension, or its length if it is never sharded.
        group: Optimizer group, one of `valkyrie.axes.PARAMETER_GROUPS`.
        float32: Store it in float32 under every precision policy.
        output_first: Whether its first dimension is an output of the product, instead of an input.
        matrices_per_token: See `Parameter`.
    """
    return Weight(dims, group, float32, output_first, matrices_per_token)


def saved(
    *dims: str | int,
    name: str | None = None,
    count: int | float = 1,
    float32: bool = False,
    product: bool = False,
    result: bool = False,
    needed_for: str | None = None,
    gathered_rows: GatheredRows | None = None,
    saved_ratio: float | None = None,
) -> ActivationSpec:
    """Declare activations of shape (batch, seq, *dims).

    Args:
        *dims: Logical axis of each dimension, or its length if it is never sharded.
        count: Number of arrays of this shape.
        name: Their `jax.ad_checkpoint.checkpoint_name` in the module, by which `remat` saves or offloads them. Without
            a name, they are saved only by policies that save every activation or, if `product` is set, every product.
        float32: Whether they are float32 instead of the compute dtype.
        product: Whether they are results of a product with a parameter, which `remat=dots` saves.
        result: Whether they are the output of the block. The block's own backward pass does not need them.
        needed_for: See `SavedActivation`.
        gathered_rows: See `SavedActivation`.
        saved_ratio: See `SavedActivation`.
    """
    dims = (BATCH, SEQ, *dims)
    return ActivationSpec(dims, name, count, float32, product, result, needed_for, gathered_rows, saved_ratio)


_EARLIER_NAMES = {
    "follows": "sharded_like",
    "over_rows": "shards_rows_over_embed",
    "kept": "saved_activations",
    "asked_activations": "constrained_activations",
}


@dataclass
class Block(ABC):
    """A block: a mixer of positions, or a feed-forward. The fields of a subclass are its configuration keys.

    Args:
        axes: Logical axes it declares in addition to `embed`, with descriptions.
        activations: Axes of the activations that its module applies a sharding constraint to.
        sharded_like: Maps an axis to another axis with the same sharding, such as `kv_heads` to `heads`. The axis is
            replicated over mesh axes that do not divide its length.
        dispatches: Axes of its parameters, such as experts, that are never gathered: tokens are sent to their shards.
        small_axes: Axes of small matrices that every device may compute. Under model parallelism, `mode=show` does not
            note that they have no rule.
        norm_group: Optimizer group of the norm before a mixer. The norm before a feed-forward is in the group `vector`.
        shards_rows_over_embed: Whether the batch is also sharded over the mesh axes of `embed` while the block mixes
            positions. Applies to mesh axes that shard none of its `activations`.
        pointwise: Whether it computes each position separately. Pointwise blocks are feed-forwards, others are mixers.
        module_class: Class of its module, as `package.file:Class`. Only `build` imports it, because it needs JAX.
    """

    axes: ClassVar[Mapping[str, str]] = {}
    activations: ClassVar[tuple[tuple[str, ...], ...]] = ()
    sharded_like: ClassVar[Mapping[str, str]] = {}
    dispatches: ClassVar[tuple[str, ...]] = ()
    small_axes: ClassVar[tuple[str, ...]] = ()
    norm_group: ClassVar[str] = "vector"
    shards_rows_over_embed: ClassVar[bool] = False
    pointwise: ClassVar[bool] = False
    module_class: ClassVar[str]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        refuse_earlier_names(cls, _EARLIER_NAMES)
        check_hooks(cls)

    @property
    def is_causal(self) -> bool:
        """Whether no position depends on later ones, as a next-token loss needs."""
        return True

    @property
    def auxiliary(self) -> dict[str, float]:
        """Auxiliary losses and metrics that its module returns, by name, with their weights in the objective.

        If not empty, the module returns `(output, values)`, where `values` maps every name to a float32 array of shape
        (batch,). Values are averaged over sequences, weighted by the sum of each sequence's token weights. The sum over
        layers, times the weight, is added to the objective. The mean over layers is logged as `KIND/NAME`. A value with
        weight 0 is only logged.
        """
        return {}

    def problems(self, key: str) -> list[Problem]:
        """Return every reason why it cannot be built. `key` is its configuration key, such as `model.s5`."""
        return []

    @abstractmethod
    def sizes(self, context: BlockContext) -> dict[str, Size]:
        """Return the length of each axis in `axes`, by axis, with the configuration key that sets the length."""

    @abstractmethod
    def weights(self, context: BlockContext) -> dict[str, Weight]:
        """Return its parameters by dotted name, each made by `weight`."""

    @abstractmethod
    def flops(self, context: BlockContext, seq: int) -> float:
        """Return forward FLOPs per token for sequences of `seq` tokens, counting two per multiply-add."""

    @abstractmethod
    def saves(self, context: BlockContext) -> list[ActivationSpec]:
        """Estimate the activations that its backward pass needs if nothing is recomputed.

        They include those of the norm before the block. `Layer` adds the residual stream at the input of the layer.
        """

    def build(self, context: BlockContext, *, numerics: Numerics, key: Array) -> Any:
        """Build its module, an instance of `module_class` (see `valkyrie.models.layers.BlockModule`)."""
        return resolve_name(self.module_class)(self, context, numerics=numerics, key=key)

    def variant(self, context: BlockContext) -> Hashable:
        """Return a value to compare blocks of the same kind. Layers share a scan only if these values are equal."""
        return None

    def parameters(self, context: BlockContext) -> dict[str, Parameter]:
        """Return the parameters that `weights` declares, with the lengths of their axes, by dotted name."""
        sizes = self._sizes(context)
        return {
            name: Parameter(
                **vars(tensor(w.dims, sizes)),
                group=w.group,
                float32=w.float32,
                output_first=w.output_first,
                matrices_per_token=w.matrices_per_token,
            )
            for name, w in self.weights(context).items()
        }

    def scores(self, context: BlockContext, seq: int) -> float:
        """Return the number of scores between positions, such as attention logits, that it computes per token."""
        return 0.0

    def dense_scores(self, context: BlockContext, seq: int) -> float:
        """Return the number of scores per token that it computes as whole matrices, on platforms with a kernel."""
        return 0.0

    def uses_wide_blocks(self, context: BlockContext, seq: int) -> bool:
        """Return whether it is attention without a window and with wide blocks of splash attention (`WIDE_BLOCK`)."""
        return False

    def lane_padding(self, context: BlockContext, lanes: int) -> float:
        """Return the ratio of padded to actual FLOPs of its work outside products with parameters.

        By default, this is the `padding_ratio` of its first saved activation with a name that is not such a product.
        """
        activations = self.saved_activations(context)
        return next(
            (padding_ratio(a.tensor.shape, lanes) for a in activations if a.name is not None and not a.product), 1.0
        )

    def neighbours(self, context: BlockContext) -> list[tuple[SavedActivation, int | None]]:
        """Return (activation, positions) for each activation that it reads from other shards of the sequence.

        `positions` is the number of positions read beyond its shard, or None for all positions of all shards.
        """
        return []

    def exchanged_halves(self, context: BlockContext) -> list[SavedActivation]:
        """Return the activations whose half-shards are exchanged if the sequence is split.

        Causal splash attention does this with its queries and output: each shard computes an early and a late half.
        """
        return []

    def dispatched_activations(self, context: BlockContext) -> list[SavedActivation]:
        """Return the activations that it sends along the mesh axes of `dispatches`, and receives results for.

        Devices along these axes gather them before the block, and reduce-scatter results of the same size after it, or
        exchange both by all-to-alls (`DispatchWork.sends_rows`).
        """
        return []

    def dispatch_work(self, context: BlockContext, seq: int) -> DispatchWork:
        """Return the work to send tokens along `dispatches` and back, other than collectives."""
        return DispatchWork()

    def alternatives(self, context: BlockContext) -> list[Alternatives]:
        """Return its settings with several values that compute the same function. A search tries all of them."""
        return []

    def saved_activations(self, context: BlockContext, needed_for: str | None = None) -> list[SavedActivation]:
        """Return the activations that `saves` declares, with the lengths of their axes.

        With `needed_for`, its output is needed only to recompute the activation with this name.
        """
        sizes = self._sizes(context)
        return [
            SavedActivation(
                tensor(s.dims, sizes),
                s.count,
                s.float32,
                name=s.name,
                product=s.product,
                needed_for=needed_for if s.result else s.needed_for,
                gathered_rows=s.gathered_rows,
                saved_ratio=s.saved_ratio,
            )
            for s in self.saves(context)
        ]

    def sequence_problems(self, context: BlockContext, seq: int) -> list[Problem]:
        """Return every reason why it cannot use sequences of `seq` tokens, if `problems` returns none."""
        return []

    def layout_notes(self, context: BlockContext, shard_count: Callable[[str], int]) -> list[str]:
        """Return what a user should know of results under a layout that splits axes into `shard_count` parts."""
        return []

    def constrained_activations(self, context: BlockContext) -> list[Tensor]:
        """Return the activations that its module applies a sharding constraint to."""
        return [tensor(axes, self._sizes(context)) for axes in self.activations]

    def axis_problems(self, context: BlockContext, known_axes: Container[str]) -> list[Problem]:
        """Return a problem for each axis of its parameters and activations that is not known or has no length.

        `known_axes` contains the axes that the blocks of the model declare, and those that all models have.
        """
        used = list(self.activations)
        used += [w.dims for w in self.weights(context).values()] + [s.dims for s in self.saves(context)]
        axes = dict.fromkeys(dim for dims in used for dim in dims if not isinstance(dim, int))
        sizes, name = {BATCH, SEQ, *self._sizes(context)}, type(self).__name__
        texts = [
            f"{name} uses the axis {a}, which no block declares. Add it to `axes`." for a in axes if a not in known_axes
        ]
        texts += [
            f"{name} uses the axis {a} without a length. Return its length from `sizes`."
            for a in axes
            if a not in sizes
        ]
        return [Problem(ProblemCode.missing, context.key, text=text) for text in texts]

    def _sizes(self, context: BlockContext) -> dict[str, Size]:
        return {"embed": Size(context.embed, "model.embed"), **self.sizes(context)}


def tensor(dims: tuple[str | int, ...], sizes: Mapping[str, Size]) -> Tensor:
    """Return the description of an array.

    Each entry of `dims` is a logical axis, with its length in `sizes`, or the length of a dimension that is never
    sharded. `batch` and `seq` have length 0 unless `sizes` contains them, because their lengths depend on the run.
    """
    sizes = {BATCH: Size(0), SEQ: Size(0), **sizes}
    dimensions = [Size(d) if isinstance(d, int) else sizes[d] for d in dims]
    axes = tuple(None if isinstance(d, int) else d for d in dims)
    return Tensor(axes, tuple(size.length for size in dimensions), tuple(size.key for size in dimensions))


class Boundary(Enum):
    """Whether state and attention cross the boundaries of packed documents (`cross`) or not (`reset`)."""

    reset = "reset"
    cross = "cross"


class Residual(Enum):
    """Whether the feed-forward reads the stream after the mixer (`sequential`) or the mixer's input (`parallel`)."""

    sequential = "sequential"
    parallel = "parallel"


DENSE = "feed_forward"
"""Name of the dense feed-forward in `feed_forward_pattern`. `Stack.feed_forward` and `Stack.mlp` configure it."""


@dataclass(frozen=True)
class Layer:
    """A mixer and an optional feed-forward, with their norms and residual sums.

    Args:
        kind: Name of the mixer in `block_pattern`.
        context: Context of the mixer.
        mixer: The mixer.
        feed_forward: The feed-forward, or None if the layer has none.
        residual: Whether the feed-forward follows the mixer or is parallel to it.
        feed_forward_kind: Name of the feed-forward in `feed_forward_pattern`.
    """

    kind: str
    context: BlockContext
    mixer: Block
    feed_forward: Block | None
    residual: Residual = Residual.sequential
    feed_forward_kind: str = DENSE

    @property
    def variant(self) -> Hashable:
        """Value to compare layers: they can share a scan only if their values are equal."""
        return tuple((kind, block.variant(context)) for kind, (block, context) in self.blocks.items())

    @property
    def feed_forward_context(self) -> BlockContext:
        """Context of the feed-forward. Its `key` is `model` for the dense one, and `model.KIND` for others."""
        return replace(
            self.context, key="model" if self.feed_forward_kind == DENSE else f"model.{self.feed_forward_kind}"
        )

    @property
    def blocks(self) -> dict[str, tuple[Block, BlockContext]]:
        """The mixer, then the feed-forward, by name, each with its context."""
        blocks = {self.kind: (self.mixer, self.context)}
        if self.feed_forward is not None:
            blocks[self.feed_forward_kind] = self.feed_forward, self.feed_forward_context
        return blocks

    def parameters(self) -> dict[str, Parameter]:
        """Return its parameters by dotted name."""
        norm_scale = partial(vector_parameter, "embed", self.context.embed)
        parameters = {"norm.scale": norm_scale(self.mixer.norm_group)}
        parameters |= add_prefix("mixer", self.mixer.parameters(self.context))
        if self.feed_forward is not None:
            if self.residual is Residual.sequential:
                parameters["feed_forward_norm.scale"] = norm_scale("vector")
            parameters |= add_prefix("feed_forward", self.feed_forward.parameters(self.feed_forward_context))
        return parameters

    def activations(self) -> list[Tensor]:
        """Return the activations that its modules apply a sharding constraint to."""
        return [t for block, context in self.blocks.values() for t in block.constrained_activations(context)]

    def flops(self, seq: int) -> float:
        """Return forward FLOPs per token for sequences of `seq` tokens."""
        return sum(block.flops(context, seq) for block, context in self.blocks.values())

    @property
    def auxiliary(self) -> dict[str, float]:
        """Weights in the objective of its blocks' auxiliary values, by `KIND/NAME` (see `Block.auxiliary`)."""
        return {
            f"{kind}/{name}": weight
            for kind, (block, _) in self.blocks.items()
            for name, weight in block.auxiliary.items()
        }

    def saved_activations(self, *, is_first: bool) -> list[SavedActivation]:
        """Estimate the activations that its backward pass needs, including its input.

        The estimate counts operations: a norm saves its input in float32, a product its input, and a gate both
        factors. The input of the first layer of a group (`is_first`) is never recomputed. The output of a layer is
        needed only to recompute the input of the next one.
        """
        embed = {"embed": Size(self.context.embed, "model.embed")}
        stream = tensor(("batch", "seq", "embed"), embed)
        block_input = SavedActivation(stream, 1, name=BLOCK_INPUT, never_recomputed=is_first)
        if self.feed_forward is None:
            return [block_input, *self.mixer.saved_activations(self.context, BLOCK_INPUT)]
        feed_forward = self.feed_forward.saved_activations(self.feed_forward_context, BLOCK_INPUT)
        if self.residual is Residual.parallel:  # the mixer counts input and output of the shared norm
            feed_forward = [a for a in feed_forward if a.name is not None or a.tensor != stream]
            return [block_input, *self.mixer.saved_activations(self.context, BLOCK_INPUT), *feed_forward]
        return [block_input, *self.mixer.saved_activations(self.context), *feed_forward]


class AuxiliaryTerm(NamedTuple):
    """Weight of an auxiliary value in the objective, and the number of layers that return it."""

    weight: float
    layers: int


def vector_parameter(axis: str, length: int, group: str) -> Parameter:
    """Return a parameter with one logical axis, such as the scale of a norm."""
    return Parameter((axis,), (length,), (f"model.{axis}",), group)


def add_prefix(prefix: str, values: Mapping[str, Parameter]) -> dict[str, Parameter]:
    """Return the parameters with `prefix.` prepended to their names."""
    return {f"{prefix}.{name}": value for name, value in values.items()}
