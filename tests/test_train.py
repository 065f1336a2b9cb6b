"""Tests of training with `valkyrie-train`: the run folder, output, evaluation, Ctrl-C, signals and NaN losses."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runs import (
    ONE_DEVICE_ARGUMENTS,
    TINY_ARGUMENTS,
    open_checkpoints,
    run_train,
    saved_arrays,
    start_python,
    start_training,
    tiny_arguments,
    trained_run,
    training_records,
)
from valkyrie.data.manifest import PreparedText, Split
from valkyrie.data.sources import text as text_source
from valkyrie.data.sources.synthetic import entropy
from valkyrie.processes.team import ALONE
from valkyrie.runs.tracking import read_metrics
from valkyrie.train import modes, trainer
from valkyrie.train.compiled import StepExecutable
from valkyrie.units import GIB

KEYS = {"step", "loss", "grad_norm", "learning_rate", "tokens", "step_s", "tokens_per_second", "mfu"}


def test_the_loss_falls_towards_the_entropy_of_the_data(tmp_path: Path) -> None:
    arguments = ["steps=60", "optimizer.learning_rate=1e-2", "eval_every=20", "data.documents=300"]
    assert run_train(*tiny_arguments(tmp_path, *arguments)) == 0
    steps = training_records(tmp_path / "run")
    assert steps[1]["loss"] == pytest.approx(math.log(257), abs=0.2)
    last = np.mean([steps[step]["loss"] for step in range(51, 61)])
    assert last < 2.0, "the loss does not fall towards the entropy of the data"
    assert last > entropy()
    evaluations = [r["eval_loss"] for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if "eval_loss" in r]
    assert len(evaluations) == 3
    assert evaluations[-1] < evaluations[0] < steps[1]["loss"]


@pytest.mark.slow
def test_a_signal_in_the_last_step_does_not_stop_a_finished_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trainer.Interrupt, "should_stop", lambda self, step, *, force=False: step == 2)
    assert run_train(*tiny_arguments(tmp_path, "steps=2")) == 0
    assert "stopped at step" not in capfd.readouterr().out


def test_the_files_of_a_run_folder() -> None:
    folder = trained_run()
    assert {"run.yaml", "versions.json", "metrics.jsonl", "checkpoints"} <= set(os.listdir(folder))
    steps = training_records(folder)
    assert sorted(steps) == [1, 2, 3, 4, 5, 6]
    assert steps[6].keys() >= KEYS and steps[6]["tokens"] == 8 * 16
    assert steps[1]["tokens_per_second"] is None, "the first step pays for warming up"
    assert steps[6]["tokens_per_second"] == pytest.approx(8 * 16 / steps[6]["step_s"])
    summary = read_metrics(folder / "metrics.jsonl")[-1]["summary"]
    assert summary["finished"] and summary["steps"] == 6
    assert summary["compile_s"] > 0 and summary["first_step_s"] > 0
    assert json.loads((folder / "versions.json").read_text()).keys() >= {"jax", "flax", "optax", "numpy"}
    made_by = (folder / "run.yaml").read_text().splitlines()[1]
    label, _, arguments = made_by.partition("valkyrie-train ")
    assert label.startswith("# ") and arguments.split()[:2] == ["model=s5_tiny", "model.layers=1"]


@pytest.mark.slow
def test_training_and_measuring_count_memory_alike(tmp_path: Path) -> None:
    assert run_train(*tiny_arguments(tmp_path, "steps=6", "mode=measure", "mode.repeats=1", "mode.warmup=0")) == 0
    measured = json.loads((tmp_path / "run" / "measure.json").read_text())["memory"]["peak"]
    summary = read_metrics(trained_run() / "metrics.jsonl")[-1]["summary"]
    assert summary["hbm_gib"] * GIB == measured > 0


def test_the_output_says_simulated_and_names_the_next_command(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_train(*tiny_arguments(tmp_path, "steps=6")) == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert "SIMULATED: 1 CPU" in out
    rates = [line for line in out.splitlines() if "tokens/s" in line]
    assert rates and all("simulated" in line for line in rates)
    assert f"run folder: {tmp_path / 'run'}" in out
    next_command = re.findall(r"next: (.*)", out)[0]
    assert shlex.split(next_command, comments=True) == ["valkyrie-train", f"resume={tmp_path / 'run'}", "steps=12"]
    assert "# continues to step 12. " in next_command and ";" not in next_command
    assert "step 6: validation" in out


@pytest.mark.slow
def test_run_yaml_reproduces_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = trained_run()
    monkeypatch.chdir(folder.parent)
    assert run_train("--config-path", folder.name, "--config-name", "run", f"runs={tmp_path}", "name=again") == 0
    repeated = training_records(tmp_path / "again")
    for step, record in training_records(folder).items():
        assert (repeated[step]["loss"], repeated[step]["grad_norm"]) == (record["loss"], record["grad_norm"])

    def settings(path: Path) -> list[str]:
        return [line for line in path.read_text().splitlines() if not re.match(r"#|runs:|name: (run|again)", line)]

    assert settings(tmp_path / "again" / "run.yaml") == settings(folder / "run.yaml")


def test_too_little_text_is_refused_in_one_line_and_leaves_no_folder(tmp_path: Path) -> None:
    (tmp_path / "little.md").write_text("Hardly any text.")
    text = ("data=text", "data.paths=[little.md]", f"data.cache_dir={tmp_path / 'cache'}", "seq=512")
    settings = [a for a in tiny_arguments(tmp_path / "runs") if not a.startswith(("data", "seq="))]
    job = start_training(*settings, *text, cwd=tmp_path)
    _, err = job.communicate(timeout=120)
    assert job.returncode == 2
    assert re.fullmatch(r"valkyrie-train: data=text .*\n", err) and "too few" in err
    assert not (tmp_path / "runs").exists()


def poison(monkeypatch: pytest.MonkeyPatch, at_step: int, parameter: str) -> None:
    """Set the first number of a parameter of the first block's mixer to NaN before step `at_step`."""
    compile_step = trainer.compile_step

    def poisoned(program: Any) -> StepExecutable:
        compiled = compile_step(program)

        def advance(state: Any, batch: Any) -> Any:
            if int(state.step) == at_step - 1:
                values = state.parameters["segment_0"]["block_0"]["mixer"]
                values[parameter] = values[parameter].at[(0,) * values[parameter].ndim].set(math.nan)
            return compiled.advance(state, batch)

        return compiled._replace(advance=advance)

    monkeypatch.setattr(trainer, "compile_step", poisoned)


