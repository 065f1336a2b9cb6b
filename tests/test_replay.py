"""Tests of replayed schedules: order, overlap, waits, loops, and parts that sum to the step."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import valkyrie
from machines import CHIPS, make_machine, make_topology
from valkyrie.compiled.collectives import collective_uses
from valkyrie.compiled.hlo import Instruction, Module, parse_module
from valkyrie.hardware.position import Position
from valkyrie.machine import assumptions
from valkyrie.machine.links import LinkSimulator, Transfer
from valkyrie.machine.network import LinkModel, Machine
from valkyrie.machine.operations import OpCost, OpCostModel
from valkyrie.machine.replay import CostModels, ReducedNetwork, Replay, replay
from valkyrie.parts import PartKind, sum_seconds
from valkyrie.processes.child import module_command
from valkyrie.records import write_record
from valkyrie.search.compile.lowered import OPTIONS_FILE, REQUEST_FILE, LoweredProgram, capture_program, plain_target
from valkyrie.search.compile.partitioner import EstimateRequest, estimate_programs, schedule_communication
from valkyrie.train.program import serialised_module

CLOCK = CHIPS["v4"].clock_ghz * 1e9
HEAD = "HloModule m, is_scheduled=true, num_partitions=64\nadd {\n  l = f32[] parameter(0)\n  r = f32[] parameter(1)\n"
HEAD += "  ROOT s = f32[] add(l, r)\n}\n"
WORK = ', backend_config={{"window_config":{{"estimated_cycles":"{}"}}}}, metadata={{op_name="{}"}}'
X_GROUPS = "replica_groups=[16,4]<=[4,16]T(1,0), use_global_device_ids=true"
Y_GROUPS = "replica_groups=[16,4]<=[4,4,4]T(0,2,1), use_global_device_ids=true"
BYTES = 1024 * 1024 * 4


def program(body: str, head: str = HEAD) -> Module:
    return parse_module(head + "ENTRY e {\n  a = f32[1024,1024] parameter(0)\n" + body + "}\n")


def timed_instruction(name: str, operand: str, cycles: int) -> str:
    root, name = ("ROOT ", name.removeprefix("ROOT ")) if name.startswith("ROOT ") else ("", name)
    return (
        f"  {root}{name} = f32[1024,1024] sort({operand}), dimensions={{0}}, to_apply=less{WORK.format(cycles, name)}\n"
    )


LESS = "less {\n  p = f32[] parameter(0)\n  q = f32[] parameter(1)\n  ROOT b = pred[] compare(p, q), direction=LT\n}\n"


def replay_on_v4(module: Module) -> Replay:
    result = replay(module, make_machine("v4", make_topology((4, 4, 4))))
    assert sum(part.seconds for part in result.parts) == pytest.approx(result.step_s)
    assert sum(cost.seconds for cost in result.costs) == pytest.approx(result.step_s)
    return result


def gather_seconds() -> float:
    share = assumptions.DEFAULT_ICI_EFFICIENCY
    return assumptions.COLLECTIVE_START_S + 2e-6 + 3 * BYTES / (2 * 45e9) / share


def start_and_done(between: str, kind: str = "all-gather") -> Module:
    return program(
        f"  s = (f32[1024,1024], f32[4096,1024]) {kind}-start(a), channel_id=1, {X_GROUPS}, dimensions={{0}}, "
        'metadata={op_name="gathered"}\n' + between + f"  ROOT d = f32[4096,1024] {kind}-done(s)\n",
        HEAD + LESS,
    )


def test_work_takes_the_cycles_estimated_by_the_compiler():
    result = replay_on_v4(
        program(timed_instruction("first", "a", 1000) + timed_instruction("ROOT second", "first", 500), HEAD + LESS)
    )
    assert result.step_s == pytest.approx(1500 / CLOCK)
    assert {cost.op_name for cost in result.costs} == {"first", "second"}


def test_a_collective_without_overlapping_work_is_exposed():
    result = replay_on_v4(start_and_done(""))
    assert result.step_s == pytest.approx(gather_seconds())
    assert [(part.kind, part.mesh_axes) for part in result.parts] == [(PartKind.exposed, ("x",))]
    (use,) = result.collectives
    assert (use.kind, use.mesh_axes, use.torus_axes, use.op_name) == ("all-gather", ("x",), ("a",), "gathered")
    assert use.bytes_sent == 3 * BYTES and use.bytes_by_torus_axis == {"a": 3 * BYTES}
    assert use.calls == 1 and use.exposed_s == pytest.approx(use.busy_s)


def test_overlapping_work_hides_a_collective():
    cycles = int(gather_seconds() * CLOCK * 0.6)
    result = replay_on_v4(start_and_done(timed_instruction("hidden", "a", cycles)))
    assert result.step_s == pytest.approx(gather_seconds(), rel=1e-3)
    assert sum_seconds(result.parts, PartKind.exposed) == pytest.approx(0.4 * gather_seconds(), rel=1e-2)
    result = replay_on_v4(start_and_done(timed_instruction("longer", "a", 3 * cycles)))
    assert not sum_seconds(result.parts, PartKind.exposed) and result.sending_s == pytest.approx(gather_seconds())
    assert result.step_s == pytest.approx(3 * cycles / CLOCK)
    assert result.collectives[0].busy_s == pytest.approx(gather_seconds())


def test_a_sparse_core_starts_once_it_has_its_operands():
    """libtpu 0.0.46 loads a SparseCore's program by an `async-start` without operands. An `async-update` adds them."""
    cycles = int(gather_seconds() * CLOCK * 0.4)
    gather = f"gather {{\n  p = f32[1024,1024] parameter(0)\n  ROOT g = f32[4096,1024] all-gather(p), {X_GROUPS}"
    shape = "((f32[1024,1024]), f32[4096,1024], s32[])"
    module = program(
        f"  start = {shape} async-start(a), calls=gather\n{timed_instruction('early', 'a', cycles)}"
        f"  update = {shape} async-update(start)\n{timed_instruction('late', 'a', cycles)}"
        "  ROOT done = f32[4096,1024] async-done(update)\n",
        f"{HEAD}{LESS}{gather}, channel_id=1, dimensions={{0}}\n}}\n",
    )
    assert sum_seconds(replay_on_v4(module).parts, PartKind.exposed) == pytest.approx(0.2 * gather_seconds(), rel=1e-2)
    module.instructions["start"].operands.clear()
    assert sum_seconds(replay_on_v4(module).parts, PartKind.exposed) == pytest.approx(0.6 * gather_seconds(), rel=1e-2)


