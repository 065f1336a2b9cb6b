"""Checks the paths in settings.

A bucket such as `gs://bucket/x` needs a package for its scheme, and is not supported by every setting. The path of a
folder must not be a file.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from valkyrie.problems import Problem, ProblemCode

_NOTE_AFTER_S = 5.0
"""Seconds without an answer of a storage service after which a note is printed."""


def url_scheme(path: str) -> str | None:
    """Return the scheme of a bucket path, such as `gs` for `gs://bucket/x`, or None for a path on disk."""
    match = re.match(r"([A-Za-z][A-Za-z0-9+.-]+)://", path)
    return match[1] if match else None


def package_problems(key: str, path: str, scheme: str, package: str) -> list[Problem]:
    """Return a problem if the scheme of a path needs a package that is not installed."""
    if find_spec(package) is not None:
        return []
    text = f"{key}={path}: {scheme}:// needs the package {package}. Install it: uv pip install {package}"
    return [Problem(ProblemCode.not_installed, key, path, text)]


def bucket_problems(key: str, path: str) -> list[Problem]:
    """Return a problem if the path of `key`, a setting that takes only paths on disk, is in a bucket."""
    scheme = url_scheme(path)
    if scheme is None:
        return []
    text = (
        f"{key}={path}: buckets ({scheme}://) are supported only by data.paths, data.val_paths and checkpoint.folder. "
        "Use a local path. With several hosts, use a path that all hosts mount (NFS, Filestore, a mounted bucket)."
    )
    return [Problem(ProblemCode.unsupported, key, path, text)]


def file_problems(key: str, path: str) -> list[Problem]:
    """Return a problem if `path`, the folder that `key` sets, is a file or is inside one. It need not exist yet."""
    folder = Path(os.path.expanduser(path))
    file = next((parent for parent in (folder, *folder.parents) if os.path.isfile(parent)), None)
    if file is None:
        return []
    text = f"{key}={path} is a file, not a folder."
    if file != folder:
        text = f"{key}={path} cannot be a folder, because {file} is a file."
    return [Problem(ProblemCode.malformed, key, path, text)]


def silence_storage_logs() -> None:
    """Silence the logs of the services' packages. They log the traceback of an error that they then raise."""
    for package in ("gcsfs", "s3fs", "fsspec"):
        logging.getLogger(package).setLevel(logging.CRITICAL)


@contextlib.contextmanager
def storage_requests(setting: str) -> Iterator[None]:
    """Print a note to stderr if the requests to a storage service in this context take more than `_NOTE_AFTER_S`.

    Also silences the logs of the services' packages, which repeat requests several times before they raise an error.
    `setting` is the key and the path, such as `data.paths=gs://bucket/books`.
    """
    text = f"note: {setting}: waiting for the storage service. If it cannot be reached, an error follows its retries."
    silence_storage_logs()
    timer = threading.Timer(_NOTE_AFTER_S, lambda: print(text, file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
