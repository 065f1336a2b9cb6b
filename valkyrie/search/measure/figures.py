"""`mode=figures`: measures the speed of the local devices and writes it as a `ChipConfig` for step-time estimates.

Times matmuls, memory and attention on all devices at once, because CPU devices share cores. Times collectives among
the devices of a process and among all devices. Calls each function a few times and uses the fastest call. The results
do not depend on a layout or model.
"""

from __future__ import annotations

import json
import math
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from valkyrie.config.modes import FIGURES_FILE, MACHINES_FILE
from valkyrie.config.run import Run
from valkyrie.hardware.target import ChipConfig
from valkyrie.paths import write_atomic
from valkyrie.precision import DType
from valkyrie.processes.team import Team
from valkyrie.records import write_record
from valkyrie.runs.folder import choose_run_folder, write_run_files
from valkyrie.search.measure.figures_file import describe_figures
from valkyrie.train.devices import prepare_devices
from valkyrie.train.processes import join_processes
from valkyrie.train.screen import make_console

REPEATS = 5
LARGE_SIZE, SMALL_SIZE = 512, 64
"""Sizes n of the timed n x n matmuls. The large one gives the peak rate, the small one the rate at small sizes."""
PROCESS_BYTES, MIN_DEVICE_BYTES = 2**28, 2**24
"""Size of the arrays for timing memory: total bytes per process (more than most caches), and minimum per device."""
MAX_CALL_S = 0.15
"""Collectives are timed at increasing sizes until a call takes more than this many seconds.

Functions timed by `_seconds_per_iteration` are repeated within a call until it takes more than half as long.
`MAX_COLLECTIVE_BYTES` and `MAX_ITERATIONS` may end this earlier.
"""
MAX_COLLECTIVE_BYTES = 2**25
"""Maximum bytes per device of the result of a timed collective."""
MAX_ITERATIONS = 2**14
"""Maximum number of iterations of a function in one call."""
SEQ_LENGTH, HEAD_DIM, HEADS = 256, 32, 4
"""Sequence length, head dimension and number of heads of the timed attention."""


@dataclass(frozen=True)
class CollectiveSpeed:
    """Speed of collectives: GB/s that a device sends in all-gathers and in all-reduces, and the latency in seconds."""

    gather_gbs: float
    sum_gbs: float
    latency_s: float


def figures_mode(run: Run) -> int:
    """Time the local devices, print their speeds, store them in the run folder, and return the exit status."""
    with join_processes(run) as team:
        console = make_console()
        devices = prepare_devices(run, console.print, team).devices
        folder = Path(team.broadcast_from_leader("run folder", lambda: str(choose_run_folder(run))))
        chip = measure_chip(devices, run.config.precision.compute, team)
        machines = sorted(set(team.exchange("machine", socket.gethostname())))
        if team.is_leader:
            write_run_files(run, folder)
            write_record(folder / FIGURES_FILE, chip)
            write_atomic(folder / MACHINES_FILE, json.dumps(machines) + "\n")
            console.print(describe_figures(chip), highlight=False, soft_wrap=True)
            console.print(f"figures: {folder / FIGURES_FILE}", soft_wrap=True)
    return 0


