"""Counts the FLOPs of instructions: two per multiply-add of a matrix product.

Elementwise operations are not counted, because the peak of a matrix unit and the definition of MFU ignore them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from valkyrie.compiled.hlo import Computation, Instruction, Module
from valkyrie.compiled.loops import condition_and_body, trip_count

_KERNEL_TARGETS = ("tpu_custom_call", "Mosaic")
"""Custom calls that run a Pallas kernel."""


def product_flops(instruction: Instruction) -> float:
    """Return the FLOPs of a dot or convolution, or of all those in a fusion or call. Other instructions have 0."""
    if instruction.opcode == "dot":
        return _dot_flops(instruction)
    if instruction.opcode == "convolution":
        return _convolution_flops(instruction)
    if instruction.opcode in ("fusion", "call"):
        return sum(product_flops(i) for c in instruction.called_computations for i in c.instructions)
    return 0.0


def _dot_flops(instruction: Instruction) -> float:
    contracted = instruction.message.dot.lhs_contracting
    lhs_dims = instruction.operands[0].shape.dims
    return 2.0 * instruction.shape.element_count * math.prod(lhs_dims[d] for d in contracted)


def _convolution_flops(instruction: Instruction) -> float:
    """Return the FLOPs of a convolution. Like XLA's HloCostAnalysis, skips window positions in the padding."""
    message = instruction.message
    dim_numbers = message.convolution
    image_dims, kernel_dims, out_dims = (
        instruction.operands[0].shape.dims,
        instruction.operands[1].shape.dims,
        instruction.shape.dims,
    )
    positions = 1
    for i, window in enumerate(message.window.dimensions):
        positions *= _valid_positions(
            window, image_dims[dim_numbers.input_spatial[i]], out_dims[dim_numbers.output_spatial[i]]
        )
    features = kernel_dims[dim_numbers.kernel_input_feature] * out_dims[dim_numbers.output_feature]
    batch = image_dims[dim_numbers.input_batch] / max(message.batch_group_count, 1)
    return 2.0 * features * batch * positions


def _valid_positions(window: Any, in_size: int, out_size: int) -> int:
    """Count the (output, window position) pairs that read an input element, not padding, along one dimension."""
    taps = np.arange(window.size)
    stride, dilation = max(window.stride, 1), max(window.base_dilation, 1)
    first_position = taps * max(window.window_dilation, 1) - window.padding_low
    last_element = (in_size - 1) * dilation
    if dilation == 1:
        first_output = np.maximum(-(first_position // stride), 0)
        last_output = np.minimum((last_element - first_position) // stride, out_size - 1)
    elif stride == 1:
        first_output, last_output = (
            -(np.maximum(-first_position, 0) // -1),
            np.minimum(last_element - first_position, out_size - 1),
        )
        first_output = np.maximum(first_output, 0) + first_position
        return int(np.maximum((last_output + first_position) // dilation - -(-first_output // dilation) + 1, 0).sum())
    else:
        positions = first_position[:, None] + np.arange(out_size) * stride
        return int(((positions >= 0) & (positions <= last_element) & (positions % dilation == 0)).sum())
    return int(np.maximum(last_output - first_output + 1, 0).sum())


class MatrixProduct(NamedTuple):
    """A dot or convolution, and how often one step executes it.

    Args:
        instruction: The dot or convolution.
        operation: The outermost fusion that contains it, or the instruction itself.
        calls: Executions in a step. In a program before partitioning, each device of a `jax.shard_map` executes the
            products in it, and all of these executions count.
    """

    instruction: Instruction
    operation: Instruction
    calls: float

    @property
    def flops(self) -> float:
        """FLOPs of all executions in a step."""
        return self.calls * product_flops(self.instruction)


def list_products(module: Module, mesh_axes: Mapping[str, int]) -> list[MatrixProduct]:
    """Return the dots and convolutions of a program in execution order.

    A product in a loop is listed once, with `calls` multiplied by the trip count, or by 1 if the trip count is unknown.
    The branches of a conditional are weighted equally. `mesh_axes` has the sizes of the mesh axes by name.
    """
    return list(_iterate_products(module.entry, 1.0, mesh_axes))


def model_flops(module: Module, mesh_axes: Mapping[str, int]) -> float | None:
    """Return the FLOPs of a program before partitioning, on all devices, without recomputation.

    Returns None if the program has Pallas kernels, because their FLOPs are unknown.
    """
    if any(i.custom_call_target in _KERNEL_TARGETS for c in module.computations for i in c.instructions):
        return None
    return sum(p.flops for p in list_products(module, mesh_axes) if "rematted_computation" not in p.instruction.op_name)


def _iterate_products(
    computation: Computation, calls: float, mesh_axes: Mapping[str, int], fusion: Instruction | None = None
) -> Iterator[MatrixProduct]:
    for instruction in computation.instructions:
        opcode = instruction.opcode
        if opcode in ("dot", "convolution"):
            yield MatrixProduct(instruction, fusion or instruction, calls)
        elif opcode == "while":
            trips = trip_count(instruction)
            yield from _iterate_products(
                condition_and_body(instruction)[1], calls * (1 if trips is None else trips), mesh_axes
            )
        elif opcode == "conditional":
            for branch in instruction.called_computations:
                yield from _iterate_products(branch, calls / len(instruction.called_computations), mesh_axes)
        elif opcode in ("fusion", "call", "async-start"):
            outer_fusion = fusion or (instruction if opcode == "fusion" else None)
            for called in instruction.called_computations:
                yield from _iterate_products(
                    called, calls * _manual_device_count(instruction, mesh_axes), mesh_axes, outer_fusion
                )


def _manual_device_count(call: Instruction, mesh_axes: Mapping[str, int]) -> int:
    """Return the number of devices that each execute the body of a `jax.shard_map`, or 1 for any other call.

    Only programs before partitioning have such calls. If a call does not name its manual axes, all devices of the mesh
    count.
    """
    if not call.called_computations[0].name.startswith("xla.sdy.manual_computation_body"):
        return 1
    for operand in call.operands:
        if operand.opcode == "get-tuple-element" and "xla.sdy.manual_axes" in operand.operands[0].attributes:
            names = re.findall(r'"([^"]+)"', operand.operands[0].attributes["xla.sdy.manual_axes"])
            return math.prod(mesh_axes.get(name, 1) for name in names)
    return math.prod(mesh_axes.values())
