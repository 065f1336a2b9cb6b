"""A sandbox for programs that nobody has read: no network, no files but system libraries, bounds on all it may use.

Made of what util-linux has: new user, mount, process, network, IPC and host-name namespaces; a root of its own out of
read-only system folders and a small memory disk, so that homes and everything else do not exist; no privileges that
could be gained; limits on processor time, memory, processes, files and output. When the time is over, the first
process of its process namespace is killed, and the kernel kills all others with it.

Started by root, programs run as a user that no other process has; started by anybody else, in a user namespace.
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

from valkyrie.code_eval.sandbox_script import Isolation, SandboxStep, script
from valkyrie.processes.child import signal_group

TOOLS = ("unshare", "setpriv", "prlimit", "pivot_root", "mount", "umount", "sh")
"""The programs that a sandbox is made of."""
OUTPUT_BYTES = 64 * 1024
"""How much a program may print before it is ended."""
_FIRST_USER, _USERS = 1_900_000_000, 100_000
_SETUP_S = 20.0
"""Seconds that the namespaces may take on a busy machine."""
_numbers = itertools.count(os.getpid() * 64)


@dataclass(frozen=True)
class Ended:
    """How a step ended: its status as a shell gives it, what it printed, its seconds, and the limit that ended it."""

    status: int
    output: str
    seconds: float
    limit: str | None = None

    @property
    def ok(self) -> bool:
        """Whether it ended by itself with status 0."""
        return self.status == 0 and self.limit is None


class SandboxError(RuntimeError):
    """The sandbox itself did not start; the message has what the system said."""


def run_steps(files: Mapping[str, str], steps: Sequence[SandboxStep], *, isolated: bool = True) -> list[Ended]:
    """Run steps one after the other in a new folder with these files, up to the first that does not end well.

    Not `isolated`: as this user, with limits on time, memory and files alone. SandboxError where no sandbox was made.
    """
    with tempfile.TemporaryDirectory(prefix="valkyrie-code-", ignore_cleanup_errors=True) as folder:
        given, root = Path(folder, "given"), Path(folder, "root")
        given.mkdir()
        root.mkdir()
        for name, text in files.items():
            with (given / name).open("w", encoding="utf-8", errors="replace") as file:
                file.write(text)
        isolation = isolation_of() if isolated else None
        python = python_inside()
        shown = None if python is None or python[0].startswith("/usr") else python[0]
        text = script(steps, given, root, isolation, shown_folders(), shown)
        return _watch([*_outside(isolation), "sh", "-c", text], steps, "/" if isolated else str(given))


def _outside(isolation: Isolation | None) -> list[str]:
    """Return the command that makes the namespaces; all of them end with this process."""
    if isolation is None:
        return []
    spaces = ["--mount", "--pid", "--fork", "--net", "--ipc", "--uts", "--kill-child"]
    user = [] if isolation.user is not None else ["--user", "--map-root-user"]
    return ["setpriv", "--pdeathsig", "KILL", "unshare", *user, *spaces]


def isolation_of() -> Isolation:
    """Return how programs are kept apart here: for root as a user number that no other process has."""
    if os.geteuid() != 0:
        return Isolation(None, nested=False, limits_processes=_counts_by_namespace())
    user = _FIRST_USER + next(_numbers) % _USERS
    if not _is_mapped(user):
        user = 65534
    return Isolation(user, nested=_nests(), limits_processes=True)


def _is_mapped(user: int) -> bool:
    """Return whether a user number exists in the user namespace of this process."""
    with contextlib.suppress(OSError, ValueError):
        lines = Path("/proc/self/uid_map").read_text().splitlines()
        rows = [[int(number) for number in line.split()] for line in lines]
        return any(first <= user < first + count for first, _, count in rows)
    return False


def _counts_by_namespace() -> bool:
    """Return whether the kernel counts processes by user namespace (Linux 5.14), not all of the user together."""
    version = re.match(r"(\d+)\.(\d+)", platform.release())
    return version is not None and (int(version[1]), int(version[2])) >= (5, 14)


@cache
def _nests() -> bool:
    """Return whether a user without privileges may make a user namespace, which programs must then be kept from."""
    command = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "unshare", "-U", "-r", "-m", "true"]
    return subprocess.run(command, capture_output=True, cwd="/").returncode == 0


@cache
def shown_folders() -> tuple[str, ...]:
    """Return the folders that programs see, read-only: system libraries and compilers, and this Python's own."""
    folders = ["/usr", "/bin", "/lib", "/lib32", "/lib64", "/libx32"]
    folders += ["/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d"]
    return tuple(folder for folder in folders if os.path.exists(folder))


