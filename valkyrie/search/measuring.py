"""Measuring stage of a search: runs the best few layouts on the local devices and compares them with predictions."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from valkyrie.config.modes import settings_for
from valkyrie.modes.measure import Config as MeasureMode
from valkyrie.runs.folder import split_override
from valkyrie.search.answer import make_answer_row
from valkyrie.search.answer_record import MeasuredLayout, MeasureReport, RankedLayout, Stage
from valkyrie.search.compiling import CompiledLayouts, plan_layout
from valkyrie.search.estimate.rank import EstimatedLayout
from valkyrie.search.local_devices import needs_cpu_figures
from valkyrie.search.request import SearchRequest
from valkyrie.search.shortlist import MeshPartition, Shortlist, mesh_partition
from valkyrie.search.tune.tune import with_settings
from valkyrie.sweep.run import run_trials
from valkyrie.sweep.trial import Status, Trial
from valkyrie.train.options import OPTIONS_KEY
from valkyrie.units import duration_text


@dataclass(frozen=True)
class MeasuredTrial:
    """A layout, its predicted step time in seconds (compiled or estimated), and the trial that measured it."""

    estimate: EstimatedLayout
    expected_s: float
    trial: Trial

    @property
    def step_s(self) -> float | None:
        """Median step time in seconds, or None if the measurement failed."""
        return self.trial.results.step.step_s if self.trial.status is Status.ok else None

    @property
    def ranking_s(self) -> float:
        """Measured seconds per step, or per sequence if the search varies the batch. 0 if the measurement failed."""
        return self.estimate.per_sequence(self.step_s or 0.0)

    @property
    def expected_ranking_s(self) -> float:
        """Predicted seconds per step, or per sequence if the search varies the batch."""
        return self.estimate.per_sequence(self.expected_s)


@dataclass
class MeasuredTrials:
    """All measured layouts of a search."""

    trials: list[MeasuredTrial] = field(default_factory=list)
    stop_reason: str = ""
    """Reason if measuring ended early, because the budget was used up or a layout was refused. Empty otherwise."""

    @property
    def timed_trials(self) -> list[MeasuredTrial]:
        """Trials with a step time, the fastest first."""
        return sorted((trial for trial in self.trials if trial.step_s is not None), key=lambda trial: trial.ranking_s)

    @property
    def rank_correlation(self) -> float | None:
        """Spearman's rank correlation of predicted and measured step times.

        None for fewer than three layouts, or if all predictions or all measurements are equal.
        """
        expected_s, step_s = [m.expected_ranking_s for m in self.timed_trials], [m.ranking_s for m in self.timed_trials]
        if len(step_s) < 3 or 1 in (len(set(expected_s)), len(set(step_s))):
            return None
        from scipy.stats import spearmanr  # takes a second

        correlation: Any = spearmanr(expected_s, step_s)
        return float(correlation.statistic)

    @property
    def regret(self) -> float | None:
        """Relative slowdown of the layout that was predicted to be the fastest, compared with the fastest one.

        0.1 means 10% slower. None if no layout was measured.
        """
        timed_trials = self.timed_trials
        if not timed_trials:
            return None
        return min(timed_trials, key=lambda m: m.expected_ranking_s).ranking_s / (timed_trials[0].ranking_s or 1.0) - 1

    @property
    def median_ratio(self) -> float:
        """Median of measured over predicted step time, or 1 if no layout was measured."""
        return median([(trial.step_s or 0.0) / trial.expected_s for trial in self.timed_trials] or [1.0])

    def step_s(self, layout: EstimatedLayout) -> float | None:
        """Return the measured seconds per step of a layout, or None if there is no successful measurement."""
        return next((trial.step_s for trial in self.trials if trial.estimate.candidate == layout.candidate), None)

    def ratio(self, key: MeshPartition) -> float | None:
        """Return the median of measured over predicted step time for a mesh and partition, or None if unknown."""
        matching = [trial for trial in self.timed_trials if mesh_partition(trial.estimate) == key]
        return median((trial.step_s or 0.0) / trial.expected_s for trial in matching) if matching else None


def measure_best(
    request: SearchRequest,
    shortlist: Shortlist,
    compiled_layouts: CompiledLayouts,
    folder: Path,
    measured_trials: MeasuredTrials,
    on_result: Callable[[MeasuredTrial], None],
) -> None:
    """Measure up to `mode.measure` layouts. Starts none after the budget is spent or a layout is refused.

    Each layout in the first half has a different mesh or partition, as far as possible. After each measurement,
    predictions for the same mesh and partition are rescaled by measured over predicted step time, and all others by the
    median of this ratio. The next layout is the one with the shortest rescaled prediction.

    Adds each result to `measured_trials` and then calls `on_result` with it. On Ctrl-C (KeyboardInterrupt),
    `measured_trials` holds the results so far.
    """
    max_measurements, start_time = request.mode.measure, time.monotonic()
    pending_layouts = predict_step_times(shortlist, compiled_layouts)
    while len(measured_trials.trials) < max_measurements and pending_layouts:
        if request.budget_s is not None and time.monotonic() - start_time > request.budget_s:
            measured_trials.stop_reason = f"mode.budget={request.mode.budget} is used up"
            return
        layout, expected_s = _pick_next(pending_layouts, measured_trials, max_measurements)
        pending_layouts = [pair for pair in pending_layouts if pair[0] is not layout]
        compiled = compiled_layouts.get(layout.candidate)
        trial = run_measurement(request, layout, folder, () if compiled is None else compiled.added_options)
        measured_trials.trials.append(MeasuredTrial(layout, expected_s, trial))
        on_result(measured_trials.trials[-1])
        if trial.status is Status.refused:
            measured_trials.stop_reason = trial.reason or "refused"
            return


def predict_step_times(shortlist: Shortlist, compiled_layouts: CompiledLayouts) -> list[tuple[EstimatedLayout, float]]:
    """Return (layout, predicted seconds per step) for each layout that fits, the fastest first.

    Compiled times replace estimates, and correct those of similar layouts.
    """
    pairs = [(layout.estimate, layout.step_s) for layout in compiled_layouts.layouts if layout.step_s is not None]
    estimated_layouts = [layout for layout in shortlist.fitting if compiled_layouts.get(layout.candidate) is None]
    times = compiled_layouts.correct(estimated_layouts)
    pairs += [(layout, time.step_s) for layout, time in zip(estimated_layouts, times, strict=True)]
    return sorted(pairs, key=lambda pair: pair[0].per_sequence(pair[1]))


def run_measurement(
    request: SearchRequest, layout: EstimatedLayout, folder: Path, added_options: Sequence[str] = ()
) -> Trial:
    """Return the trial that measures a layout. Runs it unless an earlier search already has.

    `added_options` are those of its compile (see `CompiledLayout`).
    """
    run = layout.run(request.run).changed(mode=settings_for(MeasureMode, request.mode))
    if needs_cpu_figures(request.run.config.target):
        run = run.changed(target=request.run.config.target)
    if added_options:
        options = {key.removeprefix(f"{OPTIONS_KEY}."): value for key, value in map(split_override, added_options)}
        run = with_settings(run, options, {})
    plan = plan_layout(folder, request, run, layout, added_options)
    return run_trials([plan], 1)[plan.key]


def rank_measured_layouts(
    request: SearchRequest,
    rows: Sequence[RankedLayout],
    measured_trials: MeasuredTrials,
    compiled_layouts: CompiledLayouts,
) -> list[RankedLayout]:
    """Return the rows of an answer with all measured layouts first, the fastest first.

    The step times of the other rows, compiled or estimated, are scaled by the median of measured over predicted time.
    Measured layouts without a row get one, and may displace the last rows. Rows of layouts whose measurement failed are
    removed, but not those whose measurement was refused, which is due to this machine.
    """
    failed = {
        trial.estimate.candidate
        for trial in measured_trials.trials
        if trial.step_s is None and trial.trial.status is not Status.refused
    }
    row_by_candidate = {row.candidate: row for row in rows if row.candidate not in failed}
    measured_rows = []
    for trial in measured_trials.timed_trials:
        row = row_by_candidate.pop(trial.estimate.candidate, None)
        if row is None:
            compiled = compiled_layouts.get(trial.estimate.candidate)
            row = make_answer_row(request, trial.estimate, compiled if compiled and compiled.step_s else None)
        step = trial.trial.results.step
        measured_row = row.with_step_time(trial.step_s or row.step_s)
        bounds = {"low_s": step.min_s, "high_s": step.p90_s}
        measured_rows.append(replace(measured_row, stage=Stage.measure, expected_s=trial.expected_s, **bounds))
    unmeasured_rows = [
        row.with_step_time(row.step_s * measured_trials.median_ratio) for row in row_by_candidate.values()
    ]
    return [*measured_rows, *unmeasured_rows][: max(len(rows), len(measured_rows))]


def measurement_summary(measured_trials: MeasuredTrials) -> str:
    """Describe how many layouts were measured, and how well they were predicted."""
    timed_trials = measured_trials.timed_trials
    text = f"{len(timed_trials)} measured{f' ({measured_trials.stop_reason})' if measured_trials.stop_reason else ''}"
    if measured_trials.regret is None or len(timed_trials) < 2:
        return text
    if measured_trials.rank_correlation is not None:
        text += f": rank correlation with predictions {measured_trials.rank_correlation:.2f} (Spearman)"
    slower = f"{100 * measured_trials.regret:.1f}% slower than the fastest" if measured_trials.regret else "the fastest"
    return f"{text}; the layout predicted to be the fastest is {slower}"


def measure_report(measured_trials: MeasuredTrials) -> MeasureReport:
    """Return the record of the measurements for `search.json`."""
    layouts = [
        MeasuredLayout(trial.estimate.candidate.overrides, trial.expected_s, trial.step_s, trial.trial.status.value)
        for trial in measured_trials.trials
    ]
    return MeasureReport(layouts, measured_trials.rank_correlation, measured_trials.regret, measured_trials.stop_reason)


def format_result(trial: MeasuredTrial) -> str:
    """Format the result of one measurement as a line."""
    step = trial.step_s
    result = duration_text(step) if step is not None else trial.trial.status.value.replace("_", " ")
    reason = "" if step is not None else f": {trial.trial.reason}"
    layout = " ".join(trial.estimate.candidate.overrides)
    wall_s = trial.trial.wall_s
    return f"{layout}: {result} (expected {duration_text(trial.expected_s)}; the trial took {wall_s:.0f} s){reason}"


def _pick_next(
    pending_layouts: Sequence[tuple[EstimatedLayout, float]], measured_trials: MeasuredTrials, max_measurements: int
) -> tuple[EstimatedLayout, float]:
    tried = {mesh_partition(trial.estimate) for trial in measured_trials.trials}
    untried = (
        [pair for pair in pending_layouts if mesh_partition(pair[0]) not in tried]
        if len(tried) < (max_measurements + 1) // 2
        else []
    )
    return min(
        untried or pending_layouts,
        key=lambda pair: (
            pair[0].per_sequence(pair[1])
            * (measured_trials.ratio(mesh_partition(pair[0])) or measured_trials.median_ratio)
        ),
    )
