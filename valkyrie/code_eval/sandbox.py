"""A sandbox for untrusted programs: no network, none of the user's files, and limits on resources.

The sandbox is created with the tools of util-linux:

- Mount, PID, network, IPC and UTS namespaces separate programs from the rest of the machine.
- The root file system has read-only system folders and a small writable tmpfs with the program's files.
- Programs cannot gain privileges. They run under an unused user ID if this process is root, else in a user namespace.
- CPU time, memory, processes, files and output are limited.

When a program exceeds its time or output limit, the first process of the PID namespace is killed. The kernel then kills
all other processes in the namespace.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import re
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from valkyrie.code_eval.sandbox_script import Isolation, SandboxStep, build_script
from valkyrie.processes.child import signal_group

TOOLS = ("unshare", "setpriv", "prlimit", "pivot_root", "mount", "umount", "sh")
"""Programs needed to build a sandbox."""
OUTPUT_BYTES = 64 * 1024
"""Maximum output of a program, in bytes. A program that prints more is killed."""
_FIRST_USER, _USER_COUNT = 1_900_000_000, 100_000
_SETUP_S = 20.0
"""Seconds allowed for creating the sandbox, and between steps. Ample, because the machine may be busy."""
_user_numbers = itertools.count(os.getpid() * 64)


@dataclass(frozen=True)
class SandboxStepResult:
    """Result of one command run in the sandbox (a `SandboxStep`).

    Args:
        status: Exit status as in a shell: 128 + n if signal n killed the command.
        output: The command's standard output and error, combined and cut to twice `OUTPUT_BYTES`.
        seconds: Wall time in seconds.
        limit: The limit that was exceeded, `time` or `output`, or None.
    """

    status: int
    output: str
    seconds: float
    limit: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the command exited with status 0, within its limits."""
        return self.status == 0 and self.limit is None


class SandboxError(RuntimeError):
    """The sandbox could not be created. The message includes the output of the failed tool, if there is any."""


def run_steps(
    files: Mapping[str, str], steps: Sequence[SandboxStep], *, isolated: bool = True
) -> list[SandboxStepResult]:
    """Run steps in sequence in a temporary folder, and return their results.

    Stops after the first step that fails, so the last result may be a failure.

    Args:
        files: Text of each file in the folder, by name.
        steps: The commands, with their limits.
        isolated: Whether to run the steps in a sandbox. If not, they run as this user, with limits on time, output,
            memory and files only.

    Raises:
        SandboxError: The sandbox could not be created.
    """
    with tempfile.TemporaryDirectory(prefix="valkyrie-code-", ignore_cleanup_errors=True) as folder:
        input_folder, root = Path(folder, "given"), Path(folder, "root")
        input_folder.mkdir()
        root.mkdir()
        for name, text in files.items():
            with (input_folder / name).open("w", encoding="utf-8", errors="replace") as file:
                file.write(text)
        isolation = choose_isolation() if isolated else None
        python = sandbox_python()
        python_folder = None if python is None or python.folder.startswith("/usr") else python.folder
        script = build_script(steps, input_folder, root, isolation, visible_folders(), python_folder)
        return _watch(
            [*_namespace_command(isolation), "sh", "-c", script], steps, "/" if isolated else str(input_folder)
        )


def _namespace_command(isolation: Isolation | None) -> list[str]:
    """Return the command that creates the namespaces, to prepend to a command. Empty if `isolation` is None.

    If this process dies, everything in the namespaces is killed.
    """
    if isolation is None:
        return []
    spaces = ["--mount", "--pid", "--fork", "--net", "--ipc", "--uts", "--kill-child"]
    user = [] if isolation.user is not None else ["--user", "--map-root-user"]
    return ["setpriv", "--pdeathsig", "KILL", "unshare", *user, *spaces]


def choose_isolation() -> Isolation:
    """Return how to isolate programs: under an unused user ID if this process is root, else in a user namespace.

    If the user namespace of this process does not contain the unused IDs, root uses 65534 (`nobody`).
    """
    if os.geteuid() != 0:
        return Isolation(None, forbids_namespaces=False, limits_processes=_counts_processes_per_namespace())
    user = _FIRST_USER + next(_user_numbers) % _USER_COUNT
    if not _is_mapped(user):
        user = 65534
    return Isolation(user, forbids_namespaces=_can_nest_namespaces(), limits_processes=True)


def _is_mapped(user: int) -> bool:
    """Return whether a user ID exists in the user namespace of this process."""
    with contextlib.suppress(OSError, ValueError):
        lines = Path("/proc/self/uid_map").read_text().splitlines()
        rows = [[int(number) for number in line.split()] for line in lines]
        return any(first <= user < first + count for first, _, count in rows)
    return False


def _counts_processes_per_namespace() -> bool:
    """Return whether the kernel counts processes per user namespace (Linux 5.14), not per user."""
    version = re.match(r"(\d+)\.(\d+)", platform.release())
    return version is not None and (int(version[1]), int(version[2])) >= (5, 14)


@cache
def _can_nest_namespaces() -> bool:
    """Return whether unprivileged users may create user namespaces. If so, the sandbox must prevent it."""
    command = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "unshare", "-U", "-r", "-m", "true"]
    return subprocess.run(command, capture_output=True, cwd="/").returncode == 0


@cache
def visible_folders() -> tuple[str, ...]:
    """Return the system folders and files, such as libraries and compilers, that programs can read in the sandbox."""
    folders = ["/usr", "/bin", "/lib", "/lib32", "/lib64", "/libx32"]
    folders += ["/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d"]
    return tuple(folder for folder in folders if os.path.exists(folder))


