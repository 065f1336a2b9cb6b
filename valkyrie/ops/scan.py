"""The S5 recurrence: picks an implementation, and defines the derivative of all implementations.

h_t = keep_t Lambda_bar h_{t-1} + bu_t is the part of an S5 layer between its two projections (arXiv 2208.04933,
equation 2). The backward pass is the same recurrence in the opposite direction with the conjugate of Lambda_bar. It
needs only the states, for every implementation and for any number of sequence shards.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Float32

from valkyrie.hardware.platforms import platform_of
from valkyrie.ops.choices import STATES, ScanImpl
from valkyrie.ops.scan_complex import (
    Carry,
    Eigenvalues,
    States,
    add,
    as_float32,
    at,
    conj,
    mul,
    power,
    powers,
    scaled,
    zeros_like,
)
from valkyrie.ops.scan_forms import FORMS, Keep, form_on

DEFAULT_BLOCK = 128
"""Block length of the blocked form. With 4096 positions it takes 128 + 32 sequential steps."""


class _Plan(NamedTuple):
    """Static settings of a recurrence."""

    impl: ScanImpl
    backend: str
    block: int
    reverse: bool
    axis_names: tuple[str, ...]


def chosen_impl(impl: ScanImpl, backend: str | None = None) -> ScanImpl:
    """Resolve `auto` to the default implementation of a backend (None: JAX's default backend).

    Raises ValueError for `auto` on a backend without a default.
    """
    if impl is not ScanImpl.auto:
        return impl
    backend = jax.default_backend() if backend is None else backend
    default = platform_of(backend).scan
    if default is None:
        named = ", ".join(form.value for form in FORMS)
        raise ValueError(f"scan=auto has no default for backend {backend!r}. Name one of {named}.")
    return ScanImpl(default)


def is_checkable(impl: ScanImpl, backend: str | None = None) -> bool:
    """Whether a recurrence works inside a `jax.shard_map` that checks over which mesh axes values vary.

    All do except the interpreted kernel. Without the check, gradients of values that are replicated over a mesh axis
    are summed over it and divided again, which sends arrays of shape (batch, seq, state) for nothing.
    """
    backend = jax.default_backend() if backend is None else backend
    return chosen_impl(impl, backend) is not ScanImpl.kernel or platform_of(backend).runs_pallas_tpu


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
    position, and `keep` is 0 at the end of a document. Other float inputs are cast to float32.

    Differentiable in reverse mode with respect to `lam_bar`, `bu` and `h0`; `keep` is a constant. The backward pass
    needs only the states. All implementations agree to float32 rounding. Raises ValueError for a block below 1.
    """
    backend = jax.default_backend() if backend is None else backend
    plan = _Plan(chosen_impl(impl, backend), backend, block, reverse, ())
    return _checked(plan, lam_bar, bu, h0, keep)


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
    positions; `lam_bar` and `h0` are replicated over those axes. Each device scans its positions from a zero state, all
    devices gather the last states (shards * batch * state complex numbers, and shards * batch of keep), and each adds
    the entering state times powers of Lambda_bar. Equal to the unsharded result to float32 rounding, with the same
    derivatives.
    """
    if not axis_names:
        raise ValueError("a sharded recurrence was asked for over no mesh axes. Name the axes that split seq.")
    backend = jax.default_backend() if backend is None else backend
    plan = _Plan(chosen_impl(impl, backend), backend, block, reverse, tuple(axis_names))
    return _checked(plan, lam_bar, bu, h0, keep)


def recurrence_step(lam_bar: Eigenvalues, h: Carry, bu_t: Carry) -> Carry:
    """Return the next state, Lambda_bar h + bu_t: the streaming form of `linear_recurrence`."""
    return add(mul(as_float32(lam_bar), as_float32(h)), as_float32(bu_t))


def _checked(
    plan: _Plan,
    lam_bar: Eigenvalues,
    bu: States,
    h0: Carry | None,
    keep: Float[Array, "batch seq"] | Bool[Array, "batch seq"] | None,
) -> States:
    """Return the states, after casting every input to float32 and making all vary over the same mesh axes."""
    if plan.block < 1:
        raise ValueError(f"a scan block of {plan.block} positions was asked for: it must be at least 1.")
    bu = as_float32(bu)
    assert bu[0].shape[1] > 0, "a recurrence over no positions"
    # Inside shard_map, the inputs of a custom derivative must vary over the same axes. Adding a zero that varies like
    # bu does this, and the transpose of the addition sums the devices' gradients. The zeros get their shapes from sums,
    # which jit does not compute, because explicit mesh axes do not allow slices there.
    zero, zeros = jnp.zeros_like(bu[0].sum((0, 1))), jnp.zeros_like(bu[0].sum(1))
    lam_bar = add(as_float32(lam_bar), (zero, zero))
    h0 = None if h0 is None else add(as_float32(h0), (zeros, zeros))
    kept = None if keep is None else keep.astype(jnp.float32) + jnp.zeros_like(bu[0].sum(2))
    return _recurrence(plan, lam_bar, bu, h0, kept)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _recurrence(plan: _Plan, lam_bar: Eigenvalues, bu: States, h0: Carry | None, keep: Keep) -> States:
    return _evaluate(plan, lam_bar, bu, h0, keep)[0]


_Saved = tuple[Eigenvalues, States, Carry | None, Carry | None, Keep]


def _forward(plan: _Plan, lam_bar: Eigenvalues, bu: States, h0: Carry | None, keep: Keep) -> tuple[States, _Saved]:
    h, entering = _evaluate(plan, lam_bar, bu, h0, keep)
    h = checkpoint_name(h[0], STATES), checkpoint_name(h[1], STATES)
    # The returned states must differ from the saved ones by an operation, here a no-op. Otherwise a policy that saves
    # the states saves them twice inside `jax.shard_map`: as a residual and as a result.
    leaving = jnp.expand_dims(h[0], 0).squeeze(0), jnp.expand_dims(h[1], 0).squeeze(0)
    return leaving, (lam_bar, h, h0, entering, keep)


def _backward(
    plan: _Plan, saved: _Saved, g: States
) -> tuple[Eigenvalues, States, Carry | None, Float32[Array, "batch seq"] | None]:
    """Return the gradients, from a_t = g_t + keep_{t+1} conj(Lambda_bar) a_{t+1} and its products with the states."""
    lam_bar, h, h0, entering, keep = saved
    a, _ = _evaluate(plan._replace(reverse=not plan.reverse), conj(lam_bar), g, None, _next_keep(plan, keep))
    first, before, after = _ends(plan.reverse)
    products = mul(conj(at(h, before)), at(a, after))
    weights = None if keep is None else keep[after][:, :, None]
    products = scaled(weights, products)
    d_lam = products[0].sum((0, 1)), products[1].sum((0, 1))
    a_first = scaled(None if keep is None else keep[first][:, None], at(a, first))
    if entering is not None:
        at_entry = mul(conj(entering), a_first)
        d_lam = add(d_lam, (at_entry[0].sum(0), at_entry[1].sum(0)))
    d_h0 = None
    if h0 is not None:
        d_h0 = mul(conj(lam_bar), a_first)
        if plan.axis_names:
            d_h0 = scaled((_rank(plan) == 0).astype(jnp.float32), d_h0)
    return d_lam, a, d_h0, None if keep is None else jnp.zeros_like(keep)


_recurrence.defvjp(_forward, _backward)


def _evaluate(
    plan: _Plan, lam_bar: Eigenvalues, bu: States, h0: Carry | None, keep: Keep
) -> tuple[States, Carry | None]:
    """Return the states of this device's positions, and the state before the first of them (None: zero)."""
    form = form_on(plan.impl, plan.backend)
    if not plan.axis_names:
        return form(lam_bar, bu, h0, keep, plan.reverse, plan.block), h0
    local = form(lam_bar, bu, None, keep, plan.reverse, plan.block)
    entering = _entering(plan, lam_bar, local, h0, keep)
    decay = at(powers(lam_bar, bu[0].shape[1]), slice(None, None, -1 if plan.reverse else 1))
    carried = mul(decay, (entering[0][:, None], entering[1][:, None]))
    if keep is not None:
        carried = scaled(jax.lax.cumprod(keep, axis=1, reverse=plan.reverse)[:, :, None], carried)
    return add(local, carried), entering


def _entering(plan: _Plan, lam_bar: Eigenvalues, local: States, h0: Carry | None, keep: Keep) -> Carry:
    """Return the state before this device's positions, from the last local states of the shards before it."""
    last = at(local, (slice(None), 0 if plan.reverse else -1))
    through = power(lam_bar, local[0].shape[1])
    gather = partial(jax.lax.all_gather, axis_name=plan.axis_names)
    shards_last = gather(last[0]), gather(last[1])
    shards_keep = None if keep is None else gather(keep.prod(axis=1))
    rank = _rank(plan)

    def advance(h: Carry, x: tuple[Array, Array | None, Carry]) -> tuple[Carry, None]:
        position, kept, last = x
        onward = add(scaled(None if kept is None else kept[:, None], mul(through, h)), last)
        passed = position < rank
        return (jnp.where(passed, onward[0], h[0]), jnp.where(passed, onward[1], h[1])), None

    positions = jnp.arange(_shards(plan))
    if plan.reverse:
        positions = positions[::-1]
    start = zeros_like(last) if h0 is None else h0
    entering, _ = jax.lax.scan(advance, start, (positions, shards_keep, shards_last), reverse=plan.reverse)
    return entering


def _next_keep(plan: _Plan, keep: Keep) -> Keep:
    """Return the `keep` of the next visited position, for each position (1 after the last)."""
    if keep is None:
        return None
    first, _, after = _ends(plan.reverse)
    if plan.axis_names:
        neighbour = -1 if plan.reverse else 1
        last = _shards(plan) - 1
        moves = [(shard, shard - neighbour) for shard in range(last + 1) if 0 <= shard - neighbour <= last]
        beyond = jax.lax.ppermute(keep[first], plan.axis_names, moves)
    else:
        beyond = jnp.ones_like(keep[first])
    edge = [beyond[:, None], keep[after]] if plan.reverse else [keep[after], beyond[:, None]]
    return jnp.concatenate(edge, axis=1)


def _ends(reverse: bool) -> tuple[tuple[slice, int], tuple[slice, slice], tuple[slice, slice]]:
    """Return (batch, seq) indices of the first visited position, all but the last visited, and all but the first."""
    everything, upto, since = slice(None), slice(None, -1), slice(1, None)
    if reverse:
        return (everything, -1), (everything, since), (everything, upto)
    return (everything, 0), (everything, upto), (everything, since)


def _shards(plan: _Plan) -> int:
    """Return the number of sequence shards."""
    return jax.lax.axis_size(plan.axis_names)


def _rank(plan: _Plan) -> Array:
    """Return the number of shards that the recurrence visits before this device's shard."""
    index = jax.lax.axis_index(plan.axis_names)
    return _shards(plan) - 1 - index if plan.reverse else index
