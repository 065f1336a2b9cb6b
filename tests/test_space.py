"""A space of layouts: every cell legal, none missing, none twice, against brute force; and what a sweep makes of it."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.plugins.launcher import Launcher
from hydra.types import RunMode
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from helpers import MODELS, assembly_of, compose_config, compose_run, names, some_quick
from runs import TINY, start
from valkyrie.axes import LOGICAL_AXES
from valkyrie.compose import register
from valkyrie.hardware import topology_of
from valkyrie.models.base import flatten
from valkyrie.models.config import Activation
from valkyrie.parallel.layout import Layout, make_layout
from valkyrie.parallel.mesh import MeshConfig, parse_mesh
from valkyrie.parallel.partition import PartitionConfig
from valkyrie.parallel.placement import arrange, placements
from valkyrie.paths import conf_dir
from valkyrie.run import Run
from valkyrie.sweep.asked import Composer, read_asked
from valkyrie.sweep.layouts import Sweep, cells_of, count_line, reasons, spread
from valkyrie.sweep.meshes import Same, meshes_of
from valkyrie.sweep.space import Cells, Named, Shape, SpaceConfig, enumerate_space
from valkyrie.sweep.trial import Status, TrialLog

CELLS = {"laptop_8": (44, 39), "v4_64_topology": (62, 58), "partition_by_length": (42, 34), "pa_nas_1b": (52, 52)}
"""Of every enumerated sweep: its cells, and how many of them are legal."""
QUICK = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@lru_cache
def tiny(target: str) -> Run:
    return compose_run(f"target={target}", "mesh=1x1x8", "partition=dp")


# A space against brute force


KINDS = {
    "data": ([], ["batch"]),
    "sharded data": (["embed"], ["batch"]),
    "tensor": (["mlp", "heads", "kv_heads", "vocab", "state"], ["mlp", "heads", "kv_heads", "vocab", "state"]),
    "residual": (["embed"], ["embed"]),
    "sequence": ([], ["seq"]),
    "nothing": ([], []),
}
"""What a mesh axis may do under a partition: the logical axes of parameters and of activations that it splits."""


DRAWN = st.tuples(
    st.permutations(["x", "y", "z"]),
    st.lists(st.sampled_from(sorted(KINDS)), min_size=3, max_size=3),
    st.sampled_from([False, False, True]),
)
"""The order of the axes within rules, what each does, and ZeRO-1."""


def partition_of(order: Sequence[str], kinds: Sequence[str], zero1: bool) -> PartitionConfig:
    """A partition that gives x, y and z any kind of work, in any order within a rule."""
    parameters: dict[str, list[str]] = {a: [] for a in LOGICAL_AXES if a not in ("batch", "seq")}
    activations: dict[str, list[str]] = {a: [] for a in LOGICAL_AXES if a != "layers"}
    for axis, kind in zip(order, kinds, strict=True):
        for held, logical_axes in zip((parameters, activations), KINDS[kind], strict=True):
            for logical in logical_axes:
                held[logical].append(axis)
    return PartitionConfig("drawn", parameters, activations, zero1=zero1)


def sound(run: Run, mesh: MeshConfig, partition: PartitionConfig, microbatches: int) -> Layout | None:
    """The layout of a combination, None where it is illegal; by `make_layout` alone."""
    c = run.config
    layout, problems = make_layout(
        mesh,
        partition,
        microbatches=microbatches,
        remat=c.remat,
        tensors=run.model.tensors(),
        batch=c.batch,
        seq=c.seq,
    )
    return None if problems else layout


def where(layout: Layout) -> tuple[object, ...]:
    """Which part of every kind of array each device holds, found device by device."""
    mesh = layout.mesh
    devices = np.arange(mesh.size)
    grid = devices.reshape([*mesh.axes.values()])
    if mesh.placement is not None:
        grid = arrange(devices, mesh.placement, mesh.axes)
    found: list[object] = []
    for rules in (layout.parameters, layout.activations):
        for logical in sorted(rules):
            part = np.zeros(mesh.size, int)
            for place, device in np.ndenumerate(grid):
                at = dict(zip(mesh.axes, place, strict=True))
                for axis in rules[logical]:
                    part[device] = part[device] * mesh.axes[axis] + at[axis]
            found += [math.prod(mesh.axes[a] for a in rules[logical]), *part]
    return tuple(found)


def shapes_of_three(devices: int) -> list[str]:
    sizes = range(1, devices + 1)
    return ["x".join(map(str, abc)) for abc in itertools.product(sizes, repeat=3) if math.prod(abc) == devices]


@settings(QUICK, max_examples=50)
@example((["x", "z", "y"], ["data"] * 3, False), 4, 8, 16, None, Same.sharding, True)
@given(
    drawn=DRAWN,
    devices=st.sampled_from([1, 2, 4, 6]),
    batch=st.sampled_from([4, 8, 24]),
    seq=st.sampled_from([6, 16]),
    microbatches=st.sampled_from([None, [1], [1, 2], [4, 3]]),
    same=st.sampled_from([Same.none, Same.sharding]),
    placed=st.booleans(),
)
def test_every_cell_is_legal_none_is_missing_none_is_there_twice(
    drawn: tuple[list[str], list[str], bool],
    devices: int,
    batch: int,
    seq: int,
    microbatches: list[int] | None,
    same: Same,
    placed: bool,
):
    partition = partition_of(*drawn)
    target = replace(tiny("cpu8").config.target, chips=devices)
    base = tiny("cpu8")
    run = Run(replace(base.config, batch=batch, seq=seq, target=target), base.model)
    space = SpaceConfig(microbatches=microbatches, same=same, placements=["all" if placed else "default"])
    found = enumerate_space(space, [Shape((), run)], [Named("drawn", partition)])
    brute = {}
    for name in shapes_of_three(devices):
        mesh = parse_mesh(name)
        for placement in placements(mesh.axes, topology_of(target)) if placed else [None]:
            for count in microbatches or [1]:
                layout = sound(run, replace(mesh, placement=placement), partition, count)
                if layout is not None:
                    brute[name, tuple(placement or ()), count] = where(layout)
    cells = {
        (c.run.config.mesh.name, tuple(c.run.config.mesh.placement or ()), c.run.config.microbatches): c
        for c in found.legal
    }
    assert len(cells) == len(found.legal), "a cell is there twice"
    assert set(cells) <= set(brute), "a cell is illegal"
    assert all(cell.run.problems() == [] for cell in found.legal)
    if same is Same.none or partition.zero1:
        assert set(cells) == set(brute) or (placed and {brute[key] for key in cells} == set(brute.values()))
        return
    kept = [(brute[key], key[2]) for key in cells]
    assert len(kept) == len(set(kept)), "two cells put everything on the same devices"
    assert set(kept) == {(value, key[2]) for key, value in brute.items()}, "a layout is missing"


@QUICK
@given(drawn=DRAWN, devices=st.sampled_from([4, 8, 12]))
def test_roles_count_once_whatever_the_mesh(drawn: tuple[list[str], list[str], bool], devices: int):
    partition = partition_of(*drawn)
    base = tiny("cpu8")
    run = Run(replace(base.config, target=replace(base.config.target, chips=devices)), base.model)
    found = enumerate_space(SpaceConfig(same=Same.roles), [Shape((), run)], [Named("drawn", partition)])

    def devices_of_roles(layout: Layout) -> tuple[object, ...]:
        each: dict[str, int] = {}
        for axis, role in layout.roles.items():
            each[role] = each.get(role, 1) * layout.mesh.axes[axis]
        return tuple(sorted((role, size) for role, size in each.items() if size > 1))

    layouts = [sound(run, parse_mesh(name), partition, 1) for name in shapes_of_three(devices)]
    brute = [devices_of_roles(layout) for layout in layouts if layout is not None]
    kept = [devices_of_roles(cell.run.layout) for cell in found.legal]
    assert len(kept) == len(set(kept))
    # One mesh stands for all of its roles; it may be refused where another of them is not only for sizes of arrays,
    # which are split by the product: so all are legal, or none.
    assert set(kept) == set(brute)


@QUICK
@given(
    devices=st.integers(1, 48),
    sizes=st.lists(st.sampled_from(["A", "B", "C", "D", "1", "2", "3", "4"]), min_size=3, max_size=4),
    slices=st.sampled_from([None, 1, 2]),
)
def test_a_pattern_stands_for_every_mesh_that_fits_it(devices: int, sizes: list[str], slices: int | None):
    pattern = (f"{slices}s" if slices else "") + "x".join(sizes)
    inner = devices // (slices or 1)
    divisors = [n for n in range(1, inner + 1) if inner % n == 0] if inner * (slices or 1) == devices else []
    brute = []
    for shape in itertools.product(divisors, repeat=len(sizes)):
        letters: dict[str, set[int]] = {}
        for size, letter in zip(shape, sizes, strict=True):
            letters.setdefault(letter, set()).add(size)
        fits = all(found == {int(k)} if k.isdigit() else len(found) == 1 for k, found in letters.items())
        if fits and math.prod(shape) == inner:
            brute.append((f"{slices}s" if slices else "") + "x".join(map(str, shape)))
    if brute:
        assert meshes_of(pattern, devices) == brute
        assert all(parse_mesh(name).size == devices for name in brute)
    else:
        with pytest.raises(ValueError, match=f"meshes={pattern} stands for no mesh of {devices} devices. Write sizes"):
            meshes_of(pattern, devices)


def test_on_a_torus_meshes_stay_apart_unless_their_placement_is_written_down():
    """Where JAX lays an axis on the torus depends on the sizes of all: only a placement says it."""
    run = compose_run("target=v5e-8", "mesh=1x2x4", "partition=dp")
    fsdp = [Named("fsdp", compose_run("mesh=1x2x4", "partition=fsdp").config.partition)]
    counts = {
        (same, placement): len(
            enumerate_space(SpaceConfig(same=same, placements=[placement]), [Shape((), run)], fsdp).legal
        )
        for same in Same
        for placement in ("default", "all")
    }
    assert counts[Same.none, "default"] == counts[Same.sharding, "default"] == 10
    assert counts[Same.roles, "default"] == counts[Same.roles, "all"] == 1
    assert 1 < counts[Same.sharding, "all"] < counts[Same.none, "all"]


# What is left out, what is refused


ONLY_X = PartitionConfig(
    "only_x",
    {a: (["x"] if a == "mlp" else []) for a in LOGICAL_AXES if a not in ("batch", "seq")},
    {a: (["x"] if a == "mlp" else []) for a in LOGICAL_AXES if a != "layers"},
)


def cells(space: SpaceConfig, run: Run, *partitions: PartitionConfig) -> Cells:
    return enumerate_space(space, [Shape((), run)], [Named(p.name, p) for p in partitions])


def test_axes_that_a_partition_does_not_use_multiply_nothing():
    found = cells(SpaceConfig(meshes=["AxBxC", "AxBxCxD"]), tiny("cpu8"), ONLY_X)
    assert [cell.overrides for cell in found.cells] == [("mesh=8x1x1", "partition=only_x")]
    # Eleven meshes of three axes leave one idle; of four, 1x8x1x1 is the same as 8x1x1 and the others idle.
    assert sum(found.left_out.values()) == 9 + 20
    assert "  28 left out: meshes with an axis that their partition does not use" in count_line(found, found.legal)


def test_a_mesh_that_was_asked_for_is_refused_with_its_reason():
    found = cells(SpaceConfig(meshes=["4x2x1", "8x1x1"]), tiny("cpu8"), ONLY_X)
    assert [cell.legal for cell in found.cells] == [False, True]
    assert found.cells[0].problems[0].startswith("partition=only_x leaves mesh axis y=2 idle")
    assert not found.left_out


def test_a_partition_without_any_mesh_is_one_refusal():
    found = cells(SpaceConfig(meshes=["1xBxC"]), tiny("cpu8"), ONLY_X)
    assert len(found.cells) == len(found.refused) == 1
    assert "idle" in found.cells[0].problems[0]


def test_an_unsound_shape_is_said_once():
    run = compose_run("mesh=2x2x2", "partition=2d_tp")
    wrong = Run(run.config, replace(run.model, layers=0))
    found = enumerate_space(
        SpaceConfig(devices=8), [Shape(("model.layers=0",), wrong)], [Named("2d_tp", run.config.partition)]
    )
    assert [(c.overrides, c.problems) for c in found.cells] == [
        (("model.layers=0",), ("model.layers=0: at least 1 is needed.",))
    ]


def test_refusals_are_grouped_and_counted():
    found = asked_cells("hydra/sweeper=layouts", "target=cpu8", "batch=4")
    assert reasons(found)[0][0] == "batch=4 is not divisible by 8"
    assert sum(count for _, count in reasons(found)) == len(found.refused)
    line = count_line(found, found.legal[:3])
    assert line.startswith(
        f"{len(found.cells)} cells: {len(found.legal)} legal, {len(found.refused)} refused; "
        "hydra.sweeper.limit takes 3 of the legal ones\n"
    )
    assert " refused: heads (4) on x=8\n" in line


@pytest.mark.parametrize("key", ["parameters", "flops_per_token"])
def test_a_range_keeps_the_shapes_in_it(key: str):
    run = tiny("cpu8")
    runs = [Run(run.config, replace(run.model, layers=layers)) for layers in range(1, 9)]
    sizes = [
        float(r.model.parameter_count()) if key == "parameters" else r.model.flops_per_token(run.config.seq)
        for r in runs
    ]
    shapes = [Shape((f"model.layers={i + 1}",), r) for i, r in enumerate(runs)]
    dp = [Named("dp", run.config.partition)]
    for least, most, kept in ((sizes[2], sizes[4], [3, 4, 5]), (None, sizes[1], [1, 2]), (sizes[6] + 1, None, [8])):
        space = replace(SpaceConfig(meshes=["1x1x8"]), **{key: [least, most]})
        found = enumerate_space(space, shapes, dp)
        assert [cell.overrides[0] for cell in found.cells] == [f"model.layers={n}" for n in kept]
        assert sum(found.left_out.values()) == 8 - len(kept)
        assert key in next(iter(found.left_out))


@pytest.mark.parametrize("model", [*MODELS, "variants"])
def test_parameters_are_counted_as_they_are_built(model: str):
    run = compose_run(f"model={'valkyrie_tiny' if model == 'variants' else model}", "mesh=1x1x1", "partition=dp")
    if model == "variants":
        c = run.model
        c = replace(c, tie_embeddings=False, s5=replace(c.s5, activation=Activation.full_glu, bidirectional=True))
        c = replace(
            c, layers=5, attention=replace(c.attention, global_tokens=2, kv_heads=2), feed_forward_after=c.kinds[:1]
        )
        run = Run(run.config, c)
    assert run.model.parameter_count() == sum(spec.size for spec in flatten(assembly_of(run).specs).values())


def test_a_cell_takes_about_a_millisecond():
    space = SpaceConfig(placements=["all"])
    run = compose_run("target=v4-64", "mesh=4x4x2", "partition=2d_tp", "model=valkyrie_1b", "batch=64")
    started = time.process_time()
    found = cells(space, run, run.config.partition)
    assert len(found.cells) > 200
    assert (time.process_time() - started) / len(found.cells) < 0.02


# The command line


@contextmanager
def composer(*arguments: str) -> Iterator[tuple[Composer, list[str]]]:
    """The composer of a multirun with these arguments, and those that are not Hydra's own."""
    with initialize_config_dir(str(register()), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        master = loader.load_configuration("train", list(arguments), run_mode=RunMode.MULTIRUN)
        yield Composer(master, loader), [a for a in arguments if not a.startswith("hydra")]


def asked_cells(*arguments: str) -> Cells:
    with composer(*arguments) as (composing, task):
        return cells_of(read_asked(composing.config.hydra.sweeper.space, task, composing), composing)


def test_the_keys_of_the_space_are_those_of_its_file():
    with composer("hydra/sweeper=layouts") as (composing, _):
        written = OmegaConf.to_container(composing.config.hydra.sweeper.space)
    assert written == OmegaConf.to_container(OmegaConf.structured(SpaceConfig), enum_to_str=True)


def test_lists_of_the_command_line_replace_the_layouts_and_multiply_with_the_rest():
    given = ["sweep=laptop_8", "partition=dp,2d_tp", "mesh=2x2x2,1x1x8", "seq=64,128", "steps=7", "microbatches=1,2"]
    found = asked_cells(*given)
    wanted = {
        (f"seq={seq}", f"mesh={mesh}", f"partition={partition}", f"microbatches={count}")
        for seq in (64, 128)
        for partition, mesh in [("dp", "2x2x2"), ("2d_tp", "2x2x2"), ("2d_tp", "1x1x8")]
        for count in (1, 2)
    }
    assert {cell.overrides for cell in found.legal} == wanted
    assert len(found.cells) == len(wanted)
    assert found.left_out == {"meshes like another under their partition": 2}


def test_what_is_varied_together_stays_together():
    found = asked_cells("sweep=partition_by_length", "partition=sp", "mesh=4x1x2")
    assert [(c.run.config.seq, c.run.config.batch) for c in found.cells] == [(256, 32), (1024, 8), (4096, 2)]


def test_placements_of_the_command_line():
    found = asked_cells(
        "hydra/sweeper=layouts", "target=cpu8", "mesh=2x2x2", "partition=2d_tp", "mesh.placement=[z,x,y],null"
    )
    assert [cell.run.config.mesh.placement for cell in found.legal] == [["z", "x", "y"], None]
    assert found.legal[0].overrides[-1] == "mesh.placement=[z,x,y]"
    split = ["target=v4-64", "mesh=4x4x2", "partition=dp", "batch=32", "mesh.placement=[x:2,y,x:2,z]"]
    found = asked_cells("hydra/sweeper=layouts", *split)
    assert [cell.run.config.mesh.placement for cell in found.legal] == [["x:2", "y", "x:2", "z"]]


VARIED = ("microbatches=1,2", "remat=none,dots", "hydra.sweeper.space.placements=[default,'z,y,x']")
SAMPLED = {
    "laptop_8": VARIED,
    "pa_nas_1b": ("model.layers=18,24", "hydra.sweeper.space.vary={model.s5.state_size:1024}"),
    "hydra/sweeper": (
        *("model=gpt_tiny", "target=v5e-8,cpu8", "mesh=single,AxBx2", "precision=bf16"),
        "+hydra.sweeper.space.vary={prompt:['def f(a, b)','null']}",
    ),
    "partition_by_length": (
        "partition=fsdp,dp",
        "partition.zero1=true,false",
        "mesh=2x4x1",
        "prompt='a (b), c','null'",
    ),
}


@pytest.mark.parametrize(
    "sweep", [pytest.param(s, marks=[pytest.mark.slow] if s == "pa_nas_1b" else []) for s in SAMPLED]
)
def test_a_cell_is_the_run_that_its_overrides_compose_to(sweep: str):
    first = f"sweep={sweep}" if "/" not in sweep else f"{sweep}=layouts"
    with composer(first, *SAMPLED[sweep]) as (composing, task):
        asked = read_asked(composing.config.hydra.sweeper.space, task, composing)
        found = cells_of(asked, composing)
    assert len({cell.overrides for cell in found.cells}) == len(found.cells)
    for cell in spread(found.cells, 4):
        composed = Run.from_config(compose_config(*asked.fixed, *cell.overrides))
        assert composed == cell.run
        assert tuple(composed.problems()) == cell.problems


def test_partitions_as_shipped_are_those_that_hydra_composes():
    with composer("hydra/sweeper=layouts") as (composing, _):
        shipped = composing.partitions(["all"], [])
        assert [p.name for p in shipped] == names("partition")
        changed = composing.partitions(["dp", "fsdp"], ["partition.zero1=true"])
        assert [p.value for p in changed] == [replace(p.value, zero1=True) for p in shipped if p.name in ("dp", "fsdp")]
        assert composing.partitions(["sp"], ["partition.zero1=false"])[0].value == shipped[-1].value


ENUMERATED = [
    name for name in names("sweep") if "sweeper: layouts" in (conf_dir() / "sweep" / f"{name}.yaml").read_text()
]


def test_every_enumerated_sweep_has_its_numbers_here():
    assert set(CELLS) == set(ENUMERATED)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n == "pa_nas_1b" else []) for n in ENUMERATED]
)
def test_every_enumerated_sweep_has_legal_cells(name: str):
    found = asked_cells(f"sweep={name}")
    assert (len(found.cells), len(found.legal)) == CELLS[name]
    assert f"{len(found.legal)} " in (conf_dir() / "sweep" / f"{name}.yaml").read_text(), "its comment says how many"


