"""The function `search` of the Python API, for runs and for any other JAX program."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from valkyrie.api_programs import (
    as_result,
    check_program_arguments,
    refuse_run_arguments,
    refuse_unknown_layouts,
    stderr_console,
)
from valkyrie.config.run import Run
from valkyrie.parallel.slice import Slice
from valkyrie.problems import check_range, describe_value, raise_problems, require_type
from valkyrie.processes.ending import EXIT_INTERRUPTED, EXIT_REFUSED
from valkyrie.results import Answer
from valkyrie.runs.folder import split_flags, split_override
from valkyrie.search.comparison import SEARCH_FILE, Comparison
from valkyrie.search.folder import refuse_other_folder, refuse_other_search
from valkyrie.units import parse_seconds

if TYPE_CHECKING:
    from valkyrie.search.programs import ProgramSearch

_AXES = ("data", "model")


@overload
def search(program: Run, *, quiet: bool = False) -> Answer: ...


@overload
def search(
    program: Callable[..., Any],
    *,
    slice: Slice,
    meshes: Sequence[Sequence[int] | Mapping[str, int]] | None = None,
    axes: Sequence[str] = _AXES,
    rules: Mapping[str, Any] | None = None,
    budget: str | float | int | None = None,
    folder: str | Path | None = None,
    options: Mapping[str, Any] | None = None,
    name: str | None = None,
    tokens: float | int | None = None,
    flops: float | int | None = None,
    unit: str = "tokens",
    measured_s: Mapping[str, float | int] | None = None,
    time_limit_s: float | int | None = None,
    quiet: bool = False,
) -> Comparison: ...


def search(
    program: Run | Callable[..., Any],
    *,
    slice: Slice | None = None,
    meshes: Sequence[Sequence[int] | Mapping[str, int]] | None = None,
    axes: Sequence[str] = _AXES,
    rules: Mapping[str, Any] | None = None,
    budget: str | float | int | None = None,
    folder: str | Path | None = None,
    options: Mapping[str, Any] | None = None,
    name: str | None = None,
    tokens: float | int | None = None,
    flops: float | int | None = None,
    unit: str = "tokens",
    measured_s: Mapping[str, float | int] | None = None,
    time_limit_s: float | int | None = None,
    quiet: bool = False,
) -> Answer | Comparison:
    """Search for the fastest layout of a training run, or of any JAX program, on a slice.

    **A run** is searched like `mode=search`: estimates all layouts of its model on its target, compiles the best, and
    measures them if possible. Returns an `Answer`. The only other argument is `quiet`, because the settings of the
    search are those of the run: `compose("model=gpt_1b", "target=v4-64", "mode=search", "budget=2min")`. A run of
    another mode is searched with default settings, and its `name` is not used. Layout settings that the run sets
    (`partition=fsdp`) are fixed, and the others vary. The folder of the search keeps every compile and measurement, and
    a later search with the same model, slices and layout settings continues there. An interrupt raises
    KeyboardInterrupt and keeps the answer so far in `search.json`. Compiles and measurements run in child processes,
    which need the devices: on a TPU or GPU, search before this process uses JAX. Raises ValueError if no layout fits
    (the message names a slice that is large enough), if an environment variable makes every compile fail, or if the run
    sets `resume`.

    **A function** `build(mesh, rule)` returns `(jitted, arguments)` or `(jitted, arguments, keywords)`, as for
    `predict`; without `rules`, it is `build(mesh)`. Each mesh with each rule is a layout, named by both: `fsdp on mesh
    data=2 model=4`. All are estimated, and compiled in the order of their estimates (those in the compile cache first),
    or as many as the budget allows. The others are rows with an estimated time. Returns a `Comparison` that ranks them
    by step time. If `build` raises an error, that layout has the status `failed` and the search continues. Compiled
    programs come from the cache, so the same call resumes a search that ended or was interrupted. Raises ValueError or
    TypeError for illegal arguments.

    Args:
        program: A run, or a function that builds the step for a mesh.
        slice: The slice to predict for.
        meshes: Meshes, as sizes of `axes` or as sizes by name. None for all divisions of the devices over `axes`.
        axes: Names of the mesh axes.
        rules: Maps names to values of the second argument of `build`. Each is tried on each mesh.
        budget: Time limit of the search: seconds, or text such as "5min". No compile is started that would likely
            exceed it, judging by the median so far. A compile that does exceed it is stopped (the first at twice this
            time).
        folder: Folder for `search.json` and `report.html`, rewritten after every layout. None writes no files. Raises
            ValueError if the folder has a search for another slice or with layouts that this search does not try, or
            belongs to a run, a sweep or `mode=search`.
        options: Compiler options.
        name: Title of the reports.
        tokens: Tokens in one step on all devices, for tokens per second.
        flops: Model FLOPs in one step on all devices, for MFU.
        unit: What `tokens` counts, such as "images".
        measured_s: Maps names of layouts to measured seconds per step. The median ratio of measured to predicted time
            multiplies the predictions of the other layouts.
        time_limit_s: Time limit of each compile in seconds; None for no limit.
        quiet: Whether to hide the progress lines on stderr.
    """
    work: dict[str, Any] = {"name": name, "tokens": tokens, "flops": flops, "options": options}
    work["time_limit_s"] = time_limit_s
    if isinstance(program, Run):
        settings = {"slice": slice, "meshes": meshes, "rules": rules, "budget": budget, "folder": folder}
        settings |= {"axes": None if axes == _AXES else axes, "unit": None if unit == "tokens" else unit}
        refuse_run_arguments((), {}, **settings, measured_s=measured_s, **work)
        return _search_run(program, quiet)
    if not callable(program):
        raise TypeError(f"search takes a Run, or a function that builds a step, not {describe_value(program)}.")
    target, program_work = check_program_arguments(slice, unit=unit, **work)
    from valkyrie.search.programs import ProgramSearch, parse_meshes, require_builder

    require_builder(program, rules)
    require_type(folder, str | Path | None, "folder= takes the path of a folder")
    parsed_meshes, budget_s = parse_meshes(meshes, axes, target), _parse_budget(budget)
    program_search = ProgramSearch(program, target, parsed_meshes, rules, program_work, options, time_limit_s, budget_s)
    return _search_program(program_search, None if folder is None else Path(folder), measured_s or {}, quiet)


def _search_run(run: Run, quiet: bool) -> Answer:
    from valkyrie.config.arguments import parse_run
    from valkyrie.modes.search import Config as SearchMode

    if run.config.resume is not None:
        raise ValueError(
            f"resume={run.config.resume}: search has nothing to resume. Compose a run with the settings of its model, "
            "without resume=: valkyrie.compose('model=gpt_1b', ...)."
        )
    if not isinstance(run.config.mode, SearchMode):
        flags, overrides = split_flags(run.arguments)
        model_overrides = [
            o
            for o in overrides
            if (key := split_override(o)[0]) not in ("mode", "name") and not key.startswith("mode.")
        ]
        run = parse_run([*flags, *model_overrides, "mode=search"], in_python=True)
        raise_problems(run.problems())
    from valkyrie.search.mode import find_layouts
    from valkyrie.train.screen import make_console

    outcome = find_layouts(run, stderr_console(quiet=True) if quiet else make_console())
    if outcome.status == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    if outcome.answer is None:
        raise ValueError(outcome.reason)
    if outcome.status == EXIT_REFUSED:
        raise ValueError(outcome.answer.why)
    return Answer(outcome.answer, outcome.folder.absolute())  # a notebook may change its folder


def _search_program(
    search: ProgramSearch, folder: Path | None, measured_s: Mapping[str, float | int], quiet: bool
) -> Comparison:
    target, names = search.target.describe(), tuple(search.names)
    if folder is not None:
        refuse_other_folder(folder)
        refuse_other_search(folder, target, names)
    refuse_unknown_layouts(measured_s, names)
    console, comparison = stderr_console(quiet), Comparison({}, measured_s, untried=names, target=target)
    with console.status("lowering") as status:
        for layout, predicted in search.predictions(status.update):
            results = {**comparison.results, layout: as_result(predicted)}
            untried = tuple(name for name in names if name not in results)
            comparison = dataclasses.replace(
                comparison, results=results, untried=untried, estimates=search.estimates, notes=search.notes
            )
            if folder is not None:
                comparison.write(folder)
            if console.is_terminal:
                console.print(f"{layout}: {comparison.describe(layout)}")
    if search.note:
        comparison = dataclasses.replace(comparison, notes=search.notes, estimates=search.estimates)
        console.print(f"warning: {search.note}", soft_wrap=True)
        if folder is not None and (comparison.results or not (folder / SEARCH_FILE).exists()):
            comparison.write(folder)
    return comparison


def _parse_budget(budget: str | float | int | None) -> float | int | None:
    """Convert a time budget to seconds; None stays None.

    Raises TypeError if it is neither a number nor a string, and ValueError if it is not a positive time.
    """
    if budget is None:
        return None
    require_type(budget, str | Real, 'budget= takes seconds, or a time such as "5min"')
    budget_s = parse_seconds(budget) if isinstance(budget, str) else budget
    if budget_s is None:
        raise ValueError(f'budget={budget} is not a time. Use seconds, or a time such as "90s", "5min" or "1h".')
    raise_problems(check_range("budget", budget_s, above=0))
    return budget_s
