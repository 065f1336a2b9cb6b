"""The child process of a compile: builds the run's step for its target, compiles it, writes the outcome.

`python -m valkyrie.search.compile.child FOLDER PARENT [--anew]` reads FOLDER/run.yaml and writes FOLDER/outcome.json. A
program that is not in the cache, or any program with `--anew`, is compiled into FOLDER/KEY. This is a separate process
because the compiler of another chip may abort or never return. It exits and removes its folder when the process PARENT
has ended.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from valkyrie.checksums import digest
from valkyrie.config.modes import MODULE, TEXT, settings_for
from valkyrie.config.run import Run
from valkyrie.foreign_errors import (
    Allocation,
    first_lines,
    is_out_of_memory,
    parse_out_of_memory,
    parse_scratch_memory,
)
from valkyrie.hardware.platforms import Platform, platform_of
from valkyrie.hardware.target import topology_of, usable_hbm
from valkyrie.modes.compile import Config as CompileMode
from valkyrie.paths import write_atomic
from valkyrie.processes.ending import LOST, end_process
from valkyrie.records import write_record
from valkyrie.runs.folder import saved_config
from valkyrie.search.compile.cache import OUTCOME, PROGRAM, ProgramRecord, program_key, programs_folder, read_program
from valkyrie.search.compile.prediction import (
    Alternatives,
    CompiledStep,
    CompileOutcome,
    CompileStatus,
    MemoryReport,
)

if TYPE_CHECKING:
    import jax

    from valkyrie.train.options import Option
    from valkyrie.train.program import StepProgram

NEARLY = 1.1
"""Largest ratio of needed to available memory for which a program is compiled again with options that save some."""


def main() -> None:
    """Compile the run in the folder named by the first argument, for the process named by the second."""
    folder, parent = Path(sys.argv[1]), int(sys.argv[2])
    threading.Thread(target=_end_with, args=(parent, folder), daemon=True).start()
    write_record(folder / OUTCOME, _outcome(folder, anew="--anew" in sys.argv[3:]))


def _end_with(parent: int, folder: Path) -> None:
    """End this process once its parent has ended: a parent that was killed cannot stop the compiler or clean up."""
    while os.getppid() == parent:
        time.sleep(1)
    shutil.rmtree(folder, ignore_errors=True)
    end_process(LOST, "its parent is gone")


def _outcome(folder: Path, anew: bool) -> CompileOutcome:
    run = Run.from_config(saved_config(folder))
    try:
        target = run.config.target
        devices = platform_of(target.platform).compile_devices(target, run.config.mesh.size)
    except ValueError as error:
        return CompileOutcome(CompileStatus.refused, str(error))
    from valkyrie.train.options import OptionRefused

    try:
        return _compile(run, devices, folder, anew)
    except OptionRefused as error:
        return CompileOutcome(CompileStatus.refused, str(error))
    except Exception as error:  # compilers raise errors of many types
        text = str(error)
        reason = _about_scratch_memory(text) or f"{type(error).__name__}: {first_lines(text)}"
        return CompileOutcome(CompileStatus.failed, reason)


def _compile(run: Run, devices: list[Any], folder: Path, anew: bool) -> CompileOutcome:
    from valkyrie.parallel.mesh import build_mesh
    from valkyrie.search.compile.alternatives import fuller_layouts, other_partitions
    from valkyrie.search.compile.executable import device_positions, step_memory
    from valkyrie.train.program import StepProgram

    mesh = build_mesh(run.config.mesh, devices)
    program = StepProgram(run, mesh, backend=devices[0].platform)
    began = time.perf_counter()
    lowered = program.lower_step()
    lower_s = time.perf_counter() - began
    values = {option.name: str(option.value) for option in program.options}
    kind, positions = devices[0].device_kind, device_positions(mesh)
    key = program_key(lowered.as_text(debug_info=True), values, kind, positions)
    record = None if anew else read_program(programs_folder() / key, settings_for(CompileMode, run.config.mode).hlo)
    if record is None:
        (folder / key).mkdir()
        record = _compile_program(program, lowered, folder / key)
        write_record(folder / key / PROGRAM, record)
    if record.shortage is not None:
        return _too_large(run, record.shortage, record.reason)
    assert record.memory is not None and record.module_sha256 is not None
    needed, usable = record.memory.peak, usable_hbm(run.config.target.chip)
    if usable is not None and needed > usable:  # the user's limit is below the compiler's own
        needs, limit = (f"{size / 2**30:.2f} GiB" for size in (needed, usable))
        reason = f"its peak of {needs} exceeds the {limit} of target.chip.usable_hbm_gib"
        return _too_large(run, MemoryReport(needed=needed, usable=usable), reason)
    step = CompiledStep(
        program=key,
        module_sha256=record.module_sha256,
        lower_s=lower_s,
        compile_s=record.compile_s,
        options=record.options,
        memory=step_memory(program, record.memory),
        parameters=run.model.parameter_count(),
        alternatives=Alternatives(fuller_layouts(run), other_partitions(run)),
        placement=_placement(run, mesh),
        positions=positions,
        axes={str(name): int(size) for name, size in mesh.shape.items()},
    )
    return CompileOutcome(CompileStatus.ok, step=step)


def _compile_program(program: StepProgram, lowered: jax.stages.Lowered, folder: Path) -> ProgramRecord:
    """Compile a lowered step into a folder. Raises the compiler's errors, except for lack of memory."""
    from valkyrie.search.compile.executable import program_memory
    from valkyrie.train.options import refusals_in_plain_words
    from valkyrie.train.program import serialised_module

    run, platform, began = program.run, platform_of(program.backend), time.perf_counter()
    try:
        with refusals_in_plain_words():
            compiled, options = within_memory(program.options, lowered.compile, platform)
    except Exception as error:
        if not is_out_of_memory(str(error)):
            raise
        shortage = parse_shortage(str(error))
        seconds, reason = time.perf_counter() - began, first_lines(str(error))
        return ProgramRecord(seconds, tuple(program.options), shortage=shortage, reason=reason)
    seconds = time.perf_counter() - began
    peak = peak_beside_host(compiled, lowered.compile, options, platform)
    module = serialised_module(compiled)
    write_atomic(folder / MODULE, module)
    if settings_for(CompileMode, run.config.mode).hlo:
        write_atomic(folder / TEXT, compiled.as_text() or "")
    memory = program_memory(compiled, program.backend, peak)
    return ProgramRecord(seconds, tuple(options), memory, digest(module))


