"""Parse target names such as `v4-64`, `v6e-4x4`, `h100-8` or `cpu8`; suggest the nearest valid one.

Source of the names: cloud.google.com/tpu/docs, the page of each generation; libtpu for `v4:2x4x4`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction

from valkyrie.hardware.chips import known_chips
from valkyrie.hardware.platforms import platforms
from valkyrie.hardware.slices import SliceShape, nearest_hint, parse_shape, says_twisted, shortened
from valkyrie.hardware.target import ChipConfig, TargetConfig, simulated, slice_of
from valkyrie.problems import suggest

MOST_SIMULATED = 4096
"""Most CPU devices that a process can simulate."""
_NAME = re.compile(r"(.+)([-:])([^-:]*)")


def parse_target(name: str, chips: Mapping[str, ChipConfig] = known_chips(), files: Sequence[str] = ()) -> TargetConfig:
    """Parse a target name. Raises ValueError with the nearest valid names. The target gets its shortest name.

    `CHIP-N` is the cloud's name of a slice: N counts `units_in_name` per chip, and the shape is the default for this
    size. `CHIP-AxBxC`, or libtpu's form `CHIP:AxBxC`, lists the chips along each axis.

    Args:
        name: The name.
        chips: Known chips by name.
        files: Names of targets that have a file.
    """
    if devices := re.fullmatch(r"cpu([1-9][0-9]*)", name):
        if len(devices[1]) > 4 or int(devices[1]) > MOST_SIMULATED:
            raise ValueError(f"target={shortened(name)}: at most {MOST_SIMULATED} CPU devices can be simulated.")
        return simulated(int(devices[1]))
    match = _NAME.fullmatch(name)
    word, sign, size = match.groups() if match else (name, "", "")
    chip = chips.get(word)
    if chip is None:
        raise ValueError(_unknown(name, word, sign + size, chips, files))
    if word not in (chip.name, *chip.aliases):
        raise ValueError(f"target={name}: target/chip/{word}.yaml says name: {chip.name}. Write name: {word} there.")
    if size.isdecimal() and (sign == "-" or chip.ici_axes is None):
        return slice_of(chip, _shape_of_size(chip, name, int(size)))
    if not size or chip.ici_axes is None:
        wrong = "has no torus" if size else "does not say how many chips"
        raise ValueError(f"target={name} {wrong}. {_how_to_write(chip)}")
    refusal = chip.slices.refusal(size, chip.name, _writer(chip), f"target={chip.name}-")
    if refusal is not None:
        raise ValueError(f"target={name}{refusal}")
    shape = parse_shape(size)
    assert shape is not None
    return slice_of(chip, shape, twisted=says_twisted(size))


def example_of(chip: ChipConfig) -> TargetConfig:
    """Return a small slice of a chip: the one named `CHIP-8` if it exists."""
    shape = chip.slices.default(8 // chip.units_in_name) or chip.slices.nearest(Fraction(8, chip.units_in_name))[-1]
    return slice_of(chip, shape)


def _shape_of_size(chip: ChipConfig, name: str, size: int) -> SliceShape:
    """Return the shape of the slice named `CHIP-SIZE`. Raises ValueError with the nearest slices."""
    slices, (chips, rest) = chip.slices, divmod(size, chip.units_in_name)
    shape = None if rest else slices.default(chips)
    if shape is not None:
        return shape
    counts = f"{chip.name}-N counts cores, {chip.units_in_name} in a chip" if chip.units_in_name > 1 else ""
    aside = f" ({counts})" if counts else ""
    if rest:
        reason = f"{counts}, and {size} is not a multiple of {chip.units_in_name}"
    elif slices.largest is not None and chips > slices.largest:
        reason = f"{slices.rule(chips)}{aside}"
    else:
        rule = slices.rule(chips)
        reason = f"none has {chips} chips{aside}. {rule[0].upper()}{rule[1:]}"
    hint = nearest_hint(slices.nearest(Fraction(size, chip.units_in_name)), _writer(chip))
    raise ValueError(f"target={name} is not a slice of {chip.name}: {reason}. {hint}")


def _writer(chip: ChipConfig) -> Callable[[SliceShape], str]:
    return lambda shape: f"target={slice_of(chip, shape).name}"


def _how_to_write(chip: ChipConfig) -> str:
    example = example_of(chip)
    what = f"cores, {chip.units_in_name} in a chip" if chip.units_in_name > 1 else "chips"
    shape = "" if example.topology is None else f", or the chips along each axis: target={chip.name}-{example.topology}"
    return f"Write target={chip.name}-N, where N counts {what}, such as target={example.name}{shape}."


def _unknown(name: str, word: str, size: str, chips: Iterable[str], files: Sequence[str]) -> str:
    """Return the error message for an unknown chip, with the nearest names."""
    near = [f"{chip}{size}" for chip in difflib.get_close_matches(word.lower(), list(chips))] if size else []
    near = near or [*filter(None, [suggest(name, files)])]
    if any(word.lower() in (platform.name, *platform.aliases) for platform in platforms()):
        near = ["auto"]
    if word.startswith("cpu"):
        near = ["cpu8"]
    hint = f" Did you mean {' or '.join(f'target={other}' for other in near)}?" if near else ""
    return (
        f"target={name} is not known.{hint} Known chips: {', '.join(chips)}. A target is CHIP-N as its cloud names it "
        "(v4-64, v5e-8, h100-8), CHIP-AxBxC for the chips along each axis (v4-4x4x16), cpuN for simulated devices "
        f"(cpu8){', or a file: ' if files else ''}{', '.join(files)}."
    )
