"""From a compiled module to its replay, which is kept beside it as JSON while nothing that decides it changes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from valkyrie.compiled.collectives import CollectiveUse, traffic
from valkyrie.compiled.hlo import Module, parse
from valkyrie.config.run import Run
from valkyrie.hardware.platforms import platform_of
from valkyrie.hardware.target import TargetConfig, topology_of
from valkyrie.machine.network import Machine
from valkyrie.machine.replay import Cost, Replay, Span, replay
from valkyrie.machine.torus import Position
from valkyrie.paths import source_digest, write_whole
from valkyrie.search.compile.runner import Compiled, target_settings
from valkyrie.search.compile.trust import correction_of


def replayed(run: Run, compiled: Compiled) -> tuple[Replay | None, list[CollectiveUse]]:
    """Return the corrected replay of a compiled run and what its program sends; none where the target has no schedule.

    Only the TPU compiler leaves a schedule with its own cycle estimates. Other targets have bytes sent and no time.
    """
    target = run.config.target
    replay_module = REPLAYS.get(platform_of(target.platform).replay)
    if replay_module is None:
        return None, traffic(parse(compiled.module.read_bytes()), compiled.outcome["axes"])
    kept = compiled.folder / f"replay-{_digest(target)}.json"
    result = _from_json(kept.read_bytes()) if kept.is_file() else None
    if result is None:
        outcome = compiled.outcome
        result = replay_module(target, parse(compiled.module.read_bytes()), outcome["axes"], outcome["positions"])
        write_whole(kept, json.dumps(asdict(result)))
    result = corrected(result, target)
    return result, list(result.collectives)


def corrected(raw: Replay, target: TargetConfig) -> Replay:
    """Return a replay with all its times as one's own or published runs on the chip, and on as many slices, took."""
    assert target.chip is not None
    found = correction_of(target)
    by, notes = found.factor, list(raw.notes)
    if target.chip.replay.factor is not None:
        notes.append(f"all times are the replay's x {found.of_chip:.3f}, as target.chip.replay.factor says")
    elif found.families:
        notes.append(
            f"all times are the replay's x {found.of_chip:.3f}: so much {found.rows} published runs of "
            f"{found.families} recipe{'s' * (found.families > 1)} on {target.chip.name} took of theirs"
        )
    if target.slices > 1:
        more = 100 * (found.of_slices - 1)
        notes.append(f"and {more:.1f}% more: so much published runs lost to {target.slices} slices instead of one")
    return replace(
        raw,
        step_s=by * raw.step_s,
        seconds={name: by * seconds for name, seconds in raw.seconds.items()},
        sending_s=by * raw.sending_s,
        collectives=[replace(u, busy_s=by * u.busy_s, exposed_s=by * u.exposed_s) for u in raw.collectives],
        costs=[replace(cost, seconds=by * cost.seconds) for cost in raw.costs],
        spans=[replace(s, start_s=by * s.start_s, duration_s=by * s.duration_s) for s in raw.spans],
        notes=notes,
        correction=by,
    )


def replay_on(target: TargetConfig, module: Module, axes: dict[str, int], positions: Sequence[Sequence[Any]]) -> Replay:
    """Return the replay of any scheduled module on a slice; ValueError where the slice's chip lacks a figure for it.

    `axes`: names and sizes of the mesh's axes, in order; `positions`: slice, coordinates and core of each of its
    devices, flattened.
    """
    assert target.chip is not None
    places = tuple(Position(s, tuple(coords), core) for s, coords, core in positions)
    return replay(module, Machine(target.chip, topology_of(target), places, axes))


REPLAYS: dict[str | None, Callable[[TargetConfig, Module, dict[str, int], Sequence[Sequence[Any]]], Replay]] = {
    "libtpu": replay_on,
}
"""What replays a compiled module, by the platform's `replay`."""


def _from_json(text: bytes) -> Replay | None:
    """Return a replay that was kept; None for a damaged file, which is then made again."""
    try:
        values: dict[str, Any] = json.loads(text)
        uses = [use | {key: tuple(use[key]) for key in ("mesh_axes", "torus_axes")} for use in values["collectives"]]
        values["collectives"] = [CollectiveUse(**use) for use in uses]
        values["costs"] = [Cost(**cost) for cost in values["costs"]]
        values["spans"] = [Span(**span) for span in values["spans"]]
        return Replay(**values)
    except (ValueError, KeyError, TypeError):
        return None


def _digest(target: TargetConfig) -> str:
    """Return a name for what decides a replay beside the module: the source that reads it, and the target's figures."""
    figures = json.dumps(target_settings(target), sort_keys=True, default=str)
    source = source_digest("compiled", "hardware", "machine")
    return hashlib.sha256((figures + source).encode()).hexdigest()[:16]
