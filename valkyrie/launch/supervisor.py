"""Starts the processes of a training together, stops them together, and restarts them after a crash.

Exit statuses of `valkyrie-train`: 0, 2 and 130 end the job; 75 means that it has saved and can be restarted; any other
status or death by a signal is a crash. 69 means that another process failed first, or that a step hung.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from valkyrie.processes.child import ChildProcess, wait_for
from valkyrie.processes.ending import DONE, INTERRUPTED, LOST, PREEMPTED, REFUSED, describe_status
from valkyrie.processes.hub import free_port
from valkyrie.processes.interrupt import on_signals
from valkyrie.processes.team import Place

RESTARTS = "VALKYRIE_LAUNCH_RESTARTS"
"""Environment variable of the training's processes with the number of restarts."""

_ENDS_THE_JOB = (DONE, REFUSED, INTERRUPTED)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Member:
    """A process to start: its command, and variables to add to the launcher's environment."""

    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


def cluster(command: Sequence[str], processes: int) -> list[Member]:
    """Return processes on this machine that connect through a free port. A single process needs no address."""
    if processes == 1:
        return [Member(tuple(command))]
    address = f"127.0.0.1:{free_port()}"
    return [Member(tuple(command), Place(address, processes, index).environment) for index in range(processes)]


@dataclass(frozen=True)
class Supervisor:
    """Runs the processes of a training and restarts them.

    Args:
        members: returns the processes to start, given the number of earlier starts.
        restarts: number of restarts after crashes.
        logs: folder for the output of all processes except the first.
        send: forwards a signal to processes on other hosts, or None if all run on this machine.
        clean_up: called after a failed attempt.
        lost: returns whether the hosts were preempted, which does not count as a crash.
        grace_s: seconds for the other processes to stop after a crash.
        notice_s: seconds to save after SIGTERM or a preemption.
        soon_s: a preemption within this many seconds of the start counts as a crash, to avoid restarting forever.
    """

    members: Callable[[int], Sequence[Member]]
    restarts: int
    logs: Path
    send: Callable[[int], None] | None = None
    clean_up: Callable[[], None] = lambda: None
    lost: Callable[[], bool] = lambda: False
    grace_s: float = 2.0
    notice_s: float = 30.0
    soon_s: float = 10.0

    def run(self) -> int:
        """Run the training to its end and return its exit status: 75 after a SIGTERM if all processes have saved."""
        crashes = starts = 0
        while True:
            members, start_time = self.members(starts), time.monotonic()
            signals: list[int] = []
            with on_signals(signals.append, _SIGNALS):
                status = self._attempt(members, starts, signals)
            if status != DONE:
                self.clean_up()
            if signals or status in _ENDS_THE_JOB:
                return status
            saved = status == PREEMPTED and time.monotonic() - start_time >= self.soon_s
            crash = not (saved or self.lost())
            crashes += crash
            if crashes > self.restarts:
                say(f"not started again: --restarts {self.restarts}")
                return status if status > 0 else 128 - status
            starts += 1
            say(f"starting again{f' ({crashes} of {self.restarts})' if crash else ''}")

    def _attempt(self, members: Sequence[Member], starts: int, signals: Sequence[int]) -> int:
        """Start all processes and return the status of the first to fail, or 0. Kills those still running."""
        processes: list[ChildProcess] = []
        try:
            for index, member in enumerate(members):
                log = None if index == 0 else self.logs / f"process-{index}.log"
                environment = {**member.environment, RESTARTS: str(starts)}
                processes.append(ChildProcess(member.command, environment, log, index=index, dies_with_parent=True))
            return self._watch(processes, signals)
        finally:
            for process in processes:
                process.kill()

    def _watch(self, processes: Sequence[ChildProcess], signals: Sequence[int]) -> int:
        while True:
            statuses = {process: process.status for process in processes}
            failed = [process for process, status in statuses.items() if status not in (None, DONE)]
            if signals:
                return self._stop(processes, signals)
            if failed:
                # peers of a killed process fail within milliseconds, so the process that died by a signal was first
                first = min(failed, key=lambda process: (statuses[process] or 0) >= 0)
                return self._after(first, processes, signals)
            if None not in statuses.values():
                return DONE
            time.sleep(0.02)

    def _after(self, first: ChildProcess, processes: Sequence[ChildProcess], signals: Sequence[int]) -> int:
        """Give the other processes time to stop after one has failed, report it, and return its status."""
        saves = first.status in (PREEMPTED, INTERRUPTED)
        wait_for(processes, self.notice_s if saves else self.grace_s)
        if signals:
            return self._stop(processes, signals)
        if first.status == LOST:  # another process failed first, or a step hung
            first = next((process for process in processes if process.status not in (None, DONE, LOST)), first)
        status, others = first.status, [process for process in processes if process is not first]
        assert status is not None
        left = _running(others)
        words = "was preempted and has saved" if status == PREEMPTED else f"ended {describe_status(status)}"
        ending = f"; ending {left} at once" if left else ""
        if len(processes) > 1 or status not in _ENDS_THE_JOB:
            say(f"process {first.index} {words}{', first of ' + str(len(processes)) if others else ''}{ending}")
        if not saves and processes[0].status != status and (lines := first.last_lines()):
            say(f"the last lines of {first.log}:", *(f"  {line}" for line in lines))
        worse = [process.status for process in others if process.status not in (None, DONE, PREEMPTED)]
        return worse[0] or status if status == PREEMPTED and worse else status

    def _stop(self, processes: Sequence[ChildProcess], signals: Sequence[int]) -> int:
        """Forward the launcher's signal to all processes, wait until they have saved, and return the exit status."""
        by_hand = signals[0] == signal.SIGINT
        once_more = "; once more ends them at once" if by_hand else f", at most {self.notice_s:g} s"
        running = [process for process in processes if process.status is None]
        say(f"stopping: waiting for {_running(processes)} to save{once_more}")
        for send in [self.send] if self.send else [process.send for process in running]:
            send(signal.SIGINT if by_hand else signal.SIGTERM)
        until = float("inf") if by_hand else time.monotonic() + self.notice_s
        while _running(processes) and len(signals) == 1 and time.monotonic() < until:
            time.sleep(0.02)
        if left := _running(processes):
            say(f"ending {left} at once, without saving")
        statuses = {process.status for process in processes}
        if by_hand:
            return INTERRUPTED
        if statuses == {DONE}:
            return DONE
        return PREEMPTED if statuses <= {DONE, PREEMPTED} else 128 + signal.SIGTERM


def say(*lines: str) -> None:
    """Print a message of the launcher to stderr."""
    with contextlib.suppress(OSError):  # the training continues if nobody reads this any more
        print(*(f"valkyrie-launch: {line}" for line in lines[:1]), *lines[1:], sep="\n", file=sys.stderr, flush=True)


def _running(processes: Sequence[ChildProcess]) -> str:
    """Return the names of the running processes for a message, or an empty string."""
    numbers = [str(process.index) for process in processes if process.status is None]
    return f"process{'es' * (len(numbers) > 1)} {', '.join(numbers)}" if numbers else ""
