"""Tests of restoring checkpoints under another layout: equal values with the new layout's sharding."""

from __future__ import annotations

from contextlib import closing
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from helpers import make_program, small_run
from runs import open_checkpoints
from valkyrie.train.program import StepProgram

LAYOUTS = {
    "one device": ("mesh=1x1x1", "partition=dp"),
    "dp": ("mesh=8x1x1", "partition=dp"),
    "fsdp": ("mesh=8x1x1", "partition=fsdp"),
    "fsdp of 4 devices": ("mesh=2x2x1", "partition=fsdp"),
    "1d_tp": ("mesh=2x2x2", "partition=1d_tp"),
    "2d_tp": ("mesh=2x2x2", "partition=2d_tp"),
    "2d_tp_fsdp": ("mesh=2x2x2", "partition=2d_tp_fsdp"),
    "fsdp_tp": ("mesh=4x2x1", "partition=fsdp_tp"),
    "data_model_fsdp": ("mesh=2x2x2", "partition=data_model_fsdp"),
    "sp": ("mesh=2x2x2", "partition=sp"),
    "pp_fsdp": ("mesh=2x2x2", "partition=pp_fsdp"),
}
MODELS = ("valkyrie_tiny", "gpt_tiny")
QUICK = {("gpt_tiny", "2d_tp_fsdp")}


@lru_cache
def programs(model: str) -> dict[str, StepProgram]:
    """Return the step program of a model under each layout, without compiling."""
    extra = ("optimizer.ema_decay=0.9", "microbatches=1")
    return {name: make_program(small_run(model, *layout, *extra)) for name, layout in LAYOUTS.items()}


def random_state(program: StepProgram, seed: int) -> Any:
    """Return a state of random numbers that depend on the seed but not on the layout."""
    generator = np.random.default_rng(seed)

    def values(leaf: Any) -> jax.Array:
        numbers = generator.integers(0, 1000, leaf.shape).astype(leaf.dtype)
        return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: numbers[index])

    return jax.tree.map(values, program.abstract_state)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("model", "source"),
    [
        pytest.param(model, source, marks=() if (model, source) in QUICK else pytest.mark.slow)
        for model in MODELS
        for source in LAYOUTS
    ],
)
def test_a_checkpoint_of_one_layout_is_restored_under_every_layout(model: str, source: str, tmp_path: Path):
    step_programs = programs(model)
    position = {"version": 1, "row": 48, "content": "abc"}
    with closing(open_checkpoints(tmp_path)) as checkpoints:
        assert checkpoints.save(7, random_state(step_programs[source], seed=3), position) is None
    for name, program in step_programs.items():
        with closing(open_checkpoints(tmp_path, read_only=True)) as checkpoints:
            restored = checkpoints.restore(program.abstract_state)
        assert (restored.step, restored.data) == (7, position), name
        expected = random_state(program, seed=3)
        for (path, leaf), value in zip(
            jax.tree_util.tree_flatten_with_path(expected)[0], jax.tree.leaves(restored.state), strict=True
        ):
            assert value.sharding.is_equivalent_to(leaf.sharding, leaf.ndim), (name, path)
            assert value.dtype == leaf.dtype, (name, path)
            np.testing.assert_array_equal(np.asarray(value), np.asarray(leaf), err_msg=f"{name} {path}")
