"""Compile stage of a search: compiles layouts, those with the best chance to be the fastest first.

Compiled layouts correct the estimates of similar ones. The stage ends when no other layout is likely to be faster, or
when the time budget or the maximum number of compiles is reached.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path
from statistics import median

from valkyrie.config.modes import COMPILE_FILE, settings_for
from valkyrie.config.run import Run
from valkyrie.hardware.platforms import get_platform
from valkyrie.hardware.target import TargetConfig, usable_hbm
from valkyrie.modes.compile import Config as CompileMode
from valkyrie.records import RecordError
from valkyrie.report.words import EQUAL_RATIO
from valkyrie.runs.folder import split_flags
from valkyrie.search import FIRST_RESULT_FACTOR
from valkyrie.search.compile.prediction import Hint, read_prediction
from valkyrie.search.correcting import CorrectedTime, EstimatedStep, correct_estimates, normal_chance
from valkyrie.search.durations import durations_on
from valkyrie.search.estimate.rank import EstimatedLayout
from valkyrie.search.estimate.space import Candidate
from valkyrie.search.modes import compile_into_folder
from valkyrie.search.request import SearchRequest
from valkyrie.search.shortlist import Shortlist, chip_name, describe_chips, find_batch_rival, without_torus
from valkyrie.sweep.child import capture_outcome
from valkyrie.sweep.plan import SweepContext, TrialPlan, plan_run
from valkyrie.sweep.results import OUTPUT_FILE, Outcome, outcome_from_results
from valkyrie.sweep.run import run_in_this_process, settle
from valkyrie.sweep.trial import Status, Trial, TrialLog
from valkyrie.train.memory_errors import memory_estimate_errors
from valkyrie.train.options import settings_for_training
from valkyrie.train.screen import make_console
from valkyrie.units import percent_text

MIN_CHANCE = 0.05
"""Smallest chance of a step time below that of the best compiled layout divided by `EQUAL_RATIO` to be compiled."""
MEMORY_DEVIATIONS = 4.6
"""Standard deviations between the smallest and the largest of the about 100 ratios in `memory_estimate_errors`."""
MEMORY_SLACK = 1.1
"""A layout may fit if its need, as corrected by `CompiledLayouts.may_fit`, is at most this multiple of the memory.

