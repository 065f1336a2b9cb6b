"""Decides the parts that every model shares: the norm, the feed-forward, and dropout."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from valkyrie.axes import Shard
from valkyrie.models.base import normal, parameter
from valkyrie.models.config import FeedForward
from valkyrie.ops.linear import Numerics, linear, made_once

_ACTIVATION = {
    FeedForward.swiglu: jax.nn.silu,
    FeedForward.geglu: jax.nn.gelu,
    FeedForward.gelu: jax.nn.gelu,
    FeedForward.relu: jax.nn.relu,
    FeedForward.relu2: lambda x: jnp.square(jax.nn.relu(x)),
}
"""What is applied to the gate of a gated product, and to the hidden side of a plain one."""


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation with a learnt scale (arXiv 1910.07467), computed in float32."""

    def __init__(self, embed: int, epsilon: float, *, numerics: Numerics, group: str = "vector") -> None:
        self.scale = parameter(jnp.ones((embed,), numerics.parameter), ("embed",), group)
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "*rows embed"]) -> Float[Array, "*rows embed"]:
        """Return `x` with unit mean square over `embed`, scaled, in x's dtype."""
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.epsilon)
        return (wide * self.scale[...].astype(jnp.float32)).astype(x.dtype)


class MLP(nnx.Module):
    """A feed-forward product, gated (arXiv 2002.05202) or plain; `depth` scales its last matrix at first."""

    def __init__(self, embed: int, mlp: int, kind: FeedForward, *, depth: int, numerics: Numerics, key: Array) -> None:
        keys, dtype = jax.random.split(key, 3), numerics.parameter
        self.kind, self.numerics = kind, numerics
        self.up = parameter(normal(keys[0], (embed, mlp), embed**-0.5, dtype), ("embed", "mlp"))
        if kind.gated:
            self.gate = parameter(normal(keys[1], (embed, mlp), embed**-0.5, dtype), ("embed", "mlp"))
        deviation = 1 / math.sqrt(2 * depth * mlp)
        # Embed first, as in the others: what a fully sharded partition gathers is then contiguous.
        self.down = parameter(normal(keys[2], (mlp, embed), deviation, dtype).T, ("embed", "mlp"))

    def __call__(self, x: Float[Array, "batch seq embed"], shard: Shard) -> Float[Array, "batch seq embed"]:
        """Return the product of each position."""
        up = linear("bse,em->bsm", x, self.up[...], axes=("embed", "mlp"), shard=shard, numerics=self.numerics)
        if self.kind.gated:
            gate = linear("bse,em->bsm", x, self.gate[...], axes=("embed", "mlp"), shard=shard, numerics=self.numerics)
            up, gate = made_once(up, gate)
            hidden = _ACTIVATION[self.kind](gate) * up
        else:
            hidden = _ACTIVATION[self.kind](up)
        hidden = shard(hidden, "batch", "seq", "mlp")
        return linear("bsm,em->bse", hidden, self.down[...], axes=("embed", "mlp"), shard=shard, numerics=self.numerics)


def dropout(x: Float[Array, "batch seq embed"], rate: float, key: Array | None) -> Float[Array, "batch seq embed"]:
    """Return `x` with channels dropped for a whole sequence, as lindermanlab/S5 does; unchanged without a key."""
    if key is None or rate == 0:
        return x
    kept = jax.random.bernoulli(key, 1 - rate, (x.shape[0], 1, x.shape[2]))
    return jnp.where(kept, x / (1 - rate), 0).astype(x.dtype)
