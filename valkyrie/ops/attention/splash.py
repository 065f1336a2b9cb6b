"""Splash attention, JAX's Pallas kernel for TPU, for sliding windows and for a shard of full causal attention.

Blocks of 512 suit windows of a few hundred keys and short sequences. Without a window, wider blocks cost less per key,
if a core's scratch memory can hold them (heads of up to 128). The fused backward pass takes 0.7 of the cycles of the
unfused one, but writes dq once per block of keys. It is used for at most 8 writes.

Splash's LocalMask is inclusive: a causal window of W is (W - 1, 0). Only the device knows the position of its shard of
queries, so it looks up its block tables among those of all shards. Imported only where it is used, because importing
Pallas is slow.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_mask
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as mask_info
from jaxtyping import Array, Float, Int

from valkyrie.ops.attention.pattern import Columns, Keys, Pattern, Queries, Stretch, capped
from valkyrie.ops.choices import CONTEXT

LANES = 128
BLOCK = 512
WIDE_BLOCK = 1024
WIDE_FROM = 4096
LONG_FROM = 16384
WIDE_HEAD = 128
DQ_WRITES = 8


def splash_window(
    q: Queries, k: Keys, v: Keys, *, pattern: Pattern, stretch: Stretch, interpret: bool = False
) -> Queries:
    """Compute attention (dilation 1) with splash attention. Columns are merged by their log-sum-exp.

    `interpret` runs the kernel without a TPU, slowly, for tests.
    """
    before, columns = stretch.before, stretch.columns
    assert pattern.dilation == 1 and isinstance(before, int)
    batch, seq, heads, head_dim = q.shape
    rows_padded = _padded_length(seq)
    # Every row, including padding, keeps the key at its position. A row without any block would divide zero by zero.
    keys_padded = _padded_length(max(k.shape[1], before + rows_padded))
    kernel = _splash_kernel(heads, head_dim, rows_padded, keys_padded, pattern, before, interpret)
    segments = _segments(stretch, pattern.causal, batch, seq, k.shape[1], rows_padded, keys_padded)
    return _run(kernel, q, k, v, segments, columns, rows_padded, keys_padded)


class Chunks(NamedTuple):
    """Positions of a shard's queries. `starts[i]` has the first position of each equal-length chunk of shard i."""

    starts: tuple[tuple[int, ...], ...]
    shard: Int[Array, ""]


def splash_causal_shard(
    q: Queries,
    k: Keys,
    v: Keys,
    *,
    chunks: Chunks,
    stretch: Stretch,
    soft_cap: float | None = None,
    interpret: bool = False,
) -> Queries:
    """Compute full causal attention of one shard's queries to the keys of all shards with splash attention.

    The first key is at position 0. If a shard has more than one chunk, their length must be a whole number of blocks
    (`whole_blocks`).
    """
    head_dim, length = q.shape[3], q.shape[1] // len(chunks.starts[0])
    length_padded, keys_padded = _padded_length(length), _padded_length(k.shape[1])
    assert len(chunks.starts[0]) == 1 or length == length_padded
    rows_padded = length_padded * len(chunks.starts[0])
    blocks = _block_sizes(length_padded, keys_padded, head_dim, None)
    offsets = jnp.asarray(chunks.starts, jnp.int32)[chunks.shard][:, None]
    positions = (offsets + jnp.arange(length_padded, dtype=jnp.int32)).reshape(-1)

    def tables(block_q: int | None, block_kv: int | None, by_key: bool = False) -> mask_info.MaskInfo:
        assert block_q is not None and block_kv is not None
        following, seen = _block_tables(chunks.starts, length_padded, keys_padded, block_q, block_kv, by_key)
        own_following, own_seen = (jnp.asarray(table)[chunks.shard] for table in (following, seen))
        return mask_info.MaskInfo(own_following, None, own_seen, None, positions)  # pyright: ignore[reportArgumentType]

    kernel = splash.SplashAttentionKernel(
        tables(blocks.block_q, blocks.block_kv),
        None if blocks.use_fused_bwd_kernel else tables(blocks.block_q_dq, blocks.block_kv_dq),
        tables(blocks.block_q_dkv, blocks.block_kv_dkv, by_key=True),
        **_options(blocks, _not_later, soft_cap, interpret),
    )
    segments = _segments(stretch, True, q.shape[0], q.shape[1], k.shape[1], rows_padded, keys_padded)
    return _run(kernel, q, k, v, segments, stretch.columns, rows_padded, keys_padded)


def whole_blocks(length: int) -> bool:
    """Whether a chunk of queries needs no padding."""
    return length == _padded_length(length)


def _not_later(query: Int[Array, "*both"], key: Int[Array, "*both"]) -> Array:
    return query >= key


