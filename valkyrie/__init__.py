"""Valkyrie: choose the mesh and partition before you rent the slice, then train on it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from valkyrie.api import (
        Answer,
        Comparison,
        Explanation,
        Fault,
        FoundLayout,
        Result,
        Run,
        Slice,
        Trained,
        TrialRow,
        Trials,
        check,
        compose,
        evaluate,
        explain,
        fit,
        from_hf,
        generate,
        load,
        load_model,
        measure,
        predict,
        run_sweep,
        search,
        show,
        to_hf,
        trials,
        write_report,
    )
    from valkyrie.api import named_slice as slice

__version__ = "0.1.0"
__all__ = [
    "Answer",
    "Comparison",
    "Explanation",
    "FoundLayout",
    "Fault",
    "Result",
    "Run",
    "Slice",
    "Trained",
    "TrialRow",
    "Trials",
    "check",
    "compose",
    "evaluate",
    "explain",
    "fit",
    "from_hf",
    "generate",
    "load",
    "load_model",
    "measure",
    "predict",
    "run_sweep",
    "search",
    "show",
    "slice",
    "to_hf",
    "trials",
    "write_report",
]


def __getattr__(name: str) -> Any:
    """Import a name of the API on first use. `import valkyrie` alone imports nothing."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "search":  # the package, which can be called (see valkyrie/search/__init__.py)
        return import_module("valkyrie.search")
    api_name = "named_slice" if name == "slice" else name  # in our modules, `slice` stays the builtin
    return getattr(import_module("valkyrie.api"), api_name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
