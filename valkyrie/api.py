"""The Python API, which offers the commands as functions with return values.

Import the functions from `valkyrie`: `valkyrie.fit`, and `valkyrie.slice` for `named_slice`. They do not exit the
process, do not install signal handlers, and print nothing with `quiet=True`. Wrong values raise ValueError with the
message that the command would print, and arguments of a wrong type raise TypeError. Only functions that need JAX import
it, so composing runs and reading trials work without a device.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from rich.console import Console

from valkyrie.config.run import Run, RunConfig
from valkyrie.hardware.platforms import get_platform
from valkyrie.hardware.position import Position
from valkyrie.hardware.target import TargetConfig
from valkyrie.parallel.slice import Slice
from valkyrie.paths import write_atomic
from valkyrie.problems import check_range, refuse, require_type
from valkyrie.processes.child import module_command, run_streamed
from valkyrie.processes.ending import INTERRUPTED
from valkyrie.results import Answer, Explanation, FoundLayout, Result, Trained, TrialRow, Trials
from valkyrie.runs.folder import key_value, key_values, split_flags
from valkyrie.search.comparison import Comparison
from valkyrie.search.compile.prediction import CompileStatus, Finding, Prediction
from valkyrie.units import parse_seconds

if TYPE_CHECKING:
    import jax

    from valkyrie.search.compile.predict import PredictedProgram, ProgramWork
    from valkyrie.train.trained_model import TrainedModel

__all__ = [
    "Answer",
    "Comparison",
    "Explanation",
    "Finding",
    "FoundLayout",
    "Result",
    "Run",
    "Slice",
    "Trained",
    "TrialRow",
    "Trials",
    "check",
    "compose",
    "evaluate",
    "explain",
    "fit",
    "from_hf",
    "generate",
    "load",
    "load_model",
    "measure",
    "named_slice",
    "predict",
    "run_sweep",
    "search_layouts",
    "search_program",
    "show",
    "to_hf",
    "trials",
    "write_report",
]


def compose(*overrides: str, config_dir: str | Path | None = None) -> Run:
    """Compose a run from arguments of `valkyrie-train`: `compose("model=gpt_tiny", "mesh=2x2x2")`.

    `config_dir` is a folder with your configs and modules, like `--config-dir`. Raises ValueError with everything that
    is wrong with the run: unknown names with the valid ones, and all problems of the layout.
    """
    from valkyrie.config.arguments import parse_run

    usage = 'compose takes strings, such as compose("model=gpt_tiny", "mesh=2x2x2")'
    for override in overrides:
        require_type(override, str, usage)
    return _refuse_illegal(parse_run([*_config_flags(config_dir), *overrides], in_python=True))


def load(folder: str | Path, *overrides: str) -> Run:
    """Load a run from the `run.yaml` of a run folder, with some keys overridden: `load(folder, "steps=400")`.

    `folder` is a path, the name of a run under `runs`, or `latest`, as for `resume=`.

    `fit` resumes it from its newest checkpoint. Another choice of a group (`mesh=4x2x1`) replaces that group, and all
    other settings keep their saved values, as with `resume=`. Raises ValueError if the file is missing or damaged, and
    for the same reasons as `compose`.
    """
    from valkyrie.config.arguments import load_run

    for override in overrides:
        require_type(override, str, 'load takes overrides as strings, such as load(folder, "steps=400")')
    runs = Path(key_values(overrides).get("runs", RunConfig.runs))
    return _refuse_illegal(load_run(_find_folder("load", folder, runs), overrides))


def _find_folder(function: str, folder: str | Path, runs: Path) -> Path:
    """Return the path of a run folder, given as a path, the name of a run in `runs`, or `latest`."""
    from valkyrie.runs.folder import find_run

    require_type(folder, str | Path, f"{function} takes the path of a run folder")
    path = Path(folder)
    if not path.exists() and len(path.parts) == 1:
        return runs / path if (runs / path).is_dir() else find_run(runs, str(folder), key="")
    return path


def named_slice(name: str, *, slices: int = 1) -> Slice:
    """Return the slice with this name, such as `v4-64`, `v5litepod-8` or `v4:4x8x8`.

    It has the chip, the number of chips and hosts, the topology and prices. `slice.mesh((4, 16), ("data", "model"))`
    returns a mesh to compile for. `slices` is the number of slices, connected by the data-centre network. Raises
    ValueError for an unknown name, with the nearest legal slices.
    """
    from valkyrie.config.choices import get_target

    require_type(name, str, 'slice takes a name, such as slice("v5e-8")')
    require_type(slices, int, "slices= takes a whole number")
    target = dataclasses.replace(get_target(name), slices=slices)
    refuse(target.problems())
    return Slice.from_target(target)


def show(run: Run) -> None:
    """Print the sharding and bytes of parameters, the roles of mesh axes, and the expected memory. Needs no device."""
    _require_run("show", run)
    from valkyrie.train.screen import make_console
    from valkyrie.train.show import show_run

    show_run(run, make_console())


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
    """Predict a step on a slice without the hardware: whether it fits, its time, and the time spent waiting.

    `program` is one of:

    - A `Run`. Its step is compiled for its target in a child process, and identical compiles come from the cache. It
      takes no other arguments except `quiet`, and its time limit is `mode.time_limit_s`. For a CPU target, only memory
      and communicated bytes are predicted.
    - A jitted function with the positional and keyword arguments of a call (or `jax.ShapeDtypeStruct`s), or the result
      of its `lower` or `compile`. Requires `slice`. Shardings must use a mesh from `slice.mesh(...)`. If no argument
      has a sharding, pass that mesh as `mesh`. The function is lowered here and compiled in a child process, and
      identical compiles come from the cache. One with Python callbacks is compiled in this process.
    - The path of a dumped compiled module, as for `valkyrie-predict`. Requires `slice` and the mesh of the module,
      such as `mesh={"data": 8, "model": 4}`.

    With `layouts`, predicts a function under several shardings, and returns a `Comparison`:
    `predict(step, layouts={"dp": (w, x), "fsdp": (w_fsdp, x)}, slice=slice)`. Each value is the positional arguments,
    or a dict with `args` and, if they differ between layouts, `kwargs`, `mesh`, `options` and `function`. A layout that
    raises an error has the status `failed`.

    Compiling for TPU slices needs libtpu (extra `tpu`) but no TPU. Raises ValueError for illegal arguments or programs.

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
        layouts: Arguments of the function by name of the layout, as above.
        measured_s: Measured seconds per step by name of a layout. The median ratio of measured to predicted time
            multiplies the predictions of the other layouts.
        time_limit_s: Time limit of the compile in seconds; None for no limit. Ctrl-C ends the compile at once. Only for
            a function.
        quiet: Whether to hide the progress, a line on stderr.
        keywords: Keyword arguments of the function.
    """
    if isinstance(program, Run):
        settings = {"slice": slice, "mesh": mesh, "places": places, "options": options, "name": name}
        settings |= {"layouts": layouts, "measured_s": measured_s, "time_limit_s": time_limit_s}
        settings |= {"unit": None if unit == "tokens" else unit}
        _refuse_run_arguments(arguments, keywords, **settings, tokens=tokens, flops=flops)
        return _predict_run(program, quiet)
    from valkyrie.search.compile.predict import predict_file, predict_function
    from valkyrie.search.programs import ProgramCall, parse_layouts, predict_call

    _refuse_other_programs(program)
    if places is not None:
        require_type(places, Sequence, "places= takes a list of positions, such as record.positions")
    target, work = _program_work(
        slice, name=name, tokens=tokens, flops=flops, unit=unit, options=options, time_limit_s=time_limit_s
    )
    if measured_s is not None and layouts is None:
        raise ValueError("measured_s= corrects the predictions of other layouts. Pass them too, as layouts=.")
    if isinstance(program, str | Path):
        if layouts is not None:
            raise ValueError("layouts= takes arguments of a function. Predict each dumped module by itself.")
        axes = mesh if mesh is None or isinstance(mesh, Mapping) else dict(mesh.shape)
        if not axes:
            raise ValueError('Name the mesh axes of this module, in order: mesh={"data": 8, "model": 4}.')
        predicted = predict_file(Path(program), target, axes, places=places, work=work)
        return Result(predicted.prediction, predicted.replay)
    console = Console(stderr=True, quiet=quiet)
    if layouts is not None:
        if arguments:
            raise ValueError('With layouts=, pass the arguments there: layouts={"dp": (w, x)}.')
        calls = parse_layouts(program, layouts, ProgramCall(program, (), keywords, mesh, options))
        results = {}
        _refuse_unknown_layouts(measured_s, calls)
        with console.status("lowering") as status:
            for number, (layout, call) in enumerate(calls.items(), 1):
                count = f"{number} of {len(calls)}: "
                axes = call.mesh if isinstance(call.mesh, Mapping) else dict(call.mesh.shape) if call.mesh else {}
                results[layout] = _as_result(
                    predict_call(
                        layout,
                        lambda call=call: call,
                        *(target, work, axes, time_limit_s),
                        lambda line, count=count: status.update(count + line),
                    )
                )
        return Comparison(results, measured_s or {})
    if isinstance(mesh, Mapping):
        mesh = target.mesh(list(mesh.values()), list(mesh))
    with console.status("lowering") as status:
        predicted = predict_function(
            *(program, arguments, keywords, target),
            mesh=mesh,
            options=options,
            work=work,
            time_limit_s=time_limit_s,
            progress=status.update,
        )
    return _as_result(predicted)


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
    Layouts are named `data=2,model=4 fsdp`. Compiled programs come from the cache, so the same call resumes a search
    that ended or was interrupted. Raises ValueError or TypeError for illegal arguments.

    Args:
        build: Builds the step for a mesh.
        slice: The slice to predict for.
        meshes: Meshes, as sizes of `axes` or as sizes by name. None for all divisions of the devices over `axes`.
        axes: Names of the mesh axes.
        rules: Second arguments of `build` by name, such as partition rules. Any values.
        budget: Time limit of the search, in seconds or such as "5min". No compile is started that would likely exceed
            it, judging by the longest so far.
        folder: Folder to write `search.json` and the page `report.html` to, after every layout.
        options: Compiler options.
        name: Title of the reports.
        tokens: Tokens in one step on all devices, for tokens per second.
        flops: Model FLOPs in one step on all devices, for MFU.
        unit: What `tokens` counts, such as "images".
        measured_s: Measured seconds per step by name of a layout. The median ratio of measured to predicted time
            multiplies the predictions of the other layouts.
        time_limit_s: Time limit of each compile in seconds; None for no limit.
        quiet: Whether to hide the progress, lines on stderr.
    """
    from valkyrie.search.programs import ProgramSearch, parse_meshes

    if not callable(build):
        raise TypeError(f"search_program takes a function that builds the step for a mesh, not {build!r}.")
    target, work = _program_work(
        slice, name=name, tokens=tokens, flops=flops, unit=unit, options=options, time_limit_s=time_limit_s
    )
    if rules is not None:
        require_type(rules, Mapping, 'rules= takes the second arguments of build by name, such as {"fsdp": FSDP}')
        if not rules:
            raise ValueError("rules= is empty. Leave it out if build takes only the mesh.")
    require_type(folder, str | Path | None, "folder= takes the path of a folder")
    budget_s = parse_seconds(budget) if isinstance(budget, str) else budget
    if budget is not None:
        require_type(budget, str | Real, 'budget= takes seconds, or a time such as "5min"')
        if budget_s is None:
            raise ValueError(f'budget={budget} is not a time. Use seconds, or a time such as "90s", "5min" or "1h".')
        refuse(check_range("budget", budget_s, above=0))
    search = ProgramSearch(
        build, target, parse_meshes(meshes, axes, target), rules, work, options, time_limit_s, budget_s
    )
    _refuse_unknown_layouts(measured_s, search.names)
    console, comparison = Console(stderr=True, quiet=quiet), Comparison({}, measured_s or {})
    with console.status("lowering") as status:
        for layout, predicted in search.predictions(status.update):
            comparison = dataclasses.replace(comparison, results={**comparison.results, layout: _as_result(predicted)})
            if folder is not None:
                comparison.save(folder)
            if console.is_terminal:
                console.print(f"{layout}: {comparison.describe(layout)}", markup=False, highlight=False)
    if search.note:
        comparison = dataclasses.replace(comparison, notes=(search.note,))
        if folder is not None:
            comparison.save(folder)
    return comparison


