"""Corrects estimated step times by the layouts of a search that were compiled.

The logarithm of compiled over estimated time is modelled as a Gaussian process: the error of a layout is a sum of
errors that it shares with similar layouts. A compiled layout therefore moves the estimates of similar ones by as much
as they have in common. It also narrows their intervals, unless it is further off than expected.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from valkyrie.hardware.platforms import get_platform
from valkyrie.search.estimate.rank import EstimatedLayout
from valkyrie.search.estimate.times import COMPUTE_PARTS
from valkyrie.search.shortlist import chip_name, estimate_errors, mesh_partition

FAMILY_SHARE, MESH_SHARE, WORK_SHARE = 0.1, 0.4, 0.4
"""Shares of the variance that layouts have in common if they agree in family, in mesh as well, and in their work.

The rest is a layout's own. Rounded from a maximum-likelihood fit to the 125 compiled steps of experiments/search, which
gives 0.10, 0.39 and 0.51. Correcting each of them by all others of its model changes the median error from 5.9% to
3.9%, and the standard deviation of errors divided by their predicted standard deviation is 1.0.
"""
WORK_PARTS, WORK_SCALE, COMPUTE_SHARE_SCALE = ("products", "mixing", "head"), 0.05, 0.1
"""Two layouts have the same work if these parts differ by well below 5%, and their shares of compute by below 0.1."""
_OWN_SHARE = 1 - FAMILY_SHARE - MESH_SHARE - WORK_SHARE
_QUANTILE = 1.645
"""Standard deviations between the median of a normal distribution and its 5% and 95% quantiles."""


_FAR_OFF = 2.0
"""Standard deviations from which an error is unexpected for all layouts of a slice, if all families have it."""


@dataclass(frozen=True)
class EstimatedStep:
    """What the correction needs to know about an estimated layout.

    Args:
        chip: Kind of chip. Layouts on other kinds are not corrected.
        devices: Number of chips.
        partition: Name of the partition, or "" if the errors of the platform's estimates are unknown. Most of such an
            error is one factor for all partitions.
        mesh_partition: Name of mesh, partition and schedule.
        has_pipeline: Whether the layers are split into stages.
        step_s: Estimated seconds per step.
        parts: Seconds of the estimated step by part.
    """

    chip: str
    devices: int
    partition: str
    mesh_partition: str
    has_pipeline: bool
    step_s: float
    parts: Mapping[str, float]

    @property
    def family(self) -> str:
        """The partition, or `pipeline`: layouts of a family have errors of the same causes."""
        return "pipeline" if self.has_pipeline else self.partition

    @staticmethod
    def from_layout(layout: EstimatedLayout) -> EstimatedStep:
        """Return the step of an estimated layout."""
        target, partition = layout.group.target, layout.group.candidates.partition.name
        name = " ".join(mesh_partition(layout))
        if not get_platform(target.platform).has_estimate_errors:
            partition = ""
        devices = target.slices * (target.chips or 1)
        return EstimatedStep(
            *(chip_name(layout), devices, partition, name, layout.has_pipeline, layout.step_s, layout.parts)
        )


@dataclass(frozen=True)
class CorrectedTime:
    """A step time in seconds, corrected by compiled layouts: median, and 5% and 95% quantile."""

    step_s: float
    low_s: float
    high_s: float

    def chance_below(self, seconds: float) -> float:
        """Return the probability that the compiled step takes less than `seconds`."""
        side_s = self.low_s if seconds < self.step_s else self.high_s
        deviation = abs(math.log(side_s / self.step_s)) / _QUANTILE
        return normal_chance(math.log(seconds / self.step_s) / deviation)


def normal_chance(deviations: float) -> float:
    """Return the probability that a normal variable is at most `deviations` standard deviations above its mean."""
    return 0.5 * math.erfc(-deviations / math.sqrt(2))


def correct_estimates(
    steps: Sequence[EstimatedStep], compiled: Sequence[tuple[EstimatedStep, float]]
) -> list[CorrectedTime]:
    """Return the step times of estimated layouts, corrected by `compiled`: other layouts and their seconds per step."""
    log_scales, widths = np.zeros(len(steps)), np.ones(len(steps))
    if steps and compiled:
        references = [step for step, _ in compiled]
        errors = np.log([seconds / step.step_s for step, seconds in compiled])
        common = _common_surprises(references, errors)
        surprises = _surprises(references, errors, common)
        shared = _shared_covariances(steps, references, surprises, common)
        known = _shared_covariances(references, references, surprises, common)
        known += _OWN_SHARE * _variance() * np.eye(len(errors))
        weights = np.linalg.solve(known, shared.T).T
        log_scales = weights @ errors
        expected = np.array([_variance(step.has_pipeline) for step in steps])
        unexpected = np.array(
            [surprises.get((step.chip, step.family), 0.0) + common.get(step.chip, 0.0) for step in steps]
        )
        widths = np.sqrt(1 + (unexpected - np.sum(weights * shared, axis=1)) / expected)
    corrected = []
    for step, log_scale, width in zip(steps, log_scales.tolist(), widths.tolist(), strict=True):
        step_s = math.exp(log_scale) * step.step_s
        low, high = (step_s * ratio**width for ratio in estimate_errors().time_quantiles(step.has_pipeline))
        corrected.append(CorrectedTime(step_s, low, high))
    return corrected


def _variance(has_pipeline: bool = False) -> float:
    """Return the variance of the logarithm of compiled over estimated time."""
    low, high = estimate_errors().time_quantiles(has_pipeline)
    return (math.log(high / low) / (2 * _QUANTILE)) ** 2


def _common_surprises(steps: Sequence[EstimatedStep], errors: np.ndarray) -> dict[str, float]:
    """Return the square of the error that all families on a kind of chip have, beyond `_FAR_OFF`.

    That error is the smallest mean error of a family, if there are several and all have the same sign. Otherwise, the
    families have nothing unexpected in common.
    """
    errors_by_family: dict[str, dict[str, list[float]]] = {}
    for step, error in zip(steps, errors.tolist(), strict=True):
        errors_by_family.setdefault(step.chip, {}).setdefault(step.family, []).append(error)
    surprises: dict[str, float] = {}
    for chip, families in errors_by_family.items():
        means = [sum(values) / len(values) for values in families.values()]
        if len(means) > 1 and min(means) * max(means) > 0:
            surprises[chip] = max(min(mean**2 for mean in means) - _FAR_OFF**2 * _variance(), 0.0)
    return surprises


def _surprises(
    steps: Sequence[EstimatedStep], errors: np.ndarray, common: Mapping[str, float]
) -> dict[tuple[str, str], float]:
    """Return by how much the mean squared error of each kind of chip and family exceeds the variance and `common`."""
    excess: dict[tuple[str, str], list[float]] = {}
    for step, error in zip(steps, errors.tolist(), strict=True):
        expected = _variance(step.has_pipeline) + common.get(step.chip, 0.0)
        excess.setdefault((step.chip, step.family), []).append(error**2 - expected)
    return {key: max(sum(values) / len(values), 0.0) for key, values in excess.items()}


def _shared_covariances(
    first: Sequence[EstimatedStep],
    second: Sequence[EstimatedStep],
    surprises: Mapping[tuple[str, str], float],
    common: Mapping[str, float],
) -> np.ndarray:
    """Return the covariance of the errors of two lists of layouts, without the part that is a layout's own.

    Pipelines have larger errors than other layouts. The difference is common to all pipelines, the excess in
    `surprises` to all layouts of a family, and that in `common` to all layouts on a kind of chip.
    """

    def equal(name: str) -> np.ndarray:
        return np.array([getattr(s, name) for s in first])[:, None] == np.array([getattr(s, name) for s in second])

    distance = np.sum((_work(first)[:, None] - _work(second)[None]) ** 2, axis=-1)
    shared = FAMILY_SHARE * equal("family") + MESH_SHARE * equal("mesh_partition")
    shared = _variance() * (shared + WORK_SHARE * np.exp(-distance / 2))
    pipelines = np.array([[step.has_pipeline for step in first]]).T & np.array([step.has_pipeline for step in second])
    shared += max(_variance(has_pipeline=True) - _variance(), 0.0) * pipelines
    shared += np.array([common.get(step.chip, 0.0) for step in second])
    shared += equal("family") * np.array([surprises.get((step.chip, step.family), 0.0) for step in second])
    return equal("chip") * shared


def _work(steps: Sequence[EstimatedStep]) -> np.ndarray:
    """Return a row per layout. Two rows have a distance well below 1 if the layouts have the same work in all."""
    seconds = np.array([[step.devices * step.parts[name] for name in WORK_PARTS] for step in steps])
    shares = [sum(step.parts[name] for name in COMPUTE_PARTS) / step.step_s for step in steps]
    return np.column_stack([np.log(seconds + 1e-12) / WORK_SCALE, np.array(shares) / COMPUTE_SHARE_SCALE])
