"""Products of groups of rows on GPUs: the tiles of `valkyrie.ops.grouped` as Triton kernels (JAX's Pallas).

XLA has no kernel for them on NVIDIA GPUs that is on by default (jaxlib 0.10.2 to 0.12.0). A Triton kernel of this kind
was 5.2 times as fast on an H100 as `jax.lax.ragged_dot` (marin-community/marin#4297).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

WIDTH = 128
"""Rows and columns of a block of the result of a sum, and columns of one of a product."""

DEPTH_BYTES = 128
"""Bytes of a row of a block that one step of the inner loop multiplies."""

_PARAMETERS = triton.CompilerParams(num_warps=8, num_stages=3)


def multiply_tiles(
    x: Float[Array, "rows inputs"],
    w: Float[Array, "groups inputs outputs"],
    start: Int[Array, " steps"],
    group: Int[Array, " steps"],
    first: Int[Array, " steps"],
    end: Int[Array, " steps"],
    *,
    tile: int,
    interpret: bool = False,
) -> Float[Array, "rows outputs"]:
    """Multiply rows `first` to `end` of each step's tile by the matrix of its group.

    Args:
        x: Rows, sorted by group.
        w: The matrix of each group.
        start: First row of each step's tile.
        group: Group of each step.
        first: First row that each step multiplies.
        end: One more than the last row that each step multiplies. A step with `end <= first` computes nothing.
        tile: Rows of a tile, a power of two of at least 16.
        interpret: Run the kernel's operations one by one, on any platform.

    Returns:
        The products. Rows that no step multiplies are undefined.
    """
    outputs, depth = w.shape[2], DEPTH_BYTES // x.dtype.itemsize

    def kernel(*refs: Any) -> None:
        *steps, x, w, y = refs
        step, column = pl.program_id(1), pl.program_id(0) * WIDTH
        start, group, first, end = (array[step] for array in steps)
        is_multiplied = _are_within(start, tile, first, end)[:, None]
        is_column = _are_within(column, WIDTH, 0, outputs)[None]

        @pl.when(first < end)
        def multiply() -> None:
            def add(i: Array, total: Array) -> Array:
                is_input = _are_within(i * depth, depth, 0, w.shape[1])
                rows = _load(x, (pl.ds(start, tile), pl.ds(i * depth, depth)), is_multiplied & is_input[None])
                part = (group, pl.ds(i * depth, depth), pl.ds(column, WIDTH))
                return total + triton.dot(rows, _load(w, part, is_input[:, None] & is_column))

            total = jnp.zeros((tile, WIDTH), jnp.float32)
            total = jax.lax.fori_loop(0, pl.cdiv(w.shape[1], depth), add, total)
            block = y.at[pl.ds(start, tile), pl.ds(column, WIDTH)]
            triton.store(block, total.astype(y.dtype), mask=is_multiplied & is_column)

    grid = (pl.cdiv(outputs, WIDTH), len(start))  # programs that share rows run one after the other
    inputs = (start, group, first, end, x, w)
    return _call(kernel, grid, (len(x), outputs), x.dtype, "multiply_groups", interpret, *inputs)


def sum_groups(
    x: Float[Array, "rows inputs"],
    g: Float[Array, "rows outputs"],
    start: Int[Array, " groups"],
    end: Int[Array, " groups"],
    dtype: str,
    *,
    interpret: bool = False,
) -> Float[Array, "groups inputs outputs"]:
    """Sum the outer products of rows `start` to `end` of each group, in float32, and return them in `dtype`."""
    groups, inputs, outputs, depth = len(start), x.shape[1], g.shape[1], DEPTH_BYTES // x.dtype.itemsize

    def kernel(*refs: Any) -> None:
        starts, ends, x, g, y = refs
        column, row, group = pl.program_id(0) * WIDTH, pl.program_id(1) * WIDTH, pl.program_id(2)
        is_input, is_output = _are_within(row, WIDTH, 0, inputs), _are_within(column, WIDTH, 0, outputs)
        start, end = starts[group], ends[group]

        def add(i: Array, total: Array) -> Array:
            first = start + i * depth
            is_row = _are_within(first, depth, start, end)[:, None]
            rows = _load(x, (pl.ds(first, depth), pl.ds(row, WIDTH)), is_row & is_input[None])
            cotangents = _load(g, (pl.ds(first, depth), pl.ds(column, WIDTH)), is_row & is_output[None])
            return total + triton.dot(rows, cotangents, trans_a=True)

        total = jax.lax.fori_loop(0, pl.cdiv(end - start, depth), add, jnp.zeros((WIDTH, WIDTH), jnp.float32))
        block = y.at[group, pl.ds(row, WIDTH), pl.ds(column, WIDTH)]
        triton.store(block, total.astype(y.dtype), mask=is_input[:, None] & is_output[None])

    grid = (pl.cdiv(outputs, WIDTH), pl.cdiv(inputs, WIDTH), groups)
    return _call(kernel, grid, (groups, inputs, outputs), dtype, "sum_groups", interpret, start, end, x, g)


def _are_within(first: Any, count: int, start: Any, end: Any) -> Array:
    """Return which of `count` numbers from `first` on are at least `start` and less than `end`."""
    numbers = first + jnp.arange(count)
    return (numbers >= start) & (numbers < end)


def _load(array: Any, part: tuple[Any, ...], mask: Array) -> Array:
    """Load a part of an array. Elements that are masked, such as those beyond its end, are 0."""
    return triton.load(array.at[part], mask=mask, other=0.0)


def _call(
    kernel: Any, grid: tuple[int, ...], result: tuple[int, ...], dtype: Any, name: str, interpret: bool, *inputs: Array
) -> Array:
    """Run a kernel that returns an array of shape `result`, which differs between devices like the last input."""
    shape = jax.ShapeDtypeStruct(result, dtype, manual_axis_type=jax.typeof(inputs[-1]).manual_axis_type)
    return pl.pallas_call(
        kernel, out_shape=shape, grid=grid, compiler_params=_PARAMETERS, interpret=interpret, name=name
    )(*inputs)
