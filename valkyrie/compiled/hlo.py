"""Parses a compiled module: computations, instructions in execution order, shapes and sources.

Reads a serialised `HloModuleProto`. HLO text is first converted by XLA's own parser, which preserves the schedule.
"""

from __future__ import annotations

import importlib
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from valkyrie.compiled.schema import module_class

_DTYPES = {
    1: ("pred", 8),
    2: ("s8", 8),
    3: ("s16", 16),
    4: ("s32", 32),
    5: ("s64", 64),
    6: ("u8", 8),
    7: ("u16", 16),
    8: ("u32", 32),
    9: ("u64", 64),
    10: ("f16", 16),
    11: ("f32", 32),
    12: ("f64", 64),
    15: ("c64", 64),
    16: ("bf16", 16),
    18: ("c128", 128),
    19: ("f8e5m2", 8),
    20: ("f8e4m3fn", 8),
    21: ("s4", 4),
    22: ("u4", 4),
    23: ("f8e4m3b11fnuz", 8),
    24: ("f8e5m2fnuz", 8),
    25: ("f8e4m3fnuz", 8),
    26: ("s2", 2),
    27: ("u2", 2),
    28: ("f8e4m3", 8),
    29: ("f8e3m4", 8),
    30: ("s1", 1),
    31: ("u1", 1),
    32: ("f4e2m1fn", 4),
    33: ("f8e8m0fnu", 8),
}
"""Maps the numbers of XLA's `PrimitiveType` (xla_data.proto) to the name and the bits of an element.

Tuples, tokens and opaque values are omitted, because their elements have no bits.
"""

HBM, HOST = 0, 5
"""Memory space IDs in libtpu's HLO. The remaining IDs are on-chip memories: 1 is VMEM, 2 flags, 3 CMEM."""

SHARDING_ATTRIBUTE = "xla.sdy.sharding"
"""Frontend attribute with the sharding of a value, written by Shardy, JAX's partitioner."""

_CYCLES_PATTERN = re.compile(rb'"estimated_cycles":"(\d+)"')
_UNKNOWN_CYCLES = 2**53
"""Estimates of at least this many cycles mean unknown. Offloaded gathers have the largest 64-bit integer."""
_PARTITIONS_PATTERN = re.compile(r"num_partitions=(\d+)")
_LIBRARY_PATTERN = re.compile(
    r"(?:site|dist)-packages/(?:jax|jaxlib|flax|optax|orbax|chex|haiku|equinox|numpy|tokamax|qwix|aqt)\b|/lib/python[^/]*/"
    r"(?!site-packages|dist-packages)"
)
"""Matches paths of files in JAX, NumPy, libraries built on JAX, and the Python standard library."""
_MODELS_PATH = "valkyrie/models/"


