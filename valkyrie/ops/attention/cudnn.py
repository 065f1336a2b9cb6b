"""Attention by cuDNN's kernel, on NVIDIA GPUs.

Packed documents (segments) use cuDNN's packed layout, which JAX exposes only in `jax._src.cudnn`. It takes a fixed
number of documents per row. Batches with more documents in a row use chunks of queries instead. Values of another width
than keys need this interface, too. Because it is private, and wide heads have not run on every GPU, the first use of
either in a process compares a small example with the definition (`hopper_problem`).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.cudnn import fused_attention_stablehlo as kernel
from jax._src.interpreters import batching
from jaxtyping import Array, Bool, Int

from valkyrie.hardware.platforms import get_platform
from valkyrie.hardware.platforms.gpu import is_lowering_for_chip
from valkyrie.ops.attention.pattern import Keys, Outputs, Pattern, Queries, Values
from valkyrie.ops.attention.reference import reference_attention

MIN_DOCUMENTS, TOKENS_PER_DOCUMENT = 8, 128
"""cuDNN takes rows of `seq` tokens with up to max(MIN_DOCUMENTS, seq / TOKENS_PER_DOCUMENT) documents.

The kernels start blocks for as many documents, each of up to `seq` tokens. With 64 documents in rows of 1,024 tokens,
they took 28% of a step of gpt_125m (H200).
"""

CAPABILITY = "9.0"
"""Compute capability of Hopper, the first GPUs with kernels for packed documents and for wide heads."""

WIDE_HEADS_VERSION = 91000
"""First version of cuDNN (9.10) with kernels for values of another width than keys."""


def hopper_problem(head_dim: int, value_dim: int, has_segments: bool) -> str | None:
    """Return the reason against cuDNN for a request that needs Hopper or a newer GPU, or None if cuDNN can be used.

    Such requests have packed documents, heads with more than 128 channels, or values of another width than keys. The
    GPU is the chip of `Gpu.lowering_for`, or this process's own, on which the first call computes a small example.
    """
    what = _describe(head_dim, value_dim, has_segments)
    with contextlib.suppress(Exception):  # a private interface may fail in any way: the example reports it
        if not kernel.check_compute_capability(CAPABILITY):
            return f"cuDNN supports {what} only on Hopper and newer GPUs"
        if value_dim != head_dim and kernel.check_cudnn_version() < WIDE_HEADS_VERSION:
            return f"cuDNN supports {what} from version 9.10 on"
    if is_lowering_for_chip() or get_platform(jax.default_backend()).runs_on_host:
        return None  # a program that is only compiled
    return _example_problem(head_dim, value_dim, has_segments)


def _describe(head_dim: int, value_dim: int, has_segments: bool) -> str:
    widths = f"keys of {head_dim} and values of {value_dim} channels"
    if not has_segments:
        return widths
    return "packed documents" if head_dim == value_dim else f"packed documents with {widths}"


@cache
def _example_problem(head_dim: int, value_dim: int, has_segments: bool) -> str | None:
    """Return the reason why an example fails on this process's GPU, or None. Runs it once in a process.

    Also prints the reason, because attention without the kernel is much slower.
    """
    what = _describe(head_dim, value_dim, has_segments)
    try:
        with ThreadPoolExecutor(1) as outside_of_traces:  # this may be called while a step is traced
            error = outside_of_traces.submit(_example_error, head_dim, value_dim, has_segments).result()
        problem = None if error < _MAX_ERROR else f"cuDNN's results for {what} are wrong on this GPU"
    except Exception as reason:  # a private interface may fail in any way
        problem = f"this version of JAX or cuDNN cannot compute {what} ({type(reason).__name__}: {reason})"
    if problem is not None:
        print(f"note: {problem}. Attention is computed in chunks, which is slower.", file=sys.stderr)
    return problem


_MAX_ERROR = 0.02
"""Maximum relative error of bfloat16 results. Those of the kernel without documents were off by up to 0.004 (H200)."""


def _example_error(head_dim: int, value_dim: int, has_segments: bool) -> float:
    """Return the largest relative error of the kernel's output and gradients for two rows."""
    generator, rows, seq = np.random.default_rng(0), 2, 256
    arrays = (generator.normal(size=(rows, seq, 2, dim)) for dim in (head_dim, head_dim, value_dim, value_dim))
    q, k, v, weights = (jnp.asarray(array, jnp.bfloat16) for array in arrays)
    documents = [[0] * 100 + [1] * 27 + [2] * 129, [0] * 50 + [1] * 206]
    segments = jnp.asarray(documents, jnp.int32) if has_segments else None
    pattern = Pattern(window=None, causal=True)

    def refuse(q: Queries, k: Keys, v: Values) -> Outputs:
        return jnp.full_like(q @ jnp.ones((head_dim, value_dim), q.dtype), jnp.nan)

    def by_cudnn(q: Queries, k: Keys, v: Values) -> Outputs:
        return cudnn_attention(q, k, v, pattern=pattern, segments=segments, fallback=refuse)

    def by_definition(q: Queries, k: Keys, v: Values) -> Outputs:
        return reference_attention(q, k, v, pattern=pattern, segment_ids=segments, global_tokens=None)

    results = []
    for attend, dtype in ((by_cudnn, jnp.bfloat16), (by_definition, jnp.float32)):

        def weighted_sum(*inputs: jax.Array, attend: Callable[..., jax.Array] = attend) -> tuple[jax.Array, jax.Array]:
            out = attend(*inputs)
            return (out * weights).astype(jnp.float32).sum(), out

        gradients_of_sum = jax.jit(jax.grad(weighted_sum, argnums=(0, 1, 2), has_aux=True))
        with jax.default_matmul_precision("highest"):
            gradients, out = gradients_of_sum(*(array.astype(dtype) for array in (q, k, v)))
        results.append([np.asarray(array, np.float32) for array in (out, *gradients)])
    errors = [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(*results, strict=True)]
    return float(np.max(errors)) if np.isfinite(errors).all() else float("inf")


