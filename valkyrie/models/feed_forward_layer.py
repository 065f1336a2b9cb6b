"""The Flax module of the feed-forward block (`valkyrie.models.feed_forward`)."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from valkyrie.axes import Shard
from valkyrie.models.block import BlockContext
from valkyrie.models.feed_forward import FeedForward, Nonlinearity
from valkyrie.models.layers import Boundaries, add_bias, normal, parameter, project
from valkyrie.ops.linear import Numerics, compute_cotangents_once

_CLAMP, _SLOPE = 7.0, 1.702
"""Bound of the hidden activations, and slope of the sigmoid, of `clamped_swiglu`."""


@jax.custom_vjp
def square_relu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return relu(x)². The backward pass needs `x`; autodiff would save relu(x) and a mask."""
    return jnp.square(jax.nn.relu(x))


# The forward rule repeats the body, so that remat policies see its operations.
square_relu.defvjp(lambda x: (jnp.square(jax.nn.relu(x)), x), lambda x, g: (g * (2 * jax.nn.relu(x)),))

NONLINEARITIES = {
    Nonlinearity.swiglu: jax.nn.silu,
    Nonlinearity.clamped_swiglu: lambda x: x * jax.nn.sigmoid(_SLOPE * x),
    Nonlinearity.geglu: jax.nn.gelu,
    Nonlinearity.gelu: jax.nn.gelu,
    Nonlinearity.relu: jax.nn.relu,
    Nonlinearity.relu2: square_relu,
}
"""Function applied to the gate of a gated feed-forward, or to the hidden activations of a plain one."""


def activate(
    kind: Nonlinearity, up: Float[Array, "..."], gate: Float[Array, "..."] | None = None
) -> Float[Array, "..."]:
    """Return the hidden activations of a feed-forward. `gate` is None for plain kinds."""
    if gate is None:
        return NONLINEARITIES[kind](up)
    factor, gate_input = compute_cotangents_once(up, gate)
    if kind is Nonlinearity.clamped_swiglu:
        factor, gate_input = jnp.clip(factor, -_CLAMP, _CLAMP) + 1, jnp.minimum(gate_input, _CLAMP)
    return NONLINEARITIES[kind](gate_input) * factor


class FeedForwardLayer(nnx.Module):
    """A gated or plain feed-forward. The initial weights of `down` are divided by sqrt(2 * layers), as in GPT-2."""

    def __init__(self, block: FeedForward, context: BlockContext, *, numerics: Numerics, key: Array) -> None:
        keys, specs = jax.random.split(key, 3), block.parameters(context)
        self.kind, self.numerics = block.kind, numerics
        shape, deviation = (context.embed, block.mlp), context.embed**-0.5
        self.up = parameter(specs["up"], normal(keys[0], shape, deviation), numerics)
        if block.kind.is_gated:
            self.gate = parameter(specs["gate"], normal(keys[1], shape, deviation), numerics)
        down_deviation = 1 / math.sqrt(2 * context.layers * block.mlp)
        self.down = parameter(specs["down"], normal(keys[2], shape[::-1], down_deviation).T, numerics)
        self.has_biases = block.biases
        for name in [name for name in specs if name.endswith("_bias")]:
            setattr(self, name, parameter(specs[name], jnp.zeros(specs[name].shape), numerics))

    def __call__(
        self, x: Float[Array, "batch seq embed"], boundaries: Boundaries, shard: Shard
    ) -> Float[Array, "batch seq embed"]:
        up = self._add_bias(
            project("bse,em->bsm", x, self.up, shard=shard, numerics=self.numerics, name="up"), "up", shard
        )
        if self.kind.is_gated:
            gate = project("bse,em->bsm", x, self.gate, shard=shard, numerics=self.numerics, name="gate")
            hidden = activate(self.kind, up, self._add_bias(gate, "gate", shard))
        else:
            hidden = activate(self.kind, up)
        hidden = shard(hidden, "batch", "seq", "mlp")
        down = project("bsm,em->bse", hidden, self.down, shard=shard, numerics=self.numerics, name="down")
        return self._add_bias(down, "down", shard)

    def _add_bias(self, x: Float[Array, "..."], name: str, shard: Shard) -> Float[Array, "..."]:
        return add_bias(x, getattr(self, f"{name}_bias"), shard) if self.has_biases else x
