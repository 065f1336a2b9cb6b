"""Tests of HiPPO-N, its initialisers and the discretisation, against the dense real system, SciPy and float64."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
import scipy.signal

from valkyrie.ops.choices import CInit, Discretization, ScanImpl
from valkyrie.ops.scan import linear_recurrence
from valkyrie.ops.ssm import (
    block_hippo,
    discretize,
    hippo_n,
    init_B_tilde,
    init_C_tilde,
    init_D,
    init_Lambda,
    init_log_step,
    unit_phase,
)

KEY = jax.random.key(7)


def _complex(pair: tuple[jax.Array | np.ndarray, jax.Array | np.ndarray]) -> np.ndarray:
    return np.asarray(pair[0], np.float64) + 1j * np.asarray(pair[1], np.float64)


def _last_axis(x: jax.Array | np.ndarray) -> np.ndarray:
    return _complex((x[..., 0], x[..., 1]))


def _legs(n: int) -> np.ndarray:
    """Return HiPPO-LegS as the paper defines it (arXiv 2008.07669, theorem 2)."""
    row, column = np.indices((n, n))
    off_diagonal = np.where(row > column, -np.sqrt((2 * row + 1.0) * (2 * column + 1.0)), 0.0)
    return off_diagonal - np.diag(np.arange(n) + 1.0)


jitted_discretize = jax.jit(discretize, static_argnames=("method", "step_rescale", "clip_eigenvalues"))


@pytest.mark.parametrize("n", [1, 2, 5, 16])
def test_hippo_n_diagonalises_legs_plus_its_rank_one_correction(n: int) -> None:
    Lambda, V = hippo_n(n)
    p = np.sqrt(np.arange(n) + 0.5)
    np.testing.assert_allclose(V @ np.diag(Lambda) @ V.conj().T, _legs(n) + np.outer(p, p), atol=1e-12)
    np.testing.assert_allclose(V.conj().T @ V, np.eye(n), atol=1e-13)


@pytest.mark.parametrize(
    ("n", "largest"), [(16, 81), (32, 325), (64, 1303), pytest.param(256, 20860, marks=pytest.mark.slow)]
)
def test_hippo_eigenvalues_are_conjugate_pairs_of_the_expected_size(n: int, largest: int) -> None:
    Lambda, _ = hippo_n(n)
    assert (np.real(Lambda) == -0.5).all()
    np.testing.assert_allclose(np.imag(Lambda), -np.imag(Lambda[::-1]), rtol=1e-9)
    assert (np.imag(Lambda[: n // 2]) < 0).all()
    assert np.abs(np.imag(Lambda)).max() == pytest.approx(largest, abs=0.5)
    assert np.abs(np.imag(Lambda)).max() == pytest.approx(n**2 / np.pi, rel=0.01)


def test_blocks_are_diagonalised_before_half_of_the_states_is_dropped() -> None:
    hippo = block_hippo(24, 3, conjugate_symmetric=True)
    Lambda, V = hippo_n(8)
    assert (hippo.state_count, hippo.state_size, hippo.block_count) == (12, 24, 3)
    np.testing.assert_array_equal(hippo.Lambda, np.concatenate([Lambda[:4]] * 3))
    np.testing.assert_array_equal(hippo.V, V[:, :4])
    np.testing.assert_array_equal(hippo.Vinv, V[:, :4].conj().T)
    full = block_hippo(24, 3, conjugate_symmetric=False)
    assert (full.state_count, full.state_size, full.V.shape) == (24, 24, (8, 8))
    re, im = init_Lambda(hippo)
    assert re.dtype == im.dtype == jnp.float32
    assert (re == -0.5).all()
    assert (im < 0).all()


def test_refusals_of_block_sizes_name_the_nearest_legal_ones() -> None:
    with pytest.raises(ValueError, match="state_size=96 or state_size=112"):
        block_hippo(100, 8)
    with pytest.raises(ValueError, match="state_size=2 or state_size=4"):
        block_hippo(3, 2, conjugate_symmetric=False)
    with pytest.raises(ValueError, match="state_size=12 or state_size=24"):
        block_hippo(6, 6)
    with pytest.raises(ValueError, match="blocks=0 "):
        block_hippo(8, 0)
    with pytest.raises(ValueError, match="n=0"):
        hippo_n(0)
    with pytest.raises(ValueError, match=r"step_min=0\.1 .*step_max=0\.01"):
        init_log_step(KEY, 4, 0.1, 0.01)


def _dense_V(state_size: int, blocks: int) -> np.ndarray:
    V = hippo_n(state_size // blocks)[1]
    return np.asarray(scipy.linalg.block_diag(*[V[:, : V.shape[0] // 2]] * blocks))


def test_B_tilde_is_a_real_lecun_normal_in_the_eigenbasis() -> None:
    state_size, blocks, embed = 32, 4, 700
    hippo = block_hippo(state_size, blocks)
    B_tilde = jax.jit(partial(init_B_tilde, hippo=hippo, embed=embed))(KEY)
    assert B_tilde.shape == (16, embed, 2)
    assert B_tilde.dtype == jnp.float32
    half = _dense_V(state_size, blocks) @ _last_axis(B_tilde)
    B = 2 * np.real(half)  # V V^H of both halves is the identity, and the second half is the conjugate of the first
    np.testing.assert_allclose(_dense_V(state_size, blocks).conj().T @ B, _last_axis(B_tilde), atol=1e-6)
    assert B.std() == pytest.approx(state_size**-0.5, rel=0.02)
    assert np.abs(B).max() <= 2 / 0.8796 * state_size**-0.5 * 1.001


@pytest.mark.parametrize(
    ("method", "deviation"),
    [
        (CInit.trunc_standard_normal, 32**-0.5),
        (CInit.lecun_normal, (32 * 600) ** -0.5),
        (CInit.complex_normal, 0.5**0.5),
    ],
    ids=lambda value: getattr(value, "value", None),
)
def test_C_tilde_has_the_spread_of_its_initialiser(method: CInit, deviation: float) -> None:
    hippo = block_hippo(32, 2)
    C_tilde = init_C_tilde(KEY, hippo, 600, method)
    assert C_tilde.shape == (600, 16, 2)
    assert C_tilde.dtype == jnp.float32
    for part in (0, 1):
        assert np.asarray(C_tilde[..., part]).std() == pytest.approx(deviation, rel=0.03)
        assert abs(np.asarray(C_tilde[..., part]).mean()) < 0.03 * deviation


def test_C_tilde_equals_C_times_V() -> None:
    """C can be recovered only from all eigenvectors, so C itself is checked without conjugate symmetry."""
    full, half = block_hippo(16, 2, conjugate_symmetric=False), block_hippo(16, 2)
    V = np.asarray(scipy.linalg.block_diag(full.V, full.V))
    C_tilde = _last_axis(init_C_tilde(KEY, full, 5, CInit.trunc_standard_normal))
    C = C_tilde @ V.conj().T
    assert (
        np.abs(np.real(C)).max() <= 2 / 0.8796 / 4 * 1.001
    )  # the cut of the truncated normal survives the rotation back
    assert np.abs(np.imag(C)).max() <= 2 / 0.8796 / 4 * 1.001
    np.testing.assert_allclose(
        _last_axis(init_C_tilde(KEY, half, 5, CInit.trunc_standard_normal)), C @ _dense_V(16, 2), atol=1e-6
    )


def test_initial_log_step_and_D() -> None:
    log_step = np.asarray(init_log_step(KEY, 4000, 1e-3, 1e-1))
    assert np.log(1e-3) <= log_step.min() < np.log(1.02e-3)
    assert np.log(0.98e-1) < log_step.max() <= np.log(1e-1) + 1e-6
    assert log_step.mean() == pytest.approx(np.log(1e-2), abs=0.08)
    D = np.asarray(init_D(KEY, 4000))
    assert D.std() == pytest.approx(1, rel=0.05)
    assert abs(D.mean()) < 0.06


def test_parameter_shapes_are_known_without_arrays() -> None:
    hippo = block_hippo(512, 2)
    shapes = jax.eval_shape(
        lambda key: (init_B_tilde(key, hippo, 8), init_C_tilde(key, hippo, 8, CInit.lecun_normal)), KEY
    )
    assert [shape.shape for shape in shapes] == [(256, 8, 2), (8, 256, 2)]


def _hippo_parameters(block: int, step: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    Lambda = hippo_n(block)[0]
    log_step = np.log(step) + np.random.default_rng(block).uniform(-0.01, 0.01, block)
    return jnp.asarray(np.real(Lambda), jnp.float32), jnp.asarray(np.imag(Lambda), jnp.float32), jnp.float32(log_step)


def _cont2discrete(
    system: tuple[np.ndarray, ...], step: float, method: Discretization
) -> tuple[np.ndarray, np.ndarray]:
    discrete: Any = scipy.signal.cont2discrete(system, step, method=method.value)
    return np.asarray(discrete[0]), np.asarray(discrete[1])


@pytest.mark.parametrize("method", list(Discretization), ids=lambda method: method.value)
@pytest.mark.parametrize(("block", "step"), [(16, 1e-3), (16, 1e-1), (64, 1e-2)])
def test_discretisation_equals_scipy(method: Discretization, block: int, step: float) -> None:
    re, im, log_step = _hippo_parameters(block, step)
    lam_bar, scale = map(_complex, jitted_discretize(re, im, log_step, method=method, step_rescale=2.0))
    for state in range(block):
        system = np.array([[_complex((re, im))[state]]]), np.eye(1), np.eye(1), np.zeros((1, 1))
        dt = 2.0 * np.exp(np.float64(log_step[state]))
        A_bar, B_bar = _cont2discrete(system, dt, method)
        np.testing.assert_allclose(lam_bar[state], A_bar[0, 0], rtol=2e-6)
        np.testing.assert_allclose(scale[state], B_bar[0, 0], rtol=2e-6)


def test_large_phases_are_reduced_before_rounding() -> None:
    frequency = np.float32(np.imag(hippo_n(256)[0]))
    for step in (1e-3, 1e-2, 1e-1, 1.0):
        steps = np.float32(np.random.default_rng(3).uniform(0.9, 1.0, 256) * step)
        got = _complex(unit_phase(jnp.asarray(frequency), jnp.asarray(steps)))
        exact = np.exp(1j * np.float64(frequency) * np.float64(steps))
        assert np.abs(got - exact).max() < 5e-7, step
    naive = np.abs(np.cos(frequency * np.float32(steps)) - exact.real).max()
    assert naive > 1e-4  # what the reduction is for


def test_large_phases_are_exact_up_to_rounding_of_the_step() -> None:
    re, im, log_step = _hippo_parameters(256, 0.1)
    exact = np.exp(_complex((re, im)) * np.exp(np.float64(log_step)))
    lam_bar, scale = map(_complex, jitted_discretize(re, im, log_step))
    phase = np.abs(np.asarray(im, np.float64)) * np.exp(np.float64(log_step))
    assert (np.abs(lam_bar - exact) < 5e-7 + 1.2e-7 * phase).all()
    np.testing.assert_allclose(scale, (lam_bar - 1) / _complex((re, im)), rtol=5e-6)


def test_zero_order_hold_is_exact_for_tiny_Lambda_Delta() -> None:
    re = jnp.asarray([0.0, -1e-30, -1e-7, -1e-4, -1e-2, -0.2, -0.3, 0.0, 0.0, -2.0], jnp.float32)
    im = jnp.asarray([0.0, 1e-30, 1e-9, 0.0, 1e-2, 0.1, 0.2, 1e-5, 0.24, 0.0], jnp.float32)
    log_step = jnp.zeros(10, jnp.float32)
    _, scale = jitted_discretize(re, im, log_step)
    z = _complex((re, im))
    tail = sum(z**k / np.prod(np.arange(1.0, k + 2)) for k in range(1, 25))
    np.testing.assert_allclose(_complex(scale), 1 + tail, rtol=5e-7)

    def loss(re: jax.Array, im: jax.Array, log_step: jax.Array) -> jax.Array:
        scale_re, scale_im = discretize(re, im, log_step)[1]
        return scale_re.sum() + 2 * scale_im.sum()

    # With s = phi(z) Delta and w = 1 - 2i: d loss / d Lambda = w phi'(z), d loss / d log_step = w exp(z) (Delta = 1).
    slope = (1 - 2j) * sum(k * z ** (k - 1) / np.prod(np.arange(1.0, k + 2)) for k in range(1, 25))
    got = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(re, im, log_step)
    np.testing.assert_allclose(got[0], slope.real, rtol=5e-6, atol=1e-6)
    np.testing.assert_allclose(got[1], -slope.imag, rtol=5e-6, atol=1e-6)
    np.testing.assert_allclose(got[2], ((1 - 2j) * np.exp(z)).real, rtol=5e-6, atol=1e-6)


@pytest.mark.parametrize("method", list(Discretization), ids=lambda method: method.value)
def test_gradients_of_the_discretisation_equal_differences_in_float64(method: Discretization) -> None:
    re, im, log_step = _hippo_parameters(16, 0.05)
    weights = np.random.default_rng(2).normal(size=(4, 16))

    def exact(re: np.ndarray, im: np.ndarray, log_step: np.ndarray) -> float:
        Lambda, step = re + 1j * im, np.exp(log_step)
        if method is Discretization.zoh:
            lam_bar, scale = np.exp(Lambda * step), (np.exp(Lambda * step) - 1) / Lambda
        else:
            lam_bar, scale = (1 + Lambda * step / 2) / (1 - Lambda * step / 2), step / (1 - Lambda * step / 2)
        return float(
            sum(
                (weights[0] * lam_bar).real
                + (weights[1] * lam_bar).imag
                + (weights[2] * scale).real
                + (weights[3] * scale).imag
            )
        )

    def loss(re: jax.Array, im: jax.Array, log_step: jax.Array) -> jax.Array:
        return (jnp.float32(weights) * jnp.stack(jax.tree.leaves(discretize(re, im, log_step, method)))).sum()

    got = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(re, im, log_step)
    point = [np.asarray(x, np.float64) for x in (re, im, log_step)]
    for argument in range(3):
        want = np.zeros(16)
        for state in range(16):
            step = np.zeros(16)
            step[state] = 1e-6
            sides = [exact(*[x + sign * step * (n == argument) for n, x in enumerate(point)]) for sign in (1, -1)]
            want[state] = (sides[0] - sides[1]) / 2e-6
        np.testing.assert_allclose(got[argument], want, rtol=2e-5, atol=2e-6)


def test_clipping_bounds_only_the_real_part() -> None:
    re, im = jnp.asarray([0.5, -1e-5, -0.3], jnp.float32), jnp.asarray([1.0, 2.0, 3.0], jnp.float32)
    log_step = jnp.zeros(3, jnp.float32)
    clipped, _ = jitted_discretize(re, im, log_step, clip_eigenvalues=True)
    magnitude = np.abs(_complex(clipped))
    np.testing.assert_allclose(magnitude, np.exp([-1e-4, -1e-4, -0.3]), rtol=1e-6)
    free, _ = jitted_discretize(re, im, log_step)
    np.testing.assert_allclose(np.abs(_complex(free)), np.exp([0.5, -1e-5, -0.3]), rtol=1e-6)


@pytest.mark.parametrize("method", list(Discretization), ids=lambda method: method.value)
def test_half_of_the_states_reproduce_the_real_system(method: Discretization) -> None:
    """y = 2 Re(C_tilde x) + D u over P states in float32 equals the dense real system of 2 P states in float64."""
    state_size, blocks, embed, seq, step = 12, 2, 3, 40, 0.05
    rng = np.random.default_rng(0)
    p = np.sqrt(np.arange(6) + 0.5)
    S = np.asarray(scipy.linalg.block_diag(*[_legs(6) + np.outer(p, p)] * blocks))
    B, C = rng.normal(size=(state_size, embed)), rng.normal(size=(embed, state_size))
    D, u = rng.normal(size=embed), rng.normal(size=(seq, embed))
    A_bar, B_bar = _cont2discrete((S, B, C, np.diag(D)), step, method)
    x, want = np.zeros(state_size), np.zeros((seq, embed))
    for t in range(seq):
        x = A_bar @ x + B_bar @ u[t]
        want[t] = C @ x + D * u[t]

    hippo = block_hippo(state_size, blocks)
    V = _dense_V(state_size, blocks)
    B_tilde, C_tilde = V.conj().T @ B, C @ V
    lam_bar, scale = jitted_discretize(
        *init_Lambda(hippo), jnp.full(hippo.state_count, np.log(step), jnp.float32), method=method
    )
    bu = _complex(scale) * (u @ B_tilde.T)
    h = linear_recurrence(
        lam_bar, (jnp.float32(np.real(bu)[None]), jnp.float32(np.imag(bu)[None])), impl=ScanImpl.sequential
    )
    got = 2 * (_complex(h)[0] @ C_tilde.T).real + D * u
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", list(Discretization), ids=lambda method: method.value)
def test_the_layer_equals_the_pytorch_layer(method: Discretization) -> None:
    golden = np.load(Path(__file__).with_name("goldens") / "s5.npz")
    Lambda, B, C, D, u = (golden[name] for name in ("Lambda", "B", "C", "D", "u"))
    np.testing.assert_allclose(
        np.imag(Lambda), np.imag(block_hippo(12, 2, conjugate_symmetric=False).Lambda), rtol=1e-5
    )
    parameters = np.real(Lambda), np.imag(Lambda), golden["log_step"]
    lam_bar, scale = jitted_discretize(*map(jnp.asarray, parameters), method=method, step_rescale=2.0)
    bu = _complex(scale) * (u @ _last_axis(B).T)
    bu = jnp.float32(np.real(bu)), jnp.float32(np.imag(bu))
    whole = _complex(linear_recurrence(lam_bar, bu, impl=ScanImpl.blocked, block=8))
    np.testing.assert_allclose(np.real(whole @ C.T) + D * u, golden[f"y_{method.value}"], rtol=1e-5, atol=1e-6)

    half = jnp.float32(np.real(whole[:, 9])), jnp.float32(np.imag(whole[:, 9]))
    rest = _complex(linear_recurrence(lam_bar, (bu[0][:, 10:], bu[1][:, 10:]), h0=half, impl=ScanImpl.sequential))
    continued = golden[f"y_{method.value}_continued"][:, 10:]
    np.testing.assert_allclose(np.real(rest @ C.T) + (D * u)[:, 10:], continued, rtol=1e-5, atol=1e-6)
