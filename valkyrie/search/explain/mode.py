"""`mode=explain`: compiles two layouts, or reads them from run folders, and prints why one is faster."""

from __future__ import annotations

import itertools
import math
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from valkyrie.config.arguments import parse_run
from valkyrie.config.modes import COMPILE_FILE, EXPLAIN_FILE, settings_for
from valkyrie.config.run import Run
from valkyrie.hardware.platforms import get_platform, replayed_devices
from valkyrie.hardware.slices import format_shape
from valkyrie.modes.explain import Config as ExplainMode
from valkyrie.parallel.mesh import parse_mesh
from valkyrie.parts import label_record_name
from valkyrie.records import write_record
from valkyrie.runs.folder import choose_run_folder, split_flags, split_override, write_run_files
from valkyrie.search.compile.cache import program_settings
from valkyrie.search.compile.prediction import CompileStatus, Prediction, read_prediction
from valkyrie.search.compile.show import make_table
from valkyrie.search.compile.summary import model_settings
from valkyrie.search.explain.difference import (
    KEYS,
    LETTERS,
    Difference,
    Quantity,
    compare_layouts,
    missing_step_reason,
    model_mismatch,
)
from valkyrie.search.modes import compile_and_summarise
from valkyrie.train.screen import make_console
from valkyrie.units import decimal_bytes_text, duration_text, memory_text

_MIN_PART_SHARE = 0.001
"""Parts that take less than this share of the longer step are not listed."""
_MIN_MEMORY_SHARE = 0.01
"""Contents of memory below this share of the largest one are not listed."""
_MODE_KEYS = ("mode", "first", "second", "name")


def explain_mode(run: Run) -> int:
    """Explain why one of two layouts is faster, write `explain.json`, and return the exit status."""
    console, mode = make_console(), settings_for(ExplainMode, run.config.mode)
    first, second = mode.first, mode.second
    if not first or not second:
        raise ValueError(
            "mode=explain compares two layouts. Set both first= and second= to overrides, such as "
            "first='partition=fsdp' second='mesh=4x4x2 partition=2d_tp', or to run folders with a compile.json."
        )
    if first == second:
        raise ValueError(f"first= and second= are the same: {first!r}. Choose two different layouts.")
    texts = f"first={first!r}", f"second={second!r}"
    predictions = _predict_both(*_parse_layouts(run, (first, second)), console, texts)
    comparison = compare_layouts(*predictions, requests=(first, second))
    a, b = (prediction.layout for prediction in predictions)
    folder = choose_run_folder(run, f"explain-{a.model}-{a.name}-{b.name}")
    write_run_files(run, folder)
    write_record(folder / EXPLAIN_FILE, comparison)
    print_difference(comparison, console)
    console.print(f"answer: {folder / EXPLAIN_FILE}", soft_wrap=True)
    return 0


def explain(first: Run | Path | Prediction, second: Run | Path | Prediction, console: Console) -> Difference:
    """Compare two layouts. Each is a prediction, a run folder of `mode=compile`, or a `Run` to compile.

    Raises ValueError with all problems that are known before compiling anything. After compiling, raises ValueError if
    a layout has no step time, or if both layouts compile to the same program.
    """
    layouts, problems = [], []
    for key, layout in (("first", first), ("second", second)):
        try:
            layouts.append(_read_folder(layout) if isinstance(layout, Path) else layout)
            if isinstance(layout, Run):
                _refuse_uncompilable(layout)
        except ValueError as error:
            problems.append(f"{key}: {error}")
    if problems:
        raise ValueError("\n".join(problems))
    a, b = layouts
    texts = tuple(shlex.join(layout.arguments) if isinstance(layout, Run) else "" for layout in layouts)
    return compare_layouts(*_predict_both(a, b, console), requests=(texts[0], texts[1]))


def _parse_layouts(run: Run, requests: tuple[str, str]) -> tuple[Run | Prediction, Run | Prediction]:
    """Return both layouts as predictions or runs. Raises ValueError with all problems of the requests."""
    layouts, problems = [], []
    for request in requests:
        try:
            layouts.append(_parse_layout(run, request))
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ValueError("\n".join(dict.fromkeys(problems)))
    return layouts[0], layouts[1]


