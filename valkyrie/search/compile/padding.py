"""The time that matrix products spend on padding narrow dimensions to the width of the matrix unit."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass

from valkyrie.compiled.collectives import find_cause
from valkyrie.compiled.hlo import Instruction
from valkyrie.parts import PartKind
from valkyrie.search.compile.fault_texts import list_lines
from valkyrie.search.compile.partitioned import PartitionedProgram

LANES = 128
"""Lanes of a TPU's vector registers. Smaller dimensions are padded to them. v6e's matrix unit is twice as wide."""

MIN_ROWS = 32
"""Batched products with fewer rows have one row for each token of a decoding step, so they are bound by memory."""


@dataclass(frozen=True)
class Padding:
    """Padding of narrow products.

    Args:
        seconds: Seconds of a step that the padding takes.
        product_seconds: Seconds of the products, with the padding.
        lines: Text with the source lines of the products, the slowest first.
        sizes: Text with the largest padded sizes, such as `64` or `32 and 64`.
        source: The source line with the most padding.
    """

    seconds: float
    product_seconds: float
    lines: str
    sizes: str
    source: str


def find_padding(program: PartitionedProgram) -> Padding | None:
    """Return the padding of a program's narrow products, or None if there is none.

    A product is narrow if one of its `_product_widths` is at most half of `LANES`. Lines with less than 1% of the step
    are left out.
    """
    useful_flops: Counter[tuple[str, str]] = Counter()
    padded_flops: Counter[tuple[str, str]] = Counter()
    narrow_sizes: dict[str, Counter[int]] = defaultdict(Counter)
    for product in program.local_products:
        key = find_cause(product.operation)
        sizes = [size for size in _product_widths(product.instruction) if size <= LANES // 2]
        useful_flops[key] += int(product.flops)
        padded_flops[key] += int(product.flops * math.prod(LANES / size for size in sizes))
        narrow_sizes[key[1]].update({size: int(product.flops) for size in sizes})
    waste, product_seconds = defaultdict[str, float](float), defaultdict[str, float](float)
    for cost in program.replay.costs if program.replay else ():
        key = cost.op_name, cost.source
        if cost.kind is PartKind.matmul and padded_flops[key] > useful_flops[key]:
            product_seconds[cost.source] += cost.seconds
            waste[cost.source] += cost.seconds * (1 - useful_flops[key] / padded_flops[key])
    waste = {line: seconds for line, seconds in waste.items() if seconds > 0.01 * program.step_s}
    if not waste:
        return None
    sizes = sorted({counts.most_common(1)[0][0] for line, counts in narrow_sizes.items() if line in waste and counts})
    return Padding(
        sum(waste.values()),
        sum(product_seconds[line] for line in waste),
        list_lines(program, waste),
        " and ".join(str(size) for size in sizes[-2:]),
        max(waste, key=lambda line: waste[line]),
    )


def _product_widths(instruction: Instruction) -> list[int]:
    """Return the contracted size and the number of output features of a product, the sizes that are padded.

    If both are wide, also returns the number of rows of a batched product, because XLA may have swapped its operands,
    unless there are fewer than `MIN_ROWS`.
    """
    message, result = instruction.message, instruction.shape.element_count
    left, right = (operand.shape.dims for operand in instruction.operands[:2])
    if instruction.opcode == "convolution":
        numbers, is_batched = message.convolution, _is_batched(instruction)
        window = math.prod(right[d] for d in numbers.kernel_spatial)
        contracted = right[numbers.kernel_input_feature] * (window if not is_batched else 1)
        features, batch = right[numbers.kernel_output_feature], window
    else:
        contracted = math.prod(left[d] for d in message.dot.lhs_contracting)
        used = {*message.dot.rhs_batch, *message.dot.rhs_contracting}
        features = math.prod(size for d, size in enumerate(right) if d not in used)
        batch, is_batched = math.prod(left[d] for d in message.dot.lhs_batch), bool(len(message.dot.lhs_batch))
    widths = [size for size in (contracted, features) if size > 0]
    if is_batched and min(widths, default=0) > LANES // 2 and (rows := result // (features * batch)) >= MIN_ROWS:
        widths.append(rows)
    return widths


def _is_batched(instruction: Instruction) -> bool:
    """Return whether a convolution is a batched product, which XLA writes with a dilated or strided window."""
    return any(
        window.base_dilation > 1 or window.window_dilation > 1 or window.stride > 1
        for window in instruction.message.window.dimensions
    )
