"""The last stage: the best few layouts are run on the devices at hand, and the estimates are judged by that."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from valkyrie.config.modes import settings_for
from valkyrie.modes.measure import Config as MeasureMode
from valkyrie.search.answer import MeasuredLayout, MeasureReport, RankedLayout, Stage, rank_layout
from valkyrie.search.at_hand import on_cpu
from valkyrie.search.compiling import Compiles, plan_layout
from valkyrie.search.estimate.rank import Estimated
from valkyrie.search.request import SearchRequest
from valkyrie.search.shortlist import MeshPartition, Shortlist, mesh_partition
from valkyrie.sweep.run import carry_out
from valkyrie.sweep.trial import Status, Trial
from valkyrie.units import duration


@dataclass(frozen=True)
class Measured:
    """A layout with what its step was expected to take, by its compile or its estimate, and its measured trial."""

    estimate: Estimated
    expected_s: float
    trial: Trial

    @property
    def step_s(self) -> float | None:
        """Median seconds of a step; None where it was not measured."""
        return self.trial.results.step.step_s if self.trial.status is Status.ok else None


@dataclass
class Measures:
    """What was measured."""

    done: list[Measured] = field(default_factory=list)
    why: str = ""
    """Why no more was measured."""

    @property
    def timed(self) -> list[Measured]:
        """Those that ran, the fastest first."""
        return sorted((one for one in self.done if one.step_s is not None), key=lambda one: one.step_s or 0.0)

    @property
    def agreement(self) -> float | None:
        """Spearman's correlation of the expected with the measured order; None of fewer than three, or of equals."""
        expected_s, step_s = [m.expected_s for m in self.timed], [m.step_s or 0.0 for m in self.timed]
        if len(step_s) < 3 or 1 in (len(set(expected_s)), len(set(step_s))):
            return None
        from scipy.stats import spearmanr  # takes a second

        agreement: Any = spearmanr(expected_s, step_s)
        return float(agreement.statistic)

    @property
    def regret(self) -> float | None:
        """What the layout that was expected to be the fastest takes beyond the fastest measured; None: none was."""
        timed = self.timed
        if not timed:
            return None
        return (min(timed, key=lambda m: m.expected_s).step_s or 0.0) / (timed[0].step_s or 1.0) - 1

    @property
    def usual(self) -> float:
        """What a measured step usually took of what was expected; 1 where none was measured."""
        return median([(one.step_s or 0.0) / one.expected_s for one in self.timed] or [1.0])

    def step_s(self, one: Estimated) -> float | None:
        """Return the measured seconds of a layout's step; None where it was not measured."""
        return next((m.step_s for m in self.done if m.estimate.candidate == one.candidate), None)

    def ratio(self, place: MeshPartition) -> float | None:
        """Return what a measured step of a mesh and partition took of what was expected; None where there is none."""
        own = [one for one in self.timed if mesh_partition(one.estimate) == place]
        return median((one.step_s or 0.0) / one.expected_s for one in own) if own else None


def measure_best(
    request: SearchRequest,
    listed: Shortlist,
    compiles: Compiles,
    folder: Path,
    measures: Measures,
    tell: Callable[[Measured], None],
) -> None:
    """Measure the most promising layouts into `measures`: `mode.measure` of them, none begun after the budget.

    At first each is of another mesh and partition; then the one that is expected to be the fastest by how long others
    of its mesh and partition took. Ctrl-C raises KeyboardInterrupt; what is done until then stands in `measures`.
    """
    most, began, waiting = request.mode.measure, time.monotonic(), expected_step_times(listed, compiles)
    while len(measures.done) < most and waiting:
        if request.budget_s is not None and time.monotonic() - began > request.budget_s:
            measures.why = f"mode.budget={request.mode.budget} is over"
            return
        one, expected_s = _next(waiting, measures, most)
        waiting = [pair for pair in waiting if pair[0] is not one]
        trial = run_measurement(request, one, folder)
        measures.done.append(Measured(one, expected_s, trial))
        tell(measures.done[-1])
        if trial.status is Status.refused:
            measures.why = trial.reason or "refused"
            return