def test_communication_of_a_partitioned_module_is_scheduled():
    cycles = int(gather_seconds() * CLOCK * 0.6)
    module = program(
        timed_instruction("first", "a", cycles)
        + f"  g = f32[4096,1024] all-gather(a), channel_id=1, {X_GROUPS}, dimensions={{0}}\n"
        "  zero = s32[] constant(0)\n  part = f32[1024,1024] dynamic-slice(g, zero, zero), "
        "dynamic_slice_sizes={1024,1024}\n"
        f"  u = f32[1024,1024] all-reduce(first), channel_id=2, {X_GROUPS}, to_apply=add\n"
        f"  v = f32[1024,1024] all-reduce(part), channel_id=3, {X_GROUPS}, to_apply=add\n"
        f"  w = f32[1024,1024] all-reduce(part), channel_id=4, {X_GROUPS}, to_apply=add\n"
        "  sum = f32[1024,1024] add(u, v)\n  ROOT own = f32[256,1024] dynamic-slice(w, zero, zero), "
        "dynamic_slice_sizes={256,1024}\n",
        HEAD + LESS,
    )
    schedule_communication(module)
    opcodes = [i.opcode for i in module.entry.instructions]
    assert opcodes[0] == "all-gather-start" and opcodes.index("all-gather-done") == opcodes.index("dynamic-slice") - 1
    assert opcodes.count("all-reduce") == 1 and opcodes.count("bitcast") == 1, "results that are added, are added first"
    assert opcodes.count("reduce-scatter") == 1
    uses = {use.kind: use for use in replay_on_v4(module).collectives}
    assert uses["all-gather"].exposed_s == pytest.approx(0.4 * gather_seconds(), rel=1e-2)
    assert uses["reduce-scatter"].bytes_sent == pytest.approx(uses["all-reduce"].bytes_sent / 2)


