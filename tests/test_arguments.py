"""Tests of `compose` and `load`: they read arguments as the command does (folders, resumed runs, prompts)."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from pathlib import Path

import pytest

import valkyrie
from helpers import assert_golden_message
from runs import TINY_ARGUMENTS, copy_run
from valkyrie.runs.folder import choose_run_folder


@pytest.fixture
def own_folder(tmp_path: Path) -> Path:
    """A user's configuration folder. Hydra's grammar needs quotes to read its path."""
    folder = tmp_path / "my (own) configs, é"
    chip = folder / "target" / "chip"
    chip.mkdir(parents=True)
    (chip / "tuned.yaml").write_text("defaults: [v5e, _self_]\nname: tuned\nhbm_gib: 33.0\n")
    (folder / "target" / "mine.yaml").write_text(
        "defaults: [target_schema, chip/tuned@chip, _self_]\nname: mine\nplatform: tpu\nchips: 4\ntopology: 2x2\n"
    )
    return folder


def write_run(folder: Path, *arguments: str) -> Path:
    """Write the run folder of a training run with these arguments, with an empty checkpoint at step 5."""
    checkpoint = folder / "checkpoints" / "5"
    checkpoint.mkdir(parents=True)
    (checkpoint / "_CHECKPOINT_METADATA").write_text("{}")
    valkyrie.compose(*arguments).save(folder / "run.yaml")
    return folder


@pytest.fixture(scope="module")
def original_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("runs")
    return write_run(runs / "one", *TINY_ARGUMENTS, "mesh=2x1x1", "partition=fsdp", "steps=6", f"runs={runs}")


@pytest.fixture
def folder(original_folder: Path, tmp_path: Path) -> Path:
    return copy_run(original_folder, tmp_path)


@pytest.mark.parametrize(("target", "mesh"), [("mine", "1x2x2"), ("tuned-8", "1x2x4")])
def test_a_users_target_and_chip_compose(own_folder: Path, target: str, mesh: str):
    run = valkyrie.compose("model=gpt_tiny", f"target={target}", config_dir=own_folder)
    assert run.config.target.name == target and run.config.target.chip is not None
    assert run.config.target.chip.hbm_gib == 33 and run.config.mesh.name == mesh


def test_resume_starts_from_the_saved_settings(folder: Path):
    run = valkyrie.compose("resume=latest", f"runs={folder.parent}", "steps=8")
    assert (run.model.name, run.config.model.embed, run.config.mesh.name) == ("s5_tiny", 16, "2x1x1")
    assert run.config.steps == 8 and choose_run_folder(run) == folder


@pytest.mark.parametrize("prompt", ["def f(x): return", "  a, b", "[1,2]"])
def test_a_prompt_is_taken_as_it_is_typed(folder: Path, prompt: str):
    assert valkyrie.compose("model=gpt_tiny", f"prompt={prompt}").config.prompt == prompt
    assert valkyrie.load(folder, f"prompt={prompt}").config.prompt == prompt


@pytest.mark.parametrize("name", ["1e3", "007", "1_000", "true", "-1", "a.b"])
def test_a_name_is_taken_as_it_is_typed(name: str):
    assert valkyrie.compose("model=gpt_tiny", f"name={name}").config.name == name


@pytest.mark.parametrize("override", ["mesh=8", "--cfg"])
def test_an_override_that_compose_cannot_read_is_refused(override: str):
    with pytest.raises(ValueError) as error:
        valkyrie.compose("model=gpt_tiny", override)
    assert_golden_message("arguments", ["compose", override], str(error.value))


def test_load_can_change_config_groups_as_resume_does(folder: Path):
    run = valkyrie.load(folder, "mesh=4x2x1", "partition=dp", "steps=8")
    assert (run.config.mesh.name, run.config.partition.name, run.config.steps) == ("4x2x1", "dp", 8)
    assert (run.model.name, run.config.model.embed) == ("s5_tiny", 16)
    assert choose_run_folder(run) == folder
    moved = valkyrie.load(folder, "target=v4-8", "mesh=2x2x1")
    assert moved.config.target.name == "v4-8" and moved.config.model.embed == 16


def test_values_are_parsed_like_those_of_the_command(folder: Path):
    run = valkyrie.load(
        folder, "steps=8", "data=text", "data.paths=[a,'b c']", "optimizer.clip_norm=null", "prompt='x'"
    )
    assert run.config.data.paths == ["a", "b c"] and run.config.optimizer.clip_norm is None
    assert run.config.steps == 8 and run.config.prompt == "x" and choose_run_folder(run) == folder


@pytest.mark.parametrize(
    "override",
    ["name=foo", "resume=latest", "mesh=8", "mesh=nix", "stps=8", "steps=8,9", "~steps", "steps", "steps=abc"],
)
def test_an_override_that_load_cannot_apply_is_refused(folder: Path, override: str):
    with pytest.raises(ValueError) as error:
        valkyrie.load(folder, override)
    assert_golden_message("arguments", ["load", override], str(error.value).replace(str(folder), "FOLDER"))


def test_a_loaded_run_does_not_need_the_users_folder(own_folder: Path, tmp_path: Path):
    folder = write_run(
        tmp_path / "one", "--config-dir", str(own_folder), "model=gpt_tiny", "target=mine", "partition=dp"
    )
    shutil.rmtree(own_folder)
    run = valkyrie.load(folder, "partition=fsdp")
    assert run.config.target.name == "mine" and run.config.partition.name == "fsdp"
    assert run.config.target.chip is not None and run.config.target.chip.hbm_gib == 33


@pytest.mark.parametrize("chip", ["tuned", "dual", "timed"])
def test_a_users_chip_is_selected_by_name_and_number(own_folder: Path, chip: str):
    """`dual` is based on v4, so its target names count cores. `timed` is like a file that `mode=figures` writes."""
    chip_folder = own_folder / "target" / "chip"
    (chip_folder / "dual.yaml").write_text("defaults: [v4, _self_]\nname: dual\n")
    figures = {"platform": "cpu", "peak_tflops": {"float32": 0.05}, "hbm_gbs": 2.5, "host_bounds": [1]}
    figures |= {"dcn_gbs_per_host": 0.012, "estimate": {"launch_s": 2.1e-06}}
    (chip_folder / "timed.yaml").write_text(json.dumps({"name": "timed", **figures}))
    target = valkyrie.compose(
        "--config-dir", str(own_folder), "model=gpt_tiny", f"target.chip={chip}", "target.chips=8"
    ).config.target
    assert target.chip is not None and (target.chip.name, target.chips) == (chip, 8)
    assert target.name == ("dual-16" if chip == "dual" else f"{chip}-8")
    if chip == "timed":
        assert target.chip.estimate["launch_s"] == 2.1e-06
    (chip_folder / "taken.yaml").write_text("defaults: [v5e, _self_]\nname: taken\naliases: [v4]\n")
    with pytest.raises(ValueError, match=r"^target\.chip=taken: .*taken\.yaml .*alias v4\b"):
        valkyrie.compose("--config-dir", str(own_folder), "model=gpt_tiny", "target=taken-8")
    with pytest.raises(ValueError, match=r"^target\.chip=tuned .*\btarget\.chips=N\b"):
        valkyrie.compose("--config-dir", str(own_folder), "target.chip=tuned")


def test_another_choice_of_a_group_replaces_all_of_its_settings(folder: Path):
    config = valkyrie.load(folder, "partition=1d_tp", "partition.zero1=true", "mesh=1x2x1").config
    assert (
        config.partition.parameters == valkyrie.compose("model=s5_tiny", "partition=1d_tp").config.partition.parameters
    )
    assert config.partition.zero1 and config.optimizer == valkyrie.load(folder).config.optimizer


def test_a_run_is_resumed_only_from_its_run_yaml(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Resuming works from any directory and ignores current defaults: it reads only run.yaml and the checkpoints."""
    text = (folder / "run.yaml").read_text()
    (folder / "run.yaml").write_text(text.replace("learning_rate: 0.024", "learning_rate: 0.0625"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    run = valkyrie.compose(f"resume={folder}", "steps=8")
    assert (run.config.optimizer.learning_rate, run.config.steps) == (0.0625, 8) and choose_run_folder(run) == folder


@pytest.mark.parametrize("argument", ["resume=", "resume=''"])
def test_an_empty_resume_is_refused(folder: Path, argument: str):
    with pytest.raises(ValueError) as error:
        valkyrie.compose(argument, f"runs={folder.parent}")
    assert str(error.value).startswith("resume= ") and "resume=latest" in str(error.value)


def test_a_resumed_run_cannot_be_renamed(folder: Path):
    resume_arguments = [f"resume={folder}", f"runs={folder.parent}"]
    with pytest.raises(ValueError) as error:
        valkyrie.compose(*resume_arguments, "name=fresh")
    message = str(error.value)
    assert message.startswith(f"resume={folder} ") and "name=fresh" in message and " one" in message
    for name in ("one", "null"):
        assert choose_run_folder(valkyrie.compose(*resume_arguments, f"name={name}")) == folder
    trial = valkyrie.compose(*resume_arguments, "mode=eval", "name=trial")
    assert trial.config.model.embed == 16, "a sweep names the trials that read a run"


@pytest.mark.parametrize("mode", ["eval", "generate"])
def test_modes_that_read_a_run_take_its_settings_without_resume(folder: Path, mode: str):
    write_run(folder.parent / "two", "model=longformer_tiny", "mesh=1x1x1", "partition=dp")
    os.utime(folder.parent / "two" / "checkpoints", (1, 1))
    latest = [f"mode={mode}", f"runs={folder.parent}"]
    assert valkyrie.compose(*latest).model.name == "s5_tiny"
    assert valkyrie.compose(*latest, "name=two").model.name == "longformer_tiny"
    assert valkyrie.compose(*latest, "name=null").model.name == "s5_tiny"
    with pytest.raises(ValueError, match=r"^name=twoo: .*name=two\?"):
        valkyrie.compose(*latest, "name=twoo")


@pytest.mark.parametrize("name", [None, "one"])
def test_the_command_in_run_yaml_makes_a_new_run_with_the_same_settings(folder: Path, name: str | None):
    valkyrie.compose(*TINY_ARGUMENTS, "mesh=2x1x1", f"name={name or 'null'}", f"runs={folder.parent}").save(
        folder / "run.yaml"
    )
    comment, *_ = (folder / "run.yaml").read_text().splitlines()
    _, _, *arguments = shlex.split(comment)
    run = valkyrie.compose(*arguments, "partition=dp")
    assert run.config.resume is None and not choose_run_folder(run).exists()
    assert run.config.name == (name and "one-2") and run.config.model.embed == 16
    assert run.config.partition.name == "dp" and run.config.mesh.name == "2x1x1"
    assert valkyrie.compose(*arguments, "mode=eval").config.resume == str(folder), "what reads a run reads this one"
    assert choose_run_folder(valkyrie.compose(*arguments, "name=one")) == folder, (
        "but a name that is given is the run of that name"
    )


def test_a_record_has_the_full_paths_of_what_it_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    run = valkyrie.compose("model=s5_tiny", "data=text", "data.paths=[texts/*.md,~/a b.txt,/c]", "data.cache_dir=cache")
    run.save(tmp_path / "run.yaml")
    saved_data = valkyrie.compose("--config-path", str(tmp_path), "--config-name", "run").config.data
    assert saved_data.paths == [f"{tmp_path}/texts/*.md", str(Path("~/a b.txt").expanduser()), "/c"]
    assert saved_data.cache_dir == f"{tmp_path}/cache"
    assert run.config.data.paths[0] == "texts/*.md", "messages show what was typed"


def test_an_incomplete_configuration_is_refused(tmp_path: Path):
    (tmp_path / "mine.yaml").write_text("model: gpt_tiny\nsteps: 5\n")
    with pytest.raises(ValueError) as error:
        valkyrie.compose("--config-path", str(tmp_path), "--config-name", "mine")
    message = str(error.value)
    assert message.startswith(f"{tmp_path}/mine.yaml ")
    assert all(re.search(rf"\b{key}\b", message) for key in ("mode", "target", "mesh", "partition", "trial", "model"))
    assert not re.search(r"\bsteps\b", message), "it is set in the file"
    assert all(part in message for part in ("FOLDER/experiment/mine.yaml", "@package _global_", "experiment=mine"))


def test_a_key_of_a_null_group_is_refused():
    with pytest.raises(ValueError) as error:
        valkyrie.compose("model=s5_tiny", "target.chip.hbm_gib=9")
    assert str(error.value).startswith("target.chip.hbm_gib=9: ") and "target=v5e-8" in str(error.value)


@pytest.mark.parametrize(
    ("line", "typo", "key"),
    [
        ("learning_rate: 0.024", "learning_rate: fast", "optimizer.learning_rate=fast: "),
        ("  embed: 16", "  embd: 16", "model.embd "),
    ],
)
def test_the_error_for_a_typo_in_run_yaml_names_file_and_key(folder: Path, line: str, typo: str, key: str):
    text = (folder / "run.yaml").read_text()
    assert line in text
    (folder / "run.yaml").write_text(text.replace(line, typo))
    with pytest.raises(ValueError) as error:
        valkyrie.compose(f"resume={folder}")
    assert str(error.value).startswith(f"{folder}/run.yaml: {key}")


def test_a_setting_missing_in_run_yaml_has_its_default(folder: Path):
    text = (folder / "run.yaml").read_text()
    (folder / "run.yaml").write_text(text.replace("force: false\n", "").replace("log_every: ", "log_every: 3 # "))
    config = valkyrie.compose(f"resume={folder}", "steps=9").config
    assert (config.force, config.log_every, config.model.embed) == (False, 3, 16)


def test_a_tilde_is_expanded_in_runs_and_resume(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(folder.parent))
    assert valkyrie.compose("model=s5_tiny", "runs=~/mine").config.runs == f"{folder.parent}/mine"
    assert choose_run_folder(valkyrie.compose("resume=~/one", "steps=8")) == folder
