"""Reads and completes the arguments of `valkyrie-train`."""

from __future__ import annotations

from collections.abc import Sequence

from valkyrie.runs.folder import key_value


def trains(overrides: Sequence[str]) -> bool:
    """Whether the arguments are of one training: no other mode, no sweep."""
    return value_in(overrides, "mode", "train") == "train" and not {"-m", "--multirun"} & {*overrides}


def named(overrides: Sequence[str], name: str) -> tuple[tuple[str, ...], bool]:
    """Return the arguments with a `name=`, so that a second start resumes the run, and whether it was added."""
    keys = {key_value(override)[0] for override in overrides}
    if not trains(overrides) or keys & {"name", "resume"}:
        return tuple(overrides), False
    return (*overrides, f"name={name}"), True


def value_in(overrides: Sequence[str], key: str, default: str) -> str:
    """Value that the arguments give a key, or `default` if they give none."""
    return [default, *(value for name, value in map(key_value, overrides) if name == key)][-1]


def checkpoints_elsewhere(overrides: Sequence[str]) -> bool:
    """Whether durable checkpoints go to a bucket or an absolute path, not into the run folder."""
    folder = value_in(overrides, "checkpoint.folder", "null")
    return "://" in folder or folder.startswith("/")
