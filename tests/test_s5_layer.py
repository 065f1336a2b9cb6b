"""Tests of the S5 layer against a float64 loop over the paper's equations, and of its initial parameters."""

from __future__ import annotations

import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from helpers import mark_slow_except, small_run
from valkyrie.axes import UNSHARDED
from valkyrie.models.block import BlockContext
from valkyrie.models.layers import Boundaries
from valkyrie.models.s5 import S5, Activation
from valkyrie.ops.choices import CInit, Discretization, ScanImpl
from valkyrie.ops.linear import FLOAT32, Numerics
from valkyrie.ops.ssm import hippo_n
from valkyrie.parallel.mesh import build_mesh
from valkyrie.parallel.sharding import MeshShard

EMBED, BATCH, SEQ = 6, 2, 23
CONTEXT = BlockContext(EMBED, layers=1)
STARTS = ((0, 5), (9,))
"""Positions at which documents start, for each row of the batch."""


def layer(**settings) -> Any:
    return S5(state_size=16, blocks=2, **settings).build(CONTEXT, numerics=FLOAT32, key=jax.random.key(3))


def parameter_values(module: Any) -> dict[str, np.ndarray]:
    names = module.config.parameters(CONTEXT)
    return {name: np.asarray(getattr(module, name)[...], np.float64) for name in names}


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def reference_output(module: Any, u: np.ndarray, starts: tuple[tuple[int, ...], ...]) -> np.ndarray:
    """Return the layer's output in float64, one position at a time.

    Computes equations 2, 3, 5 and 6 of arXiv 2208.04933, and the gate of the paper's code.
    """
    c, p = module.config, parameter_values(module)
    real = np.minimum(p["Lambda_re"], -1e-4) if c.clip_eigenvalues else p["Lambda_re"]
    Lambda, Delta = real + 1j * p["Lambda_im"], c.step_rescale * np.exp(p["log_step"])
    B, C = p["B"][..., 0] + 1j * p["B"][..., 1], p["C"][..., 0] + 1j * p["C"][..., 1]
    if c.discretization is Discretization.zoh:
        Lambda_bar = np.exp(Lambda * Delta)
        B_bar = ((Lambda_bar - 1) / Lambda)[:, None] * B
    else:
        BL = 1 / (1 - Lambda * Delta / 2)
        Lambda_bar, B_bar = BL * (1 + Lambda * Delta / 2), (BL * Delta)[:, None] * B
    factor = 2 if c.conjugate_symmetric else 1
    y = np.zeros_like(u)
    for row in range(len(u)):
        x = np.zeros(len(Lambda), complex)
        for t in range(u.shape[1]):
            x = (0 if t in starts[row] else Lambda_bar * x) + B_bar @ u[row, t]
            y[row, t] += factor * (C @ x).real
        if c.bidirectional:
            C_reverse = p["C_reverse"][..., 0] + 1j * p["C_reverse"][..., 1]
            x = np.zeros(len(Lambda), complex)
            for t in reversed(range(u.shape[1])):
                x = (0 if t + 1 in starts[row] else Lambda_bar * x) + B_bar @ u[row, t]
                y[row, t] += factor * (C_reverse @ x).real
    y = y + p["D"] * u
    if c.activation is Activation.gelu:
        return gelu(y)
    gate = sigmoid(gelu(y) @ p["gate"])
    if c.activation is Activation.full_glu:
        return (gelu(y) @ p["out"]) * gate
    return (gelu(y) if c.activation is Activation.half_glu1 else y) * gate


def random_input(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(BATCH, SEQ, EMBED)).astype(np.float32)


CASES = [
    *({"activation": a, "discretization": d} for a, d in itertools.product(Activation, Discretization)),
    {"conjugate_symmetric": False, "c_init": CInit.complex_normal},
    {"conjugate_symmetric": False, "bidirectional": True, "activation": Activation.gelu},
    {"bidirectional": True, "c_init": CInit.lecun_normal},
    {"step_rescale": 0.5, "clip_eigenvalues": False},
]


@pytest.mark.parametrize("settings", mark_slow_except(CASES, CASES[::5]), ids=str)
@pytest.mark.parametrize("packed", mark_slow_except([False, True], [True]), ids=["whole", "packed"])
def test_layer_equals_the_equations_of_the_paper(settings, packed):
    module, u = layer(**settings), random_input()
    starts = STARTS if packed else ((), ())
    keep = None
    if packed:
        keep = np.ones((BATCH, SEQ), np.float32)
        for row, at in enumerate(starts):
            keep[row, list(at)] = 0
        keep = jnp.asarray(keep)
    output = module(jnp.asarray(u), Boundaries(keep), UNSHARDED)
    np.testing.assert_allclose(output, reference_output(module, u.astype(np.float64), starts), rtol=1e-4, atol=1e-5)


def test_clipping_changes_the_output_if_a_state_would_grow():
    module, clipped = layer(clip_eigenvalues=False), layer(clip_eigenvalues=True)
    for m in (module, clipped):
        m.Lambda_re[...] = jnp.full_like(m.Lambda_re[...], 5.0)
    u = random_input()
    grown, bounded = (m(jnp.asarray(u), Boundaries(), UNSHARDED) for m in (module, clipped))
    np.testing.assert_allclose(bounded, reference_output(clipped, u.astype(np.float64), ((), ())), rtol=1e-4, atol=1e-5)
    assert np.abs(grown - bounded).max() > 1e-3


