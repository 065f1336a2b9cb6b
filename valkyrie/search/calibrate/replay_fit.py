"""What measured steps took of their replays: a chip's factor, and its interval by other models and batches."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from valkyrie.config.run import Run
from valkyrie.hardware.target import ReplayConfig
from valkyrie.search.compile.cache import program_settings
from valkyrie.search.compile.trust import ENOUGH, correction_of, median_by_family
from valkyrie.sweep.rows import Row

DIGITS = 4
"""Of a number that is written."""


@dataclass(frozen=True)
class Replayed:
    """A step of one's own that was measured, and replayed of the same program.

    `ratio`: measured over replayed seconds, without what published runs lost to as many slices. Steps of one `family`
    are of one model, batch and length.
    """

    layout: str
    model: str
    family: str
    slices: int
    ratio: float


@dataclass(frozen=True)
class ReplayFit:
    """Measured steps of a chip beside the replays of the same layouts.

    `before`: measured over predicted seconds, as predicted now; `left_out`: by the factor of the other families, None
    where there is one alone. `fitted`: the factor and its interval.
    """

    steps: list[Replayed]
    before: np.ndarray
    left_out: np.ndarray | None
    fitted: ReplayConfig

    @property
    def sentences(self) -> list[str]:
        """What was found, in words."""
        families, (middle, worst) = self.fitted.models, off(self.before)
        lines = [
            f"Replays: {len(self.steps)} measured steps of {families} famil{'y' if families == 1 else 'ies'} have a "
            f"compile of the same layout beside them. As predicted they are off by {middle:.1f}% in the median and "
            f"{worst:.1f}% at worst; the factor for replays is now {self.fitted.factor:g}."
        ]
        if self.left_out is None:
            return [*lines, "All are of one family, so nothing says how good the factor is on another."]
        middle, worst = off(self.left_out)
        lines.append(f"By factors of the other families: {middle:.1f}% and {worst:.1f}%.")
        if self.fitted.low is None:
            lines.append(f"Fewer than {ENOUGH} steps give no interval.")
        return lines

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        steps = [asdict(step) for step in self.steps]
        return {"steps": steps, "measured_over_predicted": self.before.tolist(), "fitted": asdict(self.fitted)}


def replay_fit(pairs: Sequence[tuple[Row, Run]]) -> tuple[ReplayFit | None, int]:
    """Return the fit to the measured trials of a chip that were compiled too, and how many measured ones were not.

    No fit where none was both.
    """
    replayed, steps, before, alone = dict[str, float](), list[Replayed](), list[float](), 0
    for row, run in pairs:
        if row.trial.stage == "compile" and (seconds := row.step.replayed_s):
            replayed[_program(run)] = seconds
    for row, run in pairs:
        if row.trial.stage != "measure" or row.step_s is None:
            continue
        seconds, target = replayed.get(_program(run)), run.config.target
        if seconds is None:
            alone += 1
            continue
        now = correction_of(target)
        ratio = row.step_s / seconds / now.of_slices
        steps.append(Replayed(row.layout, row.work.model, row.work.label, target.slices, ratio))
        before.append(ratio / now.of_chip)
    return _fit_of(steps, before), alone


def _fit_of(steps: list[Replayed], before: list[float]) -> ReplayFit | None:
    """Return the factor of these steps, and what each took of a prediction by the other families."""
    families = {step.family for step in steps}
    factor = median_by_family([(step.family, step.ratio) for step in steps])
    if factor is None:
        return None
    fitted = ReplayConfig(rounded(factor), rows=len(steps), models=len(families))
    others = {f: median_by_family([(step.family, step.ratio) for step in steps if step.family != f]) for f in families}
    by = [(step.ratio, others[step.family]) for step in steps]
    left_out = np.array([ratio / other for ratio, other in by if other is not None])
    if len(left_out) >= ENOUGH:
        fitted.low, fitted.high = rounded(left_out.min()), rounded(left_out.max())
    return ReplayFit(steps, np.array(before), left_out if len(left_out) else None, fitted)


def _program(run: Run) -> str:
    """Return a name for the program of a step on its slice, whatever else is known of the chip."""
    return json.dumps(program_settings(run), sort_keys=True, default=str)


def off(ratios: np.ndarray) -> tuple[float, float]:
    """Return the median and the largest error of predictions in per cent; `ratios` are known over predicted seconds."""
    errors = 100 * np.abs(1 / ratios - 1)
    return float(np.median(errors)), float(errors.max())


def rounded(value: float) -> float:
    """Return a number as it is written."""
    return float(f"{value:.{DIGITS}g}")
