"""Replays compiled modules, and caches each replay in the folder of its program."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace

from valkyrie.checksums import digest
from valkyrie.compiled.collectives import Collective, CollectiveUse, collective_uses
from valkyrie.compiled.hlo import Module, parse_module
from valkyrie.config.run import Run
from valkyrie.hardware.platforms import get_platform
from valkyrie.hardware.position import Position
from valkyrie.hardware.target import TargetConfig, build_topology
from valkyrie.machine.gpu_network import NcclModel
from valkyrie.machine.gpu_operations import GpuOpCostModel
from valkyrie.machine.network import Machine
from valkyrie.machine.replay import TPU_MODELS, CostModels, ReducedNetwork, Replay, replay
from valkyrie.paths import source_digest, write_atomic
from valkyrie.records import RecordError, encode, read_record
from valkyrie.search.compile.cache import target_settings
from valkyrie.search.compile.correction import target_correction
from valkyrie.search.compile.runner import CompiledRun
from valkyrie.units import count_text


def replay_program(run: Run, compiled: CompiledRun) -> tuple[Replay | None, list[CollectiveUse]]:
    """Return the corrected replay of a compiled run and the collectives of its program.

    The replay is None if the compiler does not write a schedule with cycle estimates. Collectives then have bytes but
    no times. Only the TPU compiler writes such a schedule.
    """
    target, step = run.config.target, compiled.outcome.step
    assert step is not None, "only a layout that fits is replayed"
    if get_platform(target.platform).replay is None:
        return None, collective_uses(parse_module(compiled.module_file.read_bytes()), step.axes)
    file = compiled.program_folder / f"replay-{_replay_key(target)}.json"
    try:
        result = read_record(Replay, file)
    except (OSError, RecordError):  # missing or damaged
        result = replay_on(target, parse_module(compiled.module_file.read_bytes()), step.axes, step.positions)
        write_atomic(file, json.dumps(encode(result)))  # compact: a timeline has thousands of spans
    result = correct_replay(result, target)
    return result, list(result.collectives)


def correct_replay(uncorrected: Replay, target: TargetConfig) -> Replay:
    """Return a copy of a replay with all times multiplied by the correction for the chip and the number of slices."""
    assert target.chip is not None
    correction = target_correction(target)
    factor, notes = correction.factor, list(uncorrected.notes)
    if target.chip.replay.factor is not None:
        notes.append(f"replayed times are multiplied by target.chip.replay.factor={correction.chip_factor:.3f}")
    elif correction.family_count:
        recipes = count_text(correction.family_count, "recipe")
        notes.append(
            f"replayed times are multiplied by {correction.chip_factor:.3f}, the median ratio of measured to replayed "
            f"time of {correction.run_count} published runs ({recipes}) on {target.chip.name}"
        )
    elif (note := get_platform(target.platform).replay_note) is not None:
        notes.append(note)
    if target.slices > 1:
        notes.append(
            f"replayed times are multiplied by {correction.slices_factor:.3f} for {target.slices} slices, the slowdown "
            "relative to one slice, fitted to published runs"
        )
    return replace(
        uncorrected,
        step_s=factor * uncorrected.step_s,
        parts=[replace(part, seconds=factor * part.seconds) for part in uncorrected.parts],
        sending_s=factor * uncorrected.sending_s,
        collectives=[
            replace(u, busy_s=factor * u.busy_s, exposed_s=factor * u.exposed_s) for u in uncorrected.collectives
        ],
        costs=[replace(cost, seconds=factor * cost.seconds) for cost in uncorrected.costs],
        spans=[replace(s, start_s=factor * s.start_s, duration_s=factor * s.duration_s) for s in uncorrected.spans],
        notes=notes,
        correction=factor,
    )


def replay_on(
    target: TargetConfig,
    module: Module,
    axes: dict[str, int],
    positions: Sequence[Position],
    share: Callable[[Collective], float] | None = None,
) -> Replay:
    """Replay a scheduled module on a slice.

    Raises ValueError if the module is for another number of devices, or if the chip lacks a value that the replay
    needs, such as `ici_link_gbs`.

    Args:
        target: The slice.
        module: The module of one device.
        axes: Names and sizes of the mesh's axes, in order.
        positions: Positions of the mesh's devices, in the order of `mesh.devices.flat`.
        share: Returns the share of its bytes that a collective sends, or None if all send all of them.
    """
    assert target.chip is not None
    models = REPLAY_MODELS.get(get_platform(target.platform).replay, TPU_MODELS)
    if share is not None:
        build_network, reduced = models.network, share
        models = models._replace(network=lambda *args: ReducedNetwork(build_network(*args), reduced))
    machine = Machine(target.chip, build_topology(target), tuple(positions), axes, target.routing_imbalance)
    return replay(module, machine, models)


REPLAY_MODELS: dict[str | None, CostModels] = {
    "libtpu": TPU_MODELS,
    "xla_gpu": CostModels(GpuOpCostModel, NcclModel),
}
"""Cost models of the replay, by `Platform.replay`."""


def _replay_key(target: TargetConfig) -> str:
    """Return a digest of a replay's inputs other than the module: the source code and the target's settings."""
    settings = json.dumps(target_settings(target), sort_keys=True, default=str)
    source = source_digest("compiled", "machine", "hardware")
    return digest(settings + source)[:16]
