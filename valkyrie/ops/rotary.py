"""Decides how positions enter attention: by rotating pairs of channels (RoFormer, arXiv 2104.09864).

The halves convention: channel i of the first half is paired with channel i of the second, and position p turns the
pair by p * theta ** (-2 i / head_dim) radians.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def rotate(
    x: Float[Array, "batch seq heads head_dim"],
    positions: Int[Array, "batch seq"] | Int[Array, " seq"],
    theta: float,
) -> Float[Array, "batch seq heads head_dim"]:
    """Return queries or keys rotated by their positions, in x's dtype; angles and products are float32.

    Raises ValueError for an odd head_dim.
    """
    head_dim = x.shape[-1]
    if head_dim % 2:
        raise ValueError(f"head_dim={head_dim} is odd: rotary embedding turns pairs of channels. Use {head_dim + 1}.")
    half = head_dim // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = (positions[..., None].astype(jnp.float32) * frequencies)[..., None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
