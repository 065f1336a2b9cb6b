"""Decides what travels when the sequence is split over mesh axes: a halo of keys for windows, all keys without one.

A shard needs the (window - 1) * dilation keys before its first query (and after its last, when bidirectional). They
come from as many neighbours as that spans, each by one `ppermute` straight from its owner. Full attention gathers.
Global columns are summed out of their owners; global rows are one softmax over the keys of all shards.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from valkyrie.ops.attention_chunked import full_chunks, pick_chunk
from valkyrie.ops.attention_local import Method, local_attention
from valkyrie.ops.attention_parts import (
    Columns,
    GlobalTokens,
    Span,
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
    shard, shards = jax.lax.axis_index(axis_names), math.prod(jax.lax.axis_size(axis) for axis in axis_names)
    start = shard * seq
    columns = at_globals = None
    if global_tokens is not None:
        valid = counted(global_tokens, seq * shards)
        here = global_tokens.positions - start
        at_globals = None if segment_ids is None else _from_owner(segment_ids, here, axis_names)
        rows = start + jnp.arange(seq)
        visible = column_visibility(span, rows, segment_ids, global_tokens.positions, valid, at_globals)
        columns = Columns(_from_owner(k, here, axis_names), _from_owner(v, here, axis_names), visible)
    if window is None:
        out = _gathered(q, k, v, span, segment_ids, columns, start, axis_names, chunk)
    else:
        backend = jax.default_backend() if backend is None else backend
        method = Method(platform="tpu" if backend == "tpu" else None, chunk=chunk)
        out = _with_halo(q, k, v, span, segment_ids, columns, method, axis_names, shards)
    if global_tokens is None:
        return out
    full = global_rows(global_tokens, causal, start + jnp.arange(seq), segment_ids, at_globals, axis_names)
    return overwrite_rows(out, full, here, valid)


def _gathered(
    q: Float[Array, "batch seq heads head_dim"],
    k: Float[Array, "batch seq kv_heads head_dim"],
    v: Float[Array, "batch seq kv_heads head_dim"],
    span: Span,
    segment_ids: Int[Array, "batch seq"] | None,
    columns: Columns | None,
    start: Int[Array, ""],
    axis_names: tuple[str, ...],
    chunk: int | None,
) -> Float[Array, "batch seq heads head_dim"]:
    gather = lambda x: jax.lax.all_gather(x, axis_names, axis=1, tiled=True)  # noqa: E731 (a name for one argument list)
    seq = q.shape[1]
    return full_chunks(
        q,
        gather(k),
        gather(v),
        span=span,
        start=start,
        key_valid=None,
        query_segments=segment_ids,
        key_segments=None if segment_ids is None else gather(segment_ids),
        columns=columns,
        chunk=min(chunk or pick_chunk(None, seq), seq),
    )


def _with_halo(
    q: Float[Array, "batch seq heads head_dim"],
    k: Float[Array, "batch seq kv_heads head_dim"],
    v: Float[Array, "batch seq kv_heads head_dim"],
    span: Span,
    segment_ids: Int[Array, "batch seq"] | None,
    columns: Columns | None,
    method: Method,
    axis_names: tuple[str, ...],
    shards: int,
) -> Float[Array, "batch seq heads head_dim"]:
    batch, seq = q.shape[:2]
    before = min(span.reach(), (shards - 1) * seq)
    after = 0 if span.causal else before
    # The stretch before starts at a multiple of the dilation, so that residues of keys and queries agree.
    padding = -before % span.dilation
    exists = jnp.ones((batch, seq), bool)
    extended = {
        name: jnp.pad(_halo(x, before, after, axis_names, shards), ((0, 0), (padding, 0)) + ((0, 0),) * (x.ndim - 2))
        for name, x in {"kv": jnp.stack([k, v], axis=2), "exists": exists, "segments": segment_ids}.items()
        if x is not None
    }
    return local_attention(
        q,
        extended["kv"][:, :, 0],
        extended["kv"][:, :, 1],
        span=span,
        method=method,
        before=padding + before,
        key_valid=extended["exists"],
        query_segments=segment_ids,
        key_segments=extended.get("segments"),
        columns=columns,
    )


def _halo(x: Array, before: int, after: int, axis_names: tuple[str, ...], shards: int) -> Array:
    """`x` (batch, seq, ...) with the positions around it from the neighbours; zeros (False) where there is no neighbour."""
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
    owned: Bool[Array, "batch globals"] = (here >= 0) & (here < x.shape[1])
    found = take_positions(x, here)
    return jax.lax.psum(jnp.where(owned.reshape(*owned.shape, *[1] * (x.ndim - 2)), found, 0), axis_names)
