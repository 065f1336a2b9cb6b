"""Tests of mistakes and faults by cause: the message names the file or key, without a traceback.

The tests run in this process where possible. `test_journeys.py` has the slow ones, which each start a process.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import subprocess
import sys
import time
import types
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import pytest
from omegaconf import OmegaConf

import valkyrie
from reported import make_trial
from runs import ONE_DEVICE_ARGUMENTS, TINY_ARGUMENTS, run_train
from valkyrie.checkpoint import CheckpointConfig, Checkpoints
from valkyrie.cli import predict
from valkyrie.cli.parser import output_error
from valkyrie.compiled.dumped import MAX_FILE_BYTES, read_dumped_module
from valkyrie.config.mistakes import refuse_typos
from valkyrie.config.refusals import describe_unknown_key
from valkyrie.paths import DiskError
from valkyrie.processes import ending
from valkyrie.report.text import as_csv, as_markdown
from valkyrie.runs.folder import choose_run_folder, claim_run_folder, split_override
from valkyrie.sweep.rows import make_rows
from valkyrie.tasks.puzzles import puzzle_losses
from valkyrie.units import escape_control_characters

MISTAKES = {
    "prompt=\udcff\udcfe": "prompt= has bytes that are not UTF-8 (ff fe)",
    "--config-dir=\udcff": "--config-dir= has bytes that are not UTF-8 (ff)",
    "name=it's mine": "name=it's mine: ' is not allowed",
    "resume=my run, v=1 'ü'": "resume=my run, v=1 'ü': there is no such run",
    f"name={'a' * 300}": "name=aaaaaaaaaaaa... is too long: at most 200 bytes",
    "task.foo=1": "task=NAME. Known: next_token, puzzles",
    "+task.foo=1": "task.foo is set, but no task",
    f"resume={'a' * 300}": "file name too long",
}


@pytest.mark.parametrize("argument", MISTAKES)
def test_the_message_for_a_mistake_names_its_key(argument: str, capfd: pytest.CaptureFixture[str]):
    assert run_train(*TINY_ARGUMENTS, *ONE_DEVICE_ARGUMENTS, argument, "mode=show") == 2
    text = capfd.readouterr().err
    assert MISTAKES[argument] in text and "Traceback" not in text


def test_a_folder_name_that_is_not_utf8_is_handled(tmp_path: Path, monkeypatch, capfd: pytest.CaptureFixture[str]):
    folder = os.path.join(os.fsencode(tmp_path), b"caf\xe9")
    os.mkdir(folder)
    monkeypatch.chdir(os.fsdecode(folder))
    assert run_train("mode=show") == 2
    err = capfd.readouterr().err
    assert "current folder" in err and "UTF-8 (e9)" in err


def test_disabled_jit_is_refused(monkeypatch, capfd: pytest.CaptureFixture[str]):
    monkeypatch.setenv("JAX_DISABLE_JIT", "True")
    assert run_train(*TINY_ARGUMENTS, *ONE_DEVICE_ARGUMENTS, "steps=1") == 2
    assert "JAX_DISABLE_JIT=True is set" in capfd.readouterr().err


# Only Linux has a device on which every write fails with "no space left". Filling a real disk needs root and a mount.
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's /dev/full")
@pytest.mark.parametrize(
    "variables", [{"PYTHONUNBUFFERED": "1"}, pytest.param({"PYTHONUNBUFFERED": ""}, marks=pytest.mark.slow)]
)
def test_a_full_output_device_is_reported(variables: dict[str, str]):
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [sys.executable, "-m", "valkyrie.cli.train", "mode=show", "model=gpt_tiny"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **variables},
        )
    assert result.returncode == 2 and "(stdout)" in result.stderr and "no space left" in result.stderr


def test_an_ascii_terminal_shows_question_marks():
    line = "from valkyrie.processes.interrupt import repair_std_streams as r; r(); print('a \\u00b7 b')"
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    result = subprocess.run([sys.executable, "-c", line], capture_output=True, env={**os.environ, **plain})
    assert result.stdout == b"a ? b\n", result.stderr


def test_trainings_started_in_the_same_second_have_separate_folders(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda form: "20260101-000000")
    run = valkyrie.compose(*TINY_ARGUMENTS, *ONE_DEVICE_ARGUMENTS)
    folders = [choose_run_folder(run) for _ in range(3)]
    assert len(set(folders)) == 1 and not Path("runs").exists(), "a refusal leaves nothing"
    claimed = [claim_run_folder(run, folder) for folder in folders]
    assert [folder.is_dir() for folder in claimed] == [True] * 3 and len(set(claimed)) == 3
    named = run.changed(name="one")
    assert len({claim_run_folder(named, choose_run_folder(named)) for _ in range(2)}) == 1


def test_control_characters_in_files_are_not_printed():
    hostile = make_trial("x", 10.0, overrides=["model=\x1b]0;owned\x07"])
    hostile = replace(hostile, sweep="\x1b[2J", about=replace(hostile.about, model="=cmd|'/c calc'!A0"), reason="\t=1")
    rows = make_rows({Path("x"): [hostile]})
    assert "\x1b" not in as_markdown(rows) and "\x1b" not in as_csv(rows)
    assert "'=cmd" in as_csv(rows) and ",=cmd" not in as_csv(rows) and "'\t=1" in as_csv(rows)
    assert escape_control_characters("a\x1b[0m\n\tb\x07") == "a\\x1b[0m\n\tb\\x07"


@pytest.mark.parametrize(
    ("arguments", "phrase"),
    [
        (["--json", "step.hlo"], "--json step.hlo would overwrite the input module"),
        (["--json", "a.json", "--timeline", "./a.json"], "--timeline a.json would overwrite the file of --json"),
        (["--html", "mine.py"], "--html mine.py: the name must end in .html"),
        (["--json", "mine.py"], "--json mine.py: the name must end in .json"),
        (["--timeline", "nowhere/t.json"], "there is no folder nowhere"),
        (["--tokens", "-5"], "tokens=-5: must be above 0"),
        (["--flops", "nan"], "flops=nan: must be a finite number"),
    ],
)
def test_predict_refuses_to_overwrite_inputs_and_negative_numbers(
    tmp_path: Path, monkeypatch, arguments: list[str], phrase: str, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "step.hlo").write_text("HloModule a")
    with pytest.raises(SystemExit) as error:
        predict.main(["step.hlo", "--target", "v5e-1", "--mesh", "data=1", *arguments])
    assert error.value.code == 2
    assert phrase in capfd.readouterr().err
    assert (tmp_path / "step.hlo").read_text() == "HloModule a"


def test_an_implausibly_large_module_is_not_read(tmp_path: Path):
    with (tmp_path / "step.hlo").open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(ValueError, match="too large for a module"):
        read_dumped_module(tmp_path / "step.hlo")


def test_a_search_json_without_a_request_is_refused(tmp_path: Path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    for text, words in {"{}": "was not written by mode=search", "[]": "cannot be read"}.items():
        (tmp_path / "runs" / "a").mkdir(parents=True, exist_ok=True)
        (tmp_path / "runs" / "a" / "search.json").write_text(text)
        assert run_train("mode=search", "target=v5e-4", "model=gpt_tiny", "name=a") == 2
        error = capfd.readouterr().err
        assert words in error and "search.json" in error


@pytest.mark.parametrize(
    "statement",
    [
        "threading.Thread(target=time.sleep, args=(60,)).start()",
        "pool = ThreadPoolExecutor(); pool.submit(time.sleep, 60)",
    ],
)
def test_threads_of_libraries_do_not_keep_a_failed_process_alive(statement: str):
    line = (
        "import threading, time, sys; from concurrent.futures import ThreadPoolExecutor\n"
        f"from valkyrie.processes.ending import limit_exit\n{statement}; limit_exit(3, 0.2); sys.exit(2)"
    )
    start_time = time.monotonic()
    assert subprocess.run([sys.executable, "-c", line], timeout=50).returncode == 3
    assert time.monotonic() - start_time < 30


def test_a_failed_command_limits_its_exit_once(monkeypatch: pytest.MonkeyPatch):
    limits: list[int] = []
    monkeypatch.setattr(ending, "limit_exit", limits.append)
    for error, status in {
        SystemExit(2): [2],
        SystemExit("no"): [1],
        SystemExit(0): [],
        SystemExit(): [],
        OSError(): [1],
    }.items():
        limits.clear()
        with pytest.raises(type(error)), ending.limit_failed_exit():
            raise error
        assert limits == status


def test_an_argument_that_is_not_utf8_is_named_without_an_equals_sign():
    with pytest.raises(ValueError, match=r"^/tmp/\? .*UTF-8 \(ff\)"):
        refuse_typos(["--config-dir", "/tmp/\udcff"], multirun=False)


def test_a_sweep_may_vary_which_size_of_a_batch_is_set():
    refuse_typos(["-m", "batch=2,4", "batch_tokens=null,1024"], multirun=True)
    with pytest.raises(ValueError, match=r"^batch=2,4 and batch_tokens=1024,2048 "):
        refuse_typos(["-m", "batch=2,4", "batch_tokens=1024,2048"], multirun=True)


def test_a_saved_run_may_have_a_longer_name():
    run = valkyrie.compose(*TINY_ARGUMENTS, *ONE_DEVICE_ARGUMENTS)
    config = replace(run.config, name="a" * 201)
    assert any(problem.key == "name" for problem in replace(run, config=config).problems())
    assert not replace(run, config=replace(config, resume="a")).problems()


def test_an_error_of_reading_does_not_probe_stdout(capsys: pytest.CaptureFixture[str]):
    assert output_error(OSError(errno.ETIMEDOUT, "timed out")) is None
    assert capsys.readouterr().out == ""


def test_the_limit_of_the_exit_does_not_begin_before_the_exit():
    line = (
        "import time, sys; from valkyrie.processes.ending import limit_exit\n"
        "limit_exit(3, 0.2); time.sleep(1); sys.exit(2)"
    )
    assert subprocess.run([sys.executable, "-c", line], timeout=50).returncode == 2


def test_a_puzzle_without_labels_does_not_count_as_solved():
    answers = types.SimpleNamespace(logits=jnp.zeros((2, 3, 4)), halt_logits=jnp.zeros(2))
    losses = puzzle_losses(answers, jnp.asarray([[-1, -1, -1], [0, -1, 0]]))
    assert losses.exact.tolist() == [False, True]
    assert losses.halt[0] == 0 < losses.halt[1]


def test_the_refusal_of_a_key_in_a_free_group_says_how_to_add_it():
    problem = describe_unknown_key("hydra.sweeper.space.vary.nope", OmegaConf.create({}))
    assert "+hydra.sweeper.space.vary.nope=VALUE" in str(problem) and "Known" not in str(problem)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("+a.b='x y'", "x y"),
        ('a.b="x"', "x"),
        ("a.b=x 'y'", "x 'y'"),
        ("a.b='x", "'x"),
        ("a.b='", "'"),
        ("a.b=''", ""),
        (r"a.b='it\'s'", "it's"),
    ],
)
def test_only_a_pair_of_quotes_around_a_value_is_removed(argument: str, value: str):
    assert split_override(argument) == ("a.b", value)


@pytest.mark.slow
def test_a_resumed_run_keeps_its_tokenizer_and_its_finished_steps(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    train_arguments = (*TINY_ARGUMENTS, *ONE_DEVICE_ARGUMENTS, f"runs={tmp_path}")
    assert run_train(*train_arguments, "steps=3", "name=base") == 0
    resume_arguments = (f"runs={tmp_path}", "resume=base")
    capfd.readouterr()
    assert run_train(*resume_arguments, "data.tokenizer=gpt2", "steps=6") == 2
    error = capfd.readouterr().err
    assert error.startswith("valkyrie-train: data.tokenizer=gpt2 ") and "tokenizer=bytes" in error
    assert "without resume=" in error and "vocab_size=" not in error
    assert run_train(*resume_arguments, "steps=2") == 0
    assert OmegaConf.load(tmp_path / "base" / "run.yaml").steps == 3
    (tmp_path / "base" / "checkpoints" / "6").mkdir()
    capfd.readouterr()
    assert run_train(*resume_arguments, "mode=checkpoints") == 1
    output = capfd.readouterr().out
    assert "base step 3: durable" in output and "base step 6: durable, 0 B, damaged: " in output
    assert run_train(*resume_arguments, "steps=4") == 0
    assert " step 6 in " in (error := capfd.readouterr().err) and "empty. Continuing from step 3." in error


def make_orbax_fail(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Make Orbax raise an error when it opens a folder, and make the packages for buckets appear installed."""

    def fail(*_: object, **__: object) -> None:
        logging.getLogger("gcsfs").error("Traceback")
        raise error

    monkeypatch.setattr("orbax.checkpoint.CheckpointManager", fail)
    monkeypatch.setattr("valkyrie.buckets.find_spec", lambda name: name)
    monkeypatch.setattr("valkyrie.checkpoint.location.finished_steps_in", lambda root: [])  # needs the network


