"""Defines which keys a query sees, and the softmax over blocks of keys that implementations in plain XLA share.

Window convention: a window of W counts W keys *including the token itself*, one every `dilation` positions. Causal: key
j is visible to query i iff 0 <= i - j <= (W - 1) * dilation and (i - j) % dilation == 0. Bidirectional: the same
conditions on |i - j|, so 2 W - 1 keys. A window of None has no limit. Other libraries count the keys without the token
itself: a window of W here is W - 1 in Longformer's code (one side), 2 (W - 1) in transformers (both sides), and the
pair (left, right) = (W - 1, 0), or (W - 1, W - 1) if bidirectional, in JAX, cuDNN and splash.

Global tokens (Longformer, arXiv 2004.05150, section 3): let G be the set of global positions. Position i
outside of G attends to {j: j in its window or j in G} with the local q, k, v. Position i in G attends to all keys with
the separate projections q_g, k_g, v_g. Causal attention also requires j <= i. Positions with different segment ids
never see each other. No key is counted twice. The output at a position that sees no key is zero.

Sinks (StreamingLLM, arXiv 2309.17453, and gpt-oss): every query head has a logit that joins each of its softmax sums
like that of a key with a value of zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Queries = Float[Array, "batch seq heads head_dim"]
Keys = Float[Array, "batch keys kv_heads head_dim"]
Values = Float[Array, "batch keys kv_heads value_dim"]
Outputs = Float[Array, "batch seq heads value_dim"]
Sinks = Float[Array, " heads"]


class GlobalTokens(NamedTuple):
    """Global positions and their separate projections.

    Args:
        positions: Global positions of each sequence. Entries are ignored if they are not valid, are outside the
            sequence, or repeat an earlier entry.
        valid: Whether each entry is valid.
        q: Global queries of those positions.
        k: Global keys of every position.
        v: Global values of every position.
    """

    positions: Int[Array, "batch globals"]
    valid: Bool[Array, "batch globals"]
    q: Float[Array, "batch globals heads head_dim"]
    k: Float[Array, "batch seq kv_heads head_dim"]
    v: Float[Array, "batch seq kv_heads head_dim"]


@dataclass(frozen=True)
class Pattern:
    """Visible distances between query and key (see the module's docstring), and the bound of the logits.

    A `soft_cap` c bounds the logits: c * tanh(logit / c), as in Gemma 2 (arXiv 2408.00118). None: no bound.
    """

    window: int | None
    causal: bool
    dilation: int = 1
    soft_cap: float | None = None

    def reach(self) -> int:
        """Return the largest visible distance, in positions. The window must be finite."""
        assert self.window is not None
        return (self.window - 1) * self.dilation

    def sees(self, query_positions: Int[Array, "*rows"], key_positions: Int[Array, "*keys"]) -> Bool[Array, "*both"]:
        """Return whether the keys are visible from the queries. The two arrays of positions broadcast."""
        distance = query_positions - key_positions
        visible = distance >= 0 if self.causal else jnp.ones(distance.shape, bool)
        if self.window is not None:
            visible &= jnp.abs(distance) <= self.reach()
        if self.dilation > 1:
            visible &= distance % self.dilation == 0
        return visible


class KeyBlock(NamedTuple):
    """A block of keys and values. `mask` is True where a row sees a key; it broadcasts to (batch, rows, keys)."""

    k: Float[Array, "batch kv_heads keys head_dim"]
    v: Float[Array, "batch kv_heads keys value_dim"]
    mask: Bool[Array, "#batch rows keys"]


class GlobalKeys(NamedTuple):
    """Keys and values of the global tokens, from the local projections.

    `visible` is True where a query sees a global token outside the query's window.
    """

    k: Float[Array, "batch globals kv_heads head_dim"]
    v: Float[Array, "batch globals kv_heads head_dim"]
    visible: Bool[Array, "batch seq globals"]


class KeyRange(NamedTuple):
    """A range of keys and its position relative to the queries.

    Args:
        keys_before: Number of keys before the first query: query i has the position of key `keys_before + i`.
        key_valid: Whether each key may be seen, or None if all may.
        query_segments: Segment of each query, or None. Only keys of the same segment are seen.
        key_segments: Segment of each key, or None.
        global_keys: Keys that are seen in addition to the range, or None.
        sinks: Logit of each query head's sink, in float32, or None without sinks.
    """

    keys_before: int | Int[Array, ""] = 0
    key_valid: Bool[Array, "batch keys"] | None = None
    query_segments: Int[Array, "batch seq"] | None = None
    key_segments: Int[Array, "batch keys"] | None = None
    global_keys: GlobalKeys | None = None
    sinks: Sinks | None = None


def heads_first(
    x: Float[Array, "batch seq heads head_dim"], kv_heads: int
) -> Float[Array, "batch kv_heads group seq head_dim"]:
    """Reshape queries so that heads that share a key head form a group. Head h uses key head h // group."""
    batch, seq, heads, head_dim = x.shape
    return x.reshape(batch, seq, kv_heads, heads // kv_heads, head_dim).transpose(0, 2, 3, 1, 4)


def heads_last(x: Float[Array, "batch kv_heads group seq head_dim"]) -> Float[Array, "batch seq heads head_dim"]:
    """Invert `heads_first`: restore the order of dimensions and merge the groups."""
    batch, kv_heads, group, seq, head_dim = x.shape
    return x.transpose(0, 3, 1, 2, 4).reshape(batch, seq, kv_heads * group, head_dim)


def joint_attention(
    q: Float[Array, "batch kv_heads group rows head_dim"],
    blocks: Sequence[KeyBlock],
    axis_names: tuple[str, ...] = (),
    soft_cap: float | None = None,
    sinks: Sinks | None = None,
) -> Float[Array, "batch kv_heads group rows value_dim"]:
    """Return attention with one softmax over all blocks and the sinks, in q's dtype. Logits and sums are float32.

    With `axis_names` (inside `jax.shard_map`), each shard passes its blocks for the same rows, and the softmax is over
    the keys of all shards.
    """
    logits = []
    for block in blocks:
        scores = jnp.einsum("bkgqd,bksd->bkgqs", q, block.k, preferred_element_type=jnp.float32)
        scores = apply_soft_cap(scores * q.shape[-1] ** -0.5, soft_cap)
        logits.append(jnp.where(block.mask[:, None, None], scores, -jnp.inf))
    row_maxima = [x.max(-1, keepdims=True) for x in logits]
    if sinks is not None:
        sinks = sinks.reshape(q.shape[1], q.shape[2], 1, 1)
        row_maxima.append(sinks)
    max_logit = jax.lax.stop_gradient(_maximum(row_maxima))
    if axis_names:
        max_logit = jax.lax.pmax(max_logit, axis_names)
    max_logit = jnp.where(jnp.isfinite(max_logit), max_logit, 0.0)
    weights = [jnp.exp(x - max_logit) for x in logits]
    total = sum(w.sum(-1, keepdims=True) for w in weights)
    weighted_sum = sum(
        jnp.einsum("bkgqs,bksd->bkgqd", w.astype(block.v.dtype), block.v, preferred_element_type=jnp.float32)
        for w, block in zip(weights, blocks, strict=True)
    )
    if axis_names:
        total, weighted_sum = jax.lax.psum((total, weighted_sum), axis_names)
    if sinks is not None:
        total = total + jnp.exp(sinks - max_logit)
    return (weighted_sum / jnp.where(total == 0, 1.0, total)).astype(q.dtype)


def apply_soft_cap(logits: Float[Array, "*shape"], soft_cap: float | None) -> Float[Array, "*shape"]:
    """Bound logits by plus and minus `soft_cap`. None leaves them unchanged."""
    return logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)


def _maximum(arrays: list[Array]) -> Array:
    maximum = arrays[0]
    for array in arrays[1:]:
        maximum = jnp.maximum(maximum, array)
    return maximum


def same_segment(
    query_segments: Int[Array, "batch rows"] | None, key_segments: Int[Array, "batch keys"] | None
) -> Bool[Array, "#batch #rows #keys"]:
    """Return a mask, True where a row and a key are in the same segment. Without segments, it is all True."""
    if query_segments is None or key_segments is None:
        return jnp.ones((1, 1, 1), bool)
    return query_segments[:, :, None] == key_segments[:, None, :]