@pytest.mark.parametrize(
    ("at_step", "checkpoint"),
    [(4, "step 2"), pytest.param(3, "step 2 (its parameters were not checked)", marks=pytest.mark.slow)],
)
def test_a_loss_that_is_not_finite_stops_the_run_and_is_not_saved(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    at_step: int,
    checkpoint: str,
) -> None:
    poison(monkeypatch, at_step=at_step, parameter="log_step")
    assert run_train(*tiny_arguments(tmp_path, "steps=8", "checkpoint.every=2")) == 1
    out, err = capfd.readouterr()
    assert f"step {at_step}: " in err and "nan" in err and f"Newest checkpoint: {checkpoint}." in err
    assert re.search(r"\d+ of \d+ gradients .*, starting with \w+", err), (
        "the first parameter without a finite gradient is named"
    )
    assert "Traceback" not in out + err
    folder = tmp_path / "run"
    assert sorted(training_records(folder)) == [*range(1, at_step)]
    assert os.listdir(folder / "checkpoints") == ["2"]
    assert all(np.isfinite(a).all() for a in saved_arrays(folder).values() if a.dtype.kind == "f")


@pytest.mark.slow
def test_debug_names_the_operation_that_produces_a_nan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    poison(monkeypatch, at_step=2, parameter="log_step")
    assert run_train(*tiny_arguments(tmp_path, "steps=3", "debug=nans")) == 1
    err = capfd.readouterr().err
    place = re.search(r"debug=nans: .* (\w+), at (\S+):\d+ in ", err)
    assert place is not None and place[1] not in ("scan", "jit", "pjit")
    assert Path(place[2]).is_relative_to(Path(trainer.__file__).parents[1])


