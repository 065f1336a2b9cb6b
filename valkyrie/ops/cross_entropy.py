"""Cross-entropy over a large vocabulary without all its logits: a chunk of positions at a time.

Only one chunk of float32 logits exists, forward and backward. The backward pass is written out: it keeps the
log-sum-exp of every token, makes each chunk's logits again, and sums the gradient of the unembedding in float32
whatever the compute dtype. (A rematerialised scan takes the same time and a tenth more memory, experiments/LOG.md, but
sums in the compute dtype.) That gradient is summed over chunks apart for every shard of the batch and the sequence, and
over the shards once, after the last chunk: otherwise each chunk would end in an all-reduce of the whole unembedding.
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
    """Sums over the tokens of a batch; the mean to minimise is (loss_sum + z_sum) / weight_sum, in nats per token."""

    loss_sum: Float[Array, ""]
    weight_sum: Float[Array, ""]
    z_sum: Float[Array, ""]
    per_token: Float[Array, "batch seq"]


class _Head(NamedTuple):
    """What is fixed about the map from hidden states to logits."""

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
    """Return the weighted sums of -log p(target), and the value of every token: unweighted, 0 where the weight is 0.

    Products take operands in the dtype of `hidden`; logits, softmax and sums are float32. Rows of `unembed` from
    `vocab_size` on are padding and get probability 0. `z_loss` weighs the square of the log-sum-exp (PaLM, arXiv
    2204.02311, section 5) into `z_sum`. `softcap` c replaces logits l by c * tanh(l / c). `chunk` positions of each
    of the `shards` into which the sequence is split are taken at a time; `constrain` is applied to each chunk's logits
    (batch, shards * chunk, vocab), and `place` to the unembedding in the dtype of `hidden`, forward and again backward:
    what it gathers is not kept in between, and the gradient is not rounded on its way to a wider parameter.
    `total` sums the gradient of the unembedding, (batch_shards, shards, vocab, embed) in float32, over its first two
    dimensions. `batch_shards` says into how many parts the batch is split. Targets whose weight is 0 may be any number.
    Raises ValueError where a length does not divide.
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
    """(batch, seq, ...) as (chunks, batch, shards * chunk, ...), each shard's part padded to whole chunks."""
    batch, seq = x.shape[:2]
    x = x.reshape(batch, shards, seq // shards, *x.shape[2:])
    x = jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % chunk)) + ((0, 0),) * (x.ndim - 3))
    x = jnp.moveaxis(x.reshape(batch, shards, -1, chunk, *x.shape[3:]), 2, 0)
    return x.reshape(x.shape[0], batch, shards * chunk, *x.shape[4:])


def _join(x: Array, shards: int, batch: int, seq: int) -> Array:
    """The inverse of `_split`, cut to `seq`."""
    chunks = x.shape[0]
    x = jnp.moveaxis(x.reshape(chunks, batch, shards, -1, *x.shape[3:]), 0, 2)
    x = x.reshape(batch, shards, -1, *x.shape[4:])[:, :, : seq // shards]
    return x.reshape(batch, seq, *x.shape[3:])


def _placed(head: _Head, hidden: Array, unembed: Float[Array, "vocab embed"]) -> Float[Array, "vocab embed"]:
    """The unembedding as products use it."""
    unembed = unembed.astype(hidden.dtype)
    return unembed if head.place is None else head.place(unembed)


def _logits(
    head: _Head, hidden: Float[Array, "batch part embed"], unembed: Float[Array, "vocab embed"]
) -> tuple[Float[Array, "batch part vocab"], Float[Array, "batch part vocab"] | None]:
    """One chunk's logits, -inf in the padding, and their derivative by the raw product where that is not 1."""
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
    """The one-hot of the targets, made by comparison so that a vocabulary split over devices stays split."""
    return targets[..., None] == jnp.arange(vocab)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _token_losses(
    head: _Head,
    hidden: Float[Array, "chunks batch part embed"],
    unembed: Float[Array, "vocab embed"],
    targets: Int[Array, "chunks batch part"],
) -> tuple[Float[Array, "chunks batch part"], Float[Array, "chunks batch part"]]:
    """-log p(target) and the log-sum-exp of every token."""
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
    """(batch, part, ...) as (batch shards, batch of each, seq shards, chunk, ...)."""
    batch, part = x.shape[:2]
    return x.reshape(
        head.batch_shards, batch // head.batch_shards, head.seq_shards, part // head.seq_shards, *x.shape[2:]
    )


_token_losses.defvjp(_token_losses_forward, _token_losses_backward)
