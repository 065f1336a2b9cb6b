"""Attention of queries to the keys around them on one device, by the platform's kernel or by chunks of queries.

Dilation is removed first: grouping positions of equal residue leaves a plain window. Sequence-sharded attention also
uses this module, with keys from other shards.

Chunks keep memory linear in the length with plain XLA. Each chunk is recomputed in the backward pass. Compared with one
batched product over all chunks, a scan over chunks is equally fast or up to twice as fast on a CPU, with half of the
memory (experiments/LOG.md). The keys of a chunk's windows are scanned inputs, built from shifted views of the chunked
keys. Slicing them from a closed-over array would make the backward pass quadratic.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from valkyrie.ops.attention.pattern import (
    Columns,
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
from valkyrie.ops.choices import CONTEXT

SMALLEST_CHUNK, LARGEST_CHUNK = 64, 512


class Method(NamedTuple):
    """Method of computing a stretch: `kernel` by name (`Platform.attention`), or None for chunks of `chunk` queries."""

    kernel: str | None = None
    chunk: int | None = None
    interpret: bool = False


def local_attention(q: Queries, k: Keys, v: Keys, *, pattern: Pattern, method: Method, stretch: Stretch) -> Queries:
    """Return attention of the queries to the keys around them. `stretch.before` must be a multiple of the dilation."""
    if pattern.dilation > 1:
        return _undilated(q, k, v, pattern, method, stretch)
    if method.kernel == "splash":
        from valkyrie.ops.attention.splash import splash_window  # Pallas is slow to import and rarely needed

        return splash_window(q, k, v, pattern=pattern, stretch=stretch, interpret=method.interpret)
    if method.kernel == "cudnn":
        assert stretch.before == 0 and stretch.columns is None
        window = None if pattern.window is None else (pattern.window - 1, 0)  # cuDNN's window does not count the token
        out = jax.nn.dot_product_attention(
            q, k, v, is_causal=pattern.causal, local_window_size=window, implementation="cudnn"
        )
        return checkpoint_name(out, CONTEXT)
    return chunked_attention(q, k, v, pattern=pattern, stretch=stretch, chunk=method.chunk)


def _undilated(q: Queries, k: Keys, v: Keys, pattern: Pattern, method: Method, stretch: Stretch) -> Queries:
    """Compute dilated attention as plain windowed attention over the positions of each residue."""
    dilation, columns = pattern.dilation, stretch.columns
    assert isinstance(stretch.before, int) and stretch.before % dilation == 0
    by_residue = functools.partial(_regroup, dilation=dilation)
    if columns is not None:
        k_columns, v_columns = (jnp.repeat(x, dilation, axis=0) for x in (columns.k, columns.v))
        columns = Columns(k_columns, v_columns, by_residue(columns.visible))
    valid = jnp.ones(k.shape[:2], bool) if stretch.key_valid is None else stretch.key_valid
    query_segments, key_segments = stretch.query_segments, stretch.key_segments
    out = local_attention(
        by_residue(q),
        by_residue(k),
        by_residue(v),
        pattern=replace(pattern, dilation=1),
        method=method,
        stretch=Stretch(
            before=stretch.before // dilation,
            key_valid=by_residue(valid),
            query_segments=None if query_segments is None else by_residue(query_segments),
            key_segments=None if key_segments is None else by_residue(key_segments),
            columns=columns,
        ),
    )
    return _ungroup(out, dilation, q.shape[1])


def pick_chunk(window: int | None, seq: int) -> int:
    """Return the number of queries per chunk: about the window's length, the fastest size on a CPU."""
    wanted = LARGEST_CHUNK if window is None else 1 << (window - 1).bit_length()
    return min(max(wanted, SMALLEST_CHUNK), LARGEST_CHUNK, max(seq, 1))


