"""Runs the trials of a sweep and records their results. Skips trials that are already recorded or illegal."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import Protocol, runtime_checkable

from valkyrie.processes.locks import TrialLock
from valkyrie.sweep.plan import TrialPlan
from valkyrie.sweep.process import TrialProcess, stop_trials, timeout_outcome
from valkyrie.sweep.results import Outcome
from valkyrie.sweep.trial import Status, Trial, TrialLog

_POLL_S = 0.1
_LOCKED_POLL_S = 0.5

_RESULTS = (Status.ok, Status.does_not_fit)
"""Statuses of a trial with a result, which a machine without its compiler or devices does not replace."""


@runtime_checkable
class Watcher(Protocol):
    """Shows the progress of a sweep."""

    def show_running(self, processes: Sequence[TrialProcess], waiting_count: int) -> None:
        """Called several times a second with the running trials and the number of waiting ones.

        If trials are waiting but none is running, another sweep is running them.
        """
        ...

    def show_ended(self, plan: TrialPlan, trial: Trial, *, recorded_earlier: bool) -> None:
        """Called when a trial has ended, is refused or needs no new run.

        `recorded_earlier` is True if the trial needs no new run, because an earlier or concurrent sweep has recorded
        it, or a plan with the same key has been run.
        """
        ...


class TrialTimeout(BaseException):
    """A trial in this process exceeded its time limit. Not an `Exception`, which would be recorded as a failure."""


def run_in_this_process(
    plan: TrialPlan, run_trial: Callable[[Callable[[], None]], Outcome], watch: Callable[[], None] = lambda: None
) -> Trial:
    """Run a trial in this process, and return its record. For trials that need no devices.

    Waits if another sweep is running the trial. Raises OSError if the record cannot be written.

    Args:
        plan: The trial. If it is refused, or an earlier record makes it unnecessary, `run_trial` is not called.
        run_trial: Runs the trial. It must call its argument several times a second to enforce the trial's time limit.
        watch: Called several times a second. An exception from it ends the trial without a record.
    """
    while True:
        trials, _ = settle([plan])
        if plan.key in trials:
            return trials[plan.key]
        if (lock := TrialLock.acquire(plan.trial_folder)) is not None:
            break
        watch()
        time.sleep(_LOCKED_POLL_S)
    with ExitStack() as cleanup:
        cleanup.callback(lock.release)
        trials, _ = settle([plan])  # another sweep may have recorded it before releasing the lock
        if plan.key in trials:
            return trials[plan.key]
        plan.write()
        start_timestamp, start_time = datetime.now(UTC).isoformat(), time.monotonic()

        def check_limits() -> None:
            watch()
            if plan.limit_s is not None and time.monotonic() - start_time > plan.limit_s:
                raise TrialTimeout

        try:
            outcome = run_trial(check_limits)
        except TrialTimeout:
            outcome = timeout_outcome(plan)
        outcome.write(plan.trial_folder)
        trial = plan.to_trial(outcome, start_timestamp, time.monotonic() - start_time)
        TrialLog(plan.folder).append([trial])
        return trial


def run_trials(plans: Sequence[TrialPlan], n_jobs: int, watcher: Watcher | None = None) -> dict[str, Trial]:
    """Run the trials of one sweep folder, `n_jobs` at a time in separate processes.

    Returns a dict from trial keys to records, including earlier records of trials that need no new run. Waits for
    trials that another sweep is running. Raises OSError if a record cannot be written, and KeyboardInterrupt after
    Ctrl-C. In both cases running trials are stopped and not recorded.
    """
    trials, waiting_plans = settle(plans, watcher)
    running_trials: dict[str, tuple[TrialProcess, TrialLock]] = {}
    last_attempt = 0.0
    try:
        while waiting_plans or running_trials:
            if len(running_trials) < n_jobs and time.monotonic() - last_attempt > _LOCKED_POLL_S:
                last_attempt = (
                    time.monotonic() if not _start_next(waiting_plans, running_trials, trials, watcher) else 0.0
                )
                continue
            running_count = len(running_trials)
            for key, (process, lock) in list(running_trials.items()):
                trial = process.poll()
                if trial is not None:
                    TrialLog(process.plan.folder).append([trial])
                    _add_trial(process.plan, trial, trials, watcher)
                    del running_trials[key]
                    lock.release()
            if len(running_trials) < running_count:
                last_attempt = 0.0
            else:
                if watcher is not None:
                    watcher.show_running([process for process, _ in running_trials.values()], len(waiting_plans))
                time.sleep(_POLL_S)
    finally:
        stop_trials(process for process, _ in running_trials.values())
        for _, lock in running_trials.values():
            lock.release()
    return trials


def settle(plans: Sequence[TrialPlan], watcher: Watcher | None = None) -> tuple[dict[str, Trial], list[TrialPlan]]:
    """Split plans into settled trials and plans that must run. Returns (trials by key, plans).

    A trial is settled if an earlier record makes a new run unnecessary, or if it is refused. Records new refusals,
    except for lack of a compiler or devices if the record has an earlier result. Shows settled trials with `watcher`.
    """
    trials: dict[str, Trial] = {}
    waiting_plans: list[TrialPlan] = []
    if not plans:
        return trials, waiting_plans
    log = TrialLog(plans[0].folder)
    recorded_trials = {trial.key: trial for trial in log.read()}
    refused_trials: list[tuple[TrialPlan, Trial]] = []
    new_refusals: dict[str, Trial] = {}
    for plan in plans:
        earlier_trial = recorded_trials.get(plan.key)
        if earlier_trial is not None and plan.is_settled_by(earlier_trial):
            _add_trial(plan, earlier_trial, trials, watcher, recorded_earlier=True)
        elif plan.refusal is None:
            waiting_plans.append(plan)
        elif earlier_trial is not None and earlier_trial.reason == plan.refusal:
            refused_trials.append((plan, earlier_trial))
        else:
            problems = tuple(problem.to_record() for problem in plan.problems)
            outcome = Outcome(Status.refused, plan.refusal, problems=problems)
            refused_trials.append((plan, plan.to_trial(outcome, datetime.now(UTC).isoformat(), 0.0)))
            if plan.problems or earlier_trial is None or earlier_trial.status not in _RESULTS:
                new_refusals[plan.key] = refused_trials[-1][1]
    log.append(new_refusals.values())
    for plan, trial in refused_trials:
        _add_trial(plan, trial, trials, watcher)
    return trials, waiting_plans


def _start_next(
    waiting_plans: list[TrialPlan],
    running_trials: dict[str, tuple[TrialProcess, TrialLock]],
    trials: dict[str, Trial],
    watcher: Watcher | None,
) -> bool:
    """Start the first waiting trial that is not locked, and move it from `waiting_plans` to `running_trials`.

    A trial is locked while it runs, in this or another sweep. If the first one that is not locked has been recorded in
    the meantime, moves it to `trials` instead of starting it. Returns False if all waiting trials are locked.
    """
    for plan in waiting_plans:
        if plan.key in trials:  # another job has the same key
            waiting_plans.remove(plan)
            _add_trial(plan, trials[plan.key], trials, watcher, recorded_earlier=True)
            return True
        lock = None if plan.key in running_trials else TrialLock.acquire(plan.trial_folder)
        if lock is None:
            continue
        waiting_plans.remove(plan)
        with ExitStack() as cleanup:
            cleanup.callback(lock.release)
            earlier_trial = next((trial for trial in TrialLog(plan.folder).read() if trial.key == plan.key), None)
            if earlier_trial is not None and plan.is_settled_by(earlier_trial):
                _add_trial(plan, earlier_trial, trials, watcher, recorded_earlier=True)
            else:
                running_trials[plan.key] = TrialProcess(plan, lock), lock
                cleanup.pop_all()
        return True
    return False


def _add_trial(
    plan: TrialPlan, trial: Trial, trials: dict[str, Trial], watcher: Watcher | None, *, recorded_earlier: bool = False
) -> None:
    trials[plan.key] = trial
    if watcher is not None:
        watcher.show_ended(plan, trial, recorded_earlier=recorded_earlier)
