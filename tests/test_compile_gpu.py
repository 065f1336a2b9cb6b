"""Programs compiled for NVIDIA GPUs on a machine without one."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest

from helpers import compose_run
from valkyrie.hardware.chips import known_chips
from valkyrie.hardware.names import parse_target
from valkyrie.hardware.platforms import get_platform, gpu
from valkyrie.search.compile.prediction import CompileStatus
from valkyrie.search.compile.runner import CompiledRun, compile_layout

needs_gpu_compiler = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="compiles for a GPU: uv sync --extra gpu-compile (Linux on x86_64; no GPU is needed)",
)
GPUS = [chip for chip in known_chips().values() if chip.platform == "gpu"]


@pytest.fixture(scope="session")
def compiled_gpt() -> CompiledRun:
    """A step of gpt_tiny compiled for 16 H100s in two nodes."""
    run = compose_run(
        "model=gpt_tiny", "mesh=16x1x1", "partition=fsdp", "target=h100-16", "batch=32", "mode=compile", "seq=256"
    )
    return compile_layout(run, 300)


@pytest.mark.parametrize(
    ("plugins", "versions", "has_ptxas", "fact"),
    [
        (("no_such_plugin",), {}, True, "not installed"),
        (("jax",), {"jax": "0.9.0", "jaxlib": "0.10.2"}, True, "jaxlib 0.10.2, jax 0.9.0"),
        (("jax",), {}, False, "ptxas"),
    ],
)
def test_a_missing_compiler_is_named_with_the_command_that_installs_it(
    plugins: tuple[str, ...],
    versions: dict[str, str],
    has_ptxas: bool,
    fact: str,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(gpu.Gpu, "plugins", plugins)
    monkeypatch.setattr(gpu.metadata, "version", lambda name: versions.get(name, "1.0"))
    monkeypatch.setattr(gpu, "_has_ptxas", lambda: has_ptxas)
    compiled = compile_layout(compose_run("model=s5_tiny", "mesh=8x1x1", "partition=fsdp", "target=h100-8"), 60)
    reason = compiled.outcome.reason or ""
    assert compiled.status is CompileStatus.refused and "\n" not in reason
    assert reason.startswith("target=h100-8 ") and fact in reason and "uv sync --extra gpu-compile" in reason


@pytest.mark.parametrize("chip", GPUS, ids=lambda chip: chip.name)
def test_the_description_for_xla_has_the_figures_without_which_it_dies(chip):
    text = get_platform("gpu").describe_device(chip.device_kinds[0], chip)
    for field in ("threads_per_warp", "block_dim_limit_x", "cuda_compute_capability", "core_count", "l2_cache_size"):
        assert f"{field}: 0" not in text and field in text
    assert f"device_memory_size: {int(chip.usable_hbm_gib * 2**30)}" in text


def test_a_chip_without_the_figures_of_a_gpu_is_refused():
    h100 = known_chips()["h100"]
    target = replace(parse_target("h100-8"), chip=replace(h100, gpu=None))
    reason = get_platform("gpu").missing_figures_message(target.chip)
    assert reason is not None and "sets no gpu" in reason


@needs_gpu_compiler
def test_a_step_compiles_for_gpus_without_one(compiled_gpt: CompiledRun):
    step = compiled_gpt.outcome.step
    assert compiled_gpt.status is CompileStatus.ok and step is not None, compiled_gpt.outcome.reason
    assert step.memory.peak and step.memory.headroom
    assert {position.coords for position in step.positions} == {(node, 0, i) for node in range(2) for i in range(8)}
