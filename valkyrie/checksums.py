"""Checksums of the files of a folder: written once, compared before the files are trusted."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Container, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from valkyrie.paths import write_whole

CHECKSUMS = "checksums.json"
"""The file of a folder with the bytes and the SHA-256 of the other files in it, by path."""
_THREADS = min(8, os.cpu_count() or 1)
"""Hashing and reading leave the interpreter lock: so many files at a time."""


def write_checksums(folder: Path, without: Container[str] = ()) -> None:
    """Write the checksums of the files in a folder into it, but for some names. OSError where one cannot be read."""
    files = [name for name in _files(folder) if name not in without]
    with ThreadPoolExecutor(_THREADS) as threads:
        sums = dict(zip(files, threads.map(lambda name: _of(folder / name), files), strict=True))
    write_whole(folder / CHECKSUMS, json.dumps(sums, indent=1) + "\n")


def damaged_file(folder: Path) -> str | None:
    """Return the first file of a folder that is not as its checksums have it, in words; None where all are.

    A folder without checksums has none that differ.
    """
    path = folder / CHECKSUMS
    if not path.is_file():
        return None
    try:
        sums = json.loads(path.read_bytes())
        expected = {str(name): (int(size), str(digest)) for name, (size, digest) in sums.items()}
    except (ValueError, TypeError, AttributeError):
        return f"{CHECKSUMS} cannot be read"
    if missing := sorted(expected.keys() - set(_files(folder))):
        return f"{missing[0]} is missing"
    with ThreadPoolExecutor(_THREADS) as threads:
        return _first(threads.map(lambda item: _difference(folder, *item), expected.items()))


def _difference(folder: Path, name: str, expected: tuple[int, str]) -> str | None:
    size = (folder / name).stat().st_size
    if size != expected[0]:
        return f"{name} has {size:,} bytes of {expected[0]:,}"
    return None if _of(folder / name)[1] == expected[1] else f"{name} has changed since it was saved"


def _of(path: Path) -> tuple[int, str]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return os.fstat(file.fileno()).st_size, digest


def _files(folder: Path) -> list[str]:
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in names if name != CHECKSUMS)


def _first(texts: Iterable[Any]) -> str | None:
    return next((text for text in texts if text is not None), None)
