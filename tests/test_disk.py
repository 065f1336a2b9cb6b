"""Tests of disks that are full, read-only or gone: the message names the path, and training survives if it can."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
from rich.console import Console

from helpers import compose_run
from runs import ONE_DEVICE_ARGUMENTS, TINY_ARGUMENTS, copy_run, run_train, tiny_arguments, trained_run
from valkyrie.checkpoint import latest_step, tier
from valkyrie.config.run import Run
from valkyrie.paths import DiskError, cache_problem, cache_root, disk_errors, write_atomic
from valkyrie.report.page import _vega_script
from valkyrie.runs.goodput import FINISHED, GOODPUT_FILE, read_starts
from valkyrie.runs.tracking import Tracker, read_metrics
from valkyrie.runs.wandb_writer import TrackingConfig, WandbMode
from valkyrie.search import modes
from valkyrie.search.compile import runner
from valkyrie.search.compile.prediction import (
    CompileOutcome,
    CompileStatus,
    Measurement,
    MemoryReport,
    Prediction,
)
from valkyrie.search.measure import measure
from valkyrie.train import trainer
from valkyrie.train.devices import configure_jax
from valkyrie.train.screen import Screen, make_console

DISK_FULL_ERROR = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def make_failing_write(times: float) -> Callable[..., None]:
    """Return a function whose first `times` calls raise "no space left on device". Later calls do nothing."""
    remaining = [times]

    def write(*_: Any, **__: Any) -> None:
        remaining[0] -= 1
        if remaining[0] >= 0:
            raise DISK_FULL_ERROR

    return write


@pytest.fixture
def blocking_file(tmp_path: Path) -> Path:
    """A file used as a parent folder. Nobody, not even root, can create a folder under it."""
    (tmp_path / "file").touch()
    return tmp_path / "file"


def test_the_error_for_an_unwritable_path_names_it_and_the_remedy(blocking_file: Path):
    for path, remedy in ((blocking_file / "run" / "x", "runs=DIR"), (cache_root() / "x", "VALKYRIE_CACHE=DIR")):
        with pytest.raises(DiskError) as caught, disk_errors(path):
            raise DISK_FULL_ERROR
        assert str(caught.value).startswith(f"{path} cannot be written") and str(caught.value).endswith(f" {remedy}.")
    with pytest.raises(DiskError, match=r"run.yaml .*directory\).* runs=DIR"):
        write_atomic(blocking_file / "run.yaml", "text")


def test_a_runs_path_that_is_not_a_folder_is_refused_in_one_line(
    blocking_file: Path, capsys: pytest.CaptureFixture[str]
):
    assert run_train(*tiny_arguments(blocking_file / "runs", "steps=1")) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"valkyrie-train: runs={blocking_file / 'runs'} cannot be a folder") and err.count("\n") == 1


@pytest.mark.parametrize("mode", ["compile", "measure"])
def test_a_result_that_cannot_be_stored_is_refused_before_the_work(
    blocking_file: Path, mode: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(measure, "measure", lambda *_: pytest.fail("measured"))
    monkeypatch.setattr(modes, "compile_and_summarise", lambda *_: pytest.fail("compiled"))
    assert run_train(*TINY_ARGUMENTS, *ONE_DEVICE_ARGUMENTS, f"mode={mode}", f"runs={blocking_file}", "name=mine") == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"valkyrie-train: runs={blocking_file} is a file, not a folder."


@pytest.mark.parametrize("mode", ["compile", "measure"])
def test_a_result_of_another_layout_is_not_replaced(
    tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(measure, "measure", lambda run, *_: Measurement(run.layout_record(), CompileStatus.failed, "x"))

    def compile_run(run: Run, *_: Any) -> Any:
        return None, Prediction(run.layout_record(), CompileStatus.failed, "x"), None

    monkeypatch.setattr(modes, "compile_and_summarise", compile_run)
    arguments = (*TINY_ARGUMENTS, *ONE_DEVICE_ARGUMENTS, f"mode={mode}", f"runs={tmp_path}", "name=mine")
    for _ in range(2):  # the same layout is compiled or timed again
        (tmp_path / "mine").mkdir(exist_ok=True)
        assert run_train(*arguments, "force=true") == 3
        timeline = tmp_path / "mine" / "timeline.json"
        assert mode == "measure" or not timeline.exists(), "the timeline of an earlier compile is deleted"
        timeline.touch()
    capsys.readouterr()
    assert run_train(*arguments, "batch=6", "seq=8") == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"valkyrie-train: name=mine: {tmp_path}/mine/{mode}.json ")
    assert "batch=" in last and "seq=" in last and last.endswith(". Use another name=.")
    other_mode = {"compile": "measure", "measure": "compile"}[mode]
    assert run_train(*arguments, f"mode={other_mode}", "batch=6") == 2, "run.yaml also describes the first result"
    assert run_train(*arguments, f"mode={other_mode}") == 3


@pytest.mark.parametrize("mode", ["compile", "measure"])
def test_a_result_is_printed_although_the_disk_is_full(
    tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    memory = MemoryReport(needed=3 * 2**30, usable=2**30)

    def result(kind: type, run: Run) -> Any:
        return kind(run.layout_record(), CompileStatus.does_not_fit, "too big", memory=memory)

    monkeypatch.setattr(measure, "measure", lambda run, *_: result(Measurement, run))
    monkeypatch.setattr(modes, "compile_and_summarise", lambda run, *_: (None, result(Prediction, run), None))
    monkeypatch.setattr(modes, "write_run_files", make_failing_write(1))
    assert run_train(*TINY_ARGUMENTS, *ONE_DEVICE_ARGUMENTS, f"mode={mode}", f"runs={tmp_path}", "name=mine") == 2
    output = capsys.readouterr()
    assert "does not fit" in output.out and "no space left" in output.err.lower()


@pytest.mark.parametrize("mode", ["compile", "measure"])
def test_a_refused_layout_leaves_no_folder(tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: Any) -> Any:
        raise ValueError("refused")

    monkeypatch.setattr(measure, "measure", refuse)
    monkeypatch.setattr(modes, "compile_and_summarise", refuse)
    assert (
        run_train(*TINY_ARGUMENTS, *ONE_DEVICE_ARGUMENTS, f"mode={mode}", f"runs={tmp_path / 'runs'}", "name=mine") == 2
    )
    assert not (tmp_path / "runs" / "mine").exists()


def test_a_search_under_a_file_is_refused(blocking_file: Path, capsys: pytest.CaptureFixture[str]):
    arguments = ("mode=search", "model=gpt_tiny", "target=v5e-8", "batch=8", "mode.compiles=0")
    for runs in (blocking_file, blocking_file / "runs"):
        assert run_train(*arguments, f"runs={runs}") == 2
        err = capsys.readouterr().err
        assert err.startswith(f"valkyrie-train: runs={runs} ") and f"{blocking_file} is a file" in err


def test_a_save_on_a_full_disk_is_reported_and_the_next_save_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(tier, "write_checksums", make_failing_write(1))
    assert run_train(*tiny_arguments(tmp_path, "steps=6", "checkpoint.every=2")) == 0
    out, err = capfd.readouterr()
    folder = tmp_path / "run" / "checkpoints"
    (note,) = [line for line in out.splitlines() if "not be saved" in line]
    assert "step 2" in note and str(folder) in note
    assert "Traceback" not in out + err and "ERROR" not in err
    assert sorted(path.name for path in folder.iterdir()) == ["4", "6"]


@pytest.mark.slow
def test_a_command_that_cannot_save_its_last_state_names_the_newest_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    assert run_train(*tiny_arguments(tmp_path, "steps=2")) == 0
    monkeypatch.setattr(tier, "write_checksums", make_failing_write(float("inf")))
    capfd.readouterr()
    assert run_train(*tiny_arguments(tmp_path, "steps=4")) == 1
    out, err = capfd.readouterr()
    assert "step 4" in err.splitlines()[-1] and "step 2" in err
    assert f"resume={tmp_path / 'run'}" in err and "Traceback" not in out + err
    assert latest_step(tmp_path / "run") == 2
    assert [start.end for start in read_starts(tmp_path / "run" / GOODPUT_FILE)] == [FINISHED, None]
    assert "summary" in read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]


@pytest.mark.slow
def test_the_retry_of_the_last_save_stores_its_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tier, "write_checksums", make_failing_write(1))
    assert run_train(*tiny_arguments(tmp_path, "steps=2", "checkpoint.every=null", "checkpoint.keep_best=1")) == 0
    assert "metrics" in os.listdir(tmp_path / "run" / "checkpoints" / "2")


def test_a_resume_on_a_read_only_disk_suggests_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    def fail(_: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    folder = copy_run(trained_run(), tmp_path / "my runs")
    monkeypatch.setattr(trainer, "write_lock", fail)
    for arguments in ((f"resume={folder}",), tiny_arguments(folder.parent)):
        assert run_train(*arguments, "steps=8") == 2
        (line,) = [line for line in capfd.readouterr().err.splitlines() if "read-only file system" in line]
        assert f"cp -r '{folder}' DIR" in line and "resume=DIR/run" in line


def test_records_are_kept_in_memory_while_the_disk_is_full(tmp_path: Path):
    tracker = Tracker(TrackingConfig(wandb=WandbMode.off), tmp_path, run_name="run", fields={}, group="g")
    assert tracker.log({"loss": 1.0}, 1) is None
    original_file, failing_writes = tracker._file, [0, 5]

    class FullFile:
        """Fake file on a disk that fills up in the middle of a line."""

        def write(self, body: bytes) -> int:
            if failing_writes and (room := failing_writes.pop()):
                return original_file.write(body[:room])
            raise DISK_FULL_ERROR

        def close(self) -> None:
            original_file.close()

    tracker._file = FullFile()
    note = tracker.log({"loss": 2.0}, 2)
    assert note is not None and "kept in memory" in note
    assert tracker.log({"loss": 3.0}, 3) is None
    assert tracker.lost_records_note is not None and "last 2 records" in tracker.lost_records_note
    tracker._file = original_file
    assert "written again" in str(tracker.log({"loss": 4.0}, 4))
    tracker.close()
    assert [record["loss"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1.0, 2.0, 3.0, 4.0]


def test_a_cache_folder_is_tested_before_use(tmp_path: Path, blocking_file: Path):
    assert cache_problem(tmp_path / "cache" / "xla") is None
    assert list((tmp_path / "cache" / "xla").iterdir()) == []
    problem = cache_problem(blocking_file / "cache")
    assert problem is not None and problem.startswith(f"{blocking_file / 'cache'} ") and "not a directory" in problem


def test_data_is_prepared_elsewhere_if_its_cache_cannot_be_written(
    tmp_path: Path, blocking_file: Path, capsys: pytest.CaptureFixture[str]
):
    assert run_train(*tiny_arguments(tmp_path, "steps=1", f"data.cache_dir={blocking_file / 'cache'}")) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{blocking_file / 'cache'} cannot be written") and "data.cache_dir=DIR" in out


def test_compiled_programs_are_not_cached_if_the_cache_cannot_be_written(
    blocking_file: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("VALKYRIE_CACHE", str(blocking_file / "cache"))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    cache_dir, lines = jax.config.jax_compilation_cache_dir, []
    run = compose_run(*TINY_ARGUMENTS, "mesh=1x1x1", "partition=dp")
    configure_jax(run, lines.append)
    assert jax.config.jax_compilation_cache_dir == cache_dir
    assert len(lines) == 1 and "VALKYRIE_CACHE=DIR" in lines[0]
    failed = CompileOutcome(CompileStatus.failed, "it was not tried")
    monkeypatch.setattr(runner, "_compile_in_child", lambda *_: failed)
    compiled = runner.compile_layout(run, 1)
    assert compiled.status is CompileStatus.failed and compiled.note is not None
    assert "VALKYRIE_CACHE=DIR" in compiled.note


def test_a_full_disk_for_the_output_does_not_stop_a_training(capfd: pytest.CaptureFixture[str]):
    class FullOutput(io.StringIO):
        def write(self, text: str) -> int:
            raise DISK_FULL_ERROR

    screen = Screen(Console(file=FullOutput()), 2, 0, simulated=True)
    screen.say("one")
    screen.say("two")
    assert not screen.is_closed
    err = capfd.readouterr().err
    assert "training continues" in err and err.count("\n") == 1


def test_a_message_with_brackets_is_printed_as_it_is():
    output = io.StringIO()
    Screen(make_console(output), 2, 0, simulated=True).say("/a[/b] cannot be written [source locations='c.cc:1']")
    assert output.getvalue() == "/a[/b] cannot be written [source locations='c.cc:1']\n"


def test_a_cache_that_is_a_file_is_refused_before_any_work(
    blocking_file: Path, command: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("VALKYRIE_CACHE", str(blocking_file))
    result = command("mode=show", "model=gpt_tiny")
    assert result.status == 2 and f"VALKYRIE_CACHE={blocking_file} is a file" in result.err
    monkeypatch.setenv("VALKYRIE_CACHE", "")
    assert cache_root() == Path("~/.cache/valkyrie").expanduser()


def test_a_page_is_rendered_if_the_cache_cannot_be_written(blocking_file: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("vl_convert")
    monkeypatch.setenv("VALKYRIE_CACHE", str(blocking_file / "cache"))
    assert "vegaEmbed" in _vega_script()


def test_a_damaged_script_in_the_cache_is_bundled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    vl_convert = pytest.importorskip("vl_convert")
    monkeypatch.setenv("VALKYRIE_CACHE", str(tmp_path))
    monkeypatch.setattr(vl_convert, "javascript_bundle", lambda _: "vegaEmbed = 1;\n\r\n")
    script = _vega_script()
    (bundle,) = (tmp_path / "report").iterdir()
    content = bundle.read_bytes()
    for damaged in (content[:-4], b"", b"\xff\xfe", script.encode()):
        bundle.write_bytes(damaged)
        assert _vega_script() == script and bundle.read_bytes() == content
    monkeypatch.setattr(vl_convert, "javascript_bundle", lambda _: pytest.fail("bundled"))
    assert _vega_script() == script


def test_a_file_in_place_of_the_default_cache_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache/valkyrie").touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("VALKYRIE_CACHE")
    with pytest.raises(ValueError, match=rf"^{tmp_path}/.cache/valkyrie .* file\b.* VALKYRIE_CACHE=DIR\b"):
        cache_root()
