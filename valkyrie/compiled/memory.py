"""Memory of a compiled program. Does not import JAX or NumPy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ProgramMemory:
    """Memory of a compiled program in bytes per device, as counted by XLA.

    Args:
        arguments: Arguments of the program.
        outputs: Results of the program.
        aliased: Outputs that reuse the memory of arguments.
        temporary: Peak memory other than arguments, outputs and code.
        code: Generated code.
        peak: Peak memory, including the code except on TPUs.
        host: Bytes in host memory, or None if unknown.
    """

    arguments: int
    outputs: int
    aliased: int
    temporary: int
    code: int
    peak: int
    host: int | None = None

    @property
    def arguments_and_outputs(self) -> int:
        """Bytes of arguments and outputs. Memory that both share counts once."""
        return self.arguments + self.outputs - self.aliased
