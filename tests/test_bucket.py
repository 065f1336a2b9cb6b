"""Tests of durable checkpoints in a bucket, with an emulator of Google Cloud Storage."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from buckets import bucket
from helpers import compose_config
from runs import copy_run, run_train, tiny_arguments, trained_run, training_records
from valkyrie import buckets as schemes
from valkyrie.checkpoint import CheckpointConfig, Checkpoints, saved_steps
from valkyrie.checkpoint.location import POINTER_FILE, SAVED_FILE, checkpoint_root, folder_problems, write_pointer
from valkyrie.checkpoint.tier import Tier
from valkyrie.config.run import Run
from valkyrie.doctor.disks import check_checkpoint_folder, check_disk_space
from valkyrie.doctor.findings import OK, CheckContext
from valkyrie.paths import DiskError, disk_errors
from valkyrie.problems import ProblemCode

__all__ = ["bucket"]


@pytest.mark.slow
def test_a_training_saves_to_a_bucket_and_resumes_on_another_host(
    bucket: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    overrides = (f"checkpoint.folder={bucket}", "checkpoint.every=2", "checkpoint.keep=1")
    assert run_train(*tiny_arguments(tmp_path / "one", "steps=4", *overrides)) == 0
    folder = tmp_path / "one" / "run"
    assert (folder / POINTER_FILE).read_text() == f"{bucket}/run\n" and not (folder / "checkpoints").exists()
    assert saved_steps(folder) == [4]
    assert run_train("mode=checkpoints", "resume=run", f"runs={tmp_path / 'one'}") == 0
    assert "the bucket verifies" in capfd.readouterr().out
    assert run_train(*tiny_arguments(tmp_path / "other", "steps=6", "optimizer.decay_steps=4", *overrides)) == 0
    assert "from step 4" in capfd.readouterr().out
    assert (
        training_records(folder)[4]["loss"]
        == training_records(trained_run("optimizer.decay_steps=4", steps=6))[4]["loss"]
    )
    context = CheckContext(Run.from_config(compose_config(f"checkpoint.folder={bucket}")))
    ((folder_severity, *_),), ((_, space_text),) = check_checkpoint_folder(context), check_disk_space(context)
    assert folder_severity == OK and "is a bucket" in space_text
    last_loss = training_records(tmp_path / "other" / "run")[6]["loss"]
    assert last_loss == training_records(trained_run("optimizer.decay_steps=4", steps=6))[6]["loss"]
    assert run_train("mode=generate", "resume=run", f"runs={tmp_path / 'other'}", "prompt=a", "sample_tokens=2") == 0


@pytest.mark.slow
def test_checkpoints_can_be_in_another_folder(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    folder_override = f"checkpoint.folder={tmp_path / 'shared'}"
    assert run_train(*tiny_arguments(tmp_path / "runs", "steps=2", folder_override)) == 0
    assert saved_steps(tmp_path / "runs" / "run") == [2]
    assert os.listdir(tmp_path / "shared" / "run") == ["2"]
    assert run_train("resume=latest", f"runs={tmp_path / 'runs'}", "steps=3") == 0
    assert "from step 2" in capfd.readouterr().out
    assert run_train("resume=latest", f"runs={tmp_path / 'runs'}", "steps=4", "checkpoint.folder=null") == 2
    assert f"Use checkpoint.folder={tmp_path}/shared" in capfd.readouterr().err


def test_a_run_without_its_checkpoints_in_another_folder_does_not_start_over(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    folder, runs, root = copy_run(trained_run(), tmp_path), f"runs={tmp_path}", f"{tmp_path}/shared/run"
    (folder / POINTER_FILE).write_text(f"{root}\n")
    (folder / SAVED_FILE).touch()
    (tmp_path / "unmounted").mkdir()
    (folder / "checkpoints").rename(tmp_path / "unmounted" / "run")
    settings = OmegaConf.load(folder / "run.yaml")
    settings.checkpoint.folder = f"{tmp_path}/shared"
    OmegaConf.save(settings, folder / "run.yaml")
    metrics = (folder / "metrics.jsonl").read_bytes()
    for arguments in (("resume=run", runs), tiny_arguments(tmp_path, f"checkpoint.folder={tmp_path}/shared")):
        assert run_train(*arguments, "steps=8") == 2
        err = capfd.readouterr().err
        assert all(part in err for part in ("=run: ", f" {root} (checkpoint.folder)", "disk mounted?", "another name="))
    assert (folder / "metrics.jsonl").read_bytes() == metrics
    assert run_train("mode=checkpoints", "resume=run", runs) == 2
    err = capfd.readouterr().err
    assert f": run has no checkpoint in {root}" in err and "disk mounted?" in err
    assert run_train("mode=eval", "resume=run", runs) == 2
    err = capfd.readouterr().err
    assert f"{root} has no finished checkpoint" in err and "disk mounted?" in err
    assert run_train("resume=run", runs, f"checkpoint.folder={tmp_path}/unmounted", "steps=8") == 0
    assert "from step 6" in capfd.readouterr().out


@pytest.mark.slow
def test_a_run_starts_again_only_if_it_never_saved_to_its_bucket(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    def fail(tier: Tier) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    arguments = tiny_arguments(tmp_path, "steps=2", f"checkpoint.folder={bucket}/lost")
    with monkeypatch.context() as patch:
        patch.setattr(Tier, "_write_checksums", fail)
        assert run_train(*arguments) == 1
    root = checkpoint_root(tmp_path / "run")
    root.rmtree(missing_ok=True)
    assert run_train(*arguments) == 0
    root.rmtree()
    capfd.readouterr()
    assert run_train(*arguments, "steps=3") == 2
    err = capfd.readouterr().err
    assert f"=run: its checkpoints are expected in {root} " in err and "another name=" in err and "mounted" not in err


def test_a_run_with_local_checkpoints_cannot_use_another_folder(tmp_path: Path):
    step_folder = tmp_path / "run" / "checkpoints" / "2"
    step_folder.mkdir(parents=True)
    (step_folder / "_CHECKPOINT_METADATA").write_text("{}")
    with pytest.raises(ValueError, match="checkpoint.folder=null"):
        write_pointer(tmp_path / "run", str(tmp_path / "shared"))
    assert checkpoint_root(tmp_path / "run") == tmp_path / "run" / "checkpoints"


def test_a_new_path_counts_as_saved_to_only_if_it_has_checkpoints(tmp_path: Path):
    folder = tmp_path / "run"
    write_pointer(folder, str(tmp_path / "first"))
    (folder / SAVED_FILE).touch()
    write_pointer(folder, str(tmp_path / "empty"))
    assert not (folder / SAVED_FILE).exists()
    checkpoint = tmp_path / "moved" / "run" / "2"
    checkpoint.mkdir(parents=True)
    (checkpoint / "_CHECKPOINT_METADATA").write_text("{}")
    write_pointer(folder, str(tmp_path / "moved"))
    assert (folder / SAVED_FILE).exists()
    (tmp_path / "moved").rename(tmp_path / "gone")
    write_pointer(folder, None)
    assert not (folder / SAVED_FILE).exists() and not (folder / POINTER_FILE).exists()


def test_an_unwritable_checkpoint_folder_is_refused_by_its_key(tmp_path: Path):
    (tmp_path / "file").touch()
    folder = f"{tmp_path}/file/checkpoints"
    with disk_errors(tmp_path / "run"), pytest.raises(DiskError) as caught:
        Checkpoints(tmp_path / "run", CheckpointConfig(folder=folder))
    assert str(caught.value).startswith(f"{folder}/run ") and "checkpoint.folder=" in str(caught.value)
    assert "runs=" not in str(caught.value)


@pytest.mark.parametrize(
    ("folder", "code"), [("az://x/y", ProblemCode.unknown_name), ("s3://x/y", ProblemCode.not_installed)]
)
def test_an_unsupported_bucket_is_refused(folder: str, code: ProblemCode, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(schemes, "find_spec", lambda name: None)
    assert [(p.code, p.key, p.value) for p in folder_problems(folder)] == [(code, "checkpoint.folder", folder)]
    assert CheckpointConfig(folder=folder).problems() == folder_problems(folder)
    assert folder_problems(None) == folder_problems("/mnt/shared") == []
