"""Products with operands scaled to a narrow dtype, int8 or float8, and wide accumulation.

Each row or column that a product sums over gets a separate scale from its largest magnitude, at every call. This is
AQT's dynamic scaling (arXiv 2105.03536), except that AQT rounds gradients stochastically and this rounds to nearest.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped


def narrow_einsum(
    equation: str,
    x: Float[Array, "..."],
    w: Float[Array, "..."],
    dtype: str,
    place: Callable[[Array], Array] = lambda narrow: narrow,
) -> Float[Array, "..."]:
    """Compute the einsum of two operands in a narrow dtype. The result has x's dtype.

    `place` is applied to the narrow `w`, so that devices gather it in the narrow dtype.
    """
    operands, out = equation.split("->")
    of_x, of_w = operands.split(",")
    narrow_x, x_scale = scaled_to(x, dtype, _summed(of_x, out))
    narrow_w, w_scale = scaled_to(w, dtype, _summed(of_w, out))
    wide = jnp.int32 if jnp.issubdtype(dtype, jnp.integer) else jnp.float32
    total = jnp.einsum(equation, narrow_x, place(narrow_w), preferred_element_type=wide)
    result = total.astype(jnp.float32) * _laid(x_scale, of_x, out) * _laid(w_scale, of_w, out)
    return result.astype(x.dtype)


def scaled_to(
    x: Float[Array, "..."], dtype: str, axes: tuple[int, ...]
) -> tuple[Shaped[Array, "..."], Float[Array, "..."]]:
    """Return `x` divided by its scale, in a narrow dtype, and the scale. It has length 1 over `axes` and is never 0."""
    integer = jnp.issubdtype(dtype, jnp.integer)
    largest = float(jnp.iinfo(dtype).max if integer else jnp.finfo(dtype).max)
    wide = x.astype(jnp.float32)
    top = jnp.max(jnp.abs(wide), axis=axes, keepdims=True)
    scale = jnp.where(top == 0, 1.0, top / largest)
    scaled = jnp.clip(wide / scale, -largest, largest)
    return (jnp.round(scaled) if integer else scaled).astype(dtype), scale


def _summed(letters: str, out: str) -> tuple[int, ...]:
    return tuple(i for i, letter in enumerate(letters) if letter not in out)


def _laid(scale: Float[Array, "..."], letters: str, out: str) -> Float[Array, "..."]:
    """Return a scale with a dimension for every letter of the result, of length 1 for letters that it lacks."""
    kept = [letter for letter in letters if letter in out]
    scale = jax.lax.squeeze(scale, _summed(letters, out))
    scale = scale.transpose([kept.index(letter) for letter in out if letter in kept])
    return jnp.expand_dims(scale, [i for i, letter in enumerate(out) if letter not in kept])
