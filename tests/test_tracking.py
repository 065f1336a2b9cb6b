"""Tests of the records of a training run: `metrics.jsonl`, and W&B's offline files."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from runs import trained_run
from valkyrie.runs.tracking import Tracker, read_metrics
from valkyrie.runs.wandb_writer import TrackingConfig, WandbMode, resolve_mode
from wandb_files import read_wandb, wandb_log

FIELDS = {"mesh": {"name": "4x4x2"}, "partition": {"name": "2d_tp"}}


def make_tracker(folder: Path, mode: str = "off", start: int | None = None) -> Tracker:
    config = TrackingConfig(wandb=WandbMode(mode))
    return Tracker(config, folder, run_name="run", fields=FIELDS, group="g", start_step=start)


def test_records_are_written_line_by_line(tmp_path: Path) -> None:
    run_tracker = make_tracker(tmp_path)
    run_tracker.log({"loss": 2.5}, 1)
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 2.5}]
    run_tracker.write_summary({"steps": 1})
    run_tracker.close()
    assert read_metrics(tmp_path / "metrics.jsonl")[-1] == {"summary": {"steps": 1}}


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_metrics_file_on_a_disk_that_is_gone_counts_as_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    run_tracker = make_tracker(tmp_path)
    assert not run_tracker.is_gone

    def stat(path: Path, **options: bool) -> Any:
        raise OSError(number, "the disk is gone", str(path))

    monkeypatch.setattr(Path, "stat", stat)
    assert run_tracker.is_gone
    monkeypatch.undo()
    run_tracker.close()


def test_a_line_cut_off_by_a_crash_does_not_damage_later_records(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    assert read_metrics(path) == [{"step": 1}]
    resumed_tracker = make_tracker(tmp_path)
    resumed_tracker.log({}, 2)
    resumed_tracker.close()
    assert read_metrics(path) == [{"step": 1}, {"step": 2}]


def test_records_of_repeated_steps_are_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "metrics.jsonl"
    before = [
        {"step": 5, "loss": 2.0},
        {"step": 6, "loss": 1.9},
        {"step": 6, "eval_loss": 1.8},
        {"summary": {"steps": 6}},
    ]
    later = [{"step": 7, "loss": float("nan")}, {"step": 8, "loss": 1.0}]
    damaged = b'{"step": 5, "lo\xff\n'
    written = [json.dumps(line).encode() + b"\n" for line in before + later]
    path.write_bytes(damaged + b"".join(written))
    make_tracker(tmp_path, start=6).close()
    assert path.read_bytes() == damaged + b"".join(written[: len(before)]), "a damaged line takes no other with it"
    assert read_metrics(path) == before
    messages: list[str] = []
    path.write_bytes(path.read_bytes() + b'\n \n{"step": 7, "lo')
    assert read_metrics(path, messages.append) == before
    assert len(messages) == 2 and f"{path}: skipped 1 damaged line" in messages, "blank lines are not damaged"
    assert any(message.startswith(f"{path}: ") and "last line" in message for message in messages)
    messages.clear()
    path.write_text('{"step": 1}')
    assert read_metrics(path, messages.append) == [{"step": 1}] and messages == [], "only its newline is missing"
    assert capsys.readouterr().err == ""


def test_wandb_keeps_the_run_offline(capfd: pytest.CaptureFixture[str]) -> None:
    folder = trained_run("tracking=wandb", "optimizer.warmup_steps=1")
    captured = capfd.readouterr()
    assert "wandb" not in captured.out + captured.err
    log, lines = wandb_log(folder), read_metrics(folder / "metrics.jsonl")
    config = log["config"]
    assert {"layout": "1x1x1-dp", "chips": 1, "simulated": True, "seed": 0, "stage": "train"}.items() <= config.items()
    names = {"mesh": "1x1x1", "partition": "dp", "target": "auto", "model": "s5_tiny", "precision": "float32"}
    assert {key: config[key]["name"] for key in names} == names
    assert config["optimizer"]["warmup_steps"] == 1 and config["optimizer"]["learning_rate"] > 0
    assert config["data"]["name"] and config["model"]["embed"] > 0 and config["steps"] == 6
    assert config["roles"].startswith("x=1 unused")
    assert log["run"].run_group == "s5_tiny-auto"
    assert log["run"].display_name == "run"
    assert list(log["run"].tags) == ["mesh=1x1x1", "partition=dp", "model=s5_tiny", "target=auto"]
    steps = [line for line in lines if "loss" in line]
    history = [entry for entry in log["history"] if "loss" in entry]
    assert [entry["_step"] for entry in history] == [line["step"] for line in steps]
    assert [entry["loss"] for entry in history] == [line["loss"] for line in steps]
    assert log["summary"]["steps"] == 6
    uploaded, recorded = log["summary"], lines[-1]["summary"]
    for key in ("eval_loss", "tokens_per_second", "tokens_per_second_per_chip", "step_s", "hbm_gib"):
        assert uploaded[key] == recorded[key]
    assert uploaded["step_ms"] == 1e3 * recorded["step_s"]
    assert (uploaded["stage"], uploaded["status"]) == ("train", "ok")
    assert log["exit"] == 0


def test_the_summary_overrides_the_last_step_with_the_same_keys(tmp_path: Path) -> None:
    run_tracker = make_tracker(tmp_path, "offline")
    run_tracker.log({"tokens_per_second": 55.0, "loss": 2.0}, 1)
    run_tracker.log({"tokens_per_second": 66.0, "loss": 1.0}, 3)
    run_tracker.log({"eval_loss": 1.5}, 3)
    run_tracker.write_summary({"tokens_per_second": 7.0, "step_s": 0.5, "compile_s": None})
    run_tracker.close()
    log = wandb_log(tmp_path)
    assert [(entry["_step"], entry["tokens_per_second"]) for entry in log["history"]] == [(1, 55.0), (3, 66.0)]
    assert log["history"][-1]["eval_loss"] == 1.5
    expected = {"tokens_per_second": 7.0, "step_s": 0.5, "step_ms": 500.0, "loss": 1.0, "eval_loss": 1.5}
    assert expected.items() <= log["summary"].items()
    assert "compile_s" not in log["summary"]


def test_a_wandb_failure_is_reported_and_disables_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb  # takes 1 s, in every collection if imported above

    def fail(**_: Any) -> None:
        raise OSError("no service")

    monkeypatch.setattr(wandb, "init", fail)
    run_tracker = make_tracker(tmp_path, "offline")
    assert (
        run_tracker.note is not None
        and "OSError: no service" in run_tracker.note
        and "metrics.jsonl" in run_tracker.note
    )
    run_tracker.log({"loss": 1.0}, 1)
    run_tracker.write_summary({})
    run_tracker.close()
    assert read_metrics(tmp_path / "metrics.jsonl")[0] == {"step": 1, "loss": 1.0}


def test_records_reach_the_wandb_file_before_the_run_ends(tmp_path: Path) -> None:
    run_tracker = make_tracker(tmp_path, "offline")
    for step in range(3):
        run_tracker.log({"loss": 1.0}, step)
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    end = time.monotonic() + 10
    while not (history := read_wandb(file)["history"]) and time.monotonic() < end:
        time.sleep(0.1)
    assert [entry["_step"] for entry in history] == [0, 1], "the last stays open for more of its step"
    run_tracker.close()


def test_a_failed_run_is_marked_as_failed(tmp_path: Path) -> None:
    run_tracker = make_tracker(tmp_path, "offline")
    run_tracker.log({"loss": 1.0}, 1)
    run_tracker.close(exit_code=1)
    assert wandb_log(tmp_path)["exit"] == 1


CHILD = """
import sys, time
from pathlib import Path
from valkyrie.runs.tracking import Tracker
from valkyrie.runs.wandb_writer import TrackingConfig, WandbMode
began = time.perf_counter()
config = TrackingConfig(wandb=WandbMode({mode!r}), init_timeout=2)
one = Tracker(config, Path("."), run_name="a:b#c", fields=dict(mesh=dict(name="4x4x2")), group="g")
one.log(dict(loss=1.0), 1)
one.close()
print("wandb" in sys.modules, time.perf_counter() - began, one.note)
"""


def run_in_child(folder: Path, mode: str, **environment: str) -> tuple[bool, float, str]:
    """Run a `Tracker` in a subprocess with a W&B mode and extra environment variables.

    Returns whether the subprocess imported wandb, the seconds from creating to closing the tracker, and the tracker's
    note as text ("None" if there is none).
    """
    import os

    inherited = {key: value for key, value in os.environ.items() if key != "WANDB_MODE"}
    result = subprocess.run(
        [sys.executable, "-c", CHILD.format(mode=mode)],
        cwd=folder,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    imported, seconds, note = result.stdout.split(maxsplit=2)
    return imported == "True", float(seconds), note.strip()


@pytest.mark.parametrize(
    ("mode", "environment"), [("off", {}), pytest.param("auto", {"WANDB_MODE": "disabled"}, marks=pytest.mark.slow)]
)
def test_wandb_is_not_imported_if_it_is_off(tmp_path: Path, mode: str, environment: dict[str, str]) -> None:
    assert run_in_child(tmp_path, mode, **environment)[0] is False
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.slow
def test_nothing_is_sent_without_a_key_and_unusual_names_are_accepted(tmp_path: Path) -> None:
    imported, _, note = run_in_child(tmp_path, "auto", WANDB_BASE_URL="http://127.0.0.1:9")
    assert imported and note == "None"
    assert wandb_log(tmp_path)["run"].display_name == "a:b#c"


def test_an_unreachable_network_costs_seconds_and_the_key_is_not_written(tmp_path: Path) -> None:
    key = "0123456789abcdef" * 2 + "01234567"
    start = time.perf_counter()
    _, seconds, note = run_in_child(tmp_path, "auto", WANDB_API_KEY=key, WANDB_BASE_URL="http://127.0.0.1:9")
    assert seconds < 20 and time.perf_counter() - start < 30
    assert "not start online" in note and "wandb sync" in note
    assert [path.name for path in tmp_path.glob("wandb/offline-run-*")] == [Path(note.rpartition(" ")[2]).name]
    assert len(wandb_log(tmp_path)["history"]) == 1
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 1.0}]
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and key.encode() in path.read_bytes()]


@pytest.mark.parametrize(
    ("mode", "environment", "expected"),
    [
        ("auto", {}, "offline"),
        ("auto", {"WANDB_API_KEY": "k"}, "online"),
        ("auto", {"WANDB_API_KEY": "k", "WANDB_MODE": "offline"}, "offline"),
        ("auto", {"WANDB_MODE": "disabled"}, "off"),
        ("auto", {"WANDB_MODE": "shared"}, "online"),
        ("off", {"WANDB_MODE": "offline", "WANDB_API_KEY": "k"}, "off"),
        ("online", {"WANDB_MODE": "offline"}, "online"),
    ],
)
def test_the_command_line_overrides_the_environment(
    monkeypatch: pytest.MonkeyPatch, mode: str, environment: dict[str, str], expected: str
) -> None:
    for key in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(key, raising=False)
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    assert resolve_mode(WandbMode(mode)) is WandbMode(expected)


def test_tracking_off_leaves_no_wandb_folder() -> None:
    assert not (trained_run() / "wandb").exists()
