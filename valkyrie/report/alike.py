"""Trials of several partitions that split every array alike: they are one layout, whatever their partitions' names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from valkyrie.sweep.rows import Row

DATA_PARALLEL = "dp"
"""The partition that a layout is which only splits the batch."""


def counted_as(rows: Sequence[Row]) -> dict[str, str]:
    """Return for each row, by its id, the partition that it is an example of; its own, unless another is simpler.

    On a mesh with x=1, `1d_tp` is data parallel, as `dp` is, and nothing follows from it for `1d_tp`. Of partitions
    that come to the same layout, the simplest is the one whose layouts have the fewest kinds of roles.
    """
    kinds: dict[str, set[str]] = defaultdict(set)
    alike: dict[tuple[object, ...], set[str]] = defaultdict(set)
    for row in rows:
        kinds[row.partition] |= _roles(row)
        alike[_layout(row)].add(row.partition)

    def simplest(row: Row) -> str:
        if _roles(row) == {"DP"}:
            return DATA_PARALLEL
        return min(alike[_layout(row)], key=lambda name: (len(kinds[name]), name))

    return {row.id: simplest(row) for row in rows}


def same_layout(one: Row, other: Row) -> bool:
    """Return whether two rows split every array alike, with the same microbatches, remat and placement."""
    return _layout(one) == _layout(other)


def described(partition: str) -> str:
    """Return what a layout is that is an example of this partition under another's name."""
    return "data parallel, as dp" if partition == DATA_PARALLEL else f"the same layout as {partition}"


def _roles(row: Row) -> set[str]:
    return {role for role, size in row.degrees.items() if size > 1}


def _layout(row: Row) -> tuple[object, ...]:
    """Return what rows share that split every array alike; themselves, of a record that does not say."""
    about = row.about
    if not about.sharding:
        return (row.id,)
    return row.work, about.sharding, about.microbatches, about.remat, about.mesh_placement, str(about.pipeline)
