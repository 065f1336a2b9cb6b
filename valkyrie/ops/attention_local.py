"""Decides how a stretch of queries attends to the stretch of keys around it, on one device.

The unsharded and the sequence-sharded form both end here: they differ only in where the keys came from. Dilation is
taken away first, by putting positions of equal residue together, so that what remains is a plain window.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from valkyrie.ops.attention_chunked import full_chunks, pick_chunk, windowed_chunks
from valkyrie.ops.attention_kernels import cudnn_window
from valkyrie.ops.attention_parts import Columns, Span, Stretch, regroup, ungroup


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
    stretch: Stretch,
) -> Float[Array, "batch seq heads head_dim"]:
    """Return attention of the queries over the keys around them; `stretch.before` is a multiple of the dilation."""
    if span.dilation > 1:
        return _undilated(q, k, v, span, method, stretch)
    if method.platform == "tpu":
        from valkyrie.ops.attention_splash import splash_window  # Pallas is slow to import and rarely needed

        return splash_window(q, k, v, span=span, stretch=stretch, interpret=method.interpret)
    if method.platform == "gpu":
        assert stretch.before == 0 and stretch.columns is None
        return cudnn_window(q, k, v, span)
    seq, keys = q.shape[1], k.shape[1]
    chunk = min(method.chunk or pick_chunk(span.window, seq), seq)
    whole = span.window is None or chunk + (span.window - 1) * (1 if span.causal else 2) >= keys
    form = full_chunks if whole else windowed_chunks
    return form(q, k, v, span=span, stretch=stretch, chunk=chunk)


def _undilated(
    q: Float[Array, "batch seq heads head_dim"],
    k: Float[Array, "batch keys kv_heads head_dim"],
    v: Float[Array, "batch keys kv_heads head_dim"],
    span: Span,
    method: Method,
    stretch: Stretch,
) -> Float[Array, "batch seq heads head_dim"]:
    """Each residue of the position, taken alone, is a sequence with a plain window."""
    dilation, columns = span.dilation, stretch.columns
    assert isinstance(stretch.before, int) and stretch.before % dilation == 0
    by_residue = functools.partial(regroup, dilation=dilation)
    if columns is not None:
        k_columns, v_columns = (jnp.repeat(x, dilation, axis=0) for x in (columns.k, columns.v))
        columns = Columns(k_columns, v_columns, by_residue(columns.visible))
    valid = jnp.ones(k.shape[:2], bool) if stretch.key_valid is None else stretch.key_valid
    of_rows, of_keys = stretch.query_segments, stretch.key_segments
    out = local_attention(
        by_residue(q),
        by_residue(k),
        by_residue(v),
        span=Span(span.window, span.causal),
        method=method,
        stretch=Stretch(
            before=stretch.before // dilation,
            key_valid=by_residue(valid),
            query_segments=None if of_rows is None else by_residue(of_rows),
            key_segments=None if of_keys is None else by_residue(of_keys),
            columns=columns,
        ),
    )
    return ungroup(out, dilation, q.shape[1])
