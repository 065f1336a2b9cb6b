"""Tests of faults in the sharding of a program: each is found at its source line, and sound programs have none."""

from __future__ import annotations

import inspect
import linecache
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.lax import with_sharding_constraint
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import valkyrie
from helpers import mark_slow_except
from machines import make_machine, make_topology, needs_libtpu
from sound_programs import SOUND_PROGRAMS, Program
from valkyrie.compiled.collectives import Collective, find_cause
from valkyrie.compiled.communication import AxesBytes, Communication
from valkyrie.compiled.flops import model_flops
from valkyrie.compiled.hlo import Instruction, parse_module
from valkyrie.compiled.shards import match_shard
from valkyrie.compiled.whole import AxisPart, UnpartitionedProgram, parse_sharding
from valkyrie.machine.network import CollectiveCost, LinkModel
from valkyrie.machine.operations import OpCost, OpCostModel
from valkyrie.machine.replay import CostModels, OpTotals, ReducedNetwork, Replay, replay
from valkyrie.parts import PartKind, StepPart
from valkyrie.search.compile.executable import without_cache
from valkyrie.search.compile.fault import Fault, FaultCode
from valkyrie.search.compile.fault_texts import MAX_LINES, constraint_remedy, describe_replication, join_lines
from valkyrie.search.compile.faults import _has_whole_batch, find_faults
from valkyrie.search.compile.hints import program_hints
from valkyrie.search.compile.padding import _product_widths
from valkyrie.search.compile.partitioned import PartitionedProgram
from valkyrie.search.compile.prediction import CompileStatus, HintCode, MemoryReport, PredictedStep, Prediction
from valkyrie.train.program import serialised_module
from valkyrie.units import GIB

VOCAB, EMBED, MLP, BATCH, SEQ = 512, 256, 1024, 64, 24
DATA = PartitionSpec("data")


