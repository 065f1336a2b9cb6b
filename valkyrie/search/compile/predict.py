"""Predicts a jitted, lowered or compiled function on a slice.

Uses the same replay and summary as `mode=compile`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from valkyrie.compiled.flops import model_flops
from valkyrie.compiled.hlo import Module, parse_module
from valkyrie.compiled.memory import ProgramMemory
from valkyrie.compiled.whole import UnpartitionedProgram
from valkyrie.foreign_errors import Allocation, first_lines, is_out_of_memory
from valkyrie.hardware.platforms import get_platform
from valkyrie.hardware.position import Position
from valkyrie.hardware.target import build_topology, usable_hbm
from valkyrie.parallel.slice import Slice
from valkyrie.problems import describe_value
from valkyrie.runs.folder import package_versions
from valkyrie.search.compile.fault import FaultCode
from valkyrie.search.compile.faults import find_faults
from valkyrie.search.compile.hints import program_hints
from valkyrie.search.compile.layers import merge_layers
from valkyrie.search.compile.lowered import LoweredProgram, capture_program, compile_program, has_slice_devices
from valkyrie.search.compile.partitioned import PartitionedProgram
from valkyrie.search.compile.prediction import (
    CompileOutcome,
    CompileStatus,
    CompileTimes,
    ForeignProgram,
    MemoryReport,
    Prediction,
)
from valkyrie.search.compile.replayed import correct_replay, replay_on
from valkyrie.search.compile.runner import Progress
from valkyrie.search.compile.shortage import explain_shortage, list_arguments, list_results
from valkyrie.search.compile.summary import memory_report, program_step, with_parts
from valkyrie.train.options import USER, Option, explain_option_errors, option_text

if TYPE_CHECKING:
    import jax

    from valkyrie.machine.replay import Replay


@dataclass(frozen=True)
class ProgramWork:
    """Name of a program, and its model's tokens and FLOPs per step on all devices. None means unknown.

    `unit` is what `tokens` counts, such as `images`.
    """

    name: str | None = None
    tokens: float | int | None = None
    flops: float | int | None = None
    unit: str = "tokens"


@dataclass(frozen=True)
class PredictedProgram:
    """Prediction of a program, and its replay.

    `replay` is None if the compiler failed or refused the program as too large. A program that compiles but needs more
    than the usable memory does not fit, and has a replay.
    """

    prediction: Prediction
    replay: Replay | None


def predict_function(
    function: Any,
    arguments: Sequence[Any],
    kwargs: Mapping[str, Any],
    target: Slice,
    *,
    mesh: jax.sharding.Mesh | None = None,
    options: Mapping[str, Any] | None = None,
    work: ProgramWork | None = None,
    time_limit_s: float | int | None = None,
    progress: Progress | None = None,
) -> PredictedProgram:
    """Predict the step time and memory of a jitted, lowered or compiled function on a slice.

    The program is compiled in a child process, or read from the compile cache. A program with Python callbacks, or for
    devices other than those of `Slice.mesh`, is compiled in this process without a time limit. The status is
    `does_not_fit` if the program does not fit, `timeout` after the time limit, and `failed` if the compiler fails.

    Raises TypeError for any other `function` and for options of a wrong type. Raises ValueError if the program has no
    mesh, if the kind, number or torus of its devices is not that of the slice, if `mesh` has other axes than the
    program's shardings, if a lowered or compiled program gets arguments, if a compiled one gets options, or if the
    compiler refuses an option. Errors of tracing are not caught.

    Args:
        function: The function, which does one step.
        arguments: Positional arguments, arrays or `jax.ShapeDtypeStruct`. Empty if it is lowered or compiled.
        kwargs: Keyword arguments. Empty if it is lowered or compiled.
        target: The slice to compile for.
        mesh: Mesh of the program. Only needed if neither its arguments nor its shardings have one.
        options: Compiler options.
        work: Name, tokens and FLOPs of the program.
        time_limit_s: Time limit of the compile, or None.
        progress: Called about five times a second with a status line while the program is compiled.
    """
    from valkyrie.search.compile.executable import device_positions

    start_time = time.perf_counter()
    lowered, compiled, mesh = lower_on_mesh(function, arguments, kwargs, target, mesh, options)
    lower_s = time.perf_counter() - start_time
    work, texts = work or ProgramWork(), option_texts(options or {}, target)
    name, axes = (
        work.name or str(getattr(function, "__name__", "") or ""),
        {str(axis): int(size) for axis, size in mesh.shape.items()},
    )
    user_options = tuple(Option(key, text, USER) for key, text in texts.items())
    if compiled is not None:
        result = _read_compiled(compiled, mesh, user_options)
    elif (captured := capture_program(lowered, texts)) is None or not has_slice_devices(mesh, target):
        if progress is not None:
            progress(f"compiling {name or 'a program'} in this process")
        result = _compile_in_process(lowered, mesh, user_options)
    else:
        result = _compile_in_child(captured, mesh, target, user_options, name or "a program", time_limit_s, progress)
    is_explained = not isinstance(result, CompileOutcome) or result.status is CompileStatus.does_not_fit
    unpartitioned = UnpartitionedProgram.from_lowered(lowered) if is_explained and lowered is not None else None
    if isinstance(result, CompileOutcome):
        if result.status is CompileStatus.refused:
            raise ValueError(result.reason)
        program = foreign_program(work, name or "program", target, axes)
        prediction = Prediction(
            None, result.status, result.reason, package_versions(), CompileTimes(lower_s), program=program
        )
        return _explain(PredictedProgram(replace(prediction, memory=result.shortage), None), unpartitioned, axes, None)
    program = foreign_program(work, name or result.module.name.removeprefix("jit_"), target, axes)
    positions = device_positions(mesh)
    predicted_program = predict_module(
        program, result.module, target, axes, positions, result.memory, work, result.options, unpartitioned
    )
    times = CompileTimes(lower_s, result.compile_s, result.cached)
    notes = (*predicted_program.prediction.notes, *([] if result.note is None else [result.note]))
    return _explain(
        replace(predicted_program, prediction=replace(predicted_program.prediction, compile=times, notes=notes)),
        *(unpartitioned, axes, result.module),
    )


def lower_on_mesh(
    function: Any,
    arguments: Sequence[Any],
    kwargs: Mapping[str, Any],
    target: Slice,
    mesh: jax.sharding.Mesh | None = None,
    options: Mapping[str, Any] | None = None,
) -> tuple[Any, Any, jax.sharding.Mesh]:
    """Lower a function. Returns `(lowered, None, mesh)`, or `(None, compiled, mesh)` if it is already compiled.

    Takes the arguments of `predict_function` and raises the same errors.
    """
    lowered, compiled = _lower(function, arguments, kwargs, options, target)
    program_mesh = _find_mesh([arguments, dict(kwargs)]) or _find_mesh(_program_shardings(compiled or lowered))
    _refuse_other_mesh(mesh, program_mesh)
    mesh = program_mesh or mesh
    if mesh is None:
        raise ValueError(
            "no argument of this program is sharded over a mesh of the slice. Use a NamedSharding of "
            "slice.mesh(...) for its arguments or in_shardings, or pass the mesh to predict: mesh=slice.mesh(...)."
        )
    _refuse_other_devices(mesh, target)
    return lowered, compiled, mesh


def _explain(
    predicted_program: PredictedProgram,
    unpartitioned: UnpartitionedProgram | None,
    axes: Mapping[str, int],
    module: Module | None,
) -> PredictedProgram:
    """Add the largest allocations and hints to the prediction of a program that does not fit.

    Returns a prediction with another status or without memory unchanged. `unpartitioned` is the program before
    partitioning. It is None if the caller has compiled the program, and then the prediction is also returned unchanged.
    `module` is None if XLA wrote none.
    """
    prediction = predicted_program.prediction
    if prediction.status is not CompileStatus.does_not_fit or prediction.memory is None or unpartitioned is None:
        return predicted_program
    results = [] if module is None else list_results(module)
    is_reported = any(fault.code is FaultCode.replicated_state for fault in prediction.faults)
    memory, hints = explain_shortage(
        *(prediction.memory, list_arguments(unpartitioned, axes), results), hint_replicated=not is_reported
    )
    return replace(predicted_program, prediction=replace(prediction, memory=memory, hints=tuple(hints)))


@dataclass(frozen=True)
class _CompiledModule:
    """A compiled program.

    Args:
        module: The parsed module.
        memory: Memory of the program, or the outcome of the compile if it does not fit.
        options: Compiler options that were used.
        compile_s: Compile time in seconds, or None if the caller compiled the program.
        cached: Whether the program came from the cache, or None if the caller compiled it.
        note: Why the program was not stored in the cache, or None.
    """

    module: Module
    memory: ProgramMemory | CompileOutcome
    options: Sequence[Option]
    compile_s: float | None = None
    cached: bool | None = None
    note: str | None = None


def _compile_in_child(
    program: LoweredProgram,
    mesh: jax.sharding.Mesh,
    target: Slice,
    options: Sequence[Option],
    name: str,
    time_limit_s: float | int | None,
    progress: Progress | None,
) -> _CompiledModule | CompileOutcome:
    progress = progress or (lambda line: None)
    stored_program = compile_program(
        program, mesh, target, options, name=name, time_limit_s=time_limit_s, progress=progress
    )
    if isinstance(stored_program, CompileOutcome):
        return stored_program
    record, memory = stored_program.record, stored_program.record.memory
    if memory is None:
        memory = CompileOutcome(CompileStatus.does_not_fit, record.reason, shortage=record.shortage)
        if record.module_sha256 is None:
            return memory
    module = parse_module(stored_program.module)
    stored_program.update_sources(module)
    return _CompiledModule(module, memory, record.options, record.compile_s, stored_program.cached, stored_program.note)


def _compile_in_process(
    lowered: jax.stages.Lowered, mesh: jax.sharding.Mesh, options: Sequence[Option]
) -> _CompiledModule | CompileOutcome:
    """Compile a program in this process. Returns a `CompileOutcome` with the reason if it fails or does not fit."""
    import jax

    from valkyrie.search.compile.child import compile_within_memory, parse_shortage, peak_without_host
    from valkyrie.search.compile.executable import without_cache

    platform, start_time = get_platform(mesh.devices.flat[0].platform), time.perf_counter()
    texts: dict[str, str | bool] = {option.name: option.value for option in options if option.value is not None}

    def compile(compiler_options: dict[str, str | bool] | None = None) -> Any:
        return lowered.compile(compiler_options=compiler_options or texts or None)

    try:
        with explain_option_errors(platform, in_python=True), without_cache():
            compiled, used_options = compile_within_memory(list(options), compile, platform)
            peak = peak_without_host(compiled, compile, used_options, platform)
    except jax.errors.JaxRuntimeError as error:
        text, kind = first_lines(str(error)), type(error).__name__
        if is_out_of_memory(str(error)):
            return CompileOutcome(CompileStatus.does_not_fit, text, shortage=parse_shortage(str(error)))
        return CompileOutcome(CompileStatus.failed, f"{kind}: {text}")
    result = _read_compiled(compiled, mesh, used_options, peak)
    return replace(result, compile_s=time.perf_counter() - start_time, cached=False)


def _read_compiled(
    compiled: jax.stages.Compiled, mesh: jax.sharding.Mesh, options: Sequence[Option], peak: int | None = None
) -> _CompiledModule:
    from valkyrie.search.compile.executable import read_compiled_program

    program = read_compiled_program(compiled, mesh, peak)
    return _CompiledModule(parse_module(program.module), program.memory, options)


def predict_module(
    program: ForeignProgram,
    module: Module,
    target: Slice,
    axes: Mapping[str, int],
    positions: Sequence[Position],
    memory: ProgramMemory | CompileOutcome | int,
    work: ProgramWork,
    options: Sequence[Option] = (),
    unpartitioned: UnpartitionedProgram | None = None,
) -> PredictedProgram:
    """Replay and summarise a module, and find faults in its sharding.

    Args:
        program: Name and slice of the program.
        module: The compiled module.
        target: The slice.
        axes: Names and sizes of the mesh's axes, in order.
        positions: Positions of the mesh's devices, in the order of `mesh.devices.flat`.
        memory: Memory of the program, the outcome of the compile if it does not fit, or, if nothing else is known, the
            bytes of its arguments.
        work: Tokens and FLOPs of a step.
        options: Compiler options.
        unpartitioned: The program before partitioning, which is needed to find faults and to count the model's FLOPs,
            or None.
    """
    assert target.chip is not None
    if unpartitioned is not None:
        unpartitioned.skip_helpers(module)
    replay_module = partial(replay_on, target, module, dict(axes), positions)
    replay = correct_replay(replay_module(), target)
    if isinstance(memory, CompileOutcome):
        report = replace(memory.shortage or MemoryReport(), usable=usable_hbm(target.chip))
    else:
        report = _memory_report(target, memory)
    partitioned = unpartitioned and PartitionedProgram(unpartitioned, module, axes, replay, report, replay_module)
    faults = () if partitioned is None else find_faults(partitioned)
    if isinstance(memory, CompileOutcome):
        prediction = Prediction(None, memory.status, memory.reason, package_versions(), program=program, memory=report)
        return PredictedProgram(replace(prediction, faults=faults), None)
    flops = work.flops
    if flops is None and unpartitioned is not None:
        flops = model_flops(unpartitioned.module, axes)
    too_large = report.headroom is not None and report.headroom < 0
    prediction = Prediction(
        about=None,
        program=program,
        status=CompileStatus.does_not_fit if too_large else CompileStatus.ok,
        reason="needs more memory than is usable on a device" if too_large else None,
        versions=package_versions(),
        positions=tuple(positions),
        memory=report,
        options=tuple(options),
        step=program_step(target.chip, len(positions), replay, work.tokens, flops),
        faults=faults,
    )
    prediction = with_parts(
        prediction, replace(replay, costs=merge_layers(replay.costs)), merge_layers(replay.collectives)
    )
    return PredictedProgram(replace(prediction, hints=program_hints(prediction, partitioned)), replay)


def _memory_report(target: Slice, memory: ProgramMemory | int) -> MemoryReport:
    if isinstance(memory, int):
        usable = usable_hbm(target.chip)
        headroom = usable - memory if usable is not None and memory > usable else None
        return MemoryReport(usable=usable, headroom=headroom, split={"arguments": memory}, needed=memory)
    report = memory_report(target.chip, memory)
    largest = [Allocation(size, name) for name, size in report.split.items() if size > 0]
    return replace(report, needed=memory.peak, largest=tuple(sorted(largest, key=lambda entry: -entry.bytes)))


def foreign_program(work: ProgramWork, name: str, target: Slice, axes: Mapping[str, int]) -> ForeignProgram:
    """Return the record of a program. `axes` are the names and sizes of the mesh's axes, in order."""
    chip, sizes = target.chip.name if target.chip else None, {str(axis): int(size) for axis, size in axes.items()}
    return ForeignProgram(name, target.name, target.describe(), chip, sizes, work.unit)


