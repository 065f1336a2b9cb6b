"""Compiles a layout in a child process with a time limit and a cache, so that a crash cannot take the caller along.

Imports no JAX: a layout compiled before is answered from the cache in about the time that Python needs to start.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from valkyrie.config.modes import MODULE, SHAPING_KEYS, TEXT
from valkyrie.config.run import Run
from valkyrie.hardware.platforms import platform_of
from valkyrie.hardware.target import TargetConfig
from valkyrie.paths import cache_root, cache_trouble, source_digest
from valkyrie.runs.folder import versions
from valkyrie.search.compile.child import KEYS, OUTCOME

SHAPING = (
    "code_eval",
    "config",
    "data",
    "hardware",
    "models",
    "ops",
    "parallel",
    "processes",
    "runs",
    "tasks",
    "train",
)
SHAPING += (
    "axes.py",
    "buckets.py",
    "checkpoint",
    "checksums.py",
    "extensions.py",
    "optim",
    "paths.py",
    "precision.py",
    "trees.py",
)
SHAPING += ("foreign_errors.py", "problems.py", "records.py", "units.py", "__init__.py", "search/__init__.py")
SHAPING += ("search/compile/alternatives.py", "search/compile/child.py", "search/compile/executable.py")
"""The sources that decide what is compiled, all that the step program imports. A change of any compiles again."""
_NO_PROGRAM = ("estimate", "replay", "calibrated", "rented_as", "usd_per_hour", "spot_usd_per_hour")
"""What is known of a chip that decides no program, and no replay of one."""
_NO_COMPILER_FLAGS = ("--xla_cpu_collective_call_", "--xla_force_host_platform_device_count", "--xla_dump_")

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Compiled:
    """What became of a compile: `outcome` as the child wrote it, and the folder that holds it and the module.

    `outcome["status"]` is `ok`, or `does_not_fit`, `refused`, `failed` or `timeout` with a `reason`. `note` says why it
    is not kept; its folder then goes with this process.
    """

    outcome: dict[str, Any]
    folder: Path
    cached: bool
    seconds: float
    note: str | None = None

    @property
    def status(self) -> str:
        """The status alone."""
        return str(self.outcome["status"])

    @property
    def module(self) -> Path:
        """The file of the optimised module, serialised."""
        return self.folder / MODULE


def compile_layout(
    run: Run, limit_s: float | int, use_cache: bool = True, progress: Progress | None = None
) -> Compiled:
    """Return what compiling this run's step for its target came to; never raises for what the compiler does.

    `limit_s` bounds the child's seconds. `progress` is called about five times a second with a line to show.
    Results that would come out the same again (fits, does not fit) are kept under `VALKYRIE_CACHE`.
    """
    began = time.perf_counter()
    target = run.config.target
    if missing := platform_of(target.platform).missing_compiler(target):
        return Compiled({"status": "refused", "reason": missing}, cache_root(), False, 0.0)
    folder = cache_root() / "compile" / program_key(run)
    outcome = kept_outcome(folder, run.config.mode.hlo) if use_cache else None
    if outcome is not None:
        return Compiled(outcome, folder, True, time.perf_counter() - began)
    progress = progress or (lambda line: None)
    if trouble := cache_trouble(folder.parent):
        scratch = Path(tempfile.mkdtemp(prefix="valkyrie-compile-"))
        atexit.register(shutil.rmtree, scratch, ignore_errors=True)
        outcome = _in_child(run, scratch, limit_s, progress)
        return Compiled(outcome, scratch, False, time.perf_counter() - began, f"{trouble} This compile is not kept.")
    scratch = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        outcome = _in_child(run, scratch, limit_s, progress)
        if outcome["status"] in ("ok", "does_not_fit"):
            keep(scratch, folder, anew=not use_cache)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return Compiled(outcome, folder, False, time.perf_counter() - began)


def program_key(run: Run) -> str:
    """Return a name for everything that decides the compiled module: the layout, the program's source, the versions."""
    decides = [program_settings(run), _compiler_flags(), versions(), program_digest(run)]
    text = json.dumps(decides, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def program_settings(run: Run) -> dict[str, Any]:
    """Return the settings of a run that decide the compiled module, as plain values by key."""
    from omegaconf import OmegaConf

    values = OmegaConf.to_container(OmegaConf.structured(run.config), enum_to_str=True)
    assert isinstance(values, dict)
    return {key: values[key] for key in (*SHAPING_KEYS, "debug")} | {"target": target_settings(run.config.target)}


def target_settings(target: TargetConfig) -> dict[str, Any]:
    """Return a target as plain values, without what decides neither a program nor its replay."""
    from omegaconf import OmegaConf

    values = OmegaConf.to_container(OmegaConf.structured(target), enum_to_str=True)
    assert isinstance(values, dict)
    chip = values["chip"]
    known = None if chip is None else {name: value for name, value in chip.items() if name not in _NO_PROGRAM}
    return {str(name): value for name, value in values.items()} | {"chip": known}


def _compiler_flags() -> list[str]:
    """Return the flags that the environment gives the compilers, without those that shape no program."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {os.environ.get('LIBTPU_INIT_ARGS', '')}".split()
    return sorted(flag for flag in flags if not flag.startswith(_NO_COMPILER_FLAGS))


def program_digest(run: Run) -> str:
    """Return a digest of the sources that shape the compiled program, the user's own modules among them."""
    return source_digest(*SHAPING, *run.config.modules)


def kept_outcome(folder: Path, hlo: bool = False) -> dict[str, Any] | None:
    """Return the outcome of an equal compile in the cache; None where there is none, or any part of it is damaged.

    `hlo`: also where the module is not there as text.
    """
    try:
        outcome = json.loads((folder / OUTCOME).read_bytes())
        if not isinstance(outcome, dict) or not outcome.keys() >= set(KEYS[outcome["status"]]):
            return None
        if outcome["status"] == "ok":
            with (folder / MODULE).open("rb") as module:
                whole = hashlib.file_digest(module, "sha256").hexdigest() == outcome["module_sha256"]
            if not whole or (hlo and not (folder / TEXT).is_file()):
                return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return outcome


def keep(scratch: Path, folder: Path, anew: bool) -> None:
    """Move a finished compile to its place in the cache, also where a damaged one lies.

    Of two that finish at once, the first stays; `anew` replaces a whole one too.
    """
    if not anew and kept_outcome(folder, hlo=(scratch / TEXT).is_file()) is not None:
        return
    aside = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        with contextlib.suppress(FileNotFoundError):
            folder.rename(aside / "old")
        try:
            scratch.rename(folder)
        except OSError:
            if not folder.is_dir():  # not another process that came first
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _in_child(run: Run, folder: Path, limit_s: float | int, progress: Progress) -> dict[str, Any]:
    run.save(folder / "run.yaml")
    command = [sys.executable, "-m", "valkyrie.search.compile.child", str(folder), str(os.getpid())]
    began = time.perf_counter()
    with (folder / "compiler.log").open("wb") as log:
        # A session of its own, so that the compiler's threads and whatever it starts end with it.
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=_environment(run), start_new_session=True
        )
        try:
            while (status := child.poll()) is None:
                elapsed = time.perf_counter() - began
                if elapsed > limit_s:
                    return {
                        "status": "timeout",
                        "reason": f"the compile took longer than mode.time_limit_s={limit_s:g} seconds and was ended",
                    }
                progress(f"compiling for {run.config.target.describe()}: {elapsed:.0f} s")
                time.sleep(0.2)
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
    if (folder / OUTCOME).is_file():
        return json.loads((folder / OUTCOME).read_text())
    ended = f"signal {-status} ({signal.Signals(-status).name})" if status < 0 else f"status {status}"
    return {
        "status": "failed",
        "reason": f"the compiler's process ended with {ended}: {_last_line(folder / 'compiler.log')}",
    }


def _environment(run: Run) -> dict[str, str]:
    return {**os.environ, **platform_of(run.config.target.platform).compile_environment()}


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:400] if lines else "it said nothing"
