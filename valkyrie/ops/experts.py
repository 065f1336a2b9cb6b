"""The dispatch of tokens to experts and back (see `valkyrie.ops.routing` for the choice of experts)."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from valkyrie.axes import BATCH, EXPERTS, SEQ, InUse, Shard
from valkyrie.ops.capacity import count_rows
from valkyrie.ops.grouped import multiply_groups, multiply_rows_of_groups
from valkyrie.ops.linear import Numerics, cast_and_gather, gather_in_float32


def dispatch_mask(
    one_hot: Float[Array, "batch seq top_k experts"], capacity: int
) -> Bool[Array, "batch seq top_k experts capacity"]:
    """Return whether each assignment of a token is in each slot of each expert's buffer.

    Assignments to an expert fill its slots in the order of the sequence, so that none depends on later tokens. Those
    beyond its capacity are in no slot.
    """
    batch, seq, top_k, experts = one_hot.shape
    slots = jnp.cumsum(one_hot.reshape(batch, seq * top_k, experts), axis=1).reshape(one_hot.shape) - 1
    return (slots[..., None] == jnp.arange(capacity)) & (one_hot[..., None] > 0)


def dispatch_dense(
    x: Float[Array, "batch seq embed"], mask: Bool[Array, "batch seq top_k experts capacity"]
) -> Float[Array, "experts batch capacity embed"]:
    """Copy tokens into the buffers of their experts. Empty slots are zero."""
    return jnp.einsum("bsnc,bse->nbce", jnp.any(mask, axis=2).astype(x.dtype), x)


def weigh_dense(
    weights: Float[Array, "batch seq top_k"], mask: Bool[Array, "batch seq top_k experts capacity"]
) -> Float[Array, "experts batch capacity"]:
    """Return the router weight of each slot, in float32. It is 0 for empty slots."""
    return jnp.sum(jnp.where(mask, weights[..., None, None], 0), axis=(1, 2)).swapaxes(0, 1)


def combine_dense(
    outputs: Float[Array, "experts batch capacity embed"], mask: Bool[Array, "batch seq top_k experts capacity"]
) -> Float[Array, "batch seq embed"]:
    """Return the sum of the outputs of each token's experts, in the dtype of `outputs`.

    Dropped assignments add nothing.
    """
    return jnp.einsum("bsnc,nbce->bse", jnp.any(mask, axis=2).astype(outputs.dtype), outputs)


class SortedRows(NamedTuple):
    """Assignments of the tokens on a device to experts, sorted by expert.

    With expert parallelism, these are the assignments of all tokens in the device's group to its own experts, followed
    by some to the experts of other devices, which no group contains: there are as many rows as if each token used the
    device's experts as often as it can. Arrays are concatenated over devices (`ROWS`).

    Args:
        order: For each row, the index of its assignment, numbered by token and then by choice.
        inverse: For each assignment, its row. Those to the experts of other devices may have none.
        is_local: Whether an assignment is to one of the device's experts.
        group_sizes: Number of rows of each of the device's experts, which are the first rows.
    """

    order: Int[Array, " rows"]
    inverse: Int[Array, " assignments"]
    is_local: Bool[Array, " assignments"]
    group_sizes: Int[Array, "shards local_experts"]


ROWS = (BATCH, SEQ, InUse(EXPERTS))
"""Logical axes of a dimension with rows of `SortedRows`, concatenated over devices."""


def sort_assignments(experts: Int[Array, "batch seq top_k"], count: int, shard: Shard) -> SortedRows:
    """Sort the assignments of tokens to `count` experts by expert, on each device."""
    gathered_axes, expert_axes = token_expert_axes(shard), shard.activation_mesh_axes(InUse(EXPERTS))
    shards = shard.shard_count(InUse(EXPERTS))
    local_count = count // shards

    def sort(experts: Array) -> list[Array]:
        assigned = gather_over(gathered_axes, experts.reshape(-1))
        if expert_axes:
            assigned = assigned - local_count * jax.lax.axis_index(expert_axes)
        is_local = (assigned >= 0) & (assigned < local_count)
        assigned = jnp.where(is_local, assigned, local_count)
        order = jnp.argsort(assigned, stable=True)
        group_sizes = jnp.sum(assigned[:, None] == jnp.arange(local_count), axis=0, dtype=jnp.int32)
        top_k = experts.shape[-1]
        rows = count_rows(len(assigned) // top_k, top_k, count, shards)
        return [order[:rows], jnp.argsort(order), is_local, group_sizes[None]]

    out_axes = [(ROWS,), (ROWS,), (ROWS,), (ROWS, None)]
    return SortedRows(*shard.map(sort, ((BATCH, SEQ, None),), out_axes, check_vma=True)(experts))


def dispatch_sorted(
    x: Float[Array, "batch seq embed"], rows: SortedRows, top_k: int, axis: InUse, shard: Shard
) -> Float[Array, "rows embed"]:
    """Return the token of each row. `axis` is the logical axis of its channels.

    With expert parallelism, devices first gather the tokens of their group.
    """
    gathered_axes, other_axes = token_expert_axes(shard), other_expert_axes(shard)

    def take(x: Array, order: Array, inverse: Array, is_local: Array) -> Array:
        tokens = gather_over(gathered_axes, x.reshape(-1, x.shape[-1]))
        if other_axes:
            tokens = jax.lax.pcast(tokens, other_axes, to="varying")
        return take_tokens(tokens, order, inverse, is_local, top_k)

    in_axes = ((BATCH, SEQ, axis), (ROWS,), (ROWS,), (ROWS,))
    return shard.map(take, in_axes, (ROWS, axis), check_vma=True)(x, rows.order, rows.inverse, rows.is_local)


def weigh_sorted(weights: Float[Array, "batch seq top_k"], rows: SortedRows, shard: Shard) -> Float[Array, " rows"]:
    """Return the router weight of each row, 0 for those of other devices' experts."""
    gathered_axes, other_axes = token_expert_axes(shard), other_expert_axes(shard)

    def weigh(weights: Array, order: Array, inverse: Array, is_local: Array) -> Array:
        gathered = gather_over(gathered_axes, weights.reshape(-1))
        if other_axes:
            gathered = jax.lax.pcast(gathered, other_axes, to="varying")
        return permute_numbers(jnp.where(is_local, gathered, 0), inverse)[: len(order)]

    in_axes = ((BATCH, SEQ, None), (ROWS,), (ROWS,), (ROWS,))
    return shard.map(weigh, in_axes, (ROWS,), check_vma=True)(weights, rows.order, rows.inverse, rows.is_local)


