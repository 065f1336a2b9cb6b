"""A training in several processes: started together, ended together, and started again after a crash.

What a status of `valkyrie-train` means: 0, 2 and 130 end the job; 75 has saved and is started again; anything else, or
death by a signal, is a crash, of which 69 says that it was another process's, or that a step hung.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from valkyrie.processes.child import DONE, INTERRUPTED, LOST, PREEMPTED, USER_ERROR, Process, how_it_ended, wait_for
from valkyrie.processes.hub import free_port
from valkyrie.processes.team import Place

RESTARTS = "VALKYRIE_LAUNCH_RESTARTS"
"""How often the training was started again, in the environment of its processes."""

_ENDS_THE_JOB = (DONE, USER_ERROR, INTERRUPTED)


@dataclass(frozen=True)
class Member:
    """A process to start: its command and what its environment has besides the launcher's."""

    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


def cluster(command: Sequence[str], processes: int) -> list[Member]:
    """Return so many processes of this machine that are to find each other at a port which is free now.

    A single one is told nothing: it is no cluster.
    """
    if processes == 1:
        return [Member(tuple(command))]
    address = f"127.0.0.1:{free_port()}"
    return [Member(tuple(command), Place(address, processes, index).environment) for index in range(processes)]


def _nothing() -> None:
    """Leave what is on other hosts alone: processes of this machine are ended by their groups."""


def _never() -> bool:
    """Return False: this machine is not taken away."""
    return False


@dataclass(frozen=True)
class Supervisor:
    """What starts the processes of a training and watches them.

    `members` gives them for every start anew, by how often they were started before; `restarts`: how many crashes are
    answered by another start; `logs`: the folder of what all but the first write. Where they run on other hosts:
    `send` hands a signal on to them, `clean_up` is called when one has failed, and `lost` returns whether the hosts
    were taken away, which is no crash.
    `grace_s`: seconds that the others have after a crash; `notice_s`: seconds to save after SIGTERM or a preemption;
    `soon_s`: a preemption sooner than this counts as a crash, for it would repeat for ever.
    """

    members: Callable[[int], Sequence[Member]]
    restarts: int
    logs: Path
    send: Callable[[int], None] | None = None
    clean_up: Callable[[], None] = _nothing
    lost: Callable[[], bool] = _never
    grace_s: float = 2.0
    notice_s: float = 30.0
    soon_s: float = 10.0

    def run(self) -> int:
        """Run the training to its end and return its exit status: 75 after a SIGTERM on which all have saved."""
        crashes = starts = 0
        while True:
            members, began = self.members(starts), time.monotonic()
            with _Signals() as signals:
                status = self._attempt(members, starts, signals)
            if status != DONE:
                self.clean_up()
            if signals.first is not None or status in _ENDS_THE_JOB:
                return status
            saved = status == PREEMPTED and time.monotonic() - began >= self.soon_s
            crash = not (saved or self.lost())
            crashes += crash
            if crashes > self.restarts:
                say(f"not started again: --restarts {self.restarts}")
                return status if status > 0 else 128 - status
            starts += 1
            say(f"starting again{f' ({crashes} of {self.restarts})' if crash else ''}")

    def _attempt(self, members: Sequence[Member], starts: int, signals: _Signals) -> int:
        """Start all processes and return how the first of them to fail ended, or 0; none is left."""
        processes: list[Process] = []
        try:
            for index, member in enumerate(members):
                log = None if index == 0 else self.logs / f"process-{index}.log"
                environment = {**member.environment, RESTARTS: str(starts)}
                processes.append(Process(index, member.command, environment, log))
            return self._watch(processes, signals)
        finally:
            for process in processes:
                process.kill()

    def _watch(self, processes: Sequence[Process], signals: _Signals) -> int:
        while True:
            ended = {process: process.status for process in processes}
            failed = [process for process, status in ended.items() if status not in (None, DONE)]
            if signals.first is not None:
                return self._stop(processes, signals)
            if failed:
                # a peer of one that is killed fails within milliseconds: the signal was first
                first = min(failed, key=lambda process: (ended[process] or 0) >= 0)
                return self._after(first, processes, signals)
            if None not in ended.values():
                return DONE
            time.sleep(0.02)

    def _after(self, first: Process, processes: Sequence[Process], signals: _Signals) -> int:
        """Let the others end after one has failed; return that one's status and say what it was."""
        saves = first.status in (PREEMPTED, INTERRUPTED)
        wait_for(processes, self.notice_s if saves else self.grace_s)
        if signals.first is not None:
            return self._stop(processes, signals)
        if first.status == LOST:  # it says so itself: another was first, or hangs
            first = next((process for process in processes if process.status not in (None, DONE, LOST)), first)
        status, others = first.status, [process for process in processes if process is not first]
        assert status is not None
        left = [process.index for process in others if process.status is None]
        words = "was preempted and has saved" if status == PREEMPTED else f"ended {how_it_ended(status)}"
        ending = f"; ending {_named(left)} at once" if left else ""
        if len(processes) > 1 or status not in _ENDS_THE_JOB:
            say(f"process {first.index} {words}{', first of ' + str(len(processes)) if others else ''}{ending}")
        if not saves and processes[0].status != status and (lines := first.last_lines()):
            say(f"the last lines of {first.log}:", *(f"  {line}" for line in lines))
        worse = [process.status for process in others if process.status not in (None, DONE, PREEMPTED)]
        return worse[0] or status if status == PREEMPTED and worse else status

    def _stop(self, processes: Sequence[Process], signals: _Signals) -> int:
        """Hand the signal that the launcher got on to all, wait until they have saved, and return the exit status."""
        by_hand = signals.first == signal.SIGINT
        running = [process for process in processes if process.status is None]
        once_more = "; once more ends them at once" if by_hand else f", at most {self.notice_s:g} s"
        say(f"stopping: waiting for {_named([process.index for process in running])} to save{once_more}")
        number = signal.SIGINT if by_hand else signal.SIGTERM
        for send in [self.send] if self.send else [process.send for process in running]:
            send(number)
        until = float("inf") if by_hand else time.monotonic() + self.notice_s
        while any(process.status is None for process in processes) and not signals.again and time.monotonic() < until:
            time.sleep(0.02)
        left = [process.index for process in processes if process.status is None]
        if left:
            say(f"ending {_named(left)} at once, without saving")
        statuses = {process.status for process in processes}
        if by_hand:
            return INTERRUPTED
        if statuses == {DONE}:
            return DONE
        return PREEMPTED if statuses <= {DONE, PREEMPTED} else 128 + signal.SIGTERM


class _Signals:
    """A context that remembers SIGINT, SIGTERM and SIGHUP in place of being ended by them."""

    def __init__(self) -> None:
        self.first: int | None = None
        self.again = False
        self._restore = contextlib.ExitStack()

    def __enter__(self) -> _Signals:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup's wish
                self._restore.callback(signal.signal, number, signal.signal(number, self._hear))
        return self

    def __exit__(self, *error: object) -> None:
        self._restore.close()

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.first is None:
            self.first = number
        else:
            self.again = True


def say(*lines: str) -> None:
    """Tell the user what the launcher does, where somebody reads it."""
    with contextlib.suppress(OSError):  # the training goes on where nobody reads this any more
        print(*(f"valkyrie-launch: {line}" for line in lines[:1]), *lines[1:], sep="\n", file=sys.stderr, flush=True)


def _named(indices: Sequence[int]) -> str:
    numbers = ", ".join(str(index) for index in indices)
    return f"process {numbers}" if len(indices) == 1 else f"processes {numbers}"
