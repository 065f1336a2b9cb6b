"""Tests of planning a multirun's trials before any starts: each trial gets a run, or the reason that it is refused."""

from __future__ import annotations

import io
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from helpers import compose_run, mark_slow_except
from sweeps import fake_outcomes, multirun_plans
from test_folder import make_run
from valkyrie.config.run import Run
from valkyrie.hardware.platforms.tpu import Tpu
from valkyrie.sweep.names import trial_key
from valkyrie.sweep.results import OUTPUT_FILE, Outcome
from valkyrie.sweep.run import settle
from valkyrie.sweep.screen import LineScreen
from valkyrie.sweep.tracking import wandb_run_id
from valkyrie.sweep.trial import Status, TrialLog, refuse_other_files


def test_a_multirun_cannot_use_one_run_folder_for_all_trials(command: Any, tmp_path: Path):
    """Both trials would continue the run `base`, one after the other, and overwrite its recorded command."""
    base = make_run(tmp_path / "runs", "base", "model=s5_tiny")
    result = command("-m", "resume=base", "mesh=1x1x1", "partition=dp", "seed=0,1")
    assert result.status == 2
    assert "valkyrie-train resume=base" in result.err and "without resume=" in result.err
    assert sorted(path.name for path in base.iterdir()) == ["checkpoints", "run.yaml"]
    assert not list((tmp_path / "runs").rglob("trials.jsonl"))


def test_an_interval_is_refused_by_the_default_sweeper(command: Any):
    result = command("-m", "optimizer.learning_rate=interval(1e-4,1e-2)")
    assert result.status == 2 and result.err.startswith("valkyrie-train: optimizer.learning_rate=interval(1e-4,1e-2): ")
    assert "range(A,B)" in result.err and "hydra/sweeper=optuna" in result.err


def test_a_sweep_does_not_write_into_the_folder_of_a_run(command: Any, tmp_path: Path):
    base = make_run(tmp_path / "runs", "base", "model=s5_tiny")
    for arguments in (["name=base"], ["hydra.sweep.dir=${runs}/base"]):
        result = command("-m", *arguments, "mode=show", "mesh=1x1x1", "partition=dp", "batch=2,4")
        assert result.status == 2 and "name=base: runs/base " in result.err and "not of a sweep" in result.err
    assert sorted(path.name for path in base.iterdir()) == ["checkpoints", "run.yaml"]


SHOWN_SWEEP = ["-m", "model=s5_tiny", "mode=show", "mesh=1x1x1", "partition=dp", "batch=2,4"]


@pytest.mark.parametrize("name", ["report.html", "multirun.yaml", "trials.jsonl"])
def test_a_sweep_does_not_write_into_a_folder_of_the_user(command: Any, tmp_path: Path, name: str):
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    (folder / name).write_text("mine: 1\n")
    for setting, value in (("name", "mine"), ("hydra.sweep.dir", "runs/mine")):
        result = command(*SHOWN_SWEEP, f"{setting}={value}")
        assert result.status == 2 and f"{setting}={value}: runs/mine " in result.err and f" {setting}=." in result.err
    assert [(path.name, path.read_text()) for path in folder.iterdir()] == [(name, "mine: 1\n")]


@pytest.mark.slow
def test_a_sweep_continues_from_its_first_files(command: Any, tmp_path: Path):
    """A killed sweep leaves `multirun.yaml`, or with a sweeper that does not write it, the folder of a trial."""
    folder = tmp_path / "runs" / "ours"
    assert command(*SHOWN_SWEEP, "name=ours").status == 0
    (folder / "trials.jsonl").unlink()
    multirun_text = (folder / "multirun.yaml").read_text()
    (folder / "multirun.yaml").unlink()
    assert command(*SHOWN_SWEEP, "name=ours").status == 0 and len(TrialLog(folder).read()) == 2
    shutil.rmtree(folder)
    for content in (multirun_text, ""):  # empty after a full disk
        folder.mkdir()
        (folder / "multirun.yaml").write_text(content)
        refuse_other_files(folder, "name", "ours")
        shutil.rmtree(folder)


