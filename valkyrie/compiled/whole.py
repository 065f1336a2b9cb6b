"""Reads a lowered program before XLA partitions it: the shardings of its arguments, and the batch dimensions of arrays.

A batch argument is one for which no result has the same shape and dtype (see `Argument.is_state`). Its batch dimensions
are those that mesh axes split. Those of weights are dropped (see `_Tracer`).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from valkyrie.compiled.helpers import find_helper_lines, skip_helper_lines
from valkyrie.compiled.hlo import SHARDING_ATTRIBUTE, Computation, Instruction, Module, Shape, parse_module
from valkyrie.compiled.loops import condition_and_body

if TYPE_CHECKING:
    import jax

_DIMENSION_PATTERN = re.compile(r"\{([^}]*)\}")
_AXIS_PATTERN = re.compile(r'"([^"]+)"(?::\(\d+\)(\d+))?')
"""Regex for a mesh axis, `"data"`, or a part of one, `"data":(1)2`. Its groups are the name and the part's size."""
_NO_MARKS: frozenset[int] = frozenset()
_MAX_PASSES = 4
"""Maximum number of passes over the body of a loop. Passes end earlier if the marks of its carry no longer change."""

_MIXING = ("dot", "convolution", "gather", "reduce", "custom-call")
"""Operations that do more than combine or rearrange elements."""

AxisPart = tuple[str, int | None]
"""A mesh axis and the size of a part of it, or None for the whole axis."""

Marks = tuple[frozenset[int], ...]
"""Batch dimensions from which each dimension of an array comes, as indices into `_Tracer._candidates`.

Negative numbers are `_Tracer.replications`: sharding constraints on the way that do not split the dimension.
"""


@dataclass(frozen=True)
class Argument:
    """An argument of a lowered program.

    Args:
        name: Path in the arguments: `state.params['embed']['kernel']`.
        shape: Shape of the whole array.
        axis_parts: For each dimension, the mesh axes, or parts of axes, that split it. () if the argument has no
            sharding.
        is_state: Whether the program returns an array of this shape and dtype, as a training step returns its state.
            Each returned array counts for one argument. Scalars are never state.
    """

    name: str
    shape: Shape
    axis_parts: tuple[tuple[AxisPart, ...], ...]
    is_state: bool

    @property
    def mesh_axes(self) -> tuple[tuple[str, ...], ...]:
        """Mesh axes that split each dimension, also if only a factor of a mesh axis does."""
        return tuple(tuple(axis for axis, _ in parts) for parts in self.axis_parts)


@dataclass(frozen=True)
class BatchDimension:
    """A dimension of a batch argument: the argument's name, the dimension's size, and the mesh axes that split it."""

    argument: str
    size: int
    mesh_axes: tuple[str, ...]


