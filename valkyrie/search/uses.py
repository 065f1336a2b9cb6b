"""Decides what a collective in a module is: its kind, groups, bytes, the mesh axes it crosses, who asked for it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np

from valkyrie.search.collectives import KINDS, Machine, Network, Traffic, algorithm, payload
from valkyrie.search.hlo import Computation, Instruction, Module
from valkyrie.search.hlo_groups import permute_pairs, replica_groups
from valkyrie.search.hlo_loops import condition_and_body, trip_count

ASYNC_START, ASYNC_DONE = "AsyncCollectiveStart", "AsyncCollectiveDone"
"""Custom calls by which a fusion starts or ends a collective that the fusions between them carry on."""


_RUNTIME_KINDS = {
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}
"""How libtpu's runtime for several slices (`xla_megascale_runtime`) calls what it carries."""


@dataclass
class CollectiveUse:
    """All runs of collectives alike in kind, axes and cause, in one step of one device.

    `bytes_sent`: by a device; `bytes_by_torus_axis`: of those, along each torus axis (empty without a machine).
    `busy_s`: seconds under way; `exposed_s`: seconds of those in which the device waited.
    """

    kind: str
    mesh_axes: tuple[str, ...]
    torus_axes: tuple[str, ...]
    op_name: str
    source: str
    calls: float = 0.0
    bytes_sent: float = 0.0
    bytes_by_torus_axis: dict[str, float] = field(default_factory=dict)
    busy_s: float = 0.0
    exposed_s: float = 0.0

    @property
    def key(self) -> tuple[object, ...]:
        """What tells this use from others."""
        return (self.kind, self.mesh_axes, self.torus_axes, self.op_name, self.source)

    def blank(self) -> CollectiveUse:
        """Return a use alike that has not run yet."""
        return replace(self, calls=0.0, bytes_sent=0.0, bytes_by_torus_axis={}, busy_s=0.0, exposed_s=0.0)

    def add(self, other: CollectiveUse, times: float | int) -> None:
        """Take in what another use came to, as if it had run `times` times."""
        self.calls += times * other.calls
        self.bytes_sent += times * other.bytes_sent
        self.busy_s += times * other.busy_s
        self.exposed_s += times * other.exposed_s
        for axis, sent in other.bytes_by_torus_axis.items():
            self.bytes_by_torus_axis[axis] = self.bytes_by_torus_axis.get(axis, 0.0) + times * sent


@dataclass(frozen=True)
class Collective:
    """One collective instruction: what it does in one run."""

    kind: str
    mesh_axes: tuple[str, ...]
    op_name: str
    source: str
    bytes_sent: float
    traffic: Traffic

    @property
    def label(self) -> str:
        """Its mesh axes in one word."""
        return ",".join(self.mesh_axes)

    def use(self) -> CollectiveUse:
        """Return a use of it that has not run yet."""
        torus = tuple(self.traffic.bytes_by_axis)
        return CollectiveUse(self.kind, self.mesh_axes, torus, self.op_name, self.source)


class Collectives:
    """Reads the collectives of a module; with a machine, costs them too.

    For several slices libtpu compiles the program of one slice: its groups count the devices of that slice, and what
    goes between slices is handed to the host's runtime.
    """

    def __init__(self, module: Module, mesh_axes: dict[str, int], machine: Machine | None = None) -> None:
        devices = math.prod(mesh_axes.values())
        shape = tuple(mesh_axes.values())
        if machine is not None:
            slice_of = np.array([p.slice for p in machine.positions])
        else:
            slice_of = np.arange(devices) // module.partitions
        own = slice_of == slice_of[0]
        one_slice = module.partitions < devices
        if module.partitions not in (devices, np.count_nonzero(own)):
            raise ValueError(
                f"A module compiled for {module.partitions} devices was to be read as one of {devices} "
                f"({' x '.join(f'{name}={size}' for name, size in mesh_axes.items())}): compile it for that mesh."
            )
        places = np.stack(np.unravel_index(np.arange(devices), shape), axis=-1)
        self._module = module
        self._axes = mesh_axes
        self._slices = len(np.unique(slice_of))
        self._slice_axes = tuple(
            name for d, name in enumerate(mesh_axes) if np.diff(slice_of.reshape(shape), axis=d).any()
        )
        self._places = places[own] if one_slice else places
        self._network = Network(machine, own if one_slice else None) if machine is not None else None
        self._known: dict[str, Collective] = {}

    def read(self, instruction: Instruction, kind: str | None = None, within: Instruction | None = None) -> Collective:
        """Return what a collective instruction does; `kind` where a fusion around it makes it another one.

        `within`: the operation around it, which has its name where the compiler left it none.
        """
        key = f"{instruction.name}/{kind}"
        if key not in self._known:
            self._known[key] = self._read(instruction, kind or kind_of(instruction.opcode), within)
        return self._known[key]

    def _read(self, instruction: Instruction, kind: str, within: Instruction | None) -> Collective:
        taken = float(sum(o.shape.bytes for o in instruction.operands if o.shape.elements != 1 or len(o.shape.dims)))
        taken = taken or float(sum(o.shape.bytes for o in instruction.operands))
        op_name, source = cause(instruction)
        if within is not None and not op_name:
            op_name, source = cause(within)
        if kind == "collective-permute":
            pairs = permute_pairs(instruction)
            axes = self._varying(pairs)
            traffic = self._network.permute(pairs, taken) if self._network is not None else Traffic()
            return Collective(kind, axes, op_name, source, taken if len(pairs) else 0.0, traffic)
        arrays = [g for g in replica_groups(instruction, self._module.partitions) if g.shape[1] > 1]
        if not arrays:
            return Collective(kind, (), op_name, source, 0.0, Traffic())
        groups = max(arrays, key=lambda g: g.shape[1])
        full = taken * groups.shape[1] if kind == "all-gather" else taken
        traffic = Traffic()
        if self._network is not None:
            traffic = self._network.collective(kind, groups, full, algorithm(instruction.config))
        sent = traffic.bytes_sent or payload(kind, full, groups.shape[1])
        return Collective(kind, self._varying(groups), op_name, source, sent, traffic)

    def between_slices(self, instruction: Instruction) -> Collective:
        """Return what a `send` to the host's runtime does, which carries a collective between slices."""
        attributes = instruction.attributes
        kind = _RUNTIME_KINDS.get(attributes.get("_xla_megascale_transfer_type", ""), "collective-permute")
        taken = float(instruction.operands[0].shape.bytes)
        op_name, source = cause(instruction)
        traffic = Traffic()
        if self._network is not None:
            traffic = self._network.between_slices(kind, taken, self._slices)
        full = taken * self._slices if kind == "all-gather" else taken
        return Collective(kind, self._slice_axes, op_name, source, payload(kind, full, self._slices), traffic)

    def _varying(self, groups: np.ndarray) -> tuple[str, ...]:
        """The mesh axes along which members of a group differ."""
        if not len(groups):
            return ()
        places = self._places[groups]
        differ = (places != places[:, :1]).any(axis=(0, 1))
        return tuple(name for name, d in zip(self._axes, differ, strict=True) if d)


