"""Fits the efficiency constants of the estimate to step times that were compiled, measured or published.

Minimises a robust (soft L1) loss of the logarithm of estimated over known seconds, within bounds. Layouts of a family
have similar errors, so a family of n layouts has weight sqrt(n). A weak penalty keeps constants that do not affect
these layouts at their start values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from valkyrie.config.run import Run
from valkyrie.hardware.target import ChipConfig
from valkyrie.parallel.candidates import Candidates
from valkyrie.parallel.remat import RematConfig
from valkyrie.search.estimate.efficiency import Efficiency
from valkyrie.search.estimate.network import collective_model
from valkyrie.search.estimate.runs import stack_runs
from valkyrie.search.estimate.times import StepEstimator
from valkyrie.search.estimate.work import StepWork, step_work

BOUNDS: dict[str, tuple[float, float]] = {
    "products": (0.3, 1.0),
    "mixing": (0.02, 1.0),
    "half_rate_flops": (1e6, 3e11),
    "hbm": (0.3, 1.0),
    "passes": (0.2, 8.0),
    "passes_again": (0.05, 8.0),
    "passes_kept": (0.2, 12.0),
    "logits_passes": (0.5, 12.0),
    "scores_passes": (0.0, 20.0),
    "float32_passes": (1.0, 8.0),
    "launch_s": (1e-7, 1e-3),
    "hidden_weights": (0.0, 1.0),
    "hidden_gradients": (0.0, 1.0),
    "hidden_activations": (0.0, 1.0),
    "hidden_stages": (0.0, 1.0),
    "gathers": (0.2, 1.0),
    "sums": (0.2, 1.0),
    "outside": (0.4, 1.0),
}
"""Lower and upper bound of each constant that can be fitted, in the units of `Efficiency`."""
FITTED_CONSTANTS = (
    "products",
    "float32_passes",
    "passes_kept",
    "hidden_weights",
    "hidden_gradients",
    "gathers",
    "sums",
)
"""Constants that `mode=calibrate` fits, because they affect steps compiled for a TPU.

The others keep the chip's values.
"""
_LOGARITHMIC = ("half_rate_flops", "launch_s")
PENALTY_WEIGHT = 0.2
"""Weight of the penalty on the distance of a constant from its start value.

The distance is a fraction of the range in `BOUNDS`. The relative error of a layout has weight 1 before families are
weighted.
"""

TOLERANCE = 1e-5
"""Relative change of the loss, or of the constants, at which the solver stops."""


@dataclass(frozen=True)
class TimedLayouts:
    """Layouts with known step times. All share a model, partition and remat policy.

    `step_s` are the known seconds per step. `family` names layouts with similar errors, such as those of one model and
    batch.
    """

    work: StepWork
    layouts: Candidates
    remat: RematConfig
    chip: ChipConfig
    step_s: np.ndarray
    family: str

    def estimate(self, efficiency: Efficiency) -> np.ndarray:
        """Return the estimated seconds per step of each layout."""
        if efficiency not in self._estimates:
            network = collective_model(self.chip, efficiency)
            estimator = StepEstimator(self.work, self.layouts, self.chip, efficiency, network)
            self._estimates[efficiency] = estimator.estimate(self.remat).step_s
        return self._estimates[efficiency]

    @cached_property
    def _estimates(self) -> dict[Efficiency, np.ndarray]:
        """Results of `estimate`. Fits that leave out different families begin with the same constants."""
        return {}


def timed_layouts(runs: Sequence[Run], step_s: Sequence[float], family: str) -> TimedLayouts:
    """Stack runs and their known step times. The runs must share model, partition, remat policy and mesh axes."""
    config = runs[0].config
    assert config.target.chip is not None
    return TimedLayouts(
        step_work(runs[0]), stack_runs(runs), config.remat, config.target.chip, np.array(step_s), family
    )


def fit_constants(
    timed_groups: Sequence[TimedLayouts], start: Efficiency, names: Sequence[str], first_guess: Efficiency | None = None
) -> Efficiency:
    """Fit the named constants to known step times, starting from `start`.

    Raises ValueError if `timed_groups` is empty.

    Args:
        timed_groups: The layouts with known step times.
        start: Constants that are not fitted, and the values to which the penalty draws the fitted ones.
        names: Names of the fitted constants.
        first_guess: Constants from which the solver begins, such as those of a similar fit, or None for `start`.
    """
    from scipy.optimize import least_squares

    if not timed_groups:
        raise ValueError("No step times to fit the constants to.")
    if not names:
        return start
    ranges = {name: tuple(_to_log_scale(name, bound) for bound in BOUNDS[name]) for name in names}
    default = np.array([_to_log_scale(name, max(getattr(start, name), BOUNDS[name][0])) for name in names])
    lower_bounds, upper_bounds = (np.array([ranges[name][i] for name in names]) for i in (0, 1))

    def efficiency_at(x: np.ndarray) -> Efficiency:
        return replace(
            start, **{name: float(_from_log_scale(name, value)) for name, value in zip(names, x, strict=True)}
        )

    counts = Counter(family for rows in timed_groups for family in [rows.family] * len(rows.step_s))

    def errors(x: np.ndarray) -> np.ndarray:
        efficiency = efficiency_at(x)
        residuals = [
            np.log(layouts.estimate(efficiency) / layouts.step_s) / counts[layouts.family] ** 0.25
            for layouts in timed_groups
        ]
        return np.concatenate([*residuals, PENALTY_WEIGHT * (x - default) / (upper_bounds - lower_bounds)])

    margin = 1e-6 * (upper_bounds - lower_bounds)
    guess = start if first_guess is None else first_guess
    initial = np.array([_to_log_scale(name, max(getattr(guess, name), BOUNDS[name][0])) for name in names])
    initial = np.clip(initial, lower_bounds + margin, upper_bounds - margin)
    solution = least_squares(
        errors,
        initial,
        bounds=(lower_bounds, upper_bounds),
        loss="soft_l1",
        f_scale=0.1,
        diff_step=1e-3,
        ftol=TOLERANCE,
        xtol=TOLERANCE,
    )
    return efficiency_at(solution.x)


def cross_validate(
    timed_groups: Sequence[TimedLayouts], start: Efficiency, names: Sequence[str]
) -> list[tuple[TimedLayouts, np.ndarray]]:
    """Return each entry of `timed_groups` with its estimated seconds, using constants fitted to the other families.

    With only one family, uses the constants `start`.
    """
    efficiencies = {}
    for family in {group.family for group in timed_groups}:
        other_families = [group for group in timed_groups if group.family != family]
        efficiencies[family] = fit_constants(other_families, start, names) if other_families else start
    return [(group, group.estimate(efficiencies[group.family])) for group in timed_groups]


def _to_log_scale(name: str, value: float) -> float:
    return float(np.log(value)) if name in _LOGARITHMIC else value


def _from_log_scale(name: str, value: float) -> float:
    return float(np.exp(value)) if name in _LOGARITHMIC else value
