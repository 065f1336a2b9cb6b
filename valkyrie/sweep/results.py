"""Reads the outcome of a trial: its status, the reason, and the results in the files that its mode writes."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from valkyrie.compiled.communication import Communication, upgrade_communication
from valkyrie.config.modes import MEASURE_FILE
from valkyrie.config.run import Run
from valkyrie.paths import write_atomic
from valkyrie.problems import ProblemRecord
from valkyrie.processes.ending import EXIT_INTERRUPTED, EXIT_PREEMPTED, EXIT_REFUSED, OUT_OF_MEMORY, describe_status
from valkyrie.records import RecordError, decode, encode, load, read_record
from valkyrie.runs.goodput import read_goodput
from valkyrie.runs.tracking import read_metrics
from valkyrie.runs.wandb_writer import COMMUNICATION_KEY
from valkyrie.search.compile.prediction import CompileTimes, Measurement, MemoryReport, Prediction
from valkyrie.sweep.trial import GoodputResult, Status, StepResult, TrialResult, upgrade_record
from valkyrie.units import GIB

OUTPUT_FILE, OUTCOME_FILE = "output.log", "outcome.json"
"""File names in a trial's folder, for the output of its process and for its `Outcome`."""

_ERROR_LINE = re.compile(r"^(?:[\w.]*(?:Error|Exception|Interrupt|Exit)\b.*|[FE]\d{4} .*)$")
_MAX_REASON_LENGTH = 600
_OLD_TRAFFIC_PREFIX, _OLD_TRAFFIC_TOTAL = "comm_bytes/", "comm_bytes/total"
"""Keys for bytes sent in the summary of a training run, as written by version 1.0 and earlier."""


@dataclass(frozen=True)
class Outcome:
    """How a trial ended.

    Args:
        status: Status of the trial.
        reason: The reason for the status, or None if the trial is ok.
        results: Results of the trial. Empty if there are none.
        problems: Problems of the run if it is refused. Empty if the refusal has other reasons.
    """

    status: Status
    reason: str | None = None
    results: TrialResult = TrialResult()
    problems: tuple[ProblemRecord, ...] = ()

    def write(self, folder: Path) -> None:
        """Write `outcome.json` into a trial's folder."""
        json_values = encode(self) | {"results": self.results.json_values()}
        write_atomic(folder / OUTCOME_FILE, json.dumps(json_values) + "\n")


def read_outcome(folder: Path, returncode: int) -> Outcome:
    """Read the outcome from `outcome.json`. If the file is damaged, the outcome is `failed`.

    If the file is missing, the status follows from the exit status, and the reason quotes the last error in the log.
    """
    try:
        file = folder / OUTCOME_FILE
        return decode(Outcome, upgrade_record(load(dict, file.read_bytes(), str(file))), str(file))
    except FileNotFoundError:
        return _infer_outcome(returncode, last_error(folder / OUTPUT_FILE))
    except RecordError as error:
        return failed_outcome(f"{OUTCOME_FILE} is damaged ({error.reason}). To repeat the trial, add trial.retry=true")


def outcome_from_exit_status(exit_status: int, reason: str) -> Outcome:
    """Return the outcome of a process that ended itself, from its exit status and the reason that it gave.

    An interrupted or preempted process counts as killed, and its reason is replaced. A process with a status other than
    these, `EXIT_REFUSED` and `OUT_OF_MEMORY` counts as failed.
    """
    if exit_status in (EXIT_INTERRUPTED, EXIT_PREEMPTED):
        return Outcome(Status.killed, "the process was interrupted by another program")
    statuses = {EXIT_REFUSED: Status.refused, OUT_OF_MEMORY: Status.does_not_fit}
    return Outcome(statuses[exit_status], reason) if exit_status in statuses else failed_outcome(reason)


def failed_outcome(reason: str) -> Outcome:
    """Return the outcome of a process that failed, with the reason shortened to one line."""
    return Outcome(Status.failed, " ".join(reason.split())[:_MAX_REASON_LENGTH])


def outcome_from_results(folder: Path, run: Run) -> Outcome:
    """Return the outcome of a run that ended without an error, from the results file of its mode.

    The status is `failed` if a prediction or measurement is missing, else the status in that file. Training runs, and
    modes without a results file, are `ok`. The results of the latter are their `trial_metrics`.
    """
    if run.config.mode.results is None:
        metrics = run.config.mode.trial_metrics()
        step = metrics.get("step")
        results = TrialResult(eval_loss=metrics.get("eval_loss"), steps=None if step is None else int(step))
        return Outcome(Status.ok, None, results)
    file = folder / run.config.mode.results
    if file.suffix == ".jsonl":
        return Outcome(Status.ok, None, training_results(file, run))
    if not file.is_file():
        return failed_outcome(f"the process wrote no {file.name}")
    result = read_record(Measurement if file.name == MEASURE_FILE else Prediction, file)
    return Outcome(Status(result.status.value), result.reason, trial_result(result))


