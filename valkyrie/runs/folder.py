"""The run folder: its path, the run that a command continues, and the files that describe it. Imports no JAX."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from valkyrie.checkpoint import has_saved, latest_step
from valkyrie.checkpoint.location import FOLDER
from valkyrie.config.modes import reads_run
from valkyrie.config.run import Run
from valkyrie.extensions import check_modules
from valkyrie.hardware.chips import with_shipped_figures
from valkyrie.optim import OptimizerConfig, learning_rate, with_family
from valkyrie.paths import disk_errors, unused_path, write_atomic
from valkyrie.problems import first_line, suggest
from valkyrie.processes.locks import WRITER
from valkyrie.trees import override_text

RUN = "run.yaml"
"""File of a run folder with all settings of its last training. `resume` starts with them."""

_NOT_OF_THE_TRAINING = {
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
_NOT_OF_THE_TRAINING |= {"profile", "eval_every", "prompt", "sample_tokens", "temperature", "top_k", "hydra"}
_NOT_OF_THE_TRAINING |= {"data.cache_dir", "data.workers", "code_eval", "code_eval_every", "sample_every"}
"""Settings that a run may change from one training to the next without notice."""

_FLAGS_WITH_VALUE = {"--config-dir", "-cd", "--config-path", "-cp", "--config-name", "-cn"}
_FLAGS_WITH_VALUE |= {"--cfg", "-c", "--package", "-p", "--experimental-rerun"}
"""Flags of Hydra with their value in the next argument."""

_PACKAGES = ("valkyrie-jax", "jax", "jaxlib", "libtpu", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


def find_run(runs: Path, resume: str) -> Path:
    """Return the folder of `resume`: `latest`, a run's name under `runs`, or a path. Raises ValueError if unknown."""
    candidates = sorted((f for f in runs.glob("*") if has_saved(f)), key=_last_saved)
    if resume == "latest":
        if not candidates:
            raise ValueError(f"resume=latest found no run with a checkpoint under runs={runs}. Train one first.")
        return candidates[-1]
    for folder in (runs / resume, Path(resume)):
        if has_saved(folder):
            return folder
    for folder in Path(resume).absolute().parents:
        if Path(resume).exists() and has_saved(folder):
            raise ValueError(f"resume={resume} lies in a run folder. Write resume={folder}.")
    known = ", ".join(f.name for f in reversed(candidates[-5:])) or "none"
    names = {f.name.lower(): f.name for f in candidates}
    near = suggest(resume.lower(), names, cutoff=0.75)
    hint = f" Did you mean resume={names[near]}?" if near else ""
    raise ValueError(f"resume={resume} is no run with a checkpoint under runs={runs}.{hint} Newest there: {known}.")


def _last_saved(folder: Path) -> float:
    """Return when a run last saved: the time of its checkpoint folder, or of itself if checkpoints are elsewhere."""
    checkpoints = folder / FOLDER
    return (checkpoints if checkpoints.exists() else folder).stat().st_mtime


def run_folder(run: Run) -> Path:
    """Return the folder of this run: the one that it resumes, `name`, or a new one of model, layout and time.

    A compile or measurement of a trained run has a folder next to it, so that its settings do not replace those of the
    training. Raises ValueError for a name with several folders, because `resume=latest` would not find it.
    """
    runs, mode = Path(run.config.runs), run.config.mode.name
    belongs = mode == "train" or reads_run(mode)
    if run.config.resume is not None:
        folder = find_run(runs, run.config.resume)
        return folder if belongs else folder.with_name(f"{folder.name}-{mode}")
    name = run.config.name
    if name is not None:
        if len(Path(name).parts) > 1:
            parent, last = runs / Path(name).parent, Path(name).name
            raise ValueError(
                f"name={name} is a folder in a folder: a run lies right under runs={runs}, where resume=latest looks. "
                f"Use runs={parent} name={last}, or name={name.strip('/').replace('/', '-')}."
            )
        beside = not belongs and latest_step(runs / name) is not None
        folder = runs / (f"{name}-{mode}" if beside else name)
        if _has_other_files(folder):
            raise ValueError(f"name={name}: {folder} has files and no {RUN}: it is not a run folder. Use another name.")
        return folder
    return unused_path(runs / f"{run.model.name}-{run.layout.name}-{time.strftime('%Y%m%d-%H%M%S')}")


def _has_other_files(folder: Path) -> bool:
    """Return whether a folder has files, but none that a run writes first."""
    if not folder.is_dir() or any((folder / name).exists() for name in (RUN, WRITER)) or has_saved(folder):
        return False
    return any(not entry.name.startswith(".") for entry in folder.iterdir())


def kept_text(folder: Path, name: str) -> Path:
    """Return the file in which `mode.keep` stores a text. Raises ValueError if the name is not a file name."""
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"mode.keep={name} is no name of a file. Use a word, such as mode.keep=story.")
    return folder / "texts" / f"{name}.npz"


def write_about(run: Run, folder: Path) -> None:
    """Write `run.yaml` and `versions.json` into the run folder."""
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    run.save(folder / RUN)
    write_atomic(folder / "versions.json", json.dumps(versions(), indent=2) + "\n")


def command_name(command: str = "valkyrie-train") -> str:
    """Return how to call a command: with `uv run` if that started this process, or else by its name."""
    return f"uv run {command}" if "UV_RUN_RECURSION_DEPTH" in os.environ else command


def saved_config(folder: Path) -> DictConfig:
    """Return the settings in a run folder's `run.yaml`. Raises ValueError if it is missing or damaged."""
    file = folder / RUN
    if file.is_file():
        return read_settings(file)
    if latest_step(folder) is None:
        raise ValueError(f"{folder} is no run folder: it has no {RUN}.")
    raise ValueError(f"{folder} has checkpoints, and no {RUN} with the settings of its run. {_again(folder)}")


