"""Layouts: the sharding of every array of a model, derived from a mesh and a partition. Does not import JAX."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from valkyrie.axes import BATCH, LAYERS, SEQ, Arrays, Axis, InUse
from valkyrie.checksums import digest
from valkyrie.parallel.mesh import MeshConfig, resize_axis
from valkyrie.parallel.partition import (
    MemoryKind,
    PartitionConfig,
    Role,
    RoleKind,
    Rules,
    assign_roles,
    describe_roles,
    resolve_rules,
)
from valkyrie.parallel.problems import FindNearest, add_advice, layout_problems
from valkyrie.parallel.remat import SAVE_EVERYTHING, RematConfig
from valkyrie.parallel.schedule import Pipeline
from valkyrie.problems import MisuseError, Problem, check_range, suggest


@dataclass(frozen=True)
class Layout:
    """Everything that may vary without changing the mathematics: mesh, placement, partition, microbatches, remat.

    Args:
        parameters: Mesh axes that split each logical axis of stored parameters.
        activations: Mesh axes that split each logical axis of activations.
    """

    mesh: MeshConfig
    partition: PartitionConfig
    parameters: Rules
    activations: Rules
    microbatches: int
    remat: RematConfig
    notes: tuple[str, ...] = ()
    """Deviations from the partition's rules, with reasons."""
    dispatched_axes: frozenset[str] = frozenset()
    """Logical axes of parameters that are never gathered: tokens are sent to the shards (`Arrays.dispatched_axes`)."""

    @property
    def name(self) -> str:
        """A short stable name, such as `4x4x2-2d_tp-mb2-remat_full`."""
        parts = [self.mesh.name, self.partition.name]
        if self.mesh.placement is not None:
            parts.append("order_" + "".join(self.mesh.placement).replace(":", ""))
        if self.partition.zero1:
            parts.append("zero1")
        for memory, word in ((self.partition.parameter_memory, "params"), (self.partition.optimizer_memory, "optim")):
            if memory is MemoryKind.host:
                parts.append(f"{word}_on_host")
        if self.pipeline is not None and self.pipeline.label:
            parts.append(self.pipeline.label)
        if self.microbatches > 1:
            parts.append(f"mb{self.microbatches}")
        if self.remat.label != SAVE_EVERYTHING.name:
            parts.append(f"remat_{self.remat.label}")
        return "-".join(parts)

    @property
    def roles(self) -> dict[str, Role]:
        """The role of every mesh axis."""
        return assign_roles(self.mesh, self.parameters, self.activations, self.dispatched_axes)

    @property
    def degrees(self) -> dict[str, int]:
        """Product of the mesh axis sizes of each kind of role: `{"DP": 2, "FSDP": 1, "MP1": 4, ...}`.

        `EP` is left out if no axis has it.
        """
        degrees = {kind.value: 1 for kind in RoleKind if kind not in (RoleKind.idle, RoleKind.unused)}
        for axis, role in self.roles.items():
            if role.kind.value in degrees:
                degrees[role.kind.value] *= self.mesh.axes[axis]
        if degrees[RoleKind.EP.value] == 1:
            del degrees[RoleKind.EP.value]
        return degrees

    @property
    def fused_rules(self) -> tuple[list[str], tuple[object, ...]]:
        """Mesh axes of size above 1, in order of first use in the rules, and the result of `fuse_axes` for them."""
        sizes = {axis: size for axis, size in self.mesh.axes.items() if size > 1}
        rules = [
            tuple(axis for axis in kind_rules[logical] if axis in sizes)
            for kind_rules in (self.parameters, self.activations)
            for logical in sorted(kind_rules)
        ]
        axes = list(dict.fromkeys([*(axis for rule in rules for axis in rule), *sizes]))
        return axes, fuse_axes(axes, sizes, rules)

    @property
    def sharding_hash(self) -> str:
        """A hash that is equal for layouts of a model that shard every array in the same way.

        It ignores the names of mesh axes, device order, ZeRO-1 and host memory.
        """
        return digest(repr(self.fused_rules[1]))[:8]

    @property
    def pipeline(self) -> Pipeline | None:
        """The pipeline along the mesh axis that splits `layers`, or None if no axis does."""
        axis = next((axis for axis in self.parameters.get(LAYERS, ()) if self.mesh.axes[axis] > 1), None)
        if axis is None:
            return None
        partition = self.partition
        return Pipeline(axis, self.mesh.axes[axis], self.microbatches, partition.schedule, partition.rounds)

    @property
    def accumulation_steps(self) -> int:
        """Number of microbatches over which a step accumulates gradients. 1 for a pipeline, which adds them itself."""
        return self.microbatches if self.pipeline is None else 1

    @property
    def stage_layout(self) -> Layout:
        """The layout within a pipeline stage, where the pipeline's mesh axis splits neither `layers` nor the batch."""
        batch = tuple(axis for axis in self.activations[BATCH] if axis not in self.parameters[LAYERS])
        parameters, activations = {**self.parameters, LAYERS: ()}, {**self.activations, BATCH: batch}
        return replace(self, parameters=parameters, activations=activations)

    def shard_layout(self, mesh_axes: Collection[str]) -> Layout:
        """Return the layout within one shard of the batch along `mesh_axes`, which then split nothing."""

        def without_axes(rules: Rules) -> Rules:
            return {a: tuple(m for m in axes if m not in mesh_axes) for a, axes in rules.items()}

        return replace(self, parameters=without_axes(self.parameters), activations=without_axes(self.activations))

    def describe_roles(self) -> str:
        """Return the roles of the mesh axes: `x=4 MP1(mlp,heads,vocab) · y=4 MP2(embed) · z=2 DP(batch)`."""
        return describe_roles(self.mesh.axes, self.roles)

    def shard_count(self, logical: str) -> int:
        """Return the number of parts into which a logical axis of activations is split."""
        return self.axes_size(self.activation_axes([logical])[0])

    def stored_axes(self, axes: Sequence[str | None]) -> tuple[tuple[str, ...], ...]:
        """Return, per dimension, the mesh axes that split a stored parameter with these logical axes."""
        mesh_axes = [() if a is None else find_rule(a, self.parameters) for a in axes]
        return reserve_dispatched(axes, mesh_axes, self.dispatched_axes)

    def gathered_axes(self, axes: Sequence[str | None]) -> tuple[tuple[str, ...], ...]:
        """Return, per dimension, the mesh axes over which a parameter is gathered for use (`find_gathered_axes`)."""
        rules = self.parameters, self.activations, self.dispatched_axes
        entries = zip(axes, self.stored_axes(axes), strict=True)
        return tuple(tuple(m for m in find_gathered_axes(a, *rules) if m in stored) for a, stored in entries)

    def used_axes(self, axes: Sequence[str | None]) -> tuple[tuple[str, ...], ...]:
        """Return, per dimension, the mesh axes that split a parameter while it is used."""
        entries = zip(self.stored_axes(axes), self.gathered_axes(axes), strict=True)
        return tuple(tuple(m for m in stored if m not in gathered) for stored, gathered in entries)

    def activation_axes(self, axes: Sequence[Axis]) -> tuple[tuple[str, ...], ...]:
        """Return, per dimension, the mesh axes of an activation. A dimension may have a tuple of logical axes."""
        dimensions = (() if a is None else (a,) if isinstance(a, str) else a for a in axes)
        mesh_axes = [tuple(dict.fromkeys(m for a in logical for m in self._axis_rule(a))) for logical in dimensions]
        return reserve_dispatched(axes, mesh_axes, self.dispatched_axes)

    def _axis_rule(self, logical: str) -> tuple[str, ...]:
        if isinstance(logical, InUse):
            return self.used_axes([*(self.dispatched_axes - {logical}), logical])[-1]
        return find_rule(logical, self.activations)

    def optimizer_axes(self, axes: Sequence[str | None], shape: Sequence[int]) -> tuple[tuple[str, ...], ...]:
        """Return, per dimension, the mesh axes that split the optimizer state of a parameter.

        These are the mesh axes that split the parameter. ZeRO-1 adds each mesh axis that splits the batch, but not the
        parameter, to the first dimension with a length that the resulting number of parts divides. It adds none to
        `layers`, and leaves out an axis if no dimension is divisible.
        """
        entries = list(self.stored_axes(axes))
        if self.partition.zero1:
            for data_axis in find_zero1_axes(self.activations[BATCH], entries):
                for i, size in enumerate(shape):
                    split = math.prod(self.mesh.axes[m] for m in entries[i]) * self.mesh.axes[data_axis]
                    if axes[i] != LAYERS and size % split == 0:
                        entries[i] = (*entries[i], data_axis)
                        break
        return tuple(entries)

    def axes_size(self, mesh_axes: Sequence[str]) -> int:
        """Return the number of parts into which these mesh axes split an array."""
        return math.prod(self.mesh.axes[axis] for axis in mesh_axes)

    def count_parts(self, logical: str, kind: str, length: int) -> int:
        """Return the number of parts of a logical axis of parameters (`kind` `stored`) or activations (`active`).

        `length` is ignored. This method has the arguments of `Candidates.count_parts`, so that `size_checks` can call
        either.
        """
        return self.axes_size((self.activations if kind == "active" else self.parameters)[logical])

    def format_axes(self, mesh_axes: Sequence[str]) -> str:
        """Format mesh axes with their sizes: `x=4·y=2`."""
        return "·".join(f"{axis}={self.mesh.axes[axis]}" for axis in mesh_axes)