def test_the_location_of_a_nan_is_in_valkyrie_or_in_a_users_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other packages are often in a folder of the checkout, `valkyrie/.venv`."""
    library = tmp_path / "valkyrie" / "site-packages"
    library.mkdir(parents=True)
    (library / "nan_library.py").write_text("def multiply():\n    raise FloatingPointError('nan')\n")
    (tmp_path / "nan_model.py").write_text("from nan_library import multiply\n\ndef apply():\n    multiply()\n")
    for folder in (library, tmp_path):
        monkeypatch.syspath_prepend(folder)
    for modules, place in (("", "team.py"), (str(tmp_path), "nan_model.py")):
        monkeypatch.setenv("VALKYRIE_MODULES", modules)
        with pytest.raises(FloatingPointError) as caught:
            ALONE.broadcast_from_leader("a value", import_module("nan_model").apply)
        assert f"/{place}:" in modes._nan_message(caught.value)  # pyright: ignore[reportPrivateUsage]


def test_every_validation_token_counts_once_and_bits_per_byte_are_right() -> None:
    """Compares the evaluator with a float64 sum over all windows, computed from the logits."""
    import jax.numpy as jnp

    from helpers import compose_run, make_program
    from valkyrie.data.loader import open_split
    from valkyrie.data.prepare import prepare
    from valkyrie.data.tokenizer import load_tokenizer
    from valkyrie.train.evaluate import Evaluator

    run = compose_run(*TINY_ARGUMENTS, *ONE_DEVICE_ARGUMENTS, "data.validation_fraction=0.15")
    prepared, tokenizer = prepare(run.config.data, "bytes"), load_tokenizer("bytes")
    program = make_program(run)
    parameters = program.init(0).parameters
    metrics = Evaluator(program, prepared, tokenizer)(parameters, None)

    tokens = np.asarray(open_split(prepared, "validation").read(0, 10**9))
    targets, seq = len(tokens) - 1, run.config.seq
    assert metrics["eval_tokens"] == targets
    assert targets % seq and targets > seq * run.config.batch, "choose data that needs padding and a second batch"
    rows = -(-targets // seq)
    windows = np.zeros((rows, seq), np.int32)
    windows.flat[:targets] = tokens[:-1]
    document_starts = windows == tokenizer.bos_id
    segments = np.cumsum(document_starts, axis=1, dtype=np.int32) + ~document_starts[:, :1]
    logits = program.builder.module(parameters).logits(jnp.asarray(windows), jnp.asarray(segments))
    logits = np.asarray(logits, np.float64).reshape(-1, logits.shape[-1])[:targets]
    nats = np.log(np.exp(logits).sum(-1)) - logits[np.arange(targets), tokens[1:]]
    is_text = tokens[1:] != tokenizer.bos_id
    assert metrics["eval_loss"] == pytest.approx(nats.mean(), rel=1e-5)
    assert metrics["eval_bits_per_byte"] == pytest.approx(nats[is_text].sum() / is_text.sum() / math.log(2), rel=1e-5)


@pytest.mark.slow
def test_evaluation_uses_the_average_of_the_parameters() -> None:
    from helpers import compose_run, make_program
    from valkyrie.data.prepare import prepare
    from valkyrie.data.tokenizer import load_tokenizer
    from valkyrie.train.evaluate import Evaluator

    folder = trained_run("optimizer.ema_decay=0.5", "checkpoint.every=1")
    run = compose_run(*TINY_ARGUMENTS, *ONE_DEVICE_ARGUMENTS, "optimizer.ema_decay=0.5", "steps=6")
    program = make_program(run)
    stored = open_checkpoints(folder, read_only=True)
    _, state, *_ = stored.restore(program.abstract_state)
    evaluate = Evaluator(program, prepare(run.config.data, "bytes"), load_tokenizer("bytes"))
    logged = read_metrics(folder / "metrics.jsonl")[-1]["summary"]["eval_loss"]
    assert evaluate(state.ema, 1)["eval_loss"] == pytest.approx(logged, rel=1e-6)
    assert evaluate(state.parameters, 1)["eval_loss"] != pytest.approx(logged, rel=1e-4)
    stored.close()
    before = saved_arrays(folder, 5)["['ema']['embedding']"]
    expected = 0.5 * before + 0.5 * np.asarray(state.parameters["embedding"])
    np.testing.assert_allclose(np.asarray(state.ema["embedding"]), expected, rtol=1e-6)


@pytest.mark.slow
def test_step_time_includes_loading_data_but_not_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(trainer.Evaluator):
        def __call__(self, *arguments: Any) -> dict[str, float]:
            time.sleep(0.5)
            return super().__call__(*arguments)

    from valkyrie.data.loader import ShardLoader

    give = ShardLoader.__next__

    def late(self: ShardLoader) -> Any:
        time.sleep(0.05)
        return give(self)

    monkeypatch.setattr(ShardLoader, "__next__", late)
    monkeypatch.setattr(trainer, "Evaluator", Slow)
    assert run_train(*tiny_arguments(tmp_path, "steps=12", "eval_every=4")) == 0
    summary = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["summary"]
    assert 0.045 < summary["step_s"] < 0.4
    assert 0.5 < summary["data_wait"] <= 1 and summary["time/data"] > 12 * 0.05 * 0.9
    assert summary["time/evaluation"] > 3 * 0.5


def read_terminal(fd: int, until: str, timeout_s: float) -> str:
    """Return the output of a terminal without colour codes.

    Reads until the output matches the pattern `until`, `timeout_s` seconds have passed, or the other side closes the
    terminal.
    """
    seen, end = "", time.monotonic() + timeout_s
    while time.monotonic() < end and not re.search(until, seen):
        if select.select([fd], [], [], 0.2)[0]:
            try:
                seen += re.sub(r"\x1b\[[\d;]*m", "", os.read(fd, 65536).decode(errors="replace"))
            except OSError:  # the other side has closed
                break
    return seen


@pytest.mark.slow
def test_a_terminal_shows_a_live_progress_bar_and_ctrl_c_saves(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        controller, terminal = pty.openpty()
        stack.callback(os.close, controller)
        _check_terminal(tmp_path, controller, terminal, stack)


def _check_terminal(tmp_path: Path, controller: int, terminal: int, stack: contextlib.ExitStack) -> None:
    arguments = [*tiny_arguments(tmp_path, "steps=100000"), "log_every=1000"]
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"}
    own_terminal = (
        "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\nfrom valkyrie.cli.train import main\nmain()"
    )
    job = subprocess.Popen(
        [sys.executable, "-c", own_terminal, *arguments],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env=environment,
        cwd=tmp_path,
        start_new_session=True,
    )
    os.close(terminal)
    stack.callback(lambda: (job.kill(), job.wait()))
    bar = r"\d{2,}/100000 .*loss \d\.\d{4} .*tokens/s simulated.*left"
    assert re.search(bar, seen := read_terminal(controller, bar, 90)), seen[-2000:]
    os.write(controller, b"\x03")
    seen = read_terminal(controller, r"Resume with", 60)
    assert job.wait(60) == 130
    assert "stopping after" in seen and re.search(r"step \d+, saved", seen)
    assert f"Resumewith:valkyrie-trainresume={tmp_path / 'run'}" in re.sub(r"\s", "", seen), "the terminal wraps it"
    assert "Traceback" not in seen and "\x1b[?25h" in seen, "the cursor is not shown again"
    assert saved_arrays(tmp_path / "run")["['step']"] >= 2


def wait_for(path: Path, timeout_s: float = 90) -> None:
    end = time.monotonic() + timeout_s
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert path.exists()


@pytest.mark.slow
def test_ctrl_c_twice_ends_at_once(tmp_path: Path) -> None:
    stuck = (
        "import time\nfrom valkyrie.train import trainer\n"
        "def block(self, *_): open('saving', 'w').close(); time.sleep(100)\n"
        "trainer.Checkpoints.save = block\nfrom valkyrie.cli.train import main\nmain()"
    )
    arguments = tiny_arguments(tmp_path, "steps=100000", "checkpoint.every=20")
    job = start_python("-c", stuck, *arguments, cwd=tmp_path)
    wait_for(tmp_path / "saving")
    job.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert job.poll() is None
    start = time.monotonic()
    job.send_signal(signal.SIGINT)
    _, err = job.communicate(timeout=30)
    assert time.monotonic() - start < 5
    assert job.returncode == 130
    first, _, last = err.strip().splitlines()
    assert first.startswith("stopping after")
    assert re.search(r"step \d+ .*checkpoint: none$", last)


@pytest.mark.slow
@pytest.mark.parametrize("delay_s", [0.05, 0.2, 0.7, 1.3, 1.6, 2.0, 4.0, 6.0])
def test_ctrl_c_at_any_time_shows_no_traceback(tmp_path: Path, delay_s: float) -> None:
    """The signal is sent after Python's own start-up, during which Python itself handles Ctrl-C."""
    begin = "import valkyrie.cli.train\nopen('began', 'w').close()\nvalkyrie.cli.train.main()"
    arguments = tiny_arguments(tmp_path, "steps=100000", "log_every=1000")
    job = start_python("-c", begin, *arguments, cwd=tmp_path)
    wait_for(tmp_path / "began")
    time.sleep(delay_s)
    job.send_signal(signal.SIGINT)
    out, err = job.communicate(timeout=60)
    assert job.returncode == 130
    (line,) = err.strip().splitlines()
    assert line.startswith(("valkyrie-train: stopped", "stopping after"))
    assert "Traceback" not in out


