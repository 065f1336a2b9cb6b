"""Patches of Hydra and OmegaConf that let the tests compose runs in a third of the time.

Tests compose thousands of runs. Hydra loads about 40 configs for each, and merges them one by one.
"""

from __future__ import annotations

import copy
import pickle
import sys
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from hydra.errors import HydraException
from omegaconf import OmegaConf, flag_override
from omegaconf.errors import OmegaConfBaseException

from valkyrie.config.compose import FAMILIES, SCHEMAS_BY_PATH, ValkyrieSource, register

ROOT = Path(__file__).resolve().parent.parent


def patch_hydra() -> None:
    """Apply all patches."""
    register()
    _skip_repeated_work()
    _read_configs_once()
    _merge_groups_once()
    _compose_commands_once()


def _skip_repeated_work() -> None:
    """Patch Hydra and OmegaConf to skip repeated work.

    OmegaConf's parser runs once per text. Hydra compares parsed versions, lists the choices that a defaults list
    with interpolations may refer to, also for lists without interpolations, and copies its store with all schemas.
    """
    import hydra.version
    import omegaconf._utils
    import omegaconf.base
    from hydra._internal import defaults_list

    list_choices = defaults_list._create_interpolation_map

    def list_needed_choices(overrides: Any, defaults: list[Any], self_added: bool) -> Any:
        needed = any(default.is_interpolation() for default in defaults if not default.is_self())
        return list_choices(overrides, defaults, self_added) if needed else None

    defaults_list._create_interpolation_map = list_needed_choices
    ConfigStore.__deepcopy__ = lambda store, memo: store  # composing does not modify it
    hydra.version._get_version = cache(hydra.version._get_version)
    omegaconf.base.parse = omegaconf._utils.parse = lru_cache(4096)(omegaconf.base.parse)


def _read_configs_once() -> None:
    """Patch Hydra to load configs once: YAML files of this repository and of Hydra, and Valkyrie's schemas.

    Configs of a user's folder are loaded again, because they may change. The attribute `version` of a loaded config
    differs if its content may differ.
    """
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.config_repository import ConfigRepository

    load, loaded_configs = ConfigRepository.load_config, dict[Any, Any]()
    load_single, packaged_configs = ConfigLoaderImpl._load_single_config, dict[Any, bytes]()

    def load_config(repository: Any, config_path: str) -> Any:
        source = repository._find_object_source(config_path, ObjectType.CONFIG)
        version = None if source is None else _find_version(source, config_path.removesuffix(".yaml"))
        if version is None:
            return load(repository, config_path)
        key = (type(source), source.path, source.provider, config_path, version)
        if key not in loaded_configs:
            loaded_configs[key] = load(repository, config_path)
            loaded_configs[key].version = key
        return loaded_configs[key]

    def load_part(loader: Any, default: Any, repo: Any) -> Any:
        loaded = copy.copy(load_single(loader, default, repo))
        key = getattr(default, "only_key", None)
        if key is None or OmegaConf.get_type(loaded.config) is not dict:
            loaded.config = copy.deepcopy(loaded.config)  # merging modifies it
        else:
            loaded.config = OmegaConf.masked_copy(loaded.config, [k for k in loaded.config if k == key])
        return loaded

    def load_copy(loader: Any, default: Any, repo: Any) -> Any:
        version = getattr(repo.load_config(default.config_path), "version", None)
        if version is None:
            return load_part(loader, default, repo)
        key = (version, default.package, default.primary, getattr(default, "only_key", None))
        if key not in packaged_configs:
            packaged_configs[key] = pickle.dumps(load_part(loader, default, repo))
        return pickle.loads(packaged_configs[key])

    ConfigRepository.load_config = load_config
    ConfigLoaderImpl._load_single_config = load_copy


def _find_version(source: Any, path: str) -> object:
    """Return a value that differs if the content of a config may have changed, or None if it may change at any time."""
    match source.scheme():
        case "pkg":
            return True
        case "structured":
            return True if path.startswith("hydra/") else None
        case "file":
            file = Path(source.path, f"{path}.yaml")
            return file.stat().st_mtime_ns if file.is_relative_to(ROOT / "conf") and file.is_file() else None
        case scheme if scheme == ValkyrieSource.scheme():
            group, _, name = path.partition("/")
            if path in SCHEMAS_BY_PATH or group not in FAMILIES or not name.endswith("_schema"):
                return SCHEMAS_BY_PATH.get(path)
            family = FAMILIES[group].config_class(name.removesuffix("_schema"))
            return family if family.__module__.startswith("valkyrie.") else None
    return None


def _merge_groups_once() -> None:
    """Patch Hydra to merge equal configs of a group once. Overrides of values are applied to a copy.

    Configs of one group do not change another, so the groups of a run are merged separately, each with its part of the
    configs that may set any key, such as an experiment. The keys that have no group are merged with the group `hydra`.
    """
    from hydra._internal.config_loader_impl import ConfigLoaderImpl

    merge = ConfigLoaderImpl._compose_config_from_defaults_list
    merged_configs, merged_groups = dict[Any, bytes](), dict[Any, bytes]()

    def merge_group(loader: Any, defaults: list[Any], versions: list[object], repo: Any, group: str) -> Any:
        parts = [i for i, default in enumerate(defaults) if _group(default) in ("", group)]
        key = (group, *(versions[i] for i in parts))
        if key not in merged_groups:
            merged = merge(loader, [_select_key(defaults[i], group) for i in parts], repo)
            node = merged if group == "hydra" else merged._get_node(group)
            node._set_parent(None)  # pickles the group alone
            merged_groups[key] = pickle.dumps(node)
        return pickle.loads(merged_groups[key])

    def merge_once(loader: Any, defaults: list[Any], repo: Any) -> Any:
        try:
            versions = [_describe(default, repo.load_config(default.config_path)) for default in defaults]
        except (AttributeError, pickle.PicklingError):  # a class of a test
            return merge(loader, defaults, repo)
        key = tuple(versions)
        if key not in merged_configs:
            try:
                config = merge_group(loader, defaults, versions, repo, "hydra")
                with flag_override(config, "no_deepcopy_set_nodes", True):
                    for group in dict.fromkeys(map(_group, defaults)):
                        if group not in ("", "hydra"):
                            config[group] = merge_group(loader, defaults, versions, repo, group)
            except (HydraException, OmegaConfBaseException):
                config = merge(loader, defaults, repo)  # raises the error that Hydra reports
            merged_configs[key] = pickle.dumps(config)
        return pickle.loads(merged_configs[key])

    ConfigLoaderImpl._compose_config_from_defaults_list = merge_once


def _group(default: Any) -> str:
    """Return the first part of the package of an entry of a defaults list. Empty if the config may set any key."""
    return (default.package or "").partition(".")[0]


def _select_key(default: Any, group: str) -> Any:
    """Return a copy of an entry of a defaults list that loads one group only. Does nothing for the group `hydra`."""
    part = copy.copy(default)
    part.only_key = None if group == "hydra" else group
    return part


def _describe(default: Any, loaded: Any) -> object:
    """Return a hashable description of an entry of a defaults list and of its content."""
    version = getattr(loaded, "version", None) or (default.config_path, pickle.dumps(loaded.config))
    return version, default.package, default.primary


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
