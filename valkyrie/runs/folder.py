"""Run folders: finds them, and reads and writes the files that describe a run. Does not import JAX."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import time
from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from valkyrie.buckets import file_problems
from valkyrie.checkpoint import is_resumable, latest_step
from valkyrie.checkpoint.location import CHECKPOINTS_FOLDER, SAVED_FILE, finished_steps_in
from valkyrie.config.modes import METRICS_FILE, reads_run
from valkyrie.config.run import Run, RunConfig
from valkyrie.extensions import check_modules
from valkyrie.hardware.chips import fill_missing_chip_fields
from valkyrie.optim import OptimizerConfig, convert_old_settings, learning_rate_schedule
from valkyrie.paths import disk_errors, unused_path, write_atomic
from valkyrie.problems import first_line, raise_problems, suggest
from valkyrie.processes.locks import WRITER_FILE, write_lock
from valkyrie.trees import override_text

RUN_FILE = "run.yaml"
"""File in a run folder with all settings of the run that wrote it last. `resume` starts from these settings."""

_UNREPORTED_SETTINGS = {
    "name",
    "runs",
    "resume",
    "force",
    "steps",
    "mode",
    "trial",
    "tracking",
    "checkpoint",
    "distributed",
    "log_every",
}
_UNREPORTED_SETTINGS |= {"profile", "eval_every", "prompt", "sample_tokens", "temperature", "top_k", "hydra"}
_UNREPORTED_SETTINGS |= {"data.cache_dir", "data.workers", "code_eval", "code_eval_every", "sample_every"}
"""Settings that are not listed as changed when a run continues with other values."""

_FLAGS_WITH_VALUE = {"--config-dir", "-cd", "--config-path", "-cp", "--config-name", "-cn"}
_FLAGS_WITH_VALUE |= {"--cfg", "-c", "--package", "-p", "--experimental-rerun"}
"""Flags of Hydra that take their value from the next argument."""

_MAX_CHANGES_LENGTH = 60
"""Maximum length of the changed settings in the name of a run folder."""

_PACKAGES = ("valkyrie-jax", "jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin", "flax", "optax")
_PACKAGES += ("orbax-checkpoint", "grain", "numpy")
"""Packages with an effect on the results of a run. `package_versions` records their versions."""


def find_run(runs: Path, resume: str, *, key: str = "resume=") -> Path:
    """Return the run folder that `resume` selects: `latest` (saved last), a name in `runs`, or a path.

    The folder must be resumable (`is_resumable`). `latest` and the suggestions in messages also require a `run.yaml`,
    or finished checkpoints in the folder itself. `key` is the text before the value of `resume` in messages. Raises
    ValueError if there is no such folder.
    """
    raise_problems(file_problems("runs", str(runs)))
    # A training whose start failed may leave only the identity or the pointer of its checkpoints.
    candidates = [
        f
        for f in runs.glob("*")
        if is_resumable(f) and ((f / RUN_FILE).is_file() or finished_steps_in(f / CHECKPOINTS_FOLDER))
    ]
    candidates.sort(key=_last_save_time)
    if resume == "latest":
        if not candidates:
            raise ValueError(
                f"{key}latest: no run in {runs} has a checkpoint. Train a run first, or use the path of a run folder: "
                f"{key}FOLDER."
            )
        return candidates[-1]
    for folder in (runs / resume, Path(resume)):
        if is_resumable(folder):
            return folder
    for folder in Path(resume).absolute().parents:
        if Path(resume).exists() and is_resumable(folder):
            raise ValueError(f"{key}{resume} is inside a run folder. Use {key}{folder}.")
    for folder in (runs / resume, Path(resume)):
        if not (folder / RUN_FILE).is_file():
            continue
        if (mode := saved_config(folder).mode.name) != "train":
            raise ValueError(f"{key}{resume} is the run folder of mode={mode}: it has no trained weights.")
        repeat = f"{command_name()} --config-path {shlex.quote(str(folder.resolve()))} --config-name run"
        raise ValueError(
            f"{key}{resume}: {folder} has no finished checkpoint, so there is nothing to resume. Start it again: "
            f"{repeat}"
        )
    newest_names = ", ".join(f.name for f in reversed(candidates[-5:])) or "none"
    name_by_lowercase = {f.name.lower(): f.name for f in candidates}
    nearest = suggest(resume.lower(), name_by_lowercase, cutoff=0.75)
    hint = f" Did you mean {key}{name_by_lowercase[nearest]}?" if nearest else ""
    raise ValueError(
        f"{key}{resume}: there is no such run with a checkpoint under runs={runs}.{hint} Newest runs: {newest_names}."
    )


def _last_save_time(folder: Path) -> float:
    """Return the Unix time of a run's last save, or the modification time of the run folder if it has never saved.

    A run with `checkpoint.folder` touches `SAVED_FILE` at each save, so that buckets are not queried.
    """
    paths = [path for path in (folder / SAVED_FILE, folder / CHECKPOINTS_FOLDER) if path.exists()]
    return max(path.stat().st_mtime for path in paths or [folder])


def choose_run_folder(run: Run, title: str | None = None) -> Path:
    """Return the run folder: the one that `resume` or `name` selects, or a new one.

    A new folder is named `title` or, if that is None, after model, its changed settings, layout and time. Compiling or
    measuring a trained run uses a separate folder next to it, so that the training's `run.yaml` is not overwritten.
    Raises ValueError if the run to resume does not exist, if the folder contains files but is not a run folder, or if
    `name` has a slash (`resume=latest` does not search nested folders).
    """
    runs, mode = Path(run.config.runs), run.config.mode.name
    uses_run_folder = mode == "train" or reads_run(mode)
    if run.config.resume is not None:
        folder = find_run(runs, run.config.resume)
        return folder if uses_run_folder else folder.with_name(f"{folder.name}-{mode}")
    name = run.config.name
    if name is not None:
        if len(Path(name).parts) > 1:
            parent, folder_name = runs / Path(name).parent, Path(name).name
            raise ValueError(
                f"name={name} is a nested folder, but resume=latest only searches directly under runs={runs}. Use "
                f"runs={parent} name={folder_name}, or name={name.strip('/').replace('/', '-')}."
            )
        needs_separate_folder = not uses_run_folder and latest_step(runs / name) is not None
        folder = runs / (f"{name}-{mode}" if needs_separate_folder else name)
        if _has_other_files(folder):
            if (folder / "trials.jsonl").is_file():
                raise ValueError(f"name={name}: {folder} is the folder of a sweep. Use another name=.")
            for file in folder.glob(f"*/{WRITER_FILE}"):
                with write_lock(file.parent):  # refused while a from-hf is writing the folder
                    pass
            raise ValueError(
                f"name={name}: {folder} contains files but no {RUN_FILE}, so it is not a run folder. Use another name, "
                "or delete the folder if a killed valkyrie-convert left it there."
            )
        return folder
    if title is None:
        changes = [
            f"{key.rpartition('.')[2]}{value}"
            for key, value in key_values(run.arguments).items()
            if key.startswith("model.")
        ]
        changes_text = re.sub(r"[^\w.]+", "_", "-".join(["", *changes]))[:_MAX_CHANGES_LENGTH]
        title = f"{run.model.name}{changes_text}-{run.layout.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    return unused_path(runs / title)


def claim_run_folder(run: Run, folder: Path) -> Path:
    """Create the folder of a run, as returned by `choose_run_folder`, and return it.

    `choose_run_folder` returns the same new folder for two runs that start in the same second. The second one to claim
    it gets FOLDER-2. Folders selected by `name` or `resume` may exist. Raises DiskError if the folder cannot be
    created, and ValueError if its `metrics.jsonl` is a folder.
    """
    is_new = run.config.name is None and run.config.resume is None
    with disk_errors(folder):
        if not is_new:
            folder.mkdir(parents=True, exist_ok=True)
            if (folder / METRICS_FILE).is_dir():
                raise ValueError(
                    f"{folder / METRICS_FILE} is a folder, but a run writes a file there. Move or delete it."
                )
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        while True:
            new_folder = unused_path(folder)
            with contextlib.suppress(FileExistsError):
                new_folder.mkdir()
                return new_folder


def _has_other_files(folder: Path) -> bool:
    """Return whether a folder contains files but is not a run folder. Hidden files do not count."""
    if any((folder / name).exists() for name in (RUN_FILE, WRITER_FILE)) or is_resumable(folder):
        return False
    return has_visible_files(folder)


def has_visible_files(folder: Path) -> bool:
    """Return whether a folder exists and contains files or folders that are not hidden."""
    return folder.is_dir() and any(not entry.name.startswith(".") for entry in folder.iterdir())


def stored_text_file(folder: Path, name: str) -> Path:
    """Return the file where `mode.keep=name` stores a generated text. Raises ValueError for an invalid name."""
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"mode.keep={name} is not a valid file name. Use a word, such as mode.keep=story.")
    return folder / "texts" / f"{name}.npz"


def write_run_files(run: Run, folder: Path) -> None:
    """Write `run.yaml` (all settings) and `versions.json` (of packages) into the run folder, creating it if missing."""
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    run.save(folder / RUN_FILE)
    write_atomic(folder / "versions.json", json.dumps(package_versions(), indent=2) + "\n")


def command_name(command: str = "valkyrie-train") -> str:
    """Return a command as the user would type it: with `uv run` if that started this process."""
    return f"uv run {command}" if "UV_RUN_RECURSION_DEPTH" in os.environ else command


def resume_command(folder: Path) -> str:
    """Return the command that resumes the run in a folder.

    It has the run's name if the folder is in the default `runs`, otherwise the folder's path.
    """
    name = folder.name if folder.parent == Path(RunConfig.runs) else str(folder)
    return f"{command_name()} resume={shlex.quote(name)}"


def saved_config(folder: Path) -> DictConfig:
    """Read the settings in a run folder's `run.yaml`. Raises ValueError if it is missing or damaged."""
    file = folder / RUN_FILE
    if file.is_file():
        return read_settings(file)
    if not folder.exists():
        raise ValueError(f"{folder} does not exist. Pass the path of a run folder.")
    if latest_step(folder) is None:
        raise ValueError(f"{folder} is not a run folder: it has no {RUN_FILE}.")
    raise ValueError(
        f"{folder} has checkpoints, but {RUN_FILE} with the settings of the run is missing. Restore it from a backup, "
        f"or {_continue_hint(folder)}."
    )


