"""Tests of faults in a sweep: each one is a row with its reason, and no trial is lost or repeated."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

import pytest

from helpers import compose_run
from runs import run_train
from sweeps import FakeMultirun
from valkyrie.processes.ending import (
    EXIT_INTERRUPTED,
    EXIT_LOST,
    EXIT_PREEMPTED,
    EXIT_REFUSED,
    OUT_OF_MEMORY,
    end_process,
    on_process_end,
)
from valkyrie.search.compile.prediction import MemoryReport
from valkyrie.sweep.child import capture_outcome
from valkyrie.sweep.results import Outcome, last_error, outcome_from_exit_status, outcome_from_results, read_outcome
from valkyrie.sweep.trial import Status, StepResult, TrialResult


@pytest.mark.slow
def test_every_fault_is_a_row_and_the_sweep_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
):
    multirun = FakeMultirun(tmp_path)
    faults = {"dp": "fail", "fsdp": "kill", "_1d_tp": "hang", "_2d_tp": "memory", "sp": "refuse"}
    multirun.activate(monkeypatch, **faults)
    swept = "partition=dp,fsdp,1d_tp,2d_tp,sp,fsdp_tp"
    limits = ["trial.limit_s=2", "hydra.launcher.jobs=6"]
    start = time.monotonic()
    assert run_train(*multirun.arguments(swept, *limits)) == 1
    assert time.monotonic() - start < 60
    output, trials = capfd.readouterr().out, multirun.trials()
    assert {partition: trial.status.value for partition, trial in trials.items()} == {
        "1d_tp": "timeout",
        "2d_tp": "failed",
        "dp": "failed",
        "fsdp": "killed",
        "fsdp_tp": "ok",
        "sp": "refused",
    }
    reasons = {partition: trial.reason for partition, trial in trials.items()}
    parts = {
        "dp": "status 1: ValueError",
        "fsdp": "SIGKILL",
        "1d_tp": "trial.limit_s=2",
        "2d_tp": "status 1: MemoryError",
        "sp": "partition=x",
    }
    assert all(part in (reasons[partition] or "") for partition, part in parts.items()), reasons
    assert reasons["fsdp_tp"] is None
    assert all(reason in output for reason in reasons.values() if reason)
    assert "trial.retry=true" in output
    _assert_no_process(multirun)


@pytest.mark.slow
def test_trials_without_results_are_repeated_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    multirun = FakeMultirun(tmp_path)
    multirun.activate(monkeypatch, dp="fail", sp="refuse")
    assert run_train(*multirun.arguments("partition=dp,sp")) == 1
    multirun.activate(monkeypatch)  # now both could
    assert run_train(*multirun.arguments("partition=dp,sp")) == 1
    assert [t.status for t in multirun.trials().values()] == [Status.failed, Status.ok], "what was refused is looked at"
    assert run_train(*multirun.arguments("partition=dp", "trial.retry=true")) == 0
    assert [t.status for t in multirun.trials().values()] == [Status.ok, Status.ok]
    assert len(multirun.started_trials()) == multirun.count_lines() == 2 + 1 + 1


def _assert_no_process(multirun: FakeMultirun) -> None:
    """Assert that no process of the multirun's trials is still running."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            assert str(multirun.sweep_folder) not in (folder / "cmdline").read_text() or folder.name == str(os.getpid())
        except (FileNotFoundError, ProcessLookupError):
            continue


@pytest.mark.slow
def test_a_restarted_sweep_ends_with_the_same_table(tmp_path: Path):
    """The running trial survives the kill. The next sweep ends its process and repeats the trial."""
    swept = "partition=dp,fsdp,1d_tp,sp"
    multirun, uninterrupted = FakeMultirun(tmp_path / "killed", fsdp="hang"), FakeMultirun(tmp_path / "whole")
    sweep = multirun.start(swept)
    _wait(lambda: len(multirun.started_trials()) == 2)
    sweep.kill()
    sweep.communicate()
    assert list(multirun.trials()) == ["dp"]
    multirun.set_behaviours()
    for fake in (multirun, uninterrupted):
        process = fake.start(swept)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0, output
    rows = [{p: (t.key, t.name, t.status, t.results) for p, t in s.trials().items()} for s in (multirun, uninterrupted)]
    assert rows[0] == rows[1] and len(rows[0]) == multirun.count_lines() == 4
    assert len(multirun.started_trials()) == 5
    _assert_no_process(multirun)


