"""Tests of sweeps at W&B, read back from its offline files: one group, a run per trial, and a parent run."""

from __future__ import annotations

import json
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers import compose_run
from valkyrie.records import decode, encode
from valkyrie.runs.layout_record import LayoutRecord
from valkyrie.runs.wandb_writer import TrackingConfig, WandbMode, wandb_config
from valkyrie.sweep.columns import WANDB_TABLE_COLUMNS
from valkyrie.sweep.rows import Row, make_row
from valkyrie.sweep.tracking import REPORTED_FILE, SweepTracker, trial_summary, wandb_run_id
from valkyrie.sweep.trial import Status, Trial, TrialLog, TrialResult, upgrade_record
from wandb_files import wandb_log, wandb_logs

GIB = 2**30


def layout_record(mesh: str, partition: str) -> LayoutRecord:
    x, y, z = (int(n) for n in mesh.split("x"))
    record = LayoutRecord("m", mesh, partition, "cpu8", axes={"x": x, "y": y, "z": z}, chips=8)
    return replace(record, layout=f"{mesh}-{partition}", degrees={"MP1": x, "MP2": y, "DP": z})


def trial(mesh: str, partition: str, status: Status, reason: str | None = None, **more: Any) -> Trial:
    name = f"{mesh}-{partition}"
    values: dict[str, Any] = {
        "key": f"key-{name}",
        "name": name,
        "sweep": "laptop",
        "stage": "measure",
        "overrides": [f"mesh={mesh}", f"partition={partition}"],
        "about": layout_record(mesh, partition),
        "started": "2026-01-02T03:04:05+00:00",
        "wall_s": 6.0,
        "folder": name,
        **more,
    }
    values["results"] = decode(TrialResult, upgrade_record({"results": values.get("results", {})})["results"], name)
    return Trial(status=status, reason=reason, **values)


def row(sweep_trial: Trial) -> Row:
    return make_row(sweep_trial, Path("laptop"), bool(sweep_trial.results.simulated), None, ())


def results(step_s: float) -> dict[str, Any]:
    rate = 1024 / step_s
    return {
        "step": {"step_s": step_s, "tokens_per_second": rate, "tokens_per_second_per_chip": rate / 8, "mfu": None},
        "memory": {"peak": 3 * GIB},
        "communication": {"bytes": 300.0, "bytes_by_mesh_axes": {"x": 100.0, "x,y": 200.0}},
        "simulated": True,
        "loss": 5.5,
    }


OK = trial("2x2x2", "2d_tp", Status.ok, results=results(0.5))
FASTER = trial("1x1x8", "fsdp", Status.ok, results=results(0.25))
REFUSED = trial("8x1x1", "1d_tp", Status.refused, "partition=1d_tp puts heads (4) on x=8", folder=None, wall_s=0.0)
FAILED = trial("4x2x1", "sp", Status.failed, "exit status 1: boom")
LARGE = trial("1x1x8", "dp", Status.does_not_fit, "needs 40 of 16 GiB", results={"memory": {"needed": 40 * GIB}})
SWEEP = [OK, FASTER, REFUSED, FAILED, LARGE]


def report(folder: Path, trials: list[Trial], **config: Any) -> list[str]:
    """Report a sweep with these trials to W&B and return the printed notes."""
    notes: list[str] = []
    TrialLog(folder).append(trials)
    tracker = SweepTracker(TrackingConfig(**{"wandb": WandbMode.offline, **config}), folder, "laptop", notes.append)
    for entry in trials:
        tracker.log(entry)
    tracker.close()
    return notes


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, Any]]]:
    """The folder of a reported sweep, and its W&B runs by name."""
    folder = tmp_path_factory.mktemp("sweep")
    assert report(folder, SWEEP) == []
    return folder, {log["run"].display_name: log for log in wandb_logs(folder)}


