"""Formats trials for the terminal: a line per trial, the ranked table of a sweep, and the closing summary."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from valkyrie.config.modes import has_results, reads_run
from valkyrie.runs.columns import FORMATS, terminal_table
from valkyrie.runs.folder import command_name
from valkyrie.sweep.columns import TERMINAL_COLUMNS
from valkyrie.sweep.noise import EQUAL_TOLERANCE, has_spread
from valkyrie.sweep.rows import Row, group_by_kind, make_rows, with_ranks, with_settings
from valkyrie.sweep.trial import PAGE_FILE, Status, Trial
from valkyrie.units import count_text, memory_text, share_text

NO_RESULT_STATUSES = (Status.failed, Status.killed, Status.timeout)
"""Statuses of trials that ended without a result, for a reason other than the layout."""


def describe_result(trial: Trial) -> str:
    """Summarise a trial in one line: its speed, MFU and memory, or the status and the reason."""
    if trial.status is not Status.ok:
        return f"{trial.status.value}: {trial.short_reason}"
    phrases, step, results = [], trial.results.step, trial.results
    if step.tokens_per_second:
        phrases.append(f"{step.tokens_per_second:,.0f} tokens/s {trial.speed_label}".rstrip())
    if step.tokens_per_second and step.step_s:
        phrases.append(f"{1e3 * step.step_s:,.1f} ms/step")
    if step.mfu:
        phrases.append(f"MFU {FORMATS['share'](step.mfu)}")
    if results.memory.peak is not None:
        phrases.append(memory_text(results.memory.peak))
    if not step.tokens_per_second and results.loss is not None:
        phrases.append(f"loss {FORMATS['loss'](results.loss)}")
    return "ok" + (f": {', '.join(phrases)}" if phrases else "")


def sweep_table(trials: Sequence[Trial], folder: Path, max_rows: int = 40) -> Table:
    """Return the table of at most `max_rows` trials, ranked by kind of speed. Omits refused trials, empty columns."""
    rows = with_settings([row for row in make_rows({folder: trials}) if row.trial.status is not Status.refused])
    sorted_rows = [row for group in group_by_kind(rows).values() for row in with_ranks(group)]
    top_rows = sorted_rows[:max_rows]
    nonempty_columns = [column for column in TERMINAL_COLUMNS if any(column.text(row) for row in top_rows)]
    notes = [] if len(sorted_rows) <= max_rows else [f"{len(sorted_rows) - max_rows} more on the page"]
    rank_counts = Counter[tuple[object, int | None]]((row.speed_kind, row.rank) for row in sorted_rows if row.rank)
    tied_rows = [row for row in sorted_rows if rank_counts[row.speed_kind, row.rank] > 1]
    if tied_rows:
        has_spreads = any(has_spread(row.trial) for row in tied_rows)
        tolerance = "the spread of their step times" if has_spreads else share_text(EQUAL_TOLERANCE)
        notes.append(f"trials with the same rank are equally fast, within {tolerance}")

    def style(row: Row) -> str | None:
        return None if row.trial.status is Status.ok else "dim"

    return terminal_table(
        nonempty_columns, top_rows, style, "fold", caption="\n".join(notes) or None, caption_justify="left"
    )


def count_statuses(trials: Sequence[Trial]) -> str:
    """Count trials by status, as in `12 trials: 9 ok, 2 refused, 1 killed`."""
    counts = Counter(trial.status for trial in trials)
    parts = ", ".join(f"{counts[s]} {s.value.replace('_', ' ')}" for s in Status if counts[s])
    return f"{count_text(len(trials), 'trial')}: {parts or 'none'}"


def closing_lines(trials: Sequence[Trial], folder: Path, *, is_complete: bool = True) -> list[str]:
    """Return the lines below the table: counts by status, refusals, how to retry, the folder and the HTML report.

    If the sweep is not `is_complete` or has no report yet, the last line is the command that writes the report.
    """
    lines = [count_statuses(trials)]
    refused_trials = [trial for trial in trials if trial.status is Status.refused]
    for trial in refused_trials[:3]:
        lines.append(f"refused: {trial.title}: {trial.short_reason}")
    if len(refused_trials) > 3:
        lines.append(f"refused: {len(refused_trials) - 3} more, explained on the page")
    if any(trial.status in NO_RESULT_STATUSES for trial in trials):
        lines.append("to repeat trials without a result, add trial.retry=true")
    for stage in sorted({trial.stage for trial in trials if not (has_results(trial.stage) or reads_run(trial.stage))}):
        lines.append(f"mode={stage} records no numbers. To compare memory and step time, use mode=compile")
    page_exists = is_complete and (folder / PAGE_FILE).is_file()
    page = folder / PAGE_FILE if page_exists else f"{command_name('valkyrie-report')} {shlex.quote(str(folder))}"
    return [*lines, f"folder: {folder}", f"page: {page}"]
