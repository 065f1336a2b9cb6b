"""Declarations of blocks and of the layers made of them: axes, parameters, FLOPs and saved activations.

A block is a dataclass that derives from `Block`. Its fields are configuration keys, and its methods are its whole
interface to other code. Nothing here imports JAX, so layouts are checked and their memory is estimated without it. Only
`Block.build`, which builds the module, imports JAX.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from valkyrie.axes import BATCH, SEQ, Parameter, Size, Tensor
from valkyrie.problems import Problem

if TYPE_CHECKING:
    from jaxtyping import Array

    from valkyrie.ops.linear import Numerics

BLOCK_INPUT = "block_input"
"""Name of the residual stream at the input of a block. The input of a group's first block is always saved."""


@dataclass(frozen=True)
class BlockContext:
    """Position of a block in a stack.

    Args:
        embed: Width of the residual stream.
        layers: Number of layers of the stack.
        number: Number of earlier layers with the same kind of mixer.
        key: Configuration key of the block, such as `model.s5`.
        vocab: Number of rows of a token table.
    """

    embed: int
    layers: int
    number: int = 0
    key: str = "model"
    vocab: int = 0


class Weight(NamedTuple):
    """A parameter as declared by `weight`."""

    dims: tuple[str | int, ...]
    group: str
    float32: bool
    output_first: bool


class Saved(NamedTuple):
    """Activations that the backward pass needs, as declared by `saved`."""

    dims: tuple[str | int, ...]
    name: str | None
    count: int | float
    float32: bool
    product: bool
    result: bool
    needed_for: str | None


@dataclass(frozen=True)
class SavedActivation:
    """`count` equal arrays that exist at the same time in a backward pass.

    Args:
        tensor: Shape and logical axes of one array.
        float32: float32 instead of the compute dtype.
        positions: Maximum positions of each sequence shard that exist at a time, or None for all.
        name: Name by which `remat` saves or offloads them, or None.
        product: They are results of a matrix product.
        always: They are never recomputed.
        needed_for: Name of an activation; they are needed only to recompute it.
    """

    tensor: Tensor
    count: int | float
    float32: bool = False
    positions: int | None = None
    name: str | None = None
    product: bool = False
    always: bool = False
    needed_for: str | None = None


def weight(*dims: str | int, group: str = "matrix", float32: bool = False, output_first: bool = False) -> Weight:
    """Declare a parameter.

    Args:
        *dims: A logical axis per dimension, or a length for one that is never split.
        group: Optimizer group, one of `valkyrie.axes.PARAMETER_GROUPS`.
        float32: Keep it in float32 under every precision policy.
        output_first: The first dimension is the product's output, not its input.
    """
    return Weight(dims, group, float32, output_first)


def saved(
    *dims: str | int,
    name: str | None = None,
    count: int | float = 1,
    float32: bool = False,
    product: bool = False,
    result: bool = False,
    needed_for: str | None = None,
) -> Saved:
    """Declare activations of shape (batch, seq, *dims).

    Args:
        *dims: A logical axis per dimension, or a length for one that is never split.
        count: Number of such arrays.
        name: Their `jax.ad_checkpoint.checkpoint_name` in the module, by which `remat` saves or offloads them. Without
            a name they are recomputed unless everything is saved.
        float32: float32 instead of the compute dtype.
        product: They are results of a product with a parameter, which `remat=dots` saves.
        result: They are the block's output, which only later blocks need.
        needed_for: Name of an activation; they are needed only to recompute it.
    """
    return Saved((BATCH, SEQ, *dims), name, count, float32, product, result, needed_for)


