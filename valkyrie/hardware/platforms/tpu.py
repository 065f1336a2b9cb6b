"""TPUs: libtpu compiles for any slice, without a TPU."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from valkyrie.foreign_errors import topology_reason
from valkyrie.hardware.platforms import Platform, at_rest
from valkyrie.hardware.slices import TWISTED, nearest_hint, shape_text
from valkyrie.hardware.target import TargetConfig, Topology, topology_of, topology_text

ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",  # else libtpu asks a metadata server for minutes
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else a second process that compiles is ended
}
"""What libtpu must be told before it is loaded, where there is no TPU to attach to."""

OF_UNNAMED, OF_LOSS, OF_GROUP = 0.4, 0.65, 0.5
"""What the TPU compiler takes of three parts, by least error over the layouts of experiments/memory.py.

More of activations without a name (0.4 again: it pads them, and norms keep more), of the two copies of the logits that
the model counts (1.3 copies), of a group's working set (half is there at a time).
"""


class Tpu(Platform):
    """TPUs, joined by a torus within a slice."""

    name = jax_name = lowering_name = extra = "tpu"
    plugins = ("libtpu",)
    uses_every_device = True
    has_torus = True
    rented_as_slices = True
    compiles_without_devices = True
    memory_limit_option = "xla_tpu_max_hbm_size_mib"
    peak_has_code = False
    has_estimate_errors = True
    replay = "libtpu"
    attention = "splash"
    scan = "kernel"
    runs_pallas_tpu = True
    rotates_by_product = True

    def device_files(self) -> list[Path]:
        """`/dev/accel0` and so on, or those in `/dev/vfio`."""
        return [*Path("/dev").glob("accel[0-9]*"), *Path("/dev/vfio").glob("[0-9]*")]

    def missing_compiler(self, target: TargetConfig) -> str | None:
        """Return how to install libtpu, or None if it is installed."""
        if self.is_installed():
            return None
        return (
            f"target={target.describe()} is compiled by libtpu, which is not installed here. Install it with "
            "uv sync --extra tpu in the clone; no TPU is needed."
        )

    def compile_devices(self, target: TargetConfig, size: int) -> list[Any]:
        """Return the devices of a slice to compile for, one for each JAX device, as libtpu describes them.

        They carry `coords`, `core_on_chip`, `process_index`, and `slice_index` if there are several slices. ValueError
        in one line if libtpu is missing, or has no such slice.
        """
        topology, chip = topology_of(target), target.chip
        if chip is None or chip.compiler_name is None:
            raise ValueError(
                f"target={target.describe()} is no TPU slice: only those are compiled for without a device."
            )
        for variable, value in ENVIRONMENT.items():
            os.environ.setdefault(variable, value)
        from jax.experimental import topologies

        name = f"{chip.compiler_name}:{shape_text(topology.shape)}{TWISTED if topology.twisted else ''}"
        try:
            with _quiet() as stderr:
                description = topologies.get_topology_desc(
                    platform="tpu", topology_name=name, **chip.compiler_options, **_options(topology)
                )
                devices = list(description.devices)
        except Exception as error:  # libtpu answers with several types; each is a result here
            raise ValueError(self.missing_compiler(target) or _explain(target, topology, error)) from error
        assert len(devices) == topology.devices, (name, len(devices), stderr)
        return devices

    def peak_bytes(self, sizes: Any) -> int:
        """Bytes of one device at the peak, which the TPU compiler states, arguments included, and holds to its limit.

        It is the number of its refusals. What it calls temporaries has some arrays twice (20 GiB of a program that fits
        into 15.75, experiments/LOG.md). Beside the arguments that peak has the larger of temporaries in HBM and in host
        memory: where offloaded activations are the larger, all temporaries in HBM stand for it, which is too much at
        worst.
        """
        if not (stated := sizes.peak_memory_in_bytes):
            return super().peak_bytes(sizes)
        resting = at_rest(sizes)
        of_host = stated - resting <= 1.01 * sizes.host_temp_size_in_bytes  # small buffers are beside them
        return min(stated, resting + sizes.temp_size_in_bytes) if of_host else stated

    def activation_bytes(self, kept: Any, unnamed: Any, loss: Any, group: Any, gradients: Any, gathered: Any) -> Any:
        """The peak is at the loss, or in the backward pass, when gradients are there beside a group's working set."""
        import numpy as np

        at_loss, backward = OF_LOSS * loss, gradients + OF_GROUP * group + gathered
        return kept + OF_UNNAMED * unnamed + np.maximum(at_loss, backward) - gradients

    def step_options(self, largest_gradient: int) -> dict[str, str]:
        """The size from which a product whose result is scattered becomes a loop of small products.

        XLA makes that of a product over a short ring, if the result is large. It pays for activations over a tensor
        axis, but gradients of gathered weights become two to three times slower (compiler estimates for v5p 4x4x4 and
        v6e 4x4, experiments/LOG.md): the threshold, in MiB, is put above the largest of them.
        """
        return {"xla_jf_spmd_threshold_for_windowed_einsum_mib": str(largest_gradient // 2**20 + 1)}


def _options(topology: Topology) -> dict[str, Any]:
    """Return what libtpu does not decide as Cloud TPU does: hosts, slices, and which axes close into rings.

    libtpu 0.0.50.1 closes no axis of a 3-D torus by itself, nor the long one of 8x16, and compiles other collectives
    once told: an all-gather over 4x4x4 v4 chips takes all three axes at a time.
    """
    missing = 3 - len(topology.shape)
    options: dict[str, Any] = {"chips_per_host_bounds": (*topology.host_bounds, *(1,) * missing)}
    if any(topology.wrap):
        options["wrap"] = (*topology.wrap, *(False,) * missing)
    if topology.slices > 1:
        options["num_slices"] = topology.slices
    return options


def _explain(target: TargetConfig, topology: Topology, error: Exception) -> str:
    assert target.chip is not None
    nearest = nearest_hint(target.chip.slices.nearest_to(topology.shape), topology_text)
    return f"target={target.describe()} is refused by libtpu: {topology_reason(error)}. {nearest}"


@contextlib.contextmanager
def _quiet() -> Iterator[list[str]]:
    """Keep what libtpu writes to standard error off the user's screen; the lines are filled in at the end."""
    lines: list[str] = []
    with tempfile.TemporaryFile(mode="w+", errors="replace") as file:
        stream = os.dup(2)
        try:
            os.dup2(file.fileno(), 2)
            yield lines
        finally:
            os.dup2(stream, 2)
            os.close(stream)
            file.seek(0)
            lines += file.read().splitlines()


PLATFORM = Tpu()
