"""The JSON codec of Valkyrie's files: frozen dataclasses to and from plain values. Errors name file and field.

A record is a frozen dataclass of plain values, enums, tuples, dicts and other records. Two optional fields are special.
The default of `schema: int` is the newest version that this code reads. `unknown: dict[str, Any]` stores keys written
by a newer Valkyrie, so that rewriting a file does not lose them.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from valkyrie.foreign_errors import parse_validation_error
from valkyrie.paths import write_atomic

R = TypeVar("R")
UNKNOWN_FIELD = "unknown"


class RecordError(ValueError):
    """A file is not JSON, does not match its record type, or has a newer format version than this code reads.

    Args:
        source: Name of the file.
        field: Path of the field at fault, such as `$.parts[0]`, or empty if it is the whole file.
        reason: The error, without the file and the field.
    """

    def __init__(self, source: str, field: str, reason: str) -> None:
        super().__init__(f"{source}: {reason}" + (f" at {field}" if field else ""))
        self.source, self.field, self.reason = source, field, reason


def encode(record: Any) -> Any:
    """Convert a record, or a list or dict of records, to JSON values.

    NumPy scalars become Python numbers, and paths become strings. Raises TypeError for objects without a JSON form.
    """
    json_value = msgspec.to_builtins(record, enc_hook=_encode_scalar)
    if dataclasses.is_dataclass(record) and isinstance(json_value, dict) and UNKNOWN_FIELD in json_value:
        json_value |= json_value.pop(UNKNOWN_FIELD)
    return json_value


def decode(record_type: type[R], json_value: Any, source: str) -> R:
    """Convert plain values to a record.

    Stores keys that are not fields of the record in `unknown`, or drops them if the record has no such field.
    `source` is the name of the file, for messages. Raises RecordError if a field is missing or has a wrong type, or if
    the format version is newer than this code reads.
    """
    if not isinstance(json_value, dict) or not dataclasses.is_dataclass(record_type):
        return _convert(record_type, json_value, source)
    fields = {field.name: field for field in dataclasses.fields(record_type)}
    version, newest = json_value.get("schema", 1), fields["schema"].default if "schema" in fields else None
    if isinstance(version, int) and isinstance(newest, int) and version > newest:
        reason = f"has format version {version}, but this Valkyrie reads versions up to {newest}. Update Valkyrie"
        raise RecordError(source, "", reason)
    if UNKNOWN_FIELD in fields:
        json_value = {k: v for k, v in json_value.items() if k in fields} | {
            UNKNOWN_FIELD: {k: v for k, v in json_value.items() if k not in fields}
        }
    return _convert(record_type, json_value, source)


def dump(record: Any) -> str:
    """Return a record as indented JSON text, ending with a newline."""
    return json.dumps(encode(record), indent=1) + "\n"


def load(record_type: type[R], text: str | bytes, source: str) -> R:
    """Parse JSON text into a record. Raises RecordError for invalid JSON, and for the same reasons as `decode`."""
    try:
        json_value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecordError(source, "", f"is not JSON ({error})") from error
    return decode(record_type, json_value, source)


def write_record(path: Path, record: Any) -> Path:
    """Write a record to a JSON file atomically and return its path. Raises DiskError if it cannot be written."""
    return write_atomic(path, dump(record))


def read_record(record_type: type[R], path: Path) -> R:
    """Read a record from a JSON file. Raises RecordError for invalid content, OSError if it cannot be read."""
    return load(record_type, path.read_bytes(), str(path))


def _convert(record_type: type[R], json_value: Any, source: str) -> R:
    try:
        record = msgspec.convert(json_value, record_type, str_keys=True)  # keys of JSON are strings
    except msgspec.ValidationError as error:
        reason, field = parse_validation_error(str(error))
        raise RecordError(source, field, reason) from error
    _set_defaults(record)
    return record


def _set_defaults(value: Any) -> None:
    """Set fields that the input lacks to their defaults, in a record and the records inside it.

    msgspec 0.22 does not set such fields on the instance. Reading one then finds the default on the class, but encoding
    the record omits it.
    """
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            member = getattr(value, field.name)
            object.__setattr__(value, field.name, member)
            _set_defaults(member)
    elif isinstance(value, (list, tuple)):
        for member in value:
            _set_defaults(member)
    elif isinstance(value, dict):
        for member in value.values():
            _set_defaults(member)


def _encode_scalar(value: Any) -> Any:
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return value.item()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no JSON form. Use numbers, strings, lists and dicts.")
