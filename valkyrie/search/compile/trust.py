"""Corrects replays by published runs, and gives predictions an interval.

`published.json` has measured over replayed seconds of every published run; experiments/published/predict.py writes it.
A replay is multiplied by the ratio of the runs on its chip (the median of their families), and by the loss of published
runs for every doubling of slices. The prediction of a published run excludes the runs of its family. If
`mode=calibrate` has set `target.chip.replay`, the user's own runs replace the published ones on that chip.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from valkyrie.hardware.target import ChipConfig, TargetConfig
from valkyrie.search.compile.prediction import StepInterval

FILE = Path(__file__).with_name("published.json")
ENOUGH = 4
"""Number of runs that an interval needs. If a chip has fewer published ones, those on all chips are used."""


@dataclass(frozen=True)
class Published:
    """A published run that was replayed. `ratio` is measured over replayed seconds of a step.

    Runs of one `family` share recipe and chip.
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
    """Factors for a replay: `of_chip`, and `of_slices` for several slices that wait for each other.

    `rows` and `families` are the numbers of runs on the chip and of their families.
    """

    of_chip: float
    of_slices: float
    rows: int
    families: int

    @property
    def factor(self) -> float:
        """Product of both factors."""
        return self.of_chip * self.of_slices


def correction_of(target: TargetConfig) -> Correction:
    """Return the correction of a replay on a slice, by the user's own runs on its chip or else by published ones."""
    chip = target.chip
    assert chip is not None
    found, own = correction(published(), chip.name, target.slices), chip.replay
    return found if own.factor is None else Correction(own.factor, found.of_slices, own.rows, own.models)


def correction(rows: Sequence[Published], chip: str, slices: int, without: str | None = None) -> Correction:
    """Return the correction of a replay on a chip by published runs, except those of the family `without`."""
    others = [row for row in rows if row.family != without]
    loss = _loss(others)
    on_chip = [row for row in others if row.chip == chip]
    families = {row.family for row in on_chip}
    of_chip = median_by_family([(row.family, row.ratio / _doublings(loss, row.slices)) for row in on_chip])
    return Correction(1.0 if of_chip is None else of_chip, _doublings(loss, slices), len(on_chip), len(families))


def median_by_family(ratios: Sequence[tuple[str, float]]) -> float | None:
    """Return the median of the families' medians, by logarithm, or None without ratios.

    `ratios` are pairs of family and ratio.
    """
    each = [_median(ratio for family, ratio in ratios if family == f) for f in sorted({f for f, _ in ratios})]
    return _median(each) if each else None


def interval(rows: Sequence[Published], chip: str, step_s: float) -> StepInterval | None:
    """Return the range of a predicted step of `step_s` seconds, from the errors of published runs.

    The prediction of a run excludes its family. Uses the runs on the chip, or those on all chips if fewer than four are
    left. Returns None if these are also too few.
    """
    ratios = {row: ratio for row in rows if (ratio := unseen_ratio(rows, row)) is not None}
    on_chip = {row: ratio for row, ratio in ratios.items() if row.chip == chip}
    used = on_chip if len(on_chip) >= ENOUGH else ratios
    if len(used) < ENOUGH:
        return None
    versions, models = sorted({row.libtpu for row in used}), len({row.model for row in used})
    of = chip if used is on_chip else None
    low, high = min(used.values()), max(used.values())
    return StepInterval(step_s * low, step_s * high, low, high, len(used), models, of, tuple(versions))


def unseen_ratio(rows: Sequence[Published], row: Published) -> float | None:
    """Return measured over predicted seconds of a run by those of other families, or None without any on its chip."""
    found = correction(rows, row.chip, row.slices, without=row.family)
    return row.ratio / found.factor if found.families else None


@cache
def published() -> tuple[Published, ...]:
    """Return the published runs that ship with the package."""
    return tuple(Published(**row) for row in json.loads(FILE.read_text())["rows"])


def as_json(rows: Sequence[Published]) -> str:
    """Return the text of `published.json`."""
    about = "measured over replayed seconds; written by experiments/published/predict.py --ship"
    return json.dumps({"about": about, "rows": [asdict(row) for row in rows]}, indent=1) + "\n"


def trust(step_s: float, chip: ChipConfig) -> StepInterval | None:
    """Return the range of a predicted step of `step_s` seconds, or None if unknown."""
    own = chip.replay
    if own.factor is None:
        return interval(published(), chip.name, step_s)
    if own.low is None or own.high is None:
        return None
    low_s, high_s = step_s * own.low, step_s * own.high
    return StepInterval(low_s, high_s, own.low, own.high, own.rows, own.models, chip.name, yours=True)


def _loss(rows: Sequence[Published]) -> float:
    """Return the slope of the logarithm of the ratios over doublings of slices, within families."""
    products = squares = 0.0
    for family in {row.family for row in rows}:
        doublings = [math.log2(row.slices) for row in rows if row.family == family]
        logs = [math.log(row.ratio) for row in rows if row.family == family]
        middle, mean = statistics.fmean(doublings), statistics.fmean(logs)
        products += sum((x - middle) * (y - mean) for x, y in zip(doublings, logs, strict=True))
        squares += sum((x - middle) ** 2 for x in doublings)
    return products / squares if squares else 0.0


def _doublings(loss: float, slices: int) -> float:
    return math.exp(loss * math.log2(slices))


def _median(ratios: Iterable[float]) -> float:
    return math.exp(statistics.median(math.log(ratio) for ratio in ratios))