class UnpartitionedProgram:
    """A lowered program with its arguments and the batch dimensions of each of its arrays.

    The source of an operation in a helper function is the line that calls the helper: see `helper_lines`.
    """

    def __init__(self, module: Module) -> None:
        self.module = module
        self.helper_lines = find_helper_lines(module)
        skip_helper_lines(module, self.helper_lines)
        self.arguments = read_arguments(module)
        tracer = _Tracer(module, self.arguments)
        self._dimensions, self._marks = tracer.batch_dimensions(), tracer.marks
        self._replications = {
            number: (constraint, {self._dimensions.get(candidate) for candidate in tracer.replicated[number]})
            for (constraint, _), number in tracer.replications.items()
        }

    @classmethod
    def from_lowered(cls, lowered: jax.stages.Lowered) -> UnpartitionedProgram:
        """Read the result of `jax.jit(...).lower(...)`."""
        module: Any = lowered.compiler_ir("hlo")
        return cls(parse_module(module.as_serialized_hlo_module_proto()))

    def batch_dimensions(self, instruction: Instruction) -> dict[int, BatchDimension]:
        """Map dimensions of an instruction's result to the batch dimensions that they come from.

        Omits dimensions that come from none. If one comes from several, returns the first. Returns {} for a tuple.
        """
        return {
            dimension: self._dimensions[numbers[0]]
            for dimension, mark in enumerate(self._array_marks(instruction))
            if (numbers := sorted(mark & self._dimensions.keys()))
        }

    def find_positions(self, array: Instruction, dimension: BatchDimension) -> list[int]:
        """Return the dimensions of an array that come from a batch dimension, and possibly from others as well."""
        return [
            position
            for position, mark in enumerate(self._array_marks(array))
            if any(self._dimensions.get(number) == dimension for number in mark)
        ]

    def find_replications(self, dimension: BatchDimension, lines: Collection[str]) -> list[Instruction]:
        """Return the sharding constraints that replicate a batch dimension of arrays in these source lines.

        These are the constraints through which operands of the lines come, and constraints on results of the lines. A
        constraint replicates the dimension if it splits no dimension over its mesh axes.
        """
        replications = {n: i for n, (i, replicated) in self._replications.items() if dimension in replicated}
        constraints = set(replications.values())
        numbers = set[int]()
        for instruction in (i for c in self.module.computations for i in c.instructions if constraints):
            arrays = list(instruction.operands) if instruction.source in lines else []
            if instruction in constraints and instruction.operands[0].source in lines:
                arrays.append(instruction)
            numbers |= replications.keys() & frozenset().union(
                *(m for array in arrays for m in self._array_marks(array))
            )
        return [replications[number] for number in sorted(numbers, reverse=True)]

    @cached_property
    def weights(self) -> list[Argument]:
        """State that enters products, reductions or kernels, such as weights, but not moments of gradients.

        State that is only combined with other arrays element by element, or reduced to scalars such as its norm, does
        not count.
        """
        names = _WeightTracer(self.module, self.arguments).names
        return [argument for argument in self.arguments if argument.name in names]

    def skip_helpers(self, module: Module) -> None:
        """Change the sources of the compiled module in the same way as those of this program."""
        skip_helper_lines(module, self.helper_lines)

    def _array_marks(self, array: Instruction) -> Marks:
        """Return the marks of an array; () for a tuple and for an array without any."""
        marks = self._marks.get(array)
        return marks if isinstance(marks, tuple) else ()


def read_arguments(module: Module) -> tuple[Argument, ...]:
    """Return the arguments of a lowered program, in order."""
    result = module.entry.root
    unmatched_results = Counter(
        (leaf.dtype, leaf.dims) for leaf in (result.shape.leaves if result else ()) if leaf.dims
    )
    arguments = []
    for _, parameter in sorted(module.entry.parameters.items()):
        shape = parameter.shape
        key = (shape.dtype, shape.dims)
        is_state = unmatched_results[key] > 0
        unmatched_results[key] -= is_state
        name = parameter.op_name or parameter.name
        axis_parts = parse_sharding(parameter.attributes.get(SHARDING_ATTRIBUTE, ""))
        arguments.append(Argument(name, shape, axis_parts, is_state))
    return tuple(arguments)


def parse_sharding(text: str) -> tuple[tuple[AxisPart, ...], ...]:
    """Return the mesh axes of each dimension in a Shardy sharding, such as `#sdy.sharding<@mesh, [{}, {"data"}]>`.

    An axis is `("data", None)`, or `("data", 2)` for a part of size 2, which Shardy writes as `"data":(1)2`. Returns ()
    if `text` has no sharding.
    """
    inner = text[text.find("[{") + 1 : text.find("}]") + 1] if "[{" in text else ""
    return tuple(
        tuple((axis, int(size) if size else None) for axis, size in _AXIS_PATTERN.findall(dimension))
        for dimension in _DIMENSION_PATTERN.findall(inner)
    )


def open_dimensions(text: str) -> list[bool]:
    """Return whether XLA may shard each dimension further, as Shardy writes with a question mark: `{?}`."""
    return ["?" in dimension for dimension in _DIMENSION_PATTERN.findall(text)]


