"""Hardware targets: a chip with its published figures, the number of chips, and the torus that joins them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from valkyrie.hardware.figures import GpuFigures, SplashBundles
from valkyrie.hardware.platforms import get_platform, platform_problems
from valkyrie.hardware.slices import (
    TWISTED_SUFFIX,
    Slices,
    SliceShape,
    WrapRule,
    format_shape,
    is_twisted_name,
    parse_shape,
)
from valkyrie.precision import DType
from valkyrie.problems import Problem, ProblemCode, check_range, nearest_divisor, raise_problems
from valkyrie.units import count_text

AUTO_TARGET = "auto"
"""Name of the default target: the devices of this machine."""


@dataclass
class ReplayConfig:
    """Correction of replayed step times on a chip, fitted to the user's own measurements by `mode=calibrate`.

    Args:
        factor: Factor on replayed times; null for the factor from published runs.
        low: Lowest ratio of measured to predicted step time in a leave-one-out check, where each prediction is
            corrected by a factor fitted to other models and batches only; null if too few were measured.
        high: Highest such ratio.
        rows: Number of measured steps.
        models: Number of distinct combinations of model and batch among the measured steps.
    """

    factor: float | None = None
    low: float | None = None
    high: float | None = None
    rows: int = 0
    models: int = 0


@dataclass
class ChipConfig:
    """One accelerator chip. Figures are per chip; `conf/target/chip/*.yaml` has their sources.

    Args:
        peak_tflops: Dense TFLOP/s by dtype.
        hbm_gib: Memory in GiB.
        usable_hbm_gib: Part of `hbm_gib` that the compiler leaves to a program.
        hbm_gbs: Memory bandwidth in GB/s.
        clock_ghz: Clock of the matrix units.
        compile_time_ratio: Time of a compile, relative to other chips of the platform.
        devices: JAX devices in a chip.
        ici_axes: Axes of the torus, or null without a torus.
        ici_link_gbs: One-way GB/s of a link. Each chip has two links on each torus axis.
        hop_us: Latency of a hop in microseconds.
        wrap: When an axis closes into a ring (`WrapRule`).
        twists: Slices also come as twisted tori.
        host_bounds: Chips of a host, by axis.
        single_host_chips: Largest slice on a single host, in chips, if it exceeds `host_bounds`.
        dcn_gbs_per_host: GB/s one way out of a host of `host_bounds` over the data-centre network; larger hosts have
            proportionally more.
        switch_gbs: GB/s one way from a chip to the others of its host, or of its NVLink domain, through a switch.
        max_chips: Chips of the largest slice.
        units_in_name: Units per chip that the N of a name like `v4-N` counts (2 for v4, where N counts cores).
        aliases: Other prefixes of such names (`v5litepod-N`).
        cores: TensorCores of one JAX device, which share the grid of a Pallas kernel.
        host_gbs: One-way GB/s between device and host memory over PCIe. The default is gen 4 x8, used up to v5p
            (scaling book).
        splash_bundles: Costs of the kernels `forward`, `dkv_dq`, `dkv` and `dq`; without any, those of v5p are used.
        gpu: Figures of an NVIDIA GPU that XLA needs to compile for it, or null.
        rented_as: Names in clouds: `tpu_vm_type` and `tpu_vm_runtime` (Google's TPU VMs), `gke`, `skypilot`.
        usd_per_hour: On-demand price. Shipped files have published prices, which users can override.
        usd_per_hour_source: Source of that price, with its region and date. Empty if unknown.
        spot_usd_per_hour: Price of interruptible chips. Shipped files leave it null.
        compiler_name: libtpu's name of the chip. `compiler_options` are further arguments of `get_topology_desc`.
        xla_options: Compiler options of a step; null removes an option.
        xla_options_until, xla_options_from: Last and first version of the compiler that gets a default option.
        device_kinds: Names that JAX reports as `device_kind`.
        estimate: Efficiencies that `mode=search` assumes (`valkyrie.search.estimate.efficiency`).
        replay: Correction of replayed times.
        calibrated: Chip that `estimate` and `replay` were fitted to by `mode=calibrate`.
    """

    name: str = "unknown"
    platform: str = "any"
    peak_tflops: dict[str, float] = field(default_factory=dict)
    hbm_gib: float | None = None
    usable_hbm_gib: float | None = None
    hbm_gbs: float | None = None
    clock_ghz: float | None = None
    compile_time_ratio: float = 1.0
    devices: int = 1
    ici_axes: int | None = None
    ici_link_gbs: float | None = None
    hop_us: float | None = None
    wrap: str = "none"
    twists: bool = False
    host_bounds: list[int] = field(default_factory=list)
    single_host_chips: int | None = None
    dcn_gbs_per_host: float | None = None
    switch_gbs: float | None = None
    max_chips: int | None = None
    units_in_name: int = 1
    aliases: list[str] = field(default_factory=list)
    cores: int = 1
    host_gbs: float = 16.0
    splash_bundles: dict[str, SplashBundles] = field(default_factory=dict)
    gpu: GpuFigures | None = None
    rented_as: dict[str, str] = field(default_factory=dict)
    usd_per_hour: float | None = None
    usd_per_hour_source: str = ""
    spot_usd_per_hour: float | None = None
    compiler_name: str | None = None
    compiler_options: dict[str, str] = field(default_factory=dict)
    xla_options: dict[str, Any] = field(default_factory=dict)
    xla_options_until: dict[str, str] = field(default_factory=dict)
    xla_options_from: dict[str, str] = field(default_factory=dict)
    device_kinds: list[str] = field(default_factory=list)
    estimate: dict[str, float] = field(default_factory=dict)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    calibrated: str | None = None

    def peak_flops(self, compute_dtype: DType) -> float | None:
        """Return peak FLOP/s of one chip for a dtype, or None if unpublished."""
        peak = self.peak_tflops.get(compute_dtype.value)
        return None if peak is None else peak * 1e12

    @property
    def slices(self) -> Slices:
        """The slices that exist for the chip. Raises ProblemError if one of its settings is illegal (`problems`)."""
        raise_problems(self.problems())
        wrap, bounds = WrapRule.parse(self.wrap), tuple(self.host_bounds)
        return Slices(self.ici_axes, wrap, self.max_chips, bounds, self.single_host_chips, self.twists)

    def problems(self) -> list[Problem]:
        """Return a problem for each setting that is illegal or contradicts another."""
        if invalid := platform_problems("target.chip.platform", self.platform):
            return invalid
        problems = [] if self.gpu is None else self.gpu.problems()
        for name in ("devices", "ici_axes", "max_chips", "cores", "units_in_name", "single_host_chips"):
            problems += check_range(f"target.chip.{name}", getattr(self, name), least=1)
        if self.host_bounds and (len(self.host_bounds) != (self.ici_axes or 1) or min(self.host_bounds) < 1):
            needed = "one number" if self.ici_axes is None else f"{self.ici_axes} numbers"
            text = (
                f"target.chip.host_bounds={self.host_bounds} must have {needed} of at least 1, the chips of a host "
                f"along each axis, because target.chip.ici_axes={'null' if self.ici_axes is None else self.ici_axes}."
            )
            problems.append(Problem(ProblemCode.conflict, "target.chip.host_bounds", self.host_bounds, text))
        positive = ("hbm_gib", "usable_hbm_gib", "hbm_gbs", "clock_ghz", "ici_link_gbs", "dcn_gbs_per_host")
        positive += ("compile_time_ratio",)
        positive += ("switch_gbs", "host_gbs")
        figures = {name: getattr(self, name) for name in positive}
        figures |= {f"replay.{name}": getattr(self.replay, name) for name in ("factor", "low", "high")}
        figures |= {f"peak_tflops.{dtype}": peak for dtype, peak in self.peak_tflops.items()}
        for name, figure in figures.items():
            problems += check_range(f"target.chip.{name}", figure, above=0)
        for name in ("hop_us", "usd_per_hour", "spot_usd_per_hour"):
            problems += check_range(f"target.chip.{name}", getattr(self, name), least=0)
        for name in ("rows", "models"):
            problems += check_range(f"target.chip.replay.{name}", getattr(self.replay, name), least=0)
        if self.calibrated not in (None, self.name):
            text = (
                f"target.chip.calibrated={self.calibrated}: target.chip.estimate and target.chip.replay were fitted to "
                f"{self.calibrated}, but the chip is {self.name}. Use a slice of {self.calibrated}, or leave out the "
                "+experiment= that sets them."
            )
            problems.append(Problem(ProblemCode.conflict, "target.chip.calibrated", self.calibrated, text))
        for name, value in self.xla_options.items():
            if not isinstance(value, str | int | float | None):
                key = f"target.chip.xla_options.{name}"
                text = f"{key}={value}: write a word, a number, true, false or null."
                problems.append(Problem(ProblemCode.malformed, key, value, text))
        try:
            axes = WrapRule.parse(self.wrap).axis_count
        except ValueError as error:
            return [*problems, Problem(ProblemCode.unknown_name, "target.chip.wrap", self.wrap, str(error))]
        if axes not in (None, self.ici_axes):
            text = (
                f"target.chip.wrap={self.wrap} is for a torus of {axes} axes, but target.chip.ici_axes={self.ici_axes}"
                f". Use target.chip.ici_axes={axes}, or target.chip.wrap=none."
            )
            problems.append(Problem(ProblemCode.conflict, "target.chip.wrap", self.wrap, text))
        return problems


@dataclass
class TargetConfig:
    """The requested hardware. `auto` uses the devices of this machine.

    Args:
        chips: Chips of one slice, or null if unknown (`auto`).
        topology: Physical torus (`4x4x2`), which sets `chips` and, if `hosts` is 1, `hosts`.
        hosts: Hosts of a slice.
        slices: Slices joined by the data-centre network.
        routing_imbalance: Tokens that predictions route to the busiest expert-parallel device, divided by the mean.
    """

    name: str = AUTO_TARGET
    platform: str = "any"
    chip: ChipConfig | None = None
    chips: int | None = None
    topology: str | None = None
    hosts: int = 1
    slices: int = 1
    routing_imbalance: float = 1.0

    def __post_init__(self) -> None:
        shape, chip = parse_shape(self.topology), self.chip
        if shape is None or chip is None:
            return
        is_resized = math.prod(shape) != self.chips
        if is_resized and self.chips is not None and self._chips_in_name() not in (None, self.chips):
            return  # contradicts both name and topology: reported by `problems`
        self.chips = math.prod(shape)
        if (is_resized or self.hosts == 1) and len(shape) == chip.ici_axes and not chip.problems():
            self.hosts = chip.slices.host_count(shape)

    @property
    def devices(self) -> int | None:
        """Number of JAX devices in all slices, or None if `chips` is not set."""
        return None if self.chips is None else self.chips * (self.chip.devices if self.chip else 1) * self.slices

    @property
    def domain_hosts(self) -> int:
        """Hosts whose chips one switch joins. Domains are equal, so that this divides `hosts` (32 hosts: two of 16)."""
        return 1 if self.chip is None or self.chip.gpu is None else self.chip.gpu.hosts_per_domain(self.hosts)

    def describe(self) -> str:
        """Return the name, with chips, topology and hosts if known: `v4-64 (32 v4 chips 2x4x4, 8 hosts)`."""
        if self.chips is None or self.chip is None:
            return self.name
        shape = f" {self.topology}" if self.topology not in (None, "", self._size_in_name()) else ""
        per_slice = f" in each of {self.slices} slices" if self.slices > 1 else ""
        hosts = f"{self.hosts} host{'s' * (self.hosts > 1)}"
        if self.chip.gpu is not None and self.chip.gpu.domain_hosts > 1:
            hosts += f" in {count_text(self.hosts // self.domain_hosts, 'NVLink domain')}"
        return f"{self.name} ({self.chips} {self.chip.name} chip{'s' * (self.chips > 1)}{shape}, {hosts}{per_slice})"

    def record(self) -> TargetRecord:
        """Return the target as stored in run folders. The chip is reduced to its name."""
        return TargetRecord(
            name=self.name,
            chip=self.chip.name if self.chip else None,
            chips=self.chips,
            topology=(self.topology or "").removesuffix(TWISTED_SUFFIX) or None,
            twisted=is_twisted_name(self.topology),
            hosts=self.hosts,
            slices=self.slices,
            described=self.describe(),
        )

    def problems(self) -> list[Problem]:
        """Return the first problem of the target, or all problems of its chip. Empty if the hardware exists."""
        chip, override = self.chip, f"target.topology={self.topology}"
        if invalid := platform_problems("target.platform", self.platform):
            return invalid
        for key in ("chips", "hosts", "slices", "routing_imbalance"):
            if invalid := check_range(f"target.{key}", getattr(self, key), least=1):
                return invalid
        if chip is not None and (invalid := chip.problems()):
            return invalid
        if contradiction := self._contradiction():
            return [Problem(ProblemCode.conflict, "target.chips", self.chips, contradiction)]
        if chip is None:
            return [] if self.topology is None else [self._no_torus_problem()]
        if self.slices > 1 and chip.gpu is not None:
            text = f"only TPUs have slices. Use target={chip.name}-{self.slices * (self.chips or 1)}."
            return [Problem(ProblemCode.conflict, "target.slices", self.slices, f"target.slices={self.slices}: {text}")]
        if self.slices > 1 and chip.ici_axes and chip.dcn_gbs_per_host is None:
            text = (
                f"target.slices={self.slices}: the bandwidth between slices of {chip.name} is unknown. Set "
                "target.chip.dcn_gbs_per_host (outgoing GB/s per host), or use target.slices=1."
            )
            return [Problem(ProblemCode.missing, "target.chip.dcn_gbs_per_host", text=text)]
        if self.topology is None and self.chips is not None and self.chips % self.hosts:
            nearest = nearest_divisor(self.chips, self.hosts)
            text = f"target.hosts={self.hosts} does not divide the {self.chips} chips. Use target.hosts={nearest}."
            return [Problem(ProblemCode.conflict, "target.hosts", self.hosts, text)]
        if self.topology is None:
            return chip.gpu.domain_problems(self.name, self.chips, self.hosts) if chip.gpu and self.chips else []
        if chip.ici_axes is None:
            return [self._no_torus_problem()]
        if "x" in self._size_in_name() and self._size_in_name() != self.topology:
            text = (
                f"target={self.name} and {override} name different topologies. Use "
                f"target={chip.name}-{self.topology}, or leave out target.topology."
            )
            return [Problem(ProblemCode.conflict, "target.topology", self.topology, text)]
        error = chip.slices.topology_error(self.topology, chip.name, topology_override, "target.topology=")
        shape, named_count = parse_shape(self.topology), self._chips_in_name()
        if error is None and shape is not None and named_count not in (None, math.prod(shape)):
            counts = f" has {self.chips} chips, but target={self.name} has {named_count}"
            error = f"{counts}. Use target={make_slice(chip, shape).name}, or leave out target.topology."
        if error is None and shape is not None and self.hosts != (hosts := chip.slices.host_count(shape)):
            error = f" has {hosts} host{'s' * (hosts > 1)}, not target.hosts={self.hosts}. Leave out target.hosts."
        return [Problem(ProblemCode.topology, "target.topology", self.topology, override + error)] if error else []

    def resized(self, devices: int) -> TargetConfig | None:
        """Return the default slice of the same chip with this number of devices, or None if there is none.

        For the CPU, returns a target with this number of simulated devices.
        """
        if self.chip is None:
            return simulated_target(devices) if get_platform(self.platform).runs_on_host else None
        chips, remainder = divmod(devices, self.chip.devices)
        shape = None if remainder else self.chip.slices.default_shape(chips)
        return None if shape is None else make_slice(self.chip, shape)

    def nearest_slices(self, devices: int) -> list[TargetConfig]:
        """Return the largest slice of the same chip with fewer devices, and the smallest with more, if they exist.

        Returns an empty list if the target has no chip.
        """
        if self.chip is None:
            return []
        shapes = self.chip.slices.nearest_shapes(Fraction(devices, self.chip.devices))
        return [make_slice(self.chip, shape) for shape in shapes]

    def _size_in_name(self) -> str:
        """Return the `64` of `v4-64` or the `4x4x2` of `v4-4x4x2`; empty for other names."""
        prefix, _, size = self.name.rpartition("-")
        return size if self.chip is not None and prefix == self.chip.name else ""

    def _chips_in_name(self) -> int | None:
        """Return the number of chips in the name: 32 for `v4-64` and `v4-2x4x4`, 8 for `cpu8`, None for other names."""
        if self.chip is None:
            size = self.name.removeprefix("cpu")
            return int(size) if get_platform(self.platform).runs_on_host and size.isdecimal() else None
        if (size := self._size_in_name()).isdecimal():
            return int(size) // max(self.chip.units_in_name, 1)
        shape = parse_shape(size)
        return None if shape is None else math.prod(shape)

    def _contradiction(self) -> str | None:
        """Return an error message if `chips` contradicts the name and the topology (if set), or None."""
        named_count, shape = self._chips_in_name(), parse_shape(self.topology)
        if self.chips is None or named_count in (None, self.chips) or (shape and math.prod(shape) == self.chips):
            return None
        noun = "chips" if self.chip else "devices"
        resized = self.resized(self.chips * (self.chip.devices if self.chip else 1))
        advice = f"Use target={resized.name}, or leave" if resized else "Leave"
        return f"target={self.name} has {named_count} {noun}, but target.chips={self.chips}. {advice} out target.chips."

    def _no_torus_problem(self) -> Problem:
        text = f"target={self.name} has no torus. Leave out target.topology={self.topology}."
        return Problem(ProblemCode.topology, "target.topology", self.topology, text)


@dataclass(frozen=True)
class TargetRecord:
    """The hardware of a run, as stored in run folders and `trials.jsonl`.

    Args:
        chips: Chips of one slice, or None if the run used the devices that it found.
        topology: The torus without its twist (`4x4x8`), or None for hardware without one.
        hosts: Hosts of one slice.
        described: Text of `TargetConfig.describe`, for display only.
    """

    name: str
    chip: str | None = None
    chips: int | None = None
    topology: str | None = None
    twisted: bool = False
    hosts: int = 1
    slices: int = 1
    described: str = ""

    @property
    def shape(self) -> str | None:
        """The topology in the form of `target.topology`, such as `4x4x8_twisted`, or None without a torus."""
        return None if self.topology is None else self.topology + TWISTED_SUFFIX * self.twisted

    def to_config(self, chips: Mapping[str, ChipConfig]) -> TargetConfig | None:
        """Return the target with its chip from `chips`, or None if the chip is unknown or has no torus."""
        chip = chips.get(self.chip or "")
        if chip is None or self.shape is None:
            return None
        return TargetConfig(self.name, chip.platform, chip, self.chips, self.shape, self.hosts, self.slices)


@dataclass(frozen=True)
class Topology:
    """The physical torus of a target.

    Args:
        shape: Chips along each axis.
        wrap: Whether each axis closes into a ring.
        host_bounds: Chips of a host along each axis.
        slices: Tori joined by the data-centre network.
        devices_per_chip: JAX devices that share a chip's links.
        twisted: Rings along the shortest axes close with a shift by half of the longer axes.
        domain_hosts: Hosts whose chips one switch joins, on platforms without a torus.
    """

    shape: tuple[int, ...]
    wrap: tuple[bool, ...]
    host_bounds: tuple[int, ...]
    slices: int = 1
    devices_per_chip: int = 1
    twisted: bool = False
    domain_hosts: int = 1

    @property
    def domain_chips(self) -> int:
        """Chips that one switch joins, on platforms without a torus."""
        return math.prod(self.host_bounds) * self.domain_hosts

    @property
    def wrap_shifts(self) -> tuple[tuple[int, ...], ...]:
        """For each axis, the shift of all coordinates, in chips, that a step past the end of that axis causes.

        Twisted tori of n x n x 2n and n x 2n x 2n chips: Camara et al., "Twisted torus topologies for enhanced
        interconnection networks" (2010), as in the TPU v4 paper (arXiv 2304.01433, section 2.8).
        """
        shortest = min(self.shape)
        long_shift = tuple(shortest if self.twisted and length > shortest else 0 for length in self.shape)
        no_shift = (0,) * len(self.shape)
        return tuple(long_shift if length == shortest else no_shift for length in self.shape)

    def closes_ring(self, axis: int, axis_spans: Mapping[int, tuple[int, int]]) -> bool:
        """Return whether the twist lets a mesh axis form a ring along torus axis `axis`.

        Always True if a step past the end of `axis` shifts no other axis; the caller checks that `axis` wraps and that
        the mesh axis spans it. On a twisted torus, that step also shifts the coordinates on the longer axes. The ring
        closes only if the mesh axis spans those axes too, with strides that divide the shift.

        Args:
            axis: Index of the torus axis.
            axis_spans: Maps the index of each torus axis that the mesh axis uses to (number of positions, stride).
        """
        shifts = enumerate(self.wrap_shifts[axis])
        return all(
            not shift
            or (math.prod(axis_spans.get(other, (1, 1))) == self.shape[other] and shift % axis_spans[other][1] == 0)
            for other, shift in shifts
        )

    @property
    def chips(self) -> int:
        """Chips of one slice."""
        return math.prod(self.shape)

    @property
    def devices(self) -> int:
        """JAX devices of all slices."""
        return self.chips * self.devices_per_chip * self.slices


def build_topology(target: TargetConfig) -> Topology:
    """Return the torus of a target. Targets without one (CPU, GPU) are a single axis of chips that does not wrap.

    Raises ValueError if the target does not name a number of chips (`auto`), or if its torus does not exist.
    """
    raise_problems(target.problems())
    if target.chips is None:
        raise ValueError(
            f"target={target.name} does not name its hardware, so its links are unknown. Use a target such as "
            "target=v4-64, or target=cpu8 for simulated devices."
        )
    chip, shape = target.chip, parse_shape(target.topology)
    devices = chip.devices if chip else 1
    if chip is None or shape is None:
        bounds = (-(-target.chips // target.hosts),)
        return Topology((target.chips,), (False,), bounds, target.slices, devices, domain_hosts=target.domain_hosts)
    bounds, twisted = chip.slices.host_shape(shape), is_twisted_name(target.topology)
    return Topology(shape, chip.slices.closed_axes(shape), bounds, target.slices, devices, twisted)


def make_slice(chip: ChipConfig, shape: SliceShape, *, twisted: bool = False) -> TargetConfig:
    """Return a chip's slice of this shape under its shortest name: `v4-64`, `v4-4x4x2`, `v4-4x4x8_twisted`."""
    chips = math.prod(shape)
    text = format_shape(shape) + (TWISTED_SUFFIX if twisted else "")
    size = chips * chip.units_in_name if chip.slices.default_shape(chips) == shape and not twisted else text
    topology = None if chip.ici_axes is None else text
    return TargetConfig(f"{chip.name}-{size}", chip.platform, chip, chips, topology, chip.slices.host_count(shape))


def simulated_target(devices: int) -> TargetConfig:
    """Return the target `cpuN` of N simulated CPU devices."""
    return TargetConfig(f"cpu{devices}", "cpu", chips=devices)


def topology_override(shape: SliceShape) -> str:
    """Return the override that requests a shape: `target.topology=4x4x2`."""
    return f"target.topology={format_shape(shape)}"


def usable_hbm(chip: ChipConfig | None) -> int | None:
    """Return the bytes of one device's memory that a program may use, or None if unknown."""
    return None if chip is None else get_platform(chip.platform).usable_memory(chip)
