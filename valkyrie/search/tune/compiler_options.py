"""Loads the compiler options worth trying on each chip from `compiler_options.yaml`, which names their sources."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from valkyrie.hardware.target import ChipConfig
from valkyrie.records import decode

OptionValue = bool | int | float | str | None
OptionValues = dict[str, OptionValue]
"""Values of compiler options by name, as in `target.chip.xla_options`. None removes a default of the chip."""
OPTIONS_FILE = Path(__file__).with_name("compiler_options.yaml")


@dataclass(frozen=True)
class CompilerOption:
    """A compiler option with the values to try.

    Args:
        name: Name of the option.
        values: Values to try. None leaves the choice to the compiler.
        does: Effect of the option.
        source: Where the effect is documented.
        platform: Platform of the compiler that has the option.
        chips: Chips that have the option, or None for all of the platform.
        companion_options: Options to set together with each value.
        idle_on: Chips where the option has not changed any program so far.
        idle: Whether the chip is in `idle_on`. Set by `options_for`.
    """

    name: str
    values: tuple[OptionValue, ...]
    does: str
    source: str
    platform: str = "tpu"
    chips: tuple[str, ...] | None = None
    companion_options: OptionValues = field(default_factory=dict)
    idle_on: tuple[str, ...] = ()
    idle: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Names of this option and of those set together with it."""
        return (self.name, *self.companion_options)

    @property
    def is_switch(self) -> bool:
        """Whether all values to try are booleans."""
        return all(isinstance(value, bool) for value in self.values)

    def settings(self) -> list[OptionValues]:
        """Return a dict for each value to try, with this option and its companions by name."""
        return [{self.name: value, **self.companion_options} for value in self.values]


@cache
def all_options() -> tuple[CompilerOption, ...]:
    """Return all options, in the order of `compiler_options.yaml`."""
    from omegaconf import OmegaConf

    rows = OmegaConf.to_container(OmegaConf.load(OPTIONS_FILE))
    assert isinstance(rows, list)
    return tuple(decode(CompilerOption, row, OPTIONS_FILE.name) for row in rows)


def options_for(chip: ChipConfig) -> list[CompilerOption]:
    """Return the options that a chip has, in the order of `compiler_options.yaml`, with `idle` set for this chip."""
    options = (option for option in all_options() if option.platform == chip.platform)
    chip_options = (option for option in options if option.chips is None or chip.name in option.chips)
    return [replace(option, idle=chip.name in option.idle_on) for option in chip_options]
