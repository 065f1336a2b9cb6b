"""Tests of every tiny model under every partition: the step lowers, and its results equal those on one device."""

from __future__ import annotations

import math
import time
from collections.abc import Collection
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import (
    MODELS,
    PARTITIONS,
    assert_same_steps,
    compose_run,
    config_names,
    count_learned_parameters,
    initial_state,
    is_supported,
    make_builder,
    make_program,
    mark_slow_except,
    randomize_zero_parameters,
    reference_steps,
    run_two_steps,
    small_overrides,
    small_run,
)
from valkyrie.axes import PARAMETER_GROUPS
from valkyrie.config.modes import MODES
from valkyrie.models.block import weight
from valkyrie.models.s5 import S5
from valkyrie.parallel.mesh import abstract_mesh
from valkyrie.problems import ProblemCode
from valkyrie.train.program import StepProgram
from valkyrie.trees import leaf_names

STEPPED_PAIRS = [("valkyrie_tiny", "2d_tp_fsdp")]
"""(model, partition) pairs that take steps in the default tests. Slow tests step every pair."""

LOWERED_PAIRS = [("valkyrie_tiny", "sp"), ("gpt_tiny", "fsdp_tp")]
"""(model, partition) pairs whose step is lowered, but not run, in the default tests."""


def model_partition_pairs(quick_pairs: Collection[tuple[str, str]]) -> list[Any]:
    """Return every (model, partition) pair that is supported. All except `quick_pairs` are marked slow."""
    return [
        pytest.param(model, partition, marks=() if (model, partition) in quick_pairs else pytest.mark.slow)
        for model in MODELS
        for partition in PARTITIONS
        if is_supported(model, partition)
    ]


PUBLISHED_OPTIONS = ("model.attention.qk_norm=true", "model.attention.soft_cap=2", "model.attention.kv_heads=1")
PUBLISHED_OPTIONS += ("model.residual=parallel", "model.embedding_scale=5.5", "model.logits_soft_cap=3")
"""Options of published models that no tiny model uses."""

PARAMETER_COUNTS = {
    "deepseek_v2_lite": 15_706_484_224,
    "deepseek_v3": 671_026_419_200,
    "gpt2": 124_475_904,
    "gpt3_175b": 174_566_682_624,
    "gpt_125m": 123_587_328,
    "gpt_16b": 16_504_510_464,
    "gpt_1b": 1_336_248_320,
    "gpt_oss_120b": 116_829_156_672,
    "gpt_oss_20b": 20_914_757_184,
    "llama4_scout": 107_769_861_120,
    "llama_7b": 6_738_415_616,
    "llama_8b": 8_030_261_248,
    "longformer_125m": 123_587_328,
    "longformer_1b": 1_336_248_320,
    "longformer_7b": 6_682_316_800,
    "mixtral_8x22b": 140_620_634_112,
    "mixtral_8x7b": 46_702_792_704,
    "nanochat": 394_002_914,
    "nanochat_2025": 162_201_600,
    "olmoe_1b_7b": 6_919_161_856,
    "qwen3_235b_a22b": 235_093_634_560,
    "qwen3_30b_a3b": 30_532_122_624,
    "s5_125m": 116_532_480,
    "s5_1b": 1_235_707_904,
    "s5_7b": 6_682_644_480,
    "trm_attention": 6_828_034,
    "trm_mlp": 5_028_866,
    "valkyrie_125m": 118_884_096,
    "valkyrie_1b": 1_269_221_376,
    "valkyrie_7b": 6_682_480_640,
}
"""Parameter counts of models that are not tiny, so that no change goes unnoticed."""


def test_models_and_partitions_are_discovered():
    assert {"valkyrie_tiny", "s5_tiny", "longformer_tiny", "gpt_tiny"} <= set(MODELS)
    assert {"dp", "fsdp", "1d_tp", "2d_tp", "2d_tp_fsdp", "data_model_fsdp", "sp", "fsdp_tp"} <= set(PARTITIONS)
    assert all(model in MODELS and partition in PARTITIONS for model, partition in STEPPED_PAIRS)