class _Tracer:
    """Follows the batch dimensions of arguments through a program.

    Weights are excluded in two ways. Arguments with `is_state` are not followed. Weights that the program does not
    return are recognised by their use: a batch dimension is dropped if a matrix product or convolution contracts it
    with a dimension that does not come from the same batch dimension.
    """

    def __init__(self, module: Module, arguments: Sequence[Argument]) -> None:
        self.marks: dict[Instruction, Any] = {}
        self.replications: dict[tuple[Instruction, int], int] = {}  # numbers of constraints and their dimensions
        self.replicated: dict[int, set[int]] = defaultdict(set)  # candidates that each replication replicates
        self._candidates: list[BatchDimension] = []
        self._contracted_candidates: set[int] = set()
        self._batch_instructions: set[Instruction] = set()
        parameters = [parameter for _, parameter in sorted(module.entry.parameters.items())]
        for parameter, argument in zip(parameters, arguments, strict=True):
            if argument.is_state:
                continue
            self._batch_instructions.add(parameter)
            self.marks[parameter] = self._create_marks(argument.name, argument.shape.dims, argument.mesh_axes)
        self._follow(module.entry)

    def batch_dimensions(self) -> dict[int, BatchDimension]:
        return {
            number: batch for number, batch in enumerate(self._candidates) if number not in self._contracted_candidates
        }

    def _create_marks(self, name: str, dims: Sequence[int], mesh_axes: Sequence[tuple[str, ...]]) -> Marks:
        marks = [_NO_MARKS] * len(dims)
        for dimension, axes in enumerate(mesh_axes):
            if axes:
                marks[dimension] = frozenset({len(self._candidates)})
                self._candidates.append(BatchDimension(name, dims[dimension], axes))
        return tuple(marks)

    def _follow(self, computation: Computation) -> Any:
        """Add the marks of all instructions of a computation. Returns the marks of the computation's result."""
        for instruction in computation.instructions:
            if instruction.opcode != "parameter":
                self._add_marks(instruction, self._result_marks(instruction))
        return self.marks.get(computation.root) if computation.root else None

    def _add_marks(self, instruction: Instruction, marks: Any) -> None:
        self.marks[instruction] = _union_marks(self.marks.get(instruction), marks)

    def _follow_call(self, computation: Computation, operands: Iterable[Any]) -> Any:
        for (_, parameter), marks in zip(sorted(computation.parameters.items()), operands, strict=False):
            self._add_marks(parameter, marks)
        return self._follow(computation)

    def _result_marks(self, instruction: Instruction) -> Any:
        opcode, message, operands = instruction.opcode, instruction.message, instruction.operands
        operand_marks = [self.marks.get(operand) for operand in operands]
        if operands and all(operand in self._batch_instructions or not operand.shape.dims for operand in operands):
            self._batch_instructions.add(instruction)
        if opcode == "tuple":
            return operand_marks
        if opcode == "get-tuple-element":
            return operand_marks[0][message.tuple_index] if isinstance(operand_marks[0], list) else None
        if opcode == "while":
            return self._loop_marks(instruction, operand_marks[0])
        if opcode in ("call", "conditional", "async-start"):
            inputs_by_computation = (
                [operand_marks] if opcode != "conditional" else [[marks] for marks in operand_marks[1:]]
            )
            results = [
                self._follow_call(computation, inputs_by_computation[min(number, len(inputs_by_computation) - 1)])
                for number, computation in enumerate(instruction.called_computations)
            ]
            result = None
            for marks in results:
                result = _union_marks(result, marks)
            return result
        if opcode == "opt-barrier":  # of recomputed activations
            return operand_marks[0]
        if opcode == "custom-call" and instruction.shape.tuple_shapes:
            return None
        if instruction.shape.tuple_shapes:
            marks = self._array_marks(instruction, operand_marks)
            return [marks for _ in instruction.shape.tuple_shapes]
        if opcode == "custom-call" and instruction.custom_call_target == "Sharding":
            return self._constrained_marks(instruction, operand_marks[0])
        return self._array_marks(instruction, operand_marks)

    def _constrained_marks(self, instruction: Instruction, marks: Any) -> Any:
        """Return the marks of an array after a sharding constraint.

        A constraint on a batch argument may split further dimensions. Any constraint may replicate dimensions that were
        split before, or split dimensions again that an earlier constraint replicated.
        """
        dims = instruction.shape.dims
        old_marks = marks if isinstance(marks, tuple) else (_NO_MARKS,) * len(dims)
        text = instruction.attributes.get(SHARDING_ATTRIBUTE, "")
        axes = [tuple(axis for axis, _ in parts) for parts in parse_sharding(text)]
        new_axes = [() if mark else dimension_axes for mark, dimension_axes in zip(old_marks, axes, strict=False)]
        if instruction in self._batch_instructions and instruction not in self.marks and any(new_axes):
            old_marks = _union_marks(old_marks, self._create_marks(_argument_name(instruction), dims, new_axes))
        used_axes, is_open = set().union(*axes), open_dimensions(text)
        new_marks = list(old_marks)
        for dimension, mark in enumerate(old_marks):
            batch_axes = {axis for number in mark if number >= 0 for axis in self._candidates[number].mesh_axes}
            if batch_axes & used_axes:
                new_marks[dimension] = frozenset(number for number in mark if number >= 0)
            elif batch_axes and axes and not is_open[dimension]:
                key = instruction, dimension
                number = self.replications.setdefault(key, -1 - len(self.replications))
                self.replicated[number] |= {candidate for candidate in mark if candidate >= 0}
                new_marks[dimension] = mark | {number}
        return tuple(new_marks) if any(new_marks) else None

    def _loop_marks(self, loop: Instruction, carry: Any) -> Any:
        condition, body = condition_and_body(loop)
        for _ in range(_MAX_PASSES):
            result = _union_marks(carry, self._follow_call(body, [carry]))
            if result == carry:
                break
            carry = result
        return carry

    def _array_marks(self, instruction: Instruction, operand_marks: Sequence[Any]) -> Marks | None:
        opcode, message, rank = instruction.opcode, instruction.message, len(instruction.shape.leaves[0].dims)
        array_marks = [marks if isinstance(marks, tuple) else None for marks in operand_marks]
        if not any(any(marks) for marks in array_marks if marks):
            return None
        first_marks, result = array_marks[0], [_NO_MARKS] * rank
        if opcode == "broadcast":
            for mark, dimension in zip(first_marks or (), message.dimensions, strict=True):
                result[dimension] = mark
        elif opcode == "transpose":
            result = [first_marks[dimension] for dimension in message.dimensions] if first_marks else result
        elif opcode in ("reshape", "bitcast"):
            result = (
                _reshape_marks(first_marks, instruction.operands[0].shape.dims, instruction.shape.dims)
                if first_marks
                else result
            )
        elif opcode == "reduce":
            result = [
                mark for dimension, mark in enumerate(first_marks or ()) if dimension not in message.dimensions
            ] or result
        elif opcode == "dot":
            result = self._dot_marks(instruction, array_marks)
        elif opcode == "convolution":
            dim_numbers = message.convolution
            self._record_contraction(array_marks, [dim_numbers.input_feature], [dim_numbers.kernel_input_feature])
            if first_marks:
                result[dim_numbers.output_batch] |= first_marks[dim_numbers.input_batch]
            if (kernel_marks := array_marks[1]) is not None:
                result[dim_numbers.output_feature] |= kernel_marks[dim_numbers.kernel_output_feature]
        elif opcode == "gather":
            offset_dims, vector_dim = set(message.gather.offset_dims), message.gather.index_vector_dim
            outer_dims = [dimension for dimension in range(rank) if dimension not in offset_dims]
            index_marks = [mark for dimension, mark in enumerate(array_marks[1] or ()) if dimension != vector_dim]
            for dimension, mark in zip(outer_dims, index_marks, strict=False):
                result[dimension] = mark
        else:
            dims = instruction.shape.leaves[0].dims
            for operand, marks in zip(instruction.operands, array_marks, strict=True):
                if marks is not None and len(marks) == rank:
                    is_same_size = (size == other for size, other in zip(operand.shape.dims, dims, strict=True))
                    result = [
                        _join_marks(a, b if is_equal else _NO_MARKS)
                        for a, b, is_equal in zip(result, marks, is_same_size, strict=True)
                    ]
        return tuple(result)

    def _dot_marks(self, instruction: Instruction, array_marks: Sequence[Marks | None]) -> list[frozenset[int]]:
        dim_numbers = instruction.message.dot
        (left, left_dims), (right, right_dims) = (
            (marks or (_NO_MARKS,) * len(operand.shape.dims), range(len(operand.shape.dims)))
            for marks, operand in zip(array_marks, instruction.operands, strict=False)
        )
        self._record_contraction((left, right), dim_numbers.lhs_contracting, dim_numbers.rhs_contracting)
        left_excluded = {*dim_numbers.lhs_batch, *dim_numbers.lhs_contracting}
        right_excluded = {*dim_numbers.rhs_batch, *dim_numbers.rhs_contracting}
        return [
            *(
                _join_marks(left[a], right[b])
                for a, b in zip(dim_numbers.lhs_batch, dim_numbers.rhs_batch, strict=True)
            ),
            *(left[dimension] for dimension in left_dims if dimension not in left_excluded),
            *(right[dimension] for dimension in right_dims if dimension not in right_excluded),
        ]

    def _record_contraction(
        self, array_marks: Sequence[Marks | None], left_dims: Sequence[int], right_dims: Sequence[int]
    ) -> None:
        for a, b in zip(left_dims, right_dims, strict=True):
            first, second = (marks[d] if marks else _NO_MARKS for marks, d in zip(array_marks, (a, b), strict=False))
            if not first & second:
                self._contracted_candidates |= first | second


