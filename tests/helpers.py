"""Small runs on simulated devices: composing them, making batches, and running steps."""

from __future__ import annotations

import copy
import os
import re
import shlex
from collections.abc import Collection, Iterable, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from valkyrie.axes import Arrays, Parameter
from valkyrie.config.arguments import parse_run
from valkyrie.config.compose import register
from valkyrie.config.run import Run
from valkyrie.models.builder import ModelBuilder
from valkyrie.ops.linear import Numerics
from valkyrie.parallel.mesh import build_mesh
from valkyrie.parallel.partition import PartitionConfig
from valkyrie.paths import conf_dir, read_config
from valkyrie.train.program import StepProgram
from valkyrie.train.state import TrainState, init_state
from valkyrie.trees import leaf_names

SMALL_SETTINGS: dict[str, Any] = {
    "model.vocab_size": 61,
    "model.vocab_multiple": 64,
    "model.embed": 32,
    "model.mlp": 64,
    "model.loss_chunk": 16,
    "model.s5.state_size": 32,
    "model.s5.blocks": 4,
    "model.moe.mlp": 32,
    "model.attention.heads": 4,
    "model.attention.kv_heads": 2,
    "model.attention.head_dim": 8,
}
"""Settings that shrink a tiny model, so that running it takes little time compared with compiling it.

Settings that a model family lacks are skipped. The number of layers stays, to keep every scan over repeated blocks.
"""


SMALL_LEARNING_RATE = ("optimizer.warmup_steps=2", "optimizer.learning_rate=1e-3")
"""Settings with a small learning rate.

Adam's first update has the size of the learning rate even if a gradient is only a rounding error. With a large rate,
second steps would differ between layouts.
"""


def config_names(group: str, pattern: str = "*") -> list[str]:
    """Return the choices of a config group, from its files, so that tests cover new files without a change."""
    return sorted(path.stem for path in (conf_dir() / group).glob(f"{pattern}.yaml"))


def vector_specs(groups: dict[str, str]) -> dict[str, Parameter]:
    """Return specs of parameters of shape (2,). `groups` maps the name of each parameter to its optimizer group."""
    return {name: Parameter((None,), (2,), (None,), group) for name, group in groups.items()}


MODELS = config_names("model", "*_tiny")
LANGUAGE_MODELS = [model for model in MODELS if not model.startswith("trm_")]
"""Tiny models that predict tokens. The other tiny models solve puzzles."""
MODELS_WITH_UNIQUE_LAYERS = [
    model for model in MODELS if model not in ("s5_tiny", "longformer_tiny", "gpt_oss_tiny", "llama4_tiny")
]
"""Tiny models without those whose layers `valkyrie_tiny` has (`s5_tiny`, `longformer_tiny`), or `moe_tiny` except for
attention, which other tests cover (`gpt_oss_tiny`, `llama4_tiny`)."""
PARTITIONS = config_names("partition")
PIPELINE_PARTITIONS = [
    name for name in PARTITIONS if "layers" in read_config("partition", name, PartitionConfig).parameters
]
"""Pipeline partitions: layers are sharded over a mesh axis. They need a model with stacked layers."""


def assert_golden_message(file: str, arguments: Sequence[str], message: str) -> None:
    """Compare the message for a command's arguments with its entry in `goldens/messages/FILE.txt`.

    `UPDATE_GOLDENS=1 pytest -n 0` writes the entry.
    """
    path = Path(__file__).parent / "goldens" / "messages" / f"{file}.txt"
    text = path.read_text() if path.exists() else ""
    entries = dict(entry.split("\n", 1) for entry in re.split(r"(?:^|\n)\$ ", text)[1:])
    line = shlex.join(arguments).replace("\n", "\\n")
    message = message.rstrip("\n") + "\n"
    if os.environ.get("UPDATE_GOLDENS"):
        entries[line] = message
        path.write_text("\n".join(f"$ {line}\n{text}" for line, text in entries.items()))
    assert entries.get(line) == message


