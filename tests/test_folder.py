"""Tests of run folders: finding runs, reading their settings, locks, and damaged records."""

from __future__ import annotations

import os
import re
import resource
import shutil
from pathlib import Path

import pytest

import valkyrie
from helpers import assert_golden_message, compose_run
from valkyrie.checkpoint.config import CheckpointConfig
from valkyrie.checkpoint.location import IDENTITY_FILE, POINTER_FILE, SAVED_FILE
from valkyrie.checkpoint.tiers import Checkpoints
from valkyrie.config.arguments import parse_run
from valkyrie.config.modes import MODES
from valkyrie.config.unread import replacement_notes
from valkyrie.processes.locks import WRITER_FILE, write_lock
from valkyrie.runs.folder import (
    RUN_FILE,
    changed_settings,
    choose_run_folder,
    claim_run_folder,
    command_name,
    describe_schedule_change,
    find_run,
    resume_command,
    saved_config,
    write_run_files,
)
from valkyrie.runs.tracking import Tracker
from valkyrie.runs.wandb_writer import TrackingConfig
from valkyrie.search.compile import child as compile_child
from valkyrie.sweep import child as trial_child


def make_run(runs: Path, name: str, *arguments: str, mtime: int = 0) -> Path:
    """Make a run folder with a finished checkpoint and the settings composed from these arguments.

    `mtime` is the modification time of the folder of checkpoints, in seconds since the epoch.
    """
    checkpoint = runs / name / "checkpoints" / "5"
    checkpoint.mkdir(parents=True)
    (checkpoint / "_CHECKPOINT_METADATA").write_text("{}")
    compose_run(*(arguments or ("model=s5_tiny",)), f"name={name}").save(runs / name / RUN_FILE)
    os.utime(checkpoint.parent, (mtime, mtime))
    return runs / name


def test_latest_is_the_run_with_the_newest_checkpoint(tmp_path: Path) -> None:
    make_run(tmp_path, "old", mtime=10)
    newest = make_run(tmp_path, "new", mtime=30)
    make_run(tmp_path, "middle", mtime=20)
    assert find_run(tmp_path, "latest") == newest
    elsewhere = make_run(tmp_path, "elsewhere")
    shutil.rmtree(elsewhere / "checkpoints")
    (elsewhere / POINTER_FILE).write_text(f"{tmp_path / 'bucket'}\n")
    (elsewhere / SAVED_FILE).touch()
    os.utime(elsewhere, (5, 5))
    for time, latest in ((20, newest), (40, elsewhere)):
        os.utime(elsewhere / SAVED_FILE, (time, time))
        assert find_run(tmp_path, "latest") == latest


def test_a_run_is_found_by_name_and_by_path(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "one")
    assert find_run(tmp_path, "one") == folder
    assert find_run(Path("runs"), str(folder)) == folder


def test_another_model_than_that_of_the_run_is_noted(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "one")
    same_model, other_model = (
        compose_run("model=s5_tiny", "mode=show"),
        compose_run("model=gpt_tiny", "mode=show", "seed=3"),
    )
    resumed = [run.changed(resume=str(folder)) for run in (same_model, other_model)]
    first, *_ = replacement_notes(resumed[1])
    assert replacement_notes(same_model) == replacement_notes(resumed[0]) == []
    assert "model=gpt_tiny replaces model=s5_tiny" in first and first.endswith(" of one") and "seed" not in first


def test_latest_skips_a_folder_without_settings_only_if_it_has_no_checkpoints(tmp_path: Path) -> None:
    make_run(tmp_path, "good", mtime=10)
    damaged = make_run(tmp_path, "damaged", mtime=30)
    (damaged / RUN_FILE).unlink()
    (tmp_path / "failed_start").mkdir()
    (tmp_path / "failed_start" / IDENTITY_FILE).touch()
    assert find_run(tmp_path, "latest") == damaged


