"""The cells of a sweep's space: every combination, legal or refused with its problems. No JAX.

Combinations that nobody named are skipped and counted, not refused: enumerated meshes that a partition cannot use,
meshes with the same sharding as another, and models outside the requested range.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from valkyrie.config.run import Run, known_axes
from valkyrie.hardware.platforms import platform_of
from valkyrie.hardware.target import topology_of
from valkyrie.parallel.layout import Layout, derive_layout
from valkyrie.parallel.mesh import MeshConfig, parse_mesh
from valkyrie.parallel.partition import PartitionConfig, Role, RoleKind
from valkyrie.parallel.placement import SLICE_AXIS, arrange, placements
from valkyrie.parallel.remat import RematConfig
from valkyrie.problems import Problem, ProblemCode, refuse
from valkyrie.search.estimate.space import divisions
from valkyrie.sweep.space import ALL, DEFAULT, SPACE, ModelVariant, Same, SpaceConfig

_PATTERN = re.compile(r"(?:([0-9]+)s)?((?:[A-Z]|[0-9]+)(?:x(?:[A-Z]|[0-9]+)){2,3})")


@dataclass(frozen=True)
class Cell:
    """A combination of a space."""

    overrides: tuple[str, ...]
    run: Run
    problems: tuple[Problem, ...]


@dataclass(frozen=True)
class Cells:
    """The cells of a space in order, and the reason for each skipped combination."""

    cells: list[Cell]
    skipped: list[Problem]

    @property
    def legal(self) -> list[Cell]:
        """The cells without problems."""
        return [cell for cell in self.cells if not cell.problems]

    @property
    def refused(self) -> list[Cell]:
        """The cells with problems."""
        return [cell for cell in self.cells if cell.problems]


def enumerate_space(
    space: SpaceConfig,
    variants: Sequence[ModelVariant],
    partitions: Mapping[str, PartitionConfig],
    remats: Mapping[str, RematConfig] | None = None,
    *,
    mesh_named: Callable[[str], MeshConfig] = parse_mesh,
    accelerated: bool = False,
) -> Cells:
    """Return every cell of a space. Raises ValueError for a space that cannot be enumerated.

    Args:
        space: The ranges and lists to combine.
        variants: Runs that differ in everything except the layout.
        partitions: Partitions by the name in an override.
        remats: Remat policies by name, or None to use the policy of the run.
        mesh_named: Returns the mesh of a name.
        accelerated: Whether `target=auto` means accelerators of this machine.
    """
    refuse(space.problems())
    cells: list[Cell] = []
    skipped: list[Problem] = []
    for variant in variants:
        if unsound := variant.run.model.problems():
            cells.append(Cell(variant.overrides, variant.run, tuple(unsound)))
        elif outside := _out_of_range(space, variant.run):
            skipped.append(outside)
        else:
            meshes = _meshes(space, variant.run, mesh_named)
            for name, partition in partitions.items():
                for mesh_name, mesh in _distinct_meshes(space, variant.run, partition, meshes, accelerated, skipped):
                    overrides = [f"mesh={mesh_name}", f"partition={name}"]
                    changed = variant.run.changed(mesh=mesh, partition=partition)
                    cells += _variants(space, ModelVariant((*variant.overrides, *overrides), changed), remats or {})
    return Cells(cells, skipped)


def _variants(space: SpaceConfig, variant: ModelVariant, remats: Mapping[str, RematConfig]) -> Iterator[Cell]:
    """Yield a cell for each microbatch count and remat policy of a mesh and a partition."""
    config = variant.run.config
    placement = [] if config.mesh.placement is None else [f"mesh.placement=[{','.join(config.mesh.placement)}]"]
    counts = {f"microbatches={n}": n for n in space.microbatches or []} or {"": config.microbatches}
    policies = {f"remat={name}": remat for name, remat in remats.items()} or {"": config.remat}
    for (counted, microbatches), (named, remat) in itertools.product(counts.items(), policies.items()):
        run = variant.run.changed(microbatches=microbatches, remat=remat)
        overrides = (*variant.overrides, *placement, *filter(None, (counted, named)))
        yield Cell(overrides, run, tuple(run.problems(advise=False)))


def _distinct_meshes(
    space: SpaceConfig,
    run: Run,
    partition: PartitionConfig,
    meshes: Mapping[str, tuple[MeshConfig, bool]],
    accelerated: bool,
    skipped: list[Problem],
) -> Iterator[tuple[str, MeshConfig]]:
    """Yield the name and the placed mesh of each different sharding under a partition.

    If the partition can use none of the enumerated meshes, yields the first one, so that its refusal is recorded.
    """
    platform = platform_of(run.config.target.platform)
    torus = platform.has_torus or (accelerated and platform.jax_name is None)

    def layout_on(mesh: MeshConfig) -> tuple[Layout, list[Problem]]:
        return derive_layout(mesh, partition, run.arrays, known_axes=known_axes())

    misfits = {name: _misfit(*layout_on(mesh)) for name, (mesh, enumerated) in meshes.items() if enumerated}
    usable = [name for name in meshes if misfits.get(name) is None]
    if not usable:
        name = next(iter(meshes))
        yield name, meshes[name][0]
        return
    seen: set[object] = set()
    for name in usable:
        mesh, enumerated = meshes[name]
        degrees = _degrees(layout_on(mesh)[0]) if space.same is Same.roles and enumerated else None
        distinct: list[MeshConfig] = []
        for placed in [] if degrees in seen else _placed(space, run, mesh):
            key = _sharding(layout_on(placed)[0], torus)
            if key not in seen or space.same is Same.none:
                distinct.append(placed)
                seen.add(key)
        if degrees is not None:
            seen.add(degrees)
        if not distinct:
            text = f"mesh={name} shards every array as another mesh does."
            skipped.append(Problem(ProblemCode.same_sharding, "mesh", name, text))
        yield from ((name, placed) for placed in distinct)
    skipped += filter(None, misfits.values())


def _misfit(layout: Layout, problems: Sequence[Problem]) -> Problem | None:
    """Return why a partition cannot use a mesh: an axis that it does not use, or one that it needs. Else None."""
    idle = tuple(axis for axis, role in layout.roles.items() if role.kind is RoleKind.idle)
    if idle:
        return Problem(ProblemCode.idle_mesh_axis, partition=layout.partition.name, mesh_axes=idle)
    return next((problem for problem in problems if problem.code is ProblemCode.missing_mesh_axis), None)


def _degrees(layout: Layout) -> frozenset[tuple[tuple[bool, Role], int]]:
    """Return how many devices each role has; roles between slices count separately from those within."""
    sizes: dict[tuple[bool, Role], int] = {}
    for axis, role in layout.roles.items():
        if layout.mesh.axes[axis] > 1:
            key = (axis == SLICE_AXIS, role)
            sizes[key] = sizes.get(key, 1) * layout.mesh.axes[axis]
    return frozenset(sizes.items())


def _sharding(layout: Layout, torus: bool) -> tuple[object, ...]:
    """Return a key that is equal for two layouts of a partition if every device holds the same part of every array.

    Device positions are known if there is a placement or no torus. On a torus without a placement, JAX places axes by
    their sizes, so a mesh equals only itself. The same holds under ZeRO-1, which shards over data axes one by one.
    """
    mesh = layout.mesh
    if mesh.problems() or layout.partition.zero1 or (torus and mesh.placement is None):
        return (*mesh.axes.items(), *(mesh.placement or ()))
    axes, splits = layout.fused_rules
    devices = arrange(np.arange(mesh.size), mesh.placement or [*mesh.axes], mesh.axes)
    order = [[*mesh.axes].index(axis) for axis in dict.fromkeys([*axes, *mesh.axes])]
    return (devices.transpose(order).tobytes(), splits)


def _meshes(
    space: SpaceConfig, run: Run, mesh_named: Callable[[str], MeshConfig]
) -> dict[str, tuple[MeshConfig, bool]]:
    """Return the meshes of a space by name, and whether each was enumerated from a pattern."""
    meshes: dict[str, tuple[MeshConfig, bool]] = {}
    for entry in space.meshes:
        enumerated = is_pattern(entry)
        for name in expand_pattern(entry, _devices(space, run)) if enumerated else [entry]:
            if name not in meshes:
                meshes[name] = mesh_named(name), enumerated
    return meshes


def is_pattern(name: str) -> bool:
    """Whether a mesh leaves sizes free, as `AxBxC` and `2sAx4xB` do."""
    match = _PATTERN.fullmatch(name)
    return match is not None and any(letter.isupper() for letter in match[2])


def expand_pattern(pattern: str, devices: int) -> list[str]:
    """Return the meshes that match a pattern, in ascending order. Equal letters mean equal sizes.

    Raises ValueError if no mesh matches, such as `Ax3xB` for 8 devices.
    """
    match = _PATTERN.fullmatch(pattern)
    assert match is not None, pattern
    slices, words = int(match[1] or 1), match[2].split("x")
    prefix = f"{match[1]}s" if match[1] else ""
    shapes = [] if slices < 1 or devices % slices else divisions(devices // slices, len(words))
    meshes = [prefix + "x".join(map(str, shape)) for shape in shapes if _matches(shape, words)]
    if not meshes:
        raise ValueError(
            f"meshes={pattern} stands for no mesh of {devices} devices. Write sizes that divide {devices} and letters "
            "for those to be found, such as AxBxC."
        )
    return meshes


def _matches(shape: Sequence[int], words: Sequence[str]) -> bool:
    sizes: dict[str, int] = {}
    return all(
        n == (int(word) if word.isdigit() else sizes.setdefault(word, n)) for n, word in zip(shape, words, strict=True)
    )


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
    target = run.config.target
    for entry in space.placements:
        if entry == ALL and target.devices in (None, mesh.size):
            yield from (replace(mesh, placement=p) for p in placements(mesh.axes, topology_of(target)))
        elif entry in (ALL, DEFAULT):
            yield mesh  # with ALL, its cell is refused for its number of devices
        else:
            yield replace(mesh, placement=[part.strip() for part in entry.strip("[]").split(",")])


def _out_of_range(space: SpaceConfig, run: Run) -> Problem | None:
    """Return the problem of a model that is outside a range of the space, or None."""
    values = {
        "parameters": run.model.parameter_count,
        "flops_per_token": lambda: run.model.flops_per_token(run.config.seq),
    }
    for key, value in values.items():
        bounds: list[float | None] | None = getattr(space, key)
        if bounds is not None:
            least, most = bounds
            if not (-math.inf if least is None else least) <= value() <= (math.inf if most is None else most):
                low, high = ("any" if bound is None else f"{bound:.4g}" for bound in bounds)
                return Problem(ProblemCode.out_of_range, key, text=f"{key} outside {low} to {high}")
    return None
