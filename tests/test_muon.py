"""Tests of Muon: two steps equal nanochat's, however a matrix is stored or stacked.

Also tests the parameters that AdamW updates instead.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from helpers import (
    MODELS_WITH_UNIQUE_LAYERS,
    PARTITIONS,
    assert_same_steps,
    compose_config,
    initial_state,
    is_supported,
    make_program,
    mark_slow_except,
    randomize_zero_parameters,
    run_two_steps,
    small_overrides,
    small_run,
)
from valkyrie.axes import Parameter
from valkyrie.compiled.collectives import CollectiveReader, collective_kind
from valkyrie.compiled.hlo import parse_module
from valkyrie.config.run import Run
from valkyrie.optim import Schedule, Training, convert_old_settings, learning_rate_schedule, make_optimizer
from valkyrie.optim.families.muon import AdamGroup, Config, momentum_schedule
from valkyrie.optim.muon import MuonSettings, muon, orthogonalize
from valkyrie.parallel.mesh import abstract_mesh
from valkyrie.problems import ProblemCode
from valkyrie.train.memory import MemoryEstimator
from valkyrie.train.program import StepProgram
from valkyrie.train.run_memory import expected_memory, to_candidates
from valkyrie.train.spread import matrix_stack_sharding

GOLDEN = np.load(Path(__file__).parent / "goldens" / "nanochat.npz")
PUBLISHED = MuonSettings(lambda _: 0.02, lambda _: 0.9, lambda _: 0.1, 0.9, "float32")
"""The hyperparameters in goldens/make_nanochat.py."""


def parameters_after_two_steps(name: str, specs: dict[str, Parameter], to_stored: Any) -> dict[str, np.ndarray]:
    """Return the parameters after two steps with the golden file's gradients. `name` is `tall` or `wide`.

    `to_stored` converts a matrix of shape (outputs, inputs) to the stored array.
    """
    optimizer = muon(PUBLISHED, specs)
    parameters = {key: jnp.asarray(to_stored(GOLDEN[f"muon_{name}_first"]), jnp.float32) for key in specs}
    state = optimizer.init(parameters)
    for gradient in GOLDEN[f"muon_{name}_gradients"]:
        gradients = {key: jnp.asarray(to_stored(gradient), jnp.float32) for key in specs}
        updates, state = optimizer.update(gradients, state, parameters)
        parameters = optax.apply_updates(parameters, updates)
    return jax.device_get(parameters)


@pytest.mark.parametrize("name", mark_slow_except(["tall", "wide"], ["tall"]))
def test_two_steps_equal_those_of_nanochat(name):
    rows, columns = GOLDEN[f"muon_{name}_last"].shape
    as_torch = {"w": Parameter(("mlp", "embed"), (rows, columns), (None, None), output_first=True)}
    last = parameters_after_two_steps(name, as_torch, lambda m: m)["w"]
    np.testing.assert_allclose(last, GOLDEN[f"muon_{name}_last"], rtol=2e-5, atol=2e-6)
    inputs_first = {"w": Parameter(("embed", "mlp"), (columns, rows), (None, None))}
    np.testing.assert_allclose(
        parameters_after_two_steps(name, inputs_first, np.transpose)["w"], last.T, rtol=1e-5, atol=1e-6
    )


def test_every_layer_and_head_is_a_separate_matrix():
    last = GOLDEN["muon_tall_last"]
    heads = Parameter(("layers", "embed", "heads", "head_dim"), (3, 8, 4, 3), (None,) * 4)
    specs = {"heads": heads}
    stacked = parameters_after_two_steps("tall", specs, lambda m: np.stack([m.T.reshape(8, 4, 3)] * 3))["heads"]
    np.testing.assert_allclose(stacked, np.stack([last.T.reshape(8, 4, 3)] * 3), rtol=2e-5, atol=2e-6)


def test_matrices_of_experts_stay_on_the_devices_of_their_experts():
    run = small_run("moe_tiny", "mesh=2x2x2", "partition=fsdp_ep")
    shard, specs = make_program(run).shard, run.model.parameters()
    names = [f"segment_0.block_0.feed_forward.{name}" for name in ("up", "gate")]
    experts = {name: specs[name] for name in names}
    values = {name: jax.random.normal(jax.random.key(i), experts[name].shape) for i, name in enumerate(names)}

    def update(values, sharding):
        optimizer = muon(PUBLISHED, experts, sharding)
        state = optimizer.init(values)
        for _ in range(2):
            updates, state = optimizer.update(values, state, values)
        return updates

    axes = {name: shard.layout.stored_axes(spec.axes) for name, spec in experts.items()}
    shardings = {name: shard.sharding(entry) for name, entry in axes.items()}
    split = jax.jit(lambda values: update(values, matrix_stack_sharding(shard)), in_shardings=(shardings,))
    compiled = split.lower(values).compile()
    module = parse_module(compiled.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto())
    reader = CollectiveReader(module, dict(run.layout.mesh.axes), [0] * 8)
    instructions = [i for i in module.instructions.values() if collective_kind(i.opcode)]
    assert {axis for i in instructions for axis in reader.read(i).mesh_axes} == {"x", "y"}
    expected = jax.jit(lambda values: update(values, None))(values)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), compiled(values), expected)


def test_orthogonalised_matrices_have_equal_singular_values():
    stack = jnp.asarray(np.random.default_rng(0).standard_normal((2, 16, 6)), jnp.float32)
    values = np.linalg.svd(orthogonalize(stack, output_first=True), compute_uv=False)
    np.testing.assert_allclose(values, 1, atol=0.2)
    np.testing.assert_allclose(np.square(values).sum(-1), 6, rtol=1e-4)


def test_weights_are_decayed_only_if_the_step_shrinks_them():
    spec = {"w": Parameter(("a", "b"), (2, 2), (None, None))}
    value = {"w": jnp.asarray([[3.0, 0.0], [0.0, -3.0]])}
    gradient = {"w": jnp.asarray([[1.0, 0.0], [0.0, 1.0]])}
    plain = muon(PUBLISHED._replace(decay=lambda _: 0.0), spec)
    decayed = muon(PUBLISHED, spec)
    moved = [np.asarray(o.update(gradient, o.init(value), value)[0]["w"]) for o in (plain, decayed)]
    np.testing.assert_allclose(moved[1] - moved[0], [[-0.02 * 0.1 * 3.0, 0], [0, 0]], atol=1e-7)


def test_the_schedule_is_constant_and_then_falls_linearly():
    config = Config(learning_rate=0.02, warmup_steps=4, final_ratio=0.05, schedule=Schedule.trapezoid, warmdown=0.5)
    rates = [float(learning_rate_schedule(config, 20)(step)) for step in range(21)]
    np.testing.assert_allclose(rates[:4], 0.02 * np.array([0.25, 0.5, 0.75, 1]), rtol=1e-6)
    np.testing.assert_allclose(rates[4:11], 0.02, rtol=1e-6)
    np.testing.assert_allclose(rates[20], 0.001, rtol=1e-5)
    np.testing.assert_allclose(np.diff(rates[10:]), -0.0019, rtol=1e-4)


@pytest.mark.slow
def test_every_group_has_its_own_rate():
    group_by_name = {"w": "matrix", "bias": "matrix", "table": "embedding", "scale": "input_scale"}
    shapes = {"w": (4, 4), "bias": (4,), "table": (4, 4), "scale": ()}
    specs = {
        n: Parameter(("embed",) * len(shapes[n]), shapes[n], (None,) * len(shapes[n]), g)
        for n, g in group_by_name.items()
    }
    groups = Config().groups | {
        "vector": AdamGroup(0.07),
        "embedding": AdamGroup(0.03),
        "input_scale": AdamGroup(0.5),
    }
    config = Config(
        learning_rate=0.02,
        warmup_steps=0,
        schedule=Schedule.trapezoid,
        clip_norm=None,
        groups=groups,
    )
    values = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    optimizer = make_optimizer(config, specs, Training(10))
    gradient = {name: jnp.ones(shape) for name, shape in shapes.items()} | {"w": jnp.eye(4)}
    updates = optimizer.update(gradient, optimizer.init(values), values)[0]
    for name, rate in {"bias": 0.07, "table": 0.03, "scale": 0.5}.items():
        np.testing.assert_allclose(updates[name], -rate, rtol=1e-4, err_msg=name)
    np.testing.assert_allclose(updates["w"], -0.02 * np.eye(4), atol=1e-6)


def test_the_estimate_counts_the_state_and_products_of_muon():
    """A matrix in 3 layers over 2 devices: one device orthogonalises 2 whole matrices, with 5 iterations each."""
    config, devices = Config(), np.array([1.0, 2.0])
    matrix = Parameter(("layers", "embed", "mlp"), (3, 8, 32), (None,) * 3)
    table = Parameter(("vocab", "embed"), (64, 8), (None,) * 2, group="embedding")
    assert [config.state_bytes(p) for p in (matrix, table)] == [4, 8]
    assert [config.update_bytes(p) for p in (matrix, table)] == [20, 28]
    iteration = 2 * 8 * 32 * 8 + 2 * 8**3 + 2 * 8 * 8 * 32
    assert list(config.update_flops([matrix, table], devices)) == [3 * 5 * iteration, 2 * 5 * iteration]


def test_the_estimated_memory_equals_that_of_the_arrays():
    arguments = ("mesh=2x2x2", "partition=fsdp", "optimizer=muon", "optimizer.beta2=null", "target=v5e-8")
    run = small_run("nanochat_tiny", *arguments)
    (estimate,) = MemoryEstimator(run, to_candidates([run])).estimate(run.config.remat).optimizer
    state = expected_memory(run, StepProgram(run, abstract_mesh(run.config.mesh)).abstract_state)
    assert math.isclose(estimate, state.optimizer, rel_tol=1e-2)


@pytest.mark.parametrize("schedule", Schedule)
def test_momentum_follows_nanochat_under_either_schedule(schedule: Schedule):
    """The numbers are those of `get_muon_momentum` in nanochat's `base_train.py` for 2,000 steps."""
    momentum = momentum_schedule(Config(schedule=schedule), 2000)
    expected = {0: 0.85, 200: 0.91, 400: 0.97, 700: 0.97, 1350: 0.935, 2000: 0.90}
    np.testing.assert_allclose([momentum(step) for step in expected], list(expected.values()), rtol=1e-6)


