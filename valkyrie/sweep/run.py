"""Carries out trials: skips recorded ones, refuses illegal ones, and runs and records the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import Protocol, runtime_checkable

from valkyrie.processes.locks import TrialLock
from valkyrie.sweep.plan import TrialPlan
from valkyrie.sweep.process import TrialProcess, over_limit, stop
from valkyrie.sweep.results import Outcome
from valkyrie.sweep.trial import Status, Trial, TrialLog

_POLL_S = 0.1
_ELSEWHERE_POLL_S = 0.5


@runtime_checkable
class Watcher(Protocol):
    """Shows the progress of a sweep."""

    def running(self, processes: Sequence[TrialProcess], waiting: int) -> None:
        """Called several times a second with the running trials and the number of waiting ones.

        If trials wait and none runs, another sweep is running them.
        """
        ...

    def ended(self, plan: TrialPlan, trial: Trial, *, earlier: bool) -> None:
        """Called when a trial has a record; `earlier` if it existed before this sweep."""
        ...


class TrialTimeout(BaseException):
    """A trial in this process exceeded its time limit. Not an `Exception`, which would count as its failure."""


def carry_out_here(
    plan: TrialPlan, work: Callable[[Callable[[], None]], Outcome], watch: Callable[[], None] = lambda: None
) -> Trial:
    """Carry out a trial that needs no devices in this process, and return its record.

    Waits while another sweep runs the trial. Raises OSError if the record cannot be written.

    Args:
        plan: The trial. If an earlier record settles it, that is returned.
        work: Does the trial. It calls its argument several times a second, which ends it at the trial's time limit.
        watch: Called several times a second. What it raises ends the trial without a record.
    """
    while True:
        trials, _ = settle([plan])
        if plan.key in trials:
            return trials[plan.key]
        if (lock := TrialLock.take(plan.trial_folder)) is not None:
            break
        watch()
        time.sleep(_ELSEWHERE_POLL_S)
    with ExitStack() as releasing:
        releasing.callback(lock.release)
        trials, _ = settle([plan])  # another sweep may have recorded it before the lock was free
        if plan.key in trials:
            return trials[plan.key]
        plan.write()
        started, began = datetime.now(UTC).isoformat(), time.monotonic()

        def check_limits() -> None:
            watch()
            if plan.limit_s is not None and time.monotonic() - began > plan.limit_s:
                raise TrialTimeout

        try:
            outcome = work(check_limits)
        except TrialTimeout:
            outcome = over_limit(plan)
        outcome.write(plan.trial_folder)
        trial = plan.ended(outcome.status, outcome.reason, started, time.monotonic() - began, outcome.results)
        TrialLog(plan.folder).append([trial])
        return trial


def carry_out(plans: Sequence[TrialPlan], jobs: int, watcher: Watcher | None = None) -> dict[str, Trial]:
    """Carry out the trials of one sweep folder, `jobs` processes at a time, and return their records by key.

    Waits for trials that another sweep is running. Raises OSError if a record cannot be written and KeyboardInterrupt
    after Ctrl-C; trials that are then running are not recorded.
    """
    trials, waiting = settle(plans, watcher)
    running: dict[str, tuple[TrialProcess, TrialLock]] = {}
    looked = 0.0
    try:
        while waiting or running:
            if len(running) < jobs and time.monotonic() - looked > _ELSEWHERE_POLL_S:
                looked = time.monotonic() if not _start_next(waiting, running, trials, watcher) else 0.0
                continue
            before = len(running)
            for key, (process, lock) in list(running.items()):
                trial = process.poll()
                if trial is not None:
                    TrialLog(process.plan.folder).append([trial])
                    _add(process.plan, trial, trials, watcher)
                    del running[key]
                    lock.release()
            if len(running) < before:
                looked = 0.0
            else:
                if watcher is not None:
                    watcher.running([process for process, _ in running.values()], len(waiting))
                time.sleep(_POLL_S)
    finally:
        stop(process for process, _ in running.values())
        for _, lock in running.values():
            lock.release()
    return trials


def settle(plans: Sequence[TrialPlan], watcher: Watcher | None = None) -> tuple[dict[str, Trial], list[TrialPlan]]:
    """Return the trials by key that need no process, and the other plans.

    These trials were recorded earlier, or are refused and recorded now.
    """
    trials: dict[str, Trial] = {}
    waiting: list[TrialPlan] = []
    if not plans:
        return trials, waiting
    log = TrialLog(plans[0].folder)
    recorded = {trial.key: trial for trial in log.read()}
    refused: list[tuple[TrialPlan, Trial]] = []
    for plan in plans:
        before = recorded.get(plan.key)
        if before is not None and plan.settled_by(before):
            _add(plan, before, trials, watcher, earlier=True)
        elif plan.refusal is None:
            waiting.append(plan)
        elif before is not None and before.reason == plan.refusal:
            refused.append((plan, before))
        else:
            refused.append((plan, plan.ended(Status.refused, plan.refusal, datetime.now(UTC).isoformat(), 0.0)))
    log.append({t.key: t for _, t in refused if recorded.get(t.key) is not t}.values())
    for plan, trial in refused:
        _add(plan, trial, trials, watcher)
    return trials, waiting


def _start_next(
    waiting: list[TrialPlan],
    running: dict[str, tuple[TrialProcess, TrialLock]],
    trials: dict[str, Trial],
    watcher: Watcher | None,
) -> bool:
    """Start or settle the first waiting trial that no other sweep is running, and return whether there was one."""
    for plan in waiting:
        if plan.key in trials:  # two jobs of one key
            waiting.remove(plan)
            _add(plan, trials[plan.key], trials, watcher, earlier=True)
            return True
        lock = None if plan.key in running else TrialLock.take(plan.trial_folder)
        if lock is None:
            continue
        waiting.remove(plan)
        with ExitStack() as releasing:
            releasing.callback(lock.release)
            before = next((trial for trial in TrialLog(plan.folder).read() if trial.key == plan.key), None)
            if before is not None and plan.settled_by(before):
                _add(plan, before, trials, watcher, earlier=True)
            else:
                running[plan.key] = TrialProcess(plan, lock), lock
                releasing.pop_all()
        return True
    return False


def _add(
    plan: TrialPlan, trial: Trial, trials: dict[str, Trial], watcher: Watcher | None, *, earlier: bool = False
) -> None:
    trials[plan.key] = trial
    if watcher is not None:
        watcher.ended(plan, trial, earlier=earlier)
