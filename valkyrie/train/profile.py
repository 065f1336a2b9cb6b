"""Traces a window of steps with JAX's profiler, into separate files for each process."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import jax

from valkyrie.problems import first_line
from valkyrie.processes.team import ALONE, Team
from valkyrie.runs.tracking import parse_profile_window

PROFILE_FOLDER = "profile"
"""Subfolder of a run folder that xprof and TensorBoard open."""
_XPLANE_SUFFIX = ".xplane.pb"
_SUFFIXES = (_XPLANE_SUFFIX, ".trace.json.gz")
"""Suffixes of the files that the profiler writes on each host: for xprof, and for ui.perfetto.dev."""


@contextlib.contextmanager
def tracing(folder: Path) -> Iterator[list[Path]]:
    """Trace the code in this context. Yields a list, to which the new `*.xplane.pb` files are added at the end.

    Raises RuntimeError if a trace is already running, OSError if the folder cannot be written.
    """
    existing_files, new_files = set(folder.rglob(f"*{_XPLANE_SUFFIX}")), []
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # Python calls would fill most of a trace, without information on devices
    with jax.profiler.trace(str(folder), profiler_options=options):
        yield new_files
    new_files += sorted(set(folder.rglob(f"*{_XPLANE_SUFFIX}")) - existing_files)


class ProfileWindow:
    """The traced steps of a training run: `profile=100-105` traces steps 100 to 105.

    The profiler names its files by host and second, so files of processes on the same host could collide. Therefore
    each process traces into a temporary folder. At the end, it moves its files to the run folder and names them by host
    and, if there are several processes, by its index. xprof shows each process as a host of the same run.
    """

    def __init__(self, steps: str | None, folder: Path, *, team: Team = ALONE) -> None:
        self._steps = parse_profile_window(steps) if steps is not None else None
        self._folder, self._team = folder / PROFILE_FOLDER, team
        self._trace: contextlib.ExitStack | None = None
        self._first_step, self._name = 0, ""

    def __enter__(self) -> ProfileWindow:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def missed_warning(self, start: int) -> str | None:
        """Return a warning if a run that continues after step `start` is already past the window, else None."""
        if self._steps is None or self._steps[1] > start:
            return None
        return f"profile={self._steps[0]}-{self._steps[1]} traces nothing: the run has already finished {start} steps"

    def starts_at(self, step: int) -> bool:
        """Return whether the trace begins with this step: the first in the window that this process runs."""
        return self._trace is None and self._steps is not None and self._steps[0] <= step <= self._steps[1]

    def ends_at(self, step: int) -> bool:
        """Return whether a trace is running and ends with this step."""
        return self._trace is not None and self._steps is not None and step == self._steps[1]

    def open(self, step: int, state: Any) -> str | None:
        """Start the trace once the arrays of `state` are ready. Returns an error message, or None if it started."""
        assert self._steps is not None
        self._first_step, self._name = step, f"steps-{step}-{self._steps[1]}"
        jax.block_until_ready(state)
        try:
            with contextlib.ExitStack() as stack:
                temporary_folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="valkyrie-profile-")))
                stack.callback(self._move_files, temporary_folder)
                stack.enter_context(tracing(temporary_folder))
                self._trace = stack.pop_all()
        except (RuntimeError, OSError) as error:  # a failed profile must not end the training
            self._steps = None
            return _failure_message(error)
        return None

    def close(self, last_step: int | None = None) -> str | None:
        """End the trace. `last_step` is the last traced step, or None for the end of the window.

        Returns a message for the user, with the command to view the trace or the reason why it could not be written.
        Returns None if no trace was running.
        """
        if self._trace is None:
            return None
        if last_step is not None:
            self._name = f"steps-{self._first_step}-{last_step}"
        trace, self._trace, self._steps = self._trace, None, None
        try:
            trace.close()
        except (RuntimeError, OSError) as error:  # as in `open`
            return _failure_message(error)
        view_command = f"xprof --logdir {shlex.quote(str(self._folder))}   # pip install xprof"
        return f"traced {self._name.replace('-', ' ', 1)}. View it with: {view_command}"

    def _move_files(self, temporary_folder: Path) -> None:
        """Move the files of this process into the run folder, next to those of the other processes."""
        target_folder = self._folder / "plugins" / "profile" / self._name
        target_folder.mkdir(parents=True, exist_ok=True)
        host = socket.gethostname().partition(".")[0]
        name = f"{host}-{self._team.index}" if self._team.count > 1 else host
        for suffix in _SUFFIXES:
            for file in temporary_folder.rglob(f"*{suffix}"):
                shutil.move(file, target_folder / f"{name}{suffix}")


def _failure_message(error: Exception) -> str:
    return f"the profile could not be written ({type(error).__name__}: {first_line(error)})"
