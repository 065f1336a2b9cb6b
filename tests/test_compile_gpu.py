"""Programs compiled for NVIDIA GPUs on a machine without one."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import valkyrie
from helpers import compose_config, compose_run
from machines import needs_gpu_compiler
from valkyrie.compiled.collectives import Collective
from valkyrie.compiled.flops import AttentionSize, ProductSize
from valkyrie.compiled.hlo import parse_module
from valkyrie.config.run import Run
from valkyrie.hardware.chips import known_chips
from valkyrie.hardware.figures import GpuFigures
from valkyrie.hardware.names import parse_target
from valkyrie.hardware.platforms import get_platform, gpu
from valkyrie.hardware.position import Position
from valkyrie.hardware.target import ChipConfig, TargetConfig, build_topology
from valkyrie.machine.gpu_network import NVLINK, PCIE, NcclModel
from valkyrie.machine.gpu_operations import GpuOpCostModel
from valkyrie.machine.links import LinkSimulator, Transfer
from valkyrie.machine.network import Machine
from valkyrie.parallel.axis_links import DCN, pareto_placements
from valkyrie.parallel.slice import Slice
from valkyrie.parts import PartKind
from valkyrie.records import read_record, write_record
from valkyrie.search.compile.prediction import CompileStatus
from valkyrie.search.compile.replayed import replay_program
from valkyrie.search.compile.runner import CompiledRun, compile_layout
from valkyrie.search.estimate.links import host_axis_links
from valkyrie.train.run_memory import estimated_memory

GPUS = [chip for chip in known_chips().values() if chip.platform == "gpu"]


GPT = (
    "model=gpt_tiny", "mesh=16x1x1", "partition=fsdp", "target=h100-16", "batch=32", "mode=compile", "seq=256",
    "remat=full",
)  # fmt: skip


@pytest.fixture(scope="session")
def compiled_gpt() -> CompiledRun:
    """A step of gpt_tiny compiled for 16 H100s in two nodes."""
    return compile_layout(compose_run(*GPT), 300)


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


def test_a_plugin_without_its_package_counts_as_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu.Gpu, "plugins", ("importlib",))
    hint = get_platform("gpu").compiler_install_hint(parse_target("h100-8"))
    assert hint is not None and "importlib is not installed" in hint and "uv sync --extra gpu-compile" in hint


@needs_gpu_compiler
@pytest.mark.parametrize("first_use", ["", "jax.devices(); "])
def test_gpus_are_described_although_jax_refuses_its_plugin_without_cuda(first_use: str):
    mesh = "valkyrie.slice('h100-8').mesh((8,), ('x',))"
    code = f"import jax, valkyrie; {first_use}print({mesh}.size, len(jax.devices('cpu')))"
    environment = {**os.environ, "JAX_PLATFORMS": ""}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert result.stdout == "8 1\n", result.stdout + result.stderr
    assert first_use or "CUDA" not in result.stderr


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
    assert reason is not None and "sets no gpu," in reason


def test_every_missing_figure_of_a_gpu_is_listed(monkeypatch: pytest.MonkeyPatch):
    h100, platform = known_chips()["h100"], get_platform("gpu")
    assert h100.gpu is not None and not platform.missing_figures(h100, "bfloat16", 2)
    names = ["capability", "sms", "clock_ghz", "l2_bytes", "shared_bytes", "best_tflops"]
    empty = replace(h100, gpu=GpuFigures())
    assert platform.missing_figures(empty, "bfloat16", 1) == [f"gpu.{name}" for name in names]
    unconnected = replace(h100, switch_gbs=None, dcn_gbs_per_host=None)
    assert platform.missing_figures(unconnected, "bfloat16", 1) == ["switch_gbs"]
    assert platform.missing_figures(unconnected, "bfloat16", 2) == ["switch_gbs", "dcn_gbs_per_host"]
    two_nodes = replace(parse_target("h100-16"), chip=replace(h100, dcn_gbs_per_host=None))
    monkeypatch.setattr(gpu.Gpu, "compiler_install_hint", lambda self, target: None)
    assert "dcn_gbs_per_host" in (platform.compile_refusal(two_nodes, "bfloat16") or "")


@pytest.mark.parametrize(
    ("version", "name"), [("0.10.2", "enable_pipelined"), ("0.11.0", "pipeline"), ("0.12.0.1", "pipeline")]
)
def test_collectives_are_pipelined_by_the_names_that_this_jaxlib_knows(
    version: str, name: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(gpu.metadata, "version", lambda package: version)
    options = get_platform("gpu").step_options(0, 8)
    names = [option for option in options if "pipeline" in option]
    assert names == [f"xla_gpu_{name}_{kind}" for kind in gpu._KINDS]
    assert get_platform("gpu").spell_options(options)["xla_gpu_enable_triton_gemm"] == "False"


def test_options_named_in_xla_flags_and_loop_options_of_one_gpu_are_left_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    every, alone = (set(get_platform("gpu").step_options(0, devices)) for devices in (8, 1))
    assert not any("pipeline" in name or "double_buffering" in name for name in alone) and alone < every
    named = "xla_gpu_enable_triton_gemm", "xla_gpu_enable_while_loop_double_buffering"
    monkeypatch.setenv("XLA_FLAGS", f"--{named[0]}=true --{named[1]} --xla_dump_to=x")
    assert set(get_platform("gpu").step_options(0, 8)) == every - {*named}


@needs_gpu_compiler
def test_a_step_compiles_for_gpus_without_one(compiled_gpt: CompiledRun):
    step = compiled_gpt.outcome.step
    assert compiled_gpt.status is CompileStatus.ok and step is not None, compiled_gpt.outcome.reason
    assert step.memory.peak and step.memory.headroom
    assert {position.coords for position in step.positions} == {(node, 0, i) for node in range(2) for i in range(8)}


@needs_gpu_compiler
def test_a_compiled_step_is_replayed(compiled_gpt: CompiledRun):
    replay, uses = replay_program(compose_run(*GPT), compiled_gpt)
    assert replay is not None and replay.flops > 0
    assert replay.step_s == pytest.approx(sum(part.seconds for part in replay.parts))
    kinds = {use.kind for use in uses}
    assert {"all-gather", "reduce-scatter"} <= kinds and all(use.mesh_axes in ((), ("x",)) for use in uses)
    assert {link for use in uses for link in use.bytes_by_torus_axis} == {NVLINK, DCN}


@needs_gpu_compiler
@pytest.mark.timeout(600)
def test_experts_and_latent_attention_run_as_kernels_with_known_costs():
    layers = ("model.layers=2", "model.dense_layers=0", "model.attention.value_dim=32")
    names = ("model=deepseek_tiny", *layers, "target=h100-8", "batch=64", "seq=2048", "precision=bf16_mixed")
    run = compose_run(*names, "mesh=1x1x8", "partition=fsdp_ep", "mode=compile", "target.routing_imbalance=2")
    compiled = compile_layout(run, 300)
    replay, _ = replay_program(run, compiled)
    assert replay is not None and any("2 times its share" in note for note in replay.notes)
    assert not any("no cost estimate" in note for note in replay.notes)
    assert any(part.kind is PartKind.kernel and part.seconds > 0 for part in replay.parts)
    assert any("sum_groups" in cost.op_name for cost in replay.costs)
    config = replace(run.config, target=replace(run.config.target, routing_imbalance=1.0))
    balanced, _ = replay_program(replace(run, config=config), compiled)
    assert balanced is not None and balanced.flops < replay.flops


@needs_gpu_compiler
def test_weights_are_gathered_twice_in_bfloat16(compiled_gpt: CompiledRun):
    _, uses = replay_program(compose_run(*GPT), compiled_gpt)
    gathered, summed = (
        sum(use.bytes_sent for use in uses if use.kind == kind) for kind in ("all-gather", "reduce-scatter")
    )
    # Gradients are summed once in float32. Gathers for the recomputation in float32 would send 1.5 times as much.
    assert gathered < 1.1 * summed


@pytest.mark.parametrize("chip", GPUS, ids=lambda chip: chip.name)
def test_large_products_run_near_the_best_measured_speed_and_small_ones_far_below(chip: ChipConfig):
    model = GpuOpCostModel(chip)

    def tflops(m: int, n: int, k: int) -> float:
        return model._product_tflops(ProductSize(1, m, n, k, "bf16"), None)

    assert chip.gpu is not None
    assert 0.95 <= tflops(16384, 14336, 4096) / chip.gpu.best_tflops <= 1
    assert tflops(256, 256, 256) < 0.02 * chip.gpu.best_tflops
    assert 0.3 < tflops(4096, 4096, 64) / tflops(4096, 4096, 256) < 0.7
    sizes = [tflops(size, size, size) for size in (16, 256, 512, 1024, 2048, 4096, 8192)]
    assert sizes == sorted(sizes)


def test_causal_attention_counts_half_the_pairs_and_a_window_its_keys():
    whole = AttentionSize(64, 8192, 8192, 128, is_causal=False, window=0, is_backward=False)
    assert whole.flops == 4 * 64 * 8192**2 * 128
    assert whole._replace(is_causal=True).flops == whole.flops / 2
    assert whole._replace(is_causal=True, window=1024).flops == whole.flops / 8
    assert whole._replace(is_backward=True).flops == 2.5 * whole.flops
    model = GpuOpCostModel(known_chips()["h100"])
    assert model._attention_tflops(whole) == pytest.approx(614.2)


GATHERING_STEPS = {
    ("model=llama_8b", "target=h100-64", "mesh=64x1x1", "batch=128", "seq=8192", "remat=full"): 16.6,
    ("model=gpt_1b", "target=h100-16", "mesh=16x1x1", "batch=64", "seq=2048", "remat=full"): 4.2,
    ("model=olmoe_1b_7b", "target=h100-16", "mesh=16x1x1", "batch=64", "seq=4096", "remat=full"): 16.6,
    ("model=mixtral_8x7b", "target=h100-64", "mesh=64x1x1", "batch=512", "seq=4096", "remat=save_qkv_proj"): 59.0,
    ("model=qwen3_235b_a22b", "target=gb200-64", "mesh=64x1x1", "batch=1024", "seq=4096", "remat=offload"): 127.1,
}
"""GiB that steps under `fsdp` need as compiled with jaxlib 0.10.2 (experiments/LOG.md, 2026-11-28)."""


def test_estimated_memory_counts_gathered_weights_and_gradients_of_two_layers():
    names = ("partition=fsdp", "model.tokenizer=bytes")
    estimates = [estimated_memory(compose_run(*step, *names)).total / 2**30 for step in GATHERING_STEPS]
    ratios = np.array(estimates) / [*GATHERING_STEPS.values()]
    assert ratios.min() > 0.8 and ratios.max() < 1.2 and abs(np.median(ratios) - 1) < 0.1


def test_a_copy_to_the_host_takes_the_time_of_the_updated_part():
    text = """HloModule m, is_scheduled=true