def _program_work(slice: Slice | None, *, unit: str, **settings: Any) -> tuple[Slice, ProgramWork]:
    """Check the settings of a prediction of any program. Returns the slice, and what the program does in a step."""
    from valkyrie.search.compile.predict import ProgramWork

    if slice is None:
        raise ValueError('Name the slice to predict for: slice=valkyrie.slice("v5p-128").')
    require_type(slice, TargetConfig, 'slice= takes a slice, such as valkyrie.slice("v5p-128")')
    for key, kind, takes in (
        ("tokens", Real, "a number"),
        ("flops", Real, "a number"),
        ("options", Mapping, "a dictionary of compiler options"),
        ("name", str, "a string"),
        ("time_limit_s", Real, "a number of seconds"),
    ):
        if settings[key] is not None:
            require_type(settings[key], kind, f"{key}= takes {takes}")
    require_type(unit, str, 'unit= takes what tokens= counts, such as "images"')
    if not unit.strip() or unit != "tokens" and settings["tokens"] is None:
        raise ValueError(f'unit={unit!r} names what tokens= counts: tokens=512, unit="images".')
    refuse(
        [problem for key in ("tokens", "flops", "time_limit_s") for problem in check_range(key, settings[key], above=0)]
    )
    target = Slice.from_target(slice)
    if not get_platform(target.platform).compiles_without_devices:
        raise ValueError(f"slice={target.name} is not a TPU slice. Only TPU programs compile without a device.")
    return target, ProgramWork(settings["name"], settings["tokens"], settings["flops"], unit)


