"""Sums the operations of unrolled layers, so that a report has one row for all of them."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TypeVar

from valkyrie.compiled.collectives import CollectiveUse
from valkyrie.machine.replay import OpTotals

U = TypeVar("U", OpTotals, CollectiveUse)
MIN_LAYERS = 3
"""Operations that differ only in the index of their layer are merged into one row if there are at least this many."""
_NUMBERED = re.compile(r"((?:^|/)(?:[A-Za-z]\w*_)?)\d+(?=/)")
"""Regex for a numbered scope in an operation's name, such as `blocks_7` or `7`. The group is the part before the 7."""


def merge_layers(uses: Sequence[U]) -> list[U]:
    """Merge the operations of unrolled layers: `blocks_0/Dense_1/dot_general` to `blocks_11/...` become `blocks_*/...`.

    Operations are merged if they share kind, axes and source, and their names differ only in the first numbered scope.
    Groups smaller than `MIN_LAYERS` are returned unchanged.
    """
    groups: dict[tuple[object, ...], list[U]] = defaultdict(list)
    for use in uses:
        torus_axes = use.torus_axes if isinstance(use, CollectiveUse) else ()
        groups[use.kind, use.mesh_axes, torus_axes, _NUMBERED.sub(r"\1*", use.op_name, count=1), use.source].append(use)
    merged: list[U] = []
    for (*_, name, _source), members in groups.items():
        merged += [_sum_uses(members, str(name))] if len(members) >= MIN_LAYERS else members
    return merged


def _sum_uses(uses: Sequence[U], name: str) -> U:
    """Return one operation called `name`, with the sums of the calls, seconds and bytes of `uses`.

    Other fields are those of the first use.
    """
    merged_use = replace(uses[0], op_name=name)
    for field in fields(merged_use):
        values = [getattr(use, field.name) for use in uses]
        if isinstance(values[0], float):
            merged_use = replace(merged_use, **{field.name: sum(values)})
        elif isinstance(values[0], dict):
            total: Counter[str] = Counter()
            for by_axis in values:
                total.update(by_axis)
            merged_use = replace(merged_use, **{field.name: dict(total)})
    return merged_use
