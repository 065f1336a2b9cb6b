"""Reads programs compiled by XLA: memory per device, optimised module, and positions of the devices."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from valkyrie.compiled.memory import ProgramMemory
from valkyrie.hardware.platforms import argument_output_bytes, get_platform
from valkyrie.hardware.position import Position
from valkyrie.search.compile.prediction import MemoryReport
from valkyrie.search.compile.summary import memory_report
from valkyrie.train.program import StepProgram, serialised_module
from valkyrie.train.run_memory import expected_memory


@dataclass(frozen=True)
class CompiledProgram:
    """A compiled program.

    Args:
        module: Optimised module, serialised.
        memory: Memory on one device.
        positions: Positions of the mesh's devices, in the order of `mesh.devices.flat`.
        axes: Names and sizes of the mesh's axes, in order.
    """

    module: bytes
    memory: ProgramMemory
    positions: tuple[Position, ...]
    axes: dict[str, int]


def read_compiled_program(
    compiled: jax.stages.Compiled, mesh: jax.sharding.Mesh, peak: int | None = None
) -> CompiledProgram:
    """Read the module, memory and device positions of a compiled program.

    `peak`, in bytes, replaces XLA's own peak (see `program_memory`).
    """
    return CompiledProgram(
        module=serialised_module(compiled),
        memory=program_memory(compiled, mesh.devices.flat[0].platform, peak),
        positions=device_positions(mesh),
        axes={str(name): int(size) for name, size in mesh.shape.items()},
    )


def program_memory(compiled: jax.stages.Compiled, platform: str, peak: int | None = None) -> ProgramMemory:
    """Return the memory of a program on one device of a platform, as counted by XLA.

    `peak`, in bytes, replaces XLA's own peak, which may include host memory (`peak_without_host`).
    """
    sizes = compiled.memory_analysis()
    assert sizes is not None, "every backend that compiles for a mesh counts its memory"
    backend, code = get_platform(platform), sizes.generated_code_size_in_bytes
    peak = peak or backend.peak_bytes(sizes)
    host = sizes.host_argument_size_in_bytes + sizes.host_output_size_in_bytes - sizes.host_alias_size_in_bytes
    return ProgramMemory(
        arguments=sizes.argument_size_in_bytes,
        outputs=sizes.output_size_in_bytes,
        aliased=sizes.alias_size_in_bytes,
        temporary=max(peak - argument_output_bytes(sizes) - (code if backend.peak_has_code else 0), 0),
        code=code,
        peak=peak,
        host=host + sizes.host_temp_size_in_bytes,
    )


def step_memory(program: StepProgram, memory: ProgramMemory) -> MemoryReport:
    """Return the memory report of a compiled training step.

    The peak is split into parameters, optimizer state, gradients, activations with temporaries, and batch with results.
    """
    run = program.run
    return memory_report(run.config.target.chip, memory, expected_memory(run, program.abstract_state))


def device_positions(mesh: jax.sharding.Mesh) -> tuple[Position, ...]:
    """Return the positions of a mesh's devices, in the order of `mesh.devices.flat`."""
    return tuple(device_position(device) for device in mesh.devices.flat)


def device_position(device: Any) -> Position:
    """Return the position of a JAX device. Without coordinates on a torus, its id is the only coordinate."""
    coords = getattr(device, "coords", None)
    return Position(
        getattr(device, "slice_index", 0) or 0,
        tuple(coords) if coords is not None else (device.id,),
        getattr(device, "core_on_chip", 0) or 0,
    )


@contextlib.contextmanager
def without_cache() -> Iterator[None]:
    """Disable JAX's compilation cache in this context. It cannot load programs for devices that this machine lacks."""
    was_enabled = jax.config.jax_enable_compilation_cache  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", was_enabled)
        compilation_cache.reset_cache()