def struct(mesh: Mesh, shape: tuple[int, ...], spec: PartitionSpec, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def language_model(
    mesh: Mesh, weights: PartitionSpec, constraint: PartitionSpec | None = None, *, batch: PartitionSpec = DATA
) -> tuple[Any, tuple[Any, ...]]:
    """Return a training step of an embedding and two MLPs, and the shapes of its arguments.

    Args:
        weights: Sharding of the embed and mlp dimensions of all weights.
        constraint: Sharding constraint on the embedded tokens, or None for no constraint.
        batch: Sharding of the tokens.
    """
    embed, mlp = [*weights, None, None][:2]

    def loss(parameters: Any, tokens: jax.Array) -> jax.Array:
        x = parameters["table"][tokens]
        if constraint is not None:
            x = with_sharding_constraint(x, NamedSharding(mesh, constraint))
        for up, down in parameters["layers"]:
            x = x + jax.nn.relu(x @ up) @ down
        return jnp.square(x).mean()

    def step(parameters: Any, tokens: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(loss)(parameters, tokens)
        return jax.tree.map(lambda p, g: p - 0.1 * g, parameters, gradients), value

    up, down = (
        struct(mesh, (EMBED, MLP), PartitionSpec(embed, mlp)),
        struct(mesh, (MLP, EMBED), PartitionSpec(mlp, embed)),
    )
    parameters = {"table": struct(mesh, (VOCAB, EMBED), PartitionSpec(None, embed)), "layers": [(up, down)] * 2}
    shardings = jax.tree.map(lambda array: array.sharding, parameters)
    jitted_step = jax.jit(step, donate_argnums=0, out_shardings=(shardings, NamedSharding(mesh, PartitionSpec())))
    return jitted_step, (parameters, struct(mesh, (BATCH, SEQ), batch, jnp.int32))


def cpu_mesh(**axes: int) -> Mesh:
    devices = np.array(jax.devices()[: math.prod(axes.values())])
    return Mesh(devices.reshape(*axes.values()), tuple(axes))


def compile_program(
    mesh: Mesh, jitted: Any, arguments: tuple[Any, ...], usable: float = 16 * GIB
) -> PartitionedProgram:
    """Compile a step for CPU devices and return its program, without a replay.

    `usable` is the memory of a device in bytes.
    """
    lowered = jitted.lower(*arguments)
    unpartitioned = UnpartitionedProgram.from_lowered(lowered)
    with without_cache():  # cached programs may have the line numbers of an earlier version of this file
        module = parse_module(serialised_module(lowered.compile()))
    unpartitioned.skip_helpers(module)
    return PartitionedProgram(unpartitioned, module, dict(mesh.shape), None, MemoryReport(peak=1, usable=int(usable)))


def faults_by_code(program: PartitionedProgram) -> dict[FaultCode, Fault]:
    return {fault.code: fault for fault in find_faults(program)}


def test_a_batch_that_is_not_split_is_found_at_its_line() -> None:
    mesh = cpu_mesh(data=8)
    found_faults = faults_by_code(compile_program(mesh, *language_model(mesh, PartitionSpec("data"))))
    assert list(found_faults) == [FaultCode.whole_batch]
    fault = found_faults[FaultCode.whole_batch]
    file, _, line = fault.source.rpartition(":")
    assert file == __file__ and "jax.nn.relu(x @ up)" in linecache.getline(file, int(line))
    assert fault.mesh_axes == ("data",) and "the whole batch of 64" in fault.text
    assert "PartitionSpec('data')" in fault.remedy and "jax.set_mesh" in fault.remedy


@pytest.mark.parametrize(
    ("axes", "weights", "constraint"),
    [
        ({"data": 8}, PartitionSpec("data"), DATA),
        pytest.param({"data": 8}, PartitionSpec(), None, marks=pytest.mark.slow),
        pytest.param({"data": 4, "model": 2}, PartitionSpec(None, "model"), None, marks=pytest.mark.slow),
        ({"data": 4, "model": 2}, PartitionSpec("data", "model"), DATA),
    ],
    ids=["fsdp", "dp", "tp", "fsdp and tp"],
)
def test_sound_shardings_have_no_faults(axes: dict[str, int], weights: PartitionSpec, constraint: Any) -> None:
    mesh = cpu_mesh(**axes)
    program = compile_program(mesh, *language_model(mesh, weights, constraint))
    assert find_faults(program) == ()
    # With fsdp, XLA gathers the token ids for the embedding. They are small, but each fake wait takes 1 s.
    waiting = with_waits(program)
    costs = find_faults(waiting)
    assert [fault for fault in costs if (fault.bytes or math.inf) > BATCH * SEQ * 4] == []
    # Each device looks up all tokens in its part of the table. The lookups would not be faster with split tokens.
    assert program.module is not None and program.module.entry is not None and waiting.replay is not None
    causes = {find_cause(i) for i in program.module.entry.instructions}
    totals = [OpTotals(PartKind.memory, (), *cause, 1.0, 1.0) for cause in causes]
    computing = replace(waiting, replay=replace(waiting.replay, costs=totals))
    assert [fault.seconds for fault in find_faults(computing)] == [fault.seconds for fault in costs]
    assert all(ratio == pytest.approx(1.0, rel=0.01) for ratio in program.flops_ratios.values())


def constrained_model(mesh: Mesh, constraint: PartitionSpec, *, scanned: bool = False) -> tuple[Any, tuple[Any, ...]]:
    """Return a training step of 4 residual MLPs, and the shapes of its arguments.

    Args:
        constraint: Sharding constraint on the input of each MLP.
        scanned: Whether to scan over the layers and recompute their activations.
    """

    def layer(x: jax.Array, w: tuple[jax.Array, jax.Array]) -> jax.Array:
        h = jnp.tanh(x)
        h = with_sharding_constraint(h, NamedSharding(mesh, constraint))
        h = jax.nn.gelu(h @ w[0])
        return x + h @ w[1]

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        x = with_sharding_constraint(x * 2, NamedSharding(mesh, DATA))
        if scanned:
            x = jax.lax.scan(lambda x, w: (jax.checkpoint(layer)(x, w), None), x, weights)[0]
        else:
            for number in range(4):
                x = layer(x, (weights[0][number], weights[1][number]))
        return jnp.square(x).mean()

    weights = struct(mesh, (4, EMBED, MLP), PartitionSpec()), struct(mesh, (4, MLP, EMBED), PartitionSpec())
    return jax.jit(jax.grad(loss)), (weights, struct(mesh, (BATCH, SEQ, EMBED), DATA))


@pytest.mark.parametrize(
    "scanned", [pytest.param(False, id="unrolled", marks=pytest.mark.slow), pytest.param(True, id="scan and remat")]
)
def test_a_constraint_that_replicates_the_batch_is_named_as_the_cause(scanned: bool) -> None:
    mesh = cpu_mesh(data=8)
    program = compile_program(mesh, *constrained_model(mesh, PartitionSpec(), scanned=scanned))
    fault = faults_by_code(program)[FaultCode.whole_batch]
    file, _, line = fault.source.rpartition(":")
    assert file == __file__ and "with_sharding_constraint(h" in linecache.getline(file, int(line))
    causes, consequences = fault.text.split("each device computes")[0].split("replicates it")
    assert f":{line}" in causes and f":{int(line) + 1}" in consequences and f":{line}" in fault.remedy
    assert "over another dimension" in fault.text, "the products have 2 or 2.75 times their FLOPs, not 8 times"


def test_a_constraint_in_a_helper_is_named_by_the_line_that_calls_the_helper() -> None:
    mesh = cpu_mesh(data=4, model=2)

    def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
        return with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*axes)))

    def compile_step(*axes: str | None) -> PartitionedProgram:
        def loss(up: jax.Array, down: jax.Array, x: jax.Array) -> jax.Array:
            x = constrain(jnp.tanh(x), "data")
            h = jax.nn.relu(x @ up)
            h = constrain(h, *axes)  # the fault
            return jnp.square(constrain(h @ down, "data")).mean()

        weights = (
            struct(mesh, (EMBED, MLP), PartitionSpec(None, "model")),
            struct(mesh, (MLP, EMBED), PartitionSpec("model")),
        )
        arguments = *weights, struct(mesh, (BATCH, SEQ, EMBED), DATA)
        return compile_program(mesh, jax.jit(jax.grad(loss, argnums=(0, 1))), arguments)

    fault = faults_by_code(compile_step(None, None, "model"))[FaultCode.whole_batch]
    assert line_of(fault.source).endswith("# the fault\n")
    helper_line = inspect.getsourcelines(constrain)[1] + 1
    assert f"through constrain at {Path(__file__).relative_to(Path.cwd())}:{helper_line}" in fault.text
    (spec,) = re.findall(r"PartitionSpec\(.*?\)", fault.remedy)
    assert eval(spec) == PartitionSpec("data", None, "model"), "with the axes of the other dimensions"
    assert find_faults(compile_step(*eval(spec))) == ()


