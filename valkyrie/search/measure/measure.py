"""Measures a layout: runs the training step on the local devices and times each step after a warm-up."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from valkyrie.compiled.collectives import collective_uses
from valkyrie.compiled.communication import sum_communication
from valkyrie.compiled.hlo import parse_module
from valkyrie.config.modes import settings_for
from valkyrie.config.run import Run
from valkyrie.foreign_errors import is_out_of_memory
from valkyrie.modes.measure import Config as MeasureMode
from valkyrie.modes.measure import MeasuredData
from valkyrie.parallel.mesh import build_mesh
from valkyrie.problems import first_line
from valkyrie.runs.folder import package_versions
from valkyrie.search.compile.executable import program_memory, step_memory
from valkyrie.search.compile.prediction import CompileStatus, CompileTimes, MeasuredStep, Measurement
from valkyrie.search.measure.profile import trace_collectives
from valkyrie.train.devices import Devices
from valkyrie.train.prepare import refuse_unsuitable_data
from valkyrie.train.program import StepProgram, serialised_module
from valkyrie.train.room import DoesNotFitError, check_memory_fit


def measure(
    run: Run, devices: Devices, trace_folder: Path | None = None, warn: Callable[[str], Any] | None = None
) -> Measurement:
    """Measure a layout: step times, rates, memory, and communication.

    Each step starts after the results of the step before are ready, so that steps are timed separately. Batches are
    random tokens that are already on the devices. With `mode.data=real`, they come from the run's loader, and loading
    is part of the step time. A few more steps are traced to measure the time in collectives.

    If the layout does not fit, the status of the result is `does_not_fit`. Raises ValueError if the arrays of simulated
    devices exceed this machine's memory. Times on simulated devices are not those of real devices.

    Args:
        run: The run.
        devices: The devices.
        trace_folder: Folder for the profiler trace, or None to delete it.
        warn: Called with a warning if the memory may be too small.
    """
    measurement = Measurement(
        about=run.layout_record(),
        status=CompileStatus.does_not_fit,
        versions=package_versions(),
        simulated=devices.simulated,
        devices=f"{len(devices.devices)} x {devices.devices[0].device_kind}",
        data=run.config.data.name if settings_for(MeasureMode, run.config.mode).data is MeasuredData.real else "random",
    )
    try:
        return _time_steps(measurement, run, devices, trace_folder, warn)
    except DoesNotFitError as error:
        return replace(measurement, reason=str(error))
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(str(error)):
            raise
        return replace(measurement, reason=first_line(error))


def _time_steps(
    measurement: Measurement, run: Run, devices: Devices, trace_folder: Path | None, warn: Callable[[str], Any] | None
) -> Measurement:
    program = StepProgram(run, build_mesh(run.config.mesh, devices.devices))
    check_memory_fit(program, devices, say=warn)
    mode = settings_for(MeasureMode, run.config.mode)
    with _batches(run, program) as batches:
        start_time = time.perf_counter()
        compiled = program.compile_step()
        compile_s = time.perf_counter() - start_time
        state = program.init(run.config.seed)
        metrics: dict[str, jax.Array] = {}

        def step() -> object:
            nonlocal state, metrics
            state, metrics = compiled(state, next(batches))
            return jax.block_until_ready((state, metrics))

        step_times_s = []
        for _ in range(mode.warmup + mode.repeats):
            start_time = time.perf_counter()
            step()
            step_times_s.append(time.perf_counter() - start_time)
        loss = float(metrics["loss"])
        module = parse_module(serialised_module(compiled))
        axes = {str(name): int(size) for name, size in program.mesh.shape.items()}
        collective_trace = trace_collectives(step, module, axes, trace_folder)
    memory = step_memory(program, program_memory(compiled, program.backend))
    return replace(
        measurement,
        status=CompileStatus.ok,
        compile=CompileTimes(compile_s=compile_s),
        options=tuple(program.options),
        memory=replace(memory, reported_peak=_reported_peak(devices)),
        step=_summarise_steps(run, devices, step_times_s, mode.warmup),
        communication=sum_communication(collective_uses(module, axes)),
        trace=collective_trace,
        loss=loss,
    )


@contextlib.contextmanager
def _batches(run: Run, program: StepProgram) -> Iterator[Iterator[Any]]:
    """Provide endless batches on the devices: the same random tokens every time, or the batches of the run's loader."""
    config = run.config
    if settings_for(MeasureMode, config.mode).data is MeasuredData.random:
        batch = program.task.random_batch(
            config.batch, config.seq, run.model.vocab_size, config.seed, program.local_rows
        )
        yield itertools.repeat(program.place(batch))
        return
    refuse_unsuitable_data(run)
    with program.loader(run.config.data.open(run.tokenizer), "train") as loader:
        yield map(program.place, loader)


def _summarise_steps(run: Run, devices: Devices, step_times_s: list[float], warmup: int) -> MeasuredStep:
    """Return the median, 90th percentile and minimum of the timed steps, and the rates of the median step."""
    config, chip, timed_s = run.config, devices.chip, step_times_s[warmup:]
    tokens, median = config.batch * config.seq, statistics.median(timed_s)
    peak = None if chip is None else chip.peak_flops(config.precision.compute)
    return MeasuredStep(
        step_s=median,
        p90_s=float(np.quantile(timed_s, 0.9)),
        min_s=min(timed_s),
        seconds=tuple(timed_s),
        tokens_per_second=tokens / median,
        tokens_per_second_per_chip=tokens / median / devices.chips,
        mfu=None if peak is None else run.step_flops / median / (devices.chips * peak),
        mfu_denominator=None if peak is None or chip is None else f"{peak / 1e12:g} TFLOP/s per {chip.name} chip",
        first_step_s=step_times_s[0],
    )


def _reported_peak(devices: Devices) -> int | None:
    """Return the largest peak memory reported by a device of this process, in bytes, or None if unknown."""
    stats_by_device = [
        device.memory_stats() for device in devices.devices if device.process_index == jax.process_index()
    ]
    peaks = [stats["peak_bytes_in_use"] for stats in stats_by_device if stats and "peak_bytes_in_use" in stats]
    return max(peaks, default=None)
