"""Exclusive file locks of run folders and trials. The kernel releases them when their process ends.

Some network file systems have no locks. There, the process named in a folder's `.writer` file is looked up instead.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import IO

from valkyrie.paths import open_to_append
from valkyrie.processes.child import signal_group
from valkyrie.records import RecordError, dump, load

WRITER = ".writer"
"""File of a run folder that names the process that writes there."""
_PATIENCE_S = 10.0
"""Seconds that a process may take to disappear after SIGKILL."""


class LockState(Enum):
    """Result of requesting a lock."""

    ours = "ours"
    another = "another"  # held by another process
    unsupported = "unsupported"  # the file system has no locks


@dataclass(frozen=True)
class LockHolder:
    """Process that holds a lock."""

    host: str
    pid: int


def lock(file: IO[bytes] | IO[str], *, wait: bool = True) -> LockState:
    """Lock an open file until it is closed here and in every process that inherited it.

    With `wait` the result is never `another`. It is `unsupported` on Lustre without `-o flock` and NFS without a lock
    daemon: callers continue without a lock, and warn where that matters.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return LockState.another
    except OSError:
        return LockState.unsupported
    return LockState.ours


@contextlib.contextmanager
def write_lock(folder: Path) -> Iterator[None]:
    """Hold an exclusive write lock on a folder, creating it if missing.

    Takes over the lock of a killed process. Raises ValueError with the host and process that already writes there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / WRITER
    with open_to_append(path) as file:
        state, writer = lock(file, wait=False), _read_holder(file)
        if state is LockState.another or (state is LockState.unsupported and _may_run(writer)):
            raise ValueError(_in_use(folder, path, writer, state))
        _write_holder(file, os.getpid())
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # the disk may be gone
                file.truncate(0)


class TrialLock:
    """Ensures that a trial runs once at a time, although several sweeps may share its folder.

    Consists of two files. `.sweep` is locked by the sweep that runs the trial. `.process` is locked by the trial's
    process alone, which inherits it through `process_file` (`pass_fds`): a sweep that was killed leaves such a process
    behind, and the next sweep ends it. Without file locks trials run all the same, and a note recommends one sweep at
    a time.
    """

    def __init__(self, sweep_file: IO[bytes], process_file: IO[bytes]) -> None:
        self._sweep_file, self.process_file = sweep_file, process_file

    @staticmethod
    def take(folder: Path) -> TrialLock | None:
        """Lock a trial's folder, creating it if missing. Returns None while another sweep runs the trial."""
        folder.mkdir(parents=True, exist_ok=True)
        sweep_file = open_to_append(folder / ".sweep")
        state = lock(sweep_file, wait=False)
        if state is LockState.another:
            sweep_file.close()
            return None
        if state is LockState.unsupported:
            _warn_without_locks(folder.parent)
        process_file = open_to_append(folder / ".process")
        if not _is_free(process_file) and not _end_orphan(process_file):
            process_file.close()
            sweep_file.close()
            return None
        process_file.truncate(0)  # the process it names is gone, and its number may be another's by now
        return TrialLock(sweep_file, process_file)

    def started(self, pid: int) -> None:
        """Record the trial's process and leave the process lock to it. Raises OSError if the disk is full."""
        _write_holder(self.process_file, pid)
        self.process_file.close()

    def release(self) -> None:
        """Release the lock."""
        self.process_file.close()
        self._sweep_file.close()


def _is_free(file: IO[bytes]) -> bool:
    return lock(file, wait=False) is not LockState.another


def _end_orphan(file: IO[bytes]) -> bool:
    """End the process that a dead sweep left on this host. Returns whether its lock is ours now."""
    holder = _read_holder(file)
    if holder is None or holder.host != socket.gethostname():
        return _is_free(file)
    signal_group(holder.pid, signal.SIGKILL)
    until = time.monotonic() + _PATIENCE_S
    while not (free := _is_free(file)) and time.monotonic() < until:
        time.sleep(0.02)
    return free


@cache
def _warn_without_locks(folder: Path) -> None:
    print(
        f"note: the file system of {folder} has no file locks (flock). Run one sweep at a time there: two would run "
        "the same trials, and a process left by a killed sweep is not ended.",
        file=sys.stderr,
    )


def _read_holder(file: IO[bytes]) -> LockHolder | None:
    """Return the process that a lock file names, or None if it is empty or torn."""
    file.seek(0)
    with contextlib.suppress(RecordError):
        return load(LockHolder, file.read(), str(file.name))
    return None


def _write_holder(file: IO[bytes], pid: int) -> None:
    file.truncate(0)
    file.write(dump(LockHolder(socket.gethostname(), pid)).encode())
    file.flush()


def _may_run(writer: LockHolder | None) -> bool:
    """Return whether a writer may still run. One on another host always may."""
    if writer is None or writer.host != socket.gethostname():
        return writer is not None
    if writer.pid == os.getpid():
        return False
    try:
        os.kill(writer.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _in_use(folder: Path, path: Path, writer: LockHolder | None, state: LockState) -> str:
    who = f"process {writer.pid} on {writer.host}" if writer else "another process"
    remedy = f" If that is gone, delete {path}." if state is LockState.unsupported else ""
    return f"{folder} is written by {who}: a run has one writer at a time. Wait for it, or use another name=.{remedy}"
