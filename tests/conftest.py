"""Environment of the tests: eight CPU devices, types checked at run time, and caches outside the home folder.

All of it is set up before JAX starts a backend and before `valkyrie` is imported.
"""

from __future__ import annotations

import gc
import os
import pickle
import re
import sys
import tempfile
from collections.abc import Callable
from functools import cache, lru_cache
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


def _read_configs_once() -> None:
    """Cache the configs that Hydra loads: YAML files of this repository and of Hydra, and Valkyrie's schemas.

    Halves the time to compose a run. Configs of a user's folder are not cached, because they may change.
    """
    from hydra._internal.sources_registry import SourcesRegistry

    from valkyrie.config.compose import FAMILIES, SCHEMAS_BY_PATH, ValkyrieSource, register

    register()

    def version_of_file(folder: str, path: str) -> object:
        file = Path(folder, path).with_suffix(".yaml")
        return file.stat().st_mtime_ns if file.is_relative_to(ROOT / "conf") and file.is_file() else None

    def schema_version(folder: str, path: str) -> object:
        path = path.removesuffix(".yaml")
        group, _, name = path.partition("/")
        if path in SCHEMAS_BY_PATH or group not in FAMILIES or not name.endswith("_schema"):
            return SCHEMAS_BY_PATH.get(path)
        family = FAMILIES[group].config_class(name.removesuffix("_schema"))
        return family if family.__module__.startswith("valkyrie.") else None  # a user's may change

    find_source = SourcesRegistry.instance().resolve
    _cache_configs(find_source("file"), version_of_file)
    _cache_configs(find_source("pkg"), lambda *_: True)
    _cache_configs(find_source(ValkyrieSource.scheme()), schema_version)


def _compose_quickly() -> None:
    """Patch Hydra and OmegaConf to skip repeated work. Saves a third of the time to compose a run.

    OmegaConf's parser runs once per text. Hydra compares parsed versions, lists the choices that a defaults list
    with interpolations may refer to, also for lists without interpolations, and copies its store with all schemas.
    """
    import hydra.version
    import omegaconf._utils
    import omegaconf.base
    from hydra._internal import defaults_list
    from hydra.core.config_store import ConfigStore

    list_choices = defaults_list._create_interpolation_map

    def list_needed_choices(overrides: Any, defaults: list[Any], self_added: bool) -> Any:
        needed = any(default.is_interpolation() for default in defaults if not default.is_self())
        return list_choices(overrides, defaults, self_added) if needed else None

    defaults_list._create_interpolation_map = list_needed_choices
    ConfigStore.__deepcopy__ = lambda store, memo: store  # composing does not modify it
    hydra.version._get_version = cache(hydra.version._get_version)
    omegaconf.base.parse = omegaconf._utils.parse = lru_cache(4096)(omegaconf.base.parse)


def _merge_defaults_once() -> None:
    """Patch Hydra to merge the configs of a defaults list once, unless their contents differ.

    Command-line overrides of values are applied to a copy. Saves a third of the time to compose a run.
    """
    from hydra._internal.config_loader_impl import ConfigLoaderImpl

    merge, merged_configs = ConfigLoaderImpl._compose_config_from_defaults_list, dict[bytes, bytes]()

    def merge_once(loader: Any, defaults: list[Any], repo: Any) -> Any:
        contents = [(d.config_path, d.package, d.primary, repo.load_config(d.config_path).config) for d in defaults]
        try:
            key = pickle.dumps(contents)
        except (AttributeError, pickle.PicklingError):  # a class of a test
            return merge(loader, defaults, repo)
        if key not in merged_configs:
            merged_configs[key] = pickle.dumps(merge(loader, defaults, repo))
        return pickle.loads(merged_configs[key])

    ConfigLoaderImpl._compose_config_from_defaults_list = merge_once


def _compose_commands_once() -> None:
    """Patch Hydra to compose each command once.

    By default it composes an extra time to read `hydra.mode`, which is needed only if the arguments may start a sweep.
    """
    from hydra._internal.hydra import Hydra

    compose_mode = Hydra.get_mode

    def get_mode(hydra: Hydra, config_name: str | None, overrides: list[str]) -> Any:
        may_sweep = any(word in argument for argument in sys.argv for word in ("--config", "hydra.", "sweep"))
        return compose_mode(hydra, config_name, overrides) if may_sweep else None

    Hydra.get_mode = get_mode


def _cache_configs(source: Any, get_version: Callable[[str, str], object]) -> None:
    """Cache the configs that a Hydra source loads.

    `get_version(folder, path)` returns a part of the cache key, or None for a config that must not be cached.
    """
    original_load, cache = source.load_config, dict[tuple[object, ...], bytes]()

    def load_config(self: Any, config_path: str) -> Any:
        file_version = get_version(self.path, config_path)
        if file_version is None:
            return original_load(self, config_path)
        key = (self.path, self.provider, config_path, file_version)
        if key not in cache:
            cache[key] = pickle.dumps(original_load(self, config_path))
        return pickle.loads(cache[key])

    source.load_config = load_config


def _prepare_libraries() -> None:
    """Import and configure JAX, Hypothesis, jaxtyping, Hydra and absl. `_set_environment` must have run before."""
    import absl.logging
    import hypothesis
    import jax

    jax.config.update("jax_num_cpu_devices", DEVICES)
    hypothesis.settings.register_profile("busy", deadline=None)  # the time of one example is the machine's
    hypothesis.settings.load_profile("busy")
    _install_type_checks()
    _read_configs_once()
    _compose_quickly()
    _merge_defaults_once()
    _compose_commands_once()
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
