"""`mode=tune`: finds the best compiler options and implementations for a layout, and prints the gain of each."""

from __future__ import annotations

import shlex
from pathlib import Path

from rich.console import Console
from rich.status import Status

from valkyrie.config.modes import ATTEMPTS_FILE, TUNED_FILE, settings_for
from valkyrie.config.run import Run
from valkyrie.hardware.platforms import get_platform
from valkyrie.modes.tune import Config as TuneMode
from valkyrie.paths import write_atomic
from valkyrie.processes.ending import EXIT_INTERRUPTED
from valkyrie.processes.interrupt import signals_as_exceptions
from valkyrie.records import write_record
from valkyrie.runs.columns import Column, terminal_line
from valkyrie.runs.folder import (
    choose_run_folder,
    command_name,
    installed_version,
    package_versions,
    split_override,
    write_run_files,
)
from valkyrie.search.tune.compiler_options import OptionValues
from valkyrie.search.tune.tune import refuse_untunable, tune
from valkyrie.search.tune.tuned import Attempt, TunedRun, TuneRecord, Verdict, format_options
from valkyrie.train.options import option_text
from valkyrie.train.screen import make_console
from valkyrie.units import count_text, duration_text, parse_seconds

_COLUMNS: tuple[Column[Attempt], ...] = (
    Column("step_s", "step", "seconds", lambda a: a.step_s, min_width=10),
    Column("change", "change", "change", lambda a: None if a.verdict is Verdict.same else a.change, min_width=9),
    Column("peak", "peak", "bytes", lambda a: a.peak, min_width=10),
    Column("verdict", "", "text", lambda a: "" if a.verdict is Verdict.start else a.verdict.value, min_width=12),
    Column("options", "option", "text", lambda a: _describe_options(a.options)),
)
"""Columns of the table of attempts. The options come last, because they are long."""


def tune_mode(run: Run) -> int:
    """Tune compiler options and implementations for a run, print and store the results, and return the exit status.

    Ctrl-C stops the search and keeps the results so far. The same command resumes it, using cached programs.
    """
    refuse_untunable(run.config.target)
    console, folder = make_console(), choose_run_folder(run)
    budget = settings_for(TuneMode, run.config.mode).budget
    results: list[TunedRun] = []
    is_interrupted = False
    console.print(_describe_baseline(run), soft_wrap=True)
    with console.status("compiling") as status:
        screen = _Screen(console, status)

        def show_progress(tuned_run: TunedRun) -> None:
            results.append(tuned_run)
            screen.show(tuned_run)

        try:
            with signals_as_exceptions():
                results.append(
                    tune(run, None, None if budget is None else parse_seconds(budget), show_progress, screen.progress)
                )
        except KeyboardInterrupt:
            if not results:
                raise
            is_interrupted = True
    tuned_run = results[-1]
    write_run_files(run, folder)
    write_record(folder / ATTEMPTS_FILE, TuneRecord.from_results(tuned_run, package_versions()))
    write_atomic(folder / TUNED_FILE, experiment_yaml(tuned_run))
    _print_results(tuned_run, folder, is_interrupted, console)
    return EXIT_INTERRUPTED if is_interrupted else 0


def _describe_baseline(run: Run) -> str:
    """Return the line to print before the baseline compile. With a budget, it explains what limits this compile."""
    budget = settings_for(TuneMode, run.config.mode).budget
    text = f"compiling the baseline for {run.config.target.describe()}"
    if budget is None:
        return text
    return f"{text}, limited only by mode.time_limit_s. mode.budget={budget} includes its time, but does not stop it."


class _Screen:
    """Prints a table row for each attempt and, in a terminal, a status line with the best step time so far."""

    def __init__(self, console: Console, status: Status) -> None:
        self._console, self._status, self._best = console, status, ""

    def show(self, tuned_run: TunedRun) -> None:
        attempt = tuned_run.attempts[-1]
        if attempt.verdict is Verdict.start:
            record = tuned_run.run.layout_record()
            self._print(f"{record.model} under {record.layout} on {record.described}", "bold")
            if tuned_run.set_by_user:
                self._print(f"not varied, because you set them: {', '.join(format_options(tuned_run.set_by_user))}")
            self._print(terminal_line(_COLUMNS))
        for line in attempt_lines(attempt):
            self._print(line, "green" if attempt.verdict is Verdict.kept else None)
        gain_text = f" ({-100 * tuned_run.gain:+.1f}%)" if tuned_run.options else ""
        attempts_text = count_text(len(tuned_run.attempts), "attempt")
        self._best = f"best {duration_text(tuned_run.step_s)}{gain_text} after {attempts_text} · "

    def progress(self, line: str) -> None:
        self._status.update(self._best + line)

    def _print(self, line: str, style: str | None = None) -> None:
        self._console.print(line, style=style, soft_wrap=True)


def attempt_lines(attempt: Attempt) -> list[str]:
    """Format an attempt as a table row and, if it has no step time, a line with the reason."""
    return [terminal_line(_COLUMNS, attempt), *([f"  {attempt.reason}"] if attempt.reason else [])]


