"""A watchdog that turns a hanging step into a crash, with the stacks of all threads in the log."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

from valkyrie.config.run import Debug, Run
from valkyrie.paths import open_to_append
from valkyrie.processes.ending import EXIT_LOST, end_process
from valkyrie.processes.interrupt import show_cursor
from valkyrie.processes.team import ALONE, HANG_REPORT_S, Team
from valkyrie.runs.folder import resume_command
from valkyrie.train.processes import LOGS_FOLDER

HANG_FACTOR = 20
"""A step counts as hung if it takes longer than `distributed.step_timeout_s` and longer than this many times the median
of earlier steps."""
FIRST_STEP_LIMIT_S = 1800.0
"""Minimum time limit of the first two steps, in seconds. They are slow because devices connect, kernels are tuned and
caches are cold."""
_REMEDY = "distributed.step_timeout_s sets the limit."
_MAX_STEP_TIMES = 50
_WRITE_TIMEOUT_S = 5.0
"""Time limit for writing the stacks, in seconds, since the disk may be what hangs."""


class Watchdog:
    """A context manager with a thread that ends the process with status 69 when a step hangs.

    All processes of the team then print the stacks of their threads: the leader to standard error, the others to
    `logs/process-N.log`. Nothing is watched between `paused` and the next `begin_step`.
    """

    def __init__(
        self,
        limit_s: float | None,
        team: Team = ALONE,
        log: Path | None = None,
        *,
        first_step_limit_s: float = FIRST_STEP_LIMIT_S,
        remedy: str = _REMEDY,
        clock: Callable[[], float] = time.monotonic,
        end: Callable[[int, str], object] = end_process,
    ) -> None:
        """Create a watchdog.

        Args:
            limit_s: Seconds after which a step counts as hung, or `HANG_FACTOR` times the median step time if that is
                longer. None disables the watchdog.
            team: Processes of the run.
            log: File that the stacks are also written to, or None.
            first_step_limit_s: Minimum limit of the first two steps, in seconds.
            remedy: Advice at the end of the error message.
            clock: Returns the time in seconds.
            end: Ends the process with a status and a reason.
        """
        self._limit_s, self._team, self._log, self._clock, self._end = limit_s, team, log, clock, end
        self._first_step_limit_s, self._remedy = first_step_limit_s, remedy
        self._step_times: deque[float] = deque(maxlen=_MAX_STEP_TIMES)
        self._running_step: tuple[int, float] | None = None
        self._checked_at, self._checked_step, self._waited_s = clock(), self._running_step, 0.0
        self._stop_event, self._print_lock = threading.Event(), threading.Lock()

    def __enter__(self) -> Watchdog:
        if self._limit_s is not None:
            self._poll_s = min(self._limit_s / 10, 5.0)
            if self._team.count > 1:
                self._team.on_hang = lambda line: self.print_stacks(f"{line}: stacks of all threads of this process:")
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_watching()
        self._stop_event.set()

    def begin_step(self, step: int) -> None:
        """Record that a step begins. This also ends the previous step, unless `paused` has already ended it."""
        now = self._clock()
        if self._running_step is not None:
            self._step_times.append(now - self._running_step[1])
        self._running_step = (step, now)

    def _stop_watching(self) -> None:
        if self._running_step is not None:
            self._step_times.append(self._clock() - self._running_step[1])
        self._running_step = None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stop watching until the next call of `begin_step`, because evaluations and saves may take any time."""
        self._stop_watching()
        yield

    def check(self) -> str | None:
        """Return a message if a step hangs, else None. Called about every `_poll_s` seconds.

        The message names the newest dispatched step. The step before it may be the one that hangs, because its metrics
        are read after the newest step is dispatched. Time during which the process was stopped, for example by Ctrl-Z,
        does not count.
        """
        now, last_check, step = self._clock(), self._checked_at, self._running_step
        self._checked_at = now
        if step is not self._checked_step or step is None:
            self._checked_step, self._waited_s = step, 0.0
            return None
        self._waited_s += min(now - last_check, 2 * self._poll_s)
        if self._waited_s <= self._step_limit_s():
            return None
        step_times = tuple(self._step_times)[2:]
        usual_time = f"; earlier steps took {statistics.median(step_times):.3g} s each" if step_times else ""
        return f"step {step[0]} or the one before it hangs: nothing has finished for {self._waited_s:.3g} s{usual_time}"

    def print_stacks(self, heading: str) -> None:
        """Print the line `heading` and the stacks of all threads to stderr, and append them to the log if there is one.

        Gives up after `_WRITE_TIMEOUT_S` seconds. Only the first call prints.
        """
        if self._print_lock.acquire(blocking=False):
            writer = threading.Thread(target=self._write, args=(heading,), name="stacks", daemon=True)
            writer.start()
            writer.join(_WRITE_TIMEOUT_S)

    def _step_limit_s(self) -> float:
        assert self._limit_s is not None
        step_times = tuple(self._step_times)
        if len(step_times) < 2:  # the metrics of a step are read while the next one runs
            return max(self._limit_s, self._first_step_limit_s)
        return max(self._limit_s, HANG_FACTOR * statistics.median(step_times))

    def _watch(self) -> None:
        while not self._stop_event.wait(self._poll_s):
            if line := self.check():
                return self._end_run(line)

    def _end_run(self, line: str) -> None:
        """End all processes of the run after each has printed its stacks. `line` is the message of `check`."""
        prefix = f"process {self._team.index}: " if self._team.count > 1 else ""
        self.print_stacks(f"{prefix}{line}: stacks of all threads of this process:")
        self._team.fail(EXIT_LOST, line)
        if self._team.count > 1 and self._team.is_leader:
            time.sleep(HANG_REPORT_S)
        with contextlib.suppress(OSError):
            os.write(2, f"valkyrie-train: {prefix}{line}. {self._remedy}\n".encode())
        self._end(EXIT_LOST, line)

    def _write(self, heading: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            show_cursor()
            os.write(2, f"\nvalkyrie-train: {heading}\n".encode())
            faulthandler.dump_traceback(2, all_threads=True)
        if self._log is None:
            return
        with contextlib.suppress(OSError):
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with open_to_append(self._log) as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {heading}\n".encode())
                faulthandler.dump_traceback(file, all_threads=True)


def make_watchdog(run: Run, team: Team, folder: Path, handles_signals: bool) -> Watchdog:
    """Return the watchdog of a training run.

    It is disabled if `handles_signals` is false, as in a notebook, so that it never ends the kernel. It is also
    disabled under `debug=nans`, because rerunning a step op by op is slow.
    """
    is_enabled = handles_signals and run.config.debug is not Debug.nans
    limit_s = run.config.distributed.step_timeout_s if is_enabled else None
    remedy = f"{_REMEDY} To resume from the newest checkpoint: {resume_command(folder)}"
    return Watchdog(limit_s, team, folder / LOGS_FOLDER / "process-0.log" if team.is_leader else None, remedy=remedy)
