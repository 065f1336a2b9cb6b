"""Tests on the TPUs or NVIDIA GPUs of one host: kernels, steps, and predictions against measurements.

`JAX_PLATFORMS=tpu,cpu pytest -m tpu -n 0 tests/test_accelerators.py`, or `cuda,cpu` and `-m gpu`. The file is named
because other tests start JAX when they are collected, and those errors would hide why there is no device.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import test_scan_kernel
import valkyrie
from helpers import PARTITIONS, compose_run, make_batch, small_run
from test_attention import SINKS, make_inputs, run_attention
from test_cross_entropy import gradients, reference_losses
from valkyrie.hardware.chips import chip_for_device_kind
from valkyrie.hardware.names import example_slice
from valkyrie.ops.attention import AttentionImpl
from valkyrie.ops.choices import ScanImpl
from valkyrie.ops.cross_entropy import cross_entropy
from valkyrie.ops.grouped import multiply_groups, multiply_rows_of_groups
from valkyrie.parallel.mesh import build_mesh
from valkyrie.problems import first_line
from valkyrie.search.compile.prediction import Prediction
from valkyrie.search.measure.measure import measure
from valkyrie.train.devices import prepare_devices
from valkyrie.train.program import StepProgram
from valkyrie.train.run_memory import estimated_memory

pytestmark = pytest.mark.timeout(600)

MESHES = {1: "1x1x1", 2: "2x1x1", 4: "2x2x1", 8: "2x2x2"}
"""Mesh by the number of devices of the host."""
STEP_RATIO, PEAK_RATIO, ESTIMATE_RATIO = 2.0, 1.1, 1.4
"""Largest ratios of measured to predicted values, and the reverse.

Steps of published runs took 0.9 to 1.41 times their prediction, and steps of small models have more overhead. The peak
is that of the program, which the prediction compiles too. On an H200, gpt_125m took 0.78 of its estimated memory, and
gpt_1b 0.94.
"""


@pytest.fixture(autouse=True, params=[pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("tpu", "gpu")])
def platform(request: pytest.FixtureRequest) -> str:
    """The platform under test.

    Fails without its devices: only `pytest -m tpu` or `-m gpu` runs these tests, and a run that checks nothing must not
    pass.
    """
    name, backend = request.param, default_backend()
    if backend != name:
        setting = {"tpu": "tpu,cpu", "gpu": "cuda,cpu"}[name]
        reason = f"needs a {name.upper()}, but JAX uses {backend}. Set JAX_PLATFORMS={setting} on a host with one."
        pytest.fail(reason, pytrace=False)
    return name


@cache
def default_backend() -> str:
    """Return JAX's default backend, or the error of starting it. Cached, because JAX tries again at every call."""
    try:
        return jax.default_backend()
    except RuntimeError as error:
        return f"none ({first_line(error)})"


def assert_near(ours: Iterable[Any], expected: Iterable[Any], tolerance: float = 0.02) -> None:
    """Compare arrays by the norm of their difference, relative to that of the expected one. NaN is no small error."""
    for number, (a, b) in enumerate(zip(ours, expected, strict=True)):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        error = np.linalg.norm(a - b) / np.linalg.norm(b)
        assert error < tolerance, f"array {number}: {error:.4f}"


def round_to_bfloat16(*arrays: Any) -> tuple[Any, Any]:
    """Return trees of arrays with floats in bfloat16, and with the rounded floats in float32."""

    def cast(tree: Any, dtype: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)

    return (rounded := cast(arrays, jnp.bfloat16)), cast(rounded, jnp.float32)


def assert_attention_equals_the_definition(q: Any, k: Any, v: Any, tokens: Any = None, **options: Any) -> None:
    """Compare output and gradients of `auto` in bfloat16 with those of a dense mask in float32."""
    rounded, exact = round_to_bfloat16(q, k, v, tokens)
    with jax.default_matmul_precision("highest"):
        expected = run_attention(AttentionImpl.dense, *exact, **options)
    assert_near(run_attention(AttentionImpl.auto, *rounded, **options), expected)


