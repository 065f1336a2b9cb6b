"""The options a step is compiled with: who set each of them, and why the compiler refuses one."""

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
"""Who sets an option: the chip's YAML, the command line (or an experiment), or this package by the model's size."""

TO_FIT = "needed to fit"
"""Who sets the options of a program that the compiler refused, by a few per cent, without them."""
SAVING_MEMORY = {"xla_tpu_order_dot_after_layout": "false", "xla_jf_enable_multi_output_fusion": "false"}
"""Options of a TPU that save memory: 3 to 9% of the peak where they were measured (experiments/LOG.md)."""


class OptionRefused(ValueError):
    """The compiler does not know an option, or cannot read its value."""


@dataclass(frozen=True)
class Option:
    """An option of the compiler. `value` is None for a default of the chip that was taken away."""

    name: str
    value: str | None
    set_by: str

    def __str__(self) -> str:
        return f"{self.name} removed" if self.value is None else f"{self.name}={self.value}"


def options_of(chip: ChipConfig | None, computed: dict[str, str]) -> list[Option]:
    """Return every option that stands, and every default taken away; `computed` are Valkyrie's, which a chip's replace.

    An option is the chip's default where it is as the chip's shipped YAML has it; defaults that a later compiler
    refuses (`xla_options_until`) are left out with it.
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
    """Return the options with those that save memory; one that the user set stays as it is."""
    theirs = {option.name for option in options if option.set_by == YOU}
    saving = {name: value for name, value in SAVING_MEMORY.items() if name not in theirs}
    kept = [option for option in options if option.name not in saving]
    return kept + [Option(name, value, TO_FIT) for name, value in saving.items()]


def option_text(value: object) -> str | None:
    """Return a value as the compiler reads it: `true` for True."""
    return None if value is None else str(value).lower() if isinstance(value, bool) else str(value)


@contextlib.contextmanager
def refusals_in_plain_words() -> Iterator[None]:
    """Around a compile: OptionRefused in place of XLA's error about an option."""
    import jax  # here, for the reports that print options load no JAX

    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if reason := refusal(str(error)):
            raise OptionRefused(reason) from None
        raise


def refusal(message: str) -> str | None:
    """Return what an error of the compiler means that is about an option, None for other errors."""
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
    """Return whether the installed libtpu is later than a version; False without one."""
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
