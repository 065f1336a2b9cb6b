"""Fits the constants of the estimate to step times that were compiled, measured or published.

Bounded least squares of the logarithm of estimated over known seconds. The rows of a family are alike, so a family is
weighted by the square root of their number. Each constant is pulled weakly to its default, where it stays if the rows
do not depend on it.
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
"""Bounds of each constant."""
FITTED = ("products", "float32_passes", "passes_kept", "hidden_weights", "hidden_gradients", "gathers", "sums")
"""Constants that affect steps compiled for a TPU."""
_LOGARITHMIC = ("half_rate_flops", "launch_s")
PULL = 0.2
"""Weight of a constant's distance from its default, as a share of its range, relative to a row's relative error."""


@dataclass(frozen=True)
class Known:
    """Layouts of one model, partition and remat policy with known step times. Rows of a family are similar."""

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
    """Return the known step times of runs with the same model, partition, remat policy and mesh axes."""
    config = runs[0].config
    assert config.target.chip is not None
    return Known(work_of(runs[0]), candidates_of(runs), config.remat, config.target.chip, np.array(step_s), family)


def fitted(known: Sequence[Known], start: Efficiency, names: Sequence[str]) -> Efficiency:
    """Fit the named constants, starting from `start`. Raises ValueError without any known step time."""
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

    counts = Counter(family for rows in known for family in [rows.family] * len(rows.step_s))

    def errors(x: np.ndarray) -> np.ndarray:
        efficiency = values(x)
        rows = [np.log(k.estimate(efficiency) / k.step_s) / counts[k.family] ** 0.25 for k in known]
        return np.concatenate([*rows, PULL * (x - default) / (high - low)])

    begin = np.clip(default, low + 1e-6 * (high - low), high - 1e-6 * (high - low))
    solution = least_squares(errors, begin, bounds=(low, high), loss="soft_l1", f_scale=0.1, diff_step=1e-3)
    return values(solution.x)


def without_family(known: Sequence[Known], start: Efficiency, names: Sequence[str]) -> list[tuple[Known, np.ndarray]]:
    """Return the known layouts, each with its estimates by constants fitted to all other families."""
    estimates = []
    for family in dict.fromkeys(rows.family for rows in known):
        others = [rows for rows in known if rows.family != family]
        efficiency = fitted(others, start, names) if others else start
        estimates += [(rows, rows.estimate(efficiency)) for rows in known if rows.family == family]
    return estimates


def _scaled(name: str, value: float) -> float:
    return float(np.log(value)) if name in _LOGARITHMIC else value


def _unscaled(name: str, value: float) -> float:
    return float(np.exp(value)) if name in _LOGARITHMIC else value
