"""Child process that compiles the step of a run for its target and writes the outcome.

`python -m valkyrie.search.compile.child FOLDER PARENT [--ignore-cache]` reads FOLDER/run.yaml and writes
FOLDER/outcome.json. It compiles the program into FOLDER/KEY, unless the cache has the program. `--ignore-cache`
compiles it in any case. This is a separate process, because compilers may abort or never return. It removes its folder
and exits when the process PARENT has ended.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from valkyrie.checksums import digest
from valkyrie.config.modes import HLO_TEXT_FILE, MODULE_FILE, settings_for
from valkyrie.config.run import Run
from valkyrie.foreign_errors import (
    Allocation,
    first_lines,
    is_out_of_memory,
    parse_out_of_memory,
    parse_scratch_memory,
)
from valkyrie.hardware.platforms import Platform, get_platform
from valkyrie.hardware.target import build_topology, usable_hbm
from valkyrie.modes.compile import Config as CompileMode
from valkyrie.paths import write_atomic
from valkyrie.processes.ending import EXIT_LOST, end_process
from valkyrie.records import write_record
from valkyrie.runs.folder import saved_config
from valkyrie.search.compile.cache import (
    OUTCOME_FILE,
    PROGRAM_FILE,
    ProgramRecord,
    program_key,
    programs_folder,
    read_program,
)
from valkyrie.search.compile.prediction import (
    Alternatives,
    CompiledStep,
    CompileOutcome,
    CompileStatus,
    MemoryReport,
)

if TYPE_CHECKING:
    import jax

    from valkyrie.machine.replay import Replay
    from valkyrie.train.options import Option
    from valkyrie.train.program import StepProgram

MAX_EXCESS = 1.1
"""Maximum ratio of needed to available memory for which a program is compiled again with options that save memory."""
NEARLY_FULL = 0.85
"""`compile_for_overlap` considers programs that need at least this share of the usable memory."""
NEGLIGIBLE_OVERLAP, MIN_EXPOSED = 0.1, 0.05
"""A program is compiled again for overlap if at most this share of communication overlaps, and if it waits for at least
this share of the step."""
_MORE_SCRATCH_MEMORY = (
    "Another layout does not help. Use a larger target.chip.xla_options.xla_tpu_scoped_vmem_limit_kib or, for a kernel "
    "of attention, another model.attention.head_dim."
)
"""Remedy for a kernel of our models that needs too much scratch memory."""


def main() -> None:
    """Compile the run in the folder given by the first argument. The second is the id of the parent process."""
    folder, parent = Path(sys.argv[1]), int(sys.argv[2])
    threading.Thread(target=exit_with_parent, args=(parent, folder), daemon=True).start()
    write_record(folder / OUTCOME_FILE, _compile_run(folder, ignore_cache="--ignore-cache" in sys.argv[3:]))


def exit_with_parent(parent: int, folder: Path) -> None:
    """Remove the folder and end this process when its parent has ended. A killed parent could not do this itself."""
    while os.getppid() == parent:
        time.sleep(1)
    shutil.rmtree(folder, ignore_errors=True)
    end_process(EXIT_LOST, "its parent process has ended")


def _compile_run(folder: Path, ignore_cache: bool) -> CompileOutcome:
    run = Run.from_config(saved_config(folder))
    try:
        target = run.config.target
        devices = get_platform(target.platform).devices_to_compile_for(target, run.config.mesh.size)
    except ValueError as error:
        return CompileOutcome(CompileStatus.refused, str(error))
    from valkyrie.train.options import OptionRefusedError

    try:
        return _compile_step(run, devices, folder, ignore_cache)
    except OptionRefusedError as error:
        return CompileOutcome(CompileStatus.refused, str(error))
    except Exception as error:  # compilers raise errors of many types
        text = str(error)
        reason = explain_scratch_memory(text, _MORE_SCRATCH_MEMORY) or f"{type(error).__name__}: {first_lines(text)}"
        return CompileOutcome(CompileStatus.failed, reason)


def _compile_step(run: Run, devices: list[Any], folder: Path, ignore_cache: bool) -> CompileOutcome:
    from valkyrie.parallel.mesh import build_mesh
    from valkyrie.search.compile.alternatives import fuller_remats, other_partitions
    from valkyrie.search.compile.executable import device_positions, step_memory
    from valkyrie.train.program import StepProgram

    mesh = build_mesh(run.config.mesh, devices)
    program = StepProgram(run, mesh, backend=devices[0].platform)
    start_time = time.perf_counter()
    with get_platform(program.backend).lowering_for(run.config.target.chip):
        lowered = program.lower_step()
    lower_s = time.perf_counter() - start_time
    values = {option.name: str(option.value) for option in program.options}
    platform, positions = get_platform(program.backend), device_positions(mesh)
    kind = platform.describe_device(devices[0].device_kind, run.config.target.chip)
    limits = (NEARLY_FULL, NEGLIGIBLE_OVERLAP, MIN_EXPOSED, usable_hbm(run.config.target.chip))
    key = program_key(lowered.as_text(debug_info=True), values, kind, positions, limits)
    record = (
        None if ignore_cache else read_program(programs_folder() / key, settings_for(CompileMode, run.config.mode).hlo)
    )
    if record is None:
        (folder / key).mkdir()
        record = _compile_program(program, lowered, folder / key)
        write_record(folder / key / PROGRAM_FILE, record)
    if record.shortage is not None:
        return _too_large_outcome(run, record.shortage, record.reason)
    assert record.memory is not None and record.module_sha256 is not None
    needed, usable = record.memory.peak, usable_hbm(run.config.target.chip)
    if usable is not None and needed > usable:  # the compiler's own limit can be higher, or missing
        needs, limit = (f"{size / 2**30:.2f} GiB" for size in (needed, usable))
        reason = f"{platform.memory_setting} allows {limit} per device, but the step needs {needs}"
        return _too_large_outcome(run, MemoryReport(needed=needed, usable=usable), reason)
    step = CompiledStep(
        program=key,
        module_sha256=record.module_sha256,
        lower_s=lower_s,
        compile_s=record.compile_s,
        options=record.options,
        memory=step_memory(program, record.memory),
        parameters=run.model.parameter_count(),
        alternatives=Alternatives(fuller_remats(run), other_partitions(run)),
        placement=_describe_placement(run, mesh),
        positions=positions,
        axes={str(name): int(size) for name, size in mesh.shape.items()},
    )
    return CompileOutcome(CompileStatus.ok, step=step)


def _compile_program(program: StepProgram, lowered: jax.stages.Lowered, folder: Path) -> ProgramRecord:
    """Compile a lowered step into a folder.

    If it needs too much memory, the record has a `shortage`. Other errors of the compiler are raised.
    """
    from valkyrie.search.compile.executable import program_memory
    from valkyrie.train.options import explain_option_errors
    from valkyrie.train.program import serialised_module

    run, platform, start_time = program.run, get_platform(program.backend), time.perf_counter()
    try:
        with explain_option_errors(platform):
            compiled, options = compile_within_memory(program.options, lowered.compile, platform)
            compiled, options = _overlap(program, compiled, options, lowered.compile)
    except Exception as error:
        if not is_out_of_memory(str(error)):
            raise
        shortage = parse_shortage(str(error))
        compile_s, reason = time.perf_counter() - start_time, first_lines(str(error))
        return ProgramRecord(compile_s, tuple(program.options), shortage=shortage, reason=reason)
    compile_s = time.perf_counter() - start_time
    peak = peak_without_host(compiled, lowered.compile, options, platform)
    module = serialised_module(compiled)
    write_atomic(folder / MODULE_FILE, module)
    if settings_for(CompileMode, run.config.mode).hlo:
        write_atomic(folder / HLO_TEXT_FILE, compiled.as_text() or "")
    memory = program_memory(compiled, program.backend, peak)
    return ProgramRecord(compile_s, tuple(options), memory, digest(module))


def _overlap(
    program: StepProgram, compiled: Any, options: list[Option], compile_fn: Callable[..., Any]
) -> tuple[Any, list[Option]]:
    """Apply `compile_for_overlap` to a compiled step, if its compiler writes a schedule that can be replayed."""
    import jax

    from valkyrie.compiled.hlo import parse_module
    from valkyrie.search.compile.executable import device_positions
    from valkyrie.search.compile.replayed import replay_on
    from valkyrie.train.program import serialised_module

    target, mesh = program.run.config.target, program.mesh
    assert isinstance(mesh, jax.sharding.Mesh)
    platform, usable = get_platform(target.platform), usable_hbm(target.chip)
    if platform.replay is None or usable is None:
        return compiled, options
    axes, positions = {str(name): int(size) for name, size in mesh.shape.items()}, device_positions(mesh)

    def replay_fn(compiled: Any) -> Replay:
        return replay_on(target, parse_module(serialised_module(compiled)), axes, positions)

    return compile_for_overlap(compiled, options, compile_fn, platform, usable, replay_fn)


def compile_within_memory(
    options: list[Option], compile_fn: Callable[..., Any], platform: Platform
) -> tuple[Any, list[Option]]:
    """Return the result of `compile_fn`, a function like `jax.stages.Lowered.compile`, and the options used.

    If the TPU compiler refuses a program that needs at most `MAX_EXCESS` times the available memory, compiles it again
    with options that save memory. If the program still does not fit, raises the first error. Other errors are raised.
    """
    from valkyrie.train.options import MEMORY_SAVING_OPTIONS, TO_FIT, add_options

    try:
        return compile_fn(), options
    except Exception as error:
        shortage = parse_shortage(str(error))
        needed, usable = shortage.needed, shortage.usable
        saving_options = add_options(options, MEMORY_SAVING_OPTIONS, TO_FIT)
        if (
            not platform.memory_limit_option
            or saving_options == options
            or not needed
            or not usable
            or needed > MAX_EXCESS * usable
        ):
            raise
        try:
            return compile_fn(compiler_options=option_values(saving_options)), saving_options
        except Exception as retry_error:
            if not is_out_of_memory(str(retry_error)):
                raise
            raise error from None


def compile_for_overlap(
    compiled: Any,
    options: list[Option],
    compile_fn: Callable[..., Any],
    platform: Platform,
    usable: int,
    replay_fn: Callable[[Any], Replay],
) -> tuple[Any, list[Option]]:
    """Compile a program that nearly fills the memory and overlaps no communication again, with `overlap_options`.

    Returns the faster of the two programs by replay and its options, or the first one if the other does not fit or
    does not compile.

    Args:
        compiled: The program, the result of `compile_fn` with `options`.
        options: Its options.
        compile_fn: A function like `jax.stages.Lowered.compile`.
        platform: Platform of the target.
        usable: Usable memory of a device, in bytes.
        replay_fn: Replays a compiled program.
    """
    from valkyrie.train.options import TO_OVERLAP, add_options

    def fits(program: Any) -> bool:
        return platform.peak_bytes(program.memory_analysis()) <= usable

    overlap_options = add_options(options, platform.overlap_options, TO_OVERLAP)
    sizes = compiled.memory_analysis()
    is_nearly_full = sizes is not None and platform.peak_bytes(sizes) >= NEARLY_FULL * usable
    if not is_nearly_full or overlap_options == options:
        return compiled, options
    first = replay_fn(compiled)
    busy_s, exposed_s = (sum(getattr(use, name) for use in first.collectives) for name in ("busy_s", "exposed_s"))
    if exposed_s < MIN_EXPOSED * first.step_s or exposed_s < (1 - NEGLIGIBLE_OVERLAP) * busy_s:
        return compiled, options
    try:
        second = compile_fn(compiler_options=option_values(overlap_options))
    except Exception:  # whatever it is, the first program is still good
        return compiled, options
    is_better = (fits(second) or not fits(compiled)) and replay_fn(second).step_s < first.step_s
    return (second, overlap_options) if is_better else (compiled, options)


def option_values(options: Iterable[Option]) -> dict[str, str]:
    """Return the values of compiler options by name, without removed options."""
    return {option.name: option.value for option in options if option.value is not None}


def peak_without_host(
    compiled: Any, compile_fn: Callable[..., Any], options: list[Option], platform: Platform
) -> int | None:
    """Return the peak device memory, in bytes, of a TPU program that keeps temporaries in host memory.

    XLA's own peak of such a program is the sum of device and host memory. This function compiles it again with a limit
    of 1 MiB of device memory. That fails within seconds, and the error reports the device memory that the program
    needs, within 2% of a complete compile (experiments/LOG.md). Returns None for other programs, for which XLA's peak
    is right, and if the error has no such number.

    `compiled` is the result of `compile_fn`, a function like `jax.stages.Lowered.compile`, with `options`.
    """
    sizes, limit = compiled.memory_analysis(), platform.memory_limit_option
    if limit is None or sizes is None or not sizes.host_temp_size_in_bytes:
        return None
    try:
        compile_fn(compiler_options=option_values(options) | {limit: "1"})
    except Exception as error:
        if is_out_of_memory(str(error)) and (needed := parse_shortage(str(error)).needed):
            return min(needed, platform.peak_bytes(sizes))
    return None


def explain_scratch_memory(text: str, remedy: str) -> str | None:
    """Explain an error about a kernel that needs too much scratch memory, or return None for other errors.

    `remedy` is what to change. It ends the explanation.
    """
    usage = parse_scratch_memory(text)
    if usage is None:
        return None
    return (
        f"kernel {usage.kernel or '(not named by XLA)'} needs {usage.needed_mib:g} MiB of scratch memory (VMEM), and "
        f"a core has {usage.limit_mib:g} MiB. {remedy}"
    )


def _describe_placement(run: Run, mesh: jax.sharding.Mesh) -> tuple[str, ...]:
    """Return lines that describe the position of each mesh axis on the torus, and the `mesh.placement` that sets it.

    Returns no lines on platforms without a torus.
    """
    if not get_platform(run.config.target.platform).has_torus:
        return ()
    from valkyrie.parallel.placement import describe_placement, find_placement, list_placements

    topology = build_topology(run.config.target)
    lines = [f"{name}={axis}" for name, axis in describe_placement(mesh, topology).items() if axis.size > 1]
    placement, count = find_placement(mesh, topology), len(list_placements(run.config.mesh.axes, topology))
    if placement is not None:
        lines.append(f"mesh.placement=[{','.join(placement)}] (possible placements on this torus: {count})")
    return tuple(lines)


def parse_shortage(text: str) -> MemoryReport:
    """Parse the compiler's out-of-memory error: bytes needed, bytes usable, and the largest allocations."""
    report = parse_out_of_memory(text)
    return MemoryReport(needed=report.needed, usable=report.usable, largest=report.largest)