def combine_sorted(
    outputs: Float[Array, "rows embed"],
    rows: SortedRows,
    experts: Int[Array, "batch seq top_k"],
    axis: InUse,
    shard: Shard,
) -> Float[Array, "batch seq embed"]:
    """Return the sum of the outputs of each token's experts, in the dtype of `outputs`.

    `axis` is the logical axis of their channels. With expert parallelism, devices add the sums of their group.
    """
    gathered_axes, other_axes = token_expert_axes(shard), other_expert_axes(shard)

    def combine(outputs: Array, order: Array, inverse: Array, is_local: Array, experts: Array) -> Array:
        batch, seq, top_k = experts.shape
        y: Array = add_to_tokens(outputs, order, inverse, is_local, top_k)
        y = (jax.lax.psum(y, other_axes) if other_axes else y).astype(outputs.dtype)
        return scatter_sums(gathered_axes, y).reshape(batch, seq, -1)

    in_axes = ((ROWS, axis), (ROWS,), (ROWS,), (ROWS,), (BATCH, SEQ, None))
    combined = shard.map(combine, in_axes, (BATCH, SEQ, axis), check_vma=True)
    return combined(outputs, rows.order, rows.inverse, rows.is_local, experts)


def grouped_linear(
    x: Float[Array, "rows inputs"],
    w: Float[Array, "experts first second"],
    group_sizes: Int[Array, "shards local_experts"],
    *,
    axes: tuple[str, str, str],
    output_first: bool,
    shard: Shard,
    numerics: Numerics,
    routed_share: float,
) -> Float[Array, "rows outputs"]:
    """Multiply each group of rows by the matrix of its expert, in the compute dtype.

    Like `linear`, gathers the parameter right before its use, and computes its gradient in the reduction dtype. Rows of
    no group are undefined.

    Args:
        x: Rows sorted by expert, concatenated over devices (`ROWS`).
        w: The parameter, with logical axes `axes`.
        group_sizes: Number of rows of each expert on each device.
        axes: Logical axes of the parameter.
        output_first: Whether matrices have shape (outputs, inputs) instead of (inputs, outputs).
        shard: Places arrays on the mesh.
        numerics: Dtypes. Quantised products (`numerics.product`) are not supported and computed in the compute dtype.
        routed_share: See `multiply_groups`.
    """
    experts, *matrix_axes = (InUse(axis) for axis in axes)
    inputs, outputs = reversed(matrix_axes) if output_first else matrix_axes
    backend, parameter_dtype = shard.backend, w.dtype

    def gather(w: Array) -> Array:
        return cast_and_gather(w, numerics.compute, axes, shard)

    def multiply(x: Array, w: Array, sizes: Array, x_axis: InUse, y_axis: InUse, transpose: bool) -> Array:
        summed_axes = shard.activation_mesh_axes(x_axis, all_sizes=True)

        def local(x: Array, w: Array, sizes: Array) -> Array:
            matrices = w.swapaxes(1, 2) if transpose else w
            y = multiply_groups(x, matrices, sizes[0], backend, routed_share=routed_share)
            return jax.lax.psum(y, summed_axes) if summed_axes else y

        in_axes = ((ROWS, x_axis), (experts, *matrix_axes), (ROWS, None))
        return shard.map(local, in_axes, (ROWS, y_axis), check_vma=True)(x, w, sizes)

    def partial_weight_gradient(x: Array, g: Array, sizes: Array) -> Array:
        def local(x: Array, g: Array, sizes: Array) -> Array:
            factors = (g, x) if output_first else (x, g)
            dtype = numerics.reduction
            return multiply_rows_of_groups(*factors, sizes[0], dtype, backend, routed_share=routed_share)[None, None]

        in_axes = ((ROWS, inputs), (ROWS, outputs), (ROWS, None))
        return shard.map(local, in_axes, (BATCH, SEQ, experts, *matrix_axes))(x, g, sizes)

    @jax.custom_vjp
    def product(x: Array, w: Array, sizes: Array) -> Array:
        return multiply(x, gather(w), sizes, inputs, outputs, output_first)

    def forward(x: Array, w: Array, sizes: Array) -> tuple[Array, tuple[Array, Array, Array]]:
        gathered = gather(w)
        y = multiply(x, gathered, sizes, inputs, outputs, output_first)
        return y, (x, gathered if shard.shares_gathers else w, sizes)

    def backward(residuals: tuple[Array, Array, Array], g: Array) -> tuple[Array, Array, None]:
        x, w, sizes = residuals
        matrices = w if shard.shares_gathers else gather(w)
        dx = multiply(g, matrices, sizes, outputs, inputs, not output_first)
        dw = shard.compute_gradient(
            # Unlike `jnp.sum`, this does not convert to float32, so devices exchange the reduction dtype.
            lambda parts: jax.lax.reduce(parts, np.zeros((), parts.dtype), jax.lax.add, (0, 1)),
            (partial_weight_gradient(x, g, sizes),),
            *axes,
            reduction_dtype=numerics.reduction,
        )
        return dx.astype(x.dtype), dw.astype(parameter_dtype), None

    product.defvjp(forward, backward)
    return product(x.astype(numerics.compute), shard.shard_for_storage(w, *axes), group_sizes)


