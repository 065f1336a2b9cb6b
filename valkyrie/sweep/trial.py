"""Trials and their records in `trials.jsonl`. A trial is one layout with its status and results. Does not import JAX.

The file has one line per trial and is append-only: a later line replaces an earlier one with the same key. Writers lock
the file, so that two sweeps can share it. If a crash or a full disk leaves an incomplete last line, readers skip it and
the next writer removes it.

Units are seconds per step and bytes per device. None means unknown.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from valkyrie.compiled.communication import CollectiveTrace, Communication
from valkyrie.config.modes import ANSWER_FILE, get_mode
from valkyrie.foreign_errors import missing_field
from valkyrie.hardware.target import AUTO_TARGET
from valkyrie.parts import StepPart
from valkyrie.paths import open_to_append
from valkyrie.problems import ProblemRecord
from valkyrie.processes.locks import SWEEP_LOCK_FILE, lock
from valkyrie.records import RecordError, decode, encode
from valkyrie.runs.folder import has_visible_files, key_values
from valkyrie.runs.layout_record import LayoutRecord, with_hardware
from valkyrie.runs.tracking import cut_torn_line
from valkyrie.search.compile.prediction import CompileTimes, MeasuredStep, MemoryReport, PredictedStep
from valkyrie.search.compile.upgrade import upgrade_results

SCHEMA = 1
"""Version of the format of a line. It increases when a key changes its meaning, but not when keys are added."""

TRIALS_FILE = "trials.jsonl"
"""File name of the records in a sweep's folder."""
MULTIRUN_FILE = "multirun.yaml"
"""File in a sweep's folder with the configuration of the multirun, including its command-line overrides."""
PAGE_FILE = "report.html"
"""File name of the HTML report that `valkyrie-report` writes into a sweep's folder."""
_OWN_TEXTS = {TRIALS_FILE: b'{"schema"', MULTIRUN_FILE: b"valkyrie-train", ANSWER_FILE: b'"question"'}
"""A text that each record of a sweep or a search contains, unless the record is empty, as after a full disk."""
_SHORT_REASON_LENGTH = 160
"""Maximum number of characters of a reason in tables."""


class Status(Enum):
    """How a trial ended: with results (`ok`), with some of them (`interrupted`), or why it has none."""

    ok = "ok"
    interrupted = "interrupted"  # a training run that stopped before its last step
    refused = "refused"  # an illegal layout: no process was started
    does_not_fit = "does_not_fit"
    failed = "failed"  # its process exited with a status other than 0
    killed = "killed"  # a signal ended its process
    timeout = "timeout"


@dataclass(frozen=True)
class StepResult(PredictedStep, MeasuredStep):
    """Speed of a predicted, measured or trained step. A training run may record its tokens/s without a step time."""

    step_s: float | None = None  # pyright: ignore[reportIncompatibleVariableOverride]


@dataclass(frozen=True)
class GoodputResult:
    """How a training run spent its wall time.

    Args:
        wall_s: Wall time, including restarts.
        seconds: Seconds of the wall time by kind, a key of `valkyrie.runs.goodput.TIME_KINDS` such as `compile`.
        restarts: Number of restarts.
        share: Share of the wall time spent on steps that were not repeated.
        data_wait: Share of the step time spent waiting for data.
    """

    wall_s: float
    seconds: dict[str, float]
    restarts: int
    share: float | None = None
    data_wait: float | None = None