def test_the_laptop_sweep_has_the_same_cells_on_eight_chips():
    def asked(*arguments: str) -> list[tuple[str, ...]]:
        return [cell.overrides for cell in asked_cells("sweep=laptop_8", *arguments).cells]

    assert asked() == asked("mode=compile", "target=v5e-8")


# The sweeper


class Recording(Launcher):
    """A launcher that starts nothing."""

    def __init__(self) -> None:
        self.jobs: list[Sequence[str]] = []

    def setup(self, **_: Any) -> None:
        raise AssertionError("the sweeper was given a launcher that is ready")

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[Any]:
        assert initial_job_idx == 0
        self.jobs += job_overrides
        return []


def sweep(folder: Path, *arguments: str) -> list[Sequence[str]]:
    launcher = Recording()
    with composer(*arguments, f"hydra.sweep.dir={folder}") as (composing, task):
        sweeper = composing.config.hydra.sweeper
        Sweep(composing.config, composing.loader, task).run(sweeper.space, sweeper.limit, launcher)
    return launcher.jobs


def test_legal_cells_are_launched_and_refused_ones_recorded_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    arguments = ["sweep=laptop_8", "partition=1d_tp,2d_tp", "steps=3", "hydra.sweeper.limit=5"]
    jobs = sweep(tmp_path, *arguments)
    assert len(jobs) == 5
    assert all(job[:2] == ["sweep=laptop_8", "steps=3"] and job[2].startswith("mesh=") for job in jobs)
    assert "14 cells: 12 legal, 2 refused; hydra.sweeper.limit takes 5 of the legal ones" in capsys.readouterr().out
    trials = TrialLog(tmp_path).read()
    assert [(t.status, t.stage, t.about["partition"]) for t in trials] == [
        (Status.refused, "measure", "1d_tp"),
        (Status.refused, "measure", "2d_tp"),
    ]
    assert all("heads (4)" in (t.reason or "") and t.folder is None for t in trials)
    assert trials[0].overrides == ["sweep=laptop_8", "steps=3", "mesh=8x1x1", "partition=1d_tp"]
    assert sweep(tmp_path, *arguments) == jobs
    assert len((tmp_path / "trials.jsonl").read_text().splitlines()) == 2, "what is recorded is not recorded again"
    assert (tmp_path / "multirun.yaml").is_file()


