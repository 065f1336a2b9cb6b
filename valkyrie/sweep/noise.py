"""How far the timed steps of one layout lie apart, and which speeds are therefore equal. Imports no JAX."""

from __future__ import annotations

from collections.abc import Sequence

from valkyrie.sweep.trial import Trial

EQUAL = 1e-3
"""Below this relative difference two predictions, which have no noise, are equal."""


def has_spread(trial: Trial) -> bool:
    """Return whether a trial's steps were timed one by one, unlike those of a prediction."""
    return _range(trial) is not None


def within_noise(one: Trial, other: Trial) -> bool:
    """Return whether two speeds are equal: some timed steps of the slower layout are as fast as some of the faster.

    Steps are counted from the fastest to the 90th percentile; a record without the fastest has the median instead.
    """
    slow, fast = sorted((one, other), key=lambda trial: trial.results.objective)
    low, high = slow.results.objective, fast.results.objective
    if not low:
        return False
    best_of_slow = low * (_range(slow) or (1.0, 1.0))[1]
    worst_of_fast = high * (_range(fast) or (1.0, 1.0))[0]
    return best_of_slow >= worst_of_fast or high / low - 1 <= EQUAL


def _range(trial: Trial) -> tuple[float, float] | None:
    """Return the speed of the step at the 90th percentile, and of the fastest, as shares of the median's."""
    step = trial.results.step
    if not step.p90_s or not step.step_s:
        return None
    return step.step_s / step.p90_s, step.step_s / (step.min_s or step.step_s)


def places(trials: Sequence[Trial]) -> list[int]:
    """Return the places of trials, sorted by speed; those within noise of the first of them share its place."""
    found: list[int] = []
    first = 0
    for i, trial in enumerate(trials):
        if not found or not within_noise(trials[first], trial):
            first = i
        found.append(first + 1)
    return found
