"""The figures of devices as `mode=figures` leaves them: read as a chip, and in words. Imports no JAX."""

from __future__ import annotations

import math
from pathlib import Path

from omegaconf import OmegaConf

from valkyrie.hardware import ChipConfig
from valkyrie.units import duration


def read_figures(file: Path) -> ChipConfig:
    """Return the chip that a `figures.json` describes; OSError and ValueError where it is none."""
    values = OmegaConf.create(file.read_text())
    chip = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ChipConfig), values))
    assert isinstance(chip, ChipConfig), file
    return chip


def in_words(chip: ChipConfig) -> str:
    """Return what devices reach, in a line."""
    of = chip.estimate
    ((dtype, tflops),) = chip.peak_tflops.items()
    parts = [f"{1e3 * tflops:.3g} GFLOP/s in {dtype} and {chip.hbm_gbs or 0.0:.3g} GB/s of memory a device"]
    if chip.switch_gbs:
        start = duration(of.get("start_s", 0.0))
        parts.append(f"{chip.switch_gbs:.3g} GB/s between devices of a process, {start} to start")
    if chip.dcn_gbs_per_host:
        devices = math.prod(chip.host_bounds)
        start = duration(of.get("outer_start_s", 0.0))
        parts.append(f"{chip.dcn_gbs_per_host:.3g} GB/s out of a process of {devices}, {start} to start")
    return "; ".join(parts)
