"""The feed-forward block: a gated or a plain product of each position."""

# No `from __future__ import annotations` here: annotations of the module are checked in tests, and name local imports.

import math
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any

from valkyrie.axes import Shard, Size
from valkyrie.models.block import Block, BlockContext, Saved, Weight, saved, weight
from valkyrie.problems import Problem, check_range

if TYPE_CHECKING:
    from jaxtyping import Array

    from valkyrie.ops.linear import Numerics


class Nonlinearity(Enum):
    """The feed-forward product: gated (`swiglu`, `geglu`: three matrices) or plain (two)."""

    swiglu = "swiglu"
    geglu = "geglu"
    gelu = "gelu"
    relu = "relu"
    relu2 = "relu2"

    @property
    def gated(self) -> bool:
        """Whether a third matrix gates the hidden side."""
        return self in (Nonlinearity.swiglu, Nonlinearity.geglu)


@dataclass
class FeedForward(Block):
    """A product up to `mlp`, its nonlinearity, and a product down again; gated ones as in arXiv 2002.05202.

    `biases`: each product has one (GPT-2).
    """

    kind: Nonlinearity = Nonlinearity.swiglu
    mlp: int = 512
    biases: bool = False

    axes = {"mlp": "the hidden side of a feed-forward or gating product"}
    activations = (("batch", "seq", "mlp"),)
    pointwise = True

    def problems(self, key: str) -> list[Problem]:
        return check_range(f"{key}.mlp", self.mlp, least=1)

    def sizes(self, site: BlockContext) -> dict[str, Size]:
        return {"mlp": Size(self.mlp, f"{site.key}.mlp")}

    def weights(self, site: BlockContext) -> dict[str, Weight]:
        """Return the matrices, embed first: what a fully sharded partition gathers is then contiguous."""
        names = ("up", "gate", "down") if self.kind.gated else ("up", "down")
        weights = {name: weight("embed", "mlp", output_first=name == "down") for name in names}
        if self.biases:
            sides = {name: "embed" if name == "down" else "mlp" for name in names}
            weights |= {f"{name}_bias": weight(side, group="vector") for name, side in sides.items()}
        return weights

    def flops(self, site: BlockContext, seq: int) -> float:
        return 2.0 * site.embed * self.mlp * (3 if self.kind.gated else 2)

    def saves(self, site: BlockContext) -> list[Saved]:
        """Return the products' results, the gate's factors and what the norm needs."""
        return [
            saved("mlp", name="up", product=True),
            *([saved("mlp", name="gate", product=True)] if self.kind.gated else []),
            saved("embed", name="down", product=True, result=True),
            saved("mlp", count=2),
            saved("embed"),
            saved("embed", count=2, float32=True),
        ]

    def build(self, site: BlockContext, *, numerics: "Numerics", key: "Array") -> Any:
        return feed_forward_layer()(self, site, numerics=numerics, key=key)


@cache
def feed_forward_layer() -> Any:
    """Return the class of the module. It is made here, so that declarations are imported without JAX."""
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from jaxtyping import Array, Float

    from valkyrie.models.layers import Boundaries, biased, normal, parameter, project
    from valkyrie.ops.linear import Numerics, made_once

    _NONLINEAR = {
        Nonlinearity.swiglu: jax.nn.silu,
        Nonlinearity.geglu: jax.nn.gelu,
        Nonlinearity.gelu: jax.nn.gelu,
        Nonlinearity.relu: jax.nn.relu,
        Nonlinearity.relu2: lambda x: jnp.square(jax.nn.relu(x)),
    }
    """What is applied to the gate of a gated product, and to the hidden side of a plain one."""

    class FeedForwardLayer(nnx.Module):
        """A feed-forward product, gated or plain; the depth of the stack scales its last matrix at first."""

        def __init__(self, block: FeedForward, site: BlockContext, *, numerics: Numerics, key: Array) -> None:
            keys, specs = jax.random.split(key, 3), block.parameters(site)
            self.kind, self.numerics = block.kind, numerics
            shape, deviation = (site.embed, block.mlp), site.embed**-0.5
            self.up = parameter(specs["up"], normal(keys[0], shape, deviation), numerics)
            if block.kind.gated:
                self.gate = parameter(specs["gate"], normal(keys[1], shape, deviation), numerics)
            last = 1 / math.sqrt(2 * site.layers * block.mlp)
            self.down = parameter(specs["down"], normal(keys[2], shape[::-1], last).T, numerics)
            self.biases = block.biases
            for name in [name for name in specs if name.endswith("_bias")]:
                setattr(self, name, parameter(specs[name], jnp.zeros(specs[name].shape), numerics))

        def __call__(
            self, x: Float[Array, "batch seq embed"], boundaries: Boundaries, shard: Shard
        ) -> Float[Array, "batch seq embed"]:
            """Return the product of each position."""
            up = self._biased(
                project("bse,em->bsm", x, self.up, shard=shard, numerics=self.numerics, name="up"), "up", shard
            )
            if self.kind.gated:
                gate = project("bse,em->bsm", x, self.gate, shard=shard, numerics=self.numerics, name="gate")
                gate = self._biased(gate, "gate", shard)
                up, gate = made_once(up, gate)
                hidden = _NONLINEAR[self.kind](gate) * up
            else:
                hidden = _NONLINEAR[self.kind](up)
            hidden = shard(hidden, "batch", "seq", "mlp")
            down = project("bsm,em->bse", hidden, self.down, shard=shard, numerics=self.numerics, name="down")
            return self._biased(down, "down", shard)

        def _biased(self, x: Float[Array, "..."], name: str, shard: Shard) -> Float[Array, "..."]:
            return biased(x, getattr(self, f"{name}_bias"), shard) if self.biases else x

    return FeedForwardLayer
