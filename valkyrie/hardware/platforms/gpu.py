"""The GPU platform. XLA compiles only for GPUs of this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from valkyrie.hardware.platforms import Platform

if TYPE_CHECKING:
    from valkyrie.hardware.target import ChipConfig, TargetConfig

_MEMORY_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
"""Environment variable with the share of a GPU's memory that JAX reserves. The rest is for CUDA, NCCL and cuDNN."""


class Gpu(Platform):
    """NVIDIA GPUs, joined by a switch within a host."""

    name = jax_name = "gpu"
    aliases = ("cuda", "rocm")
    lowering_name = "cuda"
    extra = "cuda"
    plugins = ("jax_cuda12_plugin", "jax_cuda13_plugin")
    attention = "cudnn"
    scan = "associative"
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

    def compile_environment(self) -> Mapping[str, str]:
        """Return no variables, so that GPUs stay visible: XLA compiles only for visible ones."""
        return {}

    def devices_to_compile_for(self, target: TargetConfig, size: int) -> list[Any]:
        """Return the GPUs of this machine. Raises ValueError if there are fewer than `size`."""
        import jax

        try:
            devices = jax.devices(self.jax_name)
        except RuntimeError:
            raise ValueError(
                f"target={target.describe()}: compiling for a GPU needs a CUDA backend and its driver, but JAX finds "
                "none. Run `uv sync --extra cuda` in the clone and compile on a machine with this GPU, or use a TPU "
                "target, which compiles anywhere."
            ) from None
        if len(devices) < size:
            raise ValueError(
                f"target={target.describe()}: the mesh needs {size} GPUs, but this machine has {len(devices)} x "
                f"{devices[0].device_kind}, and XLA compiles only for GPUs that it can see. Use a smaller mesh, or a "
                "TPU target, which compiles anywhere."
            )
        return devices


PLATFORM = Gpu()
