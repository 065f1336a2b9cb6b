"""Tests of a new user's first day: commands as a user types them, and faults while they run.

Each test checks the exit status, the time, a phrase of the output, the absence of a traceback, and the files left.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from runs import ONE_DEVICE_ARGUMENTS, TINY_ARGUMENTS, copy_run, start_training, training_records
from valkyrie.checkpoint import saved_steps
from valkyrie.runs.tracking import read_metrics

pytestmark = pytest.mark.slow

TRAINING = (*TINY_ARGUMENTS, *ONE_DEVICE_ARGUMENTS, "sample_tokens=0", "tracking=off", "checkpoint.every=3")
REFUSAL_LIMIT_S, TRAINING_LIMIT_S = 15.0, 90.0
"""Time limits for a refused command and a tiny training run. On an idle machine they take 1 s and 8 s."""


class CommandResult(NamedTuple):
    """Exit status of a command, and everything it printed."""

    status: int
    text: str


def run_command(*arguments: str, cwd: Path, limit_s: float = TRAINING_LIMIT_S, **environment: str) -> CommandResult:
    """Run `valkyrie-train` and return its status and output. It must end in time, without a traceback."""
    start = time.monotonic()
    process = start_training(*arguments, cwd=cwd, **environment)
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"{arguments} did not end within {limit_s} s: {process.communicate()}") from None
    text = out + err
    assert "Traceback" not in text, text
    assert time.monotonic() - start < limit_s
    return CommandResult(process.returncode, text)


def read_until(process: subprocess.Popen[str], words: str) -> str:
    """Return the output of a running command up to and including a line with these words."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if words in line:
            return "".join(lines)
    raise AssertionError(f"ended before {words!r}: {lines} {process.communicate()}")


