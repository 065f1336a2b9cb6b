"""Reads a lowered program, before XLA partitions it: shardings of its arguments, and where its batch dimensions go.

A batch dimension is a dimension of a batch argument (one that the program does not return) that a mesh axis splits.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from valkyrie.compiled.hlo import Computation, Instruction, Module, Shape, parse
from valkyrie.compiled.loops import condition_and_body

if TYPE_CHECKING:
    import jax

_SHARDING = "xla.sdy.sharding"
"""Frontend attribute with the sharding of a value, written by Shardy, JAX's partitioner."""
_DIMENSION = re.compile(r"\{([^}]*)\}")
_AXIS = re.compile(r'"([^"]+)"')
_NONE: frozenset[int] = frozenset()
_MAX_PASSES = 4
"""Maximum number of passes over the body of a loop. Passes end earlier if the marks of its carry no longer change."""

Marks = tuple[frozenset[int], ...]
"""For each dimension of an array, the batch dimensions that it comes from, by number."""


@dataclass(frozen=True)
class Argument:
    """An argument of a lowered program.

    Args:
        name: Path in the arguments: `state.params['embed']['kernel']`.
        shape: Shape of the whole array.
        mesh_axes: Mesh axes that split each dimension.
        is_state: Whether the program returns an array of this shape and dtype, as a training step returns its state.
    """

    name: str
    shape: Shape
    mesh_axes: tuple[tuple[str, ...], ...]
    is_state: bool


@dataclass(frozen=True)
class BatchDimension:
    """A dimension of a batch argument, its size, and the mesh axes that split it."""

    argument: str
    size: int
    mesh_axes: tuple[str, ...]


