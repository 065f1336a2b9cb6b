"""Counts the FLOPs of instructions: two per multiply-add of a matrix product.

Elementwise operations are not counted, because the peak of a matrix unit and the definition of MFU ignore them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from valkyrie.compiled.hlo import Instruction


def product_flops(instruction: Instruction) -> float:
    """Return the FLOPs of an instruction's dots and convolutions, including those in a fusion."""
    if instruction.opcode == "dot":
        return _dot(instruction)
    if instruction.opcode == "convolution":
        return _convolution(instruction)
    if instruction.opcode in ("fusion", "call"):
        return sum(product_flops(i) for c in instruction.called for i in c.instructions)
    return 0.0


def _dot(instruction: Instruction) -> float:
    contracted = instruction.message.dot.lhs_contracting
    lhs_dims = instruction.operands[0].shape.dims
    return 2.0 * instruction.shape.elements * math.prod(lhs_dims[d] for d in contracted)


def _convolution(instruction: Instruction) -> float:
    """Return the FLOPs of a convolution. Like XLA's HloCostAnalysis, skips window positions in the padding."""
    message = instruction.message
    dims = message.convolution
    image, kernel, out = instruction.operands[0].shape.dims, instruction.operands[1].shape.dims, instruction.shape.dims
    positions = 1
    for i, window in enumerate(message.window.dimensions):
        positions *= _valid_positions(window, image[dims.input_spatial[i]], out[dims.output_spatial[i]])
    features = kernel[dims.kernel_input_feature] * out[dims.output_feature]
    batch = image[dims.input_batch] / max(message.batch_group_count, 1)
    return 2.0 * features * batch * positions


def _valid_positions(window: Any, size: int, out: int) -> int:
    """Count the (output, window position) pairs that read an input element, not padding, along one dimension."""
    taps = np.arange(window.size)
    stride, dilation = max(window.stride, 1), max(window.base_dilation, 1)
    first = taps * max(window.window_dilation, 1) - window.padding_low
    last = (size - 1) * dilation
    if dilation == 1:
        low = np.maximum(-(first // stride), 0)
        high = np.minimum((last - first) // stride, out - 1)
    elif stride == 1:
        low, high = -(np.maximum(-first, 0) // -1), np.minimum(last - first, out - 1)
        low = np.maximum(low, 0) + first
        return int(np.maximum((high + first) // dilation - -(-low // dilation) + 1, 0).sum())
    else:
        positions = first[:, None] + np.arange(out) * stride
        return int(((positions >= 0) & (positions <= last) & (positions % dilation == 0)).sum())
    return int(np.maximum(high - low + 1, 0).sum())