def test_products_in_a_helper_are_named_by_the_line_that_calls_it_and_layers_by_their_own() -> None:
    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return x @ w

    def layer(x: jax.Array, w: jax.Array) -> jax.Array:
        h = x @ w  # of a layer
        return h @ w.T  # of a layer

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        h = product(x, w)  # of a caller
        x = product(h, w.T)  # of a caller
        x = layer(x, w)
        return layer(x, w)

    unpartitioned = UnpartitionedProgram.from_lowered(
        jax.jit(step).lower(jnp.zeros((EMBED, MLP)), jnp.zeros((BATCH, EMBED)))
    )
    products = [i for c in unpartitioned.module.computations for i in c.instructions if i.opcode == "dot"]
    assert [line_of(i.source).split()[-1] for i in products] == ["caller"] * 2 + ["layer"] * 4


@pytest.mark.parametrize("constraint", [DATA, PartitionSpec(PartitionSpec.UNCONSTRAINED), PartitionSpec(None, "data")])
def test_a_constraint_that_keeps_the_axes_of_the_batch_is_no_cause(constraint: PartitionSpec) -> None:
    step, arguments = constrained_model(cpu_mesh(data=8), constraint)
    unpartitioned = UnpartitionedProgram.from_lowered(step.lower(*arguments))
    instructions = [i for c in unpartitioned.module.computations for i in c.instructions]
    dimensions = {d for i in instructions for d in unpartitioned.batch_dimensions(i).values()}
    assert dimensions
    assert not any(unpartitioned.find_replications(d, {i.source for i in instructions}) for d in dimensions)


def test_a_few_lines_are_all_named_and_more_are_counted() -> None:
    lines = [f"step.py:{line}" for line in range(10, 20)]
    assert all(line in join_lines(lines[:MAX_LINES]) for line in lines[:MAX_LINES])
    assert lines[MAX_LINES] not in join_lines(lines) and f"{10 - MAX_LINES} more" in join_lines(lines)


