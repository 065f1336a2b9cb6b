"""Spaces of layouts and model shapes, and their cells: each legal, or refused with its reasons. No JAX.

A cell is one combination, as overrides of the command line. What nobody named is skipped and counted, not refused:
an enumerated mesh that a partition has no use for, a mesh with the same sharding as another, a shape out of range.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from valkyrie.config.run import Run
from valkyrie.hardware.target import topology_of
from valkyrie.parallel.mesh import MeshConfig, parse_mesh
from valkyrie.parallel.partition import PartitionConfig
from valkyrie.parallel.placement import placements
from valkyrie.parallel.remat import RematConfig, remat_named
from valkyrie.problems import Problem, ProblemCode, check_range, refuse
from valkyrie.sweep.meshes import Same, degrees, is_pattern, may_be_a_torus, meshes_of, sharding, unfit

ALL, DEFAULT = "all", "default"
"""Words of a space: every partition or placement there is, and the placement that a mesh has without one."""


@dataclass
class SpaceConfig:
    """What `hydra/sweeper=layouts` varies; `conf/hydra/sweeper/layouts.yaml` says each key with an example.

    `meshes`: sizes joined by x, letters where every factorisation of the devices is meant (`AxBxC`, `2sAxBxC`).
    `devices`: for those; null takes the target's, or the mesh's where the target is `auto`. `partitions`: names, or
    `all`. `microbatches`, `remat`: null leaves them as they are. `placements`: `default`, `all`, or lists such as
    `z,x,y`. `vary`: further keys or groups, with a list of values or a text as on the command line (`512,1024`); keys
    joined by commas vary together. `parameters`, `flops_per_token` (forward): the range of a model, null for no bound.
    """

    meshes: list[str] = field(default_factory=lambda: ["AxBxC"])
    devices: int | None = None
    partitions: list[str] = field(default_factory=lambda: [ALL])
    microbatches: list[int] | None = None
    remat: list[str] | None = None
    placements: list[str] = field(default_factory=lambda: [DEFAULT])
    vary: dict[str, Any] = field(default_factory=dict)
    parameters: list[float | None] | None = None
    flops_per_token: list[float | None] | None = None
    same: Same = Same.sharding

    def problems(self) -> list[Problem]:
        """Return everything that is wrong with these settings."""
        problems = []
        for name in ("meshes", "partitions", "placements", "microbatches", "remat"):
            if getattr(self, name) == []:
                text = f"{SPACE}.{name}=[] leaves no cell: name at least one."
                problems.append(Problem(ProblemCode.missing, f"{SPACE}.{name}", [], text))
        problems += check_range(f"{SPACE}.devices", self.devices, least=1)
        for key in ("parameters", "flops_per_token"):
            given: list[float | None] | None = getattr(self, key)
            if given is None:
                continue
            bounds = [bound for bound in given if bound is not None]
            if len(given) != 2 or bounds != sorted(bounds):
                text = ",".join("null" if bound is None else f"{bound:g}" for bound in given)
                text = f"{SPACE}.{key}=[{text}] is no range: write [least, most], with null for no bound."
                problems.append(Problem(ProblemCode.malformed, f"{SPACE}.{key}", given, text))
        return problems


SPACE = "hydra.sweeper.space"
"""Where the command line finds the space."""


Choice = TypeVar("Choice")


@dataclass(frozen=True)
class Named(Generic[Choice]):
    """A choice of a config group, under the name that the command line has for it."""

    name: str
    value: Choice


@dataclass(frozen=True)
class Shape:
    """One combination of everything that is not layout: its overrides, and the run they compose to."""

    overrides: tuple[str, ...]
    run: Run


@dataclass(frozen=True)
class Cell:
    """One combination of a space: its overrides, its run, and why it is refused; legal where nothing is wrong."""

    overrides: tuple[str, ...]
    run: Run
    problems: tuple[Problem, ...]

    @property
    def legal(self) -> bool:
        """Whether nothing is wrong with it."""
        return not self.problems


@dataclass(frozen=True)
class Cells:
    """Every cell of a space in order, and how many combinations were skipped, by reason."""

    cells: list[Cell]
    skipped: Counter[str]

    @property
    def legal(self) -> list[Cell]:
        """The cells with which nothing is wrong."""
        return [cell for cell in self.cells if cell.legal]

    @property
    def refused(self) -> list[Cell]:
        """The cells with their reasons."""
        return [cell for cell in self.cells if not cell.legal]


def enumerate_space(
    space: SpaceConfig,
    shapes: Sequence[Shape],
    partitions: Sequence[Named[PartitionConfig]],
    *,
    mesh_named: Callable[[str], MeshConfig] = parse_mesh,
    named_remat: Callable[[str], RematConfig] = remat_named,
    accelerated: bool = False,
) -> Cells:
    """Return every cell of a space for these shapes and partitions; ValueError says what cannot be enumerated.

    `mesh_named` and `named_remat` return what has a name; `accelerated` says that this machine has accelerators, which
    `target=auto` then means.
    """
    refuse(space.problems())
    cells: list[Cell] = []
    skipped: Counter[str] = Counter()
    for shape in shapes:
        outside = _outside(space, shape.run)
        if outside is not None:
            skipped[outside] += 1
        elif unsound := shape.run.model.problems():
            cells.append(Cell(shape.overrides, shape.run, tuple(unsound)))
        else:
            meshes = list(_meshes(space, shape.run, mesh_named))
            remats = [Named(name, named_remat(name)) for name in space.remat or []]
            for partition in partitions:
                cells += _of_partition(space, shape, partition, meshes, remats, accelerated, skipped)
    return Cells(cells, skipped)


def _of_partition(
    space: SpaceConfig,
    shape: Shape,
    partition: Named[PartitionConfig],
    meshes: Sequence[tuple[Named[MeshConfig], bool]],
    remats: Sequence[Named[RematConfig]],
    accelerated: bool,
    skipped: Counter[str],
) -> Iterator[Cell]:
    """Yield the cells of a partition; enumerated meshes that it cannot use are a refused cell only if none is left."""
    torus = may_be_a_torus(shape.run.config.target, accelerated)
    seen: set[tuple[object, ...]] = set()
    unused: list[Named[MeshConfig]] = []
    for mesh, enumerated in meshes:
        layout = shape.run.layout_on(mesh.value, partition.value)
        if enumerated and unfit(layout) is not None:
            unused.append(mesh)
            continue
        alike = ("degrees", degrees(layout)) if space.same is Same.roles and enumerated else None
        new = False
        for placed in _placed(space, shape.run, mesh.value) if alike is None or alike not in seen else ():
            key = sharding(shape.run.layout_on(placed, partition.value), torus)
            if key not in seen or space.same is Same.none:
                new = True
                seen.add(key)
                yield from _variants(space, shape, partition, Named(mesh.name, placed), remats)
        if alike is not None:
            seen.add(alike)
        if not new:
            skipped["same sharding as another mesh"] += 1
    if len(unused) == len(meshes):
        yield from _variants(space, shape, partition, unused[0], remats)
    elif unused:
        skipped["mesh has an axis that the partition does not use, or lacks one that it needs"] += len(unused)


def _variants(
    space: SpaceConfig,
    shape: Shape,
    partition: Named[PartitionConfig],
    mesh: Named[MeshConfig],
    remats: Sequence[Named[RematConfig]],
) -> Iterator[Cell]:
    named = [f"mesh={mesh.name}", f"partition={partition.name}"]
    if mesh.value.placement is not None:
        named.append(f"mesh.placement=[{','.join(mesh.value.placement)}]")
    for microbatches in space.microbatches or [None]:
        for remat in remats or [None]:
            overrides, changes = list(named), {"mesh": mesh.value, "partition": partition.value}
            if microbatches is not None:
                overrides.append(f"microbatches={microbatches}")
                changes["microbatches"] = microbatches
            if remat is not None:
                overrides.append(f"remat={remat.name}")
                changes["remat"] = remat.value
            run = shape.run.changed(**changes)
            yield Cell((*shape.overrides, *overrides), run, tuple(run.problems(advise=False)))


def _meshes(
    space: SpaceConfig, run: Run, mesh_named: Callable[[str], MeshConfig]
) -> Iterator[tuple[Named[MeshConfig], bool]]:
    """Yield the meshes of a space, none twice, and whether each was enumerated or is named."""
    seen: set[str] = set()
    for entry in space.meshes:
        enumerated = is_pattern(entry)
        for name in meshes_of(entry, _devices(space, run)) if enumerated else [entry]:
            if name not in seen:
                seen.add(name)
                yield Named(name, mesh_named(name)), enumerated


def _devices(space: SpaceConfig, run: Run) -> int:
    target = run.config.target
    if target.devices is None:
        return space.devices or run.config.mesh.size
    if space.devices not in (None, target.devices):
        raise ValueError(
            f"{SPACE}.devices={space.devices}, but target={target.describe()} has {target.devices} devices. "
            f"Leave {SPACE}.devices out, or choose a target of {space.devices}."
        )
    return target.devices


def _placed(space: SpaceConfig, run: Run, mesh: MeshConfig) -> Iterator[MeshConfig]:
    for entry in space.placements:
        if entry == DEFAULT:
            yield mesh
        elif entry == ALL:
            target = run.config.target
            if target.devices is not None and target.devices != mesh.size:
                yield mesh  # its cell is refused with both numbers
                continue
            for placement in placements(mesh.axes, topology_of(target)):
                yield replace(mesh, placement=placement)
        else:
            yield replace(mesh, placement=[part.strip() for part in entry.strip("[]").split(",")])


def _outside(space: SpaceConfig, run: Run) -> str | None:
    """Return which range of the space a model is out of."""
    if run.model.problems():
        return None
    for key, given, value in (
        ("parameters", space.parameters, run.model.parameter_count),
        ("flops_per_token", space.flops_per_token, lambda: run.model.flops_per_token(run.config.seq)),
    ):
        if given is not None:
            least, most = (-math.inf if given[0] is None else given[0]), (math.inf if given[1] is None else given[1])
            if not least <= value() <= most:
                return f"{key} outside {_bound(given[0])} to {_bound(given[1])}"
    return None


def _bound(value: float | None) -> str:
    return "any" if value is None else f"{value:.4g}"
