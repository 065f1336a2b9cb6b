"""Replays a compiled module, and caches the replay as JSON in the folder of the program."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace

from valkyrie.checksums import digest
from valkyrie.compiled.collectives import CollectiveUse, traffic
from valkyrie.compiled.hlo import Module, parse
from valkyrie.config.run import Run
from valkyrie.hardware.platforms import platform_of
from valkyrie.hardware.position import Position
from valkyrie.hardware.target import TargetConfig, topology_of
from valkyrie.machine.network import Machine
from valkyrie.machine.replay import Replay, replay
from valkyrie.paths import source_digest, write_atomic
from valkyrie.records import RecordError, encode, read_record
from valkyrie.search.compile.cache import target_settings
from valkyrie.search.compile.runner import CompiledRun
from valkyrie.search.compile.trust import correction_of


def replayed(run: Run, compiled: CompiledRun) -> tuple[Replay | None, list[CollectiveUse]]:
    """Return the corrected replay of a compiled run, or None without a schedule, and the collectives of its program.

    Only the TPU compiler leaves a schedule with cycle estimates. For other targets, collectives have bytes but no
    times.
    """
    target, step = run.config.target, compiled.outcome.step
    assert step is not None, "only a layout that fits is replayed"
    replay_module = REPLAYS.get(platform_of(target.platform).replay)
    if replay_module is None:
        return None, traffic(parse(compiled.module.read_bytes()), step.axes)
    file = compiled.program / f"replay-{_digest(target)}.json"
    try:
        result = read_record(Replay, file)
    except (OSError, RecordError):  # missing or damaged
        result = replay_module(target, parse(compiled.module.read_bytes()), step.axes, step.positions)
        write_atomic(file, json.dumps(encode(result)))  # compact: a timeline has thousands of spans
    result = corrected(result, target)
    return result, list(result.collectives)


def corrected(raw: Replay, target: TargetConfig) -> Replay:
    """Return a replay with all times multiplied by the correction for the target's chip and number of slices."""
    assert target.chip is not None
    correction = correction_of(target)
    by, notes = correction.factor, list(raw.notes)
    if target.chip.replay.factor is not None:
        notes.append(f"all times are the replay's x {correction.of_chip:.3f}, as target.chip.replay.factor says")
    elif correction.families:
        notes.append(
            f"all times are the replay's x {correction.of_chip:.3f}: so much {correction.rows} published runs of "
            f"{correction.families} recipe{'s' * (correction.families > 1)} on {target.chip.name} took of theirs"
        )
    if target.slices > 1:
        more = 100 * (correction.of_slices - 1)
        notes.append(f"and {more:.1f}% more: so much published runs lost to {target.slices} slices instead of one")
    return replace(
        raw,
        step_s=by * raw.step_s,
        parts=[replace(part, seconds=by * part.seconds) for part in raw.parts],
        sending_s=by * raw.sending_s,
        collectives=[replace(u, busy_s=by * u.busy_s, exposed_s=by * u.exposed_s) for u in raw.collectives],
        costs=[replace(cost, seconds=by * cost.seconds) for cost in raw.costs],
        spans=[replace(s, start_s=by * s.start_s, duration_s=by * s.duration_s) for s in raw.spans],
        notes=notes,
        correction=by,
    )


def replay_on(target: TargetConfig, module: Module, axes: dict[str, int], positions: Sequence[Position]) -> Replay:
    """Replay a scheduled module on a slice. Raises ValueError if a figure of the slice's chip is missing.

    `axes` are the names and sizes of the mesh's axes, in order. `positions` are those of its devices, flattened.
    """
    assert target.chip is not None
    return replay(module, Machine(target.chip, topology_of(target), tuple(positions), axes))


REPLAYS: dict[str | None, Callable[[TargetConfig, Module, dict[str, int], Sequence[Position]], Replay]] = {
    "libtpu": replay_on,
}
"""Functions that replay a compiled module, by the platform's `replay`."""


def _digest(target: TargetConfig) -> str:
    """Return a digest of the inputs of a replay other than the module: its source code and the target's figures."""
    figures = json.dumps(target_settings(target), sort_keys=True, default=str)
    source = source_digest("compiled", "machine", "hardware")
    return digest(figures + source)[:16]
