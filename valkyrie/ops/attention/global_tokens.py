"""Adds global tokens to windowed attention: every query sees them, and they see all keys.

In the matrix of logits, a global token is a column that every row sees, and a row that sees every column.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from valkyrie.ops.attention.pattern import (
    GlobalKeys,
    GlobalTokens,
    KeyBlock,
    KeyRange,
    Keys,
    Pattern,
    Queries,
    Sinks,
    heads_first,
    heads_last,
    joint_attention,
    same_segment,
)


def take_positions(x: Array, positions: Int[Array, "batch globals"]) -> Array:
    """Return the entries of `x` (batch, seq, ...) at `positions`, clipped to its length."""
    return jax.vmap(lambda a, i: jnp.take(a, i, axis=0, mode="clip"))(x, positions)


def attend_with_global_tokens(
    attend: Callable[[KeyRange], Queries],
    k: Keys,
    v: Keys,
    tokens: GlobalTokens,
    *,
    pattern: Pattern,
    key_range: KeyRange,
    start: int | Int[Array, ""] = 0,
    shard_count: int = 1,
    take: Callable[[Array, Int[Array, "batch globals"]], Array] = take_positions,
    axis_names: tuple[str, ...] = (),
) -> Queries:
    """Return windowed attention where every query also sees the global tokens, and global tokens see all keys.

    Both ignore only the window: causal attention still sees no later position, and no query sees another segment.

    Args:
        attend: Computes windowed attention for a key range, and also attends to the keys in its `global_keys`.
        k: Keys of this shard.
        v: Values of this shard.
        tokens: The global tokens.
        pattern: Visible distances.
        key_range: Positions of the keys relative to the queries, and the segments of both.
        start: First position of this shard.
        shard_count: Number of shards of the sequence.
        take: Returns entries at positions relative to `start`, from the shards that own them.
        axis_names: Mesh axes that shard the sequence.
    """
    segments, seq = key_range.query_segments, k.shape[1]
    query_positions, local_positions = start + jnp.arange(seq), tokens.positions - start
    valid = _mark_distinct_tokens(tokens, seq * shard_count)
    global_segments = None if segments is None else take(segments, local_positions)
    visible = _mark_visible_global_keys(pattern, query_positions, segments, tokens.positions, valid, global_segments)
    out = attend(
        key_range._replace(global_keys=GlobalKeys(take(k, local_positions), take(v, local_positions), visible))
    )
    global_rows = _attend_from_global_tokens(
        tokens, pattern, query_positions, segments, global_segments, axis_names, key_range.sinks
    )
    return _overwrite_rows(out, global_rows, local_positions, valid)


def _mark_distinct_tokens(tokens: GlobalTokens, seq: int) -> Bool[Array, "batch globals"]:
    """Mark the entries of `tokens` that are valid, inside a sequence of length `seq`, and repeat no earlier entry."""
    positions = tokens.positions
    valid = tokens.valid & (positions >= 0) & (positions < seq)
    is_same = (positions[:, :, None] == positions[:, None, :]) & valid[:, None, :]
    is_earlier = jnp.tril(jnp.ones((positions.shape[1],) * 2, bool), -1)
    return valid & ~(is_same & is_earlier).any(-1)


def _mark_visible_global_keys(
    pattern: Pattern,
    query_positions: Int[Array, " rows"],
    row_segments: Int[Array, "batch rows"] | None,
    positions: Int[Array, "batch globals"],
    valid: Bool[Array, "batch globals"],
    segments: Int[Array, "batch globals"] | None,
) -> Bool[Array, "batch rows globals"]:
    """Mark the global tokens that each query sees, except those that are already in its window."""
    row, column = query_positions[None, :, None], positions[:, None, :]
    visible = valid[:, None, :] & ~pattern.sees(row, column) & same_segment(row_segments, segments)
    return visible & (column <= row) if pattern.causal else visible


def _attend_from_global_tokens(
    tokens: GlobalTokens,
    pattern: Pattern,
    key_positions: Int[Array, " seq"],
    key_segments: Int[Array, "batch seq"] | None,
    segments: Int[Array, "batch globals"] | None,
    axis_names: tuple[str, ...] = (),
    sinks: Sinks | None = None,
) -> Float[Array, "batch globals heads head_dim"]:
    """Return the attention of the global positions over all keys that they see."""
    mask = same_segment(segments, key_segments)
    if pattern.causal:
        mask = mask & (key_positions[None, None, :] <= tokens.positions[:, :, None])
    mask = jnp.broadcast_to(mask, (mask.shape[0], tokens.q.shape[1], tokens.k.shape[1]))
    block = KeyBlock(tokens.k.swapaxes(1, 2), tokens.v.swapaxes(1, 2), mask)
    queries = heads_first(tokens.q, tokens.k.shape[2])
    return heads_last(joint_attention(queries, [block], axis_names, pattern.soft_cap, sinks))


def _overwrite_rows(
    out: Float[Array, "batch seq heads head_dim"],
    rows: Float[Array, "batch globals heads head_dim"],
    positions: Int[Array, "batch globals"],
    valid: Bool[Array, "batch globals"],
) -> Float[Array, "batch seq heads head_dim"]:
    """Return `out` with `rows` written at those `positions` that are valid and on this shard."""
    seq = out.shape[1]
    is_inside = valid & (positions >= 0) & (positions < seq)
    index = jnp.where(is_inside, positions, seq)
    return jax.vmap(lambda o, i, r: o.at[i].set(r, mode="drop"))(out, index, rows)
