"""Tests of the check that memory and cores suffice for a run, before arrays are allocated."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from importlib import import_module
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from jax.sharding import AbstractMesh
from rich.console import Console

from helpers import compose_run, mark_slow_except
from runs import run_train, tiny_arguments
from valkyrie import host_memory
from valkyrie.config.modes import MODES
from valkyrie.host_memory import free_memory
from valkyrie.models.block import SavedActivation
from valkyrie.parallel.mesh import abstract_mesh
from valkyrie.problems import ProblemCode
from valkyrie.train import room
from valkyrie.train.devices import Devices, machine_problems
from valkyrie.train.memory import ExpectedMemory, MemoryEstimator
from valkyrie.train.memory_errors import memory_estimate_errors
from valkyrie.train.program import StepProgram
from valkyrie.train.room import DoesNotFitError, check_memory_fit, explain_oom, judge_fit
from valkyrie.train.run_memory import expected_memory, to_candidates
from valkyrie.train.show import show_run
from valkyrie.units import GIB

LARGE = ("model=llama_8b", "mesh=1x1x1", "partition=dp", "batch=1", "seq=16")
MEMINFO = "MemTotal: 33554432 kB\nMemFree: 1 kB\nMemAvailable:   25165824 kB\n"


def program_of(*overrides: str) -> StepProgram:
    run = compose_run(*overrides)
    mesh = abstract_mesh(run.config.mesh)
    assert isinstance(mesh, AbstractMesh)
    return StepProgram(run, mesh, backend="cpu")


def simulated_devices(count: int = 1) -> Devices:
    return Devices(tuple(jax.devices()[:1] * count), "cpu", None, simulated=True)


def devices_with_memory(size: int | None) -> Devices:
    stats = None if size is None else {"bytes_limit": size}
    device = SimpleNamespace(device_kind="NVIDIA H100", platform="gpu", id=0, memory_stats=lambda: stats)
    return Devices((device,), "gpu", compose_run("target=h100-1", "mesh=1x1x1").config.target.chip, simulated=False)


@pytest.fixture
def set_free_memory(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that sets the free memory of this machine, in bytes."""
    return lambda size: monkeypatch.setattr(room, "free_memory", lambda: size)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("limit", "expected"), [(8 * GIB, 8 * GIB - 3 * GIB + GIB), (None, 24 * GIB)])
