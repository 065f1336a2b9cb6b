"""What the collectives of a step come to, as plain values. Imports no NumPy: reports read what it returns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from valkyrie.axes import UNATTRIBUTED

if TYPE_CHECKING:
    from valkyrie.compiled.collectives import CollectiveUse


def communication(uses: Iterable[CollectiveUse], sending_s: float | None = None) -> dict[str, Any]:
    """Return bytes sent by one device in a step: by mesh axes, by torus axis, by kind, and by cause.

    `sending_s`: the seconds of the step in which any collective was under way, where they are known.
    """
    by_mesh: dict[str, float] = defaultdict(float)
    by_torus: dict[str, float] = defaultdict(float)
    by_kind: dict[str, float] = defaultdict(float)
    causes, exposed = [], 0.0
    for use in sorted(uses, key=lambda u: -u.bytes_sent):
        by_mesh[",".join(use.mesh_axes) or UNATTRIBUTED] += use.bytes_sent
        by_kind[use.kind] += use.bytes_sent
        for axis, sent in use.bytes_by_torus_axis.items():
            by_torus[axis] += sent
        exposed += use.exposed_s
        causes.append(
            {
                "kind": use.kind,
                "mesh_axes": list(use.mesh_axes),
                "torus_axes": list(use.torus_axes),
                "cause": use.op_name,
                "source": use.source,
                "calls": use.calls,
                "bytes": use.bytes_sent,
                "busy_s": use.busy_s,
                "exposed_s": use.exposed_s,
            }
        )
    return {
        "bytes": sum(by_mesh.values()),
        "bytes_by_mesh_axes": dict(by_mesh),
        "bytes_by_torus_axis": dict(by_torus),
        "bytes_by_kind": dict(by_kind),
        "sending_s": sending_s,
        "exposed_s": exposed,
        "causes": causes,
    }
