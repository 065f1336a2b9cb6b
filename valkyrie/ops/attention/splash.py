"""Splash attention, JAX's Pallas kernel for TPU.

`splash_window` computes attention to the keys of one device, with or without a window. `splash_causal_shard` computes
one shard's part of full causal attention.

Blocks of 512 suit windows of a few hundred keys and short sequences. Without a window, and with one of 4,096 keys or
more, wider blocks cost less per key, if a core's scratch memory can hold them (heads of up to 128). The fused backward
pass takes 0.7 of the cycles of the unfused one, but writes dq once per block of keys, also for the blocks that a window
hides. It is used for at most 8 writes, or 4 with a narrow window of at most half of the keys. `splash_causal_shard`
runs it for parts of longer sequences.

Splash's LocalMask is inclusive: a causal window of W is (W - 1, 0). The position of a shard's queries is known only at
run time. The tables of visible blocks are therefore built for all shards, and each device selects its own. This module
is imported only where it is used, because importing Pallas is slow.
"""

from __future__ import annotations

import dataclasses
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

from valkyrie.ops.attention.pattern import (
    GlobalKeys,
    KeyRange,
    Keys,
    Outputs,
    Pattern,
    Queries,
    Sinks,
    Values,
    apply_soft_cap,
)
from valkyrie.ops.choices import ATTENTION_OUTPUT, MAX_WIDE_HEAD_DIM, MIN_WIDE_LENGTH, MIN_WIDE_WINDOW, WIDE_BLOCK

LANES = 128
"""Lanes of a TPU vector register. Lengths up to `BLOCK` are padded to a multiple of this."""

BLOCK = 512
"""Number of queries or keys in a block where wide blocks are not used."""

MIN_LONG_LENGTH = 16384
"""Minimum number of keys for which the backward pass doubles its blocks of keys, to write dq half as often."""

MAX_DQ_WRITES = 8
"""Maximum number of key blocks for the fused backward pass, which writes dq once per key block."""

MAX_WINDOW_DQ_WRITES = 4
"""The same with a window below `MIN_WIDE_WINDOW` and of at most half of the keys: most blocks written are zero.

By replay of 4 layers of gpt_125m on v5e-8 (131,072 tokens), the unfused backward pass shortens a step from 113.9 to
108.8 ms for 8 blocks and a window of 512, and from 118.1 to 114.6 ms for a window of 1,024. Memory falls from 1.80 to
1.56 GiB. For 4 blocks and a window of 1,024, it is no faster: 112.0 and 111.8 ms, and 458 and 463 ms with the heads of
nanochat.
"""


MAX_KEY_PARTS = 8
"""Maximum number of parts of the keys, each with a fused backward kernel. With more, the backward pass is not fused."""


def splash_window(
    q: Queries, k: Keys, v: Values, *, pattern: Pattern, key_range: KeyRange, interpret: bool = False
) -> Outputs:
    """Compute attention on one device with splash attention. The dilation must be 1.

    Attention to `key_range.global_keys` is computed separately and merged by log-sum-exp.

    `interpret` runs the kernel without a TPU, slowly, for tests.
    """
    keys_before = key_range.keys_before
    assert pattern.dilation == 1 and isinstance(keys_before, int)
    batch, seq, heads, head_dim = q.shape
    padded_rows = _padded_length(seq)
    # Every row, including padding, keeps the key at its position. A row without any block would divide zero by zero.
    padded_keys = _padded_length(max(k.shape[1], keys_before + padded_rows))
    kernel = _splash_kernel(heads, head_dim, padded_rows, padded_keys, pattern, keys_before, interpret)
    segments = _segment_ids(key_range, pattern.causal, batch, seq, k.shape[1], padded_rows, padded_keys)
    masks = _MaskTables(kernel.fwd_mask_info, kernel.dq_mask_info, (kernel.dkv_mask_info,))
    return _run_kernels(masks, kernel.kwargs, q, k, v, segments, key_range, padded_rows, padded_keys)


class QueryChunks(NamedTuple):
    """Positions of a shard's queries, in chunks of equal length.

    Args:
        starts: For each shard, the first position of each of its chunks.
        shard: Index of this shard.
    """

    starts: tuple[tuple[int, ...], ...]
    shard: Int[Array, ""]


