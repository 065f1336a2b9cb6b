"""Compiles lowered programs in a child process, with the compile cache.

The child passes XLA the same StableHLO and the same serialised options as JAX would in this process, so that the result
is that of `lowered.compile()`.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import functools
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from valkyrie.checksums import digest
from valkyrie.compiled.hlo import Frame, Module, user_frames
from valkyrie.config.modes import MODULE_FILE
from valkyrie.hardware.platforms import get_platform
from valkyrie.hardware.target import TargetConfig
from valkyrie.parallel.slice import Slice
from valkyrie.paths import cache_problem, write_atomic
from valkyrie.processes.child import ChildProcess, module_command
from valkyrie.records import RecordError, read_record, write_record
from valkyrie.search.compile.cache import (
    OUTCOME_FILE,
    PROGRAM_FILE,
    ProgramRecord,
    program_key,
    programs_folder,
    read_program,
    store_program,
)
from valkyrie.search.compile.prediction import CompileOutcome
from valkyrie.search.compile.runner import Progress, run_compiler
from valkyrie.train.options import Option

if TYPE_CHECKING:
    import jax

STABLEHLO_FILE, OPTIONS_FILE, REQUEST_FILE = "program.mlirbc", "options.pb", "request.json"
"""Files that the child process reads: the program, its `CompileOptions`, and a `ProgramRequest`."""
DUMP_FOLDER = "dump"
"""Folder where XLA writes the optimised module, even if the program does not fit."""
LOCATIONS_FILE = "locations.json"
"""File of a cached program with the `SourceLocations` of its StableHLO."""
_DEFINITION = re.compile(r"^#loc(\d*) = loc\((.*)\)$", re.MULTILINE)
_REFERENCE = re.compile(r"#loc(\d*)\b")
_LINE = re.compile(r'"([^"\n]*)":(\d+):\d+')
_NAME = re.compile(r'"((?:[^"\\]|\\.)*)"(?!:\d)')


Stack = tuple[str, ...]
"""Source lines (`file:line`) of an operation, from the innermost function to its callers."""


@dataclass(frozen=True)
class LoweredProgram:
    """The input of XLA's compiler.

    Args:
        stablehlo: Lowered module as MLIR bytecode.
        text: The same module as text, with debug information.
        options: `CompileOptions` as a serialised proto, without `overrides`.
        overrides: Compiler options by name.
        devices: Ids of the devices, in the order of the device assignment.
    """

    stablehlo: bytes
    text: str
    options: bytes
    overrides: dict[str, str | int | float | bool]
    devices: tuple[int, ...]


@dataclass(frozen=True)
class ProgramRequest:
    """Contents of `request.json`.

    The child process that compiles a program reads it together with the StableHLO and the serialised `CompileOptions`.

    Args:
        key: Key of the program in the cache.
        target: The slice.
        options: Compiler options of the user.
        overrides, devices: As in `LoweredProgram`.
    """

    key: str
    target: TargetConfig
    options: tuple[Option, ...]
    overrides: dict[str, str | int | float | bool]
    devices: tuple[int, ...]


@dataclass(frozen=True)
class SourceLocations:
    """Source lines of the operations of a program.

    Args:
        frames: Distinct stacks.
        operations: Index in `frames` for each operation, in order.
    """

    frames: tuple[Stack, ...]
    operations: tuple[int, ...]

    def map_stacks_to(self, other: SourceLocations) -> dict[Stack, Stack]:
        """Return a dict from old to new stacks, where `other` is a new lowering of the program.

        Returns {} if all are the same.
        """
        stacks: dict[Stack, Stack] = {}
        for old, new in dict.fromkeys(zip(self.operations, other.operations, strict=False)):
            if self.frames[old] and other.frames[new]:
                stacks.setdefault(self.frames[old], other.frames[new])
        return stacks if any(old != new for old, new in stacks.items()) else {}


@dataclass(frozen=True)
class StoredProgram:
    """A compiled program in the cache, or in a temporary folder if the cache cannot be written.

    Args:
        record: Result of the compile.
        folder: Folder with the record and the optimised module, if there is one.
        cached: Whether the cache already had the program.
        current_stacks: Maps the stacks of operations when the module was stored to current ones. Empty if all are the
            same.
        note: Why the program is not in the cache, or None if it is.
    """

    record: ProgramRecord
    folder: Path
    cached: bool
    current_stacks: Mapping[Stack, Stack]
    note: str | None = None

    @property
    def module(self) -> bytes:
        """The optimised module, serialised. Raises FileNotFoundError if XLA did not write one."""
        return (self.folder / MODULE_FILE).read_bytes()

    def update_sources(self, module: Module) -> None:
        """Replace the stacks and source lines in a parsed module by the current ones."""
        for instruction in module.instructions.values() if self.current_stacks else ():
            if instruction.stack:
                lines = _update_stack(tuple(frame.line for frame in instruction.stack), self.current_stacks)
                instruction.stack = tuple(map(Frame, lines))
                instruction.source = user_frames(instruction.stack)[0].line


def _update_stack(stack: Stack, current_stacks: Mapping[Stack, Stack]) -> Stack:
    """Return the current lines of a stack in a compiled module.

    XLA joins the stack of an operation and those of the calls that it inlined, so each part is replaced.
    """
    lines: list[str] = []
    while stack:
        size = next((size for size in range(len(stack), 0, -1) if stack[:size] in current_stacks), 1)
        lines += current_stacks.get(stack[:size], stack[:size])
        stack = stack[size:]
    return tuple(lines)


def capture_program(lowered: jax.stages.Lowered, options: Mapping[str, str]) -> LoweredProgram | None:
    """Return what JAX would pass to XLA's compiler, or None if the program must be compiled in this process.

    This process must compile programs with Python callbacks, and all programs if JAX's internals have changed.
    """
    from jax._src.interpreters import mlir  # JAX has no public function that returns the options of a compile

    from valkyrie.search.compile.executable import without_cache

    lowering: Any = getattr(lowered, "_lowering", None)
    arguments = getattr(lowering, "compile_args", {})
    if "backend" not in arguments or arguments.get("host_callbacks") or arguments.get("keepalive"):
        return None
    lowering = copy.copy(lowering)
    lowering.compile_args = {**arguments, "backend": _RecordingBackend(arguments["backend"])}
    try:
        with without_cache():  # JAX would look for the program before it calls the recorder
            lowering.compile(compiler_options=dict(options) or None)
    except _CapturedCompile as captured:
        compile_options = captured.options
        overrides = dict(compile_options.env_option_overrides)
        compile_options.env_option_overrides = []  # serialised maps have no fixed order
        return LoweredProgram(
            mlir.module_to_bytecode(captured.module),
            captured.module.operation.get_asm(enable_debug_info=True),
            compile_options.SerializeAsString(),
            overrides,
            tuple(device.id for device in captured.devices),
        )
    return None


class _CapturedCompile(Exception):
    """Raised by `_RecordingBackend` in place of a compile, with its arguments."""

    def __init__(self, module: Any, options: Any, devices: Sequence[Any]) -> None:
        super().__init__()
        self.module, self.options, self.devices = module, options, devices


class _RecordingBackend:
    """A backend that raises `_CapturedCompile` when JAX compiles for it."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def compile_and_load(self, module: Any, executable_devices: Any, compile_options: Any) -> None:
        raise _CapturedCompile(module, compile_options, list(executable_devices))


