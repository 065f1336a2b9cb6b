"""Tuning stage of a search: tries compiler options and implementations on the best layout.

Compares predicted step times, without measuring any.
"""

from __future__ import annotations

from rich.console import Console

from valkyrie.processes.ending import EXIT_INTERRUPTED
from valkyrie.processes.interrupt import signals_as_exceptions
from valkyrie.search.compiling import CompiledLayout, make_compile_run
from valkyrie.search.request import SearchRequest
from valkyrie.search.tune.mode import attempt_lines
from valkyrie.search.tune.tune import tune
from valkyrie.search.tune.tuned import TunedRun
from valkyrie.units import duration_text


def tune_best(request: SearchRequest, best: CompiledLayout, budget_s: float, console: Console) -> tuple[int, list[str]]:
    """Tune the best layout for up to `budget_s` seconds. Returns (status, overrides).

    The status is 0, or `EXIT_INTERRUPTED` after Ctrl-C. The overrides are those with the shortest step so far, and
    empty if Ctrl-C came before the first result.
    """
    run = make_compile_run(request, best.estimate)
    results: list[TunedRun] = []

    def print_attempt(tuned_run: TunedRun) -> None:
        results.append(tuned_run)
        console.print("  ".join(attempt_lines(tuned_run.attempts[-1])), soft_wrap=True)

    console.print(
        f"trying compiler options and implementations on {' '.join(best.estimate.candidate.overrides[1:])}",
        soft_wrap=True,
    )
    status = 0
    try:
        with signals_as_exceptions():
            results.append(tune(run, None, budget_s, print_attempt))
    except KeyboardInterrupt:
        status = EXIT_INTERRUPTED
    if not results:
        return status, []
    tuned_run = results[-1]
    console.print(
        f"tuned: {duration_text(tuned_run.step_s)} with the best settings, {duration_text(tuned_run.start_s)} without"
    )
    return status, tuned_run.overrides
