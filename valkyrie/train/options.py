"""Compiler options of a step with their origins, and explanations of errors about them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata

from valkyrie.foreign_errors import unknown_option, unreadable_option
from valkyrie.hardware.chips import known_chips
from valkyrie.hardware.platforms import Platform, get_platform
from valkyrie.hardware.target import ChipConfig
from valkyrie.problems import suggest

OPTIONS_KEY = "target.chip.xla_options"
CHIP, USER, VALKYRIE = "chip default", "you", "Valkyrie"
"""Origins of an option: the chip's YAML, the user (command line or experiment), or Valkyrie (from the model's size)."""

TO_FIT = "needed to fit"
"""Origin of options added because the program slightly exceeded the memory without them."""
MEMORY_SAVING_OPTIONS = {"xla_tpu_order_dot_after_layout": "false", "xla_jf_enable_multi_output_fusion": "false"}
"""TPU options that save memory: 3 to 9% of the peak in measurements (experiments/LOG.md)."""

TO_OVERLAP = "needed to overlap"
"""Origin of options added because the program overlapped no communication with compute without them."""


class OptionRefusedError(ValueError):
    """The compiler does not know an option or cannot parse its value."""


@dataclass(frozen=True)
class Option:
    """A compiler option.

    Args:
        name: Name of the option.
        value: Value as text, or None if the user removed an option that the chip or Valkyrie sets.
        set_by: Origin: `CHIP`, `USER`, `VALKYRIE`, `TO_FIT` or `TO_OVERLAP`.
    """

    name: str
    value: str | None
    set_by: str

    def __str__(self) -> str:
        return f"{self.name} removed" if self.value is None else f"{self.name}={self.value}"


def collect_options(chip: ChipConfig | None, computed_options: dict[str, str]) -> list[Option]:
    """Return the compiler options with their origins, including options that the user removed.

    Args:
        chip: The chip with the user's changes, or None. An option with the same value in the chip's shipped YAML counts
            as a default of the chip, any other as set by the user. Defaults for earlier or later compilers than the
            installed one (`xla_options_until`, `xla_options_from`) are left out.
        computed_options: Options set by Valkyrie. Options of `chip` override them.
    """
    requested_options = dict(chip.xla_options) if chip else {}
    shipped_options = known_chips()[chip.name].xla_options if chip and chip.name in known_chips() else {}
    for name in _defaults_for_other_compilers(chip) if chip else ():
        if name in shipped_options and requested_options.get(name) == shipped_options[name]:
            del requested_options[name]
    options = [
        Option(name, value, VALKYRIE) for name, value in computed_options.items() if name not in requested_options
    ]
    for name, value in requested_options.items():
        if value is not None or name in shipped_options or name in computed_options:
            options.append(Option(name, option_text(value), CHIP if shipped_options.get(name, ...) == value else USER))
    return options


def add_options(options: Sequence[Option], values: Mapping[str, str], set_by: str) -> list[Option]:
    """Return `options` with other values from `values`, except for options that the user set.

    `set_by` is the origin of the new options.
    """
    set_by_user = {option.name for option in options if option.set_by == USER}
    added = [Option(name, value, set_by) for name, value in values.items() if name not in set_by_user]
    names = {option.name for option in added}
    return [option for option in options if option.name not in names] + added


def settings_for_training(options: Iterable[Option], *origins: str) -> list[str]:
    """Return the overrides that set the options of these origins, by default `TO_FIT` and `TO_OVERLAP`.

    Each has the form `target.chip.xla_options.NAME=VALUE`. Compiles by `mode=compile` and `mode=search` add these
    options themselves. A training run needs the overrides.
    """
    return [f"{OPTIONS_KEY}.{option}" for option in options if option.set_by in (origins or (TO_FIT, TO_OVERLAP))]


def option_text(value: object) -> str | None:
    """Format a value for the compiler, such as `true` for True. None stays None."""
    return None if value is None else str(value).lower() if isinstance(value, bool) else str(value)


@contextlib.contextmanager
def explain_option_errors(platform: Platform, *, in_python: bool = False) -> Iterator[None]:
    """Turn errors of a platform's compiler about options into OptionRefusedError.

    `in_python`: whether the options come from the argument `options=` of `valkyrie.predict`, not from the config.
    """
    import jax  # not at the top: reports print options without JAX

    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if reason := explain_refusal(str(error), platform, in_python=in_python):
            raise OptionRefusedError(reason) from None
        raise


def explain_refusal(message: str, platform: Platform, *, in_python: bool = False) -> str | None:
    """Explain an error of a platform's compiler about an option. Returns None for other errors.

    The message refers to the config key of the option or, with `in_python`, to the argument `options=`.
    """
    if name := unknown_option(message):
        chips = (chip for chip in known_chips().values() if chip.platform == platform.name)
        names = {option for chip in chips for option in chip.xla_options} | {*platform.step_options(0, devices=2)}
        suggestion = suggest(name, sorted(names))
        hint = f" Did you mean {suggestion}? Otherwise," if suggestion else ""
        default = "" if in_python else f", or set {OPTIONS_KEY}.{name}=null if it is a default of the chip"
        setting = f'options={{"{name}": ...}}' if in_python else f"{OPTIONS_KEY}.{name}"
        remedy = f"{'remove' if hint else 'Remove'} it{default}."
        return f"{setting}: {_compiler_name(platform)} has no such option.{hint} {remedy}"
    if details := unreadable_option(message):
        name, value, reason = details
        cause = f" {reason}." if reason else ""
        setting = f'options={{"{name}": "{value}"}}' if in_python else f"{OPTIONS_KEY}.{name}={value}"
        return f"{setting}: {_compiler_name(platform)} cannot parse this value.{cause}"
    return None


def _defaults_for_other_compilers(chip: ChipConfig) -> set[str]:
    """Return the options that `xla_options_until` and `xla_options_from` exclude for the installed compiler.

    Without a compiler, these are all in `xla_options_from`.
    """
    if not chip.xla_options_until and not chip.xla_options_from:  # also for platforms without a compiler
        return set()
    try:
        installed = _version_numbers(metadata.version(get_platform(chip.platform).compiler_packages[0]))
    except metadata.PackageNotFoundError:
        return {*chip.xla_options_from}
    outdated = {name for name, until in chip.xla_options_until.items() if installed > _version_numbers(until)}
    return outdated | {name for name, first in chip.xla_options_from.items() if installed < _version_numbers(first)}


def _version_numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def _compiler_name(platform: Platform) -> str:
    package = platform.compiler_packages[0]
    try:
        return f"the compiler ({package} {metadata.version(package)})"
    except metadata.PackageNotFoundError:
        return "the compiler"
