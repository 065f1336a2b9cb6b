"""Decides where a run lives on disk, which run a command continues, and what is written about it. Imports no JAX."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from valkyrie.checkpoint import FOLDER, latest_step
from valkyrie.run import Run, as_written

COMMAND = "command.json"
"""The file of a run folder with the arguments of its last training; `resume` composes from them."""
RUN = "run.yaml"
"""The file of a run folder with every setting of its last training."""

_NOT_OF_THE_TRAINING = {"name", "runs", "resume", "steps", "mode", "trial", "tracking", "checkpoint", "log_every"}
_NOT_OF_THE_TRAINING |= {"eval_every", "prompt", "sample_tokens", "temperature", "top_k", "hydra"}
_NOT_OF_THE_TRAINING |= {"data.cache_dir", "data.workers"}
"""The settings that a run may change from one training to the next without a word."""

_FLAGS_WITH_VALUE = {"--config-dir", "-cd", "--config-path", "-cp", "--config-name", "-cn"}
_FLAGS_WITH_VALUE |= {"--cfg", "-c", "--package", "-p", "--experimental-rerun"}
"""The flags of Hydra whose value is the next argument."""

_PACKAGES = ("valkyrie-jax", "jax", "jaxlib", "libtpu", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


def find_run(runs: Path, resume: str) -> Path:
    """Return the folder that `resume` means: `latest`, a run's name under `runs`, or a path; ValueError names some."""
    candidates = sorted(
        (f for f in runs.glob("*") if latest_step(f) is not None), key=lambda f: (f / FOLDER).stat().st_mtime
    )
    if resume == "latest":
        if not candidates:
            raise ValueError(f"resume=latest found no run with a checkpoint under runs={runs}. Train one first.")
        return candidates[-1]
    for folder in (runs / resume, Path(resume)):
        if latest_step(folder) is not None:
            return folder
    known = ", ".join(f.name for f in reversed(candidates[-5:])) or "none"
    raise ValueError(f"resume={resume} is no run with a checkpoint under runs={runs}. Newest there: {known}.")


def run_folder(run: Run) -> Path:
    """Return the folder of this run: the one it resumes or is named after, or a new one of model, layout and time.

    ValueError for a name that is not one folder under `runs`: `resume=latest` would not find it.
    """
    runs = Path(run.config.runs)
    if run.config.resume is not None:
        return find_run(runs, run.config.resume)
    name = run.config.name
    if name is not None:
        if len(Path(name).parts) > 1:
            parent, last = runs / Path(name).parent, Path(name).name
            raise ValueError(
                f"name={name} is a folder in a folder: a run lies right under runs={runs}, where resume=latest looks. "
                f"Use runs={parent} name={last}, or name={name.strip('/').replace('/', '-')}."
            )
        return runs / name
    return _unused(runs / f"{run.model.name}-{run.layout.name}-{time.strftime('%Y%m%d-%H%M%S')}")


def write_about(run: Run, folder: Path, arguments: Sequence[str]) -> None:
    """Write `run.yaml`, `versions.json` and the command into the run folder."""
    folder.mkdir(parents=True, exist_ok=True)
    run.save(folder / RUN)
    (folder / "versions.json").write_text(json.dumps(versions(), indent=2) + "\n")
    kept = [a for a in arguments if key_value(a)[0] not in ("resume", "mode")]
    (folder / COMMAND).write_text(json.dumps(kept) + "\n")


def changed_settings(run: Run, folder: Path) -> dict[str, tuple[str, str]]:
    """Return the settings that differ from those in the run folder by key: (asked, saved), as they are written.

    Of a group with another choice, only that choice. None where the folder says nothing of its settings.
    """
    try:
        saved = OmegaConf.to_container(OmegaConf.load(folder / RUN))
    except (FileNotFoundError, OmegaConfBaseException, YAMLError):  # a kill in the middle of writing it
        return {}
    asked = OmegaConf.to_container(OmegaConf.structured(run.config), enum_to_str=True)
    return _changed(asked, saved) if isinstance(saved, dict) else {}


def _changed(asked: Any, saved: dict[Any, Any], prefix: str = "") -> dict[str, tuple[str, str]]:
    if asked.get("name") != saved.get("name") and prefix:
        return {f"{prefix}name": (as_written(asked.get("name")), as_written(saved.get("name")))}
    found: dict[str, tuple[str, str]] = {}
    for key in [key for key in asked if key in saved and f"{prefix}{key}" not in _NOT_OF_THE_TRAINING]:
        now, was = asked[key], saved[key]
        if isinstance(now, dict) and isinstance(was, dict):
            found |= _changed(now, was, f"{prefix}{key}.")
        elif now != was:
            found[f"{prefix}{key}"] = (as_written(now), as_written(was))
    return found


def versions() -> dict[str, str]:
    """Return the versions of the packages that decide a run's numbers."""
    return dict(_versions())


@cache
def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def resumed_arguments(arguments: Sequence[str], without: Sequence[str] = ()) -> list[str]:
    """Return the arguments of the run that `resume=` names, with the given ones in place of those they repeat.

    `mode=eval` and `mode=generate` mean the run of `name=`, or the latest, without a `resume=`. Other arguments
    come back as they are. Of the run's own, `runs` and the keys in `without` are left out.
    ValueError where there is no such run, or where a training is given the `name` of another.
    """
    given = dict(key_value(a) for a in arguments)
    resume = given.get("resume")
    if resume in (None, "null"):
        if given.get("mode") not in ("eval", "generate"):
            return list(arguments)
        resume = given.get("name", "latest")
    runs = Path(given.get("runs") or "runs")
    folder = find_run(runs, resume)
    name = given.get("name", "null")
    if given.get("mode") not in ("eval", "generate") and name != "null" and (runs / name).resolve() != folder.resolve():
        raise ValueError(
            f"resume={resume} goes on with the run {folder.name}, and name={name} is another. Leave out name= to go on "
            f"with {folder.name}, or resume= to train {name}."
        )
    command = folder / COMMAND
    if not command.is_file():
        return list(arguments)
    dropped = {*given, *without, "resume", "name", "mode", "runs"}
    saved_flags, saved = parts_of(json.loads(command.read_text()))
    flags, overrides = parts_of(arguments)
    return [*saved_flags, *flags, *(a for a in saved if key_value(a)[0] not in dropped), *overrides]


def parts_of(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the flags among arguments with their values, and the overrides, which Hydra wants in one piece."""
    flags, overrides, takes_value = [], [], False
    for argument in arguments:
        is_flag = takes_value or argument.startswith("-")
        (flags if is_flag else overrides).append(argument)
        takes_value = not takes_value and argument in _FLAGS_WITH_VALUE
    return flags, overrides


def key_value(argument: str) -> tuple[str, str]:
    """Return the key of an override, without the marks of appending, and its value, without quotes."""
    key, _, value = argument.partition("=")
    return key.lstrip("+~"), value.strip("\"'")


def _unused(folder: Path) -> Path:
    candidate, number = folder, 2
    while candidate.exists():
        candidate, number = folder.with_name(f"{folder.name}-{number}"), number + 1
    return candidate
