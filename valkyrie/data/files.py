"""Resolves paths, directories, globs and URLs to files, always in the same order."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from valkyrie.buckets import url_scheme
from valkyrie.checksums import digest
from valkyrie.data.chunks import LANGUAGE_BY_SUFFIX, PROSE_SUFFIXES, Chunking
from valkyrie.data.readers import (
    SINGLE_DOCUMENT_SUFFIXES,
    SUFFIXES,
    Document,
    File,
    ReadOptions,
    SourceFile,
    read_documents,
)
from valkyrie.data.remote import RemoteFile, fetch_ahead, list_remote, reader_suffix
from valkyrie.units import count_text

_MAX_NAMES = 5
"""Maximum number of names or suffixes in a note about skipped files."""


@dataclass(frozen=True)
class Listing:
    """The files of a source.

    Args:
        files: the files to read.
        skipped_names: names of the other matched files (unsupported suffixes, broken links, pipes and devices), and of
            folders that this user may not read.
        empty_rows: (rows without text, all rows) by file ID. `read_files` adds files with rows without text.
    """

    files: tuple[File, ...]
    skipped_names: tuple[str, ...] = ()
    empty_rows: dict[str, tuple[int, int]] = field(default_factory=dict, compare=False)

    @property
    def bytes(self) -> int:
        """Size of all files, in bytes."""
        return sum(file.size for file in self.files)

    @property
    def signature(self) -> str:
        """One hash of the path, size and modification time of all files (of remote files: URL, size and version)."""
        return digest([file.stamp for file in self.files])

    def skip_notes(self, key: str = "data.paths") -> Iterator[str]:
        """Yield notes about the files in `skipped_names`. `key` is the setting that matches them."""
        folders = [name for name in self.skipped_names if os.path.isdir(name)]
        names = [name for name in self.skipped_names if name not in folders]
        unreadable_names = [name for name in names if reader_suffix(name) in SUFFIXES]
        suffixes = sorted({reader_suffix(name) or "none" for name in names} - {*SUFFIXES})
        unreadable_count = len(unreadable_names)
        for count, noun, fault, details in (
            (len(names) - unreadable_count, "file", "with an unsupported suffix (", suffixes),
            (unreadable_count, "file", "without content (broken links, pipes or devices: ", unreadable_names),
            (len(folders), "folder", "that cannot be read (permission denied: ", folders),
        ):
            if count:
                more_text = ", ..." if len(details) > _MAX_NAMES else ""
                files_text = f"{count_text(count, noun)} {fault}{', '.join(details[:_MAX_NAMES])}{more_text})"
                yield f"{key}: {files_text} {'is' if count == 1 else 'are'} skipped."


def read_files(listing: Listing, options: ReadOptions) -> Iterator[Document]:
    """Read the non-empty documents, in the order of the listing. Remote files are fetched ahead.

    After a file with rows without text, records their number in `listing.empty_rows`, except for files of one document
    each (`SINGLE_DOCUMENT_SUFFIXES`). Raises ValueError if a file is damaged (see `read_documents`).
    """
    has_remote_files = any(isinstance(file, RemoteFile) for file in listing.files)
    for file in fetch_ahead(listing.files) if has_remote_files else listing.files:
        row_count = empty_row_count = 0
        for document in read_documents(file, options):
            row_count += 1
            if document.text:
                yield document
            else:
                empty_row_count += 1
        if empty_row_count and file.suffix not in SINGLE_DOCUMENT_SUFFIXES:
            listing.empty_rows[file.id] = empty_row_count, row_count


def empty_rows_note(counts_by_file: Mapping[str, Sequence[int]], total: int | None = None) -> str | None:
    """Return a note about the file with the most rows without text, or None if there are no files.

    Args:
        counts_by_file: [rows without text, all rows] by file, as in `Listing.empty_rows`.
        total: number of rows without text in all files, or None for the sum over `counts_by_file`.
    """
    if not counts_by_file:
        return None
    name, (empty_row_count, row_count) = max(counts_by_file.items(), key=lambda item: item[1][0])
    total = total or sum(count for count, _ in counts_by_file.values())
    verbs = ("has", "is") if empty_row_count == 1 else ("have", "are")
    total_text = f" ({total:,} in all files)" if total != empty_row_count else ""
    return f"{name}: {empty_row_count:,} of {row_count:,} rows {verbs[0]} no text and {verbs[1]} skipped{total_text}."


def list_paths(paths: Sequence[str], options: ReadOptions, key: str = "data.paths") -> Listing:
    """Expand files, directories, globs and URLs to the files with a supported suffix.

    Directories are searched recursively, except for hidden files and folders. Raises ValueError if `paths` is empty, if
    a path matches no such file or cannot be read, or if `options.chunk` is `functions` and the language of a file is
    unknown. `key` is the setting that error messages name.
    """
    if not paths:
        raise ValueError(
            "data=text needs files, such as data.paths=[corpus.txt,'notes/**/*.md']. Supported suffixes: "
            f"{', '.join(SUFFIXES)}."
        )
    local_files: dict[Path, SourceFile] = {}
    remote_files: dict[str, RemoteFile] = {}
    skipped_names: set[str] = set()
    for pattern in paths:
        is_remote = url_scheme(pattern) is not None
        matches = list_remote(pattern, key) if is_remote else _match(pattern, key)
        matched_files = [match for match in matches if isinstance(match, RemoteFile) or match.is_file()]
        readable_files = [file for file in matched_files if reader_suffix(_name(file)) in SUFFIXES]
        if not readable_files:
            _refuse_locked_folder(pattern, matches, key)
            searched_from = "" if is_remote else f" (current folder: {Path.cwd()})"
            raise ValueError(
                f"{key}: {pattern} matches {count_text(len(matched_files), 'file')}{searched_from}, none with a "
                f"supported suffix: {', '.join(SUFFIXES)}."
            )
        skipped_names |= {*map(_name, matches)} - {*map(_name, readable_files)}
        for file in readable_files:
            if isinstance(file, RemoteFile):
                remote_files[file.id] = file
            else:
                local_files[file.resolve()] = local_file(str(file), file)
    listing = Listing(
        (*(local_files[path] for path in sorted(local_files)), *(remote_files[url] for url in sorted(remote_files))),
        tuple(sorted(skipped_names)),
    )
    if options.chunk is not Chunking.whole and options.language is None:
        for file in listing.files:
            if file.suffix not in (*LANGUAGE_BY_SUFFIX, *PROSE_SUFFIXES):
                raise ValueError(
                    f"{file.id}: data.chunk=functions needs to know the language of the documents, which cannot be "
                    f"inferred from {file.suffix}. Set data.language=c, data.language=cpp or data.language=python."
                )
    return listing


def _name(file: Path | RemoteFile) -> str:
    return str(file) if isinstance(file, Path) else file.path


def _match(pattern: str, key: str) -> list[Path]:
    path = Path(pattern).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        if not _may_list(path):
            raise _locked_folder_error(path, key)
        children = walk(path, lambda directory: directory.startswith("."))
        return [child for child in children if not child.name.startswith(".")]
    if glob.has_magic(pattern):
        children = map(Path, dict.fromkeys(_glob(path)))
        return [child for child in children if not child.is_dir() or not _may_list(child)]
    if path.exists():
        raise ValueError(f"{key}: {path} is not a regular file. Write its text to a file, such as corpus.txt.")
    raise ValueError(f"{key}: there is no file or directory {path} (current folder: {Path.cwd()}).")


def _refuse_locked_folder(pattern: str, matches: Sequence[Path | RemoteFile], key: str) -> None:
    """Raise ValueError if this user may not read the folder of a pattern, or a folder among its matches."""
    parents = (parent for parent in Path(pattern).expanduser().parents if not glob.has_magic(str(parent)))
    for folder in (*(match for match in matches if isinstance(match, Path)), *islice(parents, 1)):
        if os.path.isdir(folder) and not _may_list(folder):
            raise _locked_folder_error(folder, key)


def _locked_folder_error(folder: Path, key: str) -> ValueError:
    return ValueError(f"{key}: {folder} cannot be read (permission denied). Run chmod u+rx on it, or ask its owner.")


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
            yield from _folders_without_access(directory, directories)
            yield from _glob(Path(glob.escape(directory)) / remaining_pattern)


def walk(root: Path, skip: Callable[[str], bool]) -> Iterator[Path]:
    """Yield the files under a directory, and the directories that this user may not read.

    Does not enter directories for which `skip(name)` is True.
    """
    for directory, directories, names in os.walk(root):
        directories[:] = [name for name in directories if not skip(name)]
        yield from map(Path, _folders_without_access(directory, directories))
        yield from (Path(directory, name) for name in names)


def _folders_without_access(directory: str, names: Sequence[str]) -> Iterator[str]:
    yield from (path for name in names if not _may_list(path := os.path.join(directory, name)))


def _may_list(folder: str | Path) -> bool:
    """Return whether this user may list a folder and open its files."""
    return os.access(folder, os.R_OK | os.X_OK)


def local_file(name: str, path: Path) -> SourceFile:
    """Return the `SourceFile` for a local file. Messages refer to it as `name`.

    Raises ValueError if this user may not read the file.
    """
    status = path.stat()
    if not os.access(path, os.R_OK):
        raise ValueError(f"{name} cannot be read (permission denied). Run chmod u+r on it, or ask its owner.")
    return SourceFile(name, path.resolve(), status.st_size, status.st_mtime_ns)
