"""Exclusive locks of open files, which end with the processes that have them; some file systems have none.

Where there are none, a file that names its writer stands in: one of this host is looked up among the processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import IO, Any

WRITER = ".writer"
"""The file of a folder that names the process which writes there."""


class Lock(Enum):
    """What asking for a lock comes to: it is ours, another process has it, or the file system has no locks."""

    ours = "ours"
    another = "another"
    unsupported = "unsupported"


def lock(file: IO[Any], *, wait: bool = True) -> Lock:
    """Lock an open file until it is closed here and in every process that inherited it.

    With `wait` the answer is never `another`. On network file systems without locks (Lustre without `-o flock`, NFS
    without a lock daemon) it is `unsupported`: callers go on without, and say so where that matters.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return Lock.another
    except OSError:
        return Lock.unsupported
    return Lock.ours


@contextlib.contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Be the only process that writes a folder, which is made if need be, inside this context.

    ValueError names the host and the process that writes it already. A lock that a killed process left is taken over.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / WRITER
    with path.open("a+b") as file:
        taken = lock(file, wait=False)
        writer = _writer(file)
        if taken is Lock.another or (taken is Lock.unsupported and _may_live(writer)):
            raise ValueError(_in_use(folder, path, writer, taken))
        file.truncate(0)
        file.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode())
        file.flush()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # the disk may be gone
                file.truncate(0)


def _writer(file: IO[bytes]) -> dict[str, Any]:
    file.seek(0)
    with contextlib.suppress(ValueError):
        writer = json.loads(file.read())
        if isinstance(writer, dict) and isinstance(writer.get("pid"), int):
            return writer
    return {}


def _may_live(writer: dict[str, Any]) -> bool:
    """Return whether a writer may be at work still: always where it is of another host."""
    if not writer or writer.get("host") != socket.gethostname():
        return bool(writer)
    if writer["pid"] == os.getpid():
        return False
    try:
        os.kill(writer["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _in_use(folder: Path, path: Path, writer: dict[str, Any], taken: Lock) -> str:
    who = f"process {writer['pid']} on {writer.get('host')}" if writer else "another process"
    remedy = f" If that is gone, delete {path}." if taken is Lock.unsupported else ""
    return f"{folder} is written by {who}: a run has one writer at a time. Wait for it, or use another name=.{remedy}"
