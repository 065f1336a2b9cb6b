"""Softmax attention: full or with a sliding window, optionally dilated, with segments and global tokens.

`pattern.py` defines windows, segments and global tokens. `reference.py` uses an explicit mask; the others agree with it
to float32 rounding. `local.py` uses chunks of queries or the platform's kernel (`splash.py` on a TPU, cuDNN on a GPU),
`sharded.py` handles a sequence sharded over devices, `chunks.py` chunks of positions, and `streaming.py` one token at a
time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from valkyrie.hardware.platforms import Platform, get_platform
from valkyrie.ops.attention.chunks import attention_within_chunks, chunk_segments, document_positions
from valkyrie.ops.attention.global_tokens import attend_with_global_tokens
from valkyrie.ops.attention.local import LocalOptions, local_attention, pick_chunk_size
from valkyrie.ops.attention.pattern import GlobalTokens, KeyRange, Pattern, Sinks
from valkyrie.ops.attention.reference import reference_attention
from valkyrie.ops.attention.sharded import sharded_attention
from valkyrie.ops.attention.streaming import GlobalStep, KVCache, attention_step, init_cache
from valkyrie.ops.choices import ALWAYS_DENSE_LENGTH, ATTENTION_OUTPUT, AttentionImpl
from valkyrie.problems import nearest_divisor

__all__ = [
    "AttentionImpl",
    "AttentionRequest",
    "GlobalStep",
    "GlobalTokens",
    "KVCache",
    "attention",
    "attention_step",
    "attention_within_chunks",
    "chunk_segments",
    "choose_implementation",
    "document_positions",
    "init_cache",
    "sharded_attention",
]


def attention(
    q: Float[Array, "batch seq heads head_dim"],
    k: Float[Array, "batch seq kv_heads head_dim"],
    v: Float[Array, "batch seq kv_heads value_dim"],
    *,
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
) -> Float[Array, "batch seq heads value_dim"]:
    """Compute softmax attention within a sliding window, in q's dtype.

    Query head h uses key head h // (heads / kv_heads). Logits (scaled by head_dim ** -0.5) and softmax are float32.
    Matrix products take operands in their given dtypes and accumulate in float32. Raises ValueError if `kv_heads`
    does not divide `heads`, for a window or dilation below 1, and for `impl=kernel` if no kernel supports the request.

    Args:
        q: Queries.
        k: Keys.
        v: Values. Their channels may differ in number from those of the keys, except with `global_tokens`.
        window: Number of keys that a causal query sees, including its own. Without `causal`, a query sees as many on
            each side, 2 * window - 1 in total. None for full attention.
        causal: Mask the keys after each query.
        dilation: Distance between the keys of a window.
        segment_ids: Positions of different segments do not see each other.
        global_tokens: Positions that see all others and are seen by all others, as far as `causal` allows.
        impl: Implementation.
        backend: Platform that will run the computation (cpu, gpu, tpu), by default JAX's default backend.
        chunk: Number of queries that the chunked implementation processes at a time, or None to choose it.
        soft_cap: Bound of the logits, or None (see `Pattern`).
        sinks: Logit of each query head's sink, which joins the softmax sums without a value, in float32; None without.
    """
    pattern = _check_pattern(q, k, window, causal, dilation, soft_cap)
    backend = jax.default_backend() if backend is None else backend
    request = AttentionRequest(
        pattern,
        q.dtype,
        q.shape[-1],
        has_segments=segment_ids is not None,
        has_global_tokens=global_tokens is not None,
        value_dim=v.shape[-1],
        has_sinks=sinks is not None,
    )
    impl = choose_implementation(impl, backend, q.shape[1], request)
    if impl is AttentionImpl.dense:
        out = reference_attention(
            q, k, v, pattern=pattern, segment_ids=segment_ids, global_tokens=global_tokens, sinks=sinks
        )
        return checkpoint_name(out, ATTENTION_OUTPUT)
    options = LocalOptions(
        kernel=get_platform(backend).attention if impl is AttentionImpl.kernel else None, chunk_size=chunk
    )

    def attend(key_range: KeyRange) -> Array:
        return local_attention(q, k, v, pattern=pattern, options=options, key_range=key_range)

    key_range = KeyRange(query_segments=segment_ids, key_segments=segment_ids, sinks=sinks)
    if global_tokens is None:
        return attend(key_range)
    return attend_with_global_tokens(attend, k, v, global_tokens, pattern=pattern, key_range=key_range)


class AttentionRequest(NamedTuple):
    """Properties of an attention call that decide which implementations support it."""

    pattern: Pattern
    dtype: Any
    head_dim: int
    has_segments: bool
    has_global_tokens: bool
    value_dim: int | None = None
    """Channels of a value, or None if there are `head_dim`."""
    has_sinks: bool = False


def choose_implementation(impl: AttentionImpl, backend: str, seq: int, request: AttentionRequest) -> AttentionImpl:
    """Resolve `auto` to an implementation. Returns other values of `impl` unchanged.

    `auto` is dense for short sequences, the kernel if it supports the request, and otherwise chunked, or dense if one
    chunk would span the sequence. If `impl` is `kernel` and the backend's kernel does not support the request, raises
    ValueError with the reason.
    """
    problem = _kernel_problem(get_platform(backend), request)
    if impl is AttentionImpl.kernel and problem is not None:
        raise ValueError(
            f"model.attention.impl=kernel: {problem}. Use model.attention.impl=chunked (memory linear in the sequence "
            "length), or auto."
        )
    if impl is not AttentionImpl.auto:
        return impl
    if seq <= ALWAYS_DENSE_LENGTH:
        return AttentionImpl.dense
    if problem is None:
        return AttentionImpl.kernel
    is_one_chunk = pick_chunk_size(request.pattern.window, seq) >= seq
    return AttentionImpl.dense if is_one_chunk else AttentionImpl.chunked


def _kernel_problem(platform: Platform, request: AttentionRequest) -> str | None:
    """Return the reason why the platform's kernel does not support a request, or None if it does.

    Splash attention on a TPU supports every request, cuDNN on a GPU only some.
    """
    if platform.attention is None:
        return f"{platform.name} has no attention kernel"
    if platform.attention == "splash":
        return None
    return _cudnn_problem(request)


def _cudnn_problem(request: AttentionRequest) -> str | None:
    """Return the reason why cuDNN does not support a request, or None if it does."""
    if request.dtype not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN supports bfloat16 and float16, not {jnp.dtype(request.dtype).name} (set by `precision`)"
    if not request.pattern.causal and (request.pattern.window is not None or request.pattern.dilation > 1):
        return "cuDNN supports windows only for causal attention"
    if request.has_global_tokens:
        return "cuDNN does not support global tokens"
    if request.pattern.soft_cap is not None:
        return "cuDNN does not support a soft cap of the logits"
    if request.has_sinks:
        # TODO: JAX returns cuDNN's log-sum-exp, but without its gradient. Sinks need cuDNN's backward pass (private in
        # JAX) with the output and log-sum-exp that include the sinks, as in splash.py. Test it on a GPU, and allow it.
        return "attention sinks are not implemented for cuDNN"
    head_dim, value_dim = request.head_dim, request.value_dim or request.head_dim
    if head_dim % 8 or value_dim % 8 or max(head_dim, value_dim) > 256:
        return (
            f"cuDNN needs heads with a multiple of 8 channels, at most 256. These have {head_dim} (values: {value_dim})"
        )
    if request.has_segments or head_dim > 128 or head_dim != value_dim:
        from valkyrie.ops.attention.cudnn import hopper_problem  # imports private modules of JAX

        return hopper_problem(head_dim, value_dim, request.has_segments)
    return None


def _check_pattern(
    q: Array, k: Array, window: int | None, causal: bool, dilation: int, soft_cap: float | None
) -> Pattern:
    """Return the arguments as a `Pattern`. Raises ValueError if one of them or the number of key heads is invalid."""
    heads, kv_heads = q.shape[2], k.shape[2]
    if heads % kv_heads:
        raise ValueError(
            f"kv_heads={kv_heads} must divide heads={heads}. Use kv_heads={nearest_divisor(heads, kv_heads)}."
        )
    if window is not None and window < 1:
        raise ValueError(
            f"window={window}: a window includes the token itself. Use window=1 or more, or None for full attention."
        )
    if dilation < 1:
        raise ValueError(f"dilation={dilation} must be at least 1. Use dilation=1 for adjacent keys.")
    return Pattern(window, causal, dilation, soft_cap)
