"""Trials, each a layout and what became of it: one line of `trials.jsonl`. Imports no JAX.

The file is append-only. Writers take a lock on it, so that two sweeps may share it; a last line that a crash or a full
disk tore is cut off by the next writer and left out by readers. A later line of a key replaces an earlier one.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from valkyrie.config.modes import mode_named
from valkyrie.paths import open_to_append
from valkyrie.processes.locks import lock
from valkyrie.records import RecordError, decode, encode
from valkyrie.runs.folder import key_values
from valkyrie.runs.layout_record import LayoutRecord, with_hardware
from valkyrie.runs.results import TrialResult, upgrade_results
from valkyrie.runs.tracking import cut_torn_line

SCHEMA = 1
"""The version of a line; it grows when a key changes its meaning. Keys may be added without it."""

TRIALS = "trials.jsonl"
"""The file of a sweep's folder."""
PAGE = "report.html"
"""The page of a sweep's folder, as `valkyrie-report` writes it."""
_REASON = 160
"""Letters of a reason that tables show."""


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
    record of before or of what makes no run. `problems` are those of a refused run, as `Problem.record` gives them; a
    record of before has none. `about` describes the run in words, as `summary.about` gives it
    (layout, mesh, axes, degrees, partition, model, target, chips, batch, seq, ...); of a refused trial what is known
    of it. `folder` is its run folder, relative to the file. `flags` say where a configuration of one's own lies, as the
    command line would (`--config-dir`, its folder absolute).

    `results` are the numbers of the mode, without the causes of its communication; empty where there are none.
    """

    key: str
    name: str
    sweep: str
    stage: str
    status: Status
    reason: str | None
    overrides: list[str]
    about: LayoutRecord | None
    started: str
    wall_s: float
    folder: str | None = None
    results: TrialResult = TrialResult()
    values: dict[str, str] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)
    problems: list[dict[str, Any]] = field(default_factory=list)

    @property
    def title(self) -> str:
        """The model, layout, target and stage, for display."""
        return title(self.about, self.overrides, self.stage)

    @property
    def short_reason(self) -> str:
        """The beginning of its reason, on one line."""
        reason = " ".join((self.reason or "no reason known").split())
        return reason if len(reason) <= _REASON else reason[: _REASON - 3] + "..."

    @property
    def kind(self) -> str:
        """How its speed must be marked: simulated, predicted, or not at all."""
        if self.results.simulated:
            return "simulated"
        mode = mode_named(self.stage)
        return "predicted" if mode is not None and mode.predicts else ""

    def to_json(self) -> str:
        """Return the line, without its end. A number that is not finite, as a diverged loss, is left out."""
        values = {"schema": SCHEMA} | encode(self)
        for key in ("about", "results"):
            values[key] = known_values(values[key] or {})
        return json.dumps(values, allow_nan=False)

    @staticmethod
    def from_json(line: str | bytes) -> Trial:
        """Return the trial of a line; ValueError for a line of a newer schema, or one that is none, with the remedy."""
        try:
            values = json.loads(line)
        except ValueError as error:
            raise _damaged(f"it is not JSON ({error})") from error
        if not isinstance(values, dict) or "schema" not in values:
            raise _damaged("it is no trial")
        if type(values["schema"]) is not int:
            raise _damaged(f"schema cannot be {json.dumps(values['schema'])}")
        if values["schema"] > SCHEMA:
            newer = f"schema {values['schema']} is newer than this version of valkyrie, which reads {SCHEMA}"
            raise ValueError(f"{newer}. Update valkyrie.")
        try:
            trial = decode(Trial, upgrade_line(values) | {"about": values.get("about") or None}, TRIALS)
        except RecordError as error:
            raise _damaged(f"{error.field.removeprefix('$.') or 'the line'}: {error.reason}") from error
        about = trial.about
        return trial if about is None else replace(trial, about=with_hardware(about, key_values(trial.overrides)))


def title(about: LayoutRecord | None, overrides: Sequence[str], stage: str) -> str:
    """Return the model, layout, target and stage of a trial, or its overrides if they make no run."""
    if about is None:
        return " ".join(overrides)
    target = "" if about.target == "auto" else f" {about.target}"
    return f"{about.model} {about.name}{target} {stage}"


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
        with open_to_append(self.path) as file:
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

        ValueError names the file and the line that is no trial, or one of a newer schema, and says what to do.
        """
        trials: dict[str, Trial] = {}
        lines = self.path.read_bytes().split(b"\n")[:-1] if self.path.is_file() else []
        for number, line in enumerate(lines, 1):
            try:
                trial = Trial.from_json(line)
            except ValueError as error:
                raise ValueError(f"{self.path}, line {number}, cannot be read: {error}") from error
            trials[trial.key] = trial
        return list(trials.values())


def upgrade_line(line: dict[str, Any]) -> dict[str, Any]:
    """Convert the results of an older line. Raises RecordError if they are malformed."""
    if not isinstance(line.get("results"), dict):
        return line
    try:
        return line | {"results": upgrade_results(line["results"])}
    except ValueError as error:
        raise RecordError(TRIALS, "$.results.seconds", str(error)) from error
    except (AttributeError, TypeError) as error:
        raise RecordError(TRIALS, "$.results.communication", str(error)) from error


def _damaged(why: str) -> ValueError:
    return ValueError(f"{why}. Delete that line; the same sweep command does its trial again.")


def known_values(value: Any) -> Any:
    """Return plain values without what is unknown: None, empty groups, and numbers that are not finite."""
    if isinstance(value, dict):
        known = {key: known_values(inner) for key, inner in value.items()}
        return {key: inner for key, inner in known.items() if inner is not None and inner != {}}
    if isinstance(value, list | tuple):
        return [known_values(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
