"""`mode=search`: estimates all layouts, compiles and measures the best, and prints and stores the answer."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

from rich.console import Console

from valkyrie.config.run import Run
from valkyrie.problems import DIVISIBILITY_CODES, format_alternatives
from valkyrie.processes.ending import EXIT_INTERRUPTED, EXIT_REFUSED
from valkyrie.processes.interrupt import signals_as_exceptions
from valkyrie.report.page import write_report
from valkyrie.report.search import explain_command
from valkyrie.search import NO_STEP_TIME
from valkyrie.search.answer import (
    compile_command,
    describe_work,
    launch_command,
    print_answer,
    rank_layouts,
    train_command,
)
from valkyrie.search.answer_record import RankedLayout, SearchAnswer
from valkyrie.search.baselines import baseline_layouts, find_baselines
from valkyrie.search.batches import add_batches, describe_batches, find_same_layouts
from valkyrie.search.budget import describe_compile_time, describe_missing_compiles, describe_rival_budget
from valkyrie.search.compiling import (
    CompiledLayout,
    CompiledLayouts,
    StopCause,
    add_recorded_layouts,
    compile_best,
)
from valkyrie.search.estimate.rank import EstimatedLayout, Ranking, rank
from valkyrie.search.estimate.space import MAX_DEVICE_TOKENS, Candidate, LayoutSpace
from valkyrie.search.folder import lock_folder, request_digest, save_answer, search_folder
from valkyrie.search.local_devices import add_measured_figures, can_measure, has_devices, missing_compilers
from valkyrie.search.measuring import (
    MeasuredTrial,
    MeasuredTrials,
    format_result,
    measure_best,
    measure_report,
    measurement_summary,
    rank_measured_layouts,
)
from valkyrie.search.progress import CompileProgress
from valkyrie.search.remarks import collect_remarks, describe_prices, target_slice
from valkyrie.search.request import SearchRequest, parse_request
from valkyrie.search.rivals import describe_certainty
from valkyrie.search.shortlist import Shortlist, build_shortlist, chip_name
from valkyrie.search.tuning import tune_best
from valkyrie.sweep.members import join_multirun
from valkyrie.sweep.trial import TrialLog
from valkyrie.train.screen import make_console
from valkyrie.units import count_text, memory_text, parse_seconds

MAX_SHOWN_LAYOUTS = 10
"""Maximum number of layouts in the answer.

