"""Decides whether a layout is legal, and derives from it where every array lies. Imports no JAX."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from valkyrie.axes import LOGICAL_AXES, Axis
from valkyrie.parallel.mesh import MeshConfig
from valkyrie.parallel.partition import Memory, PartitionConfig, Remat, Rules, resolve_rules, roles

ACTIVATIONS: tuple[tuple[str, ...], ...] = (
    ("batch", "seq", "embed"),
    ("batch", "seq", "mlp"),
    ("batch", "seq", "state"),
    ("batch", "seq", "heads", "head_dim"),
    ("batch", "seq", "vocab"),
)
"""The activations whose placement a partition decides."""


ROLES = ("DP", "FSDP", "MP1", "MP2", "SP")
"""The kinds of roles that a mesh axis of more than one device may have in a legal layout."""


@runtime_checkable
class TensorLike(Protocol):
    """A named array with logical axes, sizes, and the config key behind each size."""

    @property
    def name(self) -> str:
        """The name that messages use."""
        ...

    @property
    def axes(self) -> tuple[str | None, ...]:
        """One logical axis per dimension; None where it is never split."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of each dimension."""
        ...

    @property
    def keys(self) -> tuple[str | None, ...]:
        """The config key that sets each size; None where there is none."""
        ...


@dataclass(frozen=True)
class Layout:
    """All that may vary without changing the mathematics: mesh, placement, partition, microbatches, remat."""

    mesh: MeshConfig
    partition: PartitionConfig
    parameters: Rules
    activations: Rules
    microbatches: int
    remat: Remat

    @property
    def name(self) -> str:
        """A short stable name, such as `4x4x2-2d_tp-mb2-remat_full`."""
        parts = [self.mesh.name, self.partition.name]
        if self.mesh.placement is not None:
            parts.append("order_" + "".join(self.mesh.placement).replace(":", ""))
        if self.partition.zero1:
            parts.append("zero1")
        for memory, word in ((self.partition.parameter_memory, "params"), (self.partition.optimizer_memory, "optim")):
            if memory is Memory.host:
                parts.append(f"{word}_on_host")
        if self.microbatches > 1:
            parts.append(f"mb{self.microbatches}")
        if self.remat is not Remat.none:
            parts.append(f"remat_{self.remat.value}")
        return "-".join(parts)

    @property
    def roles(self) -> dict[str, str]:
        """The role of every mesh axis."""
        return roles(self.mesh, self.parameters, self.activations)

    @property
    def degrees(self) -> dict[str, int]:
        """Into how many parts each kind of role splits its work: `{"DP": 2, "FSDP": 1, "MP1": 4, "MP2": 4, ...}`."""
        found: dict[str, int] = dict.fromkeys(ROLES, 1)
        for axis, role in self.roles.items():
            kind = role.partition("(")[0]
            if kind in found:
                found[kind] *= self.mesh.axes[axis]
        return found

    def describe_roles(self) -> str:
        """Return the roles line: `x=4 MP1(mlp,heads,vocab) · y=4 MP2(embed) · z=2 DP(batch)`."""
        return " · ".join(f"{axis}={self.mesh.axes[axis]} {role}" for axis, role in self.roles.items())

    def shards(self, logical: str) -> int:
        """Return into how many parts a logical axis of activations is split."""
        return math.prod(self.mesh.axes[a] for a in self.activations.get(logical, ()))

    def stored(self, axes: Sequence[str | None]) -> tuple[tuple[str, ...], ...]:
        """Return, per dimension, the mesh axes a parameter with these logical axes rests on."""
        return tuple(() if a is None else self.parameters[a] for a in axes)

    def computed(self, axes: Sequence[str | None]) -> tuple[tuple[str, ...], ...]:
        """Return the mesh axes of a parameter while it is used: those it rests on, less the ones that split data.

        A fully sharded parameter is thus gathered for its product, and its gradient scattered back.
        """
        data = {*self.activations.get("batch", ()), *self.activations.get("seq", ())}
        return tuple(tuple(m for m in held if m not in data) for held in self.stored(axes))

    def activation(self, axes: Sequence[Axis]) -> tuple[tuple[str, ...], ...]:
        """Return, per dimension, the mesh axes of an activation with these logical axes; those of a tuple in turn."""
        each = (() if a is None else (a,) if isinstance(a, str) else a for a in axes)
        return tuple(tuple(m for a in several for m in self.activations[a]) for several in each)

    def optimizer(self, axes: Sequence[str | None], shape: Sequence[int]) -> tuple[tuple[str, ...], ...]:
        """Return the mesh axes of optimizer state: its parameter's, and under ZeRO-1 the free data axes too."""
        held = list(self.stored(axes))
        if self.partition.zero1:
            used = {m for entry in held for m in entry}
            for data in self.activations.get("batch", ()):
                if data in used:
                    continue
                for i, size in enumerate(shape):
                    split = math.prod(self.mesh.axes[m] for m in held[i]) * self.mesh.axes[data]
                    if axes[i] != "layers" and size % split == 0:
                        held[i] = (*held[i], data)
                        break
        return tuple(held)


