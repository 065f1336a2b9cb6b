"""What a kind of block is before it is built: its axes, parameters, FLOPs, and what its backward pass keeps.

A kind of block is one dataclass that derives from `Block`: its fields are keys of the configuration, and its methods
are all that anything outside its file needs to know of it. Nothing here imports JAX, so that a layout is refused, and
its memory estimated, without it; the module that computes is made by `Block.build`, which may.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from valkyrie.axes import BATCH, SEQ, Parameter, Size, Tensor

if TYPE_CHECKING:
    from jaxtyping import Array

    from valkyrie.ops.linear import Numerics

BLOCK_INPUT = "block_input"
"""The residual stream where it enters a block. That of the first block of a group is saved under every policy."""


@dataclass(frozen=True)
class Site:
    """Where a block stands: `embed` is the width of the residual stream, `layers` the blocks of the stack.

    `number` counts the blocks of its kind before it; `key` is where its configuration stands, such as `model.s5`.
    `vocab` is how many rows a table of tokens has.
    """

    embed: int
    layers: int
    number: int = 0
    key: str = "model"
    vocab: int = 0


class Weight(NamedTuple):
    """A parameter as a block declares it; see `weight`."""

    dims: tuple[str | int, ...]
    group: str
    float32: bool
    output_first: bool


class Saved(NamedTuple):
    """Activations that a block's backward pass needs; see `saved`."""

    dims: tuple[str | int, ...]
    name: str | None
    count: int | float
    float32: bool
    product: bool
    result: bool
    remakes: str | None


@dataclass(frozen=True)
class SavedActivation:
    """`count` arrays alike that exist at once on behalf of a backward pass: float32, or in the compute dtype.

    `positions` bounds how many positions of each shard of the sequence exist at a time (None: all of them). `name` is
    that by which `remat` may keep them, `product` says that a matrix product gives them. `always`: they are never made
    again. `remakes`: they serve only to make the activation of this name again.
    """

    tensor: Tensor
    count: int | float
    float32: bool = False
    positions: int | None = None
    name: str | None = None
    product: bool = False
    always: bool = False
    remakes: str | None = None


def weight(*dims: str | int, group: str = "matrix", float32: bool = False, output_first: bool = False) -> Weight:
    """Return a parameter with these dimensions: a logical axis each, or a number for one that is never split.

    `group` is the optimizer's (`valkyrie.axes.Parameter`); `float32` keeps it so under every precision policy.
    `output_first`: its first dimension is that of what it makes, not of what it reads.
    """
    return Weight(dims, group, float32, output_first)


def saved(
    *dims: str | int,
    name: str | None = None,
    count: int | float = 1,
    float32: bool = False,
    product: bool = False,
    result: bool = False,
    remakes: str | None = None,
) -> Saved:
    """Return `count` activations of (batch, seq, *dims), in float32 or in the compute dtype.

    `name` is what the block's module calls them by `jax.ad_checkpoint.checkpoint_name`: `remat` keeps or offloads them
    by it; without one they are made again unless all is kept. `product` says that a matrix product with a parameter
    gives them, so that `remat=dots` keeps them. `result`: the block's own output, which only what follows needs.
    `remakes`: only making the activation of this name needs them.
    """
    return Saved((BATCH, SEQ, *dims), name, count, float32, product, result, remakes)


