"""How a parameter meets an activation (products and look-ups), so that nothing gathered outlives its product.

It is cast and gathered where it is used, forward and again backward; its gradient is summed in full precision and
scattered back. Fully sharded parameters thus stay sharded in memory.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from valkyrie.axes import Axes, Shard
from valkyrie.ops.narrow import narrow_einsum
from valkyrie.precision import ACCUMULATED, DType, PolicyConfig


class Numerics(NamedTuple):
    """The dtypes of a precision policy, hashable: parameters as stored, operands of products, gradient sums.

    `products` is a narrow one that operands are scaled to (`valkyrie.ops.narrow`), None for none.
    """

    parameter: str
    compute: str
    reduction: str
    products: str | None = None

    @staticmethod
    def of(policy: PolicyConfig) -> Numerics:
        """Return the dtypes that a policy names."""
        narrow = None if policy.products is None else policy.products.value
        return Numerics(policy.parameter.value, policy.compute.value, policy.reduction.value, narrow)


FLOAT32 = Numerics(DType.float32.value, DType.float32.value, DType.float32.value)
"""Everything in float32."""


def linear(
    equation: str,
    x: Float[Array, "..."],
    w: Float[Array, "..."],
    *,
    axes: Axes,
    shard: Shard,
    numerics: Numerics,
) -> Float[Array, "..."]:
    """Return the einsum of an activation and a parameter with these logical axes, in the compute dtype.

    The parameter is cast, then gathered over the mesh axes that split data (`shard.gather_for_use`), here and again in
    the backward pass. Its gradient is the product of `x` and the cotangent in the reduction dtype, sharded as the
    parameter is stored: under a fully sharded partition that is a reduce-scatter. Every index of `w` must appear in `x`
    or in the result.
    """
    operands, out = equation.split("->")
    of_x, of_w = operands.split(",")

    def cast(w: Array) -> Array:
        return shard.gather_for_use(w.astype(numerics.compute), *axes)

    def multiplied(equation: str, x: Array, w: Array) -> Array:
        if numerics.products is None:
            return jnp.einsum(equation, x, cast(w))
        return narrow_einsum(equation, x, w, numerics.products, lambda narrow: shard.gather_for_use(narrow, *axes))

    @jax.custom_vjp
    def product(x: Array, w: Array) -> Array:
        return multiplied(equation, x, w)

    # The product stands here once more, not a call of `product`: rematerialisation that saves products must see it.
    def forward(x: Array, w: Array) -> tuple[Array, tuple[Array, Array]]:
        return multiplied(equation, x, w), (x, w)

    def of_weights(x: Array, g: Array) -> Array:
        return jnp.einsum(f"{of_x},{out}->{of_w}", x, g, preferred_element_type=jnp.dtype(numerics.reduction))

    def backward(saved: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
        x, w = saved
        dx = multiplied(f"{out},{of_w}->{of_x}", g, w)
        dw = shard.gradient(of_weights, (x, g), *axes, reduction=numerics.reduction)
        return dx.astype(x.dtype), dw.astype(w.dtype)

    product.defvjp(forward, backward)
    # A slice of a parameter has no placement of its own: without this one, it would be kept as it was gathered.
    return product(x.astype(numerics.compute), shard.shard_for_storage(w, *axes))


def lookup(
    table: Float[Array, "vocab embed"], tokens: Int[Array, "*rows"], *, axes: Axes, shard: Shard, numerics: Numerics
) -> Float[Array, "*rows embed"]:
    """Return the rows of a parameter with these logical axes at `tokens`, in the compute dtype.

    The gradient of a row is the sum over all its uses, taken in float32 whatever the reduction dtype: a frequent token
    has thousands, and a sum of them in bfloat16 stops growing at 256 equal ones.
    """

    @jax.custom_vjp
    def rows(table: Array, tokens: Array) -> Array:
        return shard.gather_table(table.astype(numerics.compute), *axes)[tokens]

    def forward(table: Array, tokens: Array) -> tuple[Array, tuple[Array, Array]]:
        return rows(table, tokens), (table, tokens)

    def of_table(tokens: Array, g: Array) -> Array:
        return jnp.zeros(table.shape, ACCUMULATED.value).at[tokens].add(g.astype(ACCUMULATED.value))

    def backward(saved: tuple[Array, Array], g: Array) -> tuple[Array, None]:
        table, tokens = saved
        total = shard.gradient(of_table, (tokens, g), *axes, reduction=numerics.reduction, whole=True)
        return total.astype(table.dtype), None

    rows.defvjp(forward, backward)
    return rows(table, tokens)


@jax.custom_vjp
def made_once(a: Float[Array, "*shape"], b: Float[Array, "*shape"]) -> tuple[Float[Array, "*shape"], ...]:
    """Return both arrays as they are; their cotangents are made before any product takes one.

    Otherwise a compiler may make a gate's derivative anew inside each of the four products that need it: on TPU v5e a
    tenth of a gated feed-forward's backward pass (compiler estimates, experiments/LOG.md).
    """
    return a, b


def _made_once_forward(a: Array, b: Array) -> tuple[tuple[Array, Array], None]:
    return (a, b), None


def _made_once_backward(_: None, cotangents: tuple[Array, Array]) -> tuple[Array, Array]:
    return jax.lax.optimization_barrier(cotangents)


made_once.defvjp(_made_once_forward, _made_once_backward)
