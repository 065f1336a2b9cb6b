"""What a step's collectives send, summed. Imports no NumPy: reports read these records."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from valkyrie.axes import axes_text, read_axes
from valkyrie.parts import PartKind, StepPart

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

    @property
    def by_label(self) -> dict[str, float]:
        """Bytes by mesh axes as they are printed: `x,y`."""
        return {axes_text(axes): size for axes, size in self.by_mesh_axes.items()}


@dataclass(frozen=True)
class CollectiveTime:
    """Seconds of a traced step in collectives of one kind over some mesh axes."""

    kind: str
    mesh_axes: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class CollectiveTrace:
    """Time in collectives from a profiler's trace, waiting for other devices included, mean over devices.

    `times` is None if there is no trace; `note` then says why, and otherwise what was measured. Tracing slows a step
    down, so shares are of `step_s`, the median traced step.
    """

    times: tuple[CollectiveTime, ...] | None
    note: str | None = None
    step_s: float | None = None


def measured_parts(trace: CollectiveTrace | None, step_s: float | None) -> tuple[StepPart, ...]:
    """Split a measured step into collectives by mesh axes and the rest; empty without a trace or collectives.

    The trace covers a few extra steps that it slows down, so their shares are applied to the timed step.
    """
    if trace is None or not trace.times or not trace.step_s or step_s is None:
        return ()
    seconds: dict[tuple[str, ...], float] = {}
    for time in trace.times:
        seconds[time.mesh_axes] = seconds.get(time.mesh_axes, 0.0) + time.seconds
    shares = {axes: total / trace.step_s for axes, total in seconds.items()}
    whole = max(1.0, sum(shares.values()))
    taken = {axes: share / whole * step_s for axes, share in shares.items()}
    rest = StepPart(PartKind.rest, (), max(0.0, step_s - sum(taken.values())))
    return (*(StepPart(PartKind.collectives, axes, part) for axes, part in taken.items()), rest)


def upgrade_communication(results: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the communication in results of version 1, which named mesh axes by texts and contained the trace.

    Newer values come back as they are. Raises AttributeError, TypeError or ValueError for malformed values.
    """
    sent = results.get("communication")
    if not isinstance(sent, dict) or not isinstance(sizes := sent.get("bytes_by_mesh_axes", {}), dict):
        return dict(results)
    by_axes = [{"mesh_axes": read_axes(axes), "bytes": size} for axes, size in sizes.items()]
    new = {**results, "communication": sent | {"bytes_by_mesh_axes": by_axes, "collectives": sent.get("causes", [])}}
    if "collective_note" in sent or "collective_s" in sent:
        by_kind = sent.get("collective_s")
        times = (
            None
            if by_kind is None
            else [
                {"kind": kind, "mesh_axes": read_axes(axes), "seconds": seconds}
                for axes, kinds in by_kind.items()
                for kind, seconds in kinds.items()
            ]
        )
        # Without the seconds of the traced steps, overlapping collectives were counted twice.
        new["trace"] = {"times": times, "note": sent.get("collective_note"), "step_s": sent.get("traced_step_s")}
    return new


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
