"""Tests of `remat`: named activations are saved, offloaded or recomputed, and their reported bytes are right."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from helpers import (
    MODELS,
    assert_same_steps,
    compose_run,
    config_names,
    initial_state,
    make_program,
    mark_slow_except,
    reference_steps,
    run_two_steps,
    small_overrides,
    small_run,
)
from valkyrie.config.run import Run
from valkyrie.hardware.platforms import get_platform
from valkyrie.machine.replay import OpTotals
from valkyrie.models import activation_names
from valkyrie.parallel.mesh import abstract_mesh
from valkyrie.parallel.remat import SAVE_EVERYTHING, RematConfig, load_remat
from valkyrie.parts import PartKind
from valkyrie.runs.folder import saved_config
from valkyrie.search.compile.hints import layout_hints
from valkyrie.search.compile.prediction import CompileStatus, HintCode, MemoryReport, PredictedStep, Prediction
from valkyrie.search.compile.summary import recomputed_activations, remat_report
from valkyrie.train.program import StepProgram
from valkyrie.train.run_memory import saved_bytes
from valkyrie.train.show import legal_remats

REMATS = config_names("remat")


def trace_step(run: Run, backend: str = "cpu") -> Any:
    """Return the jaxpr of a run's step, traced for a backend. Nothing is compiled."""
    program = StepProgram(run, abstract_mesh(run.config.mesh), backend=backend)
    return program.step.trace(program.abstract_state, program.abstract_batch).jaxpr.jaxpr


