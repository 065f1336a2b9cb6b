"""The GPU platform. XLA compiles for NVIDIA GPUs on a machine without one, from the figures of the chip."""

from __future__ import annotations

import contextlib
import ctypes.util
import importlib.util
import os
from collections.abc import Iterator, Mapping
from functools import partial
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from valkyrie.hardware.platforms import Platform

if TYPE_CHECKING:
    from valkyrie.hardware.target import ChipConfig, TargetConfig

_MEMORY_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
"""Environment variable with the share of a GPU's memory that JAX reserves. The rest is for CUDA, NCCL and cuDNN."""
_SKIP_CHECKS = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
"""Environment variable that makes JAX's plugin start without CUDA's libraries, which compiling does not need."""
_CUDA_VERSION, _CUDNN_VERSION = (13, 0, 0), (9, 12, 0)
"""Versions that programs are compiled for. XLA chooses cuDNN's attention kernels only from cuDNN 9."""
_GATHERED_COPIES = 2
"""Layers whose gathered weights and unreduced gradients are in memory at once: XLA pipelines their collectives."""
_KINDS = ("all_gather", "reduce_scatter", "all_reduce")
_PIPELINING: tuple[tuple[tuple[int, int], dict[str, str]], ...] = (
    ((0, 11), {f"xla_gpu_pipeline_{kind}": "COLLECTIVE_PIPELINING_MODE_ON" for kind in _KINDS}),
    ((0, 10), {f"xla_gpu_enable_pipelined_{kind}": "true" for kind in _KINDS}),
)
"""Options that pipeline collectives over the iterations of a loop, by the first version of jaxlib with these names.

Compiled with jaxlib 0.10.2, 0.11.2 and 0.12.0.1.
"""
_FIGURES_TO_COMPILE = ("capability", "sms", "clock_ghz", "l2_bytes", "shared_bytes", "best_tflops")
"""Fields of `GpuFigures` without which XLA ends the process, or a replay divides by zero."""
_INSTALL = "`uv sync --extra gpu-compile` and your other extras in the clone; no GPU is needed."

_described_devices: dict[tuple[str, str], tuple[Any, ...]] = {}
"""Devices to compile for, by topology and target config."""
_lowered_chips: list[str] = []
"""Names of the chips of all active contexts of `Gpu.lowering_for`."""


