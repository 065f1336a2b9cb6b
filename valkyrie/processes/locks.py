"""Exclusive file locks for run folders and trials. The kernel releases them when their process ends.

Some network file systems do not support locks. On these, a folder counts as locked while the process named in its lock
file is running.
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

WRITER_FILE = ".writer"
"""File in a run folder that names the process writing to it."""
SWEEP_LOCK_FILE = ".sweep"
"""File in a trial's folder that the sweep that runs the trial has locked."""
_KILL_TIMEOUT_S = 10.0
"""Seconds to wait for a process to end after SIGKILL."""


class LockState(Enum):
    """Result of a lock request."""

    acquired = "acquired"
    held = "held"  # held by another process
    unsupported = "unsupported"  # the file system has no locks


@dataclass(frozen=True)
class LockHolder:
    """The process that holds a lock, as the lock file records it."""

    host: str
    pid: int


def lock(file: IO[bytes] | IO[str] | int, *, wait: bool = True) -> LockState:
    """Lock an open file until this process and every process that inherited it have closed it.

    Returns `held` if another process holds the lock and `wait` is false. Returns `unsupported` on Lustre without
    `-o flock` and on NFS without a lock daemon. Callers then continue without a lock and may print a warning.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return LockState.held
    except OSError:
        return LockState.unsupported
    return LockState.acquired


@contextlib.contextmanager
def write_lock(folder: Path, alternative: str = "another name=", file_name: str = WRITER_FILE) -> Iterator[None]:
    """Hold an exclusive write lock on a folder, creating it if missing.

    Takes over the lock of a process that was killed. Raises ValueError, which suggests `alternative`, if another
    process holds the lock. `file_name` is the lock file in the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file_name
    with open_to_append(path) as file:
        state, writer = lock(file, wait=False), _read_holder(file)
        if state is LockState.held or (state is LockState.unsupported and _may_be_running(writer)):
            raise ValueError(_in_use_message(folder, path, writer, state, alternative))
        _write_holder(file, os.getpid())
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # the disk may be gone
                file.truncate(0)


def is_being_written(folder: Path) -> bool:
    """Return whether a process holds the write lock of a folder."""
    try:
        with (folder / WRITER_FILE).open("rb") as file:
            state = lock(file, wait=False)
            return state is LockState.held or (state is LockState.unsupported and _may_be_running(_read_holder(file)))
    except OSError:
        return False


class TrialLock:
    """Prevents several sweeps that share a folder from running the same trial at the same time.

    There are two lock files. The sweep that runs the trial locks `.sweep`. The trial's process inherits `process_file`
    (through `pass_fds`) and keeps `.process` locked. If a sweep is killed, its trial's process may survive; the next
    sweep detects it by this lock and kills it. On file systems without locks, trials run anyway and a note is printed.
    """

    def __init__(self, sweep_file: IO[bytes], process_file: IO[bytes]) -> None:
        self._sweep_file, self.process_file = sweep_file, process_file

    @staticmethod
    def acquire(folder: Path) -> TrialLock | None:
        """Lock a trial's folder, creating it if missing. Kills a process that a dead sweep left running on this host.

        Returns None if another sweep runs the trial, or if the process of a dead sweep is still running.
        """
        folder.mkdir(parents=True, exist_ok=True)
        sweep_file = open_to_append(folder / SWEEP_LOCK_FILE)
        state = lock(sweep_file, wait=False)
        if state is LockState.held:
            sweep_file.close()
            return None
        if state is LockState.unsupported:
            _warn_without_locks(folder.parent)
        process_file = open_to_append(folder / ".process")
        if not _try_lock(process_file) and not _end_orphan(process_file):
            process_file.close()
            sweep_file.close()
            return None
        process_file.truncate(0)  # it names a process that has ended and whose id may be in use again
        return TrialLock(sweep_file, process_file)

    def hand_over(self, pid: int) -> None:
        """Record the trial's process and hand the process lock over to it. Raises OSError if the disk is full."""
        _write_holder(self.process_file, pid)
        self.process_file.close()

    def release(self) -> None:
        """Close this process's lock files. The trial's process keeps `.process` locked until it ends."""
        self.process_file.close()
        self._sweep_file.close()


def _try_lock(file: IO[bytes]) -> bool:
    """Lock a file without waiting. Returns False only if another process holds the lock."""
    return lock(file, wait=False) is not LockState.held


def _end_orphan(file: IO[bytes]) -> bool:
    """Kill the process that a dead sweep left running on this host. Returns whether this process now locks `file`."""
    holder = _read_holder(file)
    if holder is None or holder.host != socket.gethostname():
        return _try_lock(file)
    signal_group(holder.pid, signal.SIGKILL)
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    while not (locked := _try_lock(file)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return locked


@cache
def _warn_without_locks(folder: Path) -> None:
    print(
        f"note: the file system of {folder} does not support file locks (flock). Run only one sweep at a time there. "
        "Otherwise, trials may run twice, and the processes of a killed sweep may keep running.",
        file=sys.stderr,
    )


def _read_holder(file: IO[bytes]) -> LockHolder | None:
    """Return the process that a lock file names, or None if the file is empty or incomplete."""
    file.seek(0)
    with contextlib.suppress(RecordError):
        return load(LockHolder, file.read(), str(file.name))
    return None


def _write_holder(file: IO[bytes], pid: int) -> None:
    file.truncate(0)
    file.write(dump(LockHolder(socket.gethostname(), pid)).encode())
    file.flush()


def _may_be_running(writer: LockHolder | None) -> bool:
    """Return whether a writer may still be running: False if None or this process, True if it is on another host."""
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


def _in_use_message(folder: Path, path: Path, writer: LockHolder | None, state: LockState, alternative: str) -> str:
    owner = f"process {writer.pid} on {writer.host}" if writer else "another process"
    remedy = f" If that process has ended, delete {path}." if state is LockState.unsupported else ""
    return f"{folder} is in use by {owner}. Wait for it, or use {alternative}.{remedy}"
