"""Tests of predictions from modules that XLA has dumped for GPUs."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import valkyrie
from machines import needs_gpu_compiler
from test_predict import MESH, STEP, parse_to_proto, refusal
from valkyrie.cli.predict import main
from valkyrie.compiled.schema import dump_class
from valkyrie.hardware.figures import GpuFigures
from valkyrie.machine.gpu_network import NVLINK
from valkyrie.parts import PartKind
from valkyrie.search.compile.executable import without_cache
from valkyrie.search.compile.prediction import Prediction

GPU_STEP = Path(__file__).parent / "goldens" / "h100_step.txt"
"""A step compiled for eight H100s as text. `UPDATE_GOLDENS=1 pytest -n 0 tests/test_predict_gpu.py` rewrites it."""


@needs_gpu_compiler
def test_the_text_of_a_module_predicts_as_its_compile(tmp_path: Path):
    slice = valkyrie.slice("h100-8")
    mesh = slice.mesh((2, 4), ("data", "model"))

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return w - jax.grad(lambda w: jnp.square(jax.nn.relu(x @ w) @ w.T).mean())(w)

    w = jax.ShapeDtypeStruct((2048, 8192), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec(None, "model")))
    x = jax.ShapeDtypeStruct((8192, 2048), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec("data")))
    with without_cache():
        compiled = jax.jit(step).lower(w, x).compile()
    text = compiled.as_text() or ""
    if os.environ.get("UPDATE_GOLDENS"):
        GPU_STEP.write_text(re.sub(r'"/[^"]*/', '"', text))
    (tmp_path / "step.txt").write_text(text)
    ours = valkyrie.predict(compiled, slice=slice)
    dumped = valkyrie.predict(tmp_path / "step.txt", slice=slice, mesh=MESH)
    assert ours.record.memory and dumped.record.memory
    for field in ("step", "parts", "costs", "communication", "positions"):
        assert getattr(dumped.record, field) == getattr(ours.record, field), field
    assert dumped.record.memory.split["arguments"] == ours.record.memory.split["arguments"]


def test_a_dumped_gpu_module_has_the_report_of_a_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main([str(GPU_STEP), "--target", "h100-8", "--mesh", "data=2,model=4", "--tokens", "8192", "--html", "r.html"])
    out, err = capsys.readouterr()
    assert (end.value.code, err) == (0, "") and (tmp_path / "r.html").is_file()
    assert "step on h100-8 (8 h100 chips" in out and "arguments need 0.0 GiB of 72.8 GiB usable. The module" in out
    prediction = valkyrie.predict(GPU_STEP, slice=valkyrie.slice("h100-8"), mesh=MESH, tokens=8192)
    record, replay = prediction.record, prediction.replay
    assert isinstance(record, Prediction) and record.step and record.memory and replay and prediction.step_s
    assert f"predicted step: {1e3 * prediction.step_s:.2f} ms, {prediction.tokens_per_second:,.0f} tokens/s" in out
    seconds = {kind: sum(part.seconds for part in record.parts if part.kind is kind) for kind in PartKind}
    flops = 5 * 2 * 2048 * 8192**2 / 8  # two products forward and three backward, without the gradient of x
    assert record.step.executed_flops == pytest.approx(flops)
    assert 0.8 < flops / (seconds[PartKind.matmul] * 794.5e12) < 1, "large products run near the fastest one"
    assert sum(seconds.values()) == pytest.approx(prediction.step_s)
    uses = replay.collectives
    assert {axis for use in uses for axis in use.mesh_axes} == {"data", "model"}
    assert {link for use in uses for link in use.bytes_by_torus_axis} == {NVLINK}
    assert record.lines[0].source.startswith("test_predict_gpu.py:") and prediction.fits is None
    assert record.memory.split == {"arguments": 2 * (2048 * 8192 // 4 + 8192 * 2048 // 2)}
    assert "compiled for h100. Check this" in record.notes[-1]


def test_a_gpu_module_with_its_buffers_says_whether_it_fits(tmp_path: Path):
    message = dump_class()()
    message.module.ParseFromString(parse_to_proto(GPU_STEP.read_text()))
    message.module.device_assignment.replicas, message.module.device_assignment.partitions = 1, 8
    message.memory.allocations.add(size=2**30)
    (tmp_path / "step.hlo.pb").write_bytes(message.SerializeToString())
    prediction = valkyrie.predict(tmp_path / "step.hlo.pb", slice=valkyrie.slice("h100-8"), mesh=MESH)
    assert prediction.peak_gib == 1 and prediction.fits


def test_wrong_modules_for_gpus_are_refused_in_one_line(tmp_path: Path):
    text, file = GPU_STEP.read_text(), tmp_path / "step.txt"
    assert "for GPUs, but v5e-8 (8 v5e chips 2x4, 1 host) has TPUs. Use the slice" in refusal(file, text, "v5e-8")
    assert "for TPUs, but h100-8 (8 h100 chips, 1 host) has GPUs. Use the slice" in refusal(file, STEP, "h100-8")
    assert "is not scheduled" in refusal(file, text.replace(", is_scheduled=true", ""), "h100-8")
    other_count = refusal(file, text, "h100-16", mesh={"data": 4, "model": 4})
    assert "was compiled for 8 devices, but h100-16 " in other_count and other_count.endswith(" Use h100-8.")
    assert "step.txt is empty" in refusal(file, "", "h100-8")
    named = tmp_path / "module_0001.jit_step.sm_9.0_gpu_after_optimizations.txt"
    assert "for sm_9.0, as its name says, but a100 is sm_8.0" in refusal(named, text, "a100-8")
    amd = tmp_path / "module_0001.jit_step.gfx950_gpu_after_optimizations.txt"
    assert "for gfx950, as its name says, but h100 is sm_9.0" in refusal(amd, text, "h100-8")
    assert valkyrie.predict(named, slice=valkyrie.slice("h200-8"), mesh=MESH).step_s


def test_products_of_triton_in_full_precision_are_not_those_of_tf32(tmp_path: Path):
    """Products of a fusion have their precision in the instruction, those of cuBLAS in the settings of the call."""
    text, seconds = GPU_STEP.read_text().replace("bf16", "f32"), []
    exact = re.sub(r"(?m)^(.* dot\(.*?), metadata=", r"\1, operand_precision={highest,highest}, metadata=", text)
    for name, module in (("tf32", text), ("exact", exact)):
        (tmp_path / f"{name}.txt").write_text(module)
        prediction = valkyrie.predict(tmp_path / f"{name}.txt", slice=valkyrie.slice("h100-8"), mesh=MESH)
        assert prediction.step_s is not None
        seconds.append(prediction.step_s)
    assert exact.count("operand_precision") == 5 and seconds[1] > 2 * seconds[0]


def test_a_chip_without_the_figures_of_a_replay_is_refused():
    h100 = valkyrie.slice("h100-8")
    assert h100.chip is not None
    with pytest.raises(ValueError, match=r"^target\.chip=h100 sets no switch_gbs, gpu\.capability, "):
        valkyrie.predict(
            GPU_STEP, slice=replace(h100, chip=replace(h100.chip, switch_gbs=None, gpu=GpuFigures())), mesh=MESH
        )
