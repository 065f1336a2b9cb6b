"""The TPU platform. libtpu compiles for any slice without a TPU."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

from valkyrie.foreign_errors import flag_refusal_reason, topology_reason
from valkyrie.hardware.platforms import Platform, argument_output_bytes
from valkyrie.hardware.slices import TWISTED_SUFFIX, format_shape, nearest_hint
from valkyrie.hardware.target import TargetConfig, Topology, build_topology, topology_override

ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",  # otherwise libtpu queries a metadata server for minutes
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # otherwise libtpu aborts when a second process loads it
}
"""Environment variables to set before libtpu is loaded on a machine without a TPU."""
LIBTPU_FLAGS_VARIABLE = "LIBTPU_INIT_ARGS"
"""Environment variable with flags that libtpu reads when it is loaded."""

UNNAMED_FACTOR, LOSS_FACTOR, GROUP_FACTOR = 0.4, 0.65, 0.5
"""Factors on three parts of the memory estimate, chosen for the least error over the layouts of experiments/memory.py.

Activations with neither a name nor a `saved_ratio` take 40% more than models count, because the compiler pads them. The
logits take 1.3 copies instead of two. Half of the working set of a layer is in memory at a time.
"""

OVERLAP_OPTIONS = {"xla_tpu_scheduler_percent_shared_memory_limit": "100", "xla_latency_hiding_scheduler_rerun": "2"}
"""TPU options with which the scheduler overlaps communication although the program nearly fills the memory.

