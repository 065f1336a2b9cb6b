"""The second stage: the layouts with the shortest estimates are compiled, until no other can be faster."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from omegaconf import OmegaConf

from valkyrie.config.modes import settings_for
from valkyrie.config.run import Run
from valkyrie.hardware.target import TargetConfig
from valkyrie.modes.compile import Config as CompileMode
from valkyrie.runs.folder import parts_of
from valkyrie.search.estimate.rank import Estimated
from valkyrie.search.request import SearchRequest
from valkyrie.search.shortlist import Place, Shortlist, errors, place_of
from valkyrie.sweep.plan import Plan, plan_run
from valkyrie.sweep.process import TrialProcess
from valkyrie.sweep.run import carry_out
from valkyrie.sweep.trial import Status, Trial

FIRST = 4
"""So many different meshes and partitions are compiled before variants of one."""
SAME_PLACE = 0.97
"""A variant of a layout that was compiled may be this much faster than its estimate, held to that one, says."""


@dataclass(frozen=True)
class Compiled:
    """A layout with its estimate and the record of its compile."""

    estimate: Estimated
    trial: Trial

    @property
    def step_s(self) -> float | None:
        """Seconds of a step by the replay of the compiled program; None where it does not fit or was not compiled."""
        return self.trial.results.step.step_s if self.trial.status is Status.ok else None

    @property
    def target(self) -> TargetConfig:
        """The slice it was compiled for."""
        return self.estimate.group.target

    @property
    def peak(self) -> int | None:
        """Bytes of one device at the peak, needed where it does not fit."""
        return self.trial.results.memory.required


@dataclass
class Compiles:
    """What was compiled."""

    done: list[Compiled] = field(default_factory=list)
    why: str = ""
    """Why no more was compiled."""

    def best(self, request: SearchRequest) -> Compiled | None:
        """Return the fastest layout that fits, or the cheapest where dollars matter."""
        fitting = [one for one in self.done if one.step_s is not None]
        return min(fitting, key=lambda one: request.cost(one.target, one.step_s or 0.0), default=None)

    def ratio(self, place: Place) -> float | None:
        """Return what the compiled step of a mesh and partition took of its estimate; None where there is none."""
        own = [one for one in self.done if place_of(one.estimate) == place and one.step_s is not None]
        return (own[-1].step_s or 0.0) / own[-1].estimate.step_s if own else None


Tell = Callable[[Compiled, Compiles], None]


def compile_best(
    request: SearchRequest,
    listed: Shortlist,
    always: Sequence[Estimated],
    folder: Path,
    most: int,
    compiles: Compiles,
    tell: Tell,
) -> None:
    """Compile layouts into `compiles` until none can be better, the budget is spent or `most` are done.

    `always` are compiled in any case, after the one that is expected to be the fastest. A layout that an earlier search
    compiled is taken from its record. None is begun that would end after the budget, if it took as long as the longest
    until then, and one that is under way at its end is ended, unrecorded. `tell` is called after each. Ctrl-C raises
    KeyboardInterrupt; what is done until then stands in `compiles`.
    """
    began, longest, waiting = time.monotonic(), 0.0, [*listed.fitting, *listed.doubtful]
    first = list(always)
    while True:
        wanted = bool(first)
        one = first.pop(0) if first and compiles.done else _next(request, waiting, compiles)
        bound = min((request.cost(other.group.target, _bound(other, compiles)) for other in waiting), default=0.0)
        best = compiles.best(request)
        if one is None:
            compiles.why = "every layout that may fit was compiled"
        elif not wanted and best is not None and bound > request.cost(best.target, best.step_s or 0.0):
            compiles.why = "no other layout can be faster, by the errors of estimates so far"
        elif request.budget_s is not None and time.monotonic() - began + longest > request.budget_s:
            compiles.why = f"another compile would take longer than mode.budget={request.mode.budget}"
        elif len(compiles.done) >= most:
            compiles.why = f"mode.compiles={most} layouts were compiled"
        if one is None or compiles.why:
            return
        waiting = [other for other in waiting if other is not one]
        if any(one.candidate == other.estimate.candidate for other in compiles.done):
            continue
        plan, start = plan_of(request, one, folder), time.monotonic()
        try:
            trial = carry_out([plan], 1, _until(request, began))[plan.key]
        except BudgetOver:
            over = f"mode.budget={request.mode.budget} was over"
            compiles.why = f"{over} before the compile of {' '.join(one.candidate.overrides)} ended"
            return
        longest = max(longest, time.monotonic() - start)
        compiles.done.append(Compiled(one, trial))
        tell(compiles.done[-1], compiles)


def plan_of(request: SearchRequest, one: Estimated, folder: Path) -> Plan:
    """Return the trial that compiles a layout."""
    run = one.run(request.run).changed(mode=settings_for(CompileMode, request.mode))
    return plan_in(folder, request, run, one.candidate.overrides)


def plan_in(folder: Path, request: SearchRequest, run: Run, overrides: Sequence[str]) -> Plan:
    """Return the trial of a run in the folder of a search; `overrides` are those that it has beside the search's."""
    hydra = OmegaConf.create(
        {
            "sweep": {"dir": str(folder)},
            "runtime": {"config_sources": []},
            "job": {"env_set": {}, "config_name": "train"},
            "overrides": {"hydra": []},
        }
    )
    flags, given = parts_of(request.command)
    plan = plan_run(run, hydra, [*given, f"mode={run.config.mode.name}", *overrides])
    return replace(plan, flags=tuple(flags))


def _next(request: SearchRequest, waiting: Iterable[Estimated], compiles: Compiles) -> Estimated | None:
    """Return the layout that is expected to be the fastest; at first each of another mesh and partition."""
    places = {place_of(one.estimate) for one in compiles.done}
    others = [one for one in waiting if place_of(one) not in places] if len(places) < FIRST else []

    def expected(one: Estimated) -> float:
        return request.cost(one.group.target, one.step_s * (compiles.ratio(place_of(one)) or 1.0))

    return min(others or waiting, key=expected, default=None)


def _bound(one: Estimated, compiles: Compiles) -> float:
    """Return the least step time that a layout may have."""
    ratio = compiles.ratio(place_of(one))
    return one.step_s * (errors().low if ratio is None else SAME_PLACE * ratio)


class BudgetOver(Exception):
    """The budget ended while a layout was being compiled."""


def _until(request: SearchRequest, began: float) -> Silent:
    return Silent() if request.budget_s is None else Until(began + request.budget_s)


class Silent:
    """Watches a trial and prints nothing."""

    def running(self, processes: Sequence[TrialProcess], waiting: int) -> None:
        """Do nothing."""

    def ended(self, plan: Plan, trial: Trial, *, earlier: bool) -> None:
        """Do nothing."""


class Until(Silent):
    """Ends what is under way at a time, in seconds of `time.monotonic`, by BudgetOver."""

    def __init__(self, end: float) -> None:
        self._end = end

    def running(self, processes: Sequence[TrialProcess], waiting: int) -> None:
        """Raise BudgetOver after the end."""
        if time.monotonic() > self._end:
            raise BudgetOver