def trial_result(result: Prediction | Measurement) -> TrialResult:
    """Convert a prediction or a measurement to the results that a line of `trials.jsonl` stores."""
    communication = result.communication
    shared_results = TrialResult(
        memory=result.memory or MemoryReport(),
        step=StepResult() if result.step is None else StepResult(**vars(result.step)),
        communication=communication and replace(communication, collectives=()),
        compile=result.compile,
    )
    if isinstance(result, Measurement):
        measured_fields = {
            "simulated": result.simulated,
            "devices": result.devices,
            "trace": result.trace,
            "loss": result.loss,
        }
        return replace(shared_results, **measured_fields)
    return replace(
        shared_results,
        parameters=result.parameters,
        parts=result.parts,
        placement=result.placement,
        hints=tuple(hint.text for hint in result.hints),
    )


@dataclass(frozen=True)
class _TrainingNumbers:
    """Values from `metrics.jsonl` for a `TrialResult`. Decoding them to this class checks their types."""

    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    eval_loss: float | None = None
    hbm_gib: float | None = None
    compile_s: float | None = None
    data_wait: float | None = None
    simulated: bool | None = None


def training_results(metrics_file: Path, run: Run, say: Callable[[str], object] | None = None) -> TrialResult:
    """Return the results of a training run from its `metrics.jsonl` and the goodput record in the same folder.

    Speeds come from the summary if the run is finished or has no record of a step, else from the record of its last
    step. If `metrics.jsonl` is missing, its values are unknown. Raises ValueError with the file and the field if a
    value has the wrong type. `say` is called with a message about damaged lines, if any.
    """
    records = read_metrics(metrics_file, say) if metrics_file.is_file() else []
    summary: dict[str, Any] = {}
    for record in records:
        record_summary = record.get("summary", {})
        if not isinstance(record_summary, dict):
            raise RecordError(str(metrics_file), "$.summary", "expected `object`")
        summary |= {k: v for k, v in record_summary.items() if v is not None}
    step_records = [record for record in records if "loss" in record]
    last_record = step_records[-1] if step_records else {}
    is_finished = bool(summary.get("finished")) and summary.get("steps") == last_record.get(
        "step", summary.get("steps")
    )
    known_values = {k: v for k, v in last_record.items() if v is not None} | (
        summary if is_finished or not last_record else {}
    )
    selected_values = {key: known_values.get(key) for key in ("steps", "data_wait")} | {"loss": last_record.get("loss")}
    selected_values |= {key: summary.get(key) for key in ("hbm_gib", "compile_s", "simulated", "eval_loss")}
    numbers = decode(_TrainingNumbers, selected_values | {"step": last_record.get("step")}, str(metrics_file))
    try:
        traffic = training_traffic(summary)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RecordError(str(metrics_file), f"$.summary.{COMMUNICATION_KEY}", f"cannot be read ({error})") from error
    goodput_record, peak = read_goodput(metrics_file.parent), numbers.hbm_gib
    goodput = None
    if goodput_record is not None and goodput_record.share is not None:
        goodput = GoodputResult(
            goodput_record.wall_s,
            goodput_record.seconds,
            goodput_record.restarts,
            goodput_record.share,
            numbers.data_wait,
        )
    return TrialResult(
        parameters=run.model.parameter_count(),
        step=decode(StepResult, known_values | {"p90_s": known_values.get("step_p90_s")}, str(metrics_file)),
        memory=MemoryReport(peak=None if peak is None else round(peak * GIB)),
        communication=None if traffic is None else decode(Communication, traffic, str(metrics_file)),
        compile=CompileTimes(compile_s=numbers.compile_s),
        simulated=numbers.simulated,
        loss=numbers.loss,
        eval_loss=numbers.eval_loss,
        steps=numbers.steps if numbers.steps is not None else numbers.step or 0,
        finished=is_finished,
        goodput=goodput,
    )


def training_traffic(summary: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the bytes sent per step in a training run's summary, as the JSON values of a `Communication`.

    Returns None if they are unknown. Upgrades older formats.
    """
    if COMMUNICATION_KEY in summary:
        return upgrade_communication(summary)[COMMUNICATION_KEY]
    if _OLD_TRAFFIC_TOTAL not in summary:
        return None
    by_axes = {
        key.removeprefix(_OLD_TRAFFIC_PREFIX): size
        for key, size in summary.items()
        if key.startswith(_OLD_TRAFFIC_PREFIX)
    }
    traffic = {"bytes": by_axes.pop("total"), "bytes_by_mesh_axes": by_axes}
    return upgrade_communication({COMMUNICATION_KEY: traffic})[COMMUNICATION_KEY]


def last_error(output_file: Path) -> str:
    """Return the last line of a log that looks like an error, or else its last line.

    Searches the last 60 lines that are not blank. Returns `no output` if the log is empty or missing.
    """
    text = output_file.read_text(errors="replace") if output_file.is_file() else ""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines[-60:] if _ERROR_LINE.match(line)]
    return ((errors or lines or ["no output"])[-1])[:_MAX_REASON_LENGTH]


def _infer_outcome(returncode: int, last_line: str) -> Outcome:
    if returncode in (EXIT_INTERRUPTED, EXIT_PREEMPTED):
        return outcome_from_exit_status(returncode, last_line)
    if returncode == -signal.SIGKILL:
        return Outcome(Status.killed, "SIGKILL ended the process: this host probably ran out of memory")
    description = f"{describe_status(returncode)}: {last_line}"
    if returncode < 0:
        return Outcome(Status.killed, f"the process was killed {description}")
    return Outcome(Status.failed, f"the process exited {description}")
