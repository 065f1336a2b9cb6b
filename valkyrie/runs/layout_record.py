"""What run folders and `trials.jsonl` keep of a layout and of what was requested with it. Imports no JAX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from valkyrie.hardware.names import parse_target
from valkyrie.hardware.target import TargetRecord
from valkyrie.parallel.partition import Role


@dataclass(frozen=True)
class LayoutRecord:
    """A layout and its run's request: `about` in `compile.json`, `measure.json`, `tune.json` and `trials.jsonl`.

    Args:
        axes: Devices along each mesh axis.
        target: Name of the target; `described`, `chip` and `chips` (of all slices) are kept for older readers.
        batch: Sequences of the global batch.
        seq: Tokens of a sequence.
        hardware: The target itself. None in records of version 1.0 and before that `with_hardware` has not seen.
        layout: Name of the layout. None if it is illegal; then so are the fields after it.
        roles: What each mesh axis does, for display; `axis_roles` for programs. None in older records.
        degrees: Into how many parts each kind of role splits its work.
        sharding: A name shared by layouts of a model that split every array alike.
        pipeline: Stages and schedule, if the layout has any.
        predicted_by: Digest of the code and compiler of a prediction. None if it is none.
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
    pipeline: dict[str, Any] | None = None
    predicted_by: str | None = None

    @property
    def name(self) -> str:
        """The name of the layout, made of its settings if it is illegal."""
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
