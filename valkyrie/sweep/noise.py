"""Decides which speeds are equal within noise, judging by the spread of step times. Does not import JAX."""

from __future__ import annotations

from collections.abc import Sequence

from valkyrie.sweep.trial import Trial

EQUAL_TOLERANCE = 1e-3
"""Relative difference up to which two speeds count as equal, even if neither trial recorded a spread."""


def has_spread(trial: Trial) -> bool:
    """Return whether a trial recorded the spread of its step times. Predictions have none."""
    return _speed_range(trial) is not None


def within_noise(trial: Trial, other: Trial) -> bool:
    """Return whether the speeds of two trials differ by at most `EQUAL_TOLERANCE`, or their step times overlap.

    The step times of a trial range from the fastest step to the 90th percentile. If the fastest step is unknown, the
    range starts at the median; if the 90th percentile is unknown, the range is the median alone. Returns False if
    a speed is unknown.
    """
    slower_trial, faster_trial = sorted((trial, other), key=lambda trial: trial.results.objective)
    slower_speed, faster_speed = slower_trial.results.objective, faster_trial.results.objective
    if not slower_speed:
        return False
    slower_best_speed = slower_speed * (_speed_range(slower_trial) or (1.0, 1.0))[1]
    faster_worst_speed = faster_speed * (_speed_range(faster_trial) or (1.0, 1.0))[0]
    return slower_best_speed >= faster_worst_speed or faster_speed / slower_speed - 1 <= EQUAL_TOLERANCE


def _speed_range(trial: Trial) -> tuple[float, float] | None:
    """Return the speeds at the 90th percentile and at the fastest step, relative to the median, or None if unknown."""
    step = trial.results.step
    if not step.p90_s or not step.step_s:
        return None
    return step.step_s / step.p90_s, step.step_s / (step.min_s or step.step_s)


def tied_ranks(trials: Sequence[Trial]) -> list[int]:
    """Return the rank of each trial, such as 1, 1, 3. `trials` must be sorted by speed, fastest first.

    A trial shares the rank of the trial before it if it is within noise of the fastest trial with that rank.
    """
    ranks: list[int] = []
    first = 0
    for i, trial in enumerate(trials):
        if not ranks or not within_noise(trials[first], trial):
            first = i
        ranks.append(first + 1)
    return ranks
