"""Global tokens: key columns that every row sees in addition to its window, and query rows that see all keys."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from valkyrie.ops.attention.pattern import (
    Columns,
    GlobalTokens,
    KeyBlock,
    Keys,
    Pattern,
    Queries,
    Stretch,
    heads_first,
    heads_last,
    joint_softmax,
    same_segment,
)


def take_positions(x: Array, positions: Int[Array, "batch globals"]) -> Array:
    """Return the entries of `x` (batch, seq, ...) at `positions`, clipped to its length."""
    return jax.vmap(lambda a, i: jnp.take(a, i, axis=0, mode="clip"))(x, positions)


def attend_with_global_tokens(
    attend: Callable[[Stretch], Queries],
    k: Keys,
    v: Keys,
    tokens: GlobalTokens,
    *,
    pattern: Pattern,
    stretch: Stretch,
    start: int | Int[Array, ""] = 0,
    shards: int = 1,
    take: Callable[[Array, Int[Array, "batch globals"]], Array] = take_positions,
    axis_names: tuple[str, ...] = (),
) -> Queries:
    """Return windowed attention with global columns added, and with the rows of global positions replaced.

    Args:
        attend: Attention over a stretch of keys and its columns.
        k: Keys of this shard.
        v: Values of this shard.
        tokens: The global tokens.
        pattern: Visible distances.
        stretch: Position of the keys relative to the queries.
        start: First position of this shard.
        shards: Number of shards of the sequence.
        take: Returns entries at positions relative to `start`, from the shards that have them.
        axis_names: Mesh axes that shard the sequence.
    """
    segments, seq = stretch.query_segments, k.shape[1]
    rows, here = start + jnp.arange(seq), tokens.positions - start
    valid = _counted(tokens, seq * shards)
    at_globals = None if segments is None else take(segments, here)
    visible = _column_visibility(pattern, rows, segments, tokens.positions, valid, at_globals)
    out = attend(stretch._replace(columns=Columns(take(k, here), take(v, here), visible)))
    full = _global_rows(tokens, pattern, rows, segments, at_globals, axis_names)
    return _overwrite_rows(out, full, here, valid)


def _counted(tokens: GlobalTokens, seq: int) -> Bool[Array, "batch globals"]:
    """Mark the entries of `tokens` that are valid, inside a sequence of length `seq`, and not a repetition."""
    positions = tokens.positions
    valid = tokens.valid & (positions >= 0) & (positions < seq)
    same = (positions[:, :, None] == positions[:, None, :]) & valid[:, None, :]
    earlier = jnp.tril(jnp.ones((positions.shape[1],) * 2, bool), -1)
    return valid & ~(same & earlier).any(-1)


def _column_visibility(
    pattern: Pattern,
    rows: Int[Array, " rows"],
    row_segments: Int[Array, "batch rows"] | None,
    positions: Int[Array, "batch globals"],
    valid: Bool[Array, "batch globals"],
    segments: Int[Array, "batch globals"] | None,
) -> Bool[Array, "batch rows globals"]:
    """Mark the global columns that each row sees, except those that are already in its window."""
    row, column = rows[None, :, None], positions[:, None, :]
    visible = valid[:, None, :] & ~pattern.sees(row, column) & same_segment(row_segments, segments)
    return visible & (column <= row) if pattern.causal else visible


def _global_rows(
    tokens: GlobalTokens,
    pattern: Pattern,
    key_positions: Int[Array, " seq"],
    key_segments: Int[Array, "batch seq"] | None,
    segments: Int[Array, "batch globals"] | None,
    axis_names: tuple[str, ...] = (),
) -> Float[Array, "batch globals heads head_dim"]:
    """Return the attention of the global positions over all keys that they see."""
    mask = same_segment(segments, key_segments)
    if pattern.causal:
        mask = mask & (key_positions[None, None, :] <= tokens.positions[:, :, None])
    mask = jnp.broadcast_to(mask, (mask.shape[0], tokens.q.shape[1], tokens.k.shape[1]))
    piece = KeyBlock(tokens.k.swapaxes(1, 2), tokens.v.swapaxes(1, 2), mask)
    return heads_last(joint_softmax(heads_first(tokens.q, tokens.k.shape[2]), [piece], axis_names, pattern.soft_cap))


def _overwrite_rows(
    out: Float[Array, "batch seq heads head_dim"],
    rows: Float[Array, "batch globals heads head_dim"],
    positions: Int[Array, "batch globals"],
    valid: Bool[Array, "batch globals"],
) -> Float[Array, "batch seq heads head_dim"]:
    """Return `out` with `rows` written at the `positions` that are valid and inside it."""
    seq = out.shape[1]
    inside = valid & (positions >= 0) & (positions < seq)
    index = jnp.where(inside, positions, seq)
    return jax.vmap(lambda o, i, r: o.at[i].set(r, mode="drop"))(out, index, rows)
