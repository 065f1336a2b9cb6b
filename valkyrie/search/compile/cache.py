"""The compile cache: results by request, and programs by the compiler's input.

`compile/requests/KEY` holds the outcome of a run. This key covers the run's settings and all source code, so every edit
of the code changes the key. `compile/programs/KEY` holds a compiled program. This key covers the lowered StableHLO, the
devices, and the compiler's options, flags and version. After an edit that does not change the program, the run is
lowered again but not compiled again. This module does not import JAX, and the key of a request is computed without JAX.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from valkyrie.checksums import digest
from valkyrie.compiled.memory import ProgramMemory
from valkyrie.config.modes import HLO_TEXT_FILE, MODULE_FILE, SHAPING_KEYS
from valkyrie.config.run import Run
from valkyrie.hardware.platforms import platforms
from valkyrie.hardware.position import Position
from valkyrie.hardware.target import TargetConfig
from valkyrie.paths import cache_root, publish_folder, source_digest
from valkyrie.records import RecordError, read_record
from valkyrie.runs.folder import package_versions
from valkyrie.search.compile.prediction import CompileOutcome, MemoryReport
from valkyrie.train.options import Option

OUTCOME_FILE, PROGRAM_FILE = "outcome.json", "program.json"
"""Names of the files with the outcome of a request and with the `ProgramRecord` of a program."""

MAX_READ_OUTCOMES = 300
"""Maximum number of outcomes in the cache to read for the durations of earlier compiles."""

_PRICES = ("usd_per_hour", "usd_per_hour_source", "spot_usd_per_hour")
_UNUSED_CHIP_SETTINGS = ("estimate", "replay", "calibrated", "rented_as", "compile_time_ratio", *_PRICES)
"""Settings of a chip that affect neither the program nor its replay."""
_UNUSED_FLAG_PREFIXES = ("--xla_cpu_collective_call_", "--xla_force_host_platform_device_count", "--xla_dump_")
_COMPILER_PACKAGES = ("jax", *{package for platform in platforms() for package in platform.compiler_packages})
"""Packages with versions that are part of a program's key."""
_SOURCE_LOCATION_PATTERN = re.compile(r'"[^"\n]*":\d+:\d+(?: to (?:\d+)?:\d+)?')


@dataclass(frozen=True)
class ProgramRecord:
    """Result of compiling a program. A program that does not fit has a `shortage` and a `reason` instead of `memory`.

    Args:
        compile_s: Compile time in seconds.
        options: Compiler options.
        memory: Memory of the program on one device.
        module_sha256: Digest of the optimised module. None for a program that does not fit if XLA did not write it.
        shortage: Memory that the program needs, if it does not fit.
        reason: The compiler's message, if it does not fit.
    """

    compile_s: float
    options: tuple[Option, ...]
    memory: ProgramMemory | None = None
    module_sha256: str | None = None
    shortage: MemoryReport | None = None
    reason: str | None = None
    schema: int = 1

    def __post_init__(self) -> None:
        if (self.memory is None) == (self.shortage is None) or (self.memory and self.module_sha256 is None):
            raise ValueError("set either memory and module_sha256, or shortage")


def requests_folder() -> Path:
    """Return the folder that has one folder per request, with its outcome."""
    return cache_root() / "compile" / "requests"


def programs_folder() -> Path:
    """Return the folder that has one folder per compiled program."""
    return cache_root() / "compile" / "programs"


def request_key(run: Run) -> str:
    """Return a digest of everything that may affect a compile: settings, flags, versions and all source code."""
    return digest([program_settings(run), compiler_flags(), package_versions(), package_digest(run)])[:32]


def program_key(
    stablehlo: str,
    options: Mapping[str, str] | Iterable[tuple[str, str]],
    device_kind: str,
    positions: Iterable[Position],
    limits: Sequence[float | None] = (),
) -> str:
    """Return a digest of the compiler's input.

    `limits` are the limits by which a program compiled with other options may be kept instead.

    `stablehlo` is the lowered program with debug information. Names of operations are part of the key, because reports
    read them from the compiled module. Source locations are not, so reports on cached training steps may name old
    lines; `lowered.StoredProgram` corrects those of other programs.
    """
    compilers = {name: version for name, version in package_versions().items() if name in _COMPILER_PACKAGES}
    program = digest(_SOURCE_LOCATION_PATTERN.sub("", stablehlo))
    devices = [device_kind, *map(str, positions)]
    return digest([program, sorted(dict(options).items()), compiler_flags(), compilers, devices, limits])[:32]


def package_digest(run: Run) -> str:
    """Return a digest of the source code of this package and of the modules in `modules=`."""
    return source_digest(".", *run.config.modules)