WRONG = {
    "no such key": (
        ["hydra.sweeper.space={mesh:[2x2x2]}"],
        "hydra.sweeper.space.mesh is not a key. Did you mean hydra.sweeper.space.meshes?",
    ),
    "a word that is none": (
        ["hydra.sweeper.space.same=all"],
        "hydra.sweeper.space.same: Invalid value 'all', expected one of [none, sharding, roles].",
    ),
    "a mesh that no devices make": (
        ["hydra.sweeper.space.meshes=[Ax3xB]"],
        "meshes=Ax3xB stands for no mesh of 8 devices. Write sizes that divide 8 and letters for those to be found",
    ),
    "another number of devices": (
        ["hydra.sweeper.space.devices=16"],
        "hydra.sweeper.space.devices=16, but target=cpu8 has 8 devices. Leave hydra.sweeper.space.devices out, or",
    ),
    "no range": (
        ["hydra.sweeper.space.parameters=[2e9,1e9]"],
        "hydra.sweeper.space.parameters=[2e+09,1e+09] is no range: write [least, most], with null for no bound.",
    ),
    "an empty list": (["hydra.sweeper.space.meshes=[]"], "hydra.sweeper.space.meshes=[] leaves no cell: name at least"),
    "a layout's key among the others": (
        ["+hydra.sweeper.space.vary.remat=[none]"],
        "hydra.sweeper.space.vary.remat: a layout's own key. Write hydra.sweeper.space.remat.",
    ),
    "an interval": (["seq=interval(1,9)"], "seq=interval(1,9): a space is made of single values."),
    "no microbatches": (["microbatches=two,1"], "microbatches=two,1: Value 'two' of type 'str' could not be converted"),
    "no such partition": (["partition=2dtp,dp"], "partition=2dtp is not a choice. Did you mean partition=2d_tp?"),
    "no such value": (["seq=64,abc"], "seq=abc: seq: Value 'abc' of type 'str' could not be converted to Integer."),
    "one of what goes together": (
        ["sweep=partition_by_length", "seq=64"],
        "seq=64: this sweep varies seq,batch together.",
    ),
    "no limit": (["hydra.sweeper.limit=0"], "hydra.sweeper.limit=0: at least 1 is needed, or null for no limit."),
}