def test_free_memory_is_limited_by_cgroups(tmp_path: Path, version: int, limit: int | None, expected: int):
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    root = cgroups / "memory" if version == 1 else cgroups
    (proc / "self").mkdir(parents=True)
    (root / "job" / "task").mkdir(parents=True)
    (proc / "meminfo").write_text(MEMINFO)
    (proc / "self" / "cgroup").write_text(
        "5:cpu,cpuacct:/x\n4:memory:/job/task\n" if version == 1 else "0::/job/task\n"
    )
    names = host_memory._CGROUP_FILES[version]
    for folder, size in ((root / "job" / "task", None), (root / "job", limit)):
        unlimited = str(2**63 - 4096) if version == 1 else "max"
        (folder / names[0]).write_text(f"{unlimited if size is None else size}\n")
        (folder / names[1]).write_text(f"{3 * GIB}\n")
        (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {GIB}\n")
    assert free_memory(proc, cgroups) == expected


def test_all_memory_counts_as_free_if_the_system_does_not_report_it(tmp_path: Path):
    everything = free_memory(tmp_path, tmp_path)
    assert everything is not None and everything >= (free_memory() or 0)


def test_a_run_that_cannot_fit_is_refused_with_both_sizes_and_a_remedy(set_free_memory: Any):
    set_free_memory(20 * GIB)
    with pytest.raises(ValueError) as caught:
        check_memory_fit(program_of(*LARGE), simulated_devices())
    assert not isinstance(caught.value, DoesNotFitError)
    for part in ("llama_8b", "mesh=1x1x1 partition=dp", "119.7 GiB", "20.0 GiB", "Use model=gpt_1b", "force=true"):
        assert part in str(caught.value)


def test_simulated_devices_share_the_memory_of_the_host(set_free_memory: Any):
    set_free_memory(4 * GIB)
    arguments = ("model=gpt_125m", "mesh=1x1x8", "batch=8", "seq=16")
    check_memory_fit(program_of(*arguments, "partition=fsdp"), simulated_devices(8))
    with pytest.raises(ValueError) as caught:
        check_memory_fit(program_of(*arguments, "partition=dp"), simulated_devices(8))
    assert "8 simulated devices" in str(caught.value) and "Use partition=fsdp" in str(caught.value)


def test_an_evaluation_needs_no_gradients(set_free_memory: Any):
    set_free_memory(100 * GIB)
    check_memory_fit(program_of(*LARGE), simulated_devices(), is_training=False)
    with pytest.raises(ValueError):
        check_memory_fit(program_of(*LARGE), simulated_devices())


def test_device_memory_is_reported_by_the_device_or_else_by_the_chip():
    with pytest.raises(DoesNotFitError) as caught:
        check_memory_fit(program_of(*LARGE), devices_with_memory(64 * GIB))
    assert "has 64.0 GiB" in str(caught.value)
    check_memory_fit(program_of(*LARGE), devices_with_memory(140 * GIB))
    with pytest.raises(DoesNotFitError) as caught:
        check_memory_fit(program_of(*LARGE), devices_with_memory(None))
    assert "has 80.0 GiB" in str(caught.value)


def test_forced_runs_and_unknown_memory_are_not_refused(set_free_memory: Any):
    set_free_memory(20 * GIB)
    check_memory_fit(program_of(*LARGE, "force=true"), simulated_devices())
    set_free_memory(None)
    check_memory_fit(program_of(*LARGE), simulated_devices())


def test_a_likely_misfit_is_reported_once_with_a_remedy(set_free_memory: Any):
    lines: list[str] = []
    set_free_memory(5 * GIB)
    overrides = ("model=gpt_125m", "mesh=1x1x1", "partition=dp", "batch=8", "seq=512")
    check_memory_fit(program_of(*overrides), simulated_devices(), say=lines.append)
    assert len(lines) == 1
    for part in ("likely", "9.1 GiB", "7.2 GiB", "5.0 GiB", "remat=full (about ", "microbatches=", "batch=2 (about "):
        assert part in lines[0]
    set_free_memory(12 * GIB)
    check_memory_fit(program_of(*overrides), simulated_devices(), say=lines.append)
    assert "may not fit" in lines[1] and "9.1 GiB" in lines[1] and "up to 18.1 GiB, but" in lines[1]
    set_free_memory(22 * GIB)
    check_memory_fit(program_of(*overrides), simulated_devices(), say=lines.append)
    assert len(lines) == 2


@pytest.mark.parametrize(
    "error",
    [
        jax.errors.JaxRuntimeError(
            "INTERNAL: Error dispatching computation: Out of memory allocating 37580968260 bytes."
        ),
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 37580968260 bytes."),
        MemoryError("Unable to allocate 37580968260 bytes"),
    ],
)
def test_running_out_of_memory_is_reported_in_one_line_with_a_remedy(
    set_free_memory: Any, error: Exception, monkeypatch: pytest.MonkeyPatch
):
    set_free_memory(20 * GIB)
    run = compose_run("mesh=1x1x1", "partition=dp", "batch=8", "seq=4096")
    with pytest.raises(DoesNotFitError) as caught, explain_oom(run, simulated_devices()):
        raise error
    assert "\n" not in str(caught.value)
    for part in ("valkyrie_tiny", "1x1x1-dp", "35.0 GiB", "20.0 GiB", "batch=4 (about "):
        assert part in str(caught.value)
    monkeypatch.delattr("valkyrie.train.program.StepProgram")  # these messages need no program
    for mode, setting in (("generate", "sample_tokens=77"), ("code_eval", "code_eval.batch=8"), ("eval", "batch=32")):
        run = compose_run("mesh=1x1x1", setting).changed(mode=MODES.config_class(mode)())
        with pytest.raises(DoesNotFitError) as caught, explain_oom(run, simulated_devices()):
            raise error
        assert str(caught.value).startswith(f"{setting}: ") and "remat" not in str(caught.value)


def test_other_compiler_errors_are_not_changed():
    with (
        pytest.raises(jax.errors.JaxRuntimeError),
        explain_oom(compose_run("mesh=1x1x1"), simulated_devices()),
    ):
        raise jax.errors.JaxRuntimeError("INTERNAL: a == b")


@pytest.mark.parametrize("mode", ["train", "measure"])
def test_the_command_refuses_before_it_makes_a_folder(
    tmp_path: Path, set_free_memory: Any, capsys: pytest.CaptureFixture[str], mode: str
):
    set_free_memory(2**10)
    assert run_train(*tiny_arguments(tmp_path / "runs"), f"mode={mode}") == 2
    *notes, refusal = capsys.readouterr().err.splitlines()
    assert "alone take" in refusal and all(note.startswith("note: ") for note in notes)
    assert not (tmp_path / "runs" / "run").exists()


def test_more_simulated_devices_than_the_cores_support_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    run = compose_run("mesh=10x10x10", "partition=dp", "batch=1000")
    (problem,) = machine_problems(run)
    assert (problem.code, problem.size) == (ProblemCode.device_count, 1000) and "2 CPU cores" in str(problem)
    assert machine_problems(run.changed(force=True)) == []
    assert machine_problems(compose_run("mesh=8x8x1", "partition=dp", "batch=64")) == []


def test_the_memory_estimate_of_a_tpu_has_its_past_error():
    results = json.loads((Path(__file__).parents[1] / "experiments" / "memory.json").read_text())
    name, overrides = "gpt_125m fsdp dots", ("model=gpt_125m", "partition=fsdp", "remat=dots")
    run = compose_run(*overrides, "batch=64", "target=v5e-8", "mesh=2x2x2")
    estimate = expected_memory(run, StepProgram(run, abstract_mesh(run.config.mesh), backend="cpu").abstract_state)
    (stored,) = [result["expected"] for result in results if result["layout"] == name]
    assert estimate.total == stored, "the estimate has changed: python experiments/memory.py --kept --ship"
    for has_pipeline, share in ((True, 0.75), (False, 0.9)):
        ratios = [result["ratio"] for result in results if (" pp" in result["layout"]) == has_pipeline]
        errors = memory_estimate_errors(has_pipeline)
        assert (errors.layouts, errors.low, errors.high) == (len(ratios), min(ratios), max(ratios))
        assert errors.within_15_percent >= share * errors.layouts and errors.models == 3
    memory = ExpectedMemory(parameters=GIB, gradients=GIB, optimizer=2 * GIB, ema=0, activations=6 * GIB)
    for usable, word in ((16, "should fit"), (10, "may not fit"), (7, "does not fit")):
        should_fit, line = judge_fit(memory, usable * GIB, "a v5e chip", errors)
        assert should_fit == (word == "should fit")
        assert line.startswith(f"{word}: ") and "10.0 GiB" in line and f"{usable:.1f} GiB usable" in line
    assert f"layouts of {errors.models} models" in line
    assert judge_fit(memory, 3 * GIB, "a v5e chip", errors).text.startswith("does not fit: "), (
        "arrays at rest are exact"
    )


def test_the_compilers_refusal_has_the_peak_of_a_step(monkeypatch: pytest.MonkeyPatch):
    def refuse() -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory. Used 1.50G of 100.0M hbm.")

    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "experiments")
    measure_peak = import_module("memory").measure_peak
    assert measure_peak(SimpleNamespace(compile_step=refuse)) == 1.5 * GIB
    assert measure_peak(SimpleNamespace(compile_step=lambda: None)) is None


