"""Finds a run's durable checkpoints: their folder or bucket, and the saved steps. Does not import JAX or Orbax.

They are in the run folder, or in a folder or bucket that all hosts reach. Like Orbax, this module accesses buckets
through `etils.epath`. `gs://` and `s3://` each need an extra package.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from valkyrie.buckets import file_problems, package_problems, storage_requests, url_scheme
from valkyrie.paths import DiskError, error_reason, write_atomic
from valkyrie.problems import Problem, ProblemCode

CHECKPOINTS_FOLDER = "checkpoints"
"""The sub-folder of a run folder with its durable checkpoints, one folder per step."""
POINTER_FILE = "checkpoints.path"
"""The file with the path of the durable checkpoints, if they are not in the run folder."""
SAVED_FILE = "checkpoints.saved"
"""An empty file that exists if a checkpoint was saved to the path in `POINTER_FILE`."""
IDENTITY_FILE = "id"
"""The file with the run's identity, which is part of the path of its fast checkpoints. It exists while the run uses the
fast tier."""
METADATA_FILE = "_CHECKPOINT_METADATA"
"""The file with a checkpoint's save times. On a disk, Orbax writes it last."""
_COMMIT_FILE = "commit_success.txt"
"""The file that Orbax writes last in a bucket, where a folder cannot be renamed atomically."""
_PACKAGES = {"gs": "gcsfs", "s3": "s3fs"}
"""Python package that provides access to each URL scheme."""
_PROGRAMMING_ERRORS = (ValueError, TypeError, AttributeError, NameError, LookupError, AssertionError, ImportError)
"""Exceptions that indicate a bug or a wrong setting, not an unreachable bucket."""


def folder_problems(folder: str | None) -> list[Problem]:
    """Return a problem if `checkpoint.folder` is a file, or if its URL scheme is unknown or lacks its package."""
    if folder is None:
        return []
    scheme = url_scheme(folder)
    if scheme is None:
        return file_problems("checkpoint.folder", folder)
    if scheme not in _PACKAGES:
        schemes = " or ".join(f"{known_scheme}://" for known_scheme in _PACKAGES)
        text = f"checkpoint.folder={folder}: {scheme}:// is not supported. Use {schemes}, or a local folder."
        return [Problem(ProblemCode.unknown_name, "checkpoint.folder", folder, text)]
    return package_problems("checkpoint.folder", folder, scheme, _PACKAGES[scheme])


def in_bucket(path: Any) -> bool:
    """Return whether a path is in a bucket, judging by a URL scheme such as `gs://`."""
    return url_scheme(str(path)) is not None


@contextlib.contextmanager
def bucket_errors(path: Any) -> Iterator[None]:
    """Convert errors that a storage service raises in this context to DiskError, with advice, if `path` is in a bucket.

    `path` is the folder of a run's checkpoints. Errors for a local folder, and errors that indicate a bug or a wrong
    setting (`_PROGRAMMING_ERRORS`), are raised unchanged.
    """
    setting = f"checkpoint.folder={str(path).rpartition('/')[0]}"
    try:
        with storage_requests(setting) if in_bucket(path) else contextlib.nullcontext():
            yield
    except (DiskError, *_PROGRAMMING_ERRORS):
        raise
    except Exception as error:  # each service's package raises its own errors
        if not in_bucket(path):
            raise
        raise DiskError(
            f"{setting} cannot be reached ({error_reason(error)}). Check its name, the network and the credentials of "
            "this host."
        ) from error


def parse_path(text: str) -> Any:
    """Convert a URL to an `etils.epath` path in a bucket, and any other text to an absolute `pathlib` path."""
    if url_scheme(text) is None:
        return Path(text).expanduser().absolute()
    from etils import epath

    return epath.Path(text)


def checkpoint_root(run_folder: Path) -> Any:
    """Return the folder or bucket path of a run's durable checkpoints, as recorded in its run folder.

    Raises ValueError if the recorded path cannot be used, for the reasons in `folder_problems`.
    """
    pointer = run_folder / POINTER_FILE
    if not pointer.is_file():
        return run_folder / CHECKPOINTS_FOLDER
    path = pointer.read_text().strip()
    if problems := folder_problems(path):
        raise ValueError(f"{pointer} says that the checkpoints are in {path}, which cannot be used. {problems[0]}")
    return parse_path(path)


