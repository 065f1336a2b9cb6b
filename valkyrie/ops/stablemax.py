"""Cross-entropy of stablemax, which replaces softmax's exp(x) by s(x) = x + 1 for x >= 0 and 1 / (1 - x) for x < 0.

Prieto et al., "Grokking at the edge of numerical stability" (arXiv 2501.04697); the Tiny Recursive Model's loss.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def log_stablemax(logits: Float[Array, "*rows vocab"]) -> Float[Array, "*rows vocab"]:
    """Return the logarithms of stablemax in float32.

    log s(x) is log1p(|x|) with the sign of x, which avoids a quotient and cancellation for small x. For logits from
    1e-6 to 1e6, losses agree to 2e-6 with float64, which the reference implementation uses (tests/test_puzzles.py).
    """
    x = logits.astype(jnp.float32)
    size = jnp.where(x < 0, -x, x)
    total = jnp.where(x < 0, 1 / (1 + size), 1 + size).sum(-1, keepdims=True)
    return jnp.where(x < 0, -jnp.log1p(size), jnp.log1p(size)) - jnp.log(total)


def stablemax_cross_entropy(logits: Float[Array, "*rows vocab"], labels: Int[Array, "*rows"]) -> Float[Array, "*rows"]:
    """Return the cross-entropy of each label in nats, or 0 for a negative label, which marks a cell without one."""
    chosen = jnp.take_along_axis(log_stablemax(logits), jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
    return jnp.where(labels < 0, 0.0, -chosen)
