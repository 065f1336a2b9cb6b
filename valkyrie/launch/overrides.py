"""The training's own arguments, as the launcher reads and completes them."""

from __future__ import annotations

from collections.abc import Sequence


def trains(overrides: Sequence[str]) -> bool:
    """Return whether the arguments are of one training: no other mode, no sweep."""
    modes = [value(override) for override in overrides if key(override) == "mode"]
    return modes in ([], ["train"]) and not {"-m", "--multirun"} & {*overrides}


def named(overrides: Sequence[str], name: str) -> tuple[tuple[str, ...], bool]:
    """Return the arguments with a `name=` by which a second start continues the run, and whether it was added."""
    keys = {key(override) for override in overrides}
    if not trains(overrides) or keys & {"name", "resume"}:
        return tuple(overrides), False
    return (*overrides, f"name={name}"), True


def name_in(overrides: Sequence[str]) -> str | None:
    """Return the name that the arguments give the run; None where they give none."""
    return next((value(override) for override in reversed(overrides) if key(override) == "name"), None)


def runs_in(overrides: Sequence[str]) -> str:
    """Return the folder or bucket that run folders lie in."""
    return next((value(override) for override in reversed(overrides) if key(override) == "runs"), "runs")


def key(override: str) -> str:
    """Return what stands before the `=`."""
    return override.partition("=")[0].lstrip("+")


def value(override: str) -> str:
    """Return what stands behind the `=`, without quotes."""
    return override.partition("=")[2].strip("'\"")
