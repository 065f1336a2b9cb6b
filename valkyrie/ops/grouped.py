"""Matrix products of groups of rows, with a different matrix per group.

JAX's `ragged_dot` has a kernel only on TPUs, and only for products with the rows (JAX 0.10.2). Elsewhere, and for the
gradients of the matrices, it multiplies every row by the matrix of every group. TPUs compute these gradients with the
kernel of megablox instead, and GPUs run Triton kernels (`grouped_triton.py`). CPUs loop over tiles of rows: like in
megablox, a step multiplies the rows of one tile that belong to one group.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm
from jax.experimental.xla_metadata import set_xla_metadata
from jaxtyping import Array, Float, Int

from valkyrie.axes import GROUP_PADDING, ROUTED_SHARE
from valkyrie.hardware.platforms import Platform, get_platform
from valkyrie.ops import grouped_triton

KERNEL_TILE, KERNEL_WIDTH_BYTES = 512, 2048
"""Rows of a tile of the TPU kernel, and the largest width of a tile.

A kernel with these tiles is limited by products instead of HBM.
"""

KERNEL_MEMORY = 13 * 2**20
"""Bytes of a core's scratch memory for the tiles of the TPU kernel. It has 16 MiB, of which the kernel uses 1 MiB more.

Tiles of float32 results are narrower, therefore.
"""

LANES = 128
"""Widths of tiles are multiples of the lanes of a TPU."""

RAGGED_DOT_TILE = 128
"""Rows of a tile of XLA's kernel for `ragged_dot` on TPUs (libtpu 0.0.42.1)."""

SMALLEST_TILE = 64
"""Rows of a tile if groups are small. Smaller tiles would take more steps than they save products of foreign rows."""


def multiply_groups(
    x: Float[Array, "rows inputs"],
    w: Float[Array, "groups inputs outputs"],
    sizes: Int[Array, " groups"],
    backend: str | None = None,
    *,
    routed_share: float = 1.0,
) -> Float[Array, "rows outputs"]:
    """Multiply each group of rows by its matrix. Rows after the last group are undefined.

    Args:
        x: Rows, sorted by group.
        w: The matrix of each group.
        sizes: Number of rows of each group.
        backend: JAX platform that will run the product, or None for the default.
        routed_share: Expected share of the rows that are in a group, for predictions of the step time.
    """
    platform = _platform(backend)
    tile = _tile_rows(128, len(x), len(w)) if platform.runs_pallas_triton else RAGGED_DOT_TILE
    with _describe(routed_share, len(w) * tile / 2 / len(x)):
        return _row_products(platform.name)(x, w, sizes)


def multiply_rows_of_groups(
    x: Float[Array, "rows inputs"],
    g: Float[Array, "rows outputs"],
    sizes: Int[Array, " groups"],
    dtype: str,
    backend: str | None = None,
    *,
    routed_share: float = 1.0,
) -> Float[Array, "groups inputs outputs"]:
    """Sum the outer products of the rows of each group, in float32, and return them in `dtype`.

    The other arguments are those of `multiply_groups`.
    """
    platform = _platform(backend)
    tile = (
        grouped_triton.DEPTH_BYTES // x.dtype.itemsize if platform.runs_pallas_triton else math.gcd(len(x), KERNEL_TILE)
    )
    with _describe(routed_share, len(sizes) * tile / 2 / len(x)):
        return _matrix_gradients(platform.name, dtype)(x, g, sizes)


def _describe(routed_share: float, padding: float) -> AbstractContextManager[object]:
    """Add the attributes that predictions need to the instructions of a product."""
    return set_xla_metadata(**{ROUTED_SHARE: f"{routed_share:.6g}", GROUP_PADDING: f"{padding:.6g}"})


def _platform(backend: str | None) -> Platform:
    return get_platform(jax.default_backend() if backend is None else backend)


