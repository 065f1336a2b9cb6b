"""Decides how a layout is measured: the real step on the devices at hand, warmed up, then timed step by step."""

from __future__ import annotations

import statistics
import time
from typing import Any

import jax
import numpy as np

from valkyrie.parallel.mesh import build_mesh
from valkyrie.run import Run
from valkyrie.search.compiled import compiled_memory, serialised_module
from valkyrie.search.hlo import parse
from valkyrie.search.summary import SCHEMA, about, communication, memory_split
from valkyrie.search.uses import traffic
from valkyrie.train.devices import Devices
from valkyrie.train.folder import versions
from valkyrie.train.program import StepProgram

OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
"""What an XLA error about memory begins with, on every backend."""


def measure(run: Run, devices: Devices, warmup: int, repeats: int) -> dict[str, Any]:
    """Return the summary of a measured layout: seconds of each timed step, rates, memory, and what the program sends.

    Every step waits for its result before the next one starts, so that a step's seconds are its own; the batch is
    random tokens of the run's shape. What does not fit comes back as a result. `simulated` says that no time is real.
    """
    found: dict[str, Any] = {
        "schema": SCHEMA,
        "stage": "measure",
        "about": about(run),
        "versions": versions(),
        "simulated": devices.simulated,
        "devices": f"{len(devices.devices)} x {devices.devices[0].device_kind}",
    }
    try:
        return found | {"status": "ok", "reason": None} | _measured(run, devices, warmup, repeats)
    except jax.errors.JaxRuntimeError as error:
        if OUT_OF_MEMORY not in str(error):
            raise
        return found | {"status": "does_not_fit", "reason": str(error).splitlines()[0]}


def _measured(run: Run, devices: Devices, warmup: int, repeats: int) -> dict[str, Any]:
    program = StepProgram(run, build_mesh(run.config.mesh, devices.devices))
    began = time.perf_counter()
    compiled = program.lower_step().compile()
    compile_s = time.perf_counter() - began
    state = program.init(run.config.seed)
    batch = program.place(random_batch(run))
    seconds = []
    for _ in range(warmup + repeats):
        began = time.perf_counter()
        state, metrics = compiled(state, batch)
        jax.block_until_ready((state, metrics))
        seconds.append(time.perf_counter() - began)
    module = parse(serialised_module(compiled))
    axes = {str(name): int(size) for name, size in program.mesh.shape.items()}
    return {
        "compile": {"compile_s": compile_s},
        "memory": memory_split(run, compiled_memory(program, compiled)) | {"reported_peak": _reported_peak(devices)},
        "step": _speed(run, devices, seconds[warmup:]) | {"first_step_s": seconds[0]},
        "communication": communication(traffic(module, axes)),
        "loss": float(metrics["loss"]),
    }


def random_batch(run: Run) -> dict[str, np.ndarray]:
    """Return this process's part of a global batch of random tokens, each row one document, every target counted."""
    config, rows = run.config, run.config.batch // jax.process_count()
    rng = np.random.default_rng([config.seed, jax.process_index()])
    tokens = rng.integers(0, run.model.vocab_size, (rows, config.seq + 1)).astype(np.int32)
    shape = (rows, config.seq)
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segment_ids": np.zeros(shape, np.int32),
        "weights": np.ones(shape, np.float32),
    }


def _speed(run: Run, devices: Devices, seconds: list[float]) -> dict[str, Any]:
    """Return median, 90th percentile and least seconds of a step, and the rates by the median."""
    config, chip = run.config, devices.chip
    tokens, median = config.batch * config.seq, statistics.median(seconds)
    chips = len(devices.devices) / (chip.devices if chip else 1)
    peak = None if chip is None else chip.peak_flops(config.precision.compute)
    return {
        "step_s": median,
        "p90_s": float(np.quantile(seconds, 0.9)),
        "min_s": min(seconds),
        "seconds": seconds,
        "tokens_per_second": tokens / median,
        "tokens_per_second_per_chip": tokens / median / chips,
        "mfu": None if peak is None else run.step_flops / median / (chips * peak),
        "mfu_denominator": None if peak is None or chip is None else f"{peak / 1e12:g} TFLOP/s of a {chip.name} chip",
    }


def _reported_peak(devices: Devices) -> int | None:
    """Return the most bytes that a device of this process says it held; None where the backend does not count."""
    held = [device.memory_stats() for device in devices.devices if device.process_index == jax.process_index()]
    peaks = [stats["peak_bytes_in_use"] for stats in held if stats and "peak_bytes_in_use" in stats]
    return max(peaks, default=None)
