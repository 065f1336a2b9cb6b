"""A child process of the launcher: one process of a training, with its group, log and exit status."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from valkyrie.processes.interrupt import EXIT_STATUS as INTERRUPTED
from valkyrie.processes.interrupt import PREEMPTED
from valkyrie.processes.team import LOST
from valkyrie.processes.team import REFUSED as USER_ERROR

__all__ = ["DONE", "INTERRUPTED", "LOST", "PREEMPTED", "USER_ERROR", "Process", "how_it_ended", "wait_for"]

DONE = 0
"""Exit status of a training that reached its last step."""

LAST_LINES = 20
"""Lines of a log that are shown when its process is the first to end."""
_LAST_BYTES = 64 * 2**10
_BECOME = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGKILL: kept by exec
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""


class Process:
    """A process of a training, in a separate session, so that it gets signals from the launcher alone.

    On Linux it is killed when the launcher is.

    Args:
        index: number of the process.
        command: the program and its arguments.
        environment: variables added to the launcher's.
        log: file to append output to, or None for the launcher's output.
    """

    def __init__(self, index: int, command: Sequence[str], environment: Mapping[str, str], log: Path | None) -> None:
        self.index, self.log = index, log
        with contextlib.ExitStack() as files:
            output = None
            if log is not None:
                log.parent.mkdir(parents=True, exist_ok=True)
                output = files.enter_context(log.open("ab"))
                self._log_starts_at = output.tell()
            self._process = subprocess.Popen(
                _ending_with_launcher(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **environment},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Exit status, negative for the signal that ended it, or None while it runs."""
        return self._process.poll()

    def send(self, number: int) -> None:
        """Send a signal to the process and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """Kill the process and its children."""
        self.send(signal.SIGKILL)
        self._process.wait()

    def last_lines(self) -> list[str]:
        """Return the last lines of its log, or an empty list if it has none."""
        if self.log is None:
            return []
        with contextlib.suppress(OSError), self.log.open("rb") as file:
            file.seek(max(self._log_starts_at, self.log.stat().st_size - _LAST_BYTES))
            return file.read().decode(errors="replace").splitlines()[-LAST_LINES:]
        return []


def how_it_ended(status: int) -> str:
    """Describe an exit status: `with status 1`, `by SIGKILL`."""
    if status >= 0:
        return f"with status {status}"
    with contextlib.suppress(ValueError):
        return f"by {signal.Signals(-status).name}"
    return f"by signal {-status}"


def wait_for(processes: Sequence[Process], seconds: float, poll_s: float = 0.02) -> None:
    """Wait until all have ended, for at most `seconds`."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and any(process.status is None for process in processes):
        time.sleep(poll_s)


def _ending_with_launcher(command: Sequence[str]) -> list[str]:
    """Return a command that executes the given one, and that the kernel kills when this process dies."""
    if shutil.which(command[0]) is None:
        raise FileNotFoundError(f"{command[0]} is not installed here, or not on the PATH.")
    if sys.platform != "linux":
        return [*command]
    return [sys.executable, "-I", "-S", "-c", _BECOME, str(os.getpid()), *command]
