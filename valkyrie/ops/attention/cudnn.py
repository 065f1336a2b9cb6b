"""Attention by cuDNN's kernel, on NVIDIA GPUs.

Packed documents (segments) use cuDNN's packed layout, which JAX exposes only in `jax._src.cudnn`. It takes a fixed
number of documents per row. Batches with more documents in a row use chunks of queries instead.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as kernel
from jaxtyping import Array, Int

from valkyrie.ops.attention.pattern import Keys, Pattern, Queries

MAX_DOCUMENTS = 64
"""Maximum number of documents in a row for cuDNN. The kernel starts blocks for each of them, empty or not."""

PACKED_CAPABILITY = "9.0"
"""Compute capability of Hopper, the first GPUs with a kernel for packed documents."""


def supports_documents() -> bool:
    """Return whether the GPU of this process has a kernel for packed documents. False without a GPU."""
    try:
        return kernel.check_compute_capability(PACKED_CAPABILITY)
    except RuntimeError:
        return False


def cudnn_attention(
    q: Queries,
    k: Keys,
    v: Keys,
    *,
    pattern: Pattern,
    segments: Int[Array, "batch seq"] | None,
    fallback: Callable[[Queries, Keys, Keys], Queries],
) -> Queries:
    """Compute attention with cuDNN. The dilation must be 1.

    Args:
        q: Queries.
        k: Keys, as many as queries.
        v: Values.
        pattern: Which keys a query sees.
        segments: Document of each position, or None. The positions of a document must be consecutive.
        fallback: Computes the same from q, k and v. Used if a row has more than `MAX_DOCUMENTS` documents.
    """
    window = pattern.window
    if segments is None:
        left_right = None if window is None else (window - 1, 0)  # JAX adds the query's own position to the left
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=pattern.causal, local_window_size=left_right, implementation="cudnn"
        )
    seq = q.shape[1]
    limit = min(MAX_DOCUMENTS, seq)
    is_start = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    count = is_start.sum(1, keepdims=True, dtype=jnp.int32)
    starts = jnp.sort(jnp.where(is_start, jnp.arange(seq, dtype=jnp.int32), seq), axis=1)[:, :limit]
    ends = jnp.pad(starts[:, 1:], ((0, 0), (0, 1)), constant_values=seq)
    lengths = jnp.where(jnp.arange(limit) < count, ends - starts, -1)
    offsets = jnp.pad(starts, ((0, 0), (0, 1)), constant_values=seq)
    offsets = jnp.where(jnp.arange(limit + 1) <= count, offsets, -1)

    def packed(q: Queries, k: Keys, v: Keys) -> Queries:
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

    return jax.lax.cond((count <= limit).all(), packed, fallback, q, k, v)
