"""Third stage of a search: tries compiler options and other implementations on the best layout, by compiling only."""

from __future__ import annotations

from rich.console import Console

from valkyrie.config.modes import settings_for
from valkyrie.modes.compile import Config as CompileMode
from valkyrie.processes.ending import INTERRUPTED
from valkyrie.processes.interrupt import signals_as_exceptions
from valkyrie.search.compiling import CompiledLayout
from valkyrie.search.request import SearchRequest
from valkyrie.search.tune.mode import row
from valkyrie.search.tune.tune import tune
from valkyrie.search.tune.tuned import Tuned
from valkyrie.units import duration


def tune_best(request: SearchRequest, best: CompiledLayout, budget_s: float, console: Console) -> tuple[int, list[str]]:
    """Return the exit status, and the overrides that make the best layout's step shortest.

    Ctrl-C, or the end of the budget in seconds, keeps the best so far.
    """
    run = best.estimate.run(request.run).changed(mode=settings_for(CompileMode, request.mode))
    known: list[Tuned] = []

    def tell(tuned: Tuned) -> None:
        known.append(tuned)
        console.print("  ".join(row(tuned.attempts[-1])), markup=False, soft_wrap=True)

    console.print(
        f"trying compiler options and implementations on {' '.join(best.estimate.candidate.overrides[1:])}",
        markup=False,
        soft_wrap=True,
    )
    status = 0
    try:
        with signals_as_exceptions():
            known.append(tune(run, None, budget_s, tell))
    except KeyboardInterrupt:
        status = INTERRUPTED
    if not known:
        return status, []
    tuned = known[-1]
    console.print(
        f"tuned: {duration(tuned.start_s)} as it is, {duration(tuned.step_s)} with the best of what was tried"
    )
    return status, tuned.overrides
