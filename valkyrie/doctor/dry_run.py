"""Trains for a few steps on random tokens, checks losses, gradients and replicas, and times each mesh axis."""

from __future__ import annotations

import math
import statistics
import time
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from valkyrie.config.run import Run
from valkyrie.doctor.findings import FAILURE, OK, WARNING, Finding
from valkyrie.parallel.mesh import build_mesh
from valkyrie.processes.team import Team
from valkyrie.train.devices import Devices
from valkyrie.train.program import StepProgram
from valkyrie.train.room import check_memory_fit, explain_oom
from valkyrie.train.state import TrainState
from valkyrie.train.watchdog import Watchdog
from valkyrie.trees import leaf_names
from valkyrie.units import count_text, duration_text

_HANG_REMEDY = (
    "distributed.step_timeout_s sets the limit. If the stack traces of one process differ from those of the others, "
    "that process is probably at fault."
)
_TIMED_SUMS = 20
"""Number of timed `psum` calls per mesh axis."""
_MAX_SUM_S = 0.01
"""Seconds above which a collective of a few bytes on real chips suggests a network problem."""


def dry_run(run: Run, devices: Devices, steps: int, team: Team) -> Iterator[list[Finding]]:
    """Yield the findings of a dry run, stage by stage: mesh axes, memory, compile, steps, replicas.

    All processes of the team must call this together, and must stop the iteration when a stage has failed on any
    process. Raises ValueError if a step runs out of memory.
    """
    program = StepProgram(run, build_mesh(run.config.mesh, devices.devices))
    limit_s = run.config.distributed.step_timeout_s
    with Watchdog(limit_s, team, first_step_limit_s=0.0, remedy=_HANG_REMEDY) as watchdog:
        watchdog.begin_step(0)
        axis_findings = time_axes(program.mesh, devices.simulated)
        with watchdog.paused():
            yield axis_findings
            yield _check_memory(program, devices)
            start = time.perf_counter()
            try:
                with explain_oom(run, devices):
                    compiled_step = program.compile_step()
            except ValueError as error:
                yield [Finding("compile", FAILURE, str(error))]
                return
            yield [Finding("compile", OK, f"the step compiled in {time.perf_counter() - start:.1f} s")]
        with explain_oom(run, devices):
            metrics, step_times_s, state = _run_steps(program, compiled_step, steps, watchdog)
        with watchdog.paused():
            yield [_steps_finding(program, metrics, step_times_s, devices)]
            names, leaves = leaf_names(state.parameters), jax.tree.leaves(state.parameters)
            yield [compare_replicas(dict(zip(names, leaves, strict=True)), team)]


def _check_memory(program: StepProgram, devices: Devices) -> list[Finding]:
    """Return findings about the devices' memory, or an empty list if it is enough."""
    notes: list[str] = []
    try:
        check_memory_fit(program, devices, say=notes.append)
    except ValueError as error:
        return [Finding("memory", FAILURE, str(error))]
    return [Finding("memory", WARNING, note) for note in notes]


def _run_steps(
    program: StepProgram, compiled_step: Any, steps: int, watchdog: Watchdog
) -> tuple[list[dict[str, np.ndarray]], list[float], TrainState]:
    """Train for `steps` steps on random tokens. Returns the metrics and seconds of each step, and the last state."""
    run, metrics, step_times_s = program.run, [], []
    config, state = run.config, program.init(run.config.seed)
    for step in range(steps):
        watchdog.begin_step(step + 1)
        rows = program.task.random_batch(
            config.batch, config.seq, run.model.vocab_size, config.seed + step, program.local_rows
        )
        batch = program.place(rows)
        start = time.perf_counter()
        state, step_metrics = compiled_step(state, batch)
        metrics.append(jax.device_get(step_metrics))
        step_times_s.append(time.perf_counter() - start)
    return metrics, step_times_s, state


def _steps_finding(
    program: StepProgram, metrics: list[dict[str, np.ndarray]], step_times_s: list[float], devices: Devices
) -> Finding:
    """Return a failure if a step has a loss or gradient that is not finite, else the losses and step time."""
    for step, values in enumerate(metrics, 1):
        if not (math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])):
            nonfinite_gradients = np.flatnonzero(~np.isfinite(values["squared_grad_norms"]))
            source = (
                f"; first gradient that is not finite: {program.parameter_names[nonfinite_gradients[0]]}"
                if nonfinite_gradients.size
                else ""
            )
            text = f"step {step}: loss {float(values['loss'])}, gradient norm {float(values['grad_norm'])}{source}"
            remedy = "Lower optimizer.learning_rate, or find the operation with debug=nans."
            return Finding("steps", FAILURE, text, remedy)
    losses = " to ".join(f"{float(values['loss']):.3f}" for values in (metrics[0], metrics[-1]))
    step_time = duration_text(statistics.median(step_times_s[1:] or step_times_s)) + " (simulated)" * devices.simulated
    text = (
        f"loss and gradients stay finite for {count_text(len(metrics), 'step')}, with loss {losses} on random tokens; "
    )
    return Finding("steps", OK, f"{text}a step takes {step_time}")


