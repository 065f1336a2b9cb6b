"""Models: blocks, the stack they form, and the families, each a module with a `Config`.

A family of this package is a module of `valkyrie.models.families`; any other name is a module of the user's that can be
imported. Its `Config` derives from `Stack`, or has the methods of `Model`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import valkyrie.models.families as own
from valkyrie.axes import Arrays, Parameter
from valkyrie.models.block import SavedActivation
from valkyrie.paths import defaults_of

if TYPE_CHECKING:
    from jaxtyping import Array

    from valkyrie.models.block import Layer
    from valkyrie.ops.linear import Numerics


@runtime_checkable
class Model(Protocol):
    """The configuration of a model, whatever its family. Only `build` imports JAX."""

    family: str
    name: str
    task: ClassVar[str]
    context: int
    tokenizer: str
    vocab_size: int
    dropout: float

    @property
    def vocab_rows(self) -> int:
        """Rows of the token embedding."""
        ...

    @property
    def causal(self) -> bool:
        """Whether no position depends on later ones."""
        ...

    def problems(self) -> list[str]:
        """Return every reason why it cannot be built, naming the keys to change."""
        ...

    def parameters(self) -> dict[str, Parameter]:
        """Return every parameter by dotted name, in the order of the built model's."""
        ...

    def arrays(self) -> Arrays:
        """Return the arrays that a layout splits."""
        ...

    def parameter_count(self) -> int:
        """Return the number of learned parameters."""
        ...

    def flops_per_token(self, seq: int) -> float:
        """Return forward FLOPs per token over sequences of `seq` tokens."""
        ...

    def step_flops_per_token(self, seq: int) -> float:
        """Return FLOPs per token of a training step, forward and backward, over sequences of `seq` tokens."""
        ...

    def kept(self) -> list[SavedActivation]:
        """Return an estimate of the activations that the backward pass needs."""
        ...

    def working(self) -> list[SavedActivation]:
        """Return an estimate of further activations that exist while a part of the model runs."""
        ...

    def build(self, *, numerics: Numerics, key: Array) -> Any:
        """Return the module; imports JAX."""
        ...


@runtime_checkable
class Layered(Model, Protocol):
    """A model whose layers run one after another, each declared by its blocks, as `Stack` has them."""

    embed: int

    def segments(self) -> list[tuple[list[Layer], int]]:
        """Return groups of layers, each with its repetitions, first to last."""
        ...


def add_import_path(folders: Iterable[str | Path]) -> None:
    """Append folders to `sys.path`: user's families and tasks are imported from there."""
    for folder in map(str, folders):
        if folder not in sys.path:
            sys.path.append(folder)


def folder_of(family: str) -> Path | None:
    """Return the folder of a user's family, or None for a family of this package."""
    spec = None if family in family_names() else find_spec(family)
    return None if spec is None or spec.origin is None else Path(spec.origin).resolve().parent


def family_names() -> list[str]:
    """Return the names of this package's families."""
    return sorted(module.name for module in iter_modules(own.__path__))


def user_family_names() -> list[str]:
    """Return the names of the user's families: modules beside a folder `model` with a YAML of their schema."""
    return _families_on(tuple(sys.path))


@cache
def _families_on(path: tuple[str, ...]) -> list[str]:
    own_files = [file for folder in path if folder for file in sorted((Path(folder) / "model").glob("*.yaml"))]
    schemas = [entry for file in own_files for entry in defaults_of(file) if isinstance(entry, str)]
    names = {entry.removesuffix("_schema") for entry in schemas if entry.endswith("_schema")}
    return sorted(name for name in names if name not in family_names() and is_family(name))


def is_family(name: str) -> bool:
    """Return whether a name is a family of this package or a module that can be imported."""
    return name in family_names() or (name.isidentifier() and find_spec(name) is not None)


def config_class(family: str) -> type:
    """Return the config class of a family. Raises ValueError for an unknown family or a module without `Config`."""
    if family in family_names():
        return import_module(f"{own.__name__}.{family}").Config
    if not is_family(family):
        raise ValueError(
            f"model.family={family} is not known. Known: {', '.join(family_names())}, or the name of a module of yours "
            "beside the YAMLs of --config-dir."
        )
    config = getattr(import_module(family), "Config", None)
    if not isinstance(config, type):
        raise ValueError(f"model.family={family} is a module without a class Config. A family's module defines one.")
    return config


def activation_names(model: Model) -> list[str]:
    """Return the names of the activations that `remat` may save."""
    return list(dict.fromkeys(kept.name for kept in model.kept() if kept.name is not None))


def known_axes() -> dict[str, str]:
    """Return the logical axes of all families, the user's included, with what each counts."""
    return _axes_of((*family_names(), *user_family_names()))


@cache
def _axes_of(families: tuple[str, ...]) -> dict[str, str]:
    return {axis: counts for family in families for axis, counts in config_class(family)().arrays().axes.items()}
