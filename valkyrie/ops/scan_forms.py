"""Four implementations (forms) of a linear recurrence on one device.

Each form returns h_t = keep_t Lambda_bar h_{t-1} + bu_t for all t. With `reverse`, t runs from the end. Forms differ
only in the order of float32 roundings. They define no derivative: `valkyrie.ops.scan` defines one rule for all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from valkyrie.hardware.platforms import get_platform
from valkyrie.ops.choices import ScanImpl
from valkyrie.ops.scan_complex import (
    Carry,
    Complex,
    Eigenvalues,
    States,
    add,
    index_parts,
    mul,
    power,
    powers,
    scale_by,
    zeros_like,
)

Keep = Float32[Array, "batch seq"] | None
"""0 at the first visited position of a document, 1 elsewhere. None if the whole sequence is one document."""

Form = Callable[[Eigenvalues, States, Carry | None, Keep, bool, int], States]
"""Takes lam_bar, bu, h0, keep, reverse and block, and returns the states."""

SEQUENTIAL_UNROLL = 4
"""Steps of the sequential form per loop iteration. On CPU, 4 saves 10 to 25% for most sizes, and 8 saves nothing."""


def scan_sequentially(
    lam_bar: Eigenvalues, bu: States, h0: Carry | None, keep: Keep, reverse: bool, block: int
) -> States:
    """Compute the states one position at a time. Ignores `block`.

    This form needs the least arithmetic and memory, but has no parallelism over time.
    """
    del block

    def step(h: Carry, x: tuple[Float32[Array, " batch"] | None, Carry]) -> tuple[Carry, Carry]:
        keep_t, bu_t = x
        h = add(scale_by(_add_state_axis(keep_t), mul(lam_bar, h)), bu_t)
        return h, h

    start = zeros_like(index_parts(bu, (slice(None), 0))) if h0 is None else h0
    inputs = (None if keep is None else keep.T, _swap_axes(bu))
    _, h = jax.lax.scan(step, start, inputs, reverse=reverse, unroll=SEQUENTIAL_UNROLL)
    return _swap_axes(h)


def scan_associatively(
    lam_bar: Eigenvalues, bu: States, h0: Carry | None, keep: Keep, reverse: bool, block: int
) -> States:
    """Compute the states with `jax.lax.associative_scan`, in O(log(seq)) dependent steps and O(seq) work.

    Ignores `block`.

    This form is slow to compile.
    """
    del block
    seq = bu[0].shape[1]
    if h0 is not None:
        first_position = seq - 1 if reverse else 0
        entering_state = scale_by(None if keep is None else _add_state_axis(keep[:, first_position]), mul(lam_bar, h0))
        bu = bu[0].at[:, first_position].add(entering_state[0]), bu[1].at[:, first_position].add(entering_state[1])
    ones = jnp.ones((1, seq, 1), jnp.float32) if keep is None else keep[:, :, None]
    decay = scale_by(ones, lam_bar)

    def combine(left: tuple[Complex, Complex], right: tuple[Complex, Complex]) -> tuple[Complex, Complex]:
        return mul(right[0], left[0]), add(mul(right[0], left[1]), right[1])

    _, h = jax.lax.associative_scan(combine, (decay, bu), reverse=reverse, axis=1)
    return h


def scan_in_blocks(lam_bar: Eigenvalues, bu: States, h0: Carry | None, keep: Keep, reverse: bool, block: int) -> States:
    """Compute the states in blocks of `block` positions.

    All blocks are scanned in parallel, each from a zero state. A scan over the blocks then computes the state that
    enters each block, and its contribution is added. The sequence is padded to a multiple of `block` after the position
    that the recurrence visits last.
    """
    seq = bu[0].shape[1]
    block = min(block, seq)
    local_bu = _swap_axes((_split_blocks(bu[0], block, reverse), _split_blocks(bu[1], block, reverse)))
    local_keep = None if keep is None else _split_blocks(keep, block, reverse).swapaxes(0, 1)

    def step_within_blocks(h: Complex, x: tuple[Array | None, Complex]) -> tuple[Complex, Complex]:
        h = add(scale_by(_add_state_axis(x[0]), mul(lam_bar, h)), x[1])
        return h, h

    zeros = zeros_like(index_parts(local_bu, 0))
    _, local_states = jax.lax.scan(step_within_blocks, zeros, (local_keep, local_bu), reverse=reverse)
    last_states = index_parts(local_states, 0 if reverse else -1)
    keep_products = None if local_keep is None else jax.lax.cumprod(local_keep, axis=0, reverse=reverse)
    block_keep = None if keep_products is None else keep_products[0 if reverse else -1].T
    block_decay = power(lam_bar, block)

    def step_between_blocks(h: Carry, x: tuple[Array | None, Carry]) -> tuple[Carry, Carry]:
        return add(scale_by(_add_state_axis(x[0]), mul(block_decay, h)), x[1]), h

    start = zeros_like(index_parts(last_states, (slice(None), 0))) if h0 is None else h0
    _, entering_states = jax.lax.scan(
        step_between_blocks, start, (block_keep, _swap_axes(last_states)), reverse=reverse
    )
    entering_states = _swap_axes(entering_states)
    decay = index_parts(powers(lam_bar, block), slice(None, None, -1 if reverse else 1))
    decay = decay[0][:, None, None], decay[1][:, None, None]
    h = _swap_axes(add(local_states, scale_by(_add_state_axis(keep_products), mul(decay, entering_states))))
    return _join_blocks(h[0], seq, reverse), _join_blocks(h[1], seq, reverse)


def kernel(
    lam_bar: Eigenvalues,
    bu: States,
    h0: Carry | None,
    keep: Keep,
    reverse: bool,
    block: int,
    *,
    interpret: bool = False,
) -> States:
    """Compute the states with the Pallas TPU kernel (scan_pallas.py). `interpret` runs it on any backend, slowly."""
    from valkyrie.ops import scan_pallas

    return scan_pallas.kernel(lam_bar, bu, h0, keep, reverse, block, interpret=interpret)


FORMS: dict[ScanImpl, Form] = {
    ScanImpl.sequential: scan_sequentially,
    ScanImpl.associative: scan_associatively,
    ScanImpl.blocked: scan_in_blocks,
    ScanImpl.kernel: kernel,
}
"""The function of each implementation. `form_for_backend` selects one for a backend."""


def form_for_backend(impl: ScanImpl, backend: str) -> Form:
    """Return the function of an implementation on a backend. The kernel is interpreted unless on a TPU."""
    is_interpreted = impl is ScanImpl.kernel and not get_platform(backend).runs_pallas_tpu
    return partial(kernel, interpret=True) if is_interpreted else FORMS[impl]


def _add_state_axis(keep: Array | None) -> Array | None:
    """Return `keep` with a trailing state axis of length 1."""
    return None if keep is None else keep[..., None]


def _swap_axes(a: Complex) -> Complex:
    """Swap the first two axes: batch-major to time-major and back."""
    return a[0].swapaxes(0, 1), a[1].swapaxes(0, 1)


def _split_blocks(x: Array, block: int, reverse: bool) -> Array:
    """Reshape (batch, seq, ...) to (batch, block, number of blocks, ...), padded after the last visited position."""
    batch, seq, *rest = x.shape
    padding = -seq % block
    if padding:
        widths = [(0, 0), (padding, 0) if reverse else (0, padding), *[(0, 0)] * len(rest)]
        x = jnp.pad(x, widths)
    return x.reshape(batch, -1, block, *rest).swapaxes(1, 2)


def _join_blocks(x: Array, seq: int, reverse: bool) -> Array:
    """Reshape (batch, block, number of blocks, state) to (batch, seq, state), without the padding."""
    batch, block, count, state = x.shape
    x = x.swapaxes(1, 2).reshape(batch, count * block, state)
    return x[:, -seq:] if reverse else x[:, :seq]
