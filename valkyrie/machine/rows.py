"""Seconds to gather and add rows of an array by index, and to sort numbers, on one device.

The TPU compiler estimates none of them. Its programs show gathers and sorts: a gather copies a row in pieces of one
tile of 128 columns, and a sort is a network of compare-exchange steps on whole vectors (final bundles of libtpu
0.0.42.1 for v5e).
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np

from valkyrie.hardware.platforms import get_platform
from valkyrie.hardware.target import ChipConfig
from valkyrie.machine.assumptions import GATHER_ROW_CYCLES, GATHER_TILE_S, HBM_EFFICIENCY, SORT_STEP_CYCLES

Amount = TypeVar("Amount", float, np.ndarray)


def gather_seconds(rows: Amount, width: Amount, itemsize: int, chip: ChipConfig) -> Amount:
    """Return the seconds to copy `rows` rows of `width` elements, selected by index.

    Chips without TPU cores move the bytes at the bandwidth of HBM.
    """
    if get_platform(chip.platform).runs_pallas_tpu:
        tiles: Any = np.ceil(width / 128) * itemsize / 2
        return rows * (GATHER_ROW_CYCLES / _clock_hz(chip) + tiles * GATHER_TILE_S / chip.cores)
    return 2 * rows * width * itemsize / _hbm_rate(chip)


def add_seconds(rows: Amount, width: Amount, chip: ChipConfig) -> Amount:
    """Return the seconds to add `rows` rows of `width` elements to others, selected by index.

    Assumed to be those of a gather of bfloat16 rows. In the profile of `GATHER_TILE_S`, sums took a third of the time
    of gathers.
    """
    return gather_seconds(rows, width, 2, chip)


def sort_seconds(count: Amount, chip: ChipConfig, length: float | None = None) -> Amount:
    """Return the seconds to sort `count` numbers, each with another number that moves with it.

    They are sorted in parts of `length` numbers, or all together if it is None.
    """
    if get_platform(chip.platform).runs_pallas_tpu:
        levels: Any = np.log2(np.maximum(count if length is None else length, 2.0))
        return SORT_STEP_CYCLES * count * levels * (levels + 1) / 2 / _clock_hz(chip)
    return 8 * 2 * 8 * count / _hbm_rate(chip)  # a radix sort passes over 8 bytes once per byte


def _clock_hz(chip: ChipConfig) -> float:
    return (chip.clock_ghz or 1.0) * 1e9 * chip.cores


def _hbm_rate(chip: ChipConfig) -> float:
    return (chip.hbm_gbs or 1.0) * 1e9 / chip.devices * HBM_EFFICIENCY
