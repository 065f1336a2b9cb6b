"""Traces of steps by JAX's profiler: a window of a training, every process in a file of its own."""

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
"""The folder of a run folder that xprof and TensorBoard open."""
_XPLANE = ".xplane.pb"
_KINDS = (_XPLANE, ".trace.json.gz")
"""What the profiler writes of a host: for xprof, and for ui.perfetto.dev."""


@contextlib.contextmanager
def tracing(folder: Path) -> Iterator[list[Path]]:
    """Trace what runs inside; afterwards the list has the `*.xplane.pb` that were written under the folder.

    Raises RuntimeError where a trace is being taken already, OSError where the folder cannot be written.
    """
    before, found = set(folder.rglob(f"*{_XPLANE}")), []
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # calls of Python are most of a trace, and say nothing of devices
    with jax.profiler.trace(str(folder), profiler_options=options):
        yield found
    found += sorted(set(folder.rglob(f"*{_XPLANE}")) - before)


class Window:
    """The steps of a training that are traced: `profile=100-105` asks for steps 100 to 105.

    The profiler names its files by host and second: each process traces into a folder of its own, and its files are
    then moved beside those of the others, named by host and process, as the hosts of one run that xprof shows together.
    """

    def __init__(self, asked: str | None, folder: Path, *, team: Team = ALONE) -> None:
        self._steps = profile_window(asked) if asked is not None else None
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
        """Return the line about a window whose steps are done, of a run that goes on after `start`; None otherwise."""
        if self._steps is None or self._steps[1] > start:
            return None
        return f"profile={self._steps[0]}-{self._steps[1]} traces nothing: {start} steps are done already"

    def opens(self, step: int) -> bool:
        """Return whether the trace begins with this step, or with the first of a run that goes on inside the window."""
        return self._trace is None and self._steps is not None and self._steps[0] <= step <= self._steps[1]

    def closes(self, step: int) -> bool:
        """Return whether this is the last traced step."""
        return self._trace is not None and self._steps is not None and step == self._steps[1]

    def open(self, step: int, before: Any) -> str | None:
        """Begin to trace once the arrays of `before` are there; return why that fails, None where it does not."""
        assert self._steps is not None
        self._name = f"steps-{step}-{self._steps[1]}"
        jax.block_until_ready(before)
        try:
            with contextlib.ExitStack() as stack:
                own = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="valkyrie-profile-")))
                stack.callback(self._keep, own)
                stack.enter_context(tracing(own))
                self._trace = stack.pop_all()
        except (RuntimeError, OSError) as error:  # a training does not end for its profile
            self._steps = None
            return _failed(error)
        return None

    def close(self) -> str | None:
        """End the trace, if one is being taken, and return how to look at it, or why it could not be written."""
        if self._trace is None:
            return None
        trace, self._trace, self._steps = self._trace, None, None
        try:
            trace.close()
        except (RuntimeError, OSError) as error:  # as above
            return _failed(error)
        view = f"xprof --logdir {shlex.quote(str(self._folder))}   # pip install xprof"
        return f"traced {self._name.replace('-', ' ', 1)}. Look at it: {view}"

    def _keep(self, own: Path) -> None:
        """Move what the profiler wrote of this process beside what it wrote of the others."""
        place = self._folder / "plugins" / "profile" / self._name
        place.mkdir(parents=True, exist_ok=True)
        host = socket.gethostname().partition(".")[0]
        name = f"{host}-{self._team.index}" if self._team.count > 1 else host
        for kind in _KINDS:
            for file in own.rglob(f"*{kind}"):
                shutil.move(file, place / f"{name}{kind}")


def _failed(error: Exception) -> str:
    return f"the profile could not be taken ({type(error).__name__}: {first_line(error)})"
