"""Decides which implementation of attention serves a request: the dense oracle, chunks, or the platform's kernel.

All of them agree to float32 rounding, so the choice is one of speed alone. What a window, a segment and a global token
mean is stated once, in attention_parts.py.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from valkyrie.ops.attention_chunked import pick_chunk
from valkyrie.ops.attention_dense import dense_attention
from valkyrie.ops.attention_kernels import Request, kernel_problem
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
from valkyrie.ops.attention_sharded import sharded_attention
from valkyrie.ops.attention_step import GlobalStep, KVCache, attention_step, init_cache
from valkyrie.ops.choices import AttentionImpl

__all__ = [
    "AttentionImpl",
    "GlobalStep",
    "GlobalTokens",
    "KVCache",
    "attention",
    "attention_step",
    "choose",
    "init_cache",
    "sharded_attention",
]

ALWAYS_DENSE = 128


def attention(
    q: Float[Array, "batch seq heads head_dim"],
    k: Float[Array, "batch seq kv_heads head_dim"],
    v: Float[Array, "batch seq kv_heads head_dim"],
    *,
    window: int | None,
    causal: bool = True,
    dilation: int = 1,
    segment_ids: Int[Array, "batch seq"] | None = None,
    global_tokens: GlobalTokens | None = None,
    impl: AttentionImpl = AttentionImpl.auto,
    backend: str | None = None,
    chunk: int | None = None,
) -> Float[Array, "batch seq heads head_dim"]:
    """Return softmax attention within a sliding window, in q's dtype.

    Query head h uses key head h // (heads / kv_heads). Logits (scaled by head_dim ** -0.5) and softmax are float32;
    matrix products take their operands as they come and accumulate in float32. `backend` (cpu, gpu, tpu) is where the
    result will run, by default where JAX runs now. `chunk` is how many queries the chunked form takes at a time.
    Raises ValueError for shapes that do not fit, and for `impl=kernel` where no kernel can serve.
    """
    span = checked_span(q, k, window, causal, dilation)
    backend = jax.default_backend() if backend is None else backend
    request = Request(span, q.dtype, q.shape[-1], segment_ids is not None, global_tokens is not None)
    impl = choose(impl, backend, q.shape[1], request)
    if impl is AttentionImpl.dense:
        return dense_attention(q, k, v, span=span, segment_ids=segment_ids, global_tokens=global_tokens)
    method = Method(platform=backend if impl is AttentionImpl.kernel else None, chunk=chunk)
    return windowed_with_globals(q, k, v, span, method, segment_ids, global_tokens)


def choose(impl: AttentionImpl, backend: str, seq: int, request: Request) -> AttentionImpl:
    """Return the implementation that serves a request; only `auto` is replaced.

    `auto` is dense where one chunk would hold the whole sequence, and otherwise the kernel before chunks.
    Raises ValueError for `kernel` where the backend's kernel cannot serve, with the reason.
    """
    problem = kernel_problem(backend, request)
    if impl is AttentionImpl.kernel and problem is not None:
        raise ValueError(
            f"attention=kernel was asked for, but {problem}. Use attention=chunked (memory linear in length), or auto."
        )
    if impl is not AttentionImpl.auto:
        return impl
    if seq <= ALWAYS_DENSE:
        return AttentionImpl.dense
    if problem is None:
        return AttentionImpl.kernel
    one_chunk = pick_chunk(request.span.window, seq) >= seq
    return AttentionImpl.dense if one_chunk else AttentionImpl.chunked


def checked_span(q: Array, k: Array, window: int | None, causal: bool, dilation: int) -> Span:
    """Return the span of a request whose shapes fit; raises ValueError that names what does not."""
    heads, kv_heads = q.shape[2], k.shape[2]
    if heads % kv_heads:
        legal = [n for n in range(1, heads + 1) if heads % n == 0]
        nearest = min(legal, key=lambda n: abs(n - kv_heads))
        raise ValueError(f"heads={heads} is not divisible by kv_heads={kv_heads}. Use kv_heads={nearest}.")
    if window is not None and window < 1:
        raise ValueError(f"window={window}: a window counts the token itself. Use window=1 or more, or null for full.")
    if dilation < 1:
        raise ValueError(f"dilation={dilation}: keys are taken every `dilation` positions. Use dilation=1 or more.")
    return Span(window, causal, dilation)


def windowed_with_globals(
    q: Float[Array, "batch seq heads head_dim"],
    k: Float[Array, "batch seq kv_heads head_dim"],
    v: Float[Array, "batch seq kv_heads head_dim"],
    span: Span,
    method: Method,
    segment_ids: Int[Array, "batch seq"] | None,
    global_tokens: GlobalTokens | None,
) -> Float[Array, "batch seq heads head_dim"]:
    """Return attention by chunks or a kernel: the windows joined by global columns, then the global rows."""
    stretch = Stretch(query_segments=segment_ids, key_segments=segment_ids)
    if global_tokens is None:
        return local_attention(q, k, v, span=span, method=method, stretch=stretch)
    positions, rows = global_tokens.positions, jnp.arange(q.shape[1])
    valid = counted(global_tokens, q.shape[1])
    at_globals = None if segment_ids is None else take_positions(segment_ids, positions)
    visible = column_visibility(span, rows, segment_ids, positions, valid, at_globals)
    columns = Columns(take_positions(k, positions), take_positions(v, positions), visible)
    out = local_attention(q, k, v, span=span, method=method, stretch=stretch._replace(columns=columns))
    full = global_rows(global_tokens, span.causal, rows, segment_ids, at_globals)
    return overwrite_rows(out, full, positions, valid)