def _refuse_unknown_layouts(measured_s: Mapping[str, float | int] | None, layouts: Collection[str]) -> None:
    """Raise ValueError or TypeError if `measured_s` has other names than the layouts, or values that are no times."""
    if measured_s is None:
        return
    usage = "measured_s= takes measured seconds by name of a layout"
    require_type(measured_s, Mapping, usage)
    for layout, seconds in measured_s.items():
        if layout not in layouts:
            raise ValueError(f'measured_s["{layout}"]: there is no such layout. Use {", ".join(layouts)}.')
        require_type(seconds, Real, usage)
        refuse(check_range(f'measured_s["{layout}"]', seconds, above=0))


def _as_result(predicted: PredictedProgram) -> Result:
    return Result(predicted.prediction, predicted.replay)


def check(function: Any, *arguments: Any, slice: Slice, **keywords: Any) -> tuple[Finding, ...]:
    """Return the faults in the sharding of a jitted or lowered function on a slice, the most expensive first.

    A finding has a code, a text, a remedy, the source line, and its cost in seconds and bytes. `assert not
    valkyrie.check(step, *shapes, slice=slice)` is a test that a sharding has no known fault. Takes the arguments of
    `predict`, and raises the same errors. Raises RuntimeError if the compile fails.
    """
    result = predict(function, *arguments, slice=slice, **keywords)
    if result.status in ("failed", "timeout"):
        raise RuntimeError(f"The program was not checked, because it was not compiled: {result.reason}")
    return result.findings


