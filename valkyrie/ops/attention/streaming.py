"""Attention for one token at a time, with a ring buffer of one window of keys, or of `max_len` keys without a window.

Time and memory per token do not depend on the number of previous tokens. The ring has shape (dilation, slots): a token
at position t reads only the slots of residue t % dilation, which are its window. Global tokens are the first positions
of the sequence. They are stored permanently in addition to the ring.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Int

from valkyrie.ops.attention.pattern import KeyBlock, Sinks, heads_first, heads_last, joint_attention
from valkyrie.units import count_text


class GlobalCache(NamedTuple):
    """Keys and values of the global tokens: local projections (`k`, `v`) and global ones (`global_k`, `global_v`)."""

    k: Float[Array, "batch globals kv_heads head_dim"]
    v: Float[Array, "batch globals kv_heads head_dim"]
    global_k: Float[Array, "batch globals kv_heads head_dim"]
    global_v: Float[Array, "batch globals kv_heads head_dim"]


class KVCache(NamedTuple):
    """The cache of causal attention after `position` tokens.

    The token at position p is stored at [p % dilation, p // dilation % slots] of `k` and `v`. `global_cache` stores the
    global tokens, or is None without any.
    """

    k: Float[Array, "batch dilation slots kv_heads head_dim"]
    v: Float[Array, "batch dilation slots kv_heads head_dim"]
    position: Int[Array, ""]
    global_cache: GlobalCache | None


class GlobalStep(NamedTuple):
    """Projections of one token as a global token. Used only if the token is global."""

    q: Float[Array, "batch heads head_dim"]
    k: Float[Array, "batch kv_heads head_dim"]
    v: Float[Array, "batch kv_heads head_dim"]


def init_cache(
    batch: int,
    kv_heads: int,
    head_dim: int,
    *,
    window: int | None,
    max_len: int,
    dilation: int = 1,
    global_tokens: int = 0,
    dtype: DTypeLike = jnp.float32,
) -> KVCache:
    """Return an empty cache for sequences of up to `max_len` tokens. The first `global_tokens` are global."""
    max_slots = -(-max_len // dilation)
    slots = max_slots if window is None else min(window, max_slots)
    k, v = (jnp.zeros((batch, dilation, slots, kv_heads, head_dim), dtype) for _ in range(2))
    global_cache = None
    if global_tokens:
        global_cache = GlobalCache(*(jnp.zeros((batch, global_tokens, kv_heads, head_dim), dtype) for _ in range(4)))
    return KVCache(k, v, jnp.zeros((), jnp.int32), global_cache)


def attention_step(
    q: Float[Array, "batch heads head_dim"],
    k: Float[Array, "batch kv_heads head_dim"],
    v: Float[Array, "batch kv_heads head_dim"],
    cache: KVCache,
    *,
    global_step: GlobalStep | None = None,
    soft_cap: float | None = None,
    sinks: Sinks | None = None,
    is_chunked: bool = False,
) -> tuple[Float[Array, "batch heads head_dim"], KVCache]:
    """Return the output of causal `attention` for the next token, and the cache with that token added.

    Window, dilation and number of global tokens are those of `init_cache`. Results equal the parallel form up to
    `max_len` tokens. Without a window, later tokens see only the last `max_len`. `global_step` is required if the cache
    has global tokens. With `is_chunked`, the window is a chunk (`attention_within_chunks`), and the dilation is 1.
    """
    _, dilation, slots = cache.k.shape[:3]
    position = cache.position
    residue, ring_step = position % dilation, position // dilation
    index = (0, residue, ring_step % slots, 0, 0)
    keys = jax.lax.dynamic_update_slice(cache.k, k[:, None, None].astype(cache.k.dtype), index)
    values = jax.lax.dynamic_update_slice(cache.v, v[:, None, None].astype(cache.v.dtype), index)
    slot_age = (ring_step - jnp.arange(slots)) % slots
    oldest_age = ring_step % slots if is_chunked else ring_step
    ring = KeyBlock(
        _select_slots(keys, residue), _select_slots(values, residue), (slot_age <= oldest_age)[None, None, :]
    )
    grouped_query = heads_first(q[:, None], k.shape[1])
    global_cache = cache.global_cache
    if global_cache is None:
        out = heads_last(joint_attention(grouped_query, [ring], (), soft_cap, sinks))[:, 0]
        return out, KVCache(keys, values, position + 1, None)
    if global_step is None:
        raise ValueError(
            f"`global_step` is missing, but the cache has {count_text(global_cache.k.shape[1], 'global token')}. Pass "
            "the token's projections as `global_step`."
        )
    global_cache = _store_global_token(global_cache, position, k, v, global_step)
    ages = position - jnp.arange(global_cache.k.shape[1])
    in_ring = (ages % dilation == 0) & (ages // dilation < slots)
    first_k, first_v = (x.swapaxes(1, 2) for x in (global_cache.k, global_cache.v))
    outside_ring = KeyBlock(first_k, first_v, ((ages >= 0) & ~in_ring)[None, None, :])
    local_row = joint_attention(grouped_query, [ring, outside_ring], (), soft_cap, sinks)
    global_k, global_v = (x.swapaxes(1, 2) for x in (global_cache.global_k, global_cache.global_v))
    all_global = KeyBlock(global_k, global_v, (ages >= 0)[None, None, :])
    global_query = heads_first(global_step.q[:, None], k.shape[1])
    global_row = joint_attention(global_query, [all_global], (), soft_cap, sinks)
    out = jnp.where(position < global_cache.k.shape[1], global_row, local_row)
    return heads_last(out)[:, 0], KVCache(keys, values, position + 1, global_cache)


def _select_slots(
    x: Float[Array, "batch dilation slots kv_heads head_dim"], residue: Int[Array, ""]
) -> Float[Array, "batch kv_heads slots head_dim"]:
    return jax.lax.dynamic_index_in_dim(x, residue, axis=1, keepdims=False).swapaxes(1, 2)


def _store_global_token(
    global_cache: GlobalCache,
    position: Int[Array, ""],
    k: Float[Array, "batch kv_heads head_dim"],
    v: Float[Array, "batch kv_heads head_dim"],
    global_step: GlobalStep,
) -> GlobalCache:
    """Store a token in the cache of global tokens. Does nothing for positions after the global ones."""
    pairs = zip(global_cache, (k, v, global_step.k, global_step.v), strict=True)
    return GlobalCache(*(cached.at[:, position].set(new.astype(cached.dtype), mode="drop") for cached, new in pairs))
