"""The hardware a run is meant for: a chip with its published figures, how many of them, and the torus they lie on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from valkyrie.hardware.platforms import platform_of, platform_problems
from valkyrie.hardware.slices import TWISTED, Slices, SliceShape, Wrap, parse_shape, says_twisted, shape_text
from valkyrie.precision import DType
from valkyrie.problems import Problem, ProblemCode, check_range, refuse


@dataclass
class ReplayConfig:
    """What measured steps of one's own took of their replays on a chip, as `mode=calibrate` finds it.

    `factor`: what a replay is multiplied by; null: what published runs took. `low` and `high`: the least and the
    largest ratio of measured to predicted seconds, each predicted by other models and batches; null where too few
    were. `rows` and `models`: how many steps, and of how many models and batches.
    """

    factor: float | None = None
    low: float | None = None
    high: float | None = None
    rows: int = 0
    models: int = 0


@dataclass
class SplashBundles:
    """VLIW bundles of a splash attention kernel on one core, bfloat16, causal.

    Each for a block of 512x512 at head size 128, of 1024x1024 at 128, and of 512x512 at 256. Compiled alone by libtpu,
    with a batch and residuals, and read off its dumps (`LIBTPU_INIT_ARGS=--xla_jf_dump_to=DIR
    --xla_jf_dump_llo_text=true`): in `*-final_bundles.txt` the loop over the grid begins at `LB:`, and in it the last
    three branches ahead (`sbr.rel`) pass over the beginning of a row, the block and the end of a row; the bundles
    between a branch and its region are theirs, and a step has the rest of the loop. A bundle is a cycle at best. Longer
    grids, grouped heads and a kernel without a batch move a step by up to 80 bundles; segment ids and local masks add
    up to 8% to a block.

    Attributes:
        step: every step of the grid takes these, also one at a block that the mask skips: fetching, index arithmetic,
            and in the fused backward pass clearing dq.
        block: a block that the mask does not skip.
        ends: beginning and ending a row of blocks (dkv: a column): clearing the sums, then normalising and writing.
    """

    step: list[int] = field(default_factory=list)
    block: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)


@dataclass
class ChipConfig:
    """One accelerator chip. Figures are per chip; sources stand in `conf/target/chip/*.yaml`.

    `peak_tflops`: dense TFLOP/s by dtype; `hbm_gib`: memory in GiB, of which the compiler leaves `usable_hbm_gib` to a
    program; `hbm_gbs`: GB/s; `clock_ghz`: of the matrix units; `devices`: JAX devices in a chip.
    `ici_axes`: axes of the torus; `ici_link_gbs`: GB/s one way of one of the two links that a chip has on each of them;
    `hop_us`: latency of a hop in microseconds; `wrap`: when an axis closes into a ring; `twists`: whether slices come
    as twisted tori as well; `host_bounds`: chips of a host, by axis; `dcn_gbs_per_host`: GB/s one way out of such a
    host over the data-centre network; a host of more chips has more in proportion. `switch_gbs`: GB/s one way of a
    chip to the others of its host, where a switch joins them (NVLink).
    `single_host_chips`: of a host that is the only one, where it may have more. `max_chips`: the largest slice;
    `units_in_name`: what the N of a name like `v4-N` counts in a chip (v4: two cores); `aliases`: what else stands
    before the N (`v5litepod-N`).
    `usd_per_hour`: on demand; `spot_usd_per_hour`: interruptible, for the user to set.
    `compiler_name`, `compiler_options`: by which libtpu knows it. `xla_options`: options that a step is compiled with,
    whether to train or to predict; null takes one away. `xla_options_until`: the last libtpu that takes one of them.
    `cores`: TensorCores behind one JAX device, between which the grid of a Pallas kernel is split. `host_gbs`: GB/s one
    way between its memory and its host's, over PCIe; by default gen 4 x8, as up to v5p (scaling book).
    `splash_bundles`: of the kernels `forward`, `dkv_dq`, `dkv` and `dq`; a chip without any is taken for a v5p.
    `rented_as`: its names at clouds, `tpu_vm_type` and `tpu_vm_runtime` at Google's TPU VMs, `gke`, `skypilot`.
    `device_kinds`: by which JAX reports it. `estimate`: what it reaches of these figures, as `mode=search` estimates a
    step (`valkyrie.search.estimate.efficiency`). `replay`: what measured steps took of their replays, where that is
    known from runs of one's own. `calibrated`: the name of the chip that both were fitted to, as `mode=calibrate`
    writes it.
    """

    name: str = "unknown"
    platform: str = "any"
    peak_tflops: dict[str, float] = field(default_factory=dict)
    hbm_gib: float | None = None
    usable_hbm_gib: float | None = None
    hbm_gbs: float | None = None
    clock_ghz: float | None = None
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
    rented_as: dict[str, str] = field(default_factory=dict)
    usd_per_hour: float | None = None
    spot_usd_per_hour: float | None = None
    compiler_name: str | None = None
    compiler_options: dict[str, Any] = field(default_factory=dict)
    xla_options: dict[str, Any] = field(default_factory=dict)
    xla_options_until: dict[str, str] = field(default_factory=dict)
    device_kinds: list[str] = field(default_factory=list)
    estimate: dict[str, float] = field(default_factory=dict)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    calibrated: str | None = None

    def peak_flops(self, compute: DType) -> float | None:
        """Return peak FLOP/s of one chip for this dtype, or None where none is published."""
        peak = self.peak_tflops.get(compute.value)
        return None if peak is None else peak * 1e12

    @property
    def slices(self) -> Slices:
        """The slices it comes in; ValueError where its figures contradict each other."""
        refuse(self.problems())
        bounds = tuple(self.host_bounds)
        return Slices(self.ici_axes, Wrap.parse(self.wrap), self.max_chips, bounds, self.single_host_chips, self.twists)

    def problems(self) -> list[Problem]:
        """Return every reason why there is no such chip."""
        if wrong := platform_problems("target.chip.platform", self.platform):
            return wrong
        problems = []
        for name in ("devices", "ici_axes", "max_chips", "cores", "units_in_name", "single_host_chips"):
            problems += check_range(f"target.chip.{name}", getattr(self, name), least=1)
        if self.host_bounds and (len(self.host_bounds) != (self.ici_axes or 1) or min(self.host_bounds) < 1):
            text = (
                f"target.chip.host_bounds={self.host_bounds}: write the chips of a host along each axis of the torus, "
                f"which target.chip.ici_axes={self.ici_axes} of this chip has, each at least 1."
            )
            problems.append(Problem(ProblemCode.conflict, "target.chip.host_bounds", self.host_bounds, text))
        above_0 = ("hbm_gib", "usable_hbm_gib", "hbm_gbs", "clock_ghz", "ici_link_gbs", "dcn_gbs_per_host")
        above_0 += ("switch_gbs", "host_gbs")
        figures = {name: getattr(self, name) for name in above_0}
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
                f"target.chip.calibrated={self.calibrated}: what was fitted to {self.calibrated} says nothing of "
                f"{self.name}. Use a slice of {self.calibrated}, or leave the experiment out that sets it."
            )
            problems.append(Problem(ProblemCode.conflict, "target.chip.calibrated", self.calibrated, text))
        for name, value in self.xla_options.items():
            if not isinstance(value, str | int | float | None):
                key = f"target.chip.xla_options.{name}"
                text = f"{key}={value}: write a word, a number, true, false or null."
                problems.append(Problem(ProblemCode.malformed, key, value, text))
        try:
            axes = Wrap.parse(self.wrap).axes
        except ValueError as error:
            return [*problems, Problem(ProblemCode.unknown_name, "target.chip.wrap", self.wrap, str(error))]
        if axes not in (None, self.ici_axes):
            text = (
                f"target.chip.wrap={self.wrap} is for a torus of {axes} axes, target.chip.ici_axes="
                f"{self.ici_axes} for another. Use target.chip.ici_axes={axes}, or target.chip.wrap=none."
            )
            problems.append(Problem(ProblemCode.conflict, "target.chip.wrap", self.wrap, text))
        return problems


@dataclass
class TargetConfig:
    """The hardware asked for: a chip and how many of them. `auto` takes what the machine has.

    `topology` is the physical torus (`4x4x2`): it decides `chips`, and where that changes them, `hosts`, the machines
    that hold them. `slices` is the number of such slices joined by the data-centre network.
    """

    name: str = "auto"
    platform: str = "any"
    chip: ChipConfig | None = None
    chips: int | None = None
    topology: str | None = None
    hosts: int = 1
    slices: int = 1

    def __post_init__(self) -> None:
        shape, chip = parse_shape(self.topology), self.chip
        if shape is None or chip is None or math.prod(shape) == self.chips:
            return
        if self.chips is not None and self._chips_in_name() not in (None, self.chips):
            return  # neither its name nor its topology has as many: `problems` says so
        self.chips = math.prod(shape)
        if len(shape) == chip.ici_axes and not chip.problems():
            self.hosts = chip.slices.hosts(shape)

    @property
    def devices(self) -> int | None:
        """JAX devices of all slices, None where the machine decides."""
        return None if self.chips is None else self.chips * (self.chip.devices if self.chip else 1) * self.slices

    def describe(self) -> str:
        """Return the target with chips, topology and hosts, as every message prints it."""
        if self.chips is None or self.chip is None:
            return self.name
        size = self._size_in_name()
        custom = size.isdigit() and int(size) != self.chips * self.chip.units_in_name
        title = f"{self.name} with topology {self.topology}" if custom and self.topology else self.name
        shape = f" {self.topology}" if self.topology and title == self.name and size != self.topology else ""
        each = f" in each of {self.slices} slices" if self.slices > 1 else ""
        hosts = f"{self.hosts} host{'s' * (self.hosts > 1)}"
        return f"{title} ({self.chips} {self.chip.name} chip{'s' * (self.chips > 1)}{shape}, {hosts}{each})"

    def record(self) -> TargetRecord:
        """Return what run folders keep of it."""
        return TargetRecord(
            name=self.name,
            chip=self.chip.name if self.chip else None,
            chips=self.chips,
            topology=(self.topology or "").removesuffix(TWISTED) or None,
            twisted=says_twisted(self.topology),
            hosts=self.hosts,
            slices=self.slices,
            described=self.describe(),
        )

    def problems(self) -> list[Problem]:
        """Return the first reason why there is no such hardware, or all of a chip's."""
        chip, override = self.chip, f"target.topology={self.topology}"
        if wrong := platform_problems("target.platform", self.platform):
            return wrong
        for key in ("chips", "hosts", "slices"):
            if wrong := check_range(f"target.{key}", getattr(self, key), least=1):
                return wrong
        if chip is not None and (wrong := chip.problems()):
            return wrong
        if contradiction := self._contradiction():
            return [Problem(ProblemCode.conflict, "target.chips", self.chips, contradiction)]
        if chip is None:
            return [] if self.topology is None else [self._no_torus()]
        if self.slices > 1 and chip.ici_axes and chip.dcn_gbs_per_host is None:
            text = (
                f"target.slices={self.slices}: no bandwidth between slices of {chip.name} is published. Set "
                "target.chip.dcn_gbs_per_host, in GB/s one way out of a host, or use one slice."
            )
            return [Problem(ProblemCode.missing, "target.chip.dcn_gbs_per_host", text=text)]
        if self.topology is None:
            return []
        if chip.ici_axes is None:
            return [self._no_torus()]
        if "x" in self._size_in_name() and self._size_in_name() != self.topology:
            text = (
                f"target={self.name} names a topology, and {override} another one. Use "
                f"target={chip.name}-{self.topology}, or leave target.topology out."
            )
            return [Problem(ProblemCode.conflict, "target.topology", self.topology, text)]
        refusal, shape = (
            chip.slices.refusal(self.topology, chip.name, topology_text, "target.topology="),
            parse_shape(self.topology),
        )
        if refusal is None and shape is not None and self.hosts not in (1, hosts := chip.slices.hosts(shape)):
            refusal = f" has {hosts} host{'s' * (hosts > 1)}, not target.hosts={self.hosts}. Leave target.hosts out."
        return (
            []
            if refusal is None
            else [Problem(ProblemCode.topology, "target.topology", self.topology, override + refusal)]
        )

    def resized(self, devices: int) -> TargetConfig | None:
        """Return one slice of so many devices of the same kind; None where there is none."""
        if self.chip is None:
            return simulated(devices) if platform_of(self.platform).runs_on_host else None
        chips, rest = divmod(devices, self.chip.devices)
        shape = None if rest else self.chip.slices.default(chips)
        return None if shape is None else slice_of(self.chip, shape)

    def nearest(self, devices: int) -> list[TargetConfig]:
        """Return the slices of the same chip with the next fewer and the next more devices."""
        if self.chip is None:
            return []
        return [slice_of(self.chip, shape) for shape in self.chip.slices.nearest(Fraction(devices, self.chip.devices))]

    def _size_in_name(self) -> str:
        """Return the `64` of `v4-64` and the `4x4x2` of `v4-4x4x2`, nothing where the name is not of that kind."""
        word, _, size = self.name.rpartition("-")
        return size if self.chip is not None and word == self.chip.name else ""

    def _chips_in_name(self) -> int | None:
        """Return how many chips its name says, None where it says none: 32 of `v4-64` and `v4-2x4x4`, 8 of `cpu8`."""
        if self.chip is None:
            size = self.name.removeprefix("cpu")
            return int(size) if platform_of(self.platform).runs_on_host and size.isdecimal() else None
        size = self._size_in_name()
        if size.isdecimal():
            return int(size) // max(self.chip.units_in_name, 1)
        shape = parse_shape(size)
        return None if shape is None else math.prod(shape)

    def _contradiction(self) -> str | None:
        """Return why it cannot have so many chips under its name and with its topology; None where it can."""
        named, shape = self._chips_in_name(), parse_shape(self.topology)
        if self.chips is None or named in (None, self.chips) or (shape and math.prod(shape) == self.chips):
            return None
        noun = "chips" if self.chip else "devices"
        resized = self.resized(self.chips * (self.chip.devices if self.chip else 1))
        other = f"Use target={resized.name}, or leave" if resized else "Leave"
        return f"target={self.name} is {named} {noun}, and target.chips={self.chips} another number. {other} it out."

    def _no_torus(self) -> Problem:
        text = f"target={self.name} has no torus, so target.topology={self.topology} means nothing. Leave it out."
        return Problem(ProblemCode.topology, "target.topology", self.topology, text)