def _again(folder: Path) -> str:
    name = shlex.quote(f"name={folder.absolute().name}")
    return f"Copy it back, or go on with {command_name()} {name} and the settings that the run was trained with."


def read_settings(file: Path, *, whole: bool = True) -> DictConfig:
    """Read a `run.yaml` or, with `whole=False`, the output of `--cfg job`. Raises ValueError if it is incomplete."""
    remedy = f"Delete it first. {_again(file.absolute().parent)}" if file.name == RUN else "Copy it again."
    try:
        config = OmegaConf.load(file)
    except (OmegaConfBaseException, OSError, UnicodeDecodeError, YAMLError) as error:
        raise ValueError(f"{file} is damaged ({first_line(error)}). {remedy}") from error
    last = OmegaConf.select(config, "hydra.hydra_logging") if isinstance(config, DictConfig) else None
    ends_well = isinstance(last, DictConfig) and "root" in last and not isinstance(last.root, str)
    if not isinstance(config, DictConfig) or not (ends_well or not whole):
        raise ValueError(f"{file} is damaged (it ends too early). {remedy}")
    check_modules([str(folder) for folder in config.get("modules") or []], file)
    if isinstance(config.get("optimizer"), DictConfig):
        saved: Any = OmegaConf.to_container(config.optimizer, resolve=False)
        config.optimizer = with_family(saved)
    if isinstance(OmegaConf.select(config, "target.chip", throw_on_missing=False), DictConfig):
        chip: Any = OmegaConf.to_container(config.target.chip, resolve=False)
        config.target.chip = with_shipped_figures(chip)
    return config


def changed_settings(run: Run, folder: Path) -> dict[str, tuple[str, str]]:
    """Return the settings that differ from those in the run folder, as texts by key: (requested, saved).

    If another choice of a group is requested, only the choice is listed. Empty if the folder has no `run.yaml`. Raises
    ValueError if that is damaged.
    """
    if not (folder / RUN).is_file():
        return {}
    saved = OmegaConf.to_container(saved_config(folder))
    assert isinstance(saved, dict)
    return _changed(run.record(), saved)


def continuation(run: Run, folder: Path, step: int, changed: dict[str, tuple[str, str]]) -> str:
    """Describe how a run continues: its steps, and the settings that differ from before."""
    config, was = run.config, saved_config(folder).steps if (folder / RUN).is_file() else run.config.steps
    differs = {"steps": (str(config.steps), str(was))} if was != config.steps else {}
    listed = ", ".join(f"{key}={now} (was {before})" for key, (now, before) in (differs | changed).items())
    return f"continuing {folder.name} from step {step} to step {config.steps}{': ' if listed else ''}{listed}"


def schedule_change(run: Run, folder: Path, step: int) -> str | None:
    """Describe the jump of the learning rate at `step` if a continued run has a schedule of another length, else None.

    Raises ValueError if `run.yaml` is damaged.
    """
    if not (folder / RUN).is_file():
        return None
    config, saved = run.config, saved_config(folder)
    known = {f.name: saved.optimizer[f.name] for f in fields(OptimizerConfig) if f.name in saved.optimizer}
    before = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(OptimizerConfig), known))
    assert isinstance(before, OptimizerConfig)
    length, was = config.optimizer.decay_steps or config.steps, before.decay_steps or saved.steps
    rates: list[Any] = [learning_rate(o, n)(step) for o, n in ((config.optimizer, length), (before, was))]
    new, old = map(float, rates)
    if length == was or abs(new - old) <= 0.01 * old:
        return None
    return (
        f"learning rate at step {step}: {new:.2g}, and {old:.2g} so far: its schedule now takes {length} steps (it "
        f"took {was}). To keep the schedule and its last rate, add optimizer.decay_steps={was}"
    )


def _changed(requested: Any, saved: dict[Any, Any], prefix: str = "") -> dict[str, tuple[str, str]]:
    if requested.get("name") != saved.get("name") and prefix:
        return {f"{prefix}name": (override_text(requested.get("name")), override_text(saved.get("name")))}
    changes: dict[str, tuple[str, str]] = {}
    for key in [key for key in requested if key in saved and f"{prefix}{key}" not in _NOT_OF_THE_TRAINING]:
        now, was = requested[key], saved[key]
        if isinstance(now, dict) and isinstance(was, dict):
            changes |= _changed(now, was, f"{prefix}{key}.")
        elif now != was:
            changes[f"{prefix}{key}"] = (override_text(now), override_text(was))
    return changes


def versions() -> dict[str, str]:
    """Return the versions of the installed packages that affect a run's numbers."""
    return {package: installed for package in _PACKAGES if (installed := installed_version(package))}


@cache
def installed_version(package: str) -> str | None:
    """Return the version of a package, or None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def parts_of(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split arguments into flags with their values, and overrides, which Hydra requires to be contiguous."""
    flags, overrides, takes_value = [], [], False
    for argument in arguments:
        is_flag = takes_value or argument.startswith("-")
        (flags if is_flag else overrides).append(argument)
        takes_value = not takes_value and argument in _FLAGS_WITH_VALUE
    return flags, overrides


def key_value(argument: str) -> tuple[str, str]:
    """Return the key of an override without `+` and `~`, and its value without quotes."""
    key, _, value = argument.partition("=")
    return key.lstrip("+~"), value.strip("\"'")


def key_values(arguments: Sequence[str]) -> dict[str, str]:
    """Return the values of the overrides among arguments by key. The last one of equal keys counts."""
    return dict(key_value(argument) for argument in parts_of(arguments)[1] if "=" in argument)
