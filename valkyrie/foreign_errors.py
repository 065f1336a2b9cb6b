"""Parses error messages of other programs. No other module of Valkyrie parses text that is meant for people.

Comments name the versions that produce the messages. `tests/test_foreign_errors.py` has an example of each.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

# Python 3.11 to 3.13.


def parse_abstract_class(message: str) -> tuple[str, list[str]] | None:
    """Return the class and its missing methods from Python's error for an abstract class, or None for other errors."""
    pattern = r"Can't instantiate abstract class (\w+) with(?:out an implementation for)? abstract methods? (.+)"
    match = re.match(pattern, message)
    return (match[1], re.findall(r"\w+", match[2])) if match else None


# OmegaConf 2.3: the first line of ValidationError and similar errors.


class WrongValue(Enum):
    """Reason why OmegaConf rejects the value of a key."""

    not_a_number = "not_a_number"
    not_a_bool = "not_a_bool"
    null = "null"
    not_a_choice = "not_a_choice"
    not_a_list = "not_a_list"
    not_a_group = "not_a_group"
    not_an_item = "not_an_item"
    not_a_text = "not_a_text"


_WRONG_VALUES = {
    WrongValue.not_a_number: r"Value '(.*)' of type '\w+' could not be converted to (\w+)",
    WrongValue.not_a_bool: r"Value '(.*)' is not a valid bool",
    WrongValue.null: r".*is not Optional|Incompatible value 'None' for field of type",
    WrongValue.not_a_choice: (
        r"Invalid value '(.*)', expected one of \[(.*)\]|Value (.*) \(\w+\) is not a valid input for <enum"
    ),
    WrongValue.not_a_list: (
        r"Value '(.*)' \(\w+\) is incompatible with type hint 'typing\.List|"
        r".*is not a ListConfig, list or tuple|Cannot merge DictConfig with ListConfig"
    ),
    WrongValue.not_an_item: r"'\w+' is incompatible with type hint",
    WrongValue.not_a_group: r"Invalid type assigned: \w+ is not a subclass of \w+\. value: (.*)",
    WrongValue.not_a_text: r"Cannot convert '\w+' to string: '(.*)'",
}


def parse_wrong_value(message: str) -> tuple[WrongValue, list[str]] | None:
    """Return the reason why OmegaConf rejects a value, and texts from the message, or None for other messages.

    The texts are the value, then the required type of a number or the allowed choices. Messages may lack some of them.
    """
    for kind, pattern in _WRONG_VALUES.items():
        if match := re.match(pattern, message):
            return kind, [group for group in match.groups() if group is not None]
    return None


def unsupported_type(message: str) -> tuple[str, str] | None:
    """Return (field, type) of a dataclass field with a type that OmegaConf does not support, or None.

    The message may have several lines. `field` is empty if the message does not name it.
    """
    match = re.match(r"(?:Unexpected type annotation|Unsupported value type): '?(.*?)'?\.?$", message, re.MULTILINE)
    if match:
        return "", match[1]
    match = re.match(r"Unions of containers are not supported:\n(\w+): (.*)", message)
    return (match[1], match[2]) if match else None


def is_key_of_null(message: str) -> bool:
    """Return whether OmegaConf 2.3 raised an AssertionError because a key was set in a group that is null."""
    return re.match("Unexpected type( for root)?: None", message) is not None


def missing_key(message: str) -> str | None:
    """Return the nonexistent key that an interpolation refers to, or None for other messages."""
    match = re.match(r"Interpolation key '(.*?)' not found", message)
    return match[1] if match else None


def missing_variable(message: str) -> str | None:
    """Return the environment variable of `${oc.env:NAME}` that is not set, or None for other messages."""
    match = re.search(r"Environment variable '(.*?)' not found", message)
    return match[1] if match else None


def interpolation_reason(message: str) -> str:
    """Return the reason why an interpolation cannot be resolved. `message` is the first line of OmegaConf's error."""
    reason = re.sub(r"^\w+ raised while resolving interpolation: |^While dereferencing [^']*'.*?': ", "", message)
    return re.sub(r"^Unsupported interpolation type (\S+)$", r"there is no resolver \1", reason).strip('"')


def is_recursive_interpolation(message: str) -> bool:
    """Return whether OmegaConf 2.3 found interpolations that refer to each other."""
    return message.startswith("Recursive interpolation detected")


# Hydra 1.3.


def ambiguous_argument(message: str) -> str | None:
    """Return the argument with several values that Hydra rejects outside of a multirun, or None."""
    match = re.match(r"Ambiguous value for argument '(.*)'", message)
    return match[1] if match else None


