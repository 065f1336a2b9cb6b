"""Cost of a Pallas kernel: its own cost estimate, a model of splash attention, or its HBM traffic alone."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from valkyrie.axes import GROUP_PADDING, ROUTED_SHARE
from valkyrie.compiled.hbm import hbm_bytes
from valkyrie.compiled.hlo import Instruction
from valkyrie.compiled.loops import find_origin
from valkyrie.hardware.chips import known_chips
from valkyrie.hardware.target import ChipConfig

FALLBACK_CHIP = "v5p"
"""Chip that provides cycle counts for chips without their own. A note in the report names it."""


@dataclass(frozen=True)
class KernelCost:
    """Cost of one run of a kernel on a device.

    Args:
        flops: FLOPs of its matrix products.
        bytes_accessed: Bytes that it reads from and writes to HBM.
        cycles: Cycles that the kernel takes on a single core, or None if unknown.
        note: Assumptions, or empty.
    """

    flops: float
    bytes_accessed: float
    cycles: float | None = None
    note: str = ""


def kernel_cost(instruction: Instruction, chip: ChipConfig, routing_imbalance: float = 1.0) -> KernelCost:
    """Return the cost of a `tpu_custom_call`, with a note about assumptions.

    Counts only the rows that are routed to the device (`ROUTED_SHARE`), times the imbalance, and the padding of groups.
    Uses the kernel's `cost_estimate` if it has one, else a model of splash attention (`_splash_cost`). For other
    kernels, only the HBM traffic is known: `flops` is 0.
    """
    hbm_traffic = hbm_bytes(instruction)
    config = instruction.backend_config.get("custom_call_config", {})
    estimate = config.get("cost_estimate")
    if estimate:
        flops, bytes_ = float(estimate.get("flops", 0)), float(estimate.get("bytes_accessed", 0))
        share, note = routed_share(instruction, routing_imbalance)
        return KernelCost(share * flops, share * (bytes_ or hbm_traffic), note=note)
    splash_kernel = _parse_splash_kernel(instruction)
    if splash_kernel is not None:
        return _splash_cost(instruction, splash_kernel, hbm_traffic, chip)
    name = instruction.name.rstrip("0123456789.")
    return KernelCost(
        0.0,
        hbm_traffic,
        None,
        f"kernel {name} has no cost estimate: only the time to move its bytes at HBM bandwidth is counted",
    )


def routed_share(instruction: Instruction, imbalance: float) -> tuple[float, str]:
    """Return the share of its rows that a product of groups of rows multiplies, and a note, empty for other kernels."""
    attributes = instruction.attributes
    if ROUTED_SHARE not in attributes:
        return 1.0, ""
    balanced_share, padding = float(attributes[ROUTED_SHARE]), float(attributes.get(GROUP_PADDING, 0))
    share = min(balanced_share * imbalance, 1.0) if balanced_share < 1 else 1.0
    note = "balanced routing to experts is assumed (target.routing_imbalance=1)"
    if imbalance > 1 and balanced_share < 1:
        note = f"the busiest device of an expert-parallel group has {imbalance:g} times its share of the tokens"
    return share + padding, note


class _SplashKernel(NamedTuple):
    """A splash attention kernel, and the numbers of queries and keys in one of its blocks.

    `suffix` is `_dkv`, `_dq`, or empty for the forward kernel.
    """

    suffix: str
    block_q: int
    block_kv: int


def _parse_splash_kernel(instruction: Instruction) -> _SplashKernel | None:
    name, metadata = instruction.name, instruction.attributes.get("kernel_metadata", "")
    if "splash" not in name or "block_q" not in metadata:
        return None
    sizes = json.loads(json.loads(metadata, strict=False)["xprof_metadata"])
    suffix = "_dkv" if "_dkv" in name else "_dq" if "_dq" in name else ""
    return _SplashKernel(suffix, sizes[f"block_q{suffix}"], sizes[f"block_kv{suffix}"])


def _splash_cost(
    instruction: Instruction, splash_kernel: _SplashKernel, hbm_traffic: float, chip: ChipConfig
) -> KernelCost:
    """Return the cost of splash attention.

    FLOPs count the blocks that the mask does not skip. Cycles also include a fixed cost per grid step (skipped blocks
    too) and per row of blocks.

    A visited block takes 2 matrix products of block_q x block_kv x head size in the forward kernel, 3 in dq, 4 in dkv,
    and 5 in a dkv that also computes dq. The dkv kernels iterate over columns instead of rows, and the cost per column
    is paid once per key/value head, not per query head.
    """
    suffix, block_q, block_kv = splash_kernel
    arrays = [o.shape.dims for o in instruction.operands if len(o.shape.dims) >= 3 and o.shape.dtype in ("bf16", "f32")]
    *outer_dims, query_count, head_dim = arrays[0]
    *kv_outer_dims, key_count, _ = arrays[1]
    # The fused kernel returns dq once per column of blocks, with one more dimension than the queries.
    is_fused = suffix == "_dkv" and any(len(result.dims) > len(arrays[0]) for result in instruction.shape.tuple_shapes)
    products_per_block = {"": 2, "_dkv": 5 if is_fused else 4, "_dq": 3}[suffix]
    mask = instruction.operands[1]
    visited_count = _count_visited_blocks(mask)
    notes = []
    if not chip.splash_bundles:
        notes.append(f"the cycles of splash attention on {chip.name} are unknown: those of {FALLBACK_CHIP} are used")
    if visited_count is None:
        notes.append(f"the mask of {instruction.name} was not found: every block is counted")
        rows, columns = query_count // block_q, key_count // block_kv
        visited_count = rows * columns
    else:
        rows, columns = mask.shape.dims[1:]
    heads = math.prod(outer_dims)
    kernel = {"": "forward", "_dkv": "dkv_dq" if is_fused else "dkv", "_dq": "dq"}[suffix]
    step_cycles, block_cycles, end_cycles = _splash_cycles(kernel, block_q, block_kv, head_dim, chip)
    end_count = math.prod(kv_outer_dims) * columns if suffix == "_dkv" else heads * rows
    cycles = heads * (rows * columns * step_cycles + visited_count * block_cycles) + end_count * end_cycles
    return KernelCost(
        2.0 * products_per_block * block_q * block_kv * head_dim * heads * visited_count,
        hbm_traffic,
        cycles,
        "; ".join(notes),
    )


def _splash_cycles(
    kernel: str, block_q: int, block_kv: int, head_dim: int, chip: ChipConfig
) -> tuple[float, float, float]:
    """Return cycles on one core for a grid step, for a block that the mask does not skip, and for the ends of a row.

    A row is a row of blocks; the dkv kernels go through columns instead. See `SplashBundles`.
    """
    bundles = (chip.splash_bundles or known_chips()[FALLBACK_CHIP].splash_bundles)[kernel]
    lanes = -(-head_dim // 128)
    step_cycles = _interpolate(bundles.step, block_q / 512, 2, lanes)
    block_cycles = _interpolate(bundles.block, block_q * block_kv / 512**2, 4, lanes)
    end_cycles = _interpolate(bundles.ends, (block_kv if kernel.startswith("dkv") else block_q) / 512, 2, lanes)
    return step_cycles, block_cycles, end_cycles


def _interpolate(bundles: Sequence[int], size: float, large_size: int, lanes: int) -> float:
    """Estimate the bundles for any block size and head size from the counts for three combinations.

    The model is a constant, plus a term proportional to `size`, plus a term proportional to `size * (lanes - 1)`.

    Args:
        bundles: Counts for (size, lanes) = (1, 1), (large_size, 1) and (1, 2).
        size: One side of the block / 512, or the area of the block / 512**2.
        large_size: `size` of the second count.
        lanes: Head size / 128, rounded up.
    """
    small_bundles, large_bundles, wide_bundles = bundles
    per_size = (large_bundles - small_bundles) / (large_size - 1)
    return small_bundles + (size - 1) * per_size + size * (lanes - 1) * (wide_bundles - small_bundles)


def _count_visited_blocks(mask: Instruction) -> float | None:
    """Return the number of blocks that a block mask (heads, rows, columns) does not skip, averaged over heads.

    If every device slices its mask from a constant, the device with the most blocks in all kernels of the computation
    counts, since the others wait. If the program computes the mask, all blocks count. Returns None if `mask` does not
    have three dimensions or is empty.
    """
    dims = mask.shape.dims
    if len(dims) != 3:
        return None
    counts = _visited_by_device(mask)
    if counts is None:
        return float(math.prod(dims[1:]))
    others = [
        _visited_by_device(kernel.operands[1]) if _parse_splash_kernel(kernel) else None
        for kernel in mask.computation.instructions
        if kernel.opcode == "custom-call"
    ]
    totals = [sum(each) for each in zip(*(o for o in others if o and len(o) == len(counts)), strict=True)] or counts
    return counts[max(range(len(counts)), key=totals.__getitem__)] if counts else None


def _visited_by_device(mask: Instruction) -> list[float] | None:
    """Return how many blocks each device that slices its mask from a constant does not skip, averaged over heads.

    There is one entry if all devices have the same mask, and none if the mask is empty. None: the program computes it.
    """
    dims = mask.shape.dims
    if len(dims) != 3:
        return None
    producer = find_origin(mask)
    if producer.opcode == "fusion" and producer.called_computations[0].root is not None:
        producer = find_origin(producer.called_computations[0].root)
    if producer.opcode == "dynamic-slice":
        producer = find_origin(producer.operands[0])
    values = bytes(producer.message.literal.s8s) if producer.opcode == "constant" else b""
    if producer.opcode == "constant" and not values:
        return [0.0] if producer.shape.element_count else []
    if len(values) == 1:
        return [float(math.prod(dims[1:])) if values[0] else 0.0]
    size = math.prod(dims)
    if values and len(values) % size == 0:
        masks = [values[i : i + size] for i in range(0, len(values), size)]
        return [sum(v != 0 for v in mask) / dims[0] for mask in masks]
    return None
