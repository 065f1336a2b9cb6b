"""The S5 recurrence: selects an implementation and defines the custom derivative that all of them share.

Computes h_t = keep_t Lambda_bar h_{t-1} + bu_t, the part of an S5 layer between its two projections (arXiv 2208.04933,
equation 2). `keep_t` is 0 where a document starts and 1 elsewhere. The backward pass runs the same recurrence in the
opposite direction with the conjugate of Lambda_bar. For every implementation, the only intermediate values saved for it
are the states and, if the sequence is sharded, the state that enters each shard.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Float32

from valkyrie.hardware.platforms import get_platform
from valkyrie.ops.choices import SCAN_STATES, ScanImpl
from valkyrie.ops.scan_complex import (
    Carry,
    Eigenvalues,
    States,
    add,
    as_float32,
    conj,
    index_parts,
    mul,
    power,
    powers,
    scale_by,
    zeros_like,
)
from valkyrie.ops.scan_forms import FORMS, Keep, form_for_backend

DEFAULT_BLOCK = 128
"""Block length of the blocked form. With 4096 positions it takes 128 + 32 sequential steps."""


class _ScanSettings(NamedTuple):
    """Settings of a recurrence that are known at compile time."""

    impl: ScanImpl
    backend: str
    block: int
    reverse: bool
    axis_names: tuple[str, ...]


def resolve_impl(impl: ScanImpl, backend: str | None = None) -> ScanImpl:
    """Resolve `auto` to the default implementation of a backend (None: JAX's default backend).

    Raises ValueError for `auto` on a backend without a default.
    """
    if impl is not ScanImpl.auto:
        return impl
    backend = jax.default_backend() if backend is None else backend
    default = get_platform(backend).scan
    if default is None:
        names = ", ".join(form.value for form in FORMS)
        raise ValueError(
            f"model.s5.scan=auto has no default on backend {backend!r}. Set model.s5.scan to one of {names}."
        )
    return ScanImpl(default)


def supports_vma_check(impl: ScanImpl, backend: str | None = None) -> bool:
    """Return whether `impl` works inside `jax.shard_map(..., check_vma=True)`.

    All implementations do except the interpreted kernel. With `check_vma=False`, JAX all-reduces the gradients of
    values that are replicated over a mesh axis and then divides them, which needlessly sends arrays of shape (batch,
    seq, state).
    """
    backend = jax.default_backend() if backend is None else backend
    return resolve_impl(impl, backend) is not ScanImpl.kernel or get_platform(backend).runs_pallas_tpu


def linear_recurrence(
    lam_bar: Eigenvalues,
    bu: States,
    *,
    h0: Carry | None = None,
    keep: Float[Array, "batch seq"] | Bool[Array, "batch seq"] | None = None,
    reverse: bool = False,
    impl: ScanImpl = ScanImpl.auto,
    block: int = DEFAULT_BLOCK,
    backend: str | None = None,
) -> States:
    """Compute all states h_t = keep_t Lambda_bar h_{t-1} + bu_t in float32, as (real, imaginary).

    `h0` is the state before the first position (None: zero) and `keep` is 0 at the start of a document (None: one
    document). With `reverse` the recurrence runs from the last position to the first, `h0` is the state after the last
    position, and `keep` is 0 at the end of a document. Inputs of other dtypes are cast to float32.

    Differentiable in reverse mode with respect to `lam_bar`, `bu` and `h0`; `keep` is a constant. The backward pass
    needs only the states. All implementations agree to float32 rounding. Raises ValueError for a block below 1.
    """
    backend = jax.default_backend() if backend is None else backend
    settings = _ScanSettings(resolve_impl(impl, backend), backend, block, reverse, ())
    return _run_checked(settings, lam_bar, bu, h0, keep)


def sharded_linear_recurrence(
    lam_bar: Eigenvalues,
    bu: States,
    *,
    axis_names: tuple[str, ...],
    h0: Carry | None = None,
    keep: Float[Array, "batch seq"] | Bool[Array, "batch seq"] | None = None,
    reverse: bool = False,
    impl: ScanImpl = ScanImpl.auto,
    block: int = DEFAULT_BLOCK,
    backend: str | None = None,
) -> States:
    """Return this device's part of the states of `linear_recurrence`. Call it inside `jax.shard_map`.

    `seq` is sharded evenly over the mesh axes `axis_names`, the first one major. `bu` and `keep` hold this device's
    positions; `lam_bar` and `h0` are replicated over those axes.

    Each device first scans its own positions from a zero state. An all-gather of the final states (shards * batch *
    state complex numbers) and of the products of `keep` (shards * batch) then gives each device the state that enters
    its shard. The device adds this state, times powers of Lambda_bar and products of `keep`, to the states of its scan.
    States and derivatives match the unsharded version up to float32 rounding.

    Raises ValueError if `axis_names` is empty or `block` is below 1.
    """
    if not axis_names:
        raise ValueError("axis_names is empty. List the mesh axes that shard the sequence.")
    backend = jax.default_backend() if backend is None else backend
    settings = _ScanSettings(resolve_impl(impl, backend), backend, block, reverse, tuple(axis_names))
    return _run_checked(settings, lam_bar, bu, h0, keep)


def recurrence_step(lam_bar: Eigenvalues, h: Carry, bu_t: Carry) -> Carry:
    """Return the next state, Lambda_bar h + bu_t: the streaming form of `linear_recurrence`."""
    return add(mul(as_float32(lam_bar), as_float32(h)), as_float32(bu_t))


def _run_checked(
    settings: _ScanSettings,
    lam_bar: Eigenvalues,
    bu: States,
    h0: Carry | None,
    keep: Float[Array, "batch seq"] | Bool[Array, "batch seq"] | None,
) -> States:
    """Check the arguments, cast inputs to float32, make them vary over the same mesh axes, and compute the states."""
    if settings.block < 1:
        raise ValueError(f"block={settings.block}: a block has at least 1 position. Use block=1 or more.")
    bu = as_float32(bu)
    assert bu[0].shape[1] > 0, "the sequence is empty"
    # Inside shard_map, the inputs of a custom derivative must vary over the same axes. Adding a zero that varies like
    # bu does this, and the transpose of the addition sums the devices' gradients. The zeros get their shapes from sums,
    # which jit does not compute, because explicit mesh axes do not allow slices there.
    varying_zero, varying_zeros = jnp.zeros_like(bu[0].sum((0, 1))), jnp.zeros_like(bu[0].sum(1))
    lam_bar = add(as_float32(lam_bar), (varying_zero, varying_zero))
    h0 = None if h0 is None else add(as_float32(h0), (varying_zeros, varying_zeros))
    keep_f32 = None if keep is None else keep.astype(jnp.float32) + jnp.zeros_like(bu[0].sum(2))
    return _recurrence(settings, lam_bar, bu, h0, keep_f32)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _recurrence(settings: _ScanSettings, lam_bar: Eigenvalues, bu: States, h0: Carry | None, keep: Keep) -> States:
    return _evaluate(settings, lam_bar, bu, h0, keep)[0]


_Residuals = tuple[Eigenvalues, States, Carry | None, Carry | None, Keep]
"""Values for the backward pass: lam_bar, the states, h0, the state that enters this device's shard, and keep."""


def _forward(
    settings: _ScanSettings, lam_bar: Eigenvalues, bu: States, h0: Carry | None, keep: Keep
) -> tuple[States, _Residuals]:
    h, entering_state = _evaluate(settings, lam_bar, bu, h0, keep)
    h = checkpoint_name(h[0], SCAN_STATES), checkpoint_name(h[1], SCAN_STATES)
    # The returned states must differ from the saved ones by an operation, here a no-op. Otherwise a policy that saves
    # the states saves them twice inside `jax.shard_map`: as a residual and as a result.
    returned = jnp.expand_dims(h[0], 0).squeeze(0), jnp.expand_dims(h[1], 0).squeeze(0)
    return returned, (lam_bar, h, h0, entering_state, keep)


def _backward(
    settings: _ScanSettings, residuals: _Residuals, g: States
) -> tuple[Eigenvalues, States, Carry | None, Float32[Array, "batch seq"] | None]:
    """Return the gradients. The gradient of bu is a_t = g_t + keep_{t+1} conj(Lambda_bar) a_{t+1}."""
    lam_bar, h, h0, entering_state, keep = residuals
    a, _ = _evaluate(
        settings._replace(reverse=not settings.reverse), conj(lam_bar), g, None, _next_visited_keep(settings, keep)
    )
    first_index, all_but_last, all_but_first = _visit_slices(settings.reverse)
    products = mul(conj(index_parts(h, all_but_last)), index_parts(a, all_but_first))
    keep_weights = None if keep is None else keep[all_but_first][:, :, None]
    products = scale_by(keep_weights, products)
    d_lam = products[0].sum((0, 1)), products[1].sum((0, 1))
    a_first = scale_by(None if keep is None else keep[first_index][:, None], index_parts(a, first_index))
    if entering_state is not None:
        entry_products = mul(conj(entering_state), a_first)
        d_lam = add(d_lam, (entry_products[0].sum(0), entry_products[1].sum(0)))
    d_h0 = None
    if h0 is not None:
        d_h0 = mul(conj(lam_bar), a_first)
        if settings.axis_names:
            d_h0 = scale_by((_visit_rank(settings) == 0).astype(jnp.float32), d_h0)
    return d_lam, a, d_h0, None if keep is None else jnp.zeros_like(keep)


_recurrence.defvjp(_forward, _backward)


def _evaluate(
    settings: _ScanSettings, lam_bar: Eigenvalues, bu: States, h0: Carry | None, keep: Keep
) -> tuple[States, Carry | None]:
    """Compute the recurrence over the positions on this device.

    Returns the states, and the state before the first position that the recurrence visits here (None: zero).
    """
    form = form_for_backend(settings.impl, settings.backend)
    if not settings.axis_names:
        return form(lam_bar, bu, h0, keep, settings.reverse, settings.block), h0
    local_states = form(lam_bar, bu, None, keep, settings.reverse, settings.block)
    entering_state = _entering_state(settings, lam_bar, local_states, h0, keep)
    decay = index_parts(powers(lam_bar, bu[0].shape[1]), slice(None, None, -1 if settings.reverse else 1))
    carried_in = mul(decay, (entering_state[0][:, None], entering_state[1][:, None]))
    if keep is not None:
        carried_in = scale_by(jax.lax.cumprod(keep, axis=1, reverse=settings.reverse)[:, :, None], carried_in)
    return add(local_states, carried_in), entering_state


def _entering_state(
    settings: _ScanSettings, lam_bar: Eigenvalues, local_states: States, h0: Carry | None, keep: Keep
) -> Carry:
    """Return the state before this device's positions, from the last states of the shards before it."""
    last_states = index_parts(local_states, (slice(None), 0 if settings.reverse else -1))
    shard_decay = power(lam_bar, local_states[0].shape[1])
    gather = partial(jax.lax.all_gather, axis_name=settings.axis_names)
    shards_last = gather(last_states[0]), gather(last_states[1])
    shards_keep = None if keep is None else gather(keep.prod(axis=1))
    rank = _visit_rank(settings)

    def advance(h: Carry, shard: tuple[Array, Array | None, Carry]) -> tuple[Carry, None]:
        position, shard_keep, last_states = shard
        advanced = add(scale_by(None if shard_keep is None else shard_keep[:, None], mul(shard_decay, h)), last_states)
        is_before = position < rank
        return (jnp.where(is_before, advanced[0], h[0]), jnp.where(is_before, advanced[1], h[1])), None

    positions = jnp.arange(_shard_count(settings))
    if settings.reverse:
        positions = positions[::-1]
    start = zeros_like(last_states) if h0 is None else h0
    entering_state, _ = jax.lax.scan(advance, start, (positions, shards_keep, shards_last), reverse=settings.reverse)
    return entering_state


def _next_visited_keep(settings: _ScanSettings, keep: Keep) -> Keep:
    """Shift `keep` by one position against the scan, across shards: position t gets keep_{t+1} (`reverse`: keep_{t-1}).

    The value past the end is arbitrary, because it only multiplies a zero state.
    """
    if keep is None:
        return None
    first_index, _, all_but_first = _visit_slices(settings.reverse)
    if settings.axis_names:
        neighbour = -1 if settings.reverse else 1
        last = _shard_count(settings) - 1
        pairs = [(shard, shard - neighbour) for shard in range(last + 1) if 0 <= shard - neighbour <= last]
        neighbour_keep = jax.lax.ppermute(keep[first_index], settings.axis_names, pairs)
    else:
        neighbour_keep = jnp.ones_like(keep[first_index])
    parts = (
        [neighbour_keep[:, None], keep[all_but_first]]
        if settings.reverse
        else [keep[all_but_first], neighbour_keep[:, None]]
    )
    return jnp.concatenate(parts, axis=1)


def _visit_slices(reverse: bool) -> tuple[tuple[slice, int], tuple[slice, slice], tuple[slice, slice]]:
    """Return (batch, seq) indices of the first visited position, all but the last visited, and all but the first."""
    whole_batch, all_but_last, all_but_first = slice(None), slice(None, -1), slice(1, None)
    if reverse:
        return (whole_batch, -1), (whole_batch, all_but_first), (whole_batch, all_but_last)
    return (whole_batch, 0), (whole_batch, all_but_last), (whole_batch, all_but_first)


def _shard_count(settings: _ScanSettings) -> int:
    return jax.lax.axis_size(settings.axis_names)


def _visit_rank(settings: _ScanSettings) -> Array:
    """Return the number of shards that the recurrence visits before this device's shard."""
    index = jax.lax.axis_index(settings.axis_names)
    return _shard_count(settings) - 1 - index if settings.reverse else index