Tested on the compiled layouts of experiments/search, where each layout corrects every other one with the same remat
policy: 1.1 excludes 326 of 350 layouts that do not fit and 29 of 1,930 that do; 1.25 excludes 297 and 15.
"""

UNLIKELY = (
    f"no other layout has a chance of {percent_text(MIN_CHANCE)} or more to be {percent_text(EQUAL_RATIO - 1)} faster"
)
"""Reason to stop if layouts are left."""
ALL_COMPILED = "every layout that may fit was compiled"
"""Reason to stop if none is left."""


class StopCause(Enum):
    """What ended the compiles of a search. `refused`: an environment variable of this machine makes every one fail."""

    finished, budget, compiles, interrupt, refused = range(5)


@dataclass(frozen=True)
class CompiledLayout:
    """A layout with its estimate and the record of its compile.

    `added_options` are overrides of compiler options that the compile has added so that the step fits or overlaps.
    `cached` is whether the program came from the compile cache, and `hints` are those of the compile.
    """

    estimate: EstimatedLayout
    trial: Trial
    added_options: tuple[str, ...] = ()
    cached: bool = False
    hints: tuple[Hint, ...] = ()

    @property
    def step_s(self) -> float | None:
        """Predicted step time in seconds, or None if the layout does not fit or its compile did not succeed."""
        return self.trial.results.step.step_s if self.trial.status is Status.ok else None

    @property
    def target(self) -> TargetConfig:
        """The slice that the layout was compiled for."""
        return self.estimate.group.target

    @property
    def peak(self) -> int | None:
        """Peak memory per device in bytes, or the bytes that the layout needs if it does not fit. None if unknown."""
        return self.trial.results.memory.required


@dataclass
class CompiledLayouts:
    """All compiled layouts of a search.

    Args:
        layouts: The layouts. Those that earlier searches compiled come first, in no particular order.
        stop_reason: Why no more layouts were compiled, in words.
        stop_cause: The same as a value. None until compiling ends.
        stopped_s: Seconds after which a compile was stopped, or None if none was.
        stopped_target: The slice of this compile, or None.
    """

    layouts: list[CompiledLayout] = field(default_factory=list)
    stop_reason: str = ""
    stop_cause: StopCause | None = None
    stopped_s: float | None = None
    stopped_target: TargetConfig | None = None

    @property
    def budget_factor(self) -> float:
        """Multiple of the budget that compiling may take: `FIRST_RESULT_FACTOR` until a layout has a step time, else 1.

        Layouts that earlier searches compiled count.
        """
        return 1.0 if any(layout.step_s is not None for layout in self.layouts) else FIRST_RESULT_FACTOR

    def stop(self, cause: StopCause, reason: str) -> None:
        """Record why no more layouts were compiled."""
        self.stop_cause, self.stop_reason = cause, reason

    def best(self, request: SearchRequest) -> CompiledLayout | None:
        """Return the layout that fits and has the lowest `SearchRequest.cost`, or None if none fits."""
        fitting = [layout for layout in self.layouts if layout.step_s is not None]
        return min(fitting, key=lambda layout: request.cost(layout.estimate, layout.step_s or 0.0), default=None)

    def get(self, candidate: Candidate) -> CompiledLayout | None:
        """Return the record of a layout, or None if it was not compiled."""
        return next((layout for layout in self.layouts if layout.estimate.candidate == candidate), None)

    def correct(self, layouts: Sequence[EstimatedLayout]) -> list[CorrectedTime]:
        """Return the step times of layouts, as corrected by the compiled ones (see `correct_estimates`)."""
        timed_layouts = [(EstimatedStep.from_layout(c.estimate), c.step_s) for c in self.layouts if c.step_s]
        return correct_estimates([EstimatedStep.from_layout(layout) for layout in layouts], timed_layouts)

    def describe_ratios(self) -> str | None:
        """Return a sentence with the ratios of compiled to estimated step times, or None if no compiled layout fits."""
        ratios = sorted((layout.step_s or 0.0) / layout.estimate.step_s for layout in self.layouts if layout.step_s)
        if not ratios:
            return None
        if len(ratios) == 1:
            return f"The only compiled layout that fits takes {ratios[0]:.1f} times its estimate."
        extremes = f"{ratios[0]:.1f} to {ratios[-1]:.1f}"
        return f"The {len(ratios)} compiled layouts that fit take {extremes} times their estimates."

    def filter_uncompiled_chips(self, layouts: Iterable[EstimatedLayout]) -> list[EstimatedLayout]:
        """Return the layouts on kinds and numbers of chips, and of slices, for which no layout was compiled."""
        compiled = {describe_chips(layout.target) for layout in self.layouts}
        return [layout for layout in layouts if describe_chips(layout.group.target) not in compiled]

    def exclude_ruled_out(self, layouts: Iterable[EstimatedLayout]) -> list[EstimatedLayout]:
        """Return the layouts for which `may_fit` is True and `has_faster_variant` is False."""
        return [layout for layout in layouts if self.may_fit(layout) and not self.has_faster_variant(layout)]

    def has_faster_variant(self, layout: EstimatedLayout) -> bool:
        """Return whether the same layout was compiled with another torus, placement or batch that is as fast and fits.

        Judges speed by the estimates, per sequence if the search varies the batch.
        """
        variants = (c.estimate for c in self.layouts if c.step_s is not None)
        candidate = without_torus(layout)
        return any(e.ranking_s <= layout.ranking_s and without_torus(e) == candidate for e in variants)

    def may_fit(self, layout: EstimatedLayout) -> bool:
        """Return whether a layout may fit, judging by compiled layouts with the same kind of chip and remat policy.

        The estimated memory of the layout is multiplied by the smallest ratio of needed to estimated memory among these
        compiled layouts. The product may be at most `MEMORY_SLACK` times the usable memory. Returns True if there are
        no such layouts, or if the usable memory is unknown.
        """
        usable, ratios = usable_hbm(layout.group.target.chip), self._memory_ratios(layout)
        return usable is None or not ratios or layout.peak_bytes * min(ratios) <= MEMORY_SLACK * usable

    def chance_to_fit(self, layout: EstimatedLayout) -> float:
        """Return the probability that a layout fits.

        Its estimated memory is multiplied by the median ratio of needed to estimated memory among compiled layouts with
        the same kind of chip and the same partition or remat policy or, if there are none, among the layouts of
        experiments/memory.py.
        """
        usable, errors = usable_hbm(layout.group.target.chip), memory_estimate_errors(layout.has_pipeline)
        expected_bytes = layout.peak_bytes * median(self._memory_ratios(layout, or_partition=True) or [errors.median])
        deviation = math.log(errors.high / errors.low) / MEMORY_DEVIATIONS
        return 1.0 if usable is None else normal_chance(math.log(usable / expected_bytes) / deviation)

    def _memory_ratios(self, layout: EstimatedLayout, or_partition: bool = False) -> list[float]:
        """Return the ratios of needed to estimated memory of compiled layouts with the same kind of chip and remat.

        With `or_partition`, also of those with the same partition and another remat policy. Pipelines are separate.
        """
        ratios, partition = list[float](), (layout.candidate.partition, layout.has_pipeline)
        for compiled in (c for c in self.layouts if c.peak and chip_name(c.estimate) == chip_name(layout)):
            estimate = compiled.estimate
            if estimate.remat == layout.remat or (
                or_partition and (estimate.candidate.partition, estimate.has_pipeline) == partition
            ):
                ratios.append((compiled.peak or 0) / estimate.peak_bytes)
        return ratios


class BudgetExceeded(BaseException):
    """Raised when the budget ends during a compile. An `Exception` would be recorded as a failure of the trial."""


def compile_best(
    request: SearchRequest,
    shortlist: Shortlist,
    find_baseline_layouts: Callable[[CompiledLayout], Sequence[EstimatedLayout]],
    folder: Path,
    max_compiles: int,
    compiled_layouts: CompiledLayouts,
    on_result: Callable[[CompiledLayout, CompiledLayouts], None],
    on_wait: Callable[[EstimatedLayout, float, float], None],
    find_batches: Callable[[CompiledLayout], Iterable[EstimatedLayout]] = lambda best: (),
) -> None:
    """Compile layouts until no other is likely to be better, the budget is spent, or `max_compiles` are compiled.

    `_pick_next` chooses the next layout. Does not start a compile that would likely exceed the budget (see
    `CompiledLayouts.budget_factor`), judging by the median so far, without those from the cache. A compile that is
    running when the budget ends is stopped. After Ctrl-C (KeyboardInterrupt), `compiled_layouts` holds the results so
    far. Stops with `StopCause.refused` if an environment variable makes every compile fail.

    Args:
        request: The search.
        shortlist: Layouts that may be the best.
        find_baseline_layouts: Returns the layouts with which the best one so far will be compared, on its slice. They
            are compiled once no other layout is likely to be faster.
        folder: Folder of the search. Layouts in its records are not compiled again.
        max_compiles: Largest number of compiles.
        compiled_layouts: Receives the results. Those that it already has count towards `max_compiles`.
        on_result: Called after each compile.
        on_wait: Called several times a second with the layout that is being compiled, the seconds since its start, and
            the median seconds of the compiles so far, or 0 before the first.
        find_batches: Returns the best layout with each searched batch.
    """
    layouts = (*shortlist.fitting, *shortlist.may_fit)
    pending_layouts = [layout for layout in layouts if compiled_layouts.get(layout.candidate) is None]
    stage_start, durations_s = time.monotonic(), list[float]()

    def left_s(factor: float = 1.0) -> float:
        return factor * (request.budget_s or math.inf) - (time.monotonic() - stage_start)

    def exceeds_budget(more_s: float) -> bool:
        return more_s > left_s(compiled_layouts.budget_factor)

    def watch(layout: EstimatedLayout, start: float) -> None:
        if exceeds_budget(0.0):
            raise BudgetExceeded
        on_wait(layout, time.monotonic() - start, median(durations_s or [0.0]))

    while True:
        possible = compiled_layouts.exclude_ruled_out(pending_layouts)
        rival = _find_batch_rival(request, compiled_layouts, find_batches)
        layout = _pick_next(request, possible, compiled_layouts, find_baseline_layouts, left_s(), rival)
        if layout is None:
            compiled_layouts.stop(StopCause.finished, UNLIKELY if possible else ALL_COMPILED)
        elif exceeds_budget(median(durations_s or [0.0])):
            limit = _describe_budget(request, compiled_layouts)
            compiled_layouts.stop(StopCause.budget, f"another compile would exceed {limit}")
        elif len(compiled_layouts.layouts) >= max_compiles:
            compiled_layouts.stop(StopCause.compiles, f"mode.compiles={max_compiles} is reached")
        if layout is None or compiled_layouts.stop_cause is not None:
            return
        pending_layouts = [other for other in pending_layouts if other.candidate != layout.candidate]
        start, plan = time.monotonic(), plan_compile(request, layout, folder)
        try:
            trial = compile_trial(plan, partial(watch, layout, start))
        except (BudgetExceeded, KeyboardInterrupt) as error:
            cause = StopCause.interrupt if isinstance(error, KeyboardInterrupt) else StopCause.budget
            _stop_compile(request, layout, time.monotonic() - start, compiled_layouts, cause)
            if cause is StopCause.interrupt:
                raise
            return
        variable = get_platform(layout.group.target.platform).flags_variable
        if variable and any(problem.key == variable for problem in trial.problems):  # refuses every layout alike
            compiled_layouts.stop(StopCause.refused, trial.reason or "refused")
            return
        compiled_layout = _read_compiled(layout, trial, plan.trial_folder)
        if not compiled_layout.cached and trial.status in (Status.ok, Status.does_not_fit):
            durations_s.append(time.monotonic() - start)
        compiled_layouts.layouts.append(compiled_layout)
        on_result(compiled_layout, compiled_layouts)


def _stop_compile(
    request: SearchRequest,
    layout: EstimatedLayout,
    seconds: float,
    compiled_layouts: CompiledLayouts,
    cause: StopCause,
) -> None:
    """Record that `cause` (interrupt or budget) stopped the compile of a layout after some seconds."""
    compiled_layouts.stopped_s, compiled_layouts.stopped_target = seconds, layout.group.target
    by = "Ctrl-C or a signal" if cause is StopCause.interrupt else _describe_budget(request, compiled_layouts)
    reason = f"the compile of {' '.join(layout.candidate.overrides)} was stopped after {seconds:.0f} s by {by}"
    compiled_layouts.stop(cause, reason)


def add_recorded_layouts(
    request: SearchRequest, layouts: Iterable[EstimatedLayout], folder: Path, compiled_layouts: CompiledLayouts
) -> None:
    """Extend `compiled_layouts` by the `layouts` that earlier searches in `folder` compiled. Compiles nothing."""
    compiled = [trial.overrides for trial in TrialLog(folder).read() if trial.stage == CompileMode.name]
    for layout in layouts:
        overrides = layout.candidate.overrides
        if not any(tuple(earlier[-len(overrides) :]) == tuple(overrides) for earlier in compiled):
            continue
        plan = plan_compile(request, layout, folder)
        if trial := settle([plan])[0].get(plan.key):
            compiled_layouts.layouts.append(_read_compiled(layout, trial, plan.trial_folder))


def compile_trial(plan: TrialPlan, watch: Callable[[], None]) -> Trial:
    """Compile the layout of a plan, or return the record of an earlier search that has compiled it.

    The trial runs in this process. Only the compiler runs in a child process.

    `watch` is called several times a second, and can stop the compile by raising an exception.
    """

    def run_trial(check_limits: Callable[[], None]) -> Outcome:
        run, folder = plan.run, plan.trial_folder
        assert run is not None
        (folder / OUTPUT_FILE).unlink(missing_ok=True)
        with (folder / OUTPUT_FILE).open("x") as log:
            console = make_console(log)

            def compile_layout() -> Outcome:
                compile_into_folder(run, console, check_limits)
                return outcome_from_results(folder, run)

            return capture_outcome(compile_layout, log)

    return run_in_this_process(plan, run_trial, watch)


def make_compile_run(request: SearchRequest, layout: EstimatedLayout) -> Run:
    """Return the run that compiles a layout, with the compile settings of `mode=search`."""
    return layout.run(request.run).changed(mode=settings_for(CompileMode, request.mode))


def plan_compile(request: SearchRequest, layout: EstimatedLayout, folder: Path) -> TrialPlan:
    """Return the plan of the trial that compiles a layout in the folder of a search."""
    return plan_layout(folder, request, make_compile_run(request, layout), layout)


def plan_layout(
    folder: Path, request: SearchRequest, run: Run, layout: EstimatedLayout, added_options: Sequence[str] = ()
) -> TrialPlan:
    """Plan the trial that compiles or measures `layout`, depending on the mode of `run`.

    `folder` is the folder of the search, and `run` has the layout and the `added_options`.
    """
    flags, overrides = split_flags(request.arguments)
    overrides = [*overrides, *added_options, f"mode={run.config.mode.name}", *layout.candidate.overrides]
    return plan_run(run, SweepContext(folder, tuple(flags)), overrides)


def _describe_budget(request: SearchRequest, compiled_layouts: CompiledLayouts) -> str:
    factor = compiled_layouts.budget_factor
    return f"{'' if factor == 1.0 else f'{factor:g} times '}mode.budget={request.mode.budget}"


def _read_compiled(layout: EstimatedLayout, trial: Trial, trial_folder: Path) -> CompiledLayout:
    """Return a compiled layout with the options and hints of the report in the trial's folder, if it has one."""
    with contextlib.suppress(RecordError, OSError):
        prediction = read_prediction(trial_folder / COMPILE_FILE)
        options = tuple(settings_for_training(prediction.options))
        return CompiledLayout(layout, trial, options, bool(prediction.compile.cached), prediction.hints)
    return CompiledLayout(layout, trial)


