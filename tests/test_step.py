"""Tests of the step program: accumulation, remat, ZeRO-1, precision, optimizer groups, and collectives."""

from __future__ import annotations

import math
import re
from collections import Counter
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import (
    StepResults,
    assert_same_steps,
    compose_run,
    initial_state,
    leaves_by_name,
    make_batch,
    make_program,
    mark_slow_except,
    place_state,
    randomize_zero_parameters,
    reference_steps,
    run_two_steps,
    shared_run,
    small_overrides,
    small_run,
)
from valkyrie.axes import UNSHARDED
from valkyrie.compiled.collectives import collective_uses
from valkyrie.compiled.hlo import parse_module
from valkyrie.config.run import Run
from valkyrie.ops.linear import Numerics, compute_cotangents_once, linear
from valkyrie.parallel.mesh import abstract_mesh
from valkyrie.parallel.partition import SumGradientsPer
from valkyrie.tasks.next_token import token_losses
from valkyrie.train.program import StepProgram, serialised_module
from valkyrie.train.run_memory import accumulated_gradients

TINY = "valkyrie_tiny"
MIXED = Numerics("float32", "bfloat16", "float32")


@pytest.mark.parametrize(
    ("mesh", "partition", "override"),
    [
        pytest.param("1x1x1", "dp", "microbatches=2", marks=pytest.mark.slow),
        pytest.param("2x1x2", "2d_tp_fsdp", "microbatches=4", marks=pytest.mark.slow),
        pytest.param("1x1x1", "dp", "remat=dots", marks=pytest.mark.slow),
        pytest.param("1x1x1", "dp", "remat=full", marks=pytest.mark.slow),
        pytest.param("1x1x1", "dp", "remat=offload", marks=pytest.mark.slow),
        pytest.param("2x2x2", "sp", "microbatches=2", marks=pytest.mark.slow),
        pytest.param("2x2x2", "2d_tp", "remat=full", marks=pytest.mark.slow),
        pytest.param("2x2x2", "fsdp", "remat=dots", marks=pytest.mark.slow),
        pytest.param("2x2x2", "2d_tp", "partition.zero1=true", marks=pytest.mark.slow),
    ],
)
def test_layout_settings_do_not_change_the_steps(mesh, partition, override):
    run = small_run(TINY, f"mesh={mesh}", f"partition={partition}", override)
    assert_same_steps(run_two_steps(run, initial_state(small_overrides(TINY))), reference_steps(TINY))


@pytest.mark.parametrize(
    ("mesh", "partition", "model"),
    [
        pytest.param("1x1x8", "dp", "gpt_tiny"),
        pytest.param("1x1x8", "dp", TINY, marks=pytest.mark.slow),
        *(
            pytest.param(mesh, partition, model, marks=pytest.mark.slow)
            for mesh, partition in (
                ("1x1x8", "fsdp"),
                ("2x2x2", "fsdp_tp"),
                ("2x2x2", "1d_tp"),
                ("2x2x2", "2d_tp"),
                ("2x2x2", "2d_tp_fsdp"),
                ("2s2x1x2", "fsdp"),
                ("2x2x2", "sp"),
            )
            for model in ("gpt_tiny", TINY)
        ),
    ],
)
def test_gradients_summed_once_per_step_are_those_of_the_whole_batch(mesh: str, partition: str, model: str):
    layout = (f"mesh={mesh}", f"partition={partition}", "microbatches=2", "partition.sum_gradients_per=step")
    run = small_run(model, *layout, "batch=16")
    assert summed_per(run) is SumGradientsPer.step
    state = randomize_zero_parameters(initial_state((*small_overrides(model), "batch=16")))
    assert_same_steps(run_two_steps(run, state), reference_steps(model, "batch=16"))


def summed_per(run: Run) -> SumGradientsPer | None:
    gradients = accumulated_gradients(run)
    return None if gradients is None else gradients.summed_per


