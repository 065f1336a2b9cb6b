"""Traces of a window of steps by JAX's profiler, one file per process."""

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
from valkyrie.runs.tracking import profile_window

FOLDER = "profile"
"""Subfolder of a run folder that xprof and TensorBoard open."""
_XPLANE = ".xplane.pb"
_KINDS = (_XPLANE, ".trace.json.gz")
"""Files that the profiler writes per host: for xprof, and for ui.perfetto.dev."""


@contextlib.contextmanager
def tracing(folder: Path) -> Iterator[list[Path]]:
    """Trace the code inside. Afterwards the list contains the new `*.xplane.pb` files in the folder.

    Raises RuntimeError if a trace is already running, OSError if the folder cannot be written.
    """
    before, written = set(folder.rglob(f"*{_XPLANE}")), []
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # Python calls would fill most of a trace, without information on devices
    with jax.profiler.trace(str(folder), profiler_options=options):
        yield written
    written += sorted(set(folder.rglob(f"*{_XPLANE}")) - before)


class Window:
    """The traced steps of a training: `profile=100-105` traces steps 100 to 105.

    The profiler names its files by host and second, so each process traces into a temporary folder. Its files are then
    moved to the run folder and named by host and process, which xprof shows as the hosts of one run.
    """

    def __init__(self, steps: str | None, folder: Path, *, team: Team = ALONE) -> None:
        self._steps = profile_window(steps) if steps is not None else None
        self._folder, self._team = folder / FOLDER, team
        self._trace: contextlib.ExitStack | None = None
        self._name = ""

    def __enter__(self) -> Window:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def missed(self, start: int) -> str | None:
        """Return a warning if all steps of the window are done when a run continues after `start`, else None."""
        if self._steps is None or self._steps[1] > start:
            return None
        return f"profile={self._steps[0]}-{self._steps[1]} traces nothing: {start} steps are done already"

    def opens(self, step: int) -> bool:
        """Return whether the trace begins with this step. A run that continues inside the window traces its rest."""
        return self._trace is None and self._steps is not None and self._steps[0] <= step <= self._steps[1]

    def closes(self, step: int) -> bool:
        """Return whether this is the last traced step."""
        return self._trace is not None and self._steps is not None and step == self._steps[1]

    def open(self, step: int, before: Any) -> str | None:
        """Start the trace once the arrays of `before` are ready. Returns the error message, or None."""
        assert self._steps is not None
        self._name = f"steps-{step}-{self._steps[1]}"
        jax.block_until_ready(before)
        try:
            with contextlib.ExitStack() as stack:
                temporary = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="valkyrie-profile-")))
                stack.callback(self._move_files, temporary)
                stack.enter_context(tracing(temporary))
                self._trace = stack.pop_all()
        except (RuntimeError, OSError) as error:  # a training does not end for its profile
            self._steps = None
            return _failed(error)
        return None

    def close(self) -> str | None:
        """End the trace. Returns how to view it, why it could not be written, or None if none was running."""
        if self._trace is None:
            return None
        trace, self._trace, self._steps = self._trace, None, None
        try:
            trace.close()
        except (RuntimeError, OSError) as error:  # as above
            return _failed(error)
        view = f"xprof --logdir {shlex.quote(str(self._folder))}   # pip install xprof"
        return f"traced {self._name.replace('-', ' ', 1)}. Look at it: {view}"

    def _move_files(self, temporary: Path) -> None:
        """Move the files of this process to those of the others."""
        target = self._folder / "plugins" / "profile" / self._name
        target.mkdir(parents=True, exist_ok=True)
        host = socket.gethostname().partition(".")[0]
        name = f"{host}-{self._team.index}" if self._team.count > 1 else host
        for kind in _KINDS:
            for file in temporary.rglob(f"*{kind}"):
                shutil.move(file, target / f"{name}{kind}")


def _failed(error: Exception) -> str:
    return f"the profile could not be taken ({type(error).__name__}: {first_line(error)})"
