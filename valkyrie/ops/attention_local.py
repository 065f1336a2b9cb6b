"""Decides how a stretch of queries attends to the stretch of keys around it, on one device.

The unsharded and the sequence-sharded form both end here: they differ only in where the keys came from. Dilation is
taken away first, by putting positions of equal residue together, so that what remains is a plain window.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from valkyrie.ops import attention_chunked as chunked
from valkyrie.ops.attention_kernels import cudnn_window
from valkyrie.ops.attention_parts import Columns, Span, regroup, ungroup


class Method(NamedTuple):
    """How the stretch is evaluated: `platform` names the kernel to use, or None for chunks of `chunk` queries."""

    platform: str | None = None
    chunk: int | None = None
    interpret: bool = False


def local_attention(
    q: Float[Array, "batch seq heads head_dim"],
    k: Float[Array, "batch keys kv_heads head_dim"],
    v: Float[Array, "batch keys kv_heads head_dim"],
    *,
    span: Span,
    method: Method,
    before: int = 0,
    key_valid: Bool[Array, "batch keys"] | None = None,
    query_segments: Int[Array, "batch seq"] | None = None,
    key_segments: Int[Array, "batch keys"] | None = None,
    columns: Columns | None = None,
) -> Float[Array, "batch seq heads head_dim"]:
    """Return attention where query i stands at key `before + i`; `before` is a multiple of the dilation."""
    if span.dilation > 1:
        if key_valid is None:
            key_valid = jnp.ones(k.shape[:2], bool)
        return _undilated(q, k, v, span, method, before, key_valid, query_segments, key_segments, columns)
    segments = {"query_segments": query_segments, "key_segments": key_segments}
    if method.platform == "tpu":
        from valkyrie.ops.attention_splash import splash_window  # Pallas is slow to import and rarely needed

        return splash_window(
            q, k, v, span=span, before=before, key_valid=key_valid, columns=columns, interpret=method.interpret, **segments
        )
    if method.platform == "gpu":
        assert before == 0 and columns is None
        return cudnn_window(q, k, v, span)
    seq, keys = q.shape[1], k.shape[1]
    chunk = min(method.chunk or chunked.pick_chunk(span.window, seq), seq)
    shared = segments | {"key_valid": key_valid, "columns": columns, "chunk": chunk}
    if span.window is None or chunk + (span.window - 1) * (1 if span.causal else 2) >= keys:
        return chunked.full_chunks(q, k, v, span=span, start=before, **shared)
    return chunked.windowed_chunks(q, k, v, window=span.window, causal=span.causal, before=before, **shared)


def _undilated(
    q: Float[Array, "batch seq heads head_dim"],
    k: Float[Array, "batch keys kv_heads head_dim"],
    v: Float[Array, "batch keys kv_heads head_dim"],
    span: Span,
    method: Method,
    before: int,
    key_valid: Bool[Array, "batch keys"],
    query_segments: Int[Array, "batch seq"] | None,
    key_segments: Int[Array, "batch keys"] | None,
    columns: Columns | None,
) -> Float[Array, "batch seq heads head_dim"]:
    """Each residue of the position, taken alone, is a sequence with a plain window."""
    dilation = span.dilation
    assert before % dilation == 0
    if columns is not None:
        repeated = (jnp.repeat(x, dilation, axis=0) for x in (columns.k, columns.v))
        columns = Columns(*repeated, regroup(columns.visible, dilation))
    out = local_attention(
        regroup(q, dilation),
        regroup(k, dilation),
        regroup(v, dilation),
        span=Span(span.window, span.causal),
        method=method,
        before=before // dilation,
        key_valid=regroup(key_valid, dilation),
        query_segments=None if query_segments is None else regroup(query_segments, dilation),
        key_segments=None if key_segments is None else regroup(key_segments, dilation),
        columns=columns,
    )
    return ungroup(out, dilation, q.shape[1])
