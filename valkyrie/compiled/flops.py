"""Counts the FLOPs of instructions: two per multiply-add of a matrix product.

Elementwise operations are not counted, because the peak of a matrix unit and the definition of MFU ignore them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from valkyrie.axes import ROUTED_SHARE
from valkyrie.compiled.hlo import Computation, Instruction, Module
from valkyrie.compiled.loops import condition_and_body, trip_count

_TRITON_TARGET = "__gpu$xla.gpu.triton"
_KERNEL_TARGETS = ("tpu_custom_call", "Mosaic", _TRITON_TARGET)
"""Custom calls that run a Pallas kernel."""
_PRODUCT_TARGETS = ("__cublas$gemm", "__cublas$lt$matmul")
_ATTENTION_TARGET = "__cudnn$fmha"
_ROW_DTYPES = ("bf16", "f16", "f32")
"""Dtypes of the factors of a product of groups of rows."""


class ProductSize(NamedTuple):
    """Size of a matrix product: `batch` products of [m, k] and [k, n]. `dtype` is that of the left operand."""

    batch: int
    m: int
    n: int
    k: int
    dtype: str

    @property
    def flops(self) -> float:
        """FLOPs of all products."""
        return 2.0 * self.batch * self.m * self.n * self.k


class AttentionSize(NamedTuple):
    """Size of a call of an attention kernel that is a library function.

    Args:
        batch: Batch times query heads.
        queries, keys: Lengths.
        head_dim: Mean of the channels of a key and of a value.
        is_causal: Queries see only earlier keys.
        window: Keys that a query sees, or 0 for all.
        is_backward: Whether it computes gradients.
    """

    batch: int
    queries: int
    keys: int
    head_dim: float
    is_causal: bool
    window: int
    is_backward: bool

    @property
    def flops(self) -> float:
        """FLOPs of the pairs of queries and keys that see each other: 2 matrix products, or 5 backward."""
        pairs = self.queries * self.keys
        if self.window:
            pairs = self.queries * min(self.window, self.keys)
        elif self.is_causal:
            pairs /= 2
        return (5 if self.is_backward else 2) * 2.0 * self.batch * pairs * self.head_dim


def product_size(instruction: Instruction) -> ProductSize | None:
    """Return the size of a dot, or of a product by cuBLAS, or None for other instructions."""
    if instruction.opcode == "dot":
        dot = instruction.message.dot
        contracted, batch = (dot.lhs_contracting, dot.rhs_contracting), (dot.lhs_batch, dot.rhs_batch)
    elif instruction.custom_call_target.startswith(_PRODUCT_TARGETS):
        dot = instruction.backend_config.get("gemm_backend_config", {}).get("dot_dimension_numbers", {})
        contracted, batch = (
            tuple([int(d) for d in dot.get(f"{side}_{kind}_dimensions", ())] for side in ("lhs", "rhs"))
            for kind in ("contracting", "batch")
        )
    else:
        return None
    lhs, rhs = (operand.shape.dims for operand in instruction.operands[:2])
    k, batches = math.prod(lhs[d] for d in contracted[0]), math.prod(lhs[d] for d in batch[0])
    m, n = math.prod(lhs) // max(k * batches, 1), math.prod(rhs) // max(k * batches, 1)
    return ProductSize(batches, m, n, k, instruction.operands[0].shape.dtype)


def attention_size(instruction: Instruction) -> AttentionSize | None:
    """Return the size of a call of cuDNN's attention, or None for other instructions."""
    if not instruction.custom_call_target.startswith(_ATTENTION_TARGET):
        return None
    config = instruction.backend_config["cudnn_fmha_backend_config"]
    batch, heads, queries, keys = map(int, config["intermediate_tensor_shape"]["dimensions"])
    return AttentionSize(
        batch * heads,
        queries,
        keys,
        (instruction.operands[0].shape.dims[-1] + instruction.operands[2].shape.dims[-1]) / 2,
        "CAUSAL" in config.get("mask_type", ""),
        int(config.get("sliding_window_length", 0)),
        "Backward" in instruction.custom_call_target,
    )


def grouped_product_size(instruction: Instruction) -> ProductSize | None:
    """Return the size of a product of groups of rows with a matrix per group, or None for other instructions.

    These are Triton kernels, and fusions into which libtpu 0.0.46 compiles `jax.lax.ragged_dot` for v5e and v6e. All
    groups together count as one product, and the sums of each group's outer products as a batch. Rows of no group count
    too (see `ROUTED_SHARE`).
    """
    is_fusion = instruction.opcode == "fusion" and product_flops(instruction) > 0
    if ROUTED_SHARE not in instruction.attributes or not (
        is_fusion or instruction.custom_call_target == _TRITON_TARGET
    ):
        return None
    arrays = [o.shape for o in instruction.operands if o.shape.dtype in _ROW_DTYPES]
    dtype, (*groups, m, n) = arrays[0].dtype, instruction.shape.dims
    matrices = next((array.dims for array in arrays if len(array.dims) == 3), None)
    if is_fusion and (matrices is None or groups):  # a step of a loop over tiles of rows
        return None
    if matrices is not None:
        return ProductSize(1, m, n, math.prod(matrices[1:]) // n, dtype)
    return ProductSize(groups[0], m, n, max(arrays[0].dims[0] // groups[0], 1), dtype)


def product_flops(instruction: Instruction) -> float:
    """Return the FLOPs of a matrix product, or of all those in a fusion or call. Other instructions have 0.

    Matrix products are dots, convolutions, and calls of cuBLAS and of cuDNN's attention.
    """
    if (size := product_size(instruction) or attention_size(instruction)) is not None:
        return size.flops
    if instruction.opcode == "convolution":
        return _convolution_flops(instruction)
    if instruction.opcode in ("fusion", "call"):
        return sum(product_flops(i) for c in instruction.called_computations for i in c.instructions)
    return 0.0


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