@pytest.mark.slow
def test_two_sweeps_into_one_folder_share_the_trials(tmp_path: Path):
    multirun = FakeMultirun(tmp_path, **dict.fromkeys(("dp", "fsdp", "_1d_tp", "sp", "fsdp_tp"), "measure 0.7"))
    sweeps = [multirun.start("partition=dp,fsdp,1d_tp,sp,fsdp_tp", "mesh=2x2x1,1x1x3") for _ in range(2)]
    outputs = [sweep.communicate(timeout=90)[0] for sweep in sweeps]
    assert [sweep.returncode for sweep in sweeps] == [0, 0], outputs
    started = multirun.started_trials()
    assert len(started) == len(set(started)) == 5
    assert all("5 refused" in output for output in outputs), outputs
    assert any("another sweep" in output for output in outputs), outputs
    names = [trial.name for trial in multirun.trials().values() if trial.status is Status.ok]
    assert sorted(names) == sorted(started)


def _wait(condition: object, limit_s: float = 60.0) -> None:
    assert callable(condition)
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_sigterm_ends_a_sweep_and_its_trial(tmp_path: Path):
    multirun = FakeMultirun(tmp_path, dp="measure 60")
    sweep = multirun.start("partition=dp")
    _wait(lambda: len(multirun.started_trials()) == 1)
    sweep.send_signal(signal.SIGTERM)
    output, _ = sweep.communicate(timeout=30)
    assert sweep.returncode == 130, output
    assert multirun.trials() == {}
    _assert_no_process(multirun)