The answer has more if more were measured, or if the slices have more kinds and numbers of chips.
"""
MAX_SHOWN_REASONS = 3
"""Maximum number of printed reasons why layouts were refused. The most frequent are printed."""


@dataclass(frozen=True)
class SearchResult:
    """Result of a search.

    Args:
        status: Exit status of the command: 0, `NO_STEP_TIME`, `EXIT_INTERRUPTED` or `EXIT_REFUSED`.
        folder: Folder of the search.
        answer: The answer, or None if no layout is left, for example because none fits.
        reason: Reason why there is no answer, or None.
    """

    status: int
    folder: Path
    answer: SearchAnswer | None
    reason: str | None = None


def search_mode(run: Run) -> int:
    """Find the fastest layouts of a run's model on its targets, print and store them, and return the exit status.

    With several processes, the leader searches. The others take part in what needs devices: measurements, and the
    timing of CPU devices.
    """
    with join_multirun(run.arguments) as leads:
        return find_layouts(run, make_console()).status if leads else 0


def find_layouts(run: Run, console: Console) -> SearchResult:
    """Find the fastest layouts of a run's model on its targets in this process, print them and store the answer.

    Raises ValueError for settings that a search cannot use.
    """
    request = parse_request(run)
    folder = search_folder(request)
    with lock_folder(folder, request):
        return _find_layouts(request, folder, console)


def _find_layouts(request: SearchRequest, folder: Path, console: Console) -> SearchResult:
    run = request.run
    if (torn_line_note := TrialLog(folder).describe_torn_line()) is not None:
        console.print(torn_line_note, style="yellow", soft_wrap=True)
    request = add_measured_figures(request, folder, console)
    start_time = time.perf_counter()
    space = request.space()
    ranking = rank(run, space)
    _print_space(space, time.perf_counter() - start_time, request, console)
    shortlist = build_shortlist(ranking)
    compiled_layouts, measured_trials, status = CompiledLayouts(), MeasuredTrials(), 0
    if not shortlist.fitting and not shortlist.may_fit:
        _print_refusals(space, console)
        reason = _describe_no_fit(shortlist, request, compiled_layouts, space)
        return _report_no_fit(NO_STEP_TIME, folder, reason, console)
    will_measure = request.mode.measure > 0 and can_measure(request)
    without_compiler = missing_compilers(request)
    if not will_measure:
        _print_missing_compilers(without_compiler, request, console)
    compiled_targets = [target.name for target in request.targets if target.name not in without_compiler]
    compilable = shortlist.for_targets(compiled_targets)
    if compilable.fitting or compilable.may_fit:
        status = _compile(request, ranking, compilable, folder, compiled_layouts, console)
    shortlist = shortlist.select(compiled_layouts.may_fit)  # the answer omits layouts that compiles show do not fit
    best, options = compiled_layouts.best(request), []
    if status == 0 and best is not None and (tune_s := parse_seconds(request.mode.tune or "")) is not None:
        status, options = tune_best(request, best, tune_s, console)
    if status == 0 and will_measure:
        status = _measure(request, shortlist, compiled_layouts, folder, measured_trials, console)
    ranked_layouts = rank_layouts(request, shortlist, compiled_layouts, MAX_SHOWN_LAYOUTS)
    rows = rank_measured_layouts(request, ranked_layouts, measured_trials, compiled_layouts)
    if not rows:
        if compiled_layouts.stop_cause is StopCause.refused:
            reason = compiled_layouts.stop_reason
        elif measured_trials.trials:  # all measurements failed, so their layouts are not in the answer
            reason = f"no layout could be measured: {format_result(measured_trials.trials[0])}"
        else:
            reason = _describe_no_fit(shortlist, request, compiled_layouts, space)
        return _report_no_fit(status or NO_STEP_TIME, folder, reason, console)
    options = _winner_options(rows[0].candidate, options, best, compiled_layouts, console)
    rows = add_batches(rows, ranking, compiled_layouts)
    rows = _add_commands(request, rows, compiled_layouts, options)
    launch = None if has_devices(target_slice(request, rows[0])) else launch_command(request, rows[0], rows[0].train)
    answer = SearchAnswer(
        command=list(run.arguments),
        question=request_digest(request),
        layouts=len(space),
        refused=_refusal_counts(space),
        duplicates=space.duplicates,
        compiled=len(compiled_layouts.layouts),
        why=compiled_layouts.stop_reason,
        measured=measure_report(measured_trials),
        best=rows,
        options=options,
        title=describe_work(request),
        targets=[target.name for target in request.targets],
        model=run.model.name,
        parameters=run.model.parameter_count(),
        batch=None if request.search_batch else run.config.batch,
        seq=run.config.seq,
        precision=run.config.precision.name,
        hardware=[target.describe() for target in request.targets],
        ranked_by="dollars" if request.ranks_by_price else "tokens/s/chip" if request.search_batch else "step time",
        date=date.today().isoformat(),
        too_large=_count_too_large(ranking, compiled_layouts),
        compile_outcomes=dict(Counter(layout.trial.status.value for layout in compiled_layouts.layouts)),
        remarks=collect_remarks(request, rows, ranking, shortlist, compiled_layouts, measured_trials),
        explain=explain_command(request.arguments, rows[0].overrides, rows[1].overrides) if len(rows) > 1 else None,
        tokens=request.tokens,
        budget_usd=request.budget_usd,
        train=rows[0].train,
        launch=launch,
        prices=describe_prices(request),
        warning=describe_missing_compiles(request, rows, compiled_layouts),
        certainty=_describe_certainty(request, rows, compiled_layouts, options),
    )
    print_answer(answer, console)
    _print_commands(answer, folder, console)
    _print_refusals(space, console)
    return SearchResult(status, folder, answer)


def _describe_certainty(
    request: SearchRequest, rows: Sequence[RankedLayout], compiled_layouts: CompiledLayouts, options: Sequence[str]
) -> list[str]:
    """Return the sentences on how sure the order is, and the limits of a search that compiles the rivals.

    Without these limits if the answer has a warning, which has a budget.
    """
    compile_time = describe_compile_time(request, rows[0], compiled_layouts)
    lines = describe_certainty(request, rows, compile_time, options)
    has_warning = describe_missing_compiles(request, rows, compiled_layouts) != ""
    return lines if has_warning else [*lines, *describe_rival_budget(request, rows, compiled_layouts)]


def _print_commands(answer: SearchAnswer, folder: Path, console: Console) -> None:
    """Store the answer, and print what is below its table: remarks, prices, commands and files."""
    has_cost = answer.tokens is not None or answer.budget_usd is not None
    lines = [*describe_batches(answer.best), *answer.remarks]
    lines += [f"prices: {'; '.join(answer.prices)}"] if answer.prices and has_cost else []
    lines += [f"train it: {answer.train}", *([f"launch it: {answer.launch}"] if answer.launch else [])]
    for line in [*lines, *save_answer(folder, answer), f"page: {write_report(folder)}"]:
        console.print(line, soft_wrap=True)


def _add_commands(
    request: SearchRequest, rows: Sequence[RankedLayout], compiled_layouts: CompiledLayouts, options: Sequence[str]
) -> list[RankedLayout]:
    """Return the rows with the commands that compile and train them. `options` are those of the first row."""
    result, without_compiler = [], missing_compilers(request)
    for place, row in enumerate(rows):
        compiled = compiled_layouts.get(row.candidate)
        added_options = options if place == 0 else () if compiled is None else compiled.added_options
        compile_text = "" if row.candidate.target in without_compiler else compile_command(request, row)
        result.append(replace(row, compile=compile_text, train=train_command(request, row, added_options)))
    return result


def _winner_options(
    winner: Candidate,
    tuned_options: list[str],
    best: CompiledLayout | None,
    compiled_layouts: CompiledLayouts,
    console: Console,
) -> list[str]:
    """Return the compiler options for the winner: those tuned for it, or else those that its compile has added.

    `best` is the layout for which options were tuned.
    """
    if tuned_options and best is not None and winner == best.estimate.candidate:
        return tuned_options
    if tuned_options:
        message = (
            f"The tuned options ({' '.join(tuned_options)}) were dropped, because another layout is faster. To tune "
            "that layout, use mode=tune."
        )
        console.print(message, style="yellow", soft_wrap=True)
    compiled = compiled_layouts.get(winner)
    return [] if compiled is None else list(compiled.added_options)


def _report_no_fit(status: int, folder: Path, reason: str, console: Console) -> SearchResult:
    console.print(reason, style="bold red")
    return SearchResult(status, folder, None, reason)


def _count_too_large(ranking: Ranking, compiled_layouts: CompiledLayouts) -> int:
    """Return the number of layouts that do not fit by estimate and were not compiled."""
    too_large = sum(len(estimates.fit_mask) - int(estimates.fit_mask.sum()) for estimates in ranking.estimates)
    return too_large - sum(not layout.estimate.fits for layout in compiled_layouts.layouts)


def _compile(
    request: SearchRequest,
    ranking: Ranking,
    shortlist: Shortlist,
    folder: Path,
    compiled_layouts: CompiledLayouts,
    console: Console,
) -> int:
    def find_baseline_layouts(best: CompiledLayout) -> list[EstimatedLayout]:
        return baseline_layouts(find_baselines(request, ranking, best.target, best.estimate.candidate))

    def find_batches(best: CompiledLayout) -> list[EstimatedLayout]:
        return [*find_same_layouts(best.estimate.candidate, ranking)]

    limit = request.mode.compiles
    add_recorded_layouts(request, [*shortlist.fitting, *shortlist.may_fit], folder, compiled_layouts)
    if request.search_batch:  # the shortlist lacks most batches
        batches = {e.candidate: e for layout in compiled_layouts.layouts for e in find_batches(layout)}
        others = [layout for candidate, layout in batches.items() if compiled_layouts.get(candidate) is None]
        add_recorded_layouts(request, others, folder, compiled_layouts)
    if compiled_layouts.layouts:
        compiled_text = count_text(len(compiled_layouts.layouts), "layout")
        console.print(f"{compiled_text} compiled by earlier searches in {folder}", soft_wrap=True)
    if limit == 0:
        if compiled_layouts.layouts:
            compiled_layouts.stop(StopCause.compiles, "mode.compiles=0")
        return 0
    progress = CompileProgress(request, compiled_layouts, console)
    progress.print_start(folder)
    try:
        with signals_as_exceptions(), progress.status_line:
            compile_best(
                *(request, shortlist, find_baseline_layouts, folder, limit, compiled_layouts),
                *(progress.print_result, progress.show_wait, find_batches),
            )
    except KeyboardInterrupt:
        if compiled_layouts.stop_cause is None:
            compiled_layouts.stop(StopCause.interrupt, "Ctrl-C or a signal")
        kind = "best so far" if compiled_layouts.best(request) else "best by estimate, none compiled"
        console.print(f"interrupted: {compiled_layouts.stop_reason}; the {kind}:", style="yellow", soft_wrap=True)
        return EXIT_INTERRUPTED
    compiled_text = count_text(len(compiled_layouts.layouts), "layout")
    console.print(f"{compiled_text} compiled: {compiled_layouts.stop_reason}", soft_wrap=True)
    if compiled_layouts.stop_cause is StopCause.refused:
        return EXIT_REFUSED
    if compiled_layouts.layouts:
        return 0 if compiled_layouts.best(request) is not None else NO_STEP_TIME
    return 0


def _measure(
    request: SearchRequest,
    shortlist: Shortlist,
    compiled_layouts: CompiledLayouts,
    folder: Path,
    measured_trials: MeasuredTrials,
    console: Console,
) -> int:
    console.print(
        f"Measuring the best layouts on the local devices, in {folder}. Ctrl-C stops and keeps the results so far."
    )

    def print_result(trial: MeasuredTrial) -> None:
        console.print(f"[{len(measured_trials.trials)}] {format_result(trial)}", soft_wrap=True)

    status = 0
    try:
        with signals_as_exceptions(), console.status("measuring"):
            measure_best(request, shortlist, compiled_layouts, folder, measured_trials, print_result)
    except KeyboardInterrupt:
        console.print("interrupted; the best so far:", style="yellow")
        status = EXIT_INTERRUPTED
    console.print(measurement_summary(measured_trials), highlight=False, soft_wrap=True)
    return status


def _print_space(space: LayoutSpace, seconds: float, request: SearchRequest, console: Console) -> None:
    """Print the number of estimated layouts.

    Also prints a warning if the precision sets a narrower dtype for matmuls, which estimates count as bfloat16.
    """
    slices = ", ".join(target.describe() for target in request.targets)
    refused = sum(space.refused.values())
    with_batches = ", with several batches each," if request.search_batch else ""
    console.print(
        f"{count_text(len(space), 'layout')} of {request.run.model.name} on {slices}{with_batches} estimated in "
        f"{seconds:.1f} s; {refused:,} refused, {space.duplicates:,} equivalent mesh{'es' * (space.duplicates != 1)} "
        "skipped",
        soft_wrap=True,
    )
    precision = request.run.config.precision
    if (narrow := precision.products) is not None:
        console.print(
            f"precision={precision.name}: estimates count {narrow.value} matmuls as bfloat16, so real steps may be "
            f"shorter. Compiled steps use {narrow.value}.",
            style="yellow",
            soft_wrap=True,
        )


def _print_refusals(space: LayoutSpace, console: Console) -> None:
    """Print the most frequent reasons why layouts were refused."""
    reasons = _refusal_counts(space)
    for reason, count in list(reasons.items())[:MAX_SHOWN_REASONS]:
        console.print(f"  {count:>7,} refused: {reason}", style="dim")
    if len(reasons) > MAX_SHOWN_REASONS:
        others = sum(list(reasons.values())[MAX_SHOWN_REASONS:])
        console.print(f"  {others:>7,} refused for other reasons", style="dim")


def _refusal_counts(space: LayoutSpace) -> dict[str, int]:
    """Return the number of refused layouts by reason, the most frequent first."""
    counts = Counter[str]()
    for problem, count in space.refused.items():
        counts[f"partition={problem.partition}: {problem.label}"] += count
    return dict(counts.most_common())


def _describe_no_fit(
    shortlist: Shortlist, request: SearchRequest, compiled_layouts: CompiledLayouts, space: LayoutSpace
) -> str:
    """Return the message for a search without a layout that fits.

    For each kind of chip, the message has the memory per device of the smallest layout, and a number of chips that
    would be enough (see `_suggest_chips`). If no layout is legal, it has the settings to change instead.
    """
    if not shortlist.smallest:
        return _describe_no_legal_layout(request, space)
    has_several_chips, lines = len(shortlist.smallest) > 1, []
    for layout in shortlist.smallest:
        no_fit = "no compiled layout fits, although the smallest is estimated to need only"
        prefix = no_fit if layout.fits else "nothing fits: the smallest layout needs"
        limit, chip = memory_text(layout.memory_limit), chip_name(layout)
        usable_text = f"{limit} are usable" if layout.batch is None else f"batch=auto uses at most {limit}"
        needs, overrides = memory_text(layout.peak_bytes), " ".join(layout.candidate.overrides)
        text = f"{prefix} {needs} per device, and {usable_text} ({overrides})"
        text += _describe_untried(
            shortlist.for_targets([t.name for t in request.targets if t.chip and t.chip.name == chip]), compiled_layouts
        )
        lines.append(f"{f'{chip}: ' if has_several_chips else ''}{text}. {_suggest_chips(request, chip)}")
    return "\n".join(lines)


def _describe_untried(shortlist: Shortlist, compiled_layouts: CompiledLayouts) -> str:
    """Return a clause with the number of uncompiled layouts that may fit, for a message, or "" if there are none."""
    compiled_candidates = {compiled.estimate.candidate for compiled in compiled_layouts.layouts}
    untried_count = len([layout for layout in shortlist.may_fit if layout.candidate not in compiled_candidates])
    if not untried_count:
        return ""
    return f"; {count_text(untried_count, 'uncompiled layout')} may fit, given the errors of estimates"


def _describe_no_legal_layout(request: SearchRequest, space: LayoutSpace) -> str:
    """Explain that no layout is legal, and what to change."""
    config, model = request.run.config, request.run.model.name
    if request.search_batch and not space.refused:
        settings = {"mesh=": request.mesh, "microbatches=": request.microbatches}
        settings |= {"device_batch=": request.device_batches or None}
        typed_keys = [key for key, value in settings.items() if value is not None]
        return (
            f"no layout is legal: no batch of up to {MAX_DEVICE_TOKENS:,} tokens per device splits evenly over the "
            f"mesh. Remove {format_alternatives(None, typed_keys or ['partition='])} from the command."
        )
    slices = min(target.slices for target in request.targets)
    if not request.search_batch and config.batch < slices:
        return (
            f"batch={config.batch}: no layout is legal, because the batch has fewer sequences than there are slices "
            f"({slices:,}). Use a batch that is a multiple of the number of devices, or fewer slices."
        )
    if not DIVISIBILITY_CODES.issuperset(problem.code for problem in space.refused):
        return (
            "no layout is legal, for the reasons listed above. Change the settings they mention, or remove those "
            "settings from the command to search all their values."
        )
    batches = ",".join(map(str, request.device_batches))
    device_batch = f"[{batches}]" if "," in batches else batches or None
    parts = {"microbatches": request.microbatches, "device_batch": device_batch}
    settings = "".join(f" {key}={value}" for key, value in parts.items() if value is not None)
    return (
        f"batch={config.batch}{settings}: no layout is legal, because no mesh divides both the batch and the axes of "
        f"{model}. {'The reasons are above. ' if space.refused else ''}Use a batch that is a multiple of the number of "
        "devices."
    )


def _suggest_chips(request: SearchRequest, chip: str) -> str:
    """Return a sentence that suggests the smallest larger slice where a layout fits by estimate.

    Tries 2, 4, ..., 32 times the devices of the largest requested target with this chip, and the largest slice of the
    chip. If none is enough, suggests a smaller model or batch.
    """
    targets = [target for target in request.targets if target.chip is not None and target.chip.name == chip]
    target = max(targets, key=lambda target: target.devices or 1)
    devices = target.devices or 1
    sizes = {devices * factor for factor in (2, 4, 8, 16, 32)}
    if target.chip is not None and target.chip.slices.max_chips is not None:
        sizes.add(target.chip.slices.max_chips * target.chip.devices)
    larger_slices = list(filter(None, (target.resized(size) for size in sorted(sizes) if size > devices)))
    for larger in larger_slices:
        larger_request = replace(request, targets=(larger,))
        if build_shortlist(rank(request.run, larger_request.space())).fitting:
            return f"{larger.chips} chips are enough: target={larger.name}."
    fact = f"No slice of {chip} has more chips."
    if larger_slices:
        fact = f"No slice up to {larger_slices[-1].chips} chips (target={larger_slices[-1].name}) is enough."
    smaller = "model" if request.search_batch or request.run.config.batch == 1 else "model or batch"
    return f"{fact} Use a smaller {smaller}."


def _print_missing_compilers(missing: dict[str, str], request: SearchRequest, console: Console) -> None:
    """Print the slices that get only estimates, and the reasons."""
    for why in dict.fromkeys(missing.values()):
        names = [name for name, reason in missing.items() if reason == why]
        scope = "" if len(names) == len(request.targets) else f" for {', '.join(names)}"
        console.print(f"estimates only{scope}: {why}", style="yellow")