def test_all_trials_and_the_parent_run_are_in_one_group(reported: tuple[Path, dict[str, Any]]) -> None:
    _, runs = reported
    assert set(runs) == {*(t.name for t in SWEEP), "laptop"}
    assert {log["run"].run_group for log in runs.values()} == {"laptop"}
    assert {log["run"].project for log in runs.values()} == {"valkyrie"}
    assert {name: log["run"].job_type for name, log in runs.items() if name != "laptop"} == {
        t.name: "measure" for t in SWEEP
    }
    assert runs["laptop"]["run"].job_type == "sweep"
    assert {"mesh=2x2x2", "mesh=1x1x8", "partition=2d_tp", "model=m", "target=cpu8"} <= {*runs["laptop"]["run"].tags}
    assert len({log["run"].run_id for log in runs.values()}) == 6


def test_a_run_has_its_layout_and_results(reported: tuple[Path, dict[str, Any]]) -> None:
    log = reported[1][OK.name]
    config = log["config"]
    assert config["layout"] == "2x2x2-2d_tp" and config["degrees"] == OK.about.degrees
    assert {key: config[key]["name"] for key in ("mesh", "partition", "model", "target")} == {
        "mesh": "2x2x2",
        "partition": "2d_tp",
        "model": "m",
        "target": "cpu8",
    }
    assert log["config"]["overrides"] == ["mesh=2x2x2", "partition=2d_tp"]
    assert log["config"]["simulated"] is True
    assert list(log["run"].tags) == ["mesh=2x2x2", "partition=2d_tp", "model=m", "target=cpu8"]
    assert {key: value for key, value in log["summary"].items() if "runtime" not in key} == {
        "status": "ok",
        "stage": "measure",
        "wall_s": 6.0,
        "simulated": True,
        "tokens_per_second": 2048.0,
        "tokens_per_second_per_chip": 256.0,
        "step_ms": 500.0,
        "hbm_gib": 3.0,
        "loss": 5.5,
        "comm_bytes/total": 300.0,
        "comm_bytes/x": 100.0,
        "comm_bytes/x,y": 200.0,
    }


def test_a_measured_run_has_the_prediction_of_its_layout(tmp_path: Path) -> None:
    step = replace(OK.results.step, step_s=0.4, mfu=0.3)
    predicted = replace(OK, key="p", name="p", stage="compile", results=replace(OK.results, simulated=None, step=step))
    assert report(tmp_path, [predicted, OK]) == []
    summaries = {log["run"].display_name: log["summary"] for log in wandb_logs(tmp_path)}
    assert (summaries[OK.name]["predicted_step_ms"], summaries[OK.name]["predicted_mfu"]) == (400, 0.3)
    assert "predicted_step_ms" not in summaries["p"]


def test_a_run_has_all_settings_nested(tmp_path: Path) -> None:
    run = compose_run("model=gpt_tiny", "mesh=2x2x2", "partition=2d_tp", "optimizer.learning_rate=0.01", "seed=7")
    (tmp_path / OK.name).mkdir()
    run.save(tmp_path / OK.name / "run.yaml")
    refused = replace(REFUSED, values={"model.embed": "96", "optimizer.learning_rate": "0.5", "model.windows": "[64]"})
    assert report(tmp_path, [OK, refused]) == []
    runs = {log["run"].display_name: log["config"] for log in wandb_logs(tmp_path)}
    config = runs[OK.name]
    assert (config["optimizer"]["learning_rate"], config["seed"]) == (0.01, 7)
    assert config["data"]["name"] == run.config.data.name and config["model"]["embed"] == run.config.model.embed
    assert config["trial"]["retry"] is False and config["trial_key"] == OK.key and "hydra" not in config
    config = runs[REFUSED.name]
    assert config["optimizer"]["learning_rate"] == 0.5 and config["model"]["windows"] == [64]
    assert config["model"] == {"name": "m", "embed": 96, "windows": [64]}


def test_bytes_on_unknown_axes_are_named_unattributed() -> None:
    results = {"communication": {"bytes": 3.0, "bytes_by_mesh_axes": {"x": 1.0, "?": 2.0}}}
    sent = upgrade_record({"results": results})["results"]
    summary = trial_summary(row(replace(OK, results=decode(TrialResult, sent, "sent"))))
    assert summary["comm_bytes/unattributed"] == 2.0 and "comm_bytes/?" not in summary


