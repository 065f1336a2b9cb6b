"""Reads and describes the device speeds that `mode=figures` writes to `figures.json`. Does not import JAX."""

from __future__ import annotations

import math
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from valkyrie.config.modes import FIGURES_FILE, MACHINES_FILE
from valkyrie.hardware.target import ChipConfig
from valkyrie.precision import DType
from valkyrie.problems import first_line
from valkyrie.records import RecordError, read_record
from valkyrie.units import count_text, duration_text


def read_figures(file: Path) -> ChipConfig:
    """Read a chip from `figures.json`. Raises OSError or ValueError if the file is missing or malformed."""
    try:
        values = OmegaConf.create(file.read_text())
        chip = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ChipConfig), values))
    except (OmegaConfBaseException, YAMLError, AssertionError, TypeError, ValueError) as error:
        raise _damage_error(file, first_line(error)) from error
    if not isinstance(chip, ChipConfig) or len(chip.peak_tflops) != 1:
        raise _damage_error(file, "it describes no chip")
    return chip


def has_figures(folder: Path, machine: str, compute_dtype: DType, devices: int) -> bool:
    """Return whether a folder has the speeds of this machine for a compute dtype and number of devices per process.

    Raises ValueError if `figures.json` or `machines.json` is damaged.
    """
    if not ((folder / FIGURES_FILE).is_file() and (folder / MACHINES_FILE).is_file()):
        return False
    chip = read_figures(folder / FIGURES_FILE)
    try:
        machines = read_record(list[str], folder / MACHINES_FILE)
    except RecordError as error:
        raise _damage_error(folder / MACHINES_FILE, error.reason) from error
    return machine in machines and (list(chip.peak_tflops), chip.host_bounds) == ([compute_dtype.value], [devices])


def _damage_error(file: Path, reason: str) -> ValueError:
    return ValueError(f"{file} is damaged ({reason}). Delete {file.parent} to time the devices again.")


def describe_figures(chip: ChipConfig) -> str:
    """Format the rates and latencies of a measured chip as one line."""
    estimate = chip.estimate
    ((dtype, tflops),) = chip.peak_tflops.items()
    parts = [f"{1e3 * tflops:.3g} GFLOP/s in {dtype} and {chip.hbm_gbs or 0.0:.3g} GB/s memory bandwidth per device"]
    if chip.switch_gbs:
        latency = duration_text(estimate.get("start_s", 0.0))
        parts.append(f"{chip.switch_gbs:.3g} GB/s and {latency} latency between devices of a process")
    if chip.dcn_gbs_per_host:
        latency = duration_text(estimate.get("outer_start_s", 0.0))
        processes = f"processes of {count_text(math.prod(chip.host_bounds), 'device')}"
        parts.append(f"{chip.dcn_gbs_per_host:.3g} GB/s and {latency} latency between {processes}")
    return "; ".join(parts)
