"""What measured steps took of their replays: a chip's factor, and its interval by other models and batches."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from valkyrie.hardware import ReplayConfig
from valkyrie.modes import SHAPING_KEYS
from valkyrie.report.records import Row
from valkyrie.run import Run
from valkyrie.search.trust import Published, correction, correction_of, unseen_ratio


@dataclass(frozen=True)
class ReplayFit:
    """Measured steps of a chip beside the replays of the same layouts.

    `before`: measured over predicted seconds, as predicted now; `left_out`: by the factor of the other families, None
    where there is one alone. `fitted`: the factor and its interval.
    """

    steps: list[Published]
    before: np.ndarray
    left_out: np.ndarray | None
    fitted: ReplayConfig

    @property
    def sentences(self) -> list[str]:
        """What was found, in words."""
        off, families = np.abs(1 / self.before - 1), self.fitted.models
        lines = [
            f"Replays: {len(self.steps)} measured steps of {families} famil{'y' if families == 1 else 'ies'} have a "
            f"compile of the same layout beside them. As predicted they are off by {100 * np.median(off):.1f}% in "
            f"the median and {100 * off.max():.1f}% at worst; the factor for replays is now {self.fitted.factor:g}."
        ]
        if self.left_out is None:
            return [*lines, "All are of one family, so nothing says how good the factor is on another."]
        left = np.abs(1 / self.left_out - 1)
        return [*lines, f"By factors of the other families: {100 * np.median(left):.1f}% and {100 * left.max():.1f}%."]

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        steps = [asdict(step) for step in self.steps]
        return {"steps": steps, "measured_over_predicted": self.before.tolist(), "fitted": asdict(self.fitted)}


def replay_fit(pairs: Sequence[tuple[Row, Run]]) -> ReplayFit | None:
    """Return the fit to the measured trials of a chip that were compiled too; None where there is none."""
    replayed, steps, before = dict[str, float](), list[Published](), list[float]()
    for row, run in pairs:
        if row.trial.stage == "compile" and (seconds := row.step.get("replayed_s")):
            replayed[_layout(run)] = seconds
    for row, run in pairs:
        seconds, target = replayed.get(_layout(run)), run.config.target
        if row.trial.stage != "measure" or seconds is None or row.step_s is None or target.chip is None:
            continue
        family, ratio = f"{row.work.label}, {target.name}", row.step_s / seconds
        steps.append(Published(row.layout, row.work.model, family, target.chip.name, target.slices, ratio, ""))
        before.append(ratio / correction_of(target).factor)
    if not steps:
        return None
    chip, families = steps[0].chip, len({step.family for step in steps})
    fitted = ReplayConfig(_rounded(correction(steps, chip, 1).of_chip), rows=len(steps), models=families)
    left_out = [unseen_ratio(steps, step) for step in steps]
    ratios = np.array([ratio for ratio in left_out if ratio is not None])
    if len(ratios):
        fitted.low, fitted.high = _rounded(ratios.min()), _rounded(ratios.max())
    return ReplayFit(steps, np.array(before), ratios if len(ratios) else None, fitted)


def unpaired(pairs: Sequence[tuple[Row, Run]]) -> int:
    """Return how many measured trials of a chip have no compile of the same layout beside them."""
    compiled = {_layout(run) for row, run in pairs if row.trial.stage == "compile" and row.step.get("replayed_s")}
    return sum(row.trial.stage == "measure" and _layout(run) not in compiled for row, run in pairs)


def _layout(run: Run) -> str:
    """Return a name for what a step computes on which slice, whatever is known of the chip."""
    values = OmegaConf.to_container(OmegaConf.structured(run.config), enum_to_str=True)
    assert isinstance(values, dict)
    target = run.config.target
    slices = (target.chip and target.chip.name, target.chips, target.topology, target.slices)
    return json.dumps([slices, [values[key] for key in SHAPING_KEYS if key != "target"]], sort_keys=True, default=str)


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
