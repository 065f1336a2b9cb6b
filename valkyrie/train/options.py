"""Compiler options of a step: their origin, and explanations of the compiler's refusals."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata

from valkyrie.foreign_errors import unknown_option, unreadable_option
from valkyrie.hardware.chips import known_chips
from valkyrie.hardware.target import ChipConfig
from valkyrie.problems import suggest

KEY = "target.chip.xla_options"
CHIP, YOU, VALKYRIE = "chip default", "you", "Valkyrie"
"""Origins of an option: the chip's YAML, the command line or an experiment, or Valkyrie, from the model's size."""

TO_FIT = "needed to fit"
"""Origin of options that were added because the program slightly exceeded the memory without them."""
SAVING_MEMORY = {"xla_tpu_order_dot_after_layout": "false", "xla_jf_enable_multi_output_fusion": "false"}
"""TPU options that save memory: 3 to 9% of the peak in measurements (experiments/LOG.md)."""


class OptionRefused(ValueError):
    """The compiler does not know an option or cannot parse its value."""


@dataclass(frozen=True)
class Option:
    """A compiler option with its origin. `value` is None for a removed default of the chip."""

    name: str
    value: str | None
    set_by: str

    def __str__(self) -> str:
        return f"{self.name} removed" if self.value is None else f"{self.name}={self.value}"


def options_of(chip: ChipConfig | None, computed: dict[str, str]) -> list[Option]:
    """Return all options, including removed defaults.

    Args:
        chip: The chip. An option with the value of the chip's shipped YAML counts as its default. Defaults that the
            installed compiler no longer accepts (`xla_options_until`) are left out.
        computed: Valkyrie's options, which those of the chip override.
    """
    written = dict(chip.xla_options) if chip else {}
    shipped = known_chips()[chip.name].xla_options if chip and chip.name in known_chips() else {}
    for name in [name for name, until in (chip.xla_options_until if chip else {}).items() if _later_than(until)]:
        if name in shipped and written.get(name) == shipped[name]:
            del written[name]
    options = [Option(name, value, VALKYRIE) for name, value in computed.items() if name not in written]
    for name, value in written.items():
        if value is not None or name in shipped or name in computed:
            options.append(Option(name, option_text(value), CHIP if shipped.get(name, ...) == value else YOU))
    return options


def with_saving(options: Sequence[Option]) -> list[Option]:
    """Add the options that save memory, except those that the user set."""
    set_by_user = {option.name for option in options if option.set_by == YOU}
    saving = {name: value for name, value in SAVING_MEMORY.items() if name not in set_by_user}
    others = [option for option in options if option.name not in saving]
    return others + [Option(name, value, TO_FIT) for name, value in saving.items()]


def option_text(value: object) -> str | None:
    """Format a value for the compiler: `true` for True."""
    return None if value is None else str(value).lower() if isinstance(value, bool) else str(value)


@contextlib.contextmanager
def refusals_in_plain_words() -> Iterator[None]:
    """Turn XLA's errors about options into OptionRefused."""
    import jax  # not at the top: reports print options without JAX

    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if reason := refusal(str(error)):
            raise OptionRefused(reason) from None
        raise


def refusal(message: str) -> str | None:
    """Explain a compiler error about an option. Returns None for other errors."""
    if name := unknown_option(message):
        names = {option for chip in known_chips().values() for option in chip.xla_options}
        near = suggest(name, sorted(names))
        hint = f" Did you mean {near}?" if near else ""
        remedy = f"Leave it out, or write {KEY}.{name}=null."
        return f"{KEY}.{name}: {_compiler()} has no option of this name.{hint} {remedy}"
    if unreadable := unreadable_option(message):
        name, value, why = unreadable
        because = f" {why}." if why else ""
        return f"{KEY}.{name}={value}: {_compiler()} cannot read this value.{because}"
    return None


def _later_than(version: str) -> bool:
    """Return whether a libtpu later than this version is installed."""
    try:
        return _numbers(metadata.version("libtpu")) > _numbers(version)
    except metadata.PackageNotFoundError:
        return False


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def _compiler() -> str:
    try:
        return f"the compiler (libtpu {metadata.version('libtpu')})"
    except metadata.PackageNotFoundError:
        return "the compiler"