@pytest.mark.parametrize(
    ("has_progress", "signals", "status", "message"),
    [
        (False, "SIGTERM", 75, "nothing to save"),
        pytest.param(True, "SIGTERM", 0, "then saving.\n", marks=pytest.mark.slow),
        pytest.param(True, "SIGTERM SIGTERM SIGUSR1", 0, "stopping after", marks=pytest.mark.slow),
        pytest.param(True, "SIGINT SIGTERM", 0, "stopping after", marks=pytest.mark.slow),
        pytest.param(True, "SIGTERM SIGINT", 0, "Press Ctrl-C again to stop immediately", marks=pytest.mark.slow),
        (True, "SIGTERM SIGINT SIGINT", 130, "Newest checkpoint: step 5"),
    ],
)
def test_a_signal_aborts_the_first_step_but_waits_for_later_steps(
    has_progress: bool, signals: str, status: int, message: str
) -> None:
    training = (
        "import os, signal, time\nfrom valkyrie.processes.interrupt import Interrupt\n"
        f"interrupt = Interrupt()\nwith interrupt.handle_signals():\n  interrupt.has_progress = {has_progress}\n"
        f"  interrupt.should_stop(7)\n  interrupt.set_checkpoints(None, lambda: 5)\n  for name in {signals.split()}:\n"
        "    os.kill(os.getpid(), getattr(signal, name))\n    time.sleep(0.3)\n  assert interrupt.stop_requested\n"
        f"  assert interrupt.is_preempted == {signals.startswith('SIGTERM')}"
    )
    result = subprocess.run([sys.executable, "-c", training], capture_output=True, text=True, timeout=60)
    line = result.stderr.splitlines(keepends=True)[-1]
    assert result.returncode == status and message in line


