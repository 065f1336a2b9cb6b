"""Enumerates the cells of a sweep's space: every combination of its values, legal or refused. Does not import JAX.

Some combinations are skipped and counted instead of refused: enumerated meshes that a partition cannot use, meshes that
are duplicates under a partition (see `MeshEquivalence`), and models outside the requested range.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from valkyrie.config.run import Run, known_axes
from valkyrie.hardware.platforms import get_platform
from valkyrie.hardware.target import build_topology
from valkyrie.parallel.layout import Layout, derive_layout
from valkyrie.parallel.mesh import MeshConfig, divisions, parse_mesh
from valkyrie.parallel.partition import PartitionConfig, Role, RoleKind
from valkyrie.parallel.placement import SLICE_AXIS, arrange, list_placements
from valkyrie.parallel.remat import RematConfig
from valkyrie.problems import Problem, ProblemCode, raise_problems
from valkyrie.sweep.space import ALL_CHOICES, DEFAULT_PLACEMENT, SPACE_KEY, MeshEquivalence, RunVariant, SpaceConfig

_PATTERN = re.compile(r"(?:([0-9]+)s)?((?:[A-Z]|[0-9]+)(?:x(?:[A-Z]|[0-9]+)){2,3})")


@dataclass(frozen=True)
class Cell:
    """One combination of the values in a space. It is legal if it has no problems.

    `overrides` compose the run, together with the overrides that all trials of the sweep share.
    """

    overrides: tuple[str, ...]
    run: Run
    problems: tuple[Problem, ...]


@dataclass(frozen=True)
class Cells:
    """The cells (combinations of settings) of a sweep's space, in order of enumeration.

    `skip_problems` has the reasons for skipped combinations: one problem for each skipped model, and one for each mesh
    that was skipped under a partition.
    """

    cells: list[Cell]
    skip_problems: list[Problem]

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
    variants: Sequence[RunVariant],
    partitions: Mapping[str, PartitionConfig],
    remats: Mapping[str, RematConfig] | None = None,
    *,
    resolve_mesh: Callable[[str], MeshConfig] = parse_mesh,
    has_accelerators: bool = False,
) -> Cells:
    """Return the legal and refused cells of a space, and the reasons for skipped combinations.

    Args:
        space: The ranges and lists to combine.
        variants: One run for each combination of the settings outside the layout.
        partitions: Partitions to try, by name.
        remats: Remat policies to try, by name, or None to use the policy of the run.
        resolve_mesh: Returns the mesh with a given name.
        has_accelerators: Whether this machine has accelerators, which `target=auto` then uses.

    Raises:
        ValueError: The space has an invalid value, a pattern matches no mesh, or `devices` contradicts the target.
    """
    raise_problems(space.problems())
    cells: list[Cell] = []
    skip_problems: list[Problem] = []
    for variant in variants:
        if model_problems := variant.run.model.problems():
            cells.append(Cell(variant.overrides, variant.run, tuple(model_problems)))
        elif range_problem := _range_problem(space, variant.run):
            skip_problems.append(range_problem)
        else:
            meshes = _meshes(space, variant.run, resolve_mesh)
            for name, partition in partitions.items():
                for mesh_name, mesh in _distinct_meshes(
                    space, variant.run, partition, meshes, has_accelerators, skip_problems
                ):
                    overrides = [f"mesh={mesh_name}", f"partition={name}"]
                    run = variant.run.changed(mesh=mesh, partition=partition)
                    cells += _vary_microbatches_and_remat(
                        space, RunVariant((*variant.overrides, *overrides), run), remats or {}
                    )
    return Cells(cells, skip_problems)


def _vary_microbatches_and_remat(
    space: SpaceConfig, variant: RunVariant, remats: Mapping[str, RematConfig]
) -> Iterator[Cell]:
    """Yield a cell for each microbatch count and remat policy, given a run with its mesh and partition."""
    config = variant.run.config
    placement = [] if config.mesh.placement is None else [f"mesh.placement=[{','.join(config.mesh.placement)}]"]
    counts = {f"microbatches={n}": n for n in space.microbatches or []} or {"": config.microbatches}
    policies = {f"remat={name}": remat for name, remat in remats.items()} or {"": config.remat}
    for (count_override, microbatches), (remat_override, remat) in itertools.product(counts.items(), policies.items()):
        run = variant.run.changed(microbatches=microbatches, remat=remat)
        overrides = (*variant.overrides, *placement, *filter(None, (count_override, remat_override)))
        yield Cell(overrides, run, tuple(run.problems(advise=False)))


def _distinct_meshes(
    space: SpaceConfig,
    run: Run,
    partition: PartitionConfig,
    meshes: Mapping[str, tuple[MeshConfig, bool]],
    has_accelerators: bool,
    skip_problems: list[Problem],
) -> Iterator[tuple[str, MeshConfig]]:
    """Yield the meshes to try with a partition, as (name, mesh with its placement).

    Omits duplicates (see `MeshEquivalence`), and enumerated meshes that the partition cannot use. Appends a problem to
    `skip_problems` for each omitted mesh. If the partition can use none of the meshes, yields only the first one, so
    that its refusal is recorded, and appends nothing.

    `meshes` maps names to (mesh, whether a pattern enumerated it).
    """
    platform = get_platform(run.config.target.platform)
    has_torus = platform.has_torus or (has_accelerators and platform.jax_name is None)

    def layout_on(mesh: MeshConfig) -> tuple[Layout, list[Problem]]:
        return derive_layout(mesh, partition, run.arrays, known_axes=known_axes())

    mesh_problems = {
        name: _mesh_problem(*layout_on(mesh)) for name, (mesh, is_from_pattern) in meshes.items() if is_from_pattern
    }
    usable = [name for name in meshes if mesh_problems.get(name) is None]
    if not usable:
        name = next(iter(meshes))
        yield name, meshes[name][0]
        return
    seen: set[object] = set()
    for name in usable:
        mesh, is_from_pattern = meshes[name]
        degrees = _role_degrees(layout_on(mesh)[0]) if space.same is MeshEquivalence.roles and is_from_pattern else None
        has_same_roles = degrees in seen
        distinct: list[MeshConfig] = []
        for placed in [] if has_same_roles else _with_placements(space, run, mesh):
            key = _sharding_key(layout_on(placed)[0], has_torus)
            if key not in seen or space.same is MeshEquivalence.none:
                distinct.append(placed)
                seen.add(key)
        if degrees is not None:
            seen.add(degrees)
        if not distinct:
            repeats = "gives every role as many devices as" if has_same_roles else "shards every array exactly like"
            text = f"mesh={name} {repeats} another mesh."
            skip_problems.append(Problem(ProblemCode.same_sharding, "mesh", name, text))
        yield from ((name, placed) for placed in distinct)
    skip_problems += filter(None, mesh_problems.values())


def _mesh_problem(layout: Layout, problems: Sequence[Problem]) -> Problem | None:
    """Return the problem if a partition leaves a mesh axis unused or needs one that is missing, else None."""
    idle = tuple(axis for axis, role in layout.roles.items() if role.kind is RoleKind.idle)
    if idle:
        return Problem(ProblemCode.idle_mesh_axis, partition=layout.partition.name, mesh_axes=idle)
    return next((problem for problem in problems if problem.code is ProblemCode.missing_mesh_axis), None)


def _role_degrees(layout: Layout) -> frozenset[tuple[tuple[bool, Role], int]]:
    """Return the number of devices of each role, as ((is between slices, role), devices) pairs.

    The number of devices is the product of the sizes of the role's mesh axes. Axes of size 1 are ignored.
    """
    sizes: dict[tuple[bool, Role], int] = {}
    for axis, role in layout.roles.items():
        if layout.mesh.axes[axis] > 1:
            key = (axis == SLICE_AXIS, role)
            sizes[key] = sizes.get(key, 1) * layout.mesh.axes[axis]
    return frozenset(sizes.items())


def _sharding_key(layout: Layout, has_torus: bool) -> tuple[object, ...]:
    """Return a key for finding equivalent layouts of a partition.

    If two layouts have the same key, every device holds the same part of every array in both. In three cases the key
    contains the axis sizes and the placement, so that it is unique to a mesh:

    - On a torus without a placement, JAX chooses the positions of devices from the axis sizes.
    - ZeRO-1 shards optimizer state over the data axes one by one.
    - The mesh has problems.
    """
    mesh = layout.mesh
    if mesh.problems() or layout.partition.zero1 or (has_torus and mesh.placement is None):
        return (*mesh.axes.items(), *(mesh.placement or ()))
    axes, splits = layout.fused_rules
    devices = arrange(np.arange(mesh.size), mesh.placement or [*mesh.axes], mesh.axes)
    order = [[*mesh.axes].index(axis) for axis in dict.fromkeys([*axes, *mesh.axes])]
    return (devices.transpose(order).tobytes(), splits)


def _meshes(
    space: SpaceConfig, run: Run, resolve_mesh: Callable[[str], MeshConfig]
) -> dict[str, tuple[MeshConfig, bool]]:
    """Return a dict from the name of each mesh in a space to (mesh, whether a pattern enumerated it)."""
    meshes: dict[str, tuple[MeshConfig, bool]] = {}
    for entry in space.meshes:
        is_from_pattern = is_pattern(entry)
        for name in expand_pattern(entry, _device_count(space, run)) if is_from_pattern else [entry]:
            if name not in meshes:
                meshes[name] = resolve_mesh(name), is_from_pattern
    return meshes


def is_pattern(name: str) -> bool:
    """Return whether a mesh name has letters in place of sizes, such as `AxBxC` or `2sAx4xB`."""
    match = _PATTERN.fullmatch(name)
    return match is not None and any(letter.isupper() for letter in match[2])


def expand_pattern(pattern: str, devices: int) -> list[str]:
    """Return the names of the meshes that match a pattern, in ascending order. Equal letters mean equal sizes.

    Raises ValueError if no mesh matches, for example `Ax3xB` with 8 devices.
    """
    match = _PATTERN.fullmatch(pattern)
    assert match is not None, pattern
    slices, factors = int(match[1] or 1), match[2].split("x")
    prefix = f"{match[1]}s" if match[1] else ""
    shapes = [] if slices < 1 or devices % slices else divisions(devices // slices, len(factors))
    meshes = [prefix + "x".join(map(str, shape)) for shape in shapes if _matches_pattern(shape, factors)]
    if not meshes:
        raise ValueError(
            f"{SPACE_KEY}.meshes={pattern} matches no mesh of {devices} devices. Use sizes that divide {devices}, and "
            "letters for the sizes to enumerate, such as AxBxC."
        )
    return meshes


def _matches_pattern(shape: Sequence[int], factors: Sequence[str]) -> bool:
    sizes: dict[str, int] = {}
    return all(
        n == (int(factor) if factor.isdigit() else sizes.setdefault(factor, n))
        for n, factor in zip(shape, factors, strict=True)
    )


def _device_count(space: SpaceConfig, run: Run) -> int:
    target = run.config.target
    if target.devices is None:
        return space.devices or run.config.mesh.size
    if space.devices not in (None, target.devices):
        raise ValueError(
            f"{SPACE_KEY}.devices={space.devices}, but target={target.describe()} has {target.devices} devices. "
            f"Omit {SPACE_KEY}.devices, or choose a target with {space.devices} devices."
        )
    return target.devices


def _with_placements(space: SpaceConfig, run: Run, mesh: MeshConfig) -> Iterator[MeshConfig]:
    target = run.config.target
    for entry in space.placements:
        if entry == ALL_CHOICES and target.devices in (None, mesh.size):
            yield from (replace(mesh, placement=p) for p in list_placements(mesh.axes, build_topology(target)))
        elif entry in (ALL_CHOICES, DEFAULT_PLACEMENT):
            yield mesh  # with ALL_CHOICES, a mesh of another size than the target: its cell is refused
        else:
            yield replace(mesh, placement=[part.strip() for part in entry.strip("[]").split(",")])


def _range_problem(space: SpaceConfig, run: Run) -> Problem | None:
    """Return a problem if the model's parameters or FLOPs per token are outside the range of the space, else None."""
    values = {
        "parameters": run.model.parameter_count,
        "flops_per_token": lambda: run.model.flops_per_token(run.config.seq),
    }
    for key, value in values.items():
        bounds: list[float | None] | None = getattr(space, key)
        if bounds is not None:
            least, most = bounds
            if not (-math.inf if least is None else least) <= value() <= (math.inf if most is None else most):
                low, high = ("null" if bound is None else f"{bound:.4g}" for bound in bounds)
                return Problem(ProblemCode.out_of_range, key, text=f"{key} outside the range [{low},{high}]")
    return None
