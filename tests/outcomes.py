"""Outcomes of compiles with known numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from valkyrie.compiled.memory import ProgramMemory
from valkyrie.search.compile.prediction import (
    Alternatives,
    CompiledStep,
    CompileOutcome,
    CompileStatus,
    StepMemory,
)

PROGRAM = ProgramMemory(arguments=960, outputs=900, aliased=900, temporary=4140, code=80, peak=5100, host=70)
STEP = CompiledStep(
    program="program",
    module_sha256="digest",
    lower_s=1.0,
    compile_s=2.0,
    options=(),
    memory=StepMemory(parameters=300, optimizer=600, gradients=300, program=PROGRAM),
    parameters=75,
    alternatives=Alternatives(),
    device_kind="TPU v4",
    placement=("x=4 on torus b", "mesh.placement=[x,y,z]"),
    positions=(),
    axes={},
)


def fitting_outcome(peak: int | None = None, **fields: Any) -> CompileOutcome:
    """Return the outcome of a layout that fits, with other fields of its step."""
    memory = STEP.memory if peak is None else replace(STEP.memory, program=replace(PROGRAM, peak=peak))
    return CompileOutcome(CompileStatus.ok, step=replace(STEP, memory=memory, **fields))
