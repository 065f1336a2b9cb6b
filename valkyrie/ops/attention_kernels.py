"""Decides when the platform's own attention kernel serves a request.

TPU: splash attention (attention_splash.py), always. GPU: cuDNN's left window, for causal float16 and bfloat16 without
segments or global tokens. Everything here is local to a device: a caller with a mesh wraps it in `jax.shard_map`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from valkyrie.ops.attention_parts import Span


class Request(NamedTuple):
    """What decides whether a kernel can serve: shapes, dtype and features, no values."""

    span: Span
    dtype: Any
    head_dim: int
    segments: bool
    global_tokens: bool


def kernel_problem(platform: str, request: Request) -> str | None:
    """Return why the kernel of `platform` (cpu, gpu, tpu) cannot serve the request, or None when it can."""
    if platform == "tpu":
        return None
    if platform != "gpu":
        return f"there is no attention kernel for {platform}"
    if request.dtype not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN takes bfloat16 or float16, not {jnp.dtype(request.dtype).name} (precision)"
    if not request.span.causal and (request.span.window is not None or request.span.dilation > 1):
        return "cuDNN has a left window only, and the request is bidirectional"
    if request.segments:
        return "cuDNN's window cannot be combined with segment ids"
    if request.global_tokens:
        return "cuDNN's window cannot be combined with global tokens"
    if request.head_dim % 8 or request.head_dim > 128:
        return f"cuDNN takes a head_dim that is a multiple of 8 up to 128, not {request.head_dim}"
    return None


def cudnn_window(
    q: Float[Array, "batch seq heads head_dim"],
    k: Float[Array, "batch seq kv_heads head_dim"],
    v: Float[Array, "batch seq kv_heads head_dim"],
    span: Span,
) -> Float[Array, "batch seq heads head_dim"]:
    """Return attention (dilation 1) by cuDNN; its inclusive left window of W - 1 is W keys."""
    window = None if span.window is None else (span.window - 1, 0)
    return jax.nn.dot_product_attention(
        q, k, v, is_causal=span.causal, local_window_size=window, implementation="cudnn"
    )
