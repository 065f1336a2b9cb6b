"""The S5 recurrence on a TPU core: a Pallas kernel that reads `bu` once and writes each state once.

Time is on sublanes and states are on lanes, the usual layout of (batch, seq, state) arrays. Three doubling steps with
distances d = 1, 2 and 4 add to each position the intermediate result from d positions back, times Lambda_bar**d.
Position t then holds the contribution of its last 8 inputs to the state, and h_t is that plus Lambda_bar**8 h_{t-8}. A
tile of 8 positions thus depends on the previous tile through a single multiplication.

Entries a few positions back are read from VMEM at unaligned addresses, which costs half as much as rotating registers
on v4. Blocks of a sequence are visited in order (`reverse`: last first) and pass on their last tile; sequences and
blocks of states are independent. This module is imported only where it is used, because importing Pallas is slow.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float32

from valkyrie.ops.scan_complex import Carry, Complex, Eigenvalues, States, add, mul, scale_by

TILE = 8
"""Positions in a tile, which are the sublanes of a vector register."""

LANES = 128
"""States in a vector register. Also the minimum block length, because `keep` is read with positions on lanes."""

STATE_BLOCKS = (256, 128)
"""Possible numbers of states per block, best first. With 256, one vector register computes while the other waits."""

TIME_BLOCKS = (512, 256, 128)
"""Possible numbers of positions per block, best first. At 512 by 256, two double-buffered inputs and two outputs take
4 MiB of VMEM."""

UNROLL = 4
"""Tiles per loop iteration. With 8, registers spill."""

DOUBLING_DISTANCES = (1, 2, 4)
"""Distance, in positions, that each doubling step looks back."""

STEP_COUNT = len(DOUBLING_DISTANCES) + 1
"""Number of multiply-adds per state and position: one for each doubling step, and one for the previous tile."""


def kernel(
    lam_bar: Eigenvalues,
    bu: States,
    h0: Carry | None,
    keep: Float32[Array, "batch seq"] | None,
    reverse: bool,
    block: int,
    *,
    interpret: bool = False,
) -> States:
    """Compute all states of the recurrence (`valkyrie.ops.scan`) with the Pallas kernel, on one device.

    `block` is ignored: the kernel chooses its block sizes from `TIME_BLOCKS` and `STATE_BLOCKS`. Positions are padded
    to a multiple of 128 after the last visited one, and states to a multiple of 128. `interpret` runs the kernel
    without a TPU, slowly, for tests.
    """
    del block
    batch, seq, state = bu[0].shape
    row_padding, lane_padding = -seq % LANES, -state % LANES
    row_widths = (row_padding, 0) if reverse else (0, row_padding)
    factors = [lam_bar]
    for _ in DOUBLING_DISTANCES:
        factors.append(mul(factors[-1], factors[-1]))
    table = jnp.stack([factor[part] for factor in factors for part in (0, 1)])
    inputs: list[Array] = [
        jnp.pad(table, ((0, 0), (0, lane_padding))),
        *_pad_parts(bu, (0, 0), row_widths, (0, lane_padding)),
    ]
    if h0 is not None:
        inputs += [part[:, None] for part in _pad_parts(h0, (0, 0), (0, lane_padding))]
    if keep is not None:
        inputs += [jnp.pad(_keep_products(keep, reverse), ((0, 0), (0, 0), row_widths))]
    # Inside a checked shard_map, a result must declare the mesh axes that it varies over: those of the input.
    varying = jax.typeof(bu[0]).manual_axis_type
    shape = jax.ShapeDtypeStruct(
        (batch, seq + row_padding, state + lane_padding), jnp.float32, manual_axis_type=varying
    )
    re, im = _build_call(shape, h0 is not None, keep is not None, reverse, interpret)(*inputs)
    start = row_padding if reverse else 0
    return re[:, start : start + seq, :state], im[:, start : start + seq, :state]


def _pad_parts(a: Complex, *widths: tuple[int, int]) -> Complex:
    """Return `a` padded with zeros, or `a` itself if all widths are 0."""
    return (jnp.pad(a[0], widths), jnp.pad(a[1], widths)) if any(map(sum, widths)) else a


def _keep_products(keep: Float32[Array, "batch seq"], reverse: bool) -> Float32[Array, "batch step seq"]:
    """Return, for each position, the products of `keep` over the last 1, 2, 4 and 8 visited positions.

    The position itself counts as the last visited one.
    """
    seq, products = keep.shape[1], [keep]
    for distance in DOUBLING_DISTANCES:
        shift = min(distance, seq)
        earlier = products[-1][:, shift:] if reverse else products[-1][:, : seq - shift]
        padding = ((0, 0), (0, shift) if reverse else (shift, 0))
        products.append(products[-1] * jnp.pad(earlier, padding, constant_values=1.0))
    return jnp.stack(products, axis=1)


def _build_call(shape: jax.ShapeDtypeStruct, has_h0: bool, has_keep: bool, reverse: bool, interpret: bool) -> Any:
    """Build the kernel call for states of this padded shape."""
    batch, seq, state = shape.shape
    state_block = next(size for size in STATE_BLOCKS if state % size == 0)
    time_block = next(size for size in TIME_BLOCKS if seq % size == 0)
    last_block = seq // time_block - 1

    def visited_block(t: Any) -> Any:
        return last_block - t if reverse else t

    state_spec = pl.BlockSpec((1, time_block, state_block), lambda b, p, t: (b, visited_block(t), p))
    specs = [pl.BlockSpec((2 * STEP_COUNT, state_block), lambda b, p, t: (0, p)), state_spec, state_spec]
    if has_h0:
        specs += [pl.BlockSpec((1, 1, state_block), lambda b, p, t: (b, 0, p))] * 2
    scratch = [
        pltpu.VMEM((len(DOUBLING_DISTANCES), 2, state_block // LANES, TILE + time_block, LANES), jnp.float32),
        pltpu.VMEM((2, TILE, state_block), jnp.float32),
    ]
    if has_keep:
        specs += [pl.BlockSpec((1, STEP_COUNT, time_block), lambda b, p, t: (b, 0, visited_block(t)))]
        scratch += [pltpu.VMEM((STEP_COUNT, time_block, LANES), jnp.float32)]
    return pl.pallas_call(
        partial(_block_kernel, has_h0=has_h0, has_keep=has_keep, reverse=reverse),
        grid=(batch, state // state_block, seq // time_block),
        in_specs=specs,
        out_specs=[state_spec, state_spec],
        out_shape=[shape, shape],
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=_estimate_cost(batch, seq, state, state // state_block, has_h0, has_keep),
        interpret=interpret,
        name="s5_scan",
    )


def _estimate_cost(
    batch: int, seq: int, state: int, state_blocks: int, has_h0: bool, has_keep: bool
) -> pl.CostEstimate:
    """Return the kernel's cost: 8 FLOPs (10 with `keep`) for each of the `STEP_COUNT` steps, per state and position.

    Each array is moved once, except that `keep` is read for every block of states and the table of eigenvalue powers
    for every sequence.
    """
    state_elements = batch * seq * state
    read_elements = 2 * state_elements + 2 * STEP_COUNT * batch * state
    if has_h0:
        read_elements += 2 * batch * state
    if has_keep:
        read_elements += STEP_COUNT * batch * seq * state_blocks
    flops = (10 if has_keep else 8) * STEP_COUNT * state_elements
    return pl.CostEstimate(flops=flops, transcendentals=0, bytes_accessed=4 * (read_elements + 2 * state_elements))


def _block_kernel(table: Any, bu_re: Any, bu_im: Any, *refs: Any, has_h0: bool, has_keep: bool, reverse: bool) -> None:
    """Compute the recurrence for one block of (positions, states).

    `refs` are, in order: h0 (real, imaginary) if `has_h0`, `keep` if `has_keep`, the two outputs, and scratch: `stages`
    (inputs of each doubling step, including the tile before the block), `carry` (states of the last tile) and, if
    `has_keep`, `keep` broadcast over lanes.
    """
    remaining_refs = list(refs)
    entering_state = [remaining_refs.pop(0) for _ in range(2 if has_h0 else 0)]
    keep = remaining_refs.pop(0) if has_keep else None
    out_re, out_im, stages, carry, *rest = remaining_refs
    keep_broadcast = rest[0] if has_keep else None
    time_block, state_block = bu_re.shape[1:]
    columns = [pl.ds(start, LANES) for start in range(0, state_block, LANES)]
    previous_tile_start, last_tile_start = (time_block, 0) if reverse else (0, time_block)

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        _write_entering_state(
            stages, carry, entering_state, pl.ds(previous_tile_start, TILE), 0 if reverse else TILE - 1
        )

    if keep is not None and keep_broadcast is not None:
        for step in range(STEP_COUNT):
            keep_broadcast[step] = jnp.broadcast_to(keep[0, step : step + 1], (LANES, time_block)).T
    factors = [[_broadcast_factor(table, step, column) for step in range(STEP_COUNT)] for column in columns]

    def run_tiles(index: Any, h: list[Complex]) -> list[Complex]:
        for unrolled in range(UNROLL):
            tile = index * UNROLL + unrolled
            base = pl.multiple_of((time_block // TILE - 1 - tile if reverse else tile) * TILE, TILE)
            rows = pl.ds(base, TILE)
            keep_factors = (
                None if keep_broadcast is None else [keep_broadcast[step, rows, :] for step in range(STEP_COUNT)]
            )
            for c, column in enumerate(columns):
                step_factors = (
                    factors[c]
                    if keep_factors is None
                    else [scale_by(keep_factors[s], factors[c][s]) for s in range(STEP_COUNT)]
                )
                value = bu_re[0, rows, column], bu_im[0, rows, column]
                for step in range(len(DOUBLING_DISTANCES)):
                    value = _doubling_step(
                        stages.at[step, :, c], value, step_factors[step], base, DOUBLING_DISTANCES[step], reverse
                    )
                h[c] = add(value, mul(step_factors[-1], h[c]))
                out_re[0, rows, column], out_im[0, rows, column] = h[c]
        return h

    first_states = [(carry[0, :, column], carry[1, :, column]) for column in columns]
    last_states = jax.lax.fori_loop(0, time_block // TILE // UNROLL, run_tiles, first_states)
    for c, column in enumerate(columns):
        carry[0, :, column], carry[1, :, column] = last_states[c]
    stages[:, :, :, pl.ds(previous_tile_start, TILE), :] = stages[:, :, :, pl.ds(last_tile_start, TILE), :]


def _write_entering_state(stages: Any, carry: Any, entering_state: list[Any], tile: Any, row: int) -> None:
    """Write the tile before the first block to `carry` and to the slice `tile` of every stage.

    Row `row` of this tile, which the recurrence visits last, is `entering_state`, or zero if that is empty. The other
    rows are zero. All stages get the same values, because no earlier inputs contribute to them.
    """
    at_row = jax.lax.broadcasted_iota(jnp.int32, carry.shape[1:], 0) == row
    for part in range(2):
        tile_values = jnp.zeros(carry.shape[1:], jnp.float32)
        if entering_state:
            tile_values = jnp.where(at_row, jnp.broadcast_to(entering_state[part][0], tile_values.shape), tile_values)
        carry[part] = tile_values
        for step in range(stages.shape[0]):
            for c in range(stages.shape[2]):
                stages[step, part, c, tile, :] = tile_values[:, c * LANES : (c + 1) * LANES]


def _broadcast_factor(table: Any, step: int, column: Any) -> Complex:
    """Return the power of Lambda_bar that step `step` multiplies by, for the states in `column`.

    The real and the imaginary part are each broadcast to (TILE, LANES).
    """
    re, im = (table[2 * step + part : 2 * step + part + 1, column] for part in (0, 1))
    return jnp.broadcast_to(re, (TILE, LANES)), jnp.broadcast_to(im, (TILE, LANES))


def _doubling_step(stage: Any, value: Complex, factor: Complex, base: Any, distance: int, reverse: bool) -> Complex:
    """Return one doubling step of a tile: at each position, the input plus `factor` times an earlier input.

    `value` is the input of this tile, and the earlier input is `distance` visited positions back. `base` is the tile's
    first position in the block. Stores `value` in `stage` first, because the shifted read covers this tile and the one
    visited before it.
    """
    write_row, read_row = (base, base + distance) if reverse else (base + TILE, base + TILE - distance)
    stage[0, pl.ds(write_row, TILE), :], stage[1, pl.ds(write_row, TILE), :] = value
    return add(value, mul(factor, (stage[0, pl.ds(read_row, TILE), :], stage[1, pl.ds(read_row, TILE), :])))