def unmergeable_config(message: str) -> str | None:
    """Return the config, such as `experiment/mine`, that Hydra could not merge, or None."""
    match = re.match(r"In '(.+)': \w+ raised while composing config", message)
    return match[1] if match else None


def missing_group(message: str) -> tuple[str, str] | None:
    """Return (file, group) if the defaults list of a config file overrides a group that does not exist, else None."""
    match = re.match(r"In '(.+)': Could not override '(.+)'\.", message)
    return (match[1], match[2].rpartition("@")[2]) if match else None


def twice_chosen_group(message: str) -> str | None:
    """Return the group for which a defaults list makes a second choice without `override`, or None."""
    match = re.match(r"Multiple values for ([\w/]+)\. To override", message)
    return match[1] if match else None


def hydra_sweep_argument(message: str) -> str | None:
    """Return the argument that sweeps over a key of Hydra itself, or None."""
    match = re.match(r"Sweeping over Hydra's configuration is not supported : '(.*)'", message)
    return match[1] if match else None


def unexpected_key(message: str) -> str | None:
    """Return the full name of a key that the class in `_target_` does not accept as an argument, or None."""
    match = re.search(r"unexpected keyword argument '(\w+)'.*full_key: ([\w.]+)", message, re.DOTALL)
    return f"{match[2]}.{match[1]}" if match else None


def scalar_valued_group(message: str) -> tuple[str, str] | None:
    """Return (file, value) if a config file sets a group to a plain value instead of a mapping, else None."""
    pattern = r"In '(.+)': ValidationError raised while composing config:\s+Merge error: str .* value: (\S+)"
    match = re.match(pattern, message)
    return (match[1], match[2]) if match else None


def list_valued_config(message: str) -> str | None:
    """Return the config, such as `partition/mine`, if its file contains a list instead of a mapping, else None."""
    match = re.match(r"In '(.+)': ValidationError raised while composing config:\s+Merge error: list ", message)
    return match[1] if match else None


def blocked_target(message: str) -> tuple[str, str] | None:
    """Return (key, target) of a `_target_` that Hydra refuses to call, such as `os.system`, or None."""
    target, key = re.match(r"Target '([^']+)' is blocklisted", message), re.search(r"full_key: (\S+)", message)
    return (key[1], target[1]) if target and key else None


def needs_quotes(message: str) -> bool:
    """Return whether Hydra's lexer found a character that needs quotes."""
    return message.startswith("LexerNoViableAltException")


# msgspec 0.22: ValidationError.


def parse_validation_error(message: str) -> tuple[str, str]:
    """Return (reason, path) of a value that does not match its type. The path, such as `$.a[0]`, may be empty."""
    reason, _, path = message.partition(" - at ")
    return reason[:1].lower() + reason[1:], path.strip("`")


def missing_field(reason: str) -> str | None:
    """Return the field that a value lacks, or None for another `reason` from `parse_validation_error`."""
    match = re.search(r"missing required field `(\w+)`", reason)
    return match[1] if match else None


# XLA: jaxlib 0.10, libtpu 0.0.42 to 0.0.50.

