"""Tests of `valkyrie-report`: the files it writes, refusals in one line, and readers that close its output."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import DictConfig

import valkyrie
from reported import make_trial, write_sweep
from runs import copy_run, trained_run
from test_report import FSDP, MEASURED, MEASURED_TP, TP
from valkyrie.cli.report import main
from valkyrie.processes.locks import write_lock
from valkyrie.records import write_record
from valkyrie.report.callback import SweepPage
from valkyrie.report.records import MULTIRUN_FILE, read_rows
from valkyrie.search.answer_record import MeasureReport, SearchAnswer
from valkyrie.search.comparison import ComparisonRecord
from valkyrie.sweep.trial import PAGE_FILE, TrialLog


def error_output(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    with pytest.raises(SystemExit) as end:
        main([str(argument) for argument in arguments])
    assert end.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("valkyrie-report: ") and captured.err.count("\n") == 1
    return captured.err


def test_the_command_writes_into_the_sweep_and_says_where(tmp_path: Path, capsys):
    folder = write_sweep(tmp_path / "mine", [FSDP, MEASURED], timeline_count=1)
    for _ in range(2):
        main([str(folder)])
        assert capsys.readouterr().out == f"2 trials: {folder}/report.html\n"
    main([str(tmp_path), "--format", "md"])
    assert capsys.readouterr().out.startswith("# hand\n")
    main([str(tmp_path), "--format", "csv", "--output", str(tmp_path / "all.csv")])
    assert (tmp_path / "all.csv").read_text().count("\n") == 3
    other = write_sweep(tmp_path / "other", [TP, MEASURED_TP, FSDP])
    capsys.readouterr()
    main(["--compare", str(folder), str(other), "--format", "md"])
    assert "| 1.00x |" in capsys.readouterr().out
    page = (folder / "report.html").read_text()
    main(["--compare", str(folder), str(other)])
    assert (folder / f"compare-{folder.name}-{other.name}.html").is_file()
    assert (folder / "report.html").read_text() == page and capsys.readouterr().out
    assert "twice" in error_output(capsys, "--compare", str(folder), str(folder))
    main([str(folder), "--output", str(tmp_path / "by_suffix.csv")])
    assert (tmp_path / "by_suffix.csv").read_text().startswith("sweep,")


def test_the_output_is_no_record_of_the_sweep(tmp_path: Path, capsys):
    folder = write_sweep(tmp_path / "mine", [FSDP])
    records = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert records
    for path in records:
        assert ".html, .md or .csv" in error_output(capsys, folder, "--output", path)
    with pytest.raises(ValueError, match=r"^output=.*/trials\.jsonl: .*\.html\b"):
        valkyrie.write_report(folder, output=folder / "trials.jsonl")
    assert {path: path.read_bytes() for path in records} == records
    assert "but the format is md" in error_output(capsys, folder, "--format", "md", "--output", "all.csv")
    assert "an empty string is not a value" in error_output(capsys, "")


def test_the_output_folder_is_created(tmp_path: Path, capsys):
    folder = write_sweep(tmp_path / "mine", [FSDP])
    output = tmp_path / "new" / "out" / "x.md"
    main([str(folder), "--format", "md", "--output", str(output)])
    assert capsys.readouterr().out == f"1 trial: {output}\n" and output.read_text().startswith("# hand\n")
    for under in (output / "y.md", output / "deeper" / "y.md"):
        err = error_output(capsys, folder, "--format", "md", "--output", under)
        assert f" {under.parent} " in err


def test_the_trials_file_can_be_given_instead_of_its_folder(tmp_path: Path, capsys):
    folder = write_sweep(tmp_path / "mine", [FSDP])
    main([str(folder / "trials.jsonl")])
    assert capsys.readouterr().out == f"1 trial: {folder / PAGE_FILE}\n"
    assert valkyrie.write_report(folder / "trials.jsonl") == folder / PAGE_FILE
    with pytest.raises(ValueError, match=f"{folder / PAGE_FILE} "):
        valkyrie.write_report(folder, output=folder / PAGE_FILE / "x.html")


def test_the_command_refuses_in_one_line(tmp_path: Path, capsys):
    assert "PATH is missing" in error_output(capsys)
    assert f"{tmp_path / 'none'} does not exist." in error_output(capsys, tmp_path / "none")
    err = error_output(capsys, tmp_path)
    assert f"trials.jsonl in {tmp_path}" in err and "valkyrie-train -m" in err
    (tmp_path / "notes.txt").write_text("")
    assert "is a file" in error_output(capsys, tmp_path / "notes.txt")
    for file, words in (
        ("run.yaml", "without metrics.jsonl"),
        ("compile.json", f" {tmp_path}/compile.json"),
        ("search.json", f"{tmp_path}/search.json is damaged"),
    ):
        (tmp_path / file).write_text("")
        err = error_output(capsys, tmp_path)
        assert f" {tmp_path}" in err and words in err
    answer = SearchAnswer([], "", 1, {}, 0, 0, "", MeasureReport([]), [], [])
    write_record(tmp_path / "search.json", answer)
    err = error_output(capsys, tmp_path)
    assert f" {tmp_path} " in err and "only estimated" in err
    write_record(tmp_path / "search.json", ComparisonRecord("v5e-8", None, (), None, "tokens"))
    err = error_output(capsys, tmp_path)
    assert f" {tmp_path} " in err and "valkyrie.search" in err
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "trials.jsonl").write_text("")
    assert "no trial has ended yet" in error_output(capsys, tmp_path / "empty")
    (tmp_path / "newer").mkdir()
    (tmp_path / "newer" / "trials.jsonl").write_text('{"schema": 99}\n')
    assert "schema 99" in error_output(capsys, tmp_path / "newer")
    folder = write_sweep(tmp_path / "mine", [FSDP])
    err = error_output(capsys, folder, "--compare", "hand", "b")
    assert ": b " in err and f" hand ({folder})" in err
    assert "neither is a folder" in error_output(capsys, "--compare", "hand", "b")
    assert "--format: invalid choice: 'pdf'" in error_output(capsys, folder, "--format", "pdf")


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (["gone"], "Leave out PATH."),
        (["--format", "html"], "Leave out --format."),
        (["--output", "a.html", "--compare", "a", "b"], "Leave out --output, --compare."),
    ],
)
def test_wandb_rejects_arguments_that_it_ignores(capsys, arguments: list[str], remedy: str):
    assert remedy in error_output(capsys, "--wandb", "me/valkyrie", "--dry-run", *arguments)


def test_csv_refuses_a_comparison(tmp_path: Path, capsys):
    folder = write_sweep(tmp_path / "mine", [FSDP])
    for options in (("--format", "csv"), ("--output", "x.csv")):
        assert "--compare" in error_output(capsys, folder, *options, "--compare", "hand", "other")


@pytest.mark.parametrize(
    "line", ['{"schema": 1}', '{"schema": 1, "status": "ok"}', '{"schema"', "[]", '{"schema": "a"}']
)
def test_a_damaged_line_is_reported_once_with_its_file(tmp_path: Path, capsys, line: str):
    log = TrialLog(write_sweep(tmp_path, [FSDP]))
    log.path.write_text(f"{log.path.read_text()}{line}\n{TP.to_json()}\n")
    err = error_output(capsys, tmp_path)
    assert err.startswith(f"valkyrie-report: {log.path}, line 2, ") and err.count(str(log.path)) == 1
    assert "Delete that line" in err
    log.path.write_text(f"{TP.to_json()}\n{line}")  # without a newline
    main([str(tmp_path)])
    err = capsys.readouterr().err
    assert err.startswith(f"{log.path}: ") and "last line" in err and err.count("\n") == 1
    log.path.write_text(line)
    assert error_output(capsys, tmp_path).startswith(f"valkyrie-report: {log.path}: its only line is incomplete")
    log.path.unlink()
    log.path.mkdir()
    assert error_output(capsys, tmp_path) == f"valkyrie-report: {log.path}: is a directory.\n"


def test_a_damaged_line_has_a_reason_and_a_remedy(tmp_path: Path, capsys):
    log = TrialLog(write_sweep(tmp_path, [FSDP]))
    text = log.path.read_text()
    for content in (gzip.compress(text.encode()) + b"\n", text.encode("utf-16")):
        log.path.write_bytes(content)
        err = error_output(capsys, tmp_path)
        assert "line 1, " in err and "not UTF-8" in err
    for key in ("seconds", "wall_s"):
        log.path.write_text(re.sub(rf'"{key}": [\d.]+', f'"{key}": Infinity', text))
        err = error_output(capsys, tmp_path)
        assert "line 1, " in err and f"{key} must be" in err and "not Infinity" in err
    log.path.write_text(re.sub(r'"step_s": (?=[\d.])', '"step_s": -', text))
    err = error_output(capsys, tmp_path)
    assert "line 1, " in err and "step_s must be" in err


@pytest.mark.parametrize("count", [1, 400])
def test_a_closed_pipe_is_not_an_error(tmp_path: Path, count: int):
    write_sweep(tmp_path, [make_trial(f"8x1x{i}-fsdp", 1000) for i in range(count)])
    command = [sys.executable, "-m", "valkyrie.cli.report", str(tmp_path), "--format", "csv"]
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=buffered) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 141


def test_a_report_does_not_load_jax(tmp_path: Path):
    folder = write_sweep(tmp_path, [FSDP, MEASURED], timeline_count=1)
    script = (
        "import sys\nfrom valkyrie.cli.report import main\nmain(sys.argv[1:])\n"
        "print(*(name for name in ('jax', 'flax', 'numpy') if name in sys.modules))\n"
    )
    command = [sys.executable, "-c", script, str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout == f"2 trials: {folder}/report.html\n\n"


def test_a_page_that_cannot_be_written_leaves_no_stale_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    folder, config = write_sweep(tmp_path, [FSDP]), DictConfig({"hydra": {"sweep": {"dir": str(tmp_path)}}})
    SweepPage().on_multirun_end(config)
    assert (folder / PAGE_FILE).is_file() and list(folder.glob(".*")) == []

    def fail(*_: object, **__: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("valkyrie.report.page.render_page", fail)
    SweepPage().on_multirun_end(config)
    stderr = capsys.readouterr().err
    assert stderr.count("\n") == 1 and "No space left" in stderr and f"valkyrie-report {folder}" in stderr
    assert "was removed" in stderr and not (folder / PAGE_FILE).exists()
    SweepPage().on_multirun_end(config)
    assert "removed" not in capsys.readouterr().err


def test_a_training_has_its_own_page(tmp_path: Path, capsys):
    folder = copy_run(trained_run("checkpoint.every=4", "steps=6"), tmp_path)
    capsys.readouterr()
    main([str(tmp_path)])
    assert capsys.readouterr().out == f"1 trial: {tmp_path / PAGE_FILE}\n"
    text = (tmp_path / PAGE_FILE).read_text()
    assert "<h1>run: how" in text and 'id="trained"' in text
    main([str(folder), "--format", "csv"])
    (row,) = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert (row["stage"], row["status"], row["layout"], row["restarts"]) == ("train", "ok", "1x1x1-dp", "0")
    assert 0 < float(row["goodput"]) < 1 and 0 <= float(row["data_wait"]) <= 1
    (folder / "run.yaml").write_text("model: {")
    main([str(folder), "--format", "md"])
    output = capsys.readouterr()
    assert "run.yaml is damaged" in output.out and output.err.startswith(f"{folder}/run.yaml is damaged")
    main(["--compare", str(folder), str(write_sweep(tmp_path / "mine", [FSDP])), "--format", "md"])


def test_a_killed_training_has_the_numbers_of_its_records(tmp_path: Path, capsys):
    folder = copy_run(trained_run("checkpoint.every=4", "steps=6"), tmp_path)
    metrics = folder / "metrics.jsonl"
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    for record in records:  # older training runs recorded their traffic under the names that it has at W&B
        if "communication" in record.get("summary", {}):
            del record["summary"]["communication"]
            record["summary"] |= {"comm_bytes/total": 300, "comm_bytes/x,y": 300}
    metrics.write_text("".join(json.dumps(record) + "\n" for record in records[:-2]) + '{"summ')
    (row,) = read_rows([folder])
    assert row.has_speed and row.trial.results.finished is False and row.trial.results.steps == 6
    assert row.bytes_by_axes["x,y"] == 300 and row.goodput is not None and row.goodput.restarts == 0
    capsys.readouterr()
    main([str(folder), "--format", "md"])
    torn_note = capsys.readouterr().err
    assert torn_note.startswith(f"{metrics}: ") and "last line" in torn_note and torn_note.count("\n") == 1
    metrics.write_text('{"step\n' + metrics.read_text())
    main([str(folder)])
    assert capsys.readouterr().err == f"{metrics}: skipped 1 damaged line\n{torn_note}"
    metrics.write_text("")
    (row,) = read_rows([folder])
    assert row.status == "killed" and "no step has" in str(row.reason)


def test_an_interrupted_trial_of_a_sweep_is_not_ok(tmp_path: Path, capsys):
    sweep = tmp_path / "m1"
    folder = copy_run(trained_run("checkpoint.every=4", "steps=6"), sweep)
    metrics = folder / "metrics.jsonl"
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    records = [r for r in records if r.get("step", 0) <= 4 and not r.get("summary", {}).get("finished")]
    metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    (row,) = read_rows([folder])
    assert row.status == "interrupted" and row.has_speed and row.trial.sweep == folder.name
    assert "4 of 6 steps" in str(row.reason) and "sweep" not in str(row.reason)
    (sweep / MULTIRUN_FILE).write_text("hydra: {overrides: {task: ['seed=1,2', name=m1]}}\n")
    main([str(sweep), "--format", "csv"])
    (line,) = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert (line["status"], line["sweep"]) == ("interrupted", "m1")
    assert "valkyrie-train -m seed=1,2 name=m1" in line["reason"]
    with write_lock(folder):
        assert read_rows([folder])[0].status == "ok", "it is still training"
