"""Composes small runs in-process, makes batches for them, and drives their step program on simulated devices."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from valkyrie.axes import Parameter
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
from valkyrie.trees import names_of

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
"""What makes a tiny model tinier, so that compiling is all that a test waits for; keys a family lacks are left out.

The number of layers stays, and with it every scan over repeated blocks.
"""


CALM = ("optimizer.warmup_steps=2", "optimizer.learning_rate=1e-3")
"""Adam makes a step of the learning rate out of a rounding error: a small one keeps second steps comparable."""


def names(group: str, pattern: str = "*") -> list[str]:
    """Return the choices of a config group by their files: a new file is tested the moment it exists."""
    return sorted(path.stem for path in (conf_dir() / group).glob(f"{pattern}.yaml"))


def specs_of(groups: dict[str, str]) -> dict[str, Parameter]:
    """Return vectors of two numbers in these groups of the optimizer."""
    return {name: Parameter((None,), (2,), (None,), group) for name, group in groups.items()}


MODELS = names("model", "*_tiny")
LANGUAGE_MODELS = [model for model in MODELS if not model.startswith("trm_")]
"""Those of them that predict tokens; the others answer puzzles."""
OF_THEIR_OWN = [model for model in MODELS if model not in ("s5_tiny", "longformer_tiny")]
"""The models with layers that no other has: valkyrie has those of S5 and of Longformer."""
PARTITIONS = names("partition")
PIPELINES = [name for name in PARTITIONS if "layers" in read_config("partition", name, PartitionConfig).parameters]
"""Those of them that put layers on a mesh axis; a model that stacks none is refused there."""


def goes_with(model: str, partition: str) -> bool:
    """Return whether a partition takes a model: all do, but pipelines none that has no stacked layers."""
    return model in LANGUAGE_MODELS or partition not in PIPELINES


def some_quick(cases: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Return the cases of a test, those that are not `quick` marked slow: the default part keeps one of each kind."""
    return [pytest.param(case, marks=[] if case in quick else pytest.mark.slow) for case in cases]


def compose_config(*overrides: str) -> DictConfig:
    """Return the composed config of `valkyrie-train` with these overrides."""
    with initialize_config_dir(str(register()), version_base="1.3"):
        return compose("train", list(overrides))


def compose_run(*overrides: str) -> Run:
    """Return the run of these overrides, which must be legal."""
    run = Run.from_config(compose_config(*overrides))
    assert not run.problems(), run.problems()
    return run


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

    Of a task without text it is the task's own random batch.
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
    """Return the step program of a run on the first devices there are."""
    return StepProgram(run, build_mesh(run.config.mesh, jax.devices()))


class Steps(NamedTuple):
    """What a few steps left: metrics of each on the host, and the last state."""

    metrics: list[dict[str, np.ndarray]]
    state: TrainState


def run_steps(program: StepProgram, count: int = 2, state: TrainState | None = None) -> Steps:
    """Return the outcome of `count` steps, each on a batch of its own."""
    state = program.init(0) if state is None else state
    metrics = []
    for i in range(count):
        state, new = program.step(state, program.place(make_batch(program.run, seed=i)))
        metrics.append(jax.device_get(new))
    return Steps(metrics, state)


def named(tree: Any) -> dict[str, Any]:
    """Return the leaves of a nested dict by dotted name."""
    return dict(zip(names_of(tree), jax.tree.leaves(tree), strict=True))


def assembly_of(run: Run) -> Assembly:
    """Return the model of a run without its arrays."""
    return Assembly(run.model, Numerics.of(run.config.precision))


def learned(assembly: Assembly) -> int:
    """Return how many numbers a built model learns: not what is fixed, nor the rows of single puzzles."""
    leaves = zip(jax.tree.leaves(assembly.abstract_parameters), assembly.specs.values(), strict=True)
    return sum(leaf.size for leaf, spec in leaves if spec.group not in NOT_AVERAGED)


@lru_cache
def initial_state(overrides: tuple[str, ...]) -> TrainState:
    """Return the state before the first step, on the host, for the overrides of a run on one device.

    It is made operation by operation: compiling an initialisation takes longer than running it, and a test holds the
    compiled one of a mesh against this.
    """
    program = make_program(compose_run(*overrides, "mesh=1x1x1", "partition=dp"))
    keep_ema = program.run.config.optimizer.ema_decay is not None
    return jax.device_get(init_state(program.assembly, program.optimizer, keep_ema, 0, program.carry))


def stirred(host: TrainState) -> TrainState:
    """Return a host state whose parameters that are all zero are small numbers: else gradients are rounding errors."""
    rng = np.random.default_rng(0)
    parameters = jax.tree.map(
        lambda p: p if np.any(p) else (0.1 * rng.standard_normal(p.shape)).astype(p.dtype), host.parameters
    )
    return host._replace(parameters=parameters)


def placed_state(program: StepProgram, host: TrainState) -> TrainState:
    """Return a host state laid out as a program wants it."""
    return jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), host, program.abstract_state)


def two_steps(run: Run, host: TrainState) -> Steps:
    """Return two steps of a run from a host state, each on its own batch."""
    program = make_program(run)
    return run_steps(program, 2, placed_state(program, host))


@lru_cache
def reference(model: str, *overrides: str) -> Steps:
    """Return two steps of a shrunken model on one device: what every layout must reproduce."""
    return two_steps(small_run(model, *overrides), stirred(initial_state((*small(model), *overrides))))


def assert_same_steps(found: Steps, expected: Steps, rtol: float = 2e-5) -> None:
    """Hold loss, gradient norm and every parameter's gradient norm of each step against those of other steps.

    A bias of keys that are not rotated has none: what stands there is rounding, 1e-9 of the whole.
    """
    for step, (new, old) in enumerate(zip(found.metrics, expected.metrics, strict=True)):
        for key in ("loss", "grad_norm", "tokens"):
            np.testing.assert_allclose(new[key], old[key], rtol=rtol, err_msg=f"{key} of step {step}")
        norms = np.sqrt(new["leaf_norms"]), np.sqrt(old["leaf_norms"])
        np.testing.assert_allclose(*norms, rtol=rtol, atol=1e-8, err_msg=f"gradient norms by parameter, step {step}")