def test_a_folder_without_a_finished_checkpoint_is_not_a_run(tmp_path: Path) -> None:
    make_run(tmp_path, "good")
    (tmp_path / "torn" / "checkpoints" / "7").mkdir(parents=True)
    assert find_run(tmp_path, "latest").name == "good"
    with pytest.raises(ValueError, match=f"resume=torn.*={tmp_path}.* good"):
        find_run(tmp_path, "torn")


def test_latest_is_refused_if_there_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"resume=latest: no run in {tmp_path} "):
        find_run(tmp_path, "latest")


def test_changed_settings_are_listed_as_they_are_written(tmp_path: Path) -> None:
    arguments = ["model=s5_tiny", "mesh=1x1x1", "partition=dp", "remat=none", "data=text", "data.paths=[c]"]
    compose_run(*arguments).save(tmp_path / "run.yaml")
    assert changed_settings(compose_run(*arguments), tmp_path) == {}
    silent = [
        "name=a",
        "runs=b",
        "steps=9",
        "tracking=off",
        "prompt=x",
        "checkpoint.every=3",
        "mode=eval",
        "log_every=3",
    ]
    assert changed_settings(compose_run(*arguments, *silent), tmp_path) == {}
    changes = ["mesh=2x1x1", "partition=fsdp", "optimizer.ema_decay=0.9", "remat=full", "model.tie_embeddings=false"]
    assert changed_settings(compose_run(*arguments, *changes, "data.paths=[a,b]"), tmp_path) == {
        "mesh.name": ("2x1x1", "1x1x1"),
        "partition.name": ("fsdp", "dp"),
        "remat.name": ("full", "none"),
        "model.tie_embeddings": ("false", "true"),
        "data.paths": (f"[{Path.cwd() / 'a'},{Path.cwd() / 'b'}]", f"[{Path.cwd() / 'c'}]"),
        "optimizer.ema_decay": ("0.9", "null"),
    }


def test_no_setting_counts_as_changed_without_a_record(tmp_path: Path) -> None:
    assert changed_settings(compose_run("model=s5_tiny", "mesh=1x1x1", "partition=dp"), tmp_path) == {}


def retrain_remedy(folder: Path) -> str:
    return f"`valkyrie-train name={folder.name}`"


def test_the_error_for_a_missing_run_yaml_names_it_and_the_remedy(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "one")
    (folder / RUN_FILE).unlink()
    with pytest.raises(ValueError) as caught:
        saved_config(folder)
    message = str(caught.value)
    assert message.startswith(f"{folder} ") and "run.yaml" in message and retrain_remedy(folder) in message


def test_the_error_for_a_damaged_run_yaml_names_it_and_the_remedy(tmp_path: Path) -> None:
    run = compose_run("model=s5_tiny", "mesh=1x1x1", "partition=dp")
    run.save(tmp_path / RUN_FILE)
    text = (tmp_path / RUN_FILE).read_text()
    ends = [text.index("hydra:") + n for n in (0, len("hydra:"), len("hydra:\n  run"))]
    for length in (0, 30, 200, 211, 300, *ends, len(text) - len("    root: null\n"), len(text) - 2):
        (tmp_path / RUN_FILE).write_text(text[:length])
        with pytest.raises(ValueError) as caught:
            saved_config(tmp_path)
        assert str(caught.value).startswith(f"{tmp_path / RUN_FILE} is damaged (")
        assert "delete it" in str(caught.value) and retrain_remedy(tmp_path) in str(caught.value)
    with pytest.raises(ValueError, match="is damaged"):
        changed_settings(run, tmp_path)


def test_trial_and_compile_processes_refuse_an_incomplete_run_yaml(tmp_path: Path) -> None:
    compose_run("model=s5_tiny", "mesh=1x1x1", "partition=dp").save(tmp_path / RUN_FILE)
    text = (tmp_path / RUN_FILE).read_text()
    (tmp_path / RUN_FILE).write_text(text[: text.index("optimizer:")])
    for carry_out in (trial_child._run_mode, lambda folder: compile_child._compile_run(folder, ignore_cache=False)):
        with pytest.raises(ValueError, match="run.yaml is damaged"):
            carry_out(tmp_path)


