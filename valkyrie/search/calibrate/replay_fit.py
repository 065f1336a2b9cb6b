"""Fits the factor that scales a chip's replayed step times to measured ones.

The interval of predictions is derived by cross-validation over families of runs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from valkyrie.config.run import Run
from valkyrie.hardware.target import ReplayConfig
from valkyrie.search.compile.cache import program_settings
from valkyrie.search.compile.correction import MIN_RUNS, median_by_family, target_correction
from valkyrie.sweep.rows import Row
from valkyrie.units import count_text

DIGITS = 4
"""Significant digits of fitted numbers in files."""


@dataclass(frozen=True)
class ReplayedStep:
    """A step that the user has both measured and replayed.

    `ratio` is measured over replayed seconds, divided by the published correction for the number of slices. Steps of
    the same `family` have the same model, batch and sequence length.
    """

    layout: str
    model: str
    family: str
    slices: int
    ratio: float


@dataclass(frozen=True)
class ReplayFit:
    """Factor for the replays of a chip, fitted to measured steps.

    Args:
        steps: Steps that were both measured and replayed.
        ratios: Measured over predicted seconds of each step, with the factor before the fit.
        held_out_ratios: Measured over predicted seconds of each step, with a factor fitted to the other families. None
            if there is only one family.
        replay_config: The factor and its interval.
    """

    steps: list[ReplayedStep]
    ratios: np.ndarray
    held_out_ratios: np.ndarray | None
    replay_config: ReplayConfig

    @property
    def sentences(self) -> list[str]:
        """Sentences with the fitted factor and the errors of predictions before and after the fit."""
        family_count, (median, worst) = self.replay_config.models, percent_errors(self.ratios)
        names = f"{family_count} famil{'y' if family_count == 1 else 'ies'}"
        lines = [
            f"Replays were compared with {count_text(len(self.steps), 'measured step')} of {names}. "
            f"Errors of predictions: median {median:.1f}%, worst {worst:.1f}%. The fitted replay factor is "
            f"{self.replay_config.factor:g}."
        ]
        if self.held_out_ratios is None:
            return [*lines, "All steps are of one family, so the factor cannot be validated on another one."]
        median, worst = percent_errors(self.held_out_ratios)
        lines.append(f"Errors with a factor fitted to the other families: median {median:.1f}%, worst {worst:.1f}%.")
        if self.replay_config.low is None:
            lines.append(f"Predictions get no interval: it needs at least {MIN_RUNS} measured steps.")
        return lines

    def as_json(self) -> dict[str, Any]:
        """Return the fit as plain values for `calibrate.json`."""
        steps = [asdict(step) for step in self.steps]
        return {"steps": steps, "measured_over_predicted": self.ratios.tolist(), "fitted": asdict(self.replay_config)}


def fit_replays(pairs: Sequence[tuple[Row, Run]]) -> tuple[ReplayFit | None, int]:
    """Fit the replay factor of a chip to layouts that were both measured and compiled.

    `pairs` has the row and the run of each trial, all on the same chip. Returns (fit, uncompiled_count). The fit is
    None if no layout was both measured and compiled. `uncompiled_count` is the number of measured layouts that were not
    compiled.
    """
    replayed_s_by_program: dict[str, float] = {}
    steps: list[ReplayedStep] = []
    ratios: list[float] = []
    uncompiled_count = 0
    for row, run in pairs:
        if row.trial.stage == "compile" and (replayed_s := row.step.replayed_s):
            replayed_s_by_program[_program_key(run)] = replayed_s
    for row, run in pairs:
        if row.trial.stage != "measure" or row.step_s is None:
            continue
        replayed_s, target = replayed_s_by_program.get(_program_key(run)), run.config.target
        if replayed_s is None:
            uncompiled_count += 1
            continue
        correction = target_correction(target)
        ratio = row.step_s / replayed_s / correction.slices_factor
        steps.append(ReplayedStep(row.layout, row.work.model, row.work.label, target.slices, ratio))
        ratios.append(ratio / correction.chip_factor)
    return _fit_steps(steps, ratios), uncompiled_count


def _fit_steps(steps: list[ReplayedStep], ratios: list[float]) -> ReplayFit | None:
    """Fit one replay factor to all steps: `median_by_family` of their ratios. Returns None if there are no steps.

    For the errors, each step is also predicted with a factor fitted only to the other families. `ratios` are measured
    over predicted seconds of each step, with the factor before the fit.
    """
    families = {step.family for step in steps}
    factor = median_by_family([(step.family, step.ratio) for step in steps])
    if factor is None:
        return None
    replay_config = ReplayConfig(round_digits(factor), rows=len(steps), models=len(families))
    held_out_factors = {
        f: median_by_family([(step.family, step.ratio) for step in steps if step.family != f]) for f in families
    }
    pairs = [(step.ratio, held_out_factors[step.family]) for step in steps]
    held_out_ratios = np.array([ratio / other for ratio, other in pairs if other is not None])
    if len(held_out_ratios) >= MIN_RUNS:
        replay_config.low, replay_config.high = round_digits(held_out_ratios.min()), round_digits(held_out_ratios.max())
    return ReplayFit(steps, np.array(ratios), held_out_ratios if len(held_out_ratios) else None, replay_config)


def _program_key(run: Run) -> str:
    """Return a key that is equal for runs with the same compiled program."""
    return json.dumps(program_settings(run), sort_keys=True, default=str)


def percent_errors(ratios: np.ndarray) -> tuple[float, float]:
    """Return the median and maximum of |predicted / actual - 1|, in percent.

    `ratios` holds actual time / predicted time.
    """
    errors = 100 * np.abs(1 / ratios - 1)
    return float(np.median(errors)), float(errors.max())


def round_digits(value: float) -> float:
    """Round a number to `DIGITS` significant digits."""
    return float(f"{value:.{DIGITS}g}")
