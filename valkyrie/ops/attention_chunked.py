"""Decides how attention stays linear in memory with plain XLA: chunks of queries, one after another.

Each chunk is computed again in the backward pass.

A scan over chunks was measured against one batched product over all chunks: on a CPU it is as fast or up to twice as
fast, in half of the memory (experiments/LOG.md). The keys of a chunk come in as scanned inputs, built from shifted
views of the chunked keys; slicing them out of a closed-over array instead would make the backward pass quadratic.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from valkyrie.ops.attention_parts import (
    Columns,
    Piece,
    Span,
    Stretch,
    heads_first,
    heads_last,
    joint_softmax,
    same_segment,
)

SMALLEST_CHUNK, LARGEST_CHUNK = 64, 512


def pick_chunk(window: int | None, seq: int) -> int:
    """Return how many queries to take at a time: about a window's worth, the fastest size on a CPU."""
    wanted = LARGEST_CHUNK if window is None else 1 << (window - 1).bit_length()
    return min(max(wanted, SMALLEST_CHUNK), LARGEST_CHUNK, max(seq, 1))


class _Chunk(NamedTuple):
    """What one step of the scan sees: some queries, and the keys of their windows where those are cut out."""

    q: Float[Array, "batch chunk heads head_dim"]
    query_segments: Int[Array, "batch chunk"] | None
    sees_columns: Bool[Array, "batch chunk globals"] | None


class _Window(NamedTuple):
    k: Float[Array, "batch width kv_heads head_dim"]
    v: Float[Array, "batch width kv_heads head_dim"]
    exists: Bool[Array, "batch width"]
    segments: Int[Array, "batch width"] | None


def windowed_chunks(
    q: Float[Array, "batch seq heads head_dim"],
    k: Float[Array, "batch keys kv_heads head_dim"],
    v: Float[Array, "batch keys kv_heads head_dim"],
    *,
    span: Span,
    stretch: Stretch,
    chunk: int,
) -> Float[Array, "batch seq heads head_dim"]:
    """Return sliding-window attention (dilation 1) with memory linear in seq.

    Keys that a window would want before the first or after the last count for nothing.
    """
    assert span.window is not None and span.dilation == 1 and isinstance(stretch.before, int)
    left = span.window - 1
    chunks, width = -(-q.shape[1] // chunk), chunk + left + (0 if span.causal else left)
    valid = jnp.ones(k.shape[:2], bool) if stretch.key_valid is None else stretch.key_valid
    segments = stretch.key_segments
    cut = functools.partial(_windows, chunks=chunks, chunk=chunk, width=width, front=left - stretch.before)
    windows = _Window(cut(k), cut(v), cut(valid), None if segments is None else cut(segments))
    in_window = span.sees(left + jnp.arange(chunk)[:, None], jnp.arange(width)[None, :])

    @jax.checkpoint
    def one_chunk(carry: None, x: tuple[_Chunk, _Window]):
        rows, keys = x
        mask = in_window & keys.exists[:, None, :] & same_segment(rows.query_segments, keys.segments)
        piece = Piece(keys.k.swapaxes(1, 2), keys.v.swapaxes(1, 2), mask)
        return carry, _attend(rows, piece, stretch.columns)

    _, out = jax.lax.scan(one_chunk, None, (_queries(q, stretch, chunk), windows))
    return _joined(out, q.shape[1])


def full_chunks(
    q: Float[Array, "batch seq heads head_dim"],
    k: Float[Array, "batch keys kv_heads head_dim"],
    v: Float[Array, "batch keys kv_heads head_dim"],
    *,
    span: Span,
    stretch: Stretch,
    chunk: int,
) -> Float[Array, "batch seq heads head_dim"]:
    """Return attention of each chunk of queries over all keys.

    Memory is linear in seq, time is not: for windows that span most of the sequence, and for no window.
    """
    keys, values = k.swapaxes(1, 2), v.swapaxes(1, 2)
    positions = jnp.arange(k.shape[1])
    chunks = -(-q.shape[1] // chunk)
    rows_of_chunks = stretch.before + jnp.arange(chunks * chunk).reshape(chunks, chunk)

    @jax.checkpoint
    def one_chunk(carry: None, x: tuple[_Chunk, Int[Array, " chunk"]]):
        rows, row_positions = x
        mask = span.sees(row_positions[:, None], positions)[None]
        mask = mask & same_segment(rows.query_segments, stretch.key_segments)
        if stretch.key_valid is not None:
            mask = mask & stretch.key_valid[:, None, :]
        return carry, _attend(rows, Piece(keys, values, mask), stretch.columns)

    _, out = jax.lax.scan(one_chunk, None, (_queries(q, stretch, chunk), rows_of_chunks))
    return _joined(out, q.shape[1])


def _attend(rows: _Chunk, keys: Piece, columns: Columns | None) -> Float[Array, "batch chunk heads head_dim"]:
    pieces = [keys]
    if columns is not None and rows.sees_columns is not None:
        pieces.append(Piece(columns.k.swapaxes(1, 2), columns.v.swapaxes(1, 2), rows.sees_columns))
    return heads_last(joint_softmax(heads_first(rows.q, keys.k.shape[1]), pieces))


def _queries(q: Array, stretch: Stretch, chunk: int) -> _Chunk:
    """Everything that belongs to the queries, by chunk, padded to whole chunks."""

    def by_chunk(x: Array) -> Array:
        return _chunked(jnp.pad(x, ((0, 0), (0, -x.shape[1] % chunk)) + ((0, 0),) * (x.ndim - 2)), chunk)

    segments, columns = stretch.query_segments, stretch.columns
    return _Chunk(
        by_chunk(q),
        None if segments is None else by_chunk(segments),
        None if columns is None else by_chunk(columns.visible),
    )


def _windows(x: Array, chunks: int, chunk: int, width: int, front: int) -> Array:
    """The `width` keys of each chunk, (chunks, batch, width, ...); the first chunk's begin `front` before the first."""
    tiles = -(-width // chunk)
    length = (chunks + tiles - 1) * chunk
    x = x[:, max(-front, 0) :][:, : length - max(front, 0)]
    back = length - max(front, 0) - x.shape[1]
    x = _chunked(jnp.pad(x, ((0, 0), (max(front, 0), back)) + ((0, 0),) * (x.ndim - 2)), chunk)
    return jnp.concatenate([x[i : i + chunks, :, : width - i * chunk] for i in range(tiles)], axis=2)


def _chunked(x: Array, chunk: int) -> Array:
    """(batch, chunks * chunk, ...) as (chunks, batch, chunk, ...)."""
    return x.reshape(x.shape[0], -1, chunk, *x.shape[2:]).swapaxes(0, 1)


def _joined(x: Array, seq: int) -> Array:
    """(chunks, batch, chunk, ...) as (batch, seq, ...), without the padding."""
    return x.swapaxes(0, 1).reshape(x.shape[1], -1, *x.shape[3:])[:, :seq]
