"""Tests of the S5 recurrence's TPU kernel: interpreted on a CPU, and compiled for every chip."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from helpers import mark_slow_except
from machines import needs_libtpu
from valkyrie.hardware.platforms.tpu import ENVIRONMENT
from valkyrie.ops import scan_pallas
from valkyrie.ops.choices import ScanImpl
from valkyrie.ops.scan import linear_recurrence, sharded_linear_recurrence
from valkyrie.ops.scan_forms import form_for_backend
from valkyrie.search.compile.executable import without_cache

Pair = tuple[jax.Array, jax.Array]

CHIPS = {
    "v4": ("v4:2x2x1", {"chip_config_name": "megacore", "chips_per_host_bounds": (2, 2, 1)}),
    "v5e": ("v5e:2x2", {}),
    "v5p": ("v5p:2x2x1", {}),
    "v6e": ("v6e:2x2", {}),
}


def make_inputs(batch: int, seq: int, state: int, *, has_initial_state: bool, resets: bool) -> dict[str, Any]:
    rng = np.random.default_rng(seq)

    def normal(*shape: int) -> Pair:
        return jnp.asarray(rng.normal(size=shape), jnp.float32), jnp.asarray(rng.normal(size=shape), jnp.float32)

    radius, angle = np.exp(-rng.uniform(1e-3, 0.3, state)), rng.normal(scale=2, size=state)
    keep = rng.random((batch, seq)) > 0.1
    keep[:, 3:5] = False
    return {
        "lam": (jnp.asarray(radius * np.cos(angle), jnp.float32), jnp.asarray(radius * np.sin(angle), jnp.float32)),
        "bu": normal(batch, seq, state),
        "h0": normal(batch, state) if has_initial_state else None,
        "keep": jnp.asarray(keep, jnp.float32) if resets else None,
        "weight": normal(batch, seq, state),
    }


@pytest.fixture
def short_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disables unrolling. An interpreted kernel's compile time grows with the tiles per loop iteration."""
    monkeypatch.setattr(scan_pallas, "UNROLL", 1)


@partial(jax.jit, static_argnames=("impl", "reverse"))
def values_and_gradients(lam: Pair, bu: Pair, h0: Pair | None, keep: Any, weight: Pair, *, impl: Any, reverse: bool):
    def loss(lam: Pair, bu: Pair, h0: Pair | None) -> tuple[jax.Array, Pair]:
        h = linear_recurrence(lam, bu, h0=h0, keep=keep, reverse=reverse, impl=impl)
        return (weight[0] * h[0] + weight[1] * h[1]).sum(), h

    (_, h), gradients = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(lam, bu, h0)
    return h, gradients


@pytest.mark.parametrize(
    ("seq", "has_initial_state", "resets", "reverse"),
    [
        pytest.param(300, False, False, False, id="bare", marks=pytest.mark.slow),
        pytest.param(300, True, True, False, id="all"),
        pytest.param(300, True, True, True, id="reverse", marks=pytest.mark.slow),
        pytest.param(5, True, True, False, id="short", marks=pytest.mark.slow),
    ],
)
def test_values_and_gradients_equal_the_sequential_form(
    seq: int, has_initial_state: bool, resets: bool, reverse: bool, short_loops: None
) -> None:
    p = make_inputs(2, seq, 3, has_initial_state=has_initial_state, resets=resets)
    arguments = [p[name] for name in ("lam", "bu", "h0", "keep", "weight")]
    got, want = (
        values_and_gradients(*arguments, impl=impl, reverse=reverse) for impl in (ScanImpl.kernel, ScanImpl.sequential)
    )
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * float(jnp.abs(b).max()))


@pytest.mark.slow
def test_states_in_several_registers_and_blocks_equal_the_sequential_form() -> None:
    p = make_inputs(1, 16, 300, has_initial_state=True, resets=True)
    got, want = (
        jax.jit(form_for_backend(impl, "cpu"), static_argnums=(4, 5))(p["lam"], p["bu"], p["h0"], p["keep"], False, 1)
        for impl in (ScanImpl.kernel, ScanImpl.sequential)
    )
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_keep_can_be_any_factor(short_loops: None) -> None:
    p = make_inputs(1, 20, 2, has_initial_state=True, resets=False)
    keep = jnp.linspace(0.3, 1.4, 20)[None]
    got, want = (
        linear_recurrence(p["lam"], p["bu"], h0=p["h0"], keep=keep, impl=impl)
        for impl in (ScanImpl.kernel, ScanImpl.sequential)
    )
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_the_kernel_runs_with_batch_sequence_and_state_sharded(short_loops: None) -> None:
    mesh = jax.make_mesh((2, 2, 2), ("z", "y", "x"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    p = make_inputs(2, 12, 4, has_initial_state=False, resets=True)
    run = jax.shard_map(
        lambda lam, bu, keep: sharded_linear_recurrence(lam, bu, keep=keep, axis_names=("y",), impl=ScanImpl.kernel),
        mesh=mesh,
        in_specs=(P("x"), P("z", "y", "x"), P("z", "y")),
        out_specs=P("z", "y", "x"),
        check_vma=False,  # JAX interprets no kernel under the check
    )

    def whole(lam: Pair, bu: Pair, keep: jax.Array) -> Pair:
        return linear_recurrence(lam, bu, keep=keep, impl=ScanImpl.sequential)

    def loss(run: Any, lam: Pair, bu: Pair) -> tuple[jax.Array, Pair]:
        h = run(lam, bu, p["keep"])
        return (p["weight"][0] * h[0] + p["weight"][1] * h[1]).sum(), h

    results = [
        jax.jit(jax.value_and_grad(partial(loss, f), argnums=(0, 1), has_aux=True))(p["lam"], p["bu"])
        for f in (run, whole)
    ]
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@needs_libtpu
@pytest.mark.parametrize("chip", mark_slow_except(CHIPS, [*CHIPS][:1]))
def test_the_kernel_compiles_for_every_chip_under_shard_map(chip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in ENVIRONMENT.items():
        monkeypatch.setenv(variable, value)
    from jax.experimental import topologies

    name, options = CHIPS[chip]
    devices = topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices
    mesh = Mesh(np.asarray(devices).reshape(2, 2), ("x", "y"))
    states, rows = P("x", None, "y"), P("x")
    run = jax.shard_map(
        lambda lam, bu, keep: linear_recurrence(lam, bu, keep=keep, backend="tpu"),
        mesh=mesh,
        in_specs=(P("y"), states, rows),
        out_specs=states,
    )

    def loss(lam: Pair, bu: Pair, keep: jax.Array) -> jax.Array:
        re, im = run(lam, bu, keep)
        return (re**2 + im**2).sum()

    def argument(shape: tuple[int, ...], spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

    lam = (argument((384,), P("y")),) * 2
    bu = (argument((2, 1000, 384), states),) * 2
    with without_cache():
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(lam, bu, argument((2, 1000), rows)).compile()
    program = compiled.as_text() or ""
    assert program.count('custom_call_target="tpu_custom_call"') == 2
    assert "s5_scan" in program
    assert '"cost_estimate"' in program
    for collective in ("all-to-all", "all-gather", "collective-permute"):
        assert collective not in program