@pytest.mark.parametrize("case", some_quick(WRONG, [*WRONG][::3]))
def test_errors_say_what_to_write(command: Any, tmp_path: Path, case: str):
    arguments, said = WRONG[case]
    folder = f"hydra.sweep.dir={tmp_path}/out"
    ended = command("-m", "hydra/sweeper=layouts", "target=cpu8", "hydra/launcher=basic", folder, *arguments)
    assert ended.status == 2
    assert said in ended.err
    assert "Traceback" not in ended.err


# For real: a process a trial


def rates(folder: Path) -> dict[tuple[str, int], float]:
    """Tokens per second and chip of every measured trial, by partition and microbatches."""
    ended = [t for t in TrialLog(folder).read() if t.status is Status.ok]
    return {
        (t.about["partition"], t.about["microbatches"]): t.results["step"]["tokens_per_second_per_chip"] for t in ended
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_space_is_measured_and_nothing_of_it_twice(tmp_path: Path):
    given = [*TINY, "mode=measure", "target=cpu8", "mesh=2x2x2", "partition=dp,2d_tp", "microbatches=1,2", "name=s"]
    for _ in range(2):
        with start("-m", "hydra/sweeper=layouts", *given, cwd=tmp_path) as process:
            out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        assert out.startswith("4 cells: 3 legal, 1 refused\n     1 refused: batch=8 is not divisible by 16\n")
        assert set(rates(tmp_path / "runs" / "s")) == {("dp", 1), ("2d_tp", 1), ("2d_tp", 2)}
        assert len((tmp_path / "runs" / "s" / "trials.jsonl").read_text().splitlines()) == 4


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_optuna_finds_the_layout_with_the_most_tokens(tmp_path: Path):
    """What is refused counts as 0; what is asked for again is not measured again."""
    swept = [
        "hydra.sweeper.params={partition:'choice(dp,2d_tp)',microbatches:'choice(1,2)'}",
        "hydra.sweeper.n_trials=5",
    ]
    with start("-m", "+sweep=laptop_optuna", *TINY, *swept, cwd=tmp_path) as process:
        _, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    folder = tmp_path / "runs" / "laptop_optuna"
    found = OmegaConf.load(folder / "optimization_results.yaml")
    best = (found.best_params.partition, int(found.best_params.microbatches))
    assert found.best_value == pytest.approx(max(rates(folder).values()))
    assert rates(folder)[best] == pytest.approx(found.best_value)
    trials = TrialLog(folder).read()
    assert len(trials) == len((folder / "trials.jsonl").read_text().splitlines()) <= 4


def test_partitions_are_those_of_each_experiment(tmp_path: Path):
    """An experiment may change a key of the partition, which the layouts of its own shapes then have."""
    (tmp_path / "experiment").mkdir()
    for name, zero1 in (("with", "true"), ("without", "false")):
        text = f"# @package _global_\npartition: {{zero1: {zero1}}}\n"
        (tmp_path / "experiment" / f"{name}.yaml").write_text(text)
    searched = f"hydra.searchpath=[valkyrie://groups,file://{tmp_path}]"
    found = asked_cells("hydra/sweeper=layouts", searched, "experiment=with,without", "partition=fsdp", "mesh=2x2x2")
    told = {cell.overrides[0]: cell.run.config.partition.zero1 for cell in found.legal}
    assert told == {"experiment=with": True, "experiment=without": False}
