"""Trials in words: one line for each, and the ranked table of a sweep with the lines under it."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE
from rich.table import Table

from valkyrie.config.modes import MODES
from valkyrie.runs.folder import command_name
from valkyrie.sweep.noise import places
from valkyrie.sweep.results import objective
from valkyrie.sweep.trial import PAGE, Status, Trial
from valkyrie.units import memory

if TYPE_CHECKING:
    from valkyrie.sweep.plan import Plan

NO_RESULT = (Status.failed, Status.killed, Status.timeout)
"""What a trial came to that says nothing of its layout."""
_REASON = 160


def title(trial: Trial | Plan) -> str:
    """Return what was tried, or is to be, in few words."""
    about = trial.about
    if about is None:
        return " ".join(trial.overrides)
    target = "" if about.target == "auto" else f" {about.target}"
    return f"{about.model} {about.name}{target} {trial.stage}"


def verdict(trial: Trial) -> str:
    """Return what became of a trial, in few words; the speed of simulated devices is called so."""
    if trial.status is not Status.ok:
        return f"{trial.status.value}: {short_reason(trial)}"
    parts = []
    step = trial.results.get("step", {})
    if step.get("tokens_per_second"):
        parts.append(f"{step['tokens_per_second']:,.0f} tokens/s{kind(trial)}")
        parts.append(f"{1e3 * step['step_s']:,.1f} ms a step")
    if step.get("mfu"):
        parts.append(f"MFU {100 * step['mfu']:.1f}%")
    if "peak" in trial.results.get("memory", {}):
        parts.append(memory(trial.results["memory"]["peak"]))
    if not step and "loss" in trial.results:
        parts.append(f"loss {trial.results['loss']:.4f}")
    return "ok" + (f": {', '.join(parts)}" if parts else "")


def short_reason(trial: Trial) -> str:
    """Return the beginning of a trial's reason, on one line."""
    reason = " ".join((trial.reason or "no reason known").split())
    return reason if len(reason) <= _REASON else reason[: _REASON - 3] + "..."


def kind(trial: Trial) -> str:
    """Return the word that a speed of this trial must bear: simulated, predicted, or none."""
    if trial.results.get("simulated"):
        return " simulated"
    return " predicted" if trial.stage in MODES and MODES[trial.stage].predicts else ""


def ranked(trials: Sequence[Trial]) -> list[Trial]:
    """Return trials by tokens/s/chip, the fastest first; those without one after them, by what became of them."""
    order = list(Status)
    return sorted(trials, key=lambda t: (order.index(t.status), -objective(t), t.name))


def table(trials: Sequence[Trial], rows: int = 40) -> Table:
    """Return the ranked table: every trial that was started, at most `rows` of them; without columns that are empty."""
    shown = [trial for trial in ranked(trials) if trial.status is not Status.refused]
    cells = [_row(place, trial) for place, trial in zip(places(shown), shown[:rows], strict=False)]
    filled = [name for name in _COLUMNS if any(row[name] for row in cells)]
    made = Table(box=SIMPLE, pad_edge=False, caption=_cut(len(shown), rows), caption_justify="left")
    for name in filled:
        words = name in ("trial", "result")
        made.add_column(name, justify="left" if words else "right", no_wrap=name != "result", overflow="fold")
    for trial, row in zip(shown, cells, strict=False):
        made.add_row(*(row[name] for name in filled), style=None if trial.status is Status.ok else "dim")
    return made


def tally(trials: Sequence[Trial]) -> str:
    """Return how many trials there are, and of what status: `12 trials: 9 ok, 2 refused, 1 killed`."""
    counts = Counter(trial.status for trial in trials)
    parts = ", ".join(f"{counts[s]} {s.value.replace('_', ' ')}" for s in Status if counts[s])
    return f"{len(trials)} {'trial' if len(trials) == 1 else 'trials'}: {parts or 'none'}"


def ending(trials: Sequence[Trial], folder: Path, *, complete: bool = True) -> list[str]:
    """Return the lines under the table: the tally, why cells were refused, where all of it is, and what to do next.

    Of a sweep that is `complete` the page is written already.
    """
    lines = [tally(trials)]
    refused = [trial for trial in trials if trial.status is Status.refused]
    for trial in refused[:3]:
        lines.append(f"refused: {title(trial)}: {short_reason(trial)}")
    if len(refused) > 3:
        lines.append(f"refused: {len(refused) - 3} more; the page says why")
    if any(trial.status in NO_RESULT for trial in trials):
        lines.append("trials without a result are not tried again, unless you add trial.retry=true")
    written = complete and (folder / PAGE).is_file()
    page = folder / PAGE if written else f"{command_name('valkyrie-report')} {shlex.quote(str(folder))}"
    return [
        *lines,
        f"folder: {folder}",
        f"page: {page}",
    ]


_COLUMNS = ("#", "trial", "tokens/s/chip", "tokens/s", "step ms", "MFU", "memory", "loss", "result")


def _row(place: int, trial: Trial) -> dict[str, str]:
    step: dict[str, Any] = trial.results.get("step", {})
    speed = objective(trial)
    verdict = "" if trial.status is Status.ok else f"{trial.status.value.replace('_', ' ')}: {short_reason(trial)}"
    return {
        "#": str(place) if speed else "",
        "trial": title(trial),
        "tokens/s/chip": f"{speed:,.0f}" if speed else "",
        "tokens/s": f"{step['tokens_per_second']:,.0f}" if speed else "",
        "step ms": f"{1e3 * step['step_s']:,.1f}" if speed else "",
        "MFU": f"{100 * step['mfu']:.1f}%" if step.get("mfu") else "",
        "memory": memory(trial.results["memory"]["peak"]) if "peak" in trial.results.get("memory", {}) else "",
        "loss": f"{trial.results['loss']:.4f}" if trial.stage == "train" and "loss" in trial.results else "",
        "result": (kind(trial).strip() if speed else "") or verdict,
    }


def _cut(count: int, rows: int) -> str | None:
    return None if count <= rows else f"{count - rows} more; the page shows all"
