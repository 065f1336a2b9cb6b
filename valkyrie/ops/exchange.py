"""Dispatch of tokens to experts by ragged all-to-alls: each device sends a token only to the devices of its experts.

Devices sort their assignments of tokens to experts by device and expert, send the rows, and sort those that they
receive by expert. The buffer of received rows has room for the assignments of all tokens to one device, or for
`capacity_factor` times the mean load. Then senders drop what a receiver cannot hold (`valkyrie.ops.capacity`): every
device knows how many rows each one sends to each expert.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata
from jaxtyping import Array, Bool, Float, Int

from valkyrie.axes import BATCH, EXPERTS, ROUTED_SHARE, SEQ, InUse, Shard
from valkyrie.hardware.platforms import get_platform
from valkyrie.ops.capacity import count_rows, is_limited, limit_counts, move_dropped_rows, rows_after_dropping
from valkyrie.ops.experts import (
    ROWS,
    add_to_tokens,
    other_expert_axes,
    permute_numbers,
    permute_rows,
    sum_over_devices,
    take_tokens,
    token_expert_axes,
)
from valkyrie.ops.grouped import vary_like


class ExchangedRows(NamedTuple):
    """Assignments of a device's tokens to experts, and the rows that it receives. Arrays are concatenated over devices.

    Args:
        order: For each sent row, the index of its assignment, numbered by token and then by choice.
        inverse: For each assignment, its row. Those that are not sent may have none.
        is_sent: Whether an assignment is to an expert of the devices that this one exchanges rows with, and not
            dropped.
        received_order: For each row of the device's experts, its index among the received rows.
        received_inverse: For each received row, its row.
        sizes: Rows that each device of the group sends to each.
        group_sizes: Number of rows of each of the device's experts, which are the first rows.
    """

    order: Int[Array, " assignments"]
    inverse: Int[Array, " assignments"]
    is_sent: Bool[Array, " assignments"]
    received_order: Int[Array, " rows"]
    received_inverse: Int[Array, " rows"]
    sizes: Int[Array, "shards senders receivers"]
    group_sizes: Int[Array, "shards local_experts"]


_PLAN_AXES = ((ROWS,), (ROWS,), (ROWS,), (ROWS,), (ROWS,), (ROWS, None, None), (ROWS, None))
"""Logical axes of the arrays of `ExchangedRows`."""


def plan_exchange(
    experts: Int[Array, "batch seq top_k"], count: int, capacity_factor: float | None, shard: Shard
) -> tuple[ExchangedRows, Float[Array, " batch"] | None]:
    """Plan the exchange of rows of `count` experts between the devices that split both experts and tokens.

    `capacity_factor` limits the received rows (`count_rows`). Also returns the number of assignments of each sequence
    that are not dropped, or None if none is dropped.
    """
    axes, expert_axes = token_expert_axes(shard), shard.activation_mesh_axes(InUse(EXPERTS))
    shards = shard.shard_count(InUse(EXPERTS))
    local_count = count // shards
    drops = is_limited(experts.shape[-1], count, shards, capacity_factor)

    def plan(experts: Array) -> list[Array]:
        members, top_k = jax.lax.axis_size(axes), experts.shape[-1]
        owner, receiver, is_sent = experts.reshape(-1) // local_count, 0, True
        for axis in reversed(expert_axes):  # the first axis is the most significant
            coordinate, owner = owner % jax.lax.axis_size(axis), owner // jax.lax.axis_size(axis)
            if axis in axes:
                later_axes = axes[axes.index(axis) + 1 :]
                receiver = receiver + coordinate * (jax.lax.axis_size(later_axes) if later_axes else 1)
            else:
                is_sent = is_sent & (coordinate == jax.lax.axis_index(axis))
        keys = jnp.where(is_sent, receiver * local_count + experts.reshape(-1) % local_count, members * local_count)
        order, is_sent = jnp.argsort(keys, stable=True), jnp.broadcast_to(is_sent, keys.shape)
        inverse = jnp.argsort(order)
        sent = jnp.sum(keys[:, None] == jnp.arange(members * local_count), axis=0, dtype=jnp.int32)
        counts = jax.lax.all_gather(sent, axes).reshape(members, members, local_count)
        row_count = count_rows(members * (len(keys) // top_k), top_k, count, shards, capacity_factor)
        kept_counts = jax.vmap(partial(limit_counts, rows=row_count), 1, 1)(counts) if drops else counts
        if drops:
            kept = kept_counts[jax.lax.axis_index(axes)].reshape(-1)
            order = move_dropped_rows(order, sent, kept)
            inverse, is_kept = rows_after_dropping(inverse, sent, kept)
            is_sent = is_sent & is_kept
        received = kept_counts[:, jax.lax.axis_index(axes)].reshape(-1)
        # Received rows are ordered by sender, then by expert. Those of the last group are empty.
        groups = jnp.sum(jnp.arange(row_count)[:, None] >= jnp.cumsum(received), axis=1)
        experts_of_rows = jnp.where(groups < len(received), groups % local_count, local_count)
        received_order = jnp.argsort(experts_of_rows, stable=True)
        group_sizes = received.reshape(members, local_count).sum(0)
        permutations = [order, inverse, is_sent, received_order, jnp.argsort(received_order)]
        arrays = [*permutations, kept_counts.sum(-1)[None], group_sizes[None]]
        kept_rows = jnp.sum(is_sent.reshape(experts.shape), axis=(1, 2), dtype=jnp.float32)
        return [*arrays, sum_over_devices(kept_rows, shard)] if drops else arrays

    out_axes = [*_PLAN_AXES, (BATCH,)] if drops else [*_PLAN_AXES]
    arrays = shard.map(plan, ((BATCH, SEQ, None),), out_axes, check_vma=True)(experts)
    return ExchangedRows(*arrays[: len(_PLAN_AXES)]), arrays[-1] if drops else None


def dispatch_exchanged(
    x: Float[Array, "batch seq embed"], rows: ExchangedRows, top_k: int, axis: InUse, shard: Shard
) -> Float[Array, "rows embed"]:
    """Send each token to the devices of its experts, and return the received rows, sorted by expert.

    `axis` is the logical axis of their channels.
    """
    axes, other_axes = token_expert_axes(shard), other_expert_axes(shard)

    def dispatch(x: Array, *arrays: Array) -> Array:
        order, inverse, is_sent, received_order, received_inverse, sizes, _ = arrays
        transfer = _Transfer(axes, shard.backend, len(order) / (jax.lax.axis_size(other_axes) if other_axes else 1))
        tokens = x.reshape(-1, x.shape[-1])
        if other_axes:
            tokens = jax.lax.pcast(tokens, other_axes, to="varying")
        sent = take_tokens(tokens, order, inverse, is_sent, top_k)
        return permute_rows(_exchange(transfer, len(received_order), sent, sizes[0]), received_order, received_inverse)

    return shard.map(dispatch, ((BATCH, SEQ, axis), *_PLAN_AXES), (ROWS, axis), check_vma=True)(x, *rows)


def weigh_exchanged(
    weights: Float[Array, "batch seq top_k"], rows: ExchangedRows, shard: Shard
) -> Float[Array, " rows"]:
    """Send router weights like the tokens, and return that of each received row."""
    axes, other_axes = token_expert_axes(shard), other_expert_axes(shard)

    def weigh(weights: Array, *arrays: Array) -> Array:
        order, _, is_sent, received_order, received_inverse, sizes, _ = arrays
        transfer = _Transfer(axes, shard.backend, len(order) / (jax.lax.axis_size(other_axes) if other_axes else 1))
        weights = weights.reshape(-1)
        if other_axes:
            weights = jax.lax.pcast(weights, other_axes, to="varying")
        sent = permute_numbers(jnp.where(is_sent, weights, 0), jnp.argsort(order))
        received: Array = _exchange(transfer, len(received_order), sent[:, None], sizes[0])
        return permute_numbers(received[:, 0], received_inverse)

    return shard.map(weigh, ((BATCH, SEQ, None), *_PLAN_AXES), (ROWS,), check_vma=True)(weights, *rows)


def combine_exchanged(
    outputs: Float[Array, "rows embed"],
    rows: ExchangedRows,
    experts: Int[Array, "batch seq top_k"],
    axis: InUse,
    shard: Shard,
) -> Float[Array, "batch seq embed"]:
    """Send outputs back, and return the sum of those of each token's experts, in the dtype of `outputs`."""
    axes, other_axes = token_expert_axes(shard), other_expert_axes(shard)

    def combine(outputs: Array, experts: Array, *arrays: Array) -> Array:
        order, inverse, is_sent, received_order, received_inverse, sizes, _ = arrays
        transfer = _Transfer(axes, shard.backend, len(order) / (jax.lax.axis_size(other_axes) if other_axes else 1))
        received = permute_rows(outputs, received_inverse, received_order)
        returned = _exchange(transfer, len(order), received, sizes[0].T)
        y: Array = add_to_tokens(returned, order, inverse, is_sent, experts.shape[-1])
        y = jax.lax.psum(y, other_axes) if other_axes else y
        return y.astype(outputs.dtype).reshape(*experts.shape[:2], -1)

    in_axes = ((ROWS, axis), (BATCH, SEQ, None), *_PLAN_AXES)
    return shard.map(combine, in_axes, (BATCH, SEQ, axis), check_vma=True)(outputs, experts, *rows)


