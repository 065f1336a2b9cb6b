"""Initialises the parameters of a model, and builds its Flax module from them."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from jaxtyping import Array

from valkyrie.axes import Parameter
from valkyrie.models import Model
from valkyrie.ops.linear import Numerics
from valkyrie.trees import leaf_names


class ModelBuilder:
    """Builds parameters and modules of a model config under a precision policy.

    Parameters are nested dicts of arrays. The constructor raises ValueError if the parameters of the module differ from
    those that `Model.parameters` declares.
    """

    def __init__(self, model: Model, numerics: Numerics) -> None:
        self._build = lambda key: model.build(numerics=numerics, key=key)
        self._graph, self._state = nnx.split(jax.eval_shape(lambda: self._build(jax.random.key(0))))
        self.abstract_parameters = nnx.to_pure_dict(self._state)
        """The parameters, with a `jax.ShapeDtypeStruct` in place of each array."""
        self.specs = model.parameters()
        """Declared parameters by dotted name, in the order of the leaves of `abstract_parameters`."""
        _check_parameters(model.family, self.specs, self.abstract_parameters, numerics)

    def init(self, key: Array) -> Any:
        """Return randomly initialised parameters. The same key gives the same parameters on any mesh."""
        return nnx.to_pure_dict(nnx.state(self._build(key)))

    def module(self, parameters: Any) -> Any:
        """Return the Flax module with these parameters, which are nested dicts as returned by `init`."""
        state = jax.tree.map(lambda leaf: leaf, self._state)  # a copy, because the next line changes it in place
        nnx.replace_by_pure_dict(state, parameters)
        return nnx.merge(self._graph, state)


def _check_parameters(family: str, specs: dict[str, Parameter], abstract_parameters: Any, numerics: Numerics) -> None:
    """Raise ValueError if the parameters of the module differ from those its configuration declares."""
    declared_leaves = {
        name: (spec.shape, "float32" if spec.float32 else numerics.parameter) for name, spec in specs.items()
    }
    leaves = zip(leaf_names(abstract_parameters), jax.tree.leaves(abstract_parameters), strict=True)
    built_leaves = {name: (leaf.shape, leaf.dtype.name) for name, leaf in leaves}
    if list(declared_leaves.items()) == list(built_leaves.items()):
        return
    mismatched = [
        name
        for name in sorted({*declared_leaves, *built_leaves})
        if declared_leaves.get(name) != built_leaves.get(name)
    ]
    mismatches = [_describe_mismatch(name, declared_leaves.get(name), built_leaves.get(name)) for name in mismatched]
    more_text = f" (and {len(mismatches) - 3} more)" if len(mismatches) > 3 else ""
    raise ValueError(
        f"model.family={family}: {'; '.join(mismatches[:3])}{more_text}. Build exactly the parameters that `weights` "
        "declares, with the same names, shapes and dtypes."
    )


_ShapeDType = tuple[tuple[int, ...], str]


def _describe_mismatch(name: str, declared: _ShapeDType | None, built: _ShapeDType | None) -> str:
    def text(array: _ShapeDType | None) -> str:
        return "missing" if array is None else f"{array[1]}{list(array[0])}"

    return f"{name} is {text(declared)} in the declaration and {text(built)} in the module"
