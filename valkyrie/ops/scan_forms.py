"""Four implementations ("forms") of a linear recurrence on one device.

Each form returns h_t = keep_t Lambda_bar h_{t-1} + bu_t for all t (with `reverse`, t runs from the end). They differ
only in the order of float32 roundings. Forms define no derivative; `valkyrie.ops.scan` defines one rule for all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from valkyrie.hardware.platforms import platform_of
from valkyrie.ops.choices import ScanImpl
from valkyrie.ops.scan_complex import Carry, Complex, Eigenvalues, States, add, at, mul, powers, scaled, zeros_like
from valkyrie.ops.scan_complex import power as power_of

Keep = Float32[Array, "batch seq"] | None
"""1 where a state continues from its neighbour, 0 at the start of a document; None: it always continues."""

Form = Callable[[Eigenvalues, States, Carry | None, Keep, bool, int], States]

SEQUENTIAL_UNROLL = 4
"""Steps of the sequential form per loop iteration. On CPU, 4 saves 10 to 25% for most sizes, and 8 saves nothing."""


def sequential(lam_bar: Eigenvalues, bu: States, h0: Carry | None, keep: Keep, reverse: bool, block: int) -> States:
    """Compute the states one position at a time: least arithmetic and memory, no parallelism over positions."""
    del block

    def step(h: Carry, x: tuple[Float32[Array, " batch"] | None, Carry]) -> tuple[Carry, Carry]:
        keep_t, bu_t = x
        h = add(scaled(_column(keep_t), mul(lam_bar, h)), bu_t)
        return h, h

    start = zeros_like(at(bu, (slice(None), 0))) if h0 is None else h0
    inputs = (None if keep is None else keep.T, _swap(bu))
    _, h = jax.lax.scan(step, start, inputs, reverse=reverse, unroll=SEQUENTIAL_UNROLL)
    return _swap(h)


def associative(lam_bar: Eigenvalues, bu: States, h0: Carry | None, keep: Keep, reverse: bool, block: int) -> States:
    """Compute the states by `jax.lax.associative_scan`: log2(seq) passes over all positions; slow to compile."""
    del block
    seq = bu[0].shape[1]
    if h0 is not None:
        first = seq - 1 if reverse else 0
        entering = scaled(None if keep is None else _column(keep[:, first]), mul(lam_bar, h0))
        bu = bu[0].at[:, first].add(entering[0]), bu[1].at[:, first].add(entering[1])
    ones = jnp.ones((1, seq, 1), jnp.float32) if keep is None else keep[:, :, None]
    decay = scaled(ones, lam_bar)

    def combine(left: tuple[Complex, Complex], right: tuple[Complex, Complex]) -> tuple[Complex, Complex]:
        return mul(right[0], left[0]), add(mul(right[0], left[1]), right[1])

    _, h = jax.lax.associative_scan(combine, (decay, bu), reverse=reverse, axis=1)
    return h


def blocked(lam_bar: Eigenvalues, bu: States, h0: Carry | None, keep: Keep, reverse: bool, block: int) -> States:
    """Compute the states by `block` steps over all blocks in parallel, one step per block, and one correction.

    The length is padded to a multiple of `block` at the end of the recurrence, so padding does not affect states.
    """
    seq = bu[0].shape[1]
    block = min(block, seq)
    local_bu = _swap((_blocks(bu[0], block, reverse), _blocks(bu[1], block, reverse)))
    local_keep = None if keep is None else _blocks(keep, block, reverse).swapaxes(0, 1)

    def within(h: Complex, x: tuple[Array | None, Complex]) -> tuple[Complex, Complex]:
        h = add(scaled(_column(x[0]), mul(lam_bar, h)), x[1])
        return h, h

    _, local = jax.lax.scan(within, zeros_like(at(local_bu, 0)), (local_keep, local_bu), reverse=reverse)
    last = at(local, 0 if reverse else -1)
    kept = None if local_keep is None else jax.lax.cumprod(local_keep, axis=0, reverse=reverse)
    kept_through = None if kept is None else kept[0 if reverse else -1].T
    through = power_of(lam_bar, block)

    def between(h: Carry, x: tuple[Array | None, Carry]) -> tuple[Carry, Carry]:
        return add(scaled(_column(x[0]), mul(through, h)), x[1]), h

    start = zeros_like(at(last, (slice(None), 0))) if h0 is None else h0
    _, entering = jax.lax.scan(between, start, (kept_through, _swap(last)), reverse=reverse)
    entering = _swap(entering)
    decay = at(powers(lam_bar, block), slice(None, None, -1 if reverse else 1))
    decay = decay[0][:, None, None], decay[1][:, None, None]
    h = _swap(add(local, scaled(_column(kept), mul(decay, entering))))
    return _joined(h[0], seq, reverse), _joined(h[1], seq, reverse)


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
    """Compute the states by the Pallas TPU kernel (scan_pallas.py). `interpret` runs it on any backend, slowly."""
    from valkyrie.ops import scan_pallas

    return scan_pallas.kernel(lam_bar, bu, h0, keep, reverse, block, interpret=interpret)


FORMS: dict[ScanImpl, Form] = {
    ScanImpl.sequential: sequential,
    ScanImpl.associative: associative,
    ScanImpl.blocked: blocked,
    ScanImpl.kernel: kernel,
}
"""The function of each implementation."""


def form_on(impl: ScanImpl, backend: str) -> Form:
    """Return the function of an implementation on a backend. The kernel is interpreted unless on a TPU."""
    interpreted = impl is ScanImpl.kernel and not platform_of(backend).runs_pallas_tpu
    return partial(kernel, interpret=True) if interpreted else FORMS[impl]


def _column(keep: Array | None) -> Array | None:
    """Return keep with a trailing state axis of length 1."""
    return None if keep is None else keep[..., None]


def _swap(a: Complex) -> Complex:
    """Swap the first two axes: batch-major to time-major and back."""
    return a[0].swapaxes(0, 1), a[1].swapaxes(0, 1)


def _blocks(x: Array, block: int, reverse: bool) -> Array:
    """Reshape (batch, seq, ...) to (batch, block, number of blocks, ...), padded at the end of the recurrence."""
    batch, seq, *rest = x.shape
    padding = -seq % block
    if padding:
        widths = [(0, 0), (padding, 0) if reverse else (0, padding), *[(0, 0)] * len(rest)]
        x = jnp.pad(x, widths)
    return x.reshape(batch, -1, block, *rest).swapaxes(1, 2)


def _joined(x: Array, seq: int, reverse: bool) -> Array:
    """Reshape (batch, block, number of blocks, state) to (batch, seq, state), without the padding."""
    batch, block, count, state = x.shape
    x = x.swapaxes(1, 2).reshape(batch, count * block, state)
    return x[:, -seq:] if reverse else x[:, :seq]
