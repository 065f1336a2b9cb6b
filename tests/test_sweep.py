"""Tests of multiruns: names of the sweep and its trials, which trials are repeated, and the output."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers import compose_run
from runs import ONE_DEVICE_ARGUMENTS, TINY_ARGUMENTS, run_train
from sweeps import FakeMultirun
from valkyrie.sweep.names import folder_name, multirun_arguments, sweep_name, trial_key, trial_name
from valkyrie.sweep.trial import Status, TrialLog
from wandb_files import wandb_logs


@pytest.fixture
def multirun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeMultirun:
    """A fake multirun that is set up for commands in this process."""
    multirun = FakeMultirun(tmp_path)
    multirun.activate(monkeypatch)
    return multirun


SINGLE_RUN_ARGUMENTS = [
    [],
    ["mesh=2x2x1"],
    ["sweep=null"],
    ["hydra.mode=RUN", "sweep=laptop_8"],
    ["--config-dir", "sweep=x"],
]


@pytest.mark.parametrize("arguments", SINGLE_RUN_ARGUMENTS)
def test_a_single_run_is_not_a_multirun(arguments: list[str]):
    assert multirun_arguments(arguments) is None


@pytest.mark.parametrize("flag", ["-m", "--multirun", "hydra.mode=MULTIRUN", "sweep=other"])
def test_a_multirun_is_known_by_its_arguments_and_gets_a_folder(flag: str):
    completed = multirun_arguments([flag, "mesh=2x2x1", "--config-dir", "mine", "resume=true"])
    assert completed is not None
    folder = next(a for a in completed if a.startswith("hydra.sweep.dir="))
    assert folder.startswith("hydra.sweep.dir=${runs}/")
    mode = ["hydra.mode=MULTIRUN"] if flag == "sweep=other" else []
    assert sorted(a for a in completed if a != folder) == sorted([flag, *mode, "mesh=2x2x1", "--config-dir", "mine"])
    assert completed[:2] == [flag, "--config-dir"] or completed[:2] == ["--config-dir", "mine"], (
        "overrides in one piece"
    )
    assert multirun_arguments([flag, "hydra.sweep.dir=here"]) == [*mode, flag, "hydra.sweep.dir=here"]


def test_a_sweep_is_named_by_its_setting_its_file_or_a_hash():
    assert sweep_name(["-m", "sweep=laptop_8", "mode=measure"]) == "laptop_8"
    assert sweep_name(["-m", "sweep=laptop_8", "name=mine"]) == "mine"
    measured = sweep_name(["-m", "mesh=2x2x1,4x1x1", "partition=dp", "mode=measure", "mode.repeats=3"])
    assert re.fullmatch(r"sweep-[0-9a-f]{8}", measured)
    assert measured == sweep_name(["partition=dp", "mesh=2x2x1,4x1x1", "mode=compile", "target=v5e-8", "-m"])
    assert measured != sweep_name(["-m", "mesh=2x2x1,4x1x1", "partition=fsdp"])


def test_sweeps_that_read_different_runs_have_different_names():
    names = [sweep_name(["-m", "mode=eval", *run]) for run in (["resume=a,b"], ["resume=a,c"], ["name=a,b"], [])]
    assert len(set(names)) == 4


def test_different_spaces_are_different_sweeps_but_limits_and_stages_are_not():
    spaces = [["hydra.sweeper.space.meshes=[AxB]"], ["hydra.sweeper.space.meshes=[AxBxC]"], []]
    names = [sweep_name(["-m", "hydra/sweeper=layouts", "mode=compile", *space]) for space in spaces]
    assert len(set(names)) == 3
    more = ["hydra.sweeper.limit=3", "hydra.launcher.jobs=2", "mode=measure"]
    assert sweep_name(["-m", "hydra/sweeper=layouts", *spaces[0], *more]) == names[0]


def test_names_are_valid_for_folders_and_for_hydra():
    assert folder_name("a b/c,d=${e}") == "a-b-c-d-e"
    assert folder_name("..") == "sweep"
    run = compose_run(*TINY_ARGUMENTS, *ONE_DEVICE_ARGUMENTS, "model.name='my model, new'")
    name = trial_name(run, trial_key(run))
    assert re.fullmatch(r"my-model-new-1x1x1-dp-train-[0-9a-f]{6}", name)


def test_the_key_of_a_trial_depends_on_settings_that_affect_the_result():
    key = trial_key(compose_run(*TINY_ARGUMENTS, *ONE_DEVICE_ARGUMENTS))
    same = ["name=other", "runs=there", "trial.limit_s=5", "tracking=wandb", "seed=0"]
    same += ["log_every=3", "prompt=b", "top_k=7", "checkpoint.every=9"]
    assert trial_key(compose_run(*TINY_ARGUMENTS, *ONE_DEVICE_ARGUMENTS, *same)) == key
    for change in (
        "batch=4",
        "seed=1",
        "mode=measure",
        "microbatches=2",
        "model.embed=32",
        "target=cpu",
        "eval_every=9",
    ):
        assert trial_key(compose_run(*TINY_ARGUMENTS, *ONE_DEVICE_ARGUMENTS, change)) != key, change


@pytest.mark.parametrize(
    ("mode", "same", "other"),
    [
        ("compile", ["mode.hlo=true", "mode.cache=false", "eval_batches=3", "data.documents=9", "seed=3"], "steps=9"),
        ("measure", ["mode.trace=true", "eval_batches=3", "data.documents=9"], "mode.repeats=3"),
        pytest.param("measure", ["mode.trace=true"], "mode.data=real", marks=pytest.mark.slow),
        pytest.param("generate", ["trial.retry=true"], "prompt=b", marks=pytest.mark.slow),
        pytest.param("eval", ["trial.retry=true"], "resume=other", marks=pytest.mark.slow),
    ],
)
def test_the_key_of_a_trial_depends_on_what_its_stage_uses(mode: str, same: list[str], other: str):
    key = trial_key(compose_run(*TINY_ARGUMENTS, *ONE_DEVICE_ARGUMENTS, f"mode={mode}"))
    assert trial_key(compose_run(*TINY_ARGUMENTS, *ONE_DEVICE_ARGUMENTS, f"mode={mode}", *same, "log_every=1")) == key
    assert trial_key(compose_run(*TINY_ARGUMENTS, *ONE_DEVICE_ARGUMENTS, f"mode={mode}", other)) != key


def test_only_missing_trials_run(multirun: FakeMultirun, capfd: pytest.CaptureFixture):
    assert run_train(*multirun.arguments("partition=dp,fsdp")) == 0
    assert run_train(*multirun.arguments("partition=dp,fsdp,1d_tp", "resume=true")) == 0
    output = capfd.readouterr().out
    assert "[2/3] 2" in output and "3 ok" in output
    assert list(multirun.trials()) == ["1d_tp", "dp", "fsdp"]
    assert len(multirun.started_trials()) == multirun.count_lines() == 3
    assert run_train(*multirun.arguments("partition=dp", "batch=4")) == 0
    assert multirun.count_lines() == 4, "another batch is another trial"


@pytest.mark.slow
def test_only_the_sweep_folder_is_written(multirun: FakeMultirun):
    before = sorted(path.name for path in multirun.folder.iterdir())
    assert run_train(*multirun.arguments("partition=dp")) == 0
    assert sorted(path.name for path in multirun.folder.iterdir()) == sorted([*before, "runs", "starts"])
    assert [path.name for path in multirun.runs.iterdir()] == ["swept"]
    (trial,) = multirun.trials().values()
    expected = ["multirun.yaml", "trials.jsonl", "report.html", trial.name]
    assert sorted(p.name for p in multirun.sweep_folder.iterdir()) == sorted(expected)
    assert trial.folder == trial.name and (multirun.sweep_folder / trial.name / "outcome.json").is_file()


def test_every_trial_is_a_run_of_one_group(multirun: FakeMultirun):
    arguments = multirun.arguments("mesh=2x2x1,1x1x3", "partition=dp", "tracking=wandb")
    for _ in range(2):  # nothing is told twice
        assert run_train(*arguments) == 0
        logs = wandb_logs(multirun.sweep_folder)
        assert {log["run"].run_group for log in logs} == {"swept"}
        assert sorted(log["run"].job_type for log in logs) == ["measure", "measure", "sweep"]
        assert sorted(log["summary"].get("status", "") for log in logs) == ["", "ok", "refused"]


def test_illegal_layouts_are_rows_and_start_nothing(multirun: FakeMultirun, capfd: pytest.CaptureFixture):
    assert run_train(*multirun.arguments("mesh=2x2x1,1x1x3", "partition=dp")) == 0
    output = capfd.readouterr().out
    assert "1x1x3-dp measure: refused:" in output
    assert "1 refused" in output and f"page: {multirun.sweep_folder / 'report.html'}" in output
    assert len(multirun.started_trials()) == 1
    capfd.readouterr()
    for _ in range(2):  # a refusal is not written twice
        assert run_train(*multirun.arguments("mesh=1x1x3", "partition=dp,dp")) == 2
        assert "[2/2]" in capfd.readouterr().out
    assert multirun.count_lines() == 2


@pytest.mark.slow
def test_a_mode_without_results_runs_every_time(
    multirun: FakeMultirun, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
):
    multirun.activate(monkeypatch, dp="real")
    for _ in range(2):
        assert run_train(*multirun.arguments("partition=dp", "mode=show")) == 0
        output = capfd.readouterr().out
        assert "embedding" in output and "1 ok" in output
    assert len(multirun.started_trials()) == 2


def test_an_invalid_sweep_is_refused(multirun: FakeMultirun, capfd: pytest.CaptureFixture):
    assert run_train(*multirun.arguments("partition=dp,nix")) == 2
    assert "partition=nix" in capfd.readouterr().err
    assert multirun.started_trials() == []


@pytest.mark.slow
def test_parallel_trials_give_the_same_results(multirun: FakeMultirun, monkeypatch: pytest.MonkeyPatch):
    multirun.activate(monkeypatch, dp="measure 1", fsdp="measure 1", sp="measure 1")
    assert run_train(*multirun.arguments("partition=dp,fsdp,sp,dp", "hydra.launcher.jobs=4")) == 0
    assert list(multirun.trials()) == ["dp", "fsdp", "sp"]
    starts = [trial.started for trial in multirun.trials().values()]
    assert multirun.count_lines() == len(multirun.started_trials()) == len(set(starts)) == 3


LISTENING = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "from valkyrie.cli.train import main\n"
    "main()\n"
)
"""Program that runs `valkyrie-train` with Ctrl-C enabled.

