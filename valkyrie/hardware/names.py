"""Parses target names such as `v4-64`, `v6e-4x4`, `h100-8` or `cpu8`, and suggests the nearest valid names.

Source of the names: cloud.google.com/tpu/docs, the page of each generation; libtpu for `v4:2x4x4`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction

from valkyrie.hardware.chips import known_chips
from valkyrie.hardware.platforms import platforms
from valkyrie.hardware.slices import SliceShape, is_twisted_name, nearest_hint, parse_shape, shorten
from valkyrie.hardware.target import ChipConfig, TargetConfig, make_slice, simulated_target
from valkyrie.problems import suggest

MAX_SIMULATED_DEVICES = 4096
"""Maximum number of CPU devices that a process can simulate."""
_NAME = re.compile(r"(.+)([-:])([^-:]*)")


def parse_target(
    name: str, chips: Mapping[str, ChipConfig] = known_chips(), target_names: Sequence[str] = ()
) -> TargetConfig:
    """Parse the name of a slice or of simulated CPU devices. Raises ValueError with the nearest valid names.

    `CHIP-N` is the cloud's name of a slice. N is the number of chips, or of cores for chips with `units_in_name` > 1,
    and the slice has the default shape for this size. `CHIP-AxBxC`, or libtpu's form `CHIP:AxBxC`, lists the chips
    along each axis; the suffix `_twisted` selects the twisted torus. For chips without a torus, `CHIP-AxB` is A hosts
    of B chips. `cpuN` is N simulated CPU devices.

    The returned target has the shortest name of its slice: `v4-4x4x4` becomes `v4-128`.

    Args:
        name: A name of one of these forms.
        chips: Known chips by name.
        target_names: Names of the targets with a file in `conf/target`, which the error message suggests.
    """
    if cpu_match := re.fullmatch(r"cpu([1-9][0-9]*)", name):
        if len(cpu_match[1]) > 4 or int(cpu_match[1]) > MAX_SIMULATED_DEVICES:
            raise ValueError(f"target={shorten(name)}: at most {MAX_SIMULATED_DEVICES} CPU devices can be simulated.")
        return simulated_target(int(cpu_match[1]))
    match = _NAME.fullmatch(name)
    prefix, separator, size = match.groups() if match else (name, "", "")
    chip = chips.get(prefix)
    if chip is None:
        raise ValueError(_unknown_target_message(name, prefix, separator + size, chips, target_names))
    if prefix not in (chip.name, *chip.aliases):
        raise ValueError(
            f"target={name}: target/chip/{prefix}.yaml says name: {chip.name}. Write name: {prefix} there."
        )
    if size.isdecimal() and (separator == "-" or chip.ici_axes is None):
        return make_slice(chip, _shape_for_size(chip, name, int(size)))
    if not size or chip.ici_axes is None:
        reason = "has no torus" if size else "has no number of chips"
        hosts = re.fullmatch(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})", size)
        if hosts and chip.host_bounds:
            usual, count = chip.host_bounds[0], int(hosts[1]) * int(hosts[2])
            shape = _shape_for_size(chip, name, count)
            if int(hosts[2]) == usual:
                return make_slice(chip, shape)
            raise ValueError(
                f"target={name}: hosts of {chip.name} have {usual} chips. For hosts of {hosts[2]}, set "
                f"target={chip.name}-{count} target.hosts={hosts[1]}."
            )
        raise ValueError(f"target={name} {reason}. {_syntax_hint(chip)}")
    topology_error = chip.slices.topology_error(size, chip.name, _target_formatter(chip), f"target={chip.name}-")
    if topology_error is not None:
        raise ValueError(f"target={name}{topology_error}")
    shape = parse_shape(size)
    assert shape is not None
    return make_slice(chip, shape, twisted=is_twisted_name(size))


def example_slice(chip: ChipConfig) -> TargetConfig:
    """Return a small slice of a chip as an example: `CHIP-8` if it exists, otherwise one of a similar size."""
    shape = (
        chip.slices.default_shape(8 // chip.units_in_name)
        or chip.slices.nearest_shapes(Fraction(8, chip.units_in_name))[-1]
    )
    return make_slice(chip, shape)


def _shape_for_size(chip: ChipConfig, name: str, size: int) -> SliceShape:
    """Return the shape of the slice named `CHIP-SIZE`. Raises ValueError with the nearest slices."""
    slices, (chips, remainder) = chip.slices, divmod(size, chip.units_in_name)
    shape = None if remainder else slices.default_shape(chips)
    if shape is not None:
        return shape
    unit_note = f"{chip.name}-N counts cores, {chip.units_in_name} per chip" if chip.units_in_name > 1 else ""
    note = f" ({unit_note})" if unit_note else ""
    if remainder:
        reason = f"{unit_note}, and {size} is not a multiple of {chip.units_in_name}"
    elif slices.max_chips is not None and chips > slices.max_chips:
        reason = f"{slices.size_rule(chips)}{note}"
    else:
        rule = slices.size_rule(chips)
        reason = f"no slice has {chips} chips{note}. {rule[0].upper()}{rule[1:]}"
    hint = nearest_hint(slices.nearest_shapes(Fraction(size, chip.units_in_name)), _target_formatter(chip))
    raise ValueError(f"target={name} is not a slice of {chip.name}: {reason}. {hint}")


def _target_formatter(chip: ChipConfig) -> Callable[[SliceShape], str]:
    return lambda shape: f"target={make_slice(chip, shape).name}"


def _syntax_hint(chip: ChipConfig) -> str:
    example = example_slice(chip)
    unit = f"cores ({chip.units_in_name} per chip)" if chip.units_in_name > 1 else "chips"
    shape = "" if example.topology is None else f", or the chips along each axis: target={chip.name}-{example.topology}"
    return f"Write target={chip.name}-N for N {unit}, such as target={example.name}{shape}."


def _unknown_target_message(name: str, prefix: str, size: str, chips: Iterable[str], files: Sequence[str]) -> str:
    """Return the error message for an unknown chip, with the nearest names."""
    suggestions = [f"{chip}{size}" for chip in difflib.get_close_matches(prefix.lower(), list(chips))] if size else []
    suggestions = suggestions or [*filter(None, [suggest(name, files)])]
    if any(prefix.lower() in (platform.name, *platform.aliases) for platform in platforms()):
        suggestions = ["auto"]
    if prefix.startswith("cpu"):
        suggestions = ["cpu8"]
    hint = f" Did you mean {' or '.join(f'target={suggestion}' for suggestion in suggestions)}?" if suggestions else ""
    return (
        f"target={name} is unknown.{hint} Known chips: {', '.join(chips)}. Write CHIP-N as the cloud names it (v4-64, "
        f"v5e-8, h100-8), CHIP-AxBxC with the chips along each axis (v4-4x4x16){',' if files else ' or'} cpuN for "
        f"simulated devices (cpu8){', or one of ' if files else ''}{', '.join(files)}."
    )