def add_grouped_bias(
    x: Float[Array, "rows channels"],
    bias: Float[Array, "experts channels"],
    group_sizes: Int[Array, "shards local_experts"],
    *,
    axes: tuple[str, str],
    shard: Shard,
    weights: Float[Array, " rows"] | None = None,
) -> Float[Array, "rows channels"]:
    """Add the bias of its expert to each row, in x's dtype. The addition is done in float32.

    Multiplies a one-hot matrix by the biases, because the gradient of a gather is a scatter-add. Rows of no group stay
    unchanged.

    Args:
        x: Rows sorted by expert, concatenated over devices (`ROWS`).
        bias: The parameter, with logical axes `axes`.
        group_sizes: Number of rows of each expert on each device.
        axes: Logical axes of the parameter.
        shard: Places arrays on the mesh.
        weights: A factor of the bias for each row, or None for 1.
    """
    experts, channels = (InUse(axis) for axis in axes)

    def add(x: Array, bias: Array, sizes: Array, *weights: Array) -> Array:
        ends, rows = jnp.cumsum(sizes[0]), jnp.arange(x.shape[0])[:, None]
        is_in_group = (rows < ends) & (rows >= ends - sizes[0])
        row_bias = jnp.dot(is_in_group.astype(jnp.float32), bias, precision=jax.lax.Precision.HIGHEST)
        row_bias = jnp.where(rows < ends[-1], row_bias, 0)  # other rows, and their gradients, may be NaN
        for row_weights in weights:
            row_bias = row_bias * row_weights[:, None]
        return (x.astype(jnp.float32) + row_bias).astype(x.dtype)

    bias_f32 = gather_in_float32(bias, axes, shard)
    factors = () if weights is None else (weights,)
    in_axes = ((ROWS, channels), (experts, channels), (ROWS, None), *((ROWS,) for _ in factors))
    return shard.map(add, in_axes, (ROWS, channels), check_vma=True)(x, bias_f32, group_sizes, *factors)


def token_expert_axes(shard: Shard) -> tuple[str, ...]:
    """Return the mesh axes along which devices have different tokens and different experts."""
    token_axes = {*shard.activation_mesh_axes(BATCH), *shard.activation_mesh_axes(SEQ)}
    return tuple(m for m in shard.activation_mesh_axes(InUse(EXPERTS)) if m in token_axes)


def other_expert_axes(shard: Shard) -> tuple[str, ...]:
    """Return the mesh axes along which devices have the same tokens and different experts."""
    token_axes = {m for axis in (BATCH, SEQ) for m in shard.activation_mesh_axes(axis, all_sizes=True)}
    return tuple(m for m in shard.activation_mesh_axes(InUse(EXPERTS), all_sizes=True) if m not in token_axes)


