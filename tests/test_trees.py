"""Tests of the dotted names of leaves in nested dicts, and in JAX trees with lists and named tuples."""

from __future__ import annotations

from typing import NamedTuple

from valkyrie.trees import flatten, leaf_names


class Moments(NamedTuple):
    mu: dict[str, object]
    count: int


def test_leaves_of_nested_dicts_by_their_dotted_names():
    tree = {"b": {"z": [1, 2], "y": {"x": None}}, "a": 3, "empty": {}}
    assert flatten(tree) == {"b.z": [1, 2], "b.y.x": None, "a": 3}
    assert list(flatten(tree)) == ["b.z", "b.y.x", "a"]


def test_leaves_of_a_jax_tree_in_its_order():
    assert leaf_names({"b": {"y": 1, "x": 2}, "a": 3}) == ["a", "b.x", "b.y"]
    assert leaf_names((Moments({"w": 1.0}, 2), [3])) == ["0.mu.w", "0.count", "1.0"]
