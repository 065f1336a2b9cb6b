"""Which checkpoints a run folder has. Imports neither JAX nor Orbax."""

from __future__ import annotations

from pathlib import Path

FOLDER = "checkpoints"
"""The folder of a run folder that holds its durable checkpoints, one sub-folder a step."""
METADATA = "_CHECKPOINT_METADATA"
"""The file of a checkpoint with the times of its saving, which Orbax writes last."""


def latest_step(folder: Path) -> int | None:
    """Return the newest finished checkpoint of a run folder; None when there is none."""
    return max(saved_steps(folder), default=None)


def saved_steps(folder: Path) -> list[int]:
    """Return the steps of the finished checkpoints of a run folder, oldest first."""
    return steps_in(folder / FOLDER)


def steps_in(path: Path) -> list[int]:
    """Return the steps of the finished checkpoints right in a folder, oldest first."""
    return sorted(int(entry.name) for entry in path.glob("*") if entry.name.isdigit() and (entry / METADATA).is_file())