class Gpu(Platform):
    """NVIDIA GPUs, joined by a switch within a host."""

    name = jax_name = "gpu"
    plural_name = "GPUs"
    aliases = ("cuda", "rocm")
    lowering_name = "cuda"
    extra = "cuda"
    plugins = ("jax_cuda13_plugin", "jax_cuda12_plugin")
    jax_plugins = ("xla_cuda13", "xla_cuda12")
    compiles_without_devices = True
    compiler_packages = ("jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin")
    usual_compile_s = (30, 75)  # llama_8b on 32 to 64 GPUs, with 1 to 8 microbatches (experiments/LOG.md)
    memory_setting = _MEMORY_FRACTION
    converts_unlisted_products = False
    replay = "xla_gpu"
    runs_pallas_triton = True
    replay_note = (
        "replayed times on GPUs are not corrected. 16 published runs of JAX programs took 1.00 to 1.41 times their "
        "replayed time (experiments/README.md)"
    )
    attention = "cudnn"
    scan = "associative"
    shares_gathers = True
    example_chip = "h100"

    def process_environment(self) -> Mapping[str, str]:
        """Return the variable with the share of the memory that JAX reserves, which is 0.75 by default."""
        return {_MEMORY_FRACTION: "0.92"}

    def usable_memory(self, chip: ChipConfig) -> int | None:
        """Return the memory that JAX reserves on a GPU, in bytes, or None if the chip's memory is unknown."""
        memory = super().usable_memory(chip)
        fraction = {**self.process_environment(), **os.environ}[_MEMORY_FRACTION]
        try:
            return memory if memory is None else int(memory * float(fraction))
        except ValueError:
            raise ValueError(f"{_MEMORY_FRACTION}={fraction} is not a number. Set it to a share such as 0.9.") from None

    def device_files(self) -> list[Path]:
        """Return `/dev/nvidia0`, `/dev/nvidia1` and so on."""
        return [path for path in Path("/dev").glob("nvidia[0-9]*") if path.name.removeprefix("nvidia").isdigit()]

    def activation_bytes(self, *args: Any, gathered_bytes: Any, **kwargs: Any) -> Any:
        """See `Platform.activation_bytes`. Adds `_GATHERED_COPIES` times the gathered arrays of a layer."""
        bytes_ = super().activation_bytes(*args, gathered_bytes=gathered_bytes, **kwargs)
        return bytes_ + _GATHERED_COPIES * gathered_bytes

    def step_options(self, largest_gradient_bytes: int, devices: int) -> dict[str, str]:
        """Return the options for products by cuBLAS, and for communication that overlaps with compute.

        With XLA's default, a GPU's autotuner chooses between Triton and cuBLAS for each product. A compile without a
        GPU cannot time them, so it would not compile the program that is trained. On several GPUs, the other options
        start the collectives of a layer while the previous one is computed. They are those of NVIDIA's recipes
        (NVIDIA/JAX-Toolbox, docs/GPU_performance.md), chosen by compiling and replaying with jaxlib 0.10.2. Their
        effect was not measured on GPUs. Replayed, llama_8b on 64 H100s took 1.71 instead of 1.78 s, with 76 instead of
        148 ms of waiting (with weights still gathered in float32). On A100s, XLA overlaps nothing without the
        latency-hiding scheduler.

        Options in `XLA_FLAGS` are left out, because options of a program would override them.

        Args:
            largest_gradient_bytes: Size of the largest gradient, in bytes, which does not matter.
            devices: Number of devices of the mesh.
        """
        options = {"xla_gpu_enable_triton_gemm": "false", "xla_gpu_enable_latency_hiding_scheduler": "true"}
        if devices > 1:
            version = tuple(int(part) for part in metadata.version("jaxlib").split(".")[:2])
            options["xla_gpu_enable_while_loop_double_buffering"] = "true"
            options |= next((pipelining for first, pipelining in _PIPELINING if version >= first), {})
        flags = {flag.strip("'\"-").partition("=")[0] for flag in os.environ.get("XLA_FLAGS", "").split()}
        return {name: value for name, value in options.items() if name not in flags}

    def describe_device(self, device_kind: str, chip: ChipConfig | None) -> str:
        """Return the target config of a chip, or the device kind if the chip has none."""
        return device_kind if chip is None or chip.gpu is None else _target_config(chip)

    def has_driver(self) -> bool:
        """Return whether NVIDIA's driver is installed, also in WSL, where GPUs have no device files."""
        return ctypes.util.find_library("cuda") is not None

    def spell_options(self, options: Mapping[str, str]) -> dict[str, str]:
        """Return the options with `True` for `true` and `False` for `false`, as XLA reads them."""
        return {name: {"true": "True", "false": "False"}.get(value, value) for name, value in options.items()}

    def compiler_install_hint(self, target: TargetConfig) -> str | None:
        """Return a message with the command that installs XLA's compiler for GPUs, or None if it is complete.

        The compiler is JAX's CUDA plugin of the same version as jaxlib, and `ptxas`.
        """
        need = f"target={target.describe()} is compiled by JAX's CUDA plugin"
        plugin = next((plugin for plugin in self.plugins if importlib.util.find_spec(plugin)), None)
        if plugin is None:
            return f"{need}, which is not installed. Install it with {_INSTALL}"
        package = plugin.replace("_", "-")
        try:
            versions = {name: metadata.version(name) for name in ("jaxlib", package, package.replace("plugin", "pjrt"))}
        except metadata.PackageNotFoundError as error:
            return f"{need}, but its package {error.name} is not installed. Install it with {_INSTALL}"
        if len({*versions.values()}) > 1:
            listed = ", ".join(f"{name} {version}" for name, version in versions.items())
            return f"{need}, whose version must be that of jaxlib, but the versions are {listed}. Run {_INSTALL}"
        if not _has_ptxas():
            return f"{need}, which needs ptxas, and ptxas is not installed. Install it with {_INSTALL}"
        return None

    def missing_figures(self, chip: ChipConfig, compute_dtype: str, hosts: int) -> list[str]:
        """Return the keys in `target.chip` of the figures missing for compiling and for predicted step times."""
        missing = super().missing_figures(chip, compute_dtype, hosts)
        speeds = ("switch_gbs", "dcn_gbs_per_host") if hosts > 1 else ("switch_gbs",)
        missing += [name for name in speeds if not getattr(chip, name)]
        if chip.gpu is None:
            return [*missing, "gpu"]
        return missing + [f"gpu.{name}" for name in _FIGURES_TO_COMPILE if not getattr(chip.gpu, name)]

    def devices_to_compile_for(self, target: TargetConfig, size: int) -> list[Any]:
        """Return the GPUs of a target to compile for, as XLA describes them.

        Their `coords` are the NVLink domain, the host in it, and the GPU in the host. Raises ValueError if the compiler
        or figures of the chip are missing.
        """
        chip = target.chip
        if chip is None or chip.gpu is None or target.chips is None:
            raise ValueError(
                f"target={target.describe()} does not name GPUs that XLA can compile for. Use a target such as "
                "target=h100-8."
            )
        if problem := self.compiler_install_hint(target) or self.missing_figures_message(chip, hosts=target.hosts):
            raise ValueError(problem)
        domains, config = target.hosts // target.domain_hosts, _target_config(chip)
        shape = f"{domains}x{target.domain_hosts}x{target.chips // target.hosts}"
        # JAX refuses a program with devices of two descriptions, even of the same topology.
        if (key := (shape, config)) not in _described_devices:
            _described_devices[key] = tuple(self._describe_devices(shape, config))
        return list(_described_devices[key])

    def _describe_devices(self, shape: str, config: str) -> list[Any]:
        """Return the devices of a topology, as XLA describes them, also if JAX has refused to start its plugin.

        JAX starts all plugins at its first use. Without CUDA's libraries, it starts this one only if `JAX_PLATFORMS`
        is set to other platforms, or `_SKIP_CHECKS`. Raises ValueError on a machine with NVIDIA's driver, where a
        plugin that starts without them could make JAX fail.
        """
        from jax.experimental import topologies

        describe = partial(topologies.get_topology_desc, platform="cuda", topology=shape, target_config=config)
        if not self.has_driver():
            os.environ.setdefault(_SKIP_CHECKS, "1")
        try:
            return describe().devices
        except NotImplementedError:  # raised by JAX for platforms without a started plugin
            if self.has_driver():
                raise ValueError(
                    "JAX's CUDA plugin did not start, probably because CUDA's libraries are missing. To compile for "
                    "GPUs without using one, set JAX_PLATFORMS=cpu. To use this machine's, `uv sync --extra cuda`."
                ) from None
        # The plugin was refused before the variable was set, such as by `jax.devices()`.
        next(import_module(f"jax_plugins.{name}") for name in self.jax_plugins if _is_installed(name)).initialize()
        return describe().devices

    @contextlib.contextmanager
    def lowering_for(self, chip: ChipConfig | None) -> Iterator[None]:
        """Make JAX lower cuDNN attention for a chip in this context.

        JAX asks the installed cuDNN and the attached GPU what they support. In this context, the chip answers.
        """
        if chip is None or chip.gpu is None:
            yield
            return
        from jax._src.cudnn import fused_attention_stablehlo as attention

        capability = chip.gpu.capability_numbers
        major, minor, patch = _CUDNN_VERSION
        answers = {
            "check_cudnn_version": lambda: 10000 * major + 100 * minor + patch,
            "check_compute_capability": lambda least: capability >= _numbers(least),
            "is_cuda_compute_capability_equal": lambda other: capability == _numbers(other),
        }
        saved = {name: getattr(attention, name) for name in answers}
        _lowered_chips.append(chip.name)
        try:
            for name, answer in answers.items():
                setattr(attention, name, answer)
            yield
        finally:
            _lowered_chips.pop()
            for name, function in saved.items():
                setattr(attention, name, function)


