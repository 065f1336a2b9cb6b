"""Matrix products with int8 or float8 operands, accumulated in int32 or float32.

Each row or column that a product sums over is scaled by its largest magnitude, at every call. This is AQT's dynamic
scaling (arXiv 2105.03536), except that AQT rounds gradients stochastically, while this module rounds to nearest.
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
    gather: Callable[[Array], Array] = lambda narrow: narrow,
) -> Float[Array, "..."]:
    """Compute the einsum of two operands in a narrow dtype. The result has x's dtype.

    `gather` is applied to the narrow `w`, so that devices gather it in the narrow dtype.
    """
    operands, out = equation.split("->")
    x_indices, w_indices = operands.split(",")
    narrow_x, x_scale = quantize(x, dtype, _summed_axes(x_indices, out))
    narrow_w, w_scale = quantize(w, dtype, _summed_axes(w_indices, out))
    accumulator = jnp.int32 if jnp.issubdtype(dtype, jnp.integer) else jnp.float32
    total = jnp.einsum(equation, narrow_x, gather(narrow_w), preferred_element_type=accumulator)
    result = total.astype(jnp.float32) * _align_scale(x_scale, x_indices, out) * _align_scale(w_scale, w_indices, out)
    return result.astype(x.dtype)


def quantize(
    x: Float[Array, "..."], dtype: str, axes: tuple[int, ...]
) -> tuple[Shaped[Array, "..."], Float[Array, "..."]]:
    """Quantise `x` to `dtype`. Returns the quantised array and its float32 scale, which has length 1 along `axes`.

    The quantised array is `x` divided by the scale. The scale maps the largest magnitude along `axes` to the largest
    value of the dtype, and is 1 where `x` is all 0.
    """
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    largest_value = float(jnp.iinfo(dtype).max if is_integer else jnp.finfo(dtype).max)
    x_f32 = x.astype(jnp.float32)
    magnitude = jnp.max(jnp.abs(x_f32), axis=axes, keepdims=True)
    scale = jnp.where(magnitude == 0, 1.0, magnitude / largest_value)
    scaled = jnp.clip(x_f32 / scale, -largest_value, largest_value)
    return (jnp.round(scaled) if is_integer else scaled).astype(dtype), scale


def _summed_axes(letters: str, out: str) -> tuple[int, ...]:
    return tuple(i for i, letter in enumerate(letters) if letter not in out)


def _align_scale(scale: Float[Array, "..."], letters: str, out: str) -> Float[Array, "..."]:
    """Reshape the scale of an operand so that it broadcasts with the result.

    `letters` and `out` are the einsum indices of the operand and the result.
    """
    shared = [letter for letter in letters if letter in out]
    scale = jax.lax.squeeze(scale, _summed_axes(letters, out))
    scale = scale.transpose([shared.index(letter) for letter in out if letter in shared])
    return jnp.expand_dims(scale, [i for i, letter in enumerate(out) if letter not in shared])