@pytest.mark.parametrize("documents", [0.0, 0.005, 0.5], ids=["one document", "packed", "more than cuDNN takes"])
@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, None), (True, 100)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_attention_equals_the_definition(causal: bool, window: int | None, documents: float, head_dim: int):
    q, k, v, _, _ = make_inputs(512, head_dim=head_dim)
    is_start = np.random.default_rng(0).random((2, 512)) < documents
    ids = jnp.asarray(np.cumsum(is_start, axis=1, dtype=np.int32)) if documents else None
    assert_attention_equals_the_definition(q, k, v, window=window, causal=causal, ids=ids)


@pytest.mark.parametrize(
    ("seq", "global_tokens", "options"),
    [
        pytest.param(4096, 0, {"window": None}, id="wide blocks"),
        pytest.param(500, 0, {"window": None}, id="no whole blocks"),
        pytest.param(512, 0, {"window": 64, "dilation": 2}, id="dilation"),
        pytest.param(512, 3, {"window": 64}, id="global tokens"),
        pytest.param(512, 0, {"window": None, "soft_cap": 2.0}, id="soft cap"),
        pytest.param(512, 0, {"window": 100, "sinks": SINKS}, id="sinks"),
    ],
)
def test_forms_of_attention_equal_the_definition(seq: int, global_tokens: int, options: dict[str, Any]):
    q, k, v, ids, tokens = make_inputs(seq, batch=1, head_dim=128, global_tokens=global_tokens, segments=True)
    assert_attention_equals_the_definition(q, k, v, tokens, ids=ids, **options)


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_the_recurrence_equals_its_sequential_form(reverse: bool):
    """States and gradients of the implementation that `auto` takes, the Pallas kernel on a TPU."""
    inputs = test_scan_kernel.make_inputs(2, 1000, 384, has_initial_state=True, resets=True)
    arguments = [inputs[name] for name in ("lam", "bu", "h0", "keep", "weight")]
    with jax.default_matmul_precision("highest"):
        ours, expected = (
            jax.tree.leaves(test_scan_kernel.values_and_gradients(*arguments, impl=impl, reverse=reverse))
            for impl in (ScanImpl.auto, ScanImpl.sequential)
        )
    assert_near(ours, expected, tolerance=1e-4)