def reserve_dispatched(
    axes: Sequence[Axis], mesh_axes: Sequence[tuple[str, ...]], dispatched_axes: Collection[str]
) -> tuple[tuple[str, ...], ...]:
    """Return `mesh_axes`, per dimension of an array, without those of dispatched dimensions in other dimensions.

    For example, if `z` splits experts and the batch, it splits only the experts of tokens that were sent to experts.
    Likewise, if it splits experts and `embed`, it splits only the experts of their weights.

    Args:
        axes: Logical axis of each dimension.
        mesh_axes: Mesh axes of each dimension by the rules of a partition.
        dispatched_axes: Logical axes that tokens are sent along (`Arrays.dispatched_axes`).
    """
    reserved = {m for a, entry in zip(axes, mesh_axes, strict=True) if a in dispatched_axes for m in entry}
    return tuple(
        entry if not reserved or a in dispatched_axes else tuple(m for m in entry if m not in reserved)
        for a, entry in zip(axes, mesh_axes, strict=True)
    )


def find_zero1_axes(data_axes: Iterable[str], stored_axes: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """Return the mesh axes over which ZeRO-1 splits the moments of a parameter: data axes that do not split it.

    `stored_axes` are the mesh axes that split each dimension of the parameter.
    """
    used = {axis for axes in stored_axes for axis in axes}
    return tuple(axis for axis in data_axes if axis not in used)


def find_gathered_axes(
    logical: str | None, parameters: Rules, activations: Rules, dispatched_axes: Collection[str]
) -> tuple[str, ...]:
    """Return the mesh axes that split a parameter's logical axis in storage, but not while it is used.

    These are the mesh axes that also split the batch or the sequence. Devices along such an axis have different tokens,
    and each device needs the whole parameter: it is gathered for use, and its gradient is reduce-scattered (FSDP).

    There are two exceptions. A pipeline's mesh axis stays split, because a stage needs only its layers. Logical axes in
    `dispatched_axes` stay split, because tokens are sent to the shards of the parameter.
    """
    if logical is None or logical in dispatched_axes:
        return ()
    data_axes = {*activations[BATCH], *activations[SEQ]} - {*parameters.get(LAYERS, ())}
    return tuple(axis for axis in find_rule(logical, parameters) if axis in data_axes)


def find_rule(logical: str, rules: Rules) -> tuple[str, ...]:
    """Return the mesh axes of a logical axis. Raises MisuseError if `rules` do not have it, as after a typo."""
    if logical not in rules:
        nearest = suggest(logical, rules)
        hint = f"Did you mean {nearest}?" if nearest else f"Use one of {', '.join(rules)}."
        raise MisuseError(f"{logical} is not a logical axis of this model. {hint}")
    return rules[logical]


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
    find_nearest: FindNearest | None = None,
    advise: bool = True,
) -> tuple[Layout | None, list[Problem]]:
    """Return the layout of a model's arrays and a list of all its problems.

    The layout is None if the mesh or `microbatches` is invalid.

    Args:
        mesh: Device mesh.
        partition: Rules that assign logical axes to mesh axes.
        arrays: Arrays of the model.
        microbatches: Number of microbatches in a step.
        remat: Activations to save or offload.
        batch: Number of sequences in the global batch.
        seq: Number of tokens per sequence.
        known_axes: Logical axes of all models, for which a partition may have rules.
        find_nearest: Searches legal values of a problem's config key (`FindNearest`), or None to suggest the nearest
            multiples.
        advise: Whether to search for legal values, which takes longer than finding the problems.
    """
    if problems := mesh.problems() + check_range("microbatches", microbatches, least=1):
        return None, problems

    def layout_on(mesh: MeshConfig) -> tuple[Layout, list[Problem]]:
        return layout_with_problems(mesh, partition, arrays, microbatches, remat, batch, seq, known_axes)

    layout, problems = layout_on(mesh)
    if not advise:
        return layout, list(dict.fromkeys(problems))
    identities = {problem.identity for problem in problems}

    def find_legal_sizes(problem: Problem) -> list[int]:
        """Return the sizes up to 64 of the problem's mesh axis that remove the problem and cause no other."""
        (axis,), other_problems = problem.mesh_axes, identities - {problem.identity}
        divisors = [n for n in range(1, 65) if problem.size % n == 0]
        return [n for n in divisors if {p.identity for p in layout_on(resize_axis(mesh, axis, n))[1]} <= other_problems]

    return layout, list(dict.fromkeys(add_advice(problem, find_nearest, find_legal_sizes) for problem in problems))


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
    """Return the layout and its problems like `make_layout`, but without checking the mesh and without advice.

    Sizes are checked only if the partition's rules have no problems.
    """
    layout, problems = derive_layout(mesh, partition, arrays, microbatches, remat, known_axes=known_axes)
    return layout, problems or layout_problems(layout, arrays, batch, seq)


