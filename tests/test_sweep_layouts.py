"""Tests of `hydra/sweeper=layouts`: the layouts enumerated for a command line, and how the sweeper runs them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hydra import initialize_config_dir
from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, RunMode
from omegaconf import OmegaConf, open_dict

from helpers import compose_config, config_names, mark_slow_except
from runs import TINY_ARGUMENTS, start_training
from valkyrie.config.compose import register
from valkyrie.config.run import Run
from valkyrie.paths import conf_dir
from valkyrie.problems import DIVISIBILITY_CODES, ProblemCode
from valkyrie.sweep.cells import Cells
from valkyrie.sweep.composer import Composer, _JobKind, _with_numbers
from valkyrie.sweep.layouts import count_kinds, describe_counts, enumerate_cells, sample_evenly, sweep_layouts
from valkyrie.sweep.space import SpaceConfig, read_space
from valkyrie.sweep.trial import Status, TrialLog

CELLS = {"laptop_8": (62, 49), "v4_64_topology": (62, 58), "partition_by_length": (54, 44), "pa_nas_1b": (52, 52)}
"""Number of layouts, and number of legal layouts, by enumerated sweep."""


@contextmanager
def make_composer(*arguments: str) -> Iterator[tuple[Composer, list[str]]]:
    """Yield the composer of a multirun with these arguments, and the arguments that are not settings of Hydra."""
    with initialize_config_dir(str(register()), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        master = loader.load_configuration("train", list(arguments), run_mode=RunMode.MULTIRUN)
        yield Composer(master, loader), [a for a in arguments if not a.startswith("hydra")]


def enumerate_command(*arguments: str) -> Cells:
    with make_composer(*arguments) as (composer, task):
        return enumerate_cells(read_space(composer.config.hydra.sweeper.space, task, composer), composer)


def test_keys_of_the_space_equal_those_of_its_file():
    with make_composer("hydra/sweeper=layouts") as (composer, _):
        written = OmegaConf.to_container(composer.config.hydra.sweeper.space)
    assert written == OmegaConf.to_container(OmegaConf.structured(SpaceConfig), enum_to_str=True)


def test_lists_on_the_command_line_replace_layouts_and_multiply_other_settings():
    arguments = [
        "sweep=laptop_8",
        "partition=dp,2d_tp",
        "mesh=2x2x2,1x1x8",
        "seq=64,128",
        "steps=7",
        "microbatches=1,2",
    ]
    enumerated = enumerate_command(*arguments)
    expected = {
        (f"seq={seq}", f"mesh={mesh}", f"partition={partition}", f"microbatches={count}")
        for seq in (64, 128)
        for partition, mesh in [("dp", "2x2x2"), ("2d_tp", "2x2x2"), ("2d_tp", "1x1x8")]
        for count in (1, 2)
    }
    assert {cell.overrides for cell in enumerated.legal} == expected
    assert len(enumerated.cells) == len(expected)
    assert [p.code for p in enumerated.skip_problems] == [ProblemCode.same_sharding] * 2


def test_a_glob_on_the_command_line_selects_the_choices_that_match():
    with make_composer("sweep=laptop_8", "partition=glob(*_tp)") as (composer, arguments):
        space = read_space(composer.config.hydra.sweeper.space, arguments, composer)
    assert space.config.partitions == [name for name in config_names("partition") if name.endswith("_tp")]


def test_settings_varied_together_stay_together():
    enumerated = enumerate_command("sweep=partition_by_length", "partition=sp", "mesh=4x1x2")
    assert [(c.run.config.seq, c.run.config.batch) for c in enumerated.cells] == [(256, 32), (1024, 8), (4096, 2)]


def test_placements_can_be_listed_on_the_command_line():
    enumerated = enumerate_command(
        "hydra/sweeper=layouts", "target=cpu8", "mesh=2x2x2", "partition=2d_tp", "mesh.placement=[z,x,y],null"
    )
    assert [cell.run.config.mesh.placement for cell in enumerated.legal] == [["z", "x", "y"], None]
    assert enumerated.legal[0].overrides[-1] == "mesh.placement=[z,x,y]"
    split = ["target=v4-64", "mesh=4x4x2", "partition=dp", "batch=32", "mesh.placement=[x:2,y,x:2,z]"]
    enumerated = enumerate_command("hydra/sweeper=layouts", *split)
    assert [cell.run.config.mesh.placement for cell in enumerated.legal] == [["x:2", "y", "x:2", "z"]]


VARIED = ("microbatches=1,2", "remat=none,dots", "hydra.sweeper.space.placements=[default,'z,y,x']")
SWEEP_ARGUMENTS = {
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
    "sweep", [pytest.param(s, marks=[] if s == "hydra/sweeper" else [pytest.mark.slow]) for s in SWEEP_ARGUMENTS]
)
@pytest.mark.slow
def test_an_enumerated_run_equals_the_one_its_overrides_compose(sweep: str):
    first = f"sweep={sweep}" if "/" not in sweep else f"{sweep}=layouts"
    with make_composer(first, *SWEEP_ARGUMENTS[sweep]) as (composer, task):
        space = read_space(composer.config.hydra.sweeper.space, task, composer)
        enumerated = enumerate_cells(space, composer)
    assert len({cell.overrides for cell in enumerated.cells}) == len(enumerated.cells)
    for cell in sample_evenly(enumerated.cells, 4):
        composed = Run.from_config(compose_config(*space.fixed_overrides, *cell.overrides))
        assert composed == cell.run
        assert tuple(composed.problems()) == cell.problems


@pytest.mark.slow
def test_shipped_partitions_equal_those_that_hydra_composes():
    with make_composer("hydra/sweeper=layouts") as (composer, _):
        for name in config_names("partition"):
            shipped = composer.compose_choice("partition", name, [])
            assert shipped == Run.from_config(composer.compose_config([f"partition={name}"])).config.partition
        dp, sp = (composer.compose_choice("partition", name, []) for name in ("dp", "sp"))
        assert composer.compose_choice("partition", "dp", ["partition.zero1=true"]) == replace(dp, zero1=True)
        assert composer.compose_choice("partition", "sp", ["partition.zero1=false"]) == sp


JOBS = [
    [f"mesh={mesh}", f"partition={partition}", f"batch={batch}"]
    for mesh in ("2x2x1", "1x4x1", "single")
    for partition in ("dp", "fsdp", "1d_tp")
    for batch in (8, 16)
]
SWEPT_KEYS = [[], ["partition.zero1=true"], ["mesh.placement=null"], ["experiment=mine"], ["experiment=sized"]]


@pytest.mark.parametrize("fixed", mark_slow_except(SWEPT_KEYS, [["experiment=sized"]]), ids=str)
def test_a_run_equals_the_one_that_hydra_composes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fixed: list[str]):
    """`compose_run` returns the same run as composing with Hydra.

    Jobs that differ only in mesh sizes, shipped partition and overridden values are composed with Hydra only once,
    unless the config refers to the mesh or partition (`${mesh.name}`).
    """
    (tmp_path / "experiment").mkdir()
    (tmp_path / "partition").mkdir()
    texts = {
        "experiment/mine": "# @package _global_\npartition: {zero1: true}\n",
        "experiment/sized": "# @package _global_\nname: run-${mesh.name}\n",
        "partition/dp": "defaults: [fsdp, _self_]\nname: dp\n",
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    jobs = [[*fixed, "model=s5_tiny", *job] for job in JOBS[:: 1 if not fixed else 5]]
    with make_composer(f"hydra.searchpath=[file://{tmp_path},valkyrie://groups]") as (composer, _):
        runs = [composer.compose_run(job) for job in jobs]
        assert runs == [Run.from_config(composer.compose_config(job)) for job in jobs]
        composed: list[object] = []
        compose = Composer.compose_config
        monkeypatch.setattr(Composer, "compose_config", lambda *given: composed.append(given) or compose(*given))
        free = [job for job in JOBS if job[0] != "mesh=single"]
        assert [run.config.batch for run in map(Composer(composer.config, composer.loader).compose_run, free)] == [
            8,
            16,
        ] * 6
    assert len(composed) == 1


@pytest.mark.slow
def test_every_experiment_has_its_own_partition_settings(tmp_path: Path):
    """An experiment may change a key of the partition. The change applies only to layouts of this experiment."""
    (tmp_path / "experiment").mkdir()
    for name, zero1 in (("with", "true"), ("without", "false")):
        text = f"# @package _global_\npartition: {{zero1: {zero1}}}\n"
        (tmp_path / "experiment" / f"{name}.yaml").write_text(text)
    searched = f"hydra.searchpath=[valkyrie://groups,file://{tmp_path}]"
    enumerated = enumerate_command(
        "hydra/sweeper=layouts", searched, "experiment=with,without", "partition=fsdp", "mesh=2x2x2"
    )
    by_experiment = {cell.overrides[0]: cell.run.config.partition.zero1 for cell in enumerated.legal}
    assert by_experiment == {"experiment=with": True, "experiment=without": False}


ENUMERATED = [
    name for name in config_names("sweep") if "sweeper: layouts" in (conf_dir() / "sweep" / f"{name}.yaml").read_text()
]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n == "pa_nas_1b" else []) for n in ENUMERATED]
)
def test_every_enumerated_sweep_has_legal_layouts(name: str):
    enumerated = enumerate_command(f"sweep={name}")
    assert (len(enumerated.cells), len(enumerated.legal)) == CELLS[name]
    assert f"{len(enumerated.legal)} " in (conf_dir() / "sweep" / f"{name}.yaml").read_text(), (
        "its comment says how many"
    )


@pytest.mark.slow
def test_the_laptop_sweep_has_the_same_layouts_on_eight_chips():
    def enumerate_overrides(*arguments: str) -> list[tuple[str, ...]]:
        return [cell.overrides for cell in enumerate_command("sweep=laptop_8", *arguments).cells]

    assert enumerate_overrides() == enumerate_overrides("mode=compile", "target=v5e-8")


def test_refusals_are_grouped_and_counted():
    enumerated = enumerate_command("hydra/sweeper=layouts", "target=cpu8", "batch=4")
    assert enumerated.refused[0].problems[0].code in DIVISIBILITY_CODES
    kinds = count_kinds(cell.problems[0] for cell in enumerated.refused)
    assert sum(count for _, count in kinds) == len(enumerated.refused)
    line = describe_counts(enumerated, enumerated.legal[:3])
    counts = [int(n) for n in re.findall(r"\d+", line.partition("\n")[0])]
    assert counts == [len(enumerated.cells), len(enumerated.legal), len(enumerated.refused), 3, 3]
    assert "heads not divisible by its mesh axes (x)" in line


# The sweeper


class RecordingLauncher(Launcher):
    """Fake launcher that records jobs without starting them."""

    def __init__(self) -> None:
        self.jobs: list[Sequence[str]] = []

    def setup(self, **_: Any) -> None:
        raise AssertionError("the sweeper was given a launcher that is ready")

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[Any]:
        assert initial_job_idx == 0
        self.jobs += job_overrides
        return []


def run_sweeper(folder: Path, *arguments: str) -> list[Sequence[str]]:
    launcher = RecordingLauncher()
    with make_composer(*arguments, f"hydra.sweep.dir={folder}") as (composer, task):
        sweeper, context = composer.config.hydra.sweeper, HydraContext(composer.loader, Callbacks())
        sweep_layouts(context, composer.config, task, sweeper.space, sweeper.limit, launcher)
    return launcher.jobs


def test_legal_layouts_are_launched_and_refused_ones_recorded_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    arguments = ["sweep=laptop_8", "partition=1d_tp,2d_tp", "steps=3", "hydra.sweeper.limit=5"]
    jobs = run_sweeper(tmp_path, *arguments)
    assert len(jobs) == 5
    assert all(job[:2] == ["sweep=laptop_8", "steps=3"] and job[2].startswith("mesh=") for job in jobs)
    counts = re.findall(r"\d+", capsys.readouterr().out.partition("\n")[0])
    assert counts[:4] == ["14", "12", "2", "5"]
    trials = TrialLog(tmp_path).read()
    assert [(t.status, t.stage, t.about.partition) for t in trials] == [
        (Status.refused, "measure", "1d_tp"),
        (Status.refused, "measure", "2d_tp"),
    ]
    heads = ("not_divisible", ("heads",), ("x",))
    for t in trials:
        assert heads in [(p.code, p.axes, p.mesh_axes) for p in t.problems] and t.folder is None
    assert trials[0].overrides == ["sweep=laptop_8", "steps=3", "mesh=8x1x1", "partition=1d_tp"]
    assert run_sweeper(tmp_path, *arguments) == jobs
    assert len((tmp_path / "trials.jsonl").read_text().splitlines()) == 2, "what is recorded is not recorded again"
    assert (tmp_path / "multirun.yaml").is_file()


WRONG = {
    "no such key": (
        ["hydra.sweeper.space={mesh:[2x2x2]}"],
        "mean hydra.sweeper.space.meshes?",
    ),
    "a word that is none": (
        ["hydra.sweeper.space.same=all"],
        "none, sharding, roles.",
    ),
    "a mesh that no devices make": (
        ["hydra.sweeper.space.meshes=[Ax3xB]"],
        "meshes=Ax3xB matches no mesh",
    ),
    "another number of devices": (
        ["hydra.sweeper.space.devices=16"],
        "hydra.sweeper.space.devices=16, but target=cpu8",
    ),
    "no range": (
        ["hydra.sweeper.space.parameters=[2e9,1e9]"],
        "hydra.sweeper.space.parameters=[2e+09,1e+09]: must be a range",
    ),
    "an empty list": (["hydra.sweeper.space.meshes=[]"], "hydra.sweeper.space.meshes=[]: must have"),
    "a layout's key among the others": (
        ["+hydra.sweeper.space.vary.remat=[none]"],
        "Use hydra.sweeper.space.remat.",
    ),
    "text in vary that Hydra cannot parse": (
        ['+hydra.sweeper.space.vary={prompt:"it\'s"}'],
        "Write prompt=\"'...'\"",
    ),
    "an interval": (["seq=interval(1,9)"], "seq=interval(1,9): this sweeper"),
    "no microbatches": (["microbatches=two,1"], "microbatches=two,1: Value 'two'"),
    "no such partition": (["partition=2dtp,dp"], "mean partition=2d_tp?"),
    "no such value": (["seq=64,abc"], "seq=abc: must be a whole"),
    "one of what goes together": (
        ["sweep=partition_by_length", "seq=64"],
        "varies seq,batch together, ",
    ),
    "several mistakes in the space": (
        ["hydra.sweeper.space={devices:a,remat:[],partitions:[dpp]}", "+hydra.sweeper.space.vary.seq=[]"],
        "4 problems",
    ),
    "no limit": (["hydra.sweeper.limit=0"], "hydra.sweeper.limit=0: must be"),
}


@pytest.mark.parametrize("case", mark_slow_except(WRONG, [*WRONG][::3]))
def test_errors_of_the_sweeper_say_what_to_write(command: Any, tmp_path: Path, case: str):
    arguments, message = WRONG[case]
    folder = f"hydra.sweep.dir={tmp_path}/out"
    result = command("-m", "hydra/sweeper=layouts", "target=cpu8", "hydra/launcher=basic", folder, *arguments)
    assert result.status == 2
    assert message in result.err
    assert "Traceback" not in result.err


# Real trials, one process each


def rates(folder: Path) -> dict[tuple[str, int], float]:
    """Return tokens/s/chip of every measured trial, by partition and microbatches."""
    ended = [t for t in TrialLog(folder).read() if t.status is Status.ok]
    return {(t.about.partition, t.about.microbatches): t.results.step.tokens_per_second_per_chip for t in ended}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_space_is_measured_without_repeats(tmp_path: Path):
    arguments = [
        *TINY_ARGUMENTS,
        "mode=measure",
        "target=cpu8",
        "mesh=2x2x2",
        "partition=dp,2d_tp",
        "microbatches=1,2",
        "name=s",
    ]
    for _ in range(2):
        with start_training("-m", "hydra/sweeper=layouts", *arguments, cwd=tmp_path) as process:
            out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        assert re.findall(r"\d+", out.partition("\n")[0]) == ["4", "3", "1"] and "microbatches (x·y·z)" in out
        assert set(rates(tmp_path / "runs" / "s")) == {("dp", 1), ("2d_tp", 1), ("2d_tp", 2)}
        assert len((tmp_path / "runs" / "s" / "trials.jsonl").read_text().splitlines()) == 4


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_optuna_finds_the_layout_with_the_most_tokens(tmp_path: Path):
    """Refused layouts count as 0. Repeated layouts are not measured again."""
    swept = [
        "hydra.sweeper.params={partition:'choice(dp,2d_tp)',microbatches:'choice(1,2)'}",
        "hydra.sweeper.n_trials=5",
    ]
    with start_training("-m", "+sweep=laptop_optuna", *TINY_ARGUMENTS, *swept, cwd=tmp_path) as process:
        _, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    folder = tmp_path / "runs" / "laptop_optuna"
    results = OmegaConf.load(folder / "optimization_results.yaml")
    best = (results.best_params.partition, int(results.best_params.microbatches))
    assert results.best_value == pytest.approx(max(rates(folder).values()))
    assert rates(folder)[best] == pytest.approx(results.best_value)
    trials = TrialLog(folder).read()
    assert len(trials) == len((folder / "trials.jsonl").read_text().splitlines()) <= 4


def test_jobs_that_differ_in_numbers_equal_the_runs_that_hydra_composes(monkeypatch: pytest.MonkeyPatch):
    changes = [
        ["seed=1", "optimizer.learning_rate=0.001", "model.layers=1"],
        ["seed=2", "optimizer.learning_rate=0.002", "model.layers=2"],
        ["seed=2", "optimizer.learning_rate=1", "model.layers=2"],  # a whole number for a float
        ["seed=2", "optimizer.learning_rate=nan", "model.layers=-1"],
        ["seed=2", "optimizer.learning_rate=0.002", "model.layers='3'"],
    ]
    composed = []
    from_config = Run.from_config
    monkeypatch.setattr(Run, "from_config", staticmethod(lambda config: composed.append(1) or from_config(config)))
    with make_composer() as (composer, _):
        for number, overrides in enumerate(changes):
            run = composer.compose_run(["model=gpt_tiny", *overrides])
            assert len(composed) == (1, 1, 2, 2, 3)[number]
            assert repr(run.config) == repr(from_config(composer.compose_config(["model=gpt_tiny", *overrides])).config)
    with make_composer() as (composer, _):  # a key that others refer to
        for batch in (8, 16):
            assert composer.compose_run([f"batch={batch}", "eval_batches=${batch}"]).config.eval_batches == batch


@pytest.mark.parametrize(
    ("reference", "is_reused"),
    [
        ("${optimizer}", False),
        pytest.param("${..optimizer}", False, marks=pytest.mark.slow),
        pytest.param("${oc.select:optimizer,null}", False, marks=pytest.mark.slow),
        pytest.param("${optimizer.learning_rate}", False, marks=pytest.mark.slow),
        ("${optimizer.name}", True),
    ],
)
def test_a_reference_to_a_key_or_its_node_prevents_reusing_a_run(reference: str, is_reused: bool):
    with make_composer() as (composer, _):
        overrides = ["model=gpt_tiny", "optimizer.learning_rate=0.001"]
        config = composer.compose_config(overrides)
        run = Run.from_config(config)
        with open_dict(config):
            config.x = reference
        reused = _with_numbers(_JobKind(config, run), composer.parse(["optimizer.learning_rate=0.002"]))
    assert (reused is not None) == is_reused