@pytest.mark.parametrize(
    "program", mark_slow_except(SOUND_PROGRAMS, SOUND_PROGRAMS[::4]), ids=lambda program: program.__name__
)
def test_sound_programs_have_no_faults(program: Callable[[Mesh], Program]) -> None:
    mesh = cpu_mesh(data=4, model=2)
    assert find_faults(compile_program(mesh, *program(mesh))) == ()


@needs_libtpu
@pytest.mark.slow  # compiles for a TPU
@pytest.mark.timeout(600)
@pytest.mark.parametrize("program", SOUND_PROGRAMS, ids=lambda program: program.__name__)
def test_sound_programs_have_no_faults_that_cost_time(program: Callable[[Mesh], Program]) -> None:
    slice_ = valkyrie.slice("v5e-8")
    step, arguments = program(slice_.mesh((4, 2), ("data", "model")))
    assert not valkyrie.check(step, *arguments, slice=slice_)


def test_an_axis_that_splits_nothing_is_found() -> None:
    mesh = cpu_mesh(data=4, spare=2)
    found_faults = faults_by_code(compile_program(mesh, *language_model(mesh, PartitionSpec("data"), DATA)))
    assert found_faults.keys() == {FaultCode.unused_axis}
    assert found_faults[FaultCode.unused_axis].mesh_axes == ("spare",)
    assert "4 of the 8 devices" in found_faults[FaultCode.unused_axis].text


@pytest.mark.parametrize(
    ("axes", "batch_axes", "batch"),
    [
        pytest.param({"data": 4, "model": 2}, ("data",), 64, marks=pytest.mark.slow),
        ({"data": 2, "spare": 2, "model": 2}, ("data", "spare"), 36),  # not a multiple of 8
    ],
)
def test_products_that_devices_repeat_are_found_and_split_by_the_remedy(
    axes: dict[str, int], batch_axes: tuple[str, ...], batch: int
) -> None:
    mesh = cpu_mesh(**axes)
    specs = PartitionSpec(), PartitionSpec(None, "model"), PartitionSpec(batch_axes)
    shapes = (EMBED, EMBED), (EMBED, MLP), (batch, EMBED)
    arguments = tuple(struct(mesh, shape, spec) for shape, spec in zip(shapes, specs, strict=True))

    def compile_step(**constraints: PartitionSpec) -> PartitionedProgram:
        def constrain(name: str, array: jax.Array) -> jax.Array:
            spec = constraints.get(name)
            return array if spec is None else with_sharding_constraint(array, NamedSharding(mesh, spec))

        def step(w: jax.Array, v: jax.Array, x: jax.Array) -> jax.Array:
            y = constrain("y", constrain("x", x) @ w)  # without a constraint, the same on both devices along `model`
            return jnp.sin(y) @ v

        return compile_program(mesh, jax.jit(step), arguments)

    found_faults = faults_by_code(compile_step())
    assert found_faults.keys() == {FaultCode.repeated_compute}
    fault = found_faults[FaultCode.repeated_compute]
    assert fault.mesh_axes == ("model",) and "model=2" in fault.text and "up to 2.0 times" in fault.text
    assert "x) @ w" in line_of(fault.source)
    ((name, spec),) = re.findall(r"([xy]) = .* NamedSharding\(mesh, (PartitionSpec\(.*\))\)\)\.", fault.remedy)
    assert "model" in spec and not find_faults(compile_step(**{name: eval(spec)}))


def test_replicated_state_is_found_if_memory_is_short() -> None:
    mesh = cpu_mesh(data=8)
    jitted_step, arguments = language_model(mesh, PartitionSpec())
    state_bytes = sum(math.prod(leaf.shape) * 4 for leaf in jax.tree.leaves(arguments[0]))
    found_faults = faults_by_code(compile_program(mesh, jitted_step, arguments, usable=2 * state_bytes))
    assert found_faults.keys() == {FaultCode.replicated_state}
    assert found_faults[FaultCode.replicated_state].bytes == pytest.approx(state_bytes * 7 / 8)
    assert "parameters" in found_faults[FaultCode.replicated_state].text