@cache
def python_inside() -> tuple[str, str] | None:
    """Return (folder, interpreter): where this Python lies, and its path in the sandbox; None where it has its home.

    One under /usr is seen as it is, any other as /python.
    """
    prefix, name = Path(sys.base_prefix).resolve(), f"python{sys.version_info.major}.{sys.version_info.minor}"
    if not os.access(prefix / "bin" / name, os.X_OK) or Path.home().resolve().is_relative_to(prefix):
        return None
    return str(prefix), f"{prefix if prefix.is_relative_to('/usr') else '/python'}/bin/{name}"


@cache
def trouble() -> str | None:
    """Return why programs cannot be kept apart on this machine, in a few words; None where they can."""
    if platform.system() != "Linux":
        return f"a sandbox needs Linux, and this is {platform.system()}"
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"{', '.join(missing)} of util-linux {'is' if len(missing) == 1 else 'are'} not installed"
    try:
        (ended,) = run_steps({}, [SandboxStep(("true",), 10.0, 256)])
    except (SandboxError, OSError) as error:
        return str(error)
    return None if ended.ok else f"a sandbox ended with status {ended.status}: {ended.output.strip()[-300:]}"


def _watch(command: list[str], steps: Sequence[SandboxStep], folder: str) -> list[Ended]:
    """Run the script, end it when a step takes too long or prints too much, and return how its steps ended.

    The script's standard input is the socket on which it tells of each step; no step gets hold of it.
    """
    hear, tell = socket.socketpair()
    path = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
    with hear:
        with tell:
            process = subprocess.Popen(
                command,
                stdin=tell.fileno(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={"PATH": path, "LANG": "C.UTF-8"},
                start_new_session=True,
            )
        try:
            return _Watch(process, hear, steps).ended()
        finally:
            signal_group(process.pid, signal.SIGKILL)
            assert process.stdout is not None
            process.stdout.close()
            process.wait()


class _Watch:
    """What has come of a script: bytes printed, and how the steps ended that did."""

    def __init__(self, process: subprocess.Popen[bytes], hear: socket.socket, steps: Sequence[SandboxStep]) -> None:
        assert process.stdout is not None
        self.hear, self.out, self.steps = hear, process.stdout.fileno(), steps
        self.told, self.output = b"", b""
        self.done: list[Ended] = []
        self.inside, self.began, self.limit = False, 0.0, time.monotonic() + _SETUP_S

    def ended(self) -> list[Ended]:
        """Return how the steps ended, up to the first that did not end well; SandboxError where none could begin."""
        with selectors.DefaultSelector() as selector:
            for pipe in (self.hear.fileno(), self.out):
                os.set_blocking(pipe, False)
                selector.register(pipe, selectors.EVENT_READ)
            while True:
                selector.select(max(self.limit - time.monotonic(), 0.0))
                self._drain(selector)
                while b"\n" in self.told:
                    line, _, self.told = self.told.partition(b"\n")
                    if self._heard(line):
                        return self.done
                over = "time" if time.monotonic() >= self.limit else None
                over = "output" if len(self.output) > OUTPUT_BYTES else over
                if self.inside and over:
                    return [*self.done, self._end(137, over)]
                if over or not selector.get_map():
                    said = " ".join(_text(self.output).split())[-300:]
                    raise SandboxError(f"no sandbox was made: {said or 'it did not start in time'}")

    def _heard(self, line: bytes) -> bool:
        """Take one line that the script told; return whether nothing follows."""
        if line == b"begins":
            self.inside, self.output, self.began = True, b"", time.monotonic()
            self.limit = self.began + self.steps[len(self.done)].time_s
            self.hear.send(b"go\n")
            return False
        self.done.append(self._end(int(line), None))
        self.inside, self.limit = False, time.monotonic() + _SETUP_S
        return not self.done[-1].ok or len(self.done) == len(self.steps)

    def _end(self, status: int, limit: str | None) -> Ended:
        limit = "time" if status == 128 + signal.SIGXCPU else limit
        return Ended(status, _text(self.output), time.monotonic() - self.began, limit)

    def _drain(self, selector: selectors.BaseSelector) -> None:
        """Take what is in the pipes: first what was told of a step's end, then what it had printed by then."""
        for pipe in (self.hear.fileno(), self.out):
            taken = 0
            while pipe in selector.get_map() and taken <= OUTPUT_BYTES:
                try:
                    piece = os.read(pipe, 65536)
                except (BlockingIOError, ConnectionResetError):
                    break
                if not piece:
                    selector.unregister(pipe)
                    break
                taken += len(piece)
                if pipe == self.out:
                    self.output += piece
                else:
                    self.told += piece


def _text(output: bytes) -> str:
    return output[: 2 * OUTPUT_BYTES].decode("utf-8", errors="replace")
