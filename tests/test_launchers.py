"""Tests of Hydra's launchers: all of them run the same trials, through the same task function."""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from runs import run_train
from sweeps import FakeMultirun
from valkyrie.sweep.trial import Status, TrialLog

LAUNCHERS = {
    "trials": ["hydra.launcher.jobs=2"],
    "basic": [],
    "joblib": ["hydra.launcher.n_jobs=2"],
    "submitit_local": ["hydra.launcher.timeout_min=2"],
}
SWEPT = ["mesh=2x2x1,1x1x3", "partition=dp,fsdp,1d_tp", "trial.limit_s=20"]


@cache
def run_sweep(launcher: str, folder: Path) -> dict[str, Any]:
    """Run a sweep with a launcher, and return the records of its trials without times, by trial key.

    One trial is killed. Runs the sweep twice, and asserts that the second run adds no records.
    """
    multirun = FakeMultirun(folder / launcher, fsdp="kill")
    for _ in range(2):
        process = multirun.start(*SWEPT, f"hydra/launcher={launcher}", *LAUNCHERS[launcher])
        output, _ = process.communicate()
        assert process.returncode == 1, output
        assert all(part in output for part in ("6 trials", "2 ok", "3 refused", "1 killed")), output
    assert len(multirun.started_trials()) == 3 and multirun.count_lines() == 6
    trials = TrialLog(multirun.sweep_folder).read()
    assert Counter(trial.status for trial in trials) == {Status.ok: 2, Status.refused: 3, Status.killed: 1}
    overrides_by_trial = [[o for o in t.overrides if not o.startswith("runs=")] for t in trials]
    return {
        t.key: (t.name, t.sweep, t.status, t.reason, overrides, t.results, t.about)
        for t, overrides in zip(trials, overrides_by_trial, strict=True)
    }


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [name for name in LAUNCHERS if name != "trials"])
def test_every_launcher_records_the_same_trials(launcher: str, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.getbasetemp()
    assert run_sweep(launcher, folder) == run_sweep("trials", folder)


@pytest.mark.slow
def test_the_task_function_records_a_trial_without_our_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
):
    """The joblib, submitit and ray launchers call the task function in workers.

    This test uses Hydra's basic launcher instead, which calls it in this process.
    """
    multirun = FakeMultirun(tmp_path)
    multirun.activate(monkeypatch)
    for attempt in (1, 2):
        assert run_train(*multirun.arguments("partition=dp", "hydra/launcher=basic")) == 0
        output = capfd.readouterr().out
        assert output.count("tokens/s simulated") == 1 and ("(recorded earlier)" in output) is (attempt == 2)
        assert "1 ok" in output
    assert len(multirun.started_trials()) == multirun.count_lines() == 1
