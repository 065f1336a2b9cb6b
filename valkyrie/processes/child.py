"""Child processes: started in their own session, and signalled together with everything they start."""

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

from valkyrie.paths import open_to_append

LAST_LINES = 20
"""Lines of a log that are shown when its process is the first to end."""
_LAST_BYTES = 64 * 2**10
_BECOME = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGKILL: kept by exec
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""


class ChildProcess:
    """A child process in its own session, so that Ctrl-C in a terminal reaches this process alone.

    Args:
        command: The program and its arguments.
        environment: Variables added to those of this process.
        log: File to append stdout and stderr to, or None for those of this process.
        index: Number among the processes that are started together.
        dies_with_parent: Whether the kernel kills it when this process dies. Only Linux does.
        pass_fds: Open file descriptors that it inherits.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path | None = None,
        *,
        index: int = 0,
        dies_with_parent: bool = False,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.index, self.log = index, log
        with contextlib.ExitStack() as files:
            output = None
            if log is not None:
                log.parent.mkdir(parents=True, exist_ok=True)
                output = files.enter_context(open_to_append(log))
                self._log_starts_at = output.tell()
            self._process = subprocess.Popen(
                _dying_with_parent(command) if dies_with_parent else command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **environment},
                start_new_session=True,
                pass_fds=pass_fds,
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
        signal_group(self.pid, number)

    def kill(self) -> None:
        """Kill the process and its children, also the children of one that has ended."""
        self.send(signal.SIGKILL)
        self._process.wait()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the end, for at most `seconds`, and return whether it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
            return True
        return False

    def last_lines(self) -> list[str]:
        """Return the last lines that it printed to its log, or an empty list if it has none."""
        if self.log is None:
            return []
        with contextlib.suppress(OSError), self.log.open("rb") as file:
            file.seek(max(self._log_starts_at, self.log.stat().st_size - _LAST_BYTES))
            return file.read().decode(errors="replace").splitlines()[-LAST_LINES:]
        return []


def python_module(name: str, *arguments: str) -> tuple[str, ...]:
    """Return the command that runs a module with this Python.

    `-P` keeps the current folder off its path: a `random.py` of the user there must not replace Python's.
    """
    return (sys.executable, "-P", "-m", name, *arguments)


def signal_group(pid: int, number: int) -> None:
    """Send a signal to the remaining processes of a child's process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


def wait_for(processes: Sequence[ChildProcess], seconds: float, poll_s: float = 0.02) -> None:
    """Wait until all have ended, for at most `seconds`."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and any(process.status is None for process in processes):
        time.sleep(poll_s)


def _dying_with_parent(command: Sequence[str]) -> list[str]:
    """Return a command that executes the given one, and that the kernel kills when this process dies."""
    if shutil.which(command[0]) is None:
        raise FileNotFoundError(f"{command[0]} is not installed here, or not on the PATH.")
    if sys.platform != "linux":
        return [*command]
    return [sys.executable, "-I", "-S", "-c", _BECOME, str(os.getpid()), *command]
