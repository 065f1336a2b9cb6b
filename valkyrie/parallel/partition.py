"""Partitions: rules that assign logical axes to mesh axes, and the role of each mesh axis. Does not import JAX."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from valkyrie.axes import BATCH, LAYERS, SEQ, axes_text
from valkyrie.parallel.mesh import MeshConfig
from valkyrie.parallel.placement import SLICE_AXIS
from valkyrie.paths import read_group
from valkyrie.problems import Problem, ProblemCode, suggest
from valkyrie.units import memory_text

Rules = dict[str, tuple[str, ...]]
"""Mesh axes that split each logical axis, slowest first."""

ROLE_SYNONYMS = {
    "dp": "data",
    "replica": "data",
    "tp": "model",
    "mp": "model",
    "tensor": "model",
    "fully_sharded": "fsdp",
}
"""Maps names that other launch scripts use in `TPU_AXIS_NAMES` to roles of the shipped partitions."""

ROUNDS = (2, 4)
"""Numbers of rounds to try under the circular schedule. Each stage has one block of layers per round."""


class MemoryKind(Enum):
    """Where an array is stored between steps: on the device, or in host memory (`memory_kind="pinned_host"`)."""

    device = "device"
    host = "host"


class GradientSum(Enum):
    """The collective that sums the gradient of a parameter whose storage is split over data axes.

    `all_to_all`: Each device receives the other devices' gradients of its shard and adds them in float32. Parameters
    that tensor parallelism also splits use `reduce_scatter` instead.

    `reduce_scatter`: The compiler's reduce-scatter.

    `auto`: `all_to_all` on chips with the compiler option `xla_tpu_enable_async_all_to_all`, which overlaps it with
    matmuls. `reduce_scatter` on others.
    """

    auto = "auto"
    reduce_scatter = "reduce_scatter"
    all_to_all = "all_to_all"


class SumGradientsPer(Enum):
    """How often a step sums gradients over the mesh axes that split the batch, if it accumulates microbatches.

    `step`: Once, after the last microbatch. Until then, each device adds up the gradients of its own rows, in float32
    arrays that those mesh axes do not split.

    `hybrid`: Over mesh axes that split no parameter, such as `s` between slices, once, after the last microbatch. Over
    the others after each microbatch. The sums are split like the stored parameters, so this takes about the memory of
    `microbatch`. Each device also holds the whole embedding table while it looks up tokens.

    `microbatch`: After each microbatch. The sums are split like the stored parameters.

    `auto`: `step` if the arrays take no more memory than under `microbatch`, or if the estimated memory, with the error
    of the estimate, fits on the target. Otherwise `hybrid`.

    In a pipeline, `step` also gathers the parameters of a stage only once, in float32. `microbatch` gathers them, and
    sums their gradients, in every turn. The setting has no effect if the mesh axes of experts split the batch: they
    need `microbatch`. Except under `microbatch`, the random masks of dropout also depend on the number of shards of the
    batch.
    """

    auto = "auto"
    step = "step"
    hybrid = "hybrid"
    microbatch = "microbatch"


@dataclass(frozen=True)
class AccumulatedGradients:
    """The gradients of a step that accumulates microbatches.

    Args:
        summed_per: How often they are summed over the mesh axes that split the batch: `step`, `hybrid` or `microbatch`.
        bytes: Estimated memory for them, in bytes per device.
        once_axes: Mesh axes over which they are summed once per step.
    """

    summed_per: SumGradientsPer
    bytes: int
    once_axes: tuple[str, ...] = ()

    @property
    def frequency_text(self) -> str:
        """How often they are summed: `once per step`, or `once per microbatch, and over s once per step`."""
        if self.summed_per is SumGradientsPer.hybrid:
            return f"once per microbatch, and over {axes_text(self.once_axes)} once per step"
        return f"once per {self.summed_per.value}"

    def describe(self) -> str:
        """Return one line for reports: `summed over devices once per step, 0.93 GiB per device (estimate)`."""
        return f"summed over devices {self.frequency_text}, {memory_text(self.bytes)} per device (estimate)"


PipelineSchedule = Enum("PipelineSchedule", {"gpipe": "gpipe", "1f1b": "1f1b", "circular": "circular"})
"""Order in which the stages of a pipeline run the microbatches.

`gpipe`: All forward passes, then all backward passes (arXiv 1811.06965).

