"""Decides what is known of the hardware a run is meant for: chips, slices, and their published figures."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from typing import Any

from valkyrie.paths import read_group
from valkyrie.precision import DType

GIB = 2**30


class Platform(Enum):
    """The JAX platform a chip belongs to; `any` is whatever the machine has."""

    any = "any"
    cpu = "cpu"
    gpu = "gpu"
    tpu = "tpu"


class Wrap(Enum):
    """Which axes of a torus close into rings: those as long as the pod's, all if all are whole cubes, or none."""

    none = "none"
    axes_of_16 = "axes_of_16"
    axes_of_32 = "axes_of_32"
    cubes_of_4 = "cubes_of_4"


@dataclass
class ChipConfig:
    """One accelerator chip. Figures are per chip; sources stand in `conf/target/chip/*.yaml`.

    `peak_tflops`: dense TFLOP/s by dtype; `hbm_gib`: memory in GiB, of which the compiler leaves `usable_hbm_gib` to a
    program; `hbm_gbs`: GB/s; `clock_ghz`: of the matrix units; `devices`: JAX devices in a chip.
    `ici_axes`: axes of the torus; `ici_link_gbs`: GB/s one way of one of the two links that a chip has on each of them;
    `hop_us`: latency of a hop in microseconds; `wrap`: when an axis closes into a ring; `host_bounds`: chips of a host,
    by axis; `dcn_gbs_per_host`: GB/s one way out of a host over the data-centre network.
    `usd_per_hour`: on demand; `spot_usd_per_hour`: interruptible, for the user to set.
    `compiler_name`, `compiler_options`: by which libtpu knows it. `device_kinds`: by which JAX reports it.
    """

    name: str = "unknown"
    platform: Platform = Platform.any
    peak_tflops: dict[str, float] = field(default_factory=dict)
    hbm_gib: float | None = None
    usable_hbm_gib: float | None = None
    hbm_gbs: float | None = None
    clock_ghz: float | None = None
    devices: int = 1
    ici_axes: int | None = None
    ici_link_gbs: float | None = None
    hop_us: float | None = None
    wrap: Wrap = Wrap.none
    host_bounds: list[int] = field(default_factory=list)
    dcn_gbs_per_host: float | None = None
    usd_per_hour: float | None = None
    spot_usd_per_hour: float | None = None
    compiler_name: str | None = None
    compiler_options: dict[str, Any] = field(default_factory=dict)
    device_kinds: list[str] = field(default_factory=list)

    def peak_flops(self, compute: DType) -> float | None:
        """Return peak FLOP/s of one chip for this dtype, or None where none is published."""
        peak = self.peak_tflops.get(compute.value)
        return None if peak is None else peak * 1e12


@dataclass
class TargetConfig:
    """The hardware asked for: a chip and how many of them. `auto` takes what the machine has.

    `topology` is the physical torus (`4x4x2`), `hosts` the machines that hold the chips, `slices` the number of
    such slices joined by the data-centre network.
    """

    name: str = "auto"
    platform: Platform = Platform.any
    chip: ChipConfig | None = None
    chips: int | None = None
    topology: str | None = None
    hosts: int = 1
    slices: int = 1

    def describe(self) -> str:
        """Return the target with chips, topology and hosts, as every message prints it."""
        if self.chips is None or self.chip is None:
            return self.name
        shape = f" {self.topology}" if self.topology else ""
        return f"{self.name} ({self.chips} {self.chip.name} chips{shape}, {self.hosts} host{'s' * (self.hosts > 1)})"


@dataclass(frozen=True)
class Topology:
    """The physical torus of a target: chips along each axis, and whether the axis closes into a ring.

    `slices` such tori are joined by the data-centre network. `devices_per_chip` JAX devices share a chip's links.
    """

    shape: tuple[int, ...]
    wrap: tuple[bool, ...]
    host_bounds: tuple[int, ...]
    slices: int = 1
    devices_per_chip: int = 1

    @property
    def chips(self) -> int:
        """Chips of one slice."""
        return math.prod(self.shape)

    @property
    def devices(self) -> int:
        """JAX devices of all slices."""
        return self.chips * self.devices_per_chip * self.slices


@cache
def known_chips() -> dict[str, ChipConfig]:
    """Return every chip described in `conf/target/chip`, by name."""
    return {chip.name: chip for chip, _ in read_group("target/chip", ChipConfig)}


def known_targets() -> list[TargetConfig]:
    """Return every target described in `conf/target`, with its chip, by name."""
    found = []
    for target, bases in read_group("target", TargetConfig):
        for base in bases:
            if base.startswith("chip/"):
                target.chip = known_chips()[base.removeprefix("chip/").removesuffix("@chip")]
        found.append(target)
    return found


def chip_of(device_kind: str) -> ChipConfig | None:
    """Return the chip that JAX reports under this `device_kind`, or None when it is not described."""
    for chip in known_chips().values():
        if device_kind in chip.device_kinds:
            return chip
    return None
