"""Platforms: the differences between TPUs, GPUs and CPUs. Each is a module with an object `PLATFORM`.

To add a platform, add a module here. These modules import JAX only inside methods. `Platform.attention`, `scan` and
`replay` are names of implementations in higher layers, which look them up.
"""

from __future__ import annotations

import contextlib
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from valkyrie.problems import Problem, ProblemCode, ProblemError

if TYPE_CHECKING:
    from valkyrie.hardware.target import ChipConfig, TargetConfig

MAX_USABLE_RATIO = 1.01
"""Maximum ratio of `usable_hbm_gib` to `hbm_gib`.

Published sizes are rounded: v5p is listed with 95 GiB, but its compiler reports 95.73 GiB usable.
"""


class Platform(ABC):
    """A kind of device. The defaults suit an unknown platform.

    Attributes:
        name: Name in `target.chip.platform` and in JAX.
        plural_name: Its devices in messages, such as `TPUs`.
        aliases: Other names of its JAX backend.
        jax_name: Argument of `jax.devices`, or None for JAX's default backend.
        lowering_name: Argument of `Traced.lower`.
        extra: Extra of this package that installs it, or None.
        plugins: Modules through which JAX finds its devices; one of them is enough.
        jax_plugins: Names of those plugins in JAX's namespace `jax_plugins`.
        runs_on_host: Its devices are the CPU and memory of the host.
        uses_every_device: A program must run on all devices of a slice.
        has_torus: A torus joins the chips, and the compiler knows their positions.
        rented_as_slices: Clouds rent its chips by the slice.
        compiles_without_devices: Its compiler needs no device.
        compiler_packages: Packages whose versions decide the compiled program, the one that names the version of
            compiler options first.
        flags_variable: Environment variable with flags that only its compiler reads, or None.
        compile_note: Printed when compiling for it, or None.
        usual_compile_s: Quartiles of the seconds that a compile of a search takes on two cores. The default is from 125
            compiles for TPUs (experiments/search/compiled.json).
        memory_limit_option: Compiler option for the memory of a device in MiB, or None if the compiler never refuses
            programs that are too large.
        memory_setting: The setting that limits the memory a program may use.
        overlap_options: Compiler options with which a program that nearly fills the memory overlaps communication.
        peak_has_code: The result of `peak_bytes` includes the program's code.
        converts_unlisted_products: Products in a dtype that `ChipConfig.peak_tflops` does not list are compiled, in a
            wider dtype. Otherwise, such a precision is refused.
        has_estimate_errors: Errors of estimated memory and step times were measured (`valkyrie.train.memory`).
        replay: Key in `valkyrie.search.compile.replayed.REPLAY_MODELS` of the cost models that replay its compiled
            programs, or None.
        replay_note: Added to replayed times that no published run corrects, or None.
        attention: Its attention kernel in `valkyrie.ops.attention`, or None.
        scan: Default of `valkyrie.ops.scan.ScanImpl`, or None.
        runs_pallas_tpu: Runs Pallas kernels for TPUs; other platforms interpret them.
        runs_pallas_triton: Runs Pallas kernels for Triton.
        rotates_by_product: A matrix product is the fastest way to swap the halves of a vector.
        shares_gathers: In recomputed layers, products save their gathered weight for the backward pass. Otherwise XLA
            gathers weights in float32, because two products use the cast.
        lanes: The head dimension of attention is padded to a multiple of this, in memory and in matrix products.
        wide_attention_cost: Time of attention with wide blocks (`Block.uses_wide_blocks`), relative to that of as many
            FLOPs in other blocks.
        example_chip: A shipped chip that the YAML of a user's chip can begin with.
    """

    name: str
    plural_name: str = "other devices"
    aliases: tuple[str, ...] = ()
    jax_name: str | None = None
    lowering_name: str = ""
    extra: str | None = None
    plugins: tuple[str, ...] = ()
    jax_plugins: tuple[str, ...] = ()
    runs_on_host: bool = False
    uses_every_device: bool = False
    has_torus: bool = False
    rented_as_slices: bool = False
    compiles_without_devices: bool = False
    compiler_packages: tuple[str, ...] = ("jaxlib",)
    flags_variable: str | None = None
    compile_note: str | None = None
    usual_compile_s: tuple[int, int] = (50, 210)
    memory_limit_option: str | None = None
    memory_setting: str = "target.chip.usable_hbm_gib"
    overlap_options: Mapping[str, str] = MappingProxyType({})
    peak_has_code: bool = True
    converts_unlisted_products: bool = True
    has_estimate_errors: bool = False
    replay: str | None = None
    replay_note: str | None = None
    attention: str | None = None
    scan: str | None = None
    runs_pallas_tpu: bool = False
    runs_pallas_triton: bool = False
    rotates_by_product: bool = False
    shares_gathers: bool = False
    lanes: int = 1
    wide_attention_cost: float = 1.0
    example_chip: str = "v5e"

    def device_files(self) -> list[Path]:
        """Return the device files of this host's chips, one per chip."""
        return []

    def is_installed(self) -> bool:
        """Return whether one of `plugins` is installed."""
        return any(importlib.util.find_spec(plugin) for plugin in self.plugins)

    def has_driver(self) -> bool:
        """Return whether this host has the driver without which plugins find no device, if they need one."""
        return True

    def is_simulated(self, accelerator_count: int) -> bool:
        """Return whether JAX simulates devices for this platform on a host with this number of accelerators."""
        return self.runs_on_host

    def compiler_install_hint(self, target: TargetConfig) -> str | None:
        """Return instructions to install the compiler for a target, or None if it is installed or comes with JAX."""
        return None

    def compile_refusal(self, target: TargetConfig, compute_dtype: str) -> str | None:
        """Return why a step cannot be compiled or replayed for a target, or None if nothing is missing.

        The reason is a missing compiler (`compiler_install_hint`) or, on platforms with `replay`, missing figures of
        the chip (`missing_figures_message`). `compute_dtype` is the step's compute dtype.
        """
        missing = self.compiler_install_hint(target)
        if missing is None and target.chip is not None and self.replay is not None:
            return self.missing_figures_message(target.chip, compute_dtype, target.hosts * target.slices)
        return missing

    def missing_figures(self, chip: ChipConfig, compute_dtype: str, hosts: int) -> list[str]:
        """Return the keys in `target.chip` of the figures that are missing for predicted step times.

        Args:
            chip: The chip.
            compute_dtype: Compute dtype of the step. Its peak speed may be missing if that of bfloat16 is set.
            hosts: Number of hosts in all slices.
        """
        needed = ("hbm_gbs", *(("hbm_gib", "clock_ghz", "ici_axes", "ici_link_gbs") if self.has_torus else ()))
        missing = [name for name in needed if getattr(chip, name) is None]
        if not {compute_dtype, "bfloat16"} & {*chip.peak_tflops}:
            missing.append(f"peak_tflops.{compute_dtype}")
        return missing

    def missing_figures_message(self, chip: ChipConfig, compute_dtype: str = "bfloat16", hosts: int = 1) -> str | None:
        """Return an error message that lists the `missing_figures`, or None if `chip` has all."""
        missing = self.missing_figures(chip, compute_dtype, hosts)
        if not missing:
            return None
        return (
            f"target.chip={chip.name} sets no {', '.join(missing)}, so the step time cannot be predicted. Set every "
            f"missing value, or begin {chip.name}.yaml with `defaults: [{self.example_chip}, _self_]`."
        )

    def process_environment(self) -> Mapping[str, str]:
        """Return the default environment variables of a process that runs on the platform."""
        return {}

    def compile_environment(self) -> Mapping[str, str]:
        """Return the environment variables of a process that compiles for the platform."""
        return {"JAX_PLATFORMS": "cpu"}

    def flag_problem(self, lines: Iterable[str]) -> str | None:
        """Return the message for a flag in `flags_variable` that the compiler refuses in its output, or None."""
        return None

    def refuse_wrong_flags(self) -> None:
        """Raise ValueError if the compiler refuses a flag in `flags_variable`, which would end this process."""
        assert self.flags_variable is None, "a platform with such a variable checks it"

    @abstractmethod
    def devices_to_compile_for(self, target: TargetConfig, size: int) -> list[Any]:
        """Return at least `size` JAX devices to compile for. Raises ValueError if this machine cannot."""

    def usable_memory(self, chip: ChipConfig) -> int | None:
        """Return the memory that a program may use on one device, in bytes, or None if unknown.

        This is the chip's `usable_hbm_gib`, divided by its number of devices. `hbm_gib` is used instead if
        `usable_hbm_gib` is unknown, or larger than `MAX_USABLE_RATIO` times `hbm_gib`.
        """
        usable, total = chip.usable_hbm_gib, chip.hbm_gib
        if usable is None or (total is not None and usable > MAX_USABLE_RATIO * total):
            usable = total
        return None if usable is None else int(usable * 2**30 / chip.devices)

    def peak_bytes(self, memory_stats: Any) -> int:
        """Return the peak memory of a program, in bytes per device.

        `memory_stats` is the result of `compiled.memory_analysis()`. The default is for backends that do not report a
        peak: the sum of arguments, results, temporaries and code.
        """
        return (
            argument_output_bytes(memory_stats)
            + memory_stats.temp_size_in_bytes
            + memory_stats.generated_code_size_in_bytes
        )

    def activation_bytes(
        self,
        saved_bytes: Any,
        unnamed_bytes: Any,
        loss_bytes: Any,
        group_bytes: Any,
        kernel_bytes: Any,
        recomputed_bytes: Any,
        gradient_bytes: Any,
        gathered_bytes: Any,
    ) -> Any:
        """Return the bytes of activations at the peak of a step, not counting the gradients.

        Arguments and result are numbers, or arrays with one entry per layout.

        Args:
            saved_bytes: Bytes saved for the backward pass.
            unnamed_bytes: Part of `saved_bytes` with neither a name nor a `saved_ratio`.
            loss_bytes: Working set of the loss.
            group_bytes: Working set of the largest layer of a group of layers.
            kernel_bytes: Bytes that the attention kernel of a layer reads and writes.
            recomputed_bytes: What the group's other layers recompute for their backward passes.
            gradient_bytes: Bytes of all gradients.
            gathered_bytes: Gathered weights and activations of a layer with their gradients, and the weights of all
                layers in the compute dtype.
        """
        return saved_bytes + loss_bytes + group_bytes + recomputed_bytes

    def describe_device(self, device_kind: str, chip: ChipConfig | None) -> str:
        """Return the properties of a device that compiled programs depend on, as part of cache keys."""
        return device_kind

    def spell_options(self, options: Mapping[str, str]) -> dict[str, str]:
        """Return compiler options, with values such as `true`, as the platform's compiler reads them."""
        return dict(options)

    def lowering_for(self, chip: ChipConfig | None) -> contextlib.AbstractContextManager[None]:
        """Return a context for lowering programs for a chip whose devices are only described."""
        return contextlib.nullcontext()

    def step_options(self, largest_gradient_bytes: int, devices: int) -> dict[str, str]:
        """Return the compiler options of a training step, in addition to the chip's.

        Args:
            largest_gradient_bytes: Bytes of the largest gradient of a layer's parameter before the reduction.
            devices: Number of devices of the mesh.
        """
        return {}


