"""Tests of multiruns over several processes: process 0 plans and records, and all run every trial."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from processes import free_address, start_processes, wait_for_processes
from runs import TINY_ARGUMENTS, start_training
from valkyrie.processes.ending import EXIT_LOST
from valkyrie.sweep.trial import Status, Trial, TrialLog

SWEEP = [*TINY_ARGUMENTS, "-m", "mode=measure", "partition=dp", "batch=12", "mode.repeats=2", "name=many"]


def trials(folder: Path) -> dict[str, Trial]:
    """Return the recorded trials of the sweep `many` in `folder`, by mesh."""
    return {trial.about.mesh: trial for trial in TrialLog(folder / "runs/many").read()}


@pytest.mark.slow
def test_every_trial_of_a_multirun_runs_on_all_processes(tmp_path: Path):
    first, second = wait_for_processes(start_processes(2, *SWEEP, "mesh=2x1x1,3x1x1,2x2x1", cwd=tmp_path))
    assert (first[0], second[0], second[1]) == (0, 0, ""), (first, second)
    recorded_trials = trials(tmp_path)
    assert {mesh: trial.status for mesh, trial in recorded_trials.items()} == {
        "2x1x1": Status.ok,
        "3x1x1": Status.refused,
        "2x2x1": Status.ok,
    }
    assert "3 devices" in str(recorded_trials["3x1x1"].reason) and "2 processes" in str(recorded_trials["3x1x1"].reason)
    assert recorded_trials["2x2x1"].results.devices == "4 x cpu"
    started = {mesh: recorded_trials[mesh].started for mesh in ("2x1x1", "2x2x1")}
    again = wait_for_processes(start_processes(2, *SWEEP, "mesh=2x1x1,2x2x1", cwd=tmp_path))
    assert [status for status, _, _ in again] == [0, 0]
    assert {mesh: trials(tmp_path)[mesh].started for mesh in started} == started


@pytest.mark.slow
def test_processes_with_different_arguments_are_refused_before_anything_is_written(tmp_path: Path):
    variables = {"JAX_COORDINATOR_ADDRESS": free_address(), "JAX_PROCESS_COUNT": "2"}
    first = start_training(*SWEEP, "mesh=2x1x1", cwd=tmp_path, **variables, JAX_PROCESS_INDEX="0")
    other = start_training(*SWEEP, "mesh=2x1x1", "batch=24", cwd=tmp_path, **variables, JAX_PROCESS_INDEX="1")
    for status, _, err in wait_for_processes([first, other]):
        assert status == 2 and "batch=24 on process" in err, err
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_killed_process_ends_the_multirun_and_the_next_one_continues(tmp_path: Path):
    arguments = [*SWEEP, "mesh=2x1x1,2x2x1", "mode.repeats=2"]
    processes = start_processes(2, *arguments, cwd=tmp_path)
    deadline = time.monotonic() + 100
    while not (tmp_path / "runs/many/trials.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(processes[1].pid, signal.SIGKILL)
    (status, _, err), _ = wait_for_processes(processes)
    assert status == EXIT_LOST and "same command" in err, err
    assert trials(tmp_path)["2x1x1"].status is Status.ok
    assert [status for status, _, _ in wait_for_processes(start_processes(2, *arguments, cwd=tmp_path))] == [0, 0]
    assert {trial.status for trial in trials(tmp_path).values()} == {Status.ok}