_OFFSETS = 6
"""Position of the documents' offsets among the operands of JAX's primitives."""


@cache
def _support_batches() -> None:
    """Let `jax.vmap` batch cuDNN attention with packed documents, and with values of another width than keys.

    JAX's batching rules reshape the lengths of the documents to one number per row, which fails with several documents,
    and values to the shape of keys (jax 0.10.2 to 0.12.0). `partition.sum_gradients_per=step` computes gradients in a
    `jax.vmap`.
    """
    for primitive, rule in (
        (kernel._dot_product_attention_fwd_p_wrapper, kernel._dot_product_attention_fwd_batcher),
        (kernel._dot_product_attention_bwd_p_wrapper, kernel._dot_product_attention_bwd_batcher),
    ):
        batching.primitive_batchers[primitive] = partial(_batch_rows, primitive, rule)


def _batch_rows(
    primitive: Any, rule: Callable[..., Any], args: Sequence[Array], dims: Sequence[int | None], **params: Any
) -> Any:
    """Batching rule of JAX that turns a batch of rows into more rows.

    `rule` is JAX's own, for rows without documents whose values are as wide as their keys.
    """
    _, keys, values = (arg.shape[-1] for arg in args[:3])
    if args[_OFFSETS].size == 0 and keys == values:
        return rule(args, dims, **params)
    count = next(arg.shape[dim] for arg, dim in zip(args, dims, strict=True) if dim is not None)

    def merge(arg: Array, dim: int | None) -> Array:
        if arg.size == 0:  # an operand that is not used
            return arg
        rows = jnp.broadcast_to(arg, (count, *arg.shape)) if dim is None else jnp.moveaxis(arg, dim, 0)
        return rows.reshape(-1, *rows.shape[2:])

    results = primitive.bind(*map(merge, args, dims), **params)
    return [result.reshape(count, -1, *result.shape[1:]) for result in results], [0] * len(results)


def cudnn_attention(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    pattern: Pattern,
    segments: Int[Array, "batch seq"] | None,
    fallback: Callable[[Queries, Keys, Values], Outputs],
) -> Outputs:
    """Compute attention with cuDNN. The dilation must be 1.

    Args:
        q: Queries.
        k: Keys, as many as queries.
        v: Values.
        pattern: Which keys a query sees.
        segments: Document of each position, or None. The positions of a document must be consecutive.
        fallback: Computes the same from q, k and v. Used if a row has too many documents (`MIN_DOCUMENTS`).
    """
    window = pattern.window
    if segments is None:
        if q.shape[-1] != v.shape[-1]:  # not in JAX's public interface
            _support_batches()
            mask = kernel.MaskType.CAUSAL if pattern.causal else kernel.MaskType.NO_MASK
            call: Any = kernel.dot_product_attention  # not typed
            return call(q, k, v, scale=q.shape[-1] ** -0.5, mask_type=mask, sliding_window_length=window)
        left_right = None if window is None else (window - 1, 0)  # JAX adds the query's own position to the left
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=pattern.causal, local_window_size=left_right, implementation="cudnn"
        )
    seq = q.shape[1]
    limit = min(max(MIN_DOCUMENTS, seq // TOKENS_PER_DOCUMENT), seq)
    is_start = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    count = is_start.sum(1, keepdims=True, dtype=jnp.int32)
    starts = jnp.sort(jnp.where(is_start, jnp.arange(seq, dtype=jnp.int32), seq), axis=1)[:, :limit]
    ends = jnp.pad(starts[:, 1:], ((0, 0), (0, 1)), constant_values=seq)
    lengths = jnp.where(jnp.arange(limit) < count, ends - starts, -1)
    # JAX wants the starts of the documents and one more column. -1 marks entries without a document.
    offsets = jnp.pad(jnp.where(jnp.arange(limit) < count, starts, -1), ((0, 0), (0, 1)), constant_values=-1)

    _support_batches()

    def packed(q: Queries, k: Keys, v: Values) -> Any:
        return kernel.dot_product_attention(
            *(q, k, v),
            q_seqlen=lengths,
            kv_seqlen=lengths,
            q_offsets=offsets,
            kv_offsets=offsets,
            scale=q.shape[-1] ** -0.5,
            mask_type=kernel.MaskType.PADDING_CAUSAL if pattern.causal else kernel.MaskType.PADDING,
            sliding_window_length=window,
        )

    return jax.lax.cond(_all(count <= limit), packed, fallback, q, k, v)


@jax.custom_batching.custom_vmap
def _all(values: Bool[Array, "rows 1"]) -> Bool[Array, ""]:
    """Return whether all values are true. In a `jax.vmap`, these are the values of the whole batch.

    A condition per element of a batch would make `jax.lax.cond` compute both branches.
    """
    return values.all()


@_all.def_vmap
def _all_of_batch(
    axis_size: int, is_batched: Sequence[bool], values: Bool[Array, "batch rows 1"]
) -> tuple[Bool[Array, ""], bool]:
    return _all(values.reshape(-1, 1)), False
