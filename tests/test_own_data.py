"""Tests of the data source and task of the READMEs, in a user's folder: they train, resume and refuse mistakes."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import yaml

from own_folder import train_with, write_listings
from runs import run_train
from valkyrie.config.arguments import parse_run
from valkyrie.data.config import SOURCES
from valkyrie.data.prepare import find_dataset, prepare
from valkyrie.doctor.disks import check_data
from valkyrie.doctor.findings import FAILURE, Check, CheckContext, run_checks

PACKAGE = Path(__file__).parent.parent / "valkyrie"
SMALL = ("model=gpt_tiny", "model.layers=1", "mesh=1x1x1", "partition=dp", "batch=2", "seq=16", "eval_every=100")
SMALL += ("tracking=off", "sample_tokens=0", "log_every=1")
DATA = ("data.paths=[tickets.db]",)
TASK = ("task=sparse_targets", "task.share=0.25")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder with the files listed in both READMEs. A database for the data source is next to it."""
    folder = tmp_path_factory.mktemp("own")
    write_listings(folder, PACKAGE / "data" / "README.md", PACKAGE / "tasks" / "README.md")
    with closing(sqlite3.connect(folder.parent / "tickets.db")) as database, database:
        database.execute("CREATE TABLE tickets (id INTEGER PRIMARY KEY, body TEXT)")
        rows = [(f"ticket {number}: it does not start\n" * 5,) for number in range(40)]
        database.executemany("INSERT INTO tickets (body) VALUES (?)", rows)
    return folder