@cache
def _row_products(platform: str) -> Callable[..., Array]:
    if get_platform(platform).runs_pallas_tpu:
        return _map_over_batch(lambda x, w, sizes: jax.lax.ragged_dot(x, w, sizes))

    def run_kernel(x: Array, w: Array, sizes: Array) -> Array:
        tile = _tile_rows(128, len(x), len(w))
        steps = _list_steps(sizes, len(x), tile)
        arrays = (x, w, steps.start, steps.group, steps.first, steps.end)
        return grouped_triton.multiply_tiles(*(vary_like(array, x, w, sizes) for array in arrays), tile=tile)

    def multiply(x: Array, w: Array, sizes: Array) -> Array:
        steps = _list_steps(sizes, len(x), min(len(x), _tile_rows(128, len(x), len(w))))

        def update(i: Array, y: Array) -> Array:
            start, (rows, is_in_group) = steps.start[i], steps.slice_rows(i, x)
            product = rows @ w[steps.group[i]]
            old = jax.lax.dynamic_slice_in_dim(y, start, steps.tile)
            return jax.lax.dynamic_update_slice_in_dim(y, jnp.where(is_in_group, product, old), start, 0)

        y = jnp.zeros((len(x), w.shape[2]), x.dtype)
        return jax.lax.fori_loop(0, steps.needed, update, vary_like(y, x, w, sizes))

    return _map_over_batch(run_kernel if get_platform(platform).runs_pallas_triton else multiply)


@cache
def _matrix_gradients(platform: str, dtype: str) -> Callable[..., Array]:
    runs_pallas_tpu = get_platform(platform).runs_pallas_tpu

    def multiply_tiles(x: Array, g: Array, sizes: Array) -> Array:
        steps = _list_steps(sizes, len(x), min(len(x), _tile_rows(512 if runs_pallas_tpu else 128, len(x), len(sizes))))

        def add(i: Array, total: Array) -> Array:
            tiles = (steps.slice_rows(i, array) for array in (x, g))
            # Both factors are masked, because rows of no group may be NaN.
            rows, cotangents = (jnp.where(is_in_group, tile, 0) for tile, is_in_group in tiles)
            product = jnp.einsum("ra,rb->ab", rows, cotangents, preferred_element_type=jnp.float32)
            group = steps.group[i]
            return jax.lax.dynamic_update_index_in_dim(total, total[group] + product, group, 0)

        # Predictions need to know the number of steps. On CPUs, a device skips the rows of other devices' experts.
        count = len(steps.start) if runs_pallas_tpu else steps.needed
        total = jnp.zeros((len(sizes), x.shape[1], g.shape[1]), jnp.float32)
        return jax.lax.fori_loop(0, count, add, vary_like(total, x, g, sizes)).astype(dtype)

    def multiply(x: Array, g: Array, sizes: Array) -> Array:
        tiles = kernel_tiles(len(x), x.shape[1], g.shape[1], x.dtype.itemsize, jnp.dtype(dtype).itemsize)
        if runs_pallas_tpu and tiles[0] >= 16:  # a tile of bfloat16 has 16 rows
            return tgmm(x.T, g, sizes, jnp.dtype(dtype), tiles)
        if get_platform(platform).runs_pallas_triton:
            end = jnp.cumsum(sizes)
            x, g, start, end = (vary_like(array, x, g, sizes) for array in (x, g, end - sizes, end))
            return grouped_triton.sum_groups(x, g, start, end, dtype)
        return multiply_tiles(x, g, sizes)

    return _map_over_batch(multiply)


