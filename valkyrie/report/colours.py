"""Colours of step parts, mesh axes, partitions and kinds of wall time. All figures use the same colours.

Step parts are blue, green or grey. Mesh axes are red, orange, yellow or brown. Partitions are violet, pink or olive.
Wall times reuse the colours of step parts and partitions. `PartKind.rest`, used only for measured steps, reuses that of
`matmul`. The same colours are used on white and on dark backgrounds.
"""

from __future__ import annotations

from valkyrie.parts import PART_LABELS, PartKind
from valkyrie.runs.goodput import TIME_KINDS

_PART_COLOURS = {
    PART_LABELS[kind]: colour
    for kind, colour in {
        PartKind.matmul: "#3f7fc9",
        PartKind.kernel: "#36a3a0",
        PartKind.compute: "#6cae5e",
        PartKind.memory: "#8b98a5",
        PartKind.copies: "#5f7183",
        PartKind.rest: "#3f7fc9",
    }.items()
}
_PART_COLOURS |= {"loop": "#a9c4e4", "copies": "#5f7183"}
"""Colours of the step parts without mesh axes, and of other labels in a timeline, by label."""
_AXES_COLOURS = {"x": "#ef8a35", "y": "#d64550", "z": "#e2b71d", "w": "#9c6b3c", "s": "#7f3d22", "x,y": "#f2a49b"}
_AXES_COLOURS |= {"x,z": "#f5c78a", "y,z": "#a33b53", "x,y,z": "#cbb08a"}
_OTHER_AXES_COLOURS = ("#b5894a", "#c97f5f", "#8a5a44", "#e0a080")
_PARTITION_COLOURS = {"fsdp": "#7a5cc4", "dp": "#8a9a2b", "1d_tp": "#b8429f", "2d_tp": "#e39ad0", "sp": "#a83279"}
_PARTITION_COLOURS |= {"data_model_fsdp": "#b7c04a", "2d_tp_fsdp": "#a08be0", "fsdp_tp": "#5d46a3"}
_OTHER_PARTITION_COLOURS = ("#6f7a1f", "#8e4fa8", "#c9a0dc", "#d98cb3")
_WALL_TIME_COLOURS = dict(
    zip(TIME_KINDS.values(), [*_PART_COLOURS.values()][:5] + [*_PARTITION_COLOURS.values()][:5], strict=True)
)


def axes_colour(axes: str) -> str:
    """Return the colour of mesh axes such as `x,y`, as a hexadecimal code."""
    return _AXES_COLOURS.get(axes) or _pick_colour(_OTHER_AXES_COLOURS, axes)


def partition_colour(partition: str) -> str:
    """Return the colour of a partition, given its name, as a hexadecimal code."""
    return _PARTITION_COLOURS.get(partition) or _pick_colour(_OTHER_PARTITION_COLOURS, partition)


def part_colour(part: str, axes: str | None) -> str:
    """Return the colour of a step part, given its label, as a hexadecimal code. Unknown labels are grey.

    Communication has the colour of its mesh axes. For other parts, `axes` is None.
    """
    return axes_colour(axes) if axes is not None else _PART_COLOURS.get(part, "#a3afbb")


def time_colour(kind: str) -> str:
    """Return the colour of a kind of wall time, given its label (a value of `valkyrie.runs.goodput.TIME_KINDS`)."""
    return _WALL_TIME_COLOURS[kind]


def _pick_colour(colours: tuple[str, ...], name: str) -> str:
    """Pick one of `colours`. The choice depends only on `name`."""
    return colours[sum(name.encode()) % len(colours)]
