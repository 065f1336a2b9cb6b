"""Reads what W&B wrote offline, from its files: the records of a LevelDB log, each a protobuf message."""

from __future__ import annotations

import json
import struct
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def wandb_log(folder: Path) -> dict[str, Any]:
    """Return what the one W&B log in a folder holds: config, history, summary, the run's record, its exit status."""
    (found,) = wandb_logs(folder)
    return found


def wandb_logs(folder: Path) -> list[dict[str, Any]]:
    """Return what every finished W&B log in a folder holds, oldest first; W&B's process may still be writing one."""
    return [_finished(path) for path in sorted(folder.glob("wandb/offline-run-*/*.wandb"))]


def _finished(path: Path) -> dict[str, Any]:
    end = time.monotonic() + 20
    while "exit" not in (found := read_wandb(path)) and time.monotonic() < end:
        time.sleep(0.1)
    return found


def read_wandb(path: Path) -> dict[str, Any]:
    """Return what a W&B log holds by now."""
    from wandb.proto import wandb_internal_pb2 as pb

    def pairs(items: Any) -> dict[str, Any]:
        return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}

    found: dict[str, Any] = {"history": [], "config": {}, "summary": {}}
    for body in _frames(path.read_bytes()):
        record = pb.Record.FromString(body)
        kind = record.WhichOneof("record_type")
        if kind == "history":
            found["history"].append(pairs(record.history.item))
        elif kind == "run":
            found["run"] = record.run
            found["config"] |= pairs(record.run.config.update)
        elif kind == "config":
            found["config"] |= pairs(record.config.update)
        elif kind == "summary":
            found["summary"] |= pairs(record.summary.update)
        elif kind == "exit":
            found["exit"] = record.exit.exit_code
    return found


def _frames(data: bytes, block: int = 32768) -> Iterator[bytes]:
    """Yield the records of a LevelDB log: frames of CRC, length and kind, cut at blocks."""
    at, body = 7, b""
    while at + 7 <= len(data):
        room = block - at % block
        if room < 7:
            at += room
            continue
        crc, length, kind = struct.unpack_from("<IHB", data, at)
        part = data[at + 7 : at + 7 + length]
        if len(part) < length:
            return
        assert zlib.crc32(part, zlib.crc32(bytes([kind]))) == crc
        at += 7 + length
        body = part if kind in (1, 2) else body + part
        if kind in (1, 4):
            yield body
