"""The parts of a step's time. Does not import JAX or NumPy, because reports use this module."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class PartKind(Enum):
    """Activity of a device during a part of a step."""

    matmul = "matmul"
    kernel = "kernel"
    compute = "compute"  # arithmetic other than matrix products
    memory = "memory"  # operations bound by HBM bandwidth
    copies = "copies"  # waiting for copies between memories
    exposed = "exposed"  # waiting for collectives, by mesh axes
    collectives = "collectives"  # in collectives, exposed or hidden, by mesh axes; measured steps only
    rest = "rest"  # outside collectives; measured steps only

    @property
    def has_mesh_axes(self) -> bool:
        """Whether this kind is communication, which is divided into parts by mesh axes."""
        return self in (PartKind.exposed, PartKind.collectives)


PART_LABELS = {
    PartKind.matmul: "matrix products",
    PartKind.kernel: "kernels",
    PartKind.compute: "other arithmetic",
    PartKind.memory: "memory-bound",
    PartKind.copies: "waiting for copies",
    PartKind.exposed: "waiting for communication",
    PartKind.collectives: "collectives",
    PartKind.rest: "compute",
}
"""Label of each kind, in the terminal and in reports. `describe_part` appends mesh axes."""
_SHORT_LABELS = PART_LABELS | {PartKind.exposed: "waiting"}
"""Labels for legends and tables with little room."""


@dataclass(frozen=True)
class StepPart:
    """Seconds of a step spent on one kind of work. `mesh_axes` is empty unless the kind is communication."""

    kind: PartKind
    mesh_axes: tuple[str, ...]
    seconds: float


def sum_seconds(parts: Iterable[StepPart], *kinds: PartKind) -> float:
    """Sum the seconds of all parts of these kinds."""
    return sum((part.seconds for part in parts if part.kind in kinds), 0.0)


def describe_part(kind: PartKind, mesh_axes_text: str, *, short: bool = False) -> str:
    """Format a part for printing: `matrix products`, or `waiting for communication over x,y`.

    With `short`, the latter is `waiting over x,y`.
    """
    label = (_SHORT_LABELS if short else PART_LABELS)[kind]
    return f"{label} over {mesh_axes_text}" if kind.has_mesh_axes else label


_RECORD_NAMES = {PartKind.exposed: "waiting for communication", PartKind.collectives: "collectives"}
"""Names in `explain.json` of kinds with mesh axes. Independent of `PART_LABELS`, so that old files stay readable."""


def record_name(kind: PartKind, mesh_axes_text: str) -> str:
    """Return the name of a part in `explain.json`: `matmul`, or `waiting for communication over x,y`."""
    return f"{_RECORD_NAMES[kind]} over {mesh_axes_text}" if kind.has_mesh_axes else kind.value


def label_record_name(name: str) -> str:
    """Convert the name of a part in `explain.json` to its label: `matmul` to `matrix products`.

    Returns other names, such as those with mesh axes, unchanged.
    """
    return next((PART_LABELS[kind] for kind in PartKind if kind.value == name), name)


def format_category(kind: PartKind, mesh_axes: tuple[str, ...] = ()) -> str:
    """Format a part as a category of a timeline file: `matmul`, `exposed x,y`."""
    return f"{kind.value} {','.join(mesh_axes)}" if kind.has_mesh_axes else kind.value


def parse_category(text: str) -> tuple[PartKind, tuple[str, ...]] | None:
    """Parse a category of a timeline file, such as `exposed x,y`.

    Returns the kind and the mesh axes, or None if the category is not a part of a step.
    """
    kind, _, axes = text.partition(" ")
    if kind not in {member.value for member in PartKind}:
        return None
    return PartKind(kind), tuple(axes.split(",")) if axes else ()


def upgrade_part(category: str) -> dict[str, str | list[str]]:
    """Convert a category in an older file, such as `exposed x,y`, to a dict with its `kind` and `mesh_axes`.

    Raises ValueError if the category is not a part of a step.
    """
    part = parse_category(category)
    if part is None:
        raise ValueError(f"{category} is not a part of a step")
    return {"kind": part[0].value, "mesh_axes": list(part[1])}
