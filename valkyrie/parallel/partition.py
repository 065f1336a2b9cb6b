"""Decides which logical axis lies on which mesh axes, and what role each mesh axis plays by that. Imports no JAX."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from valkyrie.axes import LOGICAL_AXES
from valkyrie.parallel.mesh import MeshConfig

Rules = dict[str, tuple[str, ...]]
"""Logical axis to the mesh axes it is split over, slowest first."""

ROLE_SYNONYMS = {
    "dp": "data",
    "replica": "data",
    "tp": "model",
    "mp": "model",
    "tensor": "model",
    "fully_sharded": "fsdp",
}
"""Axis names of other launch scripts, and the role each of them means here."""


class Remat(Enum):
    """What a block keeps for its backward pass: everything, its matrix products, or only its input.

    `offload` keeps its input and attention's query, key, value and output in host memory, and nothing on the device.
    """

    none = "none"
    dots = "dots"
    full = "full"
    offload = "offload"


class Memory(Enum):
    """Where an array rests between steps: device memory, or the host's through `memory_kind="pinned_host"`."""

    device = "device"
    host = "host"


@dataclass
class PartitionConfig:
    """A partition: for parameters and for activations, the mesh axes of every logical axis.

    An entry `w?` is used where the mesh has that axis and passed over where it has not. `roles` gives names to mesh
    axes; rules may use them, and the axis names of a launch environment take their place.
    `zero1` splits optimizer state over the data axes too; `parameter_memory` and `optimizer_memory` may be `host`.
    """

    name: str = "dp"
    parameters: dict[str, list[str]] = field(default_factory=dict)
    activations: dict[str, list[str]] = field(default_factory=dict)
    roles: dict[str, list[str]] = field(default_factory=dict)
    zero1: bool = False
    parameter_memory: Memory = Memory.device
    optimizer_memory: Memory = Memory.device


def resolve_rules(partition: PartitionConfig, mesh: MeshConfig) -> tuple[Rules, Rules, list[str]]:
    """Return the rules for parameters and activations in mesh axes, and every problem found on the way."""
    problems: list[str] = []
    roles = _roles_on(partition, mesh, problems)
    resolved: list[Rules] = []
    for kind, rules in (("parameters", partition.parameters), ("activations", partition.activations)):
        for logical in rules:
            if logical not in LOGICAL_AXES:
                problems.append(
                    f"partition={partition.name} has a rule for {kind}.{logical}, which is not a logical axis. "
                    f"Known: {', '.join(LOGICAL_AXES)}."
                )
        out: Rules = {}
        for logical, wanted in rules.items():
            axes = list(_expand(wanted, roles, mesh, f"{kind}.{logical}", partition.name, problems))
            has_roles = any(entry.removesuffix("?") in roles for entry in wanted)
            out[logical] = tuple(dict.fromkeys(axes) if has_roles else axes)  # roles may meet on an axis
        resolved.append(out)
    return resolved[0], resolved[1], problems


def _roles_on(partition: PartitionConfig, mesh: MeshConfig, problems: list[str]) -> Mapping[str, list[str]]:
    if mesh.names is None or not partition.roles:
        return partition.roles
    inner = [a for a in mesh.axes if a != "s"]
    found: dict[str, list[str]] = {role: [] for role in partition.roles}
    for axis, name in zip(inner, mesh.names, strict=True):
        role = ROLE_SYNONYMS.get(name, name)
        if role in found:
            found[role].append(axis)
        elif mesh.axes[axis] > 1:
            problems.append(
                f"the environment names mesh axis {axis}={mesh.axes[axis]} {name!r} (TPU_AXIS_NAMES); "
                f"partition={partition.name} knows the roles {', '.join(partition.roles)}."
            )
    return found


def _expand(
    wanted: Iterable[str], roles: Mapping[str, list[str]], mesh: MeshConfig, where: str, name: str, problems: list[str]
) -> Iterable[str]:
    for entry in wanted:
        axis, optional = entry.removesuffix("?"), entry.endswith("?")
        if axis in roles:
            yield from _expand(roles[axis], {}, mesh, where, name, problems)
        elif axis in mesh.axes:
            yield axis
        elif not optional:
            has = ", ".join(f"{a}={n}" for a, n in mesh.axes.items())
            problems.append(
                f"partition={name} puts {where} on mesh axis {axis}, which mesh={mesh.name} does not have; "
                f"it has {has}. Use a mesh with that axis{_mesh_hint(axis)}, or write {axis}? in the partition."
            )


def _mesh_hint(axis: str) -> str:
    return {"w": " (four sizes, mesh=2x4x4x2)", "s": " (slices, mesh=2s4x4x2)"}.get(axis, "")


def roles(mesh: MeshConfig, parameters: Rules, activations: Rules) -> dict[str, str]:
    """Return the role of every mesh axis: DP, FSDP, MP1, MP2, SP, `idle`, or `unused` when it has size 1."""
    found = {}
    for axis, size in mesh.axes.items():
        held = [logical for logical, axes in parameters.items() if axis in axes]
        data = axis in activations.get("batch", ())
        sequence = axis in activations.get("seq", ())
        if size == 1:
            found[axis] = "unused"
        elif data and held:
            found[axis] = f"FSDP({','.join(['batch', *held])})"
        elif data:
            found[axis] = "DP(batch)"
        elif sequence:
            found[axis] = f"SP({','.join(['seq', *held])})"
        elif held:
            found[axis] = f"{'MP2' if set(held) == {'embed'} else 'MP1'}({','.join(held)})"
        else:
            found[axis] = "idle"
    return found
