"""The environment of tests: eight CPU devices, types checked at run time, fatal warnings, an untouched home folder.

Everything here happens before JAX starts a backend and before `valkyrie` is imported.
"""

from __future__ import annotations

import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import turns

ROOT = Path(__file__).resolve().parent.parent
DEVICES = 8

_COMPILE_QUICKLY = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
"""Saves a third of the processor time of tests that compile much: 73 s instead of 107."""
if version("jaxlib").startswith("0.10."):  # later ones have no other emitters, and end at an unknown flag
    _COMPILE_QUICKLY += " --xla_cpu_use_fusion_emitters=false"  # 3.1 s to compile a step of valkyrie_tiny, and 7

_WAIT = "--xla_cpu_collective_call_terminate_timeout_seconds=1200"
"""Stops XLA from aborting the process if devices on a busy machine reach a collective more than 40 s apart."""

_scratch = tempfile.TemporaryDirectory(prefix="valkyrie-tests-", ignore_cleanup_errors=True)


def _set_environment() -> None:
    """Set the environment, for child processes too. Platform and cache set by the caller stay."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if os.environ["JAX_PLATFORMS"] == "cpu":  # compiling is most of a test, and a program runs once
        os.environ["XLA_FLAGS"] = f"{_COMPILE_QUICKLY} {_WAIT} {os.environ.get('XLA_FLAGS', '')}".strip()
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
    ):
        os.environ.pop(variable, None)


def _checked_modules() -> list[str]:
    """Return the modules with signatures checked at every call: those with array shapes, or all if CHECK_ALL_TYPES=1.

    jaxtyping's checks make code without arrays, such as the validation of layouts, two to three times slower.
    """
    if os.environ.get("CHECK_ALL_TYPES") == "1":
        return ["valkyrie"]
    files = [
        file.relative_to(ROOT) for file in (ROOT / "valkyrie").rglob("*.py") if "from jaxtyping" in file.read_text()
    ]
    return [".".join(file.with_suffix("").parts) for file in files]


def _prepare_libraries() -> None:
    """Import and configure the libraries that read the environment."""
    import absl.logging
    import hypothesis
    import jax
    from jaxtyping import install_import_hook

    jax.config.update("jax_num_cpu_devices", DEVICES)
    hypothesis.settings.register_profile("busy", deadline=None)  # the time of one example is the machine's
    hypothesis.settings.load_profile("busy")
    install_import_hook(_checked_modules(), "beartype.beartype")
    # Hydra closes every log handler, and absl's would close with it the stream that pytest captures.
    absl.logging.get_absl_handler().python_handler.setStream(sys.__stderr__)


_set_environment()
_prepare_libraries()


def pytest_addoption(parser: pytest.Parser) -> None:
    turns.add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    turns.begin(config)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    turns.order(config, items)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    turns.skip_when_over(item)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    turns.summarise(terminalreporter, config)


class Command(NamedTuple):
    """Exit status, composed run and output of a command line, up to the use of a device."""

    status: int
    run: Any
    out: str
    err: str


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    """A function that composes the run of `valkyrie-train` with some arguments, without running it."""
    from valkyrie.cli import dispatch

    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> Command:
        runs: list[Any] = []
        monkeypatch.setattr(dispatch, "_dispatch", lambda run: runs.append(run) or 0)
        monkeypatch.setattr("sys.argv", ["valkyrie-train", *arguments])
        capsys.readouterr()
        status = 0
        try:
            dispatch.dispatch()
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        return Command(status, runs[0] if runs else None, *capsys.readouterr())

    return call