@dataclass(frozen=True)
class TrialResult:
    """Results of a prediction, a measurement or a training run.

    Args:
        parameters: Number of parameters of the model.
        memory: Peak, needed and usable memory.
        step: Step time and speed.
        parts: Seconds of a predicted step by part.
        communication: Bytes that each device sends per step, without the list of collectives.
        trace: Time that a measured step spends in collectives.
        placement: Description of each mesh axis on the torus, for display.
        compile: Seconds to lower and to compile the step.
        simulated: Whether the devices are simulated, so that times are not real.
        loss: Last training loss.
        hints: Advice, for display.
        devices: The devices of a measurement, such as `8 x NVIDIA H100`.
        eval_loss: Last evaluation loss.
        steps: Last step that a training run reached.
        finished: Whether a training run reached the last step that was requested.
        goodput: Wall time of a training run by kind.
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
    def bytes_by_axes(self) -> dict[str, float]:
        """Bytes that a device sends per step, by mesh axes such as `x,y`. Empty if unknown."""
        return {} if self.communication is None else self.communication.bytes_by_label

    @property
    def objective(self) -> float:
        """Tokens/s/chip, or 0.0 if unknown. Sweepers maximise it."""
        return self.step.tokens_per_second_per_chip or 0.0

    def json_values(self) -> dict[str, Any]:
        """Return the results as a JSON object. Omits unknown values and empty lists."""
        values = encode(self)
        for group in (values.get("memory", {}), values.get("step", {}), values):  # a decoded record omits its defaults
            for key in [key for key, value in group.items() if value in ((), [])]:
                del group[key]
        return drop_unknown(values)


@dataclass(frozen=True)
class Trial:
    """One line of `trials.jsonl`.

    Args:
        key: Digest of everything that determines the result. Trials with equal keys are the same trial.
        name: Name of the trial's folder.
        sweep: Name of the sweep.
        stage: Name of the mode, such as `compile`, `measure` or `train`.
        status: Status of the trial.
        reason: The reason for the status, or None if the trial is ok.
        overrides: Overrides of the command line.
        about: The layout. Some fields are unknown if the trial was refused. None if the configuration does not compose.
        started: UTC time in ISO 8601.
        wall_s: Seconds that the trial's process ran.
        folder: Run folder, relative to the sweep's folder, or None if no process was started.
        results: The results.
        values: All settings of the model, precision and optimizer as text, by key (`model.layers`: `4`). Empty in older
            records, and if the configuration does not compose.
        flags: Command-line flags that locate the user's configuration (`--config-dir` and an absolute path).
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
        """The model, layout, target and stage as text, or the overrides if the configuration does not compose."""
        return trial_title(self.about, self.overrides, self.stage)

    @property
    def short_reason(self) -> str:
        """The reason on one line, shortened for tables."""
        reason = " ".join((self.reason or "unknown reason").split())
        return reason if len(reason) <= _SHORT_REASON_LENGTH else reason[: _SHORT_REASON_LENGTH - 3] + "..."

    @property
    def speed_label(self) -> str:
        """`simulated` or `predicted`, or empty for a speed measured on real devices."""
        if self.results.simulated:
            return "simulated"
        mode = get_mode(self.stage)
        return "predicted" if mode is not None and mode.predicts else ""

    def to_json(self) -> str:
        """Return the trial as a line of `trials.jsonl`, without a newline. Omits numbers that are not finite."""
        values = {"schema": SCHEMA} | encode(self)
        values |= {"about": drop_unknown(values["about"] or {}), "results": self.results.json_values()}
        return json.dumps(values, allow_nan=False)

    @staticmethod
    def from_json(line: str | bytes) -> Trial:
        """Parse a line. Raises ValueError for a newer schema or a malformed line, with advice in the message."""
        try:
            text = line if isinstance(line, str) else line.decode()
            values = json.loads(text)
        except ValueError as error:
            # Compressed files and UTF-16 begin so; later, a single line is damaged.
            if isinstance(error, UnicodeDecodeError) and error.start < 2:
                raise ValueError(
                    "it is not UTF-8 text. Convert the file if it is compressed or in another encoding, or restore it "
                    "from a backup."
                ) from error
            raise _malformed_line(f"it is not JSON ({error})") from error
        if not isinstance(values, dict) or "schema" not in values:
            raise _malformed_line("it is not a trial")
        if type(values["schema"]) is not int:
            raise _malformed_line(f"schema must be a whole number, not {json.dumps(values['schema'])}")
        if values["schema"] > SCHEMA:
            too_new = f"schema {values['schema']} is too new: this version of valkyrie reads up to schema {SCHEMA}"
            raise ValueError(f"{too_new}. Update valkyrie.")
        for key, value in values.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise _malformed_line(f"{key} must be a finite number, not {json.dumps(value)}")
        try:
            trial = decode(Trial, upgrade_record(values) | {"about": values.get("about") or None}, TRIALS_FILE)
        except RecordError as error:
            # `upgrade_record` drops numbers in the results that are not finite.
            key = missing_field(error.reason)
            if key and (number := re.search(rf'"{key}": *(NaN|-?Infinity)', text)):
                raise _malformed_line(f"{key} must be a finite number, not {number[1]}") from error
            raise _malformed_line(f"{error.field.removeprefix('$.') or 'the line'}: {error.reason}") from error
        for key, value in vars(trial.results.step).items():
            if isinstance(value, float) and value < 0:
                raise _malformed_line(f"{key} must be at least 0, not {value:g}")
        about = trial.about
        return trial if about is None else replace(trial, about=with_hardware(about, key_values(trial.overrides)))