def measure_chip(devices: Sequence[Any], compute_dtype: DType, team: Team) -> ChipConfig:
    """Measure the FLOP/s, memory bandwidth and collective speeds of the devices, and return them as a chip.

    Each process counts as a host. All processes of the team must call this.
    """
    dtype, mesh = jnp.dtype(compute_dtype.value), Mesh(np.array(devices), ("all",))
    timer = _Timer(team, mesh)
    devices_per_process = len(devices) // team.count
    peak, half_rate_flops = _product_speed(timer, dtype)
    estimate = {"products": 1.0, "hbm": 1.0, "tile": 1.0, "float32_passes": 1.0, "gathers": 1.0, "outside": 1.0}
    estimate |= {f"hidden_{what}": 0.0 for what in ("weights", "updates", "gradients", "activations", "stages", "host")}
    compiler_constants = {"apart": 1.0, "windowed": 0.0, "whole_batches": 0.0}
    estimate |= compiler_constants  # how XLA's CPU compiler schedules collectives
    estimate |= {
        "half_rate_flops": half_rate_flops,
        "mixing": _attention_speed(timer, dtype) / peak,
        "launch_s": _launch_seconds(timer, dtype),
    }
    chip = ChipConfig(
        name="cpu",
        platform="cpu",
        peak_tflops={compute_dtype.value: peak / 1e12},
        hbm_gbs=_memory_bandwidth(timer, devices_per_process) / 1e9,
        host_bounds=[devices_per_process],
        device_kinds=[devices[0].device_kind],
        estimate=estimate,
    )
    intra_process_speed = _measure_collectives(timer, dtype, devices_per_process) if devices_per_process > 1 else None
    if intra_process_speed is not None:
        chip.switch_gbs = intra_process_speed.gather_gbs
        estimate["sums"] = intra_process_speed.sum_gbs / intra_process_speed.gather_gbs
    estimate["start_s"] = 0.0 if intra_process_speed is None else intra_process_speed.latency_s
    if team.count > 1:
        inter_process_speed = _measure_collectives(timer, dtype, len(devices))
        chip.dcn_gbs_per_host = statistics.geometric_mean([inter_process_speed.gather_gbs, inter_process_speed.sum_gbs])
        outer_start_s = inter_process_speed.latency_s - estimate["start_s"]
        estimate["outer_start_s"] = max(outer_start_s, 0.0) / math.log2(team.count)
    # XLA's CPU compiler implements a reduce-scatter as an all-reduce and a slice.
    estimate["scatters"] = (
        2.0 if intra_process_speed is None else 2 * intra_process_speed.gather_gbs / intra_process_speed.sum_gbs
    )
    return chip


class _Timer:
    """Times functions on arrays that are split over all devices. Returns the same result on every process of a team."""

    def __init__(self, team: Team, mesh: Mesh) -> None:
        self.team, self.mesh, self._calls = team, mesh, 0

    @property
    def count(self) -> int:
        """Number of devices that take part in each call."""
        return self.mesh.size

    def __call__(
        self, function: Callable[..., Any], shape: Sequence[int], dtype: Any = jnp.float32, mesh: Mesh | None = None
    ) -> float:
        """Return the seconds of the fastest of `REPEATS` calls of a function. All devices start a call together.

        The time of a call is that of the slowest process. `shape` is the shape of the array on each device. `mesh`
        divides the devices for collectives, and is by default a single axis with all devices.
        """
        mesh = mesh or self.mesh
        axes = PartitionSpec(mesh.axis_names)
        shard = np.full(tuple(shape), 0.01, dtype)
        global_shape = (mesh.size * shape[0], *shape[1:])
        array = jax.make_array_from_callback(global_shape, NamedSharding(mesh, axes), lambda index: shard)
        mapped = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=axes, out_specs=axes, check_vma=False))
        jax.block_until_ready(mapped(array))
        slowest_seconds = []
        for _ in range(REPEATS):
            self._calls += 1
            self.team.wait(f"call {self._calls}")
            start_time = time.perf_counter()
            jax.block_until_ready(mapped(array))
            slowest_seconds.append(max(self.team.exchange(f"seconds {self._calls}", time.perf_counter() - start_time)))
        return min(slowest_seconds)


def _product_speed(timer: _Timer, dtype: Any) -> tuple[float, float]:
    """Return the FLOP/s of a device in large matmuls, and the FLOPs of a matmul that achieves half of this rate."""

    def time_matmul(side: int) -> float:
        def matmul(x: jax.Array, y: jax.Array) -> jax.Array:
            return (x @ y).astype(x.dtype)

        return _seconds_per_iteration(timer, matmul, (side, side), dtype)

    large_s, small_s = time_matmul(LARGE_SIZE), time_matmul(SMALL_SIZE)
    peak, flops = 2.0 * LARGE_SIZE**3 / large_s, 2.0 * SMALL_SIZE**3
    return peak, min(max(flops * (peak * small_s / flops - 1), 1e4), 1e9)