@pytest.mark.parametrize(
    ("mesh", "partition", "model", "settings"),
    [
        pytest.param("2s2x1x2", "fsdp", "gpt_tiny", ()),
        *(
            pytest.param(mesh, partition, model, settings, marks=pytest.mark.slow)
            for mesh, partition in (
                ("2s2x1x2", "fsdp"),
                ("2s2x2x1", "fsdp_tp"),
                ("2s2x1x2", "2d_tp_fsdp"),
                ("2s2x1x2", "sp"),
                ("2s2x1x2", "pp_fsdp"),
                ("2x2x2", "data_model_fsdp"),
            )
            for model in ("gpt_tiny", TINY)
            for settings in ((), ("partition.gradient_sum=all_to_all",))
        ),
    ],
)
def test_gradients_of_replicas_summed_once_per_step_are_those_of_the_whole_batch(
    mesh: str, partition: str, model: str, settings: tuple[str, ...]
):
    layout = (f"mesh={mesh}", f"partition={partition}", "microbatches=2", "partition.sum_gradients_per=hybrid")
    run = small_run(model, *layout, *settings, "batch=16")
    gradients = accumulated_gradients(run)
    assert gradients is not None and gradients.summed_per is SumGradientsPer.hybrid
    assert gradients.once_axes == (("s",) if "s" in mesh else ("x",))
    state = randomize_zero_parameters(initial_state((*small_overrides(model), "batch=16")))
    assert_same_steps(run_two_steps(run, state), reference_steps(model, "batch=16"))


