"""The Flax module of nanochat's attention (`valkyrie.models.nanochat_attention`)."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from valkyrie.axes import Parameter, Shard
from valkyrie.models.attention_layer import AttentionLayer, Projections
from valkyrie.models.block import BlockContext
from valkyrie.models.layers import normed_cotangent, parameter, uniform, unit_mean_square
from valkyrie.models.nanochat_attention import NanochatAttention, gate_channels
from valkyrie.ops.linear import Numerics, linear, lookup

GATE_INIT_MAX = 0.02
"""Initial gate weights are uniform between 0 and this value, as in nanochat."""


class NanochatProjections(Projections):
    """Query, key and value projections. Queries and keys are rotated, then normalised and scaled.

    nanochat rotates by -p theta at position p, the opposite of the usual direction. Converted weights rely on this.
    """

    unnamed = ("value",)

    def __init__(self, block: NanochatAttention, specs: dict[str, Parameter], *, numerics: Numerics, key: Array):
        super().__init__(block, specs, numerics=numerics, key=key)
        self.gain, self.epsilon = block.qk_gain, block.qk_norm_epsilon
        keys = jax.random.split(key, 3)
        for weights, weights_key in zip((self.query, self.key, self.value), keys, strict=True):
            shape = weights.shape
            weights[...] = uniform(weights_key, shape, shape[0] ** -0.5).astype(weights.dtype)

    def queries(
        self, x: Float[Array, "batch seq embed"], positions: Int[Array, "*batch seq"], shard: Shard
    ) -> Float[Array, "batch seq heads head_dim"]:
        return norm_and_scale(super().queries(x, -positions, shard), self.gain, self.epsilon, "query")

    def keys_values(
        self, x: Float[Array, "batch seq embed"], positions: Int[Array, "*batch seq"], shard: Shard
    ) -> tuple[Float[Array, "batch seq kv_heads head_dim"], Float[Array, "batch seq kv_heads head_dim"]]:
        k, v = super().keys_values(x, -positions, shard)
        return norm_and_scale(k, self.gain, self.epsilon, "key"), v


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def norm_and_scale(
    x: Float[Array, "batch seq heads head_dim"], gain: float, epsilon: float, name: str
) -> Float[Array, "batch seq heads head_dim"]:
    """Return `x` with a root mean square of `gain` in each head, computed in float32, in x's dtype.

    The backward pass needs the result and a number per head, and neither `x` nor the product that computes it. `remat`
    refers to both by `name`.
    """
    return (gain * unit_mean_square(x, epsilon)).astype(x.dtype)


def _norm_and_scale_forward(x: Array, gain: float, epsilon: float, name: str) -> tuple[Array, tuple[Array, Array]]:
    x_f32 = x.astype(jnp.float32)
    inverse_rms = jax.lax.rsqrt(jnp.mean(jnp.square(x_f32), axis=-1, keepdims=True) + epsilon)
    scaled = (gain * (x_f32 * inverse_rms)).astype(x.dtype)
    scaled, inverse_rms = (checkpoint_name(y, name) for y in (scaled, inverse_rms))
    return scaled, (scaled, inverse_rms)


def _norm_and_scale_backward(
    gain: float, epsilon: float, name: str, residuals: tuple[Array, Array], g: Array
) -> tuple[Array]:
    scaled, inverse_rms = residuals
    g_normed = gain * g.astype(jnp.float32)
    return (normed_cotangent(scaled.astype(jnp.float32) / gain, inverse_rms, g_normed).astype(g.dtype),)


norm_and_scale.defvjp(_norm_and_scale_forward, _norm_and_scale_backward)


class NanochatAttentionLayer(AttentionLayer):
    """Attention that adds a gated value embedding of each token to the values, in every second layer."""

    projections = NanochatProjections

    def __init__(self, block: NanochatAttention, context: BlockContext, *, numerics: Numerics, key: Array) -> None:
        super().__init__(block, context, numerics=numerics, key=key)
        self.out[...] = jnp.zeros_like(self.out[...])
        self.has_value_embedding, self.gate_channel_count = block.has_value_embedding(context), gate_channels(context)
        if self.has_value_embedding:
            specs, keys = block.parameters(context), jax.random.split(jax.random.fold_in(key, 1))
            gate = jax.random.uniform(keys[0], specs["value_gate"].shape, maxval=GATE_INIT_MAX)
            table = uniform(keys[1], specs["value_embedding"].shape, context.embed**-0.5)
            self.value_gate = parameter(specs["value_gate"], gate, numerics)
            self.value_embedding = parameter(specs["value_embedding"], table, numerics)

    def _keys_values(
        self,
        x: Float[Array, "batch seq embed"],
        positions: Int[Array, "*batch seq"],
        tokens: Int[Array, "batch seq"] | None,
        shard: Shard,
    ) -> tuple[Float[Array, "batch seq kv_heads head_dim"], Float[Array, "batch seq kv_heads head_dim"]]:
        """Return (keys, values). A layer with value embeddings adds the gated embedding of each token to the values."""
        k, v = self.local.keys_values(x, positions, shard)
        if not self.has_value_embedding:
            return k, v
        assert tokens is not None, "value embeddings need the tokens of the batch"
        with jax.named_scope("value_embedding"):
            axes = ("vocab", "embed")
            table = shard.shard_for_storage(self.value_embedding[...], *axes)
            embedded = lookup(table, tokens, axes=axes, shard=shard, numerics=self.numerics).reshape(v.shape)
            # With a name, so that a policy that saves values does not repeat the lookup for the gradient of the gate.
            embedded = checkpoint_name(embedded, "value")
            channels = shard(x[..., : self.gate_channel_count], "batch", "seq", None)
            gate = linear(
                "bsc,kc->bsk",
                channels,
                self.value_gate[...],
                axes=("kv_heads", None),
                shard=shard,
                numerics=self.numerics,
            )
            return k, v + 3 * jax.nn.sigmoid(gate)[..., None] * embedded