def _predict_run(run: Run, quiet: bool) -> Result:
    from valkyrie.search.modes import compile_and_summarise

    _, prediction, replay = compile_and_summarise(run, Console(stderr=True, quiet=quiet))
    if prediction.status is CompileStatus.refused:
        raise ValueError(prediction.reason)
    return Result(prediction, replay)


def _refuse_other_programs(program: object) -> None:
    """Raise TypeError or ValueError if `predict` gets something that is easily mistaken for a program."""
    takes = "predict takes a Run, a jitted, lowered or compiled function, or the path of a dumped module"
    if isinstance(program, bytes | bytearray | list | tuple | dict):
        raise TypeError(f"{takes}, not a {type(program).__name__}.")
    if isinstance(program, str) and program.lstrip().startswith("HloModule"):
        raise ValueError(f"{takes}. This is the text of a module: save it to a file, or pass the compiled function.")
    if isinstance(program, str) and "=" in program and not Path(program).exists():
        raise ValueError(f'{takes}. Compose a run first: valkyrie.predict(valkyrie.compose("{program}", ...)).')


def _refuse_run_arguments(arguments: Sequence[Any], keywords: Mapping[str, Any], **options: Any) -> None:
    """Raise ValueError for arguments of `predict` that a run already sets."""
    redundant = [*keywords, *(key for key, value in options.items() if value is not None)]
    if arguments or redundant:
        raise ValueError(
            f"A run already sets its slice, mesh and shapes. Leave out "
            f"{', '.join(redundant) or 'the other arguments'}, or "
            "compose the run with other values."
        )


