"""Reads the offline logs of W&B: LevelDB logs of protobuf messages."""

from __future__ import annotations

import json
import struct
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def wandb_log(folder: Path) -> dict[str, Any]:
    """Return the content of the only W&B log in a folder (see `read_wandb`)."""
    (log,) = wandb_logs(folder)
    return log


def wandb_logs(folder: Path) -> list[dict[str, Any]]:
    """Return the content of every W&B log in a folder, oldest first. Waits for W&B's process to finish writing."""
    return [_read_when_finished(path) for path in sorted(folder.glob("wandb/offline-run-*/*.wandb"))]


def _read_when_finished(path: Path) -> dict[str, Any]:
    deadline = time.monotonic() + 20
    while "exit" not in (log := read_wandb(path)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return log


def read_wandb(path: Path) -> dict[str, Any]:
    """Return the current content of a W&B log.

    `history` is a list of records, `config` and `summary` are dicts, `run` is W&B's protobuf record of the run, and
    `exit` is the exit status. The last two are missing until they are written.
    """
    from wandb.proto import wandb_internal_pb2 as pb

    def values_by_key(items: Any) -> dict[str, Any]:
        return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}

    log: dict[str, Any] = {"history": [], "config": {}, "summary": {}}
    for body in _frames(path.read_bytes()):
        record = pb.Record.FromString(body)
        kind = record.WhichOneof("record_type")
        if kind == "history":
            log["history"].append(values_by_key(record.history.item))
        elif kind == "run":
            log["run"] = record.run
            log["config"] |= values_by_key(record.run.config.update)
        elif kind == "config":
            log["config"] |= values_by_key(record.config.update)
        elif kind == "summary":
            log["summary"] |= values_by_key(record.summary.update)
        elif kind == "exit":
            log["exit"] = record.exit.exit_code
    return log


def _frames(data: bytes, block: int = 32768) -> Iterator[bytes]:
    """Yield the complete records of a LevelDB log.

    A record is split into frames that do not cross blocks of `block` bytes. A frame has a header of 7 bytes with CRC,
    length and kind (whole record, or first, middle or last part), followed by its data.
    """
    position, body = 7, b""
    while position + 7 <= len(data):
        room = block - position % block
        if room < 7:
            position += room
            continue
        crc, length, kind = struct.unpack_from("<IHB", data, position)
        part = data[position + 7 : position + 7 + length]
        if len(part) < length:
            return
        assert zlib.crc32(part, zlib.crc32(bytes([kind]))) == crc
        position += 7 + length
        body = part if kind in (1, 2) else body + part
        if kind in (1, 4):
            yield body
