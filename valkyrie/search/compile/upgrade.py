"""Upgrades version 1 of `compile.json` and `measure.json`, which stored parts, mesh axes and positions as text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from valkyrie.compiled.communication import upgrade_communication
from valkyrie.hardware.position import Position
from valkyrie.parts import upgrade_part
from valkyrie.records import encode


def upgrade_results(json_value: Mapping[str, Any]) -> dict[str, Any]:
    """Upgrade the parsed JSON of a prediction or measurement, or a subset of its keys, from version 1.

    Values of a later version are returned unchanged. Raises KeyError, TypeError, AttributeError or ValueError for
    malformed values.
    """
    upgraded = dict(json_value)
    if upgraded.get("schema") == 1:
        upgraded["schema"] = 2
    if (seconds := upgraded.pop("seconds", None)) is not None:
        upgraded["parts"] = [upgrade_part(name) | {"seconds": value} for name, value in seconds.items()]
    if isinstance(record := upgraded.get("about"), dict) and "program" in record:
        upgraded |= {"about": None, "program": record | {"name": record["program"]}}
    for key, convert in _ENTRY_UPGRADES.items():
        if key in upgraded:
            upgraded[key] = [convert(value) for value in upgraded[key]]
    if "larger" in upgraded or "partitions" in upgraded:
        partitions = [{"axis_roles": {}} | partition for partition in upgraded.pop("partitions", [])]
        upgraded["alternatives"] = {"remats": upgraded.pop("larger", []), "partitions": partitions}
    return upgrade_communication(upgraded)


_ENTRY_UPGRADES: dict[str, Callable[[Any], Any]] = {
    "costs": lambda cost: upgrade_part(cost["category"]) | cost if "category" in cost else cost,
    "positions": lambda place: encode(Position.parse(place)) if isinstance(place, str) else place,
    "hints": lambda hint: {"code": None, "text": hint} if isinstance(hint, str) else hint,
}
"""Functions that upgrade each entry of a list, by the key of the list."""
