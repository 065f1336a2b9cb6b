"""Outcome of a trial's process: its status, the reason, and the results in the files of its mode."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from valkyrie.compiled.communication import Communication, upgrade_communication
from valkyrie.config.modes import MEASURED, ModeConfig
from valkyrie.paths import write_atomic
from valkyrie.processes.ending import DOES_NOT_FIT, INTERRUPTED, PREEMPTED, REFUSED, describe_status
from valkyrie.records import RecordError, decode, load, read_record
from valkyrie.runs.goodput import read_goodput
from valkyrie.runs.tracking import read_metrics
from valkyrie.runs.wandb_writer import TRAFFIC
from valkyrie.search.compile.prediction import CompileTimes, Measurement, MemoryReport, Prediction
from valkyrie.sweep.trial import GoodputResult, Status, StepResult, TrialResult, upgrade_line
from valkyrie.units import GIB

OUTPUT, OUTCOME = "output.log", "outcome.json"
"""Files of a trial's folder: the output of its process, and its `Outcome`."""

_ERROR_LINE = re.compile(r"^(?:[\w.]*(?:Error|Exception|Interrupt|Exit)\b.*|[FE]\d{4} .*)$")
_LONGEST = 600
_OLD_NAMES, _OLD_TOTAL = "comm_bytes/", "comm_bytes/total"
"""Keys of the traffic in the summary of a training by version 1.0 and earlier."""


@dataclass(frozen=True)
class Outcome:
    """Status of a trial, the reason if it is not ok, and its results."""

    status: Status
    reason: str | None = None
    results: TrialResult = TrialResult()

    def write(self, folder: Path) -> None:
        """Write `outcome.json` into a trial's folder."""
        plain = {"status": self.status.value, "reason": self.reason, "results": self.results.plain()}
        write_atomic(folder / OUTCOME, json.dumps(plain) + "\n")


def outcome(folder: Path, returncode: int) -> Outcome:
    """Return the outcome in `outcome.json`, or one derived from the exit status if there is no such file.

    In that case the reason quotes the last error in the log. The log never decides the status.
    """
    try:
        file = folder / OUTCOME
        return decode(Outcome, upgrade_line(load(dict, file.read_bytes(), str(file))), str(file))
    except FileNotFoundError:
        return _without_outcome(returncode, last_error(folder / OUTPUT))
    except RecordError as error:
        return failure(f"its {OUTCOME} is damaged ({error.reason}). Do it again with trial.retry=true")


def ending(status: int, reason: str) -> Outcome:
    """Return the outcome of a process that ends itself with an exit status, for a reason."""
    if status in (INTERRUPTED, PREEMPTED):
        return Outcome(Status.killed, "its process was interrupted by somebody else")
    known = {REFUSED: Status.refused, DOES_NOT_FIT: Status.does_not_fit}
    return Outcome(known[status], reason) if status in known else failure(reason)


def failure(reason: str) -> Outcome:
    """Return the outcome of a process that failed, with the reason on one line."""
    return Outcome(Status.failed, " ".join(reason.split())[:_LONGEST])


def results_of(folder: Path, mode: ModeConfig | type[ModeConfig]) -> Outcome:
    """Return the outcome of a mode that has ended, from the results in its run folder."""
    if mode.results is None:
        return Outcome(Status.ok)
    file = folder / mode.results
    if file.suffix == ".jsonl":
        return Outcome(Status.ok, None, training_results(file))
    if not file.is_file():
        return failure(f"it left no {file.name}")
    result = read_record(Measurement if file.name == MEASURED else Prediction, file)
    return Outcome(Status(result.status.value), result.reason, trial_result(result))


def trial_result(result: Prediction | Measurement) -> TrialResult:
    """Return the results of a prediction or measurement that a line of `trials.jsonl` stores."""
    sent = result.communication
    common = TrialResult(
        memory=result.memory or MemoryReport(),
        step=StepResult() if result.step is None else StepResult(**vars(result.step)),
        communication=sent and replace(sent, collectives=()),
        compile=result.compile,
    )
    if isinstance(result, Measurement):
        timed = {"simulated": result.simulated, "devices": result.devices, "trace": result.trace, "loss": result.loss}
        return replace(common, **timed)
    return replace(
        common,
        parameters=result.parameters,
        parts=result.parts,
        placement=result.placement,
        hints=tuple(hint.text for hint in result.hints),
    )


def training_results(metrics: Path) -> TrialResult:
    """Return the rates, memory and losses of a training, from its last part that has any.

    The rates of an unfinished training are those of its last record.
    """
    records = read_metrics(metrics) if metrics.is_file() else []
    summary: dict[str, Any] = {}
    for record in records:
        summary |= {k: v for k, v in record.get("summary", {}).items() if v is not None}
    steps = [record for record in records if "loss" in record]
    last = steps[-1] if steps else {}
    finished = bool(summary.get("finished")) and summary.get("steps") == last.get("step", summary.get("steps"))
    known = {k: v for k, v in last.items() if v is not None} | (summary if finished or not last else {})
    traffic, spent, peak = training_traffic(summary), read_goodput(metrics.parent), summary.get("hbm_gib")
    goodput = None
    if spent is not None and spent.share is not None:
        goodput = GoodputResult(spent.wall_s, spent.seconds, spent.restarts, spent.share, known.get("data_wait"))
    return TrialResult(
        step=decode(StepResult, known | {"p90_s": known.get("step_p90_s")}, str(metrics)),
        memory=MemoryReport(peak=None if peak is None else round(peak * GIB)),
        communication=None if traffic is None else decode(Communication, traffic, str(metrics)),
        compile=CompileTimes(compile_s=summary.get("compile_s")),
        simulated=summary.get("simulated"),
        loss=last.get("loss"),
        eval_loss=summary.get("eval_loss"),
        steps=known.get("steps", last.get("step", 0)),
        finished=finished,
        goodput=goodput,
    )


def training_traffic(summary: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the traffic in a training's summary as JSON values, or None if its program could not be read."""
    if TRAFFIC in summary:
        return upgrade_communication(summary)[TRAFFIC]
    if _OLD_TOTAL not in summary:
        return None
    by_axes = {key.removeprefix(_OLD_NAMES): size for key, size in summary.items() if key.startswith(_OLD_NAMES)}
    traffic = {"bytes": by_axes.pop("total"), "bytes_by_mesh_axes": by_axes}
    return upgrade_communication({TRAFFIC: traffic})[TRAFFIC]


def last_error(output: Path) -> str:
    """Return the last line of the output that is an error, or else the last line."""
    text = output.read_text(errors="replace") if output.is_file() else ""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines[-60:] if _ERROR_LINE.match(line)]
    return ((errors or lines or ["it printed nothing"])[-1])[:_LONGEST]


def _without_outcome(returncode: int, shown: str) -> Outcome:
    if returncode in (INTERRUPTED, PREEMPTED):
        return ending(returncode, shown)
    if returncode == -signal.SIGKILL:
        return Outcome(Status.killed, "its process was ended by SIGKILL: this host probably ran out of memory")
    how = f"{describe_status(returncode)}: {shown}"
    if returncode < 0:
        return Outcome(Status.killed, f"its process was ended {how}")
    return Outcome(Status.failed, f"its process ended {how}")