class SandboxPython(NamedTuple):
    """A Python installation that programs in the sandbox can use.

    Args:
        folder: The installation folder, outside the sandbox.
        interpreter: Path of the interpreter in the sandbox.
    """

    folder: str
    interpreter: str


@cache
def sandbox_python() -> SandboxPython | None:
    """Return the folder of this Python and the path of its interpreter in the sandbox.

    A Python under /usr keeps its path; any other is mounted at /python. Returns None if the folder has no interpreter,
    or contains the home folder, which must stay hidden.
    """
    prefix, name = Path(sys.base_prefix).resolve(), f"python{sys.version_info.major}.{sys.version_info.minor}"
    if not os.access(prefix / "bin" / name, os.X_OK) or Path.home().resolve().is_relative_to(prefix):
        return None
    mount = prefix if prefix.is_relative_to("/usr") else "/python"
    return SandboxPython(str(prefix), f"{mount}/bin/{name}")


@cache
def sandbox_problem() -> str | None:
    """Return the reason why programs cannot be isolated on this machine, or None if they can.

    The first call tests this by running a command in a sandbox. Later calls return the same result.
    """
    if platform.system() != "Linux":
        return f"the sandbox needs Linux, but this is {platform.system()}"
    if missing_tools := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"{', '.join(missing_tools)} of util-linux {'is' if len(missing_tools) == 1 else 'are'} not installed"
    try:
        (result,) = run_steps({}, [SandboxStep(("true",), 10.0, 256)])
    except (SandboxError, OSError) as error:
        return str(error)
    return None if result.ok else f"the sandbox exited with status {result.status}: {result.output.strip()[-300:]}"


def _watch(command: list[str], steps: Sequence[SandboxStep], folder: str) -> list[SandboxStepResult]:
    """Start the script of `build_script` with `command` in `folder`, and return the results of its steps.

    Stops after the first step that fails or exceeds a limit, and kills the script's process group before it returns.

    The script reports on each step over a socket, which is its standard input. No step can access the socket.
    """
    our_end, script_end = socket.socketpair()
    path = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
    with our_end:
        with script_end:
            process = subprocess.Popen(
                command,
                stdin=script_end.fileno(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={"PATH": path, "LANG": "C.UTF-8"},
                start_new_session=True,
            )
        try:
            return _ScriptWatcher(process, our_end, steps).wait_for_results()
        finally:
            signal_group(process.pid, signal.SIGKILL)
            assert process.stdout is not None
            process.stdout.close()
            process.wait()


class _ScriptWatcher:
    """Follows a running script: collects its output and the results of its finished steps."""

    def __init__(self, process: subprocess.Popen[bytes], our_end: socket.socket, steps: Sequence[SandboxStep]) -> None:
        assert process.stdout is not None
        self.script_socket, self.stdout, self.steps = our_end, process.stdout.fileno(), steps
        self.message_buffer, self.output = b"", b""
        self.step_results: list[SandboxStepResult] = []
        self.in_step, self.step_start, self.deadline = False, 0.0, time.monotonic() + _SETUP_S

    def wait_for_results(self) -> list[SandboxStepResult]:
        """Return the results of the steps, up to the first failure. Raises SandboxError if a step could not start."""
        with selectors.DefaultSelector() as selector:
            for pipe in (self.script_socket.fileno(), self.stdout):
                os.set_blocking(pipe, False)
                selector.register(pipe, selectors.EVENT_READ)
            while True:
                selector.select(max(self.deadline - time.monotonic(), 0.0))
                self._drain(selector)
                while b"\n" in self.message_buffer:
                    line, _, self.message_buffer = self.message_buffer.partition(b"\n")
                    if self._handle(line):
                        return self.step_results
                exceeded_limit = "time" if time.monotonic() >= self.deadline else None
                exceeded_limit = "output" if len(self.output) > OUTPUT_BYTES else exceeded_limit
                if self.in_step and exceeded_limit:
                    return [*self.step_results, self._step_result(137, exceeded_limit)]
                if exceeded_limit or not selector.get_map():
                    output = " ".join(_decode(self.output).split())[-300:]
                    raise SandboxError(
                        f"the sandbox could not be created: {output or f'it did not start within {_SETUP_S:g} s'}"
                    )

    def _handle(self, line: bytes) -> bool:
        """Process one line from the script. Returns whether the script is done."""
        if line == b"begins":
            self.in_step, self.output, self.step_start = True, b"", time.monotonic()
            self.deadline = self.step_start + self.steps[len(self.step_results)].time_s
            self.script_socket.send(b"go\n")
            return False
        self.step_results.append(self._step_result(int(line), None))
        self.in_step, self.deadline = False, time.monotonic() + _SETUP_S
        return not self.step_results[-1].ok or len(self.step_results) == len(self.steps)

    def _step_result(self, status: int, limit: str | None) -> SandboxStepResult:
        limit = "time" if status == 128 + signal.SIGXCPU else limit
        return SandboxStepResult(status, _decode(self.output), time.monotonic() - self.step_start, limit)

    def _drain(self, selector: selectors.BaseSelector) -> None:
        """Read the available data: first the script's messages, then the output of the current step. Does not block."""
        for pipe in (self.script_socket.fileno(), self.stdout):
            bytes_read = 0
            while pipe in selector.get_map() and bytes_read <= OUTPUT_BYTES:
                try:
                    piece = os.read(pipe, 65536)
                except (BlockingIOError, ConnectionResetError):
                    break
                if not piece:
                    selector.unregister(pipe)
                    break
                bytes_read += len(piece)
                if pipe == self.stdout:
                    self.output += piece
                else:
                    self.message_buffer += piece


def _decode(output: bytes) -> str:
    return output[: 2 * OUTPUT_BYTES].decode("utf-8", errors="replace")
