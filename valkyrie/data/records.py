"""Reads .tfrecord and ArrayRecord files without TensorFlow. A record is a tf.train.Example or plain text."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, BinaryIO

from valkyrie.data.compressed import refuse_compressed
from valkyrie.problems import first_line

_MASK = 0xFFFFFFFF
_RECORDS_PER_READ = 256


def read_tfrecords(file: BinaryIO, name: str) -> Iterator[bytes]:
    """Yield the records of a .tfrecord file. Errors refer to the file as `name`.

    Raises ValueError if the file ends early, a checksum differs, or google-crc32c is not installed.
    """
    try:
        import google_crc32c
    except ImportError:
        raise ValueError(
            f"{name}: reading .tfrecord needs google-crc32c. Install it with `uv sync --extra tfrecord` in the clone."
        ) from None
    number = 0
    while head := file.read(12):
        number += 1
        if len(head) < 12:
            raise ValueError(f"{name}:{number} is cut short: the file ends inside a record.")
        length, length_sum = struct.unpack("<QI", head)
        if _masked_crc(google_crc32c.value(head[:8])) != length_sum:
            refuse_compressed(head, name)
            raise ValueError(
                f"{name}:{number} is damaged, or the file is not a .tfrecord: the length of the record does not match "
                "its checksum."
            )
        data, tail = file.read(length), file.read(4)
        if len(data) < length or len(tail) < 4:
            raise ValueError(f"{name}:{number} is cut short: the file ends inside a record.")
        if _masked_crc(google_crc32c.value(data)) != struct.unpack("<I", tail)[0]:
            raise ValueError(f"{name}:{number} is damaged: its checksum does not match.")
        yield data


def read_array_records(path: str, name: str) -> Iterator[bytes]:
    """Yield the records of an ArrayRecord file. Errors refer to the file as `name`.

    Raises ValueError if the file cannot be read or array-record is not installed.
    """
    try:
        from array_record.python.array_record_module import ArrayRecordReader
    except ImportError:
        raise ValueError(
            f"{name}: reading ArrayRecord needs array-record. Install it with `uv pip install array-record`."
        ) from None
    reader: Any = None
    try:
        reader = ArrayRecordReader(path)
        count = reader.num_records()
        for start in range(0, count, _RECORDS_PER_READ):
            yield from reader.read([*range(start, min(start + _RECORDS_PER_READ, count))])
    except (RuntimeError, IndexError, ValueError) as error:
        raise ValueError(f"{name} is not a readable ArrayRecord file: {first_line(error)}") from None
    finally:
        if reader is not None:
            reader.close()


def record_text(raw: bytes, name: str, field: str) -> str:
    """Return the text of a record: the feature `field` of a tf.train.Example, or else the whole record as UTF-8.

    Raises ValueError if an Example has no text in this feature, or if the record is neither an Example nor UTF-8.
    """
    features = _features(raw)
    if features and field not in features:
        raise ValueError(
            f"data.field={field} is not a feature of {name}. Set data.field to one of {', '.join(sorted(features))}."
        )
    if features and features[field] is None:
        raise ValueError(
            f"data.field={field} is not text in {name}. Set data.field to the name of a feature with text."
        )
    try:
        return (features[field] or b"" if features else raw).decode()
    except UnicodeDecodeError:
        if features:
            raise ValueError(
                f"data.field={field} is not UTF-8 in {name}. Set data.field to the name of a feature with text."
            ) from None
        raise ValueError(f"{name} is neither a tf.train.Example nor UTF-8 text.") from None


def _masked_crc(crc: int) -> int:
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & _MASK


def _features(raw: bytes) -> dict[str, bytes | None] | None:
    """Return the features of a tf.train.Example by name, or None if the record is not an Example.

    Each value is the first entry of the bytes list of the feature (`b""` if the list is empty), or None if the feature
    has no bytes list, for example because it holds numbers.
    """
    features: dict[str, bytes | None] = {}
    try:
        for number, group in _parse_fields(raw):
            if number != 1:
                return None
            for entry_number, entry in _parse_fields(group):
                parts = dict(_parse_fields(entry))
                if entry_number != 1 or not parts.keys() <= {1, 2}:
                    return None
                kinds = dict(_parse_fields(parts.get(2, b"")))
                if not kinds.keys() <= {1, 2, 3}:
                    return None
                values = [value for _, value in _parse_fields(kinds[1])] if 1 in kinds else []
                features[parts.get(1, b"").decode()] = values[0] if values else (b"" if 1 in kinds else None)
    except ValueError:  # no message, or a name that is not UTF-8
        return None
    return features


def _parse_fields(raw: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (field number, content) for each field of a protobuf message with only length-delimited fields.

    Raises ValueError if `raw` is not such a message.
    """
    position = 0
    while position < len(raw):
        tag, position = _varint(raw, position)
        if tag & 7 != 2:
            raise ValueError("not a field with a length")
        length, position = _varint(raw, position)
        if position + length > len(raw):
            raise ValueError("beyond the end")
        yield tag >> 3, raw[position : position + length]
        position += length


def _varint(raw: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while position < len(raw) and shift < 64:
        value |= (raw[position] & 127) << shift
        position, shift = position + 1, shift + 7
        if not raw[position - 1] & 128:
            return value, position
    raise ValueError("not a number")
