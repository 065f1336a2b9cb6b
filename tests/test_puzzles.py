"""Tests of the Tiny Recursive Model and its task against the published reference, and of resuming its training."""

from __future__ import annotations

from contextlib import closing
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import compose_run, leaves_by_name, make_program, mark_slow_except, vector_specs
from valkyrie.axes import UNSHARDED
from valkyrie.checkpoint import CheckpointConfig, Checkpoints
from valkyrie.config.run import Run
from valkyrie.data.batches import Loader
from valkyrie.data.sources.puzzles.folder import PreparedPuzzles
from valkyrie.ops.stablemax import log_stablemax, stablemax_cross_entropy
from valkyrie.optim import Training, make_optimizer
from valkyrie.tasks.puzzles import _halting_mask
from valkyrie.train.program import StepProgram
from valkyrie.train.saving import checkpoint_info

GOLDEN = Path(__file__).parent / "goldens" / "trm.npz"
REFERENCE = ("model.context=9", "model.vocab_size=7", "model.embed=8", "model.heads=2", "model.head_dim=4")
REFERENCE += ("model.mlp=256", "model.length_mlp=256", "model.puzzles=4", "model.puzzle_embed=12", "batch=5")
REFERENCE += ("model.puzzle_tokens=3", "model.high_cycles=3", "model.low_cycles=6", "model.exploration=0", "mesh=1x1x1")
REFERENCE += ("partition=dp", "precision=float32", "model=trm_tiny")
VARIANTS = {"attention": ("model.layers=2",), "mlp": ("model.layers=1", "model.mixer=mlp")}
CONSTANT_RATE = ("optimizer.warmup_steps=0", "optimizer.final_ratio=1", "optimizer.clip_norm=null")
TINY = ("model=trm_tiny", "model.embed=32", "model.mlp=32", "model.layers=1", "model.heads=2", "batch=8", "seq=16")
TINY += ("optimizer=adam_atan2", "optimizer.warmup_steps=0", "optimizer.learning_rate=1e-2")


@lru_cache
def golden(variant: str) -> dict[str, np.ndarray]:
    """Return the reference's weights, batches and outputs for a variant (`attention` or `mlp`), by name."""
    with np.load(GOLDEN) as archive:
        return {name.removeprefix(f"{variant}."): archive[name] for name in archive if name.startswith(f"{variant}.")}


