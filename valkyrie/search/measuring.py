"""The last stage: the best few layouts are run on the devices at hand, and the estimates are judged by that."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from valkyrie.search.answer import row_of
from valkyrie.search.at_hand import on_cpu
from valkyrie.search.compiling import Compiles, Silent, plan_in
from valkyrie.search.estimate.rank import Estimated
from valkyrie.search.question import Question
from valkyrie.search.shortlist import Place, Shortlist, place_of
from valkyrie.sweep.run import carry_out
from valkyrie.sweep.trial import Status, Trial
from valkyrie.units import duration


@dataclass(frozen=True)
class Measured:
    """A layout with what its step was expected to take, by its compile or its estimate, and its measured trial."""

    estimate: Estimated
    expected_s: float
    trial: Trial

    @property
    def step_s(self) -> float | None:
        """Median seconds of a step; None where it was not measured."""
        return self.trial.results["step"]["step_s"] if self.trial.status is Status.ok else None


@dataclass
class Measures:
    """What was measured."""

    done: list[Measured] = field(default_factory=list)
    why: str = ""
    """Why no more was measured."""

    @property
    def timed(self) -> list[Measured]:
        """Those that ran, the fastest first."""
        return sorted((one for one in self.done if one.step_s is not None), key=lambda one: one.step_s or 0.0)

    @property
    def agreement(self) -> float | None:
        """Spearman's correlation of the expected with the measured order; None of fewer than three, or of equals."""
        expected_s, step_s = [m.expected_s for m in self.timed], [m.step_s or 0.0 for m in self.timed]
        if len(step_s) < 3 or 1 in (len(set(expected_s)), len(set(step_s))):
            return None
        from scipy.stats import spearmanr  # takes a second

        agreement: Any = spearmanr(expected_s, step_s)
        return float(agreement.statistic)

    @property
    def regret(self) -> float | None:
        """What the layout that was expected to be the fastest takes beyond the fastest measured; None: none was."""
        timed = self.timed
        if not timed:
            return None
        return (min(timed, key=lambda m: m.expected_s).step_s or 0.0) / (timed[0].step_s or 1.0) - 1

    @property
    def usual(self) -> float:
        """What a measured step usually took of what was expected; 1 where none was measured."""
        return median([(one.step_s or 0.0) / one.expected_s for one in self.timed] or [1.0])

    def step_s(self, one: Estimated) -> float | None:
        """Return the measured seconds of a layout's step; None where it was not measured."""
        return next((m.step_s for m in self.done if m.estimate.overrides == one.overrides), None)

    def ratio(self, place: Place) -> float | None:
        """Return what a measured step of a mesh and partition took of what was expected; None where there is none."""
        own = [one for one in self.timed if place_of(one.estimate) == place]
        return median((one.step_s or 0.0) / one.expected_s for one in own) if own else None


def measure_best(
    question: Question,
    listed: Shortlist,
    compiles: Compiles,
    folder: Path,
    measures: Measures,
    tell: Callable[[Measured], None],
) -> None:
    """Measure the most promising layouts into `measures`: `mode.measure` of them, none begun after the budget.

    At first each is of another mesh and partition; then the one that is expected to be the fastest by how long others
    of its mesh and partition took. Ctrl-C raises KeyboardInterrupt; what is done until then stands in `measures`.
    """
    most, began, waiting = question.run.config.mode.measure, time.monotonic(), expected(listed, compiles)
    while len(measures.done) < most and waiting:
        if question.budget_s is not None and time.monotonic() - began > question.budget_s:
            measures.why = f"mode.budget={question.run.config.mode.budget} is over"
            return
        one, expected_s = _next(waiting, measures, most)
        waiting = [pair for pair in waiting if pair[0] is not one]
        trial = measured(question, one, folder)
        measures.done.append(Measured(one, expected_s, trial))
        tell(measures.done[-1])
        if trial.status is Status.refused:
            measures.why = trial.reason or "refused"
            return


