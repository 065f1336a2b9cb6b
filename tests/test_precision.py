"""Tests of precision policies: a step keeps the train state's dtypes, and accumulators are float32."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import (
    compose_run,
    config_names,
    initial_state,
    leaves_by_name,
    make_batch,
    make_program,
    mark_slow_except,
    small_overrides,
    small_run,
    vector_specs,
)
from runs import run_train, saved_arrays, tiny_arguments
from valkyrie.axes import UNSHARDED
from valkyrie.ops.linear import Numerics, lookup
from valkyrie.optim import Training, make_optimizer
from valkyrie.optim.families.adamw import Config as AdamW
from valkyrie.parallel.mesh import abstract_mesh
from valkyrie.precision import DType
from valkyrie.train.program import StepProgram
from valkyrie.train.run_memory import expected_memory

TINY = "gpt_tiny"
SMALLEST = ("model.layers=1", "batch=8", "seq=16")
POLICIES = [f"precision={name}" for name in config_names("precision")]
REDUCTIONS = [f"precision.reduction={dtype.value}" for dtype in DType]
CASES = list(itertools.product(POLICIES, REDUCTIONS, (1, 2), ("null", "0.9"), ("false", "true")))
QUICK = [
    ("precision=bf16", "precision.reduction=float32", 2, "null", "false"),
    ("precision=bf16", "precision.reduction=bfloat16", 1, "0.9", "true"),
    ("precision=bf16_mixed", "precision.reduction=bfloat16", 2, "0.9", "true"),
    ("precision=float32", "precision.reduction=float32", 1, "null", "false"),
]


def program_of(*overrides: str) -> StepProgram:
    run = small_run(TINY, "mesh=2x1x1", *SMALLEST, *overrides)
    return StepProgram(run, abstract_mesh(run.config.mesh), backend="cpu")


def float_dtypes(tree: Any) -> set[str]:
    return {x.dtype.name for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)}


@pytest.mark.parametrize("case", mark_slow_except(CASES, QUICK))
def test_a_step_does_not_change_the_dtype_of_any_array(case: tuple[str, str, int, str, str]):
    policy, reduction, microbatches, ema, zero1 = case
    layout = (f"microbatches={microbatches}", f"partition.zero1={zero1}")
    program = program_of(policy, reduction, *layout, f"optimizer.ema_decay={ema}")
    before = program.abstract_state
    after, metrics = jax.eval_shape(program.step, before, program.abstract_batch)
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(before)] == [(x.shape, x.dtype) for x in jax.tree.leaves(after)]
    assert float_dtypes(before.parameters) == {program.run.config.precision.parameter.value}
    assert float_dtypes((before.optimizer, before.ema, metrics)) == {"float32"}
    memory = expected_memory(program.run, before)
    for tree, expected in ((before.optimizer, memory.optimizer), (before.ema, memory.ema)):
        assert sum(int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize for x in jax.tree.leaves(tree)) == (
            expected
        )


@pytest.mark.parametrize(
    ("overrides", "bytes_each"),
    [
        (("precision=float32",), 4),
        (("precision=float32", "microbatches=2"), 4 + 4),
        (("precision=bf16",), 2),
        (("precision=bf16", "microbatches=2"), 2 + 4),
        (("precision=bf16", "precision.reduction=float32"), 2),
        (("precision=bf16_mixed", "precision.reduction=bfloat16"), 2),
    ],
)
def test_gradient_memory_is_that_of_a_microbatch_and_a_float32_sum(overrides: Any, bytes_each: int):
    program = program_of(*overrides, "partition=dp")
    count = sum(spec.size for spec in program.builder.specs.values())
    assert expected_memory(program.run, program.abstract_state).gradients == count * bytes_each


@pytest.mark.parametrize(
    ("precision", "rounding"),
    [("precision=bf16", 2**-9), pytest.param("precision=float32", 2**-20, marks=pytest.mark.slow)],
)
def test_the_moving_average_follows_every_step(precision: str, rounding: float):
    """A thousandth of a step is below bfloat16's precision: an average in bfloat16 would never move."""
    recipe = ("optimizer.ema_decay=0.999", "optimizer.warmup_steps=0", "optimizer.learning_rate=0.01")
    overrides = (*small_overrides(TINY), "model.layers=1", precision, *recipe)
    program, state = make_program(compose_run(*overrides, "mesh=1x1x1", "partition=dp")), initial_state(overrides)
    average = {name: np.asarray(p, np.float64) for name, p in leaves_by_name(state.parameters).items()}
    start = dict(average)
    for seed in range(4):
        state, _ = program.step(jax.device_put(state, program.shardings), program.place(make_batch(program.run, seed)))
        parameters = leaves_by_name(jax.device_get(state.parameters))
        average = {name: 0.999 * a + 0.001 * np.asarray(parameters[name], np.float64) for name, a in average.items()}
    for name, stored in leaves_by_name(jax.device_get(state.ema)).items():
        moved = np.asarray(stored, np.float64) - start[name]
        # The parameter that is averaged may be the one before it is rounded, in each of the four steps.
        error = (4 * 0.001 * rounding + 1e-6) * np.abs(start[name]).max()
        np.testing.assert_allclose(moved, average[name] - start[name], atol=error)
        assert np.abs(moved).max() > 3 * error, name