def _pick_next(
    request: SearchRequest,
    possible: Sequence[EstimatedLayout],
    compiled_layouts: CompiledLayouts,
    find_baseline_layouts: Callable[[CompiledLayout], Sequence[EstimatedLayout]],
    left_s: float,
    batch_rival: EstimatedLayout | None = None,
) -> EstimatedLayout | None:
    """Return the layout to compile next, or None if none is worth a compile. `left_s`: seconds left of the budget.

    Until a layout fits, this is the one with the lowest cost, divided by its chance to fit. After that, it is the one
    with the best chance to fit and to be faster than the best one, if this is at least `MIN_CHANCE`. Kinds and numbers
    of chips without a compile come first, then `batch_rival`, the best layout with another batch, then a second
    partition, because layouts of one partition have similar errors. If no layout has such a chance, the baselines and
    the remaining kinds of chips are compiled for comparison. Chips whose compiles may end within the budget come before
    others.

    If the errors of a platform's estimates are unknown, such chances are as well: each kind of its chips comes first.
    """
    best, times = compiled_layouts.best(request), compiled_layouts.correct(possible)

    def pick_cheapest(layouts: Sequence[EstimatedLayout]) -> EstimatedLayout | None:
        expected_s = {layout.candidate: time.step_s for layout, time in zip(possible, times, strict=True)}
        return min(
            layouts,
            key=lambda e: request.cost(e, expected_s[e.candidate]) / max(compiled_layouts.chance_to_fit(e), 1e-9),
            default=None,
        )

    if best is None:
        return pick_cheapest(_compiled_in_time(request, possible, left_s) or possible)
    if uncertain := [
        layout
        for layout in compiled_layouts.filter_uncompiled_chips(possible)
        if not get_platform(layout.group.target.platform).has_estimate_errors
    ]:
        return pick_cheapest(_compiled_in_time(request, uncertain, left_s) or uncertain)
    limit = request.cost(best.estimate, best.step_s or 0.0) / EQUAL_RATIO
    chances = {
        layout.candidate: time.chance_below(limit / request.cost(layout, 1.0)) * compiled_layouts.chance_to_fit(layout)
        for layout, time in zip(possible, times, strict=True)
    }
    promising = [layout for layout in possible if chances[layout.candidate] >= MIN_CHANCE]
    uncompiled = compiled_layouts.filter_uncompiled_chips(promising)
    first = _compiled_in_time(request, uncompiled, left_s)
    if batch_rival is not None and not first:
        return batch_rival
    if promising:
        other_chips = {layout.candidate for layout in uncompiled}
        on_compiled_chips = [layout for layout in promising if layout.candidate not in other_chips]
        first = first or on_compiled_chips or promising
        partitions = {layout.estimate.candidate.partition for layout in compiled_layouts.layouts}
        if len(partitions) == 1:
            first = [layout for layout in first if layout.candidate.partition not in partitions] or first
        return max(first, key=lambda layout: chances[layout.candidate])
    baselines = (b for b in find_baseline_layouts(best) if compiled_layouts.get(b.candidate) is None)
    return next(baselines, None) or pick_cheapest(compiled_layouts.filter_uncompiled_chips(possible))


