"""Every layout of a model on a target, as arrays: partition, mesh, placement, remat, microbatches.

Mesh axes that a partition treats alike are one class: only the product of their sizes matters, so that a class is put
on its first axis and the other divisions are counted as duplicates.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from valkyrie.axes import BATCH, LAYERS
from valkyrie.config.run import Run, known_axes
from valkyrie.hardware.platforms import platform_of
from valkyrie.hardware.target import TargetConfig, Topology, topology_of
from valkyrie.parallel.candidates import Candidates
from valkyrie.parallel.layout import layout_with_problems
from valkyrie.parallel.mesh import parse_mesh, resized
from valkyrie.parallel.partition import PartitionConfig, PipelineSchedule, Role, RoleKind, Rules, resolve_rules, roles
from valkyrie.parallel.placement import SLICE_AXIS
from valkyrie.parallel.remat import RematConfig
from valkyrie.problems import INDIVISIBLE, Problem, ProblemCode, ProblemError, either
from valkyrie.search.estimate.placed import Placement, between_slices, placements_of, spans_of
from valkyrie.train.memory import location_of

MOST_MICROBATCHES = 128
"""More do not shorten a pipeline's bubble by one percent."""
ROUNDS = (2, 4)
"""Stretches of layers of a stage that are tried under the circular schedule."""


@dataclass(frozen=True)
class Candidate:
    """One layout on one slice: what a search identifies it by, and the command line asks for it with."""

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

    @property
    def layout_overrides(self) -> list[str]:
        """Command-line overrides that select the layout, without those that select the slice."""
        overrides = [f"mesh={self.mesh}", f"partition={self.partition}"]
        if self.schedule is not PipelineSchedule.gpipe:
            overrides.append(f"partition.schedule={self.schedule.value}")
        if self.rounds > 1:
            overrides.append(f"partition.rounds={self.rounds}")
        if self.zero1:
            overrides.append("partition.zero1=true")
        if self.placement is not None:
            overrides.append(f"mesh.placement=[{','.join(self.placement)}]")
        overrides.append(f"remat={self.remat}")
        if self.microbatches > 1:
            overrides.append(f"microbatches={self.microbatches}")
        return overrides

    @property
    def overrides(self) -> list[str]:
        """Command-line overrides that select the slice and the layout."""
        slices = [f"target.slices={self.slices}"] if self.slices > 1 else []
        return [f"target={self.target}", *slices, *self.layout_overrides]


@dataclass(frozen=True)
class Group:
    """Candidates on one target, each under every remat policy, and how each is asked for: mesh and placement.

    `classes`: how many kinds of mesh axes their partition has.
    """

    target: TargetConfig
    candidates: Candidates
    remats: Sequence[RematConfig]
    classes: int
    meshes: list[str]
    placements: list[list[str] | None]

    def candidate(self, number: int, remat: RematConfig) -> Candidate:
        """Candidate `number` of the group under a remat policy."""
        c, placement = self.candidates, self.placements[number]
        return Candidate(
            target=self.target.name,
            slices=self.target.slices,
            mesh=self.meshes[number],
            placement=None if placement is None else tuple(placement),
            partition=c.partition.name,
            schedule=c.partition.schedule,
            rounds=c.partition.rounds,
            zero1=c.partition.zero1,
            remat=remat.name,
            microbatches=int(c.microbatches[number]),
        )

    def run(self, number: int, remat: RematConfig, run: Run) -> Run:
        """Return a run of a candidate that asks for the rest as another does."""
        c = self.candidates
        mesh = replace(parse_mesh(self.meshes[number]), placement=self.placements[number])
        count = int(c.microbatches[number])
        layout = {"mesh": mesh, "partition": c.partition, "remat": remat, "microbatches": count}
        return run.changed(target=self.target, device_batch=None, **layout)


@dataclass(frozen=True)
class Space:
    """All legal layouts in groups; how many were refused, by reason, and how many divisions shard like another one."""

    groups: list[Group]
    refused: Counter[Problem]
    duplicates: int

    def __len__(self) -> int:
        return sum(len(group.candidates) * len(group.remats) for group in self.groups)