@dataclass
class Block(ABC):
    """A kind of block: a mixer of positions, or a feed-forward. The fields of a subclass are its configuration keys.

    Args:
        axes: Logical axes it declares in addition to `embed`, with descriptions.
        activations: Axes of the activations that its module places with a sharding constraint.
        follows: Axes that are sharded like another axis, as far as their length divides (key heads like heads).
        dispatches: Axes of its parameters, such as experts, with shards that receive tokens from other devices instead
            of being gathered on every device.
        norm_group: Optimizer group of the norm before it.
        over_rows: While it mixes, rows are sharded over the mesh axes that shard the residual stream and none of its
            `activations`.
        pointwise: Each position is computed from itself alone. Pointwise blocks are feed-forwards; others are mixers.
        module_class: Class of its module, as `package.file:Class`. It is imported by `build`, so that blocks are
            declared, checked and estimated without JAX.
    """

    axes: ClassVar[Mapping[str, str]] = {}
    activations: ClassVar[tuple[tuple[str, ...], ...]] = ()
    follows: ClassVar[Mapping[str, str]] = {}
    dispatches: ClassVar[tuple[str, ...]] = ()
    norm_group: ClassVar[str] = "vector"
    over_rows: ClassVar[bool] = False
    pointwise: ClassVar[bool] = False
    module_class: ClassVar[str]

    @property
    def is_causal(self) -> bool:
        """Whether no position depends on later ones, as a next-token loss needs."""
        return True

    @property
    def auxiliary(self) -> dict[str, float]:
        """Weights in the objective of the values that its module returns in addition to its output, by name.

        With such values, the module returns `(output, values)` with a float32 value per sequence for every name. A
        value is averaged over sequences, weighted by their targets, and its weighted sum over layers is added to the
        objective. Every value is logged as `KIND/NAME`, averaged over layers too. Use weight 0 to only log a value.
        """
        return {}

    def problems(self, key: str) -> list[Problem]:
        """Return every reason why it cannot be built. `key` is its configuration key, such as `model.s5`."""
        return []

    @abstractmethod
    def sizes(self, site: BlockContext) -> dict[str, Size]:
        """Return the length of each declared axis, with the configuration key that sets it."""

    @abstractmethod
    def weights(self, site: BlockContext) -> dict[str, Weight]:
        """Return its parameters by dotted name, each made by `weight`."""

    @abstractmethod
    def flops(self, site: BlockContext, seq: int) -> float:
        """Return forward FLOPs per token for sequences of `seq` tokens, counting two per multiply-add."""

    @abstractmethod
    def saves(self, site: BlockContext) -> list[Saved]:
        """Estimate the activations its backward pass needs in addition to its input, if nothing is recomputed."""

    def build(self, site: BlockContext, *, numerics: Numerics, key: Array) -> Any:
        """Build its module, an instance of `module_class` (see `valkyrie.models.layers.BlockModule`)."""
        return resolve_name(self.module_class)(self, site, numerics=numerics, key=key)

    def variant(self, site: BlockContext) -> Hashable:
        """Return a key that differs between blocks of the same kind that cannot share a scan."""
        return None

    def parameters(self, site: BlockContext) -> dict[str, Parameter]:
        """Return its parameters by dotted name."""
        sizes = self._sizes(site)
        return {
            name: Parameter(
                **vars(tensor(w.dims, sizes)), group=w.group, float32=w.float32, output_first=w.output_first
            )
            for name, w in self.weights(site).items()
        }

    def scores(self, site: BlockContext, seq: int) -> float:
        """Return the values per token that it computes for pairs of positions, such as attention logits."""
        return 0.0

    def neighbours(self, site: BlockContext) -> list[tuple[SavedActivation, int | None]]:
        """Return the activations that it reads from other sequence shards, with the positions read (None: all)."""
        return []

    def kept(self, site: BlockContext, needed_for: str | None = None) -> list[SavedActivation]:
        """Return the activations that its backward pass needs.

        With `needed_for`, its output is marked as needed only to recompute that activation.
        """
        sizes = self._sizes(site)
        return [
            SavedActivation(
                tensor(s.dims, sizes),
                s.count,
                s.float32,
                name=s.name,
                product=s.product,
                needed_for=needed_for if s.result else s.needed_for,
            )
            for s in self.saves(site)
        ]

    def asked_activations(self, site: BlockContext) -> list[Tensor]:
        """Return the activations that it places with a sharding constraint."""
        return [tensor(axes, self._sizes(site)) for axes in self.activations]

    def _sizes(self, site: BlockContext) -> dict[str, Size]:
        return {"embed": Size(site.embed, "model.embed"), **self.sizes(site)}


def tensor(dims: tuple[str | int, ...], sizes: Mapping[str, Size]) -> Tensor:
    """Return the tensor with these dimensions. `batch` and `seq` get length 0, because only a run knows theirs."""
    known = {BATCH: Size(0), SEQ: Size(0), **sizes}
    dimensions = [Size(d) if isinstance(d, int) else known[d] for d in dims]
    axes = tuple(None if isinstance(d, int) else d for d in dims)
    return Tensor(axes, tuple(size.length for size in dimensions), tuple(size.key for size in dimensions))