def gather_over(mesh_axes: tuple[str, ...], x: Shaped[Array, "n ..."]) -> Shaped[Array, "gathered ..."]:
    """Concatenate the arrays of all devices along some mesh axes."""
    return jax.lax.all_gather(x, mesh_axes, tiled=True) if mesh_axes else x


def scatter_sums(mesh_axes: tuple[str, ...], x: Float[Array, "gathered ..."]) -> Float[Array, "n ..."]:
    """Sum arrays over some mesh axes, and return the part of this device. The transpose of `gather_over`."""
    return jax.lax.psum_scatter(x, mesh_axes, scatter_dimension=0, tiled=True) if mesh_axes else x


def sum_over_devices(counts: Float[Array, " batch"], shard: Shard) -> Float[Array, " batch"]:
    """Sum counts per sequence over the devices with other positions of it, and over those with other experts."""
    axes = (*shard.activation_mesh_axes(SEQ), *other_expert_axes(shard))
    return jax.lax.psum(counts, axes) if axes else counts


def scale_rows(x: Float[Array, "*rows channels"], weights: Float[Array, "*rows"]) -> Float[Array, "*rows channels"]:
    """Multiply rows by their router weights in float32, and return them in x's dtype."""
    return (x.astype(jnp.float32) * weights[..., None]).astype(x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def take_tokens(
    tokens: Float[Array, "tokens embed"],
    order: Int[Array, " rows"],
    inverse: Int[Array, " assignments"],
    is_local: Bool[Array, " assignments"],
    top_k: int,
) -> Float[Array, "rows embed"]:
    """Return the token of each row. Its gradient gathers by the inverse permutation, instead of a scatter-add."""
    return tokens[order // top_k]


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def add_to_tokens(
    rows: Float[Array, "rows embed"],
    order: Int[Array, " rows"],
    inverse: Int[Array, " assignments"],
    is_local: Bool[Array, " assignments"],
    top_k: int,
) -> Float[Array, "tokens embed"]:
    """Return the sum of the rows of each token's local assignments, in float32. The transpose of `take_tokens`."""
    # Choices come first, because a TPU pads the second to last dimension to a multiple of 8.
    inverse, is_local = (array.reshape(-1, top_k).T for array in (inverse, is_local))
    assignments = rows[inverse.reshape(-1)].reshape(top_k, -1, rows.shape[-1])
    return jnp.sum(jnp.where(is_local[..., None], assignments, 0), axis=0, dtype=jnp.float32)


def _take_tokens_backward(
    top_k: int, permutation: tuple[Array, Array, Array], g: Array
) -> tuple[Array, None, None, None]:
    sums: Array = add_to_tokens(g, *permutation, top_k)
    return sums.astype(g.dtype), None, None, None


def _add_to_tokens_forward(
    rows: Array, order: Array, inverse: Array, is_local: Array, top_k: int
) -> tuple[Array, tuple[Array, Array, Array, Array]]:
    # The empty array passes the dtype. It does not depend on the rows, which are not needed then.
    residuals = order, inverse, is_local, jnp.zeros(0, rows.dtype)
    return add_to_tokens(rows, order, inverse, is_local, top_k), residuals


def _add_to_tokens_backward(
    top_k: int, residuals: tuple[Array, Array, Array, Array], g: Array
) -> tuple[Array, None, None, None]:
    *permutation, empty = residuals
    return take_tokens(g.astype(empty.dtype), *permutation, top_k), None, None, None


take_tokens.defvjp(
    lambda tokens, *permutation: (take_tokens(tokens, *permutation), permutation[:3]), _take_tokens_backward
)
add_to_tokens.defvjp(_add_to_tokens_forward, _add_to_tokens_backward)


@jax.custom_vjp
def permute_rows(
    x: Float[Array, "rows embed"], order: Int[Array, " results"], inverse: Int[Array, " rows"]
) -> Float[Array, "results embed"]:
    """Return `x[order]`. Its gradient gathers by the inverse permutation, instead of a scatter-add."""
    return x[order]


permute_rows.defvjp(lambda x, order, inverse: (x[order], inverse), lambda inverse, g: (g[inverse], None, None))


@jax.custom_vjp
def permute_numbers(numbers: Float[Array, " n"], positions: Int[Array, " n"]) -> Float[Array, " n"]:
    """Move each number to its position. A TPU sorts numbers much faster than it gathers them by index."""
    return jax.lax.sort_key_val(positions, numbers)[1]


permute_numbers.defvjp(
    lambda numbers, positions: (permute_numbers(numbers, positions), positions),
    lambda positions, g: (permute_numbers(g, jnp.argsort(positions)), None),
)
