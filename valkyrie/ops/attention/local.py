"""Attention of queries to the keys around them on one device, by the platform's kernel or by chunks of queries.

Dilated attention becomes plain windowed attention by grouping positions that are equal modulo the dilation.
Sequence-sharded attention also uses this module, with keys from other shards.

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
    GlobalKeys,
    KeyBlock,
    KeyRange,
    Keys,
    Outputs,
    Pattern,
    Queries,
    Values,
    heads_first,
    heads_last,
    joint_attention,
    same_segment,
)
from valkyrie.ops.choices import ATTENTION_OUTPUT

SMALLEST_CHUNK, LARGEST_CHUNK = 64, 512
"""Bounds on the number of queries per chunk that `pick_chunk_size` chooses."""


class LocalOptions(NamedTuple):
    """Implementation of local attention.

    Args:
        kernel: Name of the kernel (`Platform.attention`), or None for chunks of queries.
        chunk_size: Number of queries per chunk, or None to choose it.
        interpret: Whether to run a TPU kernel without a TPU, for tests.
    """

    kernel: str | None = None
    chunk_size: int | None = None
    interpret: bool = False


def local_attention(
    q: Queries, k: Keys, v: Values, *, pattern: Pattern, options: LocalOptions, key_range: KeyRange
) -> Outputs:
    """Return attention of queries to the keys around them.

    `key_range.keys_before` must be a multiple of the dilation.
    """
    if pattern.dilation > 1:
        return _dilated_attention(q, k, v, pattern, options, key_range)
    if options.kernel == "splash":
        from valkyrie.ops.attention.splash import splash_window  # Pallas is slow to import and rarely needed

        return splash_window(q, k, v, pattern=pattern, key_range=key_range, interpret=options.interpret)
    by_chunks = functools.partial(
        chunked_attention, pattern=pattern, key_range=key_range, chunk_size=options.chunk_size
    )
    if options.kernel == "cudnn":
        from valkyrie.ops.attention.cudnn import cudnn_attention

        assert key_range.keys_before == 0 and key_range.global_keys is None and key_range.key_valid is None
        assert key_range.sinks is None
        segments = key_range.query_segments
        out = cudnn_attention(q, k, v, pattern=pattern, segments=segments, fallback=by_chunks)
        return checkpoint_name(out, ATTENTION_OUTPUT)
    return by_chunks(q, k, v)


def _dilated_attention(
    q: Queries, k: Keys, v: Values, pattern: Pattern, options: LocalOptions, key_range: KeyRange
) -> Outputs:
    """Compute dilated attention as windowed attention among the positions that are equal modulo the dilation."""
    dilation, global_keys = pattern.dilation, key_range.global_keys
    assert isinstance(key_range.keys_before, int) and key_range.keys_before % dilation == 0
    group_by_residue = functools.partial(_regroup, dilation=dilation)
    if global_keys is not None:
        k_global, v_global = (jnp.repeat(x, dilation, axis=0) for x in (global_keys.k, global_keys.v))
        global_keys = GlobalKeys(k_global, v_global, group_by_residue(global_keys.visible))
    valid = jnp.ones(k.shape[:2], bool) if key_range.key_valid is None else key_range.key_valid
    query_segments, key_segments = key_range.query_segments, key_range.key_segments
    out = local_attention(
        group_by_residue(q),
        group_by_residue(k),
        group_by_residue(v),
        pattern=replace(pattern, dilation=1),
        options=options,
        key_range=KeyRange(
            keys_before=key_range.keys_before // dilation,
            key_valid=group_by_residue(valid),
            query_segments=None if query_segments is None else group_by_residue(query_segments),
            key_segments=None if key_segments is None else group_by_residue(key_segments),
            global_keys=global_keys,
            sinks=key_range.sinks,
        ),
    )
    return _ungroup(out, dilation, q.shape[1])


def pick_chunk_size(window: int | None, seq: int) -> int:
    """Return the number of queries per chunk.

    This is the window, rounded up to a power of two, at least `SMALLEST_CHUNK` and at most `LARGEST_CHUNK` and `seq`.
    On a CPU, chunks of about the window's length are the fastest. Without a window, chunks are as large as possible.
    """
    chunk_size = LARGEST_CHUNK if window is None else 1 << (window - 1).bit_length()
    return min(max(chunk_size, SMALLEST_CHUNK), LARGEST_CHUNK, max(seq, 1))


def chunked_attention(
    q: Queries, k: Keys, v: Values, *, pattern: Pattern, key_range: KeyRange, chunk_size: int | None = None
) -> Outputs:
    """Compute attention for chunks of `chunk_size` queries, one after another, with memory linear in the length.

    Each chunk reads only the keys in the windows of its queries. Without a window, or if the windows of a chunk can
    cover all keys, each chunk reads all keys. Only in this case may the dilation be above 1.
    """
    seq, key_count = q.shape[1], k.shape[1]
    chunk_size = min(chunk_size or pick_chunk_size(pattern.window, seq), seq)
    needs_all_keys = (
        pattern.window is None or chunk_size + (pattern.window - 1) * (1 if pattern.causal else 2) >= key_count
    )
    prepare_keys = _prepare_all_keys if needs_all_keys else _prepare_window_keys
    scanned_keys, make_key_block = prepare_keys(k, v, pattern, key_range, -(-seq // chunk_size), chunk_size)

    @jax.checkpoint
    def chunk_step(carry: None, x: tuple[_Chunk, Any]):
        query_chunk, chunk_keys = x
        blocks = [make_key_block(query_chunk, chunk_keys)]
        if key_range.global_keys is not None and query_chunk.sees_global_keys is not None:
            global_keys = key_range.global_keys
            blocks.append(
                KeyBlock(global_keys.k.swapaxes(1, 2), global_keys.v.swapaxes(1, 2), query_chunk.sees_global_keys)
            )
        queries = heads_first(query_chunk.q, k.shape[2])
        return carry, heads_last(joint_attention(queries, blocks, (), pattern.soft_cap, key_range.sinks))

    _, out = jax.lax.scan(chunk_step, None, (_query_chunks(q, key_range, chunk_size), scanned_keys))
    out = out.swapaxes(0, 1).reshape(out.shape[1], -1, *out.shape[3:])[:, :seq]
    return checkpoint_name(out, ATTENTION_OUTPUT)


class _Chunk(NamedTuple):
    """Queries of one scan step, their segments, and a mask of the global tokens that they see outside their windows."""

    q: Float[Array, "batch chunk heads head_dim"]
    query_segments: Int[Array, "batch chunk"] | None
    sees_global_keys: Bool[Array, "batch chunk globals"] | None


class _Window(NamedTuple):
    """Keys and values that a chunk of queries can attend to.

    `is_valid` is False for positions outside the sequence, and for keys that `KeyRange.key_valid` excludes.
    """

    k: Float[Array, "batch width kv_heads head_dim"]
    v: Float[Array, "batch width kv_heads value_dim"]
    is_valid: Bool[Array, "batch width"]
    segments: Int[Array, "batch width"] | None


def _prepare_all_keys(k: Keys, v: Values, pattern: Pattern, key_range: KeyRange, chunk_count: int, chunk_size: int):
    """Return the query positions of each chunk, and a function that builds a chunk's `KeyBlock` with all keys.

    The scan over chunks passes the positions to the function.
    """
    keys, values, positions = k.swapaxes(1, 2), v.swapaxes(1, 2), jnp.arange(k.shape[1])

    def make_key_block(query_chunk: _Chunk, row_positions: Int[Array, " chunk"]) -> KeyBlock:
        mask = pattern.sees(row_positions[:, None], positions)[None]
        mask = mask & same_segment(query_chunk.query_segments, key_range.key_segments)
        if key_range.key_valid is not None:
            mask = mask & key_range.key_valid[:, None, :]
        return KeyBlock(keys, values, mask)

    return key_range.keys_before + jnp.arange(chunk_count * chunk_size).reshape(chunk_count, chunk_size), make_key_block


def _prepare_window_keys(k: Keys, v: Values, pattern: Pattern, key_range: KeyRange, chunk_count: int, chunk_size: int):
    """Return the keys in each chunk's windows, and a function that builds a chunk's `KeyBlock` from them.

    The scan over chunks passes the keys to the function.
    """
    assert pattern.window is not None and pattern.dilation == 1 and isinstance(key_range.keys_before, int)
    reach = pattern.window - 1
    width = chunk_size + reach + (0 if pattern.causal else reach)
    valid = jnp.ones(k.shape[:2], bool) if key_range.key_valid is None else key_range.key_valid
    segments = key_range.key_segments
    lookback = reach - key_range.keys_before
    window_views = functools.partial(
        _window_views, chunk_count=chunk_count, chunk_size=chunk_size, width=width, lookback=lookback
    )
    in_window = pattern.sees(reach + jnp.arange(chunk_size)[:, None], jnp.arange(width)[None, :])

    def make_key_block(query_chunk: _Chunk, keys: _Window) -> KeyBlock:
        mask = in_window & keys.is_valid[:, None, :] & same_segment(query_chunk.query_segments, keys.segments)
        return KeyBlock(keys.k.swapaxes(1, 2), keys.v.swapaxes(1, 2), mask)

    windows = _Window(
        window_views(k), window_views(v), window_views(valid), None if segments is None else window_views(segments)
    )
    return windows, make_key_block


def _query_chunks(q: Array, key_range: KeyRange, chunk_size: int) -> _Chunk:
    """Return queries, segments and column visibility by chunk, padded to whole chunks."""

    def split_queries(x: Array) -> Array:
        return _split_chunks(jnp.pad(x, ((0, 0), (0, -x.shape[1] % chunk_size)) + ((0, 0),) * (x.ndim - 2)), chunk_size)

    segments, global_keys = key_range.query_segments, key_range.global_keys
    return _Chunk(
        split_queries(q),
        None if segments is None else split_queries(segments),
        None if global_keys is None else split_queries(global_keys.visible),
    )


def _window_views(x: Array, chunk_count: int, chunk_size: int, width: int, lookback: int) -> Array:
    """Return `width` consecutive entries of `x` (batch, seq, ...) for each chunk, as (chunks, batch, width, ...).

    The entries for chunk i start at position `i * chunk_size - lookback`. Entries outside the sequence are zero.
    """
    tiles = -(-width // chunk_size)
    length = (chunk_count + tiles - 1) * chunk_size
    x = x[:, max(-lookback, 0) :][:, : length - max(lookback, 0)]
    end_padding = length - max(lookback, 0) - x.shape[1]
    x = _split_chunks(jnp.pad(x, ((0, 0), (max(lookback, 0), end_padding)) + ((0, 0),) * (x.ndim - 2)), chunk_size)
    return jnp.concatenate([x[i : i + chunk_count, :, : width - i * chunk_size] for i in range(tiles)], axis=2)


def _split_chunks(x: Array, chunk_size: int) -> Array:
    """Reshape (batch, chunks * chunk, ...) to (chunks, batch, chunk, ...)."""
    return x.reshape(x.shape[0], -1, chunk_size, *x.shape[2:]).swapaxes(0, 1)


def _regroup(x: Array, dilation: int) -> Array:
    """Reshape (batch, seq, ...) to (batch * dilation, ceil(seq / dilation), ...), grouped by residue."""
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
