"""`mode=explain`: compiles two layouts, or reads them from run folders, and says why one of both is faster."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from valkyrie.config.arguments import run_of
from valkyrie.config.modes import EXPLAINED, SUMMARY
from valkyrie.config.run import Run
from valkyrie.hardware.platforms import platform_of
from valkyrie.paths import unused, write_whole
from valkyrie.records import encode
from valkyrie.runs.folder import key_value, parts_of, run_folder, write_about
from valkyrie.search.compile.implementations import computed
from valkyrie.search.compile.prediction import CompileStatus, Prediction, read_prediction
from valkyrie.search.explain.difference import (
    LETTERS,
    NO_STEP,
    Difference,
    Pair,
    as_json,
    difference,
    other_models,
    without_step,
)
from valkyrie.search.modes import compile_and_summarise
from valkyrie.train.screen import make_console
from valkyrie.units import duration, memory, sent

LEAST = 0.001
"""The share of the longer step from which a part is listed."""
SMALL = 0.01
"""The share of the largest kind of memory from which one is listed."""
_OF_THE_MODE = ("mode", "first", "second", "name")


def explain_mode(run: Run) -> int:
    """Print why one of two layouts is faster, keep it in the run folder, and return the exit status."""
    console, asked = make_console(), (run.config.mode.first, run.config.mode.second)
    if not asked[0] or not asked[1]:
        raise ValueError(
            "mode=explain compares two layouts: say both, as first='partition=fsdp' "
            "second='mesh=4x4x2 partition=2d_tp', or as run folders with a compile.json."
        )
    if asked[0] == asked[1]:
        raise ValueError(f"first= and second= are the same: {asked[0]!r}. Name two layouts.")
    predictions = _predictions(run, (asked[0], asked[1]), console)
    made = difference(*predictions, asked=(asked[0], asked[1]))
    folder = _folder(run, predictions)
    write_about(run, folder)
    write_whole(folder / EXPLAINED, json.dumps(as_json(made), indent=1) + "\n")
    show(made, console)
    console.print(f"answer: {folder / EXPLAINED}", soft_wrap=True)
    return 0


def _folder(run: Run, predictions: Sequence[Prediction]) -> Path:
    """Return the folder of the answer: the run's where it has a name, else a new one of the model and both layouts."""
    if run.config.name is not None or run.config.resume is not None:
        return run_folder(run)
    one, other = (prediction.about for prediction in predictions)
    return unused(Path(run.config.runs) / f"explain-{one['model']}-{one['layout']}-{other['layout']}")


def _predictions(run: Run, asked: tuple[str, str], console: Console) -> tuple[Prediction, Prediction]:
    """Return the predictions of two layouts: those of folders, or of the command's run with these overrides.

    Raises ValueError with everything that is wrong with them before anything is compiled.
    """
    layouts, problems = [], []
    for letter, text in zip(LETTERS, asked, strict=True):
        try:
            layouts.append(layout := _layout(run, text))
        except ValueError as error:
            problems.append(str(error))
        else:
            problems += [why] if isinstance(layout, Prediction) and (why := without_step(layout, letter)) else []
    if not problems:
        one, other = layouts
        problems = other_models(_known(one), _known(other))
        if isinstance(one, Run) and isinstance(other, Run) and one.config == other.config:
            problems.append(f"first={asked[0]!r} and second={asked[1]!r} are the same run. Name two layouts.")
    if problems:
        raise ValueError("\n".join(dict.fromkeys(problems)))
    one, other = (_compiled(layout, console) if isinstance(layout, Run) else layout for layout in layouts)
    return one, other


