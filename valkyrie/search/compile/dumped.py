"""Predicts a step of a compiled module that XLA has dumped to a file."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from valkyrie.compiled.collectives import has_partial_groups
from valkyrie.compiled.dumped import DumpedModule, fastest_product_rate, read_dumped_module, refuse_other_chip
from valkyrie.compiled.hlo import Module
from valkyrie.hardware.platforms import get_platform
from valkyrie.hardware.position import Position
from valkyrie.parallel.slice import Slice
from valkyrie.search.compile.predict import PredictedProgram, ProgramWork, foreign_program, predict_module

LOW_RATE = 0.35
"""If the fastest large product of a dumped module is below this share of peak, the module may be for another chip."""


def predict_file(
    path: Path,
    target: Slice,
    axes: Mapping[str, int],
    *,
    places: Sequence[Position] | None = None,
    work: ProgramWork | None = None,
) -> PredictedProgram:
    """Predict a step of a compiled module that XLA has dumped to a file (`--xla_dump_to`).

    Raises ValueError for a module that cannot be replayed, or was compiled for another platform, chip or number of
    devices, and for `places` that are not those of the slice.

    Args:
        path: File of the module.
        target: The slice.
        axes: Names and sizes of the axes of the module's mesh, in order.
        places: Positions of the mesh's devices, in the order of `mesh.devices.flat`, or None for those of `Slice.mesh`.
        work: Name, tokens and FLOPs of the program, which the module does not contain.
    """
    dump, work = read_dumped_module(path), work or ProgramWork()
    _refuse_other_platform(dump, target, path)
    positions = target.positions(list(axes.values()), list(axes))
    if places is not None:
        _require_positions(places, positions, target)
        positions = tuple(places)
    devices, per_slice = len(positions), len(positions) // target.slices
    module_devices = dump.device_count or dump.module.num_partitions
    if module_devices not in (devices, per_slice) if dump.device_count else module_devices > devices:
        resized = target.resized(module_devices)
        suggestion = f" Use {resized.name}." if resized else ""
        raise ValueError(
            f"{path} was compiled for {module_devices} devices, but {target.describe()} has {target.devices}."
            f"{suggestion}"
        )
    if dump.device_count is None:
        dump.module.num_partitions = devices
    chip_note = _check_chip(dump, target, path)
    memory = dump.memory or dump.argument_bytes
    program = foreign_program(work, work.name or dump.module.name.removeprefix("jit_"), target, axes)
    predicted_program = predict_module(program, dump.module, target, axes, positions, memory, work)
    prediction, notes = predicted_program.prediction, [chip_note, *_describe_axis_order(dump.module, axes)]
    return replace(predicted_program, prediction=replace(prediction, notes=(*prediction.notes, *notes)))


def _refuse_other_platform(dump: DumpedModule, target: Slice, path: Path) -> None:
    """Raise ValueError for a module of another platform, and for a chip without the figures that a replay needs."""
    platform, chip = get_platform(target.platform), target.chip
    assert chip is not None
    if dump.platform != platform.name:
        raise ValueError(
            f"{path} was compiled for {get_platform(dump.platform).plural_name}, but {target.describe()} has "
            f"{platform.plural_name}. Use the slice that it was compiled for."
        )
    if missing := platform.missing_figures_message(chip, hosts=target.hosts):
        raise ValueError(missing)


def _check_chip(dump: DumpedModule, target: Slice, path: Path) -> str:
    """Return a note that the module may be for another chip. Raises ValueError if it clearly is."""
    chip = target.chip
    assert chip is not None
    if dump.gpu_name and chip.gpu and dump.gpu_name != (gpu_name := f"sm_{chip.gpu.capability.removesuffix('a')}"):
        raise ValueError(
            f"{path} was compiled for {dump.gpu_name}, as its name says, but {chip.name} is {gpu_name}. Use the slice "
            "that it was compiled for."
        )
    peak_tflops, clock_ghz = chip.peak_tflops.get("bfloat16", 0.0), chip.clock_ghz or math.inf  # unknown for GPUs
    flops_per_cycle = peak_tflops * 1e3 / clock_ghz / chip.devices
    refuse_other_chip(dump.module, chip.name, chip.cores > 1, flops_per_cycle, str(path))
    rate = fastest_product_rate(dump.module, flops_per_cycle)
    if rate is not None and rate < LOW_RATE:
        return (
            f"the fastest product reaches only {100 * rate:.0f}% of the peak of {chip.name}. Check that the module was "
            "compiled for this chip, because modules do not name their chip"
        )
    return (
        f"this prediction holds only if the module was compiled for {chip.name}. Check this, because a module does not "
        "record its chip"
    )


def _describe_axis_order(module: Module, axes: Mapping[str, int]) -> list[str]:
    """Return a note if the groups of a module's collectives do not match the order of the mesh axes."""
    if not has_partial_groups(module, dict(axes)):
        return []
    axes_of_size_1 = {axis: 1 for axis, size in axes.items() if size == 1}  # in any order
    longer = [(axis, size) for axis, size in axes.items() if size > 1]
    orders = (dict(order) | axes_of_size_1 for order in itertools.permutations(longer))
    matching_order = next((order for order in orders if not has_partial_groups(module, order)), None)
    text, matching_text = (
        ",".join(f"{axis}={size}" for axis, size in (order or {}).items()) for order in (axes, matching_order)
    )
    remedy = f"Use the order {matching_text}" if matching_order else "Check the names and sizes of the axes"
    return [f"the mesh {text} does not match some collectives of the module. {remedy}"]


def _require_positions(places: Sequence[Position], positions: Sequence[Position], target: Slice) -> None:
    """Raise ValueError if `places` are not the `positions` of the slice, in any order."""
    name, (position, count) = target.describe(), (Counter(places) or Counter(positions)).most_common(1)[0]
    if other := sorted(set(places) - set(positions)):
        raise ValueError(
            f"places has {other[0]}, which is not a device of {name}. List each of the {len(positions)} devices of "
            f"{name} once."
        )
    missing = [str(other) for other in sorted(set(positions) - set(places))]
    problems = [f"{position} is listed {count} times"] if count > 1 else []
    problems += [f"missing: {', '.join([*missing[:3], *(['...'] if len(missing) > 3 else [])])}"] if missing else []
    if problems:
        raise ValueError(f"places: {'; '.join(problems)}. List each of the {len(positions)} devices of {name} once.")