def convert_weights(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the reference's weights with our names and shapes: inputs first, and fused projections split."""
    table = {name.removeprefix("weights."): value.astype(np.float32) for name, value in weights.items()}
    heads = (2, 4)
    renamed = {"embedding": table["embed_tokens.embedding_weight"], "head": table["lm_head.weight"]}
    renamed |= {"halt.weight": table["q_head.weight"], "halt.bias": table["q_head.bias"]}
    renamed |= {"initial_high": table["H_init"], "initial_low": table["L_init"]}
    renamed |= {"puzzle_embedding": table["puzzle_emb.weights"]}
    for name, value in table.items():
        layer_prefix = f"layer_{name.split('.')[2]}." if name.startswith("L_level") else ""
        length_prefix = "length_" if ".mlp_t." in name else ""
        if "gate_up" in name:
            gate, up = np.split(value, 2)
            renamed |= {f"{layer_prefix}{length_prefix}gate": gate.T, f"{layer_prefix}{length_prefix}up": up.T}
        elif "down" in name:
            renamed[f"{layer_prefix}{length_prefix}down"] = value
        elif "qkv" in name:
            parts = zip(("query", "key", "value"), np.split(value, 3), strict=True)
            renamed |= {f"{layer_prefix}{part}": w.T.reshape(-1, *heads) for part, w in parts}
        elif "o_proj" in name:
            renamed[f"{layer_prefix}out"] = value.reshape(-1, *heads)
    return renamed


def reference_run(variant: str, *overrides: str) -> Run:
    """Return a run with a model of the reference's shape for a variant, and further overrides."""
    return compose_run(*REFERENCE, *VARIANTS[variant], *CONSTANT_RATE, *overrides)


def batch_of(reference: dict[str, np.ndarray], step: int) -> dict[str, np.ndarray]:
    """Return the reference's batch for a step."""
    names = {"inputs": "inputs", "labels": "labels", "puzzles": "puzzle_identifiers"}
    return {name: reference[f"step_{step}.batch.{theirs}"].astype(np.int32) for name, theirs in names.items()}


@pytest.mark.parametrize("variant", mark_slow_except(VARIANTS, ["mlp"]))
def test_two_steps_equal_those_of_the_reference(variant: str):
    reference, run = golden(variant), reference_run(variant)
    program = make_program(run)
    weights = convert_weights({name: value for name, value in reference.items() if name.startswith("weights.")})
    leaves = [jnp.asarray(weights[name]) for name in program.parameter_names]
    parameters = jax.tree.unflatten(jax.tree.structure(program.abstract_state.parameters), leaves)
    carry = program.init(0).carry

    @jax.jit
    def step(carry: Any, batch: Any) -> Any:
        def loss(parameters: Any) -> Any:
            module, key = program.builder.module(parameters), jax.random.key(0)
            out = program.task.loss(module, batch, carry, shard=UNSHARDED, checkpoint=lambda f: f, key=key)
            return out.objective, out

        return jax.grad(lambda p: loss(p), has_aux=True)(parameters)

    for number in (1, 2):
        gradients, out = step(carry, batch_of(reference, number))
        expected = {name.removeprefix(f"step_{number}."): value for name, value in reference.items()}
        carry = out.carry
        tolerances = {"rtol": 2e-5, "atol": 2e-5}
        np.testing.assert_allclose(out.objective, expected["loss"], rtol=2e-6)
        np.testing.assert_allclose(out.sums["answer_loss"], expected["lm_loss"], rtol=2e-6)
        np.testing.assert_allclose(carry["high"], expected["z_H"], **tolerances)
        np.testing.assert_allclose(carry["low"], expected["z_L"], **tolerances)
        np.testing.assert_array_equal(carry["steps"], expected["steps"])
        np.testing.assert_array_equal(~carry["running"], expected["halted"])
        our_norms = {name: np.linalg.norm(g) / 5 for name, g in leaves_by_name(gradients).items()}
        assert our_norms["initial_high"] == our_norms["initial_low"] == 0
        for name, norm in norms_of(expected).items():
            total = np.sqrt(sum(our_norms[part] ** 2 for part in converted_names(name)))
            np.testing.assert_allclose(total, norm, rtol=5e-5, err_msg=name)
        rows = updated(gradients["puzzle_embedding"], parameters["puzzle_embedding"])
        np.testing.assert_allclose(rows, expected["table_after"], rtol=1e-6)


@pytest.mark.slow
def test_puzzles_without_labels_do_not_change_means():
    program = make_program(reference_run("mlp"))
    task, state, batch = program.task, program.init(0), batch_of(golden("mlp"), 1)
    unlabelled = batch | {"labels": np.concatenate([batch["labels"][:4], np.full_like(batch["labels"][4:], -1)])}

    def means(batch: dict[str, np.ndarray]) -> tuple[dict[str, Any], Any]:
        carry = jax.tree.map(lambda x: x[: len(batch["labels"])], state.carry)

        def loss(parameters: Any) -> Any:
            module, key = program.builder.module(parameters), jax.random.key(0)
            out = task.loss(module, batch, carry, shard=UNSHARDED, checkpoint=lambda f: f, key=key)
            return out.objective / out.sums["weight"], task.metrics(out.sums)

        gradients, metrics = jax.jit(jax.grad(loss, has_aux=True))(state.parameters)
        return {name: metrics[name] for name in ("loss", "answer_loss", "exact_accuracy", "cell_accuracy")}, gradients

    labelled_only = means({name: x[:4] for name, x in batch.items()})
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), labelled_only, means(unlabelled))


def norms_of(expected: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name.removeprefix("gradient."): n for name, n in expected.items() if name.startswith("gradient.")}