`1f1b`: A microbatch starts its backward pass when it has reached the last stage, so a stage stores the layer inputs of
only a few microbatches (arXiv 1806.03377).

`circular`: Like gpipe, but a stage has `rounds` groups of layers, which divides the bubble by `rounds`
(arXiv 2104.04473).
"""


@dataclass
class PartitionConfig:
    """A partition: the mesh axes that split every logical axis, for parameters and for activations.

    A mesh axis `w?` is optional: it is used if the mesh has it. A rule for a logical axis `conv?` is ignored for models
    without that axis.

    Args:
        default: Mesh axes that split logical axes without a rule, except `batch`, `seq` and `layers`. Empty: such axes
            are not split.
        roles: Names for mesh axes, for use in rules. `TPU_AXIS_NAMES` can assign these names to other axes.
        zero1: Also split optimizer state over the data axes.
        gradient_sum: Collective that sums the gradients of parameters split over data axes.
        sum_gradients_per: How often a step that accumulates microbatches sums gradients over devices.
        parameter_memory: Where parameters are stored between steps.
        optimizer_memory: Where optimizer state is stored between steps.
        schedule: Order of the pipeline along the mesh axis that splits `layers`.
        rounds: Groups of layers per stage under `schedule: circular`.
    """

    name: str = "dp"
    parameters: dict[str, list[str]] = field(default_factory=dict)
    activations: dict[str, list[str]] = field(default_factory=dict)
    default: list[str] = field(default_factory=list)
    roles: dict[str, list[str]] = field(default_factory=dict)
    zero1: bool = False
    gradient_sum: GradientSum = GradientSum.auto
    sum_gradients_per: SumGradientsPer = SumGradientsPer.auto
    parameter_memory: MemoryKind = MemoryKind.device
    optimizer_memory: MemoryKind = MemoryKind.device
    schedule: PipelineSchedule = PipelineSchedule.gpipe
    rounds: int = 1


def shipped_partitions(model_axes: Collection[str]) -> list[PartitionConfig]:
    """Return the partitions in `conf/partition` that shard a model with these logical axes in different ways."""
    return distinct_partitions(read_group("partition", PartitionConfig), model_axes)


def distinct_partitions(partitions: Iterable[PartitionConfig], model_axes: Collection[str]) -> list[PartitionConfig]:
    """Return partitions without those that shard a model like an earlier one.

    `model_axes` are the logical axes of the model. If partitions differ only in rules for other axes, such as `fsdp`
    and `fsdp_ep` for a model without experts, the one with the fewest optional rules is returned.
    """

    def drop_other_axes(rules: dict[str, list[str]]) -> dict[str, list[str]]:
        return {logical: axes for logical, axes in rules.items() if logical.removesuffix("?") in model_axes}

    distinct: dict[str, PartitionConfig] = {}
    for partition in sorted(partitions, key=lambda p: sum(axis.endswith("?") for axis in p.parameters)):
        rules = {kind: drop_other_axes(getattr(partition, kind)) for kind in ("parameters", "activations")}
        distinct.setdefault(repr(replace(partition, name="", **rules)), partition)
    return [*distinct.values()]


def partition_variants(partition: PartitionConfig, fixed: Collection[str] = ()) -> Iterator[PartitionConfig]:
    """Yield copies of a partition with each pipeline schedule and number of rounds, each with and without ZeRO-1.

    Settings in `fixed` (`schedule`, `rounds`, `zero1`) keep their values, and ZeRO-1 is never turned off. A partition
    without a pipeline always gets the schedule `gpipe` with one round.
    """
    gpipe, circular, current = PipelineSchedule.gpipe, PipelineSchedule.circular, (partition.schedule, partition.rounds)
    pipelines = [(gpipe, 1), (PipelineSchedule["1f1b"], 1), *((circular, rounds) for rounds in ROUNDS)]
    if not partition.parameters.get(LAYERS):
        variants = [(gpipe, 1)]
    elif {"schedule", "rounds"} <= {*fixed}:
        variants = [current]
    elif "schedule" in fixed:
        variants = [current] * (current[1] > 1) + [pair for pair in pipelines if pair[0] is current[0]]
    elif "rounds" in fixed:
        variants = [pair for pair in pipelines if pair[1] == current[1]] or [(circular, current[1])]
    else:
        variants = [current, *pipelines]
    zero1_values = [partition.zero1] if "zero1" in fixed or partition.zero1 else [False, True]
    for (schedule, rounds), is_zero1 in itertools.product(dict.fromkeys(variants), zero1_values):
        yield replace(partition, schedule=schedule, rounds=rounds, zero1=is_zero1)


def resolve_rules(
    partition: PartitionConfig, mesh: MeshConfig, axes: Collection[str], other_axes: Collection[str] = ()
) -> tuple[Rules, Rules, list[Problem]]:
    """Return a model's rules for parameters, its rules for activations, and the problems of these rules on a mesh.

    `axes` are the model's logical axes. All of them get a rule for parameters, except `batch` and `seq`, and a rule for
    activations, except `layers`. Rules for logical axes of other models (`other_axes`) are ignored.
    """
    problems: list[Problem] = []
    roles = _resolve_roles(partition, mesh, problems)
    parameter_axes = [axis for axis in axes if axis not in (BATCH, SEQ)]
    activation_axes = [axis for axis in axes if axis != LAYERS]
    resolved: list[Rules] = []
    for kind, config, model_axes in (
        ("parameters", partition.parameters, parameter_axes),
        ("activations", partition.activations, activation_axes),
    ):
        problems += _unknown_axes(partition.name, kind, config, model_axes, other_axes)
        entries_by_axis = {logical.removesuffix("?"): entries for logical, entries in config.items()}
        rules: Rules = {}
        for logical in sorted(model_axes, key=[*entries_by_axis, *model_axes].index):
            default = [] if logical in (BATCH, SEQ, LAYERS) else partition.default
            entries = entries_by_axis.get(logical, default)
            rule_key = f"{kind}.{logical}" if logical in entries_by_axis else "default"
            split = list(_expand(entries, roles, mesh, rule_key, partition.name, problems))
            has_roles = any(entry.removesuffix("?") in roles for entry in entries)
            rules[logical] = tuple(dict.fromkeys(split) if has_roles else split)  # two roles may share an axis
        resolved.append(rules)
    return resolved[0], resolved[1], list(dict.fromkeys(problems))


def _unknown_axes(
    name: str, kind: str, rules: Iterable[str], model_axes: Collection[str], other_axes: Collection[str]
) -> Iterator[Problem]:
    """Yield the problem of every rule for an unknown logical axis, with the nearest name."""
    legal_axes = [*model_axes, *(axis for axis in other_axes if axis not in (*model_axes, BATCH, SEQ, LAYERS))]
    for logical in rules:
        if logical.endswith("?") or logical in legal_axes:
            continue
        nearest = suggest(logical, legal_axes)
        yield Problem(
            ProblemCode.unknown_logical_axis,
            f"partition.{kind}.{logical}",
            partition=name,
            axes=(logical,),
            details={"kind": kind, "near": nearest, "known": ", ".join(model_axes)},
        )


def _resolve_roles(partition: PartitionConfig, mesh: MeshConfig, problems: list[Problem]) -> Mapping[str, list[str]]:
    if mesh.names is None or not partition.roles:
        return partition.roles
    inner_axes = [a for a in mesh.axes if a != "s"]
    axes_by_role: dict[str, list[str]] = {role: [] for role in partition.roles}
    for axis, name in zip(inner_axes, mesh.names, strict=True):
        role = ROLE_SYNONYMS.get(name, name)
        if role in axes_by_role:
            axes_by_role[role].append(axis)
        elif mesh.axes[axis] > 1:
            problems.append(
                Problem(
                    ProblemCode.unknown_role,
                    "mesh.names",
                    name,
                    partition=partition.name,
                    mesh_axes=(axis,),
                    mesh_sizes=(mesh.axes[axis],),
                    details={"known": ", ".join(partition.roles)},
                )
            )
    return axes_by_role


def _expand(
    entries: Iterable[str],
    roles: Mapping[str, list[str]],
    mesh: MeshConfig,
    rule_key: str,
    name: str,
    problems: list[Problem],
) -> Iterable[str]:
    for entry in entries:
        axis, optional = entry.removesuffix("?"), entry.endswith("?")
        if axis in roles:
            yield from _expand(roles[axis], {}, mesh, rule_key, name, problems)
        elif axis in mesh.axes:
            yield axis
        elif not optional:
            mesh_axes = ", ".join(f"{a}={n}" for a, n in mesh.axes.items())
            problems.append(
                Problem(
                    ProblemCode.missing_mesh_axis,
                    f"partition.{rule_key}",
                    partition=name,
                    mesh_axes=(axis,),
                    mesh_sizes=(0,),
                    details={"rule": rule_key, "mesh": mesh.name, "has": mesh_axes},
                )
            )


def split_pattern(parameters: Rules, activations: Rules, sizes: Mapping[str, int]) -> tuple[object, ...]:
    """Return a key that is equal for rules that split every array in the same way, up to the names of mesh axes.

    Mesh axes of size 1 split nothing and are left out. Others are numbered in the order in which rules use them, except
    `s`, which crosses the network between slices.
    """
    numbers: dict[str, int] = {}
    rules = []
    for kind in (parameters, activations):
        split = {logical: [axis for axis in axes if sizes[axis] > 1] for logical, axes in sorted(kind.items())}
        numbered = [
            (logical, tuple(axis if axis == SLICE_AXIS else numbers.setdefault(axis, len(numbers)) for axis in axes))
            for logical, axes in split.items()
            if axes
        ]
        rules.append(tuple(numbered))
    return (*rules, tuple(sizes[axis] for axis in numbers))


class RoleKind(Enum):
    """Kind of parallelism along a mesh axis.

    DP: Splits the batch.
    FSDP: Splits the batch and parameters.
    EP: Splits the batch and an axis that tokens are sent along, such as experts (`Arrays.dispatched_axes`).
    MP1: Splits heads, MLP, states or vocabulary (tensor parallelism).
    MP2: Splits only `embed`, the residual stream.
    SP: Splits the sequence.
    PP: Splits the layers.
    idle: Splits nothing.
    unused: Has size 1.
    """

    DP = "DP"
    FSDP = "FSDP"
    EP = "EP"
    MP1 = "MP1"
    MP2 = "MP2"
    SP = "SP"
    PP = "PP"
    idle = "idle"
    unused = "unused"

    @property
    def splits_only_data(self) -> bool:
        """Whether this is DP, FSDP or unused, so that devices exchange no activations along the mesh axis."""
        return self in (RoleKind.DP, RoleKind.FSDP, RoleKind.unused)


@dataclass(frozen=True)
class Role:
    """Role of a mesh axis, and the logical axes that it splits."""

    kind: RoleKind
    axes: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return `FSDP(batch,embed)`, or `idle`."""
        return f"{self.kind.value}({','.join(self.axes)})" if self.axes else self.kind.value


