"""`mode=search`: estimates every layout, compiles the best, prints the answer and stores it in the search's folder."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from valkyrie.config.run import Run
from valkyrie.hardware.platforms import platform_of
from valkyrie.hardware.target import TargetConfig, usable_hbm
from valkyrie.problems import INDIVISIBLE
from valkyrie.processes.ending import INTERRUPTED
from valkyrie.processes.interrupt import signals_as_exceptions
from valkyrie.report.page import write_report
from valkyrie.search import NOT_COMPILED
from valkyrie.search.answer import command_of, describe_work, launch_command_of, rank_layouts, show
from valkyrie.search.answer_record import RankedLayout, SearchAnswer
from valkyrie.search.at_hand import is_here, not_at_hand, with_figures
from valkyrie.search.compiling import CompiledLayout, Compiles, compile_best
from valkyrie.search.estimate.rank import Estimated, rank
from valkyrie.search.estimate.space import Space
from valkyrie.search.folder import create_folder, digest_of, folder_of, remove_if_empty, save_answer
from valkyrie.search.measuring import (
    Measured,
    Measures,
    format_result,
    measure_best,
    measurement_summary,
    rank_measured,
    report_of,
)
from valkyrie.search.request import SearchRequest, parse_request
from valkyrie.search.rivals import format_comparison, layouts_of, rivals_on
from valkyrie.search.shortlist import Shortlist, chip_of, shortlist
from valkyrie.search.tuning import tune_best
from valkyrie.sweep.members import over_processes
from valkyrie.train.screen import make_console
from valkyrie.units import duration, memory_text, parse_seconds

SHOWN = 10
"""Number of layouts in the answer."""
REASONS = 5
"""Number of kinds of refusals to print."""


def search(run: Run) -> int:
    """Search the layouts of a run's model on its target, print the best, and return the exit status.

    With several processes, the first one searches, and the others take part in the measurements.
    """
    with over_processes(run.arguments) as leads:
        return _search(run) if leads else 0


def _search(run: Run) -> int:
    console, request = make_console(), parse_request(run)
    folder = folder_of(request)
    create_folder(folder, request)
    request = with_figures(request, folder, console)
    began = time.perf_counter()
    space = request.space()
    ranked = rank(run, space)
    _tell_space(space, time.perf_counter() - began, request, console)
    listed = shortlist(ranked)
    compiles, measures, status = Compiles(), Measures(), 0
    if not listed.fitting and not listed.doubtful:
        console.print(_nothing_fits(listed, request, compiles, space), style="bold red", markup=False)
        remove_if_empty(folder)
        return NOT_COMPILED
    at_hand = request.mode.measure > 0 and not_at_hand(request) is None
    missing = _no_compiler(request)
    if not at_hand:
        _tell_missing(missing, request, console)
    compilable = listed.on([target.name for target in request.targets if target.name not in missing])
    if compilable.fitting or compilable.doubtful:
        expected = _expected_best(request, compilable)
        rivals = layouts_of(rivals_on(request, ranked, expected.group.target))
        try:
            with signals_as_exceptions():
                status = _compile(request, compilable, rivals, folder, compiles, console)
        except KeyboardInterrupt:
            console.print("interrupted; the best so far:", style="yellow")
            status = INTERRUPTED
    best, options = compiles.best(request), []
    tune = request.mode.tune
    tune_s = None if tune is None else parse_seconds(tune)
    if status == 0 and best is not None and tune_s is not None:
        status, options = tune_best(request, best, tune_s, console)
    if status == 0 and at_hand:
        status = _measure(request, listed, compiles, folder, measures, console)
    rows = rank_measured(request, rank_layouts(request, listed, compiles, SHOWN), measures)
    if not rows:
        console.print(_nothing_fits(listed, request, compiles, space), style="bold red", markup=False)
        remove_if_empty(folder)
        return status or NOT_COMPILED
    if options and (best is None or rows[0].candidate != best.estimate.candidate):
        told_of = f"left out, for another layout is faster: {' '.join(options)}. mode=tune tries options on any layout"
        console.print(told_of, style="yellow", markup=False, soft_wrap=True)
        options = []
    on_this_machine = is_here(_slice_of(rows[0], request))
    answer = SearchAnswer(
        command=list(run.arguments),
        question=digest_of(request),
        layouts=len(space),
        refused=_counts(space),
        duplicates=space.duplicates,
        compiled=len(compiles.done),
        why=compiles.why,
        measured=report_of(measures),
        best=rows,
        options=options,
        title=describe_work(request),
        targets=[target.name for target in request.targets],
        tokens=request.tokens,
        budget_usd=request.budget_usd,
        train=command_of(request, rows[0], options),
        launch=None if on_this_machine else launch_command_of(request, rows[0], options),
    )
    show(answer, console)
    for rival in rivals_on(request, ranked, _slice_of(rows[0], request)):
        measured_s = None if rival.layout is None else measures.step_s(rival.layout)
        console.print(format_comparison(rival, compiles, rows[0], measured_s), markup=False, soft_wrap=True)
    console.print(f"train it: {answer.train}", markup=False, soft_wrap=True)
    if answer.launch is not None:
        console.print(f"launch it: {answer.launch}", markup=False, soft_wrap=True)
    kept = save_answer(folder, answer)
    if compiles.done or measures.done:
        console.print(f"page: {write_report(folder)}", soft_wrap=True)
    console.print(kept, markup=False, soft_wrap=True)
    return status


def _expected_best(request: SearchRequest, listed: Shortlist) -> Estimated:
    """Return the best layout by estimate. It may not fit if no layout is expected to."""
    return min(listed.fitting or listed.doubtful, key=lambda one: request.cost(one.group.target, one.step_s))


def _slice_of(row: RankedLayout, request: SearchRequest) -> TargetConfig:
    return next(target for target in request.targets if target.name == row.candidate.target)


def _compile(
    request: SearchRequest,
    listed: Shortlist,
    rivals: list[Estimated],
    folder: Path,
    compiles: Compiles,
    console: Console,
) -> int:
    most = request.mode.compiles
    if most == 0:
        return 0
    budget = request.mode.budget
    ends = "on Ctrl-C" if budget is None else f"after mode.budget={budget}, or on Ctrl-C"
    console.print(f"compiling the best candidates into {folder}; stops {ends}. Rerun the same command to resume.")

    def tell(one: CompiledLayout, so_far: Compiles) -> None:
        step, best = one.step_s, so_far.best(request)
        result = duration(step) if step is not None else f"{one.trial.status.value.replace('_', ' ')}"
        told = f"estimated {duration(one.estimate.step_s)}"
        now = "" if best is None else f"; best {duration(best.step_s or 0.0)}"
        layout = " ".join(one.estimate.candidate.overrides)
        line = f"[{len(so_far.done)}] {layout}: {result} ({told}, {one.trial.wall_s:.0f} s){now}"
        console.print(line, markup=False, soft_wrap=True)

    with console.status("compiling"):
        compile_best(request, listed, rivals, folder, most, compiles, tell)
    console.print(f"{len(compiles.done)} compiled: {compiles.why}", markup=False, soft_wrap=True)
    if compiles.done:
        return 0 if compiles.best(request) is not None else NOT_COMPILED
    longer = "What follows are estimates alone. Give it longer, such as mode.budget=30min, and the best are compiled."
    console.print(longer, style="yellow", markup=False, soft_wrap=True)
    return 0


def _measure(
    request: SearchRequest, listed: Shortlist, compiles: Compiles, folder: Path, measures: Measures, console: Console
) -> int:
    console.print(f"measuring the best on the devices at hand, in {folder}; Ctrl-C ends with what is known")

    def tell(one: Measured) -> None:
        console.print(f"[{len(measures.done)}] {format_result(one)}", markup=False, soft_wrap=True)

    status = 0
    try:
        with signals_as_exceptions(), console.status("measuring"):
            measure_best(request, listed, compiles, folder, measures, tell)
    except KeyboardInterrupt:
        console.print("interrupted; the best so far:", style="yellow")
        status = INTERRUPTED
    console.print(measurement_summary(measures), highlight=False, soft_wrap=True)
    return status


def _tell_space(space: Space, seconds: float, request: SearchRequest, console: Console) -> None:
    """Print the number of layouts, and the most frequent reasons for refusing others."""
    slices = ", ".join(target.describe() for target in request.targets)
    refused = sum(space.refused.values())
    console.print(
        f"{len(space):,} layouts of {request.run.model.name} on {slices} estimated in {seconds:.1f} s; {refused:,} "
        f"refused, {space.duplicates:,} meshes that shard like another left out",
        soft_wrap=True,
    )
    precision = request.run.config.precision
    if (narrow := precision.products) is not None:
        console.print(
            f"precision={precision.name}: estimates take products in {narrow.value} as if they were in bfloat16, so "
            "that steps may be shorter than estimated; compiled steps have them as asked",
            style="yellow",
            markup=False,
            soft_wrap=True,
        )
    for reason, count in list(_counts(space).items())[:REASONS]:
        console.print(f"  {count:>7,} refused: {reason}", style="dim", markup=False)


def _counts(space: Space) -> dict[str, int]:
    """Return the number of layouts that each problem refuses, the most frequent first."""
    return {f"partition={p.partition}: {p.label}": count for p, count in space.refused.most_common()}


def _nothing_fits(listed: Shortlist, request: SearchRequest, compiles: Compiles, space: Space) -> str:
    """Describe for each chip the memory that the smallest layout needs, and how many chips would be enough."""
    if not listed.smallest:
        return _none_is_legal(request, space)
    several, lines = len(listed.smallest) > 1, []
    for one in listed.smallest:
        fits = "none that was compiled fits; the smallest layout by estimate needs"
        needs = fits if one.fits else "nothing fits: the smallest layout needs"
        usable, chip = memory_text(usable_hbm(one.group.target.chip)), chip_of(one)
        text = f"{needs} {memory_text(one.bytes)} a device of {usable}, {' '.join(one.candidate.overrides)}"
        text += _untried(listed.on([t.name for t in request.targets if t.chip and t.chip.name == chip]), compiles)
        lines.append(f"{f'{chip}: ' if several else ''}{text}. {_enough_chips(request, chip)}")
    return "\n".join(lines)


def _untried(listed: Shortlist, compiles: Compiles) -> str:
    """Count the layouts that may fit but were not compiled, as the end of a sentence."""
    done = {compiled.estimate.candidate for compiled in compiles.done}
    untried = len([other for other in listed.doubtful if other.candidate not in done])
    return f"; {untried:,} may fit by the errors of estimates, and were not compiled" if untried else ""


def _none_is_legal(request: SearchRequest, space: Space) -> str:
    """Explain that no layout is legal, and what to change if sizes are not divisible."""
    config, model = request.run.config, request.run.model.name
    if not INDIVISIBLE.issuperset(problem.code for problem in space.refused):
        return "no layout is legal. The reasons are above: change what they name, or leave it out and it varies."
    parts = {"microbatches": request.microbatches, "device_batch": config.device_batch}
    given = "".join(f" with {key}={count}" for key, count in parts.items() if count is not None)
    return (
        f"no layout is legal: batch={config.batch}{given} or an axis of {model} is divided by none of the meshes. The "
        "reasons are above; a batch that is a multiple of the devices divides best."
    )


def _enough_chips(request: SearchRequest, chip: str) -> str:
    """Name the smallest slice of a chip that would be enough by estimate, up to 32 times the largest requested one."""
    of_chip = [target for target in request.targets if target.chip is not None and target.chip.name == chip]
    target = max(of_chip, key=lambda target: target.devices or 1)
    for factor in (2, 4, 8, 16, 32):
        larger = target.resized((target.devices or 1) * factor)
        if larger is not None:
            other = replace(request, targets=(larger,))
            if shortlist(rank(request.run, other.space())).fitting:
                return f"{larger.chips} chips would do: target={larger.name}."
    return f"No slice up to {32 * (target.chips or 1)} chips would do: make the model or the batch smaller."


def _no_compiler(request: SearchRequest) -> dict[str, str]:
    """Return the requested slices that nothing can be compiled for here, by name, with the reasons."""
    missing = {}
    for target in request.targets:
        platform = platform_of(target.platform)
        if not platform.compiles_without_devices:
            missing[target.name] = "only TPU slices are compiled for without the devices"
        elif (why := platform.missing_compiler(target)) is not None:
            missing[target.name] = why
    return missing


def _tell_missing(missing: dict[str, str], request: SearchRequest, console: Console) -> None:
    """Print the slices that have estimates only, and the reasons."""
    for why in dict.fromkeys(missing.values()):
        names = [name for name, reason in missing.items() if reason == why]
        which = "" if len(names) == len(request.targets) else f" of {', '.join(names)}"
        console.print(f"estimates alone{which}: {why}", style="yellow", markup=False)