def converted_names(name: str) -> list[str]:
    """Return the names of our parameters that come from a parameter of the reference."""
    shapes = {"weight": np.zeros((24, 8)), "bias": np.zeros(2)}
    blank = {n: np.zeros(1) for n in ("H_init", "L_init", "puzzle_emb.weights", "embed_tokens.embedding_weight")}
    blank |= {n: np.zeros(1) for n in ("lm_head.weight", "q_head.weight", "q_head.bias")}
    before = set(convert_weights(blank))
    special = {"embed_tokens.embedding_weight": "embedding", "lm_head.weight": "head", "q_head.weight": "halt.weight"}
    special |= {"q_head.bias": "halt.bias"}
    if name in special:
        return [special[name]]
    return sorted(set(convert_weights(blank | {name: shapes["weight"]})) - before)


def updated(gradient: Any, table: Any) -> Any:
    """Return a table after one step of sign descent with the golden's settings: rate 0.01, decay 0.5."""
    run = compose_run("model=trm_tiny", *CONSTANT_RATE, "optimizer.learning_rate=0.01", "optimizer.weight_decay=0.5")
    optimizer = make_optimizer(run.config.optimizer, vector_specs({"table": "puzzle"}), Training(10))
    updates, _ = optimizer.update({"table": gradient}, optimizer.init({"table": table}), {"table": table})
    return table + updates["table"]


def stablemax_nats(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the loss of each token by the reference's formula, in float64."""
    x = logits.astype(np.float64)
    s = np.where(x < 0, 1 / (1 - x + 1e-30), x + 1)
    return -np.log(np.take_along_axis(s / s.sum(-1, keepdims=True), labels[:, None], axis=1))[:, 0]


def test_the_float32_loss_equals_that_of_float64():
    rng = np.random.default_rng(0)
    scales = 10.0 ** rng.uniform(-6, 6, (4000, 1))  # logits of every size, and differences of every size
    logits = (rng.standard_normal((4000, 11)) * scales).astype(np.float32)
    labels = rng.integers(0, 11, 4000)
    losses = stablemax_cross_entropy(jnp.asarray(logits), jnp.asarray(labels))
    np.testing.assert_allclose(losses, stablemax_nats(logits, labels), rtol=2e-6, atol=2e-7)
    assert np.abs(np.exp(log_stablemax(jnp.asarray(logits))).sum(-1) - 1).max() < 2e-5
    gradient = jax.grad(lambda x: stablemax_cross_entropy(x, jnp.asarray(labels)).sum())(jnp.asarray(logits))
    x, rows = logits.astype(np.float64), np.arange(4000)
    s, slope = np.where(x < 0, 1 / (1 - x), x + 1), np.where(x < 0, 1 / (1 - x) ** 2, 1.0)
    expected = slope / s.sum(-1, keepdims=True)
    expected[rows, labels] -= slope[rows, labels] / s[rows, labels]
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-6)
    assert stablemax_cross_entropy(jnp.asarray(logits[:1]), jnp.asarray([-100])) == 0


def test_adam_atan2_equals_a_calculation_by_hand():
    run = compose_run("model=trm_tiny", "optimizer=adam_atan2", *CONSTANT_RATE, "optimizer.learning_rate=0.1")
    specs = vector_specs({"w": "matrix", "v": "vector", "start": "fixed"})
    optimizer = make_optimizer(run.config.optimizer, specs, Training(10))
    rng = np.random.default_rng(0)
    w = {name: rng.standard_normal(3).astype(np.float32) for name in ("start", "v", "w")}
    state, expected, m, v = optimizer.init(w), {k: x.astype(np.float64) for k, x in w.items()}, 0.0, 0.0
    for t in (1, 2, 3):
        g = rng.standard_normal(3).astype(np.float32) * 10.0 ** np.array([-6, 0, 6], np.float32)
        updates, state = optimizer.update(dict.fromkeys(w, g), state, w)
        w = {name: w[name] + updates[name] for name in w}
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g.astype(np.float64) ** 2
        step = 0.1 / (1 - 0.9**t) * np.arctan2(m, np.sqrt(v) / np.sqrt(1 - 0.95**t))
        expected = {"start": expected["start"], "v": expected["v"] - step, "w": expected["w"] * (1 - 0.1 * 1.0) - step}
        for name, value in expected.items():
            np.testing.assert_allclose(w[name], value, rtol=2e-5, atol=2e-6, err_msg=name)


