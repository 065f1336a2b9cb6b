"""Building blocks of the models' Flax modules: parameters, projections, norms, dropout, and document boundaries."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from valkyrie.axes import BATCH, SEQ, Parameter, Shard
from valkyrie.ops.linear import Numerics, gather_in_float32, linear

Checkpoint = Callable[[Callable[..., Any]], Callable[..., Any]]
"""A function that wraps a block for rematerialisation: `jax.checkpoint` with a policy, or the identity."""


class Boundaries(NamedTuple):
    """Boundaries of documents that are packed into rows.

    Args:
        keep: 0 at the first token of a document, 1 elsewhere. None if rows are not packed, or if states and attention
            cross documents (`document_boundary=cross`).
        segment_ids: Document number of each token, or None if `keep` is None.
        tokens: Token ids, for the value embeddings of nanochat, or None.
    """

    keep: Float[Array, "batch seq"] | None = None
    segment_ids: Int[Array, "batch seq"] | None = None
    tokens: Int[Array, "batch seq"] | None = None


AuxiliaryValues = dict[str, Float[Array, " batch"]]
"""Auxiliary losses and metrics by name, each with a float32 number per sequence."""


@runtime_checkable
class FeedForwardModule(Protocol):
    """Interface of the module of a feed-forward. The stack adds the norm before it and the residual sum after it."""

    def __call__(
        self, x: Float[Array, "batch seq embed"], boundaries: Boundaries, shard: Shard
    ) -> Float[Array, "batch seq embed"] | tuple[Float[Array, "batch seq embed"], AuxiliaryValues]:
        """Return the output for all positions, with auxiliary values if the block declares any (`Block.auxiliary`)."""
        ...


@runtime_checkable
class BlockModule(FeedForwardModule, Protocol):
    """Interface of modules that mix positions, such as attention or S5.

    Adds step-by-step generation to `FeedForwardModule`.
    """

    def init_state(self, batch: int, max_len: int) -> Any:
        """Return the generation state before the first token, for sequences of at most `max_len` tokens."""
        ...

    def step(self, x: Float[Array, "batch embed"], state: Any) -> tuple[Float[Array, "batch embed"], Any]:
        """Process one position. Returns the output for input `x`, and the new state.

        Processing a sequence position by position gives the same outputs as `__call__` on the whole sequence.
        """
        ...


def parameter(spec: Parameter, value: Array, numerics: Numerics) -> nnx.Param:
    """Return `value` as a parameter with the logical axes of `spec`.

    It is stored in float32 if `spec.float32` is set, otherwise in the parameter dtype of `numerics`.
    """
    assert value.shape == spec.shape, f"declared shape {spec.shape}, built {value.shape}"
    dtype = jnp.float32 if spec.float32 else numerics.parameter
    return nnx.Param(value.astype(dtype), logical_axes=spec.axes)


def project(
    equation: str,
    x: Float[Array, "..."],
    weights: nnx.Param,
    *,
    shard: Shard,
    numerics: Numerics,
    name: str | None = None,
    row_axes: tuple[str, str] = (BATCH, SEQ),
) -> Float[Array, "..."]:
    """Return the einsum of an activation and a parameter, in the compute dtype (`valkyrie.ops.linear.linear`).

    `remat` and reports refer to the result by `name`, if given. `row_axes` are the logical axes of the first two
    dimensions of `x`.
    """
    axes, settings = weights.get_metadata()["logical_axes"], {"shard": shard, "numerics": numerics}
    product = partial(linear, equation, x, weights[...], axes=axes, row_axes=row_axes, **settings)
    if name is None:
        return product()
    with jax.named_scope(name):
        return checkpoint_name(product(), name)


def add_bias(x: Float[Array, "..."], bias: nnx.Param, shard: Shard) -> Float[Array, "..."]:
    """Add a bias to the last dimensions of an activation. The result has x's dtype.

    The addition is done in float32, and so is the gradient of the bias, a sum over all positions.
    """
    bias_f32 = gather_in_float32(bias[...], bias.get_metadata()["logical_axes"], shard)
    return (x.astype(jnp.float32) + bias_f32).astype(x.dtype)


def normal(key: Array, shape: tuple[int, ...], deviation: float) -> Float[Array, "..."]:
    """Return float32 normal random numbers with this standard deviation."""
    return deviation * jax.random.normal(key, shape, jnp.float32)


def uniform(key: Array, shape: tuple[int, ...], deviation: float) -> Float[Array, "..."]:
    """Return float32 random numbers with this standard deviation, uniform around 0."""
    bound = 3**0.5 * deviation
    return jax.random.uniform(key, shape, jnp.float32, -bound, bound)


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation with a learned scale (arXiv 1910.07467), computed in float32."""

    def __init__(self, width: int, epsilon: float, *, numerics: Numerics) -> None:
        self.scale = nnx.Param(jnp.ones((width,), numerics.parameter), logical_axes=("embed",))
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "*rows width"]) -> Float[Array, "*rows width"]:
        """Return `x` with unit mean square over its last axis, scaled, in x's dtype."""
        return (unit_mean_square(x, self.epsilon) * self.scale[...].astype(jnp.float32)).astype(x.dtype)