@pytest.mark.parametrize(("model", "axis"), [("llama_8b", "kv_heads"), ("deepseek_v2_lite", "latent")])
def test_mode_show_has_no_note_on_small_axes_or_a_rule_that_the_mesh_does_not_divide(model, axis):
    run = compose_run(f"model={model}", "mesh=16x1x1", "partition=1d_tp", "target=v5e-16", "batch=16")
    console = Console(file=StringIO(), width=120)
    show_run(run, console)
    shown = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert axis in shown and "has no rule for" not in shown


@pytest.mark.parametrize(
    ("settings", "choice"),
    [
        ("microbatches=2", "per step"),
        ("microbatches=2 partition.sum_gradients_per=microbatch", "per microbatch"),
        ("microbatches=2 partition.sum_gradients_per=hybrid partition=data_model_fsdp", "over x once per step"),
        ("microbatches=2 partition.sum_gradients_per=hybrid", "per device (estimate), as with"),
        ("microbatches=1", None),
        ("microbatches=2 partition=pp", "per step"),
    ],
)
def test_mode_show_says_how_often_microbatches_sum_gradients(settings: str, choice: str | None):
    console = Console(file=StringIO(), width=120)
    show_run(
        compose_run("model=gpt_tiny", "mesh=2x1x2", "partition=fsdp", "target=v5e-4", "batch=8", *settings.split()),
        console,
    )
    shown = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    lines = [line for line in shown.splitlines() if line.startswith("gradients: ")]
    assert len(lines) == (choice is not None)
    assert all(str(choice) in line for line in lines)
    assert all((" v5e" in line) == ("sum_gradients_per" not in settings) for line in lines), "the chip decides"


def test_mode_show_without_a_chip_says_that_the_choice_of_gradient_sums_depends_on_it():
    console = Console(file=StringIO(), width=200)
    show_run(compose_run("model=gpt_tiny", "mesh=8x1x1", "partition=fsdp", "batch=64", "microbatches=2"), console)
    shown = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    (line,) = [line for line in shown.splitlines() if line.startswith("gradients: ")]
    assert "per microbatch" in line and "target=" in line


