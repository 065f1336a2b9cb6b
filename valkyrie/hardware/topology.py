"""Devices to compile for where there are none: the target's slice as libtpu describes it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import tempfile
from collections.abc import Iterator
from typing import Any

from valkyrie.hardware.slices import TWISTED, nearest_hint, shape_text
from valkyrie.hardware.target import Platform, TargetConfig, Topology, topology_of, topology_text

ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",  # else libtpu asks a metadata server for minutes
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else a second process that compiles is ended
}
"""What libtpu must be told before it is loaded, where there is no TPU to attach to."""


def compile_devices(target: TargetConfig) -> list[Any]:
    """Return devices that a program can be compiled for, not run on: one for each JAX device of a TPU target.

    They carry `coords`, `core_on_chip`, `process_index`, and `slice_index` if there are several slices. ValueError in
    one line where libtpu is missing, or has no such slice.
    """
    topology = topology_of(target)
    chip = target.chip
    if target.platform is not Platform.tpu or chip is None or chip.compiler_name is None:
        raise ValueError(f"target={target.describe()} is no TPU slice: only those are compiled for without a device.")
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
        raise ValueError(_explain(target, topology, error)) from error
    assert len(devices) == topology.devices, (name, len(devices), stderr)
    return devices


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


def libtpu_missing(target: TargetConfig) -> str | None:
    """Return what to install where a TPU target's compiler is not there; None where nothing is missing."""
    if target.platform is not Platform.tpu or importlib.util.find_spec("libtpu") is not None:
        return None
    return (
        f"target={target.describe()} is compiled by libtpu, which is not installed here. Install it with "
        "uv sync --extra tpu in the clone; no TPU is needed."
    )


def _explain(target: TargetConfig, topology: Topology, error: Exception) -> str:
    if missing := libtpu_missing(target):
        return missing
    reason = (str(error).splitlines() or [type(error).__name__])[0].removeprefix("INVALID_ARGUMENT: ").rstrip(".")
    assert target.chip is not None
    nearest = nearest_hint(target.chip.slices.nearest_to(topology.shape), topology_text)
    return f"target={target.describe()} is refused by libtpu: {reason}. {nearest}"


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
