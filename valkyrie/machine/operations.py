"""Computes the durations of operations other than collectives, from the compiler's cycles or from bytes and FLOPs.

The compiler's estimates of matrix products are used unchanged: 8192^3 in bfloat16 reaches 0.93 of peak on v4, 0.88 on
v5e, 0.90 on v5p, and 0.897 on v6e with 96 MiB of scoped VMEM, where 0.90 was measured (tpu-recipes). In ten train steps
hardly any estimate was shorter than the time to move the bytes at the full rate of HBM. Estimates of elementwise
operations are corrected (`ELEMENTWISE_FLOOR`). Products and kernels without an estimate run at most at the
chip's bfloat16 peak.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from valkyrie.compiled.flops import grouped_product_size, product_flops
from valkyrie.compiled.hbm import hbm_bytes, is_bandwidth_bound
from valkyrie.compiled.hlo import HBM, HOST, Computation, Instruction
from valkyrie.hardware.target import ChipConfig
from valkyrie.machine import assumptions
from valkyrie.machine.kernels import kernel_cost, routed_share
from valkyrie.machine.rows import add_seconds, gather_seconds, sort_seconds
from valkyrie.parts import PartKind

FREE_OPCODES = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "add-dependency",
    "partition-id",
    "replica-id",
    "opt-barrier",
    "domain",
    "async-update",
    "get-dimension-size",
}
_FREE_CUSTOM_CALLS = {"AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound", "Sharding", "SliceBitcast"}
_KERNEL_TARGET = "tpu_custom_call"
_UPDATE_OPCODE = "dynamic-update-slice"
_SCALAR_BYTES = 4096
"""Operations with a result below this size are assumed to run on the scalar unit and to take no time.