def describe_roles(sizes: Mapping[str, int], roles: Mapping[str, Role]) -> str:
    """Return the roles of mesh axes with their sizes: `x=4 MP1(mlp,heads,vocab) · y=4 MP2(embed) · z=2 DP(batch)`."""
    return " · ".join(f"{axis}={sizes[axis]} {role}" for axis, role in roles.items())


def assign_roles(
    mesh: MeshConfig, parameters: Rules, activations: Rules, dispatched_axes: Collection[str] = ()
) -> dict[str, Role]:
    """Return the role of every mesh axis.

    A mesh axis of size 1 is unused. Otherwise, its kind depends on the first of these that it splits: `layers` (PP),
    the batch (DP, FSDP or, if it also splits one of `dispatched_axes`, EP), the sequence (SP), other axes of parameters
    (MP1 or MP2). Else it is idle.
    """
    roles = {}
    for axis, size in mesh.axes.items():
        split_axes = [logical for logical, axes in parameters.items() if axis in axes]
        splits_batch = axis in activations.get("batch", ())
        splits_sequence = axis in activations.get("seq", ())
        if size == 1:
            roles[axis] = Role(RoleKind.unused)
        elif LAYERS in split_axes:
            roles[axis] = Role(RoleKind.PP, tuple(split_axes))
        elif splits_batch:
            kind = RoleKind.FSDP if split_axes else RoleKind.DP
            kind = kind if set(dispatched_axes).isdisjoint(split_axes) else RoleKind.EP
            roles[axis] = Role(kind, (BATCH, *split_axes))
        elif splits_sequence:
            roles[axis] = Role(RoleKind.SP, (SEQ, *split_axes))
        elif split_axes:
            roles[axis] = Role(RoleKind.MP2 if set(split_axes) == {"embed"} else RoleKind.MP1, tuple(split_axes))
        else:
            roles[axis] = Role(RoleKind.idle)
    return roles
