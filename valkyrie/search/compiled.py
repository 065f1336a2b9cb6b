"""What is read from a program that XLA has compiled: its memory on one device, and its optimised module."""

from __future__ import annotations

import jax

from valkyrie.train.memory import expected_memory
from valkyrie.train.program import StepProgram


def compiled_memory(program: StepProgram, compiled: jax.stages.Compiled) -> dict[str, int]:
    """Return bytes on one device: what XLA says of the compiled step, and of that what follows from shapes.

    `parameters`, `optimizer` and `gradients` follow from shapes; `arguments`, `outputs`, `aliased` (outputs that lie
    where arguments did), `temporary` and `code` are XLA's.
    """
    expected = expected_memory(program.run, program.abstract_state)
    analysis = compiled.memory_analysis()
    assert analysis is not None, "every backend that compiles for a mesh counts its memory"
    return {
        "parameters": expected.parameters + expected.average,
        "optimizer": expected.optimizer,
        "gradients": expected.gradients,
        "arguments": analysis.argument_size_in_bytes,
        "outputs": analysis.output_size_in_bytes,
        "aliased": analysis.alias_size_in_bytes,
        "temporary": analysis.temp_size_in_bytes,
        "code": analysis.generated_code_size_in_bytes,
    }


def serialised_module(compiled: jax.stages.Compiled) -> bytes:
    """Return the optimised module as a serialised HloModuleProto."""
    executable = compiled.runtime_executable()
    assert executable is not None
    return executable.hlo_modules()[0].as_serialized_hlo_module_proto()
