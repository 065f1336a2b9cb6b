"""Merges a composed config into the schema of a run."""

from __future__ import annotations

from dataclasses import is_dataclass

from omegaconf import DictConfig, OmegaConf, flag_override


def merge_into_schema(schema: DictConfig, config: DictConfig) -> DictConfig:
    """Return a copy of `schema` with the values of `config`, whose nodes may be moved into the result.

    Groups that already have the schema's class are moved, because composing has checked their values.
    `OmegaConf.merge` would check them again, which takes 25 ms instead of 11.
    """
    keys = [str(key) for key in config]
    typed_groups = {
        key for key in keys if is_dataclass(_class(config, key)) and _class(config, key) is _class(schema, key)
    }
    other_settings = OmegaConf.masked_copy(config, [key for key in keys if key not in typed_groups])
    merged = OmegaConf.merge(schema, other_settings)
    assert isinstance(merged, DictConfig)
    with flag_override(merged, ["readonly", "no_deepcopy_set_nodes"], [False, True]):
        for group in sorted(typed_groups):
            merged[group] = config[group]
    return merged


def _class(config: DictConfig, key: str) -> type | None:
    """Return the config class of a group, or None if it is missing or null."""
    return OmegaConf.get_type(config, key) if key in config else None
