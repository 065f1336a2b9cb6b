"""Rotary position embeddings: pairs of channels rotated by position (RoFormer, arXiv 2104.09864).

The halves convention: channel i of the first half is paired with channel i of the second, and position p rotates the
pair by p * theta ** (-2 i / head_dim) radians. On a TPU the halves are swapped by a product with a matrix of 0, 1 and
-1. The product is exact and nearly free on the matrix unit, while moving lanes costs a fifth of attention's projections
(compiler estimates, experiments/LOG.md).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from valkyrie.hardware.platforms import platform_of
from valkyrie.ops.choices import RopeStretch

UNSTRETCHED = RopeStretch()
"""Unchanged frequencies."""


def rotate(
    x: Float[Array, "batch seq heads head_dim"],
    positions: Int[Array, "batch seq"] | Int[Array, " seq"],
    theta: float,
    backend: str | None = None,
    stretch: RopeStretch = UNSTRETCHED,
) -> Float[Array, "batch seq heads head_dim"]:
    """Rotate queries or keys by their positions, in x's dtype. Angles and products are float32.

    `stretch` lowers the low frequencies (arXiv 2407.21783). `backend` (cpu, gpu, tpu) is the backend that will run it,
    by default JAX's default backend. Raises ValueError for an odd head_dim.
    """
    head_dim = x.shape[-1]
    if head_dim % 2:
        raise ValueError(f"head_dim={head_dim} is odd: rotary embedding turns pairs of channels. Use {head_dim + 1}.")
    half = head_dim // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if stretch.factor != 1:
        frequencies = _stretched(frequencies, stretch)
    angles = (positions[..., None].astype(jnp.float32) * frequencies)[..., None, :]
    cos, sin = (jnp.concatenate([f(angles)] * 2, axis=-1) for f in (jnp.cos, jnp.sin))
    by_product = platform_of(backend or jax.default_backend()).rotates_by_product
    return _turned(_quarter_by_product if by_product else _quarter, x, cos, sin)


def _stretched(frequencies: Float[Array, " half"], stretch: RopeStretch) -> Float[Array, " half"]:
    """Return frequencies in radians per position, lowered for fewer than `high` turns over the original context."""
    turns = stretch.context * frequencies / (2 * jnp.pi)
    kept = jnp.clip((turns - stretch.low) / (stretch.high - stretch.low), 0, 1)
    return frequencies * (kept + (1 - kept) / stretch.factor)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _turned(quarter, x: Array, cos: Array, sin: Array) -> Array:
    """Rotate `x` by the angles of `cos` and `sin`. The transpose is the inverse rotation."""
    return (x.astype(jnp.float32) * cos + quarter(x).astype(jnp.float32) * sin).astype(x.dtype)


def _turned_forward(quarter, x: Array, cos: Array, sin: Array):
    return _turned(quarter, x, cos, sin), (cos, sin)


def _turned_backward(quarter, saved: tuple[Array, Array], g: Array):
    cos, sin = saved
    return _turned(quarter, g, cos, -sin), None, None


_turned.defvjp(_turned_forward, _turned_backward)


def _quarter(x: Array) -> Array:
    """Rotate every pair by a quarter turn: (first, second) becomes (-second, first)."""
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([-second, first], axis=-1)


def _quarter_by_product(x: Array) -> Array:
    """`_quarter` as a matrix product. `highest` precision keeps float32 exact; bfloat16 is exact in one pass."""
    half = x.shape[-1] // 2
    turn = np.zeros((2 * half, 2 * half), np.float32)
    turn[np.arange(half) + half, np.arange(half)] = -1
    turn[np.arange(half), np.arange(half) + half] = 1
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum("...d,de->...e", x, jnp.asarray(turn, x.dtype), precision=precision)