def has_slice_devices(mesh: jax.sharding.Mesh, target: Slice) -> bool:
    """Return whether a mesh has the devices of `Slice.mesh`, in any order: equal topology, ids, positions and hosts."""
    from jaxlib import xla_client  # JAX has no public function that returns a topology's fingerprint

    def describe(devices: Sequence[Any]) -> object:
        attributes = ("id", "process_index", "coords", "core_on_chip", "slice_index")
        descriptions = sorted([str([getattr(device, name, None) for name in attributes]) for device in devices])
        return descriptions, xla_client.get_topology_for_devices(list(devices)).fingerprint()

    platform = get_platform(target.platform)
    platform.refuse_wrong_flags()
    devices = platform.devices_to_compile_for(target, mesh.size)
    return describe(list(mesh.devices.flat)) == describe(devices)


def is_cached(program: LoweredProgram, mesh: jax.sharding.Mesh, target: TargetConfig) -> bool:
    """Return whether the cache has the compiled program. The arguments are those of `compile_program`."""
    folder = programs_folder() / _make_key(program, mesh, target)[0]
    return read_program(folder) is not None and (folder / LOCATIONS_FILE).is_file()


def _make_key(program: LoweredProgram, mesh: jax.sharding.Mesh, target: TargetConfig) -> tuple[str, SourceLocations]:
    """Return the key of a program in the cache, and its source lines, which are not part of the key."""
    from valkyrie.search.compile.executable import device_positions

    settings = {name: repr(value) for name, value in program.overrides.items()}
    settings |= {"options": digest(program.options.hex()), "torus": f"{target.topology} {target.slices}"}
    text, locations = split_locations(program.text)
    kind = get_platform(target.platform).describe_device(mesh.devices.flat[0].device_kind, target.chip)
    return program_key(text, settings, kind, device_positions(mesh)), locations


