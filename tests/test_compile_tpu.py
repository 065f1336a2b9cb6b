"""Tests of compiling for TPU slices without a TPU: the command, the report, the timeline and the cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers import compose_run
from machines import needs_libtpu
from valkyrie.parallel.mesh import abstract_mesh
from valkyrie.search.estimate.efficiency import chip_efficiency
from valkyrie.search.estimate.runs import estimate_runs
from valkyrie.train.program import StepProgram

pytestmark = [needs_libtpu, pytest.mark.timeout(600)]

TINY_OVERRIDES = ("mode=compile", "target=v5e-4", "mesh=2x2x1", "partition=fsdp", "model=gpt_tiny", "batch=8")


def run_train_process(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "VALKYRIE_CACHE": str(folder / "cache"), "COLUMNS": "200"}
    command = [sys.executable, "-m", "valkyrie.cli.train", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compile")


@pytest.fixture(scope="module")
def first_result(folder: Path) -> subprocess.CompletedProcess[str]:
    return run_train_process(folder, *TINY_OVERRIDES, "name=first", "mode.hlo=true")


@pytest.fixture(scope="module")
def prediction(folder: Path, first_result: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert (first_result.returncode, first_result.stderr) == (0, ""), first_result.stdout + first_result.stderr
    return json.loads((folder / "runs" / "first" / "compile.json").read_text())


def test_the_report_has_memory_speed_and_hints(
    first_result: subprocess.CompletedProcess[str], prediction: dict[str, Any]
):
    for part in (
        "fits:",
        "predicted step:",
        "where the step time goes",
        "sent by mesh axes",
        "placement: x=2 on",
        "hint:",
    ):
        assert part in first_result.stdout, part
    assert prediction["status"] == "ok"
    assert 1e-5 < prediction["step"]["step_s"] < 0.1
    assert sum(part["seconds"] for part in prediction["parts"]) == pytest.approx(prediction["step"]["step_s"], rel=1e-6)
    assert 0 < prediction["step"]["mfu"] < 1
    assert {"x", "y"} & {
        axis for over in prediction["communication"]["bytes_by_mesh_axes"] for axis in over["mesh_axes"]
    }
    assert sum(prediction["communication"]["bytes_by_torus_axis"].values()) > 0
    assert any("valkyrie/" in (cost["source"] or "") for cost in prediction["costs"])
    assert prediction["memory"]["usable"] > 15 * 2**30


def test_the_timeline_covers_the_whole_step(folder: Path, prediction: dict[str, Any]):
    events = json.loads((folder / "runs" / "first" / "timeline.json").read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert {e["ph"] for e in events} == {"X", "M"}
    assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(1e6 * prediction["step"]["step_s"], rel=0.01)
    tracks = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert "compute" in tracks and any(track.startswith("collectives over") for track in tracks)


def test_the_module_is_written_to_the_requested_path(folder: Path, prediction: dict[str, Any]):
    text = (folder / "runs" / "first" / "module.hlo.txt").read_text()
    assert "is_scheduled=true" in text
    assert (folder / "runs" / "first" / "module.hlo.pb").stat().st_size > 10_000


def test_an_equal_layout_is_not_compiled_again(folder: Path, prediction: dict[str, Any]):
    again = run_train_process(folder, *TINY_OVERRIDES, "name=again")
    second = json.loads((folder / "runs" / "again" / "compile.json").read_text())
    assert second["compile"]["cached"] and not prediction["compile"]["cached"]
    assert second["step"] == prediction["step"], again.stdout


@pytest.mark.slow
def test_a_layout_that_does_not_fit_is_a_result(folder: Path):
    large = ("model=gpt_125m", "batch=4096", "remat=none", "name=large")
    result = run_train_process(folder, *TINY_OVERRIDES, *large)
    assert (result.returncode, result.stderr) == (3, "")
    line = next(line for line in result.stdout.splitlines() if line.startswith("does not fit: needs "))
    assert "15.8 GiB usable" in line and "largest: activations" in line
    assert "try: " in line and "remat=full" in line
    assert json.loads((folder / "runs" / "large" / "compile.json").read_text())["status"] == "does_not_fit"


@pytest.mark.slow
def test_square_slices_of_v6e_reduce_scatter_gradients(folder: Path):
    run_train_process(
        folder, "mode=compile", "target=v6e-16", "mesh=4x4x1", "partition=fsdp", "model=gpt_tiny", "model.embed=1024",
        "model.mlp=4096", "batch=32", "name=square",
    )  # fmt: skip
    sent = json.loads((folder / "runs" / "square" / "compile.json").read_text())["communication"]["bytes_by_kind"]
    assert sent["all-reduce"] < sent["reduce-scatter"] / 10, "without the chip's options, gradients are all-reduced"


@pytest.mark.slow
def test_more_microbatches_send_no_more_gradients(folder: Path):
    sent = {}
    for count, settings in ((1, ()), (4, ()), (4, ("partition.sum_gradients_per=microbatch",))):
        name = f"mb{count}-{len(settings)}"
        result = run_train_process(
            folder, "mode=compile", "target=v5e-8", "mesh=1x1x8", "partition=dp", "model=gpt_tiny", "batch=32",
            f"microbatches={count}", *settings, f"name={name}",
        )  # fmt: skip
        record = json.loads((folder / "runs" / name / "compile.json").read_text())
        sent[name] = sum(record["communication"]["bytes_by_kind"].values())
        assert ("\ngradients: " in result.stdout) == (count > 1)
        if count > 1:
            assert record["gradients"]["summed_per"] == ("microbatch" if settings else "step")
    assert sent["mb4-0"] <= 1.02 * sent["mb1-0"], "metrics of each microbatch may be summed"
    assert sent["mb4-1"] > 3 * sent["mb1-0"], "this test could not tell one sum per step from one per microbatch"


@pytest.mark.slow
@pytest.mark.parametrize("partition", ["fsdp", "fsdp_tp"])
def test_slices_exchange_one_sum_of_gradient_shards_per_step(folder: Path, partition: str):
    sent = {}
    for count, per in ((1, "hybrid"), (4, "hybrid"), (4, "step"), (4, "microbatch")):
        name = f"slices-{partition}-{count}-{per}"
        result = run_train_process(
            folder, "mode=compile", "target=v5e-4", "target.slices=2", "mesh=2s2x2x1", f"partition={partition}",
            "model=gpt_tiny", "batch=64", f"microbatches={count}", f"partition.sum_gradients_per={per}", f"name={name}",
        )  # fmt: skip
        assert result.returncode == 0, result.stdout + result.stderr
        record = json.loads((folder / "runs" / name / "compile.json").read_text())
        sent[count, per] = sum(
            entry["bytes"] for entry in record["communication"]["bytes_by_mesh_axes"] if "s" in entry["mesh_axes"]
        )
        parameter_bytes = record["memory"]["split"]["parameters"]
    # Gradients are float32 and split like parameters. Heads of 16 and the embedding are padded.
    assert all(parameter_bytes <= sent[key] <= 2 * parameter_bytes for key in sent if key[1] != "microbatch"), sent
    assert sent[4, "microbatch"] > 2.5 * sent[4, "hybrid"], "this test could not tell one sum per step from several"


@pytest.mark.slow
def test_a_step_that_nearly_fills_the_memory_overlaps_its_communication(folder: Path):
    width = ("embed=8192", "attention.heads=64", "attention.kv_heads=64", "attention.head_dim=128", "mlp=28672")
    model = ("model=llama_8b", "model.layers=64", *(f"model.{setting}" for setting in width))
    layout = ("mesh=1x4x16", "partition=fsdp_tp", "remat=dots", "batch=192", "seq=2048", "precision=bf16_mixed")
    result = run_train_process(folder, "mode=compile", "target=v5p-128", *model, *layout, "name=nearly_full")
    assert result.returncode == 0, result.stdout + result.stderr
    record = json.loads((folder / "runs" / "nearly_full" / "compile.json").read_text())
    sent = record["communication"]
    assert sent["exposed_s"] < 0.6 * sent["sending_s"], "without the options all communication is exposed"
    assert "target.chip.xla_options.xla_latency_hiding_scheduler_rerun=2" in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_a_step_that_may_not_fit_keeps_no_unsummed_gradient_of_the_head(tied: bool):
    """GPT-3 175B on v6e-256 needs 31.5 GiB if the gradient of the head is summed after the layers, and runs in fact."""
    import jax

    from valkyrie.hardware.platforms import get_platform
    from valkyrie.hardware.target import usable_hbm
    from valkyrie.parallel.mesh import build_mesh
    from valkyrie.search.compile.child import parse_shortage

    run = compose_run(
        "model=gpt3_175b", "target=v6e-256", "mesh=16x16x1", "partition=fsdp", "remat=full", "batch=768", "seq=2048",
        "precision=bf16_mixed", "precision.reduction=bfloat16", "model.document_boundary=cross",
        f"model.tie_embeddings={tied}", "+target.chip.xla_options.xla_tpu_max_hbm_size_mib=1",
    )  # fmt: skip
    devices = get_platform("tpu").devices_to_compile_for(run.config.target, run.config.mesh.size)
    program = StepProgram(run, build_mesh(run.config.mesh, devices), backend="tpu")
    with pytest.raises(jax.errors.JaxRuntimeError) as refusal:  # the limit of 1 MiB ends the compile within seconds
        program.compile_step()
    needed, usable = parse_shortage(str(refusal.value)).needed, usable_hbm(run.config.target.chip)
    assert needed is not None and usable is not None and needed < 0.96 * usable
    smaller = run.changed(batch=256)
    assert not StepProgram(smaller, abstract_mesh(smaller.config.mesh), backend="tpu").shard.sums_head_first


@pytest.mark.slow
@pytest.mark.parametrize(("dispatch", "kind"), [("sorted", "reduce-scatter"), ("exchanged", "ragged-all-to-all")])
def test_steps_with_experts_are_predicted_and_estimated_alike(folder: Path, dispatch: str, kind: str):
    overrides = ["model=moe_tiny", f"model.moe.dispatch={dispatch}", "partition=fsdp_ep", "mesh=2x1x2", "target=v5e-4"]
    overrides += ["batch=128", "precision=bf16"]
    result = run_train_process(folder, "mode=compile", *overrides, f"name={dispatch}")
    assert result.returncode == 0, result.stdout + result.stderr
    record = json.loads((folder / "runs" / dispatch / "compile.json").read_text())
    over_experts = [use for use in record["communication"]["collectives"] if use["mesh_axes"] == ["z"]]
    assert kind in {use["kind"] for use in over_experts}
    run = compose_run(*overrides)
    estimate_s = estimate_runs([run], chip_efficiency(run.config.target.chip))[0]["step"]
    assert 0.6 < record["step"]["step_s"] / estimate_s < 1.6
    assert any("routing" in note for note in record["notes"])
