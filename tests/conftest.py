"""Environment of the tests: eight CPU devices, types checked at run time, and caches outside the home folder.

All of it is set up before JAX starts a backend and before `valkyrie` is imported.
"""

from __future__ import annotations

import gc
import os
import re
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import turns

ROOT = Path(__file__).resolve().parent.parent
DEVICES = 8

_QUICK_COMPILE_FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
"""XLA flags that save a third of the processor time of tests that mostly compile: 73 s instead of 107 s."""
if version("jaxlib").startswith("0.10."):  # later ones have no other emitters, and end at an unknown flag
    _QUICK_COMPILE_FLAGS += " --xla_cpu_use_fusion_emitters=false"  # 3.1 s to compile a step of valkyrie_tiny, and 7
    _QUICK_COMPILE_FLAGS += " --xla_cpu_parallel_codegen_split_count=1"  # 2.1 s instead of 2.5 s

_COLLECTIVE_TIMEOUT_FLAG = "--xla_cpu_collective_call_terminate_timeout_seconds=1200"
"""XLA flag. Without it, XLA aborts the process if devices on a busy machine reach a collective 40 s apart."""

_scratch = tempfile.TemporaryDirectory(prefix="valkyrie-tests-", ignore_cleanup_errors=True)


def _set_environment() -> None:
    """Set environment variables for the tests and their child processes.

    By default, JAX uses the CPU and caches compiled programs in `.jax_cache`. JAX_PLATFORMS and
    JAX_COMPILATION_CACHE_DIR override this. W&B is offline. Valkyrie and W&B write their caches to a temporary folder.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if os.environ["JAX_PLATFORMS"] == "cpu":  # compiling is most of a test, and a program runs once
        os.environ["XLA_FLAGS"] = (
            f"{_QUICK_COMPILE_FLAGS} {_COLLECTIVE_TIMEOUT_FLAG} {os.environ.get('XLA_FLAGS', '')}".strip()
        )
        os.environ.setdefault("NPROC", str(4 * DEVICES))  # threads for the collectives that a device waits in
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".jax_cache"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")
    os.environ["VALKYRIE_CACHE"] = str(Path(_scratch.name) / "cache")
    for variable in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        os.environ[variable] = str(Path(_scratch.name) / variable.lower())
    os.environ["WANDB_MODE"] = "offline"
    for variable in (
        "WANDB_API_KEY",
        "TPU_MESH_CONFIG",
        "TPU_AXIS_NAMES",
        "HYDRA_FULL_ERROR",
        "UV_RUN_RECURSION_DEPTH",
        "PYTHONDONTWRITEBYTECODE",  # without bytecode, every child process compiles JAX and Valkyrie: 4.5 s, not 1.6 s
    ):
        os.environ.pop(variable, None)
    sys.dont_write_bytecode = False


def _install_type_checks() -> None:
    """Install runtime type checks for functions with arrays in their signatures, or for all if CHECK_ALL_TYPES=1.

    Checking all of them makes code without arrays, such as the validation of layouts, five times slower.
    """
    import jaxtyping

    modules = ["valkyrie"]
    if os.environ.get("CHECK_ALL_TYPES") != "1":
        files = [
            file.relative_to(ROOT) for file in (ROOT / "valkyrie").rglob("*.py") if "from jaxtyping" in file.read_text()
        ]
        modules = [".".join(file.with_suffix("").parts) for file in files]
        jaxtyping.jaxtyped = _skip_without_arrays(jaxtyping.jaxtyped)
    jaxtyping.install_import_hook(modules, "beartype.beartype")


def _skip_without_arrays(jaxtyped: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `jaxtyped` so that it skips functions and dataclasses without arrays in their annotations."""

    def mentions_arrays(annotated: Any) -> bool:
        annotations = " ".join(map(str, getattr(annotated, "__annotations__", {}).values()))
        module = vars(sys.modules[annotated.__module__])
        aliases = (repr(module.get(word)) for word in set(re.findall(r"\w+", annotations)))
        return any("Array" in text or "ndarray" in text for text in (annotations, *aliases))

    def decorator(*, typechecker: Any) -> Callable[[Any], Any]:
        check = jaxtyped(typechecker=typechecker)
        return lambda annotated: check(annotated) if mentions_arrays(annotated) else annotated

    return decorator


def _prepare_libraries() -> None:
    """Import and configure JAX, Hypothesis, jaxtyping, Hydra and absl. `_set_environment` must have run before."""
    import absl.logging
    import hypothesis
    import jax

    jax.config.update("jax_num_cpu_devices", DEVICES)
    hypothesis.settings.register_profile("busy", deadline=None)  # the time of one example is the machine's
    hypothesis.settings.load_profile("busy")
    _install_type_checks()

    import composing

    composing.patch_hydra()
    # Hydra closes every log handler, and absl's would close with it the stream that pytest captures.
    absl.logging.get_absl_handler().python_handler.setStream(sys.__stderr__)


_set_environment()
_prepare_libraries()


def pytest_addoption(parser: pytest.Parser) -> None:
    turns.add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    turns.store_end_time(config)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    turns.sort_items(config, items)


def pytest_collection_finish() -> None:
    gc.freeze()  # what is imported stays: collecting garbage among it is a tenth of a composition


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    turns.skip_when_over(item)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    turns.print_skipped(terminalreporter, config)


class CommandResult(NamedTuple):
    """Result of `valkyrie-train` without executing its mode: exit status, composed run, stdout and stderr.

    The run is None if the command was refused or composes no single run, as with `--help` or `-m`.
    """

    status: int
    run: Any
    out: str
    err: str


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    """A function that calls `valkyrie-train` with its arguments in `tmp_path`, and returns a `CommandResult`.

    The run is composed, but its mode is not executed.
    """
    from valkyrie.cli import dispatch

    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> CommandResult:
        runs: list[Any] = []
        monkeypatch.setattr(dispatch, "run_mode", lambda run: runs.append(run) or 0)
        monkeypatch.setattr("sys.argv", ["valkyrie-train", *arguments])
        capsys.readouterr()
        status = 0
        try:
            dispatch.dispatch()
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        return CommandResult(status, runs[0] if runs else None, *capsys.readouterr())

    return call