@pytest.mark.parametrize(("model", "partition"), model_partition_pairs(LOWERED_PAIRS))
def test_a_step_lowers_for_32_missing_devices(model, partition):
    run = small_run(model, "mesh=4x4x2", f"partition={partition}", "batch=32")
    program = StepProgram(run, abstract_mesh(run.config.mesh), backend="cpu")
    lowered = program.lower_step()
    assert len(jax.tree.leaves(lowered.out_info)) > len(program.parameter_names)
    for name, spec in program.builder.specs.items():
        mesh_axes = program.layout.stored_axes(spec.axes)
        for size, axes in zip(spec.shape, mesh_axes, strict=True):
            assert size % math.prod(run.config.mesh.axes[a] for a in axes) == 0, name


def test_a_step_lowered_without_devices_equals_that_of_training():
    run = small_run("gpt_tiny", "mesh=2x2x2", "partition=2d_tp_fsdp")
    abstract = StepProgram(run, abstract_mesh(run.config.mesh)).lower_step()
    assert abstract.as_text() == make_program(run).lower_step().as_text()


@pytest.mark.parametrize("model", MODELS)
def test_a_model_builds_its_declared_parameters(model):
    run = compose_run(f"model={model}")
    specs = make_builder(run).specs  # refuses a module with other parameters, shapes or dtypes
    assert {spec.group for spec in specs.values()} <= {*PARAMETER_GROUPS}
    assert {axis for spec in specs.values() for axis in spec.axes if axis} <= set(run.arrays.axes)
    declared_arrays = {(t.axes, t.shape) for t in run.arrays.parameters}
    assert {(spec.axes, spec.shape) for spec in specs.values() if spec.axes != ("embed",)} <= declared_arrays
    assert {axis for t in run.arrays.activations for axis in t.axes} <= set(run.arrays.axes)


def test_a_model_that_builds_undeclared_parameters_is_refused(monkeypatch):
    run = small_run("s5_tiny")
    declared = S5.weights
    monkeypatch.setattr(S5, "weights", lambda self, context: declared(self, context) | {"extra": weight("state")})
    with pytest.raises(ValueError) as error:
        make_builder(run)
    assert "segment_0.block_0.mixer.extra is" in str(error.value) and "float32[4, 16]" in str(error.value)


@pytest.mark.parametrize("model", mark_slow_except(MODELS, ["valkyrie_tiny", "trm_tiny"]))
def test_specs_equal_the_initialised_parameters(model):
    run = small_run(model)
    specs, parameters = make_builder(run).specs, initial_state(small_overrides(model)).parameters
    assert list(specs) == leaf_names(parameters)
    assert [spec.shape for spec in specs.values()] == [p.shape for p in jax.tree.leaves(parameters)]
    assert run.model.parameter_count() == count_learned_parameters(make_builder(run))


def test_parameters_are_counted_without_allocating():
    start, counts = time.process_time(), {}
    for model in PARAMETER_COUNTS:
        run = compose_run(f"model={model}")
        counts[model] = run.model.parameter_count()
    assert counts == PARAMETER_COUNTS
    assert counts["valkyrie_1b"] >= 1.2e9
    assert set(PARAMETER_COUNTS) == {m for m in config_names("model") if not m.endswith("_tiny")}
    assert time.process_time() - start < 20


def test_the_parameter_count_equals_a_calculation_by_hand():
    """`valkyrie_1b` has 24 blocks of width 2048, each with SwiGLU.

    16 blocks have S5 (1024 states, a square gate), and 8 have attention (16 heads of 128).
    """
    embed, states, mlp = 2048, 1024, 5632
    s5 = 3 * states + 2 * (2 * states * embed) + embed + embed**2
    attention = 4 * embed**2
    total = 50304 * embed + 16 * s5 + 8 * attention + 24 * (3 * embed * mlp + 2 * embed) + embed
    assert total == PARAMETER_COUNTS["valkyrie_1b"]


def test_the_initial_state_does_not_depend_on_the_mesh():
    program = make_program(small_run("valkyrie_tiny", "mesh=2x2x2", "partition=2d_tp_fsdp"))
    state = program.init(0)
    # Random bits do not depend on the mesh. B and C are then rotated by a matmul, which is equal up to rounding.
    assert_close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7)
    jax.tree.map(assert_close, jax.device_get(state), initial_state(small_overrides("valkyrie_tiny")))
    is_equivalent = jax.tree.map(
        lambda x, like: x.sharding.is_equivalent_to(like.sharding, x.ndim), state, program.abstract_state
    )
    assert all(jax.tree.leaves(is_equivalent))
    state_of_other_seed = program.init(1)
    assert not np.array_equal(state_of_other_seed.parameters["embedding"], state.parameters["embedding"])


