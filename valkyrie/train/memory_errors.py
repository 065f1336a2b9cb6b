"""Errors of the memory estimate (`valkyrie.train.memory`) against the TPU compiler."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from valkyrie.records import read_record

ERRORS_FILES = tuple(Path(__file__).with_name(name) for name in ("memory.json", "memory_of_pipelines.json"))
"""Errors of the estimate against the compiler (`MemoryRatios`): of layouts without a pipeline, and of pipelines.

Written by experiments/memory.py.
"""

UNKNOWN_ERROR = 2.0
"""Assumed largest ratio of the memory that a compiler needs to the estimate, on platforms where it was not measured."""


@dataclass(frozen=True)
class MemoryRatios:
    """Ratios of the compiler's to the estimated peak memory: the smallest (`low`), the largest (`high`) and the median.

    `layouts` and `models` are the numbers of layouts and models compared. `within_15_percent` is the number of layouts
    with a ratio between 0.85 and 1.15.
    """

    layouts: int
    models: int
    low: float
    high: float
    median: float
    within_15_percent: int


@cache
def memory_estimate_errors(has_pipeline: bool) -> MemoryRatios:
    """Return the errors of the estimate against the TPU compiler, as stored in `ERRORS_FILES`."""
    return read_record(MemoryRatios, ERRORS_FILES[has_pipeline])