@pytest.mark.parametrize(("groups", "slower"), [(X_GROUPS, 2), (Y_GROUPS, 1)])
def test_collectives_on_the_same_links_share_them(groups, slower):
    module = program(
        f"  s = (f32[1024,1024], f32[4096,1024]) all-gather-start(a), channel_id=1, {X_GROUPS}, dimensions={{0}}\n"
        f"  t = (f32[1024,1024], f32[4096,1024]) all-gather-start(a), channel_id=2, {groups}, dimensions={{0}}\n"
        "  d = f32[4096,1024] all-gather-done(s)\n  f = f32[4096,1024] all-gather-done(t)\n"
        "  ROOT r = (f32[4096,1024], f32[4096,1024]) tuple(d, f)\n"
    )
    latency = assumptions.COLLECTIVE_START_S + 2e-6
    result = replay_on_v4(module)
    assert result.step_s == pytest.approx(latency + slower * (gather_seconds() - latency))
    assert result.sending_s == pytest.approx(result.step_s), "two at once are not twice the time"


@pytest.mark.parametrize(("groups", "slower"), [(X_GROUPS, 2), (Y_GROUPS, 1)])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_collective_is_faster_if_one_on_the_same_links_sends_less(groups: str, slower: int, share: float):
    module = program(
        f"  s = (f32[1024,1024], f32[4096,1024]) all-gather-start(a), channel_id=1, {X_GROUPS}, dimensions={{0}}\n"
        f"  t = (f32[1024,1024], f32[4096,1024]) all-gather-start(a), channel_id=2, {groups}, dimensions={{0}}, "
        'metadata={op_name="reduced"}\n  d = f32[4096,1024] all-gather-done(s)\n'
        "  f = f32[4096,1024] all-gather-done(t)\n  ROOT r = (f32[4096,1024], f32[4096,1024]) tuple(d, f)\n"
    )

    def build_network(machine: Machine, mask: np.ndarray | None) -> ReducedNetwork:
        return ReducedNetwork(LinkModel(machine, mask), lambda c: share if c.op_name == "reduced" else 1.0)

    machine = make_machine("v4", make_topology((4, 4, 4)))
    result = replay(module, machine, CostModels(OpCostModel, build_network))
    latency = assumptions.COLLECTIVE_START_S + 2e-6
    assert result.step_s == pytest.approx(latency + (1 + share * (slower - 1)) * (gather_seconds() - latency))


def test_a_fusion_that_keeps_a_slice_of_an_all_reduce_is_a_reduce_scatter():
    head = HEAD + (
        "scatter {\n  w = f32[1024,1024] parameter(0)\n"
        f"  all = f32[1024,1024] all-reduce(w), channel_id=1, {X_GROUPS}, to_apply=add\n"
        "  z = s32[] constant(0)\n"
        "  ROOT s = f32[256,1024] dynamic-slice(all, z, z), dynamic_slice_sizes={256,1024}\n}\n"
    )
    named = 'metadata={op_name="gradient" source_file="step.py" source_line=7}'
    module = program(f"  ROOT f = f32[256,1024] fusion(a), kind=kCustom, calls=scatter, {named}\n", head)
    for (use,) in (replay_on_v4(module).collectives, collective_uses(module, {"x": 4, "y": 4, "z": 4})):
        assert use.kind == "reduce-scatter" and use.bytes_sent == 0.75 * BYTES
        assert (use.op_name, use.source) == ("gradient", "step.py:7"), "the all-reduce inside has no name of its own"


PLANE = "replica_groups=[4,16]<=[64], use_global_device_ids=true"
RING = "\\ngroup_size = 16 \\nhas_reordering_map: false \\n"
ALONE = f'"collective_algorithm_config":{{"emitter":"1DAllGatherNonMajorDim","debug":"{RING}"}}'
FUSED = '"async_collective_fusion_config":{"flag_start":"2","flag_end":"8"}'


def all_gather_text(name: str, operand: str, config: str, groups: str = PLANE) -> str:
    configured = f"dimensions={{0}}, backend_config={{{config}}}"
    return f"  {name} = f32[16384,1024] all-gather({operand}), channel_id=7, {groups}, {configured}\n"