def _find_batch_rival(
    request: SearchRequest,
    compiled_layouts: CompiledLayouts,
    find_batches: Callable[[CompiledLayout], Iterable[EstimatedLayout]],
) -> EstimatedLayout | None:
    """Return the best layout with the next larger batch if this may be faster, or None if a larger one was compiled."""
    best = compiled_layouts.best(request)
    if best is None or best.estimate.batch is None:
        return None
    layouts = {e.batch or 0: e for e in find_batches(best) if e.fits and compiled_layouts.may_fit(e)}
    rival = find_batch_rival(best.estimate.batch, {batch: 1 / e.ranking_s for batch, e in layouts.items()})
    compiled = {batch for batch, e in layouts.items() if compiled_layouts.get(e.candidate) is not None}
    return None if rival is None or max(compiled, default=0) >= rival else layouts[rival]


def _compiled_in_time(
    request: SearchRequest, layouts: Sequence[EstimatedLayout], left_s: float
) -> Sequence[EstimatedLayout]:
    """Return the layouts on slices for which the fastest quarter of compiles take at most `left_s` seconds."""
    targets = {layout.candidate.target: layout.group.target for layout in layouts}
    seconds = {name: durations_on(request, target).low_s for name, target in targets.items()}
    return [layout for layout in layouts if seconds[layout.candidate.target] <= left_s]
