"""Decides what is known of the hardware a run is meant for: chips, slices, and their published figures."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
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


_POD_SIDE = {Wrap.axes_of_16: 16, Wrap.axes_of_32: 32}
_BELOW_A_CUBE = ((1, 1, 1), (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))


@dataclass
class ChipConfig:
    """One accelerator chip. Figures are per chip; sources stand in `conf/target/chip/*.yaml`.

    `peak_tflops`: dense TFLOP/s by dtype; `hbm_gib`: memory in GiB, of which the compiler leaves `usable_hbm_gib` to a
    program; `hbm_gbs`: GB/s; `clock_ghz`: of the matrix units; `devices`: JAX devices in a chip.
    `ici_axes`: axes of the torus; `ici_link_gbs`: GB/s one way of one of the two links that a chip has on each of them;
    `hop_us`: latency of a hop in microseconds; `wrap`: when an axis closes into a ring; `host_bounds`: chips of a host,
    by axis; `dcn_gbs_per_host`: GB/s one way out of such a host over the data-centre network; a host of more
    chips has more in proportion.
    `max_chips`: the largest slice; `units_in_name`: what the N of a name like `v4-N` counts in a chip (v4: two cores).
    `usd_per_hour`: on demand; `spot_usd_per_hour`: interruptible, for the user to set.
    `compiler_name`, `compiler_options`: by which libtpu knows it. `xla_options`: what the compiler of a step is told.
    `device_kinds`: by which JAX reports it.
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
    max_chips: int | None = None
    units_in_name: int = 1
    usd_per_hour: float | None = None
    spot_usd_per_hour: float | None = None
    compiler_name: str | None = None
    compiler_options: dict[str, Any] = field(default_factory=dict)
    xla_options: dict[str, str] = field(default_factory=dict)
    device_kinds: list[str] = field(default_factory=list)

    def peak_flops(self, compute: DType) -> float | None:
        """Return peak FLOP/s of one chip for this dtype, or None where none is published."""
        peak = self.peak_tflops.get(compute.value)
        return None if peak is None else peak * 1e12


