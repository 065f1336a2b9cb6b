"""Predicts any JAX program on a slice: a jitted function, which is compiled here, or a dumped module.

Uses the replay and the summary that `mode=compile` uses for a run's step.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from valkyrie.compiled.collectives import CollectiveUse
from valkyrie.compiled.dumped import read_dumped, refuse_other_chip, slow_products
from valkyrie.compiled.hlo import Module, parse
from valkyrie.compiled.memory import ProgramMemory
from valkyrie.foreign_errors import Allocation, first_lines, is_out_of_memory
from valkyrie.hardware.platforms import platform_of
from valkyrie.hardware.position import Position
from valkyrie.hardware.target import topology_of, usable_hbm
from valkyrie.machine.replay import Cost
from valkyrie.parallel.slice import Slice
from valkyrie.runs.folder import versions
from valkyrie.search.compile.hints import program_hints
from valkyrie.search.compile.prediction import CompileStatus, ForeignProgram, MemoryReport, Prediction
from valkyrie.search.compile.replayed import corrected, replay_on
from valkyrie.search.compile.summary import memory_report, program_step, with_parts
from valkyrie.train.options import YOU, Option, option_text, refusals_in_plain_words

if TYPE_CHECKING:
    import jax

    from valkyrie.machine.replay import Replay

U = TypeVar("U", Cost, CollectiveUse)
LAYERS = 3
"""Minimum number of operations of unrolled layers that are summed."""
_NUMBERED = re.compile(r"((?:^|/)(?:[A-Za-z]\w*_)?)\d+(?=/)")
"""A scope of an operation's name with a number: `blocks_7` or `7`."""
LOW_RATE = 0.35
"""Share of peak. If the fastest large product of a dumped module is slower, it may be for another chip."""


@dataclass(frozen=True)
class ProgramWork:
    """Name of a program, and the tokens and FLOPs of its model per step on all devices. None means unknown."""

    name: str | None = None
    tokens: float | int | None = None
    flops: float | int | None = None


@dataclass(frozen=True)
class Predicted:
    """The prediction of a program, and its replay or None if the compiler refused it for lack of memory."""

    prediction: Prediction
    replay: Replay | None


def predict_function(
    function: Any,
    arguments: Sequence[Any],
    named: Mapping[str, Any],
    target: Slice,
    *,
    mesh: jax.sharding.Mesh | None = None,
    options: Mapping[str, Any] | None = None,
    work: ProgramWork | None = None,
) -> Predicted:
    """Predict a step of a function on a slice. It may be jitted, lowered or compiled.

    Raises ValueError if it is anything else, its devices are not those of the slice, or the compiler refuses an option.
    Other errors of tracing and compiling are passed on.
    """
    import jax

    from valkyrie.search.compile.child import parse_shortage, peak_beside_host, within_memory
    from valkyrie.search.compile.executable import compiled_program, without_cache

    lowered, compiled = _stage(function, arguments, named, options)
    mesh = mesh or _mesh_of([arguments, dict(named)])
    if mesh is not None:
        _refuse_other_devices(mesh, target)
    texts = {name: text for name, value in (options or {}).items() if (text := option_text(value)) is not None}
    used = [Option(name, text, YOU) for name, text in texts.items()]
    work, peak, platform = work or ProgramWork(), None, platform_of(target.platform)
    if compiled is None:

        def compile(compiler_options: dict[str, str] | None = None) -> Any:
            return lowered.compile(compiler_options=compiler_options or texts or None)

        try:
            with refusals_in_plain_words(), without_cache():
                compiled, used = within_memory(used, compile, platform)
                peak = peak_beside_host(compiled, compile, used, platform)
        except jax.errors.JaxRuntimeError as error:
            if not is_out_of_memory(str(error)) or mesh is None:
                raise
            program, text = _program(work.name or _name(function), target, dict(mesh.shape)), str(error)
            status, memory = CompileStatus.does_not_fit, parse_shortage(text)
            return Predicted(
                Prediction(None, status, first_lines(text), versions(), memory=memory, program=program), None
            )
    if mesh is None:
        mesh = _mesh_of([compiled.input_shardings, compiled.output_shardings])
        if mesh is None:
            raise ValueError(
                "no argument of this program lies on a mesh of the slice. Give its arguments or in_shardings a "
                "NamedSharding of slice.mesh(...), or hand the mesh to predict: mesh=slice.mesh(...)."
            )
        _refuse_other_devices(mesh, target)
    built = compiled_program(compiled, mesh, peak)
    module = parse(built.module)
    program = _program(work.name or _name(function) or module.name.removeprefix("jit_"), target, built.axes)
    return _predict_module(program, module, target, built.axes, built.positions, built.memory, work, used)