def compare_replicas(parameters: Mapping[str, jax.Array], team: Team) -> Finding:
    """Check that the copies of each parameter are bitwise equal on all devices of all processes.

    All processes of the team call this together.
    """
    replicated_parameters = {name: array for name, array in parameters.items() if _is_replicated(array)}
    local_checksums = {name: _checksums(array) for name, array in replicated_parameters.items()}
    checksums_by_parameter: dict[str, dict[str, dict[str, int]]] = {}
    for checksums in team.exchange("checksums of parameters", local_checksums):
        for name, checksums_by_index in checksums.items():
            for index, by_device in checksums_by_index.items():
                checksums_by_parameter.setdefault(name, {}).setdefault(index, {}).update(by_device)
    differing_devices = {
        name: devices
        for name, checksums_by_index in checksums_by_parameter.items()
        if (devices := _differing_devices(checksums_by_index))
    }
    if not replicated_parameters:
        return Finding("replicas", OK, "no parameter has copies on several devices")
    if differing_devices:
        name, devices = next(iter(differing_devices.items()))
        text = f"{name} on device{'s' * (len(devices) > 1)} {', '.join(devices[:8])} differs from its other copies"
        total = (
            f" ({len(differing_devices)} of {len(replicated_parameters)} parameters differ)"
            if len(differing_devices) > 1
            else ""
        )
        remedy = (
            "Run it again. If the same device differs, run without its host. Otherwise, report a bug with this table."
        )
        return Finding("replicas", FAILURE, text + total, remedy)
    text = f"all copies are bitwise equal ({len(replicated_parameters)} of {len(parameters)} parameters have copies)"
    return Finding("replicas", OK, text)


def _is_replicated(array: jax.Array) -> bool:
    index_by_device = array.sharding.devices_indices_map(array.shape)
    return len({_index_text(index) for index in index_by_device.values()}) < len(index_by_device)


def _checksums(array: jax.Array) -> dict[str, dict[str, int]]:
    """Return the CRC-32 of each addressable shard of an array, as `{index of the shard: {device id: checksum}}`."""
    checksums: dict[str, dict[str, int]] = {}
    for shard in array.addressable_shards:
        bits = np.ascontiguousarray(np.asarray(shard.data)).view(np.uint8).data
        checksums.setdefault(_index_text(shard.index), {})[str(shard.device.id)] = zlib.crc32(bits)
    return checksums


def _index_text(index: tuple[slice, ...]) -> str:
    return ",".join(f"{dimension.start or 0}:{dimension.stop}" for dimension in index)


def _differing_devices(checksums_by_index: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return the sorted ids of devices with a shard whose checksum is not the most common one among its replicas.

    `checksums_by_index` is `{index of the shard: {device id: checksum}}`.
    """
    devices = []
    for by_device in checksums_by_index.values():
        common = statistics.mode(by_device.values())
        devices += [device for device, value in by_device.items() if value != common]
    return sorted(devices, key=int)


def time_axes(mesh: Any, is_simulated: bool) -> list[Finding]:
    """Time a `psum` of a few bytes over each mesh axis with more than one device, and check its result.

    Returns one finding per axis: a failure if the sum is wrong, or a warning if it is slow and not `is_simulated`.
    """
    findings = []
    for axis, size in mesh.shape.items():
        if size == 1:
            continue
        seconds, is_correct = _time_sum(mesh, axis)
        finding = Finding(f"axis {axis}", OK, f"a sum over {axis}={size} takes {duration_text(seconds)}")
        if is_simulated:
            finding = finding._replace(text=f"{finding.text} (simulated)")
        elif seconds > _MAX_SUM_S:
            remedy = "Within a slice, it should take well under a millisecond."
            finding = finding._replace(severity=WARNING, remedy=remedy)
        if not is_correct:
            text = f"a sum of ones over {axis}={size} is not {size}"
            finding = Finding(f"axis {axis}", FAILURE, text, "A link or chip is faulty: use another slice.")
        findings.append(finding)
    return findings


def _time_sum(mesh: Any, axis: str) -> tuple[float, bool]:
    """Return the median seconds of a `psum` of ones over an axis, and whether it is correct on the local devices."""
    names = tuple(mesh.axis_names)
    in_specs, out_specs = PartitionSpec(*names), PartitionSpec(*(None if name == axis else name for name in names))
    shape = tuple(mesh.shape[name] for name in names)
    ones = jax.jit(lambda: jnp.ones(shape), out_shardings=NamedSharding(mesh, in_specs))()

    def sum_over_axis(part: jax.Array) -> jax.Array:
        return jax.lax.psum(part, axis)

    compiled_sum = jax.jit(jax.shard_map(sum_over_axis, mesh=mesh, in_specs=in_specs, out_specs=out_specs))
    result = jax.block_until_ready(compiled_sum(ones))
    times_s = []
    for _ in range(_TIMED_SUMS):
        start = time.perf_counter()
        jax.block_until_ready(compiled_sum(ones))
        times_s.append(time.perf_counter() - start)
    is_correct = all(np.all(np.asarray(shard.data) == mesh.shape[axis]) for shard in result.addressable_shards)
    return statistics.median(times_s), is_correct
