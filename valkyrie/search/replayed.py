"""Decides how a compiled module becomes a replay, and keeps the replay beside it while its assumptions stand."""

from __future__ import annotations

import hashlib
import json
import pickle
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import OmegaConf

from valkyrie.hardware import Platform, TargetConfig, topology_of
from valkyrie.paths import write_whole
from valkyrie.run import Run
from valkyrie.search.compile import Compiled

if TYPE_CHECKING:
    from valkyrie.search.replay import CollectiveUse, Replay


def replayed(run: Run, compiled: Compiled) -> tuple[Replay | None, list[CollectiveUse]]:
    """Return the replay of a compiled run and what its program sends; no replay where the target has no schedule.

    Only the TPU compiler leaves a schedule with its own cycle estimates. Elsewhere bytes are told, and no time.
    """
    target = run.config.target
    kept = compiled.folder / f"replay-{_digest(target)}.pickle"
    if kept.is_file():
        return pickle.loads(kept.read_bytes())
    found = _replay(target, compiled)
    write_whole(kept, pickle.dumps(found))
    return found


def _replay(target: TargetConfig, compiled: Compiled) -> tuple[Replay | None, list[CollectiveUse]]:
    from valkyrie.search.hlo import parse
    from valkyrie.search.replay import Machine, Position, replay, traffic

    module, axes = parse(compiled.module.read_bytes()), compiled.outcome["axes"]
    if target.platform is not Platform.tpu:
        return None, traffic(module, axes)
    assert target.chip is not None
    positions = tuple(Position(s, tuple(coords), core) for s, coords, core in compiled.outcome["positions"])
    result = replay(module, Machine(target.chip, topology_of(target), positions, axes))
    return result, list(result.collectives)


def _digest(target: TargetConfig) -> str:
    """Return a name for what decides a replay beside the module: this package's source and the target's figures."""
    figures = json.dumps(OmegaConf.to_container(OmegaConf.structured(target), enum_to_str=True), sort_keys=True)
    return hashlib.sha256((figures + _source()).encode()).hexdigest()[:16]


@cache
def _source() -> str:
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).resolve().parent.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()
