"""Enumerates every layout of a model on a target: partition, mesh, placement, remat policy and microbatches.

Mesh axes that appear in the same rules of a partition form a class. Only the product of their sizes matters, so the
first axis of the class gets all of its devices. Other divisions are counted as duplicates and not enumerated. So are
meshes under which a partition equals a simpler one, such as `1d_tp` if only its data axes are larger than 1.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from valkyrie.axes import BATCH, LAYERS
from valkyrie.config.run import Run, known_axes
from valkyrie.hardware.platforms import get_platform
from valkyrie.hardware.target import TargetConfig, build_topology
from valkyrie.parallel.axis_links import Placement, pareto_placements
from valkyrie.parallel.candidates import Candidates
from valkyrie.parallel.layout import layout_with_problems
from valkyrie.parallel.mesh import MeshConfig, divisions, parse_mesh, resize_axis
from valkyrie.parallel.partition import (
    PartitionConfig,
    PipelineSchedule,
    RoleKind,
    Rules,
    assign_roles,
    resolve_rules,
    split_pattern,
)
from valkyrie.parallel.placement import SLICE_AXIS
from valkyrie.parallel.remat import RematConfig, saved_location
from valkyrie.problems import DIVISIBILITY_CODES, Problem, ProblemCode, ProblemError, format_alternatives
from valkyrie.search.estimate.links import axis_links, slice_axis_links
from valkyrie.search.estimate.settings import ModelSettings

MAX_MICROBATCHES = 128
"""Largest number of microbatches to try in a pipeline. With 4 stages, the bubble is then 2.3% of a step."""
MAX_ACCUMULATION_STEPS = 32
"""Largest number of microbatches to try without a pipeline, where more microbatches only save memory."""
MAX_DEVICE_TOKENS = 2**20
"""Largest number of tokens per device of a searched batch. More would reduce the time per token by far less than 1%."""


@dataclass(frozen=True)
class Candidate:
    """One layout on one slice. Identifies it within a search, and converts to command-line overrides."""

    target: str
    slices: int
    mesh: str
    placement: tuple[str, ...] | None
    partition: str
    schedule: PipelineSchedule
    rounds: int
    zero1: bool
    remat: str
    microbatches: int
    batch: int | None = None
    """Sequences of the global batch if the search varies it, else None."""
    settings: tuple[str, ...] = ()
    """Overrides of the model that differ from the command of the search (`ModelSettings`)."""

    @property
    def overrides(self) -> list[str]:
        """Command-line overrides that select the slice and the layout. The first one is `target=`."""
        slices = [f"target.slices={self.slices}"] if self.slices > 1 else []
        overrides = [f"target={self.target}", *slices, f"mesh={self.mesh}", f"partition={self.partition}"]
        if self.schedule is not PipelineSchedule.gpipe:
            overrides.append(f"partition.schedule={self.schedule.value}")
        if self.rounds > 1:
            overrides.append(f"partition.rounds={self.rounds}")
        if self.zero1:
            overrides.append("partition.zero1=true")
        if self.placement is not None:
            overrides.append(f"mesh.placement=[{','.join(self.placement)}]")
        overrides.append(f"remat={self.remat}")
        if self.batch is not None:
            overrides.append(f"batch={self.batch}")
        if self.microbatches > 1:
            overrides.append(f"microbatches={self.microbatches}")
        return [*overrides, *self.settings]


@dataclass(frozen=True)
class LayoutGroup:
    """Layouts of one partition on one target.

    Args:
        target: The slice.
        candidates: Mesh sizes, links and microbatches of the layouts, as arrays with one entry per layout.
        remats: Remat policies to combine with each layout.
        axis_class_count: Number of groups of interchangeable mesh axes (axes that appear in the same rules of the
            partition). Breaks ties in the ranking; fewer is simpler.
        meshes: Mesh of each layout, with its placement.
        settings: Settings of the model.
    """

    target: TargetConfig
    candidates: Candidates
    remats: Sequence[RematConfig]
    axis_class_count: int
    meshes: list[MeshConfig]
    settings: ModelSettings = ModelSettings()

    def with_settings(self, settings: ModelSettings, run: Run) -> LayoutGroup:
        """Return the layouts in which other settings of the model matter, with these settings. May be empty."""
        indices = settings.select(self.candidates)
        candidates = replace(self.candidates.take(indices), arrays=settings.apply(run).arrays)
        return replace(self, candidates=candidates, meshes=[self.meshes[i] for i in indices], settings=settings)

    def batch(self, index: int) -> int | None:
        """Return the sequences of the global batch of layout `index`, or None if the search does not vary it."""
        batches = self.candidates.batch_sizes
        return None if batches is None else int(batches[index])

    def candidate(self, index: int, remat: RematConfig) -> Candidate:
        """Return layout `index` of the group with a remat policy."""
        mesh, partition = self.meshes[index], self.candidates.partition
        return Candidate(
            target=self.target.name,
            slices=self.target.slices,
            mesh=mesh.name,
            placement=None if mesh.placement is None else tuple(mesh.placement),
            partition=partition.name,
            schedule=partition.schedule,
            rounds=partition.rounds,
            zero1=partition.zero1,
            remat=remat.name,
            microbatches=int(self.candidates.microbatches[index]),
            batch=self.batch(index),
            settings=self.settings.overrides,
        )

    def run(self, index: int, remat: RematConfig, run: Run) -> Run:
        """Return a run with layout `index` of the group, and all other settings of `run`."""
        return self.settings.apply(run).changed(
            target=self.target,
            batch=self.batch(index) or run.config.batch,
            device_batch=None,
            mesh=self.meshes[index],
            partition=self.candidates.partition,
            remat=remat,
            microbatches=int(self.candidates.microbatches[index]),
        )


@dataclass(frozen=True)
class LayoutSpace:
    """All legal layouts, in groups.

    `refused` counts illegal layouts by their first problem. The counts are lower bounds: a partition that is illegal on
    every mesh counts as one layout, and remat policies that are illegal for a partition are not counted if another
    policy is legal. Meshes that leave no number of microbatches to try are not counted either: those that split the
    batch into more parts than it has sequences, or have too many pipeline stages.

    `duplicates` is the number of meshes that were skipped because they shard like another one, summed over slices and
    partition variants (ZeRO-1, pipeline schedules).
    """

    groups: list[LayoutGroup]
    refused: Counter[Problem]
    duplicates: int

    def __len__(self) -> int:
        return sum(len(group.candidates) * len(group.remats) for group in self.groups)


def enumerate_layouts(
    run: Run,
    targets: Sequence[TargetConfig],
    partitions: Sequence[PartitionConfig],
    remats: Sequence[RematConfig],
    microbatches: int | None = None,
    mesh: MeshConfig | None = None,
    device_batches: Sequence[int] = (),
    search_batch: bool = False,
) -> LayoutSpace:
    """Return the legal layouts of a run's model to search: one mesh per way to shard, and placements that none beats.

    Raises ProblemError if `microbatches` does not divide the batch, or if every partition has a problem on all meshes.

    Args:
        run: Provides model, batch and sequence length. Its remat policy is always tried.
        targets: Slices to use.
        partitions: Partitions to try, each with its schedule.
        remats: Remat policies to try in addition to the run's.
        microbatches: The only count to try, or None to try several.
        mesh: The only mesh to try, with as many devices and slices as each target, or None to try all. Its placement
            varies.
        device_batches: Allowed values of batch / (batch shards x stages x microbatches), or empty for any. If not
            empty, they override `microbatches`, except with `search_batch`, where both apply.
        search_batch: Whether to combine each layout with all of `searched_batches` that split evenly over its shards
            and microbatches, instead of with the batch of the run. Without a pipeline, layouts then have one microbatch
            unless `microbatches` is set, because accumulating gradients over a larger batch always takes slightly
            less time per token.
    """
    if not search_batch and microbatches is not None and run.config.batch % microbatches:
        raise ProblemError([_indivisible_problem(run.config.batch, microbatches, targets)])
    policies = _distinct_policies(run, remats)
    spaces: list[LayoutSpace] = []
    partition_problems: list[list[Problem]] = []
    microbatch_options = _MicrobatchCounts(microbatches, tuple(device_batches), search_batch)
    patterns = defaultdict[tuple[object, ...], set[tuple[object, ...]]](set)
    simplest_first = sorted(partitions, key=lambda partition: len(_axis_classes(*_full_mesh_rules(run, partition, 1))))
    for target, partition in itertools.product(targets, simplest_first):
        problems_by_policy = [(remat, _mesh_independent_problems(run, target, partition, remat)) for remat in policies]
        if legal_policies := [remat for remat, problems in problems_by_policy if not problems]:
            unnamed = replace(partition, name="", parameters={}, activations={}, default=[], roles={})
            earlier = patterns[target.name, repr((unnamed, legal_policies))]
            spaces.append(_partition_space(run, target, partition, legal_policies, microbatch_options, mesh, earlier))
        else:
            partition_problems.append([problem for _, problems in problems_by_policy for problem in problems])
            spaces.append(LayoutSpace([], Counter(partition_problems[-1][:1]), 0))
    if spaces and len(partition_problems) == len(spaces):
        raise ProblemError(itertools.chain.from_iterable(partition_problems))
    groups = [group for space in spaces for group in space.groups]
    refused = sum((space.refused for space in spaces), Counter[Problem]())
    return LayoutSpace(groups, refused, sum(space.duplicates for space in spaces))


def _distinct_policies(run: Run, remats: Sequence[RematConfig]) -> list[RematConfig]:
    """Return one policy for each distinct set of saved activations of this model, the run's own first."""
    activations, distinct = run.model.saved_activations(), {}
    for remat in [run.config.remat, *remats]:
        distinct.setdefault(tuple(saved_location(entry, remat) for entry in activations), remat)
    return list(distinct.values())


