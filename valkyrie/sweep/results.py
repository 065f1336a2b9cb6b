"""What a trial's process came to: its status, the reason in words, and the numbers that its mode left."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any, NamedTuple

from valkyrie.config.modes import Mode
from valkyrie.foreign_errors import is_out_of_memory
from valkyrie.paths import write_whole
from valkyrie.processes.interrupt import EXIT_STATUS, PREEMPTED
from valkyrie.processes.team import REFUSED
from valkyrie.runs.goodput import read_goodput
from valkyrie.runs.tracking import read_metrics, sent_over
from valkyrie.sweep.trial import Status, Trial
from valkyrie.units import GIB

OUTPUT, OUTCOME = "output.log", "outcome.json"
"""The files of a trial's folder with all that its process printed, and with what it came to."""

_KEPT = ("parameters", "memory", "step", "seconds", "communication", "placement", "compile", "simulated", "loss")
_KEPT += ("hints", "devices")
_ERROR_LINE = re.compile(r"^(?:[\w.]*(?:Error|Exception|Interrupt|Exit)\b.*|[FE]\d{4} .*|valkyrie-train: .*)$")
_LONGEST = 600


class Outcome(NamedTuple):
    """How a trial ended: its status, the reason where it is not ok, and its results."""

    status: Status
    reason: str | None
    results: dict[str, Any]

    def write(self, folder: Path) -> None:
        """Write `outcome.json` into a trial's folder."""
        values = {"status": self.status.value, "reason": self.reason, "results": self.results}
        write_whole(folder / OUTCOME, json.dumps(values) + "\n")


def outcome(folder: Path, returncode: int) -> Outcome:
    """Return what a process came to that has ended: its `outcome.json`, or how it ended without one."""
    if (folder / OUTCOME).is_file():
        return _read(folder / OUTCOME)
    if returncode < 0:
        return Outcome(Status.killed, _killed(-returncode, folder / OUTPUT), {})
    if returncode in (EXIT_STATUS, PREEMPTED):
        return Outcome(Status.killed, "its process was interrupted by somebody else", {})
    error = last_error(folder / OUTPUT)
    if returncode == REFUSED:  # one of several processes, which end where the error is
        reason = error.removeprefix("valkyrie-train: ")
        return Outcome(Status.does_not_fit if is_out_of_memory(reason) else Status.refused, reason, {})
    return failure(f"its process ended with status {returncode}: {error}")


def _read(file: Path) -> Outcome:
    """Return what a process wrote that it came to; a damaged file is the failure of its trial alone."""
    try:
        record = json.loads(file.read_bytes())
        status, reason, results = Status(record["status"]), record["reason"], record["results"]
        if not isinstance(reason, str | None) or not isinstance(results, dict):
            raise TypeError("reason or results is of another type")
    except (ValueError, KeyError, TypeError) as error:
        told = f"it lacks {error}" if isinstance(error, KeyError) else error
        return failure(f"its {OUTCOME} is damaged ({told}). Do it again with trial.retry=true")
    return Outcome(status, reason, results)


def failure(reason: str) -> Outcome:
    """Return the outcome of a process that failed: where memory was exhausted, the layout does not fit."""
    reason = " ".join(reason.split())[:_LONGEST]
    return Outcome(Status.does_not_fit if is_out_of_memory(reason) else Status.failed, reason, {})


def results_of(folder: Path, mode: Mode) -> Outcome:
    """Return what a mode left in a run folder after it came to its end."""
    if mode.results is None:
        return Outcome(Status.ok, None, {})
    file = folder / mode.results
    if file.suffix == ".jsonl":
        return Outcome(Status.ok, None, training_results(file))
    if not file.is_file():
        return failure(f"it left no {file.name}")
    summary = json.loads(file.read_text())
    return Outcome(Status(summary["status"]), summary.get("reason"), kept_results(summary))


def kept_results(summary: dict[str, Any]) -> dict[str, Any]:
    """Return the part of `compile.json` or `measure.json` that a line of `trials.jsonl` keeps."""
    kept = {key: summary[key] for key in _KEPT if key in summary}
    if "communication" in kept:
        kept["communication"] = {k: v for k, v in kept["communication"].items() if k != "causes"}
    return kept


def training_results(metrics: Path) -> dict[str, Any]:
    """Return rates, memory and losses of a training; of one in several parts, the last part's that has any.

    Keys: `step`, `memory` and `communication` as in `measure.json`, `loss`, `eval_loss`, `compile`, `simulated`,
    `steps` (the last one), `finished`, and `goodput`: its `share`, `wall_s`, `seconds` by kind, `restarts`,
    `data_wait`. A training that did not come to an end has the rates of its last record.
    """
    records = read_metrics(metrics) if metrics.is_file() else []
    summary: dict[str, Any] = {}
    for record in records:
        summary |= {k: v for k, v in record.get("summary", {}).items() if v is not None}
    steps = [record for record in records if "loss" in record]
    last = steps[-1] if steps else {}
    finished = bool(summary.get("finished")) and summary.get("steps") == last.get("step", summary.get("steps"))
    known = {k: v for k, v in last.items() if v is not None} | (summary if finished or not last else {})
    rates = ("tokens_per_second", "tokens_per_second_per_chip", "mfu", "first_step_s", "step_s")
    step = {key: known[key] for key in rates if key in known}
    if "step_p90_s" in known:
        step["p90_s"] = known["step_p90_s"]
    results = {key: summary[key] for key in ("simulated", "eval_loss") if key in summary}
    results |= {"steps": known.get("steps", last.get("step", 0)), "finished": finished}
    if "compile_s" in summary:
        results["compile"] = {"compile_s": summary["compile_s"]}
    if "hbm_gib" in summary:
        results["memory"] = {"peak": round(summary["hbm_gib"] * GIB)}
    if "comm_bytes/total" in summary:
        results["communication"] = sent_over(summary)
    if (spent := read_goodput(metrics.parent)) is not None and spent.share is not None:
        results["goodput"] = {"share": spent.share, **spent._asdict(), "data_wait": known.get("data_wait")}
    return results | ({"step": step} if step else {}) | ({"loss": last["loss"]} if last else {})


def objective(trial: Trial) -> float:
    """Return tokens/s/chip, predicted or measured, which a sweeper may maximise; 0.0 where there is none."""
    return float(trial.results.get("step", {}).get("tokens_per_second_per_chip") or 0.0)


def last_error(output: Path) -> str:
    """Return the last line of a process's output that is an error, else its last line."""
    text = output.read_text(errors="replace") if output.is_file() else ""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines[-60:] if _ERROR_LINE.match(line)]
    return ((errors or lines or ["it printed nothing"])[-1])[:_LONGEST]


def _killed(number: int, output: Path) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    if number == signal.SIGKILL:
        return "its process was ended by SIGKILL: this host probably ran out of memory"
    return f"its process was ended by {name}: {last_error(output)}"
