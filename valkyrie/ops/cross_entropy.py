"""Cross-entropy over a large vocabulary, computed for a chunk of positions at a time to save memory.

Only one chunk of float32 logits exists at a time, forward and backward. The custom backward pass saves the log-sum-exp
of every token, recomputes the logits of each chunk, and sums the gradient of the unembedding in float32 for every
compute dtype. (A rematerialised scan takes the same time and a tenth more memory, experiments/LOG.md, but sums in the
compute dtype.) Each shard of the batch and the sequence sums that gradient over its chunks separately. The shards are
summed once, after the last chunk. Otherwise each chunk would end in an all-reduce of the whole unembedding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Constrain = Callable[[Array], Array]


class CrossEntropy(NamedTuple):
    """Sums over the tokens of a batch. The loss to minimise is (loss_sum + z_sum) / weight_sum, in nats per token."""

    loss_sum: Float[Array, ""]
    weight_sum: Float[Array, ""]
    z_sum: Float[Array, ""]
    per_token: Float[Array, "batch seq"]


class _Head(NamedTuple):
    """Static settings of the map from hidden states to logits."""

    vocab_size: int
    softcap: float | None
    constrain: Constrain | None
    place: Constrain | None
    total: Constrain | None
    batch_shards: int
    seq_shards: int


def cross_entropy(
    hidden: Float[Array, "batch seq embed"],
    unembed: Float[Array, "vocab embed"],
    targets: Int[Array, "batch seq"],
    weights: Float[Array, "batch seq"],
    *,
    vocab_size: int,
    chunk: int,
    z_loss: float = 0.0,
    softcap: float | None = None,
    shards: int = 1,
    batch_shards: int = 1,
    constrain: Constrain | None = None,
    place: Constrain | None = None,
    total: Constrain | None = None,
) -> CrossEntropy:
    """Return the weighted sums of -log p(target), and the unweighted value of every token (0 if its weight is 0).

    Products take operands in the dtype of `hidden`; logits, softmax and sums are float32. Raises ValueError if a length
    is not divisible.

    Args:
        hidden: Hidden states.
        unembed: The unembedding. Rows from `vocab_size` on are padding and get probability 0.
        targets: Target tokens. They may have any value where the weight is 0.
        weights: Weight of every target.
        vocab_size: Number of tokens.
        chunk: Positions of each sequence shard that are computed at a time.
        z_loss: Weight of the squared log-sum-exp in `z_sum` (PaLM, arXiv 2204.02311, section 5).
        softcap: c, which replaces logits l by c * tanh(l / c).
        shards: Number of shards of the sequence.
        batch_shards: Number of shards of the batch.
        constrain: Applied to the logits of each chunk, (batch, shards * chunk, vocab).
        place: Applied to the unembedding in the dtype of `hidden`, forward and again backward. The gathered array is
            thus not kept in between, and the gradient of a wider parameter is not rounded.
        total: Sums the gradient of the unembedding, (batch_shards, shards, vocab, embed) in float32, over its first
            two dimensions.
    """
    batch, seq, _ = hidden.shape
    if not 0 < vocab_size <= unembed.shape[0]:
        raise ValueError(
            f"vocab_size={vocab_size}, but the unembedding has {unembed.shape[0]} rows. Use 1 to that many."
        )
    if seq % shards:
        raise ValueError(
            f"a sequence of {seq} cannot be split into {shards} shards. Use a length divisible by {shards}."
        )
    if batch % batch_shards:
        raise ValueError(
            f"a batch of {batch} cannot be split into {batch_shards} shards. Use a batch divisible by {batch_shards}."
        )
    if chunk < 1:
        raise ValueError(f"chunk={chunk}: the loss takes `chunk` positions at a time. Use 1 or more.")
    part = seq // shards
    chunk = min(chunk, part)
    head = _Head(vocab_size, softcap, constrain, place, total, batch_shards, shards)
    split = functools.partial(_split, shards=shards, chunk=chunk)
    losses: Any = _token_losses(head, split(hidden), unembed, split(targets))
    nll, log_sum = (_join(x, shards, batch, seq) for x in losses)
    counted = weights != 0
    nll, log_sum = jnp.where(counted, nll, 0.0), jnp.where(counted, log_sum, 0.0)
    weights = weights.astype(jnp.float32)
    z_sum = z_loss * jnp.sum(weights * jnp.square(log_sum))
    return CrossEntropy(jnp.sum(weights * nll), jnp.sum(weights), z_sum, nll)


def _split(x: Array, shards: int, chunk: int) -> Array:
    """Reshape (batch, seq, ...) to (chunks, batch, shards * chunk, ...), padding each shard to whole chunks."""
    batch, seq = x.shape[:2]
    x = x.reshape(batch, shards, seq // shards, *x.shape[2:])
    x = jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % chunk)) + ((0, 0),) * (x.ndim - 3))
    x = jnp.moveaxis(x.reshape(batch, shards, -1, chunk, *x.shape[3:]), 2, 0)
    return x.reshape(x.shape[0], batch, shards * chunk, *x.shape[4:])


def _join(x: Array, shards: int, batch: int, seq: int) -> Array:
    """Invert `_split`, dropping positions after `seq`."""
    chunks = x.shape[0]
    x = jnp.moveaxis(x.reshape(chunks, batch, shards, -1, *x.shape[3:]), 0, 2)
    x = x.reshape(batch, shards, -1, *x.shape[4:])[:, :, : seq // shards]
    return x.reshape(batch, seq, *x.shape[3:])


def _placed(head: _Head, hidden: Array, unembed: Float[Array, "vocab embed"]) -> Float[Array, "vocab embed"]:
    """Return the unembedding in the dtype of `hidden`, placed for products."""
    unembed = unembed.astype(hidden.dtype)
    return unembed if head.place is None else head.place(unembed)


def _logits(
    head: _Head, hidden: Float[Array, "batch part embed"], unembed: Float[Array, "vocab embed"]
) -> tuple[Float[Array, "batch part vocab"], Float[Array, "batch part vocab"] | None]:
    """Return one chunk's logits, -inf in the padding, and the derivative of the soft cap (None without a cap)."""
    logits = jnp.einsum("bse,ve->bsv", hidden, unembed, preferred_element_type=jnp.float32)
    if head.constrain is not None:
        logits = head.constrain(logits)
    slope = None
    if head.softcap is not None:
        bent = jnp.tanh(logits / head.softcap)
        logits, slope = head.softcap * bent, 1 - jnp.square(bent)
    if head.vocab_size < unembed.shape[0]:
        logits = jnp.where(jnp.arange(unembed.shape[0]) < head.vocab_size, logits, -jnp.inf)
    return logits, slope


