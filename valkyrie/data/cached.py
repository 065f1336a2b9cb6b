"""Folders in the data cache, written atomically by one process while the others wait."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

from valkyrie.paths import (
    DiskError,
    cache_problem,
    cache_root,
    disk_errors,
    is_disk_full,
    open_to_append,
    publish_folder,
)
from valkyrie.processes.locks import LockState, lock


def ensure_cached_folder(
    cache: Path, name: str, write: Callable[[Path], None], *, alternative: str | None = None
) -> Path:
    """Return the path of the folder `name` in the cache, creating it first if it is missing.

    To create it, `write` fills a temporary folder, which is then renamed. A process that is killed therefore never
    leaves an incomplete folder with this name. Several processes may call this at once: one writes while the others
    wait. If the file system has no locks, every process writes, and the result of the first to finish is kept.

    Raises DiskError if the cache cannot be written. The error message suggests `alternative`, by default the setting
    that moves the cache.
    """
    folder = cache / name
    if folder.is_dir():
        return folder
    if alternative is None:
        alternative = "VALKYRIE_CACHE=DIR" if cache.is_relative_to(cache_root()) else "data.cache_dir=DIR"
    if problem_text := cache_problem(cache, alternative):
        raise DiskError(problem_text)
    with open_to_append(cache / f".{name}.lock") as file:
        has_lock = lock(file) is LockState.acquired  # False if the file system has no locks
        if folder.is_dir():
            return folder
        if has_lock:
            for leftover_folder in cache.glob(f".{name}.tmp-*"):
                shutil.rmtree(leftover_folder)
        partial_folder = cache / f".{name}.tmp-{uuid.uuid4().hex}"
        partial_folder.mkdir()
        try:
            write(partial_folder)
            publish_folder(partial_folder, folder)
        except OSError as error:
            if not is_disk_full(error):
                raise
            with disk_errors(cache, alternative):
                raise
        finally:
            shutil.rmtree(partial_folder, ignore_errors=True)
    return folder
