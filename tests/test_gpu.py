"""Tests on an NVIDIA GPU, against the CPU or a reference: `JAX_PLATFORMS=cuda,cpu pytest -m gpu -n 0`."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import compose_run, make_batch, small_run
from test_attention import make_inputs, run_attention
from valkyrie.modes.measure import Config as MeasureMode
from valkyrie.ops.attention import AttentionImpl
from valkyrie.ops.choices import ScanImpl
from valkyrie.search.measure.measure import measure
from valkyrie.train.devices import prepare_devices
from valkyrie.train.run_memory import estimated_memory

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


@pytest.fixture(autouse=True)
def gpu() -> None:
    """Fail without a GPU: only `pytest -m gpu` runs these tests, and a run that checks nothing must not pass."""
    assert jax.default_backend() == "gpu", "no GPU. Set JAX_PLATFORMS=cuda,cpu"


@pytest.mark.parametrize("documents", [0.0, 0.005, 0.5], ids=["one document", "packed", "more than cuDNN takes"])
@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, None), (True, 100)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_attention_equals_the_definition(causal: bool, window: int | None, documents: float, head_dim: int):
    """Output and gradients of the implementation that `auto` takes for bfloat16, against a dense mask in float32."""
    q, k, v, _, _ = make_inputs(512, head_dim=head_dim)
    is_start = np.random.default_rng(0).random((2, 512)) < documents
    ids = jnp.asarray(np.cumsum(is_start, axis=1, dtype=np.int32)) if documents else None
    options = {"window": window, "causal": causal, "ids": ids}
    rounded = [x.astype(jnp.bfloat16) for x in (q, k, v)]
    with jax.default_matmul_precision("highest"):
        exact = [x.astype(jnp.float32) for x in rounded]
        expected = run_attention(AttentionImpl.dense, *exact, None, **options)
    ours = run_attention(AttentionImpl.auto, *rounded, None, **options)
    for name, a, b in zip(("output", "dq", "dk", "dv"), ours, expected, strict=True):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        error = np.linalg.norm(a - b) / np.linalg.norm(b)
        assert error < 0.02, f"{name}: {error:.4f}"


@pytest.mark.parametrize("impl", [ScanImpl.auto, ScanImpl.blocked, ScanImpl.associative], ids=str)
def test_the_recurrence_of_s5_equals_that_of_the_cpu(impl: ScanImpl):
    overrides = ["precision=float32", f"model.s5.scan={impl.value}", "mesh=1x1x1", "partition=fsdp"]
    _assert_loss_equals_that_of_the_cpu("s5_tiny", *overrides)


@pytest.mark.parametrize("model", ["gpt_tiny", "valkyrie_tiny", "longformer_tiny", "nanochat_tiny", "trm_tiny"])
def test_the_first_step_of_a_model_equals_that_of_the_cpu(model: str):
    _assert_loss_equals_that_of_the_cpu(model, "precision=float32", "mesh=1x1x1", "partition=fsdp")


def _assert_loss_equals_that_of_the_cpu(model: str, *overrides: str) -> None:
    from valkyrie.parallel.mesh import build_mesh
    from valkyrie.train.program import StepProgram

    run = small_run(model, *overrides)
    losses = []
    for platform in ("cpu", "gpu"):
        program = StepProgram(run, build_mesh(run.config.mesh, jax.devices(platform)[:1]))
        with jax.default_matmul_precision("highest"), jax.default_device(jax.devices(platform)[0]):
            step, state = program.compile_step(), program.init(run.config.seed)
            for _ in range(2):
                state, metrics = step(state, program.place(make_batch(run)))
            losses.append([float(metrics["loss"]), float(metrics["grad_norm"])])
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-3)


@pytest.mark.parametrize("partition", ["fsdp", "dp", "fsdp_tp", "1d_tp", "2d_tp", "2d_tp_fsdp", "sp"])
def test_a_step_under_each_partition(partition: str):
    """On one GPU, every axis has size 1. With two or more, the mesh uses two."""
    count = min(jax.device_count(), 2)
    run = small_run("gpt_tiny", f"mesh={count}x1x1", f"partition={partition}", "precision=bf16_mixed")
    measurement = measure(run, prepare_devices(run))
    assert measurement.loss is not None and np.isfinite(measurement.loss)


@pytest.mark.parametrize("documents", ["cross", "reset"])
def test_memory_is_near_its_estimate(documents: str):
    """Peak memory of gpt_125m. On an H200, 32 x 1024 tokens took 0.78 of the estimate, and gpt_1b 0.94."""
    run = compose_run(
        *("model=gpt_125m", "mesh=1x1x1", "partition=fsdp", "remat=minimal", "batch=8", "seq=1024"),
        *("precision=bf16_mixed", f"model.document_boundary={documents}", "mode=measure"),
    )
    assert isinstance(run.config.mode, MeasureMode)
    measurement = measure(run, prepare_devices(run))
    assert measurement.memory is not None and measurement.memory.peak is not None
    expected = estimated_memory(run).total
    assert expected / 1.4 < measurement.memory.peak < expected * 1.4, dataclasses.asdict(measurement.memory)
