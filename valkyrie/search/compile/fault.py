"""Record of a fault in the sharding of a program."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class FaultCode(Enum):
    """The kind of fault in a program's sharding."""

    whole_batch = "whole_batch"  # each device computes the whole batch in some products
    repeated_compute = "repeated_compute"  # several devices compute the same products
    unused_axis = "unused_axis"  # nothing is sharded over a mesh axis
    replicated_state = "replicated_state"  # large parameters or optimizer state are on every device
    gathered_batch = "gathered_batch"  # every device gathers the batch
    float32_gather = "float32_gather"  # arrays are gathered in float32, then converted to bfloat16
    all_reduce = "all_reduce"  # a sum is sent to all devices, although each uses only a part
    padding = "padding"  # products have dimensions below the width of the matrix unit


@dataclass(frozen=True, repr=False)
class Fault:
    """A fault in the sharding of a program, with its cost.

    Args:
        code: Kind of fault.
        text: Description, with the numbers that it is based on.
        remedy: What to change.
        source: Source line (`file:line`) to change. Empty if unknown, or if the fault does not concern one line.
        mesh_axes: Mesh axes that the fault concerns, if any.
        seconds: Estimated seconds of a step that the fault costs, or None if it costs no time.
        bytes: For `replicated_state`, the memory that sharding would save on one device. For faults of collectives,
            the superfluous bytes that a device sends per step. None for other faults.
    """

    code: FaultCode
    text: str
    remedy: str
    source: str = ""
    mesh_axes: tuple[str, ...] = ()
    seconds: float | None = None
    bytes: float | None = None

    def __str__(self) -> str:
        return f"{self.code.value}: {self.text} {self.remedy}"

    __repr__ = __str__  # so that a failed `assert not valkyrie.check(...)` prints the texts