def trial_title(about: LayoutRecord | None, overrides: Sequence[str], stage: str) -> str:
    """Return the model, layout, target and stage of a trial as text, or its overrides if they do not compose."""
    if about is None:
        return " ".join(overrides)
    target = "" if about.target == AUTO_TARGET else f" {about.target}"
    return f"{about.model} {about.name}{target} {stage}"


def refuse_other_files(folder: Path, setting: str, value: str | None) -> None:
    """Raise ValueError if a folder contains files, but none that a sweep or a search of layouts has written.

    Hidden files do not count. A sweep that was killed before its first trial ended has at least written
    `multirun.yaml` or the lock of a trial, so it can continue.

    Args:
        folder: The folder that a sweep or a search is about to write. It may be missing.
        setting: The setting that selects the folder, without `=`.
        value: The value of that setting as typed, or None if it was not typed.
    """
    if not has_visible_files(folder) or next(folder.glob(f"*/{SWEEP_LOCK_FILE}"), None) is not None:
        return
    for name, own_text in _OWN_TEXTS.items():
        if (folder / name).is_file() and own_text in ((folder / name).read_bytes() or own_text):
            return
    key = "" if value is None else f"{setting}={value}: "
    raise ValueError(
        f"{key}{folder} contains files but no record of a sweep or a search, so it is not the folder of one. Use "
        f"another {setting}=."
    )


class TrialLog:
    """Reads and writes the `trials.jsonl` of a folder."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / TRIALS_FILE

    def append(self, trials: Iterable[Trial]) -> None:
        """Append trials and wait until they are on disk. Raises OSError with the file name on failure."""
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

    def describe_torn_line(self) -> str | None:
        """Return a note on the incomplete last line that `read` skips, or None if there is none."""
        torn_line = self.path.read_bytes().rpartition(b"\n")[2] if self.path.exists() else b""
        return f"{self.path}: skipped the last line, which is incomplete" if torn_line else None

    def read(self) -> list[Trial]:
        """Return the newest trial of each key, in the order that keys first appear.

        Raises ValueError for a malformed line or a newer schema, with the line number and advice in the message.
        """
        trials: dict[str, Trial] = {}
        lines = self.path.read_bytes().split(b"\n")[:-1] if self.path.exists() else []
        for number, line in enumerate(lines, 1):
            try:
                trial = Trial.from_json(line)
            except ValueError as error:
                raise ValueError(f"{self.path}, line {number}, cannot be read: {error}") from error
            trials[trial.key] = trial
        return list(trials.values())


def upgrade_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record of a trial with its results upgraded to the current format and unknown values dropped.

    Raises RecordError if the results are malformed.
    """
    results = record.get("results")
    if not isinstance(results, dict):
        return dict(record)
    # The hints of a trial are texts. `upgrade_results` expects those of a prediction.
    hints = {"hints": results["hints"]} if "hints" in results else {}
    try:
        upgraded_results = upgrade_results({key: value for key, value in results.items() if key != "hints"})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        key = "seconds" if "seconds" in results else "communication"
        raise RecordError(TRIALS_FILE, f"$.results.{key}", f"cannot be read ({error})") from error
    return {**record, "results": drop_unknown(upgraded_results | hints)}


def _malformed_line(why: str) -> ValueError:
    return ValueError(f"{why}. Delete that line and run the sweep command again to repeat its trial.")


def drop_unknown(value: Any) -> Any:
    """Return a copy of a JSON value without the unknown values in its objects, at any depth.

    Unknown values are None, empty objects and numbers that are not finite. Lists keep their length: NaN and infinite
    numbers in them become None.
    """
    if isinstance(value, dict):
        known_items = {key: drop_unknown(item) for key, item in value.items()}
        return {key: item for key, item in known_items.items() if item is not None and item != {}}
    if isinstance(value, list | tuple):
        return [drop_unknown(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
