"""Decides what a Pallas kernel costs: its own estimate where it has one, else its blocks and shapes."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from valkyrie.search import assumptions
from valkyrie.search.hlo import HBM, Instruction
from valkyrie.search.hlo_loops import origin


@dataclass(frozen=True)
class KernelCost:
    """FLOPs on the matrix unit, bytes to and from HBM, and what had to be assumed (empty where nothing)."""

    flops: float
    bytes: float
    efficiency: float
    note: str = ""


def kernel_cost(instruction: Instruction) -> KernelCost:
    """Return the work of a `tpu_custom_call`."""
    moved = hbm_bytes(instruction)
    config = instruction.config.get("custom_call_config", {})
    estimate = config.get("cost_estimate")
    if estimate:
        flops, bytes_ = float(estimate.get("flops", 0)), float(estimate.get("bytes_accessed", 0))
        return KernelCost(flops, bytes_ or moved, assumptions.KERNEL_EFFICIENCY)
    blocks = _splash_blocks(instruction)
    if blocks is not None:
        return _splash(instruction, blocks, moved)
    name = instruction.name.rstrip("0123456789.")
    note = f"kernel {name} states no cost: charged its bytes at HBM bandwidth and no FLOPs"
    return KernelCost(0.0, moved, assumptions.KERNEL_EFFICIENCY, note)


def hbm_bytes(instruction: Instruction) -> float:
    """Return the bytes an instruction reads and writes in HBM, once each; what lies on the chip costs nothing here."""
    shapes = [leaf for operand in instruction.operands for leaf in operand.shape.leaves]
    shapes += instruction.shape.leaves
    return float(sum(shape.padded_bytes for shape in shapes if shape.memory == HBM))


def _splash_blocks(instruction: Instruction) -> dict[str, Any] | None:
    metadata = instruction.attributes.get("kernel_metadata", "")
    if "splash" not in instruction.name or "block_q" not in metadata:
        return None
    outer = json.loads(metadata, strict=False)
    return json.loads(outer["xprof_metadata"])


def _splash(instruction: Instruction, blocks: dict[str, Any], moved: float) -> KernelCost:
    """Splash attention: products per block of the mask that is not empty.

    A forward block does two products of block_q x block_kv x head size, a dkv block four (five when it makes dq too),
    a dq block three.
    """
    name = instruction.name
    part = "_dkv" if "dkv" in name else "_dq" if "dq" in name else ""
    rows, columns = blocks[f"block_q{part}"], blocks[f"block_kv{part}"]
    products = {"": 2, "_dkv": 5 if blocks.get("use_fused_bwd_kernel", True) else 4, "_dq": 3}[part]
    queries = next(
        o.shape.dims
        for o in instruction.operands
        if o.shape.dims and len(o.shape.dims) >= 3 and o.shape.dtype in ("bf16", "f32")
    )
    *outer, length, head_dim = queries
    heads = math.prod(outer)
    mask = instruction.operands[1] if len(instruction.operands) > 1 else None
    visited = _blocks_visited(mask) if mask is not None else None
    per_head = visited if visited is not None else length // rows
    flops = 2.0 * products * rows * columns * head_dim * per_head * heads
    note = "" if visited is not None else f"the mask of {name} was not found: one block of keys per block of queries"
    efficiency = {
        "": assumptions.KERNEL_EFFICIENCY,
    }.get(part, assumptions.KERNEL_EFFICIENCY)
    return KernelCost(flops, moved, efficiency, note)


def _blocks_visited(mask: Instruction) -> float | None:
    """Blocks of a splash kernel's grid that its block mask does not skip, per head."""
    end = origin(mask)
    if end.opcode == "constant":
        values = bytes(end.message.literal.s8s)
        if len(values) == end.shape.elements:
            return sum(v != 0 for v in values) / max(end.shape.dims[0], 1)
    dims = end.shape.dims
    return float(math.prod(dims[1:])) if len(dims) == 3 else None
