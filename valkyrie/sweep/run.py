"""Decides how trials are carried out: skipped where recorded, refused without a process, else run and recorded.

`run_trial` is the task function of every multirun, whatever launcher calls it, in whatever process.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from types import FrameType
from typing import Protocol, runtime_checkable

from omegaconf import DictConfig

from valkyrie.sweep.lock import TrialLock
from valkyrie.sweep.plan import Plan, plan_trial
from valkyrie.sweep.process import TrialProcess, stop
from valkyrie.sweep.results import objective
from valkyrie.sweep.screen import Lines
from valkyrie.sweep.trial import Status, Trial, TrialLog

_POLL_S = 0.1
_ELSEWHERE_POLL_S = 0.5


@runtime_checkable
class Watcher(Protocol):
    """Who is told how a sweep goes."""

    def running(self, processes: Sequence[TrialProcess], waiting: int) -> None:
        """See what runs and how many trials wait, for another sweep if none runs; called several times a second."""
        ...

    def ended(self, plan: Plan, trial: Trial, *, earlier: bool) -> None:
        """See a trial that is recorded; `earlier`: it was before this sweep came to it."""
        ...


def run_trial(config: DictConfig) -> float:
    """Carry out the job that Hydra has composed, record it, and return its tokens/s/chip; 0.0 where there is none.

    OSError where the record cannot be written, KeyboardInterrupt where it was stopped: such a trial is not recorded.
    """
    plan = plan_trial(config)
    with signals_interrupt():
        return objective(carry_out([plan], 1, Lines())[plan.key])


def carry_out(plans: Sequence[Plan], jobs: int, watcher: Watcher) -> dict[str, Trial]:
    """Return the record of every plan by key, `jobs` processes at a time; all plans are of one sweep folder.

    Trials that another sweep has in hand are left to it, and looked at again until it is done with them.
    """
    found: dict[str, Trial] = {}
    waiting = _settle(plans, found, watcher)
    running: dict[str, tuple[TrialProcess, TrialLock]] = {}
    looked = 0.0
    try:
        while waiting or running:
            if len(running) < jobs and time.monotonic() - looked > _ELSEWHERE_POLL_S:
                looked = time.monotonic() if not _start_next(waiting, running, found, watcher) else 0.0
                continue
            before = len(running)
            for key, (process, lock) in list(running.items()):
                trial = process.poll()
                if trial is not None:
                    _record(process.plan, trial, found, watcher)
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
    return found


def _settle(plans: Sequence[Plan], found: dict[str, Trial], watcher: Watcher) -> list[Plan]:
    """Return the plans that need a process; the others are recorded already, or refused and recorded now."""
    if not plans:
        return []
    log = TrialLog(plans[0].folder)
    recorded = {trial.key: trial for trial in log.read()}
    waiting: list[Plan] = []
    refused: list[tuple[Plan, Trial]] = []
    for plan in plans:
        before = recorded.get(plan.key)
        if before is not None and plan.settled_by(before):
            _note(plan, before, found, watcher, earlier=True)
        elif plan.refusal is None:
            waiting.append(plan)
        else:
            refused.append((plan, plan.ended(Status.refused, plan.refusal, datetime.now(UTC).isoformat(), 0.0)))
    new = {trial.key: trial for _, trial in refused}
    log.append(t for key, t in new.items() if key not in recorded or recorded[key].reason != t.reason)
    for plan, trial in refused:
        _note(plan, trial, found, watcher)
    return waiting


def _start_next(
    waiting: list[Plan],
    running: dict[str, tuple[TrialProcess, TrialLock]],
    found: dict[str, Trial],
    watcher: Watcher,
) -> bool:
    """Start, or settle, the first waiting trial that nobody has in hand; return whether there was one."""
    for plan in waiting:
        if plan.key in found:  # asked for twice
            waiting.remove(plan)
            _note(plan, found[plan.key], found, watcher, earlier=True)
            return True
        lock = None if plan.key in running else TrialLock.take(plan.trial_folder)
        if lock is None:
            continue
        waiting.remove(plan)
        with ExitStack() as held:
            held.callback(lock.release)
            before = _recorded(plan)
            if before is not None and plan.settled_by(before):
                _note(plan, before, found, watcher, earlier=True)
            else:
                running[plan.key] = TrialProcess(plan, lock), lock
                held.pop_all()
        return True
    return False


def _recorded(plan: Plan) -> Trial | None:
    return next((trial for trial in TrialLog(plan.folder).read() if trial.key == plan.key), None)


def _record(plan: Plan, trial: Trial, found: dict[str, Trial], watcher: Watcher) -> None:
    TrialLog(plan.folder).append([trial])
    _note(plan, trial, found, watcher)


def _note(plan: Plan, trial: Trial, found: dict[str, Trial], watcher: Watcher, *, earlier: bool = False) -> None:
    found[plan.key] = trial
    watcher.ended(plan, trial, earlier=earlier)


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """Let SIGTERM and SIGHUP do what Ctrl-C does, where nobody else has a use for them."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {n: signal.getsignal(n) for n in numbers}
    for number, handler in before.items():
        if handler is signal.SIG_DFL:
            signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is signal.SIG_DFL:
                signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)
