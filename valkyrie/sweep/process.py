"""Runs the process of a trial, with its log and time limit.

In a multirun over several processes it is process 0 of the trial. The others start and end with it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable
from datetime import UTC, datetime

from valkyrie.processes.child import ChildProcess
from valkyrie.processes.locks import TrialLock
from valkyrie.sweep.members import members
from valkyrie.sweep.plan import TrialPlan
from valkyrie.sweep.results import OUTPUT, Outcome, outcome
from valkyrie.sweep.trial import Status, Trial

_POLL_S = 0.05


class TrialProcess:
    """A trial in a separate process, which the constructor starts."""

    def __init__(self, plan: TrialPlan, lock: TrialLock) -> None:
        self.plan = plan
        leading = members()
        self._members = leading if leading is not None and leading.takes(plan) else None
        folder = plan.trial_folder
        plan.write()
        place = self._members.begin(plan) if self._members else {}
        self.started, self._began = datetime.now(UTC).isoformat(), time.monotonic()
        self._stopped_at: float | None = None
        (folder / OUTPUT).unlink(missing_ok=True)
        environment, inherited = {**plan.environment, **place}, (lock.process_file.fileno(),)
        self._process = ChildProcess(plan.command, environment, folder / OUTPUT, pass_fds=inherited)
        if self._members:
            self._members.started(self.kill)
        try:
            lock.started(self._process.pid)
        except BaseException:
            self.kill()  # nobody would watch it, and no later sweep could know its owner
            raise

    @property
    def seconds(self) -> float:
        """Seconds since it started."""
        return time.monotonic() - self._began

    @property
    def grace_s(self) -> float:
        """Seconds until it is killed after an interrupt, because a training saves its state first."""
        return self.plan.mode.grace_s

    def poll(self) -> Trial | None:
        """Return the trial once it has ended, or None while it runs. Interrupts, then kills it past its time limit."""
        status = self._process.status
        plan, limit = self.plan, self.plan.limit_s
        if status is None and limit is not None and self.seconds > limit:
            if self._stopped_at is None:
                self.interrupt()
            elif time.monotonic() - self._stopped_at > self.grace_s:
                self.kill()
            return None
        if status is None:
            return None
        if self._members:
            self._members.ended()
        seconds = self.seconds
        if status != 0:
            self.kill()  # also ends its children
        ended = outcome(plan.trial_folder, status) if self._stopped_at is None else over_limit(plan)
        return plan.ended(ended.status, ended.reason, self.started, seconds, ended.results)

    def interrupt(self) -> None:
        """Send SIGINT to the process and everything it started."""
        self._stopped_at = self._stopped_at or time.monotonic()
        self._process.send(signal.SIGINT)

    def kill(self) -> None:
        """Kill the process and everything it started."""
        self._process.kill()

    def ends_within(self, seconds: float) -> bool:
        """Wait for the process to end, and return whether it did."""
        return self._process.wait(max(seconds, _POLL_S))


def over_limit(plan: TrialPlan) -> Outcome:
    """Return the outcome of a trial that was stopped at its time limit."""
    return Outcome(Status.timeout, f"it took longer than trial.limit_s={plan.limit_s:g} seconds and was ended")


def stop(running: Iterable[TrialProcess]) -> None:
    """Interrupt trials and wait until they have ended. A second Ctrl-C kills them."""
    running = list(running)
    try:
        for process in running:
            process.interrupt()
        for process in running:
            process.ends_within(process.grace_s)
    finally:
        for process in running:
            process.kill()