def test_narrow_products_are_found_by_their_time() -> None:
    mesh = cpu_mesh(data=8)

    def scores(q: jax.Array, k: jax.Array) -> jax.Array:
        return jnp.einsum("bqd,bkd->bqk", q, k)

    array = struct(mesh, (8, 512, 64), DATA)
    program = compile_program(mesh, jax.jit(scores), (array, array))
    (product,) = program.local_products
    cost = OpTotals(PartKind.matmul, (), *find_cause(product.operation), 1.0, 0.8)
    program = replace(program, replay=Replay(1.0, [], 0.0, 0.0, [], [cost], [], []))
    found_faults = faults_by_code(program)
    assert found_faults.keys() == {FaultCode.padding}
    assert found_faults[FaultCode.padding].seconds == pytest.approx(0.4)  # 64 of 128 lanes
    assert program.replay is not None
    faultless = replace(program, replay=replace(program.replay, step_s=2.1))
    assert find_faults(faultless) == (), "19% of the step is below the threshold"
    prediction = Prediction(None, CompileStatus.ok, step=PredictedStep(2.1, None, None), parts=())
    (hint,) = program_hints(prediction, faultless)
    assert hint.code is HintCode.largest_part and {"64", "128"} <= {*re.findall(r"\d+", hint.text)}
    assert "38%" in hint.text and "19%" in hint.text, "the products and their padding"


@pytest.mark.parametrize(
    ("change", "is_suggested"),
    [
        ({}, True),
        ({"wait_s": 0.2}, False),
        ({"peak": 9 * GIB}, False),  # twice that does not fit
        ({"data_bytes": 8e8}, False),  # grows to 1.6 GB
        ({"moments": 2**27}, True),  # 1 GB, which no collective sends
        ({"moments": 2**27, "scalar": jnp.linalg.norm}, True),
        ({"moments": 2**27, "scalar": lambda array: jnp.vdot(array, array)}, True),
        ({"moments": 2**27, "scalar": lambda array: array.mean(0)}, False),  # no scalar
        ({"traced": False}, False),  # the bytes of the weights are unknown
        ({"weights": PartitionSpec("data")}, False),
        ({"batch": PartitionSpec(("data", "model"))}, False),
        ({"batch": PartitionSpec(None, "data")}, True),  # 24 tokens in 8 parts
        ({"batch": PartitionSpec(None, "model"), "weights": PartitionSpec(None, "data")}, False),
    ],
)
def test_a_wait_for_split_weights_suggests_to_split_the_batch_if_it_fits(
    change: dict[str, Any], is_suggested: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"axes": {"data": 4, "model": 2}, "weights": PartitionSpec(None, "model"), "batch": DATA} | change
    mesh = cpu_mesh(**values["axes"])
    model_step, (parameters, tokens) = language_model(mesh, values["weights"], batch=values["batch"])

    def step(parameters: Any, moments: jax.Array, tokens: jax.Array) -> Any:
        return (*model_step(parameters, tokens), 0.9 * moments, values.get("scalar", jnp.shape)(moments))

    arguments = parameters, struct(mesh, (2, values.get("moments", 2)), PartitionSpec()), tokens
    memory = MemoryReport(peak=int(values.get("peak", GIB)), usable=int(16 * GIB))
    program = PartitionedProgram(
        UnpartitionedProgram.from_lowered(jax.jit(step).lower(*arguments)), None, dict(mesh.shape), None, memory
    )
    if not values.get("traced", True):
        monkeypatch.setattr(program.unpartitioned, "weights", [])
    bytes_by_axes = {"data": values.get("data_bytes", 1e7), "model": 9e8}
    prediction = Prediction(
        None,
        CompileStatus.ok,
        step=PredictedStep(1.0, None, None),
        parts=(StepPart(PartKind.exposed, ("model",), values.get("wait_s", 0.4)),),
        communication=Communication(
            sum(bytes_by_axes.values()), tuple(AxesBytes((axis,), size) for axis, size in bytes_by_axes.items())
        ),
    )
    (hint,) = program_hints(prediction, program)
    assert hint.code is HintCode.exposed
    assert ("Splitting the batch over model" in hint.text) == is_suggested, hint.text


