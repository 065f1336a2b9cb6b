"""Compiles the training step, and reads its peak memory and the bytes that it sends."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from valkyrie.compiled.collectives import collective_uses
from valkyrie.compiled.communication import Communication, sum_communication
from valkyrie.compiled.hlo import parse_module
from valkyrie.config.run import Debug
from valkyrie.hardware.platforms import get_platform
from valkyrie.parallel.sharding import AnyMesh
from valkyrie.problems import first_line
from valkyrie.train.program import StepProgram, serialised_module
from valkyrie.train.state import TrainState
from valkyrie.units import GIB


class StepExecutable(NamedTuple):
    """A compiled training step.

    Args:
        advance: The function (state, batch) -> (state, metrics).
        compiled: The compiled program.
        compile_s: Seconds to lower and compile the step.
        peak_gib: Peak memory per device in GiB, or None if unknown.
    """

    advance: Any
    compiled: jax.stages.Compiled
    compile_s: float
    peak_gib: float | None

    def traffic(self, mesh: AnyMesh, say: Callable[[str], object]) -> Communication | None:
        """Return the bytes that a device sends per step, in total and by the mesh axes over which they are sent.

        If they cannot be read from the compiled program, reports the reason with `say` and returns None.
        """
        axes = {str(name): int(size) for name, size in mesh.shape.items()}
        try:
            return sum_communication(collective_uses(parse_module(serialised_module(self.compiled)), axes))
        except Exception as error:  # the format changes between versions of XLA; that must not end a training run
            say(f"the bytes sent by a step could not be read ({type(error).__name__}: {first_line(error)})")
            return None


def compile_step(program: StepProgram) -> StepExecutable:
    """Compile the training step, and record its compile time and peak memory.

    Under `debug=nans`, the `advance` of the result calls the jitted function instead of the compiled program, because
    JAX can rerun a jitted function op by op to find the NaN.
    """
    start_time = time.perf_counter()
    compiled = program.compile_step()
    compile_s, peak = time.perf_counter() - start_time, _peak_bytes(compiled, program.backend)
    step = _with_nan_checks(program.step) if program.run.config.debug is Debug.nans else compiled
    return StepExecutable(step, compiled, compile_s, None if peak is None else peak / GIB)


def _peak_bytes(compiled: jax.stages.Compiled, backend: str) -> int | None:
    sizes = compiled.memory_analysis()
    return None if sizes is None else get_platform(backend).peak_bytes(sizes)


def _with_nan_checks(step: Any) -> Any:
    """Wrap a step so that it runs under `jax.debug_nans`.

    The global setting does not suffice, because leaving any `jax.debug_nans` context resets it.
    """

    def advance(state: TrainState, batch: dict[str, jax.Array]) -> tuple[TrainState, dict[str, jax.Array]]:
        with jax.debug_nans(True):
            try:
                return step(state, batch)
            except FloatingPointError:
                with jax.disable_jit():  # runs loops op by op too, so that the error names an operation, not a scan
                    step(state, batch)
                raise

    return advance