def predict_file(
    path: Path,
    target: Slice,
    axes: Mapping[str, int],
    *,
    places: Sequence[Position] | None = None,
    work: ProgramWork | None = None,
) -> Predicted:
    """Predict a step of a dumped module on a slice.

    Raises ValueError for a module that cannot be replayed, or was compiled for another chip or number of devices.

    Args:
        path: File of the module.
        target: The slice.
        axes: Names and sizes of the axes of the module's mesh, in order.
        places: Positions of the mesh's devices, flattened. By default those of `Slice.mesh`.
        work: Name, tokens and FLOPs, which the module does not contain.
    """
    dumped, work = read_dumped(path), work or ProgramWork()
    chip = target.chip
    positions = target.places(list(axes.values()), list(axes))
    assert chip is not None and chip.clock_ghz is not None
    if places is not None:
        if sorted(places) != sorted(positions):
            raise ValueError(
                f"the {len(places)} places are not those of the devices of {target.describe()}, each once."
            )
        positions = tuple(places)
    devices, per_slice = len(positions), len(positions) // target.slices
    compiled_for = dumped.devices or dumped.module.partitions
    if compiled_for not in (devices, per_slice) if dumped.devices else compiled_for > devices:
        resized = target.resized(compiled_for)
        instead = f" {compiled_for} devices are {resized.name}." if resized else ""
        raise ValueError(
            f"{path} was compiled for {compiled_for} devices; {target.describe()} has {target.devices}.{instead}"
        )
    if dumped.devices is None:
        dumped.module.partitions = devices
    flops_per_cycle = chip.peak_tflops.get("bfloat16", 0.0) * 1e3 / chip.clock_ghz / chip.devices
    refuse_other_chip(dumped.module, chip.name, chip.cores > 1, flops_per_cycle, str(path))
    memory = dumped.memory or dumped.argument_bytes
    program = _program(work.name or dumped.module.name.removeprefix("jit_"), target, axes)
    predicted = _predict_module(program, dumped.module, target, axes, positions, memory, work)
    rate = slow_products(dumped.module, flops_per_cycle)
    if rate is not None and rate < LOW_RATE:
        note = (
            f"the fastest product reaches {100 * rate:.0f}% of the peak of {chip.name}: check that the module was "
            "compiled for this chip, which it does not say itself"
        )
        prediction = predicted.prediction
        return replace(predicted, prediction=replace(prediction, notes=(*prediction.notes, note)))
    return predicted


def _predict_module(
    program: ForeignProgram,
    module: Module,
    target: Slice,
    axes: Mapping[str, int],
    positions: Sequence[Position],
    memory: ProgramMemory | int,
    work: ProgramWork,
    options: Sequence[Option] = (),
) -> Predicted:
    """Replay and summarise a module. `memory` is the number of bytes of its arguments if no more is known."""
    assert target.chip is not None
    replay = corrected(replay_on(target, module, dict(axes), positions), target)
    report = _memory_report(target, memory)
    too_large = report.headroom is not None and report.headroom < 0
    prediction = Prediction(
        about=None,
        program=program,
        status=CompileStatus.does_not_fit if too_large else CompileStatus.ok,
        reason="needs more memory than the compiler leaves to a program" if too_large else None,
        versions=versions(),
        positions=tuple(positions),
        memory=report,
        options=tuple(options),
        step=program_step(target.chip, len(positions), replay, work.tokens, work.flops),
    )
    prediction = with_parts(
        prediction, replace(replay, costs=merge_layers(replay.costs)), merge_layers(replay.collectives)
    )
    return Predicted(replace(prediction, hints=program_hints(prediction)), replay)


def merge_layers(uses: Sequence[U]) -> list[U]:
    """Sum the operations of unrolled layers: `blocks_0/Dense_1/dot_general` to `blocks_11/...` is one `blocks_*/...`.

    They have the same source and names that differ in their first numbered scope. At least `LAYERS` of them are summed.
    """
    groups: dict[tuple[object, ...], list[U]] = defaultdict(list)
    for use in uses:
        where = use.torus_axes if isinstance(use, CollectiveUse) else ()
        groups[use.kind, use.mesh_axes, where, _NUMBERED.sub(r"\1*", use.op_name, count=1), use.source].append(use)
    merged: list[U] = []
    for (*_, name, _source), members in groups.items():
        merged += [_sum(members, str(name))] if len(members) >= LAYERS else members
    return merged