def make_layout(
    mesh: MeshConfig,
    partition: PartitionConfig,
    *,
    microbatches: int,
    remat: Remat,
    tensors: Sequence[TensorLike],
    batch: int,
    seq: int,
) -> tuple[Layout | None, list[str]]:
    """Return the layout and every problem it has with these parameter tensors, this batch and this length.

    `batch` counts sequences of the global batch, `seq` tokens of a sequence. The layout is None when the mesh itself
    makes no sense.
    """
    found = mesh.problems()
    if microbatches < 1:
        found.append(f"microbatches={microbatches}: at least 1 is needed.")
    if found:
        return None, found
    parameters, activations, found = resolve_rules(partition, mesh)
    layout = Layout(mesh, partition, parameters, activations, microbatches, remat)
    found += _missing_rules(layout, tensors)
    if not found:
        found += _spent_twice(layout, tensors)
        found += _indivisible(layout, tensors)
        found += _batch_problems(layout, batch, seq)
        found += [
            f"partition={partition.name} leaves mesh axis {axis}={mesh.axes[axis]} idle: its devices would repeat "
            f"each other's work. Use a mesh with {axis}=1, or a partition that uses {axis}."
            for axis, role in layout.roles.items()
            if role == "idle"
        ]
    return layout, list(dict.fromkeys(found))


def _missing_rules(layout: Layout, tensors: Sequence[TensorLike]) -> list[str]:
    name, found = layout.partition.name, []
    for tensor in tensors:
        for axis in tensor.axes:
            if axis is not None and axis not in layout.parameters:
                found.append(
                    f"partition={name} has no rule for parameters.{axis}, which {tensor.name} needs. "
                    f"Add `{axis}: []` to leave it whole, or name mesh axes ({', '.join(layout.mesh.axes)})."
                )
    for axis in LOGICAL_AXES:
        if axis != "layers" and axis not in layout.activations:
            found.append(f"partition={name} has no rule for activations.{axis}. Add `{axis}: []` to leave it whole.")
    return found


def _spent_twice(layout: Layout, tensors: Sequence[TensorLike]) -> list[str]:
    arrays = [(t.name, t.axes, layout.stored(t.axes)) for t in tensors]
    arrays += [(f"activation ({', '.join(axes)})", axes, layout.activation(axes)) for axes in ACTIVATIONS]
    found = []
    for name, axes, split in arrays:
        seen: dict[str, str | None] = {}
        for logical, held in zip(axes, split, strict=True):
            for mesh_axis in held:
                if mesh_axis in seen:
                    found.append(
                        f"partition={layout.partition.name} spends mesh axis {mesh_axis} twice on {name}: on "
                        f"{seen[mesh_axis]} and on {logical}. Give one of them another axis."
                    )
                seen[mesh_axis] = logical
    return found


def _indivisible(layout: Layout, tensors: Sequence[TensorLike]) -> list[str]:
    cases: dict[tuple[str, int, str | None], list[str]] = {}
    for tensor in tensors:
        for logical, size, key in zip(tensor.axes, tensor.shape, tensor.keys, strict=True):
            if logical is not None:
                cases.setdefault((logical, size, key), []).append(tensor.name)
    found = []
    for (logical, size, key), names in cases.items():
        held = layout.parameters[logical]
        parts = math.prod(layout.mesh.axes[m] for m in held)
        if size % parts == 0:
            continue
        where = "·".join(f"{m}={layout.mesh.axes[m]}" for m in held)
        setting = f"set {key} so that it is {_near(size, parts)}" if key else f"make {logical} {_near(size, parts)}"
        found.append(
            f"partition={layout.partition.name} puts {logical} ({size}) of {', '.join(names)} on {where}: "
            f"{size} is not divisible by {parts}. Use a mesh whose {'·'.join(held)} divides it "
            f"({_divisors(size)}), or {setting}."
        )
    return found


def _near(size: int, parts: int) -> str:
    lower, upper = size // parts * parts, -(-size // parts) * parts
    return f"{lower} or {upper}" if lower else str(upper)


def _batch_problems(layout: Layout, batch: int, seq: int) -> list[str]:
    found = []
    rows = layout.shards("batch") * layout.microbatches
    if batch % rows:
        held = "·".join(f"{m}={layout.mesh.axes[m]}" for m in layout.activations["batch"]) or "one shard"
        also = f" times microbatches={layout.microbatches}" if layout.microbatches > 1 else ""
        found.append(
            f"batch={batch} is not divisible by {rows}: partition={layout.partition.name} splits it over {held}"
            f"{also}. Use batch={_near(batch, rows).replace(' or ', ' or batch=')}."
        )
    parts = layout.shards("seq")
    if seq % parts:
        held = "·".join(f"{m}={layout.mesh.axes[m]}" for m in layout.activations["seq"])
        found.append(
            f"seq={seq} is not divisible by {parts}: partition={layout.partition.name} splits it over {held}. "
            f"Use seq={_near(seq, parts).replace(' or ', ' or seq=')}."
        )
    return found


def _divisors(n: int) -> str:
    small = [d for d in range(1, min(n, 64) + 1) if n % d == 0]
    return ", ".join(str(d) for d in small[:8])
