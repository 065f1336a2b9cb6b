"""Child process that compiles a lowered program for a slice.

`python -m valkyrie.search.compile.program_child FOLDER PARENT` reads the files that `compile_program` writes to FOLDER.
It writes the compiled program to FOLDER/KEY, or FOLDER/outcome.json if the compile fails. It removes its folder and
exits when the process PARENT has ended.
"""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from valkyrie.checksums import digest
from valkyrie.compiled.schema import dump_class
from valkyrie.config.modes import MODULE_FILE
from valkyrie.foreign_errors import first_lines, is_out_of_memory
from valkyrie.hardware.platforms import get_platform
from valkyrie.paths import write_atomic
from valkyrie.records import read_record, write_record
from valkyrie.search.compile.cache import OUTCOME_FILE, PROGRAM_FILE, ProgramRecord
from valkyrie.search.compile.child import (
    compile_within_memory,
    exit_with_parent,
    explain_scratch_memory,
    parse_shortage,
    peak_without_host,
)
from valkyrie.search.compile.lowered import (
    DUMP_FOLDER,
    OPTIONS_FILE,
    REQUEST_FILE,
    STABLEHLO_FILE,
    ProgramRequest,
)
from valkyrie.search.compile.prediction import CompileOutcome, CompileStatus
from valkyrie.train.options import OptionRefusedError, explain_option_errors

_MORE_SCRATCH_MEMORY = 'Use smaller blocks in the kernel, or a larger options={"xla_tpu_scoped_vmem_limit_kib": ...}.'


def main() -> None:
    """Compile the program in the folder given by the first argument. The second is the id of the parent process."""
    folder, parent = Path(sys.argv[1]), int(sys.argv[2])
    threading.Thread(target=exit_with_parent, args=(parent, folder), daemon=True).start()
    compile_request(folder)


def compile_request(folder: Path) -> None:
    """Compile the program that the files in a folder describe, and write the result to the folder."""
    request = read_record(ProgramRequest, folder / REQUEST_FILE)
    try:
        record = _compile(request, folder)
    except OptionRefusedError as error:
        write_record(folder / OUTCOME_FILE, CompileOutcome(CompileStatus.refused, str(error)))
    except Exception as error:  # compilers raise errors of many types
        text = str(error)
        reason = explain_scratch_memory(text, _MORE_SCRATCH_MEMORY) or f"{type(error).__name__}: {first_lines(text)}"
        write_record(folder / OUTCOME_FILE, CompileOutcome(CompileStatus.failed, reason))
    else:
        write_record(folder / request.key / PROGRAM_FILE, record)


def _compile(request: ProgramRequest, folder: Path) -> ProgramRecord:
    from jax._src.interpreters import mlir
    from jaxlib import xla_client
    from jaxlib.mlir import ir

    from valkyrie.search.compile.executable import program_memory
    from valkyrie.train.program import serialised_module

    platform = get_platform(request.target.platform)
    by_id = {device.id: device for device in platform.devices_to_compile_for(request.target, len(request.devices))}
    devices = tuple(by_id[number] for number in request.devices)
    stablehlo, options = (folder / STABLEHLO_FILE).read_bytes(), (folder / OPTIONS_FILE).read_bytes()
    # JAX sets some options, such as the optimization level, on `CompileOptions` itself. They are in `options` already.
    non_overrides = {option.name for option in request.options} - set(request.overrides)

    def compile(compiler_options: dict[str, str] | None = None) -> Any:
        compile_options = xla_client.CompileOptions.ParseFromString(options)
        overrides = {k: v for k, v in (compiler_options or {}).items() if k not in non_overrides}
        dump = {"xla_dump_to": str(folder / DUMP_FOLDER), "xla_dump_hlo_as_proto": True}
        compile_options.env_option_overrides = list((dump | request.overrides | overrides).items())
        with mlir.make_ir_context():
            module, device_list = ir.Module.parse(stablehlo), xla_client.DeviceList(devices)
            client = devices[0].client
            return _Compiled(client.compile(module, executable_devices=device_list, compile_options=compile_options))

    start_time = time.perf_counter()
    try:
        with explain_option_errors(platform, in_python=True):
            compiled, used_options = compile_within_memory(list(request.options), compile, platform)
    except Exception as error:
        if not is_out_of_memory(str(error)):
            raise
        compile_s = time.perf_counter() - start_time
        shortage, reason = parse_shortage(str(error)), first_lines(str(error))
        record = ProgramRecord(compile_s, request.options, shortage=shortage, reason=reason)
        if (module := _read_dump(folder / DUMP_FOLDER)) is None:
            return record
        write_atomic(folder / request.key / MODULE_FILE, module)
        return replace(record, module_sha256=digest(module))
    compile_s = time.perf_counter() - start_time
    peak = peak_without_host(compiled, compile, used_options, platform)
    module = serialised_module(compiled)
    write_atomic(folder / request.key / MODULE_FILE, module)
    memory = program_memory(compiled, request.target.platform, peak)
    return ProgramRecord(compile_s, tuple(used_options), memory, digest(module))


def _read_dump(folder: Path) -> bytes | None:
    """Return the newest optimised module that XLA has written to a folder, serialised, or None if there is none."""
    files = sorted(folder.rglob("*.after_optimizations.hlo.pb"), key=lambda file: file.stat().st_mtime)
    return dump_class().FromString(files[-1].read_bytes()).module.SerializeToString() if files else None


@dataclass(frozen=True)
class _Compiled:
    """Gives an XLA executable the methods of `jax.stages.Compiled` that Valkyrie uses."""

    executable: Any

    def runtime_executable(self) -> Any:
        return self.executable

    def memory_analysis(self) -> Any:
        return self.executable.get_compiled_memory_stats()


if __name__ == "__main__":
    main()
