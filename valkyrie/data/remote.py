"""Reads files from buckets and other remote file systems (`gs://`, `s3://`, `https://`, ...) through fsspec.

fsspec is imported on demand. Listing requests only names, sizes and checksums. Small files are fetched ahead of the
reader; larger ones are streamed.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from glob import has_magic
from pathlib import PurePosixPath
from typing import Any, BinaryIO, TypeVar

from valkyrie.buckets import silence_storage_logs, storage_requests, url_scheme
from valkyrie.data.threads import map_ahead
from valkyrie.paths import error_reason
from valkyrie.problems import Problem, ProblemCode

_VERSION_KEYS = (
    "md5Hash",
    "ETag",
    "etag",
    "generation",
    "blob_id",
    "LastModified",
    "last_modified",
    "mtime",
    "created",
)
"""Metadata keys with a value that changes with the content of a file, from several services, most reliable first."""
_LOGIN_COMMANDS = {"gs": "gcloud auth application-default login", "s3": "aws configure"}
_FILES_AHEAD = 16
"""Number of files fetched ahead, and in parallel."""
_MAX_FETCHED_BYTES = 4 * 2**20
"""Files up to this size, in bytes, are fetched ahead."""
_BUFFER_BYTES = 2**20
"""Buffer size for streamed files, in bytes."""
AnyFile = TypeVar("AnyFile")


@dataclass(frozen=True)
class RemoteFile:
    """A file read by fsspec.

    Args:
        id: its URL.
        size: its size in bytes.
        version: a checksum, tag or time that changes with the content.
        path: its path in the file system.
        filesystem: the fsspec file system.
        content: the content if it was fetched ahead, else None.
        key: the setting that error messages name.
    """

    id: str
    size: int
    version: str
    path: str
    filesystem: Any = field(compare=False, repr=False)
    content: bytes | None = field(default=None, compare=False, repr=False)
    key: str = field(default="data.paths", compare=False, repr=False)

    @property
    def suffix(self) -> str:
        """The suffix of the name in lower case, such as `.txt`."""
        return reader_suffix(self.path)

    @property
    def stamp(self) -> list[str | int | None]:
        """The values that identify this version of the file in a cache key: URL, size and version."""
        return [self.id, self.size, self.version]

    def read(self) -> bytes:
        """Return all bytes of the file, downloading them unless they were fetched ahead."""
        if self.content is not None:
            return self.content
        with _explain_errors(self.id, self.key):
            return self.filesystem.cat_file(self.path)

    @contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """Open the file as a binary stream, in a `with`. Downloads it while it is read, unless it was fetched ahead."""
        if self.content is not None:
            yield io.BytesIO(self.content)
            return
        with _explain_errors(self.id, self.key), self.filesystem.open(self.path, "rb") as file:
            # fsspec's own line iterator copies a whole block for each line.
            yield io.BufferedReader(file, _BUFFER_BYTES)


def reader_suffix(name: str) -> str:
    """Return the suffix that selects a file's reader, such as `.txt` or `.jsonl.zst`, in lower case.

    Ignores shard numbers: the suffix of `x.tfrecord-00001-of-00010` is `.tfrecord`.
    """
    suffixes = PurePosixPath(re.sub(r"-\d+-of-\d+$", "", name.lower())).suffixes
    return "".join(suffixes[-2:]) if suffixes[-2:] == [".jsonl", ".zst"] else suffixes[-1] if suffixes else ""


def list_remote(pattern: str, key: str = "data.paths") -> list[RemoteFile]:
    """Return the files of a file URL, a folder URL or a glob of URLs.

    Skips hidden files and folders, unless the glob names them, as in `gs://bucket/*/.cache/*`. Returns an empty list if
    a glob matches nothing. Raises ValueError if a file or folder does not exist, or if a request fails. `key` is the
    setting that error messages name.
    """
    with _explain_errors(pattern, key), storage_requests(f"{key}={pattern}"):
        from fsspec.core import url_to_fs

        filesystem, path = url_to_fs(pattern)
        filesystem.invalidate_cache()
        return [
            RemoteFile(
                filesystem.unstrip_protocol(name), info.get("size") or 0, _version(info), name, filesystem, key=key
            )
            for name, info in _match(filesystem, path, pattern, key).items()
        ]


def path_problems(paths: Iterable[str], key: str = "data.paths") -> list[Problem]:
    """Return a problem for each path that is empty, or a URL whose scheme is unknown or needs a missing package.

    `key` is the setting that error messages name.
    """
    problems: list[Problem] = []
    for path in paths:
        if not path:
            text = f"{key}: an empty string is not a path. Use . for the current folder."
            problems.append(Problem(ProblemCode.missing, key, path, text))
        elif (scheme := url_scheme(path)) is not None:
            problems += _scheme_problems(key, path, scheme)
    return problems


def fetch_ahead(files: Iterable[AnyFile]) -> Iterator[AnyFile]:
    """Yield files in order. Threads fetch the content of small remote files in advance."""
    return map_ahead(_fetch, files, workers=_FILES_AHEAD, ahead=_FILES_AHEAD)


def _fetch(file: Any) -> Any:
    if isinstance(file, RemoteFile) and file.size <= _MAX_FETCHED_BYTES:
        return replace(file, content=file.read())
    return file


def _match(filesystem: Any, path: str, pattern: str, key: str) -> Mapping[str, Mapping[str, Any]]:
    try:
        info = filesystem.info(path)
    except FileNotFoundError as error:
        # fsspec also raises this if an HTTP server cannot be reached
        if isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, FileNotFoundError):
            raise error.__cause__ from None
        info = None
    if info is not None and info["type"] == "file":
        return {path: info}
    if info is not None:
        root, infos = path, filesystem.find(path, detail=True)
    elif has_magic(path):
        root, infos = re.split(r"[*?[]", path)[0].rpartition("/")[0], filesystem.glob(path, detail=True)
    else:
        raise ValueError(f"{key}: there is no file or folder {pattern}.")
    includes_hidden = "/." in path[len(root) :]
    return {
        name: info
        for name, info in infos.items()
        if info["type"] == "file" and (includes_hidden or "/." not in name[len(root) :])
    }


def _version(info: Mapping[str, Any]) -> str:
    return str(next((info[key] for key in _VERSION_KEYS if info.get(key)), sorted(info.items())))


def _scheme_problems(key: str, path: str, scheme: str) -> list[Problem]:
    from fsspec.registry import known_implementations

    from valkyrie.buckets import package_problems

    implementation = known_implementations.get(scheme)
    if implementation is None:
        text = f"{key}={path}: {scheme}:// is unknown. Use gs://, s3:// or another scheme that fsspec supports."
        return [Problem(ProblemCode.unknown_name, key, path, text)]
    return package_problems(key, path, scheme, implementation["class"].partition(".")[0])


@contextmanager
def _explain_errors(url: str, key: str) -> Iterator[None]:
    """Convert errors of remote services to ValueError with the setting, the URL and a remedy.

    Also silences the services' logs.
    """
    scheme = url_scheme(url) or ""
    silence_storage_logs()
    try:
        yield
    except ValueError:
        raise
    except ImportError as error:
        raise ValueError(f"{key}={url}: {scheme}:// cannot be read: {error}.") from None
    except Exception as error:  # each service's package raises its own errors
        login = f" ({_LOGIN_COMMANDS[scheme]})" if scheme in _LOGIN_COMMANDS else ""
        raise ValueError(
            f"{key}={url} cannot be read: {error_reason(error)}. Check the name, the network, and this host's "
            f"credentials{login}."
        ) from error