MODELS_BY_SELECTION = {
    "resume=other": ["gpt_tiny"],
    "name=other": ["gpt_tiny"],
    "": ["s5_tiny"],
    "resume=base,other": ["gpt_tiny", "s5_tiny"],
}
"""Models of the selected runs, by the overrides that select them. Without overrides, the latest run is selected."""


@pytest.mark.slow
@pytest.mark.parametrize("selection", mark_slow_except([*MODELS_BY_SELECTION], ["name=other", "resume=base,other"]))
def test_trials_that_read_a_run_are_planned_as_that_run(
    command: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, selection: str
):
    runs, arguments = tmp_path / "runs", ["mesh=1x1x1", "partition=dp", "batch=3", "hydra.mode=RUN"]
    make_run(runs, "base", "model=s5_tiny", *arguments, mtime=20)
    make_run(runs, "other", "model=gpt_tiny", *arguments, mtime=10)
    plans = multirun_plans(
        command, monkeypatch, "-m", "mode=eval", *selection.split(), "data.documents=30,31", "data=synthetic"
    )
    assert [plan.refusal for plan in plans] == [None] * 2 * len(MODELS_BY_SELECTION[selection]), (
        "batch=3 is illegal on the default mesh"
    )
    assert sorted({plan.about.model for plan in plans}) == MODELS_BY_SELECTION[selection]
    assert all(plan.about.layout == "1x1x1-dp" and plan.name.startswith(plan.about.model) for plan in plans)
    assert {str(plan.folder.parent) for plan in plans} == {"runs"}
    for plan in plans:
        run = "base" if plan.about.model == "s5_tiny" else "other"
        assert plan.run is not None and plan.run.config.resume == str(runs / run)
        assert plan.run.model.name == plan.about.model and plan.run.config.batch == 3