@dataclass
class TargetConfig:
    """The hardware asked for: a chip and how many of them. `auto` takes what the machine has.

    `topology` is the physical torus (`4x4x2`): it decides `chips`, and where that changes them, `hosts`, the machines
    that hold them. `slices` is the number of such slices joined by the data-centre network.
    """

    name: str = "auto"
    platform: Platform = Platform.any
    chip: ChipConfig | None = None
    chips: int | None = None
    topology: str | None = None
    hosts: int = 1
    slices: int = 1

    def __post_init__(self) -> None:
        shape = torus_shape(self.topology)
        if shape is None or self.chip is None or math.prod(shape) == self.chips:
            return
        self.chips = math.prod(shape)
        self.hosts = -(-self.chips // math.prod(_host_bounds(self.chip, shape)))

    @property
    def devices(self) -> int | None:
        """JAX devices of all slices, None where the machine decides."""
        return None if self.chips is None else self.chips * (self.chip.devices if self.chip else 1) * self.slices

    def describe(self) -> str:
        """Return the target with chips, topology and hosts, as every message prints it."""
        if self.chips is None or self.chip is None:
            return self.name
        named = re.fullmatch(r".*?-([0-9]+)", self.name)
        custom = named is not None and int(named[1]) != self.chips * self.chip.units_in_name
        title = f"{self.name} with topology {self.topology}" if custom and self.topology else self.name
        shape = f" {self.topology}" if self.topology and title == self.name else ""
        each = f" in each of {self.slices} slices" if self.slices > 1 else ""
        hosts = f"{self.hosts} host{'s' * (self.hosts > 1)}"
        return f"{title} ({self.chips} {self.chip.name} chip{'s' * (self.chips > 1)}{shape}, {hosts}{each})"

    def problems(self) -> list[str]:
        """Return why there is no such hardware, in the words of the command line."""
        if self.slices < 1:
            return [f"target.slices={self.slices}: at least 1 is needed."]
        if self.slices > 1 and self.chip is not None and self.chip.ici_axes and self.chip.dcn_gbs_per_host is None:
            return [
                f"target.slices={self.slices}: no bandwidth between slices of {self.chip.name} is published. Set "
                "target.chip.dcn_gbs_per_host, in GB/s one way out of a host, or use one slice."
            ]
        if self.topology is None:
            return []
        if self.chip is None or self.chip.ici_axes is None:
            return [f"target={self.name} has no torus, so target.topology={self.topology} means nothing. Leave it out."]
        shape, axes = torus_shape(self.topology), self.chip.ici_axes
        if shape is None or len(shape) != axes:
            return [
                f"target.topology={self.topology}: a {self.chip.name} slice is a torus of {axes} axes. Write the chips "
                f"along each, such as target.topology={'x'.join('4' * axes)}."
            ]
        reason = _illegal(self.chip, shape)
        return [f"target.topology={self.topology} is no slice of {self.chip.name}: {reason}"] if reason else []


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


def torus_shape(topology: str | None) -> tuple[int, ...] | None:
    """Return the chips along each axis that a topology like `8x8x12` names, or None when it names none."""
    if topology is None or not re.fullmatch(r"[1-9][0-9]*(x[1-9][0-9]*)*", topology):
        return None
    return tuple(int(n) for n in topology.split("x"))


def topology_of(target: TargetConfig) -> Topology:
    """Return the torus of a target; a target without one (CPU, GPU) is a single axis of chips that does not wrap.

    ValueError where the target leaves the chips to the machine, or asks for a torus that does not exist.
    """
    problems = target.problems()
    if problems:
        raise ValueError("\n".join(problems))
    if target.chips is None:
        raise ValueError(
            f"target={target.name} is whatever the machine has, so nothing is known of its links. Name the hardware, "
            "such as target=v4-64, or target=cpu8 for simulated devices."
        )
    chip, shape = target.chip, torus_shape(target.topology)
    devices = chip.devices if chip else 1
    if chip is None or shape is None:
        bounds = (-(-target.chips // target.hosts),)
        return Topology((target.chips,), (False,), bounds, target.slices, devices)
    bounds = shape if target.hosts == 1 else _host_bounds(chip, shape)
    return Topology(shape, _wraps(chip, shape), bounds, target.slices, devices)


def legal_neighbours(chip: ChipConfig, shape: tuple[int, ...]) -> list[str]:
    """Return the slices of a chip nearest to a shape: one of as many chips if there is, the next smaller and larger."""
    size = math.prod(shape)

    def distance(other: tuple[int, ...]) -> tuple[float, float]:
        sides = zip(sorted(other), sorted(shape), strict=True)
        return abs(math.log(math.prod(other) / size)), sum(abs(math.log(a / b)) for a, b in sides)

    legal = _legal_shapes(chip.wrap, chip.max_chips or 0)
    found = sorted((s for s in legal if sorted(s) != sorted(shape)), key=distance)
    equal = [s for s in found if math.prod(s) == size][:1]
    smaller = [s for s in found if math.prod(s) < size][:1]
    larger = [s for s in found if math.prod(s) > size][:1]
    return [_text(s) for s in equal + smaller + larger]


def neighbours_hint(chip: ChipConfig, shape: tuple[int, ...]) -> str:
    """Return the sentence that names the nearest slices that exist, with their chips."""
    found = legal_neighbours(chip, shape)
    named = [f"target.topology={n} ({math.prod(torus_shape(n) or ())} chips)" for n in found]
    return f"Nearest: {', '.join(named)}."


@cache
def known_chips() -> dict[str, ChipConfig]:
    """Return every chip described in `conf/target/chip`, by name."""
    return {chip.name: chip for chip, _ in read_group("target/chip", ChipConfig)}


@cache
def known_targets() -> tuple[TargetConfig, ...]:
    """Return every target described in `conf/target`, with its chip, by name."""
    found = []
    for target, bases in read_group("target", TargetConfig):
        for base in bases:
            if base.startswith("chip/"):
                target.chip = known_chips()[base.removeprefix("chip/").removesuffix("@chip")]
        found.append(target)
    return tuple(found)


def chip_of(device_kind: str) -> ChipConfig | None:
    """Return the chip that JAX reports under this `device_kind`, or None when it is not described."""
    for chip in known_chips().values():
        if device_kind in chip.device_kinds:
            return chip
    return None


def _host_bounds(chip: ChipConfig, shape: tuple[int, ...]) -> tuple[int, ...]:
    bounds = chip.host_bounds or [1] * len(shape)
    return tuple(min(bound, side) for bound, side in zip(bounds, shape, strict=False))


def _wraps(chip: ChipConfig, shape: tuple[int, ...]) -> tuple[bool, ...]:
    if chip.wrap is Wrap.cubes_of_4:
        return (all(side % 4 == 0 for side in shape),) * len(shape)
    full = _POD_SIDE.get(chip.wrap)
    return tuple(side == full for side in shape)


def _illegal(chip: ChipConfig, shape: tuple[int, ...]) -> str | None:
    """Return why Cloud TPU has no slice of this shape, with the nearest it has, or None when it has one."""
    chips = math.prod(shape)
    if sorted(shape) in [sorted(s) for s in _legal_shapes(chip.wrap, chip.max_chips or 0)]:
        hosts_fit = all(side % bound == 0 for side, bound in zip(shape, chip.host_bounds, strict=True))
        if hosts_fit or chips < math.prod(chip.host_bounds):
            return None
        turned = _text(sorted(shape, reverse=True))
        return f"hosts of {_text(chip.host_bounds)} chips do not fit into it. Write target.topology={turned}."
    if chip.max_chips is not None and chips > chip.max_chips:
        rule = f"the largest has {chip.max_chips} chips, this one would have {chips}."
    elif chip.wrap is Wrap.cubes_of_4:
        small = ", ".join(_text(s) for s in _BELOW_A_CUBE)
        rule = f"below a cube of 4x4x4 there are {small}; from there on every axis is a multiple of 4."
    else:
        rule = f"slices are n x n or n x 2n chips, n a power of 2, with sides up to {_POD_SIDE[chip.wrap]}."
    return f"{rule} {neighbours_hint(chip, shape)}"


def _text(shape: Iterable[int]) -> str:
    return "x".join(str(n) for n in shape)


@cache
def _legal_shapes(wrap: Wrap, largest: int) -> frozenset[tuple[int, ...]]:
    """Return every slice that Cloud TPU has of such a chip, as Cloud TPU writes it, up to `largest` chips.

    Source: cloud.google.com/tpu/docs/v4 (`4i x 4j x 4k`, and the shapes below a cube), /v5e and /v6e (2-D).
    """
    if wrap is Wrap.cubes_of_4:
        cubes = largest // 64
        triples = (
            (i, j, k) for i in range(1, cubes + 1) for j in range(i, cubes // i + 1) for k in range(j, cubes + 1)
        )
        return frozenset((4 * i, 4 * j, 4 * k) for i, j, k in triples if i * j * k <= cubes) | set(_BELOW_A_CUBE)
    sides = [2**i for i in range(_POD_SIDE.get(wrap, 0).bit_length())]
    return frozenset((a, b) for a in sides for b in sides if b in (a, 2 * a) and (a, b) != (1, 2))
