"""The record of a layout and of the run that requested it, in run folders and `trials.jsonl`. Does not import JAX."""

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
    """A layout and its run, stored as `about` in `compile.json`, `measure.json`, `tune.json` and `trials.jsonl`.

    The fields from `layout` on are None if the layout is illegal.

    Args:
        model: Name of the model.
        mesh: Name of the mesh.
        partition: Name of the partition.
        target: Name of the target.
        axes: Number of devices along each mesh axis.
        mesh_placement: Order in which mesh axes map to the topology, or None for the default.
        microbatches: Number of microbatches.
        remat: Name of the remat policy.
        described: The target as text. This field, `chip` and `chips` are stored for older versions of Valkyrie.
        chip: Name of the chip, or None if the devices are simulated or unknown.
        chips: Number of chips in all slices.
        batch: Sequences in the global batch.
        seq: Tokens per sequence.
        precision: Name of the precision.
        hardware: The target. None in records of version 1.0 and earlier, unless added by `with_hardware`.
        layout: Name of the layout.
        roles: Role of each mesh axis, as text.
        axis_roles: Role of each mesh axis. None in older records.
        degrees: Product of the sizes of the mesh axes with each kind of role, such as `DP`.
        sharding: Hash that layouts of a model share if they shard every array in the same way (`Layout.sharding_hash`).
        pipeline: `Pipeline.to_record()`, or None without a pipeline.
        predicted_by: Digest of the code and compiler of a predicted trial of a sweep, else None.
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
        """Name of the layout, or a name made from its settings if it is illegal."""
        if self.layout is not None:
            return self.layout
        microbatches = [f"mb{self.microbatches}"] if self.microbatches != 1 else []
        remat = [f"remat_{self.remat}"] if self.remat != "none" else []
        return "-".join([self.mesh, self.partition, *microbatches, *remat])


def with_hardware(record: LayoutRecord, overrides: Mapping[str, str]) -> LayoutRecord:
    """Add `hardware` to a record of version 1.0 or earlier, which lacks it. Returns newer records unchanged.

    `hardware` follows from the target's name and the overrides of the trial (`target.topology`, `target.slices`). It
    remains None if the target is not built in.
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