def expected_step_times(listed: Shortlist, compiles: Compiles) -> list[tuple[Estimated, float]]:
    """Return layouts with what their step should take, the fastest first: compiled ones by that, others by estimate."""
    compiled = {one.estimate.candidate for one in compiles.done}
    pairs = [(one.estimate, one.step_s) for one in compiles.done if one.step_s is not None]
    for one in listed.fitting:
        if one.candidate not in compiled:
            pairs.append((one, one.step_s * (compiles.ratio(mesh_partition(one)) or 1.0)))
    return sorted(pairs, key=lambda pair: pair[1])


def run_measurement(request: SearchRequest, one: Estimated, folder: Path) -> Trial:
    """Return the record of a layout that is measured now, or was by an earlier search."""
    run = one.run(request.run).changed(mode=settings_for(MeasureMode, request.mode))
    if on_cpu(request.run.config.target):
        run = run.changed(target=request.run.config.target)
    plan = plan_layout(folder, request, run, one)
    return carry_out([plan], 1)[plan.key]


def rank_measured(request: SearchRequest, rows: Sequence[RankedLayout], measures: Measures) -> list[RankedLayout]:
    """Return the rows of an answer with the measured ones first, the fastest first.

    The step times of the others, compiled or estimated, are scaled by the usual ratio of measured to expected.
    """
    unmeasured = {row.candidate: row for row in rows}
    first = []
    for one in measures.timed:
        row = unmeasured.pop(one.estimate.candidate, None) or rank_layout(request, one.estimate)
        step = one.trial.results.step
        measured = row.with_step_time(one.step_s or row.step_s)
        bounds = {"low_s": step.min_s, "high_s": step.p90_s}
        first.append(replace(measured, stage=Stage.measure, expected_s=one.expected_s, **bounds))
    others = [row.with_step_time(row.step_s * measures.usual) for row in unmeasured.values()]
    return [*first, *others][: max(len(rows), len(first))]


def measurement_summary(measures: Measures) -> str:
    """Describe how many layouts were measured, and how well they were predicted."""
    timed = measures.timed
    text = f"{len(timed)} measured{f' ({measures.why})' if measures.why else ''}"
    if measures.regret is None or len(timed) < 2:
        return text
    if measures.agreement is not None:
        text += f": rank agreement with what was expected {measures.agreement:.2f} (Spearman)"
    return f"{text}; regret of the expected best {100 * measures.regret:.1f}%"


def report_of(measures: Measures) -> MeasureReport:
    """Return the record of what was measured, as `search.json` stores it."""
    layouts = [
        MeasuredLayout(one.estimate.candidate.overrides, one.expected_s, one.step_s, one.trial.status.value)
        for one in measures.done
    ]
    return MeasureReport(layouts, measures.agreement, measures.regret, measures.why)


def format_result(one: Measured) -> str:
    """Format the result of one measurement as a line."""
    step = one.step_s
    result = duration(step) if step is not None else one.trial.status.value.replace("_", " ")
    because = "" if step is not None else f": {one.trial.reason}"
    layout = " ".join(one.estimate.candidate.overrides)
    return f"{layout}: {result} (expected {duration(one.expected_s)}, {one.trial.wall_s:.0f} s){because}"


def _next(waiting: Sequence[tuple[Estimated, float]], measures: Measures, most: int) -> tuple[Estimated, float]:
    places = {mesh_partition(one.estimate) for one in measures.done}
    others = [p for p in waiting if mesh_partition(p[0]) not in places] if len(places) < (most + 1) // 2 else []
    return min(
        others or waiting, key=lambda pair: pair[1] * (measures.ratio(mesh_partition(pair[0])) or measures.usual)
    )
