"""Finds matrix products that several devices compute, although each could compute a part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

from valkyrie.axes import axes_text
from valkyrie.compiled.hlo import Instruction
from valkyrie.compiled.shards import UnsplitDimensions, match_product
from valkyrie.parts import PartKind
from valkyrie.search.compile.fault import Fault, FaultCode
from valkyrie.search.compile.fault_texts import format_axes, format_line, format_spec, list_lines
from valkyrie.search.compile.partitioned import PartitionedProgram, find_origin
from valkyrie.search.compile.prediction import short_cause
from valkyrie.units import duration_text

MIN_REPEATED_RATIO = 1.25
"""A source line repeats work if its FLOPs after partitioning, summed over devices, are this many times those before."""


class _RepeatedProduct(NamedTuple):
    """A product before partitioning that several devices compute.

    `unsplit` has the dimensions that are not split, for the result and each operand. `ratio` is the number of devices
    that compute the same part, and `flops` the FLOPs of one device.
    """

    instruction: Instruction
    unsplit: Sequence[UnsplitDimensions]
    ratio: float
    flops: float


def find_repeated_compute(program: PartitionedProgram, known_lines: set[str], min_share: float) -> Iterator[Fault]:
    """Yield a fault if repeated products cost at least `min_share` of the step, apart from those in `known_lines`."""
    lines = {line for line, ratio in program.flops_ratios.items() if ratio >= MIN_REPEATED_RATIO} - known_lines
    seconds = repeated_seconds(program, lines)
    if not lines or seconds < min_share * program.step_s:
        return
    product = _find_largest_product(program, lines)
    axes = () if product is None else _find_repeating_axes(program, product)
    ratio = max(program.flops_ratios[line] for line in lines)
    devices = f"All devices along {format_axes(program, axes)}" if axes else "Several devices"
    text = (
        f"{devices} compute the same matrix products, up to {ratio:.1f} times, in {list_lines(program, lines)}. This "
        f"takes about {duration_text(seconds)} of the {duration_text(program.step_s)} step."
    )
    if product is None or not axes:
        slowest = max(lines, key=lambda line: program.sum_seconds([line], PartKind.matmul))
        remedy = "Shard an operand of these products over the mesh axes that do not split them yet."
        yield Fault(FaultCode.repeated_compute, text, remedy, slowest, (), seconds)
        return
    source, remedy = product.instruction.source, _split_remedy(program, product, axes)
    yield Fault(FaultCode.repeated_compute, text, remedy, source, axes, seconds)


def repeated_seconds(program: PartitionedProgram, lines: Iterable[str]) -> float:
    """Estimate the seconds that these source lines would save if no product was repeated."""
    ratios = ((line, max(program.flops_ratios.get(line, 1.0), 1.0)) for line in lines)
    return sum(program.sum_seconds([line], PartKind.matmul) * (1 - 1 / ratio) for line, ratio in ratios)


def _find_largest_product(program: PartitionedProgram, lines: set[str]) -> _RepeatedProduct | None:
    """Return the repeated product of these lines with the most FLOPs, or None if none can be matched."""
    repeated = []
    for local in program.local_products:
        origin = find_origin(local.instruction)
        if origin.source not in lines:
            continue
        for whole in program.unpartitioned_products:
            if find_origin(whole.instruction) == origin and whole.flops:
                unsplit = match_product(local.instruction, whole.instruction)
                ratio = program.device_count * local.flops / whole.flops
                if unsplit is not None and ratio >= MIN_REPEATED_RATIO:
                    repeated.append(_RepeatedProduct(whole.instruction, unsplit, ratio, local.flops))
    return max(repeated, key=lambda product: product.flops, default=None)


def _find_repeating_axes(program: PartitionedProgram, product: _RepeatedProduct) -> tuple[str, ...]:
    """Return the mesh axes along which devices compute the same part of a product, or () if they are ambiguous.

    Their sizes multiply to the ratio of the product, and they do not split a batch dimension of it.
    """
    batch_axes = set[str]()
    for array, unsplit in zip(_arrays(product), product.unsplit, strict=True):
        for position, dimension in program.unpartitioned.batch_dimensions(array).items():
            if position not in unsplit:
                batch_axes |= {*dimension.mesh_axes}
    axes = [axis for axis, size in program.mesh_axes.items() if size > 1 and axis not in batch_axes]
    groups = [group for count in range(1, len(axes) + 1) for group in combinations(axes, count)]
    groups = [group for group in groups if program.count_parts(group) == round(product.ratio)]
    return groups[0] if len(groups) == 1 else ()


def _split_remedy(program: PartitionedProgram, product: _RepeatedProduct, axes: tuple[str, ...]) -> str:
    """Return how to split a product over mesh axes, with a constraint on an operand or the result.

    Prefers an array with a batch dimension, and splits this further if its size allows it. Otherwise splits the largest
    dimension that is not split yet and, in an operand, not contracted.
    """
    line = f"{format_line(product.instruction.source)} ({short_cause(product.instruction.op_name)})"
    over = axes_text(axes)
    result, *operands = zip(_arrays(product), product.unsplit, strict=True)
    has_batch = program.unpartitioned.batch_dimensions
    for array, unsplit in sorted([*operands, result], key=lambda pair: not has_batch(pair[0])):
        is_result, dims = array is product.instruction, array.shape.dims
        batch = {n: d.mesh_axes for n, d in program.unpartitioned.batch_dimensions(array).items() if n not in unsplit}
        excluded = set() if is_result else _contracted_dimensions(product.instruction, array)
        positions = [n for n, split in batch.items() if dims[n] % program.count_parts([*split, *axes]) == 0]
        free = [n for n in unsplit - excluded if dims[n] > 1 and dims[n] % program.count_parts(axes) == 0]
        positions += sorted(free, key=lambda n: -dims[n])
        if positions and (batch or is_result):
            spec = format_spec({**batch, positions[0]: (*batch.get(positions[0], ()), *axes)})
            where, name = ("the result of", "y") if is_result else ("the activations before", "x")
            return (
                f"Split these products over {over}. Constrain {where} {line}: "
                f"{name} = jax.lax.with_sharding_constraint({name}, NamedSharding(mesh, {spec})). Or shard the weights "
                f"there over {over}."
            )
    return f"Split these products over {over}: shard an operand of {line} over it."


def _arrays(product: _RepeatedProduct) -> tuple[Instruction, ...]:
    return product.instruction, *product.instruction.operands[:2]


def _contracted_dimensions(product: Instruction, operand: Instruction) -> set[int]:
    """Return the dimensions of an operand over which a product sums. For a convolution, all but its batch."""
    is_left = operand is product.operands[0]
    if product.opcode == "convolution":
        return {*range(len(operand.shape.dims))} - ({product.message.convolution.input_batch} if is_left else set())
    return {*(product.message.dot.lhs_contracting if is_left else product.message.dot.rhs_contracting)}
