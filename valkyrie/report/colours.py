"""Colours of the parts of a step, of mesh axes and of kinds of wall time, the same in all figures."""

from __future__ import annotations

from valkyrie.parts import PartKind
from valkyrie.report import values
from valkyrie.runs.goodput import KINDS

PALETTE = ["#4c8fd0", "#f0883e", "#4fae5a", "#e05a5a", "#43b3ae", "#b47fc7", "#d6a928", "#a9795b", "#f08fa4", "#8b98a5"]
"""Colours that are distinct on white and on black."""
PART_COLOURS = {
    PartKind.matmul: 0,
    PartKind.kernel: 4,
    PartKind.compute: 2,
    PartKind.memory: 9,
    PartKind.copies: 7,
    PartKind.rest: 0,
}
"""Index in the palette of each part of a step. Communication uses the other colours, by mesh axes."""
_PARTS = {values.PART_NAMES[kind]: PALETTE[colour] for kind, colour in PART_COLOURS.items()}

_AXES = {"x": PALETTE[1], "y": PALETTE[3], "z": PALETTE[5], "w": PALETTE[8], "s": PALETTE[7], "x,y": PALETTE[6]}
_AXES |= {"x,z": "#8f9c3a", "y,z": "#7668d8", "x,y,z": "#c25c86"}
_OTHERS = ("#b5894a", "#5f8fa8", "#9a6a55", "#a0a0c8", "#cf9fd8")


def axes_colour(axes: str) -> str:
    """Return the colour of mesh axes, the same in every figure."""
    return _AXES.get(axes) or _OTHERS[sum(axes.encode()) % len(_OTHERS)]


def part_colour(part: str, axes: str | None) -> str:
    """Return the colour of a part of a step by its label. Communication has the colour of its mesh axes."""
    return axes_colour(axes) if axes is not None else _PARTS.get(part) or axes_colour(part)


def time_colour(kind: str) -> str:
    """Return the colour of a kind of wall time, the same on every page."""
    return PALETTE[(2, 3, 1, 7, 5, 4, 6, 0, 8, 9)[list(KINDS.values()).index(kind)]]
