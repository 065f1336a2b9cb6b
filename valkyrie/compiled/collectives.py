"""Parses the collectives of a compiled program: kind, groups, bytes, mesh axes, and the operation that caused each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from valkyrie.axes import ROUTED_SHARE
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

FUSED_CONFIG_KEY = "async_collective_fusion_config"
"""Key in `Instruction.backend_config` of the collectives that the compiler fuses into matrix products."""
ASYNC_START, ASYNC_DONE = "AsyncCollectiveStart", "AsyncCollectiveDone"
"""Custom calls that mark the fusions where a collective starts and ends. Fusions in between execute parts of it."""

_RUNTIME_KINDS = {
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}
"""Maps names of collectives in libtpu's runtime for several slices (`xla_megascale_runtime`) to their kinds."""


@dataclass
class CollectiveUse:
    """All calls of collectives with the same kind, axes and cause, in one step of one device.

    Args:
        kind: HLO opcode, such as `all-reduce`.
        mesh_axes: Mesh axes that it crosses.
        torus_axes: Torus axes that it uses; empty without a network model.
        op_name: Name of the JAX operation that caused it.
        source: File and line of that operation.
        calls: Calls per step.
        bytes_sent: Bytes that the device sends per step.
        bytes_by_torus_axis: `bytes_sent`, split by torus axis; empty before a replay.
        busy_s: Seconds per step during which it is in progress.
        exposed_s: Part of `busy_s` during which the device waits for it.
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
        """Fields that identify this use."""
        return (self.kind, self.mesh_axes, self.torus_axes, self.op_name, self.source)

    def copy_without_totals(self) -> CollectiveUse:
        """Return a copy with calls, bytes and seconds set to zero."""
        return replace(self, calls=0.0, bytes_sent=0.0, bytes_by_torus_axis={}, busy_s=0.0, exposed_s=0.0)

    def add(self, other: CollectiveUse, factor: float | int) -> None:
        """Add the calls, bytes and seconds of another use, multiplied by `factor`."""
        self.calls += factor * other.calls
        self.bytes_sent += factor * other.bytes_sent
        self.busy_s += factor * other.busy_s
        self.exposed_s += factor * other.exposed_s
        for axis, bytes_sent in other.bytes_by_torus_axis.items():
            self.bytes_by_torus_axis[axis] = self.bytes_by_torus_axis.get(axis, 0.0) + factor * bytes_sent


@dataclass(frozen=True, eq=False)
class Collective:
    """One collective instruction: the bytes that a device sends in one call, and the devices that take part.

    Args:
        kind: HLO opcode, such as `all-reduce`.
        mesh_axes: Mesh axes that it crosses.
        op_name: Name of the JAX operation that caused it.
        source: File and line of that operation.
        bytes_sent: Bytes that one device sends.
        full_bytes: Bytes of a group's whole array, as in `min_bytes_sent`. For a permute and for collectives between
            slices, the bytes of one device's operand. 0 if no group has several devices.
        groups: Indices [groups, members] into the flattened devices of the mesh or of one slice. If the sizes of groups
            differ, only the largest groups. None for a permute, for collectives between slices, and if no group has
            several devices.
        pairs: (source, target) indices [pairs, 2] of a permute, or None for other collectives.
        slices: Number of slices for a collective between slices, else None.
        config: Backend configuration, which may name the compiler's algorithm; empty if `groups` is None.
        dims: Dimensions of the largest array that one device sends or receives. () for collectives between slices.
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
    dims: tuple[int, ...] = ()

    @property
    def label(self) -> str:
        """The mesh axes as text, such as `x,y`."""
        return ",".join(self.mesh_axes)

    def empty_use(self, torus_axes: tuple[str, ...] = ()) -> CollectiveUse:
        """Return a `CollectiveUse` with the kind, mesh axes and cause of this collective, and zero calls."""
        return CollectiveUse(self.kind, self.mesh_axes, torus_axes, self.op_name, self.source)


def min_bytes_sent(kind: str, full_bytes: float, members: int) -> float:
    """Return the bytes that each of `members` devices sends in a collective.

    These are the bytes of a ring, the minimum for each kind (TPU v4 paper, arXiv 2304.01433; scaling book).
    `full_bytes` is the size of the whole array: the result of an all-gather, or the operand of any other kind.
    """
    share = (members - 1) / members
    return {"all-reduce": 2 * share, "collective-permute": 1.0, "collective-broadcast": 1.0}.get(
        kind, share
    ) * full_bytes


