"""Tests of compiler options: defaults of the chip, changes by the user, the origin of each option, and refusals."""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from helpers import compose_run
from machines import needs_libtpu
from valkyrie.hardware.chips import known_chips
from valkyrie.hardware.platforms import get_platform
from valkyrie.hardware.target import ChipConfig
from valkyrie.parallel.mesh import abstract_mesh
from valkyrie.paths import conf_dir
from valkyrie.search.compile.prediction import CompileStatus
from valkyrie.search.compile.runner import compile_layout
from valkyrie.train.options import CHIP, USER, VALKYRIE, Option, collect_options, explain_refusal
from valkyrie.train.program import StepProgram

TPU = get_platform("tpu")
KEY = "target.chip.xla_options"
GATHERS = "xla_enable_async_all_gather"
ALL_TO_ALL = "xla_tpu_enable_async_all_to_all"
PREFER_GATHERS = "xla_tpu_prefer_async_allgather_to_allreduce"
THRESHOLD = "xla_jf_spmd_threshold_for_windowed_einsum_mib"


def program(*overrides: str, target: str = "v4-8", backend: str = "tpu") -> StepProgram:
    run = compose_run("model=s5_tiny", "mesh=2x2x1", f"target={target}", "batch=8", *overrides)
    return StepProgram(run, abstract_mesh(run.config.mesh), backend=backend)


def test_a_step_is_compiled_with_the_compiler_options_of_its_chip():
    options = program().compiler_options
    assert options is not None and options[GATHERS] == "true" and THRESHOLD in options
    assert {o.name: o.set_by for o in program().options} == {GATHERS: CHIP, ALL_TO_ALL: CHIP, THRESHOLD: VALKYRIE}
    assert program(backend="cpu").compiler_options is None, "a CPU's compiler has none of them"


def test_gathers_on_several_slices_stay_gathers():
    def prefers_gathers(target: str, mesh: str, slices: int = 2) -> bool:
        settings = (f"mesh={mesh}", f"target.slices={slices}", "partition=fsdp", "model.embed=64", "batch=128")
        return PREFER_GATHERS in (program(*settings, target=target).compiler_options or {})

    assert prefers_gathers("v4-128", "2s4x4x4")
    assert not prefers_gathers("v4-128", "4x4x4", slices=1)
    assert not prefers_gathers("v5e-32", "2s8x4x1"), "a torus of two axes"


@pytest.mark.parametrize("name", ["v4", "v5e", "v5p", "v6e", "tpu7x"])
def test_every_default_option_of_a_chip_has_a_comment_with_evidence(name: str):
    lines = (conf_dir() / "target" / "chip" / f"{name}.yaml").read_text().splitlines()
    above = reversed(lines[: next(n for n, line in enumerate(lines) if line.startswith("xla_options:"))])
    assert any("libtpu 0.0." in line for line in takewhile(lambda line: line.startswith("#"), above))
    assert all(option.startswith("xla_") for option in known_chips()[name].xla_options)


def test_user_options_override_defaults_and_null_removes_them():
    overridden = program(
        *(f"{KEY}.{o}" for o in (f"{GATHERS}=false", f"{ALL_TO_ALL}=false", f"{THRESHOLD}=7", "xla_mine=3"))
    )
    assert overridden.compiler_options == {GATHERS: "false", ALL_TO_ALL: "false", THRESHOLD: "7", "xla_mine": "3"}
    assert {o.set_by for o in overridden.options} == {USER}
    without_gathers = program(f"{KEY}.{GATHERS}=null")
    assert set(without_gathers.compiler_options or {}) == {ALL_TO_ALL, THRESHOLD}
    assert Option(GATHERS, None, USER) in without_gathers.options
    assert str(Option(GATHERS, None, USER)) == f"{GATHERS} removed"


