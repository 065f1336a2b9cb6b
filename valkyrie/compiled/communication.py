"""Records of the communication of a step. Does not import NumPy, because reports read these records."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from valkyrie.axes import axes_text, parse_axes
from valkyrie.parts import PartKind, StepPart

if TYPE_CHECKING:
    from valkyrie.compiled.collectives import CollectiveUse


@dataclass(frozen=True)
class CollectiveRecord:
    """All calls of collectives with the same kind, axes and cause, in one step of one device.

    Args:
        kind: HLO opcode, such as `all-reduce`.
        mesh_axes: Mesh axes that it crosses; empty if unknown.
        torus_axes: Torus axes that it uses; empty without a network model.
        cause: Name of the JAX operation that caused it.
        source: File and line of that operation.
        calls: Calls per step.
        bytes: Bytes that the device sends per step.
        busy_s: Seconds per step during which it is in progress.
        exposed_s: Part of `busy_s` during which the device waits for it.
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
    """Bytes that a device sends over some mesh axes in a step. `mesh_axes` is empty if unknown."""

    mesh_axes: tuple[str, ...]
    bytes: float


@dataclass(frozen=True)
class Communication:
    """Bytes that a device sends in a step, in total and by mesh axes, torus axis and kind of collective.

    Args:
        bytes: Total bytes; None if unknown.
        sending_s: Seconds during which any collective is in progress; None without a replay.
        exposed_s: Seconds during which the device waits for collectives; None or 0 without a replay.
        collectives: All collectives, most bytes first; empty in records of trials.
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
        """`bytes_by_mesh_axes` as a dict from mesh axes to bytes."""
        return {entry.mesh_axes: entry.bytes for entry in self.bytes_by_mesh_axes}

    @property
    def bytes_by_label(self) -> dict[str, float]:
        """Bytes by mesh axes as text, such as `x,y`."""
        return {axes_text(axes): size for axes, size in self.by_mesh_axes.items()}


@dataclass(frozen=True)
class CollectiveTime:
    """Seconds per traced step in collectives of one kind over some mesh axes."""

    kind: str
    mesh_axes: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class CollectiveTrace:
    """Time in collectives from a profiler's trace, mean over devices, including waiting for other devices.

    Args:
        times: Seconds by kind and mesh axes, or None if there is no trace.
        note: Reason why there is no trace, or a description of the measurement.
        step_s: Median duration of a traced step. Tracing slows steps down, so divide `times` by this.
    """

    times: tuple[CollectiveTime, ...] | None
    note: str | None = None
    step_s: float | None = None


def measured_parts(trace: CollectiveTrace | None, step_s: float | None) -> tuple[StepPart, ...]:
    """Split a measured step time into the time of collectives, by mesh axes, and the remaining time (`PartKind.rest`).

    Tracing slows steps down, so the collectives' shares of a traced step are applied to `step_s`, the duration of a
    step without tracing. If collectives overlap and their shares add up to more than 1, the shares are scaled to add up
    to 1. Returns an empty tuple if either step time is unknown, or if there is no trace or no collective in it.
    """
    if trace is None or not trace.times or not trace.step_s or step_s is None:
        return ()
    traced_s_by_axes: dict[tuple[str, ...], float] = {}
    for collective in trace.times:
        traced_s_by_axes[collective.mesh_axes] = traced_s_by_axes.get(collective.mesh_axes, 0.0) + collective.seconds
    shares = {axes: traced_s / trace.step_s for axes, traced_s in traced_s_by_axes.items()}
    share_sum = max(1.0, sum(shares.values()))
    seconds_by_axes = {axes: share / share_sum * step_s for axes, share in shares.items()}
    remainder = StepPart(PartKind.rest, (), max(0.0, step_s - sum(seconds_by_axes.values())))
    return (*(StepPart(PartKind.collectives, axes, seconds) for axes, seconds in seconds_by_axes.items()), remainder)


def upgrade_communication(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return saved results with their communication upgraded from version 1.

    Version 1 stored mesh axes as text, and the trace as a part of the communication. Returns a copy of newer results.
    Raises AttributeError, TypeError or ValueError for malformed values.
    """
    communication = results.get("communication")
    if not isinstance(communication, dict) or not isinstance(
        sizes := communication.get("bytes_by_mesh_axes", {}), dict
    ):
        return dict(results)
    by_axes = [{"mesh_axes": parse_axes(axes), "bytes": size} for axes, size in sizes.items()]
    upgraded_results = {
        **results,
        "communication": communication
        | {"bytes_by_mesh_axes": by_axes, "collectives": communication.get("causes", [])},
    }
    if "collective_note" in communication or "collective_s" in communication:
        seconds_by_kind = communication.get("collective_s")
        times = (
            None
            if seconds_by_kind is None
            else [
                {"kind": kind, "mesh_axes": parse_axes(axes), "seconds": seconds}
                for axes, kinds in seconds_by_kind.items()
                for kind, seconds in kinds.items()
            ]
        )
        # Files without the time of traced steps count overlapping collectives twice.
        upgraded_results["trace"] = {
            "times": times,
            "note": communication.get("collective_note"),
            "step_s": communication.get("traced_step_s"),
        }
    return upgraded_results


def sum_communication(uses: Iterable[CollectiveUse], sending_s: float | None = None) -> Communication:
    """Sum the collectives of a step.

    `sending_s`: Seconds during which any collective is in progress, or None if unknown.
    """
    bytes_by_mesh_axes: dict[tuple[str, ...], float] = defaultdict(float)
    bytes_by_torus_axis: dict[str, float] = defaultdict(float)
    bytes_by_kind: dict[str, float] = defaultdict(float)
    records, exposed_s = [], 0.0
    for use in sorted(uses, key=lambda u: -u.bytes_sent):
        bytes_by_mesh_axes[use.mesh_axes] += use.bytes_sent
        bytes_by_kind[use.kind] += use.bytes_sent
        for axis, bytes_sent in use.bytes_by_torus_axis.items():
            bytes_by_torus_axis[axis] += bytes_sent
        exposed_s += use.exposed_s
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
        bytes=sum(bytes_by_mesh_axes.values(), 0.0),
        bytes_by_mesh_axes=tuple(AxesBytes(axes, bytes_sent) for axes, bytes_sent in bytes_by_mesh_axes.items()),
        bytes_by_torus_axis=dict(bytes_by_torus_axis),
        bytes_by_kind=dict(bytes_by_kind),
        sending_s=sending_s,
        exposed_s=exposed_s,
        collectives=tuple(records),
    )