If the tests run in the background, child processes inherit that SIGINT is ignored. The program resets this.
"""


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_keeps_finished_trials_and_ends_the_current_one(tmp_path: Path):
    multirun = FakeMultirun(tmp_path, dp="measure", fsdp="hang")
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", LISTENING, *multirun.arguments("partition=dp,fsdp,sp")],
        cwd=tmp_path,
        env={**os.environ, **multirun.environment, "TERM": "xterm", "COLUMNS": "120"},
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
    )
    os.close(slave)
    output, interrupted = "", False
    while True:
        try:
            output += os.read(master, 4096).decode(errors="replace")
        except OSError:  # the terminal's other end is closed
            break
        if not interrupted and "fsdp" in output and re.search(r"running.*fsdp.* at most", output):
            interrupted = True
            time.sleep(0.2)
            os.killpg(process.pid, signal.SIGINT)  # what a terminal does on Ctrl-C; the trial is not in this group
    assert process.wait(30) == 130
    assert "best so far" in output and "simulated" in output
    assert "valkyrie-train: stopped" in output
    assert {p: t.status for p, t in multirun.trials().items()} == {"dp": Status.ok}
    assert "Traceback" not in output


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_real_trials_record_real_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture):
    monkeypatch.chdir(tmp_path)
    arguments = ["-m", *TINY_ARGUMENTS, "name=real", "mesh=2x1x1", "partition=fsdp", "steps=3"]
    for mode in (["mode=measure", "mode.repeats=2"], ["mode=train"]):
        assert run_train(*arguments, *mode) == 0
        assert "1 ok" in capfd.readouterr().out
    trials = TrialLog(tmp_path / "runs" / "real").read()
    assert [trial.stage for trial in trials] == ["measure", "train"]
    for trial in trials:
        step = trial.results.step
        chips = int(trial.about.mesh[0])
        assert trial.results.simulated and trial.results.loss > 0 and trial.results.compile.compile_s > 0
        assert step.tokens_per_second == pytest.approx(8 * 16 / step.step_s)
        assert step.tokens_per_second_per_chip == pytest.approx(step.tokens_per_second / chips)
        assert trial.wall_s > 0 and trial.about.layout == f"{trial.about.mesh}-fsdp"