def _lower(
    function: Any, arguments: Sequence[Any], kwargs: Mapping[str, Any], options: Mapping[str, Any] | None, target: Slice
) -> tuple[Any, Any]:
    """Lower a function. Returns `(lowered, None)`, or `(None, compiled)` if it is already compiled."""
    import jax

    function = _unwrap(function)
    if isinstance(function, jax.stages.Compiled | jax.stages.Lowered) and (arguments or kwargs):
        raise ValueError(
            "A lowered or compiled program takes no arguments of the function, because its shapes are fixed. Pass only "
            "keywords such as slice= and mesh=."
        )
    if isinstance(function, jax.stages.Compiled):
        if options:
            raise ValueError("options= cannot change a compiled program. Pass a jitted or lowered function instead.")
        return None, function
    if isinstance(function, jax.stages.Lowered):
        return function, None
    require_function(function, "predict")
    with get_platform(target.platform).lowering_for(target.chip):
        return _unwrap(function.lower(*arguments, **kwargs)), None


def _unwrap(program: Any) -> Any:
    """Return the JAX object in a lowered or compiled program of `flax.nnx.jit`, or `program` itself."""
    import jax

    for name, kind in (("lowered", jax.stages.Lowered), ("compiled", jax.stages.Compiled)):
        if isinstance(wrapped := getattr(program, name, None), kind):
            return wrapped
    return program


