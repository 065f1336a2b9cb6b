"""Checks that a mesh has as many devices and slices as the target, and suggests alternatives. Imports no JAX."""

from __future__ import annotations

from valkyrie.hardware.slices import parse_shape
from valkyrie.hardware.target import TargetConfig
from valkyrie.parallel.mesh import MeshConfig
from valkyrie.problems import Problem, ProblemCode


def target_problems(target: TargetConfig, mesh: MeshConfig) -> list[Problem]:
    """Return why no such target exists, or why a mesh cannot be placed on it."""
    problems = target.problems()
    if problems or target.devices is None:
        return problems
    if target.devices != mesh.size:
        text = _wrong_size(target, mesh)
        return [Problem(ProblemCode.device_count, "mesh", mesh.name, text, size=mesh.size, parts=target.devices)]
    if mesh.slices > 1 == target.slices and target.topology and mesh.placement is None:
        text = (
            f"mesh={mesh.name} is {mesh.slices} slices joined by the data-centre network, and "
            f"target={target.describe()} is one.{_as_slices(target, mesh)} In one slice, use a mesh such as "
            f"mesh={_mesh_like(target)}."
        )
        return [Problem(ProblemCode.slice_count, "mesh", mesh.name, text, size=mesh.slices, parts=1)]
    if 1 < target.slices != mesh.slices and mesh.placement is None:
        text = (
            f"target.slices={target.slices}: slices are joined by the data-centre network, and mesh={mesh.name} "
            f"does not say which axis crosses it. Use mesh={target.slices}s{_mesh_like(target)}, "
            "or set mesh.placement."
        )
        return [Problem(ProblemCode.slice_count, "target.slices", target.slices, text, size=mesh.slices)]
    return []


def _wrong_size(target: TargetConfig, mesh: MeshConfig) -> str:
    """Return the error message for a mesh with another number of devices than the target, with a matching target."""
    chips, per_chip = (target.chips or 0) * target.slices, target.chip.devices if target.chip else 1
    noun = "chips" if target.chip and per_chip == 1 else "devices"
    has = f"{chips} chips, each of {per_chip} JAX devices" if per_chip > 1 else f"{chips} {noun}"
    if target.chip and target.chip.units_in_name > 1 and target.name.endswith(f"-{mesh.size}"):
        has += f" ({target.name} counts {target.chip.units_in_name} cores a chip)"
    if target.slices > 1 and not target.topology and (single := target.resized(target.devices or 0)):
        has += f", as target={single.name} has"  # without a torus, a network joins all hosts anyway
    inner = f"{target.slices}s" if target.slices > 1 else ""
    such_as = f", such as mesh={inner}{_mesh_like(target)}" if target.chip and target.topology else ""
    resized = target.resized(mesh.size)
    nearest = " and ".join(f"target={other.describe()}" for other in target.nearest(mesh.size))
    fitting = f" No slice has {mesh.size} {noun}; the nearest are {nearest}." if nearest else ""
    if resized is not None:
        fitting = f" {mesh.size} {noun} are target={resized.describe()}."
    return (
        f"target={target.describe()} has {has}, but mesh={mesh.name} needs {mesh.size} devices."
        f"{_as_slices(target, mesh) or fitting} Use a mesh of {target.devices} devices{such_as}"
        f"{'' if resized is None else f', or a target of {mesh.size}'}."
    )


def _as_slices(target: TargetConfig, mesh: MeshConfig) -> str:
    """Return the sentence with the target for each slice of a mesh, empty if the number of slices is right."""
    each = mesh.size // mesh.slices
    resized = target.resized(each) if target.topology and mesh.slices not in (1, target.slices) else None
    if resized is None:
        return ""
    return f" {mesh.slices} slices of {each} devices are target={resized.name} target.slices={mesh.slices}."


def _mesh_like(target: TargetConfig) -> str:
    """Return the mesh with the shape of a target's torus, and the devices of a chip last."""
    shape = list(parse_shape(target.topology) or (target.chips or 1,))
    if target.chip and target.chip.devices > 1:
        shape.append(target.chip.devices)
    return "x".join(str(n) for n in shape + [1] * (3 - len(shape)))
