"""Optimizers of the Tiny Recursive Model: AdamATan2, and sign descent on the used rows of a table."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax


def scale_by_atan2(b1: float, b2: float) -> optax.GradientTransformation:
    """Adam without an epsilon: the update direction is atan2(m, sqrt(v)) instead of m / (sqrt(v) + epsilon).

    Everett et al., "Scaling exponents across parameterizations and optimizers" (arXiv 2407.05872), in the form
    of imoneoi/adam-atan2: inside atan2 only v is bias-corrected, and the result is divided by 1 - b1 ** t.
    """

    def init(params: Any) -> optax.ScaleByAdamState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return optax.ScaleByAdamState(jnp.zeros((), jnp.int32), zeros, jax.tree.map(jnp.zeros_like, params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        count = state.count + 1
        mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mu, updates)
        nu = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, state.nu, updates)
        mu_correction, nu_correction = (1 - beta ** count.astype(jnp.float32) for beta in (b1, b2))
        directions = jax.tree.map(lambda m, v: jnp.arctan2(m, jnp.sqrt(v / nu_correction)) / mu_correction, mu, nu)
        return directions, optax.ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformation(init, update)


def sign_descent_on_used_rows(weight_decay: float) -> optax.GradientTransformation:
    """Sign descent with weight decay, for the rows of a table that the batch uses.

    These are the rows with a nonzero gradient. The gradient of all other rows is exactly 0, and they get no update.
    """

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        def update_rows(gradient: jax.Array, table: jax.Array) -> jax.Array:
            is_used = (gradient != 0).any(-1, keepdims=True)
            return jnp.where(is_used, jnp.sign(gradient) + weight_decay * table, 0.0)

        return jax.tree.map(update_rows, updates, params), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)