def test_a_failed_write_leaves_the_previous_record(tmp_path: Path) -> None:
    run = compose_run("model=s5_tiny", "mesh=1x1x1", "partition=dp")
    write_run_files(run, tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match="file too large"):
            write_run_files(run.changed(steps=7), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_every_module_writes_records_atomically() -> None:
    package = Path(valkyrie.__file__).parent
    pieces = re.compile(r"\.write_text\(|OmegaConf\.save\(|json\.dump\(")
    assert [str(file) for file in package.rglob("*.py") if pieces.search(file.read_text())] == []


def test_a_resumed_run_warns_if_its_learning_rate_jumps(tmp_path: Path) -> None:
    arguments = ["model=gpt_tiny", "mesh=1x1x1", "partition=dp", "optimizer.learning_rate=1e-3"]
    compose_run(*arguments, "steps=200").save(tmp_path / RUN_FILE)

    def note(*overrides: str, step: int = 200) -> str | None:
        return describe_schedule_change(compose_run(*arguments, *overrides), tmp_path, step)

    warning = str(note("steps=400"))
    assert all(part in warning for part in ("step 200", "0.00059", "0.0001")) and warning.endswith(
        "optimizer.decay_steps=200"
    )
    assert note("steps=400", "optimizer.decay_steps=200") is None
    assert note("steps=200", step=50) is None
    assert note("steps=200", "optimizer.learning_rate=2e-3") is None, "that is said with the other changed settings"
    compose_run(*arguments, "steps=400", "optimizer.decay_steps=200").save(tmp_path / RUN_FILE)
    assert note("steps=800", "optimizer.decay_steps=200", step=400) is None
    assert re.search("800 .*200", str(note("steps=800", step=400)))


def test_a_run_name_is_a_single_folder_name(tmp_path: Path) -> None:
    arguments = ["model=s5_tiny", "mesh=1x1x1", "partition=dp", f"runs={tmp_path}"]
    assert choose_run_folder(compose_run(*arguments, "name=a")) == tmp_path / "a"
    with pytest.raises(ValueError, match=f"name=a/b .*runs={tmp_path / 'a'} name=b.* name=a-b"):
        choose_run_folder(compose_run(*arguments, "name=a/b"))
    changed = parse_run(["model=gpt_tiny", *arguments[1:], "model.attention.heads=2", "model.attention.kv_heads=2"])
    assert choose_run_folder(changed).name.startswith(f"{changed.model.name}_heads2_kv_heads2-{changed.layout.name}-")


def test_a_resume_command_has_the_name_or_else_the_folder(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("UV_RUN_RECURSION_DEPTH", raising=False)
    for folder, value in {"runs/a b": "'a b'", "runs/c/a": "runs/c/a", "/x/runs/a": "/x/runs/a"}.items():
        assert resume_command(Path(folder)) == f"valkyrie-train resume={value}"


def test_printed_commands_start_like_the_users_command(monkeypatch: pytest.MonkeyPatch):
    assert command_name() == "valkyrie-train"
    monkeypatch.setenv("UV_RUN_RECURSION_DEPTH", "1")  # as uv sets it
    assert command_name("valkyrie-report") == "uv run valkyrie-report"


@pytest.mark.parametrize(
    "name", ["two", "ONE", "unsaved", "compiled", "{runs}/one/checkpoints/5", "{runs}/one/run.yaml"]
)
def test_a_run_that_cannot_be_resumed_is_refused_with_a_remedy(tmp_path: Path, name: str) -> None:
    make_run(tmp_path, "one")
    for run_name, mode in (("unsaved", "train"), ("compiled", "compile")):
        write_run_files(compose_run("model=s5_tiny", f"mode={mode}"), tmp_path / run_name)
    with pytest.raises(ValueError) as caught:
        find_run(tmp_path, name.format(runs=tmp_path))
    assert_golden_message("folder", [f"resume={name}"], str(caught.value).replace(str(tmp_path), "{runs}"))


@pytest.mark.parametrize("override", ["resume=one", "name=one"])
def test_a_compile_of_a_trained_run_does_not_change_its_settings(tmp_path: Path, override: str) -> None:
    make_run(tmp_path, "one")
    run = compose_run("model=s5_tiny", "mesh=1x1x1", "partition=dp", f"runs={tmp_path}", override)
    assert choose_run_folder(run) == tmp_path / "one"
    compiled = run.changed(mode=MODES.config_class("compile")())
    assert choose_run_folder(compiled) == tmp_path / "one-compile"
    assert choose_run_folder(run.changed(mode=MODES.config_class("eval")())) == tmp_path / "one"


def test_code_is_only_imported_from_folders_that_a_command_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VALKYRIE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("VALKYRIE_MODULES", raising=False)
    folder = make_run(tmp_path, "somebody")
    code = folder / "code"
    code.mkdir()
    (code / "theirs.py").write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\n")
    text = (folder / RUN_FILE).read_text().replace("modules: []", f"modules: [{code}]")
    (folder / RUN_FILE).write_text(text.replace("family: valkyrie", "family: theirs"))
    with pytest.raises(ValueError, match=re.escape(f"modules=[{code}]")):
        valkyrie.load(folder)
    assert not (tmp_path / "ran").exists()
    with pytest.raises(ValueError, match="class Config"):
        valkyrie.load(folder, f"modules=[{code}]")
    assert (tmp_path / "ran").exists()


def test_a_folder_with_other_files_is_refused_as_a_run_folder(tmp_path: Path):
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "metrics.jsonl").write_text("mine\n")
    with pytest.raises(ValueError, match="name=project"):
        choose_run_folder(compose_run("model=s5_tiny", f"runs={tmp_path}", "name=project"))
    make_run(tmp_path, "ours")
    (tmp_path / "ours" / RUN_FILE).unlink()  # it still has a checkpoint
    assert choose_run_folder(compose_run("model=s5_tiny", f"runs={tmp_path}", "name=ours")) == tmp_path / "ours"


def test_the_folder_of_a_sweep_is_refused_as_a_run_folder(tmp_path: Path):
    (tmp_path / "swept").mkdir()
    (tmp_path / "swept" / "trials.jsonl").touch()
    with pytest.raises(ValueError, match=r"^name=swept: .*swept is .* sweep\b"):
        choose_run_folder(compose_run("model=s5_tiny", f"runs={tmp_path}", "name=swept"))


def test_a_folder_in_place_of_the_metrics_is_refused(tmp_path: Path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(ValueError, match=r"metrics\.jsonl is a folder\b"):
        claim_run_folder(compose_run("model=s5_tiny", "name=a"), tmp_path)


def test_links_in_a_run_folder_are_not_written_through(tmp_path: Path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "run").mkdir()
    for name in (WRITER_FILE, "metrics.jsonl"):
        (tmp_path / "run" / name).symlink_to(tmp_path / "precious")
    with pytest.raises(ValueError, match=WRITER_FILE), write_lock(tmp_path / "run"):
        pass
    with pytest.raises(ValueError, match="metrics"):
        Tracker(TrackingConfig(), tmp_path / "run", run_name="a", fields={}, group="a", start_step=3)
    assert (tmp_path / "precious").read_text() == "mine"


def test_files_that_are_not_checkpoints_of_this_run_are_not_deleted(tmp_path: Path):
    ours, theirs = make_run(tmp_path, "ours"), make_run(tmp_path, "theirs")
    Checkpoints(ours, CheckpointConfig()).close()
    notes = ours / "checkpoints" / "1" / "notes.txt"
    notes.parent.mkdir()
    notes.write_text("mine")
    with pytest.raises(ValueError, match=str(notes.parent)):
        Checkpoints(ours, CheckpointConfig())
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "checkpoints").symlink_to(theirs / "checkpoints")
    with pytest.raises(ValueError, match=str(theirs)):
        Checkpoints(tmp_path / "linked", CheckpointConfig())