Does not apply to operations with an estimate, matrix products and kernels.
"""


@dataclass(frozen=True)
class OpCost:
    """Cost of an operation: kind of work, seconds on the device, and FLOPs of its matrix products."""

    kind: PartKind
    duration_s: float
    flops: float = 0.0


class OpCostModel:
    """Computes the costs of instructions on a chip. The keys of `notes` are the assumptions made so far.

    Raises ValueError if the chip's clock or HBM bandwidth is unknown.
    """

    has_fallback_branches = False

    def __init__(self, chip: ChipConfig, routing_imbalance: float = 1.0) -> None:
        if chip.clock_ghz is None or chip.hbm_gbs is None:
            missing = " and ".join(k for k in ("clock_ghz", "hbm_gbs") if getattr(chip, k) is None)
            raise ValueError(
                f"target.chip={chip.name} sets no {missing}, which a replay needs. Set {missing}, or use another chip."
            )
        self._chip, self._routing_imbalance = chip, routing_imbalance
        self._cores = chip.cores
        self._clock_hz = chip.clock_ghz * 1e9
        self._hbm_rate = chip.hbm_gbs * 1e9 / chip.devices
        self._peak_flops = chip.peak_tflops.get("bfloat16", 0.0) * 1e12 / chip.devices
        self._host_rate = chip.host_gbs * 1e9 / chip.devices
        self._cache: dict[Instruction, OpCost] = {}
        self.compute_slowdown = 1.0
        self.notes: dict[str, None] = {}

    def cost(self, instruction: Instruction) -> OpCost:
        """Return the cost of one execution of an operation that is not a collective, cached by instruction."""
        if instruction not in self._cache:
            self._cache[instruction] = self._cost(instruction)
        return self._cache[instruction]

    def background_cost(self, instruction: Instruction) -> tuple[float, str]:
        """Return the seconds that an asynchronous operation takes alone, and the link that it occupies.

        The link is `HBM`, `to host`, `from host`, or empty for operations other than copies.
        """
        if instruction.opcode == "copy-start":
            target, source = instruction.shape.leaves[:2]
            if HOST in (target.memory_space, source.memory_space):
                return target.padded_bytes / self._host_rate, "to host" if target.memory_space == HOST else "from host"
            return self._copy_cost(target.padded_bytes, (target.memory_space == HBM) + (source.memory_space == HBM))
        operations = [i for c in instruction.called_computations for i in leaf_instructions(c)]
        if operations and all(i.opcode in ("slice", "dynamic-slice", "copy", _UPDATE_OPCODE) for i in operations):
            moved_bytes = sum(
                (i.operands[1] if i.opcode == _UPDATE_OPCODE else i).shape.padded_bytes for i in operations
            )
            memories = {s.memory_space for i in operations for s in (i.shape, i.operands[0].shape)}
            if HOST in memories:
                destination = operations[-1].shape.memory_space
                return moved_bytes / self._host_rate, "to host" if destination == HOST else "from host"
            return self._copy_cost(moved_bytes, 1)
        return sum(self.cost(i).duration_s for i in operations), ""

    def _copy_cost(self, size: int, passes: int) -> tuple[float, str]:
        return size * max(passes, 1) / (self._hbm_rate * assumptions.HBM_EFFICIENCY), "HBM"

    def _cost(self, instruction: Instruction) -> OpCost:
        if instruction.opcode in FREE_OPCODES or instruction.custom_call_target in _FREE_CUSTOM_CALLS:
            return OpCost(PartKind.compute, 0.0)
        if instruction.custom_call_target == _KERNEL_TARGET:
            return self._kernel_cost(instruction)
        flops = product_flops(instruction)
        traffic_s = hbm_bytes(instruction) / (self._hbm_rate * assumptions.HBM_EFFICIENCY)
        if (grouped := grouped_product_size(instruction)) is not None:  # its cycles count every group for every row
            share, note = routed_share(instruction, self._routing_imbalance)
            self.notes[note] = None
            busy_s = grouped.flops / (self._peak_flops * assumptions.KERNEL_EFFICIENCY)
            return OpCost(PartKind.matmul, share * max(busy_s, traffic_s), share * grouped.flops)
        if instruction.cycles is not None:
            seconds = instruction.cycles / self._clock_hz
            if not flops and is_bandwidth_bound(instruction):
                seconds = min(seconds, max(traffic_s, seconds * assumptions.ELEMENTWISE_FLOOR))
            kind = PartKind.memory if traffic_s > seconds / 2 else PartKind.compute
            return OpCost(PartKind.matmul if flops else kind, seconds, flops)
        if flops:
            return OpCost(PartKind.matmul, max(flops / self._peak_flops, traffic_s), flops)
        if (rearranging_s := _rearranging_seconds(instruction, self._chip)) > 0:
            return OpCost(PartKind.memory, max(rearranging_s, traffic_s))
        if sum(leaf.bytes for leaf in instruction.shape.leaves) < _SCALAR_BYTES:
            return OpCost(PartKind.compute, 0.0)
        if instruction.opcode == "custom-call":
            self.notes[
                f"custom call {instruction.custom_call_target} has no cost estimate: only the time to move its bytes "
                "is counted"
            ] = None
        return OpCost(PartKind.memory, traffic_s)

    def _kernel_cost(self, instruction: Instruction) -> OpCost:
        kernel = kernel_cost(instruction, self._chip, self._routing_imbalance)
        if kernel.note:
            self.notes[kernel.note] = None
        if kernel.cycles is not None:
            # At most peak: bundles do not include waiting for a matrix unit.
            busy_s = max(kernel.cycles / self._cores / self._clock_hz, kernel.flops / self._peak_flops)
        else:
            busy_s = kernel.flops / (self._peak_flops * assumptions.KERNEL_EFFICIENCY)
        seconds = max(busy_s, kernel.bytes_accessed / (self._hbm_rate * assumptions.HBM_EFFICIENCY))
        return OpCost(PartKind.kernel, seconds, kernel.flops)


def _rearranging_seconds(instruction: Instruction, chip: ChipConfig) -> float:
    """Return the seconds of a sort, or of the gathers and sums of rows in a fusion. 0 for other operations."""
    if instruction.opcode == "sort":
        numbers = instruction.operands[0].shape
        return sort_seconds(float(numbers.element_count), chip, numbers.dims[instruction.message.dimensions[0]])
    bodies, seconds = instruction.called_computations if instruction.opcode == "fusion" else [], 0.0
    for i in (i for body in bodies for i in body.instructions):
        if i.opcode == "gather":
            width = math.prod(i.shape.dims[dim] for dim in i.message.gather.offset_dims)
            rows, itemsize = i.shape.element_count / max(width, 1), i.shape.bytes // max(i.shape.element_count, 1)
            seconds += gather_seconds(rows, float(width), itemsize, chip)
        elif i.opcode == "scatter":
            updates = i.operands[-1].shape
            width = math.prod(updates.dims[dim] for dim in i.message.scatter.update_window_dims)
            seconds += add_seconds(updates.element_count / max(width, 1), float(width), chip)
        elif i.opcode == "fusion":  # sums of rows are a fusion within a fusion
            seconds += _rearranging_seconds(i, chip)
    return seconds


def leaf_instructions(computation: Computation) -> list[Instruction]:
    """Return the operations of a computation that take time, including those in the calls that it makes."""
    leaves = []
    for i in computation.instructions:
        if i.opcode in ("call", "async-start"):
            leaves += [leaf for c in i.called_computations for leaf in leaf_instructions(c)]
        elif i.opcode not in FREE_OPCODES and not i.opcode.endswith(("-done", "-update")):
            leaves.append(i)
    return leaves