def _layout(run: Run, text: str) -> Run | Prediction:
    """Return the prediction in a folder, or the command's run with these overrides. Raises ValueError for mistakes."""
    folder = next((f for f in (Path(text).expanduser(), Path(run.config.runs) / text) if f.is_dir()), None)
    if folder is not None:
        return _read(folder)
    try:
        changes = shlex.split(text)
    except ValueError:
        raise ValueError(
            f"{text}: a quotation mark in it has no partner. Write it as 'mesh=4x4x2 partition=2d_tp'."
        ) from None
    if wrong := [change for change in changes if "=" not in change]:
        raise ValueError(
            f"{wrong[0]} is neither a folder nor an override such as partition=fsdp. Two layouts are compared by "
            "first= and second=."
        )
    flags, overrides = parts_of(run.arguments)
    kept = [o for o in overrides if key_value(o)[0] not in _OF_THE_MODE and not key_value(o)[0].startswith("mode.")]
    mode = [o for o in overrides if key_value(o)[0] in ("mode.time_limit_s", "mode.cache")]
    other = run_of([*flags, *kept, "mode=compile", *mode, *changes])
    target, problems = other.config.target, [str(problem) for problem in other.problems()]
    platform = platform_of(target.platform)
    if platform.replay is None:
        problems.append(f"target={target.name} has no predicted step: {NO_STEP}")
    elif missing := platform.missing_compiler(target):
        problems.append(missing)
    if problems:
        raise ValueError("\n".join(f"{text}: {problem}" for problem in problems))
    return other


def _known(layout: Run | Prediction) -> Prediction:
    """Return what is known of a layout before it is compiled."""
    if isinstance(layout, Prediction):
        return layout
    return Prediction(about=encode(layout.about()), status=CompileStatus.ok, model=computed(layout))


def _compiled(run: Run, console: Console) -> Prediction:
    return compile_and_summarise(run, console)[1]


def _read(folder: Path) -> Prediction:
    file = folder / SUMMARY
    try:
        return read_prediction(file)
    except FileNotFoundError:
        raise ValueError(
            f"{folder} has no {SUMMARY}: it is no folder of a layout that was compiled. mode=compile leaves one."
        ) from None
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error}.") from error


def show(made: Difference, console: Console) -> None:
    """Print both layouts side by side, and in sentences why one of them is faster."""
    for letter, name in zip(LETTERS, made.names, strict=True):
        console.print(f"{letter}: {name}", style="bold", markup=False)
    least = LEAST * max(made.steps.first, made.steps.second)
    parts = [part for part in made.parts if max(part.first, part.second) >= least]
    _table("where a step goes", [*parts, made.steps], duration, console)
    _table("what a device sends in a step, over", made.sent, sent, console)
    most = max((max(kind.first, kind.second) for kind in made.memory), default=0.0)
    kinds = [kind for kind in made.memory if max(kind.first, kind.second) >= SMALL * most]
    _table("memory of one device at the peak", kinds, lambda size: memory(int(size)), console)
    _collectives(made, console)
    for sentence in made.sentences:
        console.print(sentence, markup=False)


def _table(title: str, pairs: Sequence[Pair], written: Callable[[float], str], console: Console) -> None:
    table = Table(title=title, title_justify="left", header_style="bold", box=SIMPLE)
    table.add_column("what")
    for name in (*LETTERS, "B - A"):
        table.add_column(name, justify="right", no_wrap=True)
    for pair in pairs:
        sign = "-" if pair.more < 0 else "+"
        values = [written(value) if value else "" for value in (pair.first, pair.second)]
        table.add_row(pair.name, *values, f"{sign}{written(abs(pair.more))}" if pair.more else "")
    console.print(table)


def _collectives(made: Difference, console: Console) -> None:
    table = Table(title="collectives waited for longest", title_justify="left", header_style="bold", box=SIMPLE)
    for name in ("", "kind", "over", "waited", "sent", "calls", "cause", "source"):
        table.add_column(name, justify="right" if name in ("waited", "sent", "calls") else "left")
    for letter, uses in zip(LETTERS, made.dearest, strict=True):
        for use in uses:
            numbers = duration(use.waited_s), sent(use.bytes), f"{use.calls:,.0f}"
            table.add_row(letter, use.kind, use.over, *numbers, use.cause, use.source)
    if table.row_count:
        console.print(table)
