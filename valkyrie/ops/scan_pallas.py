"""Decides how one TPU core evaluates an S5 recurrence: a Pallas kernel that reads each input and writes each state once.

Time lies on sublanes and states on lanes, as (batch, seq, state) arrays lie anyway. Three doubling steps add to every
input what the inputs 1, 2 and 4 positions back (of the tile of 8 and the one before it) become meanwhile; after that
position t holds its last 8 inputs' part of the state, and h_t is that plus Lambda_bar**8 h_{t-8}. So a tile needs no
masks and no state on all its rows, and waits for the tile before it for one multiplication only. Blocks of a sequence
are visited in order (`reverse`: last first), their last tiles kept in VMEM; sequences and blocks of states are
independent. Imported only where it is used, because importing Pallas takes a while.
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
"""Positions in a tile: the sublanes of a vector register."""

LANES = 128
"""States in a vector register."""

STATE_BLOCKS = (256, 128)
"""States a block may hold, best first."""

TIME_BLOCKS = (512, 256, 128)
"""Positions a block may hold, best first: multiples of the lanes, because `keep` enters with positions on lanes."""

UNROLL = 4
"""Tiles per loop iteration."""

REACHES = (1, 2, 4, 8)
"""How far back each step reaches: three doublings, then the tile before."""


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
    """Return the states by the kernel; `block` is ignored, as tile sizes follow the chip.

    Positions are padded to a multiple of 128 where the recurrence ends, states to a multiple of 128. `interpret` runs
    the kernel without a TPU, slowly, for tests.
    """
    del block
    batch, seq, state = bu[0].shape
    rows, lanes = -seq % LANES, -state % LANES
    ends = (rows, 0) if reverse else (0, rows)
    factors = [lam_bar]
    for _ in REACHES[1:]:
        factors.append(mul(factors[-1], factors[-1]))
    table = jnp.stack([factor[0] for factor in factors] + [factor[1] for factor in factors])
    inputs: list[Array] = [jnp.pad(table, ((0, 0), (0, lanes))), *_padded(bu, (0, 0), ends, (0, lanes))]
    if h0 is not None:
        inputs += [part[:, None] for part in _padded(h0, (0, 0), (0, lanes))]
    if keep is not None:
        inputs += [jnp.pad(_kept(keep, reverse), ((0, 0), (0, 0), ends))]
    run = _call(batch, seq + rows, state + lanes, h0 is not None, keep is not None, reverse, interpret, _varying(bu[0]))
    re, im = run(*inputs)
    start = rows if reverse else 0
    return re[:, start : start + seq, :state], im[:, start : start + seq, :state]


def _kept(keep: Float32[Array, "batch seq"], reverse: bool) -> Float32[Array, "batch reach seq"]:
    """Return for each reach the product of as many `keep`, this position's and those visited before it (1 outside)."""
    products = [keep]
    for reach in REACHES[:-1]:
        before = products[-1][:, reach:] if reverse else products[-1][:, :-reach]
        edge = [(0, 0), (0, reach) if reverse else (reach, 0)]
        seq = keep.shape[1]
        if reach >= seq:
            products.append(products[-1])
        else:
            products.append(products[-1] * jnp.pad(before, edge, constant_values=1.0))
    return jnp.stack(products, axis=1)


def _padded(a: Complex, *widths: tuple[int, int]) -> Complex:
    """Return a with zeros beside it, or a itself where there is nothing to add."""
    return a if not any(map(sum, widths)) else (jnp.pad(a[0], widths), jnp.pad(a[1], widths))


def _varying(x: Array) -> dict[str, Any]:
    """Return along which mesh axes a result that varies like `x` does, inside a checked `jax.shard_map`."""
    return {"manual_axis_type": jax.typeof(x).manual_axis_type}