def _describe_options(options: OptionValues) -> str:
    if len(options) > 3:  # more than a single candidate sets
        return f"{len(options)} options together: {', '.join(options)}"
    return ", ".join(format_options(options)) or "baseline"


def _print_results(tuned_run: TunedRun, folder: Path, is_interrupted: bool, console: Console) -> None:
    """Print the gain of the best settings, the YAML that sets them, and the command that trains with them.

    If no attempt is faster than the baseline, prints that instead. If the search is incomplete, also prints how to
    continue it.
    """

    def print_line(line: str, style: str | None = None) -> None:
        console.print(line, style=style, soft_wrap=True)

    if is_interrupted:
        print_line("Interrupted. Rerun the same command to resume.", "yellow")
    elif not tuned_run.finished:
        budget = settings_for(TuneMode, tuned_run.run.config.mode).budget
        print_line(
            f"mode.budget={budget} ended before everything was tried. To continue, rerun with a longer mode.budget.",
            "yellow",
        )
    if not (tuned_run.options or tuned_run.model):
        tried = len(tuned_run.attempts) - 1
        comparisons = {0: "nothing else was tried", 1: "the only other attempt is not faster"}
        comparison = comparisons.get(tried, f"none of {tried} attempts is faster")
        print_line(f"The baseline is the best: {duration_text(tuned_run.start_s)} a step; {comparison}.")
    else:
        before, after = duration_text(tuned_run.start_s), duration_text(tuned_run.step_s)
        print_line(
            f"predicted step: {before} without, {after} with these options ({-100 * tuned_run.gain:+.1f}%)", "bold"
        )
        for line in option_gains(tuned_run):
            print_line(f"  {line}")
        print_line(experiment_yaml(tuned_run).rstrip())
        print_line(f"options: {folder / TUNED_FILE}")
        print_line(f"to train with them: {training_command(tuned_run)}")
    print_line(f"all attempts: {folder / ATTEMPTS_FILE}")


def option_gains(tuned_run: TunedRun) -> list[str]:
    """Return a line for each kept option: the step time before and after it was added."""
    lines = []
    for attempt in tuned_run.attempts:
        kept_settings = {
            name: v for name, v in attempt.options.items() if (tuned_run.options | tuned_run.model).get(name, ...) == v
        }
        if (
            attempt.verdict is Verdict.kept
            and kept_settings
            and attempt.step_s is not None
            and attempt.change is not None
        ):
            before = attempt.step_s / (1 + attempt.change)
            steps = f"{duration_text(before)} to {duration_text(attempt.step_s)} ({100 * attempt.change:+.1f}%)"
            lines.append(f"{', '.join(format_options(kept_settings))}: {steps}")
    return lines


def experiment_yaml(tuned_run: TunedRun) -> str:
    """Return the YAML of an experiment config that sets the best compiler options and implementations.

    Its comments describe how to use it, and the gain of each setting.
    """
    record = tuned_run.run.layout_record()
    steps = [duration_text(seconds) for seconds in (tuned_run.start_s, tuned_run.step_s)]
    package = get_platform(tuned_run.run.config.target.platform).compiler_packages[0]
    compiler = f"{package} {installed_version(package)}"
    lines = [
        "# @package _global_",
        f"# {training_command(tuned_run)}",
        "# Or copy this file to FOLDER/experiment/tuned.yaml and train with --config-dir FOLDER +experiment=tuned.",
        f"# {record.model} under {record.layout} on {record.described}, batch {record.batch} x {record.seq}:",
        f"# predicted step {steps[0]} without, {steps[1]} with these options ({compiler}).",
    ]
    lines += [f"# {line}" for line in option_gains(tuned_run)]
    if tuned_run.added:
        lines.append(f"# The compile has added {', '.join(format_options(tuned_run.added))} to fit or to overlap.")
    for key, value in tuned_run.model.items():
        *path, name = key.split(".")
        lines += [f"{'  ' * depth}{part}:" for depth, part in enumerate(path)] + [f"{'  ' * len(path)}{name}: {value}"]
    if not tuned_run.settings:
        return "\n".join([*lines, "target: {chip: {xla_options: {}}}", ""])
    values = [f"{name}: {'null' if v is None else option_text(v)}" for name, v in sorted(tuned_run.settings.items())]
    return "\n".join([*lines, "target:", "  chip:", "    xla_options:", *(f"      {value}" for value in values), ""])


def training_command(tuned_run: TunedRun) -> str:
    """Return the command that trains with the best settings in a new run folder.

    It has the arguments of the tuning command, without `mode`, `mode.*` and `name`.
    """
    mode_keys = ("mode", "name")
    arguments = [
        a
        for a in tuned_run.run.arguments
        if split_override(a)[0] not in mode_keys and not split_override(a)[0].startswith("mode.")
    ]
    return " ".join([command_name(), *map(shlex.quote, arguments), *tuned_run.overrides])
