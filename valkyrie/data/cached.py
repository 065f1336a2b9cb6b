"""A folder of the data cache: written whole or not at all, by one process while the others wait."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from valkyrie.paths import DiskError, cache_root, cache_trouble, is_full, writing
from valkyrie.processes.locks import Lock, lock


def kept_in_cache(cache: Path, name: str, write: Callable[[Path], None]) -> Path:
    """Return the folder of this name in the cache, filled by `write` unless it is there already.

    Several processes may call it at once: one works, the others wait or come to the same result. What is killed leaves
    nothing that is taken for a folder. DiskError where the cache cannot be written.
    """
    final = cache / name
    if final.is_dir():
        return final
    if trouble := cache_trouble(cache, elsewhere(cache)):
        raise DiskError(trouble)
    with _lock(cache / f".{name}.lock") as alone:
        if final.is_dir():
            return final
        if alone:
            for leftover in cache.glob(f".{name}.tmp-*"):
                shutil.rmtree(leftover)
        partial = cache / f".{name}.tmp-{uuid.uuid4().hex}"
        partial.mkdir()
        try:
            write(partial)
            _publish(partial, final)
        except OSError as error:
            if not is_full(error):
                raise
            with writing(cache, elsewhere(cache)):
                raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return final


def elsewhere(cache: Path) -> str:
    """Return what sets another place for the cache."""
    return "VALKYRIE_CACHE=DIR" if cache.is_relative_to(cache_root()) else "data.cache_dir=DIR"


@contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Hold a lock that ends with the process; yields False where the file system has none."""
    with path.open("w") as file:
        yield lock(file) is Lock.ours


def _publish(partial: Path, final: Path) -> None:
    try:
        partial.rename(final)
    except OSError:
        if not final.is_dir() or not any(final.iterdir()):  # not another process that came first
            raise
