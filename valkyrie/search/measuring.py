"""Last stage of a search: runs the best few layouts on the devices at hand and compares them with their predictions."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from valkyrie.config.modes import settings_for
from valkyrie.modes.measure import Config as MeasureMode
from valkyrie.search.answer import rank_layout
from valkyrie.search.answer_record import MeasuredLayout, MeasureReport, RankedLayout, Stage
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
    """A layout, its predicted step time (compiled or estimated), and the trial that measured it."""

    estimate: Estimated
    expected_s: float
    trial: Trial

    @property
    def step_s(self) -> float | None:
        """Median step time in seconds, or None if the measurement failed."""
        return self.trial.results.step.step_s if self.trial.status is Status.ok else None


@dataclass
class Measures:
    """The measured layouts."""

    done: list[Measured] = field(default_factory=list)
    why: str = ""
    """Reason why no more layouts were measured."""

    @property
    def timed(self) -> list[Measured]:
        """The layouts that ran, the fastest first."""
        return sorted((one for one in self.done if one.step_s is not None), key=lambda one: one.step_s or 0.0)

    @property
    def agreement(self) -> float | None:
        """Spearman's correlation of predicted and measured order.

        None for fewer than three layouts, or if all predictions or all measurements are equal.
        """
        expected_s, step_s = [m.expected_s for m in self.timed], [m.step_s or 0.0 for m in self.timed]
        if len(step_s) < 3 or 1 in (len(set(expected_s)), len(set(step_s))):
            return None
        from scipy.stats import spearmanr  # takes a second

        agreement: Any = spearmanr(expected_s, step_s)
        return float(agreement.statistic)

    @property
    def regret(self) -> float | None:
        """Relative excess of the layout with the best prediction over the fastest one, or None if none was measured."""
        timed = self.timed
        if not timed:
            return None
        return (min(timed, key=lambda m: m.expected_s).step_s or 0.0) / (timed[0].step_s or 1.0) - 1

    @property
    def usual(self) -> float:
        """Median ratio of measured to predicted step time, or 1 if none was measured."""
        return median([(one.step_s or 0.0) / one.expected_s for one in self.timed] or [1.0])

    def step_s(self, one: Estimated) -> float | None:
        """Return the measured step time of a layout in seconds, or None if it was not measured."""
        return next((m.step_s for m in self.done if m.estimate.candidate == one.candidate), None)

    def ratio(self, place: MeshPartition) -> float | None:
        """Return the median ratio of measured to predicted step time for a mesh and partition, or None if unknown."""
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
    """Measure the `mode.measure` most promising layouts. Starts none after the budget is spent.

    The first half differ in mesh or partition. Then come the layouts that are expected to be the fastest, judging by
    the measurements with the same mesh and partition. Ctrl-C raises KeyboardInterrupt and leaves the results so far in
    `measures`.
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
    """Return layouts with their predicted step times, the fastest first; compiled times replace estimates."""
    compiled = {one.estimate.candidate for one in compiles.done}
    pairs = [(one.estimate, one.step_s) for one in compiles.done if one.step_s is not None]
    for one in listed.fitting:
        if one.candidate not in compiled:
            pairs.append((one, one.step_s * (compiles.ratio(mesh_partition(one)) or 1.0)))
    return sorted(pairs, key=lambda pair: pair[1])


def run_measurement(request: SearchRequest, one: Estimated, folder: Path) -> Trial:
    """Measure a layout, unless an earlier search did, and return its record."""
    run = one.run(request.run).changed(mode=settings_for(MeasureMode, request.mode))
    if on_cpu(request.run.config.target):
        run = run.changed(target=request.run.config.target)
    plan = plan_layout(folder, request, run, one)
    return carry_out([plan], 1)[plan.key]


def rank_measured(request: SearchRequest, rows: Sequence[RankedLayout], measures: Measures) -> list[RankedLayout]:
    """Return the rows of an answer with the measured ones first, the fastest at the top.

    The step times of the others, compiled or estimated, are scaled by the median ratio of measured to predicted.
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
    """Return the measurements as the record that `search.json` stores."""
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
