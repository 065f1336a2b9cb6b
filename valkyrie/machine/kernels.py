"""The cost of a Pallas kernel: its own estimate where it has one, else from its blocks and shapes."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from valkyrie.compiled.hbm import hbm_bytes
from valkyrie.compiled.hlo import Instruction
from valkyrie.compiled.loops import origin
from valkyrie.machine import assumptions

UNKNOWN_CHIP = "v5p"
"""The chip whose bundle counts stand for those of a chip that has none, which a note then says."""


@dataclass(frozen=True)
class KernelCost:
    """FLOPs of a kernel's products, bytes to and from HBM, cycles of one core (None: not known), and a note."""

    flops: float
    bytes: float
    cycles: float | None = None
    note: str = ""


def kernel_cost(instruction: Instruction, chip: str) -> KernelCost:
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


def _splash(instruction: Instruction, blocks: dict[str, Any], moved: float, chip: str) -> KernelCost:
    """Splash attention: products and cycles of every block of the mask that is not empty.

    A forward block does two products of block_q x block_kv x head size, a dkv block four (five where it makes dq too),
    a dq block three.
    """
    name = instruction.name
    part = "_dkv" if "_dkv" in name else "_dq" if "_dq" in name else ""
    rows, columns = blocks[f"block_q{part}"], blocks[f"block_kv{part}"]
    arrays = [o.shape.dims for o in instruction.operands if len(o.shape.dims) >= 3 and o.shape.dtype in ("bf16", "f32")]
    *outer, length, head_dim = arrays[0]
    fused = part == "_dkv" and len(instruction.shape.parts) == 3 and instruction.shape.parts[0].elements > 0
    products = {"": 2, "_dkv": 5 if fused else 4, "_dq": 3}[part]
    visited = _blocks_visited(instruction.operands[1])
    notes = []
    if chip not in assumptions.SPLASH_BUNDLES:
        notes.append(f"the cycles of splash attention on {chip} are not known: those of {UNKNOWN_CHIP} are taken")
    if visited is None:
        notes.append(f"the mask of {name} was not found: every block is counted")
        visited = length // rows * (arrays[1][-2] // columns)
    runs = math.prod(outer) * visited
    kind = {"": "forward", "_dkv": "dkv_dq" if fused else "dkv", "_dq": "dq"}[part]
    cycles = runs * _block_cycles(kind, rows * columns, head_dim, chip)
    return KernelCost(2.0 * products * rows * columns * head_dim * runs, moved, cycles, "; ".join(notes))


def _block_cycles(kind: str, logits: int, head_dim: int, chip: str) -> float:
    """Cycles of one core for a block of the mask, from the bundles libtpu makes of it."""
    known = assumptions.SPLASH_BUNDLES.get(chip, assumptions.SPLASH_BUNDLES[UNKNOWN_CHIP])
    small, large, wide = known[kind]
    per_area = (large - small) / 3
    per_lanes = wide - small
    area, lanes = logits / 512**2, -(-head_dim // 128)
    return small - per_area + area * (per_area + (lanes - 1) * per_lanes)


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
