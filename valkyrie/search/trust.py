"""How far a predicted step time was off on published runs: the interval that every prediction carries.

`published.json` holds measured over predicted seconds of every published run; experiments/published/predict.py writes
it. Nothing was fitted to those runs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("published.json")
ENOUGH = 4
"""Published runs that a chip must have for its own interval; with fewer, those of all chips count."""


@dataclass(frozen=True)
class Published:
    """A published run that was predicted. `ratio`: measured over predicted seconds of a step.

    Runs of one `family` are one recipe on one chip.
    """

    row: str
    model: str
    family: str
    chip: str
    ratio: float
    libtpu: str


@dataclass(frozen=True)
class Interval:
    """The least and the largest ratio of measured to predicted seconds of some published runs.

    `chip`: theirs, None where they are of several; `left_out`: those of the same model, which are not counted.
    """

    low: float
    high: float
    rows: int
    models: int
    chip: str | None
    left_out: int
    libtpu: tuple[str, ...]


def interval(rows: Sequence[Published], chip: str, model: str) -> Interval | None:
    """Return how published runs on a chip did, without the families that the model itself belongs to.

    Those of all chips where fewer than four are left; None where these are too few as well.
    """
    own = {row.family for row in rows if row.model == model}
    others = [row for row in rows if row.family not in own]
    of_chip = [row for row in others if row.chip == chip]
    used = of_chip if len(of_chip) >= ENOUGH else others
    if len(used) < ENOUGH:
        return None
    ratios, versions = [row.ratio for row in used], sorted({row.libtpu for row in used})
    models, left_out = len({row.model for row in used}), len(rows) - len(others)
    of = chip if used is of_chip else None
    return Interval(min(ratios), max(ratios), len(used), models, of, left_out, tuple(versions))


@cache
def published() -> tuple[Published, ...]:
    """Return the published runs that ship with the package."""
    return tuple(Published(**row) for row in json.loads(FILE.read_text())["rows"])


def as_json(rows: Sequence[Published]) -> str:
    """Return the text of `published.json`."""
    about = "measured over predicted seconds; written by experiments/published/predict.py --ship"
    return json.dumps({"about": about, "rows": [asdict(row) for row in rows]}, indent=1) + "\n"


def trust(step_s: float, chip: str, model: str) -> dict[str, Any] | None:
    """Return the interval of a predicted step in seconds, as `compile.json` holds it; None where none is known.

    Keys: `low_s`, `high_s`, and those of `Interval`.
    """
    found = interval(published(), chip, model)
    if found is None:
        return None
    return {"low_s": step_s * found.low, "high_s": step_s * found.high} | asdict(found)
