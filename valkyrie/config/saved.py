"""Loads saved settings from a run folder or from a file given by `--config-path`. Does not import JAX.

Hydra composes the saved settings again. Each group comes from the file unless the command line chooses another config
of that group. Therefore every argument that works for a new run also works for a saved one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import zip_longest
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from valkyrie.checkpoint import latest_step
from valkyrie.config.compose import AS_SAVED, GROUPS, saved_groups
from valkyrie.config.files import check_file
from valkyrie.config.modes import reads_run
from valkyrie.config.refusals import drop_foreign_keys
from valkyrie.config.run import FAMILIES, HEADER, OPTIONAL_GROUPS, RunConfig
from valkyrie.extensions import add_import_path
from valkyrie.paths import conf_dir, unused_path
from valkyrie.runs.folder import (
    RUN_FILE,
    find_run,
    key_values,
    read_settings,
    run_from_record,
    saved_run,
    split_flags,
    split_override,
)

CONFIG_PATH_FLAGS = ("--config-path", "-cp")
"""Flags for the folder of the primary config."""
CONFIG_DIR_FLAGS = ("--config-dir", "-cd")
"""Flags for the folder of the user's configs and modules."""
_CONFIG_NAME_FLAGS = ("--config-name", "-cn")
CONFIG_FLAGS = (*CONFIG_PATH_FLAGS, *_CONFIG_NAME_FLAGS, *CONFIG_DIR_FLAGS)
"""Flags that select config files and folders."""
SETTINGS_VARIABLE = "VALKYRIE_SETTINGS"
"""Environment variable that passes the settings file to the jobs of a multirun."""
SAVED_RUN = "saved_run"
"""Name of the primary config with saved settings in Hydra's config store."""


@dataclass(frozen=True)
class PrimaryConfig:
    """Hydra's primary config: its name, its folder (None for the package's), and the arguments to compose it with."""

    name: str
    folder: str | None
    arguments: list[str]


def find_primary_config(
    arguments: Sequence[str], *, folder: Path | None = None, read_run: bool = True
) -> PrimaryConfig:
    """Return the primary config for these arguments. Registers saved settings, if any, with Hydra.

    Saved settings come from the file that the arguments name (`find_complete_config`), or else from `folder`, or else,
    if `read_run` is true, from the trained run that the arguments select (`find_run_to_read`). In the last two cases,
    `resume` is set to the folder. Also adds the folders of `modules=` to the import path.

    Raises ValueError if a folder of `modules=` does not exist, if a file is damaged or incomplete, and for the same
    reasons as `find_complete_config` and `find_run_to_read`.
    """
    add_import_path(_module_folders(arguments))
    file = find_complete_config(arguments)
    if file is not None:
        values = _read_settings_file(file, arguments)
        _register_settings(values, file)
        return PrimaryConfig(SAVED_RUN, None, _remove_flags(arguments, (*CONFIG_PATH_FLAGS, *_CONFIG_NAME_FLAGS)))
    folder = folder or (find_run_to_read(arguments) if read_run else None)
    if folder is None:
        return PrimaryConfig(config_name(arguments), config_path(arguments), list(arguments))
    values = OmegaConf.create(saved_run(folder).record())
    values.resume = str(folder)
    _register_settings(values, None)
    flags, overrides = split_flags(arguments)
    return PrimaryConfig(SAVED_RUN, None, [*flags, *(o for o in overrides if split_override(o)[0] != "resume")])