@pytest.mark.parametrize(("model", "partition"), model_partition_pairs(STEPPED_PAIRS))
def test_same_steps_on_eight_devices_as_on_one(model, partition):
    run = small_run(model, "mesh=2x2x2", f"partition={partition}")
    steps = run_two_steps(run, randomize_zero_parameters(initial_state(small_overrides(model))))
    assert_same_steps(steps, reference_steps(model))
    assert steps.metrics[0]["loss"] != steps.metrics[1]["loss"]


@pytest.mark.parametrize(
    ("mesh", "partition", "overrides"),
    [
        pytest.param("2x2x2x1", "2d_tp_fsdp", (), marks=pytest.mark.slow),
        pytest.param("2s2x2x1", "2d_tp", (), marks=pytest.mark.slow),
        pytest.param("2x2x1x2", "fsdp", (), marks=pytest.mark.slow),
        pytest.param("2s2x1x2", "data_model_fsdp", (), marks=pytest.mark.slow),
        pytest.param("2x2x2", "sp", ("seq=64", "model.attention.windows=[null]"), marks=pytest.mark.slow),
        pytest.param("2x2x2", "2d_tp", ("mesh.placement=[z,x,y]",), marks=pytest.mark.slow),
        pytest.param("1x8x1", "2d_tp", (), marks=pytest.mark.slow),
        pytest.param("8x1x1", "sp", (), marks=pytest.mark.slow),
        pytest.param(
            "4x2x1", "2d_tp", (*PUBLISHED_OPTIONS, "model.attention.qk_norm_span=all_heads"), marks=pytest.mark.slow
        ),
        pytest.param("2x2x2", "sp", (*PUBLISHED_OPTIONS, "seq=64"), marks=pytest.mark.slow),
        pytest.param("2x2x2", "fsdp", ("partition.gradient_sum=all_to_all",), marks=pytest.mark.slow),
        pytest.param("2x2x2", "fsdp_tp", ("partition.gradient_sum=all_to_all",), marks=pytest.mark.slow),
        pytest.param("2x2x2", "sp", ("partition.gradient_sum=all_to_all",), marks=pytest.mark.slow),
        pytest.param("2x2x2", "2d_tp_fsdp", ("partition.gradient_sum=all_to_all",), marks=pytest.mark.slow),
        pytest.param("2s2x1x2", "fsdp", ("partition.gradient_sum=all_to_all",), marks=pytest.mark.slow),
    ],
)
def test_same_steps_on_other_meshes(mesh, partition, overrides):
    model_overrides = tuple(o for o in overrides if not o.startswith(("mesh", "partition")))
    run = small_run("valkyrie_tiny", f"mesh={mesh}", f"partition={partition}", *overrides)
    steps = run_two_steps(run, initial_state((*small_overrides("valkyrie_tiny"), *model_overrides)))
    assert_same_steps(steps, reference_steps("valkyrie_tiny", *model_overrides))


def test_layers_with_different_windows_are_separate_segments():
    run = compose_run("model=longformer_tiny")
    segments = {name.split(".")[0] for name in make_builder(run).specs if name.startswith("segment")}
    assert segments == {"segment_0", "segment_1"}
    assert len(set(run.model.attention.windows)) == 2


@pytest.mark.parametrize(
    "override",
    mark_slow_except(["model.attention.causal=false", "model.s5.bidirectional=true"], ["model.s5.bidirectional=true"]),
)
def test_a_bidirectional_model_can_be_shown_but_not_trained(override: str):
    run = small_run("valkyrie_tiny", "mode=show", override)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 61, (2, 16)))
    state = initial_state((*small_overrides("valkyrie_tiny"), "mode=show", override))
    module, logits = make_builder(run).module(state.parameters), jax.jit(lambda module, tokens: module.logits(tokens))
    logits_before, logits_after = logits(module, tokens), logits(module, tokens.at[:, -1].add(1) % 61)
    assert np.abs(logits_before[:, 8] - logits_after[:, 8]).max() > 1e-6
    with pytest.raises(AssertionError, match="next_token"):
        small_run("valkyrie_tiny", "mode=train", override)
    run.config.mode = MODES.config_class("train")()
    assert (ProblemCode.unsupported, "model") in [(problem.code, problem.key) for problem in run.problems()]
