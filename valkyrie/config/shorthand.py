"""Abbreviations on the command line: slices by chip count, lists of slices, keys of a mode without `mode.`."""

from __future__ import annotations

from collections.abc import Sequence

from valkyrie.config.choices import Chips
from valkyrie.config.composing import composing
from valkyrie.config.modes import mode_named
from valkyrie.config.saved import config_dirs
from valkyrie.hardware.chips import known_chips
from valkyrie.hardware.target import ChipConfig
from valkyrie.runs.folder import key_value


def written_out(arguments: Sequence[str]) -> list[str]:
    """Expand the abbreviations in arguments; ValueError for one that makes no sense.

    - `target.chip=v4 target.chips=512` becomes the slice of that size, in any shape under `mode=search`. The chip is
      one of the package or has a file in the folder of `--config-dir`.
    - `target=[v4-64,v5e-64]` compares slices under `mode=search`.
    - Some keys of a mode work without `mode.`: `tokens=`, `budget=` and `budget_usd=` under `mode=search`, `first=` and
      `second=` under `mode=explain`.
    """
    given = dict(key_value(argument) for argument in arguments if "=" in argument)
    mode = mode_named(given.get("mode"))
    short_keys = () if mode is None else mode.short_keys
    searching = given.get("mode") == "search"
    chip = _chip(given["target.chip"], config_dirs(arguments)) if "target.chip" in given else None
    written: list[str] = []
    for argument in arguments:
        key, value = key_value(argument) if "=" in argument else (argument, "")
        if key == "target.chip" and chip is not None:
            written += _slice_of(value, chip.units_in_name, given.get("target.chips"), searching)
        elif key == "target.chips" and chip is not None:
            continue
        elif searching and key == "target" and value.startswith("[") and value.endswith("]"):
            names = [name.strip() for name in value[1:-1].split(",") if name.strip()]
            if not names:
                raise ValueError(f"{argument} names no slice. Write target=[v4-64,v5e-64].")
            written += [f"target={names[0]}", f"mode.targets=[{','.join(names)}]"]
        elif key in short_keys:
            several = key == "paths" and not value.startswith("[")
            written.append(f"mode.{key}={f'[{value}]' if several else value}")
        else:
            written.append(argument)
    return written


def _chip(name: str, folders: Sequence[str]) -> ChipConfig | None:
    """Return the chip with this name, of the package or of the user, or None if unknown."""
    if name in known_chips() or not folders:
        return known_chips().get(name)
    with composing(folders):
        return Chips().get(name)


def _slice_of(chip: str, units: int, chips: str | None, searching: bool) -> list[str]:
    if chips is None:
        raise ValueError(f"target.chip={chip} does not say how many: add target.chips=N, or write target={chip}-N.")
    if not chips.isdecimal() or int(chips) < 1:
        raise ValueError(f"target.chips={chips}: a whole number of at least 1 is needed.")
    return [f"target={chip}-{int(chips) * units}", *(["mode.shapes=true"] if searching else [])]