_UNIT_BYTES = {"B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)\s*([KMGT]?)i?B?"


def is_out_of_memory(message: str) -> bool:
    """Return whether an XLA error of any backend means that a program exceeds the memory of a device.

    Returns False for a kernel that exceeds the scratch memory (VMEM) of a core, because no layout can fix that.
    """
    if "memory space vmem" in message:
        return False
    return re.search("RESOURCE_EXHAUSTED|HbmOom|[Oo]ut of memory|bad_alloc", message) is not None


def allocated_bytes(message: str) -> int | None:
    """Return the bytes of the failed allocation, or None if unknown."""
    match = re.search(r"allocat\w* (\d+)(?: bytes|\b)", message)
    return int(match[1]) if match else None


@dataclass(frozen=True)
class Allocation:
    """A large array of a program, or the total of a category such as the optimizer state.

    Args:
        bytes: Bytes on a device.
        shape: Shape as XLA prints it, `argument NAME SHAPE`, or the name of the category; None if unknown.
        op_name: Name of the operation that computes the array, or None if unknown.
        source: Source line of the operation (`file:line`), or None if unknown.
    """

    bytes: int
    shape: str | None
    op_name: str | None = None
    source: str | None = None


@dataclass(frozen=True)
class OutOfMemory:
    """Memory of a program that does not fit on a device.

    Args:
        needed: bytes that the program needs on a device, or None if unknown.
        usable: bytes that it may use, or None if unknown.
        largest: its largest allocations.
    """

    needed: int | None
    usable: int | None
    largest: tuple[Allocation, ...]


def parse_out_of_memory(text: str) -> OutOfMemory:
    """Parse the compiler's error for a program that exceeds the memory of a device."""
    sizes = re.search(rf"Used {_SIZE} of {_SIZE}", text)
    sizes = sizes or re.search(rf"{_SIZE}\)? exceeds available \w+ \({_SIZE}\)", text)
    needed, usable = (_parse_bytes(sizes[1], sizes[2]), _parse_bytes(sizes[3], sizes[4])) if sizes else (None, None)
    largest = []
    for entry in re.finditer(rf"^\s*\d+\. Size: {_SIZE}(.*?)(?=^\s*\d+\. Size:|\Z)", text, re.MULTILINE | re.DOTALL):
        name = re.search(r"op_name=\"([^\"]*)\"", entry[3])
        shape = re.search(r"Shape: (\S+?)(?:\{|\s)", entry[3])
        line = re.search(r"source_file=\"([^\"]*)\" source_line=(\d+)", entry[3])
        source = f"{line[1]}:{line[2]}" if line else None
        size = _parse_bytes(entry[1], entry[2])
        largest.append(Allocation(size, shape[1] if shape else None, name[1] if name else None, source))
    return OutOfMemory(needed, usable, tuple(largest))


@dataclass(frozen=True)
class ScratchMemory:
    """Scratch memory (VMEM) that a kernel needs, and the limit, in MiB. `kernel` is None if XLA does not name it."""

    kernel: str | None
    needed_mib: float
    limit_mib: float


def parse_scratch_memory(text: str) -> ScratchMemory | None:
    """Parse XLA's error for a kernel that exceeds the scratch memory of a core. Returns None for other messages."""
    pattern = rf"memory space vmem.*?(?:size {_SIZE} and limit {_SIZE}|Used {_SIZE} of {_SIZE})"
    match = re.search(pattern, text, re.DOTALL)
    if match is None:
        return None
    kernel = re.search(r"allocating on stack for %?([\w.-]+)", text)
    numbers, units = ([value for value in match.groups()[i::2] if value is not None] for i in (0, 1))
    needed, limit = (_parse_bytes(number, unit) / 2**20 for number, unit in zip(numbers, units, strict=True))
    return ScratchMemory(kernel[1] if kernel else None, needed, limit)


def unknown_option(message: str) -> str | None:
    """Return the name of a compile option that XLA does not know, or None for other messages."""
    match = re.search(r"No such compile option: '([^']*)'", message)
    return match[1] if match else None


def unreadable_option(message: str) -> tuple[str, str, str] | None:
    """Return (name, value, reason) of a compile option with a value that XLA cannot parse, or None."""
    match = re.search(r"Failed to parse '([^']*)' into flag (\w+):\s*(.*)", message)
    return (match[2], match[1], match[3].strip().rstrip(".")) if match else None


def flag_refusal_reason(line: str) -> str | None:
    """Return why libtpu refuses a flag in `LIBTPU_INIT_ARGS`, such as `has no flag xla_foo`. None for other lines.

    libtpu prints this line and then ends the process.
    """
    if match := re.match(r"ERROR: Unknown command line flag '(.*)'", line):
        return f"has no flag {match[1]}"
    if match := re.match(r"ERROR: Illegal value '(.*)' specified for flag '(.*)'", line):
        return f"cannot read {match[1]} as the value of {match[2]}"
    return None


def first_lines(text: str) -> str:
    """Return the first two lines that are not empty, joined by a space and cut to 600 characters."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines[:2])[:600]


# JAX 0.10, libtpu 0.0.42 to 0.0.50.


def no_device_reason(error: Exception) -> str:
    """Return the reason why `jax.devices` finds no device, without JAX's advice, or an empty string if unknown."""
    lines = str(error).partition(" (set JAX_PLATFORMS")[0].rstrip(".").splitlines()
    return lines[0] if lines else ""


def topology_reason(error: Exception) -> str:
    """Return the reason why libtpu rejects a topology."""
    first = next(iter(str(error).splitlines()), type(error).__name__)
    return first.removeprefix("INVALID_ARGUMENT: ").rstrip(".")


def is_compile_only(message: str) -> bool:
    """Return whether JAX or libtpu refused to run something on devices that can only be compiled for."""
    return "with compile-only client" in message or "'Executable' object has no attribute 'local_devices'" in message


def _parse_bytes(number: str, unit: str) -> int:
    return int(float(number) * _UNIT_BYTES[unit or "B"])