def within_memory(options: list[Option], compile: Callable[..., Any], platform: Platform) -> tuple[Any, list[Option]]:
    """Return the result of `compile`, and the options it used.

    If a TPU's compiler refuses a program that needs at most a tenth more memory than there is, the program is compiled
    again with options that save memory. If these do not help, the first error is raised.
    """
    from valkyrie.train.options import with_saving

    try:
        return compile(), options
    except Exception as error:
        found = parse_shortage(str(error))
        needed, usable = found.needed, found.usable
        saving = with_saving(options)
        if (
            not platform.memory_limit_option
            or saving == options
            or not needed
            or not usable
            or needed > NEARLY * usable
        ):
            raise
        try:
            values = {option.name: option.value for option in saving if option.value is not None}
            return compile(compiler_options=values), saving
        except Exception as again:
            if not is_out_of_memory(str(again)):
                raise
            raise error from None


def peak_beside_host(
    compiled: Any, compile: Callable[..., Any], options: list[Option], platform: Platform
) -> int | None:
    """Return the peak bytes on a device of a TPU program with arrays in host memory, or None for other programs.

    XLA reports one peak for both memories. With a limit of 1 MiB of device memory, `compile(compiler_options=...)`
    refuses the program in seconds and reports the bytes it needs, within 2% of those of a whole compile
    (experiments/LOG.md).
    """
    sizes, limit = compiled.memory_analysis(), platform.memory_limit_option
    if limit is None or sizes is None or not sizes.host_temp_size_in_bytes:
        return None
    values = {option.name: option.value for option in options if option.value is not None}
    try:
        compile(compiler_options=values | {limit: "1"})
    except Exception as error:
        if is_out_of_memory(str(error)) and (needed := parse_shortage(str(error)).needed):
            return min(needed, platform.peak_bytes(sizes))
    return None


def _about_scratch_memory(text: str) -> str | None:
    """Explain a compiler's refusal of a kernel for its scratch memory, or return None for other messages."""
    used = parse_scratch_memory(text)
    if used is None:
        return None
    return (
        f"a kernel, {used.kernel or 'that XLA does not name'}, needs {used.needed_mib:g} MiB of the "
        f"{used.limit_mib:g} MiB of scratch memory (VMEM) of a core. "
        "No layout helps: another model.attention.head_dim may, or a larger "
        "target.chip.xla_options.xla_tpu_scoped_vmem_limit_kib."
    )


def _placement(run: Run, mesh: jax.sharding.Mesh) -> tuple[str, ...]:
    """Return a line for each mesh axis with its place on the torus, and the setting for another placement."""
    if not platform_of(run.config.target.platform).has_torus:
        return ()
    from valkyrie.parallel.placement import describe_placement, placement_of, placements

    topology = topology_of(run.config.target)
    lines = [f"{name}={axis}" for name, axis in describe_placement(mesh, topology).items() if axis.size > 1]
    chosen, count = placement_of(mesh, topology), len(placements(run.config.mesh.axes, topology))
    if chosen is not None:
        lines.append(f"mesh.placement=[{','.join(chosen)}], one of {count} on this torus")
    return tuple(lines)


def parse_shortage(text: str) -> MemoryReport:
    """Parse a compiler's error for a program that needs more memory than there is."""
    found = parse_out_of_memory(text)
    return MemoryReport(needed=found.needed, usable=found.usable, largest=found.largest)


def _too_large(run: Run, shortage: MemoryReport, reason: str | None) -> CompileOutcome:
    """Return the outcome of a program that needs more memory than there is, with the layouts that need less."""
    from valkyrie.search.compile.alternatives import cheaper_layouts

    missing = (shortage.needed or 0) - (shortage.usable or 0)
    full = replace(shortage, largest=_largest(run, shortage), savings=cheaper_layouts(run, missing))
    return CompileOutcome(CompileStatus.does_not_fit, reason, shortage=full)


def _largest(run: Run, shortage: MemoryReport) -> tuple[Allocation, ...]:
    """Return the largest allocations. If the compiler does not name them, estimates them from the run's shapes.

    The bytes that the compiler needs "for HLO temporaries" include the arguments (experiments/LOG.md).
    """
    if shortage.largest:
        return shortage.largest
    from valkyrie.parallel.mesh import abstract_mesh
    from valkyrie.train.memory import expected_memory
    from valkyrie.train.program import StepProgram

    program = StepProgram(run, abstract_mesh(run.config.mesh), backend="cpu")
    expected = expected_memory(run, program.abstract_state)
    resting = expected.parameters + expected.average + expected.optimizer
    temporaries = (shortage.needed or expected.total) - resting
    parts = {
        "parameters": expected.parameters + expected.average,
        "optimizer state": expected.optimizer,
        "gradients": expected.gradients,
        "activations and other temporaries": max(temporaries - expected.gradients, 0),
    }
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    return tuple(Allocation(size, name) for name, size in ordered)


if __name__ == "__main__":
    main()
