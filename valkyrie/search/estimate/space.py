"""Every layout of a model on a target, as arrays: partition, mesh, placement, remat, microbatches.

Mesh axes that appear in the same rules of a partition form a class. Only the product of their sizes matters: the first
axis of the class gets all of its devices, and the other divisions are counted as duplicates.
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
from valkyrie.hardware.target import TargetConfig, topology_of
from valkyrie.parallel.axis_links import Placement, placements_of
from valkyrie.parallel.candidates import Candidates
from valkyrie.parallel.layout import layout_with_problems
from valkyrie.parallel.mesh import MeshConfig, parse_mesh, resized
from valkyrie.parallel.partition import PartitionConfig, PipelineSchedule, RoleKind, Rules, resolve_rules, roles
from valkyrie.parallel.placement import SLICE_AXIS
from valkyrie.parallel.remat import RematConfig
from valkyrie.problems import INDIVISIBLE, Problem, ProblemCode, ProblemError, alternatives
from valkyrie.search.estimate.spans import between_slices, spans_of
from valkyrie.train.memory import location_of

MOST_MICROBATCHES = 128
"""Largest number of microbatches in a pipeline. More do not shorten its bubble by one percent."""
MOST_ACCUMULATED = 32
"""Largest number of microbatches to try without a pipeline, where they only save memory."""
ROUNDS = (2, 4)
"""Numbers of rounds to try under the circular schedule: stretches of layers per stage."""


@dataclass(frozen=True)
class Candidate:
    """One layout on one slice. Identifies it in a search, and determines its command line."""

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
    def overrides(self) -> list[str]:
        """Command-line overrides that select the slice and the layout."""
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
        if self.microbatches > 1:
            overrides.append(f"microbatches={self.microbatches}")
        return overrides


@dataclass(frozen=True)
class Group:
    """Candidates of one partition on one target, each with every remat policy.

    `meshes` has the mesh of each candidate, with its placement. `classes` is the number of classes of mesh axes.
    """

    target: TargetConfig
    candidates: Candidates
    remats: Sequence[RematConfig]
    classes: int
    meshes: list[MeshConfig]

    def candidate(self, number: int, remat: RematConfig) -> Candidate:
        """Return candidate `number` of the group with a remat policy."""
        mesh, partition = self.meshes[number], self.candidates.partition
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
            microbatches=int(self.candidates.microbatches[number]),
        )

    def run(self, number: int, remat: RematConfig, run: Run) -> Run:
        """Return a run of a candidate, with all other settings of `run`."""
        return run.changed(
            target=self.target,
            device_batch=None,
            mesh=self.meshes[number],
            partition=self.candidates.partition,
            remat=remat,
            microbatches=int(self.candidates.microbatches[number]),
        )


@dataclass(frozen=True)
class Space:
    """All legal layouts in groups; counts of refused ones by problem, and of divisions that shard like another one."""

    groups: list[Group]
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
) -> Space:
    """Return every layout of a run's model. Raises ProblemError if every partition is refused on every mesh.

    Args:
        run: Model, batch and sequence length. Its remat policy is always tried.
        targets: Slices.
        partitions: Partitions, each with its schedule.
        remats: Further remat policies.
        microbatches: The only count to try, or None to try several, unless the run has a `device_batch`.
    """
    if microbatches is not None and run.config.batch % microbatches:
        raise ProblemError([_indivisible(run.config.batch, microbatches, targets)])
    policies = _distinct_policies(run, remats)
    spaces: list[Space] = []
    misfits: list[list[Problem]] = []
    for target, partition in itertools.product(targets, partitions):
        judged = [(remat, _mesh_independent_problems(run, target, partition, remat)) for remat in policies]
        if fitting := [remat for remat, problems in judged if not problems]:
            spaces.append(_space_of_partition(run, target, partition, fitting, microbatches))
        else:
            misfits.append([problem for _, problems in judged for problem in problems])
            spaces.append(Space([], Counter(misfits[-1][:1]), 0))
    if spaces and len(misfits) == len(spaces):
        raise ProblemError(itertools.chain.from_iterable(misfits))
    groups = [group for space in spaces for group in space.groups]
    refused = sum((space.refused for space in spaces), Counter[Problem]())
    return Space(groups, refused, sum(space.duplicates for space in spaces))


def partition_variants(partition: PartitionConfig, named: Collection[str] = ()) -> Iterator[PartitionConfig]:
    """Yield a partition with each schedule, if it has a pipeline, and each of these with and without ZeRO-1.

    Settings in `named` (`schedule`, `rounds`, `zero1`) keep their values.
    """
    gpipe, circular, own = PipelineSchedule.gpipe, PipelineSchedule.circular, (partition.schedule, partition.rounds)
    every = [(gpipe, 1), (PipelineSchedule["1f1b"], 1), *((circular, rounds) for rounds in ROUNDS)]
    if not partition.parameters.get(LAYERS):
        chosen = [(gpipe, 1)]
    elif {"schedule", "rounds"} <= {*named}:
        chosen = [own]
    elif "schedule" in named:
        chosen = [own] * (own[1] > 1) + [pair for pair in every if pair[0] is own[0]]
    elif "rounds" in named:
        chosen = [pair for pair in every if pair[1] == own[1]] or [(circular, own[1])]
    else:
        chosen = [own, *every]
    zero1 = [partition.zero1] if "zero1" in named or partition.zero1 else [False, True]
    for (schedule, rounds), spread in itertools.product(dict.fromkeys(chosen), zero1):
        yield replace(partition, schedule=schedule, rounds=rounds, zero1=spread)


def _distinct_policies(run: Run, remats: Sequence[RematConfig]) -> list[RematConfig]:
    """Return the policies that save different activations of this model, starting with the run's."""
    saved, distinct = run.model.kept(), {}
    for remat in [run.config.remat, *remats]:
        distinct.setdefault(tuple(location_of(entry, remat) for entry in saved), remat)
    return list(distinct.values())


