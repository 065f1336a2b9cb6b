"""Attention where the sequence is split over mesh axes: windows get a halo of keys, full attention all keys.

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

from valkyrie.ops.attention.global_tokens import attend_with_global_tokens, take_positions
from valkyrie.ops.attention.local import Method, chunked_attention, local_attention
from valkyrie.ops.attention.pattern import GlobalTokens, Keys, Pattern, Stretch


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
    pattern = Pattern(window, causal, dilation)
    shards = math.prod(jax.lax.axis_size(axis) for axis in axis_names)
    start = jax.lax.axis_index(axis_names) * q.shape[1]
    backend = jax.default_backend() if backend is None else backend
    method = Method(platform="tpu" if backend == "tpu" else None, chunk=chunk)

    def attend(stretch: Stretch) -> Array:
        if window is None:
            keys, values, stretch = _gathered(k, v, stretch, axis_names)
            return chunked_attention(q, keys, values, pattern=pattern, stretch=stretch, chunk=chunk)
        keys, values, stretch = _with_neighbours(k, v, pattern, stretch, axis_names, shards)
        return local_attention(q, keys, values, pattern=pattern, method=method, stretch=stretch)

    stretch = Stretch(start, query_segments=segment_ids)
    if global_tokens is None:
        return attend(stretch)
    return attend_with_global_tokens(
        attend,
        k,
        v,
        global_tokens,
        pattern=pattern,
        stretch=stretch,
        start=start,
        shards=shards,
        take=functools.partial(_from_owner, axis_names=axis_names),
        axis_names=axis_names,
    )


def _gathered(k: Keys, v: Keys, stretch: Stretch, axis_names: tuple[str, ...]) -> tuple[Array, Array, Stretch]:
    """Return the keys and values of all shards; `stretch` says where this one's queries stand."""
    gather = functools.partial(jax.lax.all_gather, axis_name=axis_names, axis=1, tiled=True)
    if stretch.query_segments is not None:
        stretch = stretch._replace(key_segments=gather(stretch.query_segments))
    return gather(k), gather(v), stretch


def _with_neighbours(
    k: Keys, v: Keys, pattern: Pattern, stretch: Stretch, axis_names: tuple[str, ...], shards: int
) -> tuple[Array, Array, Stretch]:
    """Return this shard's keys and values with those of its neighbours that a window reaches, and where they lie."""
    batch, seq = k.shape[:2]
    before = min(pattern.reach(), (shards - 1) * seq)
    after = 0 if pattern.causal else before
    # The stretch begins a multiple of the dilation before the first query, so that residues of keys and queries agree.
    padding = -before % pattern.dilation

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
    return keys_values[:, :, 0], keys_values[:, :, 1], stretch


def _halo(x: Array, before: int, after: int, axis_names: tuple[str, ...], shards: int) -> Array:
    """Return `x` (batch, seq, ...) with the positions around it from the neighbours; zeros where there are none."""
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
    """Return the entries of `x` (batch, seq, ...) at positions relative to this shard, from their owners."""
    owned = (here >= 0) & (here < x.shape[1])
    taken = take_positions(x, here)
    return jax.lax.psum(jnp.where(owned.reshape(*owned.shape, *[1] * (x.ndim - 2)), taken, 0), axis_names)