def derive_layout(
    mesh: MeshConfig,
    partition: PartitionConfig,
    arrays: Arrays,
    microbatches: int = 1,
    remat: RematConfig = SAVE_EVERYTHING,
    *,
    known_axes: Collection[str],
) -> tuple[Layout, list[Problem]]:
    """Return the layout of a partition on a mesh, even if it is illegal, and all problems of the partition's rules."""
    parameters, activations, problems = resolve_rules(partition, mesh, arrays.axes, known_axes)
    stage_axes = parameters.get(LAYERS, ())
    if stage_axes:  # outside the stacked layers, the pipeline's axis splits the rows of the batch
        activations[BATCH] = tuple(dict.fromkeys((*stage_axes, *activations[BATCH])))
    layout = Layout(
        mesh, partition, parameters, activations, microbatches, remat, dispatched_axes=arrays.dispatched_axes
    )
    return (layout if problems else align_dependent_axes(layout, arrays)), problems


def align_dependent_axes(layout: Layout, arrays: Arrays) -> Layout:
    """Return a layout that replicates axes in `Arrays.sharded_like` over mesh axes that do not divide their length.

    `sharded_like` maps an axis to the axis that it follows, such as key heads to query heads. If both have the same
    rule, mesh axes are dropped from the end of the follower's rule until the remaining ones divide its length. For
    example, key heads are replicated if there are fewer of them than shards of the query heads. Each change
    adds a line to `Layout.notes`.
    """
    notes = []
    for axis, lead_axis in arrays.sharded_like.items():
        sizes = {n for t in arrays.parameters for a, n in zip(t.axes, t.shape, strict=True) if a == axis}
        for kind in ("parameters", "activations"):
            rules: Rules = getattr(layout, kind)
            new_rule = rule = rules[axis]
            while rule == rules[lead_axis] and any(n % layout.axes_size(new_rule) for n in sizes):
                new_rule = new_rule[:-1]
            if new_rule != rule:
                parts, unsplit = layout.axes_size(rule), layout.format_axes(rule[len(new_rule) :])
                indivisible = ", ".join(str(n) for n in sorted(sizes) if n % parts)
                notes.append(
                    f"{axis} ({indivisible}) is replicated over {unsplit}, unlike {lead_axis}, because its size is not "
                    f"divisible by {parts}"
                )
                layout = replace(layout, **{kind: {**rules, axis: new_rule}})
    return replace(layout, notes=tuple(dict.fromkeys(notes)))


def fuse_axes(axes: Sequence[str], sizes: Mapping[str, int], rules: Sequence[tuple[str, ...]]) -> tuple[object, ...]:
    """Fuse consecutive mesh axes into one if each rule has them next to each other or has neither of them.

    Returns the sizes of the fused axes, and the rules with indices of fused axes instead of names.
    """
    groups: list[list[str]] = []
    for axis in axes:
        if groups and all(_adjacent(groups[-1][-1], axis, rule) for rule in rules):
            groups[-1].append(axis)
        else:
            groups.append([axis])
    index_by_axis = {group[0]: i for i, group in enumerate(groups)}
    return (
        tuple(math.prod(sizes[axis] for axis in group) for group in groups),
        tuple(tuple(index_by_axis[axis] for axis in rule if axis in index_by_axis) for rule in rules),
    )


def _adjacent(first: str, second: str, rule: tuple[str, ...]) -> bool:
    if first not in rule or second not in rule:
        return first not in rule and second not in rule
    return rule.index(second) == rule.index(first) + 1