def test_a_sweep_stays_offline_with_one_note_if_the_server_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb  # takes 1 s, in every collection if imported above

    init = wandb.init

    def refuse(**arguments: Any) -> Any:
        if arguments["mode"] == "online":
            raise wandb.errors.AuthenticationError("the key is wrong")
        return init(**arguments)

    monkeypatch.setattr(wandb, "init", refuse)
    notes = report(tmp_path, [OK, FASTER], wandb=WandbMode.online)
    (note,) = notes
    assert "the key is" in note and note.endswith(f"sync {tmp_path}/wandb/offline-run-*")
    assert {log["run"].display_name for log in wandb_logs(tmp_path)} == {OK.name, FASTER.name, "laptop"}


@pytest.mark.parametrize(("sweep_trial", "code"), [(OK, 0), (REFUSED, 0), (LARGE, 0), (FAILED, 1)])
def test_a_run_has_the_exit_code_and_reason_of_its_trial(
    reported: tuple[Path, dict[str, Any]], sweep_trial: Trial, code: int
) -> None:
    log = reported[1][sweep_trial.name]
    assert log["exit"] == code
    assert log["summary"]["status"] == sweep_trial.status.value
    assert log["summary"].get("reason") == sweep_trial.reason
    assert log["run"].notes == (sweep_trial.reason or "")
    assert ("tokens_per_second" in log["summary"]) is (sweep_trial is OK)


def test_the_parent_has_the_table_and_the_plots(reported: tuple[Path, dict[str, Any]]) -> None:
    folder, runs = reported
    log = runs["laptop"]
    (table,) = [json.loads(p.read_text()) for p in folder.rglob("*.table.json") if p.name.startswith("trials_")]
    keys = [column.key for column in WANDB_TABLE_COLUMNS]
    assert table["columns"] == keys
    rows = {row[keys.index("name")]: dict(zip(keys, row, strict=True)) for row in table["data"]}
    assert set(rows) == {t.name for t in SWEEP}
    assert rows[OK.name]["label"] == "2x2x2-2d_tp (simulated measure)"
    assert rows[OK.name]["tokens_per_second"] == 2048.0
    assert rows[REFUSED.name]["reason"] == REFUSED.reason and rows[REFUSED.name]["tokens_per_second"] is None
    assert rows[LARGE.name]["hbm_gib"] == 40.0
    plots = {key.rpartition("/")[2]: json.dumps(value) for key, value in log["config"].items() if "visualize" in key}
    assert set(plots) == {"tokens_per_second_per_layout", "memory_against_throughput"}
    assert "layout (simulated)" in plots["tokens_per_second_per_layout"]
    assert log["summary"]["trials/ok"] == 2 and log["summary"]["trials/refused"] == 1
    assert log["summary"]["best/measure"] == FASTER.name
    assert log["exit"] == 0


def test_reporting_twice_writes_only_changed_trials(tmp_path: Path) -> None:
    report(tmp_path, [OK, FAILED])
    first = {log["run"].display_name: log["run"].run_id for log in wandb_logs(tmp_path)}
    files = sorted(tmp_path.rglob("*.wandb"))
    assert len(files) == 3
    report(tmp_path, [OK, FAILED])
    assert sorted(tmp_path.rglob("*.wandb")) == files
    mended = trial("4x2x1", "sp", Status.ok, results=results(1.0))
    report(tmp_path, [OK, mended])
    again = {log["run"].display_name: log for log in wandb_logs(tmp_path)}
    assert {name: log["run"].run_id for name, log in again.items()} == first
    assert len(list(tmp_path.rglob("*.wandb"))) == 3
    assert again[mended.name]["summary"]["status"] == "ok" and again[mended.name]["exit"] == 0
    assert again["laptop"]["summary"]["trials/ok"] == 2


