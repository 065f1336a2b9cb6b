"""The functions of the Python API that compile programs: `predict`, `check` and `search_program`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from rich.console import Console

from valkyrie.config.run import Run
from valkyrie.hardware.platforms import get_platform
from valkyrie.hardware.position import Position
from valkyrie.hardware.target import TargetConfig
from valkyrie.parallel.slice import Slice
from valkyrie.problems import check_range, describe_value, raise_problems, require_type, suggest
from valkyrie.results import FoundLayout, Result
from valkyrie.search.comparison import Comparison, refuse_other_folder, refuse_other_search
from valkyrie.search.compile.fault import Fault
from valkyrie.search.compile.prediction import CompileStatus
from valkyrie.units import parse_seconds

if TYPE_CHECKING:
    import jax

    from valkyrie.search.compile.predict import PredictedProgram, ProgramWork
    from valkyrie.search.programs import ProgramCall


_MAX_TOKENS = 1e15
"""Maximum number of tokens in a step. It limits the width of tokens per second, which reports print with all digits."""


@overload
def predict(program: Any, *arguments: Any, slice: Slice, layouts: Mapping[str, Any], **keywords: Any) -> Comparison: ...


@overload
def predict(
    program: Run | str | Path | Any,
    *arguments: Any,
    slice: Slice | None = None,
    mesh: jax.sharding.Mesh | Mapping[str, int] | None = None,
    places: Sequence[Position] | None = None,
    options: Mapping[str, Any] | None = None,
    name: str | None = None,
    tokens: float | int | None = None,
    flops: float | int | None = None,
    unit: str = "tokens",
    time_limit_s: float | int | None = None,
    quiet: bool = False,
    **keywords: Any,
) -> Result: ...


def predict(
    program: Run | str | Path | Any,
    *arguments: Any,
    slice: Slice | None = None,
    mesh: jax.sharding.Mesh | Mapping[str, int] | None = None,
    places: Sequence[Position] | None = None,
    options: Mapping[str, Any] | None = None,
    name: str | None = None,
    tokens: float | int | None = None,
    flops: float | int | None = None,
    unit: str = "tokens",
    layouts: Mapping[str, Any] | None = None,
    measured_s: Mapping[str, float | int] | None = None,
    time_limit_s: float | int | None = None,
    quiet: bool = False,
    **keywords: Any,
) -> Result | Comparison:
    """Predict a step on a slice without the hardware: its memory, its time, and the time spent on communication.

    `program` is one of:

    - A `Run`. Its step is compiled for its target in a child process, and identical compiles come from the cache. The
      only other argument is `quiet`. The run's `mode.time_limit_s` limits the compile. For a CPU target, only memory
      and communicated bytes are predicted.
    - A jitted function with the positional and keyword arguments of a call (or `jax.ShapeDtypeStruct`s), or the result
      of its `lower` or `compile`. Requires `slice`. Shardings must use a mesh from `slice.mesh(...)`. If no argument
      has a sharding, pass that mesh as `mesh`. The function is lowered here and compiled in a child process, and
      identical compiles come from the cache. A function with Python callbacks is compiled in this process.
    - The path of a dumped compiled module, as for `valkyrie-predict`. Requires `slice` and the mesh of the module,
      such as `mesh={"data": 8, "model": 4}`.

    With `layouts`, predicts a function under several shardings, and returns a `Comparison`:
    `predict(step, layouts={"dp": (w, x), "fsdp": (w_fsdp, x)}, slice=slice)`. Each value is the positional arguments,
    or a dict with `args` and, if they differ between layouts, `kwargs`, `mesh`, `options` and `function`. A layout that
    raises an error has the status `failed`.

    Compiling for TPU slices needs libtpu (extra `tpu`) but no TPU. Raises ValueError or TypeError for illegal arguments
    or programs.

    Args:
        program: The program, as above.
        arguments: Positional arguments of the function.
        slice: The slice to predict for.
        mesh: The mesh of the program, or a dict of its axis names and sizes, in order.
        places: Positions of the mesh's devices, as in `record.positions`, or None for those of `Slice.mesh`. Only for
            a dumped module.
        options: Compiler options. Only for a function.
        name: Title of the report.
        tokens: Tokens in one step on all devices, for tokens per second.
        flops: Model FLOPs in one step on all devices, for MFU.
        unit: What `tokens` counts, such as "images".
        layouts: Maps the name of each layout to arguments of the function, as above.
        measured_s: Maps names of layouts to measured seconds per step. The median ratio of measured to predicted time
            multiplies the predictions of the other layouts.
        time_limit_s: Time limit of the compile in seconds; None for no limit. Only for a function.
        quiet: Whether to hide the progress line on stderr.
        keywords: Keyword arguments of the function.
    """
    if isinstance(program, Run):
        settings = {"slice": slice, "mesh": mesh, "places": places, "options": options, "name": name}
        settings |= {"layouts": layouts, "measured_s": measured_s, "unit": None if unit == "tokens" else unit}
        _refuse_run_arguments(arguments, keywords, **settings, tokens=tokens, flops=flops, time_limit_s=time_limit_s)
        return _predict_run(program, quiet)
    _refuse_other_programs(program)
    _require_mesh_and_places(mesh, places)
    settings = {"name": name, "tokens": tokens, "flops": flops, "options": options, "time_limit_s": time_limit_s}
    target, work = _check_program_arguments(slice, unit=unit, **settings)
    from valkyrie.search.programs import ProgramCall

    if measured_s is not None and layouts is None:
        raise ValueError("measured_s= needs layouts=: pass the measured layouts and those to correct by them.")
    _refuse_misspelt_keywords(program, arguments, keywords)
    if isinstance(program, str | Path):
        if layouts is not None:
            raise ValueError("layouts= takes arguments of a function. Predict each dumped module by itself.")
        return _predict_module_file(Path(program), target, mesh, places, work)
    call, console = ProgramCall(program, arguments, keywords, mesh, options), _stderr_console(quiet)
    if layouts is not None:
        return _predict_layouts(call, layouts, measured_s, target, work, time_limit_s, console)
    return _predict_function(call, target, work, time_limit_s, console)


def _require_mesh_and_places(mesh: object, places: Sequence[Position] | None) -> None:
    """Raise TypeError if one of these arguments of `predict` has the wrong type."""
    from valkyrie.search.programs import require_mesh

    require_mesh(mesh, "mesh=")
    usage = "places= takes a list of positions, such as result.record.positions"
    require_type(places, list | tuple | None, usage)
    for place in places or ():
        require_type(place, Position, usage)


def _refuse_misspelt_keywords(program: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> None:
    """Raise TypeError for a keyword that neither `predict` nor the function takes.

    Also raises TypeError for positional arguments of a dumped module, which already has its shapes. Does not check the
    keywords of lowered and compiled programs, because their signatures are unknown.
    """
    import inspect

    if isinstance(program, str | Path) and arguments:
        raise TypeError("predict takes no arguments for a dumped module, which already has its shapes. Leave them out.")
    try:
        parameters = {} if isinstance(program, str | Path) else inspect.signature(program).parameters
    except (TypeError, ValueError):  # a lowered or compiled program
        return
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    predict_parameters = inspect.signature(predict).parameters.values()
    names = [parameter.name for parameter in predict_parameters if parameter.kind is inspect.Parameter.KEYWORD_ONLY]
    if key := next((key for key in keywords if key not in parameters), None):
        nearest = suggest(key, names)
        hint = f"Did you mean {nearest}=?" if nearest else f"predict takes {', '.join(names)}."
        raise TypeError(f"{key}= is not an argument of predict or of the program. {hint}")


def _predict_module_file(
    path: Path,
    target: Slice,
    mesh: jax.sharding.Mesh | Mapping[str, int] | None,
    places: Sequence[Position] | None,
    work: ProgramWork,
) -> Result:
    from valkyrie.search.compile.dumped import predict_file

    if not path.exists():
        raise ValueError(f"{path} does not exist. Pass the path of a dumped module.")
    axes = mesh if mesh is None or isinstance(mesh, Mapping) else dict(mesh.shape)
    if not axes:
        raise ValueError('Name the mesh axes of this module, in order: mesh={"data": 8, "model": 4}.')
    return _as_result(predict_file(path, target, axes, places=places, work=work))


def _predict_function(
    call: ProgramCall, target: Slice, work: ProgramWork, time_limit_s: float | int | None, console: Console
) -> Result:
    from valkyrie.search.compile.predict import predict_function

    mesh = target.mesh(list(call.mesh.values()), list(call.mesh)) if isinstance(call.mesh, Mapping) else call.mesh
    with console.status("lowering") as status:
        predicted = predict_function(
            *(call.function, call.arguments, call.keywords, target),
            mesh=mesh,
            options=call.options,
            work=work,
            time_limit_s=time_limit_s,
            progress=status.update,
        )
    return _as_result(predicted)


def _predict_layouts(
    default_call: ProgramCall,
    layouts: Mapping[str, Any],
    measured_s: Mapping[str, float | int] | None,
    target: Slice,
    work: ProgramWork,
    time_limit_s: float | int | None,
    console: Console,
) -> Comparison:
    """Predict a function under several layouts.

    `default_call` has the function, mesh and options for layouts that do not set their own, and keywords for all
    layouts. If a layout sets the same keyword, its value is used. Raises ValueError if `default_call` has positional
    arguments.
    """
    from valkyrie.search.programs import parse_layouts

    if default_call.arguments:
        raise ValueError('With layouts=, pass the arguments there: layouts={"dp": (w, x)}.')
    calls = parse_layouts(default_call.function, layouts, default_call)
    _refuse_unknown_layouts(measured_s, calls)
    return Comparison(_predict_calls(calls, target, work, time_limit_s, console), measured_s or {})


def _predict_calls(
    calls: Mapping[str, ProgramCall],
    target: Slice,
    work: ProgramWork,
    time_limit_s: float | int | None,
    console: Console,
) -> dict[str, Result]:
    """Predict the call of each layout. `calls` and the returned results are keyed by layout name."""
    from valkyrie.search.programs import predict_call

    results = {}
    with console.status("lowering") as status:
        for number, (layout, call) in enumerate(calls.items(), 1):
            progress_prefix = f"{number} of {len(calls)}: "
            axes = call.mesh if isinstance(call.mesh, Mapping) else dict(call.mesh.shape) if call.mesh else {}
            predicted_program = predict_call(
                layout,
                lambda call=call: call,
                *(target, work, axes, time_limit_s),
                lambda line, progress_prefix=progress_prefix: status.update(progress_prefix + line),
            )
            results[layout] = _as_result(predicted_program)
    return results


def search_program(
    build: Callable[..., Any],
    *,
    slice: Slice,
    meshes: Sequence[Sequence[int] | Mapping[str, int]] | None = None,
    axes: Sequence[str] = ("data", "model"),
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
) -> Comparison:
    """Search the meshes and shardings of any JAX program: compile each for a slice, and rank them by step time.

    `build(mesh, rule)` returns `(jitted, arguments)` or `(jitted, arguments, keywords)`, as for `predict`; without
    `rules`, it is `build(mesh)`. If it raises an error, that layout has the status `failed` and the search continues.
    The name of a layout has its mesh and rule: `data=2,model=4 fsdp`. Compiled programs come from the cache, so the
    same call resumes a search that ended or was interrupted. Raises ValueError or TypeError for illegal arguments.

    Args:
        build: Builds the step for a mesh.
        slice: The slice to predict for.
        meshes: Meshes, as sizes of `axes` or as sizes by name. None for all divisions of the devices over `axes`.
        axes: Names of the mesh axes.
        rules: Maps names to values of the second argument of `build`. Each is tried on each mesh.
        budget: Time limit of the search: seconds, or text such as "5min". No compile is started that would likely
            exceed it, judging by the longest so far. A compile that does exceed it is stopped (the first at twice this
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
    from valkyrie.search.programs import ProgramSearch, parse_meshes, require_builder

    if not callable(build):
        raise TypeError(f"search_program takes a function that builds a step, not {describe_value(build)}.")
    target, work = _check_program_arguments(
        slice, name=name, tokens=tokens, flops=flops, unit=unit, options=options, time_limit_s=time_limit_s
    )
    if rules is not None:
        require_type(rules, Mapping, 'rules= takes a dict of second arguments of build, such as {"fsdp": FSDP}')
        if not rules:
            raise ValueError("rules= is empty. Leave it out if build takes only the mesh.")
    require_builder(build, rules)
    require_type(folder, str | Path | None, "folder= takes the path of a folder")
    if folder is not None:
        refuse_other_folder(Path(folder))
    parsed_meshes, budget_s = parse_meshes(meshes, axes, target), _parse_budget(budget)
    search = ProgramSearch(build, target, parsed_meshes, rules, work, options, time_limit_s, budget_s)
    if folder is not None:
        refuse_other_search(Path(folder), target.describe(), search.names)
    _refuse_unknown_layouts(measured_s, search.names)
    console, comparison = _stderr_console(quiet), Comparison({}, measured_s or {})
    with console.status("lowering") as status:
        for layout, predicted in search.predictions(status.update):
            comparison = dataclasses.replace(comparison, results={**comparison.results, layout: _as_result(predicted)})
            if folder is not None:
                comparison.write(Path(folder))
            if console.is_terminal:
                console.print(f"{layout}: {comparison.describe(layout)}")
    if search.note:
        comparison = dataclasses.replace(comparison, notes=(search.note,))
        if folder is not None:
            comparison.write(Path(folder))
    return comparison


def _stderr_console(quiet: bool) -> Console:
    return Console(stderr=True, quiet=quiet, highlight=False, markup=False, emoji=False)


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


def _check_program_arguments(slice: Slice | None, *, unit: str, **settings: Any) -> tuple[Slice, ProgramWork]:
    """Check arguments of `predict` or `search_program`, and return the slice and a `ProgramWork`.

    `settings` has `name`, `tokens`, `flops`, `options` and `time_limit_s`. The `ProgramWork` consists of `name`,
    `tokens`, `flops` and `unit`. Raises TypeError for a wrong type, and ValueError for an illegal value or a missing or
    non-TPU slice.
    """
    from valkyrie.search.compile.predict import ProgramWork

    if slice is None:
        raise ValueError('Name the slice to predict for: slice=valkyrie.slice("v5p-128").')
    require_type(slice, TargetConfig, 'slice= takes a slice, such as valkyrie.slice("v5p-128")')
    for key, kind, description in (
        ("tokens", Real, "a number"),
        ("flops", Real, "a number"),
        ("options", Mapping, "a dictionary of compiler options"),
        ("name", str, "a string"),
        ("time_limit_s", Real, "a number of seconds"),
    ):
        if settings[key] is not None:
            require_type(settings[key], kind, f"{key}= takes {description}")
    require_type(unit, str, 'unit= takes a string that says what tokens= counts, such as "images"')
    if not unit.strip() or unit != "tokens" and settings["tokens"] is None:
        raise ValueError(f'unit={unit!r} must name what tokens= counts. Pass both: tokens=512, unit="images".')
    raise_problems(
        [problem for key in ("tokens", "flops", "time_limit_s") for problem in check_range(key, settings[key], above=0)]
    )
    if (tokens := settings["tokens"]) is not None and tokens > _MAX_TOKENS:
        raise ValueError(f"tokens={tokens:g} is too large. Give the tokens of one step.")
    target = Slice.from_target(slice)
    if not get_platform(target.platform).compiles_without_devices:
        raise ValueError(f"slice={target.name} is not a TPU slice. Only TPU programs compile without a device.")
    return target, ProgramWork(settings["name"], settings["tokens"], settings["flops"], unit)


def _refuse_unknown_layouts(measured_s: Mapping[str, float | int] | None, layouts: Collection[str]) -> None:
    """Check `measured_s`, which maps names of layouts to measured seconds per step.

    Raises ValueError for a name that is not in `layouts` or a time that is not positive, and TypeError for a wrong
    type.
    """
    if measured_s is None:
        return
    usage = 'measured_s= takes measured seconds per step by layout name, such as {"dp": 0.12}'
    require_type(measured_s, Mapping, usage)
    for layout, step_s in measured_s.items():
        if layout not in layouts:
            raise ValueError(f'measured_s["{layout}"]: there is no such layout. Use {", ".join(layouts)}.')
        require_type(step_s, Real, usage)
        raise_problems(check_range(f'measured_s["{layout}"]', step_s, above=0))


def _as_result(predicted_program: PredictedProgram) -> Result:
    return Result(predicted_program.prediction, predicted_program.replay)


def check(function: Any, *arguments: Any, slice: Slice, **keywords: Any) -> tuple[Fault, ...]:
    """Return the faults in the sharding of a jitted or lowered function on a slice, the most expensive first.

    A fault has a code, a text, a remedy, the source line, and its cost in seconds and bytes. `assert not
    valkyrie.check(step, *shapes, slice=slice)` is a test that a sharding has no known fault. Takes the arguments of
    `predict` for a function, except `layouts`, and raises the same errors. Also raises RuntimeError if the compile
    fails, exceeds `time_limit_s` or leaves no module, and TypeError for a `Run`, a compiled function or a dumped
    module.
    """
    import jax

    if isinstance(function, Run | str | Path | jax.stages.Compiled):
        raise TypeError(
            f"check takes a jitted or lowered function, not a {type(function).__name__}: it cannot read shardings from "
            "anything else. Use predict for time and memory."
        )
    if "layouts" in keywords:
        raise TypeError(
            "layouts= is an argument of predict. Check each layout by itself: check(step, w, x, slice=slice)."
        )
    result = predict(function, *arguments, slice=slice, **keywords)
    if result.status in ("failed", "timeout"):
        raise RuntimeError(f"The program was not checked, because it was not compiled: {result.reason}")
    if result.status == "does_not_fit" and result.replay is None:
        raise RuntimeError(f"The program was not checked, because it does not fit, and has no module: {result.reason}")
    return result.faults


def _predict_run(run: Run, quiet: bool) -> Result:
    from valkyrie.search.modes import compile_and_summarise

    _, prediction, replay = compile_and_summarise(run, _stderr_console(quiet))
    if prediction.status is CompileStatus.refused:
        raise ValueError(prediction.reason)
    return Result(prediction, replay)


def _refuse_other_programs(program: object) -> None:
    """Raise TypeError or ValueError if `predict` gets something that is easily mistaken for a program."""
    usage = "predict takes a Run, a jitted, lowered or compiled function, or the path of a dumped module"
    if isinstance(program, FoundLayout):
        raise TypeError(f"{usage}, not a FoundLayout. Pass its run: answer.run(row).")
    if isinstance(program, bytes | bytearray | list | tuple | dict):
        raise TypeError(f"{usage}, not a {type(program).__name__}.")
    if isinstance(program, str) and program.lstrip().startswith("HloModule"):
        raise ValueError(f"{usage}. This is the text of a module: save it to a file, or pass the compiled function.")
    if isinstance(program, str) and "=" in program and not Path(program).exists():
        raise ValueError(f'{usage}. Compose a run first: valkyrie.predict(valkyrie.compose("{program}", ...)).')


def _refuse_run_arguments(arguments: Sequence[Any], keywords: Mapping[str, Any], **options: Any) -> None:
    """Raise ValueError for arguments of `predict` that a run already sets."""
    redundant_names = [*keywords, *(key for key, value in options.items() if value is not None)]
    if arguments or redundant_names:
        raise ValueError(
            f"A run already sets its slice, mesh and shapes. Leave out "
            f"{', '.join(redundant_names) or 'the other arguments'}, or "
            "compose the run with other values."
        )
