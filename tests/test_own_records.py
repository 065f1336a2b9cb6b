"""Tests of reading damaged files of Valkyrie: a field is wrong or missing, or the file is cut off.

Each reader either returns, or raises ValueError or OSError with the name of the file or the path of its folder. See
`test_foreign_files.py`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import strategies as st

import valkyrie
from reported import GOLDEN_FOLDER, golden_summary, trial_from_summary
from runs import ONE_DEVICE_ARGUMENTS, TINY_ARGUMENTS
from test_foreign_files import check_damaged_file, damaged_json, fuzz
from valkyrie.processes.locks import _read_holder
from valkyrie.report.page import render_page
from valkyrie.report.records import read_answer, read_command, read_rows, read_training
from valkyrie.report.text import as_csv, as_markdown
from valkyrie.report.values import losses
from valkyrie.runs.folder import saved_run, write_run_files
from valkyrie.search.compile.prediction import read_prediction
from valkyrie.search.measure.figures_file import read_figures
from valkyrie.sweep.results import read_outcome
from valkyrie.sweep.trial import TrialLog

METRICS = [
    {"step": 1, "loss": 4.5, "grad_norm": 1.0, "step_s": 0.01, "tokens_per_second": 800.0, "data_wait": 0.1},
    {"step": 2, "loss": 4.4, "step_s": 0.01, "tokens_per_second": 800.0, "tokens_per_second_per_chip": 800.0},
    {"summary": {"finished": True, "steps": 2, "hbm_gib": 0.1, "compile_s": 3.0, "simulated": True, "eval_loss": 4.3}},
]
GOODPUT = [{"start": 10.0}, {"time": 12.0, "step": 2, "seconds": {"step": 1.0, "setup": 1.0}, "end": "finished"}]


def report(folder: Path) -> None:
    rows = read_rows([folder])
    render_page(rows), as_markdown(rows), as_csv(rows)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a training run of two steps."""
    folder = tmp_path_factory.mktemp("records") / "run"
    write_run_files(valkyrie.compose(*TINY_ARGUMENTS, *ONE_DEVICE_ARGUMENTS), folder)
    for name, records in {"metrics.jsonl": METRICS, "goodput.jsonl": GOODPUT}.items():
        (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


@pytest.fixture(scope="module")
def sweep_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a sweep with a compiled trial `a` and a measured trial `b`, and the files of both."""
    folder = tmp_path_factory.mktemp("records") / "sweep"
    stages = {"a": "compile", "b": "measure"}
    TrialLog(folder).append(trial_from_summary(golden_summary(s), s, "sweep", name) for name, s in stages.items())
    for name, file in (("a", "compile.json"), ("a", "timeline.json"), ("b", "measure.json")):
        (folder / name).mkdir(exist_ok=True)
        shutil.copy(GOLDEN_FOLDER / file, folder / name / file)
    return folder


def check_line(data: st.DataObject, path: Path, read: Callable[[], object]) -> None:
    """Damage one line of a file of JSON lines, and read it.

    Asserts that the reader returns, or raises an error that names the file or its folder.
    """
    content = path.read_bytes()
    lines = content.splitlines(keepends=True)
    number = data.draw(st.integers(0, len(lines) - 1))
    lines[number] = data.draw(damaged_json(json.loads(lines[number]))) + b"\n"
    path.write_bytes(b"".join(lines))
    message = path.name
    try:
        read()
    except (ValueError, OSError) as error:
        message = str(error)
    finally:
        path.write_bytes(content)
    assert path.name in message or str(path.parent) in message


def test_the_page_of_a_training_draws_its_losses(run_folder: Path) -> None:
    rows = read_rows([run_folder])
    assert [(value["kind"], value["step"], value["loss"]) for value in losses(rows)] == [
        ("training", 1, 4.5),
        ("training", 2, 4.4),
    ]
    page = render_page(rows)
    assert 'data-figure="loss"' in page and f"{rows[0].trial.results.parameters:,} parameters" in page


@pytest.mark.parametrize("name", ["metrics.jsonl", "goodput.jsonl"])
@fuzz(10)
def test_damaged_training_records_are_reported(run_folder: Path, name: str, data: st.DataObject) -> None:
    assert read_training(run_folder).results.steps == 2
    check_line(data, run_folder / name, lambda: (read_training(run_folder), report(run_folder)))


@fuzz(20)
def test_a_damaged_run_yaml_is_reported(run_folder: Path, tmp_path: Path, data: st.DataObject) -> None:
    assert saved_run(run_folder).config.batch == 8
    valid_content = yaml.safe_load((run_folder / "run.yaml").read_text())
    check_damaged_file(data, tmp_path / "run.yaml", valid_content, lambda: saved_run(tmp_path))


@pytest.mark.parametrize("group", ["data", "model", "optimizer", "target", "task"])
def test_a_group_of_run_yaml_that_is_a_list_is_named(run_folder: Path, tmp_path: Path, group: str) -> None:
    content = yaml.safe_load((run_folder / "run.yaml").read_text())
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content | {group: []}))
    with pytest.raises(ValueError, match="TargetConfig" if group == "target" else f"{group}="):
        saved_run(tmp_path)


@fuzz(60)
def test_damaged_trial_records_are_reported(sweep_folder: Path, data: st.DataObject) -> None:
    check_line(data, sweep_folder / "trials.jsonl", lambda: report(sweep_folder))


@pytest.mark.parametrize("name", ["a/compile.json", "a/timeline.json"])
@fuzz(30)
def test_a_report_skips_damaged_files_of_trials(sweep_folder: Path, name: str, data: st.DataObject) -> None:
    file = sweep_folder / name
    content = file.read_bytes()
    try:
        check_damaged_file(data, file, json.loads(content), lambda: report(sweep_folder))
    finally:
        file.write_bytes(content)


def read_writer(path: Path) -> object:
    with path.open("rb") as file:
        return _read_holder(file)


READERS: dict[str, tuple[Any, Callable[[Path], object]]] = {
    "compile.json": (golden_summary("compile"), read_prediction),
    "figures.json": ({"name": "cpu", "peak_tflops": {"float32": 0.05}, "hbm_gbs": 2.7}, read_figures),
    "search.json": ({"command": ["mode=search"], "question": "a", "best": []}, lambda path: read_answer(path.parent)),
    "outcome.json": (
        {"status": "ok", "reason": None, "results": {"step": {"step_s": 1.0}}},
        lambda path: read_outcome(path.parent, 0),
    ),
    "multirun.yaml": ({"hydra": {"overrides": {"task": ["seed=1"]}}}, lambda path: read_command(path.parent)),
    ".writer": ({"host": "a", "pid": 1}, read_writer),
}


@pytest.mark.parametrize("name", READERS)
@fuzz(60)
def test_other_damaged_records_are_reported(tmp_path: Path, name: str, data: st.DataObject) -> None:
    valid, read = READERS[name]
    check_damaged_file(data, tmp_path / name, valid, lambda: read(tmp_path / name))
