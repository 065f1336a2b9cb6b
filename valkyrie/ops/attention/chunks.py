"""Attention within chunks of positions (Llama 4): a query sees only keys of its own chunk.

Chunks are counted from the start of a document. Without documents, if this device has whole chunks, each is computed
like a sequence, without communication. Otherwise, chunks are segments seen through a sliding window of their length.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from valkyrie.ops.attention.pattern import Sinks


def document_positions(segment_ids: Int[Array, "batch seq"]) -> Int[Array, "batch seq"]:
    """Return the position of each token in its document. The positions of a document must be consecutive."""
    positions = jnp.arange(segment_ids.shape[1])
    is_start = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return positions - jax.lax.cummax(jnp.where(is_start, positions, 0), axis=1)


def chunk_segments(segment_ids: Int[Array, "batch seq"], chunk_length: int) -> Int[Array, "batch seq"]:
    """Return segment ids that differ between documents and between the chunks of a document."""
    chunk_count = -(-segment_ids.shape[1] // chunk_length)
    return segment_ids * chunk_count + document_positions(segment_ids) // chunk_length


def attention_within_chunks(
    q: Float[Array, "batch seq heads head_dim"],
    k: Float[Array, "batch seq kv_heads head_dim"],
    v: Float[Array, "batch seq kv_heads value_dim"],
    *,
    chunk_length: int,
    axis_names: tuple[str, ...] = (),
    segment_ids: Int[Array, "batch seq"] | None = None,
    sinks: Sinks | None = None,
    **options: Any,
) -> Float[Array, "batch seq heads value_dim"]:
    """Return attention among the positions of each chunk of `chunk_length` positions.

    `axis_names` are the mesh axes that shard the sequence, if any. `segment_ids` are None or those of `chunk_segments`.
    The other arguments are those of `attention` and `sharded_attention`, except windows, dilations and global tokens.
    """
    from valkyrie.ops.attention import attention, sharded_attention  # these modules form the package's interface

    batch, seq = q.shape[:2]
    shard_count = math.prod(jax.lax.axis_size(axis) for axis in axis_names)
    is_one_chunk = chunk_length >= seq * shard_count
    if segment_ids is None and seq % chunk_length == 0 and not is_one_chunk:

        def split(x: Array) -> Array:
            return x.reshape(-1, chunk_length, *x.shape[2:])

        out = attention(split(q), split(k), split(v), window=None, sinks=sinks, **options)
        return out.reshape(batch, seq, *out.shape[2:])
    if segment_ids is None and not is_one_chunk:
        start = jax.lax.axis_index(axis_names) * seq if axis_names else 0
        segment_ids = jnp.broadcast_to((start + jnp.arange(seq)) // chunk_length, (batch, seq))
    options |= {"window": None if is_one_chunk else chunk_length, "segment_ids": segment_ids, "sinks": sinks}
    return sharded_attention(q, k, v, axis_names=axis_names, **options) if axis_names else attention(q, k, v, **options)
