"""Decides what travels when the sequence is split over mesh axes: a halo of keys for windows, all keys without one.

A shard needs the (window - 1) * dilation keys before its first query (and after its last, when bidirectional). They
come from as many neighbours as that spans, each by one `ppermute` straight from its owner. Full attention gathers.
Global columns are summed out of their owners; global rows are one softmax over the keys of all shards.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from valkyrie.ops.attention_chunked import full_chunks, pick_chunk
from valkyrie.ops.attention_local import Method, local_attention
from valkyrie.ops.attention_parts import (
    Columns,
    GlobalTokens,
    Span,
    Stretch,
    column_visibility,
    counted,
    global_rows,
    overwrite_rows,
    take_positions,
)


def sharded_attention(
    q: Float[Array, "batch seq heads head_dim"],
    k: Float[Array, "batch seq kv_heads head_dim"],
    v: Float[Array, "batch seq kv_heads head_dim"],
    *,
    axis_names: tuple[str, ...],
    window: int | None,
    causal: bool = True,
    dilation: int = 1,
    segment_ids: Int[Array, "batch seq"] | None = None,
    global_tokens: GlobalTokens | None = None,
    backend: str | None = None,
    chunk: int | None = None,
) -> Float[Array, "batch seq heads head_dim"]:
    """Return this shard's part of `attention` over a sequence split evenly over `axis_names`, the first one major.

    To be called inside `jax.shard_map`. `seq` is a shard's length. Of `global_tokens`, `k` and `v` are this shard's;
    `positions` (in the whole sequence), `valid` and `q` are the same on every shard. On a TPU the windows run in the
    splash kernel, elsewhere in chunks.
    """
    span, seq = Span(window, causal, dilation), q.shape[1]
    shards = math.prod(jax.lax.axis_size(axis) for axis in axis_names)
    start = jax.lax.axis_index(axis_names) * seq
    backend = jax.default_backend() if backend is None else backend
    method = Method(platform="tpu" if backend == "tpu" else None, chunk=chunk)
    spread = functools.partial(_everywhere if window is None else _beside, span=span, method=method)
    if global_tokens is None:
        return spread(q, k, v, stretch=Stretch(start, None, segment_ids), axis_names=axis_names, shards=shards)
    positions, rows = global_tokens.positions, start + jnp.arange(seq)
    valid, here = counted(global_tokens, seq * shards), positions - start
    at_globals = None if segment_ids is None else _from_owner(segment_ids, here, axis_names)
    visible = column_visibility(span, rows, segment_ids, positions, valid, at_globals)
    columns = Columns(_from_owner(k, here, axis_names), _from_owner(v, here, axis_names), visible)
    stretch = Stretch(start, None, segment_ids, None, columns)
    out = spread(q, k, v, stretch=stretch, axis_names=axis_names, shards=shards)
    full = global_rows(global_tokens, causal, rows, segment_ids, at_globals, axis_names)
    return overwrite_rows(out, full, here, valid)


def _everywhere(
    q: Float[Array, "batch seq heads head_dim"],
    k: Float[Array, "batch seq kv_heads head_dim"],
    v: Float[Array, "batch seq kv_heads head_dim"],
    *,
    span: Span,
    method: Method,
    stretch: Stretch,
    axis_names: tuple[str, ...],
    shards: int,
) -> Float[Array, "batch seq heads head_dim"]:
    """Attention over the keys of all shards; `stretch` says where this one's queries stand."""
    seq = q.shape[1]
    gather = functools.partial(jax.lax.all_gather, axis_name=axis_names, axis=1, tiled=True)
    if stretch.query_segments is not None:
        stretch = stretch._replace(key_segments=gather(stretch.query_segments))
    chunk = min(method.chunk or pick_chunk(None, seq), seq)
    return full_chunks(q, gather(k), gather(v), span=span, stretch=stretch, chunk=chunk)


def _beside(
    q: Float[Array, "batch seq heads head_dim"],
    k: Float[Array, "batch seq kv_heads head_dim"],
    v: Float[Array, "batch seq kv_heads head_dim"],
    *,
    span: Span,
    method: Method,
    stretch: Stretch,
    axis_names: tuple[str, ...],
    shards: int,
) -> Float[Array, "batch seq heads head_dim"]:
    """Attention over this shard's keys and those of its neighbours that a window reaches."""
    batch, seq = q.shape[:2]
    before = min(span.reach(), (shards - 1) * seq)
    after = 0 if span.causal else before
    # The stretch begins a multiple of the dilation before the first query, so that residues of keys and queries agree.
    padding = -before % span.dilation

    def extended(x: Array) -> Array:
        x = _halo(x, before, after, axis_names, shards)
        return jnp.pad(x, ((0, 0), (padding, 0)) + ((0, 0),) * (x.ndim - 2))

    keys_values = extended(jnp.stack([k, v], axis=2))
    segments = stretch.query_segments
    stretch = stretch._replace(
        before=padding + before,
        key_valid=extended(jnp.ones((batch, seq), bool)),
        key_segments=None if segments is None else extended(segments),
    )
    return local_attention(q, keys_values[:, :, 0], keys_values[:, :, 1], span=span, method=method, stretch=stretch)


def _halo(x: Array, before: int, after: int, axis_names: tuple[str, ...], shards: int) -> Array:
    """`x` (batch, seq, ...) with the positions around it, from the neighbours; zeros where there is no neighbour."""
    seq = x.shape[1]
    parts = [x]
    for hop in range(1, -(-before // seq) + 1):
        wanted = min(seq, before - (hop - 1) * seq)
        pairs = [(i, i + hop) for i in range(shards - hop)]
        parts.insert(0, jax.lax.ppermute(x[:, seq - wanted :], axis_names, pairs))
    for hop in range(1, -(-after // seq) + 1):
        wanted = min(seq, after - (hop - 1) * seq)
        pairs = [(i + hop, i) for i in range(shards - hop)]
        parts.append(jax.lax.ppermute(x[:, :wanted], axis_names, pairs))
    return jnp.concatenate(parts, axis=1)


def _from_owner(x: Array, here: Int[Array, "batch globals"], axis_names: tuple[str, ...]) -> Array:
    """The entries of `x` (batch, seq, ...) at positions relative to this shard, from whichever shard holds them."""
    owned = (here >= 0) & (here < x.shape[1])
    found = take_positions(x, here)
    return jax.lax.psum(jnp.where(owned.reshape(*owned.shape, *[1] * (x.ndim - 2)), found, 0), axis_names)
