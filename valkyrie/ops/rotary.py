"""Rotary position embeddings: pairs of channels rotated by position (RoFormer, arXiv 2104.09864).

Channel i of the first half is paired with channel i of the second half. Position p rotates the pair by
p * theta ** (-2 i / head_dim) radians. On a TPU, the halves are swapped by multiplying with a matrix of 0, 1 and -1,
which is exact and nearly free on the matrix unit. Swapping them by moving vector lanes would take a fifth as long as
attention's projections (compiler estimates, experiments/LOG.md).
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from valkyrie.hardware.platforms import get_platform
from valkyrie.ops.choices import RopeStretch, Yarn

NO_STRETCH = RopeStretch()
"""The default `stretch` of `rotate`, which leaves the frequencies unchanged."""


def rotate(
    x: Float[Array, "batch seq heads head_dim"],
    positions: Int[Array, "batch seq"] | Int[Array, " seq"],
    theta: float,
    backend: str | None = None,
    stretch: RopeStretch | Yarn = NO_STRETCH,
) -> Float[Array, "batch seq heads head_dim"]:
    """Rotate queries or keys by their positions, in x's dtype. Angles and products are float32.

    `stretch` lowers the low frequencies (Llama 3.1, arXiv 2407.21783, or YaRN). `backend` (cpu, gpu, tpu) is the
    platform that will run the computation, by default JAX's default backend. Raises ValueError for an odd head_dim.
    """
    head_dim = x.shape[-1]
    if head_dim % 2:
        raise ValueError(
            f"head_dim={head_dim} must be even: rotary embeddings rotate pairs of channels. "
            f"Use head_dim={head_dim + 1}."
        )
    half = head_dim // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if stretch.factor != 1:
        unstretched_share = (
            _unstretched_share_by_pair(half, theta, stretch)
            if isinstance(stretch, Yarn)
            else _unstretched_share_by_turns(frequencies, stretch)
        )
        frequencies = frequencies * (unstretched_share + (1 - unstretched_share) / stretch.factor)
    angles = (positions[..., None].astype(jnp.float32) * frequencies)[..., None, :]
    amplitude = stretch.amplitude if isinstance(stretch, Yarn) else 1.0
    cos, sin = (amplitude * jnp.concatenate([f(angles)] * 2, axis=-1) for f in (jnp.cos, jnp.sin))
    by_product = get_platform(backend or jax.default_backend()).rotates_by_product
    return _rotate_pairs(_rotate_half_by_product if by_product else _rotate_half, x, cos, sin)


def _unstretched_share_by_turns(frequencies: Float[Array, " half"], stretch: RopeStretch) -> Float[Array, " half"]:
    """Return the weight of each pair's own frequency (radians per position): 1 above `high` turns, 0 below `low`."""
    turns = stretch.context * frequencies / (2 * jnp.pi)
    if stretch.low == stretch.high:
        return (turns > stretch.low).astype(jnp.float32)
    return jnp.clip((turns - stretch.low) / (stretch.high - stretch.low), 0, 1)


def _unstretched_share_by_pair(half: int, theta: float, yarn: Yarn) -> Float[Array, " half"]:
    """Return the weight of each pair's own frequency: linear in its number between `high` and `low` turns."""

    def pair_number(turns: float) -> float:
        return half * math.log(yarn.context / (turns * 2 * math.pi)) / math.log(theta)

    first, last = pair_number(yarn.high), pair_number(yarn.low)
    if yarn.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * half - 1)
    return 1 - jnp.clip((jnp.arange(half) - first) / max(last - first, 0.001), 0, 1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rotate_pairs(rotate_half, x: Array, cos: Array, sin: Array) -> Array:
    """Rotate `x` by the angles with these cosines and sines, times their amplitude.

    The backward pass is the inverse rotation, times the same amplitude.
    """
    return (x.astype(jnp.float32) * cos + rotate_half(x).astype(jnp.float32) * sin).astype(x.dtype)


def _rotate_pairs_forward(rotate_half, x: Array, cos: Array, sin: Array):
    return _rotate_pairs(rotate_half, x, cos, sin), (cos, sin)


def _rotate_pairs_backward(rotate_half, residuals: tuple[Array, Array], g: Array):
    cos, sin = residuals
    return _rotate_pairs(rotate_half, g, cos, -sin), None, None


_rotate_pairs.defvjp(_rotate_pairs_forward, _rotate_pairs_backward)


def _rotate_half(x: Array) -> Array:
    """Rotate every pair by a quarter turn: (first, second) becomes (-second, first)."""
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([-second, first], axis=-1)


def _rotate_half_by_product(x: Array) -> Array:
    """`_rotate_half` as a matrix product. `highest` precision keeps float32 exact; bfloat16 is exact in one pass."""
    half = x.shape[-1] // 2
    matrix = np.zeros((2 * half, 2 * half), np.float32)
    matrix[np.arange(half) + half, np.arange(half)] = -1
    matrix[np.arange(half), np.arange(half) + half] = 1
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum("...d,de->...e", x, jnp.asarray(matrix, x.dtype), precision=precision)
