"""The S5 recurrence on a TPU core: a Pallas kernel that reads each input once and writes each state once.

Time is on sublanes and states are on lanes, the usual layout of (batch, seq, state) arrays. Three doubling steps add to
every input the intermediate results from 1, 2 and 4 positions back. Position t then holds the contribution of its last
8 inputs to the state, and h_t is that plus Lambda_bar**8 h_{t-8}. A tile of 8 positions thus depends on the previous
tile through a single multiplication.

Entries a few positions back are read from VMEM at unaligned addresses, which costs half as much as rotating registers
on v4. Blocks of a sequence are visited in order (`reverse`: last first) and pass on their last tile; sequences and
blocks of states are independent. Imported only where it is used, because importing Pallas is slow.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float32

from valkyrie.ops.scan_complex import Carry, Complex, Eigenvalues, States, add, mul, scaled

TILE = 8
"""Positions in a tile, which are the sublanes of a vector register."""

LANES = 128
"""States in a vector register. Also the minimum block length, because `keep` is read with positions on lanes."""

STATE_BLOCKS = (256, 128)
"""Possible numbers of states per block, best first. With two registers, one computes while the other waits."""

TIME_BLOCKS = (512, 256, 128)
"""Possible numbers of positions per block, best first. At 512 by 256, two double-buffered inputs and two outputs take
4 MiB of VMEM."""

UNROLL = 4
"""Tiles per loop iteration. With 8, registers spill."""

DOUBLINGS = (1, 2, 4)
"""Number of positions that each doubling step looks back."""

STEPS = len(DOUBLINGS) + 1
"""Multiply-adds per state: the doubling steps, then the previous tile."""


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
    """Compute the states by the kernel, on one device. `block` is ignored, because the kernel has fixed block sizes.

    Positions are padded to a multiple of 128 at the end of the recurrence, and states to a multiple of 128. `interpret`
    runs the kernel without a TPU, slowly, for tests.
    """
    del block
    batch, seq, state = bu[0].shape
    rows, lanes = -seq % LANES, -state % LANES
    ends = (rows, 0) if reverse else (0, rows)
    factors = [lam_bar]
    for _ in DOUBLINGS:
        factors.append(mul(factors[-1], factors[-1]))
    table = jnp.stack([factor[part] for factor in factors for part in (0, 1)])
    inputs: list[Array] = [jnp.pad(table, ((0, 0), (0, lanes))), *_padded(bu, (0, 0), ends, (0, lanes))]
    if h0 is not None:
        inputs += [part[:, None] for part in _padded(h0, (0, 0), (0, lanes))]
    if keep is not None:
        inputs += [jnp.pad(_kept(keep, reverse), ((0, 0), (0, 0), ends))]
    # Inside a checked shard_map, a result must declare the mesh axes that it varies over: those of the input.
    varying = jax.typeof(bu[0]).manual_axis_type
    shape = jax.ShapeDtypeStruct((batch, seq + rows, state + lanes), jnp.float32, manual_axis_type=varying)
    re, im = _call(shape, h0 is not None, keep is not None, reverse, interpret)(*inputs)
    start = rows if reverse else 0
    return re[:, start : start + seq, :state], im[:, start : start + seq, :state]


def _padded(a: Complex, *widths: tuple[int, int]) -> Complex:
    """Return a padded with zeros, or a itself if all widths are 0."""
    return (jnp.pad(a[0], widths), jnp.pad(a[1], widths)) if any(map(sum, widths)) else a


def _kept(keep: Float32[Array, "batch seq"], reverse: bool) -> Float32[Array, "batch step seq"]:
    """Return the products of 1, 2, 4 and 8 keeps: of each position and those visited before it."""
    seq, products = keep.shape[1], [keep]
    for reach in DOUBLINGS:
        back = min(reach, seq)
        before = products[-1][:, back:] if reverse else products[-1][:, : seq - back]
        edge = ((0, 0), (0, back) if reverse else (back, 0))
        products.append(products[-1] * jnp.pad(before, edge, constant_values=1.0))
    return jnp.stack(products, axis=1)


def _call(shape: jax.ShapeDtypeStruct, enters: bool, resets: bool, reverse: bool, interpret: bool) -> Any:
    """Build the kernel for states of this padded shape."""
    batch, seq, state = shape.shape
    wide = next(size for size in STATE_BLOCKS if state % size == 0)
    long = next(size for size in TIME_BLOCKS if seq % size == 0)
    last = seq // long - 1

    def visited(t: Any) -> Any:
        return last - t if reverse else t

    states = pl.BlockSpec((1, long, wide), lambda b, p, t: (b, visited(t), p))
    specs = [pl.BlockSpec((2 * STEPS, wide), lambda b, p, t: (0, p)), states, states]
    if enters:
        specs += [pl.BlockSpec((1, 1, wide), lambda b, p, t: (b, 0, p))] * 2
    scratch = [
        pltpu.VMEM((len(DOUBLINGS), 2, wide // LANES, TILE + long, LANES), jnp.float32),
        pltpu.VMEM((2, TILE, wide), jnp.float32),
    ]
    if resets:
        specs += [pl.BlockSpec((1, STEPS, long), lambda b, p, t: (b, 0, visited(t)))]
        scratch += [pltpu.VMEM((STEPS, long, LANES), jnp.float32)]
    return pl.pallas_call(
        partial(_block, enters=enters, resets=resets, reverse=reverse),
        grid=(batch, state // wide, seq // long),
        in_specs=specs,
        out_specs=[states, states],
        out_shape=[shape, shape],
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=_cost(batch, seq, state, state // wide, enters, resets),
        interpret=interpret,
        name="s5_scan",
    )


def _cost(batch: int, seq: int, state: int, state_blocks: int, enters: bool, resets: bool) -> pl.CostEstimate:
    """Return the kernel's cost: 8 FLOPs (10 with resets) per state and step, and every array moved once.

    Arrays without a state axis or a batch axis are read again for each block of states or each sequence.
    """
    numbers = batch * seq * state
    read = 2 * numbers + 2 * STEPS * batch * state
    if enters:
        read += 2 * batch * state
    if resets:
        read += STEPS * batch * seq * state_blocks
    flops = (10 if resets else 8) * STEPS * numbers
    return pl.CostEstimate(flops=flops, transcendentals=0, bytes_accessed=4 * (read + 2 * numbers))


def _block(table: Any, bu_re: Any, bu_im: Any, *refs: Any, enters: bool, resets: bool, reverse: bool) -> None:
    """Compute the states of one block of positions and states.

    `stages` holds the inputs of each doubling step, including the tile before the block. `carry` holds the last states.
    """
    left = list(refs)
    entering = [left.pop(0) for _ in range(2 if enters else 0)]
    keep = left.pop(0) if resets else None
    out_re, out_im, stages, carry, *rest = left
    kept = rest[0] if resets else None
    long, wide = bu_re.shape[1:]
    columns = [pl.ds(start, LANES) for start in range(0, wide, LANES)]
    edge, final = (long, 0) if reverse else (0, long)

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        _start(stages, carry, entering, pl.ds(edge, TILE), 0 if reverse else TILE - 1)

    if keep is not None and kept is not None:
        for step in range(STEPS):
            kept[step] = jnp.broadcast_to(keep[0, step : step + 1], (LANES, long)).T
    factors = [[_factor(table, step, column) for step in range(STEPS)] for column in columns]

    def group(index: Any, h: list[Complex]) -> list[Complex]:
        for number in range(UNROLL):
            tile = index * UNROLL + number
            base = pl.multiple_of((long // TILE - 1 - tile if reverse else tile) * TILE, TILE)
            rows = pl.ds(base, TILE)
            k = None if kept is None else [kept[step, rows, :] for step in range(STEPS)]
            for c, column in enumerate(columns):
                by = factors[c] if k is None else [scaled(k[step], factors[c][step]) for step in range(STEPS)]
                now = bu_re[0, rows, column], bu_im[0, rows, column]
                for step in range(len(DOUBLINGS)):
                    now = _doubled(stages.at[step, :, c], now, by[step], base, DOUBLINGS[step], reverse)
                h[c] = add(now, mul(by[-1], h[c]))
                out_re[0, rows, column], out_im[0, rows, column] = h[c]
        return h

    started = [(carry[0, :, column], carry[1, :, column]) for column in columns]
    ended = jax.lax.fori_loop(0, long // TILE // UNROLL, group, started)
    for c, column in enumerate(columns):
        carry[0, :, column], carry[1, :, column] = ended[c]
    stages[:, :, :, pl.ds(edge, TILE), :] = stages[:, :, :, pl.ds(final, TILE), :]


def _start(stages: Any, carry: Any, entering: list[Any], edge: Any, row: int) -> None:
    """Write the entering state to the tile before the first block, as if it were the input of its last position.

    All stages of that tile hold the state itself, because no input came before it.
    """
    at_row = jax.lax.broadcasted_iota(jnp.int32, carry.shape[1:], 0) == row
    for part in range(2):
        before = jnp.zeros(carry.shape[1:], jnp.float32)
        if entering:
            before = jnp.where(at_row, jnp.broadcast_to(entering[part][0], before.shape), before)
        carry[part] = before
        for step in range(stages.shape[0]):
            for c in range(stages.shape[2]):
                stages[step, part, c, edge, :] = before[:, c * LANES : (c + 1) * LANES]


def _factor(table: Any, step: int, column: Any) -> Complex:
    """Return the power of Lambda_bar of a step for one register of states, broadcast to every row."""
    re, im = (table[2 * step + part : 2 * step + part + 1, column] for part in (0, 1))
    return jnp.broadcast_to(re, (TILE, LANES)), jnp.broadcast_to(im, (TILE, LANES))


def _doubled(stage: Any, now: Complex, factor: Complex, base: Any, reach: int, reverse: bool) -> Complex:
    """Return one tile after a doubling step. Stores its input in `stage` for the tiles that look back at it."""
    here, back = (base, base + reach) if reverse else (base + TILE, base + TILE - reach)
    stage[0, pl.ds(here, TILE), :], stage[1, pl.ds(here, TILE), :] = now
    return add(now, mul(factor, (stage[0, pl.ds(back, TILE), :], stage[1, pl.ds(back, TILE), :])))
