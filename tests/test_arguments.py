"""`compose` and `load` read arguments as the command does: own folders, resumed runs, prompts, meshes, groups."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import valkyrie
from runs import TINY, copied
from valkyrie.train.folder import COMMAND, run_folder


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder of configurations whose path Hydra's grammar cannot read without quotes."""
    folder = tmp_path / "my (own) configs, é"
    chip = folder / "target" / "chip"
    chip.mkdir(parents=True)
    (chip / "tuned.yaml").write_text("defaults: [v5e, _self_]\nname: tuned\nhbm_gib: 33.0\n")
    (folder / "target" / "mine.yaml").write_text(
        "defaults: [target_schema, chip/tuned@chip, _self_]\nname: mine\nplatform: tpu\nchips: 4\ntopology: 2x2\n"
    )
    return folder


def saved_run(folder: Path, *arguments: str) -> Path:
    """A run folder as a training leaves it, of a run of these arguments, without arrays."""
    checkpoint = folder / "checkpoints" / "5"
    checkpoint.mkdir(parents=True)
    (checkpoint / "_CHECKPOINT_METADATA").write_text("{}")
    run = valkyrie.compose(*arguments)
    run.save(folder / "run.yaml")
    (folder / COMMAND).write_text(json.dumps(list(run.arguments)))
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("runs")
    return saved_run(runs / "one", *TINY, "mesh=2x1x1", "partition=fsdp", "steps=6", f"runs={runs}")


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return copied(made, tmp_path)


@pytest.mark.parametrize(("target", "mesh"), [("mine", "1x2x2"), ("tuned-8", "1x2x4")])
def test_a_target_and_a_chip_of_ones_own_are_composed(own: Path, target: str, mesh: str):
    run = valkyrie.compose("model=gpt_tiny", f"target={target}", config_dir=own)
    assert run.config.target.name == target and run.config.target.chip is not None
    assert run.config.target.chip.hbm_gib == 33 and run.config.mesh.name == mesh
    assert run.arguments[:2] == ("--config-dir", str(own)), "so that resume= finds the folder again"


def test_resume_reads_the_saved_command(folder: Path):
    run = valkyrie.compose("resume=latest", f"runs={folder.parent}", "steps=8")
    assert (run.model.name, run.config.model.embed, run.config.mesh.name) == ("s5_tiny", 16, "2x1x1")
    assert run.config.steps == 8 and run_folder(run) == folder


@pytest.mark.parametrize("prompt", ["def f(x): return", "  a, b", "[1,2]"])
def test_a_prompt_is_taken_as_it_is_typed(folder: Path, prompt: str):
    assert valkyrie.compose("model=gpt_tiny", f"prompt={prompt}").config.prompt == prompt
    assert valkyrie.load(folder, f"prompt={prompt}").config.prompt == prompt


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("mesh=8", "mesh=8 has 1 axis; a mesh has three (x, y, z) or four (w, x, y, z). Write mesh=8x1x1."),
        ("--cfg", "--cfg is a flag of valkyrie-train: here only KEY=VALUE is read."),
    ],
)
def test_what_compose_cannot_read_is_refused_in_words(override: str, message: str):
    with pytest.raises(ValueError) as refused:
        valkyrie.compose("model=gpt_tiny", override)
    assert str(refused.value) == message


def test_groups_are_chosen_anew_as_resume_does(folder: Path):
    run = valkyrie.load(folder, "mesh=4x2x1", "partition=dp", "steps=8")
    assert (run.config.mesh.name, run.config.partition.name, run.config.steps) == ("4x2x1", "dp", 8)
    assert (run.model.name, run.config.model.embed) == ("s5_tiny", 16)
    assert run_folder(run) == folder
    assert "mesh=2x1x1" not in run.arguments and "mesh=4x2x1" in run.arguments
    moved = valkyrie.load(folder, "target=v4-8", "mesh=2x2x1")
    assert moved.config.target.name == "v4-8" and moved.config.model.embed == 16


def test_values_are_read_by_the_grammar_of_the_command(folder: Path):
    run = valkyrie.load(folder, "steps=8", "data.paths=[a,'b c']", "optimizer.clip_norm=null", "prompt='x'")
    assert run.config.data.paths == ["a", "b c"] and run.config.optimizer.clip_norm is None
    assert run.config.steps == 8 and run.config.prompt == "x" and run_folder(run) == folder


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("name=foo", "name= is not for load: it goes on with the run in "),
        ("resume=latest", "resume= is not for load: it goes on with the run in "),
        ("mesh=8", "Write mesh=8x1x1."),
        ("mesh=nix", "mesh=nix is not a choice."),
        ("stps=8", "stps is not a key. Did you mean steps?"),
        ("steps=8,9", "steps=8,9 names several values, and a run has one. Write steps=VALUE."),
        ("~steps", "~steps removes a key, which a run cannot do without. Write steps=null, or leave it out."),
        ("steps", "steps cannot be read as KEY=VALUE."),
        ("steps=abc", "steps: Value 'abc'"),
    ],
)
def test_what_load_cannot_do_is_refused_in_words(folder: Path, override: str, message: str):
    with pytest.raises(ValueError) as refused:
        valkyrie.load(folder, override)
    assert message in str(refused.value)


def test_a_damaged_command_is_not_needed_unless_a_group_is_chosen(folder: Path):
    (folder / COMMAND).write_text("{")
    run = valkyrie.load(folder, "steps=8")
    assert run.config.steps == 8 and run.config.model.embed == 16
    again = valkyrie.compose(*run.arguments)
    assert again.config.model.embed == 16 and again.config.steps == 8, "its arguments make the same run"
    with pytest.raises(ValueError) as refused:
        valkyrie.load(folder, "mesh=4x2x1")
    assert "command.json is damaged" in str(refused.value)
    (folder / COMMAND).unlink()
    with pytest.raises(ValueError) as refused:
        valkyrie.load(folder, "mesh=4x2x1")
    assert "has no command.json, so groups cannot be chosen anew (mesh=4x2x1)" in str(refused.value)


def test_a_loaded_run_of_a_folder_of_ones_own_keeps_it(own: Path, tmp_path: Path):
    folder = saved_run(tmp_path / "one", "--config-dir", str(own), "model=gpt_tiny", "target=mine", "partition=dp")
    assert valkyrie.load(folder, "partition=fsdp").config.target.name == "mine"
    shutil.rmtree(own)
    with pytest.raises(ValueError) as refused:
        valkyrie.load(folder, "partition=fsdp")
    assert f"--config-dir {own} is not a folder." in str(refused.value)
