"""Splash attention, JAX's Pallas kernel for TPU, for a sliding window.

Blocks of 512 fit windows of a few hundred keys, and short sequences; without a window wider ones cost less a key, as
far as a core's scratch memory holds them (heads of up to 128). The fused backward pass takes 0.7 of the other one's
cycles and writes dq once per block of keys: it is used while that is at most 8 times. Splash's LocalMask is inclusive:
a window of W is (W - 1, 0) when causal.
Imported only where it is used, because importing Pallas takes a while.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_mask
from jaxtyping import Array, Float

from valkyrie.ops.attention.pattern import Columns, Keys, Pattern, Queries, Stretch

LANES = 128
BLOCK = 512
WIDE_BLOCK = 1024
WIDE_FROM = 4096
LONG_FROM = 8192
WIDE_HEAD = 128
DQ_WRITES = 8


def splash_window(
    q: Queries, k: Keys, v: Keys, *, pattern: Pattern, stretch: Stretch, interpret: bool = False
) -> Queries:
    """Return attention (dilation 1) by splash attention; columns join by their log-sum-exp.

    `interpret` runs the kernel without a TPU, slowly, for tests.
    """
    before, columns = stretch.before, stretch.columns
    assert pattern.dilation == 1 and isinstance(before, int)
    batch, seq, heads, head_dim = q.shape
    rows_padded = _padded_length(seq)
    # Every row, padding too, keeps the key it stands at: a row without any block would divide zero by zero.
    keys_padded = _padded_length(max(k.shape[1], before + rows_padded))
    kernel = _splash_kernel(heads, head_dim, rows_padded, keys_padded, pattern, before, interpret)
    segments = _segments(stretch, pattern.causal, batch, seq, k.shape[1], rows_padded, keys_padded)
    scaled = (q.astype(jnp.float32) * head_dim**-0.5).astype(q.dtype)
    queries = _pad(scaled, rows_padded).swapaxes(1, 2)
    keys, values = (_pad(x, keys_padded).swapaxes(1, 2) for x in (k, v))
    if columns is None:
        out = jax.vmap(lambda *x: kernel(*x))(queries, keys, values, segments)
    else:
        extra, extra_sum = _columns_attention(q, columns)
        extra = jnp.pad(extra, ((0, 0), (0, 0), (0, rows_padded - seq), (0, 0)))
        extra_sum = jnp.pad(extra_sum, ((0, 0), (0, 0), (0, rows_padded - seq)), constant_values=-jnp.inf)
        out = jax.vmap(functools.partial(_merged, kernel))(queries, keys, values, segments, extra, extra_sum)
    return jnp.asarray(out).swapaxes(1, 2)[:, :seq]


def _segments(
    stretch: Stretch, causal: bool, batch: int, seq: int, keys: int, rows_padded: int, keys_padded: int
) -> splash.SegmentIds | None:
    """Segment ids that also hide the padding and keys that are not valid; None where a causal mask hides enough."""
    of_rows, of_keys, valid = stretch.query_segments, stretch.key_segments, stretch.key_valid
    if of_rows is None or of_keys is None:
        if causal and valid is None:
            return None
        of_rows, of_keys = jnp.zeros((batch, seq), jnp.int32), jnp.zeros((batch, keys), jnp.int32)
    # Real segments become even numbers, so that the odd ones are free for what no row may see.
    of_keys = 2 * of_keys if valid is None else jnp.where(valid, 2 * of_keys, -1)
    return splash.SegmentIds(q=_pad(2 * of_rows, rows_padded, fill=-1), kv=_pad(of_keys, keys_padded, fill=-1))


def _padded_length(length: int) -> int:
    lanes = -(-length // LANES) * LANES
    return lanes if lanes <= BLOCK else -(-length // BLOCK) * BLOCK


def _pad(x: Array, length: int, fill: int = 0) -> Array:
    return jnp.pad(x, ((0, 0), (0, length - x.shape[1])) + ((0, 0),) * (x.ndim - 2), constant_values=fill)


def _block_sizes(rows: int, keys: int, head_dim: int, window: int | None) -> splash.BlockSizes:
    """The tiles of a shape. Of a causal square, half of the tiles on its diagonal is work for nothing."""

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
        block_kv_dkv_compute=fitting(wide, keys),
        block_q_dq=None if fused else row_block,
        block_kv_dq=None if fused else key_block,
        use_fused_bwd_kernel=fused,
    )


@functools.lru_cache(maxsize=64)
def _splash_kernel(
    heads: int, head_dim: int, rows: int, keys: int, pattern: Pattern, before: int, interpret: bool
) -> splash.SplashAttentionKernel:
    """The kernel object for one shape; making its mask takes host time, so it is kept."""
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
            interpret=interpret,
        )


def _columns_attention(
    q: Float[Array, "batch seq heads head_dim"], columns: Columns
) -> tuple[Float[Array, "batch heads seq head_dim"], Float[Array, "batch heads seq"]]:
    """Attention over the columns alone, with the log of its softmax's denominator (-inf where nothing is seen)."""
    group = q.shape[2] // columns.k.shape[2]
    k, v = jnp.repeat(columns.k, group, axis=2), jnp.repeat(columns.v, group, axis=2)
    logits = jnp.einsum("bqhd,bghd->bhqg", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    seen = columns.visible[:, None]
    top = jax.lax.stop_gradient(jnp.max(jnp.where(seen, logits, -jnp.inf), axis=-1, keepdims=True))
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    weights = jnp.exp(jnp.where(seen, logits, -jnp.inf) - top)
    total = weights.sum(-1)
    some = total > 0
    summed = jnp.einsum("bhqg,bghd->bhqd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    out = summed / jnp.where(some, total, 1.0)[..., None]
    return out, jnp.where(some, jnp.log(jnp.where(some, total, 1.0)) + top[..., 0], -jnp.inf)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _merged(
    kernel: splash.SplashAttentionKernel,
    q: Float[Array, "heads rows head_dim"],
    k: Float[Array, "kv_heads keys head_dim"],
    v: Float[Array, "kv_heads keys head_dim"],
    segments: Any,
    extra: Float[Array, "heads rows head_dim"],
    extra_sum: Float[Array, "heads rows"],
) -> Float[Array, "heads rows head_dim"]:
    """One softmax over the kernel's keys and the extra ones, which come as a finished piece and its log-sum-exp."""
    return _merged_forward(kernel, q, k, v, segments, extra, extra_sum)[0]


def _merged_forward(kernel, q, k, v, segments, extra, extra_sum):
    with_sums = splash.SplashAttentionKernel(
        kernel.fwd_mask_info, None, None, **(kernel.kwargs | {"save_residuals": True})
    )
    local, (local_sum,) = with_sums(q, k, v, segments)
    total = jnp.logaddexp(local_sum, extra_sum)
    share = jnp.exp(extra_sum - total)[..., None]
    out = (local.astype(jnp.float32) * (1 - share) + extra * share).astype(q.dtype)
    return out, (q, k, v, segments, extra, share, out, total)


def _merged_backward(kernel, saved, cotangent):
    """The kernel's own backward, given the output and log-sum-exp of the whole softmax, is that of its share in it."""
    q, k, v, segments, extra, share, out, total = saved
    options = kernel.kwargs
    inside = (q, k, v, segments, None, out, total, kernel.dq_mask_info, kernel.dkv_mask_info)
    cotangents = splash._splash_attention_bwd(
        save_residuals=False,
        mask_value=options["mask_value"],
        is_mqa=options["is_mqa"],
        block_sizes=options["block_sizes"],
        residual_checkpoint_name=options["residual_checkpoint_name"],
        mask_function=options["mask_function"],
        attn_logits_soft_cap=options["attn_logits_soft_cap"],
        interpret=options["interpret"],
        res=inside,
        do=cotangent,
    )
    dq, dk, dv = cotangents[3:6]
    wide = cotangent.astype(jnp.float32)
    d_extra = share * wide
    d_sum = share[..., 0] * (wide * (extra - out.astype(jnp.float32))).sum(-1)
    return dq, dk, dv, None, d_extra, d_sum


_merged.defvjp(_merged_forward, _merged_backward)
