"""Platforms: what differs between TPUs, GPUs and CPUs, one module each with an object `PLATFORM`.

Adding a platform is adding a module here. No module of this package imports JAX before a method needs it. Where a
platform needs code of a higher layer, it names a strategy that the layer looks up: `attention`, `scan`, `replay`.
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from valkyrie.problems import Problem, ProblemCode, ProblemError

if TYPE_CHECKING:
    from valkyrie.hardware.target import ChipConfig, TargetConfig

ROUNDED = 1.01
"""How much a program may have of a published memory, which is rounded: of v5p's 95 GiB the compiler gives 95.73."""


class Platform(ABC):
    """A kind of device. Defaults are those of a platform of which nothing is known.

    Attributes:
        name: as in `target.chip.platform`, and as JAX reports it.
        aliases: other names of its JAX backend.
        jax_name: argument of `jax.devices`, or None for JAX's default backend.
        lowering_name: argument of `Traced.lower`.
        extra: extra of this package that installs it, or None.
        plugins: modules of which JAX needs one to find its devices.
        runs_on_host: devices are the CPU and the memory of the host.
        uses_every_device: a program runs on all devices of a slice, or not at all.
        has_torus: chips are joined by a torus, and the compiler knows where each is.
        rented_as_slices: clouds rent its chips by the slice.
        compiles_without_devices: its compiler needs no device.
        compile_note: printed when compiling for it, or None.
        memory_limit_option: compiler option with the memory of a device in MiB, or None if the compiler never refuses
            a program that is too large.
        peak_has_code: the peak of `peak_bytes` includes the program's code.
        has_estimate_errors: errors of the memory estimate have been measured (`valkyrie.train.memory`).
        replay: which of `valkyrie.search.compile.replayed.REPLAYS` reads the costs of a compiled module, or None if
            there are none to read.
        attention: its attention kernel in `valkyrie.ops.attention`, or None.
        scan: default of `valkyrie.ops.scan.ScanImpl`, or None.
        runs_pallas_tpu: kernels written for Pallas on TPUs run on it; elsewhere they are interpreted.
        rotates_by_product: a matrix product is the fastest way to swap the halves of a vector.
    """

    name: str
    aliases: tuple[str, ...] = ()
    jax_name: str | None = None
    lowering_name: str = ""
    extra: str | None = None
    plugins: tuple[str, ...] = ()
    runs_on_host: bool = False
    uses_every_device: bool = False
    has_torus: bool = False
    rented_as_slices: bool = False
    compiles_without_devices: bool = False
    compile_note: str | None = None
    memory_limit_option: str | None = None
    peak_has_code: bool = True
    has_estimate_errors: bool = False
    replay: str | None = None
    attention: str | None = None
    scan: str | None = None
    runs_pallas_tpu: bool = False
    rotates_by_product: bool = False

    def device_files(self) -> list[Path]:
        """Files of the devices of this host, one per chip."""
        return []

    def is_installed(self) -> bool:
        """Return whether a plugin by which JAX finds its devices is installed."""
        return any(importlib.util.find_spec(plugin) for plugin in self.plugins)

    def is_simulated(self, accelerators: int) -> bool:
        """Return whether its devices are CPU devices on a host with so many accelerators."""
        return self.runs_on_host

    def missing_compiler(self, target: TargetConfig) -> str | None:
        """Return what to install to compile for a target, or None if nothing is missing."""
        return None

    def compile_environment(self) -> Mapping[str, str]:
        """Environment variables of a process that compiles for it."""
        return {"JAX_PLATFORMS": "cpu"}

    @abstractmethod
    def compile_devices(self, target: TargetConfig, size: int) -> list[Any]:
        """Return at least `size` JAX devices to compile for; ValueError if this machine cannot."""

    def usable_memory(self, chip: ChipConfig) -> int | None:
        """Bytes of one device's memory that a program may use, or None if unknown.

        What the compiler leaves, or all of it if that is less or the other is unknown.
        """
        size, whole = chip.usable_hbm_gib, chip.hbm_gib
        if size is None or (whole is not None and size > ROUNDED * whole):
            size = whole
        return None if size is None else int(size * 2**30 / chip.devices)

    def peak_bytes(self, sizes: Any) -> int:
        """Bytes of one device at the peak of a program, from XLA's memory analysis.

        The default is for backends that state no peak, but temporaries that are one allocation.
        """
        return at_rest(sizes) + sizes.temp_size_in_bytes + sizes.generated_code_size_in_bytes

    def activation_bytes(self, kept: Any, unnamed: Any, loss: Any, group: Any, gradients: Any, gathered: Any) -> Any:
        """Bytes of activations at the peak of a step, which an estimate adds to gradients; numbers or arrays.

        Args:
            kept: bytes kept for the backward pass.
            unnamed: those of them that no remat policy names.
            loss: working set of the loss.
            group: working set of a group of blocks.
            gradients: bytes of all gradients.
            gathered: weights of a layer gathered for use, and their gradients before the reduction.
        """
        return kept + loss + group

    def step_options(self, largest_gradient: int) -> dict[str, str]:
        """Compiler options of a training step, beside those of the chip.

        Args:
            largest_gradient: bytes of the largest gradient of a layer's parameter before the reduction.
        """
        return {}


def at_rest(sizes: Any) -> int:
    """Bytes of the arguments and results of a program, from XLA's memory analysis."""
    return sizes.argument_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes


@cache
def platforms() -> tuple[Platform, ...]:
    """Return every platform, by name."""
    found = (import_module(f"{__name__}.{module.name}").PLATFORM for module in iter_modules(__path__))
    return tuple(sorted(found, key=lambda platform: platform.name))


@cache
def platform_of(name: str) -> Platform:
    """Return the platform of this name, `target.platform` or that of a JAX backend; ValueError if there is none."""
    for platform in platforms():
        if name in (platform.name, *platform.aliases):
            return platform
    raise ProblemError(platform_problems("platform", name))


def platform_problems(key: str, name: str) -> list[Problem]:
    """Return the problem of a config key that names no platform."""
    known = [platform.name for platform in platforms()]
    text = f"{key}={name} is not known. Known: {', '.join(known)}."
    return [] if name in known else [Problem(ProblemCode.unknown_name, key, name, text)]