@pytest.mark.slow
def test_a_full_disk_is_reported_and_a_rerun_completes_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
):
    """A file size limit simulates a full disk. The rerun cuts off the incomplete last line of the record."""
    multirun = FakeMultirun(tmp_path)
    multirun.activate(monkeypatch)
    assert run_train(*multirun.arguments("partition=dp")) == 0
    settings_bytes = (multirun.sweep_folder / "multirun.yaml").stat().st_size
    trials_file = multirun.sweep_folder / "trials.jsonl"
    padding = json_lines_up_to(trials_file, max(settings_bytes, 20_000))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    capfd.readouterr()
    resource.setrlimit(resource.RLIMIT_FSIZE, (trials_file.stat().st_size + 100, hard))
    try:
        status = run_train(*multirun.arguments("partition=dp,fsdp"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    errors = capfd.readouterr().err.splitlines()
    assert status != 0
    assert len(errors) == 1 and "not recorded" in errors[0] and str(trials_file) in errors[0]
    assert list(multirun.trials()) == ["dp"]
    assert run_train(*multirun.arguments("partition=dp,fsdp")) == 0
    assert list(multirun.trials()) == ["dp", "fsdp"]
    assert multirun.count_lines() == padding + 2


def json_lines_up_to(trials_file: Path, size: int) -> int:
    """Append copies of a file's only line until the file has at least `size` bytes. Return their number."""
    line, added = trials_file.read_text(), 0
    with trials_file.open("a") as file:
        while file.tell() < size:
            file.write(line)
            added += 1
    return added


def _raise(error: Exception) -> Outcome:
    raise error


TRACEBACK = """I0000 00:00 starting
Traceback (most recent call last):
  File "x.py", line 1, in <module>
jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory allocating 17 bytes.
--------------------
For simplicity, JAX has removed its internal frames from the traceback.
"""


def test_the_reason_of_a_failure_is_the_last_error_in_the_log(tmp_path: Path):
    output = tmp_path / "output.log"
    assert last_error(output) == "no output"
    output.write_text(TRACEBACK)
    result = read_outcome(tmp_path, 1)
    assert result.status is Status.failed, "what a log says decides nothing"
    assert result.reason is not None and "RESOURCE_EXHAUSTED: Out" in result.reason and "17 bytes." in result.reason
    assert (
        capture_outcome(lambda: _raise(RuntimeError("RESOURCE_EXHAUSTED: Out of memory"))).status is Status.does_not_fit
    )
    output.write_text("F0101 00:00 thing.cc:1] Check failed: a == b\n*** Check failure stack trace: ***\n    @ 0x1\n")
    result = read_outcome(tmp_path, -signal.SIGABRT)
    assert result.status is Status.killed and result.reason is not None
    assert "SIGABRT: F0101" in result.reason and result.reason.endswith("a == b")
    assert "measure.json" in str(outcome_from_results(tmp_path, compose_run("mode=measure", "mesh=1x1x1")).reason)
    assert read_outcome(tmp_path, 130).status is Status.killed


@pytest.mark.parametrize(
    ("code", "reason", "status"),
    [
        (EXIT_LOST, "step 3 hangs: nothing has finished for 60 s", Status.failed),
        (EXIT_REFUSED, "batch=7 is not divisible by 2", Status.refused),
        (EXIT_REFUSED, "its data is named out of memory", Status.refused),
        (OUT_OF_MEMORY, "gpt_tiny under 1x1x1-dp has no room", Status.does_not_fit),
        (EXIT_PREEMPTED, "stopped by a signal", Status.killed),
        (EXIT_INTERRUPTED, "stopped by a signal", Status.killed),
    ],
)
def test_a_process_that_ends_itself_leaves_its_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, reason: str, status: Status
):
    """Covers a hang, refusals, runs that do not fit, and signals. Other errors in the log do not change the outcome."""
    (tmp_path / "output.log").write_text(TRACEBACK)
    monkeypatch.setattr("os._exit", sys.exit)
    with (
        on_process_end(lambda code, reason: outcome_from_exit_status(code, reason).write(tmp_path)),
        pytest.raises(SystemExit),
    ):
        end_process(code, reason)
    result = read_outcome(tmp_path, code)
    assert result.status is status
    assert status is Status.killed or result.reason == reason


DAMAGED = ['{"status": "o', "[]", '"weird"', "{}", '{"status": "fine", "reason": null, "results": {}}', "\xff", ""]
DAMAGED += ['{"status": "ok", "reason": null, "results": null}', '{"status": ["ok"], "reason": 1, "results": {}}']


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_outcome_fails_only_its_trial(tmp_path: Path, text: str):
    (tmp_path / "outcome.json").write_bytes(text.encode("latin-1"))
    result = read_outcome(tmp_path, 0)
    assert (result.status, result.results) == (Status.failed, TrialResult())
    assert result.reason is not None and "outcome.json" in result.reason and "trial.retry=true" in result.reason


def test_a_training_trial_has_the_results_of_its_last_summary(tmp_path: Path):
    ending = {"steps": 1, "finished": True}
    summaries = [{"step_s": 0.5, "hbm_gib": 0.25, "eval_loss": 3.0}, {"step_s": 0.4, "hbm_gib": None, "eval_loss": 2.0}]
    summaries = [summary | ending for summary in summaries]
    lines = [
        line for summary in summaries for line in ({"step": 1, "loss": summary["eval_loss"]}, {"summary": summary})
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = compose_run("model=gpt_tiny", "mode=train")
    result = outcome_from_results(tmp_path, run)
    assert result.status is Status.ok
    step, memory = StepResult(step_s=0.4), MemoryReport(peak=2**28)
    expected = TrialResult(run.model.parameter_count(), memory, step, eval_loss=2.0, loss=2.0, steps=1, finished=True)
    assert result.results == expected


def test_an_exception_gives_a_short_reason_and_a_traceback_in_the_log(tmp_path: Path):
    """A trial can be refused for a reason that the plan does not check. Here, its data file does not exist."""
    multirun = FakeMultirun(tmp_path, dp="real")
    arguments = ["partition=dp", "mode=train", "data=text", "data.paths=[lost.txt]", "steps=1"]
    sweep = multirun.start(*arguments)
    output, _ = sweep.communicate()
    (trial,) = multirun.trials().values()
    assert (sweep.returncode, trial.status) == (2, Status.refused), output
    assert trial.reason is not None and "lost" in trial.reason and "Traceback" not in output
    log = (multirun.sweep_folder / trial.name / "output.log").read_text()
    assert "Traceback" in log and log.splitlines()[-1].startswith("ValueError: ")