def test_second_moments_of_bfloat16_parameters_follow_their_gradients():
    """With beta2=0.999 a step changes a second moment by a thousandth, which bfloat16 rounds away."""
    parameters = {"w": jnp.ones(2, jnp.bfloat16)}
    config = AdamW(beta2=0.999, clip_norm=None, learning_rate=1e-6)
    optimizer = make_optimizer(config, vector_specs({"w": "matrix"}), Training(3000))

    def step(_: int, state: Any) -> Any:
        return optimizer.update(jax.tree.map(jnp.ones_like, parameters), state, parameters)[1]

    state = jax.lax.fori_loop(0, 3000, step, optimizer.init(parameters))
    (second,) = (x for path, x in jax.tree_util.tree_flatten_with_path(state)[0] if ".nu" in jax.tree_util.keystr(path))
    np.testing.assert_allclose(second, 1 - 0.999**3000, rtol=1e-3)


@pytest.mark.slow
def test_gradients_of_microbatches_are_summed_in_float32():
    """64 microbatches of equal rows give the same gradient as one whole batch.

    Sums over devices are in bfloat16 (`precision.reduction`), but sums over microbatches must not be.
    """
    overrides = ("model.layers=1", "batch=64", "seq=16", "precision=bf16_mixed", "precision.reduction=bfloat16")
    norms = []
    for count in (1, 64):
        program = make_program(small_run(TINY, *overrides, f"microbatches={count}"))
        batch = {name: np.repeat(x[:1], 64, axis=0) for name, x in make_batch(program.run, 1).items()}
        _, metrics = program.step(program.init(0), program.place(batch))
        norms.append(float(metrics["grad_norm"]))
    assert norms[0] == pytest.approx(norms[1], rel=2e-3)


def test_the_gradient_of_a_frequent_token_is_summed_in_float32_under_any_policy():
    """The same token fills all 4096 positions. Summed in bfloat16, its gradient would saturate at 256."""
    numerics = Numerics("float32", "bfloat16", "bfloat16")

    def score(table: jax.Array) -> jax.Array:
        tokens = jnp.zeros((16, 256), jnp.int32)
        x = lookup(table, tokens, axes=("vocab", "embed"), shard=UNSHARDED, numerics=numerics)
        return jnp.sum(x.astype(jnp.float32))

    gradient = jax.grad(score)(jnp.ones((4, 8), jnp.float32))
    np.testing.assert_array_equal(gradient[0], 4096)


@pytest.mark.slow
def test_training_with_a_moving_average_under_bf16(tmp_path: Path):
    """The average is float32. Evaluation and sampling use it, with bfloat16 activations."""
    overrides = tiny_arguments(
        tmp_path, "precision=bf16", "precision.reduction=float32", "microbatches=2", "optimizer.ema_decay=0.9"
    )
    assert run_train(*overrides, "steps=3", "sample_tokens=2") == 0
    averages = [x for name, x in saved_arrays(tmp_path / "run").items() if "ema" in name]
    assert averages and {x.dtype.name for x in averages} == {"float32"}
