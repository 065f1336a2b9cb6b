"""Routing: chooses the experts of each token of a mixture, and their weights."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from valkyrie.ops.choices import GroupScore, RouterScores


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


def route(
    logits: Float[Array, "batch seq experts"],
    selection_bias: Float[Array, " experts"] | None = None,
    *,
    top_k: int,
    router: RouterScores,
    normalize: bool,
    scaling: float = 1.0,
    groups: int = 1,
    top_groups: int = 1,
    group_score: GroupScore = GroupScore.top_2,
) -> Routing:
    """Choose the `top_k` experts with the highest scores of each token.

    Args:
        logits: Router logits, in float32.
        selection_bias: Added to the scores to choose experts, but not in their weights; None for none.
        top_k: Number of experts per token.
        router: Function from logits to scores.
        normalize: Whether to divide the scores of the chosen experts by their sum.
        scaling: Factor of the weights.
        groups: Number of equal groups of neighbouring experts.
        top_groups: Number of groups with the highest scores. A token uses only experts of these groups.
        group_score: Score of a group.
    """
    is_softmax = router is RouterScores.softmax
    # Scores are divided by their sum as softmaxes of their logarithms, because all sigmoids of a token can be 0.
    log_scores = logits if is_softmax else jax.nn.log_sigmoid(logits)
    probabilities = jax.nn.softmax(log_scores)
    scores = probabilities if is_softmax else jax.nn.sigmoid(logits)
    choice = jax.lax.stop_gradient(scores if selection_bias is None else scores + selection_bias)
    if top_groups < groups:
        choice = _mask_other_groups(choice, groups, top_groups, group_score)
    experts = jax.lax.top_k(choice, top_k)[1]
    one_hot = jax.nn.one_hot(experts, logits.shape[-1], dtype=jnp.float32)
    # A product with the one-hot array instead of a gather, because the gradient of a gather is a scatter-add.
    weights = jnp.sum((log_scores if normalize else scores)[:, :, None] * one_hot, axis=-1)
    if normalize:
        weights = jax.nn.softmax(weights)
    return Routing(weights if scaling == 1 else scaling * weights, experts, one_hot, probabilities)


def _mask_other_groups(
    scores: Float[Array, "batch seq experts"], groups: int, top_groups: int, group_score: GroupScore
) -> Float[Array, "batch seq experts"]:
    """Return the scores, with minus infinity for experts outside of the `top_groups` groups with the highest scores."""
    grouped_scores = scores.reshape(*scores.shape[:-1], groups, -1)
    best_scores = jax.lax.top_k(grouped_scores, 2 if group_score is GroupScore.top_2 else 1)[0]
    best_groups = jax.lax.top_k(best_scores.sum(-1), top_groups)[1]
    is_chosen = jnp.any(jax.nn.one_hot(best_groups, groups, dtype=jnp.bool), axis=-2)
    return jnp.where(is_chosen[..., None], grouped_scores, -jnp.inf).reshape(scores.shape)
