"""Finds the available chips and targets, in the package and in the folders that Hydra searches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar
from weakref import WeakKeyDictionary

from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigSource
from hydra.types import RunMode
from omegaconf import OmegaConf

from valkyrie.hardware.chips import CHIP_GROUP, known_chips
from valkyrie.hardware.names import parse_target
from valkyrie.hardware.target import ChipConfig, TargetConfig
from valkyrie.paths import config_names, read_config

Schema = TypeVar("Schema")

SEARCH_PATH = "valkyrie://groups"
"""Entry of Hydra's search path for `ValkyrieSource`, which has the schemas. Hydra searches it after all folders."""

_user_configs: WeakKeyDictionary[ConfigLoader, dict[str, object]] = WeakKeyDictionary()


class Chips(Mapping[str, ChipConfig]):
    """Configs by chip name, for the chips that ship with Valkyrie and those in the user's config folders.

    A user's file is read when its chip is first accessed. Access raises ValueError if an alias in the file is the name
    of another chip that ships with Valkyrie.
    """

    def __getitem__(self, name: str) -> ChipConfig:
        user_chip = None if name in config_names(CHIP_GROUP) else _read_user_config(f"{CHIP_GROUP}/{name}", ChipConfig)
        if user_chip is None:
            return known_chips()[name]
        if taken := sorted({*user_chip.aliases} & {*config_names(CHIP_GROUP)} - {user_chip.name}):
            raise ValueError(
                f"target.chip={name}: {CHIP_GROUP}/{name}.yaml has the alias {taken[0]}, but {taken[0]} is another "
                "chip. Remove that alias."
            )
        return user_chip

    def __iter__(self) -> Iterator[str]:
        return iter(choice_names(CHIP_GROUP))

    def __len__(self) -> int:
        return len(choice_names(CHIP_GROUP))


def get_target(name: str) -> TargetConfig:
    """Return a target by name: `target/NAME.yaml` of the package or of the user, or else a slice such as `v4-64`.

    Ignores spaces around the name. Raises ValueError for any other name.
    """
    name = name.strip()
    if name in config_names("target"):
        return read_config("target", name, TargetConfig)
    return _read_user_config(f"target/{name}", TargetConfig) or parse_target(name, Chips(), choice_names("target"))


def choice_names(group: str) -> list[str]:
    """Return the sorted names of a group's YAML files, in the package and in the folders that Hydra searches."""
    sources = [source for source in _sources() if source.is_group(group)]
    return sorted({*config_names(group), *(n for source in sources for n in source.list(group, ObjectType.CONFIG))})


def _read_user_config(path: str, schema: type[Schema]) -> Schema | None:
    """Return a user's config, composed by Hydra with its defaults list, or None if there is no such file."""
    loader = _loader()
    if loader is None or not any(source.is_config(path) for source in loader.get_sources()):
        return None
    configs = _user_configs.setdefault(loader, {})
    if path not in configs:
        config = loader.load_configuration(path, [f"hydra.searchpath=[{SEARCH_PATH}]"], RunMode.RUN)
        values = OmegaConf.select(config, path.rpartition("/")[0].replace("/", "."))
        configs[path] = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), values))
    value = configs[path]
    assert isinstance(value, schema), path
    return value


def _sources() -> list[ConfigSource]:
    loader = _loader()
    return [] if loader is None else loader.get_sources()


def _loader() -> ConfigLoader | None:
    """Return the loader of the running Hydra, or None outside of Hydra."""
    hydra = GlobalHydra.instance()
    return hydra.config_loader() if hydra.is_initialized() else None