update { s = bf16[96,1024,1024]{2,1,0:S(5)} parameter(0)
  x = bf16[1,1024,1024] parameter(1)
  i = s32[] parameter(2)
  ROOT u = bf16[96,1024,1024]{2,1,0:S(5)} dynamic-update-slice(s, x, i, i, i) }
wrapped { s = bf16[96,1024,1024]{2,1,0:S(5)} parameter(0)
  x = bf16[1,1024,1024] parameter(1)
  i = s32[] parameter(2)
  ROOT f = bf16[96,1024,1024]{2,1,0:S(5)} fusion(s, x, i), kind=kCustom, calls=update }
ENTRY e { s = bf16[96,1024,1024]{2,1,0:S(5)} parameter(0)
  x = bf16[1,1024,1024] parameter(1)
  i = s32[] parameter(2)
  ROOT c = bf16[96,1024,1024]{2,1,0:S(5)} call(s, x, i), to_apply=wrapped }
"""
    chip = known_chips()["h100"]
    seconds, link = GpuOpCostModel(chip).background_cost(parse_module(text).instructions["c"])
    assert (seconds, link) == (pytest.approx(2 * 2**20 / (chip.host_gbs * 1e9)), "to host")


def test_positions_on_gpus_name_host_and_gpu_and_a_target_is_read_from_json(tmp_path: Path):
    target = valkyrie.slice("h100-16")
    assert target.positions((2, 8), ("data", "model"))[8:10] == (Position(0, (1, 0, 0), 0), Position(0, (1, 0, 1), 0))
    plain = parse_target("h100-16")
    assert read_record(TargetConfig, write_record(tmp_path / "target.json", plain)) == plain


def network(target_name: str, routing_imbalance: float = 1.0) -> NcclModel:
    target = Slice.from_target(parse_target(target_name))
    assert target.chip is not None and target.chips is not None
    positions = target.positions((target.chips,), ("x",))
    machine = Machine(target.chip, build_topology(target), positions, {"x": target.chips}, routing_imbalance)
    return NcclModel(machine)


def collective(kind: str, groups: np.ndarray, size: float) -> Collective:
    return Collective(kind, ("x",), "", "", 0.0, size, groups=groups)


def test_collectives_within_a_node_take_the_measured_time():
    h100 = network("h100-16")
    nodes = np.arange(16).reshape(2, 8)
    gather = h100.cost(collective("all-gather", nodes, 2.0**26))
    assert gather.total_s == pytest.approx(2**26 / 314.2e9) and set(gather.busy_s) == {NVLINK}
    assert h100.cost(collective("all-reduce", nodes, 1024.0)).total_s == pytest.approx(2**16 / 1.65e9)
    assert gather.bytes_sent == pytest.approx(2**26 * 7 / 8)


@pytest.mark.parametrize("target_name", ["h100-8", "h100-64"])
def test_a_ragged_all_to_all_sends_the_rows_of_the_busiest_gpu(target_name: str):
    balanced, busy = network(target_name), network(target_name, routing_imbalance=1.5)
    members = np.arange(parse_target(target_name).chips or 1)[None]
    ragged, plain = (collective(kind, members, 2.0**30) for kind in ("ragged-all-to-all", "all-to-all"))
    assert busy.cost(ragged).bytes_sent == pytest.approx(1.5 * balanced.cost(ragged).bytes_sent)
    assert busy.cost(ragged).total_s > 1.4 * balanced.cost(ragged).total_s
    assert busy.cost(plain) == balanced.cost(plain) == balanced.cost(ragged)


def test_collectives_between_nodes_use_the_network_card_of_every_gpu():
    h100 = network("h100-64")
    size = 2.0**30
    whole = h100.cost(collective("all-gather", np.arange(64)[None], size))
    assert whole.busy_s[DCN] == pytest.approx(size * 63 / 64 / (8 * 50e9 * 0.9))
    outer = h100.cost(collective("all-gather", np.arange(64).reshape(8, 8).T, size))
    assert set(outer.busy_s) == {DCN} and outer.busy_s[DCN] == pytest.approx(size * 7 / 8 / (50e9 * 0.9))
    assert whole.latency_s == outer.latency_s > 2e-4
    assert h100.cost(collective("all-reduce", np.arange(64)[None], size)).busy_s[DCN] == pytest.approx(
        2 * whole.busy_s[DCN]
    )


def test_an_nvlink_domain_spans_hosts():
    gb200 = parse_target("gb200-72")
    assert (gb200.hosts, gb200.domain_hosts, build_topology(gb200).domain_chips) == (18, 18, 72)
    assert [parse_target(f"gb200-{chips}").domain_hosts for chips in (4, 64, 128, 144)] == [1, 16, 16, 18]
    size, pair = 2.0**30, network("gb200-144")
    domains, across = np.arange(144).reshape(2, 72), np.arange(144).reshape(2, 72).T
    assert set(pair.cost(collective("all-gather", domains, size)).busy_s) == {NVLINK}
    outer = pair.cost(collective("all-gather", across, size))
    assert outer.busy_s[DCN] == pytest.approx(size / 2 / (50e9 * 0.9))
    (placement,) = pareto_placements((144,), build_topology(parse_target("gb200-144")), has_torus=False)
    links = host_axis_links({"x": np.array([144])}, gb200.chip, domain_hosts=18)["x"]
    assert placement.axes[0].outer_size == links.outer_size == 2, "estimates count domains, too"
    positions = valkyrie.slice("gb200-144").positions((144,), ("x",))
    assert positions[71:73] == (Position(0, (0, 17, 3), 0), Position(0, (1, 0, 0), 0))


def test_a_mesh_that_splits_a_domain_unevenly_waits_for_the_network_and_says_so():
    even, uneven = network("h100-24"), network("h100-24")
    size = 2.0**28
    inside = even.cost(collective("all-gather", np.arange(24).reshape(6, 4), size))
    split = uneven.cost(collective("all-gather", np.arange(24).reshape(4, 6), size))
    assert not even.notes and set(inside.busy_s) == {NVLINK} and split.total_s > 3 * inside.total_s
    (note,) = uneven.notes
    assert (
        "groups of 6 GPUs unevenly" in note and f"{split.total_s / uneven._nvlink_s('all-gather', size, 6):.1f}" in note
    )


def test_cards_without_nvlink_exchange_over_pcie():
    card, h100 = network("rtx6000pro-8"), network("h100-8")
    group = np.arange(8)[None]
    large, small = (card.cost(collective("all-reduce", group, size)) for size in (2.0**30, 1024.0))
    assert 37e9 < 2 * 7 / 8 * 2**30 / large.total_s < 50e9, "measured bus bandwidth: 37.6 to 41.7 GB/s"
    assert small.total_s == h100.cost(collective("all-reduce", group, 1024.0)).total_s
    assert set(large.busy_s) == {PCIE} and len(card.notes) == 1 and not h100.notes


@pytest.mark.parametrize("capability", ["9", "9.0b", "sm_90", "9.0.0", "-9.0"])
def test_a_malformed_capability_is_refused(capability: str):
    h100 = known_chips()["h100"]
    assert h100.gpu is not None
    (problem,) = replace(h100, gpu=replace(h100.gpu, capability=capability)).problems()
    assert problem.key == "target.chip.gpu.capability" and str(problem).startswith(f"{problem.key}={capability} ")


def test_products_that_a_gpu_cannot_compute_are_refused():
    fp8 = ("model=gpt_tiny", "mesh=8x1x1", "partition=fsdp", "batch=16", "precision=fp8")
    for target, refused in (("a100-8", ["precision.products"]), ("h100-8", []), ("v4-16", [])):
        run = Run.from_config(compose_config(*fp8, f"target={target}"))
        assert [problem.key for problem in run.problems()] == refused


def test_kernels_take_longer_while_a_collective_is_in_flight():
    links = LinkSimulator()
    links.start(Transfer(0.0, 1.0, {NVLINK: 1.0}))
    links.compute(0.5, 1.1)
    assert links.now_s == pytest.approx(0.55)
    links.compute(1.0, 1.1)
    assert links.now_s == pytest.approx(1.0 + (1.0 - 0.45 / 1.1)) and links.sending_s == pytest.approx(1.0)