def _sum(uses: Sequence[U], name: str) -> U:
    """Return the sum of uses under a name."""
    first = replace(uses[0], op_name=name)
    for field in fields(first):
        values = [getattr(use, field.name) for use in uses]
        if isinstance(values[0], float):
            first = replace(first, **{field.name: sum(values)})
        elif isinstance(values[0], dict):
            total: Counter[str] = Counter()
            for by_axis in values:
                total.update(by_axis)
            first = replace(first, **{field.name: dict(total)})
    return first


def _memory_report(target: Slice, memory: ProgramMemory | int) -> MemoryReport:
    if isinstance(memory, int):
        usable = usable_hbm(target.chip)
        short = usable - memory if usable is not None and memory > usable else None
        return MemoryReport(usable=usable, headroom=short, split={"arguments": memory}, needed=memory)
    report = memory_report(target.chip, memory)
    largest = [Allocation(size, name) for name, size in report.split.items() if size > 0]
    return replace(report, needed=memory.peak, largest=tuple(sorted(largest, key=lambda entry: -entry.bytes)))


def _program(name: str, target: Slice, axes: Mapping[str, int]) -> ForeignProgram:
    chip, sizes = target.chip.name if target.chip else None, {str(axis): int(size) for axis, size in axes.items()}
    return ForeignProgram(name, target.name, target.describe(), chip, sizes)


def _stage(
    function: Any, arguments: Sequence[Any], named: Mapping[str, Any], options: Mapping[str, Any] | None
) -> tuple[Any, Any]:
    """Return `(lowered, None)`, or `(None, compiled)` for a function that is already compiled."""
    import jax

    if isinstance(function, jax.stages.Compiled):
        if options:
            raise ValueError("options are for compiling, and this program is compiled already. Give it lowered.")
        return None, function
    if isinstance(function, jax.stages.Lowered):
        return function, None
    if not hasattr(function, "lower"):
        raise ValueError(
            f"predict takes a jitted function, and {type(function).__name__} is none: wrap it, jax.jit(step, "
            "in_shardings=...), or give what its .lower(...) or .compile() returned, or a Run."
        )
    return function.lower(*arguments, **named), None


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", "") or "")


def _mesh_of(tree: Any) -> jax.sharding.Mesh | None:
    """Return the mesh of the first sharded array or sharding in a tree, or None."""
    import jax

    def is_sharding(leaf: Any) -> bool:
        return isinstance(leaf, jax.sharding.Sharding)

    for leaf in jax.tree.leaves(tree, is_leaf=is_sharding):
        sharding = leaf if is_sharding(leaf) else getattr(leaf, "sharding", None)
        mesh = getattr(sharding, "mesh", None)
        if isinstance(mesh, jax.sharding.Mesh):
            return mesh
    return None


def _refuse_other_devices(mesh: jax.sharding.Mesh, target: Slice) -> None:
    """Raise ValueError if the kind, number or torus of a mesh's devices differ from those of the slice."""
    from valkyrie.search.compile.executable import device_positions

    chip, devices = target.chip, list(mesh.devices.flat)
    assert chip is not None
    kind = devices[0].device_kind
    how = "slice.mesh(...) makes a mesh of the slice's devices"
    if kind not in chip.device_kinds:
        raise ValueError(f"the program lies on {kind} devices, and {target.describe()} has {chip.name} chips; {how}.")
    if len(devices) != target.devices:
        raise ValueError(f"the program's mesh has {len(devices)} devices; {target.describe()} has {target.devices}.")
    positions = device_positions(mesh)
    slices = {position.slice for position in positions}
    shape = topology_of(target).shape
    spread = [len({position.coords[i] for position in positions}) for i in range(len(shape))]
    if len(slices) != target.slices or tuple(spread) != shape:
        has = "x".join(str(n) for n in spread)
        several = f"{len(slices)} slices of " if len(slices) > 1 else ""
        raise ValueError(
            f"the program's mesh lies on {several}{has}, and {target.describe()} is another torus; {how}, and "
            f'valkyrie.slice("{chip.name}-{has}"{f", slices={len(slices)}" if several else ""}) has that torus.'
        )