def _memory_bandwidth(timer: _Timer, devices: int) -> float:
    """Return the memory bandwidth of a device, in bytes per second, while all `devices` of its process are busy."""
    bytes_ = max(PROCESS_BYTES // devices, MIN_DEVICE_BYTES)
    return 2 * bytes_ / _seconds_per_iteration(timer, lambda _, y: 1.01 * y, (bytes_ // 4,), jnp.float32)


def _seconds_per_iteration(
    timer: _Timer, function: Callable[[jax.Array, jax.Array], jax.Array], shape: Sequence[int], dtype: Any
) -> float:
    """Return the seconds of one iteration of `y = function(x, y)`, averaged over many iterations in one call."""

    def repeat(iterations: int) -> Callable[[jax.Array], jax.Array]:
        return lambda x: jax.lax.fori_loop(0, iterations, lambda i, y: function(x, y), x)

    iterations = 4
    while (seconds := timer(repeat(iterations), shape, dtype)) <= MAX_CALL_S / 2 and iterations < MAX_ITERATIONS:
        iterations *= 4
    return seconds / iterations


def _attention_speed(timer: _Timer, dtype: Any) -> float:
    """Return the FLOP/s of a device in attention, counting its two matmuls forward and four backward."""
    flops = 3 * 4.0 * HEADS * SEQ_LENGTH**2 * HEAD_DIM
    return flops / timer(_forward_and_backward, (HEADS, SEQ_LENGTH, HEAD_DIM), dtype)


def _forward_and_backward(x: jax.Array) -> jax.Array:
    """Return the output of attention and its gradient, so that the compiler cannot drop a matmul."""
    out, backward = jax.vjp(_attend, x)
    return jnp.stack([out, *backward(out)], axis=1)


def _attend(x: jax.Array) -> jax.Array:
    scores = jnp.einsum("hqd,hkd->hqk", x, x).astype(jnp.float32)
    return jnp.einsum("hqk,hkd->hqd", jax.nn.softmax(scores).astype(x.dtype), x)


def _launch_seconds(timer: _Timer, dtype: Any) -> float:
    """Return the fixed cost of an operation in seconds: the time of a tiny matmul with the loop and ops around it."""
    return _seconds_per_iteration(timer, lambda x, y: jnp.tanh(y @ x) + 1, (8, 8), dtype)


def _measure_collectives(timer: _Timer, dtype: Any, group_size: int) -> CollectiveSpeed:
    """Measure collectives in all groups of `group_size` neighbouring devices at once."""
    mesh = Mesh(timer.mesh.devices.reshape(-1, group_size), ("others", "group"))
    latency_s = timer(lambda x: jax.lax.psum(x, "group"), (8,), dtype, mesh)

    def rate(function: Callable[[jax.Array], jax.Array], sent_per_byte: float, growth: int = 1) -> float:
        """Return the GB/s that a device sends in `function`, without the latency.

        For each byte of input, a device sends `sent_per_byte` bytes and `function` returns `growth` bytes.
        """
        bytes_ = 2**16
        while True:
            seconds = timer(function, (bytes_ // jnp.dtype(dtype).itemsize,), dtype, mesh)
            if seconds > MAX_CALL_S or 4 * bytes_ * growth > MAX_COLLECTIVE_BYTES:
                return sent_per_byte * bytes_ / max(seconds - latency_s, 0.1 * seconds) / 1e9
            bytes_ *= 4

    gather_gbs = rate(lambda x: jax.lax.all_gather(x, "group", tiled=True), group_size - 1, group_size)
    return CollectiveSpeed(
        gather_gbs, rate(lambda x: jax.lax.psum(x, "group"), 2 * (group_size - 1) / group_size), latency_s
    )
