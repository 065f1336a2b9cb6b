"""What is read from a program that XLA has compiled: its memory on one device, its module, and where it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from valkyrie.hardware.platforms import at_rest, platform_of
from valkyrie.train.memory import expected_memory
from valkyrie.train.program import StepProgram, serialised_module


@dataclass(frozen=True)
class CompiledProgram:
    """A compiled program: its optimised module, its memory, and where the devices of its mesh lie.

    `memory`: XLA's bytes of one device, as `program_memory` names them. `positions`: of each device of the mesh,
    flattened, its slice, chip coordinates and core. `axes`: the mesh's names and sizes, in order.
    """

    module: bytes
    memory: dict[str, int]
    positions: list[list[Any]]
    axes: dict[str, int]
    device_kind: str


def compiled_program(
    compiled: jax.stages.Compiled, mesh: jax.sharding.Mesh, peak: int | None = None
) -> CompiledProgram:
    """Return what is read of a program compiled for a mesh, whoever wrote it; `peak` as `program_memory` takes it."""
    return CompiledProgram(
        module=serialised_module(compiled),
        memory=program_memory(compiled, mesh.devices.flat[0].platform, peak),
        positions=[device_position(device) for device in mesh.devices.flat],
        axes={str(name): int(size) for name, size in mesh.shape.items()},
        device_kind=mesh.devices.flat[0].device_kind,
    )


def program_memory(compiled: jax.stages.Compiled, platform: str, peak: int | None = None) -> dict[str, int]:
    """Return what XLA says a program compiled for a platform takes on one device, in bytes.

    `peak`: that of the device alone, where XLA's own number has host memory in it (`peak_beside_host`).
    Keys: `arguments`, `outputs`, `aliased` (outputs that lie where arguments did), `peak`, `temporary` (what the peak
    holds beside those), `code` (in a TPU's peak it is not), and `host`, which the program has in host memory.
    """
    sizes = compiled.memory_analysis()
    assert sizes is not None, "every backend that compiles for a mesh counts its memory"
    backend, code = platform_of(platform), sizes.generated_code_size_in_bytes
    peak = peak or backend.peak_bytes(sizes)
    resting = at_rest(sizes)
    host = sizes.host_argument_size_in_bytes + sizes.host_output_size_in_bytes - sizes.host_alias_size_in_bytes
    return {
        "arguments": sizes.argument_size_in_bytes,
        "outputs": sizes.output_size_in_bytes,
        "aliased": sizes.alias_size_in_bytes,
        "temporary": max(peak - resting - (code if backend.peak_has_code else 0), 0),
        "code": code,
        "peak": peak,
        "host": host + sizes.host_temp_size_in_bytes,
    }


def compiled_memory(program: StepProgram, compiled: jax.stages.Compiled, peak: int | None = None) -> dict[str, int]:
    """Return bytes on one device: what XLA says of the compiled step, and of that what follows from shapes.

    `parameters`, `optimizer` and `gradients` follow from shapes; the others are those of `program_memory`.
    """
    expected = expected_memory(program.run, program.abstract_state)
    return {
        "parameters": expected.parameters + expected.average,
        "optimizer": expected.optimizer,
        "gradients": expected.gradients,
        **program_memory(compiled, program.backend, peak),
    }


def device_position(device: Any) -> list[Any]:
    """Return where a device lies: its slice, its chip's coordinates (of a device without any, its id), its core."""
    coords = getattr(device, "coords", None)
    return [
        getattr(device, "slice_index", 0) or 0,
        list(coords) if coords is not None else [device.id],
        getattr(device, "core_on_chip", 0) or 0,
    ]


@contextlib.contextmanager
def without_cache() -> Iterator[None]:
    """Compile anew: what was compiled for absent devices cannot be read back from JAX's cache on disk."""
    before = jax.config.jax_enable_compilation_cache  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()