def measure(run: Run, *, quiet: bool = False) -> Result:
    """Time the step of a run on the devices of this process. Raises ValueError if they do not match the target.

    The number of simulated devices is fixed when JAX starts. A mesh with more devices needs a new process.
    """
    _require_run("measure", run)
    from valkyrie.train.devices import prepare_devices

    devices, console = prepare_devices(run), _console(quiet)
    from valkyrie.search.measure.measure import measure as time_step

    with console.status("compiling and timing the step"):
        return Result(time_step(run, devices))


def search_layouts(run: Run, *, quiet: bool = False) -> Answer:
    """Find the fastest layout of a run's model on its target: estimate all, compile the best, measure them if possible.

    The settings of the search are those of the run, as on the command line: `compose("model=gpt_1b", "target=v4-64",
    "mode=search", "budget=2min", "mode.compiles=4")`. A run of another mode is searched with default settings, and its
    `name` is not used. Settings of the layout that the run sets (`partition=fsdp`) are fixed, the others vary.

    The folder of the search keeps every compile and measurement, so that a later search with the same model and target
    continues there. Interrupting it raises KeyboardInterrupt and keeps the answer so far in `search.json`. Compiles and
    measurements run in child processes, which need the devices: on a TPU or GPU, search before this process uses JAX.
    Raises ValueError if no layout fits, with the slice that is large enough.
    """
    from valkyrie.modes.search import Config as SearchMode

    if callable(run):
        raise TypeError("search_layouts takes a Run. For a function that builds a step, use search_program.")
    _require_run("search_layouts", run)
    if run.config.resume is not None:
        raise ValueError(
            "search_layouts has nothing to resume. Compose the model of the run: valkyrie.compose('model=gpt_1b', ...)."
        )
    if not isinstance(run.config.mode, SearchMode):
        flags, overrides = split_flags(run.arguments)
        kept = [
            o for o in overrides if (key := key_value(o)[0]) not in ("mode", "name") and not key.startswith("mode.")
        ]
        run = compose(*flags, *kept, "mode=search")
    from valkyrie.search.mode import find_layouts

    found = find_layouts(run, _console(quiet))
    if found.status == INTERRUPTED:
        raise KeyboardInterrupt
    if found.answer is None:
        raise ValueError(found.reason)
    return Answer(found.answer, found.folder)


def explain(first: Run | Result | str | Path, second: Run | Result | str | Path, *, quiet: bool = False) -> Explanation:
    """Explain why one of two layouts of a model is faster: what each waits for, recomputes and saves.

    Each layout is a `Run`, which is compiled for its target, a `Result` of `predict`, or the run folder of a
    `mode=compile`. Raises ValueError if they cannot be compared, before compiling anything.
    """
    from valkyrie.search.explain.mode import explain as explain_layouts

    takes = "takes a Run, a Result of predict, or the path of a folder with a compile.json"
    layouts: list[Run | Path | Prediction] = []
    for key, layout in (("first", first), ("second", second)):
        layout = layout.record if isinstance(layout, Result) else Path(layout) if isinstance(layout, str) else layout
        require_type(layout, Run | Path | Prediction, f"{key}= {takes}")
        if isinstance(layout, Path) and not layout.is_dir():
            layout = Path(RunConfig.runs) / layout
            if not layout.is_dir():
                raise ValueError(
                    f"{key}: {layout.name} is no run folder. Pass one that mode=compile has made, or a Run."
                )
        layouts.append(layout)  # pyright: ignore[reportArgumentType]
    return Explanation(explain_layouts(layouts[0], layouts[1], _console(quiet)))


