"""Tests of the S5 recurrence: every form against float64 loops, SciPy and the other forms, also sharded.

The TPU kernel is tested in test_scan_kernel.py.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.signal
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from helpers import mark_slow_except
from valkyrie.ops.choices import ScanImpl
from valkyrie.ops.scan import linear_recurrence, recurrence_step, resolve_impl, sharded_linear_recurrence
from valkyrie.ops.scan_complex import power, powers

BATCH, SEQ, STATE, BLOCK = 2, 13, 3, 4
FORMS = [ScanImpl.sequential, ScanImpl.associative, ScanImpl.blocked]


def _pair(x: np.ndarray) -> tuple[jax.Array, jax.Array]:
    return jnp.asarray(np.real(x), jnp.float32), jnp.asarray(np.imag(x), jnp.float32)


def _complex(pair: tuple[jax.Array, jax.Array]) -> np.ndarray:
    return np.asarray(pair[0], np.float64) + 1j * np.asarray(pair[1], np.float64)


def _make_inputs(seq: int = SEQ, seed: int = 0) -> dict[str, np.ndarray]:
    """Return the inputs `lam`, `bu`, `h0` and `keep` of a recurrence, and the `weight` of each state in the loss.

    All values are exact in float32. `keep` is 0 at about a fifth of the positions, and 1 at the others.
    """
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        pair = rng.normal(size=(2, *shape)).astype(np.float32).astype(np.float64)
        return pair[0] + 1j * pair[1]

    lam = np.exp(np.array([-0.02 + 0.3j, -0.3 - 2.0j, -0.001 + 1.0j])).astype(np.complex64).astype(np.complex128)
    keep = (rng.random((BATCH, seq)) > 0.2).astype(np.float64)
    return {
        "lam": lam,
        "bu": normal(BATCH, seq, STATE),
        "h0": normal(BATCH, STATE),
        "keep": keep,
        "weight": normal(BATCH, seq, STATE),
    }


def _loop(lam: np.ndarray, bu: np.ndarray, h0: np.ndarray | None, keep: np.ndarray | None, reverse: bool) -> np.ndarray:
    """Return the states of the recurrence in complex128, computed one position at a time."""
    out = np.zeros_like(bu)
    h = np.zeros_like(bu[:, 0]) if h0 is None else h0
    for t in reversed(range(bu.shape[1])) if reverse else range(bu.shape[1]):
        h = (1.0 if keep is None else keep[:, t, None]) * lam * h + bu[:, t]
        out[:, t] = h
    return out


def _loss(weight: np.ndarray, h: np.ndarray) -> float:
    return float(np.real(np.conj(weight) * h).sum())


@partial(jax.jit, static_argnames=("impl", "reverse", "block"))
def _value_and_grads(lam, bu, h0, keep, weight, *, impl, reverse, block=BLOCK):
    def loss(lam, bu, h0):
        h = linear_recurrence(lam, bu, h0=h0, keep=keep, reverse=reverse, impl=impl, block=block)
        return (weight[0] * h[0] + weight[1] * h[1]).sum(), h

    (_, h), grads = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(lam, bu, h0)
    return h, grads


def _numerical_gradient(
    inputs: dict[str, np.ndarray], name: str, step: float, keep: np.ndarray | None, reverse: bool
) -> np.ndarray:
    """Return the gradient of the loss for one input as d/dre + i d/dim, by central differences of the float64 loop."""
    gradient = np.zeros_like(inputs[name])
    for index in np.ndindex(gradient.shape):
        for direction in (1.0, 1j):
            sides = []
            for sign in (1, -1):
                perturbed = {key: inputs[key] for key in ("lam", "bu", "h0")}
                perturbed[name] = perturbed[name].copy()
                perturbed[name][index] += sign * step * direction
                h = _loop(perturbed["lam"], perturbed["bu"], perturbed["h0"], keep, reverse)
                sides.append(_loss(inputs["weight"], h))
            gradient[index] += direction * (sides[0] - sides[1]) / (2 * step)
    return gradient


@pytest.mark.parametrize("resets", mark_slow_except([True, False], [True]), ids=["resets", "unbroken"])
@pytest.mark.parametrize("reverse", mark_slow_except([False, True], [True]), ids=["forward", "reverse"])
def test_values_and_gradients_of_every_form_equal_a_float64_loop(reverse: bool, resets: bool) -> None:
    inputs = _make_inputs()
    keep = inputs["keep"] if resets else None
    expected = _loop(inputs["lam"], inputs["bu"], inputs["h0"], keep, reverse)
    expected_gradients = [
        _numerical_gradient(inputs, "lam", 1e-6, keep, reverse),
        _numerical_gradient(inputs, "bu", 1.0, keep, reverse),
        _numerical_gradient(inputs, "h0", 1.0, keep, reverse),
    ]
    args = [_pair(inputs[name]) for name in ("lam", "bu", "h0")]
    keep_array = None if keep is None else jnp.asarray(keep, jnp.float32)
    for impl in FORMS:
        h, grads = _value_and_grads(*args, keep_array, _pair(inputs["weight"]), impl=impl, reverse=reverse)
        np.testing.assert_allclose(_complex(h), expected, rtol=2e-6, atol=2e-6, err_msg=impl.value)
        for got, want in zip(grads, expected_gradients, strict=True):
            np.testing.assert_allclose(_complex(got), want, rtol=1e-5, atol=1e-5, err_msg=impl.value)


@pytest.mark.parametrize("seq", mark_slow_except([1, 4, 9], [9]))
def test_blocked_form_supports_every_length(seq: int) -> None:
    inputs = _make_inputs(seq)
    for reverse in (False, True):
        expected = _loop(inputs["lam"], inputs["bu"], inputs["h0"], inputs["keep"], reverse)
        got = linear_recurrence(
            _pair(inputs["lam"]),
            _pair(inputs["bu"]),
            h0=_pair(inputs["h0"]),
            keep=jnp.asarray(inputs["keep"] > 0),
            reverse=reverse,
            impl=ScanImpl.blocked,
            block=BLOCK,
        )
        np.testing.assert_allclose(_complex(got), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("impl", FORMS, ids=lambda impl: impl.value)
def test_equals_scipy_lfilter_over_a_long_sequence_of_slow_states(impl: ScanImpl) -> None:
    rng = np.random.default_rng(1)
    lam = np.exp(np.array([-5e-4 + 0.01j, -0.05 - 2.4j, -5e-3 + 1.3j])).astype(np.complex64)
    bu = (rng.normal(size=(1, 1000, 3)) + 1j * rng.normal(size=(1, 1000, 3))).astype(np.complex64)
    got = _complex(jax.jit(partial(linear_recurrence, impl=impl, block=64))(_pair(lam), _pair(bu)))
    for state in range(3):
        poles = np.array([1.0, -np.complex128(lam[state])])
        want = scipy.signal.lfilter([1.0], poles, bu[0, :, state].astype(np.complex128))
        # Without fused multiply-add, the powers of 1000 steps are rounded once more: the error is 4.6e-6.
        assert np.abs(got[0, :, state] - want).max() < 6e-6 * np.abs(want).max()


def test_a_reset_hides_everything_before_it() -> None:
    inputs = _make_inputs()
    keep = jnp.ones((BATCH, SEQ)).at[:, 5].set(0)
    for impl in FORMS:
        recurrence = jax.jit(partial(linear_recurrence, _pair(inputs["lam"]), keep=keep, impl=impl, block=BLOCK))
        re, im = recurrence(_pair(inputs["bu"]), h0=_pair(inputs["h0"]))
        other = inputs["bu"].copy()
        other[:, :5] += 1000.0
        re_other, im_other = recurrence(_pair(other), h0=_pair(inputs["h0"] - 7.0))
        np.testing.assert_array_equal(re[:, 5:], re_other[:, 5:])
        np.testing.assert_array_equal(im[:, 5:], im_other[:, 5:])
        assert np.abs(re[:, :5] - re_other[:, :5]).min() > 0.1


def test_streaming_equals_the_parallel_form() -> None:
    inputs = _make_inputs()
    lam, bu, h = _pair(inputs["lam"]), _pair(inputs["bu"]), _pair(inputs["h0"])
    parallel = linear_recurrence(lam, bu, h0=h, impl=ScanImpl.associative)
    for t in range(SEQ):
        h = recurrence_step(lam, h, (bu[0][:, t], bu[1][:, t]))
        np.testing.assert_allclose(h[0], parallel[0][:, t], rtol=2e-6, atol=2e-6)
        np.testing.assert_allclose(h[1], parallel[1][:, t], rtol=2e-6, atol=2e-6)


def test_two_halves_joined_by_a_state_equal_the_whole_sequence() -> None:
    inputs = _make_inputs()
    lam, bu = _pair(inputs["lam"]), _pair(inputs["bu"])
    for impl in FORMS:
        recurrence = partial(linear_recurrence, lam, impl=impl, block=BLOCK)
        whole = recurrence(bu)
        first_half = recurrence((bu[0][:, :6], bu[1][:, :6]))
        right = recurrence((bu[0][:, 6:], bu[1][:, 6:]), h0=(first_half[0][:, -1], first_half[1][:, -1]))
        np.testing.assert_allclose(right[0], whole[0][:, 6:], rtol=2e-6, atol=2e-6)
        np.testing.assert_allclose(right[1], whole[1][:, 6:], rtol=2e-6, atol=2e-6)


def test_bfloat16_inputs_give_float32_states_and_bfloat16_gradients() -> None:
    inputs = _make_inputs()
    lam = _pair(inputs["lam"])
    narrow = tuple(part.astype(jnp.bfloat16) for part in _pair(inputs["bu"]))

    def loss(bu: tuple[jax.Array, jax.Array]) -> jax.Array:
        h = linear_recurrence(lam, bu, impl=ScanImpl.sequential)
        assert h[0].dtype == h[1].dtype == jnp.float32
        return (h[0] ** 2 + h[1] ** 2).sum()

    gradient = jax.grad(loss)(narrow)
    assert gradient[0].dtype == gradient[1].dtype == jnp.bfloat16
    wide = jax.grad(loss)(tuple(part.astype(jnp.float32) for part in narrow))
    np.testing.assert_allclose(gradient[0].astype(jnp.float32), wide[0], rtol=1e-2, atol=1e-3)


def test_keep_gets_no_gradient() -> None:
    inputs = _make_inputs()

    def loss(keep: jax.Array) -> jax.Array:
        h = linear_recurrence(_pair(inputs["lam"]), _pair(inputs["bu"]), keep=keep, impl=ScanImpl.blocked, block=4)
        return h[0].sum()

    keep = jnp.asarray(inputs["keep"], jnp.float32)
    gradient = jax.grad(loss)(keep)
    assert gradient.dtype == keep.dtype
    assert not gradient.any()


@pytest.mark.parametrize("impl", FORMS, ids=lambda impl: impl.value)
def test_the_backward_pass_saves_states_and_nothing_larger(impl: ScanImpl) -> None:
    lam, bu = _pair(np.ones(8)), _pair(np.ones((2, 64, 8)))
    recurrence = partial(linear_recurrence, impl=impl, block=8)
    backward = jax.eval_shape(lambda lam, bu: jax.vjp(recurrence, lam, bu)[1], lam, bu)
    saved = sum(leaf.size for leaf in jax.tree.leaves(backward))
    states = 2 * 2 * 64 * 8
    assert states <= saved <= states + 4 * 8, f"{saved} numbers saved for {states} in the states"


def _mesh(axis_type: AxisType = AxisType.Auto, **shape: int) -> jax.sharding.Mesh:
    return jax.make_mesh(tuple(shape.values()), tuple(shape), axis_types=(axis_type,) * len(shape))


@pytest.mark.parametrize("check_vma", mark_slow_except([True, False], [True]), ids=["vma", "no_vma"])
@pytest.mark.parametrize("reverse", mark_slow_except([False, True], [True]), ids=["forward", "reverse"])
@pytest.mark.parametrize("optional_inputs", mark_slow_except(["nothing", "all"], ["all"]))
def test_a_sequence_sharded_over_two_mesh_axes_equals_the_whole(
    optional_inputs: str, reverse: bool, check_vma: bool
) -> None:
    mesh = _mesh(y=2, x=4)
    inputs = _make_inputs(seq=24, seed=3)
    keep = np.ones((BATCH, 24))
    keep[0, [4, 5, 6, 13]] = 0  # shards of 3 positions: resets at a shard's edge, inside one, and at two in a row
    keep[1, [0, 11, 23]] = 0
    arguments = {"h0": _pair(inputs["h0"]), "keep": jnp.asarray(keep, bool)} if optional_inputs == "all" else {}
    lam, bu, weight = _pair(inputs["lam"]), _pair(inputs["bu"]), _pair(inputs["weight"])
    seq = P(None, ("y", "x"))
    specs = {"h0": P(), "keep": seq}

    def sharded(lam, bu, rest):
        return sharded_linear_recurrence(
            lam, bu, axis_names=("y", "x"), reverse=reverse, impl=ScanImpl.blocked, block=2, **rest
        )

    mapped = jax.shard_map(
        sharded,
        mesh=mesh,
        in_specs=(P(), seq, {name: specs[name] for name in arguments}),
        out_specs=seq,
        check_vma=check_vma,
    )

    def loss(recurrence, lam, bu, h0):
        h = recurrence(lam, bu, arguments | ({} if h0 is None else {"h0": h0}))
        return (weight[0] * h[0] + weight[1] * h[1]).sum(), h

    def whole(lam, bu, rest):
        return linear_recurrence(lam, bu, reverse=reverse, impl=ScanImpl.sequential, **rest)

    results = []
    for recurrence in (mapped, whole):
        both = jax.jit(jax.value_and_grad(partial(loss, recurrence), argnums=(0, 1, 2), has_aux=True))
        results.append(both(lam, bu, arguments.get("h0")))
    for got, want in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("impl", mark_slow_except(FORMS, [ScanImpl.associative]), ids=lambda impl: impl.value)
def test_every_form_runs_with_batch_sequence_and_state_sharded(impl: ScanImpl) -> None:
    mesh = _mesh(z=2, y=2, x=2)
    rng = np.random.default_rng(5)
    lam = np.exp(-0.1 + 1j * np.arange(4))
    bu = rng.normal(size=(2, 6, 4)) + 1j * rng.normal(size=(2, 6, 4))
    recurrence = jax.shard_map(
        partial(sharded_linear_recurrence, axis_names=("y",), impl=impl, block=2),
        mesh=mesh,
        in_specs=(P("x"), P("z", "y", "x")),
        out_specs=P("z", "y", "x"),
    )
    arguments = _pair(lam), _pair(bu)
    np.testing.assert_allclose(_complex(jax.jit(recurrence)(*arguments)), _loop(lam, bu, None, None, False), atol=3e-6)

    def loss(recurrence, lam, bu):
        h = recurrence(lam, bu)
        return (h[0] ** 2 + jnp.sin(h[1])).sum()

    got = jax.jit(jax.grad(partial(loss, recurrence), argnums=(0, 1)))(*arguments)
    want = jax.grad(partial(loss, partial(linear_recurrence, impl=ScanImpl.sequential)), argnums=(0, 1))(*arguments)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("impl", mark_slow_except(FORMS, [ScanImpl.associative]), ids=lambda impl: impl.value)
@pytest.mark.parametrize(
    "axis_type", mark_slow_except([AxisType.Auto, AxisType.Explicit], [AxisType.Auto]), ids=["auto", "explicit"]
)
def test_a_sharded_batch_and_state_need_one_reduction_of_the_gradient(axis_type: AxisType, impl: ScanImpl) -> None:
    mesh = _mesh(axis_type, y=2, x=4)
    rng = np.random.default_rng(6)
    lam = _pair(np.exp(-0.1 + 1j * np.arange(4)))
    bu = _pair(rng.normal(size=(2, 8, 4)) + 1j * rng.normal(size=(2, 8, 4)))

    def loss(impl: ScanImpl, lam: tuple[jax.Array, jax.Array], bu: tuple[jax.Array, jax.Array]) -> jax.Array:
        h = linear_recurrence(lam, bu, impl=impl, block=BLOCK)
        return (h[0] ** 2 + jnp.sin(h[1])).sum()

    want = jax.grad(partial(loss, ScanImpl.sequential), argnums=(0, 1))(lam, bu)
    with jax.set_mesh(mesh):
        placed = (
            jax.device_put(lam, NamedSharding(mesh, P("x"))),
            jax.device_put(bu, NamedSharding(mesh, P("y", None, "x"))),
        )
        compiled = jax.jit(jax.grad(partial(loss, impl), argnums=(0, 1))).lower(*placed).compile()
        got = compiled(*placed)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-5)
    program = compiled.as_text() or ""
    assert "fusion" in program
    assert program.count(" all-reduce(") <= 2  # of the two parts of Lambda_bar's gradient, or of both at once
    for collective in ("all-to-all", "all-gather", "collective-permute", "reduce-scatter"):
        assert collective not in program


def test_powers_follow_the_rounded_base() -> None:
    lam = np.exp(np.array([-5e-4 + 2.5j, -0.05 - 3.1j])).astype(np.complex64)
    pair = _pair(lam)
    exact = np.stack([lam.astype(np.complex128) ** k for k in range(1, 257)])
    listed = _complex(powers(pair, 256))
    assert np.abs(listed - exact).max() < 2e-5
    for exponent in (1, 2, 3, 100, 256):
        np.testing.assert_allclose(_complex(power(pair, exponent)), exact[exponent - 1], atol=2e-5)
    assert powers(pair, 5)[0].shape == (5, 2)


@pytest.mark.parametrize(
    ("backend", "impl"),
    [("cpu", ScanImpl.sequential), ("gpu", ScanImpl.associative), ("tpu", ScanImpl.kernel)],
)
def test_auto_chooses_the_form_by_backend_and_an_explicit_form_is_used(backend: str, impl: ScanImpl) -> None:
    assert resolve_impl(ScanImpl.auto, backend) is impl
    assert resolve_impl(ScanImpl.associative, backend) is ScanImpl.associative


def test_refusals_name_the_wrong_argument() -> None:
    lam, bu = _pair(np.ones(1)), _pair(np.ones((1, 2, 1)))
    with pytest.raises(ValueError, match="abacus"):
        resolve_impl(ScanImpl.auto, "abacus")
    with pytest.raises(ValueError, match="block=0"):
        linear_recurrence(lam, bu, block=0)
    with pytest.raises(ValueError, match="axis_names is empty"):
        sharded_linear_recurrence(lam, bu, axis_names=())
