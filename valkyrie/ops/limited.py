"""Dispatch of tokens to sorted rows in a buffer that cannot hold all of them (`valkyrie.ops.capacity`).

`dispatch_sorted` and `combine_sorted` gather a row for every assignment of all tokens of a group of devices. This works
on the rows of the buffer alone, and adds them to their tokens by index.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from valkyrie.axes import BATCH, EXPERTS, SEQ, InUse, Shard
from valkyrie.ops.capacity import count_rows, limit_counts, move_dropped_rows
from valkyrie.ops.experts import (
    ROWS,
    gather_over,
    other_expert_axes,
    permute_numbers,
    scatter_sums,
    sum_over_devices,
    token_expert_axes,
)
from valkyrie.ops.grouped import vary_like


class LimitedRows(NamedTuple):
    """The assignments to a device's experts that its buffer holds, sorted by expert. Concatenated over devices.

    Args:
        order: For each row, the index of its assignment, numbered by token of the device's group and then by choice.
        permutation: `order`, followed by the indices of all other assignments.
        group_sizes: Number of rows of each of the device's experts, which are the first rows.
    """

    order: Int[Array, " rows"]
    permutation: Int[Array, " assignments"]
    group_sizes: Int[Array, "shards local_experts"]


def plan_limited(
    experts: Int[Array, "batch seq top_k"], count: int, capacity_factor: float | None, shard: Shard
) -> tuple[LimitedRows, Float[Array, " batch"]]:
    """Sort the assignments of tokens to `count` experts by expert, and drop those beyond the buffer of `count_rows`.

    Also returns the number of assignments of each sequence that are not dropped.
    """
    gathered_axes, expert_axes = token_expert_axes(shard), shard.activation_mesh_axes(InUse(EXPERTS))
    shards = shard.shard_count(InUse(EXPERTS))
    local_count = count // shards

    def plan(experts: Array) -> list[Array]:
        _, seq, top_k = experts.shape
        assigned = gather_over(gathered_axes, experts.reshape(-1))
        if expert_axes:
            assigned = assigned - local_count * jax.lax.axis_index(expert_axes)
        assigned = jnp.where((assigned >= 0) & (assigned < local_count), assigned, local_count)
        order = jnp.argsort(assigned, stable=True)
        by_sender = assigned.reshape(-1, experts.size, 1)
        counts = jnp.sum(by_sender == jnp.arange(local_count), axis=1, dtype=jnp.int32)
        row_count = count_rows(len(assigned) // top_k, top_k, count, shards, capacity_factor)
        kept = limit_counts(counts, row_count)
        permutation = move_dropped_rows(order, counts.T.reshape(-1), kept.T.reshape(-1))
        order, group_sizes = permutation[:row_count], kept.sum(0)
        sequences = jnp.where(jnp.arange(row_count) < group_sizes.sum(), order // (top_k * seq), -1)
        kept = jnp.sum(sequences[:, None] == jnp.arange(len(assigned) // (top_k * seq)), axis=0, dtype=jnp.float32)
        kept = sum_over_devices(scatter_sums(gathered_axes, kept), shard)
        return [order, permutation, group_sizes[None], kept]

    out_axes = [(ROWS,), (ROWS,), (ROWS, None), (BATCH,)]
    *arrays, kept = shard.map(plan, ((BATCH, SEQ, None),), out_axes, check_vma=True)(experts)
    return LimitedRows(*arrays), kept


def dispatch_limited(
    x: Float[Array, "batch seq embed"], rows: LimitedRows, top_k: int, axis: InUse, shard: Shard
) -> Float[Array, "rows embed"]:
    """Return the token of each row. `axis` is the logical axis of its channels."""
    gathered_axes, other_axes = token_expert_axes(shard), other_expert_axes(shard)

    def take(x: Array, order: Array, sizes: Array) -> Array:
        tokens = gather_over(gathered_axes, x.reshape(-1, x.shape[-1]))
        if other_axes:
            tokens = jax.lax.pcast(tokens, other_axes, to="varying")
        return _take(tokens, order // top_k, jnp.arange(len(order)) < sizes.sum())

    in_axes = ((BATCH, SEQ, axis), (ROWS,), (ROWS, None))
    return shard.map(take, in_axes, (ROWS, axis), check_vma=True)(x, rows.order, rows.group_sizes)


def weigh_limited(weights: Float[Array, "batch seq top_k"], rows: LimitedRows, shard: Shard) -> Float[Array, " rows"]:
    """Return the router weight of each row. It is 0 for unused ones."""
    gathered_axes, other_axes = token_expert_axes(shard), other_expert_axes(shard)

    def weigh(weights: Array, order: Array, permutation: Array, sizes: Array) -> Array:
        weights = gather_over(gathered_axes, weights.reshape(-1))
        if other_axes:
            weights = jax.lax.pcast(weights, other_axes, to="varying")
        row_weights = permute_numbers(weights, jnp.argsort(permutation))[: len(order)]
        return jnp.where(jnp.arange(len(order)) < sizes.sum(), row_weights, 0)

    in_axes = ((BATCH, SEQ, None), (ROWS,), (ROWS,), (ROWS, None))
    return shard.map(weigh, in_axes, (ROWS,), check_vma=True)(weights, *rows)


def combine_limited(
    outputs: Float[Array, "rows embed"],
    rows: LimitedRows,
    experts: Int[Array, "batch seq top_k"],
    axis: InUse,
    shard: Shard,
) -> Float[Array, "batch seq embed"]:
    """Return the sum of the outputs of each token's experts, in the dtype of `outputs`.

    `axis` is the logical axis of their channels. Dropped assignments add nothing.
    """
    gathered_axes, other_axes = token_expert_axes(shard), other_expert_axes(shard)

    def combine(outputs: Array, order: Array, sizes: Array, experts: Array) -> Array:
        batch, seq, top_k = experts.shape
        tokens = batch * seq * (jax.lax.axis_size(gathered_axes) if gathered_axes else 1)
        is_used = jnp.arange(len(order)) < sizes.sum()
        y = _add_to_tokens(jnp.where(is_used[:, None], outputs, 0), order // top_k, tokens)
        y = (jax.lax.psum(y, other_axes) if other_axes else y).astype(outputs.dtype)
        return scatter_sums(gathered_axes, y).reshape(batch, seq, -1)

    in_axes = ((ROWS, axis), (ROWS,), (ROWS, None), (BATCH, SEQ, None))
    combined = shard.map(combine, in_axes, (BATCH, SEQ, axis), check_vma=True)
    return combined(outputs, rows.order, rows.group_sizes, experts)


@jax.custom_vjp
def _take(
    tokens: Float[Array, "tokens embed"], numbers: Int[Array, " rows"], is_used: Bool[Array, " rows"]
) -> Float[Array, "rows embed"]:
    """Return the token of each row. Its gradient is summed in float32, and leaves out unused rows, which may be NaN."""
    return tokens[numbers]


def _take_forward(tokens: Array, numbers: Array, is_used: Array) -> tuple[Array, tuple[int, Array, Array]]:
    return tokens[numbers], (len(tokens), numbers, is_used)


def _take_backward(residuals: tuple[int, Array, Array], g: Array) -> tuple[Array, None, None]:
    count, numbers, is_used = residuals
    return _add_to_tokens(jnp.where(is_used[:, None], g, 0), numbers, count).astype(g.dtype), None, None


_take.defvjp(_take_forward, _take_backward)


def _add_to_tokens(
    values: Float[Array, "rows embed"], numbers: Int[Array, " rows"], count: int
) -> Float[Array, "count embed"]:
    """Return the sum of the rows of each of `count` tokens, in float32."""
    sums = vary_like(jnp.zeros((count, values.shape[1]), jnp.float32), values, numbers)
    return sums.at[numbers].add(values.astype(jnp.float32))
