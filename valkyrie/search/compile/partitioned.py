"""A program before and after XLA partitions it, with the times of its replay."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from valkyrie.compiled.collectives import Collective, find_cause
from valkyrie.compiled.flops import MatrixProduct, list_products
from valkyrie.compiled.hlo import Instruction, Module
from valkyrie.compiled.whole import UnpartitionedProgram
from valkyrie.machine.replay import Replay
from valkyrie.parts import PartKind
from valkyrie.search.compile.prediction import MemoryReport


class Origin(NamedTuple):
    """Source line and name of a JAX operation, which are the same before and after partitioning.

    Only `whole_batch` matches operations by both: `gathered_batch` matches lines and shapes, `repeated_compute` lines.
    """

    source: str
    name: str


def find_origin(instruction: Instruction) -> Origin:
    """Return the source line and name of the JAX operation that an instruction comes from."""
    return make_origin(*find_cause(instruction))


def make_origin(op_name: str, source: str) -> Origin:
    """Return the source line and name of the JAX operation with this `op_name`."""
    return Origin(source, "/".join(op_name.split("/")[-2:]))


@dataclass(frozen=True)
class PartitionedProgram:
    """A program before and after partitioning.

    Args:
        unpartitioned: The program before partitioning.
        module: The compiled program of one device, or None if there is none.
        mesh_axes: Names and sizes of the mesh's axes.
        replay: Replay of the compiled program, or None if it was not replayed.
        memory: Memory of one device.
        replay_reduced: Replays the program with smaller collectives, without the correction of `replay`. Its argument
            returns the share of its bytes that a collective sends. None without a `replay`.
    """

    unpartitioned: UnpartitionedProgram
    module: Module | None
    mesh_axes: Mapping[str, int]
    replay: Replay | None
    memory: MemoryReport
    replay_reduced: Callable[[Callable[[Collective], float]], Replay] | None = None

    @property
    def step_s(self) -> float:
        """Predicted seconds of a step. 0 if unknown."""
        return self.replay.step_s if self.replay else 0.0

    @cached_property
    def device_count(self) -> int:
        """Number of devices in the mesh."""
        return math.prod(self.mesh_axes.values())

    def count_parts(self, mesh_axes: Iterable[str]) -> int:
        """Return the number of parts into which mesh axes split a dimension."""
        return math.prod(self.mesh_axes.get(axis, 1) for axis in mesh_axes)

    @cached_property
    def unpartitioned_by_origin(self) -> dict[Origin, list[Instruction]]:
        """Instructions of the program before partitioning, by the JAX operation that they come from."""
        by_origin: dict[Origin, list[Instruction]] = defaultdict(list)
        for instruction in self.unpartitioned.module.instructions.values():
            by_origin[find_origin(instruction)].append(instruction)
        return by_origin

    @cached_property
    def unpartitioned_products(self) -> list[MatrixProduct]:
        """Products of the program before partitioning, in order."""
        return list_products(self.unpartitioned.module, self.mesh_axes)

    @cached_property
    def local_products(self) -> list[MatrixProduct]:
        """Products of the compiled program of one device. Empty if there is no `module`."""
        return list_products(self.module, self.mesh_axes) if self.module else []

    @cached_property
    def flops_ratios(self) -> dict[str, float]:
        """FLOPs of products on all devices, relative to those before partitioning, by source line.

        Above 1 if several devices compute the same products.
        """
        whole_flops, local_flops = (
            _flops_by_source(group) for group in (self.unpartitioned_products, self.local_products)
        )
        return {
            line: self.device_count * flops / whole_flops[line]
            for line, flops in local_flops.items()
            if whole_flops.get(line)
        }

    def saved_seconds(self, share: Callable[[Collective], float]) -> float:
        """Return the seconds by which a step would be faster if collectives sent only a share of their bytes.

        Includes the time that other collectives gain because they share fewer links. Returns 0 without a replay.
        """
        if self.replay is None or self.replay_reduced is None:
            return 0.0
        return max(self.step_s - self.replay.correction * self.replay_reduced(share).step_s, 0.0)

    def sum_seconds(self, lines: Iterable[str], *kinds: PartKind, mesh_axes: Sequence[str] = ()) -> float:
        """Sum the seconds per step of operations of these kinds from these source lines.

        Waiting for communication counts only if it is over one of `mesh_axes`. Returns 0 without a replay.
        """
        lines, costs = set(lines), self.replay.costs if self.replay else []
        return sum(
            cost.seconds
            for cost in costs
            if cost.source in lines
            and cost.kind in kinds
            and (not cost.kind.has_mesh_axes or set(mesh_axes) & set(cost.mesh_axes))
        )


def _flops_by_source(group: Iterable[MatrixProduct]) -> dict[str, float]:
    flops: dict[str, float] = defaultdict(float)
    for product in group:
        # XLA drops the source of some products that it rewrites. Those of their producers would seem to repeat work.
        if product.instruction.op_name:
            flops[product.instruction.source] += product.flops
    return flops
