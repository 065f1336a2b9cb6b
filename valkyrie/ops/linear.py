"""Matrix products with sharded parameters, and lookups in sharded tables.

A parameter is cast and gathered right before its use, forward and again backward. Its gradient is summed in the
reduction dtype and scattered back. A step does not save gathered copies for its backward pass, so fully sharded
parameters stay sharded in memory.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from valkyrie.axes import BATCH, SEQ, Axes, Shard
from valkyrie.ops.narrow import narrow_einsum
from valkyrie.precision import ACCUMULATOR_DTYPE, DType, PolicyConfig


class Numerics(NamedTuple):
    """Dtypes of a precision policy, stored as names such as `bfloat16`.

    Args:
        parameter: Dtype of stored parameters.
        compute: Dtype of the operands of matrix products.
        reduction: Dtype of gradient sums.
        product: Dtype of quantised operands (`valkyrie.ops.narrow`), or None to leave them in `compute`.
    """

    parameter: str
    compute: str
    reduction: str
    product: str | None = None

    @staticmethod
    def from_policy(policy: PolicyConfig) -> Numerics:
        """Return the dtypes that a precision config (`precision=`) selects."""
        narrow = None if policy.products is None else policy.products.value
        return Numerics(policy.parameter.value, policy.compute.value, policy.reduction.value, narrow)


FLOAT32 = Numerics(DType.float32.value, DType.float32.value, DType.float32.value)
"""Numerics with all dtypes float32, whatever the precision policy."""


def gather_in_float32(w: Float[Array, "..."], axes: Axes, shard: Shard) -> Float[Array, "..."]:
    """Cast a parameter to float32 and gather it. Its gradient is summed in float32. `axes` are its logical axes."""
    return shard.gather_for_use(shard.shard_for_storage(w, *axes).astype(jnp.float32), *axes)


def cast_and_gather(w: Float[Array, "..."], dtype: DTypeLike, axes: Axes, shard: Shard) -> Float[Array, "..."]:
    """Cast a parameter and gather it for products. `axes` are its logical axes."""
    cast = w.astype(dtype)
    if shard.shares_gathers:
        # Without this constraint, XLA for GPUs gathers before a cast whose result several products use.
        cast = shard.shard_for_storage(cast, *axes)
    return shard.gather_for_use(cast, *axes)


def linear(
    equation: str,
    x: Float[Array, "..."],
    w: Float[Array, "..."],
    *,
    axes: Axes,
    shard: Shard,
    numerics: Numerics,
    row_axes: tuple[str, str] = (BATCH, SEQ),
) -> Float[Array, "..."]:
    """Compute the einsum of an activation and a parameter, in the compute dtype.

    The parameter, with logical axes `axes`, is cast and then gathered over the mesh axes that split data
    (`shard.gather_for_use`). The backward pass gathers it again, unless `shard.shares_gathers`. The parameter's
    gradient is computed in the reduction dtype and sharded like the stored parameter, which is a reduce-scatter under a
    fully sharded partition.

    With `numerics.product`, `narrow_einsum` computes the result and the gradient of `x`, but not the gradient of `w`.

    Every index of `x` or `w` must appear in the other operand or in the result. `row_axes` are the logical axes of the
    first two dimensions of `x`.
    """
    operands, out = equation.split("->")
    x_indices, w_indices = operands.split(",")

    parameter_dtype = w.dtype
    shares_gather = shard.shares_gathers and numerics.product is None

    def gather(w: Array) -> Array:
        return w if numerics.product is not None else cast_and_gather(w, numerics.compute, axes, shard)

    def multiply(equation: str, x: Array, w: Array) -> Array:
        if numerics.product is None:
            return jnp.einsum(equation, x, w)
        return narrow_einsum(equation, x, w, numerics.product, lambda narrow: shard.gather_for_use(narrow, *axes))

    @jax.custom_vjp
    def product(x: Array, w: Array) -> Array:
        return multiply(equation, x, gather(w))

    # This repeats the body of `product` instead of calling it, so that remat policies that save products see it.
    def forward(x: Array, w: Array) -> tuple[Array, tuple[Array, Array]]:
        gathered = gather(w)
        return multiply(equation, x, gathered), (x, gathered if shares_gather else w)

    def weight_gradient(x: Array, g: Array) -> Array:
        return jnp.einsum(f"{x_indices},{out}->{w_indices}", x, g, preferred_element_type=jnp.dtype(numerics.reduction))

    def backward(residuals: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
        x, w = residuals
        dx = multiply(f"{out},{w_indices}->{x_indices}", g, w if shares_gather else gather(w))
        dtype = numerics.reduction
        dw = shard.compute_gradient(weight_gradient, (x, g), *axes, reduction_dtype=dtype, row_axes=row_axes)
        return dx.astype(x.dtype), dw.astype(parameter_dtype)

    product.defvjp(forward, backward)
    # A slice of a parameter has no sharding. Without this constraint, it would be saved in its gathered form.
    return product(x.astype(numerics.compute), shard.shard_for_storage(w, *axes))


def lookup(
    table: Float[Array, "vocab embed"], tokens: Int[Array, "*rows"], *, axes: Axes, shard: Shard, numerics: Numerics
) -> Float[Array, "*rows embed"]:
    """Return the rows of a table at `tokens`, in the compute dtype. `axes` are the logical axes of the table.

    Each device sums the gradient of a row over its uses in float32, for every reduction dtype. A frequent token has
    thousands of uses, and a bfloat16 sum of equal terms stops growing after 256 of them.
    """

    @jax.custom_vjp
    def take_rows(table: Array, tokens: Array) -> Array:
        return shard.gather_table(table.astype(numerics.compute), *axes)[tokens]

    def forward(table: Array, tokens: Array) -> tuple[Array, tuple[Array, Array]]:
        return take_rows(table, tokens), (table, tokens)

    def table_gradient(tokens: Array, g: Array) -> Array:
        return jnp.zeros(table.shape, ACCUMULATOR_DTYPE.value).at[tokens].add(g.astype(ACCUMULATOR_DTYPE.value))

    def backward(residuals: tuple[Array, Array], g: Array) -> tuple[Array, None]:
        table, tokens = residuals
        total = shard.compute_gradient(
            table_gradient, (tokens, g), *axes, reduction_dtype=numerics.reduction, full_gradient=True
        )
        return total.astype(table.dtype), None

    take_rows.defvjp(forward, backward)
    return take_rows(table, tokens)


@jax.custom_vjp
def compute_cotangents_once(a: Float[Array, "*shape"], b: Float[Array, "*shape"]) -> tuple[Float[Array, "*shape"], ...]:
    """Return both arrays unchanged. The backward pass computes both cotangents before any product uses them.

    Otherwise the compiler may recompute a gate's derivative inside each of the four products that need it. On TPU v5e
    this costs a tenth of a gated feed-forward's backward pass (compiler estimates, experiments/LOG.md).
    """
    return a, b


def _compute_cotangents_once_forward(a: Array, b: Array) -> tuple[tuple[Array, Array], None]:
    return (a, b), None


def _compute_cotangents_once_backward(_: None, cotangents: tuple[Array, Array]) -> tuple[Array, Array]:
    return jax.lax.optimization_barrier(cotangents)


compute_cotangents_once.defvjp(_compute_cotangents_once_forward, _compute_cotangents_once_backward)