def _is_target(targets: Int[Array, "batch part"], vocab: int) -> Bool[Array, "batch part vocab"]:
    """Return the one-hot targets. Computed by comparison, so that a sharded vocabulary stays sharded."""
    return targets[..., None] == jnp.arange(vocab)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _token_losses(
    head: _Head,
    hidden: Float[Array, "chunks batch part embed"],
    unembed: Float[Array, "vocab embed"],
    targets: Int[Array, "chunks batch part"],
) -> tuple[Float[Array, "chunks batch part"], Float[Array, "chunks batch part"]]:
    """Return -log p(target) and the log-sum-exp of every token."""
    unembed = _placed(head, hidden, unembed)

    def one_chunk(carry: None, x: tuple[Array, Array]):
        logits, _ = _logits(head, x[0], unembed)
        top = logits.max(-1, keepdims=True)
        log_sum = jnp.log(jnp.exp(logits - top).sum(-1)) + top[..., 0]
        gold = jnp.where(_is_target(x[1], logits.shape[-1]), logits, 0.0).sum(-1)
        return carry, (log_sum - gold, log_sum)

    return jax.lax.scan(one_chunk, None, (hidden, targets))[1]


def _token_losses_forward(head, hidden, unembed, targets):
    losses: Any = _token_losses(head, hidden, unembed, targets)
    return losses, (hidden, unembed, targets, losses[1])


def _token_losses_backward(head, saved, cotangents):
    hidden, unembed, targets, log_sum = saved
    d_nll, d_log_sum = cotangents
    dtype, unembed = unembed.dtype, _placed(head, hidden, unembed)

    def one_chunk(d_unembed: Array, x: tuple[Array, ...]):
        part, target, normaliser, by_nll, by_sum = x
        logits, slope = _logits(head, part, unembed)
        probability = jnp.exp(logits - normaliser[..., None])
        d_logits = probability * (by_nll + by_sum)[..., None]
        d_logits = d_logits - jnp.where(_is_target(target, logits.shape[-1]), by_nll[..., None], 0.0)
        if slope is not None:
            d_logits = d_logits * slope
        d_logits = d_logits.astype(part.dtype)
        d_part = jnp.einsum("bsv,ve->bse", d_logits, unembed, preferred_element_type=jnp.float32).astype(part.dtype)
        apart = (_by_shard(head, x) for x in (d_logits, part))
        return d_unembed + jnp.einsum("ibjsv,ibjse->ijve", *apart, preferred_element_type=jnp.float32), d_part

    start = jnp.zeros((head.batch_shards, head.seq_shards, *unembed.shape), jnp.float32)
    d_unembed, d_hidden = jax.lax.scan(one_chunk, start, (hidden, targets, log_sum, d_nll, d_log_sum))
    total = d_unembed.sum((0, 1)) if head.total is None else head.total(d_unembed)
    return d_hidden, total.astype(dtype), None


def _by_shard(head: _Head, x: Array) -> Array:
    """Reshape (batch, part, ...) to (batch_shards, batch / batch_shards, seq_shards, chunk, ...)."""
    batch, part = x.shape[:2]
    return x.reshape(
        head.batch_shards, batch // head.batch_shards, head.seq_shards, part // head.seq_shards, *x.shape[2:]
    )


_token_losses.defvjp(_token_losses_forward, _token_losses_backward)