def expected(listed: Shortlist, compiles: Compiles) -> list[tuple[Estimated, float]]:
    """Return layouts with what their step should take, the fastest first: compiled ones by that, others by estimate."""
    known = {tuple(one.estimate.overrides): one.step_s for one in compiles.done}
    pairs = [(one.estimate, one.step_s) for one in compiles.done if one.step_s is not None]
    for one in listed.fitting:
        if tuple(one.overrides) not in known:
            pairs.append((one, one.step_s * (compiles.ratio(place_of(one)) or 1.0)))
    return sorted(pairs, key=lambda pair: pair[1])


def measured(question: Question, one: Estimated, folder: Path) -> Trial:
    """Return the record of a layout that is measured now, or was by an earlier search."""
    run = one.run(question.run).changed(mode=replace(question.run.config.mode, name="measure", budget=None))
    if on_cpu(question.run.config.target):
        run = run.changed(target=question.run.config.target)
    plan = plan_in(folder, question, run, one.overrides)
    return carry_out([plan], 1, Silent())[plan.key]


def measured_rows(question: Question, rows: Sequence[dict[str, Any]], measures: Measures) -> list[dict[str, Any]]:
    """Return the rows of an answer with the measured ones first, the fastest first.

    Steps of others, compiled or estimated, are held to what the measured ones took of what was expected.
    """
    known = {tuple(row["overrides"]): row for row in rows}
    first, usual = [], measures.usual
    for one in measures.timed:
        row = known.pop(tuple(one.estimate.overrides), None) or row_of(question, one.estimate)
        first.append(_scaled(row, (one.step_s or row["step_s"]) / row["step_s"]) | _measured(one))
    others = [_scaled(row, usual) for row in known.values()]
    return [*first, *others][: max(len(rows), len(first))]


def told(measures: Measures) -> str:
    """Return how many layouts were measured, and how well they were predicted."""
    timed = measures.timed
    text = f"{len(timed)} measured{f' ({measures.why})' if measures.why else ''}"
    if measures.regret is None or len(timed) < 2:
        return text
    if measures.agreement is not None:
        text += f": rank agreement with what was expected {measures.agreement:.2f} (Spearman)"
    return f"{text}; regret of the expected best {100 * measures.regret:.1f}%"


def in_json(measures: Measures) -> dict[str, Any]:
    """Return what was measured, as plain values."""
    layouts = [
        {
            "overrides": one.estimate.overrides,
            "expected_s": one.expected_s,
            "step_s": one.step_s,
            "status": one.trial.status.value,
        }
        for one in measures.done
    ]
    return {"layouts": layouts, "agreement": measures.agreement, "regret": measures.regret, "why": measures.why}


def line(one: Measured) -> str:
    """Return what became of a layout, in a line."""
    step = one.step_s
    result = duration(step) if step is not None else one.trial.status.value.replace("_", " ")
    because = "" if step is not None else f": {one.trial.reason}"
    layout = " ".join(one.estimate.overrides)
    return f"{layout}: {result} (expected {duration(one.expected_s)}, {one.trial.wall_s:.0f} s){because}"


def _next(waiting: Sequence[tuple[Estimated, float]], measures: Measures, most: int) -> tuple[Estimated, float]:
    places = {place_of(one.estimate) for one in measures.done}
    others = [p for p in waiting if place_of(p[0]) not in places] if len(places) < (most + 1) // 2 else []
    return min(others or waiting, key=lambda pair: pair[1] * (measures.ratio(place_of(pair[0])) or measures.usual))


def _measured(one: Measured) -> dict[str, Any]:
    """Return the measured part of a row: the least seconds, the 90th percentile, and what was expected."""
    step = one.trial.results["step"]
    return {"stage": "measure", "expected_s": one.expected_s, "low_s": step["min_s"], "high_s": step["p90_s"]}


def _scaled(row: dict[str, Any], times: float) -> dict[str, Any]:
    """Return a row whose step takes so many times as long, with what follows from that."""
    longer, fewer = ("step_s", "low_s", "high_s"), ("tokens_per_second_per_chip", "tokens_for_budget", "mfu")
    longer += ("usd_per_million_tokens", "hours", "dollars")
    changed = {key: row[key] * times for key in longer if row.get(key) is not None}
    return row | changed | {key: row[key] / times for key in fewer if row.get(key) is not None}