def require_function(function: object, name: str) -> None:
    """Raise TypeError if `function` is not a jitted, lowered or compiled function. `name` starts the message."""
    if not is_jitted(function):
        raise TypeError(
            f"{name} needs a jitted function, not {describe_value(function)}. Use jax.jit(step, in_shardings=...), or "
            "the result of its .lower(...) or .compile()."
        )


def is_jitted(function: object) -> bool:
    """Return whether `function` is a jitted, lowered or compiled function."""
    import jax

    is_lowerable = callable(function) and hasattr(function, "lower")
    return is_lowerable or isinstance(_unwrap(function), jax.stages.Compiled | jax.stages.Lowered)


def is_pmapped(function: object) -> bool:
    """Return whether `function` is the result of `jax.pmap`, which is a plain function with a method `lower`."""
    return getattr(getattr(function, "lower", None), "__module__", None) == "jax._src.pmap"


def option_texts(options: Mapping[str, Any], target: Slice) -> dict[str, str]:
    """Format compiler options for the compiler of a target, without those that are None.

    Raises TypeError if a name is not a string, or a value not a string, boolean or number.
    """
    for name, value in options.items():
        if not isinstance(name, str) or not isinstance(value, str | bool | int | float | None):
            usage = 'options= maps names of compiler options to strings, booleans or numbers, such as {"xla_foo": True}'
            raise TypeError(f"{usage}, not {{{name!r}: {value!r}}}.")
    texts = {name: text for name, value in options.items() if (text := option_text(value)) is not None}
    return get_platform(target.platform).spell_options(texts)