def configured_root(run_folder: Path, folder: str | None) -> Any:
    """Return the path of a run's durable checkpoints.

    `folder` is the setting `checkpoint.folder`. The checkpoints are in its subfolder with the run's name, or in the run
    folder if `folder` is None.
    """
    return run_folder / CHECKPOINTS_FOLDER if folder is None else parse_path(folder) / run_folder.name


def write_pointer(run_folder: Path, folder: str | None) -> None:
    """Record in the run folder where its durable checkpoints are stored.

    `folder` is the setting `checkpoint.folder`, or None if they are in the run folder. Raises ValueError if the run
    already has checkpoints in another place.
    """
    configured_path = None if folder is None else str(configured_root(run_folder, folder))
    pointer = run_folder / POINTER_FILE
    recorded_path = pointer.read_text().strip() if pointer.is_file() else None
    if recorded_path == configured_path:
        return
    if saved_steps(run_folder):
        remedy = (
            "checkpoint.folder=null"
            if recorded_path is None
            else f"checkpoint.folder={recorded_path.rpartition('/')[0]}"
        )
        raise ValueError(
            f"checkpoint.folder={folder or 'null'}: the checkpoints of {run_folder} are in "
            f"{checkpoint_root(run_folder)}. Use {remedy}, or another name=."
        )
    (run_folder / SAVED_FILE).unlink(missing_ok=True)  # it belongs to the previous path
    if configured_path is None:
        pointer.unlink()
    else:
        were_moved_there = bool(finished_steps_in(configured_root(run_folder, folder)))  # may fail: the network
        run_folder.mkdir(parents=True, exist_ok=True)
        write_atomic(pointer, f"{configured_path}\n")
        if were_moved_there:
            (run_folder / SAVED_FILE).touch()


def missing_remedy(run_folder: Path, restart: str = "start the run again, or resume another run") -> str:
    """Return what to do if a run has no checkpoint. `restart` is the remedy if none was saved or all are lost."""
    if (run_folder / POINTER_FILE).is_file() and not in_bucket(checkpoint_root(run_folder)):
        return f"Is its disk mounted? If so, {restart}."
    return f"{restart[0].upper()}{restart[1:]}."


def is_resumable(run_folder: Path) -> bool:
    """Return whether a run folder can be resumed, judging only by this disk: buckets are not queried."""
    return any((run_folder / name).is_file() for name in (POINTER_FILE, IDENTITY_FILE)) or bool(saved_steps(run_folder))


def latest_step(run_folder: Path) -> int | None:
    """Return the step of the newest finished durable checkpoint of a run, or None."""
    return max(saved_steps(run_folder), default=None)


def saved_steps(run_folder: Path) -> list[int]:
    """Return the steps of the finished durable checkpoints of a run, oldest first."""
    return finished_steps_in(checkpoint_root(run_folder))


def all_steps_in(root: Any) -> list[int]:
    """Return the steps of the checkpoint folders directly in a folder or bucket, oldest first.

    On a disk, includes incomplete folders, for example of an interrupted copy. A save in progress is not included,
    because Orbax writes to a temporary folder and renames it to the step at the end. In a bucket, an incomplete folder
    may be a save in progress, so only finished checkpoints are returned.
    """
    if in_bucket(root):
        return finished_steps_in(root)
    return sorted(int(f.name) for f in root.iterdir() if f.name.isdigit() and f.is_dir()) if root.is_dir() else []


def finished_steps_in(root: Any) -> list[int]:
    """Return the steps of the finished checkpoints directly in a folder or bucket, oldest first."""
    last_file = _COMMIT_FILE if in_bucket(root) else METADATA_FILE
    with bucket_errors(root):
        if not root.exists():
            return []
        return sorted(
            int(entry.name) for entry in root.iterdir() if entry.name.isdigit() and (entry / last_file).is_file()
        )