def splash_causal_shard(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    chunks: QueryChunks,
    key_range: KeyRange,
    soft_cap: float | None = None,
    interpret: bool = False,
) -> Outputs:
    """Compute full causal attention of one shard's queries to the keys of all shards with splash attention.

    The first key is at position 0. If a shard has more than one chunk, their length must be a whole number of blocks
    (`needs_no_padding`).

    If one fused backward kernel would write dq too often, the keys are split into parts, and each has its own kernel.
    """
    head_dim, length = q.shape[3], q.shape[1] // len(chunks.starts[0])
    padded_length, padded_keys = _padded_length(length), _padded_length(k.shape[1])
    assert len(chunks.starts[0]) == 1 or length == padded_length
    padded_rows = padded_length * len(chunks.starts[0])
    part_count, blocks = _causal_shard_blocks(padded_length, padded_keys, head_dim)
    offsets = jnp.asarray(chunks.starts, jnp.int32)[chunks.shard][:, None]
    positions = (offsets + jnp.arange(padded_length, dtype=jnp.int32)).reshape(-1)

    def make_tables(
        block_q: int | None, block_kv: int | None, by_key: bool = False, part: int = 0, part_count: int = 1
    ) -> mask_info.MaskInfo:
        assert block_q is not None and block_kv is not None
        tables = _block_tables(chunks.starts, padded_length, padded_keys, block_q, block_kv, by_key)
        shard_tables = (jnp.asarray(np.split(table, part_count, axis=-1)[part])[chunks.shard] for table in tables)
        next_visible, visibility = shard_tables
        part_positions = positions - part * (padded_keys // part_count)  # the kernel counts keys from its first one
        return mask_info.MaskInfo(next_visible, None, visibility, None, part_positions)  # pyright: ignore[reportArgumentType]

    masks = _MaskTables(
        make_tables(blocks.block_q, blocks.block_kv),
        None if blocks.use_fused_bwd_kernel else make_tables(blocks.block_q_dq, blocks.block_kv_dq),
        tuple(
            make_tables(blocks.block_q_dkv, blocks.block_kv_dkv, True, part, part_count) for part in range(part_count)
        ),
    )
    options = _kernel_options(blocks, _causal_mask, soft_cap, interpret)
    segments = _segment_ids(key_range, True, q.shape[0], q.shape[1], k.shape[1], padded_rows, padded_keys)
    return _run_kernels(masks, options, q, k, v, segments, key_range, padded_rows, padded_keys)


def needs_no_padding(length: int) -> bool:
    """Return whether a chunk of `length` queries already consists of whole blocks."""
    return length == _padded_length(length)


def _causal_mask(query: Int[Array, "*both"], key: Int[Array, "*both"]) -> Array:
    return query >= key


@functools.lru_cache(maxsize=64)
def _block_tables(
    starts: tuple[tuple[int, ...], ...], length: int, keys: int, block_q: int, block_kv: int, by_key: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return two tables for splash attention, for all shards, each (shards, 1, blocks of rows, blocks of keys).

    The first has the block of keys (with `by_key`: of rows) to fetch. For a hidden block, this is the next visible one.
    The second has the visibility of a block: hidden (0), partly visible (1) or fully visible (2).
    """
    first_rows = np.asarray(starts)[..., None] + np.arange(0, length, block_q)
    first_rows = first_rows.reshape(len(starts), -1, 1)
    first_keys = np.arange(0, keys, block_kv)
    is_partly_visible, is_fully_visible = first_keys < first_rows + block_q, first_keys + block_kv - 1 <= first_rows
    visibility = np.where(is_fully_visible, 2, np.where(is_partly_visible, 1, 0))
    if by_key:
        next_visible = _next_visible(visibility.swapaxes(1, 2)).swapaxes(1, 2)
    else:
        # Every row sees the first block.
        next_visible = np.where(is_partly_visible, np.arange(len(first_keys)), 0)
    index_dtype = np.int8 if next_visible.max(initial=0) < 128 else np.int16
    return next_visible[:, None].astype(index_dtype), visibility[:, None].astype(np.int8)


def _next_visible(visibility: np.ndarray) -> np.ndarray:
    """Return the index of the first nonzero entry at or after each entry, along the last axis.

    Entries after the last nonzero one get the index of the first nonzero one.
    """
    count = visibility.shape[-1]
    next_visible = np.zeros(visibility.shape, np.int64)
    next_index = np.argmax(visibility > 0, axis=-1)
    for i in range(count - 1, -1, -1):
        next_index = np.where(visibility[..., i] > 0, i, next_index)
        next_visible[..., i] = next_index
    return next_visible


def _kernel_options(
    blocks: splash.BlockSizes, mask_function: Any, soft_cap: float | None, interpret: bool
) -> dict[str, Any]:
    return {
        "block_sizes": blocks,
        "is_mqa": False,
        "save_residuals": False,
        "mask_value": splash.DEFAULT_MASK_VALUE,
        "attn_logits_soft_cap": soft_cap,
        "residual_checkpoint_name": ATTENTION_OUTPUT,
        "mask_function": mask_function,
        "interpret": interpret,
    }


def _run_kernels(
    masks: _MaskTables,
    options: dict[str, Any],
    q: Queries,
    k: Keys,
    v: Values,
    segments: splash.SegmentIds | None,
    key_range: KeyRange,
    padded_rows: int,
    padded_keys: int,
) -> Outputs:
    """Pad queries and keys, run the kernels, and merge their output with attention over the global keys."""
    seq, global_keys, sinks = q.shape[1], key_range.global_keys, key_range.sinks
    scaled = (q.astype(jnp.float32) * q.shape[-1] ** -0.5).astype(q.dtype)
    queries = _pad_length(scaled, padded_rows).swapaxes(1, 2)
    keys, values = (_pad_length(x, padded_keys).swapaxes(1, 2) for x in (k, v))
    if global_keys is None and sinks is None and len(masks.dkv) == 1:
        kernel = splash.SplashAttentionKernel(masks.forward, masks.dq, masks.dkv[0], **options)
        out = jax.vmap(lambda *x: kernel(*x))(queries, keys, values, segments)
    else:
        global_part = None
        if global_keys is not None:
            global_output, global_log_sum = _global_keys_attention(q, global_keys, options["attn_logits_soft_cap"])
            global_output = jnp.pad(global_output, ((0, 0), (0, 0), (0, padded_rows - seq), (0, 0)))
            global_log_sum = jnp.pad(global_log_sum, ((0, 0), (0, 0), (0, padded_rows - seq)), constant_values=-jnp.inf)
            global_part = _GlobalPart(global_output, global_log_sum)
        run_merged = functools.partial(_merged_attention, tuple(sorted(options.items())), masks)
        out = jax.vmap(run_merged, in_axes=(0, 0, 0, 0, 0, None))(queries, keys, values, segments, global_part, sinks)
    return jnp.asarray(out).swapaxes(1, 2)[:, :seq]


def _segment_ids(
    key_range: KeyRange, causal: bool, batch: int, seq: int, keys: int, padded_rows: int, padded_keys: int
) -> splash.SegmentIds | None:
    """Return segment ids that also hide padding and invalid keys, or None if the causal mask suffices."""
    row_segments, key_segments, valid = key_range.query_segments, key_range.key_segments, key_range.key_valid
    if row_segments is None or key_segments is None:
        if causal and valid is None:
            return None
        row_segments, key_segments = jnp.zeros((batch, seq), jnp.int32), jnp.zeros((batch, keys), jnp.int32)
    # Real segments become even numbers, so that odd ones are free for keys that no row may see.
    key_segments = 2 * key_segments if valid is None else jnp.where(valid, 2 * key_segments, -1)
    row_segments, key_segments = 2 * row_segments, _pad_length(key_segments, padded_keys, fill=-1)
    return splash.SegmentIds(q=_pad_length(row_segments, padded_rows, fill=-1), kv=key_segments)


def _padded_length(length: int) -> int:
    lanes = -(-length // LANES) * LANES
    return lanes if lanes <= BLOCK else -(-length // BLOCK) * BLOCK


def _pad_length(x: Array, length: int, fill: int = 0) -> Array:
    return jnp.pad(x, ((0, 0), (0, length - x.shape[1])) + ((0, 0),) * (x.ndim - 2), constant_values=fill)


def _block_sizes(rows: int, keys: int, head_dim: int, window: int | None) -> splash.BlockSizes:
    """Return the block sizes for this number of queries and keys.

    Larger blocks waste more on the diagonal of causal attention, where half of each block is masked.
    """

    def fit_block(size: int, length: int) -> int:
        return size if length % size == 0 else min(BLOCK, length)

    is_wide = window is None or window >= MIN_WIDE_WINDOW
    wide_block = WIDE_BLOCK if is_wide and head_dim <= MAX_WIDE_HEAD_DIM else BLOCK
    forward_block = wide_block if min(rows, keys) >= MIN_WIDE_LENGTH else BLOCK
    row_block, key_block = fit_block(forward_block, rows), fit_block(forward_block, keys)
    backward_block = fit_block(2 * wide_block if wide_block > BLOCK and keys >= MIN_LONG_LENGTH else wide_block, keys)
    is_mostly_hidden = window is not None and not is_wide and 2 * window <= keys
    is_fused = keys // backward_block <= (MAX_WINDOW_DQ_WRITES if is_mostly_hidden else MAX_DQ_WRITES)
    # Smaller if the backward block is doubled, to fit into v4's VMEM.
    compute_block = BLOCK // 2 if is_fused and backward_block > wide_block else wide_block
    return splash.BlockSizes(
        block_q=row_block,
        block_kv=key_block,
        block_q_dkv=row_block,
        block_kv_dkv=backward_block if is_fused else fit_block(wide_block, keys),
        block_kv_dkv_compute=fit_block(compute_block, keys),
        block_q_dq=None if is_fused else row_block,
        block_kv_dq=None if is_fused else key_block,
        use_fused_bwd_kernel=is_fused,
    )


def _causal_shard_blocks(rows: int, keys: int, head_dim: int) -> tuple[int, splash.BlockSizes]:
    """Return (number of parts of the keys in the backward pass, block sizes).

    There are as few parts as allow a fused backward kernel for each. If this takes more than `MAX_KEY_PARTS`, there is
    one part, and the backward pass is not fused.
    """
    blocks = _block_sizes(rows, keys, head_dim, None)
    for parts in range(1, MAX_KEY_PARTS + 1):
        if keys % (parts * BLOCK) == 0:
            of_part = _block_sizes(rows, keys // parts, head_dim, None)
            if of_part.use_fused_bwd_kernel:
                return parts, dataclasses.replace(of_part, block_q=blocks.block_q, block_kv=blocks.block_kv)
    return 1, blocks


@functools.lru_cache(maxsize=64)
def _splash_kernel(
    heads: int, head_dim: int, rows: int, keys: int, pattern: Pattern, keys_before: int, interpret: bool
) -> splash.SplashAttentionKernel:
    """Return the kernel for a shape. Cached, because building its mask takes host time."""
    blocks = _block_sizes(rows, keys, head_dim, pattern.window)
    if pattern.window is None and not pattern.causal:
        mask: splash_mask.Mask = splash_mask.FullMask((rows, keys))
    else:
        reach = None if pattern.window is None else pattern.window - 1
        mask = splash_mask.LocalMask((rows, keys), (reach, 0 if pattern.causal else reach), offset=keys_before)
    with jax.ensure_compile_time_eval():
        return splash.make_splash_mha(
            splash_mask.MultiHeadMask([mask] * heads),
            block_sizes=blocks,
            head_shards=1,
            q_seq_shards=1,
            attn_logits_soft_cap=pattern.soft_cap,
            residual_checkpoint_name=ATTENTION_OUTPUT,
            interpret=interpret,
        )


def _global_keys_attention(
    q: Float[Array, "batch seq heads head_dim"], global_keys: GlobalKeys, soft_cap: float | None
) -> tuple[Float[Array, "batch heads seq head_dim"], Float[Array, "batch heads seq"]]:
    """Return attention over only the global keys, with its log-sum-exp (-inf for rows that see none)."""
    group = q.shape[2] // global_keys.k.shape[2]
    k, v = jnp.repeat(global_keys.k, group, axis=2), jnp.repeat(global_keys.v, group, axis=2)
    logits = jnp.einsum("bqhd,bghd->bhqg", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    logits, is_visible = apply_soft_cap(logits, soft_cap), global_keys.visible[:, None]
    max_logit = jax.lax.stop_gradient(jnp.max(jnp.where(is_visible, logits, -jnp.inf), axis=-1, keepdims=True))
    max_logit = jnp.where(jnp.isfinite(max_logit), max_logit, 0.0)
    weights = jnp.exp(jnp.where(is_visible, logits, -jnp.inf) - max_logit)
    total = weights.sum(-1)
    sees_any = total > 0
    weighted_sum = jnp.einsum("bhqg,bghd->bhqd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    out = weighted_sum / jnp.where(sees_any, total, 1.0)[..., None]
    return out, jnp.where(sees_any, jnp.log(jnp.where(sees_any, total, 1.0)) + max_logit[..., 0], -jnp.inf)


class _MaskTables(NamedTuple):
    """Block tables of a kernel's forward pass and its two backward passes.

    `dq` is None if the backward passes are fused into the `dkv` pass, which has one table for each part of the keys.
    """

    forward: mask_info.MaskInfo
    dq: mask_info.MaskInfo | None
    dkv: tuple[mask_info.MaskInfo | None, ...]


class _GlobalPart(NamedTuple):
    """Output and log-sum-exp of attention over only the global keys."""

    output: Float[Array, "heads rows head_dim"]
    log_sum: Float[Array, "heads rows"]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _merged_attention(
    options: tuple[tuple[str, Any], ...],
    masks: _MaskTables,
    q: Float[Array, "heads rows head_dim"],
    k: Float[Array, "kv_heads keys head_dim"],
    v: Float[Array, "kv_heads keys value_dim"],
    segments: Any,
    global_part: _GlobalPart | None,
    sinks: Sinks | None,
) -> Float[Array, "heads rows value_dim"]:
    """Run the kernels, with sinks if any, and merge their output with the given attention over the global keys."""
    return _merged_attention_forward(options, masks, q, k, v, segments, global_part, sinks)[0]


def _merged_attention_forward(options, masks, q, k, v, segments, global_part, sinks):
    with_sums = splash.SplashAttentionKernel(masks.forward, None, None, **(dict(options) | {"save_residuals": True}))
    out, (log_sum,) = with_sums(q, k, v, segments, sinks)
    global_share = None
    if global_part is not None:
        log_sum = jnp.logaddexp(log_sum, global_part.log_sum)
        global_share = jnp.exp(global_part.log_sum - log_sum)[..., None]
        out = (out.astype(jnp.float32) * (1 - global_share) + global_part.output * global_share).astype(q.dtype)
    out, log_sum = checkpoint_name(out, ATTENTION_OUTPUT), checkpoint_name(log_sum, ATTENTION_OUTPUT)
    return out, (masks, q, k, v, segments, global_part, global_share, sinks, out, log_sum)


def _merged_attention_backward(options, forward_residuals, cotangent):
    """Run the kernels' backward pass with the output and log-sum-exp of the merged softmax.

    Each kernel then returns the gradients of its part of that softmax. A sink is a further key with a value of zero.
    """
    masks, q, k, v, segments, global_part, global_share, sinks, out, log_sum = forward_residuals
    kernel_options: dict[str, Any] = {**dict(options), "save_residuals": False}
    part_keys, d_keys = k.shape[1] // len(masks.dkv), []
    dq: Any = 0.0
    for part, mask in enumerate(masks.dkv):
        keys = slice(part * part_keys, (part + 1) * part_keys)
        part_segments = segments and splash.SegmentIds(segments.q, segments.kv[keys])
        residuals = (q, k[:, keys], v[:, keys], part_segments, None, out, log_sum, masks.dq, mask)
        part_dq, *d_part = splash._splash_attention_bwd(**kernel_options, res=residuals, do=cotangent)[3:6]
        # Otherwise, the dq blocks of several parts could be in memory at a time.
        dq, cotangent = jax.lax.optimization_barrier((dq + part_dq.astype(jnp.float32), cotangent))
        d_keys.append(d_part)
    dk, dv = (jnp.concatenate(parts, axis=1) for parts in zip(*d_keys, strict=True))
    d_global, d_sinks = None, None
    cotangent_f32, out_f32 = cotangent.astype(jnp.float32), out.astype(jnp.float32)
    if global_part is not None:
        d_log_sum = global_share[..., 0] * (cotangent_f32 * (global_part.output - out_f32)).sum(-1)
        d_global = _GlobalPart(global_share * cotangent_f32, d_log_sum)
    if sinks is not None:
        d_sinks = -(jnp.exp(sinks[:, None] - log_sum) * (cotangent_f32 * out_f32).sum(-1)).sum(-1)
    return None, dq.astype(q.dtype), dk, dv, None, d_global, d_sinks


_merged_attention.defvjp(_merged_attention_forward, _merged_attention_backward)
