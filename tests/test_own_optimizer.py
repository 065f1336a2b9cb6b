"""Tests of the optimizer in valkyrie/optim/README.md, in a user's folder: training, memory estimates, and errors."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import valkyrie.optim
from helpers import compose_run
from own_folder import train_with, write_listings
from runs import run_train
from valkyrie.config.run import Run
from valkyrie.extensions import add_import_path
from valkyrie.parallel.mesh import abstract_mesh
from valkyrie.runs.folder import saved_config
from valkyrie.search.estimate.efficiency import Efficiency
from valkyrie.search.estimate.runs import estimate_runs, stack_runs
from valkyrie.train.memory import MemoryEstimator
from valkyrie.train.program import StepProgram
from valkyrie.train.run_memory import expected_memory

README = Path(valkyrie.optim.__file__).parent / "README.md"
SMALL = ("model=gpt_tiny", "model.embed=32", "batch=8", "seq=32", "mesh=2x2x2", "partition=fsdp", "tracking=off")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder with the optimizer `lion` of valkyrie/optim/README.md."""
    folder = tmp_path_factory.mktemp("own")
    assert write_listings(folder, README) == ["lion.py", "optimizer/lion.yaml"]
    add_import_path([folder])
    return folder


def compose_lion(folder: Path, *overrides: str) -> Run:
    return compose_run(*SMALL, f"hydra.searchpath=[valkyrie://groups,{folder}]", "optimizer=lion", *overrides)