def test_the_memory_estimate_counts_the_group_of_layers_with_the_most_activations():
    """A first layer without experts does not hide the activations of those with experts."""

    def activation_bytes(dense_layers: int) -> float:
        run = compose_run("model=moe_tiny", f"model.dense_layers={dense_layers}", "model.mlp=64", "remat=full")
        return MemoryEstimator(run, to_candidates([run])).estimate(run.config.remat).activations.item()

    assert activation_bytes(1) == activation_bytes(0) > activation_bytes(4)


def test_the_memory_estimate_counts_weights_cast_before_the_loop_over_layers():
    def cast_bytes(*overrides: str) -> float:
        """Return the bytes of activations that four layers have and two lack, per parameter of two layers."""
        settings = ("model=gpt_tiny", "partition=dp", "target=v5e-4", "batch=4", "seq=8", "remat=full", *overrides)
        two, four = (compose_run(*settings, f"model.layers={layers}") for layers in (2, 4))
        memory = [
            MemoryEstimator(run, to_candidates([run])).estimate(run.config.remat).activations for run in (two, four)
        ]
        return (memory[1] - memory[0]).item() / (four.model.parameter_count() - two.model.parameter_count())

    assert cast_bytes() == pytest.approx(2, rel=0.02)
    assert cast_bytes("precision=bf16") < 0.04 and cast_bytes("precision=float32") < 0.04


def test_layers_of_a_group_recompute_named_activations_and_half_of_those_after_several_products():
    run = compose_run("model=gpt_tiny", "partition=dp", "target=v5e-4", "batch=4", "seq=8")
    layer = run.model.segments()[0][0][0]  # pyright: ignore[reportAttributeAccessIssue]
    up = next(a for a in layer.saved_activations(is_first=False) if a.name == "up")
    gate, hidden = replace(up, name="gate"), replace(up, name=None, product=False, count=2, saved_ratio=2.0)

    def arrays(*activations: SavedActivation) -> float:
        memory = MemoryEstimator(run, to_candidates([run]))
        groups = [memory._recomputed_bytes(group) for group in (activations, [up])]  # pyright: ignore[reportPrivateUsage]
        sizes = [sum(bytes_.item() for _, bytes_ in group) for group in groups]
        return sizes[0] / sizes[1]

    assert arrays(up, gate, hidden) == 3
    assert arrays(up, hidden) == 1 and arrays(up, gate, replace(hidden, float32=True)) == 2
    assert arrays(up, replace(gate, needed_for="up")) == 1


def test_layers_of_a_group_recompute_only_what_the_policy_does_not_save():
    def recomputed(remat: str) -> tuple[float, float]:
        run = compose_run("model=valkyrie_tiny", "partition=dp", "target=v5e-4", "batch=4", "seq=64", f"remat={remat}")
        sizes = MemoryEstimator(run, to_candidates([run]))._working_sets(run.config.remat)  # pyright: ignore[reportPrivateUsage]
        return sizes[0].item(), sizes[1].item()

    (group, full), (same_group, dots), (_, everything) = (recomputed(remat) for remat in ("full", "dots", "none"))
    assert full > dots > everything == 0 and group == same_group > 0


def test_the_memory_estimate_counts_gathered_weights_and_loss_or_gradients():
    def activations(*overrides: str) -> tuple[float, float]:
        run = compose_run("model=gpt_tiny", "mesh=2x2x1", "batch=8", "seq=64", "remat=full", *overrides)
        memory = MemoryEstimator(run, to_candidates([run]))
        return memory.estimate(run.config.remat).activations.item(), memory.gathered_bytes.item()

    simulated, _ = activations("partition=fsdp", "target=cpu4")
    on_tpu, gathered = activations("partition=fsdp", "target=v5e-4")
    assert on_tpu < simulated and gathered > 0
    assert activations("partition=dp", "target=v5e-4")[1] == 0


@pytest.mark.parametrize(
    "model", mark_slow_except(["gpt_tiny", "nanochat_tiny", "trm_tiny", "valkyrie_tiny"], ["gpt_tiny", "trm_tiny"])
)
def test_every_family_has_other_sizes_to_suggest(model: str) -> None:
    run = compose_run(f"model={model}", *(["data=sudoku"] if model == "trm_tiny" else []))
    sizes = room._family_sizes(run)  # pyright: ignore[reportPrivateUsage]
    assert sizes[model] == run.model.parameter_count() and len(sizes) >= 2