Without them it gives up if its schedule exceeds its limit, and starts every transfer where its result is needed: 9.86
instead of 8.12 s for a step of 64 layers of 8192 on v5p-128 (experiments/LOG.md).
"""

_described_devices: dict[str, tuple[Any, ...]] = {}
"""Devices to compile for, by name and options of the topology."""


class Tpu(Platform):
    """TPUs, joined by a torus within a slice."""

    name = jax_name = lowering_name = extra = "tpu"
    plural_name = "TPUs"
    plugins = ("libtpu",)
    uses_every_device = True
    has_torus = True
    rented_as_slices = True
    compiles_without_devices = True
    compiler_packages = ("libtpu", "jaxlib")
    flags_variable: str = LIBTPU_FLAGS_VARIABLE
    memory_limit_option = "xla_tpu_max_hbm_size_mib"
    overlap_options = MappingProxyType(OVERLAP_OPTIONS)
    peak_has_code = False
    has_estimate_errors = True
    replay = "libtpu"
    attention = "splash"
    scan = "kernel"
    runs_pallas_tpu = True
    rotates_by_product = True
    lanes = 128
    wide_attention_cost = 0.6  # 129 of 216 ms in llama_7b, experiments/search/compiled.json

    def device_files(self) -> list[Path]:
        """Return `/dev/accel0` and so on, and the numbered files in `/dev/vfio`."""
        return [*Path("/dev").glob("accel[0-9]*"), *Path("/dev/vfio").glob("[0-9]*")]

    def compiler_install_hint(self, target: TargetConfig) -> str | None:
        """Return a message with the command that installs libtpu, or None if it is installed."""
        if self.is_installed():
            return None
        return (
            f"target={target.describe()} is compiled by libtpu, which is not installed. Install it with "
            "`uv sync --extra tpu` in the clone; no TPU is needed."
        )

    def devices_to_compile_for(self, target: TargetConfig, size: int) -> list[Any]:
        """Return the devices of a slice to compile for, as libtpu describes them.

        They have `coords`, `core_on_chip`, `process_index`, and `slice_index` if there are several slices. Raises
        ValueError if libtpu is missing or has no such slice.
        """
        topology, chip = build_topology(target), target.chip
        if chip is None or chip.compiler_name is None:
            raise ValueError(
                f"target.chip.compiler_name is not set, so target={target.describe()} cannot be compiled for without "
                "its devices. Set it to libtpu's name of the chip, or use a slice such as target=v4-64."
            )
        for variable, value in ENVIRONMENT.items():
            os.environ.setdefault(variable, value)
        from jax.experimental import topologies

        name = f"{chip.compiler_name}:{format_shape(topology.shape)}{TWISTED_SUFFIX if topology.twisted else ''}"
        options = {**chip.compiler_options, **_topology_options(topology)}
        # JAX refuses a program with devices of two descriptions, even of the same topology.
        if (devices := _described_devices.get(key := f"{name} {options}")) is not None:
            return list(devices)
        try:
            with _captured_stderr() as stderr:
                devices = topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices
        except Exception as error:  # libtpu raises several types
            raise ValueError(self.compiler_install_hint(target) or _refusal_message(target, topology, error)) from error
        assert len(devices) == topology.devices, (name, len(devices), stderr)
        _described_devices[key] = tuple(devices)
        return list(devices)

    def flag_problem(self, lines: Iterable[str]) -> str | None:
        """Return the message for a flag in LIBTPU_INIT_ARGS that libtpu refuses in its output, or None."""
        reason = next(filter(None, map(flag_refusal_reason, map(str.strip, lines))), None)
        value = os.environ.get(self.flags_variable, "")
        return reason and f"{self.flags_variable}={value}: libtpu {reason}. Change the variable, or unset it."

    def refuse_wrong_flags(self) -> None:
        """Raise ValueError if libtpu refuses LIBTPU_INIT_ARGS. Loads it in a child process, which it would end."""
        if (value := os.environ.get(self.flags_variable)) and (problem := self.flag_problem(_load_with_flags(value))):
            raise ValueError(problem)

    def peak_bytes(self, memory_stats: Any) -> int:
        """Return the peak memory that the TPU compiler compares with its limit, in bytes per device.

        This is the peak that the compiler reports. Without a reported peak, returns the sum of all parts, which counts
        some temporaries twice (20 GiB for a program that fits into 15.75, see experiments/LOG.md).

        The reported peak consists of the arguments and results, and the larger of two parts: temporaries in HBM, and
        temporaries in host memory (offloaded activations). If those in host memory are larger, returns an upper bound:
        the reported peak or, if smaller, the arguments, results and sum of temporaries in HBM.
        """
        if not (reported_peak := memory_stats.peak_memory_in_bytes):
            return super().peak_bytes(memory_stats)
        base_bytes = argument_output_bytes(memory_stats)
        # 1.01: the reported peak includes small buffers.
        is_host_peak = reported_peak - base_bytes <= 1.01 * memory_stats.host_temp_size_in_bytes
        return min(reported_peak, base_bytes + memory_stats.temp_size_in_bytes) if is_host_peak else reported_peak

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
        """Return the bytes of activations when memory use peaks.

        Gradients are excluded, because they are counted elsewhere. The peak is either at the loss or in the backward
        pass of a group of blocks.
        """
        import numpy as np

        loss_peak, backward_peak = (
            LOSS_FACTOR * loss_bytes,
            gradient_bytes + np.maximum(GROUP_FACTOR * group_bytes, kernel_bytes) + recomputed_bytes + gathered_bytes,
        )
        return saved_bytes + UNNAMED_FACTOR * unnamed_bytes + np.maximum(loss_peak, backward_peak) - gradient_bytes

    def step_options(self, largest_gradient_bytes: int, devices: int) -> dict[str, str]:
        """Return the XLA option that keeps gradients of gathered weights out of windowed einsums.

        If a matmul's result is reduce-scattered and large, and the ring is short, XLA splits the matmul into a loop of
        small ones (a windowed einsum). This is faster for activations over a tensor-parallel axis, but two to three
        times slower for gradients of gathered weights (compiler estimates for v5p 4x4x4 and v6e 4x4,
        experiments/LOG.md). The option is XLA's size threshold in MiB. It is set just above the largest gradient.

        Args:
            largest_gradient_bytes: Size of the largest gradient, in bytes.
            devices: Number of devices of the mesh, which does not matter.
        """
        return {"xla_jf_spmd_threshold_for_windowed_einsum_mib": str(largest_gradient_bytes // 2**20 + 1)}


def _topology_options(topology: Topology) -> dict[str, int | tuple[int | bool, ...]]:
    """Return the options for which libtpu's defaults differ from Cloud TPU: hosts, slices, and rings.

    By default, libtpu 0.0.50.1 closes no axis of a 3-D torus, nor the long one of 8x16. With the right options it
    compiles different collectives: an all-gather over 4x4x4 v4 chips uses all three axes at a time.
    """
    missing = 3 - len(topology.shape)
    hosts = (*topology.host_bounds, *(1,) * missing)
    options: dict[str, int | tuple[int | bool, ...]] = {"chips_per_host_bounds": hosts}
    if any(topology.wrap):
        options["wrap"] = (*topology.wrap, *(False,) * missing)
    if topology.slices > 1:
        options["num_slices"] = topology.slices
    return options


def _refusal_message(target: TargetConfig, topology: Topology, error: Exception) -> str:
    assert target.chip is not None
    nearest = nearest_hint(target.chip.slices.similar_shapes(topology.shape), topology_override)
    return f"target={target.describe()} is refused by libtpu: {topology_reason(error)}. {nearest}"


@functools.cache
def _load_with_flags(value: str) -> list[str]:
    """Return the output of a process that loads libtpu with these flags."""
    load = 'from jax.experimental import topologies as t; t.get_topology_desc("v5e:2x2", platform="tpu")'
    environment = {**ENVIRONMENT, **os.environ, LIBTPU_FLAGS_VARIABLE: value}
    child = subprocess.run([sys.executable, "-c", load], env=environment, capture_output=True, check=False)
    return (child.stdout + child.stderr).decode(errors="replace").splitlines()


@contextlib.contextmanager
def _captured_stderr() -> Iterator[list[str]]:
    """Capture what libtpu writes to stderr. The yielded list receives the lines on exit.

    Captures nothing if LIBTPU_INIT_ARGS is set, because libtpu ends the process after its message about a wrong flag.
    """
    lines: list[str] = []
    if LIBTPU_FLAGS_VARIABLE in os.environ:
        yield lines
        return
    with tempfile.TemporaryFile(mode="w+", errors="replace") as file:
        saved_stderr = os.dup(2)
        try:
            os.dup2(file.fileno(), 2)
            yield lines
        finally:
            os.dup2(saved_stderr, 2)
            os.close(saved_stderr)
            file.seek(0)
            lines += file.read().splitlines()


PLATFORM = Tpu()
