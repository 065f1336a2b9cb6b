"""The functions of the Python API that compile programs: `predict` and `check`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from rich.console import Console

from valkyrie.config.run import Run
from valkyrie.hardware.platforms import get_platform, replayed_devices
from valkyrie.hardware.position import Position
from valkyrie.hardware.target import TargetConfig
from valkyrie.parallel.slice import Slice
from valkyrie.problems import check_range, raise_problems, require_type, suggest
from valkyrie.results import FoundLayout, Result
from valkyrie.search.comparison import Comparison
from valkyrie.search.compile.fault import Fault
from valkyrie.search.compile.prediction import CompileStatus

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

    Compiling needs libtpu (extra `tpu`) or XLA for GPUs (extra `gpu-compile`), but no device. Raises ValueError or
    TypeError for illegal arguments or programs.

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
        refuse_run_arguments(arguments, keywords, **settings, tokens=tokens, flops=flops, time_limit_s=time_limit_s)
        return _predict_run(program, quiet)
    _refuse_other_programs(program)
    _require_mesh_and_places(mesh, places)
    settings = {"name": name, "tokens": tokens, "flops": flops, "options": options, "time_limit_s": time_limit_s}
    target, work = check_program_arguments(slice, unit=unit, **settings)
    from valkyrie.search.programs import ProgramCall

    if measured_s is not None and layouts is None:
        raise ValueError("measured_s= needs layouts=: pass the measured layouts and those to correct by them.")
    _refuse_misspelt_keywords(program, arguments, keywords)
    if isinstance(program, str | Path):
        if layouts is not None:
            raise ValueError("layouts= takes arguments of a function. Predict each dumped module by itself.")
        return _predict_module_file(Path(program), target, mesh, places, work)
    call, console = ProgramCall(program, arguments, keywords, mesh, options), stderr_console(quiet)
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
    return as_result(predict_file(path, target, axes, places=places, work=work))


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
    return as_result(predicted)


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
    refuse_unknown_layouts(measured_s, calls)
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
            results[layout] = as_result(predicted_program)
    return results


def stderr_console(quiet: bool) -> Console:
    """Return a console that prints to stderr, or nothing if `quiet`."""
    return Console(stderr=True, quiet=quiet, highlight=False, markup=False, emoji=False)


def check_program_arguments(slice: Slice | None, *, unit: str, **settings: Any) -> tuple[Slice, ProgramWork]:
    """Check arguments of `predict` or `search`, and return the slice and a `ProgramWork`.

    `settings` has `name`, `tokens`, `flops`, `options` and `time_limit_s`. The `ProgramWork` consists of `name`,
    `tokens`, `flops` and `unit`. Raises TypeError for a wrong type, and ValueError for an illegal value, a missing
    slice, or one that cannot be compiled for without its devices.
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
        kinds = " or ".join(replayed_devices())
        raise ValueError(f"slice={target.name} has no compiler that works without its devices. Use {kinds}.")
    return target, ProgramWork(settings["name"], settings["tokens"], settings["flops"], unit)


def refuse_unknown_layouts(measured_s: Mapping[str, float | int] | None, layouts: Collection[str]) -> None:
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


def as_result(predicted_program: PredictedProgram) -> Result:
    """Return the prediction of a program as a `Result` of the API."""
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

    _, prediction, replay = compile_and_summarise(run, stderr_console(quiet))
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


def refuse_run_arguments(arguments: Sequence[Any], keywords: Mapping[str, Any], **options: Any) -> None:
    """Raise ValueError for arguments that a run already sets."""
    redundant_names = [*keywords, *(key for key, value in options.items() if value is not None)]
    if arguments or redundant_names:
        raise ValueError(
            f"A run already sets its slice, mesh and shapes. Leave out "
            f"{', '.join(redundant_names) or 'the other arguments'}, or "
            "compose the run with other values."
        )