@pytest.mark.parametrize(
    ("equation", "first", "second", "widths"),
    [
        ("bqd,bkd->bqk", (8, 512, 64), (8, 256, 64), [64, 256]),
        ("bkd,bqk->bdq", (8, 256, 64), (8, 512, 256), [256, 512, 64]),  # operands swapped: 64 rows
        ("bqd,bkd->bqk", (8, 1, 64), (8, 256, 64), [64, 256]),  # decodes one token
        ("qd,dk->qk", (64, 512), (512, 256), [512, 256]),  # not batched
    ],
)
def test_widths_of_a_product_are_those_that_are_padded(
    equation: str, first: tuple[int, ...], second: tuple[int, ...], widths: list[int]
) -> None:
    lowered = jax.jit(partial(jnp.einsum, equation)).lower(jnp.zeros(first), jnp.zeros(second))
    module = UnpartitionedProgram.from_lowered(lowered).module
    (product,) = [i for c in module.computations for i in c.instructions if i.opcode == "dot"]
    assert sorted(_product_widths(product)) == sorted(widths)


def test_flops_of_loops_recomputation_and_shard_map_are_counted() -> None:
    mesh = cpu_mesh(data=8)
    flops = 2 * BATCH * EMBED * EMBED

    def layer(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w)

    def scanned(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, _: (layer(w, x), None), x, None, length=5)[0]

    def recomputed(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.value_and_grad(lambda w: jax.checkpoint(layer)(w, x).sum())(w)

    mapped = jax.shard_map(layer, mesh=mesh, in_specs=(PartitionSpec(), DATA), out_specs=DATA)
    arguments = struct(mesh, (EMBED, EMBED), PartitionSpec()), struct(mesh, (BATCH, EMBED), DATA)
    for function, count in ((scanned, 5), (recomputed, 2), (mapped, 1)):
        program = compile_program(mesh, jax.jit(function), arguments)
        assert model_flops(program.unpartitioned.module, program.mesh_axes) == count * flops, function
        if function is not recomputed:
            assert program.flops_ratios.values() == {1.0} or [*program.flops_ratios.values()] == [1.0]


@given(st.data())
def test_shards_are_matched_with_merged_and_reordered_dimensions(data: st.DataObject) -> None:
    whole_shape = tuple(data.draw(st.permutations([6, 10, 14, 22]))[: data.draw(st.integers(1, 4))])
    split_dimensions = data.draw(st.sets(st.sampled_from(range(len(whole_shape)))))
    shard_shape = [size // 2 if dimension in split_dimensions else size for dimension, size in enumerate(whole_shape)]
    if len(shard_shape) > 1 and not split_dimensions & {0, 1} and data.draw(st.booleans()):
        shard_shape[:2] = [shard_shape[0] * shard_shape[1]]
    unsplit = match_shard(tuple(data.draw(st.permutations([*shard_shape, 1]))), whole_shape)
    assert unsplit == frozenset(range(len(whole_shape))) - split_dimensions
    assert match_shard((7 * 5, *shard_shape), whole_shape) is None


@pytest.mark.parametrize(
    ("text", "axes"),
    [
        ("", ()),
        ("#sdy.sharding<@mesh, []>", ()),
        ('#sdy.sharding<@mesh, [{}, {"data"}]>', ((), (("data", None),))),
        ('#sdy.sharding_per_value<[<@mesh, [{"x", "y"}, {?}]>]>', ((("x", None), ("y", None)), ())),
        ('#sdy.sharding<@mesh, [{"x":(1)2}, {}], replicated={"y"}>', ((("x", 2),), ())),
    ],
)
def test_shardings_are_parsed(text: str, axes: tuple[tuple[AxisPart, ...], ...]) -> None:
    assert parse_sharding(text) == axes


@needs_libtpu
@pytest.mark.slow
def test_check_compiles_for_a_slice_and_prices_a_fault() -> None:
    slice_ = valkyrie.slice("v5e-8")
    mesh = slice_.mesh((8,), ("data",))
    (fault, *_) = valkyrie.check(*flatten(language_model(mesh, PartitionSpec("data"))), slice=slice_)
    assert fault.code is FaultCode.whole_batch and fault.seconds
    assert not valkyrie.check(*flatten(language_model(mesh, PartitionSpec("data"), DATA)), slice=slice_)


def flatten(program: tuple[Any, tuple[Any, ...]]) -> tuple[Any, ...]:
    return program[0], *program[1]


class FreeOperations(OpCostModel):
    def cost(self, instruction: Instruction) -> OpCost:
        return OpCost(PartKind.compute, 0.0)


class SlowNetwork(LinkModel):
    def cost(self, collective: Collective) -> CollectiveCost:
        return CollectiveCost(total_s=1.0)


def with_waits(program: PartitionedProgram) -> PartitionedProgram:
    """Return the program with a fake replay, in which the step waits 1 s for each collective and does nothing else."""
    assert program.module is not None
    module, machine = program.module, make_machine("v5e", make_topology((2, 4)), dict(program.mesh_axes))

    def replay_reduced(share: Callable[[Collective], float]) -> Replay:
        return replay(
            module, machine, CostModels(FreeOperations, lambda *args: ReducedNetwork(SlowNetwork(*args), share))
        )

    return replace(program, replay=replay_reduced(lambda _: 1.0), replay_reduced=replay_reduced)


def classifier_gradient(mesh: Mesh, w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    y = with_sharding_constraint(y, NamedSharding(mesh, PartitionSpec()))  # of labels
    x = with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec()))  # of inputs
    return x.T @ (jax.nn.softmax(x @ w) - jax.nn.one_hot(y.astype(jnp.int32), MLP))


def regression_gradient(mesh: Mesh, w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    x = with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec()))  # of inputs
    error = with_sharding_constraint(x @ w - y[:, None], NamedSharding(mesh, PartitionSpec()))  # of both
    return x.T @ error