@pytest.mark.parametrize(
    "settings",
    mark_slow_except([{}, {"conjugate_symmetric": False, "discretization": Discretization.bilinear}], [{}]),
)
def test_streaming_equals_the_loop(settings):
    module, u = layer(**settings), random_input()
    state, rows = module.init_state(BATCH, SEQ), []
    for t in range(SEQ):
        y, state = module.step(jnp.asarray(u[:, t]), state)
        rows.append(y)
    np.testing.assert_allclose(
        np.stack(rows, 1), reference_output(module, u.astype(np.float64), ((), ())), rtol=1e-4, atol=1e-5
    )


def test_initial_parameters():
    block = S5(state_size=128, blocks=8, dt_min=1e-3, dt_max=1e-1)
    module = block.build(BlockContext(256, layers=1), numerics=FLOAT32, key=jax.random.key(0))
    p = parameter_values(module)
    eigenvalues, _ = hippo_n(16)
    np.testing.assert_array_equal(p["Lambda_re"], -0.5)
    np.testing.assert_allclose(p["Lambda_im"], np.tile(eigenvalues.imag[:8], 8), rtol=1e-6)
    assert p["Lambda_im"].max() < 0
    assert np.log(1e-3) <= p["log_step"].min() < np.log(2e-3)
    assert np.log(5e-2) < p["log_step"].max() <= np.log(1e-1)
    assert len(set(p["log_step"])) == 64
    assert p["B"].shape == (64, 256, 2)
    assert p["C"].shape == (256, 64, 2)
    np.testing.assert_allclose((p["B"] ** 2).sum(-1).mean(), 1 / 128, rtol=0.05)
    np.testing.assert_allclose((p["C"] ** 2).sum(-1).mean(), 2 / 128, rtol=0.05)
    np.testing.assert_allclose([p["D"].mean(), p["D"].std()], [0, 1], atol=0.15)
    np.testing.assert_allclose(p["gate"].std(), 256**-0.5, rtol=0.02)


def test_state_space_stays_float32_under_every_policy():
    pure = Numerics("bfloat16", "bfloat16", "bfloat16")
    block = S5(state_size=16, blocks=2)
    module, specs = block.build(CONTEXT, numerics=pure, key=jax.random.key(0)), block.parameters(CONTEXT)
    assert {name for name in specs if getattr(module, name)[...].dtype == jnp.float32} == set(specs) - {"gate"}
    assert {name for name, spec in specs.items() if spec.group == "ssm"} == {"B", "Lambda_re", "Lambda_im", "log_step"}
    traced = str(jax.make_jaxpr(lambda u: module(u, Boundaries(), UNSHARDED))(jnp.zeros((2, 8, EMBED), jnp.bfloat16)))
    scans = [line for line in traced.splitlines() if "scan[" in line or "while[" in line]
    assert scans
    assert not any("bf16" in line for line in scans)
    exact = block.build(CONTEXT, numerics=FLOAT32, key=jax.random.key(0))
    u = random_input()
    narrow, wide = (m(jnp.asarray(u, jnp.bfloat16), Boundaries(), UNSHARDED) for m in (module, exact))
    assert (narrow.dtype, wide.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(narrow.astype(jnp.float32), wide, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(("partition", "gathers"), [("1d_tp", 1), pytest.param("2d_tp", 0, marks=pytest.mark.slow)])
def test_activations_are_gathered_once_and_replicated_gradients_are_not_summed(partition, gathers):
    run = small_run("s5_tiny", "mesh=2x2x2", f"partition={partition}")
    # Sharded as on a TPU, with a scan implementation that compiles on a CPU.
    shard = MeshShard(run.layout, build_mesh(run.config.mesh, jax.devices()), "tpu")
    block, context = S5(state_size=32, blocks=4, scan=ScanImpl.sequential), BlockContext(32, layers=1)
    structure, parameters = nnx.split(block.build(context, numerics=FLOAT32, key=jax.random.key(0)))
    by_name = block.parameters(context)
    placed = jax.tree_util.tree_map_with_path(
        lambda path, x: jax.device_put(x, shard.sharding(shard.layout.stored_axes(by_name[path[0].key].axes))),
        parameters,
    )

    def loss(parameters, u):
        return (nnx.merge(structure, parameters)(u, Boundaries(), shard) ** 2).sum()

    u = jax.device_put(jnp.ones((8, 16, 32)), shard.sharding(shard.layout.activation_axes(("batch", "seq", "embed"))))
    program = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(placed, u).compile().as_text() or ""
    gathers_found = [
        line for line in program.splitlines() if re.search(r" = \w+\[\d+,16,\d+\]\S* all-gather(-start)?\(", line)
    ]
    assert len(gathers_found) == gathers, gathers_found
    assert not any("shard_map/psum" in line for line in program.splitlines() if re.search(r"\[\d+,16,\d+\]", line))
