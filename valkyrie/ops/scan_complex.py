"""Complex numbers for the recurrence, as pairs of separate float32 arrays.

With separate real and imaginary arrays, sharding the state axis never separates the parts of a number, projections are
real matrix products, and the same code works in a Pallas kernel.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

Complex = tuple[Float[Array, "..."], Float[Array, "..."]]
"""A complex array as (real part, imaginary part), both of the same shape."""

Eigenvalues = tuple[Float[Array, " state"], Float[Array, " state"]]
"""One complex number per state, such as Lambda_bar."""

Carry = tuple[Float[Array, "batch state"], Float[Array, "batch state"]]
"""The state of every sequence at one position."""

States = tuple[Float[Array, "batch seq state"], Float[Array, "batch seq state"]]
"""The states, or the inputs of the states, at all positions."""

Factor = Float[Array, "..."] | float | None
"""A real factor that broadcasts with a complex array; None is 1."""

Index = int | slice | tuple[int | slice, ...]
"""An index of Python integers and slices, applied to both parts."""

Powers = tuple[Float32[Array, "exponent state"], Float32[Array, "exponent state"]]
"""Several powers of one complex number per state, along the first axis."""


def mul(a: Complex, b: Complex) -> Complex:
    """Return the elementwise product a b, with NumPy broadcasting."""
    return a[0] * b[0] - a[1] * b[1], a[0] * b[1] + a[1] * b[0]


def add(a: Complex, b: Complex) -> Complex:
    """Return the elementwise sum a + b, with NumPy broadcasting."""
    return a[0] + b[0], a[1] + b[1]


def conj(a: Complex) -> Complex:
    """Return the complex conjugate of `a`."""
    return a[0], -a[1]


def scale_by(factor: Factor, a: Complex) -> Complex:
    """Return `a` times a real factor."""
    return a if factor is None else (factor * a[0], factor * a[1])


def div(a: Complex, b: Complex) -> Complex:
    """Return the elementwise quotient a / b, for |b|**2 within float32's range."""
    norm = b[0] * b[0] + b[1] * b[1]
    quotient = mul(a, conj(b))
    return quotient[0] / norm, quotient[1] / norm


def as_float32(a: Complex) -> Complex:
    """Return `a` with both parts in float32."""
    return a[0].astype(jnp.float32), a[1].astype(jnp.float32)


def zeros_like(a: Complex) -> Complex:
    """Return zeros with the shape and sharding of `a` and, inside `jax.shard_map`, its varying axes."""
    return jnp.zeros_like(a[0]), jnp.zeros_like(a[1])


def index_parts(a: Complex, index: Index) -> Complex:
    """Return `a[index]`: both parts indexed in the same way."""
    return a[0][index], a[1][index]


def power(base: Eigenvalues, exponent: int) -> Eigenvalues:
    """Return base**exponent for an exponent of at least 1, by repeated squaring.

    Squaring the rounded float32 base gives the same result as a step-by-step recurrence. exp(exponent * Lambda * Delta)
    does not, because the product loses the phase for HiPPO's large imaginary parts.
    """
    assert exponent >= 1, exponent
    result: Eigenvalues | None = None
    while True:
        if exponent & 1:
            result = base if result is None else mul(result, base)
        exponent >>= 1
        if not exponent:
            assert result is not None
            return result
        base = mul(base, base)


def powers(base: Eigenvalues, count: int) -> Powers:
    """Return base**1, ..., base**count along the first axis. Each round of multiplications doubles their number."""
    assert count >= 1, count
    result = base[0][None], base[1][None]
    while result[0].shape[0] < count:
        next_powers = mul(result, index_parts(result, slice(-1, None)))
        result = jnp.concatenate([result[0], next_powers[0]]), jnp.concatenate([result[1], next_powers[1]])
    return index_parts(result, slice(0, count))