def test_settings_saved_before_optimizers_had_families_are_read():
    values = {"name": "muon", "kind": "muon", "learning_rate": 0.02, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-10}
    values |= {"ssm_learning_rate_ratio": 0.5, "muon": {"beta2": 0.9, "momentum": 0.95}}
    expected = {"name": "muon", "family": "muon", "learning_rate": 0.02, "epsilon": 1e-10}
    assert convert_old_settings(values) == expected | {"beta2": 0.9, "momentum": 0.95}
    adamw = {"name": "adamw", "kind": "adamw", "beta2": 0.95, "muon": None}
    assert convert_old_settings(adamw) == {"name": "adamw", "family": "adamw", "beta2": 0.95}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "partition"), [(m, p) for m in MODELS_WITH_UNIQUE_LAYERS for p in PARTITIONS if is_supported(m, p)]
)
def test_muon_takes_the_same_steps_on_eight_devices_as_on_one(model, partition):
    overrides = ("optimizer=muon", "optimizer.warmup_steps=2", "optimizer.learning_rate=1e-3")
    state = randomize_zero_parameters(initial_state((*small_overrides(model), *overrides)))
    alone = run_two_steps(small_run(model, *overrides), state)
    sharded = run_two_steps(small_run(model, *overrides, "mesh=2x2x2", f"partition={partition}"), state)
    assert_same_steps(sharded, alone, rtol=1e-4)


