"""Computes the durations of GPU operations other than collectives, from tables of achieved speeds and from bytes.

XLA:GPU states no durations that a replay could use. Products and attention run at achieved speeds for their size
(`GpuFigures`), all other kernels at the speed of the memory. Each kernel takes a launch in addition.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

from valkyrie.axes import ROUTED_SHARE
from valkyrie.compiled.flops import (
    AttentionSize,
    ProductSize,
    attention_size,
    grouped_product_size,
    product_flops,
    product_size,
)
from valkyrie.compiled.hbm import hbm_bytes
from valkyrie.compiled.hlo import HOST, Instruction
from valkyrie.hardware.chips import known_chips
from valkyrie.hardware.figures import GpuFigures
from valkyrie.hardware.target import ChipConfig
from valkyrie.machine import gpu_assumptions as assumptions
from valkyrie.machine.kernels import routed_share
from valkyrie.machine.operations import FREE_OPCODES, OpCost, leaf_instructions
from valkyrie.parts import PartKind

_TABLE_DTYPES = {"bf16": "bfloat16", "f16": "bfloat16", "f32": "float32", "s8": "int8"}
"""Names in `GpuFigures.products` of XLA's dtypes. fp8 types are `float8_e4m3fn`."""
_HIGHEST_PRECISION = 2
"""Number of `jax.lax.Precision.HIGHEST` in XLA's PrecisionConfig."""
_FREE_TARGETS = {"Sharding", "AllocateBuffer", "annotate_device_placement"}


