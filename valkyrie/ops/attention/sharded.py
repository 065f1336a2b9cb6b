"""Attention over a sequence sharded over mesh axes. Windows fetch a halo of keys, full attention gathers all keys.

A shard needs the (window - 1) * dilation keys before its first query (and after its last one, if bidirectional). They
come from as many neighbours as that spans, each by one `ppermute` directly from its owner.

Full attention gathers all keys. A kernel that skips blocks hidden by the causal mask would give later shards more work.
To balance it, queries are exchanged first: of 2 n chunks, shard i of n computes chunks i and 2 n - 1 - i.

Global columns are fetched from their owners by a sum over shards. Global rows are one softmax over the keys of all
shards.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from valkyrie.hardware.platforms import platform_of
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
    soft_cap: float | None = None,
    interpret: bool = False,
) -> Float[Array, "batch seq heads head_dim"]:
    """Return this shard's part of `attention` over a sequence sharded evenly over `axis_names`, the first one major.

    Call it inside `jax.shard_map`. `seq` is the length of a shard. The `k` and `v` of `global_tokens` are this shard's;
    `positions` (in the whole sequence), `valid` and `q` are the same on every shard. On a TPU it uses splash attention.
    Other platforms, and dilated attention without a window, use chunks. `interpret` runs the kernel without a TPU.
    """
    pattern = Pattern(window, causal, dilation, soft_cap)
    shards = math.prod(jax.lax.axis_size(axis) for axis in axis_names)
    start = jax.lax.axis_index(axis_names) * q.shape[1]
    backend = jax.default_backend() if backend is None else backend
    kernel = platform_of(backend).attention
    method = Method(kernel=kernel if kernel == "splash" else None, chunk=chunk, interpret=interpret)

    def attend(stretch: Stretch) -> Array:
        if window is None:
            keys, values, stretch = _gathered(k, v, stretch, axis_names)
            if method.kernel == "splash" and dilation == 1:
                return _full_by_kernel(q, keys, values, pattern, method, stretch, axis_names, shards)
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


def _full_by_kernel(
    q: Array,
    k: Keys,
    v: Keys,
    pattern: Pattern,
    method: Method,
    stretch: Stretch,
    axis_names: tuple[str, ...],
    shards: int,
) -> Array:
    """Compute full attention of this shard's queries to all keys with splash attention."""
    from valkyrie.ops.attention.splash import Chunks, splash_causal_shard, whole_blocks  # Pallas is slow to import

    if not pattern.causal:
        return local_attention(q, k, v, pattern=pattern, method=method, stretch=stretch._replace(before=0))
    shard, seq = jax.lax.axis_index(axis_names), q.shape[1]
    attend = functools.partial(splash_causal_shard, soft_cap=pattern.soft_cap, interpret=method.interpret)
    if seq % 2 or not whole_blocks(seq // 2):
        starts = tuple((i * seq,) for i in range(shards))
        return attend(q, k, v, chunks=Chunks(starts, shard), stretch=stretch)
    swap = functools.partial(_swapped, axis_names=axis_names, shards=shards)
    segments, columns = stretch.query_segments, stretch.columns
    swapped = stretch._replace(
        query_segments=None if segments is None else swap(segments),
        columns=None if columns is None else columns._replace(visible=swap(columns.visible)),
    )
    halves = [{to: half for half, to in enumerate(_takers(shards)) if half % 2 == i} for i in range(2)]
    starts = tuple((halves[0][i] * (seq // 2), halves[1][i] * (seq // 2)) for i in range(shards))
    return swap(attend(swap(q), k, v, chunks=Chunks(starts, shard), stretch=swapped), back=True)


def _takers(shards: int) -> list[int]:
    """Return the shard that computes each half of a shard's queries. Pairs early halves with late, longer ones."""
    return [min(half, 2 * shards - 1 - half) for half in range(2 * shards)]


def _swapped(x: Array, axis_names: tuple[str, ...], shards: int, back: bool = False) -> Array:
    """Exchange halves of `x` (batch, seq, ...): return those that this shard computes, or with `back` undo it."""
    parts = []
    for i, part in enumerate(jnp.split(x, 2, axis=1)):
        pairs = [(half // 2, to) for half, to in enumerate(_takers(shards)) if half % 2 == i]
        parts.append(jax.lax.ppermute(part, axis_names, [(b, a) for a, b in pairs] if back else pairs))
    return jnp.concatenate(parts, axis=1)


def _gathered(k: Keys, v: Keys, stretch: Stretch, axis_names: tuple[str, ...]) -> tuple[Array, Array, Stretch]:
    """Gather the keys, values and key segments of all shards."""
    gather = functools.partial(jax.lax.all_gather, axis_name=axis_names, axis=1, tiled=True)
    if stretch.query_segments is not None:
        stretch = stretch._replace(key_segments=gather(stretch.query_segments))
    return gather(k), gather(v), stretch


def _with_neighbours(
    k: Keys, v: Keys, pattern: Pattern, stretch: Stretch, axis_names: tuple[str, ...], shards: int
) -> tuple[Array, Array, Stretch]:
    """Return this shard's keys and values with those of neighbours within the window, and their `Stretch`."""
    batch, seq = k.shape[:2]
    before = min(pattern.reach(), (shards - 1) * seq)
    after = 0 if pattern.causal else before
    # The stretch starts a multiple of the dilation before the first query, so that residues of keys and queries agree.
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
    """Return `x` (batch, seq, ...) with adjacent positions from the neighbours, or zeros outside of the sequence."""
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
    """Return the entries of `x` (batch, seq, ...) at positions relative to this shard, from the owning shards."""
    owned = (here >= 0) & (here < x.shape[1])
    taken = take_positions(x, here)
    return jax.lax.psum(jnp.where(owned.reshape(*owned.shape, *[1] * (x.ndim - 2)), taken, 0), axis_names)
