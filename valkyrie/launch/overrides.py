"""Reads and completes the arguments of `valkyrie-train`."""

from __future__ import annotations

from collections.abc import Sequence

from valkyrie.runs.folder import key_value


def trains(overrides: Sequence[str]) -> bool:
    """Return whether the arguments start a single training, not another mode or a sweep."""
    return value_in(overrides, "mode", "train") == "train" and not {"-m", "--multirun"} & {*overrides}


def named(overrides: Sequence[str], name: str) -> tuple[tuple[str, ...], bool]:
    """Add a `name=` to a training without one, so that a restart resumes it. Also returns whether it was added."""
    keys = {key_value(override)[0] for override in overrides}
    if not trains(overrides) or keys & {"name", "resume"}:
        return tuple(overrides), False
    return (*overrides, f"name={name}"), True


def value_in(overrides: Sequence[str], key: str, default: str) -> str:
    """Return the value of a key in the arguments, or `default` if it is not set there."""
    return [default, *(value for name, value in map(key_value, overrides) if name == key)][-1]


def checkpoints_elsewhere(overrides: Sequence[str]) -> bool:
    """Return whether durable checkpoints go to a bucket or an absolute path instead of the run folder."""
    folder = value_in(overrides, "checkpoint.folder", "null")
    return "://" in folder or folder.startswith("/")
