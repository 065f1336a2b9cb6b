"""Resolves paths, directories, globs and URLs to files, always in the same order."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from valkyrie.buckets import url_scheme
from valkyrie.checksums import digest
from valkyrie.data.chunks import LANGUAGE_BY_SUFFIX, PROSE_SUFFIXES, Chunk
from valkyrie.data.readers import SUFFIXES, Document, File, ReadOptions, SourceFile, read
from valkyrie.data.remote import RemoteFile, fetch_ahead, list_remote
from valkyrie.units import count_text


@dataclass(frozen=True)
class Listing:
    """The files of a source, before they are read. `skipped` counts matched files with an unsupported suffix."""

    files: tuple[File, ...]
    skipped: int = 0

    @property
    def bytes(self) -> int:
        """Size of all files, in bytes."""
        return sum(file.size for file in self.files)

    @property
    def signature(self) -> str:
        """One hash of the path, size and modification time of all files (of remote files: URL, size and version)."""
        return digest([file.stamp for file in self.files])


def read_files(listing: Listing, options: ReadOptions) -> Iterator[Document]:
    """Read the non-empty documents, in the order of the listing. Remote files are fetched ahead."""
    has_remote_files = any(isinstance(file, RemoteFile) for file in listing.files)
    for file in fetch_ahead(listing.files) if has_remote_files else listing.files:
        for document in read(file, options):
            if document.text:
                yield document


def list_paths(paths: Sequence[str], options: ReadOptions, key: str = "data.paths") -> Listing:
    """Expand files, directories, globs and URLs to the files with a supported suffix.

    Raises ValueError if a path matches no such file, or if `options.chunk` is `functions` and the language of a file is
    unknown. `key` is the setting that error messages name.
    """
    if not paths:
        raise ValueError(
            "data=text needs files, such as data.paths=[corpus.txt,'notes/**/*.md']. Supported suffixes: "
            f"{', '.join(SUFFIXES)}."
        )
    local_files: dict[Path, SourceFile] = {}
    remote_files: dict[str, RemoteFile] = {}
    skipped = 0
    for pattern in paths:
        is_remote = url_scheme(pattern) is not None
        matched_files = list_remote(pattern) if is_remote else _match(pattern, key)
        readable_files = [path for path in matched_files if path.suffix.lower() in SUFFIXES]
        if not readable_files:
            searched_from = "" if is_remote else f" (looked from {Path.cwd()})"
            raise ValueError(
                f"{key}: {pattern} matches {count_text(len(matched_files), 'file')}{searched_from}, none with a "
                f"supported suffix: {', '.join(SUFFIXES)}."
            )
        skipped += len(matched_files) - len(readable_files)
        for path in readable_files:
            if isinstance(path, RemoteFile):
                remote_files[path.id] = path
            else:
                local_files[path.resolve()] = local_file(str(path), path)
    listing = Listing(
        (*(local_files[path] for path in sorted(local_files)), *(remote_files[url] for url in sorted(remote_files))),
        skipped,
    )
    if options.chunk is not Chunk.whole and options.language is None:
        for file in listing.files:
            if file.suffix not in (*LANGUAGE_BY_SUFFIX, *PROSE_SUFFIXES):
                raise ValueError(
                    f"{file.id}: data.chunk=functions needs to know the language of the documents, which cannot be "
                    f"inferred from {file.suffix}. Set data.language=c, data.language=cpp or data.language=python."
                )
    return listing


def _match(pattern: str, key: str) -> list[Path]:
    path = Path(pattern).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        if not os.access(path, os.R_OK | os.X_OK):
            raise ValueError(
                f"{key}: {path} cannot be read (permission denied). Run chmod u+rx on it, or ask its owner."
            )
        children = walk(path, lambda directory: directory.startswith("."))
        return [child for child in children if child.is_file() and not child.name.startswith(".")]
    if glob.has_magic(pattern):
        return [child for child in map(Path, dict.fromkeys(_glob(path))) if child.is_file()]
    if path.exists():
        raise ValueError(f"{key}: {path} is not a regular file. Write its text to a file, such as corpus.txt.")
    raise ValueError(f"{key}: there is no file or directory {path} (looked from {Path.cwd()}).")


def _glob(pattern: Path) -> Iterator[str]:
    """Yield the paths that match a pattern, possibly more than once.

    Unlike `glob.glob`, `**` enters each directory only once, even if symbolic links form a cycle.
    """
    if "**" not in pattern.parts:
        yield from glob.glob(str(pattern))
        return
    i = pattern.parts.index("**")
    remaining_pattern = Path(*pattern.parts[i + 1 :] or "*")
    for root in glob.glob(str(Path(*pattern.parts[:i]))) if i else ["."]:
        visited: set[str] = set()
        for directory, directories, _ in os.walk(root, followlinks=True):
            if (real_path := os.path.realpath(directory)) in visited:
                directories.clear()
                continue
            visited.add(real_path)
            directories[:] = [name for name in directories if not name.startswith(".")]
            yield from _glob(Path(glob.escape(directory)) / remaining_pattern)


def walk(root: Path, skip: Callable[[str], bool]) -> Iterator[Path]:
    """Yield the files under a directory. Does not enter directories for which `skip(name)` is True."""
    for directory, directories, names in os.walk(root):
        directories[:] = [name for name in directories if not skip(name)]
        yield from (Path(directory, name) for name in names)


def local_file(name: str, path: Path) -> SourceFile:
    """Return the `SourceFile` for a local file. Messages refer to it as `name`."""
    status = path.stat()
    return SourceFile(name, path.resolve(), status.st_size, status.st_mtime_ns)
