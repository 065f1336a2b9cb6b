"""Second stage of a search: compiles the layouts with the shortest estimates until no other can be faster."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from valkyrie.config.modes import settings_for
from valkyrie.config.run import Run
from valkyrie.hardware.target import TargetConfig
from valkyrie.modes.compile import Config as CompileMode
from valkyrie.runs.folder import parts_of
from valkyrie.search.estimate.rank import Estimated
from valkyrie.search.modes import compile_into_folder
from valkyrie.search.request import SearchRequest
from valkyrie.search.shortlist import MeshPartition, Shortlist, errors, mesh_partition
from valkyrie.sweep.child import outcome_of
from valkyrie.sweep.plan import SweepContext, TrialPlan, plan_run
from valkyrie.sweep.results import OUTPUT, Outcome, results_of
from valkyrie.sweep.run import carry_out_here
from valkyrie.sweep.trial import Status, Trial

FIRST = 4
"""Number of different meshes and partitions to compile before variants of one."""
LOWEST_VARIANT = 0.97
"""Smallest ratio of a variant's step time to its estimate, after rescaling by another compile of its partition."""


@dataclass(frozen=True)
class CompiledLayout:
    """A layout with its estimate and the record of its compile."""

    estimate: Estimated
    trial: Trial

    @property
    def step_s(self) -> float | None:
        """Step time of the replayed program, in seconds, or None if it does not fit or was not compiled."""
        return self.trial.results.step.step_s if self.trial.status is Status.ok else None

    @property
    def target(self) -> TargetConfig:
        """The slice it was compiled for."""
        return self.estimate.group.target

    @property
    def peak(self) -> int | None:
        """Peak memory per device, in bytes. If the layout does not fit, the bytes that it needs."""
        return self.trial.results.memory.required


@dataclass
class Compiles:
    """The compiled layouts, and the reason why no more were compiled."""

    done: list[CompiledLayout] = field(default_factory=list)
    why: str = ""

    def best(self, request: SearchRequest) -> CompiledLayout | None:
        """Return the fastest layout that fits, or the cheapest if the search is by price."""
        fitting = [layout for layout in self.done if layout.step_s is not None]
        return min(fitting, key=lambda layout: request.cost(layout.target, layout.step_s or 0.0), default=None)

    def ratio(self, key: MeshPartition) -> float | None:
        """Return compiled over estimated step time of a mesh and partition, or None if none was compiled."""
        same = [c for c in self.done if mesh_partition(c.estimate) == key and c.step_s is not None]
        return (same[-1].step_s or 0.0) / same[-1].estimate.step_s if same else None


class BudgetOver(BaseException):
    """The budget ended during a compile. Not an `Exception`, which would be recorded as the trial's failure."""


def compile_best(
    request: SearchRequest,
    listed: Shortlist,
    always: Sequence[Estimated],
    folder: Path,
    most: int,
    compiles: Compiles,
    on_result: Callable[[CompiledLayout, Compiles], None],
) -> None:
    """Compile layouts until no other can be better, the budget is spent, or `most` are compiled.

    Does not start a compile that would likely exceed the budget, judging by the longest so far. A compile that is
    running when the budget ends is stopped and not recorded. Ctrl-C raises KeyboardInterrupt and leaves the results so
    far.

    Args:
        request: The search.
        listed: Layouts that may be the best.
        always: Layouts to compile in any case, after the one that is expected to be the fastest.
        folder: Folder of the search. Layouts that an earlier search compiled are read from its records.
        most: Largest number of compiles.
        compiles: Receives the results.
        on_result: Called after each compile.
    """
    began, longest, waiting = time.monotonic(), 0.0, [*listed.fitting, *listed.doubtful]
    required = list(always)

    def watch() -> None:
        if request.budget_s is not None and time.monotonic() - began > request.budget_s:
            raise BudgetOver

    while True:
        is_required = bool(required)
        layout = required.pop(0) if required and compiles.done else _next(request, waiting, compiles)
        bound = min((request.cost(other.group.target, _bound(other, compiles)) for other in waiting), default=0.0)
        best = compiles.best(request)
        if layout is None:
            compiles.why = "every layout that may fit was compiled"
        elif not is_required and best is not None and bound > request.cost(best.target, best.step_s or 0.0):
            compiles.why = "no other layout can be faster, by the errors of estimates so far"
        elif request.budget_s is not None and time.monotonic() - began + longest > request.budget_s:
            compiles.why = f"another compile would take longer than mode.budget={request.mode.budget}"
        elif len(compiles.done) >= most:
            compiles.why = f"mode.compiles={most} layouts were compiled"
        if layout is None or compiles.why:
            return
        waiting = [other for other in waiting if other is not layout]
        if any(layout.candidate == other.estimate.candidate for other in compiles.done):
            continue
        start = time.monotonic()
        try:
            trial = compile_trial(plan_compile(request, layout, folder), watch)
        except BudgetOver:
            over = f"mode.budget={request.mode.budget} was over"
            compiles.why = f"{over} before the compile of {' '.join(layout.candidate.overrides)} ended"
            return
        longest = max(longest, time.monotonic() - start)
        compiles.done.append(CompiledLayout(layout, trial))
        on_result(compiles.done[-1], compiles)


def compile_trial(plan: TrialPlan, watch: Callable[[], None]) -> Trial:
    """Compile the layout of a plan in one child process and record it, unless an earlier search did.

    `watch` is called several times a second. An exception that it raises ends the compile.
    """

    def work(check_limits: Callable[[], None]) -> Outcome:
        run, folder = plan.run, plan.trial_folder
        assert run is not None
        (folder / OUTPUT).unlink(missing_ok=True)
        with (folder / OUTPUT).open("x") as log:
            console = Console(file=log, soft_wrap=True, highlight=False, width=140)

            def compile_layout() -> Outcome:
                compile_into_folder(run, console, check_limits)
                return results_of(folder, plan.mode)

            return outcome_of(compile_layout, log)

    return carry_out_here(plan, work, watch)


def plan_compile(request: SearchRequest, layout: Estimated, folder: Path) -> TrialPlan:
    """Plan the trial that compiles a layout."""
    run = layout.run(request.run).changed(mode=settings_for(CompileMode, request.mode))
    return plan_layout(folder, request, run, layout)


def plan_layout(folder: Path, request: SearchRequest, run: Run, layout: Estimated) -> TrialPlan:
    """Plan a trial of a layout in the folder of a search."""
    flags, overrides = parts_of(request.command)
    overrides = [*overrides, f"mode={run.config.mode.name}", *layout.candidate.overrides]
    return plan_run(run, SweepContext(folder, tuple(flags)), overrides)


def _next(request: SearchRequest, waiting: Iterable[Estimated], compiles: Compiles) -> Estimated | None:
    """Return the layout that is expected to be the fastest. The first `FIRST` differ in mesh or partition."""
    compiled = {mesh_partition(layout.estimate) for layout in compiles.done}
    others = [layout for layout in waiting if mesh_partition(layout) not in compiled] if len(compiled) < FIRST else []

    def expected(layout: Estimated) -> float:
        return request.cost(layout.group.target, layout.step_s * (compiles.ratio(mesh_partition(layout)) or 1.0))

    return min(others or waiting, key=expected, default=None)


def _bound(layout: Estimated, compiles: Compiles) -> float:
    """Return the shortest step time that a layout may have, in seconds."""
    ratio = compiles.ratio(mesh_partition(layout))
    return layout.step_s * (errors().low if ratio is None else LOWEST_VARIANT * ratio)
