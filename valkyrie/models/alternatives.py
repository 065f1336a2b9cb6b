"""Settings of blocks with several values that compute the same function."""

from __future__ import annotations

from typing import Any, NamedTuple


class Alternatives(NamedTuple):
    """Values of a setting that compute the same function, each faster in some layouts. Searches try all of them.

    Args:
        key: Configuration key, such as `model.moe.dispatch`.
        values: The values, including the current one.
        axis: Logical axis of parameters. The setting changes nothing in layouts that do not split it. None if it
            matters in all layouts.
    """

    key: str
    values: tuple[Any, ...]
    axis: str | None = None
