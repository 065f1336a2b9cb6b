"""The CPU platform. One host simulates as many devices as a mesh needs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from valkyrie.hardware.platforms import Platform

if TYPE_CHECKING:
    from valkyrie.hardware.target import TargetConfig


class Cpu(Platform):
    """The CPU of the host."""

    name = jax_name = lowering_name = "cpu"
    runs_on_host = True
    compile_note = (
        "Compiled for CPU: reports memory and the bytes sent over each mesh axis, but no step time. To predict the "
        "step time, use a TPU slice, such as target=v4-64."
    )
    scan = "sequential"

    def devices_to_compile_for(self, target: TargetConfig, size: int) -> list[Any]:
        """Return `size` simulated devices. Call it before anything else initialises a JAX backend."""
        os.environ["JAX_PLATFORMS"] = "cpu"
        import jax

        jax.config.update("jax_num_cpu_devices", size)
        return jax.devices("cpu")


PLATFORM = Cpu()