@dataclass
class Block(ABC):
    """A kind of block: a mixer of positions, or a feed-forward. The fields of a subclass are its configuration keys.

    Args:
        axes: Logical axes it declares in addition to `embed`, with what each counts.
        activations: Axes of the activations whose placement its module requests.
        follows: Axes that are split like another one as far as their length divides (key heads like heads).
        dispatches: Axes of its parameters whose shards receive tokens from other devices (experts), instead of being
            gathered on every device.
        norm_group: Optimizer group of the norm before it.
        over_rows: Mesh axes that split the residual stream and none of its `activations` split rows while it mixes.
        pointwise: Each position is computed from itself alone. Such a block is a feed-forward; others are mixers.
    """

    axes: ClassVar[Mapping[str, str]] = {}
    activations: ClassVar[tuple[tuple[str, ...], ...]] = ()
    follows: ClassVar[Mapping[str, str]] = {}
    dispatches: ClassVar[tuple[str, ...]] = ()
    norm_group: ClassVar[str] = "vector"
    over_rows: ClassVar[bool] = False
    pointwise: ClassVar[bool] = False

    @property
    def is_causal(self) -> bool:
        """Whether no position sees one after it, as a next-token loss needs."""
        return True

    @property
    def auxiliary(self) -> dict[str, float]:
        """Weights in the objective of the values that its module returns beside its output, by name.

        The module then returns `(output, values)` with a float32 value per sequence for every name. A value is averaged
        over sequences, each weighted by its targets, and its weighted sum over layers is added to the objective.
        Every value is logged as `KIND/NAME`, averaged over layers too; the weight 0 is for values that are only logged.
        """
        return {}

    def problems(self, key: str) -> list[str]:
        """Return every reason why it cannot be built; `key` is where its configuration stands, such as `model.s5`."""
        return []

    @abstractmethod
    def sizes(self, site: Site) -> dict[str, Size]:
        """Return the length of each axis it declares, and the config key that sets it."""

    @abstractmethod
    def weights(self, site: Site) -> dict[str, Weight]:
        """Return its parameters by dotted name, as `weight` makes them."""

    @abstractmethod
    def flops(self, site: Site, seq: int) -> float:
        """Return forward FLOPs per token over sequences of `seq` tokens: two for every multiply-add."""

    @abstractmethod
    def saves(self, site: Site) -> list[Saved]:
        """Return what its backward pass needs beside the block's input where nothing is computed again. An estimate."""

    @abstractmethod
    def build(self, site: Site, *, numerics: Numerics, key: Array) -> Any:
        """Return the module that computes it (`valkyrie.models.layers.BlockModule`)."""

    def variant(self, site: Site) -> Hashable:
        """Return what tells this block from others of its kind: only equal ones are scanned together."""
        return None

    def parameters(self, site: Site) -> dict[str, Parameter]:
        """Return its parameters by dotted name."""
        sizes = self._sizes(site)
        return {
            name: Parameter(
                **vars(tensor(w.dims, sizes)), group=w.group, float32=w.float32, output_first=w.output_first
            )
            for name, w in self.weights(site).items()
        }

    def scores(self, site: Site, seq: int) -> float:
        """Return how many numbers per token it makes of pairs of positions, as attention's logits are."""
        return 0.0

    def neighbours(self, site: Site) -> list[tuple[SavedActivation, int | None]]:
        """Return what it reads of other devices where the sequence is split, and of how many positions (None: all)."""
        return []

    def kept(self, site: Site, remakes: str | None = None) -> list[SavedActivation]:
        """Return what its backward pass needs; its own output only for making `remakes` again (None: for more)."""
        sizes = self._sizes(site)
        return [
            SavedActivation(
                tensor(s.dims, sizes),
                s.count,
                s.float32,
                name=s.name,
                product=s.product,
                remakes=remakes if s.result else s.remakes,
            )
            for s in self.saves(site)
        ]

    def asked_activations(self, site: Site) -> list[Tensor]:
        """Return the activations whose placement it asks for."""
        return [tensor(axes, self._sizes(site)) for axes in self.activations]

    def _sizes(self, site: Site) -> dict[str, Size]:
        return {"embed": Size(site.embed, "model.embed"), **self.sizes(site)}


def tensor(dims: tuple[str | int, ...], sizes: Mapping[str, Size]) -> Tensor:
    """Return the tensor of these dimensions; batch and seq have the length 0 of what only a run knows."""
    known = {BATCH: Size(0), SEQ: Size(0), **sizes}
    dimensions = [Size(d) if isinstance(d, int) else known[d] for d in dims]
    axes = tuple(None if isinstance(d, int) else d for d in dims)
    return Tensor(axes, tuple(size.length for size in dimensions), tuple(size.key for size in dimensions))