MISTAKES: dict[str, Sequence[str]] = {
    "modle=gpt_tiny": ("Did you mean model?",),
    "--steps=5": ("write settings without dashes: steps=5",),
    "steps 5": ("Write steps=5",),
    "mesh=2,2,2": ("mesh=2x2x2",),
    "mesh=2*2*2": ("mesh=2x2x2",),
    "mesh=[2,2,2]": ("mesh=2x2x2",),
    "model=gpt_tiny,s5_tiny": ("Add -m for a sweep over them",),
    "batch=0": ("batch=0: must be at least 1",),
    "batch=7 mesh=2x2x2": ("batch=7 is not divisible by 8",),
    "name=.": ("cannot be the name of a folder",),
    "name=latest": ("Use another name",),
    "name=a/b": ("is a nested folder",),
    "resume=": ("resume= has no value",),
    "resume=latest": ("Train a run first",),
    "resume=nothing": ("there is no such run",),
    "lr=3e-4": ("Did you mean optimizer.learning_rate?",),
    "optimizer=sgd": ("Choices: adam_atan2, adamw, muon",),
    "optimizer.learning_rate=fast": ("must be a number",),
    "optimizer.learning_rate=-1": ("must be above 0",),
    "model=gpt3": ("model=gpt3 is not a choice",),
    "model=gpt_tiny model.attention.heads=3": ("model.attention.heads=3 must be a multiple of",),
    "partition=2d": ("Did you mean partition=2d_tp?",),
    "partition.name=dp": ("Write partition=dp",),
    "partition=null": ("partition cannot be null",),
    "precision=fp16": ("Choices: bf16, bf16_mixed, float32",),
    "remat=yes": ("remat=yes is not a choice", "minimal_with_context"),
    "data=text": ("data=text needs files",),
    "data=text data.paths=nofile.txt": ("no file or directory nofile.txt",),
    "data.tokenizer=nope": ("data.tokenizer=nope is unknown",),
    "data=wikitext": ("data=wikitext is not a choice",),
    "target=gpu": ("Did you mean target=auto?",),
    "target=v4-63": ("is not a multiple of 2",),
    "target=v5e-8 mesh=2x4x1": ("needs accelerators",),
    "target.chip.hbm_gib=9": ("target.chip.hbm_gib=9: ", "target=v5e-8"),
    "mesh=1000x1x1 partition=dp batch=1000": ("mesh=1000x1x1 needs", "force=true"),
    "model=llama_8b mesh=1x1x1 partition=dp": ("GiB", "mode=compile", "force=true"),
    "experiment=no_header --config-dir own": ("must begin with the line '# @package _global_'",),
    "experiment=short --config-dir own": ("Rename it to short.yaml",),
    "experiment=own/experiment/no_header.yaml --config-dir own": ("--config-dir own",),
    "--config-dir nowhere": ("nowhere", "not a folder"),
    "--config-path own --config-name partial": ("has no defaults list",),
    "-m seed=0,1 hydra/launcher=nope": ("hydra/launcher=nope is not a choice",),
    "-m partition=dp,nope": ("partition=nope is not a choice",),
    "-m +sweep=nope": ("sweep=nope is not a choice",),
    "train": ("write mode=train",),
}
"""Arguments with a mistake, and the words that the message must contain."""


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_refused_at_once_with_what_to_write(tmp_path: Path, line: str):
    experiments = tmp_path / "own" / "experiment"
    experiments.mkdir(parents=True)
    (experiments / "no_header.yaml").write_text("steps: 5\n")
    (experiments / "short.yml").write_text("# @package _global_\nsteps: 5\n")
    (tmp_path / "own" / "partial.yaml").write_text("steps: 5\n")
    result = run_command(*line.split(), cwd=tmp_path, limit_s=REFUSAL_LIMIT_S)
    assert result.status == 2
    for words in MISTAKES[line]:
        assert words in result.text
    if not line.startswith("-m"):  # Hydra begins a sweep's folder before it composes the jobs
        assert not (tmp_path / "runs").exists(), "a refusal leaves nothing"


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("JAX_PLATFORMS", "cuda", "JAX_PLATFORMS=cuda"),
        ("JAX_PLATFORMS", "tpu", "JAX_PLATFORMS=tpu"),
        ("JAX_PLATFORMS", "gpux", "JAX_PLATFORMS=gpux"),
        ("XLA_FLAGS", "--xla_no_such_flag=1", "--xla_no_such_flag"),
        ("TPU_MESH_CONFIG", "2x2x2", "separate the sizes by commas"),
    ],
)
def test_an_impossible_environment_is_named(tmp_path: Path, variable: str, value: str, words: str):
    result = run_command(*TRAINING[:-1], "steps=1", cwd=tmp_path, **{variable: value})
    if variable == "TPU_MESH_CONFIG":  # not read beside a mesh
        result = run_command(cwd=tmp_path, **{variable: value})
    assert result.status != 0 and words in result.text
    assert len([line for line in result.text.splitlines() if line.startswith("valkyrie-train:")]) == 1


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run with two checkpoints."""
    folder = tmp_path_factory.mktemp("day")
    result = run_command(*TRAINING, "steps=6", "name=live", cwd=folder)
    assert result.status == 0, result.text
    assert "valkyrie-train resume=live steps=12" in result.text
    return folder / "runs" / "live"


@pytest.fixture
def live(finished_run: Path, tmp_path: Path) -> Path:
    """A copy of the run `finished_run`, in `runs` in an otherwise empty directory."""
    (tmp_path / "runs").mkdir()
    return copy_run(finished_run, tmp_path / "runs")


def test_a_run_is_repeated_resumed_evaluated_and_moved_from_any_directory(live: Path, tmp_path: Path):
    elsewhere = tmp_path / "else where"
    elsewhere.mkdir()
    line = (live / "run.yaml").read_text().splitlines()[0]
    command, *repeat_arguments = shlex.split(line.removeprefix("# "))
    assert command == "valkyrie-train"
    repeated = run_command(*repeat_arguments, cwd=elsewhere)
    assert repeated.status == 0 and (elsewhere / "runs" / "live").is_dir(), "the name is free there"
    losses = {step: record["loss"] for step, record in training_records(live).items()}
    assert {step: record["loss"] for step, record in training_records(elsewhere / "runs" / "live").items()} == losses
    beside = run_command(*repeat_arguments, cwd=tmp_path)
    assert beside.status == 0 and (tmp_path / "runs" / "live-2").is_dir() and len(saved_steps(live)) == 2
    for arguments, words in {
        ("resume=live-2", "steps=7"): " 7 to 7",
        ("resume=live-2", "steps=8", "mesh=2x1x1", "partition=fsdp"): "mesh.name=2x1x1 (was 1x1x1)",
        ("mode=eval", "resume=live-2"): "validation loss",
        ("mode=generate", "resume=live-2", "sample_tokens=3"): "live-2 at step 8",
        (*repeat_arguments, "mode=eval"): "live at step 6",
    }.items():
        result = run_command(*arguments, cwd=tmp_path)
        assert result.status == 0 and words in result.text, result.text
    result = run_command(f"resume={live}", "steps=7", cwd=elsewhere)
    assert result.status == 0 and "steps=7 (was 6)" in result.text
    assert sorted(training_records(live)) == list(range(1, 8))


def test_lost_settings_are_named_and_not_replaced_by_defaults(live: Path, tmp_path: Path):
    text = (live / "run.yaml").read_text()
    for damaged in (text[:300], text[: len(text) // 2], ""):
        (live / "run.yaml").write_text(damaged)
        result = run_command("resume=live", "steps=8", cwd=tmp_path, limit_s=REFUSAL_LIMIT_S)
        assert result.status == 2 and "run.yaml is damaged" in result.text and "name=live" in result.text
    (live / "run.yaml").unlink()
    result = run_command("resume=live", "steps=8", cwd=tmp_path, limit_s=REFUSAL_LIMIT_S)
    assert result.status == 2 and "but run.yaml with the settings" in result.text
    result = run_command(*TRAINING, "name=live", "steps=8", cwd=tmp_path)
    assert result.status == 0 and " 7 to 8" in result.text


def test_a_flipped_bit_is_found_and_the_previous_checkpoint_is_used(live: Path, tmp_path: Path):
    files = [file for file in (live / "checkpoints" / "6").rglob("*") if file.is_file() and file.stat().st_size > 200]
    largest = max(files, key=lambda file: file.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 4
    largest.write_bytes(content)
    listing = run_command("mode=checkpoints", "resume=live", cwd=tmp_path)
    assert listing.status == 1 and "step 6" in listing.text and "damaged" in listing.text and "as saved" in listing.text
    result = run_command("resume=live", "steps=6", cwd=tmp_path)
    assert result.status == 0 and "damaged" in result.text and " 4 to 6" in result.text
    steps = [record["step"] for record in read_metrics(live / "metrics.jsonl") if "loss" in record]
    assert steps == sorted(set(steps)), "steps that are done again are not in the record twice"


@pytest.fixture
def training_process(tmp_path: Path):
    """The process of an endless training run, `runs/live` in `tmp_path`. It has already saved a checkpoint."""
    process = start_training(
        *TRAINING, "steps=1000000", "name=live", "log_every=1", "checkpoint.every=20", cwd=tmp_path
    )
    try:
        read_until(process, "step 25/")
        while not saved_steps(tmp_path / "runs" / "live"):
            assert process.poll() is None
            time.sleep(0.1)
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_only_one_process_at_a_time_writes_a_run(training_process: subprocess.Popen[str], tmp_path: Path):
    for how in (["resume=latest"], [*TRAINING, "name=live", "steps=9"]):
        result = run_command(*how, cwd=tmp_path)
        assert result.status != 0 and str(training_process.pid) in result.text, result.text
    training_process.send_signal(signal.SIGTERM)
    out, _ = training_process.communicate(timeout=60)
    assert training_process.returncode == 75 and "valkyrie-train resume=live" in out
    assert run_command("resume=latest", "steps=2", cwd=tmp_path).status == 0, "it is free again"


def test_a_killed_run_resumes_from_its_last_checkpoint(training_process: subprocess.Popen[str], tmp_path: Path):
    training_process.kill()
    training_process.communicate()
    last = saved_steps(tmp_path / "runs" / "live")[-1]
    result = run_command("resume=latest", f"steps={last + 2}", cwd=tmp_path)
    assert result.status == 0 and f" {last + 1} to {last + 2}" in result.text
    steps = [
        record["step"] for record in read_metrics(tmp_path / "runs" / "live" / "metrics.jsonl") if "loss" in record
    ]
    assert steps == list(range(1, last + 3))


def test_a_deleted_run_folder_ends_the_training_with_a_message(training_process: subprocess.Popen[str], tmp_path: Path):
    (tmp_path / "runs" / "live").rename(tmp_path / "gone")  # at once: files keep coming while a tree is deleted
    out, err = training_process.communicate(timeout=60)
    assert training_process.returncode == 1 and "no longer exists" in err and "Traceback" not in out + err
    assert "resume=" not in err, "there is nothing to resume"


def test_a_closed_pipe_saves_the_training(tmp_path: Path):
    arguments = shlex.join([*TRAINING, "steps=1000000", "log_every=1"])
    command = f"{shlex.quote(sys.executable)} -m valkyrie.cli.train {arguments}"
    piped = f"set -o pipefail; {command} name=piped | head -n 12"
    result = subprocess.run(
        ["bash", "-c", piped], cwd=tmp_path, capture_output=True, text=True, timeout=TRAINING_LIMIT_S
    )
    assert result.returncode == 130 and "Traceback" not in result.stderr
    assert saved_steps(tmp_path / "runs" / "piped")


def test_an_unreachable_wandb_is_used_offline(tmp_path: Path):
    nobody = {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_MODE": "online"}
    arguments = [argument for argument in TRAINING if argument != "tracking=off"]
    result = run_command(*arguments, "steps=3", "name=a", "tracking.init_timeout=2", cwd=tmp_path, **nobody)
    assert result.status == 0 and "wandb sync" in result.text and "offline" in result.text
    assert list((tmp_path / "runs" / "a" / "wandb").glob("offline-run-*"))


def test_the_users_text_trains_as_in_the_readme(tmp_path: Path):
    books = tmp_path / "books" / "more"
    books.mkdir(parents=True)
    for name in ("one", "two", "three"):
        (books / f"{name}.txt").write_text(f"The book {name} is about a run that never ended.\n" * 40)
    arguments = [argument for argument in TRAINING if not argument.startswith("data")]
    for paths in ("data.paths=[~/books/**/*.txt]", "data.paths=~/books", "data.paths=books/**/*.txt"):
        result = run_command(*arguments, "data=text", paths, "steps=2", cwd=tmp_path, HOME=str(tmp_path))
        assert result.status == 0 and re.search(r"text: [\d,]+ training", result.text), result.text


def test_a_full_disk_and_a_read_only_home_are_reported(tmp_path: Path):
    (tmp_path / "file").write_text("")
    blocked = run_command(*TRAINING, "steps=3", f"runs={tmp_path}/file/runs", cwd=tmp_path)
    assert blocked.status != 0 and f"{tmp_path}/file/runs" in blocked.text and "runs=" in blocked.text
    cache = {"VALKYRIE_CACHE": f"{tmp_path}/file/cache", "HOME": f"{tmp_path}/file/home"}
    result = run_command(*TRAINING, "steps=3", "name=a", cwd=tmp_path, **cache)
    assert result.status == 0 and "VALKYRIE_CACHE" in result.text, result.text
    assert os.listdir(tmp_path / "runs" / "a" / "checkpoints")
