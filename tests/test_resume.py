"""Tests of resuming: bit-for-bit equal runs, changed settings, other meshes, and refusals."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers import mark_slow_except
from runs import (
    ONE_DEVICE_ARGUMENTS,
    TINY_ARGUMENTS,
    assert_same_bits,
    copy_run,
    run_train,
    saved_arrays,
    tiny_arguments,
    trained_run,
    training_records,
)
from valkyrie.checkpoint import checkpoint_root, latest_step
from valkyrie.config.arguments import parse_run
from valkyrie.train import screen
from valkyrie.train.prepare import load_run_tokenizer
from valkyrie.train.trainer import _opening_line

FORMS = {
    "plain": (),
    "microbatches and dropout": ("microbatches=2", "model.dropout=0.2"),
    "average": ("optimizer.ema_decay=0.9",),
}


def interrupt_at(monkeypatch: pytest.MonkeyPatch, step: int, number: signal.Signals = signal.SIGINT) -> None:
    """Send this process one signal when the metrics of `step`, or of a later step, are shown."""
    show_step, sent = screen.Screen.show_step, []

    def shown(self: screen.Screen, shown_step: int, record: dict[str, Any], *, print_line: bool) -> None:
        show_step(self, shown_step, record, print_line=print_line)
        if shown_step >= step and not sent:
            sent.append(os.kill(os.getpid(), number))
            time.sleep(0.2)

    monkeypatch.setattr(screen.Screen, "show_step", shown)


def assert_same_run(actual_run: Path, expected_run: Path) -> None:
    """Assert that two runs logged the same losses, gradient norms and learning rates, and saved the same last state."""
    actual_records, expected_records = training_records(actual_run), training_records(expected_run)
    assert actual_records.keys() == expected_records.keys()
    for step in actual_records:
        for key in ("loss", "grad_norm", "learning_rate"):
            assert actual_records[step][key] == expected_records[step][key], (step, key)
    assert_same_bits(saved_arrays(actual_run), saved_arrays(expected_run))


@pytest.mark.parametrize("form", mark_slow_except(FORMS, ["plain"]))
def test_an_interrupted_run_resumes_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], form: str
) -> None:
    number = signal.SIGTERM if form == "average" else signal.SIGINT
    uninterrupted_run = trained_run(*FORMS[form], steps=12)
    with monkeypatch.context() as patch:
        interrupt_at(patch, 3, number)
        assert run_train(*tiny_arguments(tmp_path, "steps=12", *FORMS[form])) == (
            75 if number == signal.SIGTERM else 130
        )
    out, err = capfd.readouterr()
    stopped_step = saved_arrays(tmp_path / "run")["['step']"]
    assert 3 <= stopped_step <= 6
    assert f"stopped at step {stopped_step}, saved in {tmp_path / 'run'}" in out
    assert "stopping after" in err and "Traceback" not in err
    assert run_train("resume=run", f"runs={tmp_path}") == 0
    assert f"training steps {stopped_step + 1} to 12" in capfd.readouterr().out
    assert_same_run(tmp_path / "run", uninterrupted_run)


def remove_checkpoints_after(folder: Path, step: int) -> None:
    """Remove the checkpoints after a step, as if the run had died before it saved them."""
    for later in (folder / "checkpoints").iterdir():
        if int(later.name) > step:
            shutil.rmtree(later)


@pytest.mark.slow
def test_biases_that_balance_experts_resume_bit_for_bit(tmp_path: Path) -> None:
    model = ("model=moe_tiny", "model.layers=1", "model.embed=16", "model.moe.mlp=16", "model.moe.selection_bias=true")
    training = [argument for argument in TINY_ARGUMENTS if not argument.startswith("model")]
    arguments = (*model, *training, *ONE_DEVICE_ARGUMENTS, "optimizer.ema_decay=0.9")
    runs = tmp_path / "whole"
    assert run_train(*arguments, f"runs={runs}", "name=run", "steps=4", "checkpoint.every=2") == 0
    folder = copy_run(runs / "run", tmp_path)
    remove_checkpoints_after(folder, 2)
    assert run_train("resume=run", f"runs={tmp_path}") == 0
    assert_same_run(folder, runs / "run")
    averaged = [value for name, value in saved_arrays(folder).items() if "selection_bias" in name]
    assert len(averaged) == 2 and all(np.any(value) for value in averaged)
    np.testing.assert_array_equal(*averaged)  # the average of parameters has the current biases


@pytest.mark.slow
@pytest.mark.parametrize("selector", mark_slow_except(["latest", "run", "path", "name"], ["latest"]))
def test_a_run_is_resumed_by_any_of_its_names(tmp_path: Path, selector: str) -> None:
    uninterrupted_run = trained_run("checkpoint.every=3")
    folder = copy_run(uninterrupted_run, tmp_path)
    remove_checkpoints_after(folder, 3)
    overrides = {
        "latest": ["resume=latest", f"runs={tmp_path}"],
        "run": ["resume=run", f"runs={tmp_path}"],
        "path": [f"resume={folder}"],
        "name": [*tiny_arguments(tmp_path), "steps=6", "checkpoint.every=3"],
    }[selector]
    assert run_train(*overrides) == 0
    assert_same_run(folder, uninterrupted_run)


@pytest.mark.slow
def test_a_finished_run_says_so_and_continues_with_more_steps(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = copy_run(trained_run(), tmp_path)
    before = saved_arrays(folder)
    capfd.readouterr()  # the run it goes on from may have been trained just now
    assert run_train("resume=run", f"runs={tmp_path}") == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert "(6 of 6" in out and "steps=12" in out
    assert "compiled" not in out
    assert "step 6: validation" in out
    assert_same_bits(saved_arrays(folder), before)

    assert run_train("resume=run", f"runs={tmp_path}", "steps=8") == 0
    assert sorted(training_records(folder)) == list(range(1, 9))
    assert "\nsteps: 8\n" in (folder / "run.yaml").read_text()
    capfd.readouterr()
    assert run_train("resume=run", f"runs={tmp_path}") == 0
    assert "(8 of 8" in capfd.readouterr().out


def test_a_run_beyond_the_requested_steps_names_its_step() -> None:
    line = _opening_line(4, 2, None)
    assert line.startswith("steps=2:") and "step 4" in line and "2 steps" not in line


def test_another_model_is_refused_by_name(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = copy_run(trained_run(), tmp_path)
    before = (folder / "run.yaml").read_text()
    assert run_train(*tiny_arguments(tmp_path, "model.embed=32", "steps=20")) == 2
    err = capfd.readouterr().err
    assert "embedding" in err and "(384, 16)" in err and "(384, 32)" in err
    assert "Traceback" not in err and (folder / "run.yaml").read_text() == before


def test_the_tokenizer_is_compared_before_the_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VALKYRIE_CACHE", str(tmp_path))
    folder = copy_run(trained_run(), tmp_path)
    with pytest.raises(ValueError, match=r"^data.tokenizer=gpt2 .*data.tokenizer=bytes"):
        load_run_tokenizer(parse_run(tiny_arguments(tmp_path, "data.tokenizer=gpt2")))
    file = checkpoint_root(folder) / str(latest_step(folder)) / "about" / "metadata"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer": {"name": "mine", "fingerprint": "ab"}}))
    run = parse_run(tiny_arguments(tmp_path, "data.tokenizer=mine", "model.vocab_size=300"))
    tokenizer_file = tmp_path / "tokenizers" / "mine.json"
    with pytest.raises(ValueError, match=rf"^data.tokenizer=mine, .*{tokenizer_file.parent}.* mine.json"):
        load_run_tokenizer(run)
    other_run = parse_run(tiny_arguments(tmp_path, "data.tokenizer=nosuch.json", "model.vocab_size=300"))
    with pytest.raises(ValueError, match=r"^data.tokenizer=nosuch.json: "):
        load_run_tokenizer(other_run)
    tokenizer_file.parent.mkdir()
    tokenizer_file.write_text("{}")
    with pytest.raises(ValueError, match=r"^data.tokenizer=mine has changed"):
        load_run_tokenizer(run)


@pytest.mark.parametrize(
    ("before", "change", "saved_setting"),
    [
        ((), "optimizer.clip_norm=null", "optimizer.clip_norm=1.0"),
        pytest.param((), "optimizer.ema_decay=0.9", "optimizer.ema_decay=null", marks=pytest.mark.slow),
        pytest.param(
            ("optimizer.ema_decay=0.9",),
            "optimizer.ema_decay=null",
            "optimizer.ema_decay=0.9",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_refusal_of_another_optimizer_names_the_differing_option(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], before: tuple[str, ...], change: str, saved_setting: str
) -> None:
    folder = copy_run(trained_run(*before), tmp_path)
    overrides = ("resume=run", f"runs={tmp_path}", "steps=8", "optimizer.learning_rate=1e-4", change)
    assert run_train(*overrides) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "step 6" in line and str(folder / "checkpoints") in line and saved_setting in line


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        ("seed=1", r": seed=1, .* seed=0\b.*data\.shuffle_seed=0\b"),
        ("seq=8", r": seq=8\b.*[ =]16\b"),
        ("data.documents=61", r"\bfiles\b"),
    ],
)
def test_other_data_is_refused_with_both_values(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], change: str, pattern: str
) -> None:
    copy_run(trained_run(), tmp_path)
    assert run_train("resume=run", f"runs={tmp_path}", "steps=8", change) == 2
    err = capfd.readouterr().err
    assert re.search(pattern, err)
    assert "another name=" in err


def _parse_continuation(capfd: pytest.CaptureFixture[str]) -> tuple[list[str], str]:
    """Return the step numbers and the changed settings, both as text, in the line that a continued run prints."""
    (line,) = (line for line in capfd.readouterr().out.splitlines() if line.startswith("continuing run "))
    steps, _, changes = line.partition(": ")
    return re.findall(r"step (\d+)", steps), changes


@pytest.mark.slow
def test_a_continued_run_prints_its_changed_settings(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = ("optimizer.learning_rate=1e-4", "optimizer.weight_decay=0")
    copy_run(trained_run(*before), tmp_path)
    capfd.readouterr()
    unlisted = ("log_every=2", "sample_tokens=1")
    assert run_train(*tiny_arguments(tmp_path, "steps=7", *before, *unlisted)) == 0
    assert _parse_continuation(capfd) == (["6", "7"], "steps=7 (was 6)")
    assert run_train(*tiny_arguments(tmp_path, "steps=8", "optimizer.weight_decay=0")) == 0
    changes = "steps=8 (was 7), optimizer.learning_rate=0.024 (was 0.0001)"
    assert _parse_continuation(capfd) == (["7", "8"], changes)
    assert max(training_records(tmp_path / "run")) == 8


def test_a_damaged_checkpoint_is_refused_without_a_traceback(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = copy_run(trained_run(), tmp_path)
    metadata = folder / "checkpoints" / "6" / "about" / "metadata"
    metadata.write_text(metadata.read_text()[:10])
    assert run_train("resume=latest", f"runs={tmp_path}") == 2
    out, err = capfd.readouterr()
    assert "is damaged: about/metadata" in err and "10 bytes" in err
    assert "Traceback" not in out + err


@pytest.mark.slow
def test_a_deleted_run_folder_ends_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    show_step = screen.Screen.show_step

    def shown(self: screen.Screen, shown_step: int, record: dict[str, Any], *, print_line: bool) -> None:
        show_step(self, shown_step, record, print_line=print_line)
        if shown_step == 3:
            shutil.rmtree(tmp_path / "run")

    monkeypatch.setattr(screen.Screen, "show_step", shown)
    assert run_train(*tiny_arguments(tmp_path, "steps=100000")) == 1
    out, err = capfd.readouterr()
    assert "step 4: " in err and f"{tmp_path / 'run' / 'metrics.jsonl'} no longer exists" in err
    assert "Traceback" not in out + err and not (tmp_path / "run").exists()


@pytest.mark.slow
def test_only_the_final_state_is_saved_without_an_interval() -> None:
    assert os.listdir(trained_run("checkpoint.every=null") / "checkpoints") == ["6"]
    assert sorted(os.listdir(trained_run("checkpoint.every=3") / "checkpoints")) == ["3", "6"]


@pytest.mark.slow
def test_the_order_of_data_uses_the_data_seed_if_set() -> None:
    losses = {
        seed: training_records(trained_run(*overrides))[1]["loss"]
        for seed, overrides in {"run": (), "own": ("data.shuffle_seed=0",), "other": ("data.shuffle_seed=9",)}.items()
    }
    assert losses["run"] == losses["own"] != losses["other"]


@pytest.mark.slow
def test_a_run_resumes_under_another_mesh_and_partition(tmp_path: Path) -> None:
    model = ("model=valkyrie_tiny", "model.layers=2", "model.embed=32", "model.attention.head_dim=8", "seq=32")
    under = ("mesh=2x2x2", "partition=2d_tp", "checkpoint.every=3", "steps=6", "model.mlp=64", "data.documents=200")
    start = [a for a in TINY_ARGUMENTS if not a.startswith(("model", "seq="))]
    assert run_train(*start, *model, *under, f"runs={tmp_path}", "name=run") == 0
    whole = training_records(tmp_path / "run")
    remove_checkpoints_after(tmp_path / "run", 3)
    assert run_train("resume=run", f"runs={tmp_path}", "mesh=1x2x4", "partition=fsdp") == 0
    moved = training_records(tmp_path / "run")
    for step in (4, 5, 6):
        np.testing.assert_allclose(moved[step]["loss"], whole[step]["loss"], rtol=2e-5)
        np.testing.assert_allclose(moved[step]["grad_norm"], whole[step]["grad_norm"], rtol=1e-4)
