"""Dotted names of the leaves of nested dicts, and of JAX's trees; JAX is imported only for the latter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested dicts by their dotted names, in the order of the dicts; an empty dict has none."""
    leaves: dict[str, Any] = {}
    for key, value in values.items():
        leaves |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return leaves


def names_of(tree: Any) -> list[str]:
    """Return the dotted name of every leaf of one of JAX's trees, in the order of its leaves."""
    import jax

    return [name_of(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]


def name_of(path: Any) -> str:
    """Return the dotted name of a leaf from its path, as `jax.tree_util` gives it."""
    import jax

    return jax.tree_util.keystr(path, simple=True, separator=".")
