"""Buffers of expert-parallel devices that hold fewer rows than the tokens of all devices could need.

Rows beyond a buffer are dropped. A device keeps the same share of each sender's rows for each of its experts, those of
the first tokens, so that a device that sends first and an expert with a low number have no advantage.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from valkyrie.ops.grouped import KERNEL_TILE


def count_rows(tokens: int, top_k: int, experts: int, shards: int = 1, capacity_factor: float | None = None) -> int:
    """Return the rows of a device's buffer.

    A limited buffer has whole tiles of 8 to `KERNEL_TILE` rows, which add at most an eighth, or 7 rows.

    Args:
        tokens: Tokens of all devices that send rows to the device.
        top_k: Number of experts per token.
        experts: Number of experts.
        shards: Number of devices that experts are split over.
        capacity_factor: Rows relative to the mean load, or None for room for all: each token uses as many of the
            device's experts as it can.
    """
    most_rows = tokens * min(top_k, experts // shards)
    if capacity_factor is None or not is_limited(top_k, experts, shards, capacity_factor):
        return most_rows
    rows = math.ceil(capacity_factor * tokens * top_k / shards)
    tile = min(KERNEL_TILE, 1 << max(rows // 8, 8).bit_length() - 1)
    return min(most_rows, -(-rows // tile) * tile)


def is_limited(top_k: int, experts: int, shards: int, capacity_factor: float | None) -> bool:
    """Check whether a buffer with this capacity cannot hold all rows. The arguments are those of `count_rows`."""
    return capacity_factor is not None and capacity_factor * top_k / shards < min(top_k, experts // shards)


def limit_counts(counts: Int[Array, "senders experts"], rows: int) -> Int[Array, "senders experts"]:
    """Return how many rows of each sender and expert a buffer of `rows` rows keeps: about the same share of each."""
    ends = jnp.cumsum(counts.T)
    # In float32, because products of two numbers of rows exceed int32. The order of `ends` survives rounding.
    kept_ends = jnp.floor(ends * (rows / jnp.maximum(ends[-1], 1).astype(jnp.float32))).astype(jnp.int32)
    kept_ends = jnp.where(ends == ends[-1], rows, jnp.minimum(kept_ends, rows))
    kept_ends = jnp.where(ends[-1] <= rows, ends, kept_ends)
    kept = jnp.diff(kept_ends, prepend=0).reshape(counts.T.shape).T
    return jnp.minimum(kept, counts)


def rows_after_dropping(
    rows: Int[Array, " rows"], counts: Int[Array, " groups"], kept: Int[Array, " groups"]
) -> tuple[Int[Array, " rows"], Bool[Array, " rows"]]:
    """Return the position of rows after dropping the last ones of each group, and whether each is kept.

    Args:
        rows: Positions before. Those after the last group are kept.
        counts: Rows of each group, which follow each other.
        kept: How many of them are kept, the first ones.
    """
    ends, dropped = jnp.cumsum(counts), counts - kept
    is_dropped = jnp.any((rows[:, None] < ends) & (rows[:, None] >= ends - dropped), axis=1)
    return rows - jnp.sum((rows[:, None] >= ends) * dropped, axis=1, dtype=rows.dtype), ~is_dropped


def move_dropped_rows(
    numbers: Int[Array, " rows"], counts: Int[Array, " groups"], kept: Int[Array, " groups"]
) -> Int[Array, " rows"]:
    """Move the numbers of dropped rows to the end. The other arguments are those of `rows_after_dropping`.

    Sorts, because a TPU sorts numbers much faster than it gathers them by index.
    """
    positions, is_kept = rows_after_dropping(jnp.arange(len(numbers)), counts, kept)
    return jax.lax.sort_key_val(jnp.where(is_kept, positions, len(numbers)), numbers)[1]
