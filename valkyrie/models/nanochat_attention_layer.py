"""The Flax module of nanochat's attention (`valkyrie.models.nanochat_attention`)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from valkyrie.axes import Parameter, Shard
from valkyrie.models.attention_layer import AttentionLayer, Projections
from valkyrie.models.block import BlockContext
from valkyrie.models.layers import parameter, uniform, unit_mean_square
from valkyrie.models.nanochat_attention import NanochatAttention, gate_channels
from valkyrie.ops.linear import Numerics, linear, lookup

GATE_INIT_MAX = 0.02
"""Initial gate weights are uniform between 0 and this value, as in nanochat."""


class NanochatProjections(Projections):
    """Query, key and value projections. Queries and keys are rotated, then normalised and scaled.

    nanochat rotates by -p theta at position p, the opposite of the usual direction. Converted weights rely on this.
    """

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
        return self._norm_and_scale(super().queries(x, -positions, shard))

    def keys_values(
        self, x: Float[Array, "batch seq embed"], positions: Int[Array, "*batch seq"], shard: Shard
    ) -> tuple[Float[Array, "batch seq kv_heads head_dim"], Float[Array, "batch seq kv_heads head_dim"]]:
        k, v = super().keys_values(x, -positions, shard)
        return self._norm_and_scale(k), v

    def _norm_and_scale(self, x: Array) -> Array:
        return (self.gain * unit_mean_square(x, self.epsilon)).astype(x.dtype)


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