def test_a_plan_is_settled_by_an_outcome_of_the_same_request_and_code(
    command: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    overrides = ["-m", "mode=compile", "model=s5_tiny", "mesh=1x1x1", "partition=dp", "target=cpu"]
    (plan,) = multirun_plans(command, monkeypatch, *overrides)
    finished_trial = plan.to_trial(Outcome(Status.ok), "", 1.0)
    assert plan.is_settled_by(finished_trial) and not plan.is_settled_by(None)
    (with_hlo,) = multirun_plans(command, monkeypatch, *overrides, "mode.hlo=true")
    assert with_hlo.key == plan.key and not with_hlo.is_settled_by(finished_trial), "the module was not left"
    with_hlo.trial_folder.mkdir(parents=True)
    for name in with_hlo.files:
        (with_hlo.trial_folder / name).touch()
    assert with_hlo.is_settled_by(finished_trial)
    by_others = replace(finished_trial, about=replace(finished_trial.about, predicted_by="an older jax"))
    assert not plan.is_settled_by(by_others)
    (measured,) = multirun_plans(command, monkeypatch, *overrides, "mode=measure")
    assert measured.about.predicted_by is None, "a measurement stays what it was"


def test_a_record_has_the_settings_that_determine_the_step(command: Any, monkeypatch: pytest.MonkeyPatch):
    overrides = ["-m", "model=s5_tiny", "mesh=1x1x1,3x1x1", "partition=dp", "batch=8", "model.dropout=1e-1"]
    plans = multirun_plans(command, monkeypatch, *overrides)
    assert [plan.refusal is None for plan in plans] == [True, False]
    for plan in plans:
        values = plan.to_trial(Outcome(Status.ok), "", 1.0).values
        assert values["model.name"] == "s5_tiny" and values["model.dropout"] == "0.1"
        assert values["model.block_pattern"] == "[s5]" and values["model.s5.bidirectional"] == "false"
        assert values["optimizer.ema_decay"] == "null" and values["precision.compute"] == "float32"
        assert {key.partition(".")[0] for key in values} == {"model", "precision", "optimizer"}


@pytest.mark.slow
def test_a_record_has_the_path_of_the_users_configuration(
    command: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    (tmp_path / "my own" / "optimizer").mkdir(parents=True)
    (tmp_path / "my own" / "optimizer" / "mine.yaml").write_text("defaults: [adamw]\nname: mine\n")
    overrides = ["--config-dir", "my own", "-m", "optimizer=mine", "mesh=1x1x1", "batch=8"]
    plans = multirun_plans(command, monkeypatch, *overrides, "partition=dp", "steps=0,1")
    assert [plan.refusal is None for plan in plans] == [False, True]
    flags = ["--config-dir", str(tmp_path / "my own")]
    assert [plan.to_trial(Outcome(Status.ok), "", 0.0).flags for plan in plans] == [flags] * 2
    space = ["mode=show", "hydra/sweeper=layouts", "hydra.sweeper.space.partitions=[dp]", "steps=0"]
    space += ["hydra.sweeper.space.meshes=[1x1x1]", "name=space"]
    command(*overrides, *space)
    assert [trial.flags for trial in TrialLog(tmp_path / "runs" / "space").read()] == [flags]


def test_a_search_path_of_the_command_line_reaches_the_trials(
    command: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    (tmp_path / "own" / "optimizer").mkdir(parents=True)
    (tmp_path / "own" / "optimizer" / "mine.yaml").write_text("defaults: [adamw]\nname: mine\n")
    path = "hydra.searchpath=[valkyrie://groups,file://own]"
    (plan,) = multirun_plans(command, monkeypatch, "-m", path, "optimizer=mine", "mesh=1x1x1", "partition=dp")
    assert plan.run is not None and plan.run.config.optimizer.name == "mine"


def test_a_compile_without_its_compiler_is_refused_by_the_plan(command: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Tpu, "compiler_install_hint", lambda self, target: f"{target.name} needs libtpu.")
    overrides = ["-m", "target=v4-8", "model=s5_tiny", "mesh=1x2x2", "partition=dp"]
    (compiled,) = multirun_plans(command, monkeypatch, *overrides, "mode=compile")
    assert compiled.refusal == "v4-8 needs libtpu."
    (shown,) = multirun_plans(command, monkeypatch, *overrides, "mode=show")
    assert shown.refusal is None


@pytest.mark.parametrize("status", [Status.ok, Status.does_not_fit])
def test_a_machine_without_the_compiler_keeps_an_earlier_prediction(
    command: Any, monkeypatch: pytest.MonkeyPatch, status: Status
):
    monkeypatch.setattr(Tpu, "compiler_install_hint", lambda self, target: f"{target.name} needs libtpu.")
    overrides = ["-m", "target=v4-8", "model=s5_tiny", "mesh=1x2x2", "partition=dp", "mode=compile"]
    (plan,) = multirun_plans(command, monkeypatch, *overrides)
    earlier = plan.to_trial(Outcome(status), "", 1.0)
    TrialLog(plan.folder).append([replace(earlier, about=replace(earlier.about, predicted_by="an older jax"))])
    for _ in range(2):
        trials, waiting_plans = settle([plan])
        assert trials[plan.key].status is Status.refused and waiting_plans == []
        assert [trial.status for trial in TrialLog(plan.folder).read()] == [status]


@pytest.mark.parametrize(
    ("overrides", "warned"),
    [
        (["mode=measure", "hydra.launcher.jobs=2"], True),
        (["mode=measure"], False),
        (["mode=compile", "hydra.launcher.jobs=2"], False),
    ],
)
def test_parallel_trials_that_distort_each_other_cause_a_warning(
    command: Any, monkeypatch: pytest.MonkeyPatch, overrides: list[str], warned: bool
):
    fake_outcomes(monkeypatch, dp=Status.ok, fsdp=Status.ok)
    result = command("-m", "model=s5_tiny", "batch=8", "mesh=1x1x1", "partition=dp,fsdp", "tracking=off", *overrides)
    assert (result.status, "CONCURRENT MEASUREMENTS" in result.out) == (0, warned)


@pytest.mark.slow
def test_the_layouts_sweeper_plans_trials_without_hydra(command: Any, monkeypatch: pytest.MonkeyPatch):
    """Composing a job with Hydra takes 0.25 s, and the sweeper has composed every run already."""
    arguments = ["-m", "+sweep=laptop_8", "partition=dp,fsdp", "seq=32,64", "mode.trace=true", "hydra.sweeper.limit=3"]
    arguments += ["+hydra.job.env_set.NUMBER='${hydra.job.num}'"]
    load, composed = ConfigLoaderImpl.load_sweep_config, []
    monkeypatch.setattr(ConfigLoaderImpl, "load_sweep_config", lambda *a: composed.append(a) or load(*a))
    plans = multirun_plans(command, monkeypatch, *arguments)
    # Composes the shapes, the partitions, and one cell if an earlier sweep ran in this process; never all 3 cells.
    assert 2 <= len(composed) <= 3
    assert [plan.environment for plan in plans] == [{"NUMBER": str(i)} for i in range(3)]
    runs = [compose_run(*(o for o in plan.overrides)) for plan in plans]
    assert [trial_key(run) for run in runs] == [plan.key for plan in plans]
    alone = multirun_plans(command, monkeypatch, *arguments, "hydra/launcher=basic", "hydra.sweeper.limit=3")
    assert [replace(plan, environment={}) for plan in alone] == [replace(plan, environment={}) for plan in plans]


def test_a_trial_has_its_own_run_folder(command: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The trial's process reads the planned run from `run.yaml` in this folder."""
    overrides = ["-m", "model=s5_tiny", "mesh=1x1x1", "partition=dp", "batch=8", "model.layers=3", "name=a b"]
    (plan,) = multirun_plans(command, monkeypatch, *overrides)
    plan.trial_folder.mkdir(parents=True)
    plan.write()
    config = OmegaConf.load(plan.trial_folder / "run.yaml")
    assert isinstance(config, DictConfig) and plan.run is not None
    run = Run.from_config(config)
    tracking = replace(plan.run.config.tracking, id=wandb_run_id(plan.run.config.tracking, plan.folder, plan.key))
    assert run == plan.run.changed(tracking=tracking)
    assert (run.config.runs, run.config.name, run.config.tracking.group) == ("runs/a-b", plan.name, "a-b")


@pytest.mark.parametrize("terminal", [False, True])
def test_the_start_of_the_first_trial_is_printed_once(command: Any, monkeypatch: pytest.MonkeyPatch, terminal: bool):
    plans: Any = multirun_plans(command, monkeypatch, "-m", "mesh=1x1x1", "partition=dp", "seed=0,1")
    console = Console(file=io.StringIO(), force_terminal=terminal, width=500)
    screen = LineScreen(console, total=2)
    running: list[Any] = [SimpleNamespace(plan=plan, elapsed_s=90.0) for plan in plans]
    for trial in running:
        screen.show_running([trial], 0)
    lines = console.file.getvalue().splitlines()
    assert len(lines) == (0 if terminal else 1)
    assert all(line.startswith("running ") and str(plans[0].trial_folder / OUTPUT_FILE) in line for line in lines)
    console.file.truncate(0)
    monkeypatch.setattr("valkyrie.sweep.screen.PROGRESS_EVERY_S", 0.0)
    screen = LineScreen(console, total=2)
    for _ in range(3):
        screen.show_running([running[1]], 0)
    progress = console.file.getvalue().splitlines()[1:]
    assert len(progress) == (0 if terminal else 2) and all("0 of 2 trials" in line for line in progress)