def _predict_both(
    first: Run | Prediction, second: Run | Prediction, console: Console, texts: tuple[str, str] = ("first", "second")
) -> tuple[Prediction, Prediction]:
    """Return the predictions of both layouts, compiling those that are runs.

    Raises ValueError with all problems before compiling anything. `texts` are the names of the layouts in messages.
    """
    layouts = (first, second)
    reasons = [
        missing_step_reason(layout, key)
        for key, layout in zip(KEYS, layouts, strict=True)
        if isinstance(layout, Prediction)
    ]
    problems = [reason for reason in reasons if reason] or model_mismatch(*map(_as_prediction, layouts))
    if isinstance(first, Run) and isinstance(second, Run) and program_settings(first) == program_settings(second):
        problems.append(f"{texts[0]} and {texts[1]} are the same layout. Choose two different layouts.")
    elif isinstance(first, Run) and isinstance(second, Run) and _shards_equally(first, second):
        partitions = " and ".join(run.config.partition.name for run in (first, second))
        example = f", such as mesh={mesh}" if (mesh := _find_distinct_mesh(first, second)) else ""
        problems.append(
            f"{texts[0]} and {texts[1]} are the same program on mesh={first.config.mesh.name}: {partitions} differ "
            f"only in how they use mesh axes of size 1. Use another mesh{example}."
        )
    if problems:
        raise ValueError("\n".join(dict.fromkeys(problems)))
    a, b = (compile_and_summarise(layout, console)[1] if isinstance(layout, Run) else layout for layout in layouts)
    return a, b


def _shards_equally(first: Run, second: Run) -> bool:
    """Return whether two runs differ only in rules of their partitions for mesh axes of size 1."""
    runs, layouts = (first, second), (first.layout, second.layout)
    settings = [
        program_settings(run.changed(partition=replace(run.config.partition, name="", parameters={}, activations={})))
        for run in runs
    ]
    shardings = [(layout.roles, layout.fused_rules) for layout in layouts]
    return settings[0] == settings[1] and shardings[0] == shardings[1]


def _find_distinct_mesh(first: Run, second: Run) -> str:
    """Return the name of a mesh on which both runs are legal and are sharded differently, or an empty string.

    At most 8 devices are on the second of its axes, because hosts of GPUs have 8 joined by NVLink.
    """
    mesh = first.config.mesh
    size, axis_count = math.prod(mesh.shape), len(mesh.shape)
    for inner_size in (n for n in (8, 4, 2) if size % n == 0):
        for outer, inner in itertools.combinations(range(axis_count), 2):
            shape = [1] * axis_count
            shape[outer], shape[inner] = size // inner_size, inner_size
            name = f"{mesh.slices}s{format_shape(shape)}".removeprefix("1s")
            runs = [run.changed(mesh=parse_mesh(name)) for run in (first, second)]
            if not any(run.problems() for run in runs) and not _shards_equally(*runs):
                return name
    return ""


def _parse_layout(run: Run, request: str) -> Run | Prediction:
    """Return the prediction stored in the folder `request`, or a run to compile with the overrides in `request`.

    The overrides are added to those of `run`. Raises ValueError if `request` is neither a folder nor overrides, if the
    folder has no readable `compile.json`, if the overrides set `mode`, or if the layout is illegal or cannot be
    compiled or timed here.
    """
    for folder in (Path(request).expanduser(), Path(run.config.runs) / request):
        if folder.is_dir():
            return _read_folder(folder)
    spaced = re.sub(r",\s*(?=[+\w./@]+=)", " ", request[1:-1] if request.startswith("[") else request)
    if spaced != request:
        raise ValueError(f"{request}: separate the overrides of a layout with spaces: {spaced!r}.")
    try:
        changes = shlex.split(request)
    except ValueError as error:
        raise ValueError(
            f"{request}: cannot be split into overrides ({error}). Quote all of them once, such as "
            "first='mesh=4x4x2 partition=2d_tp'."
        ) from None
    if not_overrides := [change for change in changes if "=" not in change]:
        raise ValueError(
            f"{not_overrides[0]} is neither a folder nor an override such as partition=fsdp. Set first= and second= to "
            "the two layouts to compare."
        )
    if modes := [change for change in changes if split_override(change)[0] == "mode"]:
        raise ValueError(f"{request}: a layout cannot set mode. Leave out {modes[0]}.")
    flags, overrides = split_flags(run.arguments)
    keys = [(override, split_override(override)[0]) for override in overrides]
    shared = [override for override, key in keys if key not in _MODE_KEYS and not key.startswith("mode.")]
    mode_overrides = [override for override, key in keys if key in ("mode.time_limit_s", "mode.cache")]
    layout_run = parse_run([*flags, *shared, "mode=compile", *mode_overrides, *changes])
    try:
        _refuse_uncompilable(layout_run)
    except ValueError as error:
        raise ValueError("\n".join(f"{request}: {line}" for line in str(error).splitlines())) from error
    return layout_run