def module_with_fused_gather(cycles: int, preceding: str = "") -> Module:
    """Return a module with an all-gather in three fusions, as libtpu compiles it to overlap with a matrix product.

    The first fusion starts the all-gather, the second computes a matrix product of `cycles` cycles, and the third ends
    the all-gather. The HLO instructions in `preceding` precede the fusions.
    """
    whole = "f32[16384,1024]"
    head = HEAD + (
        f"begin {{\n  w = f32[1024,1024] parameter(0)\n{all_gather_text('g', 'w', FUSED)}"
        f'  ROOT c = {whole} custom-call(g), custom_call_target="AsyncCollectiveStart"\n}}\n'
        f"carry {{\n  v = f32[1024,1024] parameter(0)\n{all_gather_text('h', 'v', FUSED)}"
        "  ROOT m = f32[1024,1024] dot(v, v), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n}\n"
        f"end {{\n  u = f32[1024,1024] parameter(0)\n{all_gather_text('k', 'u', FUSED)}"
        f'  ROOT e = {whole} custom-call(k), custom_call_target="AsyncCollectiveDone"\n}}\n'
    )
    return program(
        f"{preceding}  s = {whole} fusion(a), kind=kCustom, calls=begin\n"
        f"  p = f32[1024,1024] fusion(a), kind=kOutput, calls=carry{WORK.format(cycles, 'product')}\n"
        f"  ROOT d = {whole} fusion(a), kind=kCustom, calls=end\n",
        head,
    )


def test_a_gather_fused_into_products_uses_the_ring_of_separate_gathers():
    (alone,) = replay_on_v4(program(all_gather_text("ROOT r", "a", ALONE))).collectives
    uses = {
        u.op_name: u for u in replay_on_v4(module_with_fused_gather(1000, all_gather_text("r", "a", ALONE))).collectives
    }
    assert sum(u.busy_s for u in uses.values()) == pytest.approx(2 * alone.busy_s), "the fused one as the one alone"
    (other,) = replay_on_v4(module_with_fused_gather(1000)).collectives
    assert other.busy_s < alone.busy_s / 1.5, "without a gather alone over these groups, rings along each axis"


def test_a_product_with_a_fused_gather_hides_it():
    (use,) = replay_on_v4(module_with_fused_gather(1000)).collectives
    assert use.calls == 1 and use.exposed_s == pytest.approx(use.busy_s - 1000 / CLOCK)
    result = replay_on_v4(module_with_fused_gather(int(2 * use.busy_s * CLOCK)))
    assert [part.kind for part in result.parts] == [PartKind.matmul] and result.sending_s == pytest.approx(use.busy_s)


def test_a_product_without_a_cycle_estimate_runs_at_the_bfloat16_peak():
    sizes = "bf16[8192,8192]"
    product = f"  ROOT d = {sizes} dot(a, a), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}\n"
    result = replay(
        parse_module(f"{HEAD}ENTRY e {{\n  a = {sizes} parameter(0)\n{product}}}\n"),
        make_machine("v5e", make_topology((8, 8))),
    )
    (part,) = result.parts
    assert (part.kind, part.mesh_axes) == (PartKind.matmul, ())
    assert part.seconds == pytest.approx(2 * 8192**3 / 197e12), "not of int8"


LOOP = (
    "body {\n  b = (s32[], f32[1024,1024]) parameter(0)\n  i = s32[] get-tuple-element(b), index=0\n"
    "  x = f32[1024,1024] get-tuple-element(b), index=1\n  one = s32[] constant(1)\n  n = s32[] add(i, one)\n"
    + timed_instruction("w", "x", 1000)
    + f"  g = f32[1024,1024] all-reduce(w), channel_id=1, {X_GROUPS}, to_apply=add\n"
    "  ROOT t = (s32[], f32[1024,1024]) tuple(n, g)\n}\n"
    "condition {\n  c = (s32[], f32[1024,1024]) parameter(0)\n  ci = s32[] get-tuple-element(c), index=0\n"
    "  limit = s32[] constant(10)\n  ROOT go = pred[] compare(ci, limit), direction=LT\n}\n"
)
LOOP_CALL = (
    "  zero = s32[] constant(0)\n  start = (s32[], f32[1024,1024]) tuple(zero, a)\n"
    "  loop = (s32[], f32[1024,1024]) while(start), condition=condition, body=body\n"
    "  ROOT out = f32[1024,1024] get-tuple-element(loop), index=1\n"
)


