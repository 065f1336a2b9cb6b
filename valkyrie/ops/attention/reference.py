"""Reference attention with an explicit mask. The other implementations are tested against it.

Time and memory are quadratic in the length, but it is the fastest implementation for short sequences.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from valkyrie.ops.attention.pattern import GlobalTokens, Pattern, Sinks, apply_soft_cap


def reference_attention(
    q: Float[Array, "batch seq heads head_dim"],
    k: Float[Array, "batch seq kv_heads head_dim"],
    v: Float[Array, "batch seq kv_heads value_dim"],
    *,
    pattern: Pattern,
    segment_ids: Int[Array, "batch seq"] | None = None,
    global_tokens: GlobalTokens | None = None,
    sinks: Sinks | None = None,
) -> Float[Array, "batch seq heads value_dim"]:
    """Return attention in q's dtype, computed with one full matrix of logits per head (two with global tokens)."""
    positions = jnp.arange(q.shape[1])
    row, column = positions[:, None], positions[None, :]
    is_allowed = (
        jnp.ones((1, 1, 1), bool) if segment_ids is None else segment_ids[:, :, None] == segment_ids[:, None, :]
    )
    if pattern.causal:
        is_allowed = is_allowed & (column <= row)
    in_window = pattern.sees(row, column)[None]
    if global_tokens is None:
        return _masked_attention(q, k, v, is_allowed & in_window, pattern.soft_cap, sinks)
    tokens = global_tokens
    is_entry = tokens.valid[:, :, None] & (tokens.positions[:, :, None] == positions)
    is_global = is_entry.any(1)
    local = _masked_attention(q, k, v, is_allowed & (in_window | is_global[:, None, :]), pattern.soft_cap, sinks)
    entry = jnp.argmax(is_entry, axis=1)
    q_global = jax.vmap(lambda rows, index: rows[index])(tokens.q, entry)
    global_mask = jnp.broadcast_to(is_allowed, (1, *in_window.shape[1:]) if segment_ids is None else is_allowed.shape)
    global_rows = _masked_attention(q_global, tokens.k, tokens.v, global_mask, pattern.soft_cap, sinks)
    return jnp.where(is_global[:, :, None, None], global_rows, local)


def _masked_attention(
    q: Float[Array, "batch seq heads head_dim"],
    k: Float[Array, "batch seq kv_heads head_dim"],
    v: Float[Array, "batch seq kv_heads value_dim"],
    mask: Bool[Array, "#batch seq seq"],
    soft_cap: float | None,
    sinks: Sinks | None,
) -> Float[Array, "batch seq heads value_dim"]:
    batch, seq, heads, head_dim = q.shape
    grouped = q.reshape(batch, seq, k.shape[2], -1, head_dim)
    logits = jnp.einsum("bikgd,bjkd->bkgij", grouped, k, preferred_element_type=jnp.float32) * head_dim**-0.5
    logits, mask = apply_soft_cap(logits, soft_cap), mask[:, None, None]
    logits = jnp.where(mask, logits, jnp.finfo(jnp.float32).min)
    if sinks is not None:
        column = jnp.broadcast_to(sinks.reshape(*logits.shape[1:3], 1, 1), (*logits.shape[:-1], 1))
        logits = jnp.concatenate([logits, column], axis=-1)
    weights = jax.nn.softmax(logits, axis=-1)[..., : k.shape[1]]
    weights = jnp.where(mask, weights, 0.0).astype(v.dtype)
    out = jnp.einsum("bkgij,bjkd->bikgd", weights, v, preferred_element_type=jnp.float32)
    return out.reshape(batch, seq, heads, v.shape[3]).astype(q.dtype)