@pytest.mark.parametrize("options", [{}, {"z_loss": 0.1, "soft_cap": 3.0}], ids=str)
def test_cross_entropy_equals_the_plain_formula(options: dict[str, Any]):
    hidden, unembed = (
        jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(4, 256, 128), (1024, 128)])
    )
    targets = jax.random.randint(jax.random.key(2), (4, 256), 0, 1000)
    weights = jax.random.uniform(jax.random.key(3), (4, 256)).at[1, 100:].set(0.0)

    def chunked(hidden: jax.Array, unembed: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        out = cross_entropy(hidden, unembed, targets, weights, vocab_size=1000, chunk=64, **options)
        return out.loss_sum, out.z_sum, out.per_token

    rounded, exact = round_to_bfloat16(hidden, 0.1 * unembed)
    ours = gradients(chunked, *rounded)
    with jax.default_matmul_precision("highest"):
        expected = gradients(lambda h, u: reference_losses(h, u, targets, weights, vocab_size=1000, **options), *exact)
    (_, (loss, z, per_token)), (d_hidden, d_unembed) = ours
    (_, (expected_loss, expected_z, expected_per_token)), expected_gradients = expected
    assert_near([loss, per_token, d_hidden, d_unembed], [expected_loss, expected_per_token, *expected_gradients])
    assert float(z) == pytest.approx(float(expected_z), rel=0.02)


@pytest.mark.parametrize("sizes", [[300, 0, 500, 124], [256, 256, 256, 256], [0, 0, 1024, 0]], ids=str)
def test_products_of_groups_equal_the_definition(sizes: list[int]):
    """Rows of no group are NaN, as `ragged_dot` may leave them on a TPU."""
    shapes = [(1024, 256), (1024, 384), (4, 256, 384)]
    x, g, w = (jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i, shape in enumerate(shapes))
    used, ends, counts = sum(sizes), np.cumsum(sizes), jnp.asarray(sizes, jnp.int32)
    x, g = (array.at[used:].set(jnp.nan) for array in (x, g))
    products = jax.jit(multiply_groups)(x, w, counts)[:used]
    sums = jax.jit(partial(multiply_rows_of_groups, dtype="float32"))(x, g, counts)
    x, g, w = (np.asarray(array, np.float32) for array in (x, g, w))
    groups = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    assert_near([products], [np.concatenate([x[rows] @ w[i] for i, rows in enumerate(groups)])])
    assert_near([sums], [np.stack([x[rows].T @ g[rows] for rows in groups])])


@pytest.mark.parametrize("impl", [ScanImpl.auto, ScanImpl.blocked, ScanImpl.associative], ids=str)
def test_the_recurrence_of_s5_equals_that_of_the_cpu(impl: ScanImpl, platform: str):
    assert_steps_equal_those_of_the_cpu("s5_tiny", platform, f"model.s5.scan={impl.value}")


@pytest.mark.parametrize(
    "model", ["gpt_tiny", "valkyrie_tiny", "longformer_tiny", "nanochat_tiny", "trm_tiny", "moe_tiny"]
)
def test_the_first_steps_of_a_model_equal_those_of_the_cpu(model: str, platform: str):
    assert_steps_equal_those_of_the_cpu(model, platform)


@pytest.mark.parametrize("partition", PARTITIONS)
def test_the_first_steps_under_each_partition_equal_those_of_the_cpu(partition: str, platform: str):
    """On all devices. With one, every axis has size 1."""
    mesh = MESHES[jax.device_count()]
    model = "moe_tiny" if partition == "fsdp_ep" else "gpt_tiny"
    assert_steps_equal_those_of_the_cpu(model, platform, f"mesh={mesh}", f"partition={partition}")


def assert_steps_equal_those_of_the_cpu(model: str, platform: str, *overrides: str) -> None:
    """Compare loss and gradient norm of two steps in float32, by default on one device."""
    run = small_run(model, "precision=float32", *overrides)
    metrics_by_platform = []
    for name in ("cpu", platform):
        devices = jax.devices(name)[: run.config.mesh.size]
        program = StepProgram(run, build_mesh(run.config.mesh, devices), backend=devices[0].platform)
        with jax.default_matmul_precision("highest"), jax.default_device(devices[0]):
            step, state = program.compile_step(), program.init(run.config.seed)
            for _ in range(2):
                state, metrics = step(state, program.place(make_batch(run)))
            metrics_by_platform.append([float(metrics["loss"]), float(metrics["grad_norm"])])
    np.testing.assert_allclose(metrics_by_platform[1], metrics_by_platform[0], rtol=2e-3)


@pytest.mark.parametrize(
    ("partition", "documents"),
    [
        *((partition, "reset") for partition in ("fsdp", "dp", "fsdp_tp", "1d_tp", "2d_tp", "2d_tp_fsdp", "sp")),
        ("fsdp", "cross"),
    ],
)
def test_measured_time_and_memory_are_near_those_predicted(partition: str, documents: str):
    """A step of gpt_125m on all devices of the host."""
    chip = chip_for_device_kind(jax.devices()[0].device_kind)
    assert chip is not None, f"{jax.devices()[0].device_kind} is no chip that Valkyrie knows"
    target = example_slice(chip).resized(jax.device_count())
    assert target is not None
    run = compose_run(
        *("model=gpt_125m", f"target={target.name}", f"mesh={MESHES[jax.device_count()]}", f"partition={partition}"),
        *("remat=minimal", "batch=8", "seq=1024", "precision=bf16_mixed", "mode=measure"),
        f"model.document_boundary={documents}",
    )
    predicted, measured = valkyrie.predict(run, quiet=True).record, measure(run, prepare_devices(run))
    assert measured.loss is not None and np.isfinite(measured.loss)
    assert isinstance(predicted, Prediction) and predicted.step and measured.step
    assert predicted.memory and measured.memory and predicted.memory.peak and measured.memory.peak
    reported_peak = measured.memory.reported_peak  # by the device since the process began, so only a lower bound holds
    assert reported_peak and reported_peak > 0.5 * predicted.memory.peak
    ratios = {
        "step": measured.step.step_s / predicted.step.step_s,
        "peak": measured.memory.peak / predicted.memory.peak,
        "estimated memory": measured.memory.peak / estimated_memory(run).total,
    }
    limits = {"step": STEP_RATIO, "peak": PEAK_RATIO, "estimated memory": ESTIMATE_RATIO}
    assert all(1 / limits[name] < ratio < limits[name] for name, ratio in ratios.items()), ratios
