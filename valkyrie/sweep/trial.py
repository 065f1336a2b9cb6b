"""Trials, each a layout and what became of it: one line of `trials.jsonl`. Imports no JAX.

The file is append-only. Writers take a lock on it, so that two sweeps may share it; a last line that a crash or a full
disk tore is cut off by the next writer and left out by readers. A later line of a key replaces an earlier one.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any

from valkyrie.locks import lock
from valkyrie.tracking import cut_torn_line

SCHEMA = 1
"""The version of a line; it grows when a key changes its meaning. Keys may be added without it."""

TRIALS = "trials.jsonl"
"""The file of a sweep's folder."""
PAGE = "report.html"
"""The page of a sweep's folder, as `valkyrie-report` writes it."""


class Status(Enum):
    """What became of a trial."""

    ok = "ok"
    refused = "refused"  # an illegal layout: no process was started
    does_not_fit = "does_not_fit"
    failed = "failed"  # its process ended with another status than 0
    killed = "killed"  # a signal ended its process
    timeout = "timeout"


@dataclass(frozen=True)
class Trial:
    """One line of `trials.jsonl`.

    `key` is a digest of everything that decides the result: two trials of one key are the same. `name` is its folder's,
    `sweep` the name of the sweep, `stage` the mode that ran: `compile`, `measure`, `train`. `started` is UTC in ISO
    8601, `wall_s` the seconds of its process. `overrides` are the command line's; `values` are those that decide what
    a step computes, by their keys, whether the command line names them or not (`model.layers`: `4`), and empty in a
    record of before or of what makes no run. `about` describes the run in words, as `summary.about` gives it
    (layout, mesh, axes, degrees, partition, model, target, chips, batch, seq, ...); of a refused trial what is known
    of it. `folder` is its run folder, relative to the file. `flags` say where a configuration of one's own lies, as the
    command line would (`--config-dir`, its folder absolute).

    `results` are the numbers of the mode: of `compile.json` and `measure.json` the keys `parameters`, `memory`, `step`,
    `seconds`, `communication` without its causes, `placement`, `compile`, `devices`, `simulated`, `loss`, `hints`; of
    a training run `step` and `loss`. Empty where there is no result.
    """

    key: str
    name: str
    sweep: str
    stage: str
    status: Status
    reason: str | None
    overrides: list[str]
    about: dict[str, Any]
    started: str
    wall_s: float
    folder: str | None = None
    results: dict[str, Any] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        """Return the line, without its end. A number that is not finite, as a diverged loss, becomes null."""
        values = {"schema": SCHEMA, **asdict(self), "status": self.status.value}
        return json.dumps(_finite(values), allow_nan=False)

    @staticmethod
    def from_json(line: str) -> Trial:
        """Return the trial of a line; ValueError for a line of a newer schema, or one that is none."""
        values = json.loads(line)
        if not isinstance(values, dict) or "schema" not in values:
            raise ValueError("a line that is no trial")
        if values["schema"] > SCHEMA:
            raise ValueError(f"schema {values['schema']} is newer than this version of valkyrie, which reads {SCHEMA}")
        known = {f.name for f in fields(Trial)}
        kept = {key: value for key, value in values.items() if key in known}
        return Trial(**{**kept, "status": Status(values["status"])})


class TrialLog:
    """The `trials.jsonl` of a folder."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / TRIALS

    def append(self, trials: Iterable[Trial]) -> None:
        """Write lines and wait until they are on disk; OSError names the file where the disk does not take them."""
        body = "".join(trial.to_json() + "\n" for trial in trials).encode()
        if not body:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b", buffering=0) as file:
            lock(file)
            cut_torn_line(self.path)
            try:
                while body:
                    body = body[file.write(body) :]
                os.fsync(file.fileno())
            except OSError as error:
                message = f"{os.strerror(error.errno or 0)}: a trial was not recorded"
                raise OSError(error.errno, message, str(self.path)) from error

    def read(self) -> list[Trial]:
        """Return the newest line of every key, in the order in which keys first came.

        ValueError names the file and the line that is no trial, or one of a newer schema.
        """
        trials: dict[str, Trial] = {}
        lines = self.path.read_bytes().split(b"\n")[:-1] if self.path.is_file() else []
        for number, line in enumerate(lines, 1):
            try:
                trial = Trial.from_json(line.decode())
            except (ValueError, KeyError, TypeError) as error:
                reason = error if isinstance(error, ValueError) else "it lacks keys that every trial has"
                raise ValueError(f"{self.path}, line {number}, cannot be read: {reason}.") from error
            trials[trial.key] = trial
        return list(trials.values())


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