def compile_program(
    program: LoweredProgram,
    mesh: jax.sharding.Mesh,
    target: TargetConfig,
    options: Sequence[Option],
    *,
    name: str,
    time_limit_s: float | int | None,
    progress: Progress,
) -> StoredProgram | CompileOutcome:
    """Compile a program in a child process, unless the cache has it.

    Returns a `CompileOutcome` with the reason if the compile fails or is stopped. A program that does not fit is a
    stored program without `record.memory`.

    Args:
        program: The program.
        mesh: Mesh of the program. It has the devices of the slice.
        target: The slice.
        options: Compiler options of the user.
        name: Name of the program, for the status line.
        time_limit_s: Time limit of the child process in seconds, or None for no limit.
        progress: Called about five times a second with a status line.
    """
    key, locations = _make_key(program, mesh, target)
    folder = programs_folder() / key
    if (cached_record := read_program(folder)) is not None:
        with contextlib.suppress(OSError, RecordError):
            current_stacks = read_record(SourceLocations, folder / LOCATIONS_FILE).map_stacks_to(locations)
            return StoredProgram(cached_record, folder, True, current_stacks)
    problem = cache_problem(programs_folder())
    is_writable = problem is None
    scratch = Path(tempfile.mkdtemp(prefix="compile.", dir=programs_folder() if is_writable else None))
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    request = ProgramRequest(key, plain_target(target), tuple(options), program.overrides, program.devices)
    try:
        write_record(scratch / REQUEST_FILE, request)
        write_atomic(scratch / STABLEHLO_FILE, program.stablehlo)
        write_atomic(scratch / OPTIONS_FILE, program.options)
        (scratch / key).mkdir()
        write_record(scratch / key / LOCATIONS_FILE, locations)
        command = module_command("valkyrie.search.compile.program_child", str(scratch), str(os.getpid()))
        platform, log = get_platform(target.platform), scratch / "compiler.log"
        result_files = (scratch / OUTCOME_FILE, scratch / key / PROGRAM_FILE)
        failure = run_compiler(
            ChildProcess(command, platform.compile_environment(), log),
            platform,
            time_limit_s,
            "time_limit_s",
            lambda elapsed: progress(f"compiling {name} for {target.name}: {elapsed:.0f} s"),
            lambda: any(file.is_file() for file in result_files),
        )
        if failure is None and result_files[0].is_file():
            failure = read_record(CompileOutcome, result_files[0])
        if failure is not None:
            return failure
        record = read_record(ProgramRecord, scratch / key / PROGRAM_FILE)
        if not is_writable:
            return StoredProgram(
                record, scratch / key, False, {}, f"{problem} The result of this compile is not cached."
            )
        # Source lines of an intact program in the cache are damaged, or this line would not be reached.
        store_program(scratch / key, folder, overwrite=cached_record is not None)
        return StoredProgram(record, folder, False, {})
    finally:
        if is_writable:
            shutil.rmtree(scratch, ignore_errors=True)


def plain_target(target: TargetConfig) -> TargetConfig:
    """Return a target, such as a `Slice`, as a plain `TargetConfig`."""
    return TargetConfig(**{field.name: getattr(target, field.name) for field in fields(TargetConfig)})


def _unescape(text: str) -> str:
    r"""Decode a string of MLIR, which writes the bytes of letters such as `é` as `\C3\A9`, and a backslash as two."""
    escapes = re.compile(rb"\\(\\|[0-9A-F]{2})")
    decoded = escapes.sub(lambda m: b"\\" if m[1] == b"\\" else bytes.fromhex(m[1].decode()), text.encode())
    return decoded.decode(errors="replace")


def split_locations(text: str) -> tuple[str, SourceLocations]:
    """Separate the text of StableHLO with debug information from its source lines. Returns (text, locations).

    The text keeps the names of operations. It does not depend on line numbers, on functions or on the callers of the
    program, so it can be part of a cache key.
    """
    definitions = {match[1]: match[2] for match in _DEFINITION.finditer(text)}
    frames: dict[tuple[str, ...], int] = {}
    operations: list[int] = []

    @functools.cache
    def read_stack(number: str) -> tuple[str, ...]:
        definition = definitions.get(number, "")
        if line := _LINE.match(definition):
            return (f"{_unescape(line[1])}:{line[2]}",)
        return tuple(frame for reference in _REFERENCE.findall(definition) for frame in read_stack(reference))

    @functools.cache
    def read_names(number: str) -> tuple[str, ...]:
        definition = definitions.get(number, "")
        references = _REFERENCE.findall(definition)
        is_frame = any(_LINE.match(definitions.get(reference, "")) for reference in references)
        if _LINE.match(definition) or definition.startswith("callsite(") or is_frame:
            return ()
        inner_names = tuple(name for reference in references for name in read_names(reference))
        return (name[1], *inner_names) if (name := _NAME.match(definition)) else inner_names

    def replace_reference(match: re.Match[str]) -> str:
        operations.append(frames.setdefault(read_stack(match[1]), len(frames)))
        return repr(read_names(match[1]))

    body = _REFERENCE.sub(replace_reference, _DEFINITION.sub("", text))
    return body.strip(), SourceLocations(tuple(frames), tuple(operations))