class GpuOpCostModel:
    """Computes the costs of instructions on a GPU. The keys of `notes` are the assumptions made so far."""

    has_fallback_branches = True  # of cuDNN's kernel for packed documents

    def __init__(self, chip: ChipConfig, routing_imbalance: float = 1.0) -> None:
        """Raises ValueError if figures of the chip are missing."""
        if chip.gpu is None or chip.hbm_gbs is None:
            raise ValueError(f"target.chip={chip.name} sets no gpu or hbm_gbs, which a replay needs.")
        self._chip = chip
        self._figures: GpuFigures = chip.gpu
        self._memory_rate = chip.hbm_gbs * 1e9 * assumptions.HBM_EFFICIENCY
        self._host_rate = chip.host_gbs * 1e9
        self._routing_imbalance = routing_imbalance
        self._cache: dict[Instruction, OpCost] = {}
        self.compute_slowdown = assumptions.COMPUTE_SLOWDOWN
        self.notes: dict[str, None] = {}

    def cost(self, instruction: Instruction) -> OpCost:
        """Return the cost of one execution of an operation that is not a collective, cached by instruction."""
        if instruction not in self._cache:
            self._cache[instruction] = self._cost(instruction)
        return self._cache[instruction]

    def background_cost(self, instruction: Instruction) -> tuple[float, str]:
        """Return the seconds that an asynchronous operation takes alone, and the link that it occupies.

        Copies to or from the host occupy PCIe (`to host`, `from host`), all other operations the memory (`HBM`).
        """
        if instruction.opcode == "copy-start":
            target, source = instruction.shape.leaves[:2]
            if HOST in (target.memory_space, source.memory_space):
                return target.bytes / self._host_rate, "to host" if target.memory_space == HOST else "from host"
            return 2 * target.bytes / self._memory_rate, "HBM"
        operations = [i for c in instruction.called_computations for i in leaf_instructions(c)]
        for operation in operations:
            source = operation.operands[0].shape if operation.operands else operation.shape
            if HOST in (operation.shape.memory_space, source.memory_space):
                link = "to host" if operation.shape.memory_space == HOST else "from host"
                return _copied_bytes(operation) / self._host_rate, link
        return sum(self.cost(i).duration_s for i in operations), "HBM"

    def _cost(self, instruction: Instruction) -> OpCost:
        if instruction.opcode in FREE_OPCODES or instruction.custom_call_target in _FREE_TARGETS:
            return OpCost(PartKind.compute, 0.0)
        memory_s = _traffic_bytes(instruction) / self._memory_rate
        sizes = list(_list_sizes([instruction]))
        if sizes:
            busy_s = sum(self._busy_s(size, i) for size, i in sizes)
            is_attention = any(isinstance(size, AttentionSize) for size, _ in sizes)
            kind, flops = PartKind.kernel if is_attention else PartKind.matmul, sum(size.flops for size, _ in sizes)
            return OpCost(kind, max(busy_s, memory_s) + assumptions.KERNEL_START_S, flops)
        if (grouped := grouped_product_size(instruction)) is not None:
            share, note = routed_share(instruction, self._routing_imbalance)
            self.notes[note] = None
            busy_s = share * self._busy_s(grouped, instruction) / assumptions.GROUPED_EFFICIENCY
            duration_s = max(busy_s, share * memory_s) + assumptions.KERNEL_START_S
            return OpCost(PartKind.matmul, duration_s, share * grouped.flops)
        if flops := product_flops(instruction):  # convolutions
            peak = self._chip.peak_tflops.get("bfloat16", 1.0) * 1e12 * assumptions.CONVOLUTION_EFFICIENCY
            return OpCost(PartKind.matmul, max(flops / peak, memory_s) + assumptions.KERNEL_START_S, flops)
        if instruction.opcode == "custom-call" and not instruction.custom_call_target.startswith("__cub$"):
            self.notes[
                f"custom call {instruction.custom_call_target} has no cost estimate: only the time to move its bytes "
                "is counted"
            ] = None
        return OpCost(PartKind.memory, memory_s + assumptions.KERNEL_START_S)

    def _busy_s(self, size: ProductSize | AttentionSize, instruction: Instruction) -> float:
        if isinstance(size, AttentionSize):
            return size.flops / (1e12 * self._attention_tflops(size))
        return size.flops / (1e12 * self._product_tflops(size, instruction))

    def _product_tflops(self, size: ProductSize, instruction: Instruction) -> float:
        """Return the achieved TFLOP/s of a product of this size."""
        dtype = "float8_e4m3fn" if size.dtype.startswith("f8") else _TABLE_DTYPES.get(size.dtype, "float32")
        # Triton kernels for experts have no `jax.lax.Precision`, and compute float32 in full.
        if dtype == "float32" and (_is_full_precision(instruction) or ROUTED_SHARE in instruction.attributes):
            return self._chip.peak_tflops.get("float32", 1.0) * assumptions.FULL_FLOAT32_EFFICIENCY
        figures, factor = self._figures_with("products")
        if dtype not in figures.products:  # the ratio of the peaks
            peaks = self._chip.peak_tflops
            factor *= peaks.get(dtype, peaks["bfloat16"]) / peaks["bfloat16"]
            dtype = "bfloat16"
        best_tflops = factor * figures.best_tflops * (math.inf if dtype != "bfloat16" else 1.0)
        return min(factor * _interpolate_product(figures.products[dtype], size, figures.best_tflops), best_tflops)

    def _figures_with(self, table: str) -> tuple[GpuFigures, float]:
        """Return the figures that have a table of speeds, and a factor for this chip's speeds."""
        if getattr(self._figures, table):
            return self._figures, 1.0
        fallback = known_chips()[assumptions.FALLBACK_CHIP].gpu
        assert fallback is not None
        factor = self._figures.best_tflops / fallback.best_tflops
        if factor != 1.0:
            self.notes[
                f"speeds of {table} on {self._chip.name} are those of {assumptions.FALLBACK_CHIP} times {factor:.2f}, "
                "the ratio of the fastest products"
            ] = None
        return fallback, factor

    def _attention_tflops(self, size: AttentionSize) -> float:
        figures, factor = self._figures_with("attention")
        tflops = interpolate(figures.attention, min(size.keys, size.window or size.keys))
        if size.is_backward:
            factor *= assumptions.ATTENTION_BACKWARD
        return factor * tflops * (assumptions.ATTENTION_NARROW if size.head_dim <= 64 else 1.0)