def saved_run(folder: Path) -> Run:
    """Return the run that a run folder's `run.yaml` describes, with the mode `train`.

    Raises ValueError if the file is missing or damaged, or if a setting is invalid. The message then names the file and
    the invalid key.
    """
    saved = saved_config(folder)
    saved.mode = {"name": "train"}  # the keys of the mode may have changed since
    return run_from_record(saved, folder / RUN_FILE)


def run_from_record(values: DictConfig, file: Path) -> Run:
    """Build a run from the settings in `file`, a `run.yaml`. Raises ValueError with the file and the invalid key."""
    try:
        return Run.from_config(values)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _continue_hint(folder: Path) -> str:
    name = shlex.quote(f"name={folder.absolute().name}")
    return f"continue with `{command_name()} {name}` plus the original training settings"


def read_settings(file: Path, *, has_hydra: bool = True) -> DictConfig:
    """Read a `run.yaml` or, with `has_hydra=False`, the output of `--cfg job`. Converts settings of older versions.

    Raises ValueError if the file is damaged, or names a folder of Python modules that the user has not trusted.
    """
    remedy = "Create it again."
    if file.name == RUN_FILE:
        remedy = f"Restore it from a backup, or delete it and {_continue_hint(file.absolute().parent)}."
    try:
        config = OmegaConf.load(file)
    except (OmegaConfBaseException, OSError, UnicodeDecodeError, YAMLError) as error:
        raise ValueError(f"{file} is damaged ({first_line(error)}). {remedy}") from error
    hydra = config.get("hydra") if isinstance(config, DictConfig) else None
    logging_config = hydra.get("hydra_logging") if isinstance(hydra, DictConfig) else None
    is_complete = (
        isinstance(logging_config, DictConfig) and "root" in logging_config and not isinstance(logging_config.root, str)
    )
    if not isinstance(config, DictConfig) or not (is_complete or not has_hydra):
        raise ValueError(f"{file} is damaged (the end is missing). {remedy}")
    modules = config.get("modules")
    if not (modules is None or isinstance(modules, ListConfig)):
        raise ValueError(f"{file} is damaged (modules={modules} must be a list). {remedy}")
    check_modules([str(folder) for folder in modules or []], file)
    if isinstance(config.get("optimizer"), DictConfig):
        old_optimizer: Any = OmegaConf.to_container(config.optimizer, resolve=False)
        config.optimizer = convert_old_settings(old_optimizer)
    target = config.get("target")
    if isinstance(target, DictConfig) and isinstance(target.get("chip"), DictConfig):
        chip: Any = OmegaConf.to_container(config.target.chip, resolve=False)
        config.target.chip = fill_missing_chip_fields(chip)
    return config


