"""Starts child processes, each in a new session, so that signals can be sent to a child and all its descendants."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from valkyrie.paths import open_to_append

MAX_LOG_LINES = 20
"""Maximum number of lines that `ChildProcess.last_lines` returns."""
_MAX_LOG_BYTES = 64 * 2**10
_EXEC_SCRIPT = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGKILL: survives exec
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""


class ChildProcess:
    """A child process in a new session, so that Ctrl-C in the terminal does not reach it.

    Args:
        command: The program and its arguments.
        environment: Environment variables in addition to those of this process.
        log: File that stdout and stderr are appended to, or None to share the streams of this process.
        index: Number of the child among those started together.
        dies_with_parent: Whether the kernel kills the child when this process dies. Works only on Linux.
        pass_fds: Open file descriptors that the child inherits.
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
                self._log_offset = output.tell()
            self._process = subprocess.Popen(
                _wrap_to_die_with_parent(command) if dies_with_parent else command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **environment},
                start_new_session=True,
                pass_fds=pass_fds,
            )

    @property
    def pid(self) -> int:
        """Process id of the child, which is also that of its process group."""
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Exit status, the negative signal number if a signal ended the process, or None while it runs."""
        return self._process.poll()

    def send(self, signum: int) -> None:
        """Send a signal to the process and its descendants. Does nothing if all of them have ended."""
        signal_group(self.pid, signum)

    def kill(self) -> None:
        """Kill the process and its descendants, even if the process itself has ended, and wait for the process."""
        self.send(signal.SIGKILL)
        self._process.wait()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait at most `timeout_s` seconds for the process to end, or forever if None. Returns whether it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
            return True
        return False

    def last_lines(self) -> list[str]:
        """Return the last lines that the process wrote to its log (at most `MAX_LOG_LINES`). Empty without a log."""
        if self.log is None:
            return []
        with contextlib.suppress(OSError), self.log.open("rb") as file:
            file.seek(max(self._log_offset, self.log.stat().st_size - _MAX_LOG_BYTES))
            return file.read().decode(errors="replace").splitlines()[-MAX_LOG_LINES:]
        return []


def run_streamed(command: Sequence[str], on_line: Callable[[str], object]) -> tuple[int, str]:
    """Run a command, pass every line of its stdout to `on_line`, and return its exit status and its stderr.

    On Ctrl-C, interrupts the command, waits until it has ended and raises KeyboardInterrupt. Another Ctrl-C kills it.
    Raises FileNotFoundError if the program is not installed.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as stderr_file:
        process = subprocess.Popen(
            _wrap_to_die_with_parent(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr_file,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        assert process.stdout is not None
        try:
            try:
                for line in process.stdout:
                    on_line(line.rstrip("\n"))
                status = process.wait()
            except KeyboardInterrupt:
                process.send_signal(signal.SIGINT)
                for line in process.stdout:
                    on_line(line.rstrip("\n"))
                process.wait()
                raise
        finally:
            process.stdout.close()
            if process.poll() is None:
                signal_group(process.pid, signal.SIGKILL)
                process.wait()
        stderr_file.seek(0)
        return status, stderr_file.read()


def module_command(name: str, *arguments: str) -> tuple[str, ...]:
    """Return the command that runs a module with this Python.

    `-P` keeps the current folder out of `sys.path`, where a user's `random.py` would replace Python's.
    """
    return (sys.executable, "-P", "-m", name, *arguments)


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process, a fork of the process `parent`, when that dies. Works only on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def signal_group(pid: int, signum: int) -> None:
    """Send a signal to a child and its descendants. Does nothing if all of them have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signum)


def wait_for(processes: Sequence[ChildProcess], timeout_s: float, poll_s: float = 0.02) -> None:
    """Wait until all processes have ended, at most `timeout_s` seconds. Leaves the remaining processes running."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and any(process.status is None for process in processes):
        time.sleep(poll_s)


def _wrap_to_die_with_parent(command: Sequence[str]) -> list[str]:
    """Wrap a command so that the kernel kills it when this process dies. Outside of Linux, returns it unchanged.

    Raises FileNotFoundError if the program is not installed.
    """
    if shutil.which(command[0]) is None:
        raise FileNotFoundError(f"{command[0]} is not installed, or not on the PATH.")
    if sys.platform != "linux":
        return [*command]
    return [sys.executable, "-I", "-S", "-c", _EXEC_SCRIPT, str(os.getpid()), *command]