def latest_wandb_file(folder: Path, reported_trial: Trial) -> Path:
    """Return the latest W&B file of a trial's run."""
    return max(folder.rglob(f"run-{wandb_run_id(TrackingConfig(), folder, reported_trial.key)}.wandb"))


def test_an_interrupted_report_is_repeated_and_keeps_the_uploaded_run(tmp_path: Path) -> None:
    report(tmp_path, [OK])
    wandb_file = latest_wandb_file(tmp_path, OK)
    wandb_file.with_suffix(".wandb.synced").touch()
    (wandb_file.parent / REPORTED_FILE).unlink()  # the sweep was killed before W&B had the run
    time.sleep(1)  # W&B names folders by the second
    report(tmp_path, [OK])
    assert wandb_file.is_file() and latest_wandb_file(tmp_path, OK) != wandb_file
    assert len(list(tmp_path.rglob("*.wandb"))) == 3


def test_two_sweeps_with_one_name_do_not_share_runs(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        report(tmp_path / folder, [OK])
    first, other = ({log["run"].run_id for log in wandb_logs(tmp_path / folder)} for folder in ("a", "b"))
    assert len(first) == len(other) == 2 and not first & other


def test_a_wandb_failure_is_reported_once_and_does_not_end_the_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb  # takes 1 s, in every collection if imported above

    calls: list[str] = []

    def fail(**about: Any) -> None:
        calls.append(about["name"])
        raise OSError("no service")

    monkeypatch.setattr(wandb, "init", fail)
    notes = report(tmp_path, SWEEP)
    (note,) = notes
    assert "OSError: no service" in note and "trials.jsonl" in note
    assert calls == [OK.name]
    assert len(TrialLog(tmp_path).read()) == len(SWEEP)


def test_tracking_off_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(tmp_path, SWEEP, wandb=WandbMode.off) == []
    assert [path.name for path in tmp_path.iterdir()] == ["trials.jsonl"]


def test_a_sweep_does_not_wait_for_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb  # takes 1 s, in every collection if imported above

    gate = threading.Event()
    monkeypatch.setattr(wandb, "init", lambda **_: gate.wait(20))
    tracker = SweepTracker(TrackingConfig(wandb=WandbMode.offline), tmp_path, "laptop", lambda _: None)
    start = time.perf_counter()
    for sweep_trial in SWEEP:
        tracker.log(sweep_trial)
    assert time.perf_counter() - start < 1 and not gate.is_set()
    gate.set()
    tracker.close()


def test_a_training_that_reported_itself_is_not_reported_again(tmp_path: Path) -> None:
    (tmp_path / "own" / "wandb" / "offline-run-20260102_030405-own").mkdir(parents=True)
    trained = trial("2x2x2", "2d_tp", Status.ok, stage="train", folder="own")
    killed = trial("1x1x8", "fsdp", Status.killed, "killed by signal 9", stage="train", folder="own")
    assert report(tmp_path, [trained, killed]) == []
    runs = {log["run"].display_name: log for log in wandb_logs(tmp_path)}
    assert set(runs) == {killed.name, "laptop"}
    assert runs[killed.name]["exit"] == 1 and runs[killed.name]["summary"]["reason"] == killed.reason


def test_a_training_that_succeeds_on_retry_leaves_no_failed_run(tmp_path: Path) -> None:
    slow = trial("2x2x2", "2d_tp", Status.timeout, "it took longer than trial.limit_s=13 seconds", stage="train")
    report(tmp_path, [slow])
    assert len(wandb_logs(tmp_path)) == 2
    (tmp_path / slow.name / "wandb" / "offline-run-20260102_030405-own").mkdir(parents=True)
    trained = trial("2x2x2", "2d_tp", Status.ok, stage="train", results=results(0.5))
    for _ in range(2):
        report(tmp_path, [trained])
        (log,) = wandb_logs(tmp_path)
        assert log["run"].display_name == "laptop" and log["summary"]["trials/ok"] == 1
    shutil.rmtree(tmp_path / slow.name)
    report(tmp_path, [slow])
    assert {log["run"].display_name for log in wandb_logs(tmp_path)} == {slow.name, "laptop"}


def test_an_uploaded_failed_run_is_kept_next_to_the_trainings(tmp_path: Path) -> None:
    slow = trial("2x2x2", "2d_tp", Status.timeout, "it took longer than trial.limit_s=13 seconds", stage="train")
    report(tmp_path, [slow])
    run = latest_wandb_file(tmp_path, slow)
    run.with_suffix(".wandb.synced").touch()
    (tmp_path / slow.name / "wandb" / "offline-run-20260102_030405-own").mkdir(parents=True)
    report(tmp_path, [trial("2x2x2", "2d_tp", Status.ok, stage="train")])
    assert run.is_file()


def test_two_sweeps_in_one_folder_report_a_trial_once(tmp_path: Path) -> None:
    TrialLog(tmp_path).append([OK, FAILED])
    notes: list[str] = []
    config = TrackingConfig(wandb=WandbMode.offline)
    trackers = [SweepTracker(config, tmp_path, "laptop", notes.append) for _ in range(2)]
    for sweep_trial in (OK, FAILED):
        for tracker in trackers:
            tracker.log(sweep_trial)
    for tracker in trackers:
        tracker.close()
    assert notes == []
    assert len(list(tmp_path.rglob("*.wandb"))) == 3
    assert sorted(log["run"].display_name for log in wandb_logs(tmp_path)) == sorted([OK.name, FAILED.name, "laptop"])


def test_a_later_sweep_in_the_folder_replaces_the_report_of_a_trial(tmp_path: Path) -> None:
    config = TrackingConfig(wandb=WandbMode.offline)
    first, other = (SweepTracker(config, tmp_path, "laptop", lambda _: None) for _ in range(2))
    TrialLog(tmp_path).append([FAILED])
    other.log(OK)
    deadline = time.monotonic() + 20
    while not list(tmp_path.rglob(REPORTED_FILE)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    first.log(FAILED)
    first.close()
    mended = trial("4x2x1", "sp", Status.ok, results=results(1.0))
    TrialLog(tmp_path).append([OK, mended])
    other.log(mended)
    other.close()
    runs = wandb_logs(tmp_path)
    assert sorted(log["run"].display_name for log in runs) == sorted([OK.name, mended.name, "laptop"])
    assert {log["exit"] for log in runs} == {0}
    (parent,) = [log for log in runs if log["run"].display_name == "laptop"]
    assert parent["summary"]["trials/ok"] == 2 and parent["summary"]["trials/failed"] == 0


def test_a_training_reports_to_the_run_of_its_trial_in_the_sweeps_group(tmp_path: Path) -> None:
    from valkyrie.runs.tracking import Tracker

    run_id = wandb_run_id(TrackingConfig(), tmp_path, OK.key)
    config = TrackingConfig(wandb=WandbMode.offline, group="laptop", id=run_id)
    tracker = Tracker(config, tmp_path, run_name="run", fields=wandb_config(encode(OK.about), {}), group="m-cpu8")
    tracker.write_summary({"step_s": 0.5, "tokens_per_second": 4.0, "mfu": None})
    tracker.close()
    log = wandb_log(tmp_path)
    assert log["run"].run_id == run_id
    assert log["run"].run_group == "laptop" and log["run"].job_type == "train"
    assert log["summary"]["step_ms"] == 500.0 and log["summary"]["tokens_per_second"] == 4.0


def test_the_id_of_a_run_does_not_depend_on_when_and_where_it_is_reported(tmp_path: Path) -> None:
    config, folder = TrackingConfig(), tmp_path / "swept"
    folder.mkdir()
    first = wandb_run_id(config, folder, OK.key)
    assert wandb_run_id(TrackingConfig(), folder / ".." / "swept", OK.key) == first
    other_ids = [
        (TrackingConfig(project="other"), folder, OK.key),
        (config, folder, FASTER.key),
        (config, tmp_path, OK.key),
    ]
    assert len({first, *(wandb_run_id(*other) for other in other_ids)}) == 4