def _indivisible_problem(batch: int, microbatches: int, targets: Sequence[TargetConfig]) -> Problem:
    """Return the problem for microbatches that do not divide the batch. Suggests the nearest values that do."""
    divisors = [n for n in range(1, batch + 1) if batch % n == 0]
    nearest = [max(n for n in divisors if n < microbatches), *[n for n in divisors if n > microbatches][:1]]
    required_divisor = microbatches * max(target.devices or 1 for target in targets)
    lower_batch = batch // required_divisor * required_divisor
    batches = [n for n in (lower_batch, lower_batch + required_divisor) if n]
    suggestions = [*(f"microbatches={n}" for n in nearest), *(f"batch={n}" for n in batches)]
    text = (
        f"batch={batch} is not divisible by microbatches={microbatches}. Use {format_alternatives(None, suggestions)}."
    )
    return Problem(ProblemCode.batch_not_divisible, "batch", batch, text, size=batch, parts=microbatches)


def _mesh_independent_problems(
    run: Run, target: TargetConfig, partition: PartitionConfig, remat: RematConfig
) -> list[Problem]:
    """Return the problems of a partition and a remat policy that occur on every mesh of a target."""
    stages = partition.parameters.get(LAYERS, ())
    mesh = parse_mesh(f"{target.slices}s1x1x1x1" if target.slices > 1 else "1x1x1x1")
    axis = next((axis for axis in mesh.axes if axis in stages and axis != SLICE_AXIS), None)
    if axis is not None and (partition.schedule, partition.rounds) != (PipelineSchedule.gpipe, 1):
        mesh = resize_axis(mesh, axis, 2)  # the problems of a schedule appear with two stages
    batch, seq = run.config.batch, run.config.seq
    _, problems = layout_with_problems(mesh, partition, run.arrays, mesh.size, remat, batch, seq, known_axes())
    return [problem for problem in problems if problem.code not in DIVISIBILITY_CODES]


