"""What a step's collectives send, summed. Imports no NumPy: reports read these records."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from valkyrie.compiled.collectives import CollectiveUse


@dataclass(frozen=True)
class CollectiveRecord:
    """All runs of collectives alike in kind, axes and cause, in one step of one device.

    Args:
        kind: HLO opcode, such as `all-reduce`.
        mesh_axes: Mesh axes that it crosses; empty if unknown.
        torus_axes: Torus axes that it uses; empty without a network model.
        cause: Name of the JAX operation that it belongs to.
        source: File and line of that operation.
        calls: Runs per step.
        bytes: Bytes that the device sends.
        busy_s: Seconds during which it is under way.
        exposed_s: Seconds of those in which the device waits for it.
    """

    kind: str
    mesh_axes: tuple[str, ...]
    torus_axes: tuple[str, ...]
    cause: str
    source: str
    calls: float
    bytes: float
    busy_s: float
    exposed_s: float


@dataclass(frozen=True)
class AxesBytes:
    """Bytes that a device sends over a set of mesh axes in a step; no axes if they are unknown."""

    mesh_axes: tuple[str, ...]
    bytes: float


@dataclass(frozen=True)
class Communication:
    """What a device sends in a step, in bytes, in total and by mesh axes, torus axis and kind of collective.

    `sending_s` are the seconds in which any collective is under way, `exposed_s` those in which the device waits, both
    None or 0 without a replay. `collectives` are ordered by bytes; records of trials leave them out.
    """

    bytes: float | None = None
    bytes_by_mesh_axes: tuple[AxesBytes, ...] = ()
    bytes_by_torus_axis: dict[str, float] = field(default_factory=dict)
    bytes_by_kind: dict[str, float] = field(default_factory=dict)
    sending_s: float | None = None
    exposed_s: float | None = None
    collectives: tuple[CollectiveRecord, ...] = ()

    @property
    def by_mesh_axes(self) -> dict[tuple[str, ...], float]:
        """Bytes by mesh axes."""
        return {over.mesh_axes: over.bytes for over in self.bytes_by_mesh_axes}


def sum_communication(uses: Iterable[CollectiveUse], sending_s: float | None = None) -> Communication:
    """Sum the collectives of a step; `sending_s` are the seconds in which any is under way, or None if unknown."""
    by_mesh: dict[tuple[str, ...], float] = defaultdict(float)
    by_torus: dict[str, float] = defaultdict(float)
    by_kind: dict[str, float] = defaultdict(float)
    records, exposed = [], 0.0
    for use in sorted(uses, key=lambda u: -u.bytes_sent):
        by_mesh[use.mesh_axes] += use.bytes_sent
        by_kind[use.kind] += use.bytes_sent
        for axis, sent in use.bytes_by_torus_axis.items():
            by_torus[axis] += sent
        exposed += use.exposed_s
        records.append(
            CollectiveRecord(
                kind=use.kind,
                mesh_axes=use.mesh_axes,
                torus_axes=use.torus_axes,
                cause=use.op_name,
                source=use.source,
                calls=use.calls,
                bytes=use.bytes_sent,
                busy_s=use.busy_s,
                exposed_s=use.exposed_s,
            )
        )
    return Communication(
        bytes=sum(by_mesh.values(), 0.0),
        bytes_by_mesh_axes=tuple(AxesBytes(axes, sent) for axes, sent in by_mesh.items()),
        bytes_by_torus_axis=dict(by_torus),
        bytes_by_kind=dict(by_kind),
        sending_s=sending_s,
        exposed_s=exposed,
        collectives=tuple(records),
    )