def scans(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            yield equation
            continue
        for value in equation.params.values():
            for inner in value if isinstance(value, list | tuple) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from scans(inner)


def forward_output_bytes(run: Run, backend: str = "cpu") -> tuple[int, int]:
    """Return the bytes that blocks save for the backward pass, as a pair: in device memory and in host memory."""
    length, device, host = run.config.seq, 0, 0
    for scan in scans(trace_step(run, backend)):
        outputs = [out.aval for out in scan.outvars[scan.params["num_carry"] :]]
        for array in outputs:
            if array.ndim > 3 and length in array.shape[2:] and scan.params["reverse"] is False:
                size = int(np.prod(array.shape)) * array.dtype.itemsize
                on_host = "host" in str(array)
                device, host = device + size * (not on_host), host + size * on_host
    return device, host


@lru_cache
def long_run(model: str) -> Run:
    """Return a run with sequences of 256 tokens, long enough for attention to use the TPU kernel."""
    return small_run(model, "seq=256", "batch=4")


@pytest.mark.parametrize("model", mark_slow_except(["gpt_tiny", "valkyrie_tiny"], ["valkyrie_tiny"]))
@pytest.mark.parametrize("remat", mark_slow_except([r for r in REMATS if r != "none"], ["dots", "minimal"]))
def test_reported_saved_bytes_equal_those_of_the_forward_pass(model: str, remat: str):
    run = long_run(model).changed(remat=load_remat(remat))
    expected = saved_bytes(run)
    assert forward_output_bytes(run, "tpu") == (expected.device_total, expected.host_total), expected


def test_saved_queries_keys_and_values_include_what_norms_and_value_embeddings_need():
    run = long_run("nanochat_tiny").changed(remat=load_remat("save_qkv_proj"))
    assert forward_output_bytes(run, "tpu") == (saved_bytes(run).device_total, 0)


@pytest.mark.parametrize("dispatch", ["sorted", "exchanged", "dense"])
def test_the_last_products_of_experts_are_never_recomputed(dispatch: str):
    run = small_run("moe_tiny", "remat=full", "partition=fsdp_ep", "mesh=2x2x2", f"model.moe.dispatch={dispatch}")
    products: dict[bool, set[str]] = {False: set(), True: set()}
    for scan in scans(trace_step(run)):
        products[scan.params["reverse"]] |= {*re.findall(r"name\[name=(up|gate|down)\]", str(scan))}
    assert products == {False: {"up", "gate", "down"}, True: {"up", "gate"}}


@pytest.mark.parametrize("dispatch", ["sorted", "exchanged"])
def test_saving_all_products_saves_those_of_experts(dispatch: str):
    moe = (f"model.moe.dispatch={dispatch}", "model.moe.mlp=192")
    run = small_run("moe_tiny", "remat=dots", "partition=fsdp_ep", "mesh=2x2x2", *moe)
    saved = [out.aval for scan in scans(trace_step(run)) for out in scan.outvars[scan.params["num_carry"] :]]
    assert sum(array.ndim == 3 and array.shape[-1] == 192 for array in saved) == 2  # `up` and `gate`, not `down`


@pytest.mark.parametrize("model", mark_slow_except(MODELS, ["valkyrie_tiny", "trm_tiny"]))
def test_every_activation_that_a_model_declares_is_named_in_its_step(model: str):
    run = small_run(model)
    named = {*re.findall(r"name\[name=(\w+)\]", str(trace_step(run)))}
    assert named >= {*activation_names(run.model)}


def test_saving_an_activation_takes_the_reported_bytes():
    run = small_run("valkyrie_tiny", "remat=full")
    for name, (size, _) in recomputed_activations(run).items():
        assert (
            saved_bytes(run, remat=RematConfig("full", [name])).device_total - saved_bytes(run).device_total == size
        ), name


def test_save_and_offload_lists_extend_a_policy():
    run = compose_run(
        "model=gpt_tiny", "mesh=2x2x2", "remat=full", "remat.offload=[query,key,value]", "remat.save=[out]"
    )
    assert run.config.remat == RematConfig("full", ["out"], ["query", "key", "value"])
    assert run.layout.name == "2x2x2-fsdp-remat_save_out_offload_key+query+value"
    assert {*saved_bytes(run).host} == {"query", "key", "value"} and {*saved_bytes(run).device} == {
        "block_input",
        "out",
    }


@pytest.mark.parametrize(
    ("remat", "label"),
    [
        *((load_remat(name), name) for name in REMATS),
        (RematConfig("full", ["all"]), "none"),
        (RematConfig("dots", ["value", "key", "query"]), "save_qkv_proj"),
        (RematConfig("full", [], ["out"]), "offload_out"),
        (RematConfig("mine", ["out"], ["query"]), "mine"),
        (RematConfig("full", ["query", "value", "context", "up"]), "save_context+query+up+value"),
        (RematConfig("full", ["query", "value", "context", "up"], ["block_input", "out"]), "custom_3b07c4"),
    ],
)
def test_remat_lists_have_short_stable_labels(remat: RematConfig, label: str):
    assert remat.label == label


def test_wide_models_use_remat_full_by_default():
    narrow, wide = compose_run("model=gpt_tiny"), compose_run("model=gpt_1b")
    assert (narrow.config.remat, wide.config.remat) == (load_remat("none"), load_remat("full"))
    assert compose_run("model=gpt_tiny", "model.embed=2048").config.remat == load_remat("full")


def test_a_saved_run_keeps_its_remat_lists(tmp_path: Path):
    run = compose_run("model=gpt_tiny", "remat=qkv_proj_offloaded", "remat.save=[out]")
    run.save(tmp_path / "run.yaml")
    again = Run.from_config(saved_config(tmp_path))
    assert (
        again.config.remat == run.config.remat == RematConfig("qkv_proj_offloaded", ["out"], ["query", "key", "value"])
    )


def recomputed_cost(name: str, seconds: float) -> OpTotals:
    return OpTotals(
        PartKind.matmul,
        (),
        f"jit(step)/while/body/checkpoint/rematted_computation/{name}/dot_general",
        "",
        24.0,
        seconds,
    )


def test_the_hint_suggests_the_most_expensive_activation_that_fits():
    run = small_run("valkyrie_tiny", "remat=full", "remat.save=[out]")
    forward = OpTotals(PartKind.matmul, (), "jit(step)/while/body/up/dot_general", "", 24.0, 0.5)
    costs = [
        recomputed_cost("up", 0.02),
        recomputed_cost("up/x", 0.01),
        recomputed_cost("driven", 0.05),
        recomputed_cost("states", 0.01),
        recomputed_cost("out", 0.3),
    ]
    report = remat_report(run, [forward, *costs])
    assert [(e.name, round(e.seconds, 9)) for e in report.again[:2]] == [("states", 0.06), ("driven", 0.05)]
    assert (report.save, report.offload, {*report.device}) == (("out",), (), {"block_input", "out"})
    memory, step = MemoryReport(headroom=2**30), PredictedStep(1.0)
    prediction = Prediction(None, CompileStatus.ok, memory=memory, step=step, remat=report)
    (hint,) = layout_hints(prediction)
    assert (hint.code, hint.changes) == (HintCode.save_activation, ("remat.save=[out,states]",))
    assert hint.share == pytest.approx(0.06)
    (hint,) = layout_hints(replace(prediction, memory=MemoryReport(headroom=0)))
    assert hint.changes == ("remat.offload=[states]",)
    long_step, nothing_again = replace(prediction, step=PredictedStep(100.0)), remat_report(run, [forward])
    for other in (long_step, replace(prediction, remat=nothing_again)):
        assert [hint.code for hint in layout_hints(other)] == [HintCode.largest_part]


def test_every_policy_reports_its_bytes():
    run = small_run("gpt_tiny", "remat.save=[out]")
    saved_by_policy = {name: saved_bytes(run, remat) for name, remat in legal_remats(run).items()}
    assert {*saved_by_policy} == {*REMATS}  # `out` alone is save_out_proj
    assert saved_by_policy["offload"].device_total == 0 < saved_by_policy["offload"].host_total
    assert (
        saved_by_policy["full"].device_total
        < saved_by_policy["dots"].device_total
        < saved_by_policy["none"].device_total
    )


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt_tiny", "valkyrie_tiny"])
@pytest.mark.parametrize("partition", mark_slow_except(["fsdp", "2d_tp"], ["fsdp"]))
def test_activation_names_do_not_change_the_program(model: str, partition: str, monkeypatch: pytest.MonkeyPatch):
    run = small_run(model, "mesh=2x2x2", f"partition={partition}", "remat=none")
    named = make_program(run).lower_step().as_text()
    for module in [module for name, module in sys.modules.items() if name.startswith("valkyrie.")]:
        if hasattr(module, "checkpoint_name"):
            monkeypatch.setattr(module, "checkpoint_name", lambda x, name: x)
    jax.clear_caches()
    assert make_program(run).lower_step().as_text() == named


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt_tiny", "valkyrie_tiny"])
@pytest.mark.parametrize("partition", ["fsdp", "1d_tp"])
def test_remat_lists_do_not_change_the_steps(model: str, partition: str):
    lists = ("remat=full", "remat.save=[query,up,states]", "remat.offload=[out,read]")
    run = small_run(model, "mesh=2x2x2", f"partition={partition}", *lists)
    assert_same_steps(run_two_steps(run, initial_state(small_overrides(model))), reference_steps(model))


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("moe_tiny", ("mesh=1x1x8", "partition=fsdp")),
        *(
            pytest.param(model, layout, marks=pytest.mark.slow)
            for model, layout in (
                ("gpt_tiny", ("mesh=2x2x2", "partition=pp_fsdp")),
                ("gpt_tiny", ("mesh=2x2x2", "partition=2d_tp_fsdp", "microbatches=2")),
                ("gpt_tiny", ("mesh=2s2x1x2", "partition=fsdp", "microbatches=2", "partition.sum_gradients_per=step")),
                (
                    "gpt_tiny",
                    ("mesh=2s2x1x2", "partition=fsdp", "microbatches=2", "partition.sum_gradients_per=hybrid"),
                ),
            )
        ),
    ],
)
def test_products_that_share_a_gathered_weight_with_their_recomputation_do_not_change_the_steps(
    model: str, layout: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
):
    expected = reference_steps(model, "batch=16")
    monkeypatch.setattr(get_platform("cpu"), "shares_gathers", True)
    run = small_run(model, *layout, "batch=16", "remat=full")
    assert make_program(run).shard.shares_gathers
    assert not make_program(run.changed(remat=SAVE_EVERYTHING)).shard.shares_gathers
    assert_same_steps(run_two_steps(run, initial_state((*small_overrides(model), "batch=16"))), expected)
