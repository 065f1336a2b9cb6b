"""Writes the checksums of the files in a folder, and verifies the files before they are used."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Container, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from valkyrie.paths import write_atomic
from valkyrie.problems import Problem, ProblemCode

CHECKSUMS_FILE = "checksums.json"
"""Name of the file that maps the paths of the other files in a folder to their sizes in bytes and SHA-256."""
_THREADS = min(8, os.cpu_count() or 1)
"""Number of files to hash in parallel. Hashing and reading release the interpreter lock."""


def digest(value: object) -> str:
    """Return the hexadecimal SHA-256 of bytes, of text in UTF-8, or of another value's JSON with sorted keys.

    Values that JSON does not support are converted with `str`.
    """
    if isinstance(value, str):
        value = value.encode()
    body = value if isinstance(value, bytes) else json.dumps(value, sort_keys=True, default=str).encode()
    return hashlib.sha256(body).hexdigest()


def write_checksums(folder: Path, excluded: Container[str] = ()) -> None:
    """Write `checksums.json` for all files in a folder and its subfolders, except those in `excluded`.

    Paths in `excluded` are relative to the folder. Raises OSError if a file cannot be read.
    """
    files = [name for name in _file_names(folder) if name not in excluded]
    with ThreadPoolExecutor(_THREADS) as threads:
        sums = dict(zip(files, threads.map(lambda name: _checksum(folder / name), files), strict=True))
    write_atomic(folder / CHECKSUMS_FILE, json.dumps(sums, indent=1) + "\n")


def folder_problem(folder: Path) -> Problem | None:
    """Compare the files in a folder with its `checksums.json`. Returns the first problem, or None if there is none.

    The problems are a file that is missing or has changed, and a `checksums.json` that cannot be read. A folder without
    `checksums.json` counts as undamaged.
    """
    path = folder / CHECKSUMS_FILE
    if not path.is_file():
        return None
    try:
        sums = json.loads(path.read_bytes())
        expected = {str(name): (int(size), str(digest)) for name, (size, digest) in sums.items()}
    except (ValueError, TypeError, AttributeError):
        return _damage(CHECKSUMS_FILE, f"{CHECKSUMS_FILE} cannot be read")
    return next(file_problems(folder, expected), None)


def file_problems(
    folder: Path, expected: Mapping[str, tuple[int, str]], trusted_names: Container[str] = ()
) -> Iterator[Problem]:
    """Yield a problem for each file that is missing or has changed.

    First come the files that are missing or have another size. Then the contents of the others are read.

    Args:
        folder: the folder that contains the files.
        expected: size in bytes and SHA-256 of each file, by path relative to the folder.
        trusted_names: files to compare by size only.
    """
    size_problems = {name: _size_damage(folder / name, name, size) for name, (size, _) in expected.items()}
    yield from filter(None, size_problems.values())
    digests = {
        name: digest
        for name, (_, digest) in expected.items()
        if size_problems[name] is None and name not in trusted_names
    }
    with ThreadPoolExecutor(_THREADS) as threads:
        sums = [*threads.map(lambda name: _checksum(folder / name)[1], digests)]
    for name, actual in zip(digests, sums, strict=True):
        if actual != digests[name]:
            yield _damage(name, f"{name} has changed since it was saved")


def _size_damage(path: Path, name: str, expected: int) -> Problem | None:
    if not path.is_file():
        return Problem(ProblemCode.missing, value=name, text=f"{name} is missing")
    size = path.stat().st_size
    return None if size == expected else _damage(name, f"{name} has {size:,} bytes instead of {expected:,}")


def _damage(name: str, text: str) -> Problem:
    return Problem(ProblemCode.damaged, value=name, text=text)


def _checksum(path: Path) -> tuple[int, str]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return os.fstat(file.fileno()).st_size, digest


def _file_names(folder: Path) -> list[str]:
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in names if name != CHECKSUMS_FILE)
