"""Trials: one layout each, with its status and results. A trial is a line of `trials.jsonl`. Imports no JAX.

The file is append-only. Writers lock it, so that two sweeps may share it. If a crash or a full disk leaves an
incomplete last line, readers skip it and the next writer removes it. A later line replaces an earlier one of its key.

Units are seconds of a step and bytes of a device. None means unknown.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from valkyrie.compiled.communication import CollectiveTrace, Communication
from valkyrie.config.modes import get_mode
from valkyrie.parts import StepPart
from valkyrie.paths import open_to_append
from valkyrie.problems import ProblemRecord
from valkyrie.processes.locks import lock
from valkyrie.records import RecordError, decode, encode
from valkyrie.runs.folder import key_values
from valkyrie.runs.layout_record import LayoutRecord, with_hardware
from valkyrie.runs.tracking import cut_torn_line
from valkyrie.search.compile.prediction import CompileTimes, MeasuredStep, MemoryReport, PredictedStep
from valkyrie.search.compile.upgrade import upgrade_results

SCHEMA = 1
"""Version of a line. It increases if a key changes its meaning, but not if keys are added."""

TRIALS = "trials.jsonl"
"""File name, in the sweep's folder."""
PAGE = "report.html"
"""File name of the page that `valkyrie-report` writes into a sweep's folder."""
_REASON = 160
"""Characters of a reason that tables show."""


class Status(Enum):
    """Status of a trial."""

    ok = "ok"
    refused = "refused"  # an illegal layout: no process was started
    does_not_fit = "does_not_fit"
    failed = "failed"  # its process ended with another status than 0
    killed = "killed"  # a signal ended its process
    timeout = "timeout"


@dataclass(frozen=True)
class StepResult(PredictedStep, MeasuredStep):
    """Time of a predicted, measured or trained step. A training may record its rate alone."""

    step_s: float | None = None  # pyright: ignore[reportIncompatibleVariableOverride]


@dataclass(frozen=True)
class GoodputResult:
    """Wall time of a training by kind, its share in steps that count, and the share of steps that wait for data."""

    wall_s: float
    seconds: dict[str, float]
    restarts: int
    share: float | None = None
    data_wait: float | None = None


@dataclass(frozen=True)
class TrialResult:
    """Results of a prediction, a measurement or a training.

    Args:
        parts: Time of a predicted step by part.
        communication: Bytes that a device sends, without the single collectives.
        trace: Time in collectives of a measured step.
        placement: Location of each mesh axis on the torus, for display.
        simulated: Whether the devices are simulated, so that no time is real.
        devices: The devices of a measurement, such as `8 x NVIDIA H100`.
        hints: Advice, for display.
        steps: Last step of a training.
        finished: Whether that is the last step requested.
    """

    parameters: int | None = None
    memory: MemoryReport = MemoryReport()
    step: StepResult = StepResult()
    parts: tuple[StepPart, ...] = ()
    communication: Communication | None = None
    trace: CollectiveTrace | None = None
    placement: tuple[str, ...] = ()
    compile: CompileTimes = CompileTimes()
    simulated: bool | None = None
    loss: float | None = None
    hints: tuple[str, ...] = ()
    devices: str | None = None
    eval_loss: float | None = None
    steps: int | None = None
    finished: bool | None = None
    goodput: GoodputResult | None = None

    @property
    def sent(self) -> dict[str, float]:
        """Bytes that a device sends in a step by mesh axes."""
        return {} if self.communication is None else self.communication.by_label

    @property
    def objective(self) -> float:
        """Tokens/s/chip, which a sweeper may maximise, or 0.0 if unknown."""
        return self.step.tokens_per_second_per_chip or 0.0

    def plain(self) -> dict[str, Any]:
        """Return JSON values without unknown numbers and empty lists."""
        plain = encode(self)
        for group in (plain.get("memory", {}), plain.get("step", {}), plain):  # a decoded record omits its defaults
            for key in [key for key, value in group.items() if value in ((), [])]:
                del group[key]
        return known_values(plain)


@dataclass(frozen=True)
class Trial:
    """One line of `trials.jsonl`.

    Args:
        key: Digest of everything that determines the result. Trials with equal keys are the same.
        name: Name of the trial's folder.
        sweep: Name of the sweep.
        stage: Mode that ran: `compile`, `measure`, `train`.
        overrides: Overrides of the command line.
        about: The layout, or what is known of it if the trial was refused. None if the configuration makes no run.
        started: UTC time in ISO 8601.
        wall_s: Seconds of its process.
        folder: Run folder, relative to the file.
        values: Settings that determine what a step computes, by key (`model.layers`: `4`), whether the command line
            names them or not. Empty in older records.
        flags: Flags of the command line that locate a user's configuration (`--config-dir` and an absolute path).
        problems: Problems of a refused run. Empty in older records.
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
    problems: tuple[ProblemRecord, ...] = ()

    @property
    def title(self) -> str:
        """The model, layout, target and stage, for display."""
        return title(self.about, self.overrides, self.stage)

    @property
    def short_reason(self) -> str:
        """The first `_REASON` characters of the reason, on one line."""
        reason = " ".join((self.reason or "no reason known").split())
        return reason if len(reason) <= _REASON else reason[: _REASON - 3] + "..."

    @property
    def kind(self) -> str:
        """Mark of its speed: `simulated`, `predicted`, or empty if it was measured on real devices."""
        if self.results.simulated:
            return "simulated"
        mode = get_mode(self.stage)
        return "predicted" if mode is not None and mode.predicts else ""

    def to_json(self) -> str:
        """Return the line without a newline. Omits numbers that are not finite, such as a diverged loss."""
        values = {"schema": SCHEMA} | encode(self)
        values |= {"about": known_values(values["about"] or {}), "results": self.results.plain()}
        return json.dumps(values, allow_nan=False)

    @staticmethod
    def from_json(line: str | bytes) -> Trial:
        """Parse a line. Raises ValueError, with the remedy, for a newer schema or a malformed line."""
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
        """Write lines and wait until they are on disk. Raises OSError with the file name if that fails."""
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
        """Return the newest line of every key, in the order in which keys first appear.

        Raises ValueError, with the line number and the remedy, for a malformed line or a newer schema.
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


def upgrade_line(line: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the results of an older line. Raises RecordError if they are malformed."""
    results = line.get("results")
    if not isinstance(results, dict):
        return dict(line)
    hints = {"hints": results["hints"]} if "hints" in results else {}  # texts, unlike those of a prediction
    try:
        new = upgrade_results({key: value for key, value in results.items() if key != "hints"})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        key = "seconds" if "seconds" in results else "communication"
        raise RecordError(TRIALS, f"$.results.{key}", f"cannot be read ({error})") from error
    return {**line, "results": known_values(new | hints)}


def _damaged(why: str) -> ValueError:
    return ValueError(f"{why}. Delete that line; the same sweep command does its trial again.")


def known_values(value: Any) -> Any:
    """Return JSON values without unknown ones: None, empty objects, and numbers that are not finite."""
    if isinstance(value, dict):
        known = {key: known_values(inner) for key, inner in value.items()}
        return {key: inner for key, inner in known.items() if inner is not None and inner != {}}
    if isinstance(value, list | tuple):
        return [known_values(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