def chunked_attention(
    q: Queries, k: Keys, v: Keys, *, pattern: Pattern, stretch: Stretch, chunk: int | None = None
) -> Queries:
    """Compute attention for chunks of `chunk` queries, one after another, with memory linear in the length.

    Each chunk reads the keys of its windows (dilation 1), or all keys if the window is None or the windows of a chunk
    would span them. Windows end at the first and the last key.
    """
    seq, keys = q.shape[1], k.shape[1]
    chunk = min(chunk or pick_chunk(pattern.window, seq), seq)
    whole = pattern.window is None or chunk + (pattern.window - 1) * (1 if pattern.causal else 2) >= keys
    scanned, piece_of = (_all_keys if whole else _windows)(k, v, pattern, stretch, -(-seq // chunk), chunk)

    @jax.checkpoint
    def one_chunk(carry: None, x: tuple[_Chunk, Any]):
        rows, of_chunk = x
        pieces = [piece_of(rows, of_chunk)]
        if stretch.columns is not None and rows.sees_columns is not None:
            columns = stretch.columns
            pieces.append(KeyBlock(columns.k.swapaxes(1, 2), columns.v.swapaxes(1, 2), rows.sees_columns))
        return carry, heads_last(joint_softmax(heads_first(rows.q, k.shape[2]), pieces, (), pattern.soft_cap))

    _, out = jax.lax.scan(one_chunk, None, (_queries(q, stretch, chunk), scanned))
    out = out.swapaxes(0, 1).reshape(out.shape[1], -1, *out.shape[3:])[:, :seq]
    return checkpoint_name(out, CONTEXT)


class _Chunk(NamedTuple):
    """Queries of one scan step."""

    q: Float[Array, "batch chunk heads head_dim"]
    query_segments: Int[Array, "batch chunk"] | None
    sees_columns: Bool[Array, "batch chunk globals"] | None


class _Window(NamedTuple):
    """Keys in the windows of a chunk of queries."""

    k: Float[Array, "batch width kv_heads head_dim"]
    v: Float[Array, "batch width kv_heads head_dim"]
    exists: Bool[Array, "batch width"]
    segments: Int[Array, "batch width"] | None


def _all_keys(k: Keys, v: Keys, pattern: Pattern, stretch: Stretch, chunks: int, chunk: int):
    """Return the query positions of each chunk, for the scan, and a function that builds the `KeyBlock` of all keys."""
    keys, values, positions = k.swapaxes(1, 2), v.swapaxes(1, 2), jnp.arange(k.shape[1])

    def piece_of(rows: _Chunk, row_positions: Int[Array, " chunk"]) -> KeyBlock:
        mask = pattern.sees(row_positions[:, None], positions)[None]
        mask = mask & same_segment(rows.query_segments, stretch.key_segments)
        if stretch.key_valid is not None:
            mask = mask & stretch.key_valid[:, None, :]
        return KeyBlock(keys, values, mask)

    return stretch.before + jnp.arange(chunks * chunk).reshape(chunks, chunk), piece_of


def _windows(k: Keys, v: Keys, pattern: Pattern, stretch: Stretch, chunks: int, chunk: int):
    """Return the keys in each chunk's windows, for the scan, and a function that builds a chunk's `KeyBlock`."""
    assert pattern.window is not None and pattern.dilation == 1 and isinstance(stretch.before, int)
    left = pattern.window - 1
    width = chunk + left + (0 if pattern.causal else left)
    valid = jnp.ones(k.shape[:2], bool) if stretch.key_valid is None else stretch.key_valid
    segments = stretch.key_segments
    cut = functools.partial(_shifted, chunks=chunks, chunk=chunk, width=width, front=left - stretch.before)
    in_window = pattern.sees(left + jnp.arange(chunk)[:, None], jnp.arange(width)[None, :])

    def piece_of(rows: _Chunk, keys: _Window) -> KeyBlock:
        mask = in_window & keys.exists[:, None, :] & same_segment(rows.query_segments, keys.segments)
        return KeyBlock(keys.k.swapaxes(1, 2), keys.v.swapaxes(1, 2), mask)

    return _Window(cut(k), cut(v), cut(valid), None if segments is None else cut(segments)), piece_of


def _queries(q: Array, stretch: Stretch, chunk: int) -> _Chunk:
    """Return queries, segments and column visibility by chunk, padded to whole chunks."""

    def by_chunk(x: Array) -> Array:
        return _chunked(jnp.pad(x, ((0, 0), (0, -x.shape[1] % chunk)) + ((0, 0),) * (x.ndim - 2)), chunk)

    segments, columns = stretch.query_segments, stretch.columns
    return _Chunk(
        by_chunk(q),
        None if segments is None else by_chunk(segments),
        None if columns is None else by_chunk(columns.visible),
    )


def _shifted(x: Array, chunks: int, chunk: int, width: int, front: int) -> Array:
    """Return the `width` keys of each chunk, (chunks, batch, width, ...), starting `front` keys before the chunk."""
    tiles = -(-width // chunk)
    length = (chunks + tiles - 1) * chunk
    x = x[:, max(-front, 0) :][:, : length - max(front, 0)]
    back = length - max(front, 0) - x.shape[1]
    x = _chunked(jnp.pad(x, ((0, 0), (max(front, 0), back)) + ((0, 0),) * (x.ndim - 2)), chunk)
    return jnp.concatenate([x[i : i + chunks, :, : width - i * chunk] for i in range(tiles)], axis=2)


def _chunked(x: Array, chunk: int) -> Array:
    """Reshape (batch, chunks * chunk, ...) to (chunks, batch, chunk, ...)."""
    return x.reshape(x.shape[0], -1, chunk, *x.shape[2:]).swapaxes(0, 1)


def _regroup(x: Array, dilation: int) -> Array:
    """Reshape (batch, seq, ...) to (batch * dilation, ceil(seq / dilation), ...), grouping positions by residue."""
    batch, seq = x.shape[:2]
    steps = -(-seq // dilation)
    x = jnp.pad(x, ((0, 0), (0, steps * dilation - seq)) + ((0, 0),) * (x.ndim - 2))
    x = x.reshape(batch, steps, dilation, *x.shape[2:]).swapaxes(1, 2)
    return x.reshape(batch * dilation, steps, *x.shape[3:])


def _ungroup(x: Array, dilation: int, seq: int) -> Array:
    """Invert `_regroup`, keeping `seq` positions."""
    groups, steps = x.shape[:2]
    x = x.reshape(groups // dilation, dilation, steps, *x.shape[2:]).swapaxes(1, 2)
    return x.reshape(groups // dilation, steps * dilation, *x.shape[3:])[:, :seq]