def _refuse_uncompilable(run: Run) -> None:
    """Raise ValueError with all problems if a run is illegal, or if this machine cannot predict its step time."""
    target, problems = run.config.target, [str(problem) for problem in run.problems()]
    platform = get_platform(target.platform)
    if platform.replay is None:
        kinds = " or ".join(replayed_devices())
        problems.append(f"target={target.name} has no predicted step time. Use {kinds}, such as target=v4-64.")
    elif missing := platform.compile_refusal(target, run.config.precision.compute.value):
        problems.append(missing)
    if problems:
        raise ValueError("\n".join(problems))


def _as_prediction(layout: Run | Prediction) -> Prediction:
    """Return `layout` if it is a prediction, otherwise a placeholder with only the run's model and layout."""
    if isinstance(layout, Prediction):
        return layout
    return Prediction(about=layout.layout_record(), status=CompileStatus.ok, model=model_settings(layout))


def _read_folder(folder: Path) -> Prediction:
    file = folder / COMPILE_FILE
    try:
        return read_prediction(file)
    except FileNotFoundError:
        raise ValueError(
            f"{folder} has no {COMPILE_FILE}. Use the run folder of a layout that mode=compile has compiled."
        ) from None
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error}.") from error


def print_difference(comparison: Difference, console: Console) -> None:
    """Print tables of both layouts, and the sentences that explain the difference."""
    for letter, name in zip(LETTERS, comparison.names, strict=True):
        console.print(f"{letter}: {name}", style="bold")
    seconds = _drop_small(comparison.seconds, _MIN_PART_SHARE * max(comparison.step_s))
    seconds = [replace(quantity, name=label_record_name(quantity.name)) for quantity in seconds]
    _print_quantities(
        "where the step time goes", [*seconds, Quantity("step", *comparison.step_s)], duration_text, console
    )
    _print_quantities("sent per device and step, by mesh axes", comparison.bytes_sent, decimal_bytes_text, console)
    largest = max((max(kind.first, kind.second) for kind in comparison.bytes_at_peak), default=0.0)
    kinds = _drop_small(comparison.bytes_at_peak, _MIN_MEMORY_SHARE * largest)
    _print_quantities("memory per device at the peak", kinds, lambda size: memory_text(int(size)), console)
    columns = ("", "kind", "over", "waited", "sent", "calls", "cause", "source")
    table = make_table("collectives with the longest waits", columns, number_columns=("waited", "sent", "calls"))
    for letter, uses in zip(LETTERS, comparison.collectives, strict=True):
        for use in uses:
            numbers = duration_text(use.waited_s), decimal_bytes_text(use.bytes), f"{use.calls:,.0f}"
            table.add_row(letter, use.kind, use.over, *numbers, use.cause, use.source)
    if table.row_count:
        console.print(table)
    for sentence in comparison.sentences:
        console.print(sentence)


def _drop_small(pairs: Sequence[Quantity], minimum: float) -> list[Quantity]:
    return [pair for pair in pairs if max(pair.first, pair.second) >= minimum]


def _print_quantities(
    title: str, pairs: Sequence[Quantity], describe: Callable[[float], str], console: Console
) -> None:
    table = make_table(title, ("what", *LETTERS, "B - A"), number_columns=(*LETTERS, "B - A"))
    for pair in pairs:
        sign = "-" if pair.excess < 0 else "+"
        values = [describe(value) if value else "" for value in (pair.first, pair.second)]
        table.add_row(pair.name, *values, f"{sign}{describe(abs(pair.excess))}" if pair.excess else "")
    console.print(table)