def slice_mask(slice_by_device: Sequence[int], num_partitions: int) -> np.ndarray | None:
    """Return a mask of the devices in the first slice if a module was compiled for one slice.

    Returns None if the module was compiled for all devices. For several slices, libtpu compiles one slice's program,
    and its replica groups number only that slice's devices.
    Raises ValueError if `num_partitions` is neither the number of devices in a slice nor in all slices.

    Args:
        slice_by_device: The slice of each device.
        num_partitions: Number of devices that the module was compiled for.
    """
    mask = np.asarray(slice_by_device) == slice_by_device[0]
    if num_partitions not in (len(mask), np.count_nonzero(mask)):
        sharding = "Shard its arguments over the mesh: NamedSharding(mesh, PartitionSpec(...))."
        raise ValueError(
            f"The module was compiled for {num_partitions} device{'s' * (num_partitions != 1)}, not for the "
            f"{len(mask)} of this mesh. {sharding if num_partitions == 1 else 'Compile it for this mesh.'}"
        )
    return mask if num_partitions < len(mask) else None


class CollectiveReader:
    """Parses the collectives of a module.

    If the module was compiled for one of several slices, its groups refer to that slice's devices. Collectives between
    slices go through the host's runtime.

    Args:
        module: The compiled program.
        mesh_axes: Names and sizes of the mesh axes, slowest varying first over the program's devices.
        slice_by_device: The slice of each device of the mesh, or None for contiguous blocks of equal size.
    """

    def __init__(self, module: Module, mesh_axes: dict[str, int], slice_by_device: Sequence[int] | None = None) -> None:
        mesh_shape = tuple(mesh_axes.values())
        device_count = math.prod(mesh_shape)
        if slice_by_device is None:
            slice_by_device = [device // module.num_partitions for device in range(device_count)]
        in_first_slice = slice_mask(slice_by_device, module.num_partitions)
        slice_by_position = np.asarray(slice_by_device).reshape(mesh_shape)
        mesh_coords = np.stack(np.unravel_index(np.arange(device_count), mesh_shape), axis=-1)
        self._module = module
        self._mesh_axes = mesh_axes
        self._slices = len(np.unique(slice_by_position))
        self._slice_axes = tuple(name for d, name in enumerate(mesh_axes) if np.diff(slice_by_position, axis=d).any())
        self._mesh_coords = mesh_coords if in_first_slice is None else mesh_coords[in_first_slice]
        self._cache: dict[str, Collective] = {}
        self._configs_by_groups: dict[tuple[str, bytes], Mapping[str, Any]] | None = None

    def read(self, instruction: Instruction, kind: str | None = None, caller: Instruction | None = None) -> Collective:
        """Parse a collective instruction. The result is cached by instruction and `kind`.

        Args:
            instruction: The collective.
            kind: Kind to use instead of the opcode's, for a fusion that changes it (`fused_kind`).
            caller: Operation whose computation contains the instruction. Provides `op_name` and `source` if the
                instruction has no `op_name`.
        """
        key = f"{instruction.name}/{kind}"
        if key not in self._cache:
            self._cache[key] = self._read(instruction, kind or collective_kind(instruction.opcode), caller)
        return self._cache[key]

    def _read(self, instruction: Instruction, kind: str, caller: Instruction | None) -> Collective:
        # A ragged-all-to-all sends only its first operand. The second is the buffer that it writes to.
        operands = instruction.operands[:1] if kind == "ragged-all-to-all" else instruction.operands
        operand_bytes = float(sum(o.shape.bytes for o in operands if o.shape.element_count != 1 or len(o.shape.dims)))
        operand_bytes = operand_bytes or float(sum(o.shape.bytes for o in operands))
        operand_bytes *= float(instruction.attributes.get(ROUTED_SHARE, 1))
        shapes = [leaf for array in (*operands, instruction) for leaf in array.shape.leaves]
        dims = max(shapes, key=lambda shape: shape.element_count).dims
        op_name, source = find_cause(instruction)
        if caller is not None and not op_name:
            op_name, source = find_cause(caller)
        if kind == "collective-permute":
            pairs = permute_pairs(instruction)
            axes, bytes_sent = self._varying_axes(pairs), operand_bytes if len(pairs) else 0.0
            return Collective(kind, axes, op_name, source, bytes_sent, operand_bytes, pairs=pairs, dims=dims)
        group_arrays = [g for g in replica_groups(instruction, self._module.num_partitions) if g.shape[1] > 1]
        if not group_arrays:
            return Collective(kind, (), op_name, source, 0.0, dims=dims)
        groups = max(group_arrays, key=lambda g: g.shape[1])
        full_bytes = operand_bytes * groups.shape[1] if kind == "all-gather" else operand_bytes
        bytes_sent = min_bytes_sent(kind, full_bytes, groups.shape[1])
        axes = self._varying_axes(groups)
        config = instruction.backend_config
        if FUSED_CONFIG_KEY in config:
            config = self._algorithm_configs().get((kind, groups.tobytes()), config)
        return Collective(kind, axes, op_name, source, bytes_sent, full_bytes, groups, config=config, dims=dims)

    def _algorithm_configs(self) -> dict[tuple[str, bytes], Mapping[str, Any]]:
        """Return the backend configurations that name an algorithm, by kind of collective and replica groups.

        Collectives fused into matrix products do not name their algorithm. They are assumed to use the algorithm of a
        standalone collective of the same kind over the same groups. If standalone collectives use several algorithms,
        the first in alphabetical order is chosen, so rings (`1DAllGather`) precede routers (`AllGatherWithNetRouter`).
        """
        if self._configs_by_groups is None:
            self._configs_by_groups = {}
            instructions = (i for c in self._module.computations for i in c.instructions if collective_kind(i.opcode))
            instructions_with_algorithm = [i for i in instructions if "collective_algorithm_config" in i.backend_config]
            for i in sorted(
                instructions_with_algorithm,
                key=lambda i: i.backend_config["collective_algorithm_config"].get("emitter", ""),
            ):
                for groups in replica_groups(i, self._module.num_partitions):
                    self._configs_by_groups.setdefault((collective_kind(i.opcode), groups.tobytes()), i.backend_config)
        return self._configs_by_groups

    def read_between_slices(self, instruction: Instruction) -> Collective:
        """Parse a `send` to the host's runtime, which executes a collective between slices."""
        attributes = instruction.attributes
        kind = _RUNTIME_KINDS.get(attributes.get("_xla_megascale_transfer_type", ""), "collective-permute")
        operand_bytes = float(instruction.operands[0].shape.bytes)
        op_name, source = find_cause(instruction)
        full_bytes = operand_bytes * self._slices if kind == "all-gather" else operand_bytes
        bytes_sent = min_bytes_sent(kind, full_bytes, self._slices)
        return Collective(kind, self._slice_axes, op_name, source, bytes_sent, operand_bytes, slices=self._slices)

    def _varying_axes(self, groups: np.ndarray) -> tuple[str, ...]:
        """Return the mesh axes along which the members of any group, or the two devices of any pair, differ."""
        if not len(groups):
            return ()
        mesh_coords = self._mesh_coords[groups]
        is_varying = (mesh_coords != mesh_coords[:, :1]).any(axis=(0, 1))
        return tuple(name for name, d in zip(self._mesh_axes, is_varying, strict=True) if d)


def collective_kind(opcode: str) -> str:
    """Return the kind of collective of an opcode with or without `-start`, or an empty string for other opcodes."""
    base = opcode.removesuffix("-start")
    return base if base in KINDS else ""


def is_synchronous(instruction: Instruction) -> bool:
    """Return whether the device waits for a collective where it starts. XLA:GPU writes such pairs, too."""
    inner = [i for c in instruction.called_computations for i in inner_collectives(c)]
    configs = (i.backend_config.get("collective_backend_config", {}) for i in (instruction, *inner))
    return any(config.get("is_sync", False) for config in configs)


def is_between_slices(instruction: Instruction) -> bool:
    """Return whether an instruction is a `send` that starts a collective between slices, which the hosts execute."""
    return instruction.opcode == "send" and "_xla_megascale_transfer_type" in instruction.attributes


def find_cause(instruction: Instruction) -> tuple[str, str]:
    """Return (op_name, source) of an instruction or, if it has no op_name, of the nearest producer with one.

    Searches at most 16 producers, breadth first. If none of them has an op_name, the returned op_name is empty.
    """
    if instruction.op_name:
        return instruction.op_name, instruction.source
    queue, producer_count = list(instruction.operands), 0
    while queue and producer_count < 16:
        producer = queue.pop(0)
        producer_count += 1
        if producer.op_name:
            return producer.op_name, producer.source
        queue += producer.operands
    return "", instruction.source


def inner_collectives(computation: Computation) -> list[Instruction]:
    """Return the collectives in a computation and in the fusions, calls and asynchronous operations that it starts."""
    if computation.collectives is None:
        direct_collectives = [i for i in computation.instructions if collective_kind(i.opcode)]
        calling_instructions = (i for i in computation.instructions if i.opcode in ("fusion", "call", "async-start"))
        computation.collectives = direct_collectives + [
            i for caller in calling_instructions for c in caller.called_computations for i in inner_collectives(c)
        ]
    return computation.collectives


def wrapped_collectives(target: str, computation: Computation) -> list[Instruction]:
    """Return the collectives that are operands of custom calls with this target, including those in nested fusions."""
    direct_collectives = [
        operand
        for i in computation.instructions
        if i.opcode == "custom-call" and i.custom_call_target == target
        for operand in i.operands
        if collective_kind(operand.opcode)
    ]
    nested_computations = (c for i in computation.instructions if i.opcode == "fusion" for c in i.called_computations)
    return direct_collectives + [i for c in nested_computations for i in wrapped_collectives(target, c)]


def fused_kind(fusion: Instruction, inner: Instruction) -> str:
    """Return the kind of a collective `inner` in a fusion.

    An all-reduce counts as a reduce-scatter if the fusion returns only a part of the reduced array.
    """
    kind = collective_kind(inner.opcode)
    returned_elements = max((leaf.element_count for leaf in fusion.shape.leaves), default=0)
    operand_elements = max((o.shape.element_count for o in inner.operands), default=0)
    return "reduce-scatter" if kind == "all-reduce" and returned_elements < operand_elements else kind


def has_partial_groups(module: Module, mesh_axes: dict[str, int]) -> bool:
    """Return whether any collective has groups of only some of the devices along its mesh axes.

    If so, the axes may be in the wrong order. Returns False for a module that was compiled for one of several slices.
    """
    if module.num_partitions != math.prod(mesh_axes.values()):
        return False
    reader = CollectiveReader(module, mesh_axes)
    collectives = [reader.read(i) for i in module.instructions.values() if collective_kind(i.opcode)]
    return any(
        collective.groups is not None
        and collective.groups.shape[1] != math.prod(mesh_axes[axis] for axis in collective.mesh_axes)
        for collective in collectives
    )


def collective_uses(module: Module, mesh_axes: dict[str, int]) -> list[CollectiveUse]:
    """Return the collectives that one device runs per step, grouped by kind, mesh axes and cause, most bytes first.

    Works for any backend. Loops with an unknown trip count are counted once, and the branches of a conditional are
    weighted equally. Does not set seconds or torus axes.

    Args:
        module: The compiled program.
        mesh_axes: Names and sizes of the mesh axes, slowest varying first over the program's devices.
    """
    reader = CollectiveReader(module, mesh_axes)
    uses: dict[tuple[object, ...], CollectiveUse] = {}
    _add_computation_uses(module.entry, 1.0, reader, uses)
    return sorted(uses.values(), key=lambda use: -use.bytes_sent)


def _add_computation_uses(
    computation: Computation, calls: float, reader: CollectiveReader, uses: dict[tuple[object, ...], CollectiveUse]
) -> None:
    for instruction in computation.instructions:
        if instruction.opcode == "while":
            count = trip_count(instruction)
            _add_computation_uses(
                condition_and_body(instruction)[1], calls * (1 if count is None else count), reader, uses
            )
        elif instruction.opcode == "conditional":
            for branch in instruction.called_computations:
                _add_computation_uses(branch, calls / len(instruction.called_computations), reader, uses)
        elif is_between_slices(instruction):
            _add_use(reader.read_between_slices(instruction), calls, uses)
        elif collective_kind(instruction.opcode):
            _add_use(reader.read(instruction), calls, uses)
        elif instruction.opcode in ("fusion", "call", "async-start"):
            for called in instruction.called_computations:
                started = wrapped_collectives(ASYNC_START, called)
                for inner in inner_collectives(called):
                    if FUSED_CONFIG_KEY in inner.backend_config and inner not in started:
                        continue
                    kind = fused_kind(instruction, inner) if instruction.opcode == "fusion" else None
                    _add_use(reader.read(inner, kind, instruction), calls, uses)


def _add_use(collective: Collective, calls: float, uses: dict[tuple[object, ...], CollectiveUse]) -> None:
    use = collective.empty_use()
    use = uses.setdefault(use.key, use)
    use.calls += calls
    use.bytes_sent += calls * collective.bytes_sent