def space_of(
    run: Run,
    targets: Sequence[TargetConfig],
    partitions: Sequence[PartitionConfig],
    remats: Sequence[RematConfig],
    microbatches: int | None = None,
) -> Space:
    """Return every layout of a run's model on these targets under these partitions and remat policies.

    The run's own remat is among them; without any other it is the only one. `microbatches` None varies them, unless the
    run has a `device_batch`. ValueError where what is asked for is refused on every mesh.
    """
    if microbatches is not None and run.config.batch % microbatches:
        raise ProblemError([_indivisible(run.config.batch, microbatches, targets)])
    groups, refused, duplicates = [], Counter[Problem](), 0
    wrong: list[list[Problem]] = []
    distinct = _distinct(run, remats)
    for target, partition in itertools.product(targets, partitions):
        fitting, misfits = _fitting(run, target, partition, distinct)
        wrong.append(misfits if not fitting else [])
        if not fitting:
            refused.update(misfits[:1])
            continue
        group, illegal, same = _of_partition(run, target, partition, fitting, microbatches)
        refused.update(illegal)
        duplicates += same
        groups += [] if group is None else [group]
    if wrong and all(wrong):
        raise ProblemError(problem for misfits in wrong for problem in misfits)
    return Space(groups, refused, duplicates)


def schedules(partition: PartitionConfig, named: Collection[str] = ()) -> list[PartitionConfig]:
    """Return a partition under each schedule where it has a pipeline; elsewhere a schedule means nothing.

    What is `named` of `schedule` and `rounds` stays, and the other one takes every value that goes with it.
    """
    gpipe, circular, own = PipelineSchedule.gpipe, PipelineSchedule.circular, (partition.schedule, partition.rounds)
    if not partition.parameters.get(LAYERS):
        return [replace(partition, schedule=gpipe, rounds=1)]
    every = [(gpipe, 1), (PipelineSchedule["1f1b"], 1), *((circular, rounds) for rounds in ROUNDS)]
    if {"schedule", "rounds"} <= {*named}:
        chosen = [own]
    elif "schedule" in named:
        chosen = [own] * (own[1] > 1) + [pair for pair in every if pair[0] is own[0]]
    elif "rounds" in named:
        chosen = [pair for pair in every if pair[1] == own[1]] or [(circular, own[1])]
    else:
        chosen = [own, *every]
    return [replace(partition, schedule=schedule, rounds=rounds) for schedule, rounds in dict.fromkeys(chosen)]


def with_zero1(partition: PartitionConfig) -> list[PartitionConfig]:
    """Return a partition without ZeRO-1 and with it."""
    return [replace(partition, zero1=zero1) for zero1 in (False, True)]


def _distinct(run: Run, remats: Sequence[RematConfig]) -> list[RematConfig]:
    """Return the policies that keep different activations of this model, the run's own first."""
    kept, distinct = run.model.kept(), {}
    for remat in [run.config.remat, *remats]:
        distinct.setdefault(tuple(location_of(entry, remat) for entry in kept), remat)
    return list(distinct.values())


