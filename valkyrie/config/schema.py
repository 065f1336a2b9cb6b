"""Schemas of runs, and merging a composed config into them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import is_dataclass
from functools import cache

from omegaconf import MISSING, DictConfig, OmegaConf, flag_override
from omegaconf.errors import OmegaConfBaseException


def merge_into_schema(run_class: type, group_classes: Mapping[str, type], config: DictConfig) -> DictConfig:
    """Return a config of `run_class` with the values of `config`, whose nodes may be moved into the result.

    Groups that already have their class are moved, because composing has checked their values. `OmegaConf.merge` would
    check them again, which takes 25 ms instead of 8.

    Args:
        run_class: The dataclass of the whole config.
        group_classes: The dataclasses of groups whose class depends on a choice.
        config: The composed config. Groups without a class may lack settings that have a default.
    """
    classes, keys = tuple(group_classes.items()), [str(key) for key in config]
    schema = _build_schema(run_class, classes)
    typed_groups = frozenset(
        key for key in keys if is_dataclass(cls := _class(config, key)) and cls is _class(schema, key)
    )
    other_settings = OmegaConf.masked_copy(config, [key for key in keys if key not in typed_groups])
    try:
        merged = OmegaConf.merge(_build_schema(run_class, classes, typed_groups), other_settings)
    except OmegaConfBaseException:
        OmegaConf.merge(schema, config)  # raises the error with all groups, in which an unknown key is looked up
        raise
    assert isinstance(merged, DictConfig)
    with flag_override(merged, ["readonly", "no_deepcopy_set_nodes"], [False, True]):
        for group in sorted(typed_groups):
            merged[group] = config[group]
    return merged


@cache
def _build_schema(
    run_class: type, group_classes: tuple[tuple[str, type], ...], missing: Collection[str] = frozenset()
) -> DictConfig:
    """Return the schema of a run without the groups in `missing`. It is cached, so it must not be modified.

    A report on hundreds of training runs would otherwise spend half its time building schemas.
    """
    schema = OmegaConf.structured(run_class)
    for group, config_class in group_classes:
        schema[group] = OmegaConf.structured(config_class)
    for group in missing:
        schema[group] = MISSING
    return schema


def _class(config: DictConfig, key: str) -> type | None:
    """Return the config class of a group, or None if it is missing or null."""
    return OmegaConf.get_type(config, key) if key in config else None