def argument_output_bytes(memory_stats: Any) -> int:
    """Return the bytes per device of a program's arguments and results. Donated buffers count once.

    `memory_stats` is the result of `compiled.memory_analysis()`.
    """
    return memory_stats.argument_size_in_bytes + memory_stats.output_size_in_bytes - memory_stats.alias_size_in_bytes


@cache
def platforms() -> tuple[Platform, ...]:
    """Return all platforms, sorted by name."""
    platforms = (import_module(f"{__name__}.{module.name}").PLATFORM for module in iter_modules(__path__))
    return tuple(sorted(platforms, key=lambda platform: platform.name))


@cache
def get_platform(name: str) -> Platform:
    """Return the platform with this name in `target.platform` or JAX's backends. Raises ValueError for other names."""
    for platform in platforms():
        if name in (platform.name, *platform.aliases):
            return platform
    raise ProblemError(platform_problems("platform", name))


def replayed_devices() -> tuple[str, ...]:
    """Return the kinds of devices with predicted step times, for messages: `("TPUs", "GPUs")`."""
    return tuple(platform.plural_name for platform in reversed(platforms()) if platform.replay is not None)


def platform_problems(key: str, name: str) -> list[Problem]:
    """Check that `name`, the value of config key `key`, is a platform. Returns one problem, or an empty list."""
    names = [platform.name for platform in platforms()]
    text = f"{key}={name} is unknown. Known platforms: {', '.join(names)}."
    return [] if name in names else [Problem(ProblemCode.unknown_name, key, name, text)]