def interpolate(table: Mapping[int, float], size: float) -> float:
    """Interpolate a table of rates by size, both on logarithmic scales. Outside the table, the rate is constant."""
    points = sorted(table.items())
    size = min(max(size, points[0][0]), points[-1][0])
    for (low, low_rate), (high, high_rate) in itertools.pairwise(points):
        if size <= high:
            share = math.log(size / low) / math.log(high / low)
            return low_rate ** (1 - share) * high_rate**share
    return points[-1][1]


def _interpolate_product(table: Sequence[float], size: ProductSize, best_tflops: float) -> float:
    """Return the TFLOP/s of a product from a table for m, n and k in `PRODUCT_SIZES`, with k varying fastest.

    Below the smallest size of the table, its trend continues. Above the largest, the speed approaches `best_tflops`,
    which products of 8 times the FLOPs reach. A batch counts as a multiple of m.
    """
    sizes, count = assumptions.PRODUCT_SIZES, len(assumptions.PRODUCT_SIZES)
    dims = (size.batch * size.m, size.n, size.k)
    corners = []
    for dim in dims:
        inside = min(max(dim, 1), sizes[-1])
        low = max((i for i in range(count - 1) if sizes[i] <= inside), default=0)
        share = math.log(inside / sizes[low]) / math.log(sizes[low + 1] / sizes[low])
        corners.append(((low, 1 - share), (low + 1, share)))
    log_rate = sum(
        a * b * c * math.log(table[(i * count + j) * count + k])
        for (i, a), (j, b), (k, c) in itertools.product(*corners)
    )
    excess = math.prod(dims) / sizes[-1] ** 3
    if excess > 1 and min(dims) >= sizes[1] and (top := table[-1]) < best_tflops:
        log_rate += math.log(best_tflops / top) * min(math.log(excess, 8), 1.0)
    return math.exp(log_rate)


def _list_sizes(instructions: Iterable[Instruction]) -> Iterable[tuple[ProductSize | AttentionSize, Instruction]]:
    """Yield the products and attention calls among instructions, and in the fusions and calls that they run."""
    for instruction in instructions:
        if (size := product_size(instruction) or attention_size(instruction)) is not None:
            yield size, instruction
        elif instruction.opcode in ("fusion", "call"):
            yield from _list_sizes(i for c in instruction.called_computations for i in c.instructions)


def _is_full_precision(instruction: Instruction) -> bool:
    """Return whether a float32 product must not use TF32. It is a call of cuBLAS, or an instruction of a fusion."""
    if _HIGHEST_PRECISION in instruction.message.precision.operands:
        return True
    precision = instruction.backend_config.get("gemm_backend_config", {}).get("precision_config", {})
    return "HIGHEST" in precision.get("operand_precision", ())


def _copied_bytes(operation: Instruction) -> float:
    """Return the bytes of an array that is copied, or of the part of it that an operation slices or updates."""
    root = operation.called_computations[0].root if operation.opcode == "fusion" else operation
    if root is not None and root.opcode == "dynamic-update-slice":
        return root.operands[1].shape.bytes
    return min(array.bytes for array in (operation.shape, *(o.shape for o in operation.operands[:1])))


def _traffic_bytes(instruction: Instruction) -> float:
    """Return the bytes that an operation moves, without the scratch memory that cuBLAS and cuDNN return."""
    scratch = 0
    if instruction.custom_call_target.startswith(("__cublas", "__cudnn")) and instruction.shape.tuple_shapes:
        last = instruction.shape.tuple_shapes[-1]
        scratch = last.bytes if last.dtype in ("s8", "u8") else 0
    return hbm_bytes(instruction) - scratch
