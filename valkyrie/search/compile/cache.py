"""The compile cache: results by request, and programs by the compiler's input.

`compile/requests/KEY` holds the outcome of a run. Its key covers the run's settings and all source code, so it is found
without JAX but changes with every edit. `compile/programs/KEY` holds a compiled program. Its key covers the lowered
StableHLO, the compiler's options, flags and version, and the devices, so an edit that does not change the program finds
it after lowering. Imports no JAX.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from valkyrie.checksums import digest
from valkyrie.compiled.memory import ProgramMemory
from valkyrie.config.modes import MODULE, SHAPING_KEYS, TEXT
from valkyrie.config.run import Run
from valkyrie.hardware.position import Position
from valkyrie.hardware.target import TargetConfig
from valkyrie.paths import cache_root, publish_folder, source_digest
from valkyrie.records import RecordError, read_record
from valkyrie.runs.folder import versions
from valkyrie.search.compile.prediction import CompileOutcome, MemoryReport
from valkyrie.train.options import Option

OUTCOME, PROGRAM = "outcome.json", "program.json"
"""File of a request with its outcome, and file of a program with its `ProgramRecord`."""

_NO_PROGRAM = ("estimate", "replay", "calibrated", "rented_as", "usd_per_hour", "spot_usd_per_hour")
"""Settings of a chip that do not change a program or its replay."""
_NO_COMPILER_FLAGS = ("--xla_cpu_collective_call_", "--xla_force_host_platform_device_count", "--xla_dump_")
_COMPILERS = ("jax", "jaxlib", "libtpu")
"""Packages that compile StableHLO. Their versions are part of a program's key."""
_SOURCE_PLACE = re.compile(r'"[^"\n]*":\d+:\d+(?: to (?:\d+)?:\d+)?')


@dataclass(frozen=True)
class ProgramRecord:
    """The compiler's result for a program: its memory and module, or the shortage of memory.

    `compile_s` is the compile time in seconds. A program that does not fit has a `shortage` and a `reason`, but no
    memory and no module.
    """

    compile_s: float
    options: tuple[Option, ...]
    memory: ProgramMemory | None = None
    module_sha256: str | None = None
    shortage: MemoryReport | None = None
    reason: str | None = None
    schema: int = 1

    def __post_init__(self) -> None:
        if (self.memory is None) == (self.shortage is None) or (self.memory is None) != (self.module_sha256 is None):
            raise ValueError("either memory and module_sha256 or a shortage is needed")


def requests_folder() -> Path:
    """Return the folder of outcomes by request."""
    return cache_root() / "compile" / "requests"


def programs_folder() -> Path:
    """Return the folder of compiled programs."""
    return cache_root() / "compile" / "programs"


def request_key(run: Run) -> str:
    """Return a digest of everything that may decide a compile: settings, flags, versions and all source code."""
    return digest([program_settings(run), compiler_flags(), versions(), package_digest(run)])[:32]


def program_key(
    stablehlo: str,
    options: Mapping[str, str] | Iterable[tuple[str, str]],
    device_kind: str,
    positions: Iterable[Position],
) -> str:
    """Return a digest of the compiler's input.

    `stablehlo` is the lowered program with debug information. Names of operations count, because reports read them from
    the compiled module. Source locations do not, so a report on a cached program may name lines that have moved since.
    """
    compilers = {name: version for name, version in versions().items() if name in _COMPILERS}
    program = digest(_SOURCE_PLACE.sub("", stablehlo))
    devices = [device_kind, *map(str, positions)]
    return digest([program, sorted(dict(options).items()), compiler_flags(), compilers, devices])[:32]


def package_digest(run: Run) -> str:
    """Return a digest of the package's source code and of the run's own modules."""
    return source_digest(".", *run.config.modules)


def program_settings(run: Run) -> Mapping[str, object]:
    """Return the settings of a run that decide the compiled program, as plain values by key."""
    from omegaconf import OmegaConf

    values = OmegaConf.to_container(OmegaConf.structured(run.config), enum_to_str=True)
    assert isinstance(values, dict)
    return {key: values[key] for key in (*SHAPING_KEYS, "debug")} | {"target": target_settings(run.config.target)}


def target_settings(target: TargetConfig) -> Mapping[str, object]:
    """Return a target as plain values, without settings that do not change a program or its replay."""
    from omegaconf import OmegaConf

    values = OmegaConf.to_container(OmegaConf.structured(target), enum_to_str=True)
    assert isinstance(values, dict)
    chip = values["chip"]
    known = None if chip is None else {name: value for name, value in chip.items() if name not in _NO_PROGRAM}
    return {str(name): value for name, value in values.items()} | {"chip": known}


def compiler_flags() -> list[str]:
    """Return the compiler flags of the environment, without those that do not change programs."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {os.environ.get('LIBTPU_INIT_ARGS', '')}".split()
    return sorted(flag for flag in flags if not flag.startswith(_NO_COMPILER_FLAGS))


def read_outcome(folder: Path, hlo: bool = False) -> CompileOutcome | None:
    """Return the outcome of a request, or None if it is missing or any part of it is damaged.

    The program of a layout that fits must be in the cache too, with `hlo` also as text.
    """
    try:
        outcome = read_record(CompileOutcome, folder / OUTCOME)
    except (OSError, RecordError):
        return None
    if outcome.step is not None:
        program = read_program(programs_folder() / outcome.step.program, hlo)
        if program is None or program.module_sha256 != outcome.step.module_sha256:
            return None
    return outcome


def read_program(folder: Path, hlo: bool = False) -> ProgramRecord | None:
    """Return the record of a compiled program, or None if it is missing or damaged.

    With `hlo`, a program that fits also needs its module as text.
    """
    try:
        program = read_record(ProgramRecord, folder / PROGRAM)
        if program.module_sha256 is not None:
            with (folder / MODULE).open("rb") as module:
                whole = hashlib.file_digest(module, "sha256").hexdigest() == program.module_sha256
            if not whole or (hlo and not (folder / TEXT).is_file()):
                return None
    except (OSError, RecordError):
        return None
    return program


def keep_program(scratch: Path, folder: Path, replace: bool) -> None:
    """Move a compiled program into the cache, replacing a damaged one.

    If two compiles of it finish at once, the first stays. With `replace`, an intact program is replaced too.
    """
    if not replace and read_program(folder, hlo=(scratch / TEXT).is_file()) is not None:
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        with contextlib.suppress(FileNotFoundError):
            folder.rename(aside / "old")
        publish_folder(scratch, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