NOTHING_TO_SAVE = "stopped before the first step"


@pytest.mark.parametrize(
    ("mode", "name", "status", "message"),
    [
        pytest.param("train", "SIGINT", 130, NOTHING_TO_SAVE, marks=pytest.mark.slow),
        ("train", "SIGTERM", 75, NOTHING_TO_SAVE),
        pytest.param("train", "SIGUSR1", 75, NOTHING_TO_SAVE, marks=pytest.mark.slow),
        pytest.param("eval", "SIGTERM", 130, "stopped", marks=pytest.mark.slow),
    ],
)
def test_a_signal_during_the_preparation_of_data_deletes_its_partial_files(
    mode: str, name: str, status: int, message: str, tmp_path: Path
) -> None:
    program = (
        "import os, signal, time\nimport valkyrie.cli.train\nfrom valkyrie.data.writer import ShardWriter\n"
        "def finish(self):\n  print('.tmp-' in str(self._path) and self._path.is_dir(), flush=True)\n"
        f"  os.kill(os.getpid(), signal.{name})\n  time.sleep(20)\n"
        "ShardWriter.finish = finish\nvalkyrie.cli.train.main()"
    )
    cache = str(tmp_path / "cache")
    reading = mode == "eval"
    arguments = (f"resume={trained_run()}", f"data.cache_dir={cache}") if reading else tiny_arguments(tmp_path)
    job = start_python("-c", program, f"mode={mode}", *arguments, cwd=tmp_path, VALKYRIE_CACHE=cache)
    out, err = job.communicate(timeout=60)
    assert (job.returncode, out) == (status, "True\n"), "the partial folder existed before the signal"
    (line,) = err.strip().splitlines()
    assert line.startswith(f"valkyrie-train: {message}")
    assert not [path for path in (tmp_path / "cache").rglob("*.tmp-*") if path.is_dir()]


