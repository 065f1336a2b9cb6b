"""Spread of the timed steps of a layout, and which speeds are equal within it. Imports no JAX."""

from __future__ import annotations

from collections.abc import Sequence

from valkyrie.sweep.trial import Trial

EQUAL = 1e-3
"""Relative difference below which two predictions are equal. They have no noise."""


def has_spread(trial: Trial) -> bool:
    """Return whether a trial's steps were timed one by one, unlike those of a prediction."""
    return _range(trial) is not None


def within_noise(one: Trial, other: Trial) -> bool:
    """Return whether two speeds are equal: the ranges of their timed steps overlap.

    A range is from the fastest step, or the median if that is unknown, to the 90th percentile.
    """
    slow, fast = sorted((one, other), key=lambda trial: trial.results.objective)
    low, high = slow.results.objective, fast.results.objective
    if not low:
        return False
    best_of_slow = low * (_range(slow) or (1.0, 1.0))[1]
    worst_of_fast = high * (_range(fast) or (1.0, 1.0))[0]
    return best_of_slow >= worst_of_fast or high / low - 1 <= EQUAL


def _range(trial: Trial) -> tuple[float, float] | None:
    """Return the speeds of the 90th percentile and of the fastest step, relative to the median."""
    step = trial.results.step
    if not step.p90_s or not step.step_s:
        return None
    return step.step_s / step.p90_s, step.step_s / (step.min_s or step.step_s)


def places(trials: Sequence[Trial]) -> list[int]:
    """Return the ranks of trials that are sorted by speed. Trials within noise of the first of a rank share it."""
    ranks: list[int] = []
    first = 0
    for i, trial in enumerate(trials):
        if not ranks or not within_noise(trials[first], trial):
            first = i
        ranks.append(first + 1)
    return ranks