def is_supported(model: str, partition: str) -> bool:
    """Return whether a partition supports a model. Pipelines support only language models with repeated layers.

    The four layers of llama4_tiny differ, so that two stages need eight of them.
    """
    return model in LANGUAGE_MODELS and model != "llama4_tiny" or partition not in PIPELINE_PARTITIONS


def mark_slow_except(cases: Iterable[Any], quick_cases: Collection[Any]) -> list[Any]:
    """Mark all cases of a parametrised test as slow except `quick_cases`."""
    return [pytest.param(case, marks=[] if case in quick_cases else pytest.mark.slow) for case in cases]


def compose_config(*overrides: str) -> DictConfig:
    """Return the composed config of `valkyrie-train` with these overrides."""
    with initialize_config_dir(str(register()), version_base="1.3"):
        return compose("train", list(overrides))


def compose_run(*overrides: str) -> Run:
    """Return the run that these overrides compose. Fails if the run is illegal.

    Returns a copy of a cached run, because composing takes 0.2 s.
    """
    variables = ("JAX_PLATFORMS", "TPU_MESH_CONFIG", "TPU_AXIS_NAMES", "VALKYRIE_CACHE", "HOME")
    return copy.deepcopy(_legal_run(overrides, tuple(map(os.environ.get, variables))))


@cache
def _legal_run(overrides: tuple[str, ...], environment: tuple[str | None, ...]) -> Run:
    run = Run.from_config(compose_config(*overrides))
    assert not run.problems(), run.problems()
    return run


@cache
def shared_run(*arguments: str) -> Run:
    """Return the run of a command's arguments. It may be illegal. It is cached and must not be modified."""
    return parse_run(arguments)


@lru_cache
def small_overrides(model: str) -> tuple[str, ...]:
    """Return overrides that select a model, shrink it, its batch and its sequences, and set a small learning rate."""
    config = compose_config(f"model={model}")
    overrides = [f"{key}={value}" for key, value in SMALL_SETTINGS.items() if OmegaConf.select(config, key) is not None]
    windows = OmegaConf.select(config, "model.attention.windows")
    if windows:
        overrides.append(f"model.attention.windows={[w and max(w // 8, 2) for w in windows]}".replace("None", "null"))
    if OmegaConf.select(config, "model.attention.value_embeddings"):  # tables as wide as the stream split like it
        overrides.append("model.attention.kv_heads=4")
    return (f"model={model}", *overrides, "batch=8", "seq=48", *SMALL_LEARNING_RATE)


def small_run(model: str, *overrides: str) -> Run:
    """Return the run of a shrunken model with further overrides, by default on one device."""
    return compose_run(*small_overrides(model), "mesh=1x1x1", "partition=dp", *overrides)


@cache
def arrays_of(model: str) -> Arrays:
    """Return the arrays of a model, which are the same under every layout."""
    return compose_run("mesh=1x1x1", "partition=dp", f"model={model}").arrays


def make_batch(run: Run, seed: int = 0) -> dict[str, np.ndarray]:
    """Return a random global batch as a dict of arrays.

    A batch of text has `tokens`, `targets`, `segment_ids` and `weights` of shape (batch, seq). A row has several
    documents, and weights of 0, 0.5 or 1 with a different sum in each row. Other tasks provide their own random
    batches.
    """
    c, rng, task = run.config, np.random.default_rng(seed), run.task
    if not task.is_text:
        return task.random_batch(c.batch, c.seq, run.model.vocab_size, seed, range(c.batch))
    tokens = rng.integers(0, run.model.vocab_size, (c.batch, c.seq + 1)).astype(np.int32)
    document_starts = rng.random((c.batch, c.seq)) < 0.1
    weights = rng.choice([0.0, 0.5, 1.0], (c.batch, c.seq), p=[0.2, 0.2, 0.6])
    weights[0, 5:] = 0
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segment_ids": np.cumsum(document_starts, axis=1).astype(np.int32) + 1,
        "weights": weights.astype(np.float32),
    }


def make_program(run: Run) -> StepProgram:
    """Return the step program of a run on the first available devices."""
    return StepProgram(run, build_mesh(run.config.mesh, jax.devices()))


