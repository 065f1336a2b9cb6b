"""Tests of layouts: in a legal layout, every array divides evenly over its mesh axes.

All problems of an illegal layout are reported at once. Also tests where optimizer state is placed.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from helpers import MODELS, PARTITIONS, arrays_of
from valkyrie.axes import Arrays, Tensor
from valkyrie.models import known_axes
from valkyrie.parallel.candidates import Candidates
from valkyrie.parallel.layout import Layout, make_layout
from valkyrie.parallel.mesh import MeshConfig, parse_mesh
from valkyrie.parallel.partition import MemoryKind, PartitionConfig
from valkyrie.parallel.remat import load_remat
from valkyrie.paths import read_group
from valkyrie.problems import Problem, ProblemCode

PARTITION_CONFIGS = {partition.name: partition for partition in read_group("partition", PartitionConfig)}


def make_arrays(*parameters: tuple[str, Tensor], sharded_like: dict[str, str] | None = None) -> Arrays:
    """Return the arrays of a model with these parameters, and no activations."""
    axes = ["batch", "seq", "layers", *(a for _, t in parameters for a in t.axes if a)]
    return Arrays(dict.fromkeys(axes, ""), {t: [name] for name, t in parameters}, {}, sharded_like or {})


def try_layout(
    mesh: str | MeshConfig, partition: PartitionConfig, **options: Any
) -> tuple[Layout | None, list[Problem]]:
    defaults: dict[str, Any] = {
        "microbatches": 1,
        "remat": load_remat("none"),
        "arrays": arrays_of("valkyrie_tiny"),
        "known_axes": known_axes(),
        "batch": 32,
        "seq": 128,
    }
    return make_layout(parse_mesh(mesh) if isinstance(mesh, str) else mesh, partition, **(defaults | options))


def legal_layout(mesh: str, partition: PartitionConfig, **options: Any) -> Layout:
    layout, problems = try_layout(mesh, partition, **options)
    assert layout is not None
    assert problems == []
    return layout


def shard_count(layout: Layout, held: tuple[str, ...]) -> int:
    return math.prod(layout.mesh.axes[axis] for axis in held)


sizes = st.sampled_from([1, 1, 2, 2, 3, 4, 8])
meshes = st.builds(
    lambda shape, slices: (f"{slices}s" if slices else "") + "x".join(map(str, shape)),
    st.lists(sizes, min_size=3, max_size=4),
    st.sampled_from([0, 1, 2, 3]),
)


@settings(max_examples=150)
@given(
    meshes,
    st.sampled_from(PARTITIONS),
    st.sampled_from(MODELS),
    st.booleans(),
    st.sampled_from([1, 1, 2, 3, 0]),
    st.sampled_from([1, 7, 96, 768]),
    st.sampled_from([1, 30, 96, 768]),
)
def test_a_layout_without_problems_divides_every_array(
    mesh: str, name: str, model: str, zero1: bool, microbatches: int, batch: int, seq: int
):
    partition = replace(PARTITION_CONFIGS[name], zero1=zero1)
    options = {"arrays": arrays_of(model), "microbatches": microbatches, "batch": batch, "seq": seq}
    layout, problems = try_layout(mesh, partition, **options)
    assert len(problems) == len(set(problems))
    event("refused" if problems else "legal")
    if problems:
        return
    assert layout is not None
    stages = 1 if layout.pipeline is None else layout.pipeline.stages
    assert batch % layout.shard_count("batch") == 0, "a pipeline's stages split the batch outside of it"
    assert batch % (layout.shard_count("batch") // stages * microbatches) == 0
    assert seq % layout.shard_count("seq") == 0
    for tensor in arrays_of(model).parameters:
        for sharding in (
            layout.stored_axes(tensor.axes),
            layout.used_axes(tensor.axes),
            layout.optimizer_axes(tensor.axes, tensor.shape),
        ):
            used = [axis for mesh_axes in sharding for axis in mesh_axes]
            assert len(used) == len(set(used)), (tensor, sharding)
            for size, mesh_axes in zip(tensor.shape, sharding, strict=True):
                assert size % shard_count(layout, mesh_axes) == 0, (tensor, sharding)
    for tensor in arrays_of(model).activations:
        used = [axis for mesh_axes in layout.activation_axes(tensor.axes) for axis in mesh_axes]
        assert len(used) == len(set(used)), tensor
        for size, mesh_axes in zip(tensor.shape, layout.activation_axes(tensor.axes), strict=True):
            assert size % shard_count(layout, mesh_axes) == 0, tensor


rules = st.dictionaries(
    st.sampled_from(["batch", "seq", "embed", "mlp", "heads", "kv_heads", "head_dim", "vocab", "state", "layers"]),
    st.lists(st.sampled_from(["x", "y", "z", "w", "w?", "s?", "data"]), max_size=3),
)


@settings(max_examples=150)
@given(meshes, rules, rules)
def test_any_partition_gives_either_problems_or_a_layout(mesh: str, parameters: Any, activations: Any):
    partition = PartitionConfig("any", parameters, activations, roles={"data": ["x", "w?"]})
    layout, problems = try_layout(mesh, partition)
    assert problems or layout is not None
    for problem in problems:
        assert problem.partition == "any" and str(problem).endswith(".")


def test_shardings_of_stored_and_computed_arrays():
    layout = legal_layout("4x4x2", PARTITION_CONFIGS["2d_tp_fsdp"])
    assert layout.stored_axes(("embed", "mlp")) == (("y", "z"), ("x",))
    assert layout.used_axes(("embed", "mlp")) == (("y",), ("x",))
    assert layout.activation_axes(("batch", "seq", "mlp")) == (("z",), (), ("x",))
    assert layout.stored_axes((None, "head_dim")) == ((), ())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dp", (("x", "y", "z"), ())),  # a replicated parameter's moments are split over all the data axes
        ("2d_tp", (("y", "z"), ("x",))),
        ("fsdp", (("x", "y", "z"), ())),  # nothing is left to split over
        ("1d_tp", (("y", "z"), ("x",))),
    ],
)
def test_zero1_shards_optimizer_state_over_unused_data_axes(name: str, expected: tuple[tuple[str, ...], ...]):
    axes, shape = ("embed", "mlp"), (128, 256)
    plain, zero1 = (
        legal_layout("4x4x2", PARTITION_CONFIGS[name]),
        legal_layout("4x4x2", replace(PARTITION_CONFIGS[name], zero1=True)),
    )
    assert plain.optimizer_axes(axes, shape) == plain.stored_axes(axes)
    assert zero1.optimizer_axes(axes, shape) == expected
    assert zero1.stored_axes(axes) == plain.stored_axes(axes)


def test_zero1_shards_the_first_divisible_dimension_except_layers():
    layout = legal_layout("4x4x2", replace(PARTITION_CONFIGS["2d_tp"], zero1=True))
    assert layout.optimizer_axes(("layers", "embed", None), (2, 4, 6)) == ((), ("y",), ("z",))
    assert layout.optimizer_axes(("layers", "embed"), (2, 4)) == ((), ("y",))


def test_layout_names_are_short_and_distinct():
    partition = PARTITION_CONFIGS["2d_tp"]
    assert legal_layout("4x4x2", partition).name == "4x4x2-2d_tp"
    assert (
        legal_layout("4x4x2", partition, microbatches=2, remat=load_remat("full")).name == "4x4x2-2d_tp-mb2-remat_full"
    )
    switched = replace(partition, zero1=True, parameter_memory=MemoryKind.host, optimizer_memory=MemoryKind.host)
    assert legal_layout("4x4x2", switched).name == "4x4x2-2d_tp-zero1-params_on_host-optim_on_host"
    placed = replace(parse_mesh("4x4x2"), placement=["z", "x", "y"])
    layout, problems = try_layout(placed, partition)
    assert problems == []
    assert layout is not None
    assert layout.name == "4x4x2-2d_tp-order_zxy"


def layout_problems(mesh: str, partition: PartitionConfig, **options: Any) -> list[Problem]:
    return try_layout(mesh, partition, **options)[1]


def test_the_error_for_an_indivisible_dimension_names_it_and_divisors():
    arrays = make_arrays(
        ("up", Tensor(("embed", "mlp"), (128, 130), ("model.embed", "model.mlp"))),
        ("other", Tensor(("mlp", None), (130, 5), ("model.mlp", None))),
        ("odd", Tensor(("state",), (3,), (None,))),
    )
    mlp, state = layout_problems("4x1x2", PARTITION_CONFIGS["2d_tp"], arrays=arrays)
    assert mlp.identity == (ProblemCode.not_divisible, "model.mlp", ("mlp",), ("x",))
    assert (mlp.size, mlp.parts, mlp.names, mlp.mesh_sizes) == (130, 4, ("up", "other"), (4,))
    assert (mlp.legal_sizes, mlp.nearest) == ((1, 2, 5, 10, 13, 26), (128, 132))
    assert state.identity == (ProblemCode.not_divisible, None, ("state",), ("x",))
    assert (state.size, state.parts, state.legal_sizes, state.nearest) == (3, 4, (1, 3), (4,))


def test_the_error_for_an_indivisible_batch_or_length_names_the_nearest_legal_ones():

    def find_problem(mesh: str, name: str, **options: int) -> tuple[Any, ...]:
        (problem,) = layout_problems(mesh, PARTITION_CONFIGS[name], **options)
        return problem.code, problem.mesh_axes, problem.size, problem.parts, problem.nearest

    batch, seq = ProblemCode.batch_not_divisible, ProblemCode.seq_not_divisible
    assert find_problem("4x4x2", "1d_tp", batch=30) == (batch, ("y", "z"), 30, 8, (24, 32))
    assert find_problem("4x4x2", "1d_tp", batch=30, microbatches=4) == (batch, ("y", "z"), 30, 32, (32,))
    assert find_problem("4x4x2", "sp", seq=130) == (seq, ("x",), 130, 4, (128, 132))
    assert find_problem("1x1x1", "dp", batch=5, microbatches=2) == (batch, (), 5, 2, (4, 6))


def test_an_axis_used_twice_is_refused_for_parameters_and_activations():
    partition = replace(
        PARTITION_CONFIGS["2d_tp"],
        parameters=PARTITION_CONFIGS["2d_tp"].parameters | {"mlp": ["y"]},
        activations=PARTITION_CONFIGS["2d_tp"].activations | {"embed": ["z"]},
    )
    parameters, activations = layout_problems("2x2x2", partition, arrays=arrays_of("longformer_tiny"))
    code = ProblemCode.mesh_axis_used_twice
    assert parameters.identity == (code, None, ("embed", "mlp"), ("y",))
    assert set(parameters.names) == {"feed_forward.up", "feed_forward.gate", "feed_forward.down"}
    assert activations.identity == (code, None, ("batch", "embed"), ("z",))


def test_an_axis_without_a_rule_is_replicated_or_follows_the_default():
    batch = {"batch": ["x"]}
    whole = legal_layout("2x1x1", PartitionConfig("mine", {}, batch))
    assert (
        whole.stored_axes(("layers", "embed", "mlp", None))
        == whole.activation_axes(("heads", "mlp", "embed", None))
        == ((),) * 4
    )
    arrays = make_arrays(("filter", Tensor(("layers", "conv"), (3, 8), ("model.layers", None))))
    with_default = legal_layout("2x1x2", PartitionConfig("mine", {}, batch, default=["z"]), arrays=arrays)
    assert with_default.stored_axes(("layers", "conv")) == ((), ("z",)) and with_default.activation_axes(
        ("seq", "conv")
    ) == (
        (),
        ("z",),
    )
    (problem,) = layout_problems("2x1x3", PartitionConfig("mine", {}, batch, default=["z"]), arrays=arrays)
    assert (problem.axes, problem.legal_sizes, problem.nearest) == (("conv",), (1, 2, 4, 8), (6, 9))


def test_a_rule_for_an_unknown_axis_is_refused_unless_marked_optional():
    def rule_problems(axis: str) -> list[tuple[ProblemCode, str | None, str | None]]:
        partition = PartitionConfig("mine", {axis: ["y"]}, {"batch": ["x"]})
        problems = layout_problems("2x1x1", partition, arrays=arrays_of("gpt_tiny"))
        return [(p.code, p.key, p.details["near"]) for p in problems]

    unknown = ProblemCode.unknown_logical_axis
    assert rule_problems("emebd") == [(unknown, "partition.parameters.emebd", "embed")]
    assert rule_problems("conv") == [(unknown, "partition.parameters.conv", None)]
    assert rule_problems("batch")[0][:2] == (unknown, "partition.parameters.batch")
    assert rule_problems("conv?") == rule_problems("state") == [], (
        "an axis that another model of the package has needs no mark"
    )


KEYS = Tensor(("kv_heads",), (2,), (None,))
HEADS = Tensor(("heads",), (16,), (None,))


@pytest.mark.parametrize(
    ("mesh", "rule", "split", "replicated"),
    [
        ("2x1x1", ["x"], ("x",), None),
        ("4x1x1", ["x"], (), ("x=4", 4)),
        ("2x4x1", ["x", "y"], ("x",), ("y=4", 8)),
        ("4x2x1", ["x", "y"], (), ("x=4·y=2", 8)),
    ],
)
def test_key_heads_are_sharded_like_heads_as_far_as_divisible(mesh, rule, split, replicated):
    arrays = make_arrays(("q", HEADS), ("k", KEYS), sharded_like={"kv_heads": "heads"})
    both = {"heads": rule, "kv_heads": rule}
    layout = legal_layout(mesh, PartitionConfig("mine", both, both), arrays=arrays)
    assert (
        layout.stored_axes(("heads", "kv_heads"))
        == layout.activation_axes(("heads", "kv_heads"))
        == (tuple(rule), split)
    )
    notes = ()
    if replicated is not None:
        axes, parts = replicated
        notes = (f"kv_heads (2) is replicated over {axes}, unlike heads, because its size is not divisible by {parts}",)
    assert layout.notes == notes
    otherwise = PartitionConfig("mine", {"heads": ["y"], "kv_heads": ["x"]}, {"batch": ["x"]})
    refused = {(p.axes, p.size, p.names) for p in layout_problems("4x1x1", otherwise, arrays=arrays)}
    assert (("kv_heads",), 2, ("k",)) in refused


def test_microbatches_and_meshes_are_checked_before_arrays():
    layout, problems = try_layout(MeshConfig(shape=[2, 2]), PARTITION_CONFIGS["dp"], microbatches=0)
    assert layout is None
    assert [(p.code, p.key) for p in problems] == [
        (ProblemCode.mesh_shape, "mesh.shape"),
        (ProblemCode.out_of_range, "microbatches"),
    ]


def test_an_expert_axis_that_dispatches_is_not_gathered():
    weights = Tensor(("layers", "experts", "embed", "mlp"), (2, 8, 64, 128), (None,) * 4)
    partition = PartitionConfig(
        "experts", {"experts": ["x"], "embed": ["y"], "mlp": ["z"]}, {"batch": ["x", "y"], "mlp": ["z"]}
    )
    gathered = make_arrays(("experts", weights))
    for arrays, used in (
        (gathered, ((), (), (), ("z",))),
        (replace(gathered, dispatched_axes=frozenset({"experts"})), ((), ("x",), (), ("z",))),
    ):
        layout = legal_layout("2x4x2", partition, arrays=arrays)
        assert layout.stored_axes(weights.axes) == ((), ("x",), ("y",), ("z",))
        assert layout.used_axes(weights.axes) == used
        sizes = {axis: np.array([size]) for axis, size in layout.mesh.axes.items()}
        ones = np.ones(1, np.int64)
        candidates = Candidates(partition, layout.parameters, layout.activations, arrays, sizes, {}, ones, ones)
        assert tuple(candidates.used_axes(axis) for axis in weights.axes) == used
        assert tuple(candidates.gathered_axes(axis) for axis in weights.axes) == layout.gathered_axes(weights.axes)
