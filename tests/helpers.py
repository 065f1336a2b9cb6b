"""Composes small runs in-process, makes batches for them, and drives their step program on simulated devices."""

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

from valkyrie.axes import Parameter
from valkyrie.config.arguments import parse_run
from valkyrie.config.compose import register
from valkyrie.config.run import Run
from valkyrie.models.assembly import Assembly
from valkyrie.ops.linear import Numerics
from valkyrie.optim import NOT_AVERAGED
from valkyrie.parallel.mesh import build_mesh
from valkyrie.parallel.partition import PartitionConfig
from valkyrie.paths import conf_dir, read_config
from valkyrie.train.program import StepProgram
from valkyrie.train.state import TrainState, init_state
from valkyrie.trees import leaf_names

SMALL: dict[str, Any] = {
    "model.vocab_size": 61,
    "model.vocab_multiple": 64,
    "model.embed": 32,
    "model.mlp": 64,
    "model.loss_chunk": 16,
    "model.s5.state_size": 32,
    "model.s5.blocks": 4,
    "model.attention.heads": 4,
    "model.attention.kv_heads": 2,
    "model.attention.head_dim": 8,
}
"""Settings that shrink a tiny model, so that a test waits for compiling alone. Keys that a family lacks are skipped.

The number of layers stays, and with it every scan over repeated blocks.
"""


CALM = ("optimizer.warmup_steps=2", "optimizer.learning_rate=1e-3")
"""Adam turns a rounding error into a step of the learning rate. A small rate keeps second steps comparable."""


def names(group: str, pattern: str = "*") -> list[str]:
    """Return the choices of a config group by their files: a new file is tested the moment it exists."""
    return sorted(path.stem for path in (conf_dir() / group).glob(f"{pattern}.yaml"))


def specs_of(groups: dict[str, str]) -> dict[str, Parameter]:
    """Return vectors of two numbers in these groups of the optimizer."""
    return {name: Parameter((None,), (2,), (None,), group) for name, group in groups.items()}


MODELS = names("model", "*_tiny")
LANGUAGE_MODELS = [model for model in MODELS if not model.startswith("trm_")]
"""The models that predict tokens. The others answer puzzles."""
OF_THEIR_OWN = [model for model in MODELS if model not in ("s5_tiny", "longformer_tiny")]
"""The models with unique layers. valkyrie contains the layers of S5 and Longformer."""
PARTITIONS = names("partition")
PIPELINES = [name for name in PARTITIONS if "layers" in read_config("partition", name, PartitionConfig).parameters]
"""The partitions with layers on a mesh axis. They refuse models without stacked layers."""


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


def goes_with(model: str, partition: str) -> bool:
    """Return True if a partition supports a model. Pipelines refuse models without stacked layers."""
    return model in LANGUAGE_MODELS or partition not in PIPELINES


def some_quick(cases: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Return the cases of a test, with all but the `quick` ones marked slow."""
    return [pytest.param(case, marks=[] if case in quick else pytest.mark.slow) for case in cases]


def compose_config(*overrides: str) -> DictConfig:
    """Return the composed config of `valkyrie-train` with these overrides."""
    with initialize_config_dir(str(register()), version_base="1.3"):
        return compose("train", list(overrides))


def compose_run(*overrides: str) -> Run:
    """Return the run of these overrides, which must be legal: a copy, as composing one takes a fifth of a second."""
    variables = ("JAX_PLATFORMS", "TPU_MESH_CONFIG", "TPU_AXIS_NAMES")
    return copy.deepcopy(_legal_run(overrides, tuple(map(os.environ.get, variables))))


@cache
def _legal_run(overrides: tuple[str, ...], environment: tuple[str | None, ...]) -> Run:
    run = Run.from_config(compose_config(*overrides))
    assert not run.problems(), run.problems()
    return run


@cache
def shared_run(*arguments: str) -> Run:
    """Return the unchecked run of a command's arguments, composed once: leave it unchanged."""
    return parse_run(arguments)


@lru_cache
def small(model: str) -> tuple[str, ...]:
    """Return the overrides that select a model and shrink it, with a batch to match."""
    composed = compose_config(f"model={model}")
    known = [f"{key}={value}" for key, value in SMALL.items() if OmegaConf.select(composed, key) is not None]
    windows = OmegaConf.select(composed, "model.attention.windows")
    if windows:
        known.append(f"model.attention.windows={[w and max(w // 8, 2) for w in windows]}".replace("None", "null"))
    if OmegaConf.select(composed, "model.attention.value_embeddings"):  # tables as wide as the stream split like it
        known.append("model.attention.kv_heads=4")
    return (f"model={model}", *known, "batch=8", "seq=48", *CALM)


def small_run(model: str, *overrides: str) -> Run:
    """Return the run of a shrunken model with further overrides."""
    return compose_run(*small(model), "mesh=1x1x1", "partition=dp", *overrides)


def make_batch(run: Run, seed: int = 0) -> dict[str, np.ndarray]:
    """Return a batch with several documents in a row, weights of 0, 1 and between, and rows of uneven weight.

    A task without text makes its own random batch.
    """
    c, rng, task = run.config, np.random.default_rng(seed), run.task
    if not task.is_text:
        return task.random_batch(c.batch, c.seq, run.model.vocab_size, seed, range(c.batch))
    tokens = rng.integers(0, run.model.vocab_size, (c.batch, c.seq + 1)).astype(np.int32)
    starts = rng.random((c.batch, c.seq)) < 0.1
    weights = rng.choice([0.0, 0.5, 1.0], (c.batch, c.seq), p=[0.2, 0.2, 0.6])
    weights[0, 5:] = 0
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segment_ids": np.cumsum(starts, axis=1).astype(np.int32) + 1,
        "weights": weights.astype(np.float32),
    }