class _WeightTracer(_Tracer):
    """Follows state through a program, and collects in `names` the arguments that an operation of `_MIXING` reads.

    Ignores reductions to scalars, such as norms. All dimensions of an array have the marks of all arguments that it is
    computed from.
    """

    def __init__(self, module: Module, arguments: Sequence[Argument]) -> None:
        self.names: set[str] = set()
        super().__init__(module, [replace(argument, is_state=not argument.is_state) for argument in arguments])

    def _create_marks(self, name: str, dims: Sequence[int], mesh_axes: Sequence[tuple[str, ...]]) -> Marks:
        self._candidates.append(BatchDimension(name, 0, ()))
        return (frozenset({len(self._candidates) - 1}),) * len(dims)

    def _constrained_marks(self, instruction: Instruction, marks: Any) -> Any:
        return marks

    def _array_marks(self, instruction: Instruction, operand_marks: Sequence[Any]) -> Marks | None:
        marks = frozenset[int]().union(*(m for array in operand_marks if isinstance(array, tuple) for m in array))
        if instruction.opcode not in _MIXING:
            return (marks,) * len(instruction.shape.leaves[0].dims) if marks else None
        if instruction.opcode in ("reduce", "dot") and not any(leaf.dims for leaf in instruction.shape.leaves):
            return None
        self.names |= {self._candidates[number].argument for number in marks}
        return None


