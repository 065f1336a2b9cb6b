"""Predicts any JAX program on a slice: a jitted function that is compiled here, or a module that somebody dumped.

It uses what `mode=compile` uses for our own step: what is read of the compiled program, the replay, and the summary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from valkyrie.compiled.dumped import read_dumped, refuse_other_chip, slow_products
from valkyrie.compiled.hlo import Module, parse
from valkyrie.foreign_errors import is_out_of_memory, parse_out_of_memory
from valkyrie.hardware.platforms import platform_of
from valkyrie.hardware.target import topology_of, usable_hbm
from valkyrie.parallel.slice import Slice
from valkyrie.runs.folder import versions
from valkyrie.search.compile.hints import program_hints
from valkyrie.search.compile.replayed import corrected, replay_on
from valkyrie.search.compile.summary import SCHEMA, beside_peak, parts_of_step, positions, speed_on
from valkyrie.train.options import YOU, Option, option_text, refusals_in_plain_words

if TYPE_CHECKING:
    import jax

    from valkyrie.machine.replay import Replay

LOW_RATE = 0.35
"""Where the fastest large product of a dumped module stays below this share of peak, its chip may be another."""


@dataclass(frozen=True)
class Work:
    """What a program cannot say of itself: a name, and the tokens and FLOPs of its model in one step of all devices."""

    name: str | None = None
    tokens: float | int | None = None
    flops: float | int | None = None


@dataclass(frozen=True)
class Predicted:
    """The summary of a program, as `compile.json` has it, and its replay; None where it does not fit."""

    summary: dict[str, Any]
    replay: Replay | None


def predict_function(
    function: Any,
    arguments: Sequence[Any],
    named: Mapping[str, Any],
    target: Slice,
    *,
    mesh: jax.sharding.Mesh | None = None,
    options: Mapping[str, Any] | None = None,
    work: Work | None = None,
) -> Predicted:
    """Return what a step of a jitted function, or of one lowered or compiled already, takes on a slice.

    ValueError where it is none, lies on devices of another kind, number or torus than the slice's, or the compiler
    does not take an option; what tracing and compiling raise otherwise is raised as it came.
    """
    import jax

    from valkyrie.search.compile.child import peak_beside_host, within_memory
    from valkyrie.search.compile.executable import compiled_program, without_cache

    lowered, compiled = _stage(function, arguments, named, options)
    mesh = mesh or _mesh_of([arguments, dict(named)])
    if mesh is not None:
        _refuse_other_devices(mesh, target)
    told = [
        Option(name, text, YOU) for name, value in (options or {}).items() if (text := option_text(value)) is not None
    ]
    work, peak, platform = work or Work(), None, platform_of(target.platform)
    if compiled is None:

        def compile(compiler_options: dict[str, str] | None = None) -> Any:
            asked = {option.name: option.value for option in told}
            return lowered.compile(compiler_options=compiler_options or asked or None)

        try:
            with refusals_in_plain_words(), without_cache():
                compiled, told = within_memory(told, compile, platform)
                peak = peak_beside_host(compiled, compile, told, platform)
        except jax.errors.JaxRuntimeError as error:
            if not is_out_of_memory(str(error)) or mesh is None:
                raise
            about = _about(work.name or _name(function), target, dict(mesh.shape))
            return Predicted(_refused_for_memory(about, str(error)), None)
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
    about = _about(work.name or _name(function) or module.name.removeprefix("jit_"), target, built.axes)
    taken = [asdict(option) for option in told]
    return _predicted(about, module, target, built.axes, built.positions, built.memory, work, taken)


def predict_file(
    path: Path,
    target: Slice,
    axes: Mapping[str, int],
    *,
    places: Sequence[str] | None = None,
    work: Work | None = None,
) -> Predicted:
    """Return what a step of a dumped module takes on a slice; `axes` are the names and sizes of its mesh, in order.

    `places`: where each device of the mesh lies, flattened, as `slice:x,y,z:core`; without them, as `Slice.mesh` lays
    it. ValueError where the module is none that can be replayed, or for another chip or number of devices.
    """
    dumped, work = read_dumped(path), work or Work()
    chip = target.chip
    lie = target.places(list(axes.values()), list(axes))
    assert chip is not None and chip.clock_ghz is not None
    if places is not None:
        lie = _places(places, lie, target)
    devices, of_a_slice = len(lie), len(lie) // target.slices
    compiled_for = dumped.devices or dumped.module.partitions
    if compiled_for not in (devices, of_a_slice) if dumped.devices else compiled_for > devices:
        resized = target.resized(compiled_for)
        instead = f" {compiled_for} devices are {resized.name}." if resized else ""
        raise ValueError(
            f"{path} was compiled for {compiled_for} devices; {target.describe()} has {target.devices}.{instead}"
        )
    if dumped.devices is None:
        dumped.module.partitions = devices
    in_a_cycle = chip.peak_tflops.get("bfloat16", 0.0) * 1e3 / chip.clock_ghz / chip.devices
    refuse_other_chip(dumped.module, chip.name, chip.cores > 1, in_a_cycle, str(path))
    memory: dict[str, Any] = dumped.memory or {"argument_bytes": dumped.argument_bytes}
    about = _about(work.name or dumped.module.name.removeprefix("jit_"), target, axes)
    predicted = _predicted(about, dumped.module, target, axes, lie, memory, work, [])
    rate = slow_products(dumped.module, in_a_cycle)
    if rate is not None and rate < LOW_RATE:
        predicted.summary["notes"].append(
            f"the fastest product reaches {100 * rate:.0f}% of the peak of {chip.name}: check that the module was "
            "compiled for this chip, which it does not say itself"
        )
    return predicted


def _predicted(
    about: dict[str, Any],
    module: Module,
    target: Slice,
    axes: Mapping[str, int],
    lie: Sequence[Sequence[Any]],
    memory: Mapping[str, int],
    work: Work,
    options: list[dict[str, Any]],
) -> Predicted:
    assert target.chip is not None
    replay = corrected(replay_on(target, module, dict(axes), lie), target)
    told = memory_of_program(target, memory)
    too_large = told["headroom"] is not None and told["headroom"] < 0
    summary = {
        "schema": SCHEMA,
        "about": about,
        "status": "does_not_fit" if too_large else "ok",
        "reason": "needs more memory than the compiler leaves to a program" if too_large else None,
        "versions": versions(),
        "positions": positions(lie),
        "memory": told,
        "options": options,
        "step": speed_on(target.chip, len(lie), replay, work.tokens, work.flops),
        **parts_of_step(replay, replay.collectives),
    }
    summary["hints"] = program_hints(summary)
    return Predicted(summary, replay)


def memory_of_program(target: Slice, memory: Mapping[str, int]) -> dict[str, Any]:
    """Return the bytes of one device at the peak of any program's step; `peak` is None if arguments alone are known."""
    usable = usable_hbm(target.chip)
    if "argument_bytes" in memory:
        arguments = memory["argument_bytes"]
        short = usable - arguments if usable is not None and arguments > usable else None
        told = {"peak": None, "usable": usable, "headroom": short, "split": {"arguments": arguments}}
        return told | {"needed": arguments, "largest": [], "savings": []}
    at_rest = memory["arguments"] + memory["outputs"] - memory["aliased"]
    peak = memory.get("peak", at_rest + memory["temporary"] + memory["code"])
    split = {
        "arguments": memory["arguments"],
        "outputs that take no argument's place": memory["outputs"] - memory["aliased"],
        "temporaries": memory["temporary"],
        "program": peak - at_rest - memory["temporary"],
    }
    largest = [{"bytes": size, "shape": name, "op_name": None} for name, size in split.items() if size > 0]
    return {
        "peak": peak,
        "usable": usable,
        "headroom": None if usable is None else usable - peak,
        "split": split,
        "needed": peak,
        "largest": sorted(largest, key=lambda entry: -entry["bytes"]),
        "savings": [],
        **beside_peak(target.chip, memory),
    }


