"""Causal attention within a window and a document on a GPU: a Pallas kernel, where cuDNN has none with documents.

The two passes of FlashAttention-2 (arXiv 2307.08691), with loops over only those blocks of keys that the window of a
block of queries reaches, and backward over only those queries that a block of keys is seen by. Memory is linear in the
length. Blocks of keys that lie in other documents are masked, not skipped.
JAX 0.12 deprecates Pallas for Triton, in favour of Mosaic GPU, which takes Hopper and newer GPUs alone.
Imported only where it is used, because importing Pallas takes a while.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as gpu
from jaxtyping import Array, Float

from valkyrie.ops.attention.pattern import Keys, Pattern, Queries, Stretch
from valkyrie.ops.choices import CONTEXT

BLOCK = 64
_HIDDEN = float(-0.7 * np.finfo(np.float32).max)


class _Shape(NamedTuple):
    """What a kernel is made for: windows of `window` keys with the query's own (None: all before it), heads per key."""

    window: int | None
    group: int
    interpret: bool


def triton_window(
    q: Queries, k: Keys, v: Keys, *, pattern: Pattern, stretch: Stretch, interpret: bool = False
) -> Queries:
    """Return causal attention (dilation 1) of as many queries as keys, within their window and segment.

    `interpret` runs the kernel without a GPU, slowly, for tests.
    """
    assert pattern.causal and pattern.dilation == 1 and stretch.before == 0 and stretch.columns is None
    batch, seq, heads, _ = q.shape
    segments = stretch.query_segments
    segments = jnp.zeros((batch, seq), jnp.int32) if segments is None else segments.astype(jnp.int32)
    short = -seq % BLOCK  # keys after the last query: none of the real queries sees them
    q, k, v = (jnp.pad(x, [(0, 0), (0, short), (0, 0), (0, 0)]) for x in (q, k, v))
    shape = _Shape(pattern.window, heads // k.shape[2], interpret)
    out = _attend(q, k, v, jnp.pad(segments, [(0, 0), (0, short)]), shape)
    return checkpoint_name(out[:, :seq], CONTEXT)  # pyright: ignore[reportIndexIssue]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(q: Array, k: Array, v: Array, segments: Array, shape: _Shape) -> Array:
    return _forward(q, k, v, segments, shape)[0]


def _forward(q: Array, k: Array, v: Array, segments: Array, shape: _Shape) -> tuple[Array, Any]:
    """Return the output, and what the backward pass takes: with it the log of each row's sum of exponentials."""
    # Shapes are those of results, which say along which mesh axes they vary.
    sums = jax.eval_shape(lambda q: q[..., 0].swapaxes(1, 2).astype(jnp.float32), q)
    out, log_sums = _call(
        functools.partial(_forward_kernel, shape=shape),
        shape,
        (q, k, v, segments),
        ("block", "keys", "keys", "segments"),
        (_like(q, q.dtype), sums),
        ("block", "row_block"),
    )
    return out, (q, k, v, segments, out, log_sums)


def _backward(shape: _Shape, kept: Any, d_out: Array) -> tuple[Array, Array, Array, None]:
    q, k, v, segments, out, log_sums = kept
    delta = jnp.einsum("bsnh,bsnh->bns", out.astype(jnp.float32), d_out.astype(jnp.float32))
    given = (q, k, v, segments, d_out, log_sums, delta)
    (dq,) = _call(
        functools.partial(_dq_kernel, shape=shape),
        shape,
        given,
        ("block", "keys", "keys", "segments", "block", "row_block", "row_block"),
        (_like(q, q.dtype),),
        ("block",),
    )
    of_head = _like(q, jnp.float32)  # a head of keys is the sum over its group's
    dk, dv = _call(
        functools.partial(_dkv_kernel, shape=shape),
        shape,
        given,
        ("rows", "key_block", "key_block", "segments", "rows", "row", "row"),
        (of_head, of_head),
        ("block", "block"),
    )
    return dq, _of_groups(dk, shape.group, k.dtype), _of_groups(dv, shape.group, v.dtype), None


_attend.defvjp(_forward, _backward)


def _like(x: Array, dtype: Any) -> Any:
    return jax.eval_shape(lambda x: x.astype(dtype), x)


def _of_groups(x: Array, group: int, dtype: Any) -> Array:
    batch, seq, heads, head_dim = x.shape
    return x.reshape(batch, seq, heads // group, group, head_dim).sum(3).astype(dtype)


def _call(kernel: Any, shape: _Shape, given: Any, lie: Any, made: Any, lie_made: Any) -> Any:
    """Run a kernel for each block of rows, batch and head; `lie` says which part of each array a program has."""
    batch, seq, heads, head_dim = given[0].shape
    group = shape.group
    parts = {
        "block": pl.BlockSpec((None, BLOCK, None, head_dim), lambda i, b, h: (b, i, h, 0)),
        "rows": pl.BlockSpec((None, seq, None, head_dim), lambda i, b, h: (b, 0, h, 0)),
        "key_block": pl.BlockSpec((None, BLOCK, None, head_dim), lambda i, b, h: (b, i, h // group, 0)),
        "keys": pl.BlockSpec((None, seq, None, head_dim), lambda i, b, h: (b, 0, h // group, 0)),
        "segments": pl.BlockSpec((None, seq), lambda i, b, h: (b, 0)),
        "row_block": pl.BlockSpec((None, None, BLOCK), lambda i, b, h: (b, h, i)),
        "row": pl.BlockSpec((None, None, seq), lambda i, b, h: (b, h, 0)),
    }
    return pl.pallas_call(
        kernel,
        grid=(seq // BLOCK, batch, heads),
        in_specs=[parts[name] for name in lie],
        out_specs=[parts[name] for name in lie_made],
        out_shape=list(made),
        compiler_params=gpu.CompilerParams(num_warps=4, num_stages=2),
        interpret=shape.interpret,
        name=f"valkyrie{kernel.func.__name__}",
    )(*given)


def _dot(a: Array, b: Array) -> Float[Array, "rows columns"]:
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def _at(block: Any) -> Any:
    """Return the positions of a block, as a slice."""
    return pl.ds(block * BLOCK, BLOCK)


def _logits(q: Array, k: Array, i: Any, j: Any, segments: tuple[Array, Array], window: int | None) -> Array:
    """Return the scaled logits of the queries of block i and the keys of block j, those not seen far below all."""
    rows, columns = (block * BLOCK + jnp.arange(BLOCK) for block in (i, j))
    away = rows[:, None] - columns[None, :]
    seen = (away >= 0) & (segments[0][:, None] == segments[1][None, :])
    if window is not None:
        seen &= away < window
    return jnp.where(seen, _dot(q, k.T) * q.shape[-1] ** -0.5, _HIDDEN)


def _first_keys(i: Any, window: int | None) -> Any:
    """Return the first block of keys that queries of block i see."""
    return 0 if window is None else jax.lax.div(jnp.maximum(i * BLOCK - (window - 1), 0), BLOCK)


def _forward_kernel(q_ref: Any, k_ref: Any, v_ref: Any, s_ref: Any, o_ref: Any, l_ref: Any, *, shape: _Shape) -> None:
    i, q = pl.program_id(0), q_ref[...]
    own = s_ref[_at(i)]

    def body(j: Any, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        out, most, total = carry
        logits = _logits(q, k_ref[_at(j), :], i, j, (own, s_ref[_at(j)]), shape.window)
        now = jnp.maximum(most, logits.max(1))
        shrink, weights = jnp.exp(most - now), jnp.exp(logits - now[:, None])
        values = v_ref[_at(j), :]
        out = out * shrink[:, None] + _dot(weights.astype(values.dtype), values)
        return out, now, total * shrink + weights.sum(1)

    empty = jnp.zeros(q.shape, jnp.float32), jnp.full((BLOCK,), _HIDDEN, jnp.float32), jnp.zeros((BLOCK,), jnp.float32)
    # A block of another document hides all of a row's keys, whose weights are then 1 until its own, the last, is read.
    out, most, total = jax.lax.fori_loop(_first_keys(i, shape.window), i + 1, body, empty)
    o_ref[...] = (out / total[:, None]).astype(o_ref.dtype)
    l_ref[...] = most + jnp.log(total)


def _dq_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    s_ref: Any,
    d_ref: Any,
    l_ref: Any,
    delta_ref: Any,
    dq_ref: Any,
    *,
    shape: _Shape,
) -> None:
    i, q, d_out = pl.program_id(0), q_ref[...], d_ref[...]
    own, log_sums, delta = s_ref[_at(i)], l_ref[...], delta_ref[...]

    def body(j: Any, dq: Array) -> Array:
        k = k_ref[_at(j), :]
        weights = jnp.exp(_logits(q, k, i, j, (own, s_ref[_at(j)]), shape.window) - log_sums[:, None])
        d_logits = weights * (_dot(d_out, v_ref[_at(j), :].T) - delta[:, None])
        return dq + _dot(d_logits.astype(k.dtype), k)

    dq = jax.lax.fori_loop(_first_keys(i, shape.window), i + 1, body, jnp.zeros(q.shape, jnp.float32))
    dq_ref[...] = (dq * q.shape[-1] ** -0.5).astype(dq_ref.dtype)


def _dkv_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    s_ref: Any,
    d_ref: Any,
    l_ref: Any,
    delta_ref: Any,
    dk_ref: Any,
    dv_ref: Any,
    *,
    shape: _Shape,
) -> None:
    j, k, v = pl.program_id(0), k_ref[...], v_ref[...]
    own, blocks = s_ref[_at(j)], q_ref.shape[0] // BLOCK

    def body(i: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        dk, dv = carry
        q, d_out = q_ref[_at(i), :], d_ref[_at(i), :]
        logits = _logits(q, k, i, j, (s_ref[_at(i)], own), shape.window)
        weights = jnp.exp(logits - l_ref[_at(i)][:, None])
        dv += _dot(weights.astype(d_out.dtype).T, d_out)
        d_logits = weights * (_dot(d_out, v.T) - delta_ref[_at(i)][:, None])
        return dk + _dot(d_logits.astype(q.dtype).T, q), dv

    last = blocks
    if shape.window is not None:  # the last query that sees the block's last key, and its block
        last = jnp.minimum(blocks, jax.lax.div((j + 1) * BLOCK - 1 + shape.window - 1, BLOCK) + 1)
    zeros = jnp.zeros(k.shape, jnp.float32)
    dk, dv = jax.lax.fori_loop(j, last, body, (zeros, zeros))
    dk_ref[...] = (dk * k.shape[-1] ** -0.5).astype(dk_ref.dtype)
    dv_ref[...] = dv.astype(dv_ref.dtype)