def test_a_loop_counts_all_its_iterations():
    result = replay_on_v4(program(LOOP_CALL, HEAD + LESS + LOOP))
    (use,) = result.collectives
    assert use.calls == 10 and use.bytes_sent == 10 * 2 * 0.75 * BYTES
    once = 1000 / CLOCK + use.busy_s / 10
    assert result.sending_s == pytest.approx(use.busy_s)
    assert result.step_s == pytest.approx(10 * (once + assumptions.LOOP_ITERATION_S))
    names = [span.name for span in result.spans if span.track == "compute"]
    assert names.count("w") == 2 and "iterations 2 to" in str(names)
    assert max(s.start_s + s.duration_s for s in result.spans) == pytest.approx(result.step_s, rel=1e-2)


def test_a_transfer_started_before_a_loop_continues_inside_it():
    body = (
        f"  s = (f32[1024,1024], f32[4096,1024]) all-gather-start(a), channel_id=2, {Y_GROUPS}, dimensions={{0}}\n"
        + LOOP_CALL.replace("ROOT ", "")
        + "  d = f32[4096,1024] all-gather-done(s)\n"
        "  ROOT r = (f32[1024,1024], f32[4096,1024]) tuple(out, d)\n"
    )
    result = replay_on_v4(program(body, HEAD + LESS + LOOP))
    assert not any(part.mesh_axes == ("y",) for part in result.parts)
    assert result.step_s == pytest.approx(replay_on_v4(program(LOOP_CALL, HEAD + LESS + LOOP)).step_s)


class KernelCosts(OpCostModel):
    """Counts the branch `short` of `conditional` as a kernel."""

    def cost(self, instruction: Instruction) -> OpCost:
        cost = super().cost(instruction)
        return replace(cost, kind=PartKind.kernel) if instruction.name == "shortw" else cost


class FallbackCosts(KernelCosts):
    has_fallback_branches = True


def conditional() -> Module:
    branches = "".join(
        f"{name} {{\n  {name}p = f32[1024,1024] parameter(0)\n"
        + timed_instruction(f"ROOT {name}w", f"{name}p", cycles)
        + "}\n"
        for name, cycles in (("short", 100), ("long", 5000))
    )
    return program(
        "  which = pred[] constant(true)\n"
        "  ROOT c = f32[1024,1024] conditional(which, a, a), true_computation=short, false_computation=long\n",
        HEAD + LESS + branches,
    )


@pytest.mark.parametrize(
    ("operations", "cycles", "fact"),
    [
        (OpCostModel, 5000, "longest branch"),
        (KernelCosts, 5000, "longest branch"),
        (FallbackCosts, 100, "branch with a kernel"),
    ],
)
def test_the_longest_branch_is_used_unless_it_is_the_fallback_of_a_kernel(
    operations: type[OpCostModel], cycles: int, fact: str
):
    machine = make_machine("v4", make_topology((4, 4, 4)))
    result = replay(conditional(), machine, CostModels(operations, LinkModel))
    assert result.step_s == pytest.approx(cycles / CLOCK)
    (note,) = result.notes
    assert fact in note


def test_bytes_are_counted_for_any_backend_without_a_machine():
    (use,) = collective_uses(program(LOOP_CALL, HEAD + LESS + LOOP), {"x": 4, "y": 4, "z": 4})
    assert (use.kind, use.mesh_axes, use.calls) == ("all-reduce", ("x",), 10)
    assert use.bytes_sent == 10 * 2 * 0.75 * BYTES and use.busy_s == 0 and not use.torus_axes


def test_bytes_are_counted_for_cpu_programs():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    rows, columns = NamedSharding(mesh, P("x")), NamedSharding(mesh, P("y"))
    a = jax.ShapeDtypeStruct((64, 256), jnp.float32, sharding=NamedSharding(mesh, P("x", "y")))
    b = jax.ShapeDtypeStruct((256, 128), jnp.float32, sharding=columns)
    compiled = jax.jit(lambda a, b: a @ b, out_shardings=rows).lower(a, b).compile()
    module = parse_module(serialised_module(compiled))
    (use,) = collective_uses(module, {"x": 2, "y": 4})
    assert (use.kind, use.mesh_axes, use.calls) == ("all-reduce", ("y",), 1)
    assert use.bytes_sent == 2 * 3 / 4 * (32 * 128 * 4)
    assert use.source.split(":")[0].endswith("test_replay.py")


def test_a_module_for_other_devices_is_refused():
    with pytest.raises(ValueError) as error:
        replay(program(LOOP_CALL, HEAD + LESS + LOOP), make_machine("v4", make_topology((2, 2, 4))))
    assert "64 devices" in str(error.value) and "16" in str(error.value)


