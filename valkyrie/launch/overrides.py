"""The training's own arguments, as the launcher reads and completes them."""

from __future__ import annotations

from collections.abc import Sequence

from valkyrie.runs.folder import key_value


def trains(overrides: Sequence[str]) -> bool:
    """Return whether the arguments are of one training: no other mode, no sweep."""
    modes = _values(overrides, "mode")
    return modes in ([], ["train"]) and not {"-m", "--multirun"} & {*overrides}


def named(overrides: Sequence[str], name: str) -> tuple[tuple[str, ...], bool]:
    """Return the arguments with a `name=` by which a second start continues the run, and whether it was added."""
    keys = {key_value(override)[0] for override in overrides}
    if not trains(overrides) or keys & {"name", "resume"}:
        return tuple(overrides), False
    return (*overrides, f"name={name}"), True


def name_in(overrides: Sequence[str]) -> str | None:
    """Return the name that the arguments give the run; None where they give none."""
    return (_values(overrides, "name") or [None])[-1]


def runs_in(overrides: Sequence[str]) -> str:
    """Return the folder that run folders lie in."""
    return (_values(overrides, "runs") or ["runs"])[-1]


def checkpoints_elsewhere(overrides: Sequence[str]) -> bool:
    """Return whether durable checkpoints go to a bucket or an absolute path, not into the run folder."""
    folder = (_values(overrides, "checkpoint.folder") or ["null"])[-1]
    return "://" in folder or folder.startswith("/")


def _values(overrides: Sequence[str], wanted: str) -> list[str]:
    return [value for key, value in map(key_value, overrides) if key == wanted]