def _is_installed(jax_plugin: str) -> bool:
    return importlib.util.find_spec(f"jax_plugins.{jax_plugin}") is not None


def is_lowering_for_chip() -> bool:
    """Return whether programs are being lowered for a chip that is only described (`Gpu.lowering_for`)."""
    return bool(_lowered_chips)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version.split("."))


def _has_ptxas() -> bool:
    """Return whether XLA finds `ptxas`: in an installed package `nvidia`, in CUDA_HOME, or on PATH."""
    spec = importlib.util.find_spec("nvidia")
    packages = spec.submodule_search_locations if spec is not None else None
    found = (file for folder in packages or () for file in Path(folder).glob("*/bin/ptxas"))
    toolkits = [os.environ.get("CUDA_HOME", "/usr/local/cuda") + "/bin", *os.environ.get("PATH", "").split(os.pathsep)]
    return any(found) or any((Path(folder) / "ptxas").is_file() for folder in toolkits)


def _target_config(chip: ChipConfig) -> str:
    """Return the text of a `GpuTargetConfigProto`, which describes a chip to XLA. `chip.gpu` must be set.

    Uses only fields that all supported versions of XLA know. XLA ends the process without a message if a field such as
    `threads_per_warp` is missing. XLA chooses its cost tables by the name.
    """
    figures, name = chip.gpu, chip.device_kinds[0] if chip.device_kinds else chip.name
    assert figures is not None
    memory_bytes, memory_rate = int((chip.usable_hbm_gib or chip.hbm_gib or 0) * 2**30), (chip.hbm_gbs or 0.0) * 1e9
    major, minor = figures.capability_numbers
    feature = "feature_extension: ACCELERATED_FEATURES" if figures.capability.endswith("a") else ""
    cuda_text, cudnn_text = (".".join(map(str, version)) for version in (_CUDA_VERSION, _CUDNN_VERSION))
    cuda, cudnn = ("major: {} minor: {} patch: {}".format(*version) for version in (_CUDA_VERSION, _CUDNN_VERSION))
    return f"""
gpu_device_info {{
  name: "{name}" device_vendor: "NVIDIA Corporation"
  cuda_compute_capability {{ major: {major} minor: {minor} {feature} }}
  core_count: {figures.sms} fpus_per_core: {figures.fp32_units} clock_rate_ghz: {figures.clock_ghz}
  memory_bandwidth: {int(memory_rate)} device_memory_size: {memory_bytes} l2_cache_size: {figures.l2_bytes}
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_core: {figures.shared_bytes}
  shared_memory_per_block_optin: {figures.shared_bytes - 1024}
  driver_version: "{cuda_text}" runtime_version: "{cuda_text}" compile_time_toolkit_version: "{cuda_text}"
  dnn_version: "{cudnn_text}" device_address_bits: 64 pcie_bandwidth: 64000000000 ecc_enabled: true
  device_interconnect_info {{ active_links: {figures.nvlinks} }}
}}
platform_name: "CUDA"
dnn_version_info {{ {cudnn} }}
runtime_version {{ {cuda} }}
device_description_str: "{name}"
"""


PLATFORM = Gpu()
