"""Cross-entropy over a large vocabulary, computed for a chunk of positions at a time to save memory.

Only one chunk of float32 logits exists at a time, forward and backward. The custom backward pass saves the log-sum-exp
of every token, recomputes the logits of each chunk, and sums the gradient of the unembedding in float32 for every
compute dtype. (A rematerialised scan takes the same time and a tenth more memory, experiments/LOG.md, but sums in the
compute dtype.) Each shard of the batch and the sequence sums the gradient over its own chunks. The shards' sums are
added once, after the last chunk. Otherwise each chunk would end in an all-reduce of the whole gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

ArrayFunction = Callable[[Array], Array]


class CrossEntropy(NamedTuple):
    """Losses of a batch. The loss to minimise is (loss_sum + z_sum) / weight_sum, in nats per token.

    Args:
        loss_sum: Weighted sum of -log p(target).
        weight_sum: Sum of the weights.
        z_sum: Weighted sum of the squared log-sum-exp, times `z_loss`.
        per_token: Unweighted -log p(target) of every token, 0 where the weight is 0.
    """

    loss_sum: Float[Array, ""]
    weight_sum: Float[Array, ""]
    z_sum: Float[Array, ""]
    per_token: Float[Array, "batch seq"]


class _Settings(NamedTuple):
    """Arguments of `cross_entropy` that are known at compile time."""

    vocab_size: int
    soft_cap: float | None
    constrain: ArrayFunction | None
    gather: ArrayFunction | None
    sum_gradient: ArrayFunction | None
    batch_shards: int
    seq_shards: int
    sum_first: bool


def cross_entropy(
    hidden: Float[Array, "batch seq embed"],
    unembed: Float[Array, "vocab embed"],
    targets: Int[Array, "batch seq"],
    weights: Float[Array, "batch seq"],
    *,
    vocab_size: int,
    chunk: int,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    seq_shards: int = 1,
    batch_shards: int = 1,
    constrain: ArrayFunction | None = None,
    gather: ArrayFunction | None = None,
    sum_gradient: ArrayFunction | None = None,
    sum_first: bool = False,
) -> CrossEntropy:
    """Return the cross-entropy of the targets and the z-loss.

    Products take operands in the dtype of `hidden`; logits, softmax and sums are float32. Raises ValueError for an
    invalid `vocab_size` or `chunk`, or if the batch or the sequence is not divisible by its number of shards.

    Args:
        hidden: Hidden states.
        unembed: The unembedding. Rows from `vocab_size` on are padding and get probability 0.
        targets: Target tokens. They may have any value where the weight is 0.
        weights: Weight of every target.
        vocab_size: Number of tokens.
        chunk: Positions of each sequence shard that are computed at a time.
        z_loss: Factor of the squared log-sum-exp in `z_sum` (PaLM, arXiv 2204.02311, section 5).
        soft_cap: Bound c of the logits: c * tanh(logit / c). None: no bound.
        seq_shards: Number of shards of the sequence.
        batch_shards: Number of shards of the batch.
        constrain: Applied to the logits of each chunk, (batch, seq_shards * chunk, vocab).
        gather: Applied to the unembedding after its cast to the dtype of `hidden`, in the forward pass and again in the
            backward pass, so that the gathered array is not saved. The gradient of the unembedding stays float32 until
            it is cast to the dtype of `unembed`.
        sum_gradient: Sums the float32 gradient of the unembedding, (batch_shards, seq_shards, vocab, embed), over its
            first two dimensions. None: an ordinary sum.
        sum_first: Whether the backward pass computes this sum before the gradients of earlier layers, which saves
            memory. Otherwise, compilers may keep the gradients of the shards until the end of the backward pass.
    """
    batch, seq, _ = hidden.shape
    if not 0 < vocab_size <= unembed.shape[0]:
        raise ValueError(
            f"vocab_size={vocab_size} must be at least 1 and at most {unembed.shape[0]}, the number of rows of the "
            "unembedding."
        )
    if seq % seq_shards:
        raise ValueError(
            f"a sequence of length {seq} does not split into seq_shards={seq_shards}. Use a length "
            f"divisible by {seq_shards}."
        )
    if batch % batch_shards:
        raise ValueError(
            f"a batch of {batch} does not split into batch_shards={batch_shards}. Use a multiple of {batch_shards}."
        )
    if chunk < 1:
        raise ValueError(f"chunk={chunk}: the loss is computed for `chunk` positions at a time. Use chunk=1 or more.")
    shard_length = seq // seq_shards
    chunk = min(chunk, shard_length)
    settings = _Settings(vocab_size, soft_cap, constrain, gather, sum_gradient, batch_shards, seq_shards, sum_first)
    split = functools.partial(_split_chunks, seq_shards=seq_shards, chunk=chunk)
    token_losses: Any = _token_losses(settings, split(hidden), unembed, split(targets))
    nll, log_sum = (_merge_chunks(x, seq_shards, batch, seq) for x in token_losses)
    has_weight = weights != 0
    nll, log_sum = jnp.where(has_weight, nll, 0.0), jnp.where(has_weight, log_sum, 0.0)
    weights = weights.astype(jnp.float32)
    z_sum = z_loss * jnp.sum(weights * jnp.square(log_sum))
    return CrossEntropy(jnp.sum(weights * nll), jnp.sum(weights), z_sum, nll)


def _split_chunks(x: Array, seq_shards: int, chunk: int) -> Array:
    """Reshape (batch, seq, ...) to (chunks, batch, seq_shards * chunk, ...), padding each shard to whole chunks."""
    batch, seq = x.shape[:2]
    x = x.reshape(batch, seq_shards, seq // seq_shards, *x.shape[2:])
    x = jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % chunk)) + ((0, 0),) * (x.ndim - 3))
    x = jnp.moveaxis(x.reshape(batch, seq_shards, -1, chunk, *x.shape[3:]), 2, 0)
    return x.reshape(x.shape[0], batch, seq_shards * chunk, *x.shape[4:])


def _merge_chunks(x: Array, seq_shards: int, batch: int, seq: int) -> Array:
    """Reshape (chunks, batch, seq_shards * chunk, ...) to (batch, seq, ...), without the padding of `_split_chunks`."""
    chunks = x.shape[0]
    x = jnp.moveaxis(x.reshape(chunks, batch, seq_shards, -1, *x.shape[3:]), 0, 2)
    x = x.reshape(batch, seq_shards, -1, *x.shape[4:])[:, :, : seq // seq_shards]
    return x.reshape(batch, seq, *x.shape[3:])


def _gather_unembed(
    settings: _Settings, hidden: Array, unembed: Float[Array, "vocab embed"]
) -> Float[Array, "vocab embed"]:
    """Return the unembedding in the dtype of `hidden`, gathered for products."""
    unembed = unembed.astype(hidden.dtype)
    return unembed if settings.gather is None else settings.gather(unembed)


def _compute_logits(
    settings: _Settings, hidden: Float[Array, "batch part embed"], unembed: Float[Array, "vocab embed"]
) -> tuple[Float[Array, "batch part vocab"], Float[Array, "batch part vocab"] | None]:
    """Return the logits of a chunk and the derivative of the soft cap, or None if there is no soft cap.

    The logits of padded vocabulary rows are -inf.
    """
    logits = jnp.einsum("bse,ve->bsv", hidden, unembed, preferred_element_type=jnp.float32)
    if settings.constrain is not None:
        logits = settings.constrain(logits)
    slope = None
    if settings.soft_cap is not None:
        squashed = jnp.tanh(logits / settings.soft_cap)
        logits, slope = settings.soft_cap * squashed, 1 - jnp.square(squashed)
    if settings.vocab_size < unembed.shape[0]:
        logits = jnp.where(jnp.arange(unembed.shape[0]) < settings.vocab_size, logits, -jnp.inf)
    return logits, slope


def _is_target(targets: Int[Array, "batch part"], vocab: int) -> Bool[Array, "batch part vocab"]:
    """Return the targets as one-hot vectors, by a comparison that keeps a sharded vocabulary sharded."""
    return targets[..., None] == jnp.arange(vocab)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _token_losses(
    settings: _Settings,
    hidden: Float[Array, "chunks batch part embed"],
    unembed: Float[Array, "vocab embed"],
    targets: Int[Array, "chunks batch part"],
) -> tuple[Float[Array, "chunks batch part"], Float[Array, "chunks batch part"]]:
    """Return -log p(target) and the log-sum-exp of every token."""
    unembed = _gather_unembed(settings, hidden, unembed)

    def chunk_step(carry: None, x: tuple[Array, Array]):
        logits, _ = _compute_logits(settings, x[0], unembed)
        max_logit = logits.max(-1, keepdims=True)
        log_sum = jnp.log(jnp.exp(logits - max_logit).sum(-1)) + max_logit[..., 0]
        target_logit = jnp.where(_is_target(x[1], logits.shape[-1]), logits, 0.0).sum(-1)
        return carry, (log_sum - target_logit, log_sum)

    return jax.lax.scan(chunk_step, None, (hidden, targets))[1]


def _token_losses_forward(settings, hidden, unembed, targets):
    losses: Any = _token_losses(settings, hidden, unembed, targets)
    return losses, (hidden, unembed, targets, losses[1])


def _token_losses_backward(settings, residuals, cotangents):
    hidden, unembed, targets, log_sum = residuals
    d_nll, d_log_sum = cotangents
    dtype, unembed = unembed.dtype, _gather_unembed(settings, hidden, unembed)

    def chunk_step(d_unembed: Array, x: tuple[Array, ...]):
        hidden_chunk, target_chunk, log_sum_chunk, d_nll_chunk, d_log_sum_chunk = x
        logits, slope = _compute_logits(settings, hidden_chunk, unembed)
        probability = jnp.exp(logits - log_sum_chunk[..., None])
        d_logits = probability * (d_nll_chunk + d_log_sum_chunk)[..., None]
        d_logits = d_logits - jnp.where(_is_target(target_chunk, logits.shape[-1]), d_nll_chunk[..., None], 0.0)
        if slope is not None:
            d_logits = d_logits * slope
        d_logits = d_logits.astype(hidden_chunk.dtype)
        d_hidden = jnp.einsum("bsv,ve->bse", d_logits, unembed, preferred_element_type=jnp.float32)
        d_hidden = d_hidden.astype(hidden_chunk.dtype)
        by_shard = (_split_shards(settings, x) for x in (d_logits, hidden_chunk))
        d_unembed = d_unembed + jnp.einsum("ibjsv,ibjse->ijve", *by_shard, preferred_element_type=jnp.float32)
        return d_unembed, d_hidden

    zeros = jnp.zeros((settings.batch_shards, settings.seq_shards, *unembed.shape), jnp.float32)
    d_unembed, d_hidden = jax.lax.scan(chunk_step, zeros, (hidden, targets, log_sum, d_nll, d_log_sum))
    total = d_unembed.sum((0, 1)) if settings.sum_gradient is None else settings.sum_gradient(d_unembed)
    total = total.astype(dtype)
    if settings.sum_first:
        d_hidden, total = jax.lax.optimization_barrier((d_hidden, total))
    return d_hidden, total, None


def _split_shards(settings: _Settings, x: Array) -> Array:
    """Reshape (batch, part, ...) to (batch_shards, batch / batch_shards, seq_shards, chunk, ...)."""
    batch, length = x.shape[:2]
    return x.reshape(
        settings.batch_shards,
        batch // settings.batch_shards,
        settings.seq_shards,
        length // settings.seq_shards,
        *x.shape[2:],
    )


_token_losses.defvjp(_token_losses_forward, _token_losses_backward)
