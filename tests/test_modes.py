"""Tests of modes that read a run: evaluation, sampling, and listing checkpoints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from helpers import mark_slow_except
from runs import copy_run, run_train, start_training, tiny_arguments, trained_run
from valkyrie.config.arguments import parse_run
from valkyrie.config.modes import run_mode
from valkyrie.problems import ProblemCode
from valkyrie.runs.tracking import read_metrics
from valkyrie.sweep.results import outcome_from_results
from valkyrie.train import prepare


def resume_arguments(folder: Path, *arguments: str) -> tuple[str, ...]:
    return (f"resume={folder}", *arguments)


@pytest.mark.slow
def test_evaluation_of_a_run_covers_its_validation_split(capfd: pytest.CaptureFixture[str]) -> None:
    folder = trained_run("eval_batches=1000")
    capfd.readouterr()
    assert run_train(*resume_arguments(folder, "mode=eval")) == 0
    out, err = capfd.readouterr()
    last = read_metrics(folder / "metrics.jsonl")[-1]["summary"]
    expected = (
        f"run at step 6: validation loss {last['eval_loss']:.4f}, {last['eval_bits_per_byte']:.4f} bits per byte "
        f"over {last['eval_tokens']:,.0f} tokens"
    )
    assert expected in out
    assert err == ""
    run = parse_run([*resume_arguments(folder, "mode=eval")])
    assert run_mode(run) == 0
    results = outcome_from_results(folder, run).results
    assert results.eval_loss == pytest.approx(last["eval_loss"]) and results.steps == 6, "the record of a trial"


@pytest.mark.slow
def test_evaluation_refuses_rows_longer_than_the_validation_split_unless_the_training_had_them(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = trained_run()
    with monkeypatch.context() as patch:
        patch.delattr(prepare, "acquire_devices")  # the check needs no devices
        assert run_train(*resume_arguments(folder, "mode=eval", "seq=96")) == 2
    err = capfd.readouterr().err
    assert "seq=96: " in err and "validation split" in err and "seq=80 " in err
    assert run_train(*resume_arguments(trained_run("batch=1", "seq=96"), "mode=eval")) == 0


@pytest.mark.parametrize("prompt", mark_slow_except(["def ", 'x = "é" # 😀', "two\nlines", ""], []))
def test_text_begins_with_its_prompt(capfd: pytest.CaptureFixture[str], prompt: str) -> None:
    quoted = "'" + prompt + "'"
    assert run_train(*resume_arguments(trained_run(), "mode=generate", f"prompt={quoted}", "sample_tokens=3")) == 0
    out, err = capfd.readouterr()
    assert re.search(r"\brun\b.*\b6\n" + re.escape(prompt), out)
    assert err == ""


@pytest.mark.slow
def test_the_same_seed_generates_the_same_text(capfd: pytest.CaptureFixture[str]) -> None:
    texts = []
    for seed in (1, 1, 2):
        assert run_train(*resume_arguments(trained_run(), "mode=generate", f"seed={seed}", "sample_tokens=12")) == 0
        texts.append(capfd.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.slow
def test_modes_read_the_latest_run_with_its_settings_by_default(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    copy_run(trained_run(), tmp_path)
    assert run_train("mode=generate", f"runs={tmp_path}", "sample_tokens=2") == 0
    assert re.search(r"\brun\b.*\b6\n", capfd.readouterr().out)


@pytest.mark.parametrize("mode", ["eval", "generate"])
def test_reading_without_a_run_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str], mode: str) -> None:
    assert run_train(f"mode={mode}", f"runs={tmp_path}") == 2
    error = capfd.readouterr().err
    assert "resume=latest" in error and str(tmp_path) in error


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ("top_k=0", ProblemCode.out_of_range),
        ("sample_tokens=-1", ProblemCode.out_of_range),
        ("temperature=-1", ProblemCode.out_of_range),
        ("temperature=nan", ProblemCode.out_of_range),
        ("seed=-1", ProblemCode.out_of_range),
        ("seed=99999999999", ProblemCode.too_large),
        ("name=''", ProblemCode.malformed),
        ("name=../x", ProblemCode.malformed),
    ],
)
def test_an_invalid_setting_is_refused_in_one_line(
    capfd: pytest.CaptureFixture[str], change: str, code: ProblemCode
) -> None:
    (problem,) = parse_run([change]).problems()
    assert (problem.code, problem.key) == (code, change.partition("=")[0])
    assert run_train(change) == 2
    assert capfd.readouterr().err == f"valkyrie-train: {problem}\n"


TOO_FEW_IDS = ("model.tokenizer=bytes", "model.vocab_size=256", "model.vocab_size=257")


@pytest.mark.parametrize(
    ("mode", "change", "values"),
    [
        (
            "train",
            "data.tokenizer=gpt2 model.vocab_size=257",
            ("data.tokenizer=gpt2", "50,257", "model.vocab_size=257", "model.vocab_size=50257"),
        ),
        (
            "train",
            "model.tokenizer=gpt2 model.vocab_size=257",
            ("model.tokenizer=gpt2", "50,257", "model.vocab_size=257", "model.vocab_size=50257"),
        ),
        *((mode, "model.vocab_size=256", TOO_FEW_IDS) for mode in ("train", "eval", "generate")),
    ],
)
def test_a_tokenizer_with_more_ids_than_the_model_is_refused_before_any_data(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], mode: str, change: str, values: tuple[str, ...]
) -> None:
    arguments = tiny_arguments(tmp_path) if mode == "train" else resume_arguments(trained_run())
    capfd.readouterr()
    assert run_train(*arguments, f"mode={mode}", f"data.cache_dir={tmp_path / 'cache'}", *change.split()) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.startswith(f"valkyrie-train: {values[0]} ") and err.count("\n") == 1
    assert all(value in err for value in values)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode", ["eval", "generate"])
@pytest.mark.parametrize("group", ["data", "model"])
def test_reading_a_run_with_another_tokenizer_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], mode: str, group: str
) -> None:
    change = [f"{group}.tokenizer=gpt2", "model.vocab_size=257"]
    arguments = resume_arguments(trained_run(), f"mode={mode}", f"data.cache_dir={tmp_path / 'cache'}", *change)
    assert run_train(*arguments) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.startswith(f"valkyrie-train: {group}.tokenizer=gpt2 ") and err.count("\n") == 1
    assert f"use {group}.tokenizer=bytes" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_closed_pipe_is_not_an_error(tmp_path: Path) -> None:
    job = start_training(*resume_arguments(trained_run(), "mode=generate", "sample_tokens=500"), cwd=tmp_path)
    assert job.stdout is not None and job.stderr is not None
    assert "at step 6" in job.stdout.readline()
    job.stdout.close()
    err = job.stderr.read()
    job.wait(60)
    job.stderr.close()
    assert not re.search("Traceback|Exception ignored|Errno", err)


def test_listing_checkpoints_fails_if_one_is_damaged(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = copy_run(trained_run(), tmp_path)
    assert run_train("mode=checkpoints", f"runs={tmp_path}") == 0
    (line,) = capfd.readouterr().out.splitlines()
    assert re.match(r"run .*\b6\b.*\bdurable\b.* [\d.]+ kB,.* 20[\d: +-]+", line)
    state = folder / "checkpoints" / "6" / "state" / "_METADATA"
    state.write_text(state.read_text().replace("1", "2", 1))
    assert run_train("mode=checkpoints", f"runs={tmp_path}") == 1
    (damaged,) = capfd.readouterr().out.splitlines()
    assert "state/_METADATA" in damaged and "_METADATA" not in line
