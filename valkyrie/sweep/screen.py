"""Shows the progress of a sweep: a live table in a terminal, or one line per trial elsewhere."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.box import SIMPLE
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from valkyrie.config.modes import has_results
from valkyrie.sweep.results import OUTPUT_FILE
from valkyrie.sweep.table import describe_result
from valkyrie.sweep.trial import Status, Trial, trial_title
from valkyrie.train.screen import make_console
from valkyrie.units import long_duration_text

if TYPE_CHECKING:
    from valkyrie.sweep.plan import TrialPlan
    from valkyrie.sweep.process import TrialProcess

_STYLES = {Status.ok: "green", Status.refused: "dim", Status.does_not_fit: "yellow"}


PROGRESS_EVERY_S = 30.0
"""Seconds between lines about running trials while the output is not a terminal."""
REFUSED_LINES = 10
"""Number of refused trials that are printed one by one. Further ones are only counted."""


class LineScreen:
    """Prints a line for each trial that ends, numbered if there are several.

    If the output is not a terminal, also prints a line when the first trial starts, and every `PROGRESS_EVERY_S`.

    Refused trials after the first `REFUSED_LINES` are only counted. If there are several trials, those recorded earlier
    are only counted too.
    """

    def __init__(self, console: Console | None = None, total: int = 1) -> None:
        self.console, self.total, self.ended_count = console or make_console(), total, 0
        self._unprinted_counts: Counter[str] = Counter()
        self._refused_count = 0
        self._is_waiting_for_sweep = False
        self._next_progress_s: float | None = None  # None until the first trial has started

    def __enter__(self) -> LineScreen:
        return self

    def __exit__(self, *_: object) -> None:
        self._print_counts()

    def show_running(self, processes: Sequence[TrialProcess], waiting_count: int) -> None:
        """Print how many trials ended without a line since the last call.

        If the output is not a terminal, also prints the name of a running trial when the first one starts, and then its
        duration every `PROGRESS_EVERY_S`. When another sweep starts to run all remaining trials, also prints that this
        sweep waits for it.
        """
        self._print_counts()
        if processes and not self.console.is_terminal and time.monotonic() >= (self._next_progress_s or 0.0):
            plan = processes[0].plan
            line = f"running {trial_title(plan.about, plan.overrides, plan.stage)}"
            if self._next_progress_s is None:
                line += f", which writes to {plan.trial_folder / OUTPUT_FILE}"
            else:
                elapsed = long_duration_text(processes[0].elapsed_s)
                line += f" for {elapsed}; {self.ended_count} of {self.total} trials ended"
            self.console.print(line, style="dim", highlight=False)
            self._next_progress_s = time.monotonic() + PROGRESS_EVERY_S
        if waiting_count and not processes and not self._is_waiting_for_sweep:
            trials = f"{waiting_count} trials" if waiting_count > 1 else "trial"
            line = f"waiting for another sweep, which is running the last {trials}"
            self.console.print(line, style="dim", highlight=False)
        self._is_waiting_for_sweep = bool(waiting_count and not processes)

    def show_ended(self, plan: TrialPlan, trial: Trial, *, recorded_earlier: bool) -> None:
        """Print a line for the trial, or only count it.

        If the trial is ok but its mode has no results, first prints the output of its process.
        """
        self.ended_count += 1
        self._refused_count += trial.status is Status.refused
        if self.total > 1 and recorded_earlier:
            self._unprinted_counts["recorded earlier"] += 1
        elif self._refused_count > REFUSED_LINES and trial.status is Status.refused:
            self._unprinted_counts["more refused"] += 1
        else:
            self._print(plan, trial, recorded_earlier)

    def _print_counts(self) -> None:
        for description, count in self._unprinted_counts.items():
            self.console.print(f"[{self.ended_count}/{self.total}] {count} {description}", style="dim", highlight=False)
        self._unprinted_counts.clear()

    def _print(self, plan: TrialPlan, trial: Trial, recorded_earlier: bool) -> None:
        number = f"[{self.ended_count}/{self.total}] " if self.total > 1 else ""
        duration = " (recorded earlier)" if recorded_earlier else f" ({trial.wall_s:.1f} s)" if trial.wall_s else ""
        output = plan.trial_folder / OUTPUT_FILE
        if not has_results(plan.stage) and trial.status is Status.ok and output.is_file():
            self.console.print(output.read_text(errors="replace").rstrip(), highlight=False)
        line = f"{number}{trial.title}: {describe_result(trial)}{duration}"
        self.console.print(line, style=_STYLES.get(trial.status, "red"), highlight=False)


class LiveScreen(LineScreen):
    """A `LineScreen` that also shows the best trial so far, running trials and estimated time left below the lines."""

    def __init__(self, console: Console, total: int, jobs: int, name: str) -> None:
        super().__init__(console, total)
        self._jobs, self._name, self._start_time = jobs, name, time.monotonic()
        self._counts: Counter[Status] = Counter()
        self._trial_durations_s: list[float] = []
        self._best_trial: Trial | None = None
        self._processes: Sequence[TrialProcess] = ()
        self._waiting_count = total
        self._live = Live(console=console, refresh_per_second=4, transient=True, get_renderable=self._render)

    def __enter__(self) -> LiveScreen:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._print_counts()
        self._live.stop()

    def show_running(self, processes: Sequence[TrialProcess], waiting_count: int) -> None:
        """Store the running and waiting trials for the next refresh."""
        super().show_running(processes, waiting_count)
        self._processes, self._waiting_count = list(processes), waiting_count

    def show_ended(self, plan: TrialPlan, trial: Trial, *, recorded_earlier: bool) -> None:
        """Print a line for the trial, or only count it, and update the counts, mean duration and best trial."""
        super().show_ended(plan, trial, recorded_earlier=recorded_earlier)
        self._counts[trial.status] += 1
        if not recorded_earlier and trial.wall_s:
            self._trial_durations_s.append(trial.wall_s)
        if trial.results.objective > (self._best_trial.results.objective if self._best_trial else 0.0):
            self._best_trial = trial

    def seconds_left(self) -> float | None:
        """Estimate the seconds left from the mean duration of the trials so far. None before the first has finished."""
        if not self._trial_durations_s:
            return None
        mean = sum(self._trial_durations_s) / len(self._trial_durations_s)
        running_s = sum(max(mean - process.elapsed_s, 0.0) for process in self._processes)
        return (running_s + mean * self._waiting_count) / self._jobs

    def _render(self) -> Group:
        ended_count = sum(self._counts.values())
        seconds_left = self.seconds_left()
        parts = [f"{ended_count}/{self.total} done", f"{len(self._processes)} running"]
        parts += [f"{n} {s.value.replace('_', ' ')}" for s, n in self._counts.items() if s is not Status.ok]
        parts.append("ETA ?" if seconds_left is None else f"ETA {long_duration_text(seconds_left)}")
        parts.append(f"{long_duration_text(time.monotonic() - self._start_time)} so far")
        heading = Text(f"sweep {self._name}: {' · '.join(parts)}", style="bold")
        rows = Table(box=SIMPLE, show_header=False, pad_edge=False)
        if self._best_trial is not None:
            speed = f"{self._best_trial.results.objective:,.0f} tokens/s/chip {self._best_trial.speed_label}".rstrip()
            rows.add_row("best so far", self._best_trial.title, speed)
        for process in self._processes:
            limit = process.plan.limit_s
            rows.add_row(
                "running",
                trial_title(process.plan.about, process.plan.overrides, process.plan.stage),
                f"{process.elapsed_s:.0f} s" + (f" of at most {limit:g} s" if limit else ""),
            )
        return Group(heading, rows)