@dataclass(frozen=True)
class TargetRecord:
    """The hardware a run was made for, as its folder and `trials.jsonl` keep it. `chips` and `hosts` are of one slice.

    `topology` is the torus without its twist (`4x4x8`), None for hardware without one. `chips` is None where the
    machine decided. `described` is for display only.
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
        """The topology as `target.topology` takes it: `4x4x8_twisted`."""
        return None if self.topology is None else self.topology + TWISTED * self.twisted

    def config(self, chips: Mapping[str, ChipConfig]) -> TargetConfig | None:
        """Return the target, with its chip among `chips`; None if the chip is unknown or has no torus."""
        chip = chips.get(self.chip or "")
        if chip is None or self.shape is None:
            return None
        return TargetConfig(self.name, chip.platform, chip, self.chips, self.shape, self.hosts, self.slices)


@dataclass(frozen=True)
class Topology:
    """The physical torus of a target: chips along each axis, and whether the axis closes into a ring.

    `slices` such tori are joined by the data-centre network. `devices_per_chip` JAX devices share a chip's links.
    `twisted`: the rings of the shortest axes come back shifted by half of the longer ones.
    """

    shape: tuple[int, ...]
    wrap: tuple[bool, ...]
    host_bounds: tuple[int, ...]
    slices: int = 1
    devices_per_chip: int = 1
    twisted: bool = False

    @property
    def shifts(self) -> tuple[tuple[int, ...], ...]:
        """For each axis, by how many chips along every axis a step over its end is shifted.

        Twisted tori of n x n x 2n and n x 2n x 2n chips: Camara et al., "Twisted torus topologies for enhanced
        interconnection networks" (2010), as the TPU v4 paper has them (arXiv 2304.01433, section 2.8).
        """
        shortest = min(self.shape)
        long = tuple(shortest if self.twisted and length > shortest else 0 for length in self.shape)
        none = (0,) * len(self.shape)
        return tuple(long if length == shortest else none for length in self.shape)

    def closes(self, axis: int, cover: Mapping[int, tuple[int, int]]) -> bool:
        """Return whether places along an axis that go round it make a ring with the places on the other axes.

        `cover`: of each axis, how many places there are and their stride. Over the end of an axis of a twisted torus
        one comes out on other places of the longer axes, which must be among them.
        """
        shifts = enumerate(self.shifts[axis])
        return all(
            not shift or (math.prod(cover.get(other, (1, 1))) == self.shape[other] and shift % cover[other][1] == 0)
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


def topology_of(target: TargetConfig) -> Topology:
    """Return the torus of a target; a target without one (CPU, GPU) is a single axis of chips that does not wrap.

    ValueError where the target leaves the chips to the machine, or asks for a torus that does not exist.
    """
    refuse(target.problems())
    if target.chips is None:
        raise ValueError(
            f"target={target.name} is whatever the machine has, so nothing is known of its links. Name the hardware, "
            "such as target=v4-64, or target=cpu8 for simulated devices."
        )
    chip, shape = target.chip, parse_shape(target.topology)
    devices = chip.devices if chip else 1
    if chip is None or shape is None:
        bounds = (-(-target.chips // target.hosts),)
        return Topology((target.chips,), (False,), bounds, target.slices, devices)
    bounds = shape if target.hosts == 1 else chip.slices.host(shape)
    twisted = says_twisted(target.topology)
    return Topology(shape, chip.slices.rings(shape), bounds, target.slices, devices, twisted)


def slice_of(chip: ChipConfig, shape: SliceShape, *, twisted: bool = False) -> TargetConfig:
    """Return the slice of a chip that has this shape, by its shortest name: `v4-64`, `v4-4x4x2`, `v4-4x4x8_twisted`."""
    chips = math.prod(shape)
    text = shape_text(shape) + (TWISTED if twisted else "")
    size = chips * chip.units_in_name if chip.slices.default(chips) == shape and not twisted else text
    topology = None if chip.ici_axes is None else text
    return TargetConfig(f"{chip.name}-{size}", chip.platform, chip, chips, topology, chip.slices.hosts(shape))


def simulated(devices: int) -> TargetConfig:
    """Return so many simulated CPU devices."""
    return TargetConfig(f"cpu{devices}", "cpu", chips=devices)


def topology_text(shape: SliceShape) -> str:
    """Return a shape as a topology is asked for: `target.topology=4x4x2`."""
    return f"target.topology={shape_text(shape)}"


def usable_hbm(chip: ChipConfig | None) -> int | None:
    """Return the bytes that a program may have of one device's memory; None where that is not known."""
    return None if chip is None else platform_of(chip.platform).usable_memory(chip)
