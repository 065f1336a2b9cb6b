"""Trials, each a layout and what became of it: one line of `trials.jsonl`. Imports no JAX.

The file is append-only. Writers take a lock on it, so that two sweeps may share it; a last line that a crash or a full
disk tore is cut off by the next writer and left out by readers. A later line of a key replaces an earlier one.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from enum import Enum
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from valkyrie.processes.locks import lock
from valkyrie.runs.tracking import cut_torn_line

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
    record of before or of what makes no run. `problems` are those of a refused run, as `Problem.record` gives them; a
    record of before has none. `about` describes the run in words, as `summary.about` gives it
    (layout, mesh, axes, degrees, partition, model, target, chips, batch, seq, ...); of a refused trial what is known
    of it. `folder` is its run folder, relative to the file. `flags` say where a configuration of one's own lies, as the
    command line would (`--config-dir`, its folder absolute).

    `results` are the numbers of the mode: of `compile.json` and `measure.json` the keys `parameters`, `memory`, `step`,
    `seconds`, `communication` without its causes, `placement`, `compile`, `devices`, `simulated`, `loss`, `hints`; of
    a training those of `results.training_results`. Empty where there is no result.
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
    problems: list[dict[str, Any]] = field(default_factory=list)

    def to_json(self) -> str:
        """Return the line, without its end. A number that is not finite, as a diverged loss, becomes null."""
        values = {"schema": SCHEMA, **asdict(self), "status": self.status.value}
        return json.dumps(_finite(values), allow_nan=False)

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
        required = [f.name for f in fields(Trial) if f.default is MISSING and f.default_factory is MISSING]
        if missing := [name for name in required if name not in values]:
            raise _damaged(f"it lacks {', '.join(missing)}")
        for path, fits in _parts():
            if (value := _at(values, path)) is not _ABSENT and not fits(value):
                raise _damaged(f"{'.'.join(path)} cannot be {json.dumps(value)[:100]}")
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


_ABSENT = object()
_NUMBER, _TEXT, _NUMBERS = float | None, str | None, dict[str, float]
_OF_STEP = ("step_s", "p90_s", "min_s", "tokens_per_second", "tokens_per_second_per_chip", "mfu", "product_rate")
_INNER: dict[str, Any] = {
    **{f"about.{key}": _TEXT for key in ("model", "layout", "mesh", "partition", "target", "described", "chip")},
    **{f"about.{key}": _NUMBER for key in ("batch", "seq", "chips", "microbatches")},
    **{f"about.{key}": _NUMBERS | None for key in ("axes", "degrees")},
    **{f"results.{key}": dict[str, Any] for key in ("step", "memory", "communication", "compile", "goodput")},
    **{f"results.step.{key}": _NUMBER for key in (*_OF_STEP, "executed_flops")},
    "results.step.tokens_per_dollar": dict[str, _NUMBER] | None,
    **{f"results.memory.{key}": _NUMBER for key in ("peak", "needed", "usable", "reported_peak")},
    "results.memory.split": _NUMBERS,
    "results.seconds": _NUMBERS,
    "results.communication.bytes_by_mesh_axes": _NUMBERS | None,
    "results.communication.collective_s": dict[str, _NUMBERS] | None,
    "results.communication.exposed_s": _NUMBER,
    "results.compile.compile_s": _NUMBER,
    **{f"results.goodput.{key}": _NUMBER for key in ("share", "wall_s", "restarts", "data_wait")},
    "results.goodput.seconds": _NUMBERS,
    **{f"results.{key}": _NUMBER for key in ("loss", "eval_loss", "parameters")},
    **{f"results.{key}": list[str] | None for key in ("hints", "placement")},
}
"""The types of the parts of `about` and `results` that tables and reports compute with."""


def _damaged(why: str) -> ValueError:
    return ValueError(f"{why}. Delete that line; the same sweep command does its trial again.")


@cache
def _parts() -> list[tuple[tuple[str, ...], Callable[[Any], bool]]]:
    """Return where a line's keys are, and the parts of them that are computed with, and what tells their type."""
    kinds = get_type_hints(Trial) | _INNER
    return [(tuple(name.split(".")), _test_of(kind)) for name, kind in kinds.items()]


def _at(values: Any, path: Sequence[str]) -> Any:
    """Return the value at a path of keys; `_ABSENT` where there is none."""
    for key in path:
        values = values.get(key, _ABSENT) if isinstance(values, dict) else _ABSENT
    return values


def _test_of(kind: Any) -> Callable[[Any], bool]:
    """Return whether a value read from JSON is of a type: a status by its name, a whole number also as a float."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is UnionType:
        tests = [_test_of(part) for part in parts]
        return lambda value: any(test(value) for test in tests)
    if origin is dict and parts[1] is Any:
        return lambda value: isinstance(value, dict)
    if origin is dict:
        of_values = _test_of(parts[1])
        return lambda value: isinstance(value, dict) and all(map(of_values, value.values()))
    if origin is list:
        of_items = _test_of(parts[0])
        return lambda value: isinstance(value, list) and all(map(of_items, value))
    if kind is Status:
        return lambda value: value in [status.value for status in Status]
    types = (int, float) if kind is float else kind
    return lambda value: isinstance(value, types) and not isinstance(value, bool)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