def test_link_bandwidth_is_shared_up_to_the_capacity_of_each_link():
    links = LinkSimulator()
    long, short, other = (Transfer(0.0, s, {link: 1.0}) for s, link in ((3.0, "a+"), (1.0, "a+"), (1.0, "b+")))
    for transfer in (long, short, other):
        links.start(transfer)
    assert links.wait(other) == pytest.approx(1.0)
    assert links.wait(short) == pytest.approx(1.0)
    assert links.wait(long) == pytest.approx(2.0)


def test_latency_passes_before_links_are_needed():
    links = LinkSimulator()
    first, second = Transfer(1.0, 1.0, {"a+": 1.0}), Transfer(0.0, 1.0, {"a+": 1.0})
    links.start(first)
    links.start(second)
    assert links.wait(second) == pytest.approx(1.0)
    assert links.wait(first) == pytest.approx(1.0)


def kernel_program(mesh: Mesh, block: int) -> LoweredProgram:
    """Lower a product with gathered weights and a kernel with blocks of `block` rows."""

    def kernel(x: jax.Array) -> jax.Array:
        return jax.ffi.ffi_call("kernel", jax.ShapeDtypeStruct(x.shape, x.dtype))(x, block=block)

    def function(x: jax.Array, weights: jax.Array) -> jax.Array:
        rows = jax.shard_map(kernel, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)(x @ weights)
        return (rows @ weights.T).sum()

    sharding = NamedSharding(mesh, P("data"))
    arguments = [jax.ShapeDtypeStruct((size, 256), jnp.float32, sharding=sharding) for size in (512, 256)]
    captured = capture_program(jax.jit(function).lower(*arguments), {})
    assert captured is not None
    return captured


def test_partitioned_programs_are_estimated_and_told_apart(monkeypatch: pytest.MonkeyPatch):
    mesh = Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Auto,))
    small, large = kernel_program(mesh, 128), kernel_program(mesh, 1024)
    positions = [Position(0, (x, y, 0), 0) for x in range(2) for y in range(4)]
    captured = {"small": small, "same": small, "large": large, "option": replace(small, overrides={"xla_option": 1})}
    programs = {name: (program, {"data": 8}, positions) for name, program in captured.items()}
    target, counts = valkyrie.slice("v5e-8"), list[int]()
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_hlo_module_re=none")
    estimates = estimate_programs(programs, target, 60, counts.append)
    assert all(e.reason is None and e.axes == {"data": 8} and e.peak > 0 for e in estimates.values())
    assert 0 < estimates["small"].waiting_s < estimates["small"].step_s
    assert estimates["small"].program == estimates["same"].program
    assert len({estimate.program for estimate in estimates.values()}) == 3, "kernels and options differ"
    monkeypatch.setenv("XLA_FLAGS", "--xla_no_such_flag")  # XLA aborts
    (estimate,) = estimate_programs({"small": programs["small"]}, target, 60, counts.append).values()
    assert estimate.reason is not None and "status" in estimate.reason and not estimate.step_s


def test_partitioning_ends_with_the_search(tmp_path: Path):
    """The program is a pipe, which the partitioner's copy of its process waits for."""
    root, target = tmp_path / "estimate", plain_target(valkyrie.slice("v5e-8"))
    (root / "00000").mkdir(parents=True)
    write_record(root / "00000" / REQUEST_FILE, EstimateRequest(target, {}, (Position(0, (0, 0, 0), 0),), {}))
    os.mkfifo(pipe := root / "00000" / OPTIONS_FILE)
    script = "import os, subprocess, sys; subprocess.run([*sys.argv[1:], str(os.getpid())])"
    command = module_command("valkyrie.search.compile.partitioner", str(root))
    search = subprocess.Popen([sys.executable, "-c", script, *command])
    deadline, file = time.monotonic() + 30, None
    while file is None and time.monotonic() < deadline:
        time.sleep(0.01)
        with contextlib.suppress(OSError):  # no process has opened the pipe yet
            file = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    search.kill()
    search.wait()
    assert file is not None
    while root.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not root.exists()
    with pytest.raises(BrokenPipeError):  # no process reads the pipe
        os.write(file, b"options")
    os.close(file)