class PlainRMSNorm(nnx.Module):
    """Root-mean-square normalisation without parameters, computed in float32."""

    def __init__(self, width: int, epsilon: float, *, numerics: Numerics) -> None:
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "*rows width"]) -> Float[Array, "*rows width"]:
        """Return `x` with unit mean square over its last axis, in x's dtype."""
        return plain_rms_norm(x, self.epsilon)


class LayerNorm(nnx.Module):
    """Normalisation to mean 0 and variance 1 with a learned scale and bias (arXiv 1607.06450), computed in float32."""

    def __init__(self, width: int, epsilon: float, *, numerics: Numerics) -> None:
        self.scale = nnx.Param(jnp.ones((width,), numerics.parameter), logical_axes=("embed",))
        self.bias = nnx.Param(jnp.zeros((width,), numerics.parameter), logical_axes=("embed",))
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "*rows width"]) -> Float[Array, "*rows width"]:
        """Return `x` normalised over its last axis, scaled and shifted, in x's dtype."""
        x_f32 = x.astype(jnp.float32)
        centred = x_f32 - jnp.mean(x_f32, axis=-1, keepdims=True)
        scale, bias = (parameter[...].astype(jnp.float32) for parameter in (self.scale, self.bias))
        return (unit_mean_square(centred, self.epsilon) * scale + bias).astype(x.dtype)


def unit_mean_square(x: Float[Array, "..."], epsilon: float, axes: tuple[int, ...] = (-1,)) -> Float[Array, "..."]:
    """Return `x` with unit mean square over `axes`, in float32."""
    x_f32 = x.astype(jnp.float32)
    return x_f32 * jax.lax.rsqrt(jnp.mean(jnp.square(x_f32), axis=axes, keepdims=True) + epsilon)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def plain_rms_norm(x: Float[Array, "*rows width"], epsilon: float) -> Float[Array, "*rows width"]:
    """Return `x` with unit mean square over its last axis, computed in float32, in x's dtype.

    The backward pass needs `x` in its own dtype and a number per row. Autodiff would save two float32 arrays of x's
    size.
    """
    return unit_mean_square(x, epsilon).astype(x.dtype)


def _plain_rms_norm_forward(x: Array, epsilon: float) -> tuple[Array, tuple[Array, Array]]:
    x_f32 = x.astype(jnp.float32)
    inverse_rms = jax.lax.rsqrt(jnp.mean(jnp.square(x_f32), axis=-1, keepdims=True) + epsilon)
    return (x_f32 * inverse_rms).astype(x.dtype), (x, inverse_rms)


def _plain_rms_norm_backward(epsilon: float, residuals: tuple[Array, Array], g: Array) -> tuple[Array]:
    x, inverse_rms = residuals
    return (normed_cotangent(x.astype(jnp.float32) * inverse_rms, inverse_rms, g).astype(x.dtype),)


plain_rms_norm.defvjp(_plain_rms_norm_forward, _plain_rms_norm_backward)


def normed_cotangent(
    normed: Float[Array, "*rows width"], inverse_rms: Float[Array, "*rows 1"], g: Float[Array, "*rows width"]
) -> Float[Array, "*rows width"]:
    """Return the float32 cotangent of x, given `normed` (x times `inverse_rms`, in float32) and its cotangent `g`."""
    g = g.astype(jnp.float32)
    return inverse_rms * (g - normed * jnp.mean(g * normed, axis=-1, keepdims=True))


def dropout(x: Float[Array, "batch seq embed"], rate: float, key: Array | None) -> Float[Array, "batch seq embed"]:
    """Drop each channel for a whole sequence with probability `rate`, as lindermanlab/S5 does.

    The other channels are divided by `1 - rate`. Without a key, returns `x` unchanged.
    """
    if key is None or rate == 0:
        return x
    mask = jax.random.bernoulli(key, 1 - rate, (x.shape[0], 1, x.shape[2]))
    return jnp.where(mask, x / (1 - rate), 0).astype(x.dtype)
