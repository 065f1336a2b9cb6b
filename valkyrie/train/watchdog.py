"""A watchdog on the steps of a training: one that hangs becomes a crash, with the stacks of all threads in the log."""

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
from valkyrie.processes.ending import LOST, end_process
from valkyrie.processes.interrupt import show_cursor
from valkyrie.processes.team import ALONE, NEWS_S, Team
from valkyrie.train.processes import LOGS

STEPS = 20
"""A step that takes so many times the median of those before it hangs, if it also takes longer than the limit."""
FIRST_S = 1800.0
"""Seconds that the first step has at least: devices connect, kernels are tuned, caches are cold."""
_REMEDY = "Started again, it goes on from its newest checkpoint; distributed.step_timeout_s is the limit."
_REMEMBERED = 50
_WRITE_S = 5.0
"""Seconds that the stacks may take to be written: the disk may be what hangs."""


class Watchdog:
    """A context in which a thread ends the process, with status 69, when no step of a training finishes any more.

    `limit_s` are the seconds that a step may take; a longer time is allowed to the first, and where steps are slow
    anyway (`first_s`, `STEPS`). None: nothing is watched. What comes between `resting` and the next `step` may take as
    long as it does. All processes of the `team` are told, and each prints the stacks of its threads to its standard
    error; into `log` too, where one is given. `remedy` is said at the end.
    """

    def __init__(
        self,
        limit_s: float | None,
        team: Team = ALONE,
        log: Path | None = None,
        *,
        first_s: float = FIRST_S,
        remedy: str = _REMEDY,
        clock: Callable[[], float] = time.monotonic,
        end: Callable[[int, str], object] = end_process,
    ) -> None:
        self._limit_s, self._team, self._log, self._clock, self._end = limit_s, team, log, clock, end
        self._first_s, self._remedy = first_s, remedy
        self._taken: deque[float] = deque(maxlen=_REMEMBERED)
        self._now: tuple[int, float] | None = None
        self._looked, self._seen, self._waited = clock(), self._now, 0.0
        self._over, self._printed = threading.Event(), threading.Lock()

    def __enter__(self) -> Watchdog:
        if self._limit_s is not None:
            self._poll_s = min(self._limit_s / 10, 5.0)
            if self._team.count > 1:
                self._team.on_hang = lambda line: self.print_stacks(f"{line}: what the threads of this process do:")
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._rest()
        self._over.set()

    def step(self, step: int) -> None:
        """Note that a step begins, and that the one before it is as good as done."""
        now = self._clock()
        if self._now is not None:
            self._taken.append(now - self._now[1])
        self._now = (step, now)

    def _rest(self) -> None:
        if self._now is not None:
            self._taken.append(self._clock() - self._now[1])
        self._now = None

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """Watch nothing until the next step begins: inside is an evaluation or a save, or the end comes after it."""
        self._rest()
        yield

    def look(self) -> str | None:
        """Return a line about the step if it hangs, else None; to be called every `_poll_s` or so.

        Time in which the process itself was stopped, as by Ctrl-Z, is not counted.
        """
        now, before, step = self._clock(), self._looked, self._now
        self._looked = now
        if step is not self._seen or step is None:
            self._seen, self._waited = step, 0.0
            return None
        self._waited += min(now - before, 2 * self._poll_s)
        if self._waited <= self._allowed_s():
            return None
        taken = tuple(self._taken)[2:]
        before_it = f"; those before took {statistics.median(taken):.3g} s each" if taken else ""
        return f"step {step[0]} hangs: nothing has finished for {self._waited:.3g} s{before_it}"

    def print_stacks(self, head: str) -> None:
        """Print what every thread of this process does, once; return after `_WRITE_S` where that cannot be written."""
        if self._printed.acquire(blocking=False):
            writing = threading.Thread(target=self._write, args=(head,), name="stacks", daemon=True)
            writing.start()
            writing.join(_WRITE_S)

    def _allowed_s(self) -> float:
        assert self._limit_s is not None
        taken = tuple(self._taken)
        if len(taken) < 2:  # the metrics of a step are read while the next one runs
            return max(self._limit_s, self._first_s)
        return max(self._limit_s, STEPS * statistics.median(taken))

    def _watch(self) -> None:
        while not self._over.wait(self._poll_s):
            if line := self.look():
                return self._hung(line)

    def _hung(self, line: str) -> None:
        """Print the stacks, let the others do so, and end all processes."""
        who = f"process {self._team.index}: " if self._team.count > 1 else ""
        self.print_stacks(f"{who}{line}: what the threads of this process do:")
        self._team.fail(LOST, line)
        if self._team.count > 1 and self._team.leads:
            time.sleep(NEWS_S)
        with contextlib.suppress(OSError):
            os.write(2, f"valkyrie-train: {who}{line}. {self._remedy}\n".encode())
        self._end(LOST, line)

    def _write(self, head: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            show_cursor()
            os.write(2, f"\nvalkyrie-train: {head}\n".encode())
            faulthandler.dump_traceback(2, all_threads=True)
        if self._log is None:
            return
        with contextlib.suppress(OSError):
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with self._log.open("a") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {head}\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)


def watchdog_of(run: Run, team: Team, folder: Path, signals: bool) -> Watchdog:
    """Return the watchdog of a training in its folder.

    Without `signals` it watches nothing: ending the process would take a notebook with it. Nor under `debug=nans`,
    which takes a step apart into single operations where it finds one.
    """
    watches = signals and run.config.debug is not Debug.nans
    limit_s = run.config.distributed.step_timeout_s if watches else None
    return Watchdog(limit_s, team, folder / LOGS / "process-0.log" if team.leads else None)