def changed_settings(run: Run, folder: Path) -> dict[str, tuple[str, str]]:
    """Return the settings that differ from those in the run folder's `run.yaml`, as (requested, saved) texts by key.

    Omits those that may change freely, such as `steps`. If a group has a different choice, only the choice is listed.
    Empty if there is no `run.yaml`. Raises ValueError if `run.yaml` is damaged.
    """
    if not (folder / RUN_FILE).is_file():
        return {}
    saved_settings = OmegaConf.to_container(saved_config(folder))
    assert isinstance(saved_settings, dict)
    return _find_changes(run.record(), saved_settings)


def describe_continuation(run: Run, folder: Path, step: int, changes: dict[str, tuple[str, str]]) -> str:
    """Return a line about a run that continues: its first and last step, and the settings that have changed.

    `changes` is the result of `changed_settings`.
    """
    config = run.config
    saved_steps = saved_config(folder).steps if (folder / RUN_FILE).is_file() else config.steps
    changed_steps = {"steps": (str(config.steps), str(saved_steps))} if saved_steps != config.steps else {}
    changes_text = ", ".join(
        f"{key}={new_value} (was {saved_value})" for key, (new_value, saved_value) in (changed_steps | changes).items()
    )
    return (
        f"continuing {folder.name} from step {step} to step {config.steps}{': ' if changes_text else ''}{changes_text}"
    )