def _indivisible(batch: int, microbatches: int, targets: Sequence[TargetConfig]) -> Problem:
    """Return the problem of microbatches that do not divide a batch, with the nearest counts and batches that do."""
    divisors = [n for n in range(1, batch + 1) if batch % n == 0]
    nearest = [max(n for n in divisors if n < microbatches), *[n for n in divisors if n > microbatches][:1]]
    parts = microbatches * max(target.devices or 1 for target in targets)
    batches = [n for n in (batch // parts * parts, (batch // parts + 1) * parts) if n]
    use = [*(f"microbatches={n}" for n in nearest), *(f"batch={n}" for n in batches)]
    text = f"batch={batch} is not divisible by microbatches={microbatches}. Use {alternatives(None, use)}."
    return Problem(ProblemCode.batch_not_divisible, "batch", batch, text, size=batch, parts=microbatches)


def _mesh_independent_problems(
    run: Run, target: TargetConfig, partition: PartitionConfig, remat: RematConfig
) -> list[Problem]:
    """Return the problems of a partition and a remat policy that occur on every mesh of a target."""
    stages = partition.parameters.get(LAYERS, ())
    mesh = parse_mesh(f"{target.slices}s1x1x1x1" if target.slices > 1 else "1x1x1x1")
    axis = next((axis for axis in mesh.axes if axis in stages and axis != SLICE_AXIS), None)
    if axis is not None and (partition.schedule, partition.rounds) != (PipelineSchedule.gpipe, 1):
        mesh = resized(mesh, axis, 2)  # the problems of a schedule appear with two stages
    batch, seq = run.config.batch, run.config.seq
    _, problems = layout_with_problems(mesh, partition, run.arrays, mesh.size, remat, batch, seq, known_axes())
    return [problem for problem in problems if problem.code not in INDIVISIBLE]


@dataclass(frozen=True)
class _Row:
    sizes: dict[str, int]
    placement: Placement
    microbatches: int


def _space_of_partition(
    run: Run, target: TargetConfig, partition: PartitionConfig, remats: Sequence[RematConfig], microbatches: int | None
) -> Space:
    """Return the layouts of one partition on one target."""
    slices, batch, each = target.slices, run.config.batch, run.config.device_batch
    mesh = parse_mesh(f"{slices}s2x2x2x2" if slices > 1 else "2x2x2x2")
    parameters, activations, _ = resolve_rules(partition, mesh, run.arrays.axes, known_axes())
    on_batch, on_layers = activations[BATCH], parameters.get(LAYERS, ())
    classes = _axis_classes(mesh, parameters, activations)
    assert target.devices is not None
    meshes, all_divisions = [], 0
    for products in divisions(target.devices // slices, len(classes)):
        all_divisions += math.prod(len(list(divisions(n, len(c)))) for n, c in zip(products, classes, strict=True))
        sizes = {c[0]: n for c, n in zip(classes, products, strict=True)}
        meshes.append({axis: slices if axis == SLICE_AXIS else sizes.get(axis, 1) for axis in mesh.axes})
    duplicates = all_divisions - len(meshes)
    # Without a pipeline, a schedule is the same as gpipe. ZeRO-1 changes nothing if parameters are split over all
    # data axes.
    if partition.schedule is not PipelineSchedule.gpipe:
        meshes = [m for m in meshes if any(m[axis] > 1 for axis in on_layers)]
    if partition.zero1:
        free = [a for a in on_batch if not any(a in axes for axes in parameters.values())]
        meshes = [m for m in meshes if any(m[axis] > 1 for axis in free)]
    refused = Counter[Problem]()
    if each is not None:
        whole = [m for m in meshes if batch % (each * math.prod(m[axis] for axis in {*on_batch, *on_layers})) == 0]
        code = ProblemCode.device_batch_not_divisible
        problem = Problem(code, "device_batch", each, partition=partition.name, size=batch)
        refused += Counter({problem: (len(meshes) - len(whole)) * len(remats)})
        meshes = whole
    topology, torus = replace(topology_of(target), slices=1), platform_of(target.platform).has_torus
    rows = []
    for sizes in meshes:
        shards, stages = (math.prod(sizes[axis] for axis in rule) for rule in (on_batch, on_layers))
        if each is not None:
            counts = [batch // (each * shards * stages)]
        else:
            counts = _microbatches(batch, shards, stages) if microbatches is None else [microbatches]
        placed = placements_of(tuple(n for axis, n in sizes.items() if axis != SLICE_AXIS), topology, torus)
        rows += [_Row(sizes, placement, count) for placement in placed for count in counts]
    if not rows:
        return Space([], refused, duplicates)
    candidates = _candidates(run, target, partition, (parameters, activations), rows)
    legal = np.ones(len(rows), bool)
    for problem, wrong in candidates.problems(batch, run.config.seq).items():
        refused += Counter({problem: int((wrong & legal).sum()) * len(remats)})
        legal &= ~wrong
    fitting = [_mesh(row, partition, target) for row, fine in zip(rows, legal, strict=True) if fine]
    groups = [Group(target, candidates.take(legal), remats, len(classes), fitting)] if fitting else []
    return Space(groups, refused, duplicates)


def _candidates(
    run: Run, target: TargetConfig, partition: PartitionConfig, rules: tuple[Rules, Rules], rows: Sequence[_Row]
) -> Candidates:
    assert target.chip is not None
    axes = list(rows[0].sizes)
    spans = dict(spans_of([row.placement.axes for row in rows], [a for a in axes if a != SLICE_AXIS], target.chip))
    if SLICE_AXIS in axes:
        spans[SLICE_AXIS] = between_slices(len(rows), target)
    return Candidates(
        partition,
        *rules,
        run.arrays,
        {axis: np.array([row.sizes[axis] for row in rows]) for axis in axes},
        spans,
        np.array([row.microbatches for row in rows]),
        np.full(len(rows), float(partition.rounds)),
    )


def _axis_classes(mesh: MeshConfig, parameters: Rules, activations: Rules) -> list[list[str]]:
    """Return the mesh axes that appear in some rule, grouped by those rules; x, y and z before w."""
    role_of = roles(mesh, parameters, activations)
    classes: dict[tuple[object, ...], list[str]] = {}
    for axis in sorted(mesh.axes, key=lambda axis: (axis == "w", axis)):
        if axis != SLICE_AXIS and role_of[axis].kind is not RoleKind.idle:
            within = tuple(
                (i, a) for i, rules in enumerate((parameters, activations)) for a in rules if axis in rules[a]
            )
            classes.setdefault(within, []).append(axis)
    return list(classes.values())


def divisions(n: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to write n as an ordered product of `parts` factors, in lexicographic order."""
    if parts < 2:
        if parts == 1 or n == 1:
            yield (n,) * parts
        return
    for factor in (d for d in range(1, n + 1) if n % d == 0):
        for rest in divisions(n // factor, parts - 1):
            yield (factor, *rest)


def _microbatches(batch: int, shards: int, stages: int) -> list[int]:
    """Return counts of microbatches: powers of two, and with a pipeline at least one per stage."""
    most = min(batch // shards, MOST_MICROBATCHES if stages > 1 else MOST_ACCUMULATED)
    counts = [2**i for i in range(most.bit_length())]
    return [n for n in counts if n >= stages] if stages > 1 else counts


def _mesh(row: _Row, partition: PartitionConfig, target: TargetConfig) -> MeshConfig:
    """Return the mesh of a row, with a fourth axis if that has devices or a rule needs it.

    If one axis has all devices, the mesh has no placement: JAX's own is as good.
    """
    inner = {axis: n for axis, n in row.sizes.items() if axis != SLICE_AXIS}
    needs_w = any("w" in axes for rules in (partition.parameters, partition.activations) for axes in rules.values())
    prefix = f"{target.slices}s" if SLICE_AXIS in row.sizes else ""
    mesh = parse_mesh(prefix + "x".join(str(n) for axis, n in inner.items() if axis != "w" or n > 1 or needs_w))
    if target.chip is None or sum(n > 1 for n in inner.values()) < 2:
        return mesh
    entries = row.placement.entries([*inner], [*inner.values()])
    return replace(mesh, placement=[SLICE_AXIS, *entries] if SLICE_AXIS in row.sizes else entries)