class WholeProgram:
    """A lowered program with its arguments and the batch dimensions of each of its arrays."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.arguments = read_arguments(module)
        tracer = _Tracer(module, self.arguments)
        self._dimensions, self._marks = tracer.batch_dimensions(), tracer.marks

    @classmethod
    def from_lowered(cls, lowered: jax.stages.Lowered) -> WholeProgram:
        """Read the result of `jax.jit(...).lower(...)`."""
        module: Any = lowered.compiler_ir("hlo")
        return cls(parse(module.as_serialized_hlo_module_proto()))

    def batch_dimensions(self, instruction: Instruction) -> dict[int, BatchDimension]:
        """Return the batch dimensions in an instruction's result, by the index of the result's dimension."""
        marks = self._marks.get(instruction)
        if not isinstance(marks, tuple):
            return {}
        return {
            dimension: self._dimensions[numbers[0]]
            for dimension, mark in enumerate(marks)
            if (numbers := sorted(mark & self._dimensions.keys()))
        }


def read_arguments(module: Module) -> tuple[Argument, ...]:
    """Return the arguments of a lowered program, in order."""
    root = module.entry.root
    returned = Counter((leaf.dtype, leaf.dims) for leaf in (root.shape.leaves if root else ()) if leaf.dims)
    arguments = []
    for _, parameter in sorted(module.entry.parameters.items()):
        shape = parameter.shape
        key = (shape.dtype, shape.dims)
        is_state = returned[key] > 0
        returned[key] -= is_state
        name = parameter.op_name or parameter.name
        arguments.append(Argument(name, shape, parse_sharding(parameter.attributes.get(_SHARDING, "")), is_state))
    return tuple(arguments)


def parse_sharding(text: str) -> tuple[tuple[str, ...], ...]:
    """Parse a sharding of Shardy, such as `#sdy.sharding<@mesh, [{}, {"data"}]>`, to the mesh axes of each dimension.

    Parts of an axis, written as `"data":(1)2`, count as the axis. Returns () if there is no sharding.
    """
    inner = text[text.find("[{") + 1 : text.find("}]") + 1] if "[{" in text else ""
    return tuple(tuple(_AXIS.findall(dimension)) for dimension in _DIMENSION.findall(inner))


class _Tracer:
    """Follows sharded dimensions of batch arguments through a program.

    Dimensions of weights are excluded in two ways: arguments of the state are not followed, and a dimension that a
    product contracts with a dimension from another argument is not a batch dimension.
    """

    def __init__(self, module: Module, arguments: Sequence[Argument]) -> None:
        self.marks: dict[Instruction, Any] = {}
        self._candidates: list[BatchDimension] = []
        self._contracted: set[int] = set()
        self._from_batch: set[Instruction] = set()
        parameters = [parameter for _, parameter in sorted(module.entry.parameters.items())]
        for parameter, argument in zip(parameters, arguments, strict=True):
            if argument.is_state:
                continue
            self._from_batch.add(parameter)
            self.marks[parameter] = self._mark(argument.name, argument.shape.dims, argument.mesh_axes)
        self._follow(module.entry)

    def batch_dimensions(self) -> dict[int, BatchDimension]:
        return {number: batch for number, batch in enumerate(self._candidates) if number not in self._contracted}

    def _mark(self, name: str, dims: Sequence[int], mesh_axes: Sequence[tuple[str, ...]]) -> Marks:
        marks = [_NONE] * len(dims)
        for dimension, axes in enumerate(mesh_axes):
            if axes:
                marks[dimension] = frozenset({len(self._candidates)})
                self._candidates.append(BatchDimension(name, dims[dimension], axes))
        return tuple(marks)

    def _follow(self, computation: Computation) -> Any:
        """Add the marks of all instructions of a computation. Returns the marks of the computation's result."""
        for instruction in computation.instructions:
            if instruction.opcode != "parameter":
                self._add(instruction, self._result(instruction))
        return self.marks.get(computation.root) if computation.root else None

    def _add(self, instruction: Instruction, marks: Any) -> None:
        self.marks[instruction] = _union(self.marks.get(instruction), marks)

    def _call(self, computation: Computation, operands: Iterable[Any]) -> Any:
        for (_, parameter), marks in zip(sorted(computation.parameters.items()), operands, strict=False):
            self._add(parameter, marks)
        return self._follow(computation)

    def _result(self, instruction: Instruction) -> Any:
        opcode, message, sources = instruction.opcode, instruction.message, instruction.operands
        operands = [self.marks.get(operand) for operand in sources]
        if sources and all(operand in self._from_batch or not operand.shape.dims for operand in sources):
            self._from_batch.add(instruction)
        if opcode == "tuple":
            return operands
        if opcode == "get-tuple-element":
            return operands[0][message.tuple_index] if isinstance(operands[0], list) else None
        if opcode == "while":
            return self._loop(instruction, operands[0])
        if opcode in ("call", "conditional", "async-start"):
            inputs = [operands] if opcode != "conditional" else [[marks] for marks in operands[1:]]
            results = [self._call(c, inputs[min(n, len(inputs) - 1)]) for n, c in enumerate(instruction.called)]
            result = None
            for marks in results:
                result = _union(result, marks)
            return result
        if opcode in ("optimization-barrier", "custom-call") and instruction.shape.parts:
            return operands[0] if opcode == "optimization-barrier" else None
        if instruction.shape.parts:
            marks = self._array_marks(instruction, operands)
            return [marks for _ in instruction.shape.parts]
        if opcode == "custom-call" and instruction in self._from_batch and instruction.target == "Sharding":
            return self._constrain(instruction, operands[0])
        return self._array_marks(instruction, operands)

    def _constrain(self, instruction: Instruction, marks: Any) -> Any:
        """Return the marks of a batch argument after a sharding constraint, which may split further dimensions."""
        dims = instruction.shape.dims
        old = marks if isinstance(marks, tuple) else (_NONE,) * len(dims)
        axes = parse_sharding(instruction.attributes.get(_SHARDING, ""))
        unmarked = [() if mark else names for mark, names in zip(old, axes, strict=False)]
        if instruction in self.marks or not any(unmarked):
            return marks
        return _union(marks, self._mark(_argument_name(instruction), dims, unmarked))

    def _loop(self, loop: Instruction, carry: Any) -> Any:
        condition, body = condition_and_body(loop)
        for _ in range(_MAX_PASSES):
            result = _union(carry, self._call(body, [carry]))
            if result == carry:
                break
            carry = result
        return carry

    def _array_marks(self, instruction: Instruction, operands: Sequence[Any]) -> Marks | None:
        opcode, message, rank = instruction.opcode, instruction.message, len(instruction.shape.leaves[0].dims)
        arrays = [marks if isinstance(marks, tuple) else None for marks in operands]
        if not any(any(marks) for marks in arrays if marks):
            return None
        first, result = arrays[0], [_NONE] * rank
        if opcode == "broadcast":
            for mark, dimension in zip(first or (), message.dimensions, strict=True):
                result[dimension] = mark
        elif opcode == "transpose":
            result = [first[dimension] for dimension in message.dimensions] if first else result
        elif opcode in ("reshape", "bitcast"):
            result = _reshape(first, instruction.operands[0].shape.dims, instruction.shape.dims) if first else result
        elif opcode == "reduce":
            result = [
                mark for dimension, mark in enumerate(first or ()) if dimension not in message.dimensions
            ] or result
        elif opcode == "dot":
            result = self._dot(instruction, arrays)
        elif opcode == "convolution":
            numbers = message.convolution
            self._contract(arrays, [numbers.input_feature], [numbers.kernel_input_feature])
            if first:
                result[numbers.output_batch] |= first[numbers.input_batch]
            if (kernel := arrays[1]) is not None:
                result[numbers.output_feature] |= kernel[numbers.kernel_output_feature]
        elif opcode == "gather":
            offsets, vector = set(message.gather.offset_dims), message.gather.index_vector_dim
            outer = [dimension for dimension in range(rank) if dimension not in offsets]
            indices = [mark for dimension, mark in enumerate(arrays[1] or ()) if dimension != vector]
            for dimension, mark in zip(outer, indices, strict=False):
                result[dimension] = mark
        else:
            dims = instruction.shape.leaves[0].dims
            for operand, marks in zip(instruction.operands, arrays, strict=True):
                if marks is not None and len(marks) == rank:
                    same = (size == other for size, other in zip(operand.shape.dims, dims, strict=True))
                    result = [a | (b if equal else _NONE) for a, b, equal in zip(result, marks, same, strict=True)]
        return tuple(result)

    def _dot(self, instruction: Instruction, arrays: Sequence[Marks | None]) -> list[frozenset[int]]:
        numbers = instruction.message.dot
        (left, left_dims), (right, right_dims) = (
            (marks or (_NONE,) * len(operand.shape.dims), range(len(operand.shape.dims)))
            for marks, operand in zip(arrays, instruction.operands, strict=False)
        )
        self._contract((left, right), numbers.lhs_contracting, numbers.rhs_contracting)
        left_used = {*numbers.lhs_batch, *numbers.lhs_contracting}
        right_used = {*numbers.rhs_batch, *numbers.rhs_contracting}
        return [
            *(left[a] | right[b] for a, b in zip(numbers.lhs_batch, numbers.rhs_batch, strict=True)),
            *(left[dimension] for dimension in left_dims if dimension not in left_used),
            *(right[dimension] for dimension in right_dims if dimension not in right_used),
        ]

    def _contract(self, arrays: Sequence[Marks | None], left: Sequence[int], right: Sequence[int]) -> None:
        for a, b in zip(left, right, strict=True):
            first, second = (marks[d] if marks else _NONE for marks, d in zip(arrays, (a, b), strict=False))
            if not first & second:
                self._contracted |= first | second


