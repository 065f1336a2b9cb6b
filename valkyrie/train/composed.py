"""Running a configuration that is already composed: a `run.yaml`, or the output of `--cfg job`."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

from omegaconf import DictConfig

from valkyrie.checkpoint import latest_step
from valkyrie.compose import SCHEMAS
from valkyrie.run import HEADER
from valkyrie.train.folder import COMMAND, key_value, parts_of, read_settings

CONFIG_PATH = ("--config-path", "-cp")
"""The flags whose value is the folder of the whole configuration."""
_NAME, _DIR = ("--config-name", "-cn"), ("--config-dir", "-cd")
CONFIG_FLAGS = (*CONFIG_PATH, *_NAME, *_DIR)
"""The flags that say where the configuration lies."""
_SILENT = ("hydra.run.dir=.", "hydra.sweep.subdir=.", "hydra.output_subdir=null")
_SILENT += ("hydra/job_logging=disabled", "hydra/hydra_logging=disabled")
"""What `train.yaml` says of Hydra's own folders and logs."""


def composed_file(arguments: Sequence[str]) -> Path | None:
    """Return the file that the arguments name as their whole configuration, if it has no defaults list.

    ValueError where it is a damaged `run.yaml`: what it lacks would be taken from the defaults.
    """
    folder = config_path(arguments)
    if folder is None:
        return None
    file = Path(folder) / f"{config_name(arguments)}.yaml"
    if not file.is_file():
        return None
    if file.read_bytes().startswith(HEADER.encode()):
        read_settings(file)
    return None if _has(file, "defaults") else file


def config_path(arguments: Sequence[str]) -> str | None:
    """Return the folder of the whole configuration that the arguments give, in full; None where they give none."""
    folder = _flag(arguments, CONFIG_PATH)
    return None if folder is None else os.path.abspath(folder)


def config_name(arguments: Sequence[str]) -> str:
    """Return the name of the whole configuration: `train`, unless the arguments give another."""
    return (_flag(arguments, _NAME) or "train").removesuffix(".yaml")


def config_dirs(arguments: Sequence[str]) -> list[str]:
    """Return the folder that the arguments give for configurations of the user's own, in full; at most one."""
    folder = _flag(arguments, _DIR)
    return [] if folder is None else [str(Path(folder).resolve())]


def without_outputs(arguments: Sequence[str], file: Path) -> list[str]:
    """Return the arguments for a composed file, with what keeps Hydra from folders and logs where the file has not."""
    if _has(file, "hydra"):
        return list(arguments)
    flags, overrides = parts_of(arguments)
    given = {key_value(override)[0] for override in overrides}
    return [*flags, *(silent for silent in _SILENT if key_value(silent)[0] not in given), *overrides]


def refuse_choices(config: DictConfig, file: Path | None) -> None:
    """Raise ValueError where a group was chosen in a composed file, which has only keys; None is no such file."""
    if file is None:
        return
    values = {group: config.get(group) for group in ("model", *SCHEMAS)}
    chosen = [f"{group}={value}" for group, value in values.items() if isinstance(value, str | int | float)]
    if not chosen:
        return
    keys = [c.replace("=", ".name=") if c.startswith("mode=") else f"{c.partition('=')[0]}.KEY=VALUE" for c in chosen]
    if (file.parent / COMMAND).is_file() and latest_step(file.parent) is not None:
        folder = file.parent.name if file.parent.parent == Path.cwd() / "runs" else file.parent
        other = f"valkyrie-train resume={folder} {' '.join(chosen)}"
    else:
        other = f"choose where it is composed: valkyrie-train {' '.join(chosen)} --cfg job"
    raise ValueError(
        f"{file} is composed already, so groups cannot be chosen in it ({', '.join(chosen)}). "
        f"Write {' '.join(keys)}, or {other}"
    )


def _flag(arguments: Sequence[str], names: Sequence[str]) -> str | None:
    """Return the last value of a flag, joined to it by `=` or standing behind it."""
    given = None
    for argument, following in zip_longest(arguments, arguments[1:]):
        name, joined, value = argument.partition("=")
        if name in names:
            given = value if joined else following
    return given


def _has(file: Path, key: str) -> bool:
    return re.search(rf"^{key}\s*:", file.read_text(), re.MULTILINE) is not None
