"""Correction factors for replayed step times, and the interval of a prediction.

`published.json` has the ratio of measured to replayed seconds of every published run. It is written by
experiments/published/predict.py. A family is a group of published runs with the same recipe on the same chip. Replayed
times are multiplied by two factors. One is the median ratio of the chip (the median over families). The other is a
slowdown for every doubling of slices. Errors are cross-validated: each published run is predicted with factors fitted
without its family. If `mode=calibrate` has set `target.chip.replay`, the factor of the chip and the errors come from
the user's own runs instead.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from valkyrie.hardware.chips import known_chips
from valkyrie.hardware.target import ChipConfig, TargetConfig
from valkyrie.search.compile.prediction import StepInterval

PUBLISHED_FILE = Path(__file__).with_name("published.json")
MIN_RUNS = 4
"""Minimum number of runs with a known prediction error for an interval."""
SHARED_ERRORS = "predictions for the same kind of chip are off by about the same ratio"
"""Why the order of two layouts can be sure although their intervals overlap."""


@dataclass(frozen=True)
class PublishedRun:
    """A published run. `row` is its id, and `ratio` its measured over replayed seconds per step.

    Runs of the same `family` have the same recipe and chip. `libtpu` is the version that compiled the replayed program.
    """

    row: str
    model: str
    family: str
    chip: str
    slices: int
    ratio: float
    libtpu: str


@dataclass(frozen=True)
class Correction:
    """Factors that correct replayed step times.

    Args:
        chip_factor: Median ratio of measured to replayed time on this chip.
        slices_factor: Slowdown from waiting for other slices; 1 for one slice.
        run_count: Number of runs that `chip_factor` is fitted to.
        family_count: Number of families among these runs. After `mode=calibrate`, a family is a model, batch and
            length.
    """

    chip_factor: float
    slices_factor: float
    run_count: int
    family_count: int

    @property
    def factor(self) -> float:
        """Product of both factors."""
        return self.chip_factor * self.slices_factor


def target_correction(target: TargetConfig) -> Correction:
    """Return the factors that correct replayed times on a target.

    The chip factor is fitted to the user's runs if `mode=calibrate` set one, otherwise to published runs. The factor
    for slices always comes from published runs.
    """
    chip = target.chip
    assert chip is not None
    published_factors, user_fit = published_correction(published_runs(), chip.name, target.slices), chip.replay
    return (
        published_factors
        if user_fit.factor is None
        else Correction(user_fit.factor, published_factors.slices_factor, user_fit.rows, user_fit.models)
    )


def published_correction(
    runs: Sequence[PublishedRun], chip: str, slices: int, held_out_family: str | None = None
) -> Correction:
    """Return the factors that correct replayed times on `slices` slices of a chip, fitted to published runs.

    Ignores the runs of the family `held_out_family`. The chip factor is 1 if no run is on this chip.
    """
    other_runs = [run for run in runs if run.family != held_out_family]
    log_slowdown = _log_slowdown(other_runs)
    chip_runs = [run for run in other_runs if run.chip == chip]
    families = {run.family for run in chip_runs}
    chip_factor = median_by_family(
        [(run.family, run.ratio / _slowdown_factor(log_slowdown, run.slices)) for run in chip_runs]
    )
    return Correction(
        1.0 if chip_factor is None else chip_factor,
        _slowdown_factor(log_slowdown, slices),
        len(chip_runs),
        len(families),
    )


def median_by_family(ratios: Sequence[tuple[str, float]]) -> float | None:
    """Return the median over families of the median ratio of each family, or None if `ratios` is empty.

    `ratios` are pairs of family and ratio. Medians are computed in logarithms.
    """
    medians = [
        _log_median(ratio for family, ratio in ratios if family == name)
        for name in sorted({name for name, _ in ratios})
    ]
    return _log_median(medians) if medians else None


def published_interval(runs: Sequence[PublishedRun], chip: str, step_s: float) -> StepInterval | None:
    """Return the range of a predicted step of a dense transformer, from the prediction errors of published runs.

    `step_s` is the predicted time in seconds. The range extends in both directions by the largest error of these runs:

    - Several recipes and at least `MIN_RUNS` runs on the chip: the runs on the chip.
    - One recipe, or fewer runs: the runs on the chip, and those of chips with several recipes.
    - No runs: all runs.

    The error of a run is that of its prediction without the runs of its recipe (`held_out_ratio`), so a run has no
    factor for its chip if no other recipe has runs there. For a chip without runs, no run has this factor.

    Returns None if there are fewer than `MIN_RUNS` such errors.
    """
    recipe_counts = Counter(chip for chip, _ in {(run.chip, run.family) for run in runs})
    chip_runs = [run for run in runs if run.chip == chip]
    if is_new := not chip_runs:
        log_slowdown, used_runs = _log_slowdown(runs), list(runs)
        ratios = [run.ratio / _slowdown_factor(log_slowdown, run.slices) for run in runs]
    else:
        is_enough = recipe_counts[chip] > 1 and len(chip_runs) >= MIN_RUNS
        used_runs = [run for run in runs if run.chip == chip or not is_enough and recipe_counts[run.chip] > 1]
        ratios = [held_out_ratio(runs, run) for run in used_runs]
    if len(ratios) < MIN_RUNS:
        return None
    high = max(max(ratio, 1 / ratio) for ratio in ratios)
    chips, models = {run.chip for run in used_runs}, len({run.model for run in used_runs})
    versions = tuple(sorted({run.libtpu for run in used_runs}))
    interval_chip = chip if chips == {chip} else None
    return StepInterval(
        step_s / high, step_s * high, 1 / high, high, len(ratios), models, interval_chip, versions, is_new=is_new
    )


def held_out_ratio(runs: Sequence[PublishedRun], run: PublishedRun) -> float:
    """Return measured over predicted seconds of a published run. The prediction is fitted to the other families.

    It has no factor for the chip if no other family has runs there.
    """
    return run.ratio / published_correction(runs, run.chip, run.slices, held_out_family=run.family).factor


@cache
def published_runs() -> tuple[PublishedRun, ...]:
    """Return the published runs that ship with the package."""
    return tuple(PublishedRun(**row) for row in json.loads(PUBLISHED_FILE.read_text())["rows"])


def published_runs_on(platform: str) -> list[PublishedRun]:
    """Return the published runs on chips of a platform."""
    chips = {name for name, chip in known_chips().items() if chip.platform == platform}
    return [run for run in published_runs() if run.chip in chips]


def as_json(runs: Sequence[PublishedRun]) -> str:
    """Return the content of `published.json`."""
    comment = "measured over replayed seconds; written by experiments/published/predict.py --ship"
    return json.dumps({"about": comment, "rows": [asdict(run) for run in runs]}, indent=1) + "\n"


def step_interval(step_s: float, chip: ChipConfig, *, trains_dense_transformer: bool) -> StepInterval | None:
    """Return the range in which the measured step time should fall, or None if there are too few comparable runs.

    The range comes from the prediction errors of the user's own runs if `mode=calibrate` has set a factor, otherwise
    from those of published runs on the same platform. Published runs are all dense transformers, so without calibration
    other models get None.

    Args:
        step_s: Predicted step time in seconds.
        chip: The chip.
        trains_dense_transformer: Whether the program trains a dense transformer.
    """
    user_fit = chip.replay
    if user_fit.factor is None:
        comparable_runs = published_runs_on(chip.platform)
        return published_interval(comparable_runs, chip.name, step_s) if trains_dense_transformer else None
    if user_fit.low is None or user_fit.high is None:
        return None
    low_s, high_s = step_s * user_fit.low, step_s * user_fit.high
    return StepInterval(
        low_s, high_s, user_fit.low, user_fit.high, user_fit.rows, user_fit.models, chip.name, yours=True
    )


def _log_slowdown(runs: Sequence[PublishedRun]) -> float:
    """Return how much log(measured / replayed time) increases per doubling of the number of slices.

    This is the slope of a linear regression with one intercept per family. It is 0 if no family has runs on different
    numbers of slices.
    """
    products = squares = 0.0
    for family in {run.family for run in runs}:
        doublings = [math.log2(run.slices) for run in runs if run.family == family]
        logs = [math.log(run.ratio) for run in runs if run.family == family]
        mean_doublings, mean_log = statistics.fmean(doublings), statistics.fmean(logs)
        products += sum((x - mean_doublings) * (y - mean_log) for x, y in zip(doublings, logs, strict=True))
        squares += sum((x - mean_doublings) ** 2 for x in doublings)
    return products / squares if squares else 0.0


def _slowdown_factor(log_slowdown: float, slices: int) -> float:
    return math.exp(log_slowdown * math.log2(slices))


def _log_median(ratios: Iterable[float]) -> float:
    return math.exp(statistics.median(math.log(ratio) for ratio in ratios))