class StepResults(NamedTuple):
    """Results of consecutive steps: the metrics of each step, copied to the host, and the state after the last step."""

    metrics: list[dict[str, np.ndarray]]
    state: TrainState


def run_steps(program: StepProgram, count: int = 2, state: TrainState | None = None) -> StepResults:
    """Run `count` steps, each on a different batch, from `state` or from the initial state with seed 0."""
    state = program.init(0) if state is None else state
    metrics = []
    for i in range(count):
        state, step_metrics = program.step(state, program.place(make_batch(program.run, seed=i)))
        metrics.append(jax.device_get(step_metrics))
    return StepResults(metrics, state)


def leaves_by_name(tree: Any) -> dict[str, Any]:
    """Return the leaves of a nested dict by dotted name."""
    return dict(zip(leaf_names(tree), jax.tree.leaves(tree), strict=True))


def make_builder(run: Run) -> ModelBuilder:
    """Return the `ModelBuilder` of a run's model, which allocates no arrays."""
    return ModelBuilder(run.model, Numerics.from_policy(run.config.precision))


def count_learned_parameters(builder: ModelBuilder) -> int:
    """Count the learned parameters of a model, without fixed arrays and puzzle embeddings."""
    leaves = zip(jax.tree.leaves(builder.abstract_parameters), builder.specs.values(), strict=True)
    return sum(leaf.size for leaf, spec in leaves if spec.group not in ("puzzle", "fixed"))


@lru_cache
def initial_state(overrides: tuple[str, ...]) -> TrainState:
    """Return the initial state of a single-device run, as NumPy arrays.

    Not jitted, because compiling the initialisation takes longer than running it. Another test compares the compiled
    initialisation with this one.
    """
    program = make_program(compose_run(*overrides, "mesh=1x1x1", "partition=dp"))
    keep_ema = program.run.config.optimizer.ema_decay is not None
    return jax.device_get(init_state(program.builder, program.optimizer, keep_ema, 0, program.carry))


def randomize_zero_parameters(host_state: TrainState) -> TrainState:
    """Replace parameters that are all zero by small random numbers. With zeros, some gradients are rounding errors."""
    rng = np.random.default_rng(0)
    parameters = jax.tree.map(
        lambda p: p if np.any(p) else (0.1 * rng.standard_normal(p.shape)).astype(p.dtype), host_state.parameters
    )
    return host_state._replace(parameters=parameters)


def place_state(program: StepProgram, host_state: TrainState) -> TrainState:
    """Return a state from the host, placed on the devices of a program."""
    return jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), host_state, program.abstract_state)


def run_two_steps(run: Run, host_state: TrainState) -> StepResults:
    """Run two steps from a state on the host, each on a different batch."""
    program = make_program(run)
    return run_steps(program, 2, place_state(program, host_state))


@lru_cache
def reference_steps(model: str, *overrides: str) -> StepResults:
    """Return the results of two steps of a shrunken model on one device. Tests compare every layout with them."""
    return run_two_steps(
        small_run(model, *overrides), randomize_zero_parameters(initial_state((*small_overrides(model), *overrides)))
    )


def assert_same_steps(steps: StepResults, expected: StepResults, rtol: float = 2e-5) -> None:
    """Compare the loss, token count, gradient norm and gradient norms by parameter of each step.

    The absolute tolerance is for key biases without rotary embedding. Their gradient is zero except for rounding errors
    of about 1e-9 of the gradient norm.
    """
    for step, (metrics, expected_metrics) in enumerate(zip(steps.metrics, expected.metrics, strict=True)):
        for key in ("loss", "grad_norm", "tokens"):
            np.testing.assert_allclose(metrics[key], expected_metrics[key], rtol=rtol, err_msg=f"{key} of step {step}")
        norms = np.sqrt(metrics["squared_grad_norms"]), np.sqrt(expected_metrics["squared_grad_norms"])
        np.testing.assert_allclose(*norms, rtol=rtol, atol=1e-8, err_msg=f"gradient norms by parameter, step {step}")
