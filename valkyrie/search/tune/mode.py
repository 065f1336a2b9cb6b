"""`mode=tune`: prints the gain of compiler options and implementations for a layout, and stores the best."""

from __future__ import annotations

import shlex
from pathlib import Path

from rich.console import Console
from rich.status import Status

from valkyrie.config.modes import ATTEMPTS, TUNED, settings_for
from valkyrie.config.run import Run
from valkyrie.modes.tune import Config as TuneMode
from valkyrie.paths import write_atomic
from valkyrie.processes.ending import INTERRUPTED
from valkyrie.processes.interrupt import signals_as_exceptions
from valkyrie.records import write_record
from valkyrie.runs.columns import Column, terminal_line
from valkyrie.runs.folder import command_name, key_value, run_folder, versions, write_about
from valkyrie.search.tune.compiler_options import Options
from valkyrie.search.tune.tune import tune
from valkyrie.search.tune.tuned import Attempt, Tuned, TuneRecord, Verdict, assignments
from valkyrie.train.options import option_text
from valkyrie.train.screen import make_console
from valkyrie.units import duration, parse_seconds

_COLUMNS: tuple[Column[Attempt], ...] = (
    Column("step_s", "step", "seconds", lambda a: a.step_s, least=10),
    Column("change", "change", "change", lambda a: None if a.verdict is Verdict.same else a.change, least=9),
    Column("peak", "peak", "bytes", lambda a: a.peak, least=10),
    Column("verdict", "", "text", lambda a: "" if a.verdict is Verdict.start else a.verdict.value, least=12),
    Column("options", "option", "text", lambda a: _describe_options(a.options)),
)
"""The options come last, because they are long."""


def tune_mode(run: Run) -> int:
    """Tune the run's compiler options by compiling it, print and store the results, and return the exit status.

    Ctrl-C ends it with the results so far. Compiled programs are in the cache, where the same command finds them.
    """
    console, folder = make_console(), run_folder(run)
    budget = settings_for(TuneMode, run.config.mode).budget
    known: list[Tuned] = []
    interrupted = False
    console.print(_first(run), soft_wrap=True, markup=False)
    with console.status("compiling") as status:
        screen = _Screen(console, status)

        def show(tuned: Tuned) -> None:
            known.append(tuned)
            screen.show(tuned)

        try:
            with signals_as_exceptions():
                known.append(tune(run, None, None if budget is None else parse_seconds(budget), show, screen.progress))
        except KeyboardInterrupt:
            if not known:
                raise
            interrupted = True
    tuned = known[-1]
    write_about(run, folder)
    write_record(folder / ATTEMPTS, TuneRecord.of(tuned, versions()))
    write_atomic(folder / TUNED, fragment(tuned))
    _show_end(tuned, folder, interrupted, console)
    return INTERRUPTED if interrupted else 0


def _first(run: Run) -> str:
    """Describe the first compile, including that a budget does not end it."""
    budget = settings_for(TuneMode, run.config.mode).budget
    text = f"compiling the layout as it is for {run.config.target.describe()}"
    if budget is None:
        return text
    return f"{text}: mode.budget={budget} does not end that, for all else is held to it; mode.time_limit_s does"


class _Screen:
    """Output while options are tried: a row for each result, and in a terminal the best so far."""

    def __init__(self, console: Console, status: Status) -> None:
        self._console, self._status, self._best = console, status, ""

    def show(self, tuned: Tuned) -> None:
        attempt = tuned.attempts[-1]
        if attempt.verdict is Verdict.start:
            about = tuned.run.about()
            self._print(f"{about.model} under {about.layout} on {about.described}", "bold")
            if tuned.set_by_user:
                self._print(f"left as you set them: {', '.join(assignments(tuned.set_by_user))}")
            self._print(terminal_line(_COLUMNS))
        for line in row(attempt):
            self._print(line, "green" if attempt.verdict is Verdict.kept else None)
        gained = f" ({-100 * tuned.gain:+.1f}%)" if tuned.options else ""
        self._best = f"best {duration(tuned.step_s)}{gained} after {len(tuned.attempts)} · "

    def progress(self, line: str) -> None:
        self._status.update(self._best + line)

    def _print(self, line: str, style: str | None = None) -> None:
        self._console.print(line, style=style, markup=False, soft_wrap=True)


