"""The list of model families. A new one is one file, one entry here and one YAML in `conf/model`."""

from __future__ import annotations

from importlib import import_module
from typing import NamedTuple


class Family(NamedTuple):
    """Where a family's config dataclass and its module class are found, as `module:name`.

    They are imported when asked for, so that a config is checked before JAX is loaded.
    """

    config: str
    module: str


FAMILIES: dict[str, Family] = {
    "gpt": Family("valkyrie.models.gpt:GPTConfig", "valkyrie.models.valkyrie:Valkyrie"),
    "valkyrie": Family("valkyrie.models.config:ValkyrieConfig", "valkyrie.models.valkyrie:Valkyrie"),
}


def config_class(family: str) -> type:
    """Return the config dataclass of a family; ValueError names the known ones."""
    return _load(_family(family).config)


def module_class(family: str) -> type:
    """Return the Flax NNX module class of a family; imports JAX."""
    return _load(_family(family).module)


def _family(name: str) -> Family:
    if name not in FAMILIES:
        raise ValueError(f"model.family={name} is not known. Known: {', '.join(sorted(FAMILIES))}.")
    return FAMILIES[name]


def _load(path: str) -> type:
    module, name = path.split(":")
    return getattr(import_module(module), name)
