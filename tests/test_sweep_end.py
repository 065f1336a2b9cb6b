"""Tests of the end of a multirun: output, tracking and exit status, for every launcher and kind of failure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sweeps import fake_outcomes
from valkyrie.sweep import end
from valkyrie.sweep.trial import Status, Trial, TrialLog

ARGUMENTS = ["-m", "model=s5_tiny", "batch=8", "mesh=2x2x1", "mode=measure", "name=swept"]
LAUNCHERS = ["trials", "basic"]


class Tracker:
    """A fake W&B tracker. `logged` has the partitions of the logged trials, and `closed` counts calls of `close`."""

    def __init__(self, *_: object) -> None:
        self.logged: list[str] = []
        self.closed = 0

    def log(self, trial: Trial) -> None:
        self.logged.append(trial.about.partition)

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def tracker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tracker]:
    tracker = Tracker()
    monkeypatch.setattr(end, "SweepTracker", lambda *_: tracker)
    yield tracker
    assert tracker.closed == 1


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ctrl_c_ends_a_sweep_and_prints_its_table(
    command: Any, monkeypatch: pytest.MonkeyPatch, tracker: Tracker, launcher: str
):
    fake_outcomes(monkeypatch, dp=Status.ok, fsdp=KeyboardInterrupt(), sp=Status.ok)
    arguments = [*ARGUMENTS, "partition=dp,fsdp,sp", f"hydra/launcher={launcher}"]
    result = command(*arguments)
    assert result.status == 130
    assert "s5_tiny 2x2x1-dp measure" in result.out and "1 ok" in result.out
    (note,) = [line for line in result.out.splitlines() if line.startswith("sweep interrupted: 1 trial ")]
    assert note.endswith(f": valkyrie-train {' '.join(arguments)}")
    assert tracker.logged == ["dp"]


def test_ctrl_c_before_a_trial_ends_prints_the_command_that_continues(
    command: Any, monkeypatch: pytest.MonkeyPatch, tracker: Tracker
):
    fake_outcomes(monkeypatch, dp=KeyboardInterrupt())
    result = command(*ARGUMENTS, "partition=dp")
    assert result.status == 130 and result.out.startswith("sweep interrupted: 0 trials ")
    assert result.out.endswith(f": valkyrie-train {' '.join(ARGUMENTS)} partition=dp\n") and result.out.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_record_that_cannot_be_written_ends_the_sweep_and_prints_its_table(
    command: Any, monkeypatch: pytest.MonkeyPatch, tracker: Tracker, launcher: str
):
    fake_outcomes(
        monkeypatch, dp=Status.ok, fsdp=OSError(28, "No space left on device: a trial was not recorded", "trials.jsonl")
    )
    result = command(*ARGUMENTS, "partition=dp,fsdp", f"hydra/launcher={launcher}")
    assert result.status == 2 and "not recorded" in result.err.splitlines()[-1]
    assert "1 ok" in result.out and "sweep failed: 1 trial recorded" in result.out
    assert tracker.logged == ["dp"]


def test_an_error_at_the_end_of_a_sweep_sets_the_exit_status(
    command: Any, tracker: Tracker, monkeypatch: pytest.MonkeyPatch
):
    """Hydra turns exceptions of callbacks into warnings, which alone would leave an exit status of 0."""

    def broken(*_: object) -> None:
        raise KeyError("mesh")

    fake_outcomes(monkeypatch, dp=Status.failed)
    monkeypatch.setattr(end, "sweep_table", broken)
    result = command(*ARGUMENTS, "partition=dp")
    assert result.status == 1
    (line,) = result.err.splitlines()
    assert line.startswith("valkyrie-train: ") and "(KeyError: 'mesh')" in line and "runs/swept" in line


def test_a_sweep_of_a_mode_without_results_names_one_with_results(
    command: Any, monkeypatch: pytest.MonkeyPatch, tracker: Tracker
):
    fake_outcomes(monkeypatch, dp=Status.ok)
    ended = command(*ARGUMENTS, "mode=show", "partition=dp")
    assert any(re.match("mode=show .* mode=compile", line) for line in ended.out.splitlines())


def test_a_sweep_reports_settings_that_its_modes_do_not_read(
    command: Any, monkeypatch: pytest.MonkeyPatch, tracker: Tracker
):
    fake_outcomes(monkeypatch, dp=Status.ok)
    result = command(*ARGUMENTS, "mode=measure,show", "partition=dp", "log_every=1,2", "seed=0")
    notes = ["note: mode=measure does not read log_every=1,2", "note: mode=show does not read log_every=1,2 and seed=0"]
    assert (result.status, result.err.splitlines()) == (0, notes)


@pytest.mark.parametrize("sweeper", [[], ["hydra/sweeper=layouts"]])
def test_every_sweeper_ends_the_same_way_if_no_trial_is_legal(
    command: Any, tracker: Tracker, tmp_path: Path, sweeper: list[str]
):
    result = command(*ARGUMENTS, "mesh=2x2x2", "target=cpu8", "batch=3", "partition=dp,fsdp", *sweeper)
    assert result.status == end.ALL_REFUSED_EXIT and result.err == ""
    assert "measure: batch=3 is" in result.out and "folder: runs/swept" in result.out and "2 refused" in result.out
    assert [trial.status for trial in TrialLog(tmp_path / "runs" / "swept").read()] == [Status.refused] * 2
    assert tracker.logged == ["dp", "fsdp"]


@pytest.mark.parametrize(
    ("argument", "phrase"),
    [
        ("hydra.launcher.jobs=0", "jobs=0: "),
        ("hydra.launcher.jobs=abc", "jobs=abc: "),
        ("partition=glob(fsdpp*)", "partition=fsdp?"),
    ],
)
def test_a_mistake_before_any_trial_prints_only_the_error(command: Any, tracker: Tracker, argument: str, phrase: str):
    result = command(*ARGUMENTS, *([] if argument.startswith("partition") else ["partition=dp"]), argument)
    assert (result.status, result.out) == (2, "")
    assert phrase in result.err