@dataclass(frozen=True)
class _PlacedMesh:
    sizes: dict[str, int]
    placement: Placement


def _partition_space(
    run: Run,
    target: TargetConfig,
    partition: PartitionConfig,
    remats: Sequence[RematConfig],
    microbatch_options: _MicrobatchCounts,
    mesh: MeshConfig | None,
    patterns: set[tuple[object, ...]],
) -> LayoutSpace:
    """Enumerate the layouts of one partition on one target.

    Leaves out meshes that split all arrays as in `patterns`, which are those of simpler partitions. Adds the others.
    """
    batch = run.config.batch
    full_mesh, parameters, activations = _full_mesh_rules(run, partition, target.slices)
    batch_axes, layer_axes = activations[BATCH], parameters.get(LAYERS, ())
    axis_classes = _axis_classes(full_mesh, parameters, activations)
    refused, duplicates = Counter[Problem](), 0
    if mesh is None:
        meshes, duplicates = _distinct_meshes(target, full_mesh, axis_classes)
    elif idle := [axis for axis in mesh.axes if mesh.axes[axis] > 1 and axis not in {SLICE_AXIS}.union(*axis_classes)]:
        sizes = tuple(mesh.axes[axis] for axis in idle)
        problem = Problem(ProblemCode.idle_mesh_axis, partition=partition.name, mesh_axes=tuple(idle), mesh_sizes=sizes)
        return LayoutSpace([], Counter({problem: len(remats)}), 0)
    else:
        meshes = [{axis: mesh.axes.get(axis, 1) for axis in full_mesh.axes}]
    effective_meshes = _effective_meshes(meshes, partition, parameters, activations)
    mesh_by_pattern = {split_pattern(parameters, activations, sizes): sizes for sizes in effective_meshes}
    duplicates += len(patterns & mesh_by_pattern.keys())
    meshes = [sizes for pattern, sizes in mesh_by_pattern.items() if pattern not in patterns]
    patterns.update(mesh_by_pattern)
    for device_batch in microbatch_options.device_batches if not microbatch_options.search_batch else ():
        batch_divisors = [device_batch * math.prod(m[axis] for axis in {*batch_axes, *layer_axes}) for m in meshes]
        code = ProblemCode.device_batch_not_divisible
        problem = Problem(code, "device_batch", device_batch, partition=partition.name, size=batch)
        refused += Counter({problem: sum(batch % n > 0 for n in batch_divisors) * len(remats)})
    topology, has_torus = replace(build_topology(target), slices=1), get_platform(target.platform).has_torus
    placed_meshes: list[_PlacedMesh] = []
    indices: list[int] = []
    batches_and_counts: list[tuple[int, int]] = []
    for sizes in meshes:
        shards, stages = (math.prod(sizes[axis] for axis in rule) for rule in (batch_axes, layer_axes))
        pairs = [
            (size, count)
            for size in (searched_batches(target, run.config.seq) if microbatch_options.search_batch else [batch])
            for count in microbatch_options.on_mesh(size, shards, stages, partition.schedule)
        ]
        if not pairs:
            continue
        inner_sizes = tuple(n for axis, n in sizes.items() if axis != SLICE_AXIS)
        placements = pareto_placements(inner_sizes, topology, has_torus)
        for placement in placements:
            indices += [len(placed_meshes)] * len(pairs)
            batches_and_counts += pairs
            placed_meshes.append(_PlacedMesh(sizes, placement))
    if not placed_meshes:
        return LayoutSpace([], refused, duplicates)
    candidates = _stack_candidates(run, target, partition, (parameters, activations), placed_meshes).take(
        np.array(indices)
    )
    batches, microbatches = np.array(batches_and_counts).T
    candidates = replace(
        candidates, microbatches=microbatches, batch_sizes=batches if microbatch_options.search_batch else None
    )
    legal_mask = np.ones(len(candidates), bool)
    # Searched batches are divisible by construction. A batch of 0 passes that check.
    for problem, mask in candidates.problems(0 if microbatch_options.search_batch else batch, run.config.seq).items():
        refused += Counter({problem: int((mask & legal_mask).sum()) * len(remats)})
        legal_mask &= ~mask
    if not legal_mask.any():
        return LayoutSpace([], refused, duplicates)
    legal_indices = np.array(indices)[legal_mask].tolist()
    mesh_configs = {i: _mesh_config(placed_meshes[i], partition, target) for i in dict.fromkeys(legal_indices)}
    meshes_of_legal = [mesh_configs[i] for i in legal_indices]
    return LayoutSpace(
        [LayoutGroup(target, candidates.take(legal_mask), remats, len(axis_classes), meshes_of_legal)],
        refused,
        duplicates,
    )


