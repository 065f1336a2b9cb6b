"""Tests of the mode of conf/README.md, in a user's folder: it runs, is listed, and refuses keys of other modes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers import compose_run
from own_folder import write_listings
from runs import ONE_DEVICE_ARGUMENTS, run_train
from valkyrie.config.arguments import parse_run
from valkyrie.config.modes import MODES
from valkyrie.config.run import Run
from valkyrie.extensions import add_import_path, is_own_file
from valkyrie.paths import conf_dir
from valkyrie.problems import ProblemCode, ProblemError
from valkyrie.runs.folder import saved_config

SMALL = (*ONE_DEVICE_ARGUMENTS, "model=s5_tiny")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder with the mode `count` of conf/README.md."""
    folder = tmp_path_factory.mktemp("own")
    assert write_listings(folder, conf_dir() / "README.md", name=r"\S*count\S*") == ["count.py", "mode/count.yaml"]
    add_import_path([folder])
    return folder


def test_a_users_mode_runs_with_its_key(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_train("mode=count", "--config-dir", str(folder), "mode.unit=1000", *SMALL) == 0
    assert float(capfd.readouterr().out.replace(",", "")) == round(
        compose_run(*SMALL).model.parameter_count() / 1000, 1
    )


@pytest.mark.parametrize(("result", "status"), [("None", 0), ("3", 3), ("False", 2), ("'done'", 2), ("256", 2)])
def test_the_result_of_a_users_mode_is_its_exit_status(
    folder: Path, capfd: pytest.CaptureFixture[str], result: str, status: int
) -> None:
    name = f"count_{status}_{len(result)}"
    file, settings = folder / f"{name}.py", (folder / "mode" / "count.yaml").read_text()
    file.write_text((folder / "count.py").read_text().replace("return 0", f"return {result}"))
    (folder / "mode" / f"{name}.yaml").write_text(settings.replace("count", name))
    assert run_train(f"mode={name}", "--config-dir", str(folder), *SMALL) == status
    err = capfd.readouterr().err
    assert (f"run() of {file} returned {result}, not an exit status from 0 to 255." in err) == (status == 2), err


def test_an_error_in_a_users_mode_is_located(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, settings = folder / "count_typo.py", (folder / "mode" / "count.yaml").read_text()
    file.write_text((folder / "count.py").read_text().replace("/ self.unit", "/ self.unti"))
    (folder / "mode" / "count_typo.yaml").write_text(settings.replace("count", "count_typo"))
    arguments = ("mode=count_typo", "--config-dir", str(folder), *SMALL)
    assert run_train(*arguments) == 1
    err = capfd.readouterr().err
    assert f"{file}, line " in err and "in run: AttributeError: " in err and err.count("\n") == 1, err
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(AttributeError):
        run_train(*arguments)


def test_a_file_that_valkyrie_cannot_read_for_a_users_mode_is_no_error_of_the_mode(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = (folder / "mode" / "count.yaml").read_text()
    for name, line, status in (
        ("count_bytes", "import valkyrie.records; valkyrie.records.read_record(dict, self_path)", 2),
        ("count_open", "self_path.read_bytes()", 1),
    ):
        line = line.replace("self_path", "__import__('pathlib').Path('none.json')")
        (folder / f"{name}.py").write_text((folder / "count.py").read_text().replace("return 0", line))
        (folder / "mode" / f"{name}.yaml").write_text(settings.replace("count", name))
        assert run_train(f"mode={name}", "--config-dir", str(folder), *SMALL) == status
        err = capfd.readouterr().err
        assert "none.json" in err and (f"{name}.py, line " in err) == (status == 1), err


def test_a_typo_is_explained_with_a_config_dir_that_contains_valkyrie(
    command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("VALKYRIE_MODULES", "")
    result = command("--config-dir", str(conf_dir().parent), "model=gpt_tyni")
    assert result.status == 2 and "model=gpt_tiny?" in result.err, result.err


def test_the_standard_library_below_a_users_folder_is_not_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("VALKYRIE_MODULES", "")
    library = Path(json.__file__).parent
    add_import_path([library.parent.parent])
    assert not is_own_file(json.__file__) and is_own_file(str(library.parent.parent / "mine.py"))


def test_a_users_mode_is_listed(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_train("--help", "--config-dir", str(folder)) == 0
    assert "mode=count" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("name", "encoding", "correct", "wrong", "message"),
    [
        ("count_1", "utf-16", "unit", "unit", "FILE is UTF-16 or binary"),
        (
            "count_2",
            "utf-8",
            "    unit: int = 1",
            "    unit: int = 1\n    run: int = 1",
            "has a field run, which is a method",
        ),
        (
            "count-3",
            "utf-8",
            "unit",
            "unit",
            "FILE would be ignored, because count-3 ",
        ),
    ],
)
def test_slips_in_a_users_mode_are_refused(
    folder: Path, capfd: pytest.CaptureFixture[str], name: str, encoding: str, correct: str, wrong: str, message: str
) -> None:
    file = folder / f"{name}.py"
    code = (folder / "count.py").read_text()
    assert correct in code
    file.write_text(code.replace(correct, wrong), encoding=encoding)
    settings = (folder / "mode" / "count.yaml").read_text()
    (folder / "mode" / f"{name}.yaml").write_text(settings.replace("count", name))
    assert run_train(f"mode={name}", "--config-dir", str(folder), *SMALL) == 2
    err = capfd.readouterr().err
    assert message.replace("FILE", str(file)) in err and err.count("\n") == 1, err
    file.unlink()
    (folder / "mode" / f"{name}.yaml").unlink()


def test_the_run_folder_of_a_users_mode_loads(folder: Path, tmp_path: Path) -> None:
    parse_run(["--config-dir", str(folder), "mode=count", "mode.unit=7", *SMALL]).save(tmp_path / "run.yaml")
    saved = Run.from_config(saved_config(tmp_path)).config
    assert vars(saved.mode) == {"name": "count", "unit": 7} and saved.modules == [str(folder)]


def problem_of(*arguments: str) -> tuple[ProblemCode, str | None]:
    with pytest.raises(ProblemError) as error:
        parse_run([*arguments, *SMALL])
    (problem,) = error.value.problems
    return problem.code, problem.key


def test_keys_of_other_modes_are_refused_with_the_modes_that_have_them(folder: Path) -> None:
    arguments = ("--config-dir", str(folder), "mode=count")
    assert problem_of(*arguments, "mode.repeats=3") == (ProblemCode.unknown_name, "mode.repeats")
    with pytest.raises(ProblemError, match="mode=measure, mode=search"):
        parse_run([*arguments, "mode.repeats=3", *SMALL])
    assert problem_of("mode=measure", "mode.unit=3") == (ProblemCode.unknown_name, "mode.unit")


@pytest.mark.parametrize("wrong", [{"repeats": 3}, {"nothing": None}])
def test_run_folders_with_keys_of_all_modes_are_read(tmp_path: Path, wrong: dict[str, object]) -> None:
    compose_run(*SMALL, "mode=compile", "mode.time_limit_s=60").save(tmp_path / "run.yaml")
    saved = saved_config(tmp_path)
    saved.mode = {**saved.mode, "repeats": 10, "data": "random", "budget": None, "targets": [], "keep": None}
    assert vars(Run.from_config(saved).config.mode)["time_limit_s"] == 60
    saved.mode = {**saved.mode, **wrong}
    with pytest.raises(ProblemError) as error:
        Run.from_config(saved)
    assert [problem.key for problem in error.value.problems] == [f"mode.{key}" for key in wrong]


def test_every_mode_names_keys_that_it_has() -> None:
    for name in MODES.names():
        mode = MODES.config_class(name)
        assert {*mode.files, *mode.short_keys} <= vars(mode()).keys() and mode().name == name and mode.description