def _indivisible(batch: int, microbatches: int, targets: Sequence[TargetConfig]) -> Problem:
    """Return the problem of microbatches that do not divide a batch, with those and the batches that would do."""
    divisors = [n for n in range(1, batch + 1) if batch % n == 0]
    nearest = [max(n for n in divisors if n < microbatches), *[n for n in divisors if n > microbatches][:1]]
    parts = microbatches * max(target.devices or 1 for target in targets)
    batches = [n for n in (batch // parts * parts, (batch // parts + 1) * parts) if n]
    use = [*(f"microbatches={n}" for n in nearest), *(f"batch={n}" for n in batches)]
    text = f"batch={batch} is not divisible by microbatches={microbatches}. Use {either(None, use)}."
    return Problem(ProblemCode.batch_not_divisible, "batch", batch, text, size=batch, parts=microbatches)


def _fitting(
    run: Run, target: TargetConfig, partition: PartitionConfig, remats: Sequence[RematConfig]
) -> tuple[list[RematConfig], list[Problem]]:
    """Return the remat policies under which a partition is legal on some mesh, and why it is not under the others."""
    fitting, misfits = [], []
    for remat in remats:
        problems = _misfits(run, target, partition, remat)
        misfits += problems
        fitting += [] if problems else [remat]
    return fitting, misfits


def _misfits(run: Run, target: TargetConfig, partition: PartitionConfig, remat: RematConfig) -> list[Problem]:
    """Return the problems that a partition and a remat policy have on every mesh of a target."""
    stages = partition.parameters.get(LAYERS, ())
    mesh = parse_mesh(f"{target.slices}s1x1x1x1" if target.slices > 1 else "1x1x1x1")
    axis = next((axis for axis in mesh.axes if axis in stages and axis != SLICE_AXIS), None)
    if axis is not None and (partition.schedule, partition.rounds) != (PipelineSchedule.gpipe, 1):  # stages are meant
        mesh = resized(mesh, axis, 2)
    batch, seq = run.config.batch, run.config.seq
    _, problems = layout_with_problems(mesh, partition, run.arrays, mesh.size, remat, batch, seq, known_axes())
    return [problem for problem in problems if problem.code not in INDIVISIBLE]


def _of_partition(
    run: Run, target: TargetConfig, partition: PartitionConfig, remats: Sequence[RematConfig], microbatches: int | None
) -> tuple[Group | None, Counter[Problem], int]:
    """Return the legal layouts of a partition on a target, those refused by reason, and how many are duplicates."""
    slices = target.slices
    mesh = parse_mesh(f"{slices}s2x2x2x2" if slices > 1 else "2x2x2x2")
    parameters, activations, _ = resolve_rules(partition, mesh, run.arrays.axes, known_axes())
    classes = _classes(parameters, activations, list(mesh.axes), roles(mesh, parameters, activations))
    assert target.devices is not None
    meshes, seen = [], 0
    for sizes in divisions(target.devices // slices, len(classes)):
        seen += math.prod(len(list(divisions(n, len(c)))) for n, c in zip(sizes, classes, strict=True))
        between = {SLICE_AXIS: slices} if slices > 1 else {}
        meshes.append({c[0]: n for c, n in zip(classes, sizes, strict=True)} | between)
    duplicates = seen - len(meshes)
    if partition.schedule is not PipelineSchedule.gpipe:  # without a pipeline they are those of gpipe
        meshes = [m for m in meshes if any(m.get(axis, 1) > 1 for axis in parameters[LAYERS])]
    if partition.zero1:  # with no data axis on which parameters are whole they are those without it
        free = [a for a in activations[BATCH] if not any(a in axes for axes in parameters.values())]
        meshes = [m for m in meshes if any(m.get(axis, 1) > 1 for axis in free)]
    batch, each, refused = run.config.batch, run.config.device_batch, Counter[Problem]()
    if each is not None:
        axes = {*activations[BATCH], *parameters.get(LAYERS, ())}
        whole = [m for m in meshes if batch % (each * math.prod(m.get(axis, 1) for axis in axes)) == 0]
        code = ProblemCode.device_batch_not_divisible
        problem = Problem(code, "device_batch", each, partition=partition.name, size=batch)
        refused += Counter({problem: (len(meshes) - len(whole)) * len(remats)})
        meshes = whole
    rows = _rows(run, target, mesh.axes, meshes, parameters, activations, microbatches)
    if not rows:
        return None, refused, duplicates
    candidates = _candidates(run, target, partition, parameters, activations, list(mesh.axes), rows)
    group, illegal = _legal(run, target, candidates, rows, remats, len(classes))
    return group, refused + illegal, duplicates


@dataclass(frozen=True)
class _Row:
    sizes: dict[str, int]
    placement: Placement
    microbatches: int


def _rows(
    run: Run,
    target: TargetConfig,
    axes: dict[str, int],
    meshes: Sequence[dict[str, int]],
    parameters: Rules,
    activations: Rules,
    microbatches: int | None,
) -> list[_Row]:
    """Return every mesh with each of its placements and numbers of microbatches."""
    topology, torus = topology_of(target), platform_of(target.platform).has_torus
    rows = []
    for mesh in meshes:
        sizes = {axis: mesh.get(axis, 1) for axis in axes}
        on_slice = tuple(sizes[axis] for axis in axes if axis != SLICE_AXIS)
        placed = placements_of(on_slice, _one_slice(topology), torus)
        shards = math.prod(sizes[a] for a in activations[BATCH])
        stages = math.prod(sizes[a] for a in parameters.get(LAYERS, ()))
        if (each := run.config.device_batch) is not None:
            counts = [run.config.batch // (each * shards * stages)]
        else:
            counts = _microbatches(run.config.batch, shards, stages) if microbatches is None else [microbatches]
        rows += [_Row(sizes, placement, count) for placement in placed for count in counts]
    return rows


def _candidates(
    run: Run,
    target: TargetConfig,
    partition: PartitionConfig,
    parameters: Rules,
    activations: Rules,
    axes: list[str],
    rows: Sequence[_Row],
) -> Candidates:
    assert target.chip is not None
    inner = [axis for axis in axes if axis != SLICE_AXIS]
    spans = dict(spans_of([row.placement.lies for row in rows], inner, target.chip))
    if SLICE_AXIS in axes:
        spans[SLICE_AXIS] = between_slices(len(rows), target)
    return Candidates(
        partition,
        parameters,
        activations,
        run.arrays,
        {axis: np.array([row.sizes[axis] for row in rows]) for axis in axes},
        spans,
        np.array([row.microbatches for row in rows]),
        np.full(len(rows), float(partition.rounds)),
    )


def _legal(
    run: Run,
    target: TargetConfig,
    candidates: Candidates,
    rows: Sequence[_Row],
    remats: Sequence[RematConfig],
    classes: int,
) -> tuple[Group | None, Counter[Problem]]:
    """Return the legal ones among candidates, and how many are refused, each by its first problem."""
    legal, refused, partition = np.ones(len(rows), bool), Counter[Problem](), candidates.partition
    for problem, wrong in candidates.problems(run.config.batch, run.config.seq).items():
        if count := int((wrong & legal).sum()):
            refused[problem] += count * len(remats)
        legal &= ~wrong
    chosen = [row for row, fine in zip(rows, legal, strict=True) if fine]
    if not chosen:
        return None, refused
    inner = [axis for axis in candidates.sizes if axis != SLICE_AXIS]
    meshes = [_mesh_name(row.sizes, partition) for row in chosen]
    placements = [_entries(row, inner, target) for row in chosen]
    return Group(target, candidates.take(legal), remats, classes, meshes, placements), refused


def _classes(parameters: Rules, activations: Rules, axes: Sequence[str], role_of: dict[str, Role]) -> list[list[str]]:
    """Return the mesh axes that some rule uses, those that stand in the same rules together; x, y and z before w."""
    classes: dict[tuple[object, ...], list[str]] = {}
    for axis in sorted(axes, key=lambda axis: (axis == "w", axis)):
        if axis != SLICE_AXIS and role_of[axis].kind is not RoleKind.idle:
            within = tuple(
                (i, a) for i, rules in enumerate((parameters, activations)) for a in rules if axis in rules[a]
            )
            classes.setdefault(within, []).append(axis)
    return list(classes.values())


def divisions(n: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to write n as a product of so many factors, in order."""
    if parts < 2:
        if parts == 1 or n == 1:
            yield (n,) * parts
        return
    for factor in (d for d in range(1, n + 1) if n % d == 0):
        for rest in divisions(n // factor, parts - 1):
            yield (factor, *rest)


def _microbatches(batch: int, shards: int, stages: int) -> list[int]:
    """Return numbers of microbatches: powers of two, of a pipeline at least as many as it has stages."""
    most = min(batch // shards, MOST_MICROBATCHES)
    counts = [2**i for i in range(most.bit_length()) if 2**i <= most]
    return [n for n in counts if n >= stages] if stages > 1 else counts[:6]


def _mesh_name(sizes: dict[str, int], partition: PartitionConfig) -> str:
    """Return the mesh as the command line has it; with a fourth axis where it has devices or a rule needs it."""
    needs = any("w" in entries for rules in (partition.parameters, partition.activations) for entries in rules.values())
    axes = [a for a in ("w", "x", "y", "z") if a != "w" or sizes[a] > 1 or needs]
    prefix = f"{sizes[SLICE_AXIS]}s" if sizes.get(SLICE_AXIS, 1) > 1 else ""
    return prefix + "x".join(str(sizes[a]) for a in axes)


def _entries(row: _Row, inner: Sequence[str], target: TargetConfig) -> list[str] | None:
    """Return the placement of a row; None where one axis has all devices, which JAX places as well."""
    if target.chip is None or sum(row.sizes[a] > 1 for a in inner) < 2:
        return None
    entries = row.placement.entries(inner, [row.sizes[a] for a in inner])
    return [SLICE_AXIS, *entries] if SLICE_AXIS in row.sizes else entries


def _one_slice(topology: Topology) -> Topology:
    return replace(topology, slices=1)
