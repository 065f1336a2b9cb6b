"""Routing of tokens to experts, and the dispatch of tokens to experts and back."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class Routing(NamedTuple):
    """Experts of each token.

    Args:
        weights: Weight of each chosen expert's output, in float32.
        experts: Numbers of the chosen experts, highest score first.
        one_hot: 1 for each chosen expert, in float32.
        probabilities: Scores of all experts, divided by their sum, in float32.
    """

    weights: Float[Array, "batch seq top_k"]
    experts: Int[Array, "batch seq top_k"]
    one_hot: Float[Array, "batch seq top_k experts"]
    probabilities: Float[Array, "batch seq experts"]


def route(logits: Float[Array, "batch seq experts"], top_k: int, *, softmax: bool, normalize: bool) -> Routing:
    """Choose the `top_k` experts with the highest router logits of each token.

    Args:
        logits: Router logits, in float32.
        top_k: Number of experts per token.
        softmax: Whether scores are a softmax over all experts, instead of a sigmoid of each logit.
        normalize: Whether to divide the scores of the chosen experts by their sum.
    """
    scores = jax.nn.softmax(logits) if softmax else jax.nn.sigmoid(logits)
    experts = jax.lax.top_k(jax.lax.stop_gradient(scores), top_k)[1]
    one_hot = jax.nn.one_hot(experts, logits.shape[-1], dtype=jnp.float32)
    # A product with the one-hot array instead of a gather, because the gradient of a gather is a scatter-add.
    weights = jnp.sum(scores[:, :, None] * one_hot, axis=-1)
    if normalize:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    probabilities = scores if softmax else scores / jnp.sum(scores, axis=-1, keepdims=True)
    return Routing(weights, experts, one_hot, probabilities)


def dispatch_mask(
    one_hot: Float[Array, "batch seq top_k experts"], capacity: int
) -> Bool[Array, "batch seq top_k experts capacity"]:
    """Return whether each assignment of a token is in each slot of each expert's buffer.

    Assignments to an expert fill its slots in the order of the sequence, so that none depends on later tokens. Those
    beyond its capacity are in no slot.
    """
    batch, seq, top_k, experts = one_hot.shape
    slots = jnp.cumsum(one_hot.reshape(batch, seq * top_k, experts), axis=1).reshape(one_hot.shape) - 1
    return (slots[..., None] == jnp.arange(capacity)) & (one_hot[..., None] > 0)


def dispatch_dense(
    x: Float[Array, "batch seq embed"], mask: Bool[Array, "batch seq top_k experts capacity"]
) -> Float[Array, "experts batch capacity embed"]:
    """Copy tokens into the buffers of their experts. Empty slots are zero."""
    return jnp.einsum("bsnc,bse->nbce", jnp.any(mask, axis=2).astype(x.dtype), x)


def combine_dense(
    outputs: Float[Array, "experts batch capacity embed"],
    mask: Bool[Array, "batch seq top_k experts capacity"],
    routing: Routing,
) -> Float[Array, "batch seq embed"]:
    """Return the weighted sum of the outputs of each token's experts, in the dtype of `outputs`.

    Dropped assignments add nothing.
    """
    weights = jnp.sum(jnp.where(mask, routing.weights[..., None, None], 0), axis=2)
    return jnp.einsum("bsnc,nbce->bse", weights.astype(outputs.dtype), outputs)
