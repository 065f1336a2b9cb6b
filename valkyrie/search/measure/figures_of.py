"""Reads the figures that `mode=figures` writes, as a chip and as text. Imports no JAX."""

from __future__ import annotations

import json
import math
from pathlib import Path

from omegaconf import OmegaConf

from valkyrie.config.modes import FIGURES, MACHINES
from valkyrie.hardware.target import ChipConfig
from valkyrie.precision import DType
from valkyrie.units import duration


def read_figures(file: Path) -> ChipConfig:
    """Return the chip that a `figures.json` describes. Raises OSError or ValueError if it describes none."""
    values = OmegaConf.create(file.read_text())
    chip = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ChipConfig), values))
    assert isinstance(chip, ChipConfig), file
    return chip


def has_figures(folder: Path, machine: str, compute: DType, devices: int) -> bool:
    """Check whether a folder has figures for `devices` devices per process on this machine, in this dtype."""
    if not ((folder / FIGURES).is_file() and (folder / MACHINES).is_file()):
        return False
    chip, machines = read_figures(folder / FIGURES), json.loads((folder / MACHINES).read_text())
    return machine in machines and (list(chip.peak_tflops), chip.host_bounds) == ([compute.value], [devices])


def in_words(chip: ChipConfig) -> str:
    """Describe the figures of devices in a line."""
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
