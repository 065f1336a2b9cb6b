"""The steps of a run's checkpoints. Imports neither JAX nor Orbax."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from valkyrie.checkpoint.place import IDENTITY, POINTER, in_bucket, place_of

METADATA = "_CHECKPOINT_METADATA"
"""The file with a checkpoint's save times. On a disk, Orbax writes it last."""
_COMMITTED = "commit_success.txt"
"""The file that Orbax writes last in a bucket, where a folder cannot be renamed atomically."""


def has_saved(folder: Path) -> bool:
    """Return whether a run folder can be resumed, judging only by this disk: buckets are not queried."""
    return (folder / POINTER).is_file() or (folder / IDENTITY).is_file() or latest_step(folder) is not None


def latest_step(folder: Path) -> int | None:
    """Return the step of the newest finished durable checkpoint of a run folder, or None."""
    return newest_in(place_of(folder))


def saved_steps(folder: Path) -> list[int]:
    """Return the steps of the finished durable checkpoints of a run folder, oldest first."""
    return steps_in(place_of(folder))


def newest_in(path: Any) -> int | None:
    """Return the step of the newest finished checkpoint directly in a folder or bucket, or None."""
    return max(steps_in(path), default=None)


def steps_in(path: Any) -> list[int]:
    """Return the steps of the finished checkpoints directly in a folder or bucket, oldest first."""
    last = _COMMITTED if in_bucket(path) else METADATA
    if not path.exists():
        return []
    return sorted(int(entry.name) for entry in path.iterdir() if entry.name.isdigit() and (entry / last).is_file())