def row(attempt: Attempt) -> list[str]:
    """Format an attempt as lines: step, change from the best before it, peak, verdict and option, then the reason."""
    return [terminal_line(_COLUMNS, attempt), *([f"  {attempt.reason}"] if attempt.reason else [])]


def _describe_options(options: Options) -> str:
    if len(options) > 3:  # more than one candidate sets
        return f"{len(options)} options together: {', '.join(options)}"
    return ", ".join(assignments(options)) or "as it is"


def _show_end(tuned: Tuned, folder: Path, interrupted: bool, console: Console) -> None:
    """Print the gain of the options, the YAML that sets them, and the command that trains with them."""

    def tell(line: str, style: str | None = None) -> None:
        console.print(line, style=style, markup=False, soft_wrap=True)

    if interrupted:
        tell("stopped; the same command goes on from what was compiled", "yellow")
    elif not tuned.finished:
        spent = f"mode.budget={settings_for(TuneMode, tuned.run.config.mode).budget} is spent and there is more to try"
        tell(f"{spent}: the same command with a longer one goes on from what was compiled", "yellow")
    if not (tuned.options or tuned.model):
        tried = len(tuned.attempts) - 1
        of_those = f"none of {tried} tried is shorter" if tried else "nothing else was tried"
        tell(f"best as it is: {duration(tuned.start_s)} a step; {of_those}")
    else:
        before, after = duration(tuned.start_s), duration(tuned.step_s)
        tell(f"predicted step: {before} as it is, {after} with these options ({-100 * tuned.gain:+.1f}%)", "bold")
        for line in bought(tuned):
            tell(f"  {line}")
        tell(fragment(tuned).rstrip())
        tell(f"options: {folder / TUNED}")
        tell(f"to train with them: {training_command(tuned)}")
    tell(f"all that was tried: {folder / ATTEMPTS}")


def bought(tuned: Tuned) -> list[str]:
    """Return a line for each option that was kept: the step without and with it, at the time of the attempt."""
    lines = []
    for attempt in tuned.attempts:
        kept = {name: v for name, v in attempt.options.items() if (tuned.options | tuned.model).get(name, ...) == v}
        if attempt.verdict is Verdict.kept and kept and attempt.step_s is not None and attempt.change is not None:
            before = attempt.step_s / (1 + attempt.change)
            steps = f"{duration(before)} to {duration(attempt.step_s)} ({100 * attempt.change:+.1f}%)"
            lines.append(f"{', '.join(assignments(kept))}: {steps}")
    return lines


def fragment(tuned: Tuned) -> str:
    """Return the YAML that sets the options, with comments on its use and on the gain of each option."""
    about, steps = tuned.run.about(), [duration(seconds) for seconds in (tuned.start_s, tuned.step_s)]
    lines = [
        "# @package _global_",
        f"# {training_command(tuned)}",
        "# Or copy this file to FOLDER/experiment/tuned.yaml and write --config-dir FOLDER +experiment=tuned.",
        f"# {about.model} under {about.layout} on {about.described}, batch {about.batch} x {about.seq}:",
        f"# predicted step {steps[0]} without, {steps[1]} with these options (libtpu {versions().get('libtpu')}).",
    ]
    lines += [f"# {line}" for line in bought(tuned)]
    if tuned.to_fit:
        lines.append(f"# without {', '.join(assignments(tuned.to_fit))} it does not fit")
    for key, value in tuned.model.items():
        *path, name = key.split(".")
        lines += [f"{'  ' * depth}{part}:" for depth, part in enumerate(path)] + [f"{'  ' * len(path)}{name}: {value}"]
    if not tuned.settings:
        return "\n".join([*lines, "target: {chip: {xla_options: {}}}", ""])
    values = [f"{name}: {'null' if v is None else option_text(v)}" for name, v in sorted(tuned.settings.items())]
    return "\n".join([*lines, "target:", "  chip:", "    xla_options:", *(f"      {value}" for value in values), ""])


def training_command(tuned: Tuned) -> str:
    """Return the command that trains the run with its options in a new folder. Other arguments are as typed."""
    own = ("mode", "name")
    typed = [a for a in tuned.run.arguments if key_value(a)[0] not in own and not key_value(a)[0].startswith("mode.")]
    return " ".join([command_name(), *map(shlex.quote, typed), *tuned.overrides])
