"""Tests of enumerated layouts: legal, complete and without duplicates, compared with brute force."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from helpers import MODELS, compose_run, count_learned_parameters, make_builder
from valkyrie.config.run import Run
from valkyrie.hardware.target import build_topology, simulated_target
from valkyrie.models import known_axes
from valkyrie.models.s5 import Activation
from valkyrie.parallel.layout import Layout, make_layout
from valkyrie.parallel.mesh import MeshConfig, parse_mesh
from valkyrie.parallel.partition import PartitionConfig
from valkyrie.parallel.placement import arrange, list_placements
from valkyrie.problems import ProblemCode
from valkyrie.sweep.cells import Cells, enumerate_space, expand_pattern
from valkyrie.sweep.layouts import describe_counts
from valkyrie.sweep.space import MeshEquivalence, RunVariant, SpaceConfig

QUICK = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@lru_cache
def tiny(target: str) -> Run:
    return compose_run(f"target={target}", "mesh=1x1x8", "partition=dp")


# A space against brute force


AXIS_USES = {
    "data": ([], ["batch"]),
    "sharded data": (["embed"], ["batch"]),
    "tensor": (["mlp", "heads", "kv_heads", "vocab", "state"], ["mlp", "heads", "kv_heads", "vocab", "state"]),
    "residual": (["embed"], ["embed"]),
    "sequence": ([], ["seq"]),
    "nothing": ([], []),
}
"""Ways to use a mesh axis: the logical axes that it shards, of parameters and of activations."""


PARTITION_ARGUMENTS = st.tuples(
    st.permutations(["x", "y", "z"]),
    st.lists(st.sampled_from(sorted(AXIS_USES)), min_size=3, max_size=3),
    st.sampled_from([False, False, True]),
)
"""Strategy for the arguments of `make_partition`: order of mesh axes, use of each axis, and whether ZeRO-1 is on."""


def make_partition(order: Sequence[str], uses: Sequence[str], zero1: bool) -> PartitionConfig:
    """Return a partition that uses the mesh axis `order[i]` as `AXIS_USES[uses[i]]`.

    Logical axes with several mesh axes have them in `order`.
    """
    parameters: dict[str, list[str]] = {}
    activations: dict[str, list[str]] = {}
    for axis, use in zip(order, uses, strict=True):
        for rules, logical_axes in zip((parameters, activations), AXIS_USES[use], strict=True):
            for logical in logical_axes:
                rules.setdefault(logical, []).append(axis)
    return PartitionConfig("drawn", parameters, activations, zero1=zero1)


def legal_layout(run: Run, mesh: MeshConfig, partition: PartitionConfig, microbatches: int) -> Layout | None:
    """Return the layout that `make_layout` builds from a combination, or None if it is illegal."""
    c = run.config
    layout, problems = make_layout(
        mesh,
        partition,
        run.arrays,
        microbatches=microbatches,
        remat=c.remat,
        known_axes=known_axes(),
        batch=c.batch,
        seq=c.seq,
        advise=False,
    )
    return None if problems else layout


def shard_indices(layout: Layout) -> tuple[object, ...]:
    """Return, for each logical axis, its number of shards and the shard index of every device.

    The logical axes of parameters come first, then those of activations.
    """
    mesh = layout.mesh
    devices = np.arange(mesh.size)
    grid = devices.reshape([*mesh.axes.values()])
    if mesh.placement is not None:
        grid = arrange(devices, mesh.placement, mesh.axes)
    shards: list[object] = []
    for rules in (layout.parameters, layout.activations):
        for logical in sorted(rules):
            shard_index = np.zeros(mesh.size, int)
            for coordinates, device in np.ndenumerate(grid):
                coordinate_by_axis = dict(zip(mesh.axes, coordinates, strict=True))
                for axis in rules[logical]:
                    shard_index[device] = shard_index[device] * mesh.axes[axis] + coordinate_by_axis[axis]
            shards += [math.prod(mesh.axes[a] for a in rules[logical]), *shard_index]
    return tuple(shards)


def shapes_of_three(devices: int) -> list[str]:
    sizes = range(1, devices + 1)
    return ["x".join(map(str, abc)) for abc in itertools.product(sizes, repeat=3) if math.prod(abc) == devices]


@settings(QUICK, max_examples=50)
@example((["x", "z", "y"], ["data"] * 3, False), 4, 8, 16, None, MeshEquivalence.sharding, True)
@given(
    drawn=PARTITION_ARGUMENTS,
    devices=st.sampled_from([1, 2, 4, 6]),
    batch=st.sampled_from([4, 8, 24]),
    seq=st.sampled_from([6, 16]),
    microbatches=st.sampled_from([None, [1], [1, 2], [4, 3]]),
    same=st.sampled_from([MeshEquivalence.none, MeshEquivalence.sharding]),
    all_placements=st.booleans(),
)
def test_every_legal_layout_is_enumerated_once(
    drawn: tuple[list[str], list[str], bool],
    devices: int,
    batch: int,
    seq: int,
    microbatches: list[int] | None,
    same: MeshEquivalence,
    all_placements: bool,
):
    partition = make_partition(*drawn)
    target = simulated_target(devices)
    base = tiny("cpu8")
    run = Run(replace(base.config, batch=batch, seq=seq, target=target), base.model)
    space = SpaceConfig(microbatches=microbatches, same=same, placements=["all" if all_placements else "default"])
    enumerated = enumerate_space(space, [RunVariant((), run)], {"drawn": partition})
    brute_force = {}
    for name in shapes_of_three(devices):
        mesh = parse_mesh(name)
        for placement in list_placements(mesh.axes, build_topology(target)) if all_placements else [None]:
            for count in microbatches or [1]:
                layout = legal_layout(run, replace(mesh, placement=placement), partition, count)
                if layout is not None:
                    brute_force[name, tuple(placement or ()), count] = shard_indices(layout)
    cells = {
        (c.run.config.mesh.name, tuple(c.run.config.mesh.placement or ()), c.run.config.microbatches): c
        for c in enumerated.legal
    }
    assert len(cells) == len(enumerated.legal), "a cell is there twice"
    assert set(cells) <= set(brute_force), "a cell is illegal"
    assert all(cell.run.problems() == [] for cell in enumerated.legal)
    if same is MeshEquivalence.none or partition.zero1:
        assert set(cells) == set(brute_force) or (
            all_placements and {brute_force[key] for key in cells} == set(brute_force.values())
        )
        return
    enumerated_layouts = [(brute_force[key], key[2]) for key in cells]
    assert len(enumerated_layouts) == len(set(enumerated_layouts)), "two cells put everything on the same devices"
    assert set(enumerated_layouts) == {(value, key[2]) for key, value in brute_force.items()}, "a layout is missing"


@QUICK
@given(drawn=PARTITION_ARGUMENTS, devices=st.sampled_from([4, 8, 12]))
def test_layouts_with_the_same_roles_are_enumerated_once(drawn: tuple[list[str], list[str], bool], devices: int):
    partition = make_partition(*drawn)
    base = tiny("cpu8")
    run = Run(replace(base.config, target=simulated_target(devices)), base.model)
    enumerated = enumerate_space(SpaceConfig(same=MeshEquivalence.roles), [RunVariant((), run)], {"drawn": partition})

    def devices_of_roles(layout: Layout) -> tuple[object, ...]:
        sizes: dict[str, int] = {}
        for axis, role in layout.roles.items():
            sizes[str(role)] = sizes.get(str(role), 1) * layout.mesh.axes[axis]
        return tuple(sorted((role, size) for role, size in sizes.items() if size > 1))

    layouts = [legal_layout(run, parse_mesh(name), partition, 1) for name in shapes_of_three(devices)]
    brute_force = [devices_of_roles(layout) for layout in layouts if layout is not None]
    enumerated_layouts = [devices_of_roles(cell.run.layout) for cell in enumerated.legal]
    assert len(enumerated_layouts) == len(set(enumerated_layouts))
    # One mesh represents all meshes with the same number of devices in every role. Arrays must be divisible by the
    # product of the axes with a role, so either all of these meshes are legal or none is.
    assert set(enumerated_layouts) == set(brute_force)


@QUICK
@given(
    devices=st.integers(1, 48),
    sizes=st.lists(st.sampled_from(["A", "B", "C", "D", "1", "2", "3", "4"]), min_size=3, max_size=4),
    slices=st.sampled_from([None, 1, 2]),
)
def test_a_mesh_pattern_matches_every_mesh_that_fits_it(devices: int, sizes: list[str], slices: int | None):
    pattern = (f"{slices}s" if slices else "") + "x".join(sizes)
    inner = devices // (slices or 1)
    divisors = [n for n in range(1, inner + 1) if inner % n == 0] if inner * (slices or 1) == devices else []
    brute_force = []
    for shape in itertools.product(divisors, repeat=len(sizes)):
        letters: dict[str, set[int]] = {}
        for size, letter in zip(shape, sizes, strict=True):
            letters.setdefault(letter, set()).add(size)
        fits = all(found == {int(k)} if k.isdigit() else len(found) == 1 for k, found in letters.items())
        if fits and math.prod(shape) == inner:
            brute_force.append((f"{slices}s" if slices else "") + "x".join(map(str, shape)))
    if brute_force:
        assert expand_pattern(pattern, devices) == brute_force
        assert all(parse_mesh(name).size == devices for name in brute_force)
    else:
        with pytest.raises(ValueError, match=f"meshes={pattern} "):
            expand_pattern(pattern, devices)


def test_equivalent_meshes_on_a_torus_are_distinct_unless_their_placement_is_explicit():
    """JAX chooses the torus axes of a mesh axis by the sizes of all mesh axes. Only a placement fixes them."""
    run = compose_run("target=v5e-8", "mesh=1x2x4", "partition=dp")
    fsdp = {"fsdp": compose_run("mesh=1x2x4", "partition=fsdp").config.partition}
    counts = {
        (same, placement): len(
            enumerate_space(SpaceConfig(same=same, placements=[placement]), [RunVariant((), run)], fsdp).legal
        )
        for same in MeshEquivalence
        for placement in ("default", "all")
    }
    assert counts[MeshEquivalence.none, "default"] == counts[MeshEquivalence.sharding, "default"] == 10
    assert counts[MeshEquivalence.roles, "default"] == counts[MeshEquivalence.roles, "all"] == 1
    assert 1 < counts[MeshEquivalence.sharding, "all"] < counts[MeshEquivalence.none, "all"]


# Skipped and refused layouts


ONLY_X = PartitionConfig("only_x", {"mlp": ["x"]}, {"mlp": ["x"]})


def enumerate_layouts(space: SpaceConfig, run: Run, *partitions: PartitionConfig) -> Cells:
    return enumerate_space(space, [RunVariant((), run)], {p.name: p for p in partitions})


def test_axes_that_a_partition_does_not_use_add_no_layouts():
    enumerated = enumerate_layouts(SpaceConfig(meshes=["AxBxC", "AxBxCxD"]), tiny("cpu8"), ONLY_X)
    assert [cell.overrides for cell in enumerated.cells] == [("mesh=8x1x1", "partition=only_x")]
    # 9 of the 10 meshes with three axes leave an axis idle, and 19 of the 20 with four. 1x8x1x1 is the same as 8x1x1.
    codes = Counter(problem.code for problem in enumerated.skip_problems)
    assert codes == {ProblemCode.idle_mesh_axis: 28, ProblemCode.same_sharding: 1}
    assert " 1 skipped" in describe_counts(enumerated, enumerated.legal)


def test_a_requested_illegal_mesh_is_refused_with_the_reason():
    enumerated = enumerate_layouts(SpaceConfig(meshes=["4x2x1", "8x1x1"]), tiny("cpu8"), ONLY_X)
    assert [bool(cell.problems) for cell in enumerated.cells] == [True, False]
    assert enumerated.cells[0].problems[0].identity == (ProblemCode.idle_mesh_axis, None, (), ("y",))
    assert not enumerated.skip_problems


def test_a_partition_without_a_legal_mesh_is_refused_once():
    enumerated = enumerate_layouts(SpaceConfig(meshes=["1xBxC"]), tiny("cpu8"), ONLY_X)
    assert len(enumerated.cells) == len(enumerated.refused) == 1
    assert enumerated.cells[0].problems[0].code is ProblemCode.idle_mesh_axis


def test_an_invalid_mesh_is_reported_once():
    run = compose_run("mesh=2x2x2", "partition=2d_tp")
    wrong = Run(run.config, replace(run.model, layers=0))
    enumerated = enumerate_space(
        SpaceConfig(devices=8), [RunVariant(("model.layers=0",), wrong)], {"2d_tp": run.config.partition}
    )
    (cell,) = enumerated.cells
    assert cell.overrides == ("model.layers=0",) and [p.key for p in cell.problems] == ["model.layers"]


@pytest.mark.parametrize("key", ["parameters", "flops_per_token"])
def test_a_range_keeps_only_the_meshes_in_it(key: str):
    run = tiny("cpu8")
    runs = [Run(run.config, replace(run.model, layers=layers)) for layers in range(1, 9)]
    sizes = [
        float(r.model.parameter_count()) if key == "parameters" else r.model.flops_per_token(run.config.seq)
        for r in runs
    ]
    shapes = [RunVariant((f"model.layers={i + 1}",), r) for i, r in enumerate(runs)]
    dp = {"dp": run.config.partition}
    for least, most, expected in ((sizes[2], sizes[4], [3, 4, 5]), (None, sizes[1], [1, 2]), (sizes[6] + 1, None, [8])):
        space = replace(SpaceConfig(meshes=["1x1x8"]), **{key: [least, most]})
        enumerated = enumerate_space(space, shapes, dp)
        assert [cell.overrides[0] for cell in enumerated.cells] == [f"model.layers={n}" for n in expected]
        assert [(p.code, p.key) for p in enumerated.skip_problems] == [(ProblemCode.out_of_range, key)] * (
            8 - len(expected)
        )


@pytest.mark.parametrize("model", [*MODELS, "variants"])
def test_parameter_counts_equal_those_of_the_built_model(model: str):
    run = compose_run(f"model={'valkyrie_tiny' if model == 'variants' else model}", "mesh=1x1x1", "partition=dp")
    if model == "variants":
        c = run.model
        c = replace(c, tie_embeddings=False, s5=replace(c.s5, activation=Activation.full_glu, bidirectional=True))
        c = replace(
            c,
            layers=5,
            attention=replace(c.attention, global_tokens=2, kv_heads=2),
            feed_forward_after=c.mixer_kinds[:1],
        )
        run = Run(run.config, c)
    assert run.model.parameter_count() == count_learned_parameters(make_builder(run))


def test_enumerating_a_layout_takes_less_than_20_ms():
    space = SpaceConfig(placements=["all"])
    run = compose_run("target=v4-64", "mesh=4x4x2", "partition=2d_tp", "model=valkyrie_1b", "batch=64")
    start = time.process_time()
    enumerated = enumerate_layouts(space, run, run.config.partition)
    assert len(enumerated.cells) > 200
    assert (time.process_time() - start) / len(enumerated.cells) < 0.02


def test_an_enumerated_layout_equals_that_of_its_run():
    run = compose_run("model=gpt_tiny", "mesh=1x1x1", "partition=dp", "model.attention.kv_heads=2", "batch=8")
    rules = {axis: ["x"] for axis in ("heads", "kv_heads", "state")}  # a GPT has no axis `state`, another model has
    partition = PartitionConfig(name="mine", parameters=rules, activations=rules | {"batch": ["z"]})
    mesh = parse_mesh("4x1x2")
    layout = run.changed(mesh=mesh, partition=partition).layout
    assert layout.notes, "two key heads are whole over four devices"
    assert run.layout_on(mesh, partition) == layout
    space = SpaceConfig(meshes=["4x1x2"], partitions=["mine"])
    (cell,) = enumerate_space(space, [RunVariant((), run)], {"mine": partition}).cells
    assert cell.run.layout == layout