class _Transfer(NamedTuple):
    """Mesh axes and platform of an exchange, and the rows that a device sends and receives if routing is balanced."""

    axes: tuple[str, ...]
    backend: str | None
    mean_rows: float


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _exchange(
    transfer: _Transfer, count: int, x: Float[Array, "rows embed"], sizes: Int[Array, "n n"]
) -> Float[Array, "count embed"]:
    """Send `sizes[i, j]` rows from each device i to each device j. They are ordered by receiver, then by sender.

    Its gradient sends rows back. CPUs have no ragged all-to-all: they gather all rows instead.
    """
    axes, backend, mean_rows = transfer
    me = jax.lax.axis_index(axes)
    sent_starts, received_starts = jnp.cumsum(sizes, 1) - sizes, jnp.cumsum(sizes, 0) - sizes
    if not get_platform(jax.default_backend() if backend is None else backend).runs_on_host:
        output = vary_like(jnp.zeros((count, x.shape[1]), x.dtype), x, sizes)
        offsets = sent_starts[me], sizes[me], received_starts[me], sizes[:, me]
        with set_xla_metadata(**{ROUTED_SHARE: f"{min(mean_rows / len(x), 1):.6g}"}):
            return jax.lax.ragged_all_to_all(x, output, *offsets, axis_name=axes)
    rows = jnp.arange(count)
    sender = jnp.minimum(jnp.sum(rows[:, None] >= jnp.cumsum(sizes[:, me]), axis=1), len(sizes) - 1)
    sent_row = sent_starts[sender, me] + rows - received_starts[sender, me]
    received = jax.lax.all_gather(x, axes)[sender, jnp.minimum(sent_row, len(x) - 1)]
    return jnp.where((rows < sizes[:, me].sum())[:, None], received, 0)


def _exchange_forward(transfer: _Transfer, count: int, x: Array, sizes: Array) -> tuple[Array, tuple[int, Array]]:
    return _exchange(transfer, count, x, sizes), (len(x), sizes)


def _exchange_backward(transfer: _Transfer, count: int, residuals: tuple[int, Array], g: Array) -> tuple[Array, None]:
    sent_count, sizes = residuals
    return _exchange(transfer, sent_count, g, sizes.T), None


_exchange.defvjp(_exchange_forward, _exchange_backward)
