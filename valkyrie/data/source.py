"""The documents of a dataset, always in the same order for the same files.

`list_source` looks at names, sizes and times only (the cache key); `documents` reads.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import sys
import sysconfig
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from valkyrie.buckets import scheme_of
from valkyrie.data.config import Chunk, DataConfig, Source
from valkyrie.data.readers import SUFFIXES, WHOLE_FILE, Document, SourceFile, read, unknown_language
from valkyrie.data.remote import RemoteFile, fetched_ahead, list_remote
from valkyrie.data.synthetic import SyntheticDocument, synthetic_documents

MIN_STDLIB_BYTES = 1_000_000
_NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


@dataclass(frozen=True)
class Listing:
    """What a source consists of, before anything is read."""

    files: tuple[SourceFile | RemoteFile, ...]
    skipped: int
    """Files that a glob or a directory matched and whose suffix is not one of `SUFFIXES`."""

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def signature(self) -> str:
        """A hash of every name, size and modification time, of remote files their checksum or tag."""
        return hashlib.sha256(json.dumps([file.stamp for file in self.files]).encode()).hexdigest()


def list_source(config: DataConfig) -> Listing:
    """Return the files of a source, sorted; ValueError names the path or pattern that gives none.

    The standard library leaves out its tests: some installations ship without them, and the corpus should be the same.
    """
    if config.source is Source.synthetic:
        return Listing((), 0)
    listing = _list_stdlib() if config.source is Source.stdlib else _list_text(config)
    if unknown := unknown_language(listing.files, config):
        raise ValueError(unknown)
    return listing


def documents(config: DataConfig, listing: Listing) -> Iterator[Document | SyntheticDocument]:
    """Yield the documents of a source that are not empty, in the order of the listing and of the rows in a file."""
    if config.source is Source.synthetic:
        yield from synthetic_documents(config)
        return
    remote = any(isinstance(file, RemoteFile) for file in listing.files)
    for file in fetched_ahead(listing.files) if remote else listing.files:
        for document in read(file, config):
            if document.text:
                yield document


def is_single_text(config: DataConfig, listing: Listing) -> bool:
    """Return whether the source is one file that is one document, so that it has to be split inside."""
    if config.source is not Source.text or config.chunk is not Chunk.whole:
        return False
    return len(listing.files) == 1 and listing.files[0].suffix in WHOLE_FILE


def _list_stdlib() -> Listing:
    root = Path(sysconfig.get_paths()["stdlib"])
    files: list[SourceFile] = []
    if (root / "os.py").is_file():
        for path in _walk(root, lambda directory: directory in _NOT_STDLIB):
            if path.suffix == ".py":
                files.append(_plain_file(path.relative_to(root).as_posix(), path))
    else:
        for archive in (Path(entry) for entry in sys.path if entry.endswith(".zip")):
            if archive.is_file():
                files.extend(_list_zip(archive))
    files.sort(key=lambda file: file.id)
    size = sum(file.size for file in files)
    if size < MIN_STDLIB_BYTES:
        raise ValueError(
            f"data=stdlib found {len(files)} .py files with {size:,} bytes under {root} and on sys.path; it needs "
            f"{MIN_STDLIB_BYTES:,}. This Python comes without its source: use data=text data.paths=[FILES], "
            f"or data=synthetic."
        )
    return Listing(tuple(files), 0)


def _list_zip(archive: Path) -> Iterator[SourceFile]:
    mtime_ns = archive.stat().st_mtime_ns
    with zipfile.ZipFile(archive) as opened:
        for info in opened.infolist():
            if info.filename.endswith(".py") and not _NOT_STDLIB.intersection(Path(info.filename).parts):
                yield SourceFile(info.filename, archive, info.file_size, mtime_ns, info.filename)


def _list_text(config: DataConfig) -> Listing:
    if not config.paths:
        raise ValueError(
            f"data=text needs files: data.paths=[corpus.txt,'notes/**/*.md']. Read are {', '.join(SUFFIXES)}."
        )
    files: dict[Path, SourceFile] = {}
    remote: dict[str, RemoteFile] = {}
    skipped = 0
    for pattern in config.paths:
        is_remote = scheme_of(pattern) is not None
        matched = list_remote(pattern) if is_remote else _match(pattern)
        kept = [path for path in matched if path.suffix.lower() in SUFFIXES]
        if not kept:
            looked = "" if is_remote else f" (looked from {Path.cwd()})"
            raise ValueError(
                f"data.paths: {pattern} matches {len(matched)} files{looked}, none of them {', '.join(SUFFIXES)}."
            )
        skipped += len(matched) - len(kept)
        for path in kept:
            if isinstance(path, RemoteFile):
                remote[path.id] = path
            else:
                files[path.resolve()] = _plain_file(str(path), path)
    return Listing((*(files[path] for path in sorted(files)), *(remote[url] for url in sorted(remote))), skipped)


def _match(pattern: str) -> list[Path]:
    path = Path(pattern).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        inside = _walk(path, lambda directory: directory.startswith("."))
        return [child for child in inside if child.is_file() and not child.name.startswith(".")]
    if glob.has_magic(pattern):
        matched = (Path(name) for name in glob.glob(str(path), recursive=True))
        return [child for child in matched if child.is_file()]
    raise ValueError(f"data.paths: there is no file or directory {path} (looked from {Path.cwd()}).")


def _walk(root: Path, skip: Callable[[str], bool]) -> Iterator[Path]:
    """Yield the files under a directory, but not those in directories with a name to skip."""
    for directory, directories, names in os.walk(root):
        directories[:] = [name for name in directories if not skip(name)]
        yield from (Path(directory, name) for name in names)


def _plain_file(name: str, path: Path) -> SourceFile:
    status = path.stat()
    return SourceFile(name, path.resolve(), status.st_size, status.st_mtime_ns)