def _find_mesh(tree: Any) -> jax.sharding.Mesh | None:
    """Return the first mesh in a tree of meshes, shardings and arrays, or None if there is none."""
    import jax

    def is_sharding(leaf: Any) -> bool:
        return isinstance(leaf, jax.sharding.Sharding)

    for leaf in jax.tree.leaves(tree, is_leaf=is_sharding):
        sharding = leaf if is_sharding(leaf) else getattr(leaf, "sharding", None)
        mesh = leaf if isinstance(leaf, jax.sharding.Mesh) else getattr(sharding, "mesh", None)
        if isinstance(mesh, jax.sharding.Mesh) and not mesh.empty:
            return mesh
    return None


def _program_shardings(program: jax.stages.Lowered | jax.stages.Compiled) -> list[Any]:
    """Return the shardings of a program's arguments and results.

    For a lowered program, also returns the shardings of its intermediate values and the mesh of its context.
    """
    import jax

    if isinstance(program, jax.stages.Compiled):
        return [program.input_shardings, program.output_shardings]
    arguments = getattr(getattr(program, "_lowering", None), "compile_args", {})  # JAX has no public way to read these
    return [arguments.get(key) for key in ("in_shardings", "out_shardings", "intermediate_shardings", "context_mesh")]


def _refuse_other_mesh(mesh: jax.sharding.Mesh | None, program_mesh: jax.sharding.Mesh | None) -> None:
    """Raise ValueError if the caller's `mesh` and the `program_mesh` of the program's shardings have different axes."""
    if mesh is None or program_mesh is None or dict(mesh.shape) == dict(program_mesh.shape):
        return
    passed_axes, program_axes = (
        ", ".join(f"{axis}={size}" for axis, size in m.shape.items()) for m in (mesh, program_mesh)
    )
    raise ValueError(
        f"mesh= has the axes {passed_axes}, but the mesh of the program's shardings has {program_axes}. Leave out "
        "mesh=. In valkyrie.search, use the mesh that build(mesh) receives for the shardings."
    )


