"""The compiler options that may be worth setting on a chip: `compiler_options.yaml`, where each has its source."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("compiler_options.yaml")


@dataclass(frozen=True)
class CompilerOption:
    """An option of the compiler with the values to try, on some `chips` or (None) on all TPUs.

    A value of None leaves the choice to the compiler. `also` are options set together with each value. `does` says
    what the option changes, `source` where that is known from. On the chips of `idle_on` no program that was looked at
    changed by it; `idle` says that of the chip that was asked about.
    """

    name: str
    values: tuple[Any, ...]
    does: str
    source: str
    chips: tuple[str, ...] | None = None
    also: tuple[tuple[str, Any], ...] = ()
    idle_on: tuple[str, ...] = ()
    idle: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The options that are set."""
        return (self.name, *(name for name, _ in self.also))

    @property
    def is_switch(self) -> bool:
        """Whether its values are true and false."""
        return all(isinstance(value, bool) for value in self.values)

    def settings(self) -> list[dict[str, Any]]:
        """Return what is tried, value by value: each option with its value."""
        return [{self.name: value, **dict(self.also)} for value in self.values]


@cache
def all_options() -> tuple[CompilerOption, ...]:
    """Return all of them, in the order in which they are tried."""
    from omegaconf import OmegaConf

    rows = OmegaConf.to_container(OmegaConf.load(FILE))
    assert isinstance(rows, list)
    return tuple(_option(**{str(key): value for key, value in row.items()}) for row in rows)


def options_for(chip: str) -> list[CompilerOption]:
    """Return those that may be worth setting on a chip, by its name, in the order in which they are tried."""
    there = (option for option in all_options() if option.chips is None or chip in option.chips)
    return [replace(option, idle=chip in option.idle_on) for option in there]


def _option(
    *,
    name: str,
    values: list[Any],
    does: str,
    source: str,
    chips: list[str] | None = None,
    also: dict[str, Any] | None = None,
    idle_on: list[str] | None = None,
) -> CompilerOption:
    on = None if chips is None else tuple(chips)
    return CompilerOption(name, tuple(values), does, source, on, tuple((also or {}).items()), tuple(idle_on or ()))
