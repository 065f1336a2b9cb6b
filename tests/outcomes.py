"""Fake results of compiles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from valkyrie.compiled.memory import ProgramMemory
from valkyrie.hardware.chips import known_chips
from valkyrie.search.compile.prediction import Alternatives, CompiledStep, CompileOutcome, CompileStatus
from valkyrie.search.compile.summary import memory_report
from valkyrie.train.memory import ExpectedMemory

PROGRAM = ProgramMemory(arguments=960, outputs=900, aliased=900, temporary=4140, code=80, peak=5100, host=70)
STATE = ExpectedMemory(parameters=300, gradients=300, optimizer=600, ema=0, activations=0)
MEMORY = memory_report(known_chips()["v4"], PROGRAM, STATE)
STEP = CompiledStep(
    program="program",
    module_sha256="digest",
    lower_s=1.0,
    compile_s=2.0,
    options=(),
    memory=MEMORY,
    parameters=75,
    alternatives=Alternatives(),
    placement=("x=4 on torus b", "mesh.placement=[x,y,z]"),
    positions=(),
    axes={},
)


def fitting_outcome(peak: int | None = None, **fields: Any) -> CompileOutcome:
    """Return the result of a compile that fits.

    `peak` is the peak memory in bytes, by default that of `MEMORY`. `fields` replace fields of the `CompiledStep`.
    """
    step = replace(STEP, **fields)
    if peak is not None:
        step = replace(step, memory=replace(MEMORY, peak=peak, headroom=(MEMORY.usable or 0) - peak))
    return CompileOutcome(CompileStatus.ok, step=step)
