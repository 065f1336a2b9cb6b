"""Fits the factor of a chip's replays to measured steps, and its interval to those of other models and batches."""

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
"""Significant digits of numbers in files."""


@dataclass(frozen=True)
class Replayed:
    """A step that the user measured and replayed.

    `ratio` is measured over replayed seconds, without the loss of published runs to as many slices. Steps of one
    `family` share model, batch and length.
    """

    layout: str
    model: str
    family: str
    slices: int
    ratio: float


@dataclass(frozen=True)
class ReplayFit:
    """Measured steps of a chip, and the factor for replays that follows from them.

    Args:
        steps: Steps that were both measured and replayed.
        before: Measured over predicted seconds, by the factor in use before the fit.
        left_out: The same by the factor of the other families, or None if there is only one family.
        fitted: The factor and its interval.
    """

    steps: list[Replayed]
    before: np.ndarray
    left_out: np.ndarray | None
    fitted: ReplayConfig

    @property
    def sentences(self) -> list[str]:
        """The result as sentences."""
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
        """Return the fit as plain values."""
        steps = [asdict(step) for step in self.steps]
        return {"steps": steps, "measured_over_predicted": self.before.tolist(), "fitted": asdict(self.fitted)}


def replay_fit(pairs: Sequence[tuple[Row, Run]]) -> tuple[ReplayFit | None, int]:
    """Fit the factor to layouts that were both measured and compiled, and count measured ones without a compile.

    The fit is None if no layout was both.
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
    """Fit the factor to these steps, with the errors of each step by the factor of the other families."""
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
    """Return a key for the program of a step on its slice. Ignores figures of the chip that do not change it."""
    return json.dumps(program_settings(run), sort_keys=True, default=str)


def off(ratios: np.ndarray) -> tuple[float, float]:
    """Return the median and the largest error of predictions in per cent. `ratios` are known over predicted seconds."""
    errors = 100 * np.abs(1 / ratios - 1)
    return float(np.median(errors)), float(errors.max())


def rounded(value: float) -> float:
    """Round a number to `DIGITS` significant digits."""
    return float(f"{value:.{DIGITS}g}")