def _argument_name(instruction: Instruction) -> str:
    """Return the name of the argument that a value is computed from, following first operands."""
    while instruction.operands and instruction.opcode != "parameter":
        instruction = instruction.operands[0]
    return instruction.op_name or instruction.name


def _join_marks(first: frozenset[int], second: frozenset[int]) -> frozenset[int]:
    """Return the marks of one dimension that is computed from two operands.

    If a batch is split in one operand, XLA splits the result, even if a constraint replicates the other operand.
    """
    marks = first | second
    is_replicated = all(not mark or min(mark) < 0 for mark in (first, second))
    return marks if is_replicated else frozenset(number for number in marks if number >= 0)


def _union_marks(first: Any, second: Any) -> Any:
    """Return the union of the marks of two values of the same shape.

    An array has `Marks`. An HLO tuple has a list with the marks of each element. None means no marks.
    """
    if first is None or second is None:
        return second if first is None else first
    if isinstance(first, list):
        return [_union_marks(a, b) for a, b in zip(first, second, strict=True)]
    return tuple(a | b for a, b in zip(first, second, strict=True))


def _reshape_marks(marks: Marks, old_shape: Sequence[int], new_shape: Sequence[int]) -> list[frozenset[int]]:
    """Return the marks after a reshape. If dimensions are merged or split, the major one keeps its marks."""
    result = [_NO_MARKS] * len(new_shape)
    for old_dims, new_dims in _reshape_groups(old_shape, new_shape):
        source = next((dim for dim in old_dims if old_shape[dim] > 1), None)
        target = next((dim for dim in new_dims if new_shape[dim] > 1), None)
        if source is not None and target is not None:
            result[target] = marks[source]
    return result


def _reshape_groups(old_shape: Sequence[int], new_shape: Sequence[int]) -> Iterator[tuple[range, range]]:
    """Yield the smallest groups of adjacent dimensions with the same number of elements before and after a reshape."""
    i = j = 0
    while i < len(old_shape) and j < len(new_shape):
        start_i, start_j = i, j
        size_i, size_j, i, j = old_shape[i], new_shape[j], i + 1, j + 1
        while size_i != size_j:
            if size_i < size_j:
                if i == len(old_shape):
                    return
                size_i, i = size_i * old_shape[i], i + 1
            else:
                if j == len(new_shape):
                    return
                size_j, j = size_j * new_shape[j], j + 1
        yield range(start_i, i), range(start_j, j)