def test_an_unreachable_bucket_is_named(
    tmp_path: Path, monkeypatch, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.ERROR, "gcsfs")
    make_orbax_fail(monkeypatch, OSError(-2, "Name or service not known"))
    assert (
        run_train(*TINY_ARGUMENTS, *ONE_DEVICE_ARGUMENTS, "steps=1", f"runs={tmp_path}", "checkpoint.folder=gs://x")
        == 2
    )
    words = "checkpoint.folder=gs://x cannot be reached (name or service not known)"
    error = capfd.readouterr().err
    assert words in error and "Traceback" not in error + caplog.text
    (tmp_path / "checkpoints.path").write_text("gs://x/run\n")
    with pytest.raises(DiskError, match=re.escape(words)):
        Checkpoints(tmp_path, CheckpointConfig(), read_only=True)


def test_a_programming_error_is_not_blamed_on_the_bucket(tmp_path: Path, monkeypatch):
    make_orbax_fail(monkeypatch, TypeError("unexpected argument"))
    with pytest.raises(TypeError, match="unexpected"):
        Checkpoints(tmp_path, CheckpointConfig(folder="gs://x"))


def test_a_full_run_folder_is_not_blamed_on_the_bucket(tmp_path: Path, monkeypatch, capfd: pytest.CaptureFixture[str]):
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("valkyrie.buckets.find_spec", lambda name: name)
    monkeypatch.setattr("valkyrie.checkpoint.location.finished_steps_in", lambda path: [])
    monkeypatch.setattr("valkyrie.checkpoint.location.write_atomic", fail)
    assert (
        run_train(
            *TINY_ARGUMENTS,
            *ONE_DEVICE_ARGUMENTS,
            "steps=1",
            f"runs={tmp_path}",
            "name=full",
            "checkpoint.folder=gs://x",
        )
        == 2
    )
    error = capfd.readouterr().err
    assert f"{tmp_path}/full " in error and "(no space left on device)" in error and "cannot be reached" not in error