def kernel_tiles(rows: int, inputs: int, outputs: int, itemsize: int, result_itemsize: int) -> tuple[int, int, int]:
    """Return the rows, inputs and outputs of a tile of the TPU kernel. Its memory is at most `KERNEL_MEMORY`.

    `itemsize` and `result_itemsize` are the bytes of a number of the operands and of the result.
    """
    tile, width = math.gcd(rows, KERNEL_TILE), KERNEL_WIDTH_BYTES // itemsize
    input_width = _balanced_width(inputs, width)
    # Two buffers of each operand and of the result, and a sum in float32.
    memory = KERNEL_MEMORY - 2 * itemsize * tile * input_width
    fitting_width = memory // (2 * itemsize * tile + (2 * result_itemsize + 4) * input_width)
    return tile, input_width, _balanced_width(outputs, min(width, fitting_width // LANES * LANES))


def _balanced_width(length: int, limit: int) -> int:
    """Return the width of as few tiles of at most `limit` as cover `length`, all about equally wide."""
    return min(length, -(-length // (LANES * -(-length // limit))) * LANES)


class _Steps(NamedTuple):
    """Steps of a loop over pairs of a tile and a group that share rows.

    Args:
        tile: Rows of a tile.
        start: First row of each step's tile. The last tile overlaps with the one before it if `tile` does not divide
            the rows.
        group: Group of each step.
        first, end: Range of the rows that each step multiplies, those of its group in its tile. Empty for steps that
            are not needed.
        needed: Number of steps that are needed. They are the first ones.
    """

    tile: int
    start: Int[Array, " steps"]
    group: Int[Array, " steps"]
    first: Int[Array, " steps"]
    end: Int[Array, " steps"]
    needed: Int[Array, ""]

    def slice_rows(self, i: Array, x: Float[Array, "rows width"]) -> tuple[Array, Array]:
        """Return the rows of a step's tile, and whether the step multiplies each, with shape (tile, 1)."""
        numbers = self.start[i] + jnp.arange(self.tile)[:, None]
        rows = jax.lax.dynamic_slice_in_dim(x, self.start[i], self.tile)
        return rows, (numbers >= self.first[i]) & (numbers < self.end[i])


def _list_steps(sizes: Int[Array, " groups"], rows: int, tile: int) -> _Steps:
    """Return the pairs of a tile and a group that share rows. There are fewer than tiles + groups."""
    ends = jnp.cumsum(sizes)
    starts = ends - sizes
    counts = jnp.where(sizes > 0, (ends - 1) // tile - starts // tile + 1, 0)
    last_steps = jnp.cumsum(counts)
    numbers = jnp.arange(-(-rows // tile) + len(sizes) - 1)
    group = jnp.minimum(jnp.sum(numbers[:, None] >= last_steps, axis=1), len(sizes) - 1)
    tile_start = tile * (starts[group] // tile + numbers - (last_steps - counts)[group])
    first, end = jnp.maximum(starts[group], tile_start), jnp.minimum(ends[group], tile_start + tile)
    return _Steps(tile, jnp.clip(tile_start, 0, max(rows - tile, 0)), group, first, end, last_steps[-1])


def _tile_rows(limit: int, rows: int, groups: int) -> int:
    """Return the rows of a tile, a power of two: at most `limit`, and about those of a small group."""
    return min(limit, max(SMALLEST_TILE, 1 << (rows // groups).bit_length() - 1 if rows >= groups else 0))


def vary_like(array: Array, *others: Array) -> Array:
    """Mark an array as different on each device over the mesh axes of the others, as in `jax.shard_map`."""
    own, *axes = (jax.typeof(x).manual_axis_type.varying for x in (array, *others))
    new_axes = frozenset[str]().union(*axes) - own
    return jax.lax.pcast(array, tuple(sorted(new_axes)), to="varying") if new_axes else array


def _map_over_batch(f: Callable[..., Array]) -> Callable[..., Array]:
    """Let `jax.vmap` call `f` once per element. Ragged products support only few kinds of `vmap` (JAX 0.10.2).

    The gradients of `partition.sum_gradients_per=step` are computed in a `vmap` with one element per device.
    """
    mapped = jax.custom_batching.custom_vmap(f)

    @mapped.def_vmap
    def call_per_element(size: int, is_batched: list[bool], *arguments: Array) -> tuple[Array, bool]:
        elements = [
            f(*(x[i] if batched else x for x, batched in zip(arguments, is_batched, strict=True))) for i in range(size)
        ]
        return jnp.stack(elements), True

    return mapped