def make_program(run: Run) -> StepProgram:
    """Return the step program of a run on the first available devices."""
    return StepProgram(run, build_mesh(run.config.mesh, jax.devices()))


class Steps(NamedTuple):
    """Metrics of each step on the host, and the last state."""

    metrics: list[dict[str, np.ndarray]]
    state: TrainState


def run_steps(program: StepProgram, count: int = 2, state: TrainState | None = None) -> Steps:
    """Run `count` steps, each on a different batch."""
    state = program.init(0) if state is None else state
    metrics = []
    for i in range(count):
        state, new = program.step(state, program.place(make_batch(program.run, seed=i)))
        metrics.append(jax.device_get(new))
    return Steps(metrics, state)


def named(tree: Any) -> dict[str, Any]:
    """Return the leaves of a nested dict by dotted name."""
    return dict(zip(leaf_names(tree), jax.tree.leaves(tree), strict=True))


def assembly_of(run: Run) -> Assembly:
    """Return the model of a run without its arrays."""
    return Assembly(run.model, Numerics.from_policy(run.config.precision))


def learned(assembly: Assembly) -> int:
    """Return the number of learned parameters of a built model, without fixed arrays and rows of single puzzles."""
    leaves = zip(jax.tree.leaves(assembly.abstract_parameters), assembly.specs.values(), strict=True)
    return sum(leaf.size for leaf, spec in leaves if spec.group not in NOT_AVERAGED)


@lru_cache
def initial_state(overrides: tuple[str, ...]) -> TrainState:
    """Return the state before the first step, on the host, for the overrides of a run on one device.

    It is made operation by operation, as compiling an initialisation takes longer than running it. A test compares the
    compiled initialisation of a mesh with this.
    """
    program = make_program(compose_run(*overrides, "mesh=1x1x1", "partition=dp"))
    keep_ema = program.run.config.optimizer.ema_decay is not None
    return jax.device_get(init_state(program.assembly, program.optimizer, keep_ema, 0, program.carry))


def stirred(host: TrainState) -> TrainState:
    """Return a host state with small numbers in place of all-zero parameters: else gradients are rounding errors."""
    rng = np.random.default_rng(0)
    parameters = jax.tree.map(
        lambda p: p if np.any(p) else (0.1 * rng.standard_normal(p.shape)).astype(p.dtype), host.parameters
    )
    return host._replace(parameters=parameters)


def placed_state(program: StepProgram, host: TrainState) -> TrainState:
    """Return a host state placed on the devices of a program."""
    return jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), host, program.abstract_state)


def two_steps(run: Run, host: TrainState) -> Steps:
    """Run two steps from a host state, each on a different batch."""
    program = make_program(run)
    return run_steps(program, 2, placed_state(program, host))


@lru_cache
def reference(model: str, *overrides: str) -> Steps:
    """Return two steps of a shrunken model on one device, which every layout must reproduce."""
    return two_steps(small_run(model, *overrides), stirred(initial_state((*small(model), *overrides))))


def assert_same_steps(steps: Steps, expected: Steps, rtol: float = 2e-5) -> None:
    """Compare loss, gradient norm and every parameter's gradient norm of each step.

    A bias of keys without rotary embedding has no gradient: its norm is a rounding error, 1e-9 of the whole.
    """
    for step, (new, old) in enumerate(zip(steps.metrics, expected.metrics, strict=True)):
        for key in ("loss", "grad_norm", "tokens"):
            np.testing.assert_allclose(new[key], old[key], rtol=rtol, err_msg=f"{key} of step {step}")
        norms = np.sqrt(new["leaf_norms"]), np.sqrt(old["leaf_norms"])
        np.testing.assert_allclose(*norms, rtol=rtol, atol=1e-8, err_msg=f"gradient norms by parameter, step {step}")
