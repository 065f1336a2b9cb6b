"""How a multirun ends: whatever goes wrong, and whoever runs the trials, it is told, closed and has its exit status."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sweeps import play
from valkyrie.sweep import end
from valkyrie.sweep.trial import Status, Trial, TrialLog

ASKED = ["-m", "model=s5_tiny", "batch=8", "mesh=2x2x1", "mode=measure", "name=swept"]
LAUNCHERS = ["trials", "basic"]


class Tracker:
    """Takes the place of W&B, and remembers."""

    def __init__(self, *_: object) -> None:
        self.told: list[str] = []
        self.closed = 0

    def log(self, trial: Trial) -> None:
        self.told.append(trial.about.partition)

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def tracker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tracker]:
    made = Tracker()
    monkeypatch.setattr(end, "SweepTracker", lambda *_: made)
    yield made
    assert made.closed == 1


@pytest.mark.parametrize("runs", LAUNCHERS)
def test_ctrl_c_is_told_as_an_end_whoever_runs_the_trials(
    command: Any, monkeypatch: pytest.MonkeyPatch, tracker: Tracker, runs: str
):
    play(monkeypatch, dp=Status.ok, fsdp=KeyboardInterrupt(), sp=Status.ok)
    ended = command(*ASKED, "partition=dp,fsdp,sp", f"hydra/launcher={runs}")
    assert ended.status == 130
    assert "s5_tiny 2x2x1-dp measure" in ended.out and end.STOPPED in ended.out and "1 trial: 1 ok" in ended.out
    assert tracker.told == ["dp"]


@pytest.mark.slow
@pytest.mark.parametrize("runs", LAUNCHERS)
def test_a_record_that_cannot_be_written_ends_a_sweep_with_its_table(
    command: Any, monkeypatch: pytest.MonkeyPatch, tracker: Tracker, runs: str
):
    play(
        monkeypatch, dp=Status.ok, fsdp=OSError(28, "No space left on device: a trial was not recorded", "trials.jsonl")
    )
    ended = command(*ASKED, "partition=dp,fsdp", f"hydra/launcher={runs}")
    assert ended.status == 2 and "a trial was not recorded" in ended.err.splitlines()[-1]
    assert "1 trial: 1 ok" in ended.out and "the same command does the rest" in ended.out
    assert tracker.told == ["dp"]


def test_what_fails_at_the_end_is_an_exit_status_of_its_own(
    command: Any, tracker: Tracker, monkeypatch: pytest.MonkeyPatch
):
    """Hydra makes a warning of what a callback raises, and the status would be 0."""

    def broken(*_: object) -> None:
        raise KeyError("mesh")

    play(monkeypatch, dp=Status.failed)
    monkeypatch.setattr(end, "table", broken)
    ended = command(*ASKED, "partition=dp")
    assert ended.status == 1
    (line,) = ended.err.splitlines()
    assert line.startswith("valkyrie-train: the end of the sweep cannot be shown (KeyError: 'mesh'); its trials are")
    assert "recorded in runs/swept." in line


@pytest.mark.parametrize("sweeper", [[], ["hydra/sweeper=layouts"]])
def test_where_no_trial_is_legal_every_sweeper_ends_alike(
    command: Any, tracker: Tracker, tmp_path: Path, sweeper: list[str]
):
    ended = command(*ASKED, "mesh=2x2x2", "target=cpu8", "batch=3", "partition=dp,fsdp", *sweeper)
    assert ended.status == end.ALL_REFUSED and ended.err == ""
    assert "refused: s5_tiny 2x2x2-dp cpu8 measure: batch=3 is not divisible by" in ended.out
    assert "folder: runs/swept" in ended.out and "2 trials: 2 refused" in ended.out
    assert [trial.status for trial in TrialLog(tmp_path / "runs" / "swept").read()] == [Status.refused] * 2
    assert tracker.told == ["dp", "fsdp"]


def test_a_mistake_before_any_trial_is_said_alone(command: Any, tracker: Tracker):
    ended = command(*ASKED, "partition=dp", "hydra.launcher.jobs=0")
    assert (ended.status, ended.out) == (2, "")
    assert "hydra.launcher.jobs=0: at least 1 trial" in ended.err
