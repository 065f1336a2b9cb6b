"""Prints the progress of the compiles of a search: the expected duration, each result, and the current compile."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console
from rich.status import Status
from rich.text import Text

from valkyrie.hardware.target import usable_hbm
from valkyrie.search.budget import describe_plan
from valkyrie.search.compiling import CompiledLayout, CompiledLayouts
from valkyrie.search.estimate.rank import EstimatedLayout
from valkyrie.search.request import SearchRequest
from valkyrie.units import duration_text, memory_text

LINE_INTERVAL_S = 30.0
"""Seconds between two lines about the current compile, if the output is not a terminal."""


class CompileProgress:
    """Progress of the compiles of a search, on a console.

    Args:
        request: The search.
        compiled_layouts: Its compiled layouts so far.
        console: Receives a line per result. A terminal also has a live line about the current compile, other outputs
            a line every `LINE_INTERVAL_S`.
    """

    def __init__(self, request: SearchRequest, compiled_layouts: CompiledLayouts, console: Console) -> None:
        self.request, self.compiled_layouts, self.console = request, compiled_layouts, console
        self.status_line: Status = console.status("compiling")
        self.start_s, self.last_line_s = time.monotonic(), 0.0

    def print_start(self, folder: Path) -> None:
        """Print when compiling will stop, how long a compile takes, and how many the budget allows."""
        budget, stop_condition = self.request.mode.budget, "on Ctrl-C"
        if budget is not None:
            factor = self.compiled_layouts.budget_factor
            limit_text = f"{factor * (self.request.budget_s or 0.0) / 60:.3g} min"
            longer = "" if factor == 1.0 else f" (after {limit_text} if no layout has a step time by then)"
            stop_condition = f"after mode.budget={budget}{longer}, or on Ctrl-C"
        self.console.print(
            f"Compiling the best candidates into {folder}. Stops {stop_condition}. Rerun the same command to resume."
        )
        for line in describe_plan(self.request, self.compiled_layouts):
            self.console.print(line, soft_wrap=True)

    def print_result(self, compiled_layout: CompiledLayout, results: CompiledLayouts) -> None:
        """Print the result of a compile, the best layout so far, and what is left of the budget."""
        step = compiled_layout.step_s
        result = compiled_layout.trial.status.value.replace("_", " ")
        if step is not None:
            result = self._speed_text(compiled_layout.estimate, step)
        usable = usable_hbm(compiled_layout.target.chip)
        if step is None and compiled_layout.peak and usable:
            result += f": needs {memory_text(compiled_layout.peak)} of {memory_text(usable)} usable"
        estimate = f"estimated {duration_text(compiled_layout.estimate.step_s)}"
        layout = " ".join(compiled_layout.estimate.candidate.overrides)
        source = f"compiled in {compiled_layout.trial.wall_s:.0f} s"
        source = "compiled before, from the cache" if compiled_layout.cached else source
        line = f"[{len(results.layouts)}] {layout}: {result} ({estimate}; {source})"
        self.console.print(line + self._best_text() + self._remaining_text(), soft_wrap=True)

    def show_wait(self, layout: EstimatedLayout, seconds: float, median_s: float) -> None:
        """Show the layout that is being compiled, the seconds since its start, and the median of those so far."""
        limit_text = f", the median so far is {median_s:.0f} s" if median_s else ""
        if not median_s and self.request.budget_s is not None:
            limit_text = f" of at most {self.compiled_layouts.budget_factor * self.request.budget_s:.0f} s"
        text = f"compiling {' '.join(layout.candidate.overrides)}: {seconds:.0f} s{limit_text}{self._best_text()}"
        self.status_line.update(Text(text))
        self.last_line_s = min(self.last_line_s, seconds)  # a new compile starts at 0
        if not self.console.is_terminal and seconds - self.last_line_s >= LINE_INTERVAL_S:
            self.last_line_s = seconds
            self.console.print(text, soft_wrap=True)

    def _best_text(self) -> str:
        best = self.compiled_layouts.best(self.request)
        return "" if best is None else f"; best {self._speed_text(best.estimate, best.step_s or 0.0)}"

    def _remaining_text(self) -> str:
        if self.request.budget_s is None:
            return ""
        limit_s = self.compiled_layouts.budget_factor * self.request.budget_s
        return f"; {max(limit_s - (time.monotonic() - self.start_s), 0.0):.0f} s left"

    def _speed_text(self, layout: EstimatedLayout, step_s: float) -> str:
        if layout.batch is None:
            return duration_text(step_s)
        chips = (layout.group.target.chips or 1) * layout.group.target.slices
        rate = self.request.step_tokens(layout.batch) / step_s / chips
        return f"{duration_text(step_s)} ({rate:,.0f} tokens/s/chip)"