@dataclass(frozen=True, slots=True)
class Shape:
    """Dtype, dimensions, layout and memory space of an array, or a tuple of shapes (`tuple_shapes`).

    Args:
        dtype: XLA's name of the dtype (`bf16`), `tuple`, or `other`.
        dims: Sizes of the dimensions.
        bits: Bits of an element; 0 for tuples and tokens.
        memory_space: ID of the memory space (`HBM`, `HOST`).
        tile: Tile of the layout; its last size applies to the most minor dimension.
        minor_to_major: Dimensions from the fastest to the slowest varying in memory.
        tuple_shapes: Shapes of the elements of a tuple; empty for arrays.
    """

    dtype: str
    dims: tuple[int, ...]
    bits: int
    memory_space: int = HBM
    tile: tuple[int, ...] = ()
    minor_to_major: tuple[int, ...] = ()
    tuple_shapes: tuple[Shape, ...] = ()

    @property
    def element_count(self) -> int:
        """Number of elements; 0 for a tuple or token."""
        return math.prod(self.dims) if self.bits else 0

    @property
    def bytes(self) -> int:
        """Bytes without padding, summed over the parts of a tuple."""
        return sum(p.bytes for p in self.tuple_shapes) + -(-self.element_count * self.bits // 8)

    @property
    def padded_bytes(self) -> int:
        """Bytes in memory, with minor dimensions rounded up to the layout's tile."""
        if self.tuple_shapes:
            return sum(p.padded_bytes for p in self.tuple_shapes)
        if not self.tile or len(self.tile) > len(self.minor_to_major):
            return self.bytes
        sizes = [self.dims[d] for d in self.minor_to_major]
        for i, t in enumerate(reversed(self.tile)):
            sizes[i] = -(-sizes[i] // t) * t
        return -(-math.prod(sizes) * self.bits // 8)

    @property
    def leaves(self) -> tuple[Shape, ...]:
        """The arrays of a tuple, flattened, or the array itself."""
        return tuple(leaf for part in self.tuple_shapes for leaf in part.leaves) if self.tuple_shapes else (self,)


class Frame(NamedTuple):
    """A stack frame: its source line (`file:line`) and the name of its function, or an empty string if unknown."""

    line: str
    function: str = ""


@lru_cache(maxsize=2**14)
def user_frames(stack: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """Return the frames of the user's code from the one that caused an operation outwards.

    This is the innermost frame in `valkyrie/models`. If there is none, it is the innermost frame outside of libraries
    or, failing that, the innermost frame.
    """
    outside_libraries = [frame for frame in stack if not _LIBRARY_PATTERN.search(frame.line)]
    in_models = (number for number, frame in enumerate(outside_libraries) if _MODELS_PATH in frame.line)
    return tuple(outside_libraries[next(in_models, 0) :] or stack[:1])


@dataclass(slots=True, eq=False)
class Instruction:
    """One operation.

    Args:
        op_name: Name of the JAX operation that caused it, with its scopes; empty if unknown.
        source: `file:line` of that operation, in the model if possible; empty if unknown.
        cycles: The compiler's estimate of its duration in cycles, or None if unknown.
        message: The protobuf message.
        computation: The computation that contains it.
        stack: All stack frames of that operation, from the innermost function to its callers; empty if unknown.
        operands: The instructions that compute its operands.
        called_computations: Computations that it calls, such as the body of a fusion.
    """

    name: str
    opcode: str
    shape: Shape
    op_name: str
    source: str
    cycles: int | None
    message: Any
    computation: Computation
    stack: tuple[Frame, ...] = ()
    operands: list[Instruction] = field(default_factory=list)
    called_computations: list[Computation] = field(default_factory=list)

    @property
    def backend_config(self) -> dict[str, Any]:
        """The backend's configuration; empty if it is missing or not JSON."""
        raw = self.message.backend_config
        return json.loads(raw) if raw.startswith(b"{") else {}

    @property
    def attributes(self) -> dict[str, str]:
        """Frontend attributes by name: text from JAX, such as `SHARDING_ATTRIBUTE`."""
        return {a.key: a.value for a in self.message.frontend_attributes.map}

    @property
    def custom_call_target(self) -> str:
        """Name of the function that a custom call runs; empty for other instructions."""
        return self.message.custom_call_target


@dataclass(slots=True, eq=False)
class Computation:
    """A computation of a module, such as the body of a loop or of a fusion.

    Args:
        instructions: All instructions, in execution order if the module is scheduled.
        parameters: The instructions that are parameters, by number.
        root: The instruction that computes the result.
        callers: Instructions that call this computation.
        collectives: Cache of `valkyrie.compiled.collectives.inner_collectives`.
    """

    name: str
    instructions: list[Instruction] = field(default_factory=list)
    parameters: dict[int, Instruction] = field(default_factory=dict)
    root: Instruction | None = None
    callers: list[Instruction] = field(default_factory=list)
    collectives: list[Instruction] | None = None


@dataclass(eq=False)
class Module:
    """The compiled program of one device.

    Args:
        num_partitions: Number of devices that it was compiled for, 1 if unknown.
        is_scheduled: Whether instructions are in execution order.
        assigned_device_count: Number of devices in its device assignment, or None if it has none.
        replica_count: Number of replicas (`jax.pmap`).
    """

    name: str
    entry: Computation
    computations: list[Computation]
    num_partitions: int
    is_scheduled: bool
    assigned_device_count: int | None = None
    replica_count: int = 1

    @cached_property
    def instructions(self) -> dict[str, Instruction]:
        """Every instruction by name."""
        return {i.name: i for c in self.computations for i in c.instructions}


def parse_module(source: bytes | str) -> Module:
    """Parse a serialised `HloModuleProto` or HLO text. Raises ValueError if it has no computations.

    Get the bytes from `compiled.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto()`.
    """
    match = None
    if isinstance(source, str):
        hlo_module_from_text = importlib.import_module("jaxlib._hlo").hlo_module_from_text  # XLA's own parser
        match = _PARTITIONS_PATTERN.search(source.partition("\n")[0])
        source = hlo_module_from_text(source).as_serialized_hlo_module_proto()
    message = module_class().FromString(source)
    if not message.computations:
        raise ValueError(f"Not a compiled module: no computation in {len(source)} bytes.")
    module = _Reader(message).read_module()
    if match:
        module.num_partitions = int(match[1])
    return module


class _Reader:
    """Converts protobuf messages to linked objects."""

    def __init__(self, message: Any) -> None:
        self._message = message
        self._frames = message.stack_frames
        self._stacks: dict[int, tuple[Frame, ...]] = {}
        self._shapes: dict[bytes, Shape] = {}

    def read_module(self) -> Module:
        message = self._message
        computations = {c.id: Computation(c.name) for c in message.computations}
        instruction_ids = {entry.key: entry.value.instruction_ids for entry in message.schedule.sequences}
        for c in message.computations:
            self._fill_computation(computations[c.id], c, instruction_ids.get(c.id))
        for computation in computations.values():
            for instruction in computation.instructions:
                for i in instruction.message.called_computation_ids:
                    instruction.called_computations.append(computations[i])
                    computations[i].callers.append(instruction)
        return Module(
            name=message.name,
            entry=computations[message.entry_computation_id],
            computations=list(computations.values()),
            num_partitions=max(message.device_assignment.partitions, 1),
            is_scheduled=bool(instruction_ids),
            assigned_device_count=message.device_assignment.partitions or None,
            replica_count=max(message.device_assignment.replicas, 1),
        )

    def _fill_computation(self, computation: Computation, message: Any, instruction_ids: Any) -> None:
        instruction_by_id: dict[int, Instruction] = {}
        for instruction_message in message.instructions:
            cycles_match = _CYCLES_PATTERN.search(instruction_message.backend_config)
            cycles = int(cycles_match[1]) if cycles_match else _UNKNOWN_CYCLES
            stack = self._read_stack(instruction_message.metadata.stack_frame_id)
            instruction_by_id[instruction_message.id] = Instruction(
                name=instruction_message.name,
                opcode=instruction_message.opcode,
                shape=self._shape(instruction_message.shape),
                op_name=instruction_message.metadata.op_name,
                source=_source_line(stack, instruction_message.metadata),
                cycles=cycles if cycles < _UNKNOWN_CYCLES else None,
                message=instruction_message,
                computation=computation,
                stack=stack,
            )
            if instruction_message.opcode == "parameter":
                computation.parameters[instruction_message.parameter_number] = instruction_by_id[instruction_message.id]
        for instruction_message in message.instructions:
            instruction_by_id[instruction_message.id].operands = [
                instruction_by_id[i] for i in instruction_message.operand_ids
            ]
        computation.instructions = (
            [instruction_by_id[i] for i in instruction_ids] if instruction_ids else list(instruction_by_id.values())
        )
        computation.root = instruction_by_id[message.root_id]

    def _shape(self, message: Any) -> Shape:
        key = message.SerializeToString()
        shape = self._shapes.get(key)
        if shape is None:
            dtype, bits = _DTYPES.get(message.element_type, ("other", 0))
            layout = message.layout
            shape = self._shapes[key] = Shape(
                dtype="tuple" if message.tuple_shapes else dtype,
                dims=tuple(message.dimensions),
                bits=bits,
                memory_space=layout.memory_space,
                tile=tuple(layout.tiles[0].dimensions) if layout.tiles else (),
                minor_to_major=tuple(layout.minor_to_major),
                tuple_shapes=tuple(self._shape(part) for part in message.tuple_shapes),
            )
        return shape

    def _read_stack(self, frame_id: int) -> tuple[Frame, ...]:
        if frame_id not in self._stacks:
            self._stacks[frame_id] = tuple(self._frames_from(frame_id))
        return self._stacks[frame_id]

    def _frames_from(self, frame_id: int) -> Iterator[Frame]:
        files, functions = self._frames.file_names, self._frames.function_names
        while frame_id:
            frame = self._frames.frames[frame_id - 1]
            location = self._frames.locations[frame.location - 1]
            function = functions[location.function - 1] if location.function else ""
            yield Frame(f"{files[location.file - 1]}:{location.line}", function)
            frame_id = frame.parent


def _source_line(stack: tuple[Frame, ...], metadata: Any) -> str:
    """Return the source line that caused an operation, as `file:line`. Empty if unknown.

    Without a stack, it is the line that the metadata names.
    """
    if stack:
        return user_frames(stack)[0].line
    return f"{metadata.source_file}:{metadata.source_line}" if metadata.source_file else ""
