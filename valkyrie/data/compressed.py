"""Recognizes compressed files by their first bytes, whatever their suffix."""

from __future__ import annotations

_FORMATS = {
    b"\x1f\x8b": ("gzip-compressed", "gunzip -c"),
    b"PK\x03\x04": ("a zip archive", "unzip -p"),
    b"\x28\xb5\x2f\xfd": ("zstd-compressed", "zstd -dc"),
    b"\xfd7zXZ": ("xz-compressed", "xz -dc"),
}
"""Maps the first bytes of a file to the end of the message `FILE is ...` and a command that unpacks the file. No text
begins with these bytes."""


def refuse_compressed(head: bytes, name: str) -> None:
    """Raise ValueError if the first bytes of a file are those of a compressed file. Errors refer to it as `name`."""
    for magic, (format_name, command) in _FORMATS.items():
        if head.startswith(magic):
            raise ValueError(f"{name} is {format_name}. Unpack it, for example with {command}.")
