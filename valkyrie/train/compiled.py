"""The compiled step of a training: how it is called, and what its program tells."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from valkyrie.compiled.collectives import traffic
from valkyrie.compiled.communication import Communication, sum_communication
from valkyrie.compiled.hlo import parse
from valkyrie.config.run import Debug
from valkyrie.hardware.platforms import platform_of
from valkyrie.parallel.sharding import AnyMesh
from valkyrie.problems import first_line
from valkyrie.train.program import StepProgram, serialised_module
from valkyrie.train.state import TrainState
from valkyrie.units import GIB


class CompiledStep(NamedTuple):
    """The step as it is called, its program, the seconds it took to compile, and the memory of a device at its peak."""

    advance: Any
    program: jax.stages.Compiled
    compile_s: float
    hbm_gib: float | None

    def traffic(self, mesh: AnyMesh, say: Callable[[str], object]) -> Communication | None:
        """Return what one device sends in a step, read as `mode=compile` and `mode=measure` read it.

        None if the program cannot be read: `say` gets the reason, and the training goes on without it.
        """
        axes = {str(name): int(size) for name, size in mesh.shape.items()}
        try:
            return sum_communication(traffic(parse(serialised_module(self.program)), axes))
        except Exception as error:  # the program is XLA's, of whatever version: a training does not end for it
            why = first_line(error)
            say(f"the bytes that a step sends could not be read ({type(error).__name__}: {why})")
            return None


def compile_step(program: StepProgram) -> CompiledStep:
    """Return the compiled step. Under `debug=nans` it is called as one that JAX can take apart."""
    began = time.perf_counter()
    compiled = program.compile_step()
    seconds, peak = time.perf_counter() - began, _peak_bytes(compiled, program.backend)
    step = _checked(program.step) if program.run.config.debug is Debug.nans else compiled
    return CompiledStep(step, compiled, seconds, None if peak is None else peak / GIB)


def _peak_bytes(compiled: jax.stages.Compiled, backend: str) -> int | None:
    """Return the bytes of one device at the peak of a compiled step, by XLA's count, or None if unknown."""
    sizes = compiled.memory_analysis()
    return None if sizes is None else platform_of(backend).peak_bytes(sizes)


def _checked(step: Any) -> Any:
    """Return the step under `jax.debug_nans` itself: JAX forgets the global switch where such a context was left."""

    def advance(state: TrainState, batch: dict[str, jax.Array]) -> tuple[TrainState, dict[str, jax.Array]]:
        with jax.debug_nans(True):
            try:
                return step(state, batch)
            except FloatingPointError:
                with jax.disable_jit():  # takes loops apart too: what is named is one operation, not a scan
                    step(state, batch)
                raise

    return advance