def train(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return train_with(folder, *SMALL, "optimizer=lion", *arguments)


@pytest.mark.slow
def test_a_users_optimizer_trains_on_a_mesh_and_resumes(folder: Path) -> None:
    result = train(folder, "name=lion", "steps=2", "sample_tokens=0")
    assert "step 2/2" in result.stdout, result.stdout + result.stderr
    saved = saved_config(folder.parent / "runs" / "lion")
    assert saved.optimizer.family == "lion" and list(saved.modules) == [str(folder)]
    command = [sys.executable, "-m", "valkyrie.cli.train", "resume=lion", "steps=3", "sample_tokens=0"]
    result = subprocess.run(command, cwd=folder.parent, capture_output=True, text=True, timeout=300)
    assert "steps 3 to" in result.stdout, result.stdout + result.stderr


def test_mode_show_and_the_estimate_count_one_moment(folder: Path) -> None:
    run = compose_lion(folder, "target=v5e-8")
    program = StepProgram(run, abstract_mesh(run.config.mesh))
    shown = expected_memory(run, program.abstract_state).optimizer
    layouts = stack_runs([run])
    (bytes_,) = MemoryEstimator(run, layouts).estimate(run.config.remat).optimizer
    assert shown == pytest.approx(bytes_, rel=1e-3)
    lion, adamw = (estimate_runs([run], Efficiency())[0] for run in (run, compose_run(*SMALL, "target=v5e-8")))
    assert lion["optimizer"] / adamw["optimizer"] == pytest.approx(20 / 28)
    assert lion | {"optimizer": 0, "step": 0} == adamw | {"optimizer": 0, "step": 0}


def test_mode_show_prints_the_memory_of_a_users_optimizer(folder: Path) -> None:
    assert "expected memory" in train(folder, "mode=show").stdout


def test_a_wrong_value_is_refused_by_its_key(folder: Path) -> None:
    wrong = replace(compose_lion(folder).config.optimizer, **{"beta2": 1.0})
    assert [problem.key for problem in wrong.problems()] == ["optimizer.beta2"]


@pytest.mark.parametrize(
    ("family", "correct", "wrong", "message"),
    [
        (
            "lion_1",
            "return super().problems() +",
            "super().problems() +",
            "problems() of FILE returned None, not a list of Problem",
        ),
        (
            "lion_2",
            "return super().problems() +",
            'return ["a"] or',
            "problems() of FILE returned ['a'], not a list of Problem",
        ),
        ("lion_3", "return 4.0", 'return "4"', "state_bytes() of FILE returned '4'"),
        ("lion_4", "return 4.0", "return -4.0", "state_bytes() of FILE returned -4.0"),
        ("lion_5", "return 4.0", 'return float("nan")', "state_bytes() of FILE returned nan"),
        (
            "lion_6",
            "def state_bytes(self, parameter):\n        return 4.0",
            "def update_bytes(self, parameter):\n        return None",
            "update_bytes() of FILE returned None, not a number of bytes",
        ),
        (
            "lion_7",
            "@dataclass\n",
            "",
            "lion_7 has annotated fields, but no @dataclass",
        ),
        (
            "lion_8",
            "beta1: float = 0.9",
            "beta1: complex = 1j",
            "FILE: beta1 has type complex",
        ),
        ("lion_9", "beta1: float = 0.9", 'beta1: float = "a"', "FILE: beta1=a: must be a number."),
        ("lion_10", "beta1: float = 0.9", 'beta1: "Foo" = 0.9', "FILE: name 'Foo' is not defined."),
        (
            "lion_11",
            '"matrix":',
            '"matrices":',
            "unknown group matrices. Groups: matrix, vector, ssm",
        ),
        ("lion_12", '"matrix":', '"vector":', "no rule for the parameter group matrix"),
        (
            "lion_13",
            "def rules",
            "def rule",
            "neither `rules` nor `transformation`",
        ),
        (
            "lion_17",
            "def rules(",
            "def rules(self, rate):\n        self.other_rules(rate)\n\n    def other_rules(",
            "rules() of FILE returned None, not a dict",
        ),
        (
            "lion_14",
            "beta1: float = 0.9",
            'beta1: "OptimizerConfig.Foo" = 1',
            "'OptimizerConfig' has no attribute 'Foo'.",
        ),
        ("lion_15", "beta1: float = 0.9", 'beta1: "1 +" = 1', "FILE: Forward reference must be an expression -- got"),
        (
            "lion_16",
            "beta1: float = 0.9",
            "beta1: int | list[int] = 1",
            "FILE: beta1 has type Union[int, list[int]], but ",
        ),
    ],
)
def test_slips_in_a_users_optimizer_are_refused_in_one_line(
    capfd: pytest.CaptureFixture[str], folder: Path, family: str, correct: str, wrong: str, message: str
) -> None:
    file = folder / f"{family}.py"
    code = (folder / "lion.py").read_text()
    assert code.count(correct) == 1
    file.write_text(code.replace(correct, wrong))
    settings = (folder / "optimizer" / "lion.yaml").read_text()
    (folder / "optimizer" / f"{family}.yaml").write_text(settings.replace("lion", family))
    assert run_train("--config-dir", str(folder), *SMALL, f"optimizer={family}", "mode=show") == 2
    err = capfd.readouterr().err
    assert re.match(rf"valkyrie-train: optimizer(\.family)?={family}: ", err) and err.count("\n") == 1, err
    assert message.replace("FILE", str(file)) in err


def test_a_yaml_without_its_family_is_refused(command: Any, folder: Path) -> None:
    file = folder / "optimizer" / "nameless.yaml"
    file.write_text("defaults: [lion_schema, _self_]\nname: nameless\n")
    result = command("--config-dir", str(folder), *SMALL, "optimizer=nameless")
    assert result.status == 2 and result.err.startswith(f"valkyrie-train: {file} ") and "family: lion." in result.err


def test_a_field_without_a_type_is_named(command: Any, tmp_path: Path) -> None:
    write_listings(tmp_path, README)
    file = (tmp_path / "lion.py").rename(tmp_path / "untyped.py")
    file.write_text(file.read_text().replace("beta1: float = 0.9", "beta1 = 0.9"))
    settings = (tmp_path / "optimizer" / "lion.yaml").read_text()
    (tmp_path / "optimizer" / "lion.yaml").unlink()
    (tmp_path / "optimizer" / "untyped.yaml").write_text(settings.replace("lion", "untyped"))
    result = command("--config-dir", str(tmp_path), *SMALL, "optimizer=untyped", "optimizer.beta1=0.8")
    assert f" {file} has beta1 without a type" in result.err and "beta1: float = 0.9" in result.err


def test_a_missing_module_is_named_with_its_yaml(tmp_path: Path) -> None:
    (tmp_path / "mine" / "optimizer").mkdir(parents=True)
    file = tmp_path / "mine" / "optimizer" / "foo.yaml"
    file.write_text("defaults: [foo_schema, _self_]\nname: foo\n")
    refusal = train_with(tmp_path / "mine", "optimizer=foo")
    message = f"{file} needs foo_schema, but there is no {tmp_path / 'mine' / 'foo.py'} with a class Config."
    assert refusal.returncode == 2 and message in refusal.stderr, refusal.stderr


def test_a_module_without_an_optimizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "no_optimizer.py").write_text("class Config: ...\n")
    add_import_path([tmp_path])
    for family in ("no_optimizer", "no_module"):
        with pytest.raises(ValueError, match=f"optimizer.family={family}"):
            valkyrie.optim.FAMILIES.config_class(family)


def test_an_optimizer_with_the_name_of_a_module_of_python_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text((folder / "lion.py").read_text())
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delenv("VALKYRIE_MODULES", raising=False)
    add_import_path([tmp_path])
    with pytest.raises(ValueError, match=r"optimizer\.family=json: .*/json\.py .* Python "):
        valkyrie.optim.FAMILIES.config_class("json")