def find_run_to_read(arguments: Sequence[str]) -> Path | None:
    """Return the folder of the trained run that provides the initial settings, or None if no run provides them.

    This is the run of `resume=`. If `resume` is not set or null, modes that read a run (`mode=eval`, `mode=generate`,
    ...) use the run of `name=`, or else the latest run; other modes use none. Raises ValueError if the run does not
    exist, if `resume=` is empty, or, in a mode that does not read a run, if `resume=` and `name=` are different runs.
    """
    values = key_values(arguments)
    resume, name, key = values.get("resume"), values.get("name", "null"), "resume="
    mode_reads_run = reads_run(values.get("mode"))
    if resume == "":
        raise ValueError(
            "resume= has no value. Is a shell variable not set? Write resume=latest, resume=NAME or resume=FOLDER."
        )
    if resume in (None, "null"):
        if not mode_reads_run:
            return None
        key, resume = ("resume=", "latest") if name == "null" else ("name=", name)
    runs = Path(values.get("runs") or RunConfig.runs)
    folder = find_run(runs, resume, key=key)
    if not mode_reads_run and name != "null" and (runs / name).resolve() != folder.resolve():
        raise ValueError(
            f"resume={resume} continues the run {folder.name}, but name={name} is another run. Leave out name= to "
            f"continue {folder.name}, or leave out resume= to train {name}."
        )
    return folder


def find_complete_config(arguments: Sequence[str]) -> Path | None:
    """Return the primary config file that the arguments name, or None if there is none or it has a defaults list.

    Raises ValueError for a `run.yaml` with a defaults list: Hydra would obey the `hydra:` section of a file that may
    come from someone else.
    """
    folder = config_path(arguments)
    if folder is None:
        return None
    file = Path(folder) / f"{config_name(arguments)}.yaml"
    if not file.is_file():
        return None
    check_file(file)
    if not re.search(r"^defaults\s*:", file.read_text(), re.MULTILINE):
        return file
    if file.name == RUN_FILE:
        raise ValueError(
            f"{file} has a defaults list, but Valkyrie never writes one into {RUN_FILE}. If you wrote this file "
            f"yourself, give it a name other than {RUN_FILE}."
        )
    return None


def config_path(arguments: Sequence[str]) -> str | None:
    """Return the absolute path of the primary config's folder, or None if the arguments name none."""
    folder = _last_flag_value(arguments, CONFIG_PATH_FLAGS)
    return None if folder is None else os.path.abspath(folder)


def config_name(arguments: Sequence[str]) -> str:
    """Return the name of the primary config, by default `train`."""
    return (_last_flag_value(arguments, _CONFIG_NAME_FLAGS) or "train").removesuffix(".yaml")


def config_dirs(arguments: Sequence[str]) -> list[str]:
    """Return the absolute path of the `--config-dir` folder in a list, or an empty list without that flag."""
    folder = _last_flag_value(arguments, CONFIG_DIR_FLAGS)
    return [] if folder is None else [str(Path(folder).resolve())]


def _module_folders(arguments: Sequence[str]) -> list[str]:
    """Return the folders that `modules=` names. Raises ValueError if one is not a folder."""
    overrides = [o for o in split_flags(arguments)[1] if split_override(o)[0] == "modules"]
    values = [override.value() for override in OverridesParser.create().parse_overrides(overrides)]
    folders = [str(folder) for value in values if isinstance(value, list) for folder in value]
    for folder in folders:
        if os.path.isfile(folder):
            parent = os.path.dirname(folder) or "."
            raise ValueError(f"modules=[{folder}] is a file, not a folder. Name its folder: modules=[{parent}].")
        if not os.path.isdir(folder):
            raise ValueError(f"modules=[{folder}]: there is no such folder. Name the folder of your Python modules.")
    return folders


