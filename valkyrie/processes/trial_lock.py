"""The lock of a trial: it runs once at a time, whatever sweeps share its folder, and no lost process keeps it.

Two locks, for two questions. `.sweep` is locked by the sweep that carries the trial out: is there one? `.process` is
locked by the trial's process alone, which inherits it: does one run that no sweep watches any more? A sweep that was
killed leaves such a process behind; the next sweep ends it and takes the trial over. On a file system without locks a
trial runs all the same, and a note says to run one sweep at a time.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
from functools import cache
from pathlib import Path
from typing import IO

from valkyrie.processes.locks import Lock, lock

_PATIENCE_S = 10.0
"""How long a process may take to be gone after SIGKILL."""


class TrialLock:
    """The lock of a trial that is carried out. `process_file` is for the trial's process to inherit (`pass_fds`)."""

    def __init__(self, sweep_file: IO[bytes], process_file: IO[bytes]) -> None:
        self._sweep_file, self.process_file = sweep_file, process_file

    @staticmethod
    def take(folder: Path) -> TrialLock | None:
        """Return the lock of a trial's folder, which is made if need be; None while another sweep carries it out."""
        folder.mkdir(parents=True, exist_ok=True)
        sweep_file = (folder / ".sweep").open("ab")
        outcome = lock(sweep_file, wait=False)
        if outcome is Lock.another:
            sweep_file.close()
            return None
        if outcome is Lock.unsupported:
            _warn_of_no_locks(folder.parent)
        process_file = (folder / ".process").open("a+b")
        if not _locked(process_file) and not _end_left_behind(process_file):
            process_file.close()
            sweep_file.close()
            return None
        process_file.truncate(0)  # the process it names is gone, and its number may be another's by now
        return TrialLock(sweep_file, process_file)

    def started(self, pid: int) -> None:
        """Say whose the process lock is from now on, and leave it to that process; OSError where the disk is full."""
        self.process_file.write(json.dumps({"pid": pid, "host": socket.gethostname()}).encode())
        self.process_file.close()

    def release(self) -> None:
        """Let others have the trial."""
        self.process_file.close()
        self._sweep_file.close()


def _locked(file: IO[bytes]) -> bool:
    return lock(file, wait=False) is not Lock.another


@cache
def _warn_of_no_locks(folder: Path) -> None:
    """Say once that nothing keeps two sweeps apart."""
    print(
        f"note: the file system of {folder} has no file locks (flock). Run one sweep at a time there: two would run "
        "the same trials, and a process left by a killed sweep is not ended.",
        file=sys.stderr,
    )


def _end_left_behind(file: IO[bytes]) -> bool:
    """End the process that a dead sweep left, if it is of this host, and return whether its lock is ours now."""
    file.seek(0)
    with contextlib.suppress(ValueError):  # torn or not yet written: nobody to name, so only waiting helps
        holder = json.loads(file.read())
        if holder["host"] == socket.gethostname():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(holder["pid"], signal.SIGKILL)
            until = time.monotonic() + _PATIENCE_S
            while time.monotonic() < until:
                if _locked(file):
                    return True
                time.sleep(0.02)
    return _locked(file)
