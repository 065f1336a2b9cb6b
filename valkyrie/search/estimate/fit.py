"""Fits the constants of the estimate to step times that were compiled, measured or published.

Least squares of the logarithm of estimated over known seconds, with bounds; a family weighs as the root of its rows
and not as many times as they are, for they are alike. Each constant is pulled weakly to its
default, so that one that the rows say nothing of stays there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from valkyrie.config.run import Run
from valkyrie.hardware.target import ChipConfig
from valkyrie.parallel.candidates import Candidates
from valkyrie.parallel.remat import RematConfig
from valkyrie.search.estimate.efficiency import Efficiency
from valkyrie.search.estimate.network import network_of
from valkyrie.search.estimate.runs import candidates_of
from valkyrie.search.estimate.times import Step
from valkyrie.search.estimate.work import Work, work_of

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
"""The least and the largest value that each constant may take."""
FITTED = ("products", "float32_passes", "passes_kept", "hidden_weights", "hidden_gradients", "gathers", "sums")
"""The constants that steps compiled for a TPU say something of."""
_LOGARITHMIC = ("half_rate_flops", "launch_s")
PULL = 0.2
"""The weight of a constant's distance from its default, over its whole range, beside a row's relative error."""


@dataclass(frozen=True)
class Known:
    """Layouts of one model under one partition and remat whose step times are known; `family` is what they share."""

    work: Work
    layouts: Candidates
    remat: RematConfig
    chip: ChipConfig
    step_s: np.ndarray
    family: str

    def estimate(self, efficiency: Efficiency) -> np.ndarray:
        """Return the estimated seconds of each step."""
        network = network_of(self.chip, efficiency)
        return Step(self.work, self.layouts, self.chip, efficiency, network).under(self.remat).step_s


def known_of(runs: Sequence[Run], step_s: Sequence[float], family: str) -> Known:
    """Return runs of one model, partition and remat, with the same mesh axes, whose steps take so many seconds."""
    config = runs[0].config
    assert config.target.chip is not None
    return Known(work_of(runs[0]), candidates_of(runs), config.remat, config.target.chip, np.array(step_s), family)


def fitted(known: Sequence[Known], start: Efficiency, names: Sequence[str]) -> Efficiency:
    """Return the constants with those of these names fitted to what is known; ValueError where nothing is."""
    from scipy.optimize import least_squares

    if not known:
        raise ValueError("there is no step time to fit to.")
    if not names:
        return start
    ranges = {name: tuple(_scaled(name, bound) for bound in BOUNDS[name]) for name in names}
    default = np.array([_scaled(name, max(getattr(start, name), BOUNDS[name][0])) for name in names])
    low, high = (np.array([ranges[name][i] for name in names]) for i in (0, 1))

    def values(x: np.ndarray) -> Efficiency:
        return replace(start, **{name: float(_unscaled(name, value)) for name, value in zip(names, x, strict=True)})

    counts = Counter[str]()
    for one in known:
        counts[one.family] += len(one.step_s)

    def errors(x: np.ndarray) -> np.ndarray:
        efficiency = values(x)
        rows = [np.log(one.estimate(efficiency) / one.step_s) / counts[one.family] ** 0.25 for one in known]
        return np.concatenate([*rows, PULL * (x - default) / (high - low)])

    begin = np.clip(default, low + 1e-6 * (high - low), high - 1e-6 * (high - low))
    found = least_squares(errors, begin, bounds=(low, high), loss="soft_l1", f_scale=0.1, diff_step=1e-3)
    return values(found.x)


def without_family(known: Sequence[Known], start: Efficiency, names: Sequence[str]) -> list[tuple[Known, np.ndarray]]:
    """Return what is known with its estimate by constants that were fitted to all other families."""
    estimates = []
    for family in dict.fromkeys(one.family for one in known):
        others = [one for one in known if one.family != family]
        efficiency = fitted(others, start, names) if others else start
        estimates += [(one, one.estimate(efficiency)) for one in known if one.family == family]
    return estimates


def _scaled(name: str, value: float) -> float:
    return float(np.log(value)) if name in _LOGARITHMIC else value


def _unscaled(name: str, value: float) -> float:
    return float(np.exp(value)) if name in _LOGARITHMIC else value
