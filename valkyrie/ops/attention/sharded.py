"""Attention over a sequence sharded over mesh axes.

With a window, each shard fetches a halo: the (window - 1) * dilation keys before its first query (and as many after its
last one, if bidirectional). If the halo spans several neighbours, each neighbour sends its keys directly, in one
`ppermute`.

Without a window, every shard gathers all keys. Splash attention skips the blocks hidden by the causal mask, so later
shards would have more work. To balance the work, the queries are divided into 2 n chunks, and shard i of n computes
chunks i and 2 n - 1 - i. Queries are exchanged before attention, and outputs are exchanged back after it. Chunks that
would need padding are not exchanged.

Keys and values of global tokens are fetched from the shards that own them, by a sum over shards. Outputs of global
tokens are one softmax over the keys of all shards.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from valkyrie.hardware.platforms import get_platform
from valkyrie.ops.attention.global_tokens import attend_with_global_tokens, take_positions
from valkyrie.ops.attention.local import LocalOptions, chunked_attention, local_attention
from valkyrie.ops.attention.pattern import GlobalTokens, KeyRange, Keys, Pattern, Sinks, Values
from valkyrie.ops.choices import AttentionImpl


def sharded_attention(
    q: Float[Array, "batch seq heads head_dim"],
    k: Float[Array, "batch seq kv_heads head_dim"],
    v: Float[Array, "batch seq kv_heads value_dim"],
    *,
    axis_names: tuple[str, ...],
    window: int | None,
    causal: bool = True,
    dilation: int = 1,
    segment_ids: Int[Array, "batch seq"] | None = None,
    global_tokens: GlobalTokens | None = None,
    impl: AttentionImpl = AttentionImpl.auto,
    backend: str | None = None,
    chunk: int | None = None,
    soft_cap: float | None = None,
    sinks: Sinks | None = None,
    interpret: bool = False,
) -> Float[Array, "batch seq heads value_dim"]:
    """Return this shard's part of `attention` over an evenly sharded sequence. Call it inside `jax.shard_map`.

    `axis_names` are the mesh axes that shard the sequence, major axis first, and `seq` is the length of a shard. The
    `k` and `v` of `global_tokens` are those of this shard; `positions` (in the whole sequence), `valid` and `q` are the
    same on every shard. The other arguments are those of `attention`.

    With `impl=auto`, TPUs use splash attention and other platforms use chunks. `dense` also uses chunks. Dilated
    attention without a window always uses chunks. `interpret` runs the kernel without a TPU, slowly, for tests.

    Raises ValueError for `impl=kernel` on a platform without splash attention.
    """
    backend = jax.default_backend() if backend is None else backend
    has_kernel = get_platform(backend).attention == "splash"
    if impl is AttentionImpl.kernel and not has_kernel:
        raise ValueError(
            "model.attention.impl=kernel: if the sequence is split over mesh axes, only TPUs have a kernel. Use "
            "model.attention.impl=chunked, or auto."
        )
    pattern = Pattern(window, causal, dilation, soft_cap)
    shard_count = math.prod(jax.lax.axis_size(axis) for axis in axis_names)
    start = jax.lax.axis_index(axis_names) * q.shape[1]
    kernel = "splash" if has_kernel and impl in (AttentionImpl.auto, AttentionImpl.kernel) else None
    options = LocalOptions(kernel=kernel, chunk_size=chunk, interpret=interpret)

    def attend(key_range: KeyRange) -> Array:
        if window is None:
            keys, values, key_range = _gather_keys(k, v, key_range, axis_names)
            if options.kernel == "splash" and dilation == 1:
                return _full_splash_attention(q, keys, values, pattern, options, key_range, axis_names, shard_count)
            return chunked_attention(q, keys, values, pattern=pattern, key_range=key_range, chunk_size=chunk)
        keys, values, key_range = _extend_keys(k, v, pattern, key_range, axis_names, shard_count)
        return local_attention(q, keys, values, pattern=pattern, options=options, key_range=key_range)

    key_range = KeyRange(start, query_segments=segment_ids, sinks=sinks)
    if global_tokens is None:
        return attend(key_range)
    return attend_with_global_tokens(
        attend,
        k,
        v,
        global_tokens,
        pattern=pattern,
        key_range=key_range,
        start=start,
        shard_count=shard_count,
        take=functools.partial(_take_from_owner, axis_names=axis_names),
        axis_names=axis_names,
    )


def _full_splash_attention(
    q: Array,
    k: Keys,
    v: Values,
    pattern: Pattern,
    options: LocalOptions,
    key_range: KeyRange,
    axis_names: tuple[str, ...],
    shard_count: int,
) -> Array:
    """Compute full attention of this shard's queries to all keys with splash attention."""
    from valkyrie.ops.attention.splash import (
        QueryChunks,
        needs_no_padding,
        splash_causal_shard,
    )  # Pallas is slow to import

    if not pattern.causal:
        return local_attention(q, k, v, pattern=pattern, options=options, key_range=key_range._replace(keys_before=0))
    shard, seq = jax.lax.axis_index(axis_names), q.shape[1]
    attend = functools.partial(splash_causal_shard, soft_cap=pattern.soft_cap, interpret=options.interpret)
    if seq % 2 or not needs_no_padding(seq // 2):
        starts = tuple((i * seq,) for i in range(shard_count))
        return attend(q, k, v, chunks=QueryChunks(starts, shard), key_range=key_range)
    swap = functools.partial(_exchange_halves, axis_names=axis_names, shard_count=shard_count)
    segments, global_keys = key_range.query_segments, key_range.global_keys
    swapped = key_range._replace(
        query_segments=None if segments is None else swap(segments),
        global_keys=None if global_keys is None else global_keys._replace(visible=swap(global_keys.visible)),
    )
    half_by_owner = [
        {owner: half for half, owner in enumerate(_half_owners(shard_count)) if half % 2 == i} for i in range(2)
    ]
    starts = tuple((half_by_owner[0][i] * (seq // 2), half_by_owner[1][i] * (seq // 2)) for i in range(shard_count))
    return swap(attend(swap(q), k, v, chunks=QueryChunks(starts, shard), key_range=swapped), inverse=True)


def _half_owners(shard_count: int) -> list[int]:
    """Return the shard that computes each half-shard of queries. Each shard gets an early and a late half."""
    return [min(half, 2 * shard_count - 1 - half) for half in range(2 * shard_count)]


def _exchange_halves(x: Array, axis_names: tuple[str, ...], shard_count: int, inverse: bool = False) -> Array:
    """Exchange halves of `x` (batch, seq, ...) between shards. Returns the two halves that this shard computes.

    `inverse` returns every half to the shard it came from.
    """
    parts = []
    for i, part in enumerate(jnp.split(x, 2, axis=1)):
        pairs = [(half // 2, owner) for half, owner in enumerate(_half_owners(shard_count)) if half % 2 == i]
        parts.append(jax.lax.ppermute(part, axis_names, [(b, a) for a, b in pairs] if inverse else pairs))
    return jnp.concatenate(parts, axis=1)


def _gather_keys(k: Keys, v: Values, key_range: KeyRange, axis_names: tuple[str, ...]) -> tuple[Array, Array, KeyRange]:
    """Return the keys and values of all shards, and `key_range` with the segments of all keys."""
    gather = functools.partial(jax.lax.all_gather, axis_name=axis_names, axis=1, tiled=True)
    if key_range.query_segments is not None:
        key_range = key_range._replace(key_segments=gather(key_range.query_segments))
    return gather(k), gather(v), key_range


def _extend_keys(
    k: Keys, v: Values, pattern: Pattern, key_range: KeyRange, axis_names: tuple[str, ...], shard_count: int
) -> tuple[Array, Array, KeyRange]:
    """Return (keys, values, key range) of this shard, extended by the neighbours' keys within the window."""
    batch, seq = k.shape[:2]
    keys_before = min(pattern.reach(), (shard_count - 1) * seq)
    keys_after = 0 if pattern.causal else keys_before
    # The range starts a multiple of the dilation before the first query, so that residues of keys and queries agree.
    padding = -keys_before % pattern.dilation

    def extend(x: Array) -> Array:
        x = _add_halo(x, keys_before, keys_after, axis_names, shard_count)
        return jnp.pad(x, ((0, 0), (padding, 0)) + ((0, 0),) * (x.ndim - 2))

    keys_values = extend(jnp.stack([k, v], axis=2))
    segments = key_range.query_segments
    key_range = key_range._replace(
        keys_before=padding + keys_before,
        key_valid=extend(jnp.ones((batch, seq), bool)),
        key_segments=None if segments is None else extend(segments),
    )
    return keys_values[:, :, 0], keys_values[:, :, 1], key_range


def _add_halo(x: Array, before: int, after: int, axis_names: tuple[str, ...], shard_count: int) -> Array:
    """Extend `x` (batch, seq, ...) by `before` and `after` positions of its neighbours, or zeros past the sequence."""
    seq = x.shape[1]
    parts = [x]
    for hop in range(1, -(-before // seq) + 1):
        count = min(seq, before - (hop - 1) * seq)
        pairs = [(i, i + hop) for i in range(shard_count - hop)]
        parts.insert(0, jax.lax.ppermute(x[:, seq - count :], axis_names, pairs))
    for hop in range(1, -(-after // seq) + 1):
        count = min(seq, after - (hop - 1) * seq)
        pairs = [(i + hop, i) for i in range(shard_count - hop)]
        parts.append(jax.lax.ppermute(x[:, :count], axis_names, pairs))
    return jnp.concatenate(parts, axis=1)


def _take_from_owner(x: Array, local_positions: Int[Array, "batch globals"], axis_names: tuple[str, ...]) -> Array:
    """Gather entries of a sequence-sharded array onto every shard.

    `x` (batch, seq, ...) is this shard's part. `local_positions` are relative to the start of this shard. Entries
    outside this shard come from the shards that own them, and are zero outside the sequence.
    """
    owned = (local_positions >= 0) & (local_positions < x.shape[1])
    entries = take_positions(x, local_positions)
    return jax.lax.psum(jnp.where(owned.reshape(*owned.shape, *[1] * (x.ndim - 2)), entries, 0), axis_names)
