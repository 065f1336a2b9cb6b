"""The Flax module of multi-head latent attention (`valkyrie.models.latent_attention`)."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from valkyrie.axes import UNSHARDED, CombinedAxes, Shard
from valkyrie.models.attention_layer import ProjectionNorm, batch_axes, scale_logits
from valkyrie.models.block import BlockContext
from valkyrie.models.latent_attention import LatentAttention
from valkyrie.models.layers import Boundaries, normal, parameter, project
from valkyrie.ops.attention import attention, sharded_attention
from valkyrie.ops.attention.pattern import KeyBlock, heads_first, heads_last, joint_attention
from valkyrie.ops.choices import ATTENTION_OUTPUT
from valkyrie.ops.linear import Numerics
from valkyrie.ops.rotary import rotate

LATENT_NORM_EPSILON = 1e-6
"""Epsilon of the norms of latents, as in DeepSeek-V2 and V3."""


class LatentCache(NamedTuple):
    """The cache after `position` tokens. Slot p % slots stores the token at position p."""

    latent: Float[Array, "batch slots latent"]
    rope_key: Float[Array, "batch slots rope_dim"]
    position: Int[Array, ""]


class LatentAttentionLayer(nnx.Module):
    """Multi-head latent attention.

    Training computes the keys and values of all heads. `step` works on latents, and multiplies queries and outputs by
    the projections of keys and values instead (the absorbed form), so its cache has `latent + rope_dim` numbers per
    token.
    """

    latent: nnx.Param
    rope_key: nnx.Param
    key: nnx.Param
    value: nnx.Param
    out: nnx.Param

    def __init__(self, block: LatentAttention, context: BlockContext, *, numerics: Numerics, key: Array) -> None:
        self.block, self.numerics = block, numerics
        specs = block.parameters(context)
        matrices = {name: spec for name, spec in specs.items() if spec.group == "matrix"}
        out_deviation = (2 * context.layers * block.heads * block.value_dim) ** -0.5
        for (name, spec), weight_key in zip(matrices.items(), jax.random.split(key, len(matrices)), strict=True):
            deviation = out_deviation if name == "out" else spec.shape[0] ** -0.5
            setattr(self, name, parameter(spec, normal(weight_key, spec.shape, deviation), numerics))
        norm = partial(ProjectionNorm, epsilon=LATENT_NORM_EPSILON, numerics=numerics)
        self.latent_norm = norm(specs["latent_norm.scale"])
        if block.query_latent is not None:
            self.query_latent_norm = norm(specs["query_latent_norm.scale"])

    def __call__(
        self, x: Float[Array, "batch seq embed"], boundaries: Boundaries, shard: Shard
    ) -> Float[Array, "batch seq embed"]:
        """Return the output of the layer, before the residual sum. Attention does not cross segments."""
        rows, segment_ids = batch_axes(shard, x.shape[0], "heads"), boundaries.segment_ids
        positions = jnp.arange(x.shape[1])
        key_axes, value_axes = (rows, "seq", "heads", "head_dim"), (rows, "seq", "heads", "value_dim")
        q = checkpoint_name(shard(self._queries(x, positions, shard), *key_axes), "query")
        latent, rope_key = self._latents(x, positions, shard)
        key = self._from_latent(latent, "key", shard)
        v = shard(self._from_latent(latent, "value", shard), *value_axes)
        shared = jnp.broadcast_to(rope_key[:, :, None], (*key.shape[:3], rope_key.shape[-1]))
        k = shard(jnp.concatenate([key, shared], axis=-1), *key_axes)
        inputs: list[Array] = [q, k, v]
        axes: list[CombinedAxes] = [key_axes, key_axes, value_axes]
        if segment_ids is not None:
            inputs, axes = [*inputs, segment_ids], [*axes, (rows, "seq")]
        with jax.named_scope(ATTENTION_OUTPUT):
            mixed = shard.map(self._local_attention(shard), axes, value_axes)(*inputs)
        return project("bshd,ehd->bse", mixed, self.out, shard=shard, numerics=self.numerics, name="out")

    def _local_attention(self, shard: Shard):
        """Return a function that computes attention for one device's sequences, heads and positions."""
        options = {"window": None, "causal": True, "impl": self.block.impl, "backend": shard.backend}
        sequence_axes = shard.activation_mesh_axes("seq")
        mix = partial(sharded_attention, axis_names=sequence_axes) if sequence_axes else attention

        def attend(q: Array, k: Array, v: Array, segment_ids: Array | None = None) -> Array:
            return mix(q, k, v, segment_ids=segment_ids, **options)

        return attend

    def _queries(
        self, x: Float[Array, "batch seq embed"], positions: Int[Array, " seq"], shard: Shard
    ) -> Float[Array, "batch seq heads head_dim"]:
        """Return the queries, times `Yarn.logit_scale`."""
        block = self.block
        if block.query_latent is not None:
            x = self.query_latent_norm(self._to_latent(x, "query_latent", shard))
        with jax.named_scope("query"):
            weights = getattr(self, block.query_name)
            q = project("bse,ehd->bshd", x, weights, shard=shard, numerics=self.numerics)
            fixed, rotated = jnp.split(q, [block.nope_dim], axis=-1)
            rotated = rotate(rotated, positions, block.rope_theta, shard.backend, block.yarn)
            return scale_logits(jnp.concatenate([fixed, rotated], axis=-1), block.yarn)

    def _latents(
        self, x: Float[Array, "batch seq embed"], positions: Int[Array, " seq"], shard: Shard
    ) -> tuple[Float[Array, "batch seq latent"], Float[Array, "batch seq rope_dim"]]:
        """Return the normalised latent, and the rotated key that all heads share."""
        rope_key = self._to_latent(x, "rope_key", shard, "rope_dim")[:, :, None]
        rope_key = rotate(rope_key, positions, self.block.rope_theta, shard.backend, self.block.yarn)
        return self.latent_norm(self._to_latent(x, "latent", shard)), rope_key[:, :, 0]

    def _to_latent(
        self, x: Float[Array, "batch seq embed"], name: str, shard: Shard, axis: str | None = None
    ) -> Float[Array, "batch seq channels"]:
        """Return the product of the layer's input with the parameter `name`. `axis` is that of its channels."""
        weights = getattr(self, name)
        latent = project("bse,ec->bsc", x, weights, shard=shard, numerics=self.numerics, name=name)
        return shard(latent, "batch", "seq", axis or name)

    def _from_latent(
        self, latent: Float[Array, "batch seq latent"], name: str, shard: Shard
    ) -> Float[Array, "batch seq heads channels"]:
        weights = getattr(self, name)
        return project("bsl,lhd->bshd", latent, weights, shard=shard, numerics=self.numerics, name=name)

    def init_state(self, batch: int, max_len: int) -> LatentCache:
        """Return an empty cache of latents and shared keys for `max_len` positions."""
        sizes = (self.block.latent, self.block.rope_dim)
        latent, rope_key = (jnp.zeros((batch, max_len, size), self.numerics.compute) for size in sizes)
        return LatentCache(latent, rope_key, jnp.zeros((), jnp.int32))

    def step(
        self, x: Float[Array, "batch embed"], state: LatentCache
    ) -> tuple[Float[Array, "batch embed"], LatentCache]:
        """Process one position of each sequence. Returns the output for input `x` and the updated cache."""
        block, sequence, position = self.block, x[:, None], state.position
        slots = state.latent.shape[1]
        q = self._queries(sequence, position[None], UNSHARDED)
        fixed, rotated = jnp.split(q, [block.nope_dim], axis=-1)
        key, value = (weights[...].astype(self.numerics.compute) for weights in (self.key, self.value))
        absorbed = jnp.concatenate([jnp.einsum("bshd,lhd->bshl", fixed, key), rotated], axis=-1)
        # `joint_attention` divides logits by the root of the number of channels that it sees.
        absorbed = absorbed * (absorbed.shape[-1] / block.head_dim) ** 0.5

        def store(cached: Array, new: Array) -> Array:
            return jax.lax.dynamic_update_slice(cached, new.astype(cached.dtype), (0, position % slots, 0))

        latent, rope_key = map(store, state[:2], self._latents(sequence, position[None], UNSHARDED))
        is_filled = jnp.arange(slots) <= position
        keys = jnp.concatenate([latent, rope_key], axis=-1)
        keys = KeyBlock(keys[:, None], latent[:, None], is_filled[None, None])
        mixed = heads_last(joint_attention(heads_first(absorbed, 1), [keys]))
        mixed = jnp.einsum("bshl,lhd->bshd", mixed, value)
        out = project("bshd,ehd->bse", mixed, self.out, shard=UNSHARDED, numerics=self.numerics)
        return out[:, 0], LatentCache(latent, rope_key, position + 1)