def _argument_name(instruction: Instruction) -> str:
    """Return the name of the argument that a value is computed from, following first operands."""
    while instruction.operands and instruction.opcode != "parameter":
        instruction = instruction.operands[0]
    return instruction.op_name or instruction.name


def _union(first: Any, second: Any) -> Any:
    """Return the union of the marks of two values of the same shape.

    The marks of an array are a `Marks`, those of an HLO tuple a list with one entry per element, and None means no
    marks.
    """
    if first is None or second is None:
        return second if first is None else first
    if isinstance(first, list):
        return [_union(a, b) for a, b in zip(first, second, strict=True)]
    return tuple(a | b for a, b in zip(first, second, strict=True))


def _reshape(marks: Marks, old: Sequence[int], new: Sequence[int]) -> list[frozenset[int]]:
    """Return the marks after a reshape. If dimensions are merged or split, the major one keeps its marks."""
    result = [_NONE] * len(new)
    for before, after in _groups(old, new):
        first = next((d for d in before if old[d] > 1), None)
        target = next((d for d in after if new[d] > 1), None)
        if first is not None and target is not None:
            result[target] = marks[first]
    return result


def _groups(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[range, range]]:
    """Yield the smallest groups of adjacent dimensions with the same number of elements before and after a reshape."""
    i = j = 0
    while i < len(old) and j < len(new):
        start_i, start_j = i, j
        size_i, size_j, i, j = old[i], new[j], i + 1, j + 1
        while size_i != size_j:
            if size_i < size_j:
                if i == len(old):
                    return
                size_i, i = size_i * old[i], i + 1
            else:
                if j == len(new):
                    return
                size_j, j = size_j * new[j], j + 1
        yield range(start_i, i), range(start_j, j)
