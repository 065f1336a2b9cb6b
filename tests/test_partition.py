"""Tests of partitions: the rules and roles of every YAML, the roles of a launch environment, and refusals."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import MODELS, PARTITIONS, compose_run, is_supported, mark_slow_except
from valkyrie.config.run import Run
from valkyrie.models import known_axes
from valkyrie.parallel.layout import Layout
from valkyrie.parallel.mesh import MeshConfig, parse_mesh
from valkyrie.parallel.partition import PartitionConfig, Role, RoleKind, assign_roles, resolve_rules
from valkyrie.paths import read_group
from valkyrie.problems import Problem, ProblemCode
from valkyrie.records import dump, load
from valkyrie.runs.layout_record import LayoutRecord

AXES = list(known_axes())
PARTITION_CONFIGS = {partition.name: partition for partition in read_group("partition", PartitionConfig)}


@lru_cache
def compose_model_run(model: str) -> Run:
    return compose_run("mesh=1x1x1", "partition=dp", f"model={model}")


def layout_of(mesh: str, partition: str, model: str = "valkyrie_tiny") -> Layout:
    """Return the layout of a model under a mesh and a partition.

    Replaces both in a cached run, because composing a run for every case would take minutes.
    """
    run = compose_model_run(model)
    return Run(replace(run.config, mesh=parse_mesh(mesh), partition=PARTITION_CONFIGS[partition]), run.model).layout


ROLES = {
    "1d_tp": "x=4 MP1(mlp,heads,kv_heads,vocab,state) · y=4 DP(batch) · z=2 DP(batch)",
    "2d_tp": "x=4 MP1(mlp,heads,kv_heads,vocab,state) · y=4 MP2(embed) · z=2 DP(batch)",
    "2d_tp_fsdp": "x=4 MP1(mlp,heads,kv_heads,vocab,state) · y=4 MP2(embed) · z=2 FSDP(batch,embed)",
    "data_model_fsdp": "x=4 DP(batch) · y=4 MP1(mlp,heads,kv_heads,vocab,state) · z=2 FSDP(batch,embed)",
    "dp": "x=4 DP(batch) · y=4 DP(batch) · z=2 DP(batch)",
    "fsdp": "x=4 FSDP(batch,embed) · y=4 FSDP(batch,embed) · z=2 FSDP(batch,embed)",
    "pp": "x=4 DP(batch) · y=4 DP(batch) · z=2 PP(layers)",
    "pp_2d_tp": "x=4 MP1(mlp,heads,kv_heads,vocab,state) · y=4 MP2(embed) · z=2 PP(layers)",
    "pp_fsdp": "x=4 FSDP(batch,embed) · y=4 FSDP(batch,embed) · z=2 PP(layers)",
    "sp": "x=4 SP(seq) · y=4 FSDP(batch,embed) · z=2 FSDP(batch,embed)",
}


def test_partition_files_are_named_like_their_partitions():
    assert sorted(PARTITION_CONFIGS) == PARTITIONS
    assert set(ROLES) <= set(PARTITIONS)


@pytest.mark.parametrize("name", PARTITIONS)
def test_every_logical_axis_of_a_model_has_a_rule(name: str):
    partition, axes = PARTITION_CONFIGS[name], [*AXES, "conv"]
    for mesh in ("4x4x2", "2x4x4x1", "2s4x4x1", "2s2x2x2x2"):
        parameters, activations, problems = resolve_rules(partition, parse_mesh(mesh), axes)
        assert problems == []
        assert set(parameters) == set(axes) - {"batch", "seq"} and parameters["conv"] == ()
        assert set(activations) == set(axes) - {"layers"} and activations["conv"] == ()


@pytest.mark.parametrize(("name", "model"), [(p, m) for p in PARTITIONS for m in MODELS if is_supported(m, p)])
def test_every_partition_is_legal_for_every_tiny_model_on_32_devices(name: str, model: str):
    layout = layout_of("4x4x2", name, model)
    assert layout.name == f"4x4x2-{name}"
    assert RoleKind.idle not in {role.kind for role in layout.roles.values()}


@pytest.mark.parametrize("name", sorted(ROLES))
def test_roles_of_a_mesh(name: str):
    assert layout_of("4x4x2", name).describe_roles() == ROLES[name]


def test_an_axis_of_experts_also_splits_the_batch_and_the_other_parameters():
    layout = layout_of("2x2x2", "fsdp_ep", "moe_tiny")
    assert str(layout.roles["z"]) == "EP(batch,experts,embed)" and layout.degrees["EP"] == 2
    assert "EP" not in layout_of("2x2x2", "fsdp_ep").degrees
    weights = ("layers", "experts", "embed", "mlp")
    assert layout.stored_axes(weights) == ((), ("z",), ("x", "y"), ())
    assert layout.gathered_axes(weights) == ((), (), ("x", "y"), ())
    assert layout.stored_axes(("embed", "vocab")) == (("x", "y", "z"), ())
    assert layout.activation_axes(("experts", "batch", None)) == (("z",), ("x", "y"), ())
    assert layout.activation_axes((None, "batch", None)) == ((), ("x", "y", "z"), ())


@pytest.mark.parametrize("name", PARTITIONS)
@pytest.mark.parametrize("axis", ["w", "s"])
def test_a_fourth_axis_and_the_slice_axis_shard_data(name: str, axis: str):
    layout = layout_of("2x2x2x2" if axis == "w" else "2s2x2x2", name)
    assert layout.roles[axis].kind in (RoleKind.DP, RoleKind.FSDP)
    stages = layout.parameters["layers"]
    assert layout.activations["batch"][: len(stages) + 1] == (*stages, axis)
    if axis == "s":
        assert all("s" not in mesh_axes for mesh_axes in layout.parameters.values()), (
            "parameters cross the data-centre network"
        )


@pytest.mark.parametrize("name", PARTITIONS)
def test_axes_of_size_one_are_unused(name: str):
    assert set(layout_of("1x1x1", name).roles.values()) == {Role(RoleKind.unused)}


def test_roles_are_read_back_from_a_record():
    record = compose_run("model=gpt_tiny", "mesh=2x2x2", "partition=2d_tp_fsdp").layout_record()
    assert record.axis_roles and load(LayoutRecord, dump(record), "a record") == record


def resolve_data_model_fsdp(names: list[str], mesh: str = "4x4x2") -> tuple[dict[str, str], list[Problem]]:
    config = parse_mesh(mesh)
    config.names = names
    parameters, activations, problems = resolve_rules(PARTITION_CONFIGS["data_model_fsdp"], config, AXES)
    return {axis: str(role) for axis, role in assign_roles(config, parameters, activations).items()}, problems


MODEL_ROLE = "MP1(mlp,heads,kv_heads,vocab,state)"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["data", "model", "fsdp"], {"x": "DP(batch)", "y": MODEL_ROLE, "z": "FSDP(batch,embed)"}),
        (["fsdp", "data", "model"], {"x": "FSDP(batch,embed)", "y": "DP(batch)", "z": MODEL_ROLE}),
        (["replica", "fully_sharded", "tensor"], {"x": "DP(batch)", "y": "FSDP(batch,embed)", "z": MODEL_ROLE}),
        (["dp", "tp", "mp"], {"x": "DP(batch)", "y": MODEL_ROLE, "z": MODEL_ROLE}),
    ],
)
def test_axis_names_of_the_launch_environment_give_roles(names: list[str], expected: dict[str, str]):
    assert resolve_data_model_fsdp(names) == (expected, [])


@pytest.mark.parametrize("axis", mark_slow_except(range(4), [0]))
@pytest.mark.parametrize("role", ["replica", "model", "fsdp"])
def test_a_fourth_axis_has_the_role_that_the_launch_environment_gives_it(role: str, axis: int):
    names = ["data", "model", "fsdp"]
    names.insert(axis, role)
    run = compose_model_run("valkyrie_tiny")
    mesh = parse_mesh("2x2x2x2")
    mesh.names = names
    named_run = Run(replace(run.config, mesh=mesh, partition=PARTITION_CONFIGS["data_model_fsdp"]), run.model)
    assert named_run.problems() == []
    expected = {"replica": "DP(batch)", "data": "DP(batch)", "model": MODEL_ROLE, "fsdp": "FSDP(batch,embed)"}
    assert list(map(str, named_run.layout.roles.values())) == [expected[name] for name in names]


def test_an_axis_listed_by_name_and_by_role_is_used_once():
    partition = PartitionConfig(
        name="mine",
        parameters={"embed": ["w", "w"]},
        activations={"batch": ["w?", "data", "z"]},
        roles={"data": ["x"], "fsdp": ["z"]},
    )
    mesh = parse_mesh("2x4x4x2")
    mesh.names = ["replica", "data", "fsdp", "data"]
    parameters, activations, problems = resolve_rules(partition, mesh, AXES)
    assert (activations["batch"], problems) == (("w", "x", "z"), [])
    assert parameters["embed"] == ("w", "w"), "what was written twice is refused by the layout"


def test_an_unknown_axis_name_is_refused_unless_its_axis_has_size_one():
    (problem,) = resolve_data_model_fsdp(["data", "expert", "fsdp"])[1]
    assert (problem.code, problem.value, problem.mesh_axes) == (ProblemCode.unknown_role, "expert", ("y",))
    assert resolve_data_model_fsdp(["data", "expert", "fsdp"], "4x1x2")[1] == []


def test_axis_names_do_not_affect_a_partition_without_roles():
    mesh = parse_mesh("4x4x2")
    mesh.names = ["a", "b", "c"]
    assert resolve_rules(PARTITION_CONFIGS["2d_tp"], mesh, AXES) == resolve_rules(
        PARTITION_CONFIGS["2d_tp"], parse_mesh("4x4x2"), AXES
    )


def test_invalid_rules_are_refused():
    partition = PartitionConfig(
        name="mine", parameters={"mpl": ["x"], "mlp": ["w"]}, activations={"batch": ["s", "s?"], "seq": ["q"]}
    )
    problems = resolve_rules(partition, parse_mesh("4x4x2"), AXES)[2]
    assert [(p.code, p.key, p.mesh_axes) for p in problems] == [
        (ProblemCode.unknown_logical_axis, "partition.parameters.mpl", ()),
        (ProblemCode.missing_mesh_axis, "partition.parameters.mlp", ("w",)),
        (ProblemCode.missing_mesh_axis, "partition.activations.batch", ("s",)),
        (ProblemCode.missing_mesh_axis, "partition.activations.seq", ("q",)),
    ]


entries = st.lists(st.sampled_from(["x", "y", "z", "w", "w?", "s?", "data", "q"]), max_size=4)


@settings(max_examples=60)
@given(
    st.dictionaries(st.sampled_from([a for a in AXES if a not in ("batch", "seq")]), entries),
    st.dictionaries(st.sampled_from(["data", "x"]), st.lists(st.sampled_from(["x", "y", "w"]), max_size=2)),
    st.sampled_from(["4x4x2", "2x2x2x2", "2s2x2x2"]),
)
def test_resolved_rules_have_only_axes_of_the_mesh(
    rules: dict[str, list[str]], named: dict[str, list[str]], mesh_name: str
):
    mesh: MeshConfig = parse_mesh(mesh_name)
    partition = PartitionConfig(name="any", parameters=rules, activations={}, roles=named)
    parameters, _, problems = resolve_rules(partition, mesh, AXES)
    assert list(parameters)[: len(rules)] == list(rules)
    for logical, mesh_axes in parameters.items():
        assert set(mesh_axes) <= set(mesh.axes), (logical, mesh_axes)
    allowed = {entry for mesh_axes in rules.values() for entry in mesh_axes}
    if not problems:
        assert not {"q", "data"} & (allowed - set(named))
