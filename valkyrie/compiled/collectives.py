"""The collectives of a compiled program: kind, groups, bytes, the mesh axes each one crosses, and what asked for it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from valkyrie.compiled.groups import permute_pairs, replica_groups
from valkyrie.compiled.hlo import Computation, Instruction, Module
from valkyrie.compiled.loops import condition_and_body, trip_count

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
"""Opcodes of collectives, without `-start`."""

FUSED = "async_collective_fusion_config"
"""What the configuration of a collective holds that products carry on."""
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


@dataclass(frozen=True, eq=False)
class Collective:
    """One collective instruction: what one device sends in one run, and between which devices.

    `full_bytes`: the whole array of a group, as `payload` counts it; of a permute, and of what crosses slices through
    the host's runtime (`slices` of them), the bytes that one device hands in. `groups` or `pairs` are positions in the
    mesh's flattened device list, or in that of one slice; `config` is the compiler's choice of algorithm.
    """

    kind: str
    mesh_axes: tuple[str, ...]
    op_name: str
    source: str
    bytes_sent: float
    full_bytes: float = 0.0
    groups: np.ndarray | None = None
    pairs: np.ndarray | None = None
    slices: int | None = None
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Its mesh axes in one word."""
        return ",".join(self.mesh_axes)

    def use(self, torus_axes: tuple[str, ...] = ()) -> CollectiveUse:
        """Return a use of it that has not run yet."""
        return CollectiveUse(self.kind, self.mesh_axes, torus_axes, self.op_name, self.source)


def payload(kind: str, full_bytes: float, members: int) -> float:
    """Return the bytes that each of `members` devices sends in a collective.

    `full_bytes`: the whole array, that is what an all-gather returns and what the others take. A ring's bytes: the
    least possible for each kind; TPU v4 paper (arXiv 2304.01433), scaling book.
    """
    share = (members - 1) / members
    return {"all-reduce": 2 * share, "collective-permute": 1.0, "collective-broadcast": 1.0}.get(
        kind, share
    ) * full_bytes


def own_slice(slices: Sequence[int], partitions: int) -> np.ndarray | None:
    """Return which devices the groups of a module count, of devices in these slices; None for all of them.

    For several slices libtpu compiles the program of one slice: `partitions` is then the size of that slice.
    """
    own = np.asarray(slices) == slices[0]
    if partitions not in (len(own), np.count_nonzero(own)):
        raise ValueError(
            f"A module compiled for {partitions} devices was to be read as one of {len(own)}: compile it for that mesh."
        )
    return own if partitions < len(own) else None


class Collectives:
    """Reads the collectives of a module; `slices` is the slice of each device, by default equal stretches of them.

    Groups count the devices of one slice; what goes between slices is handed to the host's runtime.
    """

    def __init__(self, module: Module, mesh_axes: dict[str, int], slices: Sequence[int] | None = None) -> None:
        shape = tuple(mesh_axes.values())
        devices = math.prod(shape)
        if slices is None:
            slices = [device // module.partitions for device in range(devices)]
        own = own_slice(slices, module.partitions)
        slice_of = np.asarray(slices).reshape(shape)
        places = np.stack(np.unravel_index(np.arange(devices), shape), axis=-1)
        self._module = module
        self._axes = mesh_axes
        self._slices = len(np.unique(slice_of))
        self._slice_axes = tuple(name for d, name in enumerate(mesh_axes) if np.diff(slice_of, axis=d).any())
        self._places = places if own is None else places[own]
        self._known: dict[str, Collective] = {}
        self._algorithms: dict[tuple[str, bytes], Mapping[str, Any]] | None = None

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
            sent = taken if len(pairs) else 0.0
            return Collective(kind, self._varying(pairs), op_name, source, sent, taken, pairs=pairs)
        arrays = [g for g in replica_groups(instruction, self._module.partitions) if g.shape[1] > 1]
        if not arrays:
            return Collective(kind, (), op_name, source, 0.0)
        groups = max(arrays, key=lambda g: g.shape[1])
        full = taken * groups.shape[1] if kind == "all-gather" else taken
        sent = payload(kind, full, groups.shape[1])
        axes = self._varying(groups)
        config = instruction.config
        if FUSED in config:
            config = self._stated().get((kind, groups.tobytes()), config)
        return Collective(kind, axes, op_name, source, sent, full, groups=groups, config=config)

    def _stated(self) -> dict[tuple[str, bytes], Mapping[str, Any]]:
        """The configurations that name an algorithm, by kind and groups.

        Collectives that products carry on name none; those are taken to be done as the ones alone over their groups.
        Of several algorithms the first by name counts: rings (`1DAllGather`) before routers (`AllGatherWithNetRouter`).
        """
        if self._algorithms is None:
            self._algorithms = {}
            instructions = (i for c in self._module.computations for i in c.instructions if kind_of(i.opcode))
            naming = [i for i in instructions if "collective_algorithm_config" in i.config]
            for i in sorted(naming, key=lambda i: i.config["collective_algorithm_config"].get("emitter", "")):
                for groups in replica_groups(i, self._module.partitions):
                    self._algorithms.setdefault((kind_of(i.opcode), groups.tobytes()), i.config)
        return self._algorithms

    def between_slices(self, instruction: Instruction) -> Collective:
        """Return what a `send` to the host's runtime does, which carries a collective between slices."""
        attributes = instruction.attributes
        kind = _RUNTIME_KINDS.get(attributes.get("_xla_megascale_transfer_type", ""), "collective-permute")
        taken = float(instruction.operands[0].shape.bytes)
        op_name, source = cause(instruction)
        full = taken * self._slices if kind == "all-gather" else taken
        sent = payload(kind, full, self._slices)
        return Collective(kind, self._slice_axes, op_name, source, sent, taken, slices=self._slices)

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
    if computation.collectives is None:
        own = [i for i in computation.instructions if kind_of(i.opcode)]
        callers = (i for i in computation.instructions if i.opcode in ("fusion", "call", "async-start"))
        computation.collectives = own + [i for caller in callers for c in caller.called for i in inner_collectives(c)]
    return computation.collectives


def wrapped_by(target: str, computation: Computation) -> list[Instruction]:
    """Return the collectives that custom calls of this target take in a fused computation, nested ones included."""
    wrapped = [
        operand
        for i in computation.instructions
        if i.opcode == "custom-call" and i.target == target
        for operand in i.operands
        if kind_of(operand.opcode)
    ]
    nested = (c for i in computation.instructions if i.opcode == "fusion" for c in i.called)
    return wrapped + [i for c in nested for i in wrapped_by(target, c)]


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
                    if FUSED in inner.config and inner not in started:
                        continue
                    kind = fused_kind(instruction, inner) if instruction.opcode == "fusion" else None
                    _add(reader.read(inner, kind, instruction), times, uses)


def _add(collective: Collective, times: float, uses: dict[tuple[object, ...], CollectiveUse]) -> None:
    use = collective.use()
    use = uses.setdefault(use.key, use)
    use.calls += times
    use.bytes_sent += times * collective.bytes_sent
