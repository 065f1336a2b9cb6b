"""Dotted names for leaves of nested dicts, nested dataclasses and JAX trees. Imports JAX only for JAX trees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from typing import Any


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested dicts to a dict of leaves by dotted name, in the same order. Drops empty dicts."""
    leaves = {}
    for key, value in values.items():
        leaves |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return leaves


def get_value(config: Any, key: str) -> Any:
    """Return the value of a dotted key, such as `mesh.slices`, in nested dataclasses."""
    for name in key.split("."):
        config = getattr(config, name)
    return config


def with_value(config: Any, key: str, value: Any) -> Any:
    """Return a copy of nested dataclasses with a new value for a dotted key."""
    name, _, remaining_key = key.partition(".")
    return replace(
        config, **{name: with_value(getattr(config, name), remaining_key, value) if remaining_key else value}
    )


def override_text(value: Any) -> str:
    """Format a config value as on the command line: `null`, `true`, `[a,b]`."""
    if isinstance(value, list):
        return f"[{','.join(map(override_text, value))}]"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return str(value.value if isinstance(value, Enum) else value)


def leaf_names(tree: Any) -> list[str]:
    """Return the dotted name of every leaf of a JAX tree, in the order of its leaves."""
    import jax

    return [leaf_name(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]


def leaf_name(path: Any) -> str:
    """Return the dotted name of a leaf, such as `layers.0.scale`, from its `jax.tree_util` path."""
    import jax

    return jax.tree_util.keystr(path, simple=True, separator=".")