def test_gradient_sums_are_split_if_the_compiler_overlaps_them_with_products():
    def lowered_text(*overrides: str, **options: str) -> str:
        fsdp = compose_run("model=gpt_tiny", "partition=fsdp", "mesh=2x2x1", "batch=8", *overrides)
        lowered = StepProgram(fsdp, abstract_mesh(fsdp.config.mesh), backend=options.get("backend", "tpu")).lower_step()
        return lowered.as_text()

    assert "all_to_all" in lowered_text("target=v4-8")
    assert "all_to_all" not in lowered_text("target=v4-8", "partition.gradient_sum=reduce_scatter")
    assert "all_to_all" not in lowered_text("target=v4-8", f"{KEY}.{ALL_TO_ALL}=null")
    assert "all_to_all" not in lowered_text("target=v5e-4"), "its compiler has no asynchronous all-to-all"
    assert "all_to_all" not in lowered_text("target=v4-8", backend="cpu")
    assert "all_to_all" in lowered_text("target=v5e-4", "partition.gradient_sum=all_to_all")


def test_later_compilers_gather_on_sparse_cores_instead_of_in_products(monkeypatch: pytest.MonkeyPatch):
    chip, fusion_option = known_chips()["v5p"], "xla_tpu_enable_async_collective_fusion_fuse_all_gather"
    offload_option = "xla_tpu_enable_sparse_core_collective_offload_all_gather"
    for version, option in (("0.0.42.1", fusion_option), ("0.0.46", offload_option), ("0.1.0", offload_option)):
        monkeypatch.setattr("valkyrie.train.options.metadata.version", lambda name, version=version: version)
        names = {option.name for option in collect_options(chip, {})}
        assert names & {fusion_option, offload_option} == {option}
    overridden = replace(chip, xla_options=chip.xla_options | {fusion_option: "maybe"})
    assert Option(fusion_option, "maybe", USER) in collect_options(overridden, {}), "the setting of the user is kept"


def test_a_null_option_without_a_default_is_not_listed():
    chip = ChipConfig(name="mine", xla_options={"xla_other": None, "xla_flag": True})
    assert collect_options(chip, {}) == [Option("xla_flag", "true", USER)]


def test_a_list_is_refused_as_the_value_of_an_option(command: Any):
    result = command("model=s5_tiny", "target=v4-8", f"{KEY}.{GATHERS}=[1]", "mode=show")
    assert result.status == 2
    assert f"{KEY}.{GATHERS}=[1]: " in result.err


def test_compiler_errors_about_options_are_explained():
    unknown = explain_refusal("INVALID_ARGUMENT: No such compile option: 'xla_enable_async_all_gathers'", TPU)
    assert unknown is not None
    assert unknown.startswith(f"{KEY}.xla_enable_async_all_gathers: ")
    assert f"Did you mean {GATHERS}?" in unknown
    unreadable = explain_refusal(
        f"INVALID_ARGUMENT: Failed to parse 'maybe' into flag {GATHERS}: Options are: auto.", TPU
    )
    assert unreadable is not None
    assert unreadable.startswith(f"{KEY}.{GATHERS}=maybe: the compiler")
    assert unreadable.endswith("Options are: auto.")
    message = "INVALID_ARGUMENT: No such compile option: 'xla_nothing'"
    assert str(explain_refusal(message, TPU, in_python=True)).startswith('options={"xla_nothing": ...}: the compiler')
    for_gpus = explain_refusal(message, get_platform("gpu")) or ""
    assert "jaxlib" in for_gpus and "libtpu" not in for_gpus
    message = message.replace("xla_nothing", "xla_gpu_enable_triton_gem")
    assert "Did you mean xla_gpu_enable_triton_gemm?" in (explain_refusal(message, get_platform("gpu")) or "")
    out_of_memory = "RESOURCE_EXHAUSTED: out of memory"
    assert explain_refusal(out_of_memory, TPU) is None


@needs_libtpu
def test_an_unknown_compiler_option_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VALKYRIE_CACHE", str(tmp_path / "cache"))
    layout = ("model=s5_tiny", "mesh=2x2x1", "target=v4-8", "batch=8", "seq=64", "mode=compile")
    outcome = compile_layout(compose_run(*layout, f"{KEY}.xla_enable_async_all_gathers=true"), 300).outcome
    assert outcome.status is CompileStatus.refused and outcome.reason is not None
    assert outcome.reason.startswith(f"{KEY}.xla_enable_async_all_gathers: ") and "libtpu" in outcome.reason
    assert f"Did you mean {GATHERS}?" in outcome.reason
