"""Decides what is kept of what a trial's process left: how it ended, in words, and the numbers the stage found."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any, NamedTuple

from valkyrie.hardware import GIB
from valkyrie.search import NOT_COMPILED
from valkyrie.sweep.trial import Status, Trial
from valkyrie.tracking import read_metrics

OUTPUT = "output.log"
"""The file of a trial's folder with all that its process printed."""
FILES = {"compile": "compile.json", "measure": "measure.json"}
"""The file in which a stage leaves its numbers; a training leaves them in `metrics.jsonl`."""

_KEPT = ("parameters", "memory", "step", "seconds", "communication", "placement", "compile", "simulated", "loss")
_KEPT += ("hints", "devices")
_USER_ERROR, _INTERRUPTED = 2, 130
_OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
_TELLING = re.compile(r"^(?:[\w.]*(?:Error|Exception|Interrupt|Exit)\b.*|[FE]\d{4} .*|valkyrie-train: .*)$")
_LONGEST = 600


class Outcome(NamedTuple):
    """How a trial ended: its status, the reason where it is not ok, and its results."""

    status: Status
    reason: str | None
    results: dict[str, Any]


def outcome(folder: Path, stage: str, returncode: int) -> Outcome:
    """Return what a process that ended by itself, or by a signal (`returncode` below 0), came to."""
    left = folder / FILES.get(stage, "metrics.jsonl")
    output = folder / OUTPUT
    if returncode < 0:
        return Outcome(Status.killed, _killed(-returncode, output), {})
    if returncode == _INTERRUPTED:
        return Outcome(Status.killed, "its process was told to stop by somebody else", {})
    if returncode == _USER_ERROR:
        return Outcome(Status.refused, refusal(output), {})
    if returncode not in (0, NOT_COMPILED):
        said = last_words(output)
        status = Status.does_not_fit if _OUT_OF_MEMORY in said else Status.failed
        return Outcome(status, f"its process ended with status {returncode}: {said}", {})
    if stage not in FILES:
        return Outcome(Status.ok, None, training_results(left) if stage == "train" else {})
    if not left.is_file():
        return Outcome(Status.failed, f"its process left no {left.name}: {last_words(output)}", {})
    found = json.loads(left.read_text())
    return Outcome(Status(found["status"]), found.get("reason"), kept_results(found))


def kept_results(found: dict[str, Any]) -> dict[str, Any]:
    """Return the part of `compile.json` or `measure.json` that a line of `trials.jsonl` keeps."""
    kept = {key: found[key] for key in _KEPT if key in found}
    if "communication" in kept:
        kept["communication"] = {k: v for k, v in kept["communication"].items() if k != "causes"}
    return kept


def training_results(metrics: Path) -> dict[str, Any]:
    """Return rates, memory and losses of a training; of one in several parts, the last part's that has any.

    Keys: `step` and `memory` as in `measure.json`, `loss`, `eval_loss`, `compile`, `simulated`.
    """
    records = read_metrics(metrics) if metrics.is_file() else []
    summary: dict[str, Any] = {}
    for record in records:
        summary |= {k: v for k, v in record.get("summary", {}).items() if v is not None}
    losses = [record["loss"] for record in records if "loss" in record]
    rates = ("tokens_per_second", "tokens_per_second_per_chip", "mfu", "first_step_s", "step_s")
    step = {key: summary[key] for key in rates if key in summary}
    if "step_p90_s" in summary:
        step["p90_s"] = summary["step_p90_s"]
    results = {key: summary[key] for key in ("simulated", "eval_loss", "steps") if key in summary}
    if "compile_s" in summary:
        results["compile"] = {"compile_s": summary["compile_s"]}
    if "hbm_gib" in summary:
        results["memory"] = {"peak": round(summary["hbm_gib"] * GIB)}
    return results | ({"step": step} if step else {}) | ({"loss": losses[-1]} if losses else {})


def objective(trial: Trial) -> float:
    """Return tokens/s/chip, predicted or measured, which a sweeper may maximise; 0.0 where there is none."""
    return float(trial.results.get("step", {}).get("tokens_per_second_per_chip") or 0.0)


def refusal(output: Path) -> str:
    """Return the message with which a process refused what it was asked."""
    lines = _lines(output)
    starts = [i for i, line in enumerate(lines) if line.startswith("valkyrie-train: ")]
    if not starts:
        return last_words(output)
    first, *others = lines[starts[-1] :]
    message = [first.removeprefix("valkyrie-train: "), *(line.strip().removeprefix("- ") for line in others)]
    return " ".join(message[1:] if len(message) > 1 and message[0].endswith(" problems") else message)


def last_words(output: Path) -> str:
    """Return the last line of a process's output that tells an error, else its last line."""
    lines = _lines(output)
    telling = [line for line in lines[-60:] if _TELLING.match(line)]
    return ((telling or lines or ["it said nothing"])[-1])[:_LONGEST]


def _lines(output: Path) -> list[str]:
    text = output.read_text(errors="replace") if output.is_file() else ""
    return [line.rstrip() for line in text.splitlines() if line.strip()]


def _killed(number: int, output: Path) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    if number == signal.SIGKILL:
        return "its process was ended by SIGKILL: this host probably ran out of memory"
    return f"its process was ended by {name}: {last_words(output)}"
