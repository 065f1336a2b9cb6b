"""Decides where the configuration that ships with the package lies, and how one of its files is read without Hydra."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

Schema = TypeVar("Schema")


def conf_dir() -> Path:
    """Return the folder of config groups: `valkyrie/_conf` in an installed wheel, `conf/` in a checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "_conf"
    return installed if installed.is_dir() else package.parent / "conf"


def read_group(group: str, schema: type[Schema]) -> list[tuple[Schema, list[str]]]:
    """Return every config of a group, by file name, as its dataclass, with the names in its defaults list."""
    from omegaconf import DictConfig, OmegaConf

    found = []
    for path in sorted((conf_dir() / group).glob("*.yaml")):
        values = OmegaConf.load(path)
        assert isinstance(values, DictConfig), path
        bases = [str(base) for base in values.pop("defaults", [])]
        value = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), values))
        assert isinstance(value, schema), path
        found.append((value, bases))
    return found
