"""Decides how attention stays linear in memory with plain XLA: chunks of queries, one after another, recomputed backward.

A scan over chunks was measured against one batched product over all chunks: on a CPU it is as fast or up to twice as
fast, in half of the memory (experiments/LOG.md). The keys of a chunk come in as scanned inputs, built from shifted
views of the chunked keys; slicing them out of a closed-over array instead would make the backward pass quadratic.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from valkyrie.ops.attention_parts import Columns, Piece, Span, heads_first, heads_last, joint_softmax, same_segment

SMALLEST_CHUNK, LARGEST_CHUNK = 64, 512


def pick_chunk(window: int | None, seq: int) -> int:
    """Return how many queries to take at a time: about a window's worth, the fastest size on a CPU."""
    wanted = LARGEST_CHUNK if window is None else 1 << (window - 1).bit_length()
    return min(max(wanted, SMALLEST_CHUNK), LARGEST_CHUNK, max(seq, 1))


def windowed_chunks(
    q: Float[Array, "batch seq heads head_dim"],
    k: Float[Array, "batch keys kv_heads head_dim"],
    v: Float[Array, "batch keys kv_heads head_dim"],
    *,
    window: int,
    causal: bool,
    before: int,
    key_valid: Bool[Array, "batch keys"] | None,
    query_segments: Int[Array, "batch seq"] | None,
    key_segments: Int[Array, "batch keys"] | None,
    columns: Columns | None,
    chunk: int,
) -> Float[Array, "batch seq heads head_dim"]:
    """Return sliding-window attention (dilation 1) where query i stands at key `before + i`; memory linear in seq.

    Keys that a window would want before the first or after the last, and keys that are not valid, count for nothing.
    """
    seq, kv_heads = q.shape[1], k.shape[2]
    after = 0 if causal else window - 1
    chunks, width = -(-seq // chunk), chunk + window - 1 + after

    def windows(x: Array) -> Array:
        """The keys of each chunk, (chunks, batch, width, ...): from `window - 1` before its first query on."""
        tiles = chunks + -(-width // chunk) - 1
        front = window - 1 - before
        x = x[:, max(-front, 0) :]
        x = x[:, : tiles * chunk - max(front, 0)]
        back = tiles * chunk - max(front, 0) - x.shape[1]
        x = jnp.pad(x, ((0, 0), (max(front, 0), back)) + ((0, 0),) * (x.ndim - 2))
        x = _chunked(x, chunk)
        pieces = [x[i : i + chunks, :, : width - i * chunk] for i in range(-(-width // chunk))]
        return jnp.concatenate(pieces, axis=2)

    exists = jnp.ones(k.shape[:2], bool) if key_valid is None else key_valid
    distance = (window - 1) + jnp.arange(chunk)[:, None] - jnp.arange(width)[None, :]
    in_window = (distance < window) & (distance > -window) & ((distance >= 0) | (not causal))
    inputs = {
        "q": _chunked(_padded(q, chunks * chunk), chunk),
        "k": windows(k),
        "v": windows(v),
        "exists": windows(exists),
        "q_segments": None if query_segments is None else _chunked(_padded(query_segments, chunks * chunk), chunk),
        "k_segments": None if key_segments is None else windows(key_segments),
        "sees": None if columns is None else _chunked(_padded(columns.visible, chunks * chunk), chunk),
    }

    extra = None if columns is None else (columns.k.swapaxes(1, 2), columns.v.swapaxes(1, 2))

    @jax.checkpoint
    def one_chunk(carry: None, x: dict[str, Array | None]):
        mask = in_window[None] & x["exists"][:, None, :] & same_segment(x["q_segments"], x["k_segments"])
        pieces = [Piece(x["k"].swapaxes(1, 2), x["v"].swapaxes(1, 2), mask)]
        if extra is not None:
            pieces.append(Piece(*extra, x["sees"]))
        return carry, heads_last(joint_softmax(heads_first(x["q"], kv_heads), pieces))

    _, out = jax.lax.scan(one_chunk, None, inputs)
    return _joined(out, seq)


def full_chunks(
    q: Float[Array, "batch seq heads head_dim"],
    k: Float[Array, "batch keys kv_heads head_dim"],
    v: Float[Array, "batch keys kv_heads head_dim"],
    *,
    span: Span,
    start: Int[Array, ""] | int,
    key_valid: Bool[Array, "batch keys"] | None,
    query_segments: Int[Array, "batch seq"] | None,
    key_segments: Int[Array, "batch keys"] | None,
    columns: Columns | None,
    chunk: int,
) -> Float[Array, "batch seq heads head_dim"]:
    """Return attention of each chunk of queries over all keys, where query i stands at key `start + i`.

    Memory is linear in seq, time is not: for windows that span most of the sequence, and for no window.
    """
    seq, kv_heads = q.shape[1], k.shape[2]
    chunks = -(-seq // chunk)
    keys = {"k": k.swapaxes(1, 2), "v": v.swapaxes(1, 2)}
    extra = None if columns is None else (columns.k.swapaxes(1, 2), columns.v.swapaxes(1, 2))
    inputs = {
        "q": _chunked(_padded(q, chunks * chunk), chunk),
        "row": start + jnp.arange(chunks * chunk).reshape(chunks, chunk),
        "q_segments": None if query_segments is None else _chunked(_padded(query_segments, chunks * chunk), chunk),
        "sees": None if columns is None else _chunked(_padded(columns.visible, chunks * chunk), chunk),
    }

    @jax.checkpoint
    def one_chunk(carry: None, x: dict[str, Array | None]):
        in_span = span.sees(x["row"][:, None], jnp.arange(k.shape[1])[None, :])[None]
        mask = in_span & same_segment(x["q_segments"], key_segments)
        if key_valid is not None:
            mask = mask & key_valid[:, None, :]
        pieces = [Piece(keys["k"], keys["v"], mask)]
        if extra is not None:
            pieces.append(Piece(*extra, x["sees"]))
        return carry, heads_last(joint_softmax(heads_first(x["q"], kv_heads), pieces))

    _, out = jax.lax.scan(one_chunk, None, inputs)
    return _joined(out, seq)


def _padded(x: Array, length: int) -> Array:
    return jnp.pad(x, ((0, 0), (0, length - x.shape[1])) + ((0, 0),) * (x.ndim - 2))


def _chunked(x: Array, chunk: int) -> Array:
    """(batch, chunks * chunk, ...) as (chunks, batch, chunk, ...)."""
    return x.reshape(x.shape[0], -1, chunk, *x.shape[2:]).swapaxes(0, 1)


def _joined(x: Array, seq: int) -> Array:
    """(chunks, batch, chunk, ...) as (batch, seq, ...), without the padding."""
    return x.swapaxes(0, 1).reshape(x.shape[1], -1, *x.shape[3:])[:, :seq]
