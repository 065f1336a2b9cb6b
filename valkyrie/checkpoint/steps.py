"""Which checkpoints a run has. Imports neither JAX nor Orbax."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from valkyrie.checkpoint.place import IDENTITY, POINTER, in_bucket, place_of

METADATA = "_CHECKPOINT_METADATA"
"""The file of a checkpoint with the times of its saving, which Orbax writes last on a disk."""
_COMMITTED = "commit_success.txt"
"""What it writes last in a bucket, where a folder cannot get its name in one piece."""


def has_saved(folder: Path) -> bool:
    """Return whether a run folder can be resumed, as far as this disk tells: a bucket is not asked."""
    return (folder / POINTER).is_file() or (folder / IDENTITY).is_file() or latest_step(folder) is not None


def latest_step(folder: Path) -> int | None:
    """Return the newest finished durable checkpoint of a run folder; None when there is none."""
    return newest_in(place_of(folder))


def saved_steps(folder: Path) -> list[int]:
    """Return the steps of the finished durable checkpoints of a run folder, oldest first."""
    return steps_in(place_of(folder))


def newest_in(path: Any) -> int | None:
    """Return the newest finished checkpoint right in a folder or bucket; None when there is none."""
    return max(steps_in(path), default=None)


def steps_in(path: Any) -> list[int]:
    """Return the steps of the finished checkpoints right in a folder or bucket, oldest first."""
    last = _COMMITTED if in_bucket(path) else METADATA
    if not path.exists():
        return []
    return sorted(int(entry.name) for entry in path.iterdir() if entry.name.isdigit() and (entry / last).is_file())