def _call(
    batch: int, seq: int, state: int, enters: bool, resets: bool, reverse: bool, interpret: bool, varying: dict[str, Any]
) -> Any:
    """Return the kernel for these (padded) sizes, a function of its inputs."""
    wide = next(size for size in STATE_BLOCKS if state % size == 0)
    long = next(size for size in TIME_BLOCKS if seq % size == 0)
    last = seq // long - 1

    def visited(t: Any) -> Any:
        return last - t if reverse else t

    states = pl.BlockSpec((1, long, wide), lambda b, p, t: (b, visited(t), p))
    specs = [pl.BlockSpec((2 * len(REACHES), wide), lambda b, p, t: (0, p)), states, states]
    if enters:
        specs += [pl.BlockSpec((1, 1, wide), lambda b, p, t: (b, 0, p))] * 2
    if resets:
        specs += [pl.BlockSpec((1, len(REACHES), long), lambda b, p, t: (b, 0, visited(t)))]
    shape = jax.ShapeDtypeStruct((batch, seq, state), jnp.float32, **varying)
    scratch = [pltpu.VMEM((2 * len(REACHES), TILE, wide), jnp.float32)]
    if resets:
        scratch += [pltpu.VMEM((len(REACHES), long, LANES), jnp.float32)]
    return pl.pallas_call(
        partial(_block, enters=enters, resets=resets, reverse=reverse),
        grid=(batch, state // wide, seq // long),
        in_specs=specs,
        out_specs=[states, states],
        out_shape=[shape, shape],
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=_cost(batch, seq, state, enters, resets, state // wide),
        interpret=interpret,
        name="s5_scan",
    )


def _cost(batch: int, seq: int, state: int, enters: bool, resets: bool, state_blocks: int) -> pl.CostEstimate:
    """Return what the kernel does: a complex multiply-add (8 FLOPs) a state and reach, 2 more with resets."""
    numbers = batch * seq * state
    read = 2 * numbers + 2 * len(REACHES) * state * batch + 2 * batch * state * enters
    read += len(REACHES) * batch * seq * state_blocks * resets
    flops = (10 if resets else 8) * len(REACHES) * numbers
    return pl.CostEstimate(flops=flops, transcendentals=0, bytes_accessed=4 * (read + 2 * numbers))


def _block(*refs: Any, enters: bool, resets: bool, reverse: bool) -> None:
    """Compute the states of one block of positions and states from the last tiles of the one before."""
    left = list(refs)
    table, bu_re, bu_im = left[:3]
    del left[:3]
    entering = [left.pop(0), left.pop(0)] if enters else None
    keep = left.pop(0) if resets else None
    out_re, out_im, before = left[:3]
    kept = left[3] if resets else None
    shape = before.shape[1:]
    row = jax.lax.broadcasted_iota(jnp.int32, shape, 0)

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        # The state that enters stands as the last input, alone: then every step finds what it would have left there.
        at_end = row == (0 if reverse else TILE - 1)
        for number in range(before.shape[0]):
            start = jnp.zeros(shape, jnp.float32)
            if entering is not None:
                start = jnp.where(at_end, jnp.broadcast_to(entering[number % 2][0], shape), start)
            before[number] = start

    if keep is not None and kept is not None:
        for step in range(len(REACHES)):
            kept[step] = jnp.broadcast_to(keep[0, step : step + 1], (LANES, keep.shape[2])).T
    factors = [
        (_rows(table, step, shape), _rows(table, len(REACHES) + step, shape)) for step in range(len(REACHES))
    ]
    tiles = bu_re.shape[1] // TILE

    def group(index: Any, last: list[Complex]) -> list[Complex]:
        for number in range(UNROLL):
            tile = index * UNROLL + number
            rows = pl.ds(pl.multiple_of((tiles - 1 - tile if reverse else tile) * TILE, TILE), TILE)
            now = bu_re[0, rows, :], bu_im[0, rows, :]
            left = []
            for step, reach in enumerate(REACHES):
                factor = factors[step]
                if kept is not None:
                    factor = scaled(jnp.concatenate([kept[step, rows, :]] * (shape[1] // LANES), axis=1), factor)
                back = last[step] if reach == TILE else _back(now, last[step], reach, row, reverse)
                if reach < TILE:
                    left.append(now)
                now = add(now, mul(factor, back))
            out_re[0, rows, :], out_im[0, rows, :] = now
            last = [*left, now]
        return last

    started = [(before[2 * step], before[2 * step + 1]) for step in range(len(REACHES))]
    ended = jax.lax.fori_loop(0, tiles // UNROLL, group, started)
    for step, (re, im) in enumerate(ended):
        before[2 * step], before[2 * step + 1] = re, im


def _rows(table: Any, row: int, shape: tuple[int, ...]) -> Array:
    """Return one row of the table on every row."""
    return jnp.broadcast_to(table[row : row + 1, :], shape)


def _back(now: Complex, last: Complex, reach: int, row: Array, reverse: bool) -> Complex:
    """Return for each position of a tile the number `reach` positions back, from it or from the tile before."""
    from_last = row < reach if reverse else row >= TILE - reach
    shift = TILE - reach if reverse else reach
    re, im = jnp.where(from_last, last[0], now[0]), jnp.where(from_last, last[1], now[1])
    return pltpu.roll(re, shift, 0), pltpu.roll(im, shift, 0)
