"""A layer of a stack as its blocks declare it: a mixer, and a feed-forward after or beside it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

from valkyrie.axes import Parameter, Size, Tensor
from valkyrie.models.block import BLOCK_INPUT, Block, SavedActivation, Site, tensor


class Boundary(Enum):
    """What a packed document sees of the one before it: nothing (`reset`) or everything (`cross`)."""

    reset = "reset"
    cross = "cross"


class Residual(Enum):
    """Feed-forward after the mixer (`sequential`), or both on one norm and summed (`parallel`)."""

    sequential = "sequential"
    parallel = "parallel"


DENSE = "feed_forward"
"""The feed-forward that `Stack.feed_forward` and `Stack.mlp` describe, as `feed_forward_pattern` names it."""


@dataclass(frozen=True)
class Layer:
    """A mixer and the feed-forward after it, if any, each between a norm and a residual sum."""

    kind: str
    site: Site
    mixer: Block
    feed_forward: Block | None
    residual: Residual = Residual.sequential
    feed_forward_kind: str = DENSE

    @property
    def variant(self) -> Hashable:
        """Key under which layers are scanned together."""
        after = self.feed_forward and (self.feed_forward_kind, self.feed_forward.variant(self.feed_forward_site))
        return self.kind, self.mixer.variant(self.site), after

    @property
    def feed_forward_site(self) -> Site:
        """The site of the feed-forward. The keys of the dense one are the model's own."""
        return replace(self.site, key="model" if self.feed_forward_kind == DENSE else f"model.{self.feed_forward_kind}")

    @property
    def blocks(self) -> dict[str, tuple[Block, Site]]:
        """Its blocks by kind: the mixer, then the feed-forward."""
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
        """Return the activations whose placement it requests."""
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
        """Return its input and what its backward pass needs beside that. An estimate.

        Counted from the operations: norms keep their input in float32, products their input, gates both factors. The
        input of the `first` layer of a group is never made again. A layer's result serves to make the next one's input.
        """
        embed = {"embed": Size(self.site.embed, "model.embed")}
        of_input = SavedActivation(tensor(("batch", "seq", "embed"), embed), 1, name=BLOCK_INPUT, always=first)
        if self.feed_forward is None:
            return [of_input, *self.mixer.kept(self.site, BLOCK_INPUT)]
        after = self.feed_forward.kept(self.feed_forward_site, BLOCK_INPUT)
        if self.residual is Residual.parallel:  # of one norm, whose input and result the mixer counts
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


def prefixed(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with `prefix.` before their names."""
    return {f"{prefix}.{name}": value for name, value in values.items()}
