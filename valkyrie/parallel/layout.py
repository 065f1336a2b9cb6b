"""Layouts: where a mesh and a partition put every array of a model, or why they cannot. Imports no JAX."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from valkyrie.axes import BATCH, LAYERS, SEQ, Arrays, Axis
from valkyrie.checksums import digest
from valkyrie.parallel.mesh import MeshConfig, resized
from valkyrie.parallel.partition import (
    Memory,
    PartitionConfig,
    Role,
    RoleKind,
    Rules,
    describe_roles,
    resolve_rules,
    roles,
)
from valkyrie.parallel.problems import Nearest, layout_problems, with_advice
from valkyrie.parallel.remat import EVERYTHING, RematConfig
from valkyrie.parallel.schedule import Pipeline
from valkyrie.problems import Problem, check_range


@dataclass(frozen=True)
class Layout:
    """All that may vary without changing the mathematics: mesh, placement, partition, microbatches, remat."""

    mesh: MeshConfig
    partition: PartitionConfig
    parameters: Rules
    activations: Rules
    microbatches: int
    remat: RematConfig
    notes: tuple[str, ...] = ()
    """What lies otherwise than the partition's rules say, and why."""
    dispatched: frozenset[str] = frozenset()
    """Logical axes of parameters that are never gathered: tokens are sent to their shards (`Arrays.dispatched`)."""

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
        if self.pipeline is not None and self.pipeline.label:
            parts.append(self.pipeline.label)
        if self.microbatches > 1:
            parts.append(f"mb{self.microbatches}")
        if self.remat.label != EVERYTHING.name:
            parts.append(f"remat_{self.remat.label}")
        return "-".join(parts)

    @property
    def roles(self) -> dict[str, Role]:
        """The role of every mesh axis."""
        return roles(self.mesh, self.parameters, self.activations)

    @property
    def degrees(self) -> dict[str, int]:
        """Into how many parts each kind of role splits its work: `{"DP": 2, "FSDP": 1, "MP1": 4, "MP2": 4, ...}`."""
        degrees = {kind.value: 1 for kind in RoleKind if kind not in (RoleKind.idle, RoleKind.unused)}
        for axis, role in self.roles.items():
            if role.kind.value in degrees:
                degrees[role.kind.value] *= self.mesh.axes[axis]
        return degrees

    @property
    def fused_rules(self) -> tuple[list[str], tuple[object, ...]]:
        """Mesh axes of several devices in the order of the rules, and the rules after fusing axes (`fused`)."""
        sizes = {axis: size for axis, size in self.mesh.axes.items() if size > 1}
        rules = [
            tuple(axis for axis in of_kind[logical] if axis in sizes)
            for of_kind in (self.parameters, self.activations)
            for logical in sorted(of_kind)
        ]
        axes = list(dict.fromkeys([*(axis for rule in rules for axis in rule), *sizes]))
        return axes, fused(axes, sizes, rules)

    @property
    def sharding(self) -> str:
        """A name shared by layouts of a model that split every array alike, whatever partition and axes they name.

        The order of the devices, ZeRO-1 and host memory are not part of it.
        """
        return digest(repr(self.fused_rules[1]))[:8]

    @property
    def pipeline(self) -> Pipeline | None:
        """The pipeline that the mesh axis which splits `layers` makes; None where there is none."""
        axis = next((axis for axis in self.parameters.get(LAYERS, ()) if self.mesh.axes[axis] > 1), None)
        if axis is None:
            return None
        partition = self.partition
        return Pipeline(axis, self.mesh.axes[axis], self.microbatches, partition.schedule, partition.rounds)

    @property
    def accumulated(self) -> int:
        """Over how many parts of the batch a step adds gradients up: a pipeline takes its microbatches all at once."""
        return self.microbatches if self.pipeline is None else 1

    @property
    def in_stage(self) -> Layout:
        """The layout of what one stage of the pipeline works on: its own layers, of its microbatches all rows."""
        batch = tuple(axis for axis in self.activations[BATCH] if axis not in self.parameters[LAYERS])
        parameters, activations = {**self.parameters, LAYERS: ()}, {**self.activations, BATCH: batch}
        return replace(self, parameters=parameters, activations=activations)

    def describe_roles(self) -> str:
        """Return the roles line: `x=4 MP1(mlp,heads,vocab) · y=4 MP2(embed) · z=2 DP(batch)`."""
        return describe_roles(self.mesh.axes, self.roles)

    def shards(self, logical: str) -> int:
        """Return into how many parts a logical axis of activations is split."""
        return self.parts(self.activations[logical])

    def stored(self, axes: Sequence[str | None]) -> tuple[tuple[str, ...], ...]:
        """Return, per dimension, the mesh axes a parameter with these logical axes rests on."""
        return tuple(() if a is None else self.parameters[a] for a in axes)

    def gathered(self, axes: Sequence[str | None]) -> tuple[tuple[str, ...], ...]:
        """Return, per dimension, the mesh axes over which a parameter is gathered for use (`gathered_axes`)."""
        rules = self.parameters, self.activations, self.dispatched
        return tuple(gathered_axes(axis, *rules) for axis in axes)

    def computed(self, axes: Sequence[str | None]) -> tuple[tuple[str, ...], ...]:
        """Return, per dimension, the mesh axes that split a parameter while it is used."""
        entries = zip(self.stored(axes), self.gathered(axes), strict=True)
        return tuple(tuple(m for m in stored if m not in gathered) for stored, gathered in entries)

    def activation(self, axes: Sequence[Axis]) -> tuple[tuple[str, ...], ...]:
        """Return, per dimension, the mesh axes of an activation with these logical axes; those of a tuple in turn."""
        each = (() if a is None else (a,) if isinstance(a, str) else a for a in axes)
        return tuple(tuple(m for a in several for m in self.activations[a]) for several in each)

    def optimizer(self, axes: Sequence[str | None], shape: Sequence[int]) -> tuple[tuple[str, ...], ...]:
        """Return the mesh axes of optimizer state: its parameter's, and under ZeRO-1 the free data axes too."""
        entries = list(self.stored(axes))
        if self.partition.zero1:
            for data in zero1_axes(self.activations[BATCH], entries):
                for i, size in enumerate(shape):
                    split = math.prod(self.mesh.axes[m] for m in entries[i]) * self.mesh.axes[data]
                    if axes[i] != LAYERS and size % split == 0:
                        entries[i] = (*entries[i], data)
                        break
        return tuple(entries)

    def parts(self, mesh_axes: Sequence[str]) -> int:
        """Return into how many parts these mesh axes split."""
        return math.prod(self.mesh.axes[axis] for axis in mesh_axes)

    def split(self, logical: str, kind: str, length: int) -> int:
        """Return into how many parts a logical axis is split: of parameters (`stored`), or activations (`active`)."""
        return self.parts((self.activations if kind == "active" else self.parameters)[logical])

    def sizes(self, mesh_axes: Sequence[str]) -> str:
        """Return mesh axes with their sizes, as messages print them: `x=4·y=2`."""
        return "·".join(f"{axis}={self.mesh.axes[axis]}" for axis in mesh_axes)