def _too_large_outcome(run: Run, shortage: MemoryReport, reason: str | None) -> CompileOutcome:
    """Return the outcome of a program that needs too much memory, with changes that save memory."""
    from valkyrie.search.compile.alternatives import memory_savings

    missing_bytes = (shortage.needed or 0) - (shortage.usable or 0)
    report = replace(shortage, largest=_largest_allocations(run, shortage), savings=memory_savings(run, missing_bytes))
    return CompileOutcome(CompileStatus.does_not_fit, reason, shortage=report)


def _largest_allocations(run: Run, shortage: MemoryReport) -> tuple[Allocation, ...]:
    """Return the largest allocations as named by the compiler, or else estimated from the run's shapes.

    Temporaries are estimated as the needed bytes without parameters, optimizer state and gradients, because the
    compiler's bytes "for HLO temporaries" include the arguments (experiments/LOG.md).
    """
    if shortage.largest:
        return shortage.largest
    from valkyrie.parallel.mesh import abstract_mesh
    from valkyrie.train.program import StepProgram
    from valkyrie.train.run_memory import expected_memory

    program = StepProgram(run, abstract_mesh(run.config.mesh), backend="cpu")
    estimate = expected_memory(run, program.abstract_state)
    state_bytes = estimate.parameters + estimate.ema + estimate.optimizer
    temporaries = (shortage.needed or estimate.total) - state_bytes
    bytes_by_content = {
        "parameters": estimate.parameters + estimate.ema,
        "optimizer state": estimate.optimizer,
        "gradients": estimate.gradients,
        "activations and other temporaries": max(temporaries - estimate.gradients, 0),
    }
    ordered = sorted(bytes_by_content.items(), key=lambda item: -item[1])
    return tuple(Allocation(size, name) for name, size in ordered)


if __name__ == "__main__":
    main()
