"""Paths of buckets, such as `gs://bucket/x`: told from those of a disk, and the package that serves a scheme."""

from __future__ import annotations

import re
from importlib.util import find_spec


def scheme_of(path: str) -> str | None:
    """Return `gs` of `gs://bucket/x`, without `://`; None of a path of a disk."""
    found = re.match(r"([A-Za-z][A-Za-z0-9+.-]+)://", path)
    return found[1] if found else None


def package_problems(asked: str, scheme: str, package: str) -> list[str]:
    """Return that a scheme cannot be served without its package, where that is not installed.

    `asked` is the setting as it was written: `checkpoint.folder=s3://bucket/x`.
    """
    if find_spec(package) is not None:
        return []
    return [f"{asked}: {scheme}:// needs the package {package}: uv pip install {package}."]


def needs_disk(key: str, path: str) -> list[str]:
    """Return that a setting takes no bucket, where its path is of one."""
    scheme = scheme_of(path)
    if scheme is None:
        return []
    return [
        f"{key}={path}: {scheme}:// is not read or written directly. "
        "Use a folder of a disk, for several hosts one that all of them mount: NFS, Filestore, a mounted bucket. "
        "What takes a bucket is data.paths and checkpoint.folder."
    ]