def test_ctrl_c_inside_a_finaliser_is_not_lost() -> None:
    """By default, Python prints and ignores a KeyboardInterrupt that is raised in a finaliser, and continues."""
    lost = (
        "import os, signal\nfrom valkyrie.processes.interrupt import exit_on_ctrl_c\n"
        "class Dying:\n  def __del__(self):\n    os.kill(os.getpid(), signal.SIGINT)\n    sum(range(10**8))\n"
        "with exit_on_ctrl_c('it'):\n  Dying()\nprint('went on')"
    )
    result = subprocess.run([sys.executable, "-c", lost], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "it: stopped\n")


def test_ctrl_c_ends_a_command_without_stderr_and_shows_the_cursor() -> None:
    program = (
        "import os, signal, time\nfrom valkyrie.processes.interrupt import exit_on_ctrl_c\n"
        "with exit_on_ctrl_c('it'):\n  os.close(2)\n  os.kill(os.getpid(), signal.SIGINT)\n  time.sleep(20)"
    )
    controller, terminal = pty.openpty()
    try:
        assert subprocess.run([sys.executable, "-c", program], stdout=terminal, timeout=60).returncode == 130
        assert b"\x1b[?25h" in os.read(controller, 100)
    finally:
        os.close(terminal)
        os.close(controller)


@pytest.mark.slow
def test_a_closed_pipe_saves_and_ends_the_training(tmp_path: Path) -> None:
    job = start_training(*tiny_arguments(tmp_path, "steps=100000"), cwd=tmp_path)
    assert job.stdout is not None and job.stderr is not None
    assert any(line.startswith("step 2/") for line in job.stdout)
    job.stdout.close()
    with job.stderr:
        err = job.stderr.read()
    assert job.wait(60) == 130
    assert "stdout is closed" in err and err.count("\n") == 1, err
    assert saved_arrays(tmp_path / "run")["['step']"] >= 2


@pytest.mark.slow
def test_a_closed_terminal_saves_and_ends_the_training(tmp_path: Path) -> None:
    job = start_training(*tiny_arguments(tmp_path, "steps=100000"), cwd=tmp_path)
    assert job.stdout is not None
    assert any(line.startswith("step 2/") for line in job.stdout)
    job.send_signal(signal.SIGHUP)
    out, err = job.communicate(timeout=60)
    assert job.returncode == 130 and "stopped at" in out and "stopping after" in err
    assert saved_arrays(tmp_path / "run")["['step']"] >= 2


def test_lines_reach_a_pipe_and_signals_stop_the_run_before_the_step_is_compiled(tmp_path: Path) -> None:
    process = start_training(*tiny_arguments(tmp_path, "steps=100000"), cwd=tmp_path)
    assert process.stdout is not None and process.stderr is not None
    try:
        lines = list(itertools.takewhile(lambda line: line != "compiling the step\n", process.stdout))
        assert process.poll() is None and any(line.startswith("data synthetic:") for line in lines)
        process.terminate()
        _, err = process.communicate(timeout=60)
        assert process.returncode == 75 and err.strip().startswith("valkyrie-train: stopped ") and "first step" in err
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("train", "validation", "noted"), [(95, 5, False), (91, 9, False), (67, 33, True), (98, 2, True)]
)
def test_a_validation_split_far_from_its_requested_fraction_is_reported(
    train: int, validation: int, noted: bool
) -> None:
    splits = [Split(1, tokens, tokens, ()) for tokens in (train, validation)]
    data = PreparedText("text", "", "", {}, "bytes", "", 257, 256, "uint16", *splits, path=Path("none"))
    note = text_source.Config(validation_fraction=0.05).note(data)
    assert (note is not None) == noted
    if note is not None:
        assert f" {validation}%" in note and "data.validation_fraction=0.05" in note


def test_the_validation_split_of_a_folder_with_shards_is_not_reported(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").touch()
    splits = [Split(1, tokens, tokens, ()) for tokens in (67, 33)]
    data = PreparedText("text", "", "", {}, "bytes", "", 257, 256, "uint16", *splits, path=tmp_path)
    assert text_source.Config(validation_fraction=0.025, paths=[str(tmp_path)]).note(data) is None
    assert "0.025: the validation split has 33% of" in str(text_source.Config(validation_fraction=0.025).note(data))
