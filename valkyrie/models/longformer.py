"""Decides the attention layer: windowed (Longformer, arXiv 2004.05150), rotary, with optional global tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from valkyrie.axes import UNSHARDED, Axes, Axis, Placed, Shard
from valkyrie.models.base import ATTENTION_OUT, KEY, QUERY, VALUE, normal, parameter
from valkyrie.models.config import AttentionConfig
from valkyrie.ops.attention import (
    GlobalStep,
    GlobalTokens,
    KVCache,
    attention,
    attention_step,
    init_cache,
    sharded_attention,
)
from valkyrie.ops.linear import Numerics, linear
from valkyrie.ops.rotary import rotate

_QUERY: Axes = ("embed", "heads", "head_dim")
_KEY: Axes = ("embed", "kv_heads", "head_dim")
_OUT: Axes = ("embed", "heads", "head_dim")


class Projections(nnx.Module):
    """Query, key and value projections, rotated by position."""

    def __init__(self, config: AttentionConfig, embed: int, *, numerics: Numerics, key: Array) -> None:
        keys, deviation, dtype = jax.random.split(key, 3), embed**-0.5, numerics.parameter
        heads, kv_heads, head_dim = config.heads, config.kv_heads, config.head_dim
        self.theta, self.numerics = config.rope_theta, numerics
        self.query = parameter(normal(keys[0], (embed, heads, head_dim), deviation, dtype), _QUERY)
        self.key = parameter(normal(keys[1], (embed, kv_heads, head_dim), deviation, dtype), _KEY)
        self.value = parameter(normal(keys[2], (embed, kv_heads, head_dim), deviation, dtype), _KEY)

    def queries(
        self, x: Float[Array, "batch seq embed"], positions: Int[Array, " seq"], shard: Shard
    ) -> Float[Array, "batch seq heads head_dim"]:
        """Return rotated queries."""
        q = linear("bse,ehd->bshd", x, self.query[...], axes=_QUERY, shard=shard, numerics=self.numerics)
        return rotate(q, positions, self.theta, shard.backend)

    def keys_values(
        self, x: Float[Array, "batch seq embed"], positions: Int[Array, " seq"], shard: Shard
    ) -> tuple[Float[Array, "batch seq kv_heads head_dim"], Float[Array, "batch seq kv_heads head_dim"]]:
        """Return rotated keys, and values."""
        k, v = (
            linear("bse,ehd->bshd", x, w[...], axes=_KEY, shard=shard, numerics=self.numerics)
            for w in (self.key, self.value)
        )
        return rotate(k, positions, self.theta, shard.backend), v


class LongformerAttention(nnx.Module):
    """Attention within a window and dilation that are fixed for this layer; leading tokens may be global."""

    def __init__(
        self,
        config: AttentionConfig,
        embed: int,
        *,
        window: int | None,
        dilation: int,
        depth: int,
        numerics: Numerics,
        key: Array,
    ) -> None:
        keys = jax.random.split(key, 3)
        self.config, self.window, self.dilation, self.numerics = config, window, dilation, numerics
        self.local = Projections(config, embed, numerics=numerics, key=keys[0])
        if config.global_tokens:
            self.globals = Projections(config, embed, numerics=numerics, key=keys[1])
        shape = (config.heads, config.head_dim, embed)
        deviation = (2 * depth * config.heads * config.head_dim) ** -0.5
        weights = normal(keys[2], shape, deviation, numerics.parameter)
        # Embed first, as in the others: what a fully sharded partition gathers is then contiguous.
        self.out = parameter(weights.transpose(2, 0, 1), _OUT)

    def __call__(
        self, x: Float[Array, "batch seq embed"], *, segment_ids: Int[Array, "batch seq"] | None, shard: Shard
    ) -> Float[Array, "batch seq embed"]:
        """Return the layer's output before the residual sum; unequal `segment_ids` do not see each other."""
        positions, rows = jnp.arange(x.shape[1]), _rows(shard, x.shape[0])
        of_heads, of_kv_heads = (rows, "seq", "heads", "head_dim"), (rows, "seq", "kv_heads", "head_dim")
        q = shard(self.local.queries(x, positions, shard), *of_heads)
        k, v = (shard(y, *of_kv_heads) for y in self.local.keys_values(x, positions, shard))
        q, k, v = (checkpoint_name(y, name) for y, name in ((q, QUERY), (k, KEY), (v, VALUE)))
        inputs: list[Array] = [q, k, v]
        axes: list[Placed] = [of_heads, of_kv_heads, of_kv_heads]
        if segment_ids is not None:
            inputs, axes = [*inputs, segment_ids], [*axes, (rows, "seq")]
        if self.config.global_tokens:
            first = min(self.config.global_tokens, x.shape[1])
            q_global = self.globals.queries(x[:, :first], positions[:first], shard)
            k_global, v_global = self.globals.keys_values(x, positions, shard)
            inputs += [q_global, k_global, v_global]
            axes += [(rows, None, "heads", "head_dim"), of_kv_heads, of_kv_heads]
        mixed = shard.map(self._local(segment_ids is not None, shard), axes, of_heads)(*inputs)
        out = linear("bshd,ehd->bse", mixed, self.out[...], axes=_OUT, shard=shard, numerics=self.numerics)
        return checkpoint_name(out, ATTENTION_OUT)

    def _local(self, segmented: bool, shard: Shard):
        """Return what each device does with its heads, rows and, under a sequence split, positions."""
        c, axis_names = self.config, shard.mesh_axes("seq")

        def mix(q: Array, k: Array, v: Array, *rest: Array) -> Array:
            segment_ids, rest = (rest[0], rest[1:]) if segmented else (None, rest)
            global_tokens = _leading(*rest) if rest else None
            asked = {
                "window": self.window,
                "causal": c.causal,
                "dilation": self.dilation,
                "segment_ids": segment_ids,
                "global_tokens": global_tokens,
                "backend": shard.backend,
            }
            if axis_names:
                return sharded_attention(q, k, v, axis_names=axis_names, **asked)
            return attention(q, k, v, impl=c.impl, **asked)

        return mix

    def init_state(self, batch: int, max_len: int) -> KVCache:
        """Return an empty cache: one window of keys, or `max_len` of them without a window."""
        c = self.config
        return init_cache(
            batch,
            c.kv_heads,
            c.head_dim,
            window=self.window,
            max_len=max_len,
            dilation=self.dilation,
            global_tokens=c.global_tokens,
            dtype=self.numerics.compute,
        )

    def step(self, x: Float[Array, "batch embed"], state: KVCache) -> tuple[Float[Array, "batch embed"], KVCache]:
        """Return the output of one more position and the cache after it: the streaming form."""
        wide, position = x[:, None], state.position[None]
        q = self.local.queries(wide, position, UNSHARDED)[:, 0]
        k, v = (y[:, 0] for y in self.local.keys_values(wide, position, UNSHARDED))
        beside = None
        if self.config.global_tokens:
            k_global, v_global = (y[:, 0] for y in self.globals.keys_values(wide, position, UNSHARDED))
            beside = GlobalStep(self.globals.queries(wide, position, UNSHARDED)[:, 0], k_global, v_global)
        mixed, state = attention_step(q, k, v, state, global_step=beside)
        out = linear("bhd,ehd->be", mixed, self.out[...], axes=_OUT, shard=UNSHARDED, numerics=self.numerics)
        return out, state


def _rows(shard: Shard, batch: int) -> Axis:
    """Return what splits the rows of attention: the batch's axes, and those of the residual stream that are free.

    Products over a split residual stream leave sums over its axes: each of their devices then takes its own rows of the
    sum, where otherwise all of them would take all rows and attend to the same.
    """
    free = not set(shard.mesh_axes("embed")) & {*shard.mesh_axes("heads"), *shard.mesh_axes("kv_heads")}
    split = free and shard.size("embed") > 1 and batch % (shard.size("batch") * shard.size("embed")) == 0
    return ("batch", "embed") if split else "batch"


def _leading(q: Array, k: Array, v: Array) -> GlobalTokens:
    positions = jnp.broadcast_to(jnp.arange(q.shape[1]), q.shape[:2])
    return GlobalTokens(positions, jnp.ones(q.shape[:2], bool), q, k, v)