class Boundary(Enum):
    """Whether a packed document sees the one before it: never (`reset`) or always (`cross`)."""

    reset = "reset"
    cross = "cross"


class Residual(Enum):
    """Order of mixer and feed-forward: one after the other (`sequential`), or a sum on a shared norm (`parallel`)."""

    sequential = "sequential"
    parallel = "parallel"


DENSE = "feed_forward"
"""Name in `feed_forward_pattern` of the feed-forward that `Stack.feed_forward` and `Stack.mlp` define."""


@dataclass(frozen=True)
class Layer:
    """A mixer and the feed-forward after it, if any, each between a norm and a residual sum."""

    kind: str
    site: BlockContext
    mixer: Block
    feed_forward: Block | None
    residual: Residual = Residual.sequential
    feed_forward_kind: str = DENSE

    @property
    def variant(self) -> Hashable:
        """Key that is equal for layers that can be scanned together."""
        return tuple((kind, block.variant(site)) for kind, (block, site) in self.blocks.items())

    @property
    def feed_forward_site(self) -> BlockContext:
        """Context of the feed-forward. The dense one uses the configuration keys of the model."""
        return replace(self.site, key="model" if self.feed_forward_kind == DENSE else f"model.{self.feed_forward_kind}")

    @property
    def blocks(self) -> dict[str, tuple[Block, BlockContext]]:
        """Blocks by kind: the mixer, then the feed-forward."""
        blocks = {self.kind: (self.mixer, self.site)}
        if self.feed_forward is not None:
            blocks[self.feed_forward_kind] = self.feed_forward, self.feed_forward_site
        return blocks

    def parameters(self) -> dict[str, Parameter]:
        """Return its parameters by dotted name."""
        width = partial(vector, "embed", self.site.embed)
        parameters = {"norm.scale": width(self.mixer.norm_group)}
        parameters |= prefixed("mixer", self.mixer.parameters(self.site))
        if self.feed_forward is not None:
            if self.residual is Residual.sequential:
                parameters["feed_forward_norm.scale"] = width("vector")
            parameters |= prefixed("feed_forward", self.feed_forward.parameters(self.feed_forward_site))
        return parameters

    def activations(self) -> list[Tensor]:
        """Return the activations that its blocks place with a sharding constraint."""
        return [t for block, site in self.blocks.values() for t in block.asked_activations(site)]

    def flops(self, seq: int) -> float:
        """Return forward FLOPs per token."""
        return sum(block.flops(site, seq) for block, site in self.blocks.values())

    @property
    def auxiliary(self) -> dict[str, float]:
        """Weights of the values that its blocks return, by `KIND/NAME` (`Block.auxiliary`)."""
        return {
            f"{kind}/{name}": weight
            for kind, (block, _) in self.blocks.items()
            for name, weight in block.auxiliary.items()
        }

    def kept(self, *, first: bool) -> list[SavedActivation]:
        """Estimate its input and the other activations that its backward pass needs.

        Counted from the operations: norms keep their input in float32, products their input, gates both factors. The
        input of the `first` layer of a group is never recomputed. A layer's result is needed to recompute the next
        layer's input.
        """
        embed = {"embed": Size(self.site.embed, "model.embed")}
        of_input = SavedActivation(tensor(("batch", "seq", "embed"), embed), 1, name=BLOCK_INPUT, always=first)
        if self.feed_forward is None:
            return [of_input, *self.mixer.kept(self.site, BLOCK_INPUT)]
        after = self.feed_forward.kept(self.feed_forward_site, BLOCK_INPUT)
        if self.residual is Residual.parallel:  # the shared norm's input and result are counted by the mixer
            shared = of_input.tensor
            after = [kept for kept in after if kept.name is not None or kept.tensor != shared]
            return [of_input, *self.mixer.kept(self.site, BLOCK_INPUT), *after]
        return [of_input, *self.mixer.kept(self.site), *after]


class AuxiliaryTerm(NamedTuple):
    """The weight in the objective of a value that blocks return, and the number of layers that return it."""

    weight: float
    layers: int


def vector(axis: str, length: int, group: str) -> Parameter:
    """Return a parameter with one logical axis, such as the scale of a norm."""
    return Parameter((axis,), (length,), (f"model.{axis}",), group)


def prefixed(prefix: str, values: Mapping[str, Parameter]) -> dict[str, Parameter]:
    """Return the values with `prefix.` prepended to their names."""
    return {f"{prefix}.{name}": value for name, value in values.items()}
