"""The figures of devices as `mode=figures` leaves them: read as a chip, and in words. Imports no JAX."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf

from valkyrie.hardware import ChipConfig
from valkyrie.precision import DType
from valkyrie.units import duration


@dataclass(frozen=True)
class Figures:
    """What devices reach, as a chip, and the names of the machines that they are of."""

    chip: ChipConfig
    machines: tuple[str, ...]

    def are_of(self, machine: str, compute: DType, devices: int) -> bool:
        """Return whether they are of so many devices of a process on this machine, for products of this dtype."""
        alike = (list(self.chip.peak_tflops), self.chip.host_bounds) == ([compute.value], [devices])
        return alike and machine in self.machines


def read_figures(file: Path) -> Figures:
    """Return what a `figures.json` says; OSError and ValueError where it is none."""
    values = json.loads(file.read_text())
    machines = tuple(values.pop("machines", ()))
    chip = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ChipConfig), values))
    assert isinstance(chip, ChipConfig), file
    return Figures(chip, machines)


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
