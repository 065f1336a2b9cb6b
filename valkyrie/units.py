"""Formats bytes, seconds and shares for people, and parses times."""

from __future__ import annotations

import re

GIB = 2**30
"""Bytes per GiB."""


def escape_control_characters(text: str) -> str:
    """Replace control characters, which terminals interpret, with hexadecimal escapes. Keeps newlines and tabs."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda control: f"\\x{ord(control[0]):02x}", text)


def gib_text(size: int | float | None) -> str:
    """Format bytes in GiB, or `?` if unknown."""
    return "?" if size is None else f"{size / GIB:.1f} GiB"


def memory_text(size: int | float | None) -> str:
    """Format bytes in GiB, MiB or KiB: the largest unit that gives at least 0.1. Returns `?` if unknown."""
    if size is None or size >= GIB / 10:
        return gib_text(size)
    return f"{size / 2**20:.1f} MiB" if size >= 2**20 / 10 else f"{size / 2**10:.1f} KiB"


def decimal_bytes_text(size: int | float) -> str:
    """Format bytes sent over a link or stored in files, in decimal units (GB, MB, kB or B)."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size:.0f} B"


def duration_text(seconds: float) -> str:
    """Format a time in seconds, or in milliseconds if it is below one second."""
    if seconds >= 1:
        return f"{seconds:.2f} s" if seconds >= 10 else f"{seconds:.3f} s"
    return f"{1e3 * seconds:.1f} ms" if seconds >= 0.01 else f"{1e3 * seconds:.3g} ms"


def long_duration_text(seconds: float) -> str:
    """Format a long time in its two largest units: `3 d 2 h`, `5 min 12 s`, `8.1 s`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    size, unit, smaller_size, smaller_unit = next(
        units for units in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")) if seconds >= units[0]
    )
    return f"{int(seconds // size)} {unit} {int(seconds % size // smaller_size)} {smaller_unit}"


def number_text(number: float) -> str:
    """Format a number with three significant digits, or without decimals from 100 on."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def parameters_text(count: int) -> str:
    """Format a number of parameters: `379 million parameters`."""
    if count < 1e6:
        return f"{count:,} parameters"
    unit, scale = ("billion", 1e9) if count >= 1e9 else ("million", 1e6)
    return f"{number_text(count / scale)} {unit} parameters"


def count_text(count: int, noun: str) -> str:
    """Format a count with its noun, such as `1 chip` or `1,024 chips`."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def range_text(low: float, high: float) -> str:
    """Format two numbers without decimals, such as `41 to 60`, or one if they are equal."""
    return " to ".join(dict.fromkeys((f"{low:.0f}", f"{high:.0f}")))


def percent_text(share: float) -> str:
    """Format a share (0 to 1) as a whole percentage."""
    return f"{100 * share:.0f}%"


def share_text(share: float) -> str:
    """Format a share (0 to 1) as a percentage, with one decimal below 10%."""
    return percent_text(share) if share >= 0.0995 or not share else f"{100 * share:.1f}%"


def parse_seconds(text: str) -> float | None:
    """Return the seconds in a time such as `90s`, `10min` or `1.5h`, or None if it is malformed or not above 0."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|min|h)", text)
    return None if match is None else float(match[1]) * {"s": 1, "min": 60, "h": 3600}[match[2]] or None
