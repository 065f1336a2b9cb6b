"""The cost of a Pallas kernel: its own estimate where it has one, else from its blocks and shapes."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from valkyrie.compiled.hbm import hbm_bytes
from valkyrie.compiled.hlo import Instruction
from valkyrie.compiled.loops import origin
from valkyrie.hardware.chips import known_chips
from valkyrie.hardware.target import ChipConfig

UNKNOWN_CHIP = "v5p"
"""Fallback chip for kernel cycle counts. Adds a note to the report."""


@dataclass(frozen=True)
class KernelCost:
    """FLOPs of a kernel's products, bytes to and from HBM, cycles of one core (None: not known), and a note."""

    flops: float
    bytes: float
    cycles: float | None = None
    note: str = ""


def kernel_cost(instruction: Instruction, chip: ChipConfig) -> KernelCost:
    """Return the work of a `tpu_custom_call`; `note` says what had to be assumed, if anything."""
    moved = hbm_bytes(instruction)
    config = instruction.config.get("custom_call_config", {})
    estimate = config.get("cost_estimate")
    if estimate:
        flops, bytes_ = float(estimate.get("flops", 0)), float(estimate.get("bytes_accessed", 0))
        return KernelCost(flops, bytes_ or moved)
    blocks = _splash_blocks(instruction)
    if blocks is not None:
        return _splash(instruction, blocks, moved, chip)
    name = instruction.name.rstrip("0123456789.")
    return KernelCost(0.0, moved, None, f"kernel {name} states no cost: charged its bytes at HBM bandwidth, no FLOPs")


def _splash_blocks(instruction: Instruction) -> dict[str, Any] | None:
    metadata = instruction.attributes.get("kernel_metadata", "")
    if "splash" not in instruction.name or "block_q" not in metadata:
        return None
    outer = json.loads(metadata, strict=False)
    return json.loads(outer["xprof_metadata"])


def _splash(instruction: Instruction, blocks: dict[str, Any], moved: float, chip: ChipConfig) -> KernelCost:
    """Splash attention: products and cycles of every block of the mask that is not empty, and of stepping over others.

    A forward block does two products of block_q x block_kv x head size, a dkv block four (five where it makes dq too),
    a dq block three. The forward and the dq kernel go along rows of blocks, the dkv kernel down columns, for which the
    query heads of a group share one beginning and end.
    """
    name = instruction.name
    part = "_dkv" if "_dkv" in name else "_dq" if "_dq" in name else ""
    block_q, block_kv = blocks[f"block_q{part}"], blocks[f"block_kv{part}"]
    arrays = [o.shape.dims for o in instruction.operands if len(o.shape.dims) >= 3 and o.shape.dtype in ("bf16", "f32")]
    *outer, length, head_dim = arrays[0]
    *kv_outer, keys, _ = arrays[1]
    # dq comes once per column of blocks, in one more dimension than queries have.
    fused = part == "_dkv" and any(len(result.dims) > len(arrays[0]) for result in instruction.shape.parts)
    products = {"": 2, "_dkv": 5 if fused else 4, "_dq": 3}[part]
    mask = instruction.operands[1]
    visited = _blocks_visited(mask)
    notes = []
    if not chip.splash_bundles:
        notes.append(f"the cycles of splash attention on {chip.name} are not known: those of {UNKNOWN_CHIP} are taken")
    if visited is None:
        notes.append(f"the mask of {name} was not found: every block is counted")
        rows, columns = length // block_q, keys // block_kv
        visited = rows * columns
    else:
        rows, columns = mask.shape.dims[1:]
    heads = math.prod(outer)
    kind = {"": "forward", "_dkv": "dkv_dq" if fused else "dkv", "_dq": "dq"}[part]
    step, block, end = _cycles(kind, block_q, block_kv, head_dim, chip)
    ends = math.prod(kv_outer) * columns if part == "_dkv" else heads * rows
    cycles = heads * (rows * columns * step + visited * block) + ends * end
    return KernelCost(2.0 * products * block_q * block_kv * head_dim * heads * visited, moved, cycles, "; ".join(notes))


def _cycles(kind: str, block_q: int, block_kv: int, head_dim: int, chip: ChipConfig) -> tuple[float, float, float]:
    """Cycles of one core for a step of the grid, a block of the mask, and the ends of a row (dkv: column) of blocks."""
    bundles = (chip.splash_bundles or known_chips()[UNKNOWN_CHIP].splash_bundles)[kind]
    lanes = -(-head_dim // 128)
    step = _scaled(bundles.step, block_q / 512, 2, lanes)
    block = _scaled(bundles.block, block_q * block_kv / 512**2, 4, lanes)
    end = _scaled(bundles.ends, (block_kv if kind.startswith("dkv") else block_q) / 512, 2, lanes)
    return step, block, end


def _scaled(bundles: Sequence[int], size: float, large_size: int, lanes: int) -> float:
    """Bundles at a size (rows or area of a block, 1 at 512): a constant, a part by size, and one by size and lanes."""
    small, large, wide = bundles
    per_size = (large - small) / (large_size - 1)
    return small + (size - 1) * per_size + size * (lanes - 1) * (wide - small)


def _blocks_visited(mask: Instruction) -> float | None:
    """Blocks of a splash kernel's grid that its block mask (heads, rows, columns) does not skip, per head.

    Where each device takes its own mask out of those of all, the others wait for the one that skips least.
    """
    dims = mask.shape.dims
    if len(dims) != 3:
        return None
    end = origin(mask)
    if end.opcode == "fusion" and end.called[0].root is not None:
        end = origin(end.called[0].root)
    if end.opcode == "dynamic-slice":
        end = origin(end.operands[0])
    values = bytes(end.message.literal.s8s) if end.opcode == "constant" else b""
    if end.opcode == "constant" and not values:
        return 0.0 if end.shape.elements else None
    if len(values) == 1:
        return float(math.prod(dims[1:])) if values[0] else 0.0
    size = math.prod(dims)
    if values and len(values) % size == 0:
        masks = [values[i : i + size] for i in range(0, len(values), size)]
        return max(sum(v != 0 for v in mask) for mask in masks) / dims[0]
    return float(math.prod(dims[1:]))