def train(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return train_with(folder, *SMALL, "data=tickets", *arguments)


def losses(folder: Path, name: str) -> list[float]:
    lines = (folder.parent / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [record["loss"] for record in map(json.loads, lines) if "loss" in record]


def test_a_users_source_and_task_train(folder: Path, monkeypatch: pytest.MonkeyPatch):
    result = train(folder, *DATA, f"data.cache_dir={folder}/cache", "name=both", "steps=1", *TASK)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "step 1/1" in result.stdout and len(list((folder / "cache").glob("tickets-*"))) == 1
    run = yaml.safe_load((folder.parent / "runs" / "both" / "run.yaml").read_text())
    assert [f"task={run['task']['name']}"] == [override for override in TASK if override.startswith("task=")]
    module = folder / "tickets.py"
    code = module.read_text()
    module.write_text(f"{code}\n# An edited module reads its documents again.\n")
    monkeypatch.syspath_prepend(str(folder))
    config = SOURCES.config_class("tickets")(paths=[str(folder.parent / "tickets.db")], cache_dir=f"{folder}/cache")
    assert SOURCES.config_class("tickets")().cache_dir == os.environ["VALKYRIE_CACHE"] + "/data"
    assert find_dataset(config, "bytes") is None
    module.write_text(code)
    assert find_dataset(config, "bytes") is not None


@pytest.mark.slow
def test_a_users_task_changes_the_loss_and_its_run_resumes_from_another_folder(folder: Path):
    data = (*DATA, f"data.cache_dir={folder}/cache2")
    for name, task in {"source": (), "task": TASK}.items():
        result = train(folder, *data, f"name={name}", "steps=2", *task)
        assert result.returncode == 0, result.stdout + result.stderr
    first, second = losses(folder, "source"), losses(folder, "task")
    assert len(first) == len(second) == 2 and first != second
    assert len(list((folder / "cache2").glob("tickets-*"))) == 1, "found again"
    # From another folder and without --config-dir: the run folder knows its modules and the paths in full.
    command = [sys.executable, "-m", "valkyrie.cli.train", f"resume={folder.parent}/runs/task", "steps=3"]
    resumed = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert "steps 3 to" in resumed.stdout, resumed.stdout + resumed.stderr


@pytest.mark.parametrize("helper_file", ["helper.py", "helper/__init__.py", "helper/inner.py"])
def test_an_edited_helper_of_a_users_source_reads_its_documents_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, helper_file: str
):
    name = f"packed_{helper_file.count('/')}_{len(helper_file)}"
    package, helper = tmp_path / name, tmp_path / helper_file
    for file in (package / "__init__.py", helper, tmp_path / "unrelated.py"):
        file.parent.mkdir(exist_ok=True)
        file.write_text("x = 1\n")
    (package / "reader.py").write_text("def read():\n    import helper.inner\n")
    (package / "__init__.py").write_text(
        "from valkyrie.data.sources.text import Config as TextConfig\n\n\nclass Config(TextConfig):\n    pass\n"
    )
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    assert SOURCES.user_folder(name) == tmp_path, "the folder to import it from"
    config_class = SOURCES.config_class(name)
    config = config_class(name=name, source=name, paths=[str(tmp_path / "a.jsonl")], cache_dir=str(tmp_path / "cache"))
    prepare(config, "bytes")
    (tmp_path / "unrelated.py").write_text("x = 2\n")
    assert find_dataset(config, "bytes") is not None
    helper.write_text("x = 2\n")
    assert find_dataset(config, "bytes") is None


def test_a_data_folder_with_the_name_of_an_imported_library_is_not_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("wandb", "parts_of_reader", "not_imported"):  # a library, a package without __init__.py, data
        (tmp_path / name).mkdir()
        (tmp_path / name / "inner.py").write_text("x = 1\n")
    (tmp_path / "reader_with_parts.py").write_text("import wandb\nimport parts_of_reader.inner\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    paths = SOURCES.source_paths("reader_with_parts")
    assert [path.name for path in paths] == ["reader_with_parts.py", "parts_of_reader"]


def test_the_doctor_checks_a_users_source_and_does_not_suggest_valkyrie_data(folder: Path):
    command = [
        sys.executable,
        "-m",
        "valkyrie.cli.doctor",
        "--config-dir",
        str(folder),
        *SMALL,
        "data=tickets",
        "data.paths=[tickets.db]",
    ]
    command.append(f"data.cache_dir={folder}/unused")
    result = subprocess.run(command, cwd=folder.parent, capture_output=True, text=True, timeout=300)
    checked = " ".join(result.stdout.split())
    assert (
        "data=tickets is not prepared" in checked
        and "first document was read" in checked
        and "process 0 prepares it" in checked
    ), result.stderr
    assert "valkyrie-data prepare" not in checked


def add_source(folder: Path, source: str, correct: str, wrong: str) -> Path:
    """Add a copy of the data source with a slip, named `source`, to the folder. Returns its module."""
    code = (folder / "tickets.py").read_text()
    assert code.count(correct) == 1
    module = folder / f"{source}.py"
    module.write_text(code.replace(correct, wrong).replace('"tickets"', f'"{source}"'))
    settings = (folder / "data" / "tickets.yaml").read_text()
    (folder / "data" / f"{source}.yaml").write_text(settings.replace("tickets", source))
    return module


@pytest.mark.parametrize(
    ("source", "correct", "wrong", "message"),
    [
        (
            "tickets_1",
            "yield Document(",
            "text = None if number == 2 else text; yield Document(",
            "document tickets.db:2 has a text of type NoneType",
        ),
        (
            "tickets_2",
            "yield Document(",
            "yield (",
            "read_documents() of FILE returned a value of type tuple",
        ),
        (
            "tickets_3",
            "return Listing(",
            "return (",
            "list_files() of FILE returned a value of type tuple",
        ),
        (
            "tickets_7",
            "def read_documents(",
            "def read_documents(self, listing):\n        self.texts(listing)\n\n    def texts(",
            "read_documents() of FILE returned None, not an iterable",
        ),
        (
            "tickets_6",
            "    query: str",
            "    is_single_text: bool = False\n    query: str",
            "the class Config of the module tickets_6 has a field is_single_text, which is a method",
        ),
        (
            "tickets_4",
            "return [*super().problems()",
            "[*super().problems()",
            "problems() of FILE returned None, not a list of Problem",
        ),
    ],
)
def test_a_slip_in_a_users_source_is_refused(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    source: str,
    correct: str,
    wrong: str,
    message: str,
):
    module = add_source(folder, source, correct, wrong)
    monkeypatch.chdir(folder.parent)
    data = (f"data={source}", "data.paths=[tickets.db]", f"data.cache_dir={folder}/other")
    assert run_train("--config-dir", str(folder), *SMALL, *data) == 2
    message = message.replace("FILE", str(module))
    assert f"valkyrie-train: data.source={source}: {message}" in capfd.readouterr().err


def test_an_error_in_a_users_source_is_located(folder: Path):
    add_source(folder, "tickets_5", "yield Document", "yield {}[number] if number == 2 else Document")
    data = ("data=tickets_5", "data.paths=[tickets.db]", f"data.cache_dir={folder}/other")
    result = train_with(folder, *SMALL, *data)
    assert result.returncode == 1
    assert "KeyError: 2; " in result.stderr and "data.source=tickets_5, document 3" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("source", "wrong", "expected"),
    [
        ("tickets_8", "yield {}[number] if number == 0 else Document(", "KeyError: 0; "),
        ("tickets_9", "yield (", "returned a value of type tuple"),
        ("tickets_10", "yield from () and (", "data=tickets_10 has no documents"),
    ],
)
def test_the_doctor_reads_the_first_document_of_a_users_source(
    folder: Path, monkeypatch: pytest.MonkeyPatch, source: str, wrong: str, expected: str
):
    module = add_source(folder, source, "yield Document(", wrong)
    monkeypatch.chdir(folder.parent)
    data = (f"data={source}", "data.paths=[tickets.db]", f"data.cache_dir={folder}/other")
    run = parse_run(["--config-dir", str(folder), *SMALL, *data])
    (finding,) = run_checks([Check("data", check_data)], CheckContext(run))
    assert finding.severity == FAILURE and expected in finding.text
    assert "KeyError" not in expected or finding.text.startswith(f"{module}, line ")


def test_checks_of_a_users_source_and_task_refuse_mistakes(folder: Path):
    result = train(folder, "data.paths=[none.db]", "task=sparse_targets", "task.share=2")
    assert result.returncode == 2
    assert result.stderr.count("data.paths=none.db") == result.stderr.count("task.share=2.0") == 1
    result = train(folder, "data.packing=best_fit")
    assert result.returncode == 2 and "data=parquet_stream" in result.stderr
