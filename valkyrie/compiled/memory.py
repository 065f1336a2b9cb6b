"""Memory of a compiled program. Imports neither JAX nor NumPy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ProgramMemory:
    """Bytes of one device that XLA counts for a compiled program.

    Args:
        arguments: Arguments of the program.
        outputs: Results of the program.
        aliased: Outputs that reuse the memory of arguments.
        temporary: What the peak holds in addition to arguments and outputs.
        code: Generated code. A TPU's peak does not include it.
        peak: Peak memory.
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
    def at_rest(self) -> int:
        """Bytes of arguments and outputs, those that share memory counted once."""
        return self.arguments + self.outputs - self.aliased
