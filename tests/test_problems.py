"""Tests of the `Problem` of each invalid setting: its code, key and value, and a golden file of the messages."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from helpers import MODELS, PARTITIONS, arrays_of, compose_config
from valkyrie.config.arguments import parse_run
from valkyrie.config.run import Run
from valkyrie.models import known_axes
from valkyrie.parallel.candidates import Candidates
from valkyrie.parallel.layout import layout_with_problems
from valkyrie.parallel.mesh import AXIS_NAMES, parse_mesh
from valkyrie.parallel.partition import PartitionConfig, PipelineSchedule, resolve_rules
from valkyrie.parallel.remat import load_remat
from valkyrie.paths import read_group
from valkyrie.problems import Problem, ProblemCode, ProblemError, check_range, describe_value, raise_problems

GOLDEN = Path(__file__).parent / "goldens" / "problems.txt"
SMALL = "model=valkyrie_tiny mesh=2x2x2 partition=2d_tp"
SEARCH = "mode=search target=v5e-8"
PP = "model=gpt_tiny mesh=2x2x2 partition=pp microbatches=2 batch=8"

CASES: dict[str, tuple[str, str | None, Any]] = {
    # arguments: code, key, value
    "batch=0": ("out_of_range", "batch", 0),
    "optimizer.learning_rate=0": ("out_of_range", "optimizer.learning_rate", 0.0),
    "optimizer.learning_rate=inf": ("out_of_range", "optimizer.learning_rate", math.inf),
    "optimizer.clip_norm=-1": ("out_of_range", "optimizer.clip_norm", -1.0),
    "temperature=-1": ("out_of_range", "temperature", -1.0),
    "seed=4294967296": ("too_large", "seed", "4294967296"),
    f"{SEARCH} microbatches=0": ("out_of_range", "microbatches", 0),
    f"{SEARCH} partition=pp partition.rounds=-1": ("out_of_range", "partition.rounds", -1),
    f"{SEARCH} mode.measure=-1": ("out_of_range", "mode.measure", -1),
    f"{SEARCH} mode.budget=soon": ("malformed", "mode.budget", "soon"),
    "name=a$b": ("malformed", "name", "a$b"),
    "name=.": ("malformed", "name", "."),
    "name=latest": ("malformed", "name", "latest"),
    "profile=5": ("malformed", "profile", "5"),
    "profile=9-3": ("malformed", "profile", "9-3"),
    "profile=100-105 steps=104": ("conflict", "profile", "100-105"),
    "model=gpt_tiny remat.save=[out,nonsense]": ("unknown_name", "remat.save", ["nonsense"]),
    f"{SEARCH} model=gpt_tiny remat.save=[out,nonsense]": ("unknown_name", "remat.save", ["nonsense"]),
    "remat=offload remat.save=[query]": ("conflict", "remat.save", ["query"]),
    "data=sudoku data.sudoku.side=4 data.sudoku.guesses=1 model=trm_tiny": ("conflict", "data.sudoku.guesses", 1),
    "distributed.processes=4": ("missing", "distributed.coordinator", None),
    "distributed.coordinator=a:1 distributed.processes=2 distributed.process=2": ("conflict", "distributed.process", 2),
    "model.attention.causal=false": ("unsupported", "model", "valkyrie_tiny"),
    # meshes and targets
    "mesh=2x2x2 mesh.placement=[x,y]": ("placement", "mesh.placement", "x,y"),
    "mesh=2x2x2 mesh.names=[data]": ("mesh_names", "mesh.names", "data"),
    "mesh=2x2x2 mesh.shape=[2,2]": ("mesh_shape", "mesh.shape", [2, 2]),
    "mesh=2x2x2 target=v4-64": ("device_count", "mesh", "2x2x2"),
    "mesh=2x2x1 target=v4-64": ("device_count", "mesh", "2x2x1"),
    "mesh=4x4x2 target=v4-32 batch=64": ("device_count", "mesh", "4x4x2"),
    "mesh=2x2x1 target=v3-8": ("device_count", "mesh", "2x2x1"),
    "mesh=2x2x1 target=cpu8": ("device_count", "mesh", "2x2x1"),
    "mesh=1x1x16 target=h100-16 target.slices=2": ("conflict", "target.slices", 2),
    "mesh=2s4x4x2 target=v4-64 batch=64": ("device_count", "mesh", "2s4x4x2"),
    "mesh=4x4x4 target=v4-64 target.slices=2 batch=64": ("slice_count", "target.slices", 2),
    "mesh=2s4x4x2 target=v4-128 batch=64": ("slice_count", "mesh", "2s4x4x2"),
    "mesh=2s2x2x2 target=v3-8 target.slices=2": ("missing", "target.chip.dcn_gbs_per_host", None),
    "mesh=4x4x2 target=v4-64 target.topology=4x4x3 batch=64": ("topology", "target.topology", "4x4x3"),
    # rules and sizes
    f"{SMALL} partition.parameters.mpl=[x]": ("unknown_logical_axis", "partition.parameters.mpl", None),
    f"{SMALL} partition.parameters.conv=[x]": ("unknown_logical_axis", "partition.parameters.conv", None),
    f"{SMALL} partition.parameters.mlp=[w]": ("missing_mesh_axis", "partition.parameters.mlp", None),
    f"{SMALL} partition.parameters.mlp=[y]": ("mesh_axis_used_twice", None, None),
    "mesh=2x2x1 partition=dp partition.activations.batch=[x]": ("idle_mesh_axis", None, None),
    "mesh=2x2x2 partition=data_model_fsdp mesh.names=[data,model,expert]": ("unknown_role", "mesh.names", "expert"),
    "model=valkyrie_tiny mesh=3x2x1 partition=2d_tp batch=32": ("not_divisible", "model.s5.state_size", None),
    f"{SMALL} batch=7": ("batch_not_divisible", "batch", None),
    "mesh=4x2x1 partition=sp seq=30": ("seq_not_divisible", "seq", None),
    "model=gpt_tiny seq=64 batch_tokens=1000": ("batch_tokens_not_divisible", "batch_tokens", 1000),
    "mesh=2x2x2 partition=dp batch=64 device_batch=3": ("device_batch_not_divisible", "device_batch", 3),
    "mesh=4x4x1 partition=dp batch_tokens=512 seq=64 device_batch=1": ("device_batch_not_divisible", "device_batch", 1),
    # pipelines
    "model=trm_tiny data=sudoku seq=81 mesh=2x2x2 partition=pp": ("no_stack", None, None),
    f"{PP} mesh=2x1x3 batch=24": ("not_divisible", "model.layers", None),
    f"{PP} microbatches=3": ("batch_not_divisible", "batch", None),
    "model=gpt_tiny mesh=1x1x1 batch=8 microbatches=3": ("batch_not_divisible", "batch", None),
    "model=gpt_tiny mesh=2x1x1 partition=dp batch=8 microbatches=3": ("batch_not_divisible", "batch", None),
    f"{PP} partition.rounds=2": ("wrong_rounds", "partition.rounds", 2),
    f"{PP} partition.schedule=circular": ("wrong_rounds", "partition.rounds", 1),
    f"{PP} microbatches=1 partition.schedule=circular partition.rounds=2": ("too_few_microbatches", "microbatches", 1),
    f"{PP} partition.schedule=circular partition.rounds=4": ("rounds_not_divisible", "model.layers", None),
    f"{PP} partition.schedule=1f1b remat=dots": ("remat_with_1f1b", "remat", "dots"),
    f"{PP} model=longformer_tiny partition.schedule=1f1b remat=full": ("several_stacks", "partition.schedule", None),
    f"{PP} partition.parameters.layers=[y,z]": ("several_stage_axes", "partition.parameters.layers", None),
    f"{PP} partition.parameters.embed=[z]": ("stage_axis_shared", "partition.parameters", None),
    f"{PP} partition.activations.seq=[z] partition.activations.heads=[z]": (
        "stage_axis_shared",
        "partition.activations",
        None,
    ),
}
MADE = [
    Problem(ProblemCode.not_finite, "model.attention.soft_cap", math.inf),
    Problem(ProblemCode.not_installed, "data.paths", text="data.paths=s3://x: s3:// needs the package s3fs."),
    Problem(ProblemCode.same_sharding, "mesh", "4x2x1", "mesh=4x2x1 shards every array exactly like another mesh."),
    Problem(ProblemCode.damaged, names=("train-00000.array_record",), text="train-00000.array_record is damaged."),
]
"""Example problems that depend on more than the arguments, such as installed packages or damaged files."""


@cache
def problems_of(arguments: str) -> list[Problem]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TPU_MESH_CONFIG", raising=False)
        return parse_run(arguments.split()).problems()


@pytest.mark.parametrize("arguments", CASES)
def test_a_problem_has_a_code_the_key_at_fault_and_its_value(arguments: str):
    code, key, value = CASES[arguments]
    assert (ProblemCode(code), key, value) in [(p.code, p.key, p.value) for p in problems_of(arguments)]


@pytest.mark.timeout(600)  # alone, it composes every case
def test_texts_of_all_problem_codes_equal_the_golden_file():
    """`UPDATE_GOLDENS=1 pytest tests/test_problems.py` writes the file."""
    problems_by_arguments = {arguments: problems_of(arguments) for arguments in CASES} | {"": MADE}
    lines = [
        f"$ {arguments}\n" + "".join(f"{p.code.value}: {p}\n" for p in problems)
        for arguments, problems in problems_by_arguments.items()
    ]
    if os.environ.get("UPDATE_GOLDENS"):
        GOLDEN.write_text("\n".join(lines))
    assert GOLDEN.read_text() == "\n".join(lines)
    assert {p.code for problems in problems_by_arguments.values() for p in problems} == {*ProblemCode}
    assert all(p.label and str(p).endswith(".") for problems in problems_by_arguments.values() for p in problems)


@pytest.mark.parametrize(
    "overrides",
    [
        {"steps": 0, "trial.limit_s": "inf"},
        {"distributed.heartbeat_s": 0, "distributed.timeout_s": "inf"},
        {"optimizer.momentum": 1, "optimizer.momentum_start": "nan"},
    ],
)
def test_a_problem_does_not_hide_that_of_another_key(overrides: dict[str, object]):
    arguments = ["optimizer=muon", *(f"{key}={value}" for key, value in overrides.items())]
    problems = Run.from_config(compose_config(*arguments)).problems()
    assert overrides.keys() <= {problem.key for problem in problems}


def test_sizes_are_not_part_of_a_problems_identity():
    first, other = (
        Problem(ProblemCode.not_divisible, "model.mlp", axes=("mlp",), mesh_axes=("x",), mesh_sizes=(n,), size=130)
        for n in (4, 8)
    )
    assert first != other and first.identity == other.identity
    assert first.label == other.label and first.label.startswith("mlp not divisible by its mesh axes (x)")
    assert "model.mlp" in first.label, "the key to change"
    layers, rounds = (
        Problem(code, "model.layers", axes=("layers",))
        for code in (ProblemCode.not_divisible, ProblemCode.rounds_not_divisible)
    )
    assert layers.label == rounds.label and "partition.rounds" in rounds.label, "one phrase for stages and rounds"
    assert first.identity != replace(first, mesh_axes=("y",)).identity != replace(first, key=None).identity


@pytest.mark.parametrize(
    ("bounds", "inside", "outside", "text"),
    [
        ({"least": 1}, 1, 0, "k=0: must be at least 1."),
        ({"least": 0}, 0, -1, "k=-1: must be at least 0."),
        ({"above": 0, "most": 1}, 1, 1.5, "k=1.5: must be above 0 and at most 1."),
        ({"least": 0, "below": 2}, 1.5, 2, "k=2: must be at least 0 and below 2."),
        (
            {"above": 0, "otherwise": "null for none"},
            0.1,
            math.nan,
            "k=nan: must be a finite number, above 0, or null for none.",
        ),
    ],
)
def test_numbers_out_of_range_are_problems(bounds: dict[str, Any], inside: float, outside: float, text: str):
    assert check_range("k", inside, **bounds) == check_range("k", None, **bounds) == []
    (problem,) = check_range("k", outside, **bounds)
    assert (problem.code, problem.key, str(problem)) == (ProblemCode.out_of_range, "k", text)


def test_a_value_of_a_wrong_type_is_shown_without_its_memory_address():
    assert describe_value(object()) == "<object object>"


def test_an_error_lists_each_problem_once():
    problem = Problem(ProblemCode.malformed, "k", text="k: no.")
    raise_problems([])
    with pytest.raises(ProblemError) as error:
        raise_problems([problem, problem, replace(problem, partition="dp")])
    assert error.value.problems == (problem,) and str(error.value) == "k: no."


PARTITION_CONFIGS = {partition.name: partition for partition in read_group("partition", PartitionConfig)}
OF_A_MESH = {
    ProblemCode.not_divisible,
    ProblemCode.batch_not_divisible,
    ProblemCode.seq_not_divisible,
    ProblemCode.too_few_microbatches,
    ProblemCode.no_stack,
    ProblemCode.rounds_not_divisible,
}
"""The problem codes that the search checks with arrays, for many layouts at once."""


@example(shape=[1, 3, 1, 1], name="sp", model="trm_tiny", schedule=("gpipe", 1), microbatches=1, batch=1, seq=30)
@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from([1, 1, 2, 3, 4, 8]), min_size=4, max_size=4),
    st.sampled_from(PARTITIONS),
    st.sampled_from(MODELS),
    st.sampled_from([("gpipe", 1), ("1f1b", 1), ("circular", 2), ("circular", 4)]),
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from([1, 7, 96, 768]),
    st.sampled_from([30, 96, 768]),
)
def test_vectorised_checks_find_the_problems_of_single_layouts(
    shape: list[int], name: str, model: str, schedule: tuple[str, int], microbatches: int, batch: int, seq: int
):
    partition = replace(PARTITION_CONFIGS[name], schedule=PipelineSchedule[schedule[0]], rounds=schedule[1])
    mesh, arrays, logical_axes = parse_mesh("x".join(map(str, shape))), arrays_of(model), known_axes()
    remat = load_remat("full")
    _, problems = layout_with_problems(mesh, partition, arrays, microbatches, remat, batch, seq, logical_axes)
    parameters, activations, _ = resolve_rules(partition, mesh, arrays.axes, logical_axes)
    sizes = {axis: np.array([n]) for axis, n in zip(AXIS_NAMES, shape, strict=True)}
    counts, rounds = np.array([microbatches]), np.array([float(partition.rounds)])
    candidates = Candidates(partition, parameters, activations, arrays, sizes, {}, counts, rounds)
    of_arrays = {(p.code, p.axes) for p, wrong in candidates.problems(batch, seq).items() if wrong[0]}
    event(", ".join(sorted(code.value for code, _ in of_arrays)) or "legal")
    assert of_arrays == {(p.code, p.axes) for p in problems if p.code in OF_A_MESH}