def test_rows_halt_by_step_limit_or_by_the_model_and_later_when_exploring():
    config = compose_run("model=trm_tiny", "model.exploration=0").model
    halt = jnp.asarray([5.0, -5.0, -5.0, 5.0])
    steps = jnp.asarray([1, 1, 16, 16])
    assert _halting_mask(config, halt, steps, jax.random.key(0)).tolist() == [True, False, True, True]
    explorer = compose_run("model=trm_tiny", "model.exploration=1").model
    ended = [
        float(_halting_mask(explorer, jnp.full(4000, 5.0), jnp.full(4000, n), jax.random.key(1)).mean())
        for n in (1, 2, 9, 16)
    ]
    np.testing.assert_allclose(ended, [0, 1 / 15, 8 / 15, 1], atol=0.03)


@pytest.fixture(scope="module")
def puzzles(tmp_path_factory: pytest.TempPathFactory) -> PreparedPuzzles:
    """40 training and 12 validation puzzles of size 4x4."""
    keys = ("data.sudoku.train=40", "data.sudoku.validation=12", f"data.cache_dir={tmp_path_factory.mktemp('cache')}")
    return compose_run("model=trm_tiny", "data=sudoku_4x4", *keys).config.data.open("none")


def take_steps(program: StepProgram, loader: Loader, state: Any, count: int) -> tuple[Any, list[dict[str, Any]]]:
    """Return the state after `count` steps, and the metrics of each."""
    metrics = []
    for _ in range(count):
        state, step_metrics = program.step(state, program.place(next(loader)))
        metrics.append(jax.device_get(step_metrics))
    return state, metrics


@pytest.mark.parametrize("mesh", ["1x1x1", pytest.param("2x2x1", marks=pytest.mark.slow)])
def test_a_training_resumes_in_the_middle_of_its_puzzles(puzzles: PreparedPuzzles, mesh: str, tmp_path: Path):
    settings = (*TINY, "model.max_steps=3", "model.exploration=0.5", "model.high_cycles=1", "model.low_cycles=1")
    program = make_program(compose_run(*settings, "mesh=1x1x1", "partition=dp"))
    assert checkpoint_info(program).tokenizer == {"name": "none", "fingerprint": "none"}
    with program.loader(puzzles, "train") as loader, closing(Checkpoints(tmp_path, CheckpointConfig())) as checkpoints:
        state, _ = take_steps(program, loader, program.init(0), 2)
        assert checkpoints.save(2, state, loader.state()) is None
        assert checkpoints.wait() is None
        assert state.carry["running"].all(), "no puzzle is done"
        table = state.parameters["puzzle_embedding"]
        np.testing.assert_array_equal(state.ema["puzzle_embedding"], table)
        assert np.any(table != 0) and np.any(state.ema["head"] != state.parameters["head"])
        np.testing.assert_array_equal(program.init(0).parameters["initial_low"], state.parameters["initial_low"])
        after, metrics = take_steps(program, loader, state, 3)
        assert metrics[0]["halting_steps"] == 3.0
    resumed_program = (
        program if mesh == "1x1x1" else make_program(compose_run(*settings, f"mesh={mesh}", "partition=dp"))
    )
    with (
        resumed_program.loader(puzzles, "train") as loader,
        closing(Checkpoints(tmp_path, CheckpointConfig())) as checkpoints,
    ):
        restored = checkpoints.restore(resumed_program.abstract_state)
        loader.restore(restored.data)
        again, resumed_metrics = take_steps(resumed_program, loader, restored.state, 3)
    if mesh == "1x1x1":
        jax.tree.map(np.testing.assert_array_equal, after, again)
    for mine, theirs in zip(metrics, resumed_metrics, strict=True):
        np.testing.assert_allclose(mine["loss"], theirs["loss"], rtol=2e-5)
        assert mine["halting_steps"] == theirs["halting_steps"]