def program_settings(run: Run) -> Mapping[str, object]:
    """Return the settings of a run that affect the compiled program, as plain values by key."""
    from omegaconf import OmegaConf

    values = OmegaConf.to_container(OmegaConf.structured(run.config), enum_to_str=True)
    assert isinstance(values, dict)
    return {key: values[key] for key in (*SHAPING_KEYS, "debug")} | {"target": target_settings(run.config.target)}


def target_settings(target: TargetConfig) -> Mapping[str, object]:
    """Return a target as plain values, without settings that affect neither the program nor its replay."""
    from omegaconf import OmegaConf

    values = OmegaConf.to_container(OmegaConf.structured(target), enum_to_str=True)
    assert isinstance(values, dict)
    chip = values["chip"]
    chip_settings = (
        None if chip is None else {name: value for name, value in chip.items() if name not in _UNUSED_CHIP_SETTINGS}
    )
    return {str(name): value for name, value in values.items()} | {"chip": chip_settings}


def compiler_flags() -> list[str]:
    """Return the flags in `XLA_FLAGS` and each `flags_variable`, sorted, without those that do not affect programs."""
    variables = ["XLA_FLAGS", *(platform.flags_variable for platform in platforms() if platform.flags_variable)]
    flags = " ".join(os.environ.get(variable, "") for variable in variables).split()
    return sorted(flag for flag in flags if not flag.startswith(_UNUSED_FLAG_PREFIXES))


def read_outcome(folder: Path, needs_hlo_text: bool = False) -> CompileOutcome | None:
    """Return the outcome of a request, or None if it is missing or damaged.

    Also returns None if the layout fits, but its program is not in the cache or, with `needs_hlo_text`, is not stored
    as text.
    """
    try:
        outcome = read_record(CompileOutcome, folder / OUTCOME_FILE)
    except (OSError, RecordError):
        return None
    if outcome.step is not None:
        program = read_program(programs_folder() / outcome.step.program, needs_hlo_text)
        if program is None or program.module_sha256 != outcome.step.module_sha256:
            return None
    return outcome


def earlier_compile_seconds(parameters: int, usable: int | None) -> list[float]:
    """Return how long the compiles in the cache took that fit and whose models have this number of parameters.

    Counts only chips with this usable memory, in bytes: compilers for other chips take another time.

    In seconds, with the lowering, the most recent first. A program that several requests share counts once. Reads at
    most `MAX_READ_OUTCOMES`. Returns an empty list if the cache cannot be read.
    """
    seconds: dict[str, float] = {}
    with contextlib.suppress(OSError):
        files = sorted(requests_folder().glob(f"*/{OUTCOME_FILE}"), key=lambda file: -file.stat().st_mtime)
        for file in files[:MAX_READ_OUTCOMES]:
            duration = _read_duration(file, file.stat().st_mtime_ns)
            if duration is not None and (duration.parameters, duration.usable) == (parameters, usable):
                seconds.setdefault(duration.program, duration.seconds)
    return [*seconds.values()]


class _Duration(NamedTuple):
    """Seconds that a compile took, with the number of parameters of its model and the usable memory of its chip."""

    program: str
    parameters: int | None
    usable: int | None
    seconds: float


@cache
def _read_duration(file: Path, mtime_ns: int) -> _Duration | None:
    """Return the duration of a compile from its outcome, or None if it did not fit. Cached until the file changes."""
    try:
        step = read_record(CompileOutcome, file).step
    except RecordError:
        return None
    if step is None:
        return None
    return _Duration(step.program, step.parameters, step.memory.usable, step.lower_s + step.compile_s)


def read_program(folder: Path, needs_hlo_text: bool = False) -> ProgramRecord | None:
    """Return the record of a compiled program, or None if the record or its module is missing or damaged.

    With `needs_hlo_text`, also returns None if the module is not stored as text too. A record of a program that does
    not fit may have no module.
    """
    try:
        program = read_record(ProgramRecord, folder / PROGRAM_FILE)
        if program.module_sha256 is not None:
            with (folder / MODULE_FILE).open("rb") as module:
                is_intact = hashlib.file_digest(module, "sha256").hexdigest() == program.module_sha256
            if not is_intact or (needs_hlo_text and not (folder / HLO_TEXT_FILE).is_file()):
                return None
    except (OSError, RecordError):
        return None
    return program


def store_program(scratch: Path, folder: Path, overwrite: bool) -> None:
    """Move a compiled program from `scratch` to `folder` in the cache.

    Without `overwrite`, keeps an intact program that `folder` already has and leaves `scratch` as it is, unless only
    `scratch` has the program as text. If two processes store the same program at once, one of the two remains.
    """
    if not overwrite and read_program(folder, needs_hlo_text=(scratch / HLO_TEXT_FILE).is_file()) is not None:
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    trash = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        with contextlib.suppress(FileNotFoundError):
            folder.rename(trash / "old")
        publish_folder(scratch, folder)
    finally:
        shutil.rmtree(trash, ignore_errors=True)