def _refused_for_memory(about: dict[str, Any], text: str) -> dict[str, Any]:
    found = parse_out_of_memory(text)
    memory = {key: found[key] for key in ("needed", "usable", "largest")} | {"savings": []}
    kept = {"schema": SCHEMA, "about": about, "status": "does_not_fit", "reason": found["reason"]}
    return kept | {"versions": versions(), "memory": memory}


def _about(name: str, target: Slice, axes: Mapping[str, int]) -> dict[str, Any]:
    return {
        "program": name,
        "target": target.name,
        "described": target.describe(),
        "chip": target.chip.name if target.chip else None,
        "axes": {str(axis): int(size) for axis, size in axes.items()},
    }


def _stage(
    function: Any, arguments: Sequence[Any], named: Mapping[str, Any], options: Mapping[str, Any] | None
) -> tuple[Any, Any]:
    """Return the function lowered and not compiled, or compiled: (lowered, None) or (None, compiled)."""
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
    lowered = function.lower(*arguments, **named)
    return lowered, None


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", "") or "")


def _mesh_of(tree: Any) -> jax.sharding.Mesh | None:
    """Return the mesh of devices that the first sharded array of a tree lies on; a tree of shardings is one too."""
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
    """Raise ValueError where a mesh does not have the devices of a slice: their kind, number and torus."""
    from valkyrie.search.compile.executable import device_position

    chip, devices = target.chip, list(mesh.devices.flat)
    assert chip is not None
    kind = devices[0].device_kind
    how = "slice.mesh(...) makes a mesh of the slice's devices"
    if kind not in chip.device_kinds:
        raise ValueError(f"the program lies on {kind} devices, and {target.describe()} has {chip.name} chips; {how}.")
    if len(devices) != target.devices:
        raise ValueError(f"the program's mesh has {len(devices)} devices; {target.describe()} has {target.devices}.")
    lie = [device_position(device) for device in devices]
    slices = {slice_ for slice_, _, _ in lie}
    shape = topology_of(target).shape
    spread = [len({coords[i] for _, coords, _ in lie}) for i in range(len(shape))]
    if len(slices) != target.slices or tuple(spread) != shape:
        has = "x".join(str(n) for n in spread)
        several = f"{len(slices)} slices of " if len(slices) > 1 else ""
        raise ValueError(
            f"the program's mesh lies on {several}{has}, and {target.describe()} is another torus; {how}, and "
            f'valkyrie.slice("{chip.name}-{has}"{f", slices={len(slices)}" if several else ""}) has that torus.'
        )


def _places(texts: Iterable[str], default: Sequence[Sequence[Any]], target: Slice) -> list[list[Any]]:
    """Return device places as they were written, `slice:x,y,z:core`; ValueError where they are not the slice's."""
    places = []
    for text in texts:
        try:
            slice_, coords, core = str(text).split(":")
            places.append([int(slice_), [int(c) for c in coords.split(",")], int(core)])
        except ValueError:
            raise ValueError(f"{text} is no place of a device. Write slice:x,y,z:core, such as 0:1,3,0:0.") from None
    if sorted(places) != sorted([s, list(c), core] for s, c, core in default):
        raise ValueError(f"the {len(places)} places are not those of the devices of {target.describe()}, each once.")
    return places