def fit(run: Run, *, quiet: bool = False) -> Trained:
    """Train a run in its run folder, like `mode=train`, but without printing a sample.

    A run with `resume=` or with the `name=` of an earlier run resumes from its newest checkpoint. Interrupting it (a
    notebook's stop button) raises KeyboardInterrupt and keeps the checkpoints saved so far. Raises ValueError if
    devices, data or checkpoint do not match the run, and `valkyrie.train.callbacks.DivergedError` if the loss is no
    longer finite.
    """
    _require_run("fit", run)
    from valkyrie.runs.folder import run_folder
    from valkyrie.train.prepare import prepare_run

    began, folder, console = time.time(), run_folder(run), _console(quiet)
    prepared = prepare_run(run, console)
    from valkyrie.train import trainer

    fitted = trainer.fit(run, *prepared, folder, console, signals=False, began=began)
    return Trained(run, fitted.folder, fitted.summary, fitted)


def evaluate(run: Run, *, quiet: bool = True) -> dict[str, float]:
    """Return the metrics of a trained run on its whole validation split: `eval_loss` and others.

    Uses the run of `resume=` or `name=`, or else the latest. Raises ValueError if there is none.
    """
    _require_run("evaluate", run)
    from valkyrie.train.prepare import prepare_run, restore, trained_folder

    folder = trained_folder(run)
    prepared = prepare_run(run, _console(quiet))
    from valkyrie.train.evaluate import Evaluator

    program, _, parameters = restore(run, prepared.devices, folder)
    return Evaluator(program, prepared.data, prepared.tokenizer)(parameters, None)


def generate(run: Run, prompt: str, *, tokens: int = 200, temperature: float = 0.8, top_k: int | None = 40) -> str:
    """Continue a prompt with a trained run by at most `tokens` tokens. Returns the new text without the prompt.

    Uses the run of `resume=` or `name=`, or else the latest. Raises ValueError if there is none.
    """
    _require_run("generate", run)
    from valkyrie.train.prepare import check_sampling

    check_sampling(prompt, tokens, temperature, top_k)
    return _restore_model(run).generate(prompt, tokens=tokens, temperature=temperature, top_k=top_k)


def load_model(folder: str | Path, *overrides: str) -> TrainedModel:
    """Load the newest checkpoint of a run folder as a model, a function from tokens to logits.

    `model = load_model(folder)` has `model(tokens)`, `model.parameters`, `model.tokenizer` and
    `model.generate(prompt)`. `overrides` change the run, such as
    `"mesh=1x1x1"` for one device or `"precision=float32"`. Raises ValueError if there is no checkpoint, if this process
    lacks the devices, or if the model has no tokens.
    """
    require_type(folder, str | Path, "load_model takes the path of a run folder")
    return _restore_model(load(folder, *overrides))


def _restore_model(run: Run) -> TrainedModel:
    from valkyrie.train.devices import prepare_devices
    from valkyrie.train.prepare import load_run_tokenizer, restore, trained_folder

    folder, tokenizer = trained_folder(run), load_run_tokenizer(run)
    devices = prepare_devices(run)
    from valkyrie.train.trained_model import TrainedModel

    program, step, parameters = restore(run, devices, folder)
    return TrainedModel(run, step, parameters, tokenizer, program)