def _read_settings_file(file: Path, arguments: Sequence[str]) -> DictConfig:
    """Return the settings in a file without a defaults list.

    A `run.yaml` is repeated as a new run: missing keys get their defaults, and the name is changed to an unused one
    unless the arguments set `name`. If the mode reads a trained run and the file's folder has a checkpoint, `resume` is
    set to that folder instead. Raises ValueError if the file is damaged, or if it is not a `run.yaml` and lacks a key.
    """
    is_record = file.read_bytes().startswith(HEADER.encode())
    values = read_settings(file, has_hydra=is_record)
    # Interpolations are not resolved, because nothing is registered yet.
    present_keys = {str(key) for key in values if not OmegaConf.is_missing(values, key)}
    missing_keys = (
        [] if is_record else [f.name for f in fields(RunConfig) if f.name not in present_keys | OPTIONAL_GROUPS]
    )
    groups = present_keys & {*GROUPS} - OPTIONAL_GROUPS
    malformed_groups = [group for group in GROUPS if group in groups and not isinstance(values.get(group), DictConfig)]
    if missing_keys or (malformed_groups and not is_record):
        raise ValueError(
            f"{file} has no defaults list, so it must set every key, but "
            f"{', '.join([*missing_keys, *malformed_groups])} "
            f"{'is' if len(missing_keys + malformed_groups) == 1 else 'are'} missing. To set only some keys, move it "
            f"to FOLDER/experiment/{file.stem}.yaml with the first line '# @package _global_', and use --config-dir "
            f"FOLDER experiment={file.stem}."
        )
    if is_record:
        values = OmegaConf.create(run_from_record(values, file).record())  # with defaults for missing keys
        overrides = key_values(arguments)
        values.resume = None
        if reads_run(overrides.get("mode", str(values.mode.name))) and latest_step(file.parent) is not None:
            values.resume = str(file.parent)
        elif values.name is not None and "name" not in overrides:
            values.name = unused_path(Path(overrides.get("runs") or values.runs) / values.name).name
    return values


def _register_settings(values: DictConfig, file: Path | None) -> None:
    """Register these settings with Hydra. If `file` is given, the jobs of a multirun read the settings from it."""
    add_import_path(values.modules)
    shipped_config: Any = OmegaConf.load(conf_dir() / "train.yaml")
    defaults_after_self = shipped_config.defaults[list(shipped_config.defaults).index("_self_") :]
    for group in ("mode", "data"):
        drop_foreign_keys(values, group)
    present_groups = [group for group in GROUPS if group not in OPTIONAL_GROUPS or values.get(group) is not None]
    for group in present_groups:
        schema = f"{OmegaConf.select(values, FAMILIES[group].key) if group in FAMILIES else group}_schema"
        chip_schema = ["chip/chip_schema@chip"] if group == "target" and values.target.chip is not None else []
        saved_groups[group] = OmegaConf.create(
            {"defaults": [schema, *chip_schema, "_self_"], **_plain_dict(values[group])}
        )
    top_level_settings = {
        str(key): value for key, value in _plain_dict(values).items() if key not in (*GROUPS, "hydra")
    }
    hydra = shipped_config.hydra
    if file is not None:
        hydra.job.env_set = {SETTINGS_VARIABLE: str(file)}
    defaults = [
        "run_schema",
        *({group: AS_SAVED if group in present_groups else None} for group in GROUPS),
        *defaults_after_self,
    ]
    ConfigStore.instance().store(
        name=SAVED_RUN, node={"defaults": defaults, **top_level_settings, "hydra": hydra}, provider="valkyrie"
    )


def _plain_dict(values: DictConfig) -> dict[str, object]:
    plain = OmegaConf.to_container(values, resolve=False)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def _remove_flags(arguments: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Remove some flags and their values from the arguments."""
    remaining_arguments, value_follows = [], False
    for argument in arguments:
        name, sign, _ = argument.partition("=")
        if name not in flags and not value_follows:
            remaining_arguments.append(argument)
        value_follows = name in flags and not sign
    return remaining_arguments


def _last_flag_value(arguments: Sequence[str], names: Sequence[str]) -> str | None:
    """Return the last value of a flag, given as `FLAG=VALUE` or `FLAG VALUE`, or None if the flag is not given.

    `names` are the long and the short name of the flag.
    """
    last_value = None
    for argument, next_argument in zip_longest(arguments, arguments[1:]):
        name, sign, value = argument.partition("=")
        if name in names:
            last_value = value if sign else next_argument
    return last_value