def zero1_axes(data: Iterable[str], stored: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """Return the mesh axes over which ZeRO-1 splits a parameter's moments: those of the data that leave it whole."""
    taken = {axis for entry in stored for axis in entry}
    return tuple(axis for axis in data if axis not in taken)


def gathered_axes(
    logical: str | None, parameters: Rules, activations: Rules, dispatched: Collection[str]
) -> tuple[str, ...]:
    """Return the mesh axes that split a parameter's logical axis in storage, but not while it is used.

    Devices along a mesh axis that splits the batch or the sequence have different tokens, and each needs the whole
    parameter: it is gathered for use, and its gradient is scattered back (FSDP). Two kinds of axes stay split: that of
    a pipeline, where a stage has its own layers, and dispatched logical axes, where tokens travel to the parameter.
    """
    if logical is None or logical in dispatched:
        return ()
    data = {*activations[BATCH], *activations[SEQ]} - {*parameters.get(LAYERS, ())}
    return tuple(axis for axis in parameters[logical] if axis in data)


def make_layout(
    mesh: MeshConfig,
    partition: PartitionConfig,
    arrays: Arrays,
    *,
    microbatches: int,
    remat: RematConfig,
    batch: int,
    seq: int,
    known_axes: Collection[str],
    nearest: Nearest | None = None,
    advise: bool = True,
) -> tuple[Layout | None, list[Problem]]:
    """Return the layout of a model's arrays, and every problem it has with them, this batch and this length.

    The layout is None if there is no such mesh.

    `batch` counts sequences of the global batch, `seq` tokens of a sequence; `known_axes` are logical axes of other
    models, for which a partition may have rules. `nearest` searches the values of a problem's key that remove it and
    make no other; without it, problems name the nearest values that divide. `advise=False` skips the search for values
    that would do, which takes longer than finding the problems.
    """
    if problems := mesh.problems() + check_range("microbatches", microbatches, least=1):
        return None, problems

    def on(mesh: MeshConfig) -> tuple[Layout, list[Problem]]:
        return layout_with_problems(mesh, partition, arrays, microbatches, remat, batch, seq, known_axes)

    layout, found = on(mesh)
    if not advise:
        return layout, list(dict.fromkeys(found))
    known = {problem.identity for problem in found}

    def sizes_of(problem: Problem) -> list[int]:
        """Return the sizes of the one mesh axis of a problem, up to 64, that remove it and make no other."""
        (axis,), least = problem.mesh_axes, known - {problem.identity}
        divisors = [n for n in range(1, 65) if problem.size % n == 0]
        return [n for n in divisors if {p.identity for p in on(resized(mesh, axis, n))[1]} <= least]

    return layout, list(dict.fromkeys(with_advice(problem, nearest, sizes_of) for problem in found))


def layout_with_problems(
    mesh: MeshConfig,
    partition: PartitionConfig,
    arrays: Arrays,
    microbatches: int,
    remat: RematConfig,
    batch: int,
    seq: int,
    known_axes: Collection[str],
) -> tuple[Layout, list[Problem]]:
    """Return the layout and its problems as `make_layout` does, for a legal mesh, without looking for advice."""
    layout, problems = derive_layout(mesh, partition, arrays, microbatches, remat, known_axes=known_axes)
    return layout, problems or layout_problems(layout, arrays, batch, seq)


def derive_layout(
    mesh: MeshConfig,
    partition: PartitionConfig,
    arrays: Arrays,
    microbatches: int = 1,
    remat: RematConfig = EVERYTHING,
    *,
    known_axes: Collection[str],
) -> tuple[Layout, list[Problem]]:
    """Return the layout that a partition's rules make of a mesh, legal or not, and every problem of the rules."""
    parameters, activations, problems = resolve_rules(partition, mesh, arrays.axes, known_axes)
    stages = parameters.get(LAYERS, ())
    if stages:  # outside the stacked layers, stages share the rows of the batch: each has those of its own
        activations[BATCH] = tuple(dict.fromkeys((*stages, *activations[BATCH])))
    layout = Layout(mesh, partition, parameters, activations, microbatches, remat, dispatched=arrays.dispatched)
    return (layout if problems else align_dependent_axes(layout, arrays)), problems


def align_dependent_axes(layout: Layout, arrays: Arrays) -> Layout:
    """Return the layout with axes that follow another one split no further than their length divides.

    Only where the partition splits both alike: key heads, fewer than the devices that share the heads, are then whole
    on the devices between which they cannot be split.
    """
    notes = []
    for axis, other in arrays.follows.items():
        sizes = {n for t in arrays.parameters for a, n in zip(t.axes, t.shape, strict=True) if a == axis}
        for kind in ("parameters", "activations"):
            rules: Rules = getattr(layout, kind)
            split = rule = rules[axis]
            while rule == rules[other] and any(n % layout.parts(split) for n in sizes):
                split = split[:-1]
            if split != rule:
                whole, lengths = layout.sizes(rule[len(split) :]), ", ".join(map(str, sorted(sizes)))
                notes.append(f"{axis} ({lengths}) cannot be split like {other}: whole over {whole}")
                layout = replace(layout, **{kind: {**rules, axis: split}})
    return replace(layout, notes=tuple(dict.fromkeys(notes)))


def fused(axes: Sequence[str], sizes: Mapping[str, int], rules: Sequence[tuple[str, ...]]) -> tuple[object, ...]:
    """Return the sizes of axes after fusing what always stands together, and every rule in those axes by position."""
    groups: list[list[str]] = []
    for axis in axes:
        if groups and all(_side_by_side(groups[-1][-1], axis, rule) for rule in rules):
            groups[-1].append(axis)
        else:
            groups.append([axis])
    number = {group[0]: i for i, group in enumerate(groups)}
    return (
        tuple(math.prod(sizes[axis] for axis in group) for group in groups),
        tuple(tuple(number[axis] for axis in rule if axis in number) for rule in rules),
    )


def _side_by_side(first: str, second: str, rule: tuple[str, ...]) -> bool:
    if first not in rule or second not in rule:
        return first not in rule and second not in rule
    return rule.index(second) == rule.index(first) + 1
