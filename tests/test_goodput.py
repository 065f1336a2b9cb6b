"""Tests of goodput: it equals a calculation by hand, also for training runs that are stopped, killed and resumed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax
import pytest

from runs import TINY_ARGUMENTS, copy_run, run_train, tiny_arguments, trained_run
from valkyrie.checkpoint import latest_step
from valkyrie.processes.team import Team
from valkyrie.runs.goodput import GOODPUT_FILE, TIME_KINDS, GoodputRecorder, read_goodput, read_starts
from valkyrie.runs.tracking import read_metrics
from valkyrie.train import compiled, profile
from valkyrie.units import long_duration_text
from wandb_files import wandb_log


def ledger_line(time: float, step: int, end: str | None = None, **seconds: float) -> str:
    return json.dumps({"time": time, "step": step, "seconds": seconds} | ({"end": end} if end else {})) + "\n"


TWO_RESTARTS = (
    '{"start": 1000.0}\n'
    + ledger_line(1010, 0, setup=4, compile=6)
    + ledger_line(1030, 100, setup=4, compile=6, steps=19, data=1)
    + ledger_line(1050, 200, setup=4, compile=6, steps=37, data=2, save=1)  # killed: it had saved step 150
    + '{"start": 1060.0}\n'
    + ledger_line(1070, 150, setup=3, restore=2, compile=5)
    + ledger_line(1090, 250, setup=3, restore=2, compile=5, steps=20)  # preempted
    + ledger_line(1092, 260, "preempted", setup=3, restore=2, compile=5, steps=21, save=1)
    + '{"start": 1100.0}\n'
    + ledger_line(1104, 260, setup=3, restore=1)
    + ledger_line(1124, 360, setup=3, restore=1, steps=18, evaluation=2)
    + '{"time": 1130, "step": 400, "seco'
)


def test_goodput_of_two_restarts_equals_a_calculation_by_hand(tmp_path: Path) -> None:
    """Steps 100 to 200 first take 37 - 19 = 18 s. The second start repeats half of them, so 9 s count as redone."""
    (tmp_path / GOODPUT_FILE).write_text(TWO_RESTARTS)
    goodput = read_goodput(tmp_path)
    assert goodput is not None
    assert goodput.restarts == 2
    assert goodput.wall_s == pytest.approx(124)
    expected = {"steps": 37 - 9 + 21 + 18, "redone": 9, "data": 2, "setup": 10, "compile": 11, "restore": 3}
    expected |= {"save": 2, "evaluation": 2, "down": 10 + 8, "other": 0}
    assert goodput.seconds == pytest.approx(expected)
    assert goodput.share == pytest.approx(67 / 124)
    shares = re.findall(r"[0-9.]+%", goodput.describe())
    assert shares == ["54%", "15%", "8.9%", "8.1%", "7.3%", "2.4%", "1.6%", "1.6%", "1.6%"]
    assert "2 restarts" in goodput.describe() and "2 min 4 s" in goodput.describe()


def test_a_restart_from_an_earlier_step_discards_the_later_steps_of_all_starts(tmp_path: Path) -> None:
    text = "".join(
        f'{{"start": {start}}}\n' + ledger_line(start, first, steps=0) + ledger_line(start + 10, last, steps=10)
        for start, first, last in ((0, 0, 100), (10, 80, 100), (20, 50, 150))
    )
    (tmp_path / GOODPUT_FILE).write_text(text)
    goodput = read_goodput(tmp_path)
    assert goodput is not None
    assert goodput.seconds["redone"] == pytest.approx(5 + 10)
    assert goodput.seconds["steps"] == pytest.approx(15)


@pytest.mark.parametrize(("end", "down", "restarts"), [(None, 3600, 1), ("preempted", 3600, 1), ("stopped", 0, 0)])
def test_time_after_a_requested_end_is_not_lost(tmp_path: Path, end: str | None, down: float, restarts: int) -> None:
    text = '{"start": 0}\n' + ledger_line(10, 5, end, steps=10) + '{"start": 3610}\n' + ledger_line(3620, 5, steps=0)
    (tmp_path / GOODPUT_FILE).write_text(text)
    goodput = read_goodput(tmp_path)
    assert goodput is not None
    assert (goodput.seconds["down"], goodput.restarts) == (down, restarts)


def test_a_start_killed_before_its_first_record_counts_as_down_time(tmp_path: Path) -> None:
    (tmp_path / GOODPUT_FILE).write_text('{"start": 0}\n{"start": 30}\n' + ledger_line(40, 0, setup=10))
    goodput = read_goodput(tmp_path)
    assert goodput is not None
    assert (goodput.seconds["down"], goodput.seconds["setup"], goodput.restarts) == (30, 10, 1)


def test_live_goodput_equals_that_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        now = 2000.0

        def time(self) -> float:
            return self.now

        def perf_counter(self) -> float:
            return self.now - 500

    clock = Clock()
    monkeypatch.setattr("valkyrie.runs.goodput.time", clock)
    (tmp_path / GOODPUT_FILE).write_text(TWO_RESTARTS)
    spent = {"restore": 2.0}
    recorder = GoodputRecorder(tmp_path, 1995.0, spent)
    clock.now += 1
    recorder.count_setup(300)
    assert spent == {"restore": 2.0, "setup": 4.0}
    for step in range(301, 500):
        clock.now += 0.1
        spent["steps"] = spent.get("steps", 0.0) + 0.1
        recorder.record_step(step)
    clock.now += 7
    live = recorder.goodput()
    recorder.write(end="finished")
    written = read_goodput(tmp_path)
    assert written is not None
    assert live.seconds == pytest.approx(written.seconds, abs=0.01)
    assert live.restarts == written.restarts == 3
    assert live.seconds["other"] == pytest.approx(7)
    assert live.seconds["redone"] == pytest.approx(9 + 18 * 60 / 100)
    points = read_starts(tmp_path / GOODPUT_FILE)[-1].points
    assert 15 < len(points) < 25, "a line a second in a start this short"


def test_only_process_0_writes_goodput(tmp_path: Path) -> None:
    recorder = GoodputRecorder(tmp_path, 0.0, {}, is_writer=False)
    recorder.count_setup(0)
    recorder.write(1)
    assert not list(tmp_path.iterdir())


def test_a_deleted_run_folder_does_not_end_the_training(tmp_path: Path) -> None:
    recorder = GoodputRecorder(tmp_path / "gone", 0.0, {})
    recorder.count_setup(0)
    assert recorder.goodput().seconds.keys() == TIME_KINDS.keys()


@pytest.mark.parametrize(
    ("seconds", "text"), [(8.06, "8.1 s"), (312.0, "5 min 12 s"), (7320.0, "2 h 2 min"), (266400.0, "3 d 2 h")]
)
def test_long_times_have_two_units(seconds: float, text: str) -> None:
    assert long_duration_text(seconds) == text


def test_a_training_reports_how_it_spent_its_time(capfd: pytest.CaptureFixture[str]) -> None:
    folder = trained_run("tracking=wandb", "optimizer.warmup_steps=1")
    lines, log = read_metrics(folder / "metrics.jsonl"), wandb_log(folder)
    summary = lines[-1]["summary"]
    keys = {"goodput", "restarts", "data_wait", "time/total", *(f"time/{kind}" for kind in TIME_KINDS)}
    assert {key: summary[key] for key in keys} == {key: log["summary"][key] for key in keys}
    assert summary["restarts"] == 0 and 0 < summary["goodput"] < 1
    assert sum(summary[f"time/{kind}"] for kind in TIME_KINDS) == pytest.approx(summary["time/total"], abs=0.01)
    assert summary["time/compile"] >= summary["compile_s"] - 0.01
    assert summary["communication"]["bytes"] == log["summary"]["comm_bytes/total"] == 0
    records = [record for record in lines if "loss" in record]
    assert all(record["goodput"] > 0 for record in records)
    assert all(0 <= record["data_wait"] <= 1 for record in records[1:])
    goodput = read_goodput(folder)
    assert goodput is not None and goodput.seconds["steps"] == pytest.approx(summary["time/steps"], abs=0.01)


@pytest.mark.slow
def test_collective_bytes_of_a_training_equal_those_of_the_search(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    layout = ("mesh=2x2x1", "partition=fsdp", f"runs={tmp_path}", "name=run")
    assert run_train(*TINY_ARGUMENTS, *layout, "steps=2") == 0
    assert "a device sends " in capfd.readouterr().out
    assert run_train(*TINY_ARGUMENTS, *layout, "mode=measure", "mode.repeats=1", "mode.warmup=0") == 0
    early, *_, last = read_metrics(tmp_path / "run" / "metrics.jsonl")
    measured = json.loads((tmp_path / "run-measure" / "measure.json").read_text())["communication"]
    communication = last["summary"]["communication"]
    by_axes = {",".join(over["mesh_axes"]): over["bytes"] for over in measured["bytes_by_mesh_axes"]}
    assert communication == {"bytes": measured["bytes"], "bytes_by_mesh_axes": by_axes}
    assert communication["bytes"] > 0 and communication == early["summary"]["communication"], (
        "a killed run has them too"
    )


def test_unreadable_programs_and_profiler_failures_do_not_end_a_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def unreadable(_: Any) -> None:
        raise KeyError("a new opcode")

    def taken(_: Any) -> None:
        raise RuntimeError("Only one profile may be run at a time.")

    monkeypatch.setattr(compiled, "parse_module", unreadable)
    monkeypatch.setattr(profile, "tracing", taken)
    assert run_train(*tiny_arguments(tmp_path, "steps=3", "profile=2-3")) == 0
    out = capfd.readouterr().out
    assert "KeyError: 'a new" in out and "RuntimeError: Only one" in out
    assert "communication" not in read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["summary"]


@pytest.mark.slow
def test_a_killed_run_restarts_and_counts_its_repeated_steps(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Simulates a killed run: a finished run whose last checkpoint and record of its end are removed."""
    folder = copy_run(trained_run("checkpoint.every=4", "steps=6"), tmp_path)
    file = folder / GOODPUT_FILE
    lines = [line for line in file.read_text().splitlines(keepends=True) if '"end"' not in line]
    file.write_text("".join(lines) + '{"time": 17')
    (folder / "checkpoints" / "6").rename(tmp_path / "6")
    assert latest_step(folder) == 4
    assert run_train(*tiny_arguments(tmp_path, "checkpoint.every=4", "steps=8", "profile=2-3")) == 0
    assert "profile=2-3 traces nothing" in capfd.readouterr().out
    assert not (folder / "profile").exists()
    summary = read_metrics(folder / "metrics.jsonl")[-1]["summary"]
    assert summary["restarts"] == 1
    assert summary["time/redone"] > 0 and summary["time/down"] > 0 and summary["time/restore"] > 0
    assert summary["time/redone"] < read_starts(file)[0].seconds_spent("steps")


