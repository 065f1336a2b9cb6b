"""Runs a trial in a separate process, with a log file and a time limit.

In a multirun on several hosts, this process is process 0 of the trial. Unless the trial needs no devices, it starts and
ends together with the processes of the trial on the other hosts.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable
from datetime import UTC, datetime

from valkyrie.processes.child import ChildProcess
from valkyrie.processes.locks import TrialLock
from valkyrie.sweep.members import current_members
from valkyrie.sweep.plan import TrialPlan
from valkyrie.sweep.results import OUTPUT_FILE, Outcome, read_outcome
from valkyrie.sweep.trial import Status, Trial

_POLL_S = 0.05


class TrialProcess:
    """A trial that runs in a separate process. The constructor starts the process.

    The process inherits the process file of `lock`, the lock of the trial's folder. The caller still has to release
    `lock` when the trial has ended.
    """

    def __init__(self, plan: TrialPlan, lock: TrialLock) -> None:
        self.plan = plan
        members = current_members()
        self._members = members if members is not None and members.runs_on_all_hosts(plan) else None
        folder = plan.trial_folder
        plan.write()
        process_environment = self._members.start_trial(plan) if self._members else {}
        self.start_timestamp, self._start_time = datetime.now(UTC).isoformat(), time.monotonic()
        self._interrupt_time: float | None = None
        (folder / OUTPUT_FILE).unlink(missing_ok=True)
        environment, inherited = {**plan.environment, **process_environment}, (lock.process_file.fileno(),)
        # If this process is killed, nobody would stop the trial at its time limit or record its result.
        self._process = ChildProcess(
            plan.command, environment, folder / OUTPUT_FILE, dies_with_parent=True, pass_fds=inherited
        )
        if self._members:
            self._members.set_kill(self.kill)
        try:
            lock.hand_over(self._process.pid)
        except BaseException:
            self.kill()  # it would run unsupervised, and a later sweep could not find its owner
            raise

    @property
    def elapsed_s(self) -> float:
        """Seconds since the process started."""
        return time.monotonic() - self._start_time

    @property
    def grace_s(self) -> float:
        """Seconds between the interrupt at the time limit and the kill. A training run saves its state in that time."""
        return self.plan.mode.grace_s

    def poll(self) -> Trial | None:
        """Return the trial if it has ended, else None.

        Interrupts the trial at its time limit, and kills it `grace_s` later.
        """
        status = self._process.status
        plan, limit = self.plan, self.plan.limit_s
        if status is None and limit is not None and self.elapsed_s > limit:
            if self._interrupt_time is None:
                self.interrupt()
            elif time.monotonic() - self._interrupt_time > self.grace_s:
                self.kill()
            return None
        if status is None:
            return None
        if self._members:
            self._members.wait_for_end()
        seconds = self.elapsed_s
        if status != 0:
            self.kill()  # also kills its children
        final_outcome = (
            read_outcome(plan.trial_folder, status) if self._interrupt_time is None else timeout_outcome(plan)
        )
        return plan.to_trial(final_outcome, self.start_timestamp, seconds)

    def interrupt(self) -> None:
        """Send SIGINT to the process and its children."""
        self._interrupt_time = self._interrupt_time or time.monotonic()
        self._process.send(signal.SIGINT)

    def kill(self) -> None:
        """Kill the process and its children."""
        self._process.kill()

    def wait(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s`, but at least 0.05 s, for the process to end. Returns whether it has ended."""
        return self._process.wait(max(timeout_s, _POLL_S))


def timeout_outcome(plan: TrialPlan) -> Outcome:
    """Return the outcome of a trial that was stopped at its time limit."""
    return Outcome(Status.timeout, f"stopped at its time limit, trial.limit_s={plan.limit_s:g} seconds")


def stop_trials(processes: Iterable[TrialProcess]) -> None:
    """Interrupt trials, and kill those that are still running after their `grace_s` or at another Ctrl-C."""
    processes = list(processes)
    try:
        for process in processes:
            process.interrupt()
        began = time.monotonic()
        for process in processes:
            process.wait(max(process.grace_s - (time.monotonic() - began), 0.0))
    finally:
        for process in processes:
            process.kill()