def _refuse_other_devices(mesh: jax.sharding.Mesh, target: Slice) -> None:
    """Raise ValueError if the kind, number or torus of a mesh's devices differ from those of the slice."""
    from valkyrie.search.compile.executable import device_positions

    chip, devices = target.chip, list(mesh.devices.flat)
    assert chip is not None
    kind = devices[0].device_kind
    advice = "Use slice.mesh(...), a mesh of the slice's devices"
    if kind not in chip.device_kinds:
        raise ValueError(f"the program uses {kind} devices, but {target.describe()} has {chip.name} chips. {advice}.")
    if len(devices) != target.devices:
        raise ValueError(
            f"the program's mesh has {len(devices)} devices, but {target.describe()} has {target.devices}. {advice}."
        )
    if chip.ici_axes is None:  # without a torus, devices differ only by their host
        return
    positions = device_positions(mesh)
    slices = {position.slice_index for position in positions}
    shape = build_topology(target).shape
    torus_extent = [len({position.coords[i] for position in positions}) for i in range(len(shape))]
    if len(slices) != target.slices or tuple(torus_extent) != shape:
        torus = "x".join(str(n) for n in torus_extent)
        slices_text = f"{len(slices)} slices of " if len(slices) > 1 else ""
        raise ValueError(
            f"the program's mesh has the devices of {slices_text}{torus}, but the target is {target.describe()}. "
            f'{advice}, or valkyrie.slice("{chip.name}-{torus}"{f", slices={len(slices)}" if slices_text else ""}) for '
            "that torus."
        )