def gradient_bytes_sent(*overrides: str) -> float:
    """Return the bytes that each device sends in the collectives of a step that add up gradients."""
    run = small_run("gpt_tiny", "batch=32", *overrides)
    module = parse_module(serialised_module(make_program(run).compile_step()))
    uses = collective_uses(module, run.config.mesh.axes)
    return sum(use.bytes_sent for use in uses if use.kind in ("all-reduce", "reduce-scatter"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(("mesh=1x1x8", "partition=fsdp"), id="fsdp"),
        pytest.param(("mesh=1x4x2", "partition=pp_fsdp"), id="pp_fsdp", marks=pytest.mark.slow),
        pytest.param(
            ("mesh=1x4x2", "partition=pp_fsdp", "partition.schedule=1f1b", "remat=full"),
            id="1f1b",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_more_microbatches_send_no_more_gradients(layout: tuple[str, ...]):
    per_step, per_microbatch = (
        [
            gradient_bytes_sent(*layout, f"partition.sum_gradients_per={per}", f"microbatches={count}")
            for count in (1, 4)
        ]
        for per in ("step", "microbatch")
    )
    assert per_step[1] <= per_step[0]
    assert per_microbatch[1] > 1.5 * per_step[1], "this test could not tell a sum per step from one per microbatch"


def test_gradients_are_summed_once_per_step_if_they_fit_unsummed():
    def sums_once(*overrides: str) -> bool:
        run = shared_run("target=v5e-8", "model=gpt_125m", "microbatches=8", *overrides)
        return summed_per(run) is SumGradientsPer.step

    sharded = ("mesh=1x1x8", "batch=128", "remat=full", "partition=fsdp")
    assert sums_once(*sharded) and sums_once(*sharded[:-1], "partition=dp", "target.chip.usable_hbm_gib=0.1")
    assert not sums_once(*sharded, "target.chip.usable_hbm_gib=1")
    assert sums_once(*sharded, "target.chip.usable_hbm_gib=1", "partition.sum_gradients_per=step")
    assert not sums_once(*sharded, "partition.sum_gradients_per=microbatch")
    small_memory = (*sharded[1:-1], "mesh=1x2x4", "target.chip.usable_hbm_gib=0.1")
    assert sums_once(*small_memory, "partition=pp") and not sums_once(*small_memory, "partition=pp_fsdp")


def test_zero1_shards_only_optimizer_state():
    program = make_program(small_run(TINY, "mesh=2x2x2", "partition=2d_tp", "partition.zero1=true"))

    def per_device(tree: Any) -> int:
        return sum(int(np.prod(x.sharding.shard_shape(x.shape))) for x in jax.tree.leaves(tree) if x.ndim)

    state, plain = program.abstract_state, abstract_state("partition=2d_tp")
    assert per_device(state.parameters) == per_device(plain.parameters)
    assert per_device(state.optimizer) < 0.55 * per_device(plain.optimizer)


def abstract_state(*overrides: str) -> Any:
    run = small_run(TINY, "mesh=2x2x2", *overrides)
    return StepProgram(run, abstract_mesh(run.config.mesh)).abstract_state


def test_uneven_microbatches_average_over_tokens():
    """One of 4 microbatches has all the weight, so a mean of microbatch means would be too small by a factor of 4."""
    run = small_run("gpt_tiny", "microbatches=4")
    batch = make_batch(run)
    batch["weights"][np.arange(8) % 4 != 1] = 0
    single_batch_program, microbatched_program = (
        make_program(small_run("gpt_tiny", f"microbatches={n}")) for n in (1, 4)
    )
    results = []
    for program in (single_batch_program, microbatched_program):
        _, metrics = program.step(
            place_state(program, initial_state(small_overrides("gpt_tiny"))), program.place(batch)
        )
        results.append(jax.device_get(metrics))
    for key in ("loss", "grad_norm", "tokens", "squared_grad_norms"):
        np.testing.assert_allclose(results[1][key], results[0][key], rtol=2e-5)
    assert results[0]["tokens"] == batch["weights"].sum()


@lru_cache
def compile_partition(partition: str, *overrides: str) -> Any:
    return make_program(small_run(TINY, "mesh=2x2x2", f"partition={partition}", *overrides)).lower_step().compile()


@pytest.mark.slow
def test_rematerialisation_saves_memory():
    temp = {}
    for remat in ("none", "dots", "full"):
        run = compose_run(
            *small_overrides(TINY), "mesh=1x1x1", "partition=dp", "model.layers=16", "seq=128", f"remat={remat}"
        )
        temp[remat] = make_program(run).lower_step().compile().memory_analysis().temp_size_in_bytes
    assert temp["full"] < 0.6 * temp["none"], temp
    assert temp["full"] <= temp["dots"] < temp["none"], temp


COLLECTIVE = re.compile(r"= (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")


def collectives(hlo: str) -> dict[str, list[tuple[int, ...]]]:
    """Return the output shapes of a compiled program's collectives, by kind."""
    shapes_by_kind: dict[str, list[tuple[int, ...]]] = {}
    for shapes, kind in COLLECTIVE.findall(hlo):
        for shape in re.findall(r"\w+\[([\d,]*)\]", shapes):
            shapes_by_kind.setdefault(kind, []).append(tuple(int(n) for n in shape.split(",") if n))
    return shapes_by_kind


def is_activation(shape: tuple[int, ...], rows: int) -> bool:
    return len(shape) >= 3 and shape[:2] == (rows, 48)


@pytest.mark.slow
def test_dp_only_sums_gradients():
    shapes_by_kind = collectives(compile_partition("dp").as_text())
    assert set(shapes_by_kind) == {"all-reduce"}
    assert not any(is_activation(shape, 1) for shape in shapes_by_kind["all-reduce"])


@pytest.mark.slow
def test_fsdp_gathers_every_parameter_forward_and_backward():
    """Activations are never gathered. Gradients are summed in the scan, by all-reduces on CPU."""
    run = small_run(TINY, "mesh=2x2x2", "partition=fsdp")
    shapes_by_kind = collectives(compile_partition("fsdp").as_text())
    assert set(shapes_by_kind) <= {"all-gather", "all-reduce", "reduce-scatter"}
    assert not any(is_activation(shape, 1) for shapes in shapes_by_kind.values() for shape in shapes)
    gather_counts = Counter(tuple(sorted(n for n in shape if n > 1)) for shape in shapes_by_kind["all-gather"])
    embed, mlp, states, heads = run.model.embed, run.model.mlp, run.model.s5.state_count, run.model.attention.heads
    # beside three matrices of two feed-forwards, twice, of the same size
    embedding_gathers = gather_counts[embed, mlp] - 2 * 6
    assert 1 <= embedding_gathers <= 3, "for the lookup, the loss, and the loss backward; a compiler may join them"
    assert gather_counts[states, embed] == 2 * 4
    assert gather_counts[heads, run.model.attention.head_dim, embed] == 2 * 2, "query and output"
    assert gather_counts[run.model.attention.kv_heads, run.model.attention.head_dim, embed] == 2 * 2, "key and value"


@pytest.mark.parametrize(
    "partition",
    mark_slow_except(["1d_tp", "fsdp_tp", "data_model_fsdp", "fsdp", "sp"], []),
)
def test_no_partition_reshards_activations_by_all_to_all(partition):
    """An all-to-all of an activation would mean that two consecutive operations shard it differently."""
    moved = collectives(compile_partition(partition).as_text()).get("all-to-all", [])
    positions = {48, 24}  # whole sequences, and halves of them; a weight that changes places is no activation
    assert not any(positions & set(shape) for shape in moved)


@pytest.mark.parametrize("partition", mark_slow_except(["2d_tp", "2d_tp_fsdp"], []))
def test_logits_are_never_summed_over_devices(partition):
    """A device's logits have a last dimension of 80: `vocab_multiple=160` over 2 devices.

    All-to-alls only change how hidden states and activations of attention are sharded: by width or by position.
    """
    shapes_by_kind = collectives(compile_partition(partition, "model.vocab_multiple=160").as_text())
    assert not any(shape[-1:] == (80,) for shapes in shapes_by_kind.values() for shape in shapes)
    assert max(map(math.prod, shapes_by_kind["all-to-all"])) <= 4 * 48 * 16


def test_gathered_parameters_are_not_kept_for_the_backward_pass():
    """The backward pass saves the stored float32 parameter, not the gathered bfloat16 copy."""
    x, w = jnp.zeros((2, 4, 8), jnp.bfloat16), jnp.zeros((8, 16), jnp.float32)

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return linear("bse,em->bsm", x, w, axes=("embed", "mlp"), shard=UNSHARDED, numerics=MIXED)

    _, backward = jax.vjp(product, x, w)
    saved = {(leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(backward)}
    assert saved == {((2, 4, 8), "bfloat16"), ((8, 16), "float32")}


def test_gradient_of_a_product_is_summed_in_float32():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(16, 512, 8)) + 1, jnp.bfloat16)
    g = jnp.asarray(rng.normal(size=(16, 512, 4)) + 1, jnp.bfloat16)
    w = jnp.asarray(rng.normal(size=(8, 4)), jnp.float32)
    call = partial(linear, "bse,em->bsm", axes=("embed", "mlp"), shard=UNSHARDED, numerics=MIXED)
    out, backward = jax.vjp(call, x, w)
    dx, dw = backward(g)
    assert (out.dtype, dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    exact = np.einsum("bse,bsm->em", np.asarray(x, np.float64), np.asarray(g, np.float64))
    np.testing.assert_allclose(dw, exact, rtol=1e-5)
    narrow = jnp.asarray(exact, jnp.bfloat16).astype(jnp.float32)
    assert np.abs(narrow / exact - 1).max() > 1e-4, "this reference could not tell float32 sums from bfloat16 ones"


def run_precision(precision: str) -> StepResults:
    key = (*small_overrides(TINY), f"precision={precision}")
    return run_two_steps(small_run(TINY, key[-1]), initial_state(key))


@pytest.mark.slow
def test_dtypes_under_bf16_mixed():
    mixed, exact = run_precision("bf16_mixed"), reference_steps(TINY)
    for new, old in zip(mixed.metrics, exact.metrics, strict=True):
        np.testing.assert_allclose(new["loss"], old["loss"], rtol=5e-3)
        np.testing.assert_allclose(new["grad_norm"], old["grad_norm"], rtol=3e-2)
    floats = [x.dtype for x in jax.tree.leaves(mixed.state) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert set(floats) == {jnp.dtype("float32")}


@pytest.mark.slow
def test_bf16_keeps_only_the_state_space_in_float32():
    narrow, exact = run_precision("bf16"), reference_steps(TINY)
    np.testing.assert_allclose(narrow.metrics[0]["loss"], exact.metrics[0]["loss"], rtol=2e-2)
    np.testing.assert_allclose(narrow.metrics[0]["grad_norm"], exact.metrics[0]["grad_norm"], rtol=0.1)
    dtypes = {name: str(x.dtype) for name, x in leaves_by_name(narrow.state.parameters).items()}
    wide = {name.rsplit(".", 1)[1] for name, dtype in dtypes.items() if dtype == "float32"}
    assert wide == {"Lambda_re", "Lambda_im", "log_step", "B", "C", "D"}
    assert dtypes["embedding"] == "bfloat16"


def operand_dtypes(jaxpr: Any, counts: Counter) -> Counter:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            lhs, rhs = (v.aval for v in eqn.invars)
            counts[str(lhs.dtype), str(rhs.dtype), max(lhs.shape[-1], rhs.shape[-1])] += 1
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda v: hasattr(v, "jaxpr")):
            if hasattr(value, "jaxpr"):
                operand_dtypes(value.jaxpr, counts)
    return counts


def test_matrix_products_use_bfloat16_under_bf16_mixed_but_the_state_space_does_not():
    run = small_run(TINY, "precision=bf16_mixed", "mesh=1x1x1")
    program = StepProgram(run, abstract_mesh(run.config.mesh))
    traced = program.step.trace(program.abstract_state, program.abstract_batch)
    kinds: Counter = Counter()
    for (lhs, rhs, _), count in operand_dtypes(traced.jaxpr.jaxpr, Counter()).items():
        kinds[lhs, rhs] += count
    assert kinds["bfloat16", "bfloat16"] > 20
    assert kinds["float32", "float32"] == 12, "B u and C x, each in two parts, forward and twice backward"


@lru_cache
def run_one_step(*overrides: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], Any, Any]:
    """Run one step with these overrides.

    Returns the parameters before the step and after the step, each by name, the metrics, and the state after the step.
    """
    key = (*small_overrides(TINY), *overrides)
    program, initial = make_program(compose_run(*key, "mesh=1x1x1", "partition=dp")), initial_state(key)
    state, metrics = program.step(place_state(program, initial), program.place(make_batch(program.run)))
    after = jax.device_get(state)
    return leaves_by_name(initial.parameters), leaves_by_name(after.parameters), jax.device_get(metrics), after


RECIPE = (
    "optimizer.warmup_steps=0",
    "optimizer.learning_rate=0.01",
    "optimizer.epsilon=1e-12",
    "optimizer.weight_decay=0.5",
    "optimizer.ssm_learning_rate_ratio=0.25",
    "optimizer.clip_norm=0.01",
    "optimizer.ema_decay=0.75",
)
"""Optimizer settings. With epsilon near 0, Adam's first update has the size of the learning rate for every gradient."""


@pytest.mark.slow
def test_each_optimizer_group_updates_at_its_rate():
    before, after, metrics, _ = run_one_step(*RECIPE)
    groups = {name: spec.group for name, spec in make_program(small_run(TINY)).builder.specs.items()}
    assert metrics["learning_rate"] == np.float32(0.01)
    rate = {"matrix": 0.01, "embedding": 0.01, "vector": 0.01, "ssm": 0.0025}
    for name, group in groups.items():
        moved = (after[name] - before[name]).astype(np.float64)
        if group in ("matrix", "embedding"):
            moved = moved + 0.01 * 0.5 * before[name]
        sizes = np.abs(moved[:61] if name == "embedding" else moved)
        np.testing.assert_allclose(np.median(sizes), rate[group], rtol=5e-3, err_msg=name)
        assert sizes.max() < rate[group] * 1.02 + 1e-5, name
    assert set(rate) == set(groups.values())
    slow = {n.rsplit(".", 1)[1] for n, g in groups.items() if g == "ssm"}
    assert slow == {"B", "Lambda_re", "Lambda_im", "log_step", "scale"}


@pytest.mark.slow
def test_clipping_does_not_change_the_reported_gradient_norm():
    """After one step, the first moment is (1 - beta1) times the clipped gradient."""
    *_, metrics, state = run_one_step(*RECIPE)
    leaves = jax.tree_util.tree_flatten_with_path(state.optimizer)[0]
    moments = [m for path, m in leaves if ".mu" in jax.tree_util.keystr(path)]
    norm = np.sqrt(sum(np.sum(np.square(m, dtype=np.float64)) for m in moments)) / (1 - 0.9)
    np.testing.assert_allclose(norm, 0.01, rtol=1e-4)
    assert metrics["grad_norm"] > 0.1
    np.testing.assert_allclose(metrics["grad_norm"], reference_steps(TINY).metrics[0]["grad_norm"], rtol=1e-5)


@pytest.mark.slow
def test_moving_average_of_parameters():
    before, after, _, state = run_one_step(*RECIPE)
    for name, average in leaves_by_name(state.ema).items():
        np.testing.assert_allclose(average, 0.75 * before[name] + 0.25 * after[name], rtol=1e-5, atol=1e-7)
    assert reference_steps(TINY).state.ema is None


@pytest.mark.slow
def test_dropout_differs_by_step_and_repeats_for_the_same_state():
    key = (*small_overrides(TINY), "model.dropout=0.5", "optimizer.learning_rate=1e-20")
    program, initial = make_program(compose_run(*key, "mesh=1x1x1", "partition=dp")), initial_state(key)
    batch = program.place(make_batch(program.run))
    state, first = program.step(place_state(program, initial), batch)
    _, second = program.step(state, batch)
    _, again = program.step(place_state(program, initial), batch)
    assert first["loss"] == again["loss"]
    assert first["loss"] != second["loss"]
    sums = program.evaluate(place_state(program, initial).parameters, batch, jnp.ones(61, jnp.int32))
    plain = reference_steps(TINY).metrics[0]["loss"]
    np.testing.assert_allclose(sums["loss"] / sums["weight"], plain, rtol=1e-6)


@pytest.mark.slow
def test_evaluation_counts_bytes_of_text_only():
    run = small_run(TINY, "mesh=2x2x2", "partition=2d_tp")
    program, batch = make_program(run), make_batch(run)
    initial = initial_state(small_overrides(TINY))
    length = np.arange(61, dtype=np.int32) % 3
    sums = jax.device_get(program.evaluate(place_state(program, initial).parameters, program.place(batch), length))
    parameters = jax.tree.map(jnp.asarray, initial.parameters)
    module = program.builder.module(parameters)
    losses = jax.jit(lambda b: token_losses(module, b, shard=UNSHARDED, checkpoint=lambda block: block, key=None))
    per_token = np.asarray(losses(jax.tree.map(jnp.asarray, batch)).per_token)
    text = length[batch["targets"]] > 0
    np.testing.assert_allclose(sums["weight"], batch["weights"].sum(), rtol=1e-6)
    np.testing.assert_allclose(sums["loss"], (per_token * batch["weights"]).sum(), rtol=1e-5)
    np.testing.assert_allclose(sums["nats"], per_token[text & (batch["weights"] > 0)].sum(), rtol=1e-5)
    np.testing.assert_allclose(sums["bytes"], (length[batch["targets"]] * batch["weights"]).sum(), rtol=1e-6)


def test_the_tpu_compiler_only_loops_over_products_of_activations():
    """XLA splits a matmul into a loop only above a size threshold in MiB, which is a compiler option.

    The option is set to the first whole number above the size of the largest gradient of a gathered weight. It is 1 for
    `TINY`.
    """
    run = small_run(TINY, "mesh=2x2x2", "partition=fsdp")
    mesh = abstract_mesh(run.config.mesh)
    (threshold,) = (StepProgram(run, mesh, backend="tpu").compiler_options or {}).values()
    assert threshold == "1"
    assert StepProgram(run, mesh, backend="cpu").compiler_options is None
    wide = compose_run("model=gpt_1b", "mesh=2x2x2", "partition=fsdp_tp", "precision=bf16_mixed", "batch=8", "seq=128")
    (threshold,) = (StepProgram(wide, abstract_mesh(wide.config.mesh), backend="tpu").compiler_options or {}).values()
    assert int(threshold) == 2048 * 5632 // 2 * 4 // 2**20 + 1


def test_materialising_cotangents_once_does_not_change_them():
    a, b = (jnp.asarray(np.random.default_rng(i).normal(size=(3, 4))) for i in (0, 1))
    plain, once = (
        jax.grad(lambda x, y, f=f: jnp.prod(jnp.stack(f(x, y))), (0, 1))
        for f in (lambda *x: x, compute_cotangents_once)
    )
    jax.tree.map(np.testing.assert_array_equal, once(a, b), plain(a, b))
