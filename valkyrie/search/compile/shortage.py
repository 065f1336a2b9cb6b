"""Explains why a program does not fit: its largest arguments and allocations, and what would make them smaller."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from valkyrie.compiled.hlo import HBM, Module
from valkyrie.compiled.whole import UnpartitionedProgram
from valkyrie.foreign_errors import Allocation
from valkyrie.search.compile.prediction import Hint, HintCode, MemoryReport
from valkyrie.units import gib_text, percent_text

MIN_SHARE = 0.01
"""Arrays below this share of the usable memory are not listed, and hints do not suggest sharding them."""
_MAX_ARGUMENTS, _MAX_LISTED = 3, 8
"""Maximum numbers of arguments that a hint names, and of arrays that are listed."""
_CONTROL_FLOW = ("while", "conditional", "call")
_NO_ARRAYS = ("parameter", "tuple", "get-tuple-element", "bitcast", "constant", "after-all")
"""Operations that allocate no array."""


@dataclass(frozen=True)
class ListedArgument:
    """An argument of a program.

    Args:
        name: Its name with its position in a tree: `params['w']`.
        shape: Dtype and dimensions before partitioning, such as `f32[16,128]`.
        bytes: Bytes on one device.
        replicated_over: Sizes of the mesh axes over which it is replicated, by name.
    """

    name: str
    shape: str
    bytes: int
    replicated_over: dict[str, int]

    @property
    def savable_bytes(self) -> int:
        """Bytes on one device that sharding over `replicated_over` saves."""
        return self.bytes - self.bytes // math.prod(self.replicated_over.values())


def list_arguments(unpartitioned: UnpartitionedProgram, axes: Mapping[str, int]) -> list[ListedArgument]:
    """Return the arguments that have a sharding, the largest on a device first. `axes` maps mesh axes to sizes."""
    arguments = []
    for argument in unpartitioned.arguments:
        if not argument.axis_parts:  # no sharding, or a scalar
            continue
        shape, replicated, elements = argument.shape, dict(axes), 1
        for dim, parts in zip(shape.dims, argument.axis_parts, strict=True):
            sizes = [(axis, size or axes[axis]) for axis, size in parts]
            for axis, size in sizes:
                replicated[axis] //= size
            elements *= -(-dim // math.prod(size for _, size in sizes))
        replicated = {axis: size for axis, size in replicated.items() if size > 1}
        text = f"{shape.dtype}[{','.join(map(str, shape.dims))}]"
        arguments.append(ListedArgument(argument.name, text, -(-elements * shape.bits // 8), replicated))
    return sorted(arguments, key=lambda argument: -argument.bytes)


def list_results(module: Module) -> list[Allocation]:
    """Return the arrays in HBM that a program's operations compute, the largest first.

    Includes operations in the bodies of loops and conditionals. Arrays of the same size, shape, operation name and
    source line are listed once.
    """
    results: dict[Allocation, None] = {}
    computations = [module.entry]
    for computation in computations:
        for instruction in computation.instructions:
            if instruction.opcode in _CONTROL_FLOW:
                computations += instruction.called_computations
            elif instruction.opcode not in _NO_ARRAYS and not instruction.opcode.endswith("-done"):
                shapes = [leaf for leaf in instruction.shape.leaves if leaf.memory_space == HBM]
                for shape in shapes:
                    text = f"{shape.dtype}[{','.join(map(str, shape.dims))}]"
                    entry = Allocation(
                        shape.padded_bytes, text, instruction.op_name or None, instruction.source or None
                    )
                    results[entry] = None
    return sorted(results, key=lambda entry: -entry.bytes)


def explain_shortage(
    memory: MemoryReport,
    arguments: Sequence[ListedArgument],
    results: Sequence[Allocation] = (),
    *,
    hint_replicated: bool = True,
) -> tuple[MemoryReport, list[Hint]]:
    """Explain why a program does not fit. Returns (report, hints).

    The report is `memory`. If its `largest` is empty, the report lists the largest arguments and results instead. Hints
    suggest how to reduce the memory. There are none if the needed or usable memory is unknown. With `hint_replicated`,
    one hint suggests sharding the replicated arguments, if any, that would save the most memory.
    """
    min_bytes = MIN_SHARE * (memory.usable or 0)
    if not memory.largest:
        largest = [*(Allocation(each.bytes, f"argument {each.name} {each.shape}") for each in arguments), *results]
        largest = sorted((entry for entry in largest if entry.bytes > min_bytes), key=lambda entry: -entry.bytes)
        memory = replace(memory, largest=tuple(largest[:_MAX_LISTED]))
    if memory.needed is None or not memory.usable:
        return memory, []
    texts, missing_bytes = [], memory.needed - memory.usable
    savable_arguments = sorted(arguments, key=lambda each: -each.savable_bytes)
    savable_arguments = [each for each in savable_arguments if each.savable_bytes > min_bytes][:_MAX_ARGUMENTS]
    if savable_arguments and hint_replicated:
        named_arguments = ", ".join(
            f"{each.name} ({gib_text(each.bytes)}, replicated over {' and '.join(each.replicated_over)})"
            for each in savable_arguments
        )
        saved = sum(each.savable_bytes for each in savable_arguments)
        verdict = (
            "enough to fit" if saved >= missing_bytes else f"{percent_text(saved / missing_bytes)} of what is missing"
        )
        texts.append(f"shard {named_arguments}: saves up to {gib_text(saved)} on a device, {verdict}.")
    temporary = memory.needed - sum(each.bytes for each in arguments)
    if arguments and temporary > missing_bytes / 2:
        texts.append(
            f"about {gib_text(temporary)} are results and temporaries, such as activations: use jax.checkpoint around "
            "layers, a smaller batch, or a mesh that shards the batch over more devices."
        )
    return memory, [Hint(HintCode.shortage, text) for text in texts]
