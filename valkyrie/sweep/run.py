"""How trials are carried out: skipped where recorded, refused without a process, else run and recorded."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import Protocol, runtime_checkable

from valkyrie.processes.locks import TrialLock
from valkyrie.sweep.plan import Plan
from valkyrie.sweep.process import TrialProcess, stop
from valkyrie.sweep.trial import Status, Trial, TrialLog

_POLL_S = 0.1
_ELSEWHERE_POLL_S = 0.5


@runtime_checkable
class Watcher(Protocol):
    """Is called as a sweep goes on."""

    def running(self, processes: Sequence[TrialProcess], waiting: int) -> None:
        """See what runs and how many trials wait, for another sweep if none runs; called several times a second."""
        ...

    def ended(self, plan: Plan, trial: Trial, *, earlier: bool) -> None:
        """See a trial that is recorded; `earlier`: it was before this sweep came to it."""
        ...


def carry_out(plans: Sequence[Plan], jobs: int, watcher: Watcher) -> dict[str, Trial]:
    """Return the record of every plan by key, `jobs` processes at a time; all plans are of one sweep folder.

    Trials that another sweep is carrying out are left to it, and looked at again until it is done with them. OSError
    where a record cannot be written, KeyboardInterrupt after Ctrl-C: such trials are not recorded.
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
                watcher.running([process for process, _ in running.values()], len(waiting))
                time.sleep(_POLL_S)
    finally:
        stop(process for process, _ in running.values())
        for _, lock in running.values():
            lock.release()
    return trials


def settle(plans: Sequence[Plan], watcher: Watcher | None = None) -> tuple[dict[str, Trial], list[Plan]]:
    """Return the trials by key that need no process, recorded earlier or refused and recorded now, and other plans."""
    trials: dict[str, Trial] = {}
    waiting: list[Plan] = []
    if not plans:
        return trials, waiting
    log = TrialLog(plans[0].folder)
    recorded = {trial.key: trial for trial in log.read()}
    refused: list[tuple[Plan, Trial]] = []
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
    waiting: list[Plan],
    running: dict[str, tuple[TrialProcess, TrialLock]],
    trials: dict[str, Trial],
    watcher: Watcher,
) -> bool:
    """Start, or settle, the first waiting trial that no other sweep is carrying out; return whether there was one."""
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


def _add(plan: Plan, trial: Trial, trials: dict[str, Trial], watcher: Watcher | None, *, earlier: bool = False) -> None:
    trials[plan.key] = trial
    if watcher is not None:
        watcher.ended(plan, trial, earlier=earlier)