def kind_of(opcode: str) -> str:
    """Return the kind of collective of an opcode, with or without `-start`; empty for other operations."""
    base = opcode.removesuffix("-start")
    return base if base in KINDS else ""


def is_between_slices(instruction: Instruction) -> bool:
    """Return whether an instruction hands a collective between slices to the host's runtime."""
    return instruction.opcode == "send" and "_xla_megascale_transfer_type" in instruction.attributes


def cause(instruction: Instruction) -> tuple[str, str]:
    """Return (op_name, source) of an instruction, or of what makes or uses its value where it has none of its own."""
    if instruction.op_name:
        return instruction.op_name, instruction.source
    queue, seen = list(instruction.operands), 0
    while queue and seen < 16:
        before = queue.pop(0)
        seen += 1
        if before.op_name:
            return before.op_name, before.source
        queue += before.operands
    return "", instruction.source


def inner_collectives(computation: Computation) -> list[Instruction]:
    """Return the collectives inside a fused or wrapped computation, nested ones included."""
    return _inner(computation)


@cache
def _inner(computation: Computation) -> list[Instruction]:
    found = [i for i in computation.instructions if kind_of(i.opcode)]
    nested = (c for i in computation.instructions if i.opcode in ("fusion", "call", "async-start") for c in i.called)
    return found + [i for c in nested for i in _inner(c)]


def wrapped_by(target: str, computation: Computation) -> list[Instruction]:
    """Return the collectives that custom calls of this target take in a fused computation, nested ones included."""
    found = [
        operand
        for i in computation.instructions
        if i.opcode == "custom-call" and i.target == target
        for operand in i.operands
        if kind_of(operand.opcode)
    ]
    nested = (c for i in computation.instructions if i.opcode == "fusion" for c in i.called)
    return found + [i for c in nested for i in wrapped_by(target, c)]


def fused_kind(fusion: Instruction, inner: Instruction) -> str:
    """Return the kind of collective a fusion around one is: an all-reduce that keeps a slice is a reduce-scatter."""
    kind = kind_of(inner.opcode)
    returned = max((leaf.elements for leaf in fusion.shape.leaves), default=0)
    whole = max((o.shape.elements for o in inner.operands), default=0)
    return "reduce-scatter" if kind == "all-reduce" and returned < whole else kind


def traffic(module: Module, mesh_axes: dict[str, int]) -> list[CollectiveUse]:
    """Return the collectives of one step of one device with their bytes, most bytes first; for any backend.

    `mesh_axes`: names and sizes, in the order of the flattened device list. Seconds and torus axes stay empty.
    """
    reader = Collectives(module, mesh_axes)
    uses: dict[tuple[object, ...], CollectiveUse] = {}
    _collect(module.entry, 1.0, reader, uses)
    return sorted(uses.values(), key=lambda use: -use.bytes_sent)


def _collect(
    computation: Computation, times: float, reader: Collectives, uses: dict[tuple[object, ...], CollectiveUse]
) -> None:
    for instruction in computation.instructions:
        if instruction.opcode == "while":
            count = trip_count(instruction)
            _collect(condition_and_body(instruction)[1], times * (1 if count is None else count), reader, uses)
        elif instruction.opcode == "conditional":
            for branch in instruction.called:
                _collect(branch, times / len(instruction.called), reader, uses)
        elif is_between_slices(instruction):
            _add(reader.between_slices(instruction), times, uses)
        elif kind_of(instruction.opcode):
            _add(reader.read(instruction), times, uses)
        elif instruction.opcode in ("fusion", "call", "async-start"):
            for called in instruction.called:
                started = wrapped_by(ASYNC_START, called)
                for inner in inner_collectives(called):
                    if "async_collective_fusion_config" in inner.config and inner not in started:
                        continue
                    kind = fused_kind(instruction, inner) if instruction.opcode == "fusion" else None
                    _add(reader.read(inner, kind, instruction), times, uses)


def _add(collective: Collective, times: float, uses: dict[tuple[object, ...], CollectiveUse]) -> None:
    use = collective.use()
    use = uses.setdefault(use.key, use)
    use.calls += times
    use.bytes_sent += times * collective.bytes_sent
