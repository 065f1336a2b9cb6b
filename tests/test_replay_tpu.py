"""Tests of replaying programs compiled for TPU slices: seconds equal closed forms, FLOPs equal the model's."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from helpers import compose_run
from machines import CHIPS, compile_module, needs_libtpu, tpu_mesh
from valkyrie.compiled.hlo import parse_module
from valkyrie.hardware.chips import known_chips
from valkyrie.machine import assumptions
from valkyrie.machine.replay import Replay, replay
from valkyrie.parallel.mesh import build_mesh
from valkyrie.parts import PartKind, sum_seconds
from valkyrie.search.compile.executable import without_cache
from valkyrie.train.program import StepProgram, serialised_module

pytestmark = needs_libtpu

MIB = 2**20
ROWS = 32768
SHAPE = ((ROWS, 1024), jnp.bfloat16)
BYTES = ROWS * 1024 * 2
LINK = 45e9


def map_over_mesh(function: Any, mesh: Any) -> Any:
    """Return `function` mapped over a mesh: every device runs it on the whole array."""
    return jax.shard_map(function, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)


@lru_cache
def replay_collective(kind: str, axes: tuple[str, ...], slices: int = 1, slice_name: str = "v4:4x4x4") -> Replay:
    mesh, machine = tpu_mesh(slice_name, slices)
    n = mesh.shape[axes[0]]
    functions = {
        "all-gather": lambda x: jax.lax.all_gather(x, axes, tiled=True),
        "all-reduce": lambda x: jax.lax.psum(x, axes),
        "reduce-scatter": lambda x: jax.lax.psum_scatter(x, axes, tiled=True),
        "all-to-all": lambda x: jax.lax.all_to_all(x, axes, 0, 1, tiled=True),
        "collective-permute": lambda x: jax.lax.ppermute(x, axes[0], [(i, (i + 1) % n) for i in range(n)]),
    }
    return replay(compile_module(map_over_mesh(functions[kind], mesh), mesh, SHAPE), machine)


def find_use(result: Replay, kind: str) -> Any:
    assert sum(part.seconds for part in result.parts) == pytest.approx(result.step_s)
    (use,) = (u for u in result.collectives if u.kind == kind)
    return use


def link_rate(kind: str) -> float:
    return LINK * assumptions.ICI_EFFICIENCY.get(kind, assumptions.DEFAULT_ICI_EFFICIENCY)


@pytest.mark.parametrize("axis", ["x", "y", "z"])
@pytest.mark.parametrize(
    ("kind", "sent", "seconds"),
    [
        ("all-gather", 3 * BYTES, 3 * BYTES / 2),
        ("all-reduce", 1.5 * BYTES, 1.5 * BYTES / 2),
        ("all-to-all", 0.75 * BYTES, BYTES / 2),
        ("collective-permute", BYTES, BYTES),
    ],
)
def test_collectives_on_each_mesh_axis_take_their_closed_form_time(kind, axis, sent, seconds):
    use = find_use(replay_collective(kind, (axis,)), kind)
    assert use.mesh_axes == (axis,) and use.torus_axes == ({"x": "a", "y": "b", "z": "c"}[axis],)
    assert use.bytes_sent == sent
    assert use.busy_s == pytest.approx(seconds / link_rate(kind), rel=0.1)
    assert use.source.endswith(tuple(f"test_replay_tpu.py:{n}" for n in range(1, 400)))


@pytest.mark.parametrize("axis", ["x", "y", "z"])
def test_a_reduce_scatter_inside_a_fusion_is_found(axis):
    """libtpu pads the array to whole tiles, so a device sends slightly more than 3/4 of it."""
    use = find_use(replay_collective("reduce-scatter", (axis,)), "reduce-scatter")
    assert use.mesh_axes == (axis,)
    assert use.bytes_sent == pytest.approx(0.75 * BYTES, rel=0.01)
    assert use.busy_s == pytest.approx(0.75 * BYTES / 2 / link_rate("reduce-scatter"), rel=0.1)


def test_an_all_reduce_over_a_cube_uses_six_links():
    use = find_use(replay_collective("all-reduce", ("x", "y", "z")), "all-reduce")
    assert use.mesh_axes == ("x", "y", "z") and use.bytes_sent == 2 * 63 / 64 * BYTES
    assert use.busy_s == pytest.approx(2 * 63 / 64 * BYTES / 6 / link_rate("all-reduce"), rel=0.1)


def test_an_all_reduce_between_two_slices_uses_the_network():
    use = find_use(replay_collective("all-reduce", ("s",), 2, "v4:2x2x1"), "all-reduce")
    assert use.mesh_axes == ("s",) and use.torus_axes == ("dcn",)
    assert use.bytes_sent == BYTES
    assert use.busy_s == pytest.approx(4 * BYTES / 25e9, rel=0.1)


def test_an_all_reduce_within_and_between_slices_takes_its_closed_form_time():
    result = replay_collective("all-reduce", ("s", "x", "y"), 2, "v4:2x2x1")
    between = [u for u in result.collectives if u.mesh_axes == ("s",)]
    assert sum(u.bytes_sent for u in between) == pytest.approx(BYTES / 4, rel=0.01)
    assert {u.mesh_axes for u in result.collectives} >= {("s",), ("x",)} or {("x", "y")} <= {
        u.mesh_axes for u in result.collectives
    }


@pytest.mark.parametrize(("name", "share"), [("v4:2x2x1", 0.93), ("v5e:2x2", 0.88)])
def test_a_matrix_product_runs_near_the_chips_peak(name, share):
    mesh, machine = tpu_mesh(name)
    matrix = ((8192, 8192), jnp.bfloat16)
    result = replay(compile_module(lambda a, b: a @ b, mesh, matrix, matrix), machine)
    assert result.flops == 2 * 8192**3
    peak = CHIPS[name[:-4].partition(":")[0]].peak_tflops["bfloat16"] * 1e12
    assert result.flops / sum_seconds(result.parts, PartKind.matmul) == pytest.approx(share * peak, rel=0.05)
    assert result.step_s == pytest.approx(result.flops / (share * peak), rel=0.1)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_memory_bound_operation_runs_at_memory_bandwidth(dtype):
    mesh, machine = tpu_mesh("v4:2x2x1")
    result = replay(compile_module(lambda a: a * 2 + 1, mesh, ((2**15, 8192), dtype)), machine)
    moved = 2 * 2**28 * jnp.dtype(dtype).itemsize
    assert result.step_s == pytest.approx(moved / (assumptions.HBM_EFFICIENCY * 1200e9), rel=0.1)
    assert {part.kind for part in result.parts} == {PartKind.memory}


def test_loops_multiply_the_cost_of_their_body():
    mesh, machine = tpu_mesh("v4:2x2x1")

    def inner(x, w):
        return jnp.tanh(x @ w), None

    def outer(x, _, w):
        return jax.lax.scan(inner, x, w)[0], None

    def nested(x, w):
        return jax.lax.scan(lambda x, _: outer(x, _, w), x, length=3)[0]

    result = replay(
        compile_module(nested, mesh, ((1024, 1024), jnp.bfloat16), ((5, 1024, 1024), jnp.bfloat16)), machine
    )
    assert result.flops == 3 * 5 * 2 * 1024**3


@pytest.mark.slow
def test_a_permute_overlaps_with_a_matrix_product():
    mesh, machine = tpu_mesh("v4:4x4x4")

    def ring(x, w):
        received = jax.lax.ppermute(x, "x", [(i, (i + 1) % 4) for i in range(4)])
        return received, w @ w

    matrix = ((8192, 8192), jnp.bfloat16)
    module = compile_module(
        jax.shard_map(ring, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False),
        mesh,
        ((8192, 1024), jnp.bfloat16),
        matrix,
    )
    result = replay(module, machine)
    use = find_use(result, "collective-permute")
    assert use.busy_s == pytest.approx(8192 * 1024 * 2 / link_rate(use.kind), rel=0.1)
    assert use.exposed_s < 0.05 * use.busy_s


ASYNC = {"xla_enable_async_all_gather": "true"}
FUSED = ASYNC | {f"xla_tpu_enable_async_collective_fusion{more}": "true" for more in ("", "_fuse_all_gather")}
FUSED |= {"xla_tpu_overlap_compute_collective_tc": "true"}


@pytest.mark.parametrize("options", [ASYNC, pytest.param(FUSED, marks=pytest.mark.slow)], ids=["async", "fused"])
def test_overlapped_gathers_use_the_same_ring_as_other_gathers(options):
    mesh, machine = tpu_mesh("v4:2x4x4")
    whole = NamedSharding(mesh, PartitionSpec())

    def gathered(x, *weights):
        for w in weights:
            x = jnp.tanh(x @ jax.lax.with_sharding_constraint(w, whole))
        return x

    shapes = [((2048, 2048), jnp.bfloat16)] * 4
    rows = PartitionSpec(("x", "y", "z"))
    alone, overlapped = (
        replay(compile_module(gathered, mesh, *shapes, spec=rows, options=o), machine) for o in ({}, options)
    )
    before, after = (next(u for u in done.collectives if u.kind == "all-gather") for done in (alone, overlapped))
    assert (before.calls, after.calls) == (3, 3) and after.bytes_sent == before.bytes_sent
    assert after.busy_s == pytest.approx(before.busy_s, rel=0.01)
    assert after.exposed_s < before.exposed_s


def test_a_pallas_kernel_declares_its_cost():
    from jax.experimental import pallas as pl

    def double(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    def kernel(x):
        return pl.pallas_call(
            double,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            grid=(64,),
            in_specs=[pl.BlockSpec((1024, 1024), lambda i: (i, 0))],
            out_specs=pl.BlockSpec((1024, 1024), lambda i: (i, 0)),
            cost_estimate=pl.CostEstimate(flops=7_000_000, transcendentals=0, bytes_accessed=2 * 64 * 4 * MIB),
        )(x)

    mesh, machine = tpu_mesh("v4:2x2x1")
    result = replay(compile_module(map_over_mesh(kernel, mesh), mesh, ((64 * 1024, 1024), jnp.float32)), machine)
    assert result.flops == 7_000_000
    expected = 2 * 64 * 4 * MIB / (assumptions.HBM_EFFICIENCY * 1200e9)
    assert sum_seconds(result.parts, PartKind.kernel) == pytest.approx(expected, rel=0.01)
    assert not result.notes


@lru_cache
def compile_step(model: str, *overrides: str) -> tuple[Any, bytes]:
    """Return the run of a small training step, and the serialised module of the step compiled for 4 v4 chips."""
    mesh, _ = tpu_mesh("v4:2x2x1")
    run = compose_run(f"model={model}", "mesh=2x2x1", "partition=dp", "precision=bf16_mixed", *overrides)
    program = StepProgram(run, build_mesh(run.config.mesh, list(mesh.devices.flat)), backend="tpu")
    with without_cache():
        compiled = program.lower_step().compile()
    return run, serialised_module(compiled)


SMALL = ("model.layers=2", "model.embed=512", "model.mlp=2048", "batch=8", "seq=1024", "model.vocab_size=8192")
ATTENTION = ("model.attention.heads=4", "model.attention.kv_heads=4", "model.attention.head_dim=128")
FAMILIES = {
    "s5_125m": ("model.s5.state_size=256", "model.s5.blocks=8"),
    "longformer_125m": (*ATTENTION, "model.attention.windows=[128]"),
    "valkyrie_125m": (
        *ATTENTION,
        "model.attention.windows=[128]",
        "model.s5.state_size=256",
        "model.s5.blocks=8",
        "model.layers=3",
    ),
}


def expected_flops(run: Any, devices: int) -> float:
    """Return the FLOPs of a step per device, including those that the model's count leaves out.

    The backward pass computes the logits again, unless the loss has a single chunk (`model.loss_chunk`). Splash
    attention computes whole blocks of 512 instead of the keys in the window: three of four blocks in rows of 1024, with
    two products in the forward pass and five in the backward pass.
    """
    model, seq = run.model, run.config.seq
    tokens = run.config.batch * seq / devices
    logits = 2.0 * model.embed * model.vocab_rows
    total = run.step_flops / devices + logits * tokens
    a, layers = model.attention, model.mixer_kinds.count("attention")
    if layers:
        width = a.heads * a.head_dim
        window = a.windows[0]
        keys = window - window * (window - 1) / (2 * seq)
        total -= 3 * 4 * width * keys * tokens * layers
        total += 2.0 * (2 + 5) * 3 * 512**2 * width * run.config.batch / devices * layers
    return total


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", FAMILIES)
def test_flops_of_a_step_equal_those_of_the_model(model):
    run, raw = compile_step(model, *SMALL, *FAMILIES[model], "model.loss_chunk=128")
    _, machine = tpu_mesh("v4:2x2x1")
    chip = replace(machine.chip, splash_bundles=known_chips()["v4"].splash_bundles)
    result = replay(parse_module(raw), replace(machine, chip=chip))
    assert result.flops == pytest.approx(expected_flops(run, 4), rel=0.03)
    assert sum(part.seconds for part in result.parts) == pytest.approx(result.step_s)
    assert not result.notes


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_module_is_parsed_and_replayed_in_two_seconds_per_megabyte():
    _, raw = compile_step("longformer_125m", *SMALL, *FAMILIES["longformer_125m"])
    _, machine = tpu_mesh("v4:2x2x1")
    begin = time.process_time()  # of this process alone: the machine may be busy
    replay(parse_module(raw), machine)
    assert time.process_time() - begin < 2.0 * max(len(raw) / 1e6, 1.0)
