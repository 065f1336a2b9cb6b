"""Valkyrie: choose the mesh and partition before you rent the slice, then train on it."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from valkyrie.api import (
        Result,
        Run,
        Slice,
        Trained,
        compose,
        evaluate,
        generate,
        load,
        measure,
        predict,
        report,
        show,
        slice,
        train,
        trials,
    )

__version__ = "0.1.0"
__all__ = [
    "Result",
    "Run",
    "Slice",
    "Trained",
    "compose",
    "evaluate",
    "generate",
    "load",
    "measure",
    "predict",
    "report",
    "show",
    "slice",
    "train",
    "trials",
]


_MODULES = ("report", "train")
"""The names of functions that are names of modules too."""


class _Callable(ModuleType):
    """A module with the name of a function of `valkyrie.api`: `valkyrie.train(run)` beside `valkyrie.train.trainer`."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Call the function of the API."""
        return getattr(import_module("valkyrie.api"), self.__name__.rpartition(".")[2])(*arguments, **options)


class _Package(ModuleType):
    """This package; a module of it that is imported under the name of a function can be called."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _MODULES:
            value.__class__ = _Callable
        super().__setattr__(name, value)


def __getattr__(name: str) -> Any:
    """Return a name of the API, imported when it is first used: `import valkyrie` alone imports nothing."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    return getattr(import_module("valkyrie.api"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


sys.modules[__name__].__class__ = _Package