def _effective_meshes(
    meshes: Sequence[dict[str, int]], partition: PartitionConfig, parameters: Rules, activations: Rules
) -> list[dict[str, int]]:
    """Return the meshes under which the pipeline schedule and ZeRO-1 of a partition have an effect.

    Without a pipeline, every schedule equals gpipe. ZeRO-1 changes nothing if parameters are split over all data axes.
    """
    if partition.schedule is not PipelineSchedule.gpipe:
        layer_axes = parameters.get(LAYERS, ())
        meshes = [m for m in meshes if any(m[axis] > 1 for axis in layer_axes)]
    if partition.zero1:
        free = [a for a in activations[BATCH] if not any(a in axes for axes in parameters.values())]
        meshes = [m for m in meshes if any(m[axis] > 1 for axis in free)]
    return [*meshes]


def _full_mesh_rules(run: Run, partition: PartitionConfig, slices: int) -> tuple[MeshConfig, Rules, Rules]:
    """Return a mesh with all axes and with these slices, and the rules of a partition on it."""
    full_mesh = parse_mesh(f"{slices}s2x2x2x2" if slices > 1 else "2x2x2x2")
    parameters, activations, _ = resolve_rules(partition, full_mesh, run.arrays.axes, known_axes())
    return full_mesh, parameters, activations