@pytest.mark.parametrize(
    ("step", "constraints"),
    [
        pytest.param(classifier_gradient, {"x": {"inputs"}, "y": {"labels"}}, marks=pytest.mark.slow),
        (regression_gradient, {"x": {"inputs", "both"}, "y": {"both"}}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_constraint_is_blamed_only_for_the_batch_arguments_that_it_replicates(
    step: Any, constraints: dict[str, set[str]]
) -> None:
    mesh = cpu_mesh(data=8)
    arguments = (
        struct(mesh, (EMBED, MLP), PartitionSpec()),
        struct(mesh, (BATCH, EMBED), DATA),
        struct(mesh, (BATCH,), DATA),
    )
    program = with_waits(compile_program(mesh, jax.jit(partial(step, mesh)), arguments))
    instructions = [i for c in program.unpartitioned.module.computations for i in c.instructions]
    dimensions = {d for i in instructions for d in program.unpartitioned.batch_dimensions(i).values()}
    found = {}
    for dimension in dimensions:
        replications = program.unpartitioned.find_replications(dimension, {i.source for i in instructions})
        found[dimension.argument] = {line_of(i.source).split()[-1] for i in replications}
        remedies = [constraint_remedy(program, dimension, [replication]) for replication in replications]
        assert all("(PartitionSpec('data'))" in remedy for remedy in remedies)
    assert found == constraints
    assert find_faults(program)


def line_of(source: str) -> str:
    file, _, line = source.rpartition(":")
    return linecache.getline(file, int(line))


def test_gathers_without_a_line_are_not_counted_for_a_constraint_on_an_argument() -> None:
    mesh = cpu_mesh(data=8)

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        x = with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec()))
        return x @ w

    arguments = struct(mesh, (EMBED, MLP), PartitionSpec()), struct(mesh, (BATCH, EMBED), DATA)
    program = with_waits(compile_program(mesh, jax.jit(step), arguments))
    shares = []

    def replay_reduced(share: Callable[[Collective], float]) -> Replay:
        shares.append(share)
        assert program.replay_reduced is not None
        return program.replay_reduced(share)

    fault = faults_by_code(replace(program, replay_reduced=replay_reduced))[FaultCode.whole_batch]
    assert program.replay is not None and fault.seconds == program.replay.step_s
    (share,) = shares
    assert share(Collective("all-gather", ("data",), "", "", 1.0)) == 1
    assert share(Collective("all-gather", ("data",), "", fault.source, 1.0)) == 0


def test_only_collectives_that_send_the_whole_batch_count_for_it() -> None:
    mesh = cpu_mesh(data=4, model=2)
    jitted, arguments = constrained_model(mesh, PartitionSpec())
    unpartitioned = UnpartitionedProgram.from_lowered(jitted.lower(*arguments))
    program = PartitionedProgram(unpartitioned, None, dict(mesh.shape), None, MemoryReport())
    product = program.unpartitioned_products[1].instruction
    (dimension,) = unpartitioned.batch_dimensions(product).values()
    assert "h @ w[1]" in line_of(product.source)
    for dims, is_whole in (
        ((BATCH, SEQ, EMBED), True),
        ((BATCH * SEQ, EMBED // 2), True),
        ((BATCH // 4, SEQ, EMBED), False),
        ((MLP, EMBED), False),
    ):
        collective = Collective("all-reduce", ("model",), product.op_name, product.source, 1.0, dims=dims)
        assert _has_whole_batch(program, dimension, collective) == is_whole, dims


def test_gathers_without_a_line_are_not_taken_for_those_of_a_batch() -> None:
    mesh = cpu_mesh(data=8)
    arguments = struct(mesh, (EMBED, MLP), PartitionSpec()), struct(mesh, (BATCH * SEQ, EMBED), DATA)
    program = compile_program(mesh, jax.jit(partial(gathers_the_batch, mesh)), arguments)
    assert FaultCode.gathered_batch in faults_by_code(with_waits(program))
    assert program.module is not None
    for module in (program.module, program.unpartitioned.module):
        for instruction in (i for c in module.computations for i in c.instructions):
            object.__setattr__(instruction, "source", "")
    assert FaultCode.gathered_batch not in faults_by_code(with_waits(program))


def test_a_constraint_without_a_line_is_described() -> None:
    mesh = cpu_mesh(data=8)
    program = compile_program(mesh, *constrained_model(mesh, PartitionSpec()))
    batch = program.unpartitioned.module.entry.parameters[2]  # stands for a constraint: arguments have no line
    (dimension,) = program.unpartitioned.batch_dimensions(batch).values()
    assert "unknown line" in describe_replication([batch])
    assert "unknown line" in constraint_remedy(program, dimension, [batch])


def gathers_the_batch(mesh: Mesh, w: jax.Array, x: jax.Array) -> jax.Array:
    y = jnp.tanh(x @ w)
    y = with_sharding_constraint(y, NamedSharding(mesh, PartitionSpec()))
    return y * 2


def gathers_float32(mesh: Mesh, w: jax.Array, x: jax.Array) -> jax.Array:
    return x @ with_sharding_constraint(w, NamedSharding(mesh, PartitionSpec())).astype(jnp.bfloat16)


def reduces_everywhere(mesh: Mesh, w: jax.Array, x: jax.Array) -> jax.Array:
    product = with_sharding_constraint(x.T @ x, NamedSharding(mesh, PartitionSpec()))
    return with_sharding_constraint(product * 2.0, NamedSharding(mesh, DATA))


@pytest.mark.parametrize(
    ("step", "weights", "dtype", "code"),
    [
        (gathers_the_batch, PartitionSpec(), jnp.float32, FaultCode.gathered_batch),
        pytest.param(gathers_float32, DATA, jnp.bfloat16, FaultCode.float32_gather, marks=pytest.mark.slow),
        (reduces_everywhere, PartitionSpec(), jnp.float32, FaultCode.all_reduce),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_collectives_that_send_too_much_are_found(
    step: Any, weights: PartitionSpec, dtype: Any, code: FaultCode
) -> None:
    mesh = cpu_mesh(data=8)
    arguments = struct(mesh, (EMBED, MLP), weights), struct(mesh, (BATCH * SEQ, EMBED), DATA, dtype)
    program = with_waits(compile_program(mesh, jax.jit(partial(step, mesh)), arguments))
    fault = faults_by_code(program)[code]
    assert fault.seconds and fault.bytes
    file, _, line = fault.source.rpartition(":")
    lines, first = inspect.getsourcelines(step)
    assert file == __file__ and int(line) in range(first, first + len(lines))
    assert "with_sharding_constraint" in linecache.getline(file, int(line))
    if code is FaultCode.gathered_batch:  # the next operation reads the whole batch
        assert program.module is not None and program.module.entry.root is not None and program.replay is not None
        reading = OpTotals(PartKind.memory, (), *find_cause(program.module.entry.root), 1.0, 8.0)
        program = replace(program, replay=replace(program.replay, costs=[reading]))
        assert faults_by_code(program)[code].seconds == pytest.approx(fault.seconds + 7.0)
