"""Separates a model from its arrays: initialises parameters from a key, and builds the module for given parameters."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from jaxtyping import Array

from valkyrie.axes import Parameter
from valkyrie.models import Model
from valkyrie.ops.linear import Numerics
from valkyrie.trees import leaf_names


class Assembly:
    """Builds the module of a model config under a precision policy. Parameters are nested dicts of arrays."""

    def __init__(self, model: Model, numerics: Numerics) -> None:
        self._make = lambda key: model.build(numerics=numerics, key=key)
        self._graph, self._state = nnx.split(jax.eval_shape(lambda: self._make(jax.random.key(0))))
        self.abstract_parameters = nnx.to_pure_dict(self._state)
        """Shapes and dtypes of the parameters."""
        self.specs = model.parameters()
        """Declared parameters by dotted name, in the order of the leaves."""
        _refuse_undeclared(model.family, self.specs, self.abstract_parameters, numerics)

    def init(self, key: Array) -> Any:
        """Return new parameters. The same key gives the same parameters on any mesh."""
        return nnx.to_pure_dict(nnx.state(self._make(key)))

    def module(self, parameters: Any) -> Any:
        """Return the module that holds these parameters."""
        state = jax.tree.map(lambda leaf: leaf, self._state)
        nnx.replace_by_pure_dict(state, parameters)
        return nnx.merge(self._graph, state)


def _refuse_undeclared(family: str, specs: dict[str, Parameter], built: Any, numerics: Numerics) -> None:
    """Raise ValueError if the parameters of the module differ from those its configuration declares."""
    declared = {name: (spec.shape, "float32" if spec.float32 else numerics.parameter) for name, spec in specs.items()}
    leaves = zip(leaf_names(built), jax.tree.leaves(built), strict=True)
    made = {name: (leaf.shape, leaf.dtype.name) for name, leaf in leaves}
    if list(declared.items()) == list(made.items()):
        return
    names = [name for name in sorted({*declared, *made}) if declared.get(name) != made.get(name)]
    wrong = [f"{name} is declared {_shape(declared.get(name))} and built {_shape(made.get(name))}" for name in names]
    raise ValueError(f"model.family={family}: {'; '.join(wrong[:3])}{_more(wrong)}. A block builds what it declares.")


def _shape(of: tuple[tuple[int, ...], str] | None) -> str:
    return "not at all" if of is None else f"{of[1]}{list(of[0])}"


def _more(wrong: list[str]) -> str:
    return f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