def describe_schedule_change(run: Run, folder: Path, step: int) -> str | None:
    """Return a warning if the learning rate jumps at `step` because the schedule has another length now, else None.

    Raises ValueError if `run.yaml` is damaged.
    """
    if not (folder / RUN_FILE).is_file():
        return None
    config, saved_settings = run.config, saved_config(folder)
    saved_fields = {
        f.name: saved_settings.optimizer[f.name] for f in fields(OptimizerConfig) if f.name in saved_settings.optimizer
    }
    saved_optimizer = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(OptimizerConfig), saved_fields))
    assert isinstance(saved_optimizer, OptimizerConfig)
    length, saved_length = (
        config.optimizer.decay_steps or config.steps,
        saved_optimizer.decay_steps or saved_settings.steps,
    )
    rates: list[Any] = [
        learning_rate_schedule(optimizer, schedule_steps)(step)
        for optimizer, schedule_steps in ((config.optimizer, length), (saved_optimizer, saved_length))
    ]
    new_rate, old_rate = map(float, rates)
    if length == saved_length or abs(new_rate - old_rate) <= 0.01 * old_rate:
        return None
    return (
        f"the learning rate at step {step} changes from {old_rate:.2g} to {new_rate:.2g}, because its schedule now has "
        f"{length} steps instead of {saved_length}. To keep the schedule, add optimizer.decay_steps={saved_length}"
    )


def _find_changes(requested: Any, saved: dict[Any, Any], prefix: str = "") -> dict[str, tuple[str, str]]:
    if requested.get("name") != saved.get("name") and prefix:
        return {f"{prefix}name": (override_text(requested.get("name")), override_text(saved.get("name")))}
    changes: dict[str, tuple[str, str]] = {}
    for key in [key for key in requested if key in saved and f"{prefix}{key}" not in _UNREPORTED_SETTINGS]:
        new_value, saved_value = requested[key], saved[key]
        if isinstance(new_value, dict) and isinstance(saved_value, dict):
            changes |= _find_changes(new_value, saved_value, f"{prefix}{key}.")
        elif new_value != saved_value:
            changes[f"{prefix}{key}"] = (override_text(new_value), override_text(saved_value))
    return changes


def package_versions() -> dict[str, str]:
    """Return the versions of the packages in `_PACKAGES`, by package. Leaves out those that are not installed."""
    return {package: package_version for package in _PACKAGES if (package_version := installed_version(package))}


@cache
def installed_version(package: str) -> str | None:
    """Return the version of a package, or None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def split_flags(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split arguments into flags (with their values) and overrides. Hydra requires overrides to be contiguous."""
    flags, overrides, takes_value = [], [], False
    for argument in arguments:
        is_flag = takes_value or argument.startswith("-")
        (flags if is_flag else overrides).append(argument)
        takes_value = not takes_value and argument in _FLAGS_WITH_VALUE
    return flags, overrides


def split_override(argument: str) -> tuple[str, str]:
    """Split an override such as `+name='a b'` into its key without `+` or `~`, and its value without quotes."""
    key, _, value = argument.partition("=")
    if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
        value = value[1:-1].replace(f"\\{value[0]}", value[0])
    return key.lstrip("+~"), value


def key_values(arguments: Sequence[str]) -> dict[str, str]:
    """Return the values of the overrides among arguments, by key. If a key is repeated, the last value counts."""
    return dict(split_override(argument) for argument in split_flags(arguments)[1] if "=" in argument)
