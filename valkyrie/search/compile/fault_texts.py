"""Texts of faults in a program's sharding: lists of source lines, mesh axes, and the constraints that cause a fault."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from valkyrie.compiled.helpers import find_helper
from valkyrie.compiled.hlo import SHARDING_ATTRIBUTE, Instruction
from valkyrie.compiled.whole import BatchDimension, open_dimensions, parse_sharding
from valkyrie.parts import PartKind
from valkyrie.search.compile.partitioned import PartitionedProgram
from valkyrie.search.compile.prediction import short_source
from valkyrie.units import count_text

MAX_LINES = 5
"""Maximum number of source lines that a fault lists."""


def batch_spec(program: PartitionedProgram, dimension: BatchDimension, array: Instruction) -> str:
    """Return the `PartitionSpec` that splits a batch dimension of an array, as code.

    Keeps the mesh axes that the array's sharding has, if it is an argument or the result of a sharding constraint.
    """
    sharding = array.attributes.get(SHARDING_ATTRIBUTE, "")
    axes = {
        number: tuple(axis for axis, _ in parts if axis not in dimension.mesh_axes)
        for number, parts in enumerate(parse_sharding(sharding))
    }
    position = program.unpartitioned.find_positions(array, dimension)[0]
    axes[position] = (*dimension.mesh_axes, *axes.get(position, ()))
    return format_spec(axes, [number for number, is_open in enumerate(open_dimensions(sharding)) if is_open])


def format_spec(mesh_axes: Mapping[int, Sequence[str]], open_dimensions: Sequence[int] = ()) -> str:
    """Return the `PartitionSpec` that splits dimensions, given by number, over mesh axes, as code.

    `open_dimensions` are the numbers of dimensions that XLA may split if they have no mesh axes.
    """
    entries = []
    for position in range(max([*(number for number, axes in mesh_axes.items() if axes), *open_dimensions]) + 1):
        names = [repr(axis) for axis in mesh_axes.get(position, ())]
        unsplit = "PartitionSpec.UNCONSTRAINED" if position in open_dimensions else "None"
        entries.append(unsplit if not names else names[0] if len(names) == 1 else f"({', '.join(names)})")
    return f"PartitionSpec({', '.join(entries)})"


def describe_replication(constraints: Sequence[Instruction]) -> str:
    """Return a clause that names the source lines of sharding constraints that replicate a batch."""
    places = list(dict.fromkeys(map(format_place, constraints)))
    return f"with_sharding_constraint in {join_texts(places)} replicate{'s' * (len(places) == 1)} it"


def constraint_remedy(
    program: PartitionedProgram, dimension: BatchDimension, constraints: Sequence[Instruction]
) -> str:
    """Return how to change the first of the constraints that replicate a batch dimension."""
    first = constraints[0]
    spec = batch_spec(program, dimension, first)
    return f"Split the batch in {format_line(first.source)} ({spec}), or remove the constraint."


def format_place(instruction: Instruction) -> str:
    """Return the source line of an instruction, with its helper function if there is one (`skip_helper_lines`)."""
    line, helper = format_line(instruction.source), find_helper(instruction)
    if helper is None:
        return line
    name = helper.function.rpartition(".")[2]
    return f"{line} (through {f'{name} at ' * bool(name)}{format_line(helper.line)})"


def format_axes(program: PartitionedProgram, mesh_axes: Iterable[str]) -> str:
    """Return mesh axes with their sizes, such as `data=4,model=2`."""
    return ",".join(f"{axis}={program.mesh_axes.get(axis, 1)}" for axis in mesh_axes)


def format_line(line: str) -> str:
    """Return a source line with a short path, or `an unknown line` if it is empty."""
    return short_source(line) or "an unknown line"


def list_lines(program: PartitionedProgram, lines: Iterable[str]) -> str:
    """List source lines, the slowest first, as `join_lines` does."""
    ordered = sorted(
        lines, key=lambda line: (-program.sum_seconds([line], *PartKind, mesh_axes=[*program.mesh_axes]), line)
    )
    return join_lines(ordered)


def join_lines(lines: Sequence[str]) -> str:
    """Join up to `MAX_LINES` source lines, as `format_line` writes them, and the number of remaining ones."""
    return join_texts([*map(format_line, lines)])


def join_texts(texts: Sequence[str]) -> str:
    """Join up to `MAX_LINES` texts about source lines, and the number of remaining ones."""
    more = len(texts) - MAX_LINES
    shown = [*texts[:MAX_LINES], *([count_text(more, "more line")] if more > 0 else [])]
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)
