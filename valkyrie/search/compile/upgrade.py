"""Reads version 1 of `compile.json` and `measure.json`, in which parts, mesh axes and positions were texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from valkyrie.axes import read_axes
from valkyrie.hardware.position import Position
from valkyrie.parts import upgrade_part
from valkyrie.records import encode


def upgrade_results(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Convert version 1 of a prediction or measurement, or a subset of its keys, to this version's plain values.

    Newer values come back as they are. Raises KeyError, TypeError, AttributeError or ValueError for malformed values.
    """
    new = dict(plain)
    if new.get("schema") == 1:
        new["schema"] = 2
    if (seconds := new.pop("seconds", None)) is not None:
        new["parts"] = [upgrade_part(name) | {"seconds": value} for name, value in seconds.items()]
    if "costs" in new:
        new["costs"] = [upgrade_part(cost["category"]) | cost if "category" in cost else cost for cost in new["costs"]]
    if "positions" in new:
        new["positions"] = [
            encode(Position.parse(position)) if isinstance(position, str) else position for position in new["positions"]
        ]
    if "hints" in new:
        new["hints"] = [{"code": None, "text": hint} if isinstance(hint, str) else hint for hint in new["hints"]]
    if "larger" in new or "partitions" in new:
        partitions = [{"axis_roles": {}} | partition for partition in new.pop("partitions", [])]
        new["alternatives"] = {"remats": new.pop("larger", []), "partitions": partitions}
    sent = new.get("communication")
    if isinstance(sent, dict) and not isinstance(sent.get("bytes_by_mesh_axes", []), list):
        new["communication"] = _communication(sent)
        if "collective_note" in sent or "collective_s" in sent:
            new["trace"] = _trace(sent)
    return new


def _communication(sent: dict[str, Any]) -> dict[str, Any]:
    by_axes = [{"mesh_axes": read_axes(axes), "bytes": size} for axes, size in sent["bytes_by_mesh_axes"].items()]
    return sent | {"bytes_by_mesh_axes": by_axes, "collectives": sent.get("causes", [])}


def _trace(sent: dict[str, Any]) -> dict[str, Any]:
    by_axes = sent.get("collective_s")
    times = (
        None
        if by_axes is None
        else [
            {"kind": kind, "mesh_axes": read_axes(axes), "seconds": seconds}
            for axes, kinds in by_axes.items()
            for kind, seconds in kinds.items()
        ]
    )
    # Without the seconds of the traced steps, overlapping collectives were counted twice: the times are left out then.
    return {"times": times, "note": sent.get("collective_note"), "step_s": sent.get("traced_step_s")}