def test_momentum_is_sharded_like_its_parameter():
    program = make_program(small_run("nanochat_tiny", "mesh=2x2x2", "partition=fsdp", "optimizer=muon"))
    parameters = {str(p): x for p, x in jax.tree_util.tree_leaves_with_path(program.abstract_state.parameters)}
    momentum = [
        (str(p), x)
        for p, x in jax.tree_util.tree_leaves_with_path(program.abstract_state.optimizer)
        if "momentum" in str(p)
    ]
    assert momentum
    for path, x in momentum:
        (parameter,) = (p for name, p in parameters.items() if path.endswith(name[1:]))
        assert x.shape == parameter.shape and x.sharding == parameter.sharding, path


@pytest.mark.parametrize("override", ["optimizer.momentum=1", "optimizer.momentum_warmup=0", "optimizer.warmdown=0"])
def test_invalid_muon_settings_are_refused(override):
    run = Run.from_config(compose_config("optimizer=muon", "mesh=1x1x1", "partition=dp", override))
    assert override.partition("=")[0] in {problem.key for problem in run.problems()}


def test_an_unknown_parameter_group_is_refused():
    config = Config(groups=Config().groups | {"heads": AdamGroup()})
    assert [(p.code, p.key) for p in config.problems()] == [(ProblemCode.unknown_name, "optimizer.groups.heads")]


def test_learning_rates_scale_with_the_width():
    run = Run.from_config(compose_config("optimizer=muon", "model=nanochat", "model.depth=16"))
    assert isinstance(run.config.optimizer, Config)
    assert math.isclose(run.config.optimizer.groups["embedding"].learning_rate, 0.3 * (768 / 1024) ** 0.5)