def _distinct_meshes(
    target: TargetConfig, full_mesh: MeshConfig, axis_classes: Sequence[Sequence[str]]
) -> tuple[list[dict[str, int]], int]:
    """Return the axis sizes of all meshes that shard differently, and the number of equivalent meshes left out.

    Each mesh has the same axes as `full_mesh`. `axis_classes` has the axes that a partition uses, grouped by the rules
    in which they appear. The first axis of a class gets all of its devices. `s` gets the slices, and all other axes
    have size 1.
    """
    assert target.devices is not None
    meshes, division_count = [], 0
    for products in divisions(target.devices // target.slices, len(axis_classes)):
        division_count += math.prod(
            len(list(divisions(n, len(c)))) for n, c in zip(products, axis_classes, strict=True)
        )
        sizes = {c[0]: n for c, n in zip(axis_classes, products, strict=True)}
        meshes.append({axis: target.slices if axis == SLICE_AXIS else sizes.get(axis, 1) for axis in full_mesh.axes})
    return meshes, division_count - len(meshes)


def _stack_candidates(
    run: Run,
    target: TargetConfig,
    partition: PartitionConfig,
    rules: tuple[Rules, Rules],
    placed_meshes: Sequence[_PlacedMesh],
) -> Candidates:
    assert target.chip is not None
    axes = list(placed_meshes[0].sizes)
    links = dict(
        axis_links([m.placement.axes for m in placed_meshes], [a for a in axes if a != SLICE_AXIS], target.chip)
    )
    if SLICE_AXIS in axes:
        links[SLICE_AXIS] = slice_axis_links(len(placed_meshes), target)
    return Candidates(
        partition,
        *rules,
        run.arrays,
        {axis: np.array([m.sizes[axis] for m in placed_meshes]) for axis in axes},
        links,
        np.ones(len(placed_meshes), np.int64),
        np.full(len(placed_meshes), float(partition.rounds)),
    )


def _axis_classes(mesh: MeshConfig, parameters: Rules, activations: Rules) -> list[list[str]]:
    """Return the mesh axes that appear in at least one rule, grouped by the rules they appear in. `w` comes last."""
    axis_roles = assign_roles(mesh, parameters, activations)
    axis_classes: dict[tuple[object, ...], list[str]] = {}
    for axis in sorted(mesh.axes, key=lambda axis: (axis == "w", axis)):
        if axis != SLICE_AXIS and axis_roles[axis].kind is not RoleKind.idle:
            rule_key = tuple(
                (i, a) for i, rules in enumerate((parameters, activations)) for a in rules if axis in rules[a]
            )
            axis_classes.setdefault(rule_key, []).append(axis)
    return list(axis_classes.values())


def searched_batches(target: TargetConfig, seq: int) -> list[int]:
    """Return the global batches to search on a target, the smallest first.

    They have 1, 2, 3, 4, 6, 8, 12, ... (2^i and 3 * 2^i) sequences per device, up to `MAX_DEVICE_TOKENS`. Batches with
    fewer sequences than devices are the number of devices divided by 2, 4, ..., as long as it is divisible.
    """
    devices = target.devices or 1
    smaller = [devices >> i for i in range(1, devices.bit_length()) if devices % 2**i == 0]
    largest = max(MAX_DEVICE_TOKENS // seq, 1)
    per_device = sorted({n << i for n in (1, 3) for i in range(largest.bit_length()) if n << i <= largest})
    return [*reversed(smaller), *(n * devices for n in per_device)]


@dataclass(frozen=True)
class _MicrobatchCounts:
    """Which numbers of microbatches to try.

    Args:
        microbatches: The only count, or None for several.
        device_batches: Allowed values of batch / (batch shards x stages x microbatches), or empty for any. If not
            empty, they override `microbatches`, except with `search_batch`, where both apply.
        search_batch: Whether the search varies the batch.
    """

    microbatches: int | None
    device_batches: tuple[int, ...]
    search_batch: bool

    def on_mesh(self, batch: int, shards: int, stages: int, schedule: PipelineSchedule) -> list[int]:
        """Return the numbers of microbatches to try with `shards` shards of a batch and `stages` pipeline stages.

        A pipeline tries the powers of two from `stages` to `MAX_MICROBATCHES`. Without one, the powers of two up to
        `MAX_ACCUMULATION_STEPS` are tried, or only 1 if the search varies the batch. `microbatches` and
        `device_batches` restrict the numbers. Those that do not divide a searched batch evenly are left out.
        """
        batch_divisors = [n * shards * stages for n in dict.fromkeys(self.device_batches)]
        by_device_batch = [batch // n for n in batch_divisors if batch % n == 0]
        if self.device_batches and not self.search_batch:
            return by_device_batch
        if self.microbatches is not None:
            counts = [self.microbatches]
        else:
            unsplit = 1 if self.search_batch else MAX_ACCUMULATION_STEPS
            largest = min(batch // shards, MAX_MICROBATCHES if stages > 1 else unsplit)
            counts = [2**i for i in range(largest.bit_length())]
            counts = [n for n in counts if n >= stages] if stages > 1 else counts
        if not self.search_batch:
            return counts
        is_1f1b = schedule is PipelineSchedule["1f1b"]
        divisible = [n for n in counts if batch % (shards * (stages * n if is_1f1b else math.lcm(stages, n))) == 0]
        return [n for n in divisible if n in by_device_batch] if self.device_batches else divisible


def _mesh_config(placed_mesh: _PlacedMesh, partition: PartitionConfig, target: TargetConfig) -> MeshConfig:
    """Return the config of a placed mesh, with the axis `w` only if it has several devices or a rule needs it.

    The mesh gets no placement if at most one axis besides `s` is larger than 1, because JAX's default is then as good,
    or if the chip is unknown.
    """
    inner = {axis: n for axis, n in placed_mesh.sizes.items() if axis != SLICE_AXIS}
    needs_w = any("w" in axes for rules in (partition.parameters, partition.activations) for axes in rules.values())
    prefix = f"{target.slices}s" if SLICE_AXIS in placed_mesh.sizes else ""
    mesh = parse_mesh(prefix + "x".join(str(n) for axis, n in inner.items() if axis != "w" or n > 1 or needs_w))
    if target.chip is None or sum(n > 1 for n in inner.values()) < 2:
        return mesh
    entries = placed_mesh.placement.entries([*inner], [*inner.values()])
    return replace(mesh, placement=[SLICE_AXIS, *entries] if SLICE_AXIS in placed_mesh.sizes else entries)
