"""How the process of a trial ended: its status, the reason, and the numbers that its mode left."""

from __future__ import annotations

import json
import re
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from valkyrie.compiled.communication import Communication
from valkyrie.config.modes import MEASURED, ModeConfig
from valkyrie.paths import write_whole
from valkyrie.processes.ending import DOES_NOT_FIT, INTERRUPTED, PREEMPTED, REFUSED, describe_status
from valkyrie.records import RecordError, decode, encode, load, read_record
from valkyrie.runs.goodput import read_goodput
from valkyrie.runs.results import (
    CompileResult,
    GoodputResult,
    MemoryResult,
    StepResult,
    TrialResult,
    training_traffic,
)
from valkyrie.runs.tracking import read_metrics
from valkyrie.search.compile.prediction import Measurement, Prediction
from valkyrie.sweep.trial import Status, known_values, upgrade_line
from valkyrie.units import GIB

OUTPUT, OUTCOME = "output.log", "outcome.json"
"""The files of a trial's folder with all that its process printed, and with how it ended."""

_ERROR_LINE = re.compile(r"^(?:[\w.]*(?:Error|Exception|Interrupt|Exit)\b.*|[FE]\d{4} .*)$")
_LONGEST = 600


@dataclass(frozen=True)
class Outcome:
    """How a trial ended: its status, the reason where it is not ok, and its results."""

    status: Status
    reason: str | None = None
    results: TrialResult = TrialResult()

    def write(self, folder: Path) -> None:
        """Write `outcome.json` into a trial's folder."""
        write_whole(folder / OUTCOME, json.dumps(encode(self) | {"results": known_values(encode(self.results))}) + "\n")


def outcome(folder: Path, returncode: int) -> Outcome:
    """Return how a process ended: as its `outcome.json` says, or by its exit status if it left none.

    The last error in its log is only shown, as a part of the reason.
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
    """Return what a mode left in a run folder after it came to its end."""
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
    """Return the numbers that a line of `trials.jsonl` keeps of a prediction or measurement."""
    sent = result.communication
    plain = known_values(encode(replace(result, communication=sent and replace(sent, collectives=()))))
    plain.pop("hints", None)  # a trial keeps their text alone
    kept = decode(TrialResult, plain, "results")
    if isinstance(result, Prediction):
        kept = replace(kept, hints=tuple(hint.text for hint in result.hints))
    return kept


def training_results(metrics: Path) -> TrialResult:
    """Return rates, memory and losses of a training; of one in several parts, the last part's that has any.

    A training that did not come to an end has the rates of its last record.
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
        memory=MemoryResult(peak=None if peak is None else round(peak * GIB)),
        communication=None if traffic is None else decode(Communication, traffic, str(metrics)),
        compile=CompileResult(compile_s=summary["compile_s"]) if "compile_s" in summary else None,
        simulated=summary.get("simulated"),
        loss=last.get("loss"),
        eval_loss=summary.get("eval_loss"),
        steps=known.get("steps", last.get("step", 0)),
        finished=finished,
        goodput=goodput,
    )


def last_error(output: Path) -> str:
    """Return the last line of a process's output that is an error, else its last line."""
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
