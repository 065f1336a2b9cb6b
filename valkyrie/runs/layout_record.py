"""The record of a layout and its request in run folders and `trials.jsonl`. Imports no JAX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache

from valkyrie.hardware.names import parse_target
from valkyrie.hardware.target import TargetRecord
from valkyrie.parallel.partition import Role
from valkyrie.parallel.schedule import PipelineRecord


@dataclass(frozen=True)
class LayoutRecord:
    """A layout and its run's request: `about` in `compile.json`, `measure.json`, `tune.json` and `trials.jsonl`.

    Args:
        axes: Devices along each mesh axis.
        target: Name of the target. `described`, `chip` and `chips` (of all slices) are stored for older readers.
        batch: Sequences of the global batch.
        seq: Tokens of a sequence.
        hardware: The target. None in records of version 1.0 and earlier, unless `with_hardware` has added it.
        layout: Name of the layout. None if the layout is illegal, as are the fields after it.
        roles: Role of each mesh axis, for display.
        axis_roles: Role of each mesh axis. None in older records.
        degrees: Number of parts into which each kind of role splits its work.
        sharding: Name shared by layouts of a model that shard every array alike.
        pipeline: `Pipeline.record()`, or None without a pipeline.
        predicted_by: Digest of the code and compiler of a prediction, or None for other stages.
    """

    model: str
    mesh: str
    partition: str
    target: str
    axes: dict[str, int] = field(default_factory=dict)
    mesh_placement: tuple[str, ...] | None = None
    microbatches: int = 1
    remat: str = "none"
    described: str | None = None
    chip: str | None = None
    chips: int | None = None
    batch: int | None = None
    seq: int | None = None
    precision: str | None = None
    hardware: TargetRecord | None = None
    layout: str | None = None
    roles: str | None = None
    axis_roles: dict[str, Role] | None = None
    degrees: dict[str, int] | None = None
    sharding: str | None = None
    pipeline: PipelineRecord | None = None
    predicted_by: str | None = None

    @property
    def name(self) -> str:
        """Name of the layout, composed of its settings if it is illegal."""
        if self.layout is not None:
            return self.layout
        microbatches = [f"mb{self.microbatches}"] if self.microbatches != 1 else []
        remat = [f"remat_{self.remat}"] if self.remat != "none" else []
        return "-".join([self.mesh, self.partition, *microbatches, *remat])


def with_hardware(record: LayoutRecord, overrides: Mapping[str, str]) -> LayoutRecord:
    """Return the record of an older Valkyrie with `hardware`, derived from the target's name and a trial's overrides.

    It stays None if the name belongs to a user's own chip.
    """
    if record.hardware is not None:
        return record
    topology, slices = overrides.get("target.topology"), overrides.get("target.slices", "1")
    return replace(record, hardware=_parse_hardware(record.target, topology, slices))


@cache
def _parse_hardware(name: str, topology: str | None, slices: str) -> TargetRecord | None:
    try:
        target = parse_target(name)
        if topology is not None:
            target = replace(target, topology=topology)  # also derives `chips` and `hosts`
        target.slices = int(slices)
    except ValueError:
        return None
    return target.record()