@pytest.mark.slow
def test_a_window_of_steps_is_traced(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_train(*tiny_arguments(tmp_path, "steps=5", "profile=2-3")) == 0
    folder = tmp_path / "run" / "profile"
    assert f"xprof --logdir {folder}" in capfd.readouterr().out
    (file,) = folder.glob("plugins/profile/steps-2-3/*.xplane.pb")
    assert file.with_name(file.name.replace(".xplane.pb", ".trace.json.gz")).is_file()
    trace = jax.profiler.ProfileData.from_file(str(file))
    named = [
        dict(event.stats).get("step_num") for plane in trace.planes for line in plane.lines for event in line.events
    ]
    assert {step for step in named if step is not None} == {2, 3}


def test_processes_of_one_host_write_separate_traces(tmp_path: Path) -> None:
    for index in range(2):
        with profile.ProfileWindow("1-1", tmp_path, team=Team(2, index)) as window:
            assert window.starts_at(1)
            assert window.open(1, ()) is None
            assert not window.starts_at(2) and window.ends_at(1)
    files = sorted(file.name.rpartition("-")[2] for file in tmp_path.rglob("*.xplane.pb"))
    assert files == ["0.xplane.pb", "1.xplane.pb"]
    assert len({file.parent for file in tmp_path.rglob("*.xplane.pb")}) == 1, "hosts of one run"


def test_a_trace_that_ends_early_is_named_by_its_last_step(tmp_path: Path) -> None:
    window = profile.ProfileWindow("2-9", tmp_path)
    assert window.open(2, ()) is None
    assert str(window.close(3)).startswith("traced steps 2-3. ")
    assert [folder.name for folder in (tmp_path / "profile/plugins/profile").iterdir()] == ["steps-2-3"]


def test_only_idle_devices_count_as_waiting_for_data() -> None:
    """A batch that arrives late, but while the devices still compute the previous step, delays nothing."""
    import threading
    import time

    from valkyrie.train.meter import Meter

    meter, step_complete = Meter(1, 1, 1.0, None), threading.Event()
    meter.start()
    meter.record_dispatch(step_complete.wait)
    with meter.waiting_for_data():
        time.sleep(0.02)
    meter.record_step()
    assert meter.seconds_by_kind["data"] == 0
    with meter.waiting_for_data():
        step_complete.set()
        time.sleep(0.3)
    meter.record_step()
    meter.close()
    assert 0.05 < meter.seconds_by_kind["data"] <= meter.step_times[0] < 1
    assert meter.rates()["data_wait"] == pytest.approx(meter.seconds_by_kind["data"] / meter.step_times[0])