def from_hf(
    folder: str | Path, *overrides: str, name: str | None = None, tokenizer: str | None = None, quiet: bool = False
) -> Path:
    """Convert a Hugging Face folder to a run folder, like `valkyrie-convert from-hf`, and return its path.

    `load_model` loads it, and `fit(load(folder, "steps=1000", ...))` continues its training. The weights are converted
    in a child process. Raises ValueError if the model cannot be converted, or if the run folder exists.

    Args:
        folder: The folder, with `config.json` and safetensors.
        overrides: Settings of the run, such as `"mesh=2x2x1"`.
        name: Name of the run, or None for the name of the folder.
        tokenizer: `bytes`, `gpt2`, a tiktoken encoding or a `tokenizer.json`, or None for the folder's.
        quiet: Whether to print nothing.
    """
    require_type(folder, str | Path, "from_hf takes the path of a Hugging Face folder")
    for override in overrides:
        require_type(override, str, 'from_hf takes overrides as strings, such as from_hf(folder, "mesh=2x2x1")')
    options = {"name": name, "tokenizer": tokenizer}
    for key, value in options.items():
        require_type(value, str | None, f"{key}= takes a string")
    return _convert("from-hf", [str(folder), *overrides], options, quiet)


def to_hf(
    run_folder: str | Path,
    output: str | Path,
    *,
    step: int | None = None,
    dtype: str | None = None,
    file_gb: float = 5.0,
    quiet: bool = False,
) -> Path:
    """Convert a trained run to a Hugging Face folder, like `valkyrie-convert to-hf`, and return its path.

    The weights are converted in a child process. Raises ValueError if there is no checkpoint, if the model cannot be
    converted, or if `output` is not empty.

    Args:
        run_folder: The run folder.
        output: The folder to write, for `AutoModelForCausalLM.from_pretrained`.
        step: Step of the checkpoint, or None for the newest.
        dtype: `float32`, `bfloat16` or `float16`, or None for the original dtype of the weights, else float32.
        file_gb: Maximum size of a file in GB, and of the weights in memory.
        quiet: Whether to print nothing.
    """
    from valkyrie.config.arguments import load_run

    run_folder = _find_folder("to_hf", run_folder, Path(RunConfig.runs))
    require_type(output, str | Path, "output= takes the path of a folder")
    require_type(step, Integral | None, "step= takes a whole number or None")
    require_type(file_gb, Real, "file_gb= takes a number")
    if dtype not in (None, "float32", "bfloat16", "float16"):
        raise ValueError(f"dtype={dtype}: must be float32, bfloat16 or float16, or None.")
    load_run(run_folder, [])  # raises ValueError if it is no run folder
    options = {"step": step, "dtype": dtype, "file-gb": file_gb}
    return _convert("to-hf", [str(run_folder), str(output)], options, quiet)


def _convert(command: str, arguments: Sequence[str], options: Mapping[str, object], quiet: bool) -> Path:
    """Run `valkyrie-convert` in a child process, because it initialises JAX, and return the folder that it writes."""
    folders: list[Path] = []

    def find_folder(line: str) -> None:
        if match := re.fullmatch(r"wrote (.+) in [\d.]+ s", line):
            folders.append(Path(match[1]))

    flags = [f"--{key}={value}" for key, value in options.items() if value is not None]
    try:
        _run_command("convert", [command, *flags, *arguments], quiet, find_folder, lambda: bool(folders))
    except ValueError as error:
        text = re.sub(r"--([\w-]+) (?=[A-Z\d])", r"\1=", str(error))  # `--step 3` is step=3 here
        raise ValueError(re.sub(r"--([\w-]+)", r"\1=", text).replace("file-gb=", "file_gb=")) from None
    return folders[-1]


def trials(*paths: str | Path) -> Trials:
    """Return the trials of sweeps, one row per trial. `paths` are sweep folders or folders that contain them.

    `pandas.DataFrame(valkyrie.trials("runs"))` makes a table.
    """
    for path in paths:
        require_type(path, str | Path, "trials takes paths of sweep folders")
    from valkyrie.report.records import read_rows
    from valkyrie.sweep.columns import CSV_COLUMNS

    rows = read_rows([Path(path) for path in paths])
    return Trials(TrialRow(**{column.name: column.value(row) for column in CSV_COLUMNS}) for row in rows)


