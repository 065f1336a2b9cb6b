"""Metadata of a training run's checkpoints, and checks of the checkpoint settings."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import jax

from valkyrie.checkpoint import CheckpointConfig, CheckpointInfo, checkpoint_root, stored_checkpoints
from valkyrie.checkpoint.location import (
    POINTER_FILE,
    SAVED_FILE,
    all_steps_in,
    configured_root,
    in_bucket,
    missing_remedy,
)
from valkyrie.config.run import RunConfig
from valkyrie.data.tokenizer import tokenizer_identity
from valkyrie.runs.folder import package_versions
from valkyrie.tasks import Task
from valkyrie.train.program import StepProgram


def checkpoint_info(program: StepProgram) -> CheckpointInfo:
    """Return the metadata of a run's checkpoints: model, layout, mesh, each process's devices, tokenizer, versions."""
    devices: dict[str, list[int]] = {}
    assert isinstance(program.mesh, jax.sharding.Mesh), "a run that trains has devices"
    for device in program.mesh.devices.flat:
        devices.setdefault(str(device.process_index), []).append(device.id)
    return CheckpointInfo(
        parameters={},  # every save fills these in
        model=program.run.model.name,
        layout=program.layout.name,
        mesh={str(axis): size for axis, size in program.mesh.shape.items()},
        devices_of_process={process: sorted(ids) for process, ids in sorted(devices.items())},
        tokenizer=tokenizer_identity(program.run.tokenizer),
        versions=package_versions(),
    )


def shared_folder(folder: Path, config: CheckpointConfig) -> Path | None:
    """Return the folder that all processes of a run must share, or None if their checkpoints go to a bucket."""
    path = folder if config.folder is None else configured_root(folder, config.folder)
    return None if in_bucket(path) else path


def refuse_missing_checkpoints(folder: Path, config: RunConfig) -> None:
    """Raise ValueError if a run's checkpoints in `checkpoint.folder` are missing, for example on an unmounted disk.

    They are missing if the run has saved there (`SAVED_FILE`), but there are none now.

    Passes if this host has fast checkpoints of the run, if the run has checkpoints in the `checkpoint.folder` of
    `config`, or if the checkpoints are in the run folder.
    """
    if not all((folder / name).is_file() for name in (POINTER_FILE, SAVED_FILE)):
        return
    root = checkpoint_root(folder)
    if all_steps_in(root) or all_steps_in(configured_root(folder, config.checkpoint.folder)):
        return
    if not stored_checkpoints(folder, config.checkpoint):
        key = "name" if config.resume is None else "resume"
        raise ValueError(
            f"{key}={folder.name}: its checkpoints are expected in {root} (checkpoint.folder), but there are none, "
            f"although the run has saved there. {missing_remedy(folder, 'use another name= to start over')}"
        )


def refuse_unknown_best_metric(config: CheckpointConfig, task: Task) -> None:
    """Raise ValueError if `checkpoint.best` is not a metric of the task's evaluation. Passes if `keep_best` is 0."""
    if not config.keep_best:
        return
    metrics = task.evaluation(defaultdict(lambda: 1.0))
    if config.best not in metrics:
        raise ValueError(
            f"checkpoint.best={config.best} is not a metric of {task.name}. Use one of {', '.join(metrics)}."
        )
