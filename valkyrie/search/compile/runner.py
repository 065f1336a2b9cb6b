"""Compiles a layout in a child process with a time limit and a cache. A crash of the compiler ends only the child.

Does not import JAX, so that cached results are available at once.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from valkyrie.config.modes import MODULE_FILE, settings_for
from valkyrie.config.run import Run
from valkyrie.hardware.platforms import Platform, get_platform
from valkyrie.modes.compile import Config as CompileMode
from valkyrie.paths import cache_problem
from valkyrie.processes.child import ChildProcess, module_command
from valkyrie.processes.ending import describe_status
from valkyrie.records import read_record, write_record
from valkyrie.search.compile.cache import (
    OUTCOME_FILE,
    programs_folder,
    read_outcome,
    request_key,
    requests_folder,
    store_program,
)
from valkyrie.search.compile.prediction import CompileOutcome, CompileStatus

Progress = Callable[[str], None]


@dataclass(frozen=True)
class CompiledRun:
    """Result of compiling a run's step, and the folders with its files.

    Args:
        outcome: Result of the child process.
        folder: Folder of the request in the cache, or a temporary folder if the cache cannot be written.
        programs_root: Folder that contains the folder of the compiled program.
        cached: Whether the program came from the cache.
        elapsed_s: Duration of the compile or of reading the cache, in seconds.
        note: Why the cache cannot be written, or None if it can. Without the cache, the program is deleted when this
            process ends.
    """

    outcome: CompileOutcome
    folder: Path
    programs_root: Path
    cached: bool
    elapsed_s: float
    note: str | None = None

    @property
    def status(self) -> CompileStatus:
        """Status of `outcome`, such as `ok` or `does_not_fit`."""
        return self.outcome.status

    @property
    def program_folder(self) -> Path:
        """Folder of the compiled program. Only available if the layout fits."""
        assert self.outcome.step is not None
        return self.programs_root / self.outcome.step.program

    @property
    def module_file(self) -> Path:
        """File of the optimised module, serialised."""
        return self.program_folder / MODULE_FILE


def compile_layout(
    run: Run, time_limit_s: float | int, use_cache: bool = True, progress: Progress | None = None
) -> CompiledRun:
    """Compile a run's step for its target. If the compiler fails, the result has the status and reason.

    Args:
        run: The run.
        time_limit_s: Time limit of the child process, in seconds.
        use_cache: Whether to return a cached result. New results (fits, does not fit) are stored in either case, if the
            cache (`VALKYRIE_CACHE`) can be written.
        progress: Called about five times a second with a status line.
    """
    start_time = time.perf_counter()
    folder, programs_root = requests_folder() / request_key(run), programs_folder()
    progress = progress or (lambda line: None)
    target = run.config.target
    if refusal := get_platform(target.platform).compile_refusal(target, run.config.precision.compute.value):
        return CompiledRun(CompileOutcome(CompileStatus.refused, refusal), folder, programs_root, False, 0.0)
    outcome = read_outcome(folder, settings_for(CompileMode, run.config.mode).hlo) if use_cache else None
    if outcome is not None:
        return CompiledRun(outcome, folder, programs_root, True, time.perf_counter() - start_time)
    if problem := cache_problem(programs_root):
        scratch = Path(tempfile.mkdtemp(prefix="valkyrie-compile-"))
        atexit.register(shutil.rmtree, scratch, ignore_errors=True)
        outcome = _compile_in_child(run, scratch, time_limit_s, use_cache, progress)
        note = f"{problem} The result of this compile is not cached."
        return CompiledRun(outcome, scratch, scratch, False, time.perf_counter() - start_time, note)
    scratch = Path(tempfile.mkdtemp(prefix="compile.", dir=programs_root))
    try:
        outcome = _compile_in_child(run, scratch, time_limit_s, use_cache, progress)
        cacheable = outcome.status in (CompileStatus.ok, CompileStatus.does_not_fit)
        new_programs = [path for path in scratch.iterdir() if path.is_dir()]
        if cacheable:
            for program in new_programs:
                store_program(program, programs_root / program.name, overwrite=not use_cache)
            folder.mkdir(parents=True, exist_ok=True)
            write_record(folder / OUTCOME_FILE, outcome)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return CompiledRun(outcome, folder, programs_root, cacheable and not new_programs, time.perf_counter() - start_time)


def _compile_in_child(
    run: Run, folder: Path, time_limit_s: float | int, use_cache: bool, progress: Progress
) -> CompileOutcome:
    run.save(folder / "run.yaml")
    command = [*module_command("valkyrie.search.compile.child", str(folder), str(os.getpid()))]
    command += ["--ignore-cache"] * (not use_cache)
    description, platform = run.config.target.describe(), get_platform(run.config.target.platform)
    failure = run_compiler(
        ChildProcess(command, platform.compile_environment(), folder / "compiler.log"),
        platform,
        time_limit_s,
        "mode.time_limit_s",
        lambda elapsed: progress(f"compiling for {description}: {elapsed:.0f} s"),
        lambda: (folder / OUTCOME_FILE).is_file(),
    )
    return failure or read_record(CompileOutcome, folder / OUTCOME_FILE)


def run_compiler(
    child: ChildProcess,
    platform: Platform,
    time_limit_s: float | int | None,
    limit_key: str,
    progress: Callable[[float], None],
    is_finished: Callable[[], bool],
) -> CompileOutcome | None:
    """Wait for a child process that compiles, and kill it at the time limit or if waiting is interrupted.

    Returns None if the child has written its results, otherwise an outcome with the reason.

    Args:
        child: The process.
        platform: The platform that it compiles for.
        time_limit_s: Time limit in seconds, or None for no limit.
        limit_key: Name of the setting with the time limit.
        progress: Called about five times a second with the seconds since the start.
        is_finished: Returns whether the results are complete, after the process has ended.
    """
    start_time = time.perf_counter()
    try:
        while (status := child.status) is None:
            elapsed = time.perf_counter() - start_time
            if time_limit_s is not None and elapsed > time_limit_s:
                reason = f"the compile exceeded {limit_key}={time_limit_s:g} seconds and was stopped"
                return CompileOutcome(CompileStatus.timeout, reason)
            progress(elapsed)
            time.sleep(0.2)
    finally:
        child.kill()
    if is_finished():
        return None
    lines = [line.strip() for line in child.last_lines() if line.strip()]
    if reason := platform.flag_problem(lines):
        return CompileOutcome(CompileStatus.refused, reason, variable=platform.flags_variable)
    last_line = lines[-1][:400] if lines else "no output"
    reason = f"the compiler process ended {describe_status(status)}: {last_line}"
    return CompileOutcome(CompileStatus.failed, reason)