def run_sweep(*overrides: str, config_dir: str | Path | None = None, quiet: bool = False) -> Trials:
    """Run a sweep, like `valkyrie-train -m`, and return the trials of its folder.

    `run_sweep("+sweep=laptop_8", "steps=3")` runs a sweep of `conf/sweep`, and `run_sweep("mesh=2x2x2,4x2x1",
    "partition=fsdp,dp", "mode=measure")` every combination. Trials that the folder already has are not repeated.
    Trials that fail are rows with a `status` and `reason`.

    The sweep runs in a child process, and each trial in a process of its own, which needs the devices: on a TPU or
    GPU, sweep before this process uses JAX. Interrupting it raises KeyboardInterrupt and keeps the finished trials.
    Raises ValueError for settings that `valkyrie-train` refuses. `config_dir` is a folder with your configs and
    modules.
    """
    folders: list[str] = []

    def find_folder(line: str) -> None:
        if line.startswith(_FOLDER_LINE):
            folders.append(line.removeprefix(_FOLDER_LINE))

    if not overrides:
        raise ValueError('run_sweep needs settings, such as run_sweep("+sweep=laptop_8", "steps=3").')
    for override in overrides:
        require_type(override, str, 'run_sweep takes strings, such as run_sweep("+sweep=laptop_8", "steps=3")')
    arguments = [*_config_flags(config_dir), *(o for o in overrides if o not in ("-m", "--multirun"))]
    _run_command("train", ["-m", *arguments], quiet, find_folder, lambda: bool(folders))
    return trials(folders[-1])


def _config_flags(config_dir: str | Path | None) -> list[str]:
    """Return the flag for a folder with the user's configs. Raises ValueError if it does not exist."""
    if config_dir is None:
        return []
    require_type(config_dir, str | Path, "config_dir= takes the path of a folder")
    if not Path(config_dir).is_dir():
        raise ValueError(f"config_dir={config_dir} is not a folder.")
    return ["--config-dir", str(Path(config_dir).resolve())]


_FOLDER_LINE = "folder: "
"""Start of the line that a sweep prints with its folder."""


def _run_command(
    name: str, arguments: Sequence[str], quiet: bool, on_line: Callable[[str], None], has_result: Callable[[], bool]
) -> None:
    """Run a command such as `valkyrie-train` in a child process, and print its output.

    Args:
        name: The command, without `valkyrie-`.
        arguments: Its arguments.
        quiet: Whether to print nothing.
        on_line: Called with each line that it prints.
        has_result: Returns whether it has printed its result. If not, raises ValueError with its error message.

    Raises RuntimeError if the command fails without such a message.
    """

    def print_line(line: str) -> None:
        on_line(line)
        if not quiet:
            print(line, flush=True)

    status, errors = run_streamed(module_command(f"valkyrie.cli.{name}", *arguments), print_line)
    if status == INTERRUPTED:
        raise KeyboardInterrupt
    if has_result():
        if not quiet:
            print(errors, end="", file=sys.stderr)
        return
    message = errors.partition(f"valkyrie-{name}: ")[2].strip()
    if not message:
        raise RuntimeError(f"valkyrie-{name} ended with status {status} and without a result. {errors}".rstrip())
    first, *problems = message.splitlines()
    raise ValueError("\n".join(problem.removeprefix("  - ") for problem in problems) if problems else first)


def write_report(*paths: str | Path, output: str | Path | None = None) -> Path:
    """Write the HTML report of sweeps to `output`, or to `report.html` in the first folder. Returns its path."""
    from valkyrie.report.page import page_file, render_page
    from valkyrie.report.records import read_rows

    for path in paths:
        require_type(path, str | Path, "write_report takes paths of sweep folders")
    require_type(output, str | Path | None, "output= takes the path of a file")
    if output is not None and Path(output).suffix.lower() not in ("", ".html", ".htm"):
        raise ValueError(f"output={output}: the name must end in .html.")
    text = render_page(read_rows([Path(path) for path in paths]))
    file = page_file([Path(path) for path in paths], None if output is None else Path(output))
    return write_atomic(file, text, "output=FILE")


def _require_run(function: str, run: object) -> None:
    require_type(run, Run, f'{function} takes a Run, such as valkyrie.compose("model=gpt_tiny", "mesh=2x2x2")')


def _refuse_illegal(run: Run) -> Run:
    refuse(run.problems())
    return run


def _console(quiet: bool) -> Console:
    from valkyrie.train.screen import make_console

    return Console(quiet=True) if quiet else make_console()