@functools.lru_cache(maxsize=64)
def _block_tables(
    starts: tuple[tuple[int, ...], ...], length: int, keys: int, block_q: int, block_kv: int, by_key: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return two splash tables for all shards, each (shards, 1, blocks of rows, blocks of keys).

    The first has the block of keys (with `by_key`: of rows) to fetch. For a hidden block, this is the next visible one.
    The second has the visibility of a block: hidden (0), partly visible (1) or fully visible (2).
    """
    firsts = np.asarray(starts)[..., None] + np.arange(0, length, block_q)
    firsts = firsts.reshape(len(starts), -1, 1)
    keys_from = np.arange(0, keys, block_kv)
    some, every = keys_from < firsts + block_q, keys_from + block_kv - 1 <= firsts
    seen = np.where(every, 2, np.where(some, 1, 0))
    if by_key:
        following = _next_seen(seen.swapaxes(1, 2)).swapaxes(1, 2)
    else:
        following = np.where(some, np.arange(len(keys_from)), 0)  # the first block is visible to every row
    small = np.int8 if following.max(initial=0) < 128 else np.int16
    return following[:, None].astype(small), seen[:, None].astype(np.int8)


def _next_seen(seen: np.ndarray) -> np.ndarray:
    """Return the index in the last axis of the next nonzero entry, for every entry; after the last, of the first."""
    count = seen.shape[-1]
    following = np.zeros(seen.shape, np.int64)
    after = np.argmax(seen > 0, axis=-1)
    for i in range(count - 1, -1, -1):
        after = np.where(seen[..., i] > 0, i, after)
        following[..., i] = after
    return following


def _options(blocks: splash.BlockSizes, mask_function: Any, soft_cap: float | None, interpret: bool) -> dict[str, Any]:
    return {
        "block_sizes": blocks,
        "is_mqa": False,
        "save_residuals": False,
        "mask_value": splash.DEFAULT_MASK_VALUE,
        "attn_logits_soft_cap": soft_cap,
        "residual_checkpoint_name": CONTEXT,
        "mask_function": mask_function,
        "interpret": interpret,
    }


def _run(
    kernel: splash.SplashAttentionKernel,
    q: Queries,
    k: Keys,
    v: Keys,
    segments: splash.SegmentIds | None,
    columns: Columns | None,
    rows_padded: int,
    keys_padded: int,
) -> Queries:
    """Pad rows and keys, run the kernel, and merge the columns."""
    seq = q.shape[1]
    scaled = (q.astype(jnp.float32) * q.shape[-1] ** -0.5).astype(q.dtype)
    queries = _pad(scaled, rows_padded).swapaxes(1, 2)
    keys, values = (_pad(x, keys_padded).swapaxes(1, 2) for x in (k, v))
    if columns is None:
        out = jax.vmap(lambda *x: kernel(*x))(queries, keys, values, segments)
    else:
        extra, extra_sum = _columns_attention(q, columns, kernel.kwargs["attn_logits_soft_cap"])
        extra = jnp.pad(extra, ((0, 0), (0, 0), (0, rows_padded - seq), (0, 0)))
        extra_sum = jnp.pad(extra_sum, ((0, 0), (0, 0), (0, rows_padded - seq)), constant_values=-jnp.inf)
        masks = _Masks(kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info)
        merged = functools.partial(_merged, tuple(sorted(kernel.kwargs.items())), masks)
        out = jax.vmap(merged)(queries, keys, values, segments, extra, extra_sum)
    return jnp.asarray(out).swapaxes(1, 2)[:, :seq]


def _segments(
    stretch: Stretch, causal: bool, batch: int, seq: int, keys: int, rows_padded: int, keys_padded: int
) -> splash.SegmentIds | None:
    """Return segment ids that also hide padding and invalid keys, or None if the causal mask hides them already."""
    of_rows, of_keys, valid = stretch.query_segments, stretch.key_segments, stretch.key_valid
    if of_rows is None or of_keys is None:
        if causal and valid is None:
            return None
        of_rows, of_keys = jnp.zeros((batch, seq), jnp.int32), jnp.zeros((batch, keys), jnp.int32)
    # Real segments become even numbers, so that odd ones are free for keys that no row may see.
    of_keys = 2 * of_keys if valid is None else jnp.where(valid, 2 * of_keys, -1)
    return splash.SegmentIds(q=_pad(2 * of_rows, rows_padded, fill=-1), kv=_pad(of_keys, keys_padded, fill=-1))


def _padded_length(length: int) -> int:
    lanes = -(-length // LANES) * LANES
    return lanes if lanes <= BLOCK else -(-length // BLOCK) * BLOCK


def _pad(x: Array, length: int, fill: int = 0) -> Array:
    return jnp.pad(x, ((0, 0), (0, length - x.shape[1])) + ((0, 0),) * (x.ndim - 2), constant_values=fill)


def _block_sizes(rows: int, keys: int, head_dim: int, window: int | None) -> splash.BlockSizes:
    """Return the block sizes for a shape. In causal attention, half of each block on the diagonal is wasted work."""

    def fitting(wanted: int, length: int) -> int:
        return wanted if length % wanted == 0 else min(BLOCK, length)

    wide = WIDE_BLOCK if window is None and head_dim <= WIDE_HEAD else BLOCK
    forward = wide if min(rows, keys) >= WIDE_FROM else BLOCK
    row_block, key_block = fitting(forward, rows), fitting(forward, keys)
    backward = fitting(2 * wide if wide > BLOCK and keys >= LONG_FROM else wide, keys)
    fused = keys // backward <= DQ_WRITES
    return splash.BlockSizes(
        block_q=row_block,
        block_kv=key_block,
        block_q_dkv=row_block,
        block_kv_dkv=backward if fused else fitting(wide, keys),
        block_kv_dkv_compute=fitting(BLOCK // 2 if fused and backward > wide else wide, keys),  # for v4's VMEM
        block_q_dq=None if fused else row_block,
        block_kv_dq=None if fused else key_block,
        use_fused_bwd_kernel=fused,
    )


@functools.lru_cache(maxsize=64)
def _splash_kernel(
    heads: int, head_dim: int, rows: int, keys: int, pattern: Pattern, before: int, interpret: bool
) -> splash.SplashAttentionKernel:
    """Return the kernel for a shape. Cached, because building its mask takes host time."""
    blocks = _block_sizes(rows, keys, head_dim, pattern.window)
    if pattern.window is None and not pattern.causal:
        mask: splash_mask.Mask = splash_mask.FullMask((rows, keys))
    else:
        side = None if pattern.window is None else pattern.window - 1
        mask = splash_mask.LocalMask((rows, keys), (side, 0 if pattern.causal else side), offset=before)
    with jax.ensure_compile_time_eval():
        return splash.make_splash_mha(
            splash_mask.MultiHeadMask([mask] * heads),
            block_sizes=blocks,
            head_shards=1,
            q_seq_shards=1,
            attn_logits_soft_cap=pattern.soft_cap,
            residual_checkpoint_name=CONTEXT,
            interpret=interpret,
        )


def _columns_attention(
    q: Float[Array, "batch seq heads head_dim"], columns: Columns, soft_cap: float | None
) -> tuple[Float[Array, "batch heads seq head_dim"], Float[Array, "batch heads seq"]]:
    """Return attention over only the columns, with its log-sum-exp (-inf for rows that see none)."""
    group = q.shape[2] // columns.k.shape[2]
    k, v = jnp.repeat(columns.k, group, axis=2), jnp.repeat(columns.v, group, axis=2)
    logits = jnp.einsum("bqhd,bghd->bhqg", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    logits, seen = capped(logits, soft_cap), columns.visible[:, None]
    top = jax.lax.stop_gradient(jnp.max(jnp.where(seen, logits, -jnp.inf), axis=-1, keepdims=True))
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    weights = jnp.exp(jnp.where(seen, logits, -jnp.inf) - top)
    total = weights.sum(-1)
    some = total > 0
    summed = jnp.einsum("bhqg,bghd->bhqd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    out = summed / jnp.where(some, total, 1.0)[..., None]
    return out, jnp.where(some, jnp.log(jnp.where(some, total, 1.0)) + top[..., 0], -jnp.inf)


class _Masks(NamedTuple):
    """Block tables of a kernel's forward pass and its two backward passes."""

    forward: mask_info.MaskInfo
    dq: mask_info.MaskInfo | None
    dkv: mask_info.MaskInfo | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _merged(
    options: tuple[tuple[str, Any], ...],
    masks: _Masks,
    q: Float[Array, "heads rows head_dim"],
    k: Float[Array, "kv_heads keys head_dim"],
    v: Float[Array, "kv_heads keys head_dim"],
    segments: Any,
    extra: Float[Array, "heads rows head_dim"],
    extra_sum: Float[Array, "heads rows"],
) -> Float[Array, "heads rows head_dim"]:
    """Merge a kernel's attention with precomputed attention over extra keys, `extra`, and its log-sum-exp."""
    return _merged_forward(options, masks, q, k, v, segments, extra, extra_sum)[0]


def _merged_forward(options, masks, q, k, v, segments, extra, extra_sum):
    with_sums = splash.SplashAttentionKernel(masks.forward, None, None, **(dict(options) | {"save_residuals": True}))
    local, (local_sum,) = with_sums(q, k, v, segments)
    total = jnp.logaddexp(local_sum, extra_sum)
    share = jnp.exp(extra_sum - total)[..., None]
    out = (local.astype(jnp.float32) * (1 - share) + extra * share).astype(q.dtype)
    out, total = checkpoint_name(out, CONTEXT), checkpoint_name(total, CONTEXT)
    return out, (masks, q, k, v, segments, extra, share, out, total)


def _merged_backward(options, saved, cotangent):
    """Run the kernel's backward pass with the output and log-sum-exp of the merged softmax.

    The kernel then returns the gradients of its part of that softmax.
    """
    masks, q, k, v, segments, extra, share, out, total = saved
    inside = (q, k, v, segments, None, out, total, masks.dq, masks.dkv)
    kernel_options: dict[str, Any] = {**dict(options), "save_residuals": False}
    cotangents = splash._splash_attention_bwd(**kernel_options, res=inside, do=cotangent)
    dq, dk, dv = cotangents[3:6]
    wide = cotangent.astype(jnp.float32)
    d_extra = share * wide
    d_sum = share[..., 0] * (wide * (extra - out.astype(jnp.float32))).sum(-1)
    return None, dq, dk, dv, None, d_extra, d_sum


_merged.defvjp(_merged_forward, _merged_backward)
