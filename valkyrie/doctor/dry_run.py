"""Dry run: a few steps on random tokens. Checks for finite numbers and equal replicas, and times each mesh axis."""

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
from valkyrie.doctor.findings import FAILS, FINE, WARNING, Finding
from valkyrie.parallel.mesh import build_mesh
from valkyrie.processes.team import Team
from valkyrie.train.devices import Devices
from valkyrie.train.program import StepProgram
from valkyrie.train.room import check_room, explain_oom
from valkyrie.train.state import TrainState
from valkyrie.train.watchdog import Watchdog
from valkyrie.trees import leaf_names
from valkyrie.units import duration

_REMEDY = "distributed.step_timeout_s is the limit; look for the process whose stacks differ from the others'."
_REPEATS = 20
_SLOW_S = 0.01
"""Seconds above which a collective of a few bytes on real chips suggests a problem of the network."""


def dry_run(run: Run, devices: Devices, steps: int, team: Team) -> Iterator[list[Finding]]:
    """Yield the findings of a dry run in parts: mesh axes, memory, compile, steps, replicas.

    All processes of the team call this together and continue only if the previous part failed on none of them. Raises
    ValueError if a step runs out of memory.
    """
    program = StepProgram(run, build_mesh(run.config.mesh, devices.devices))
    limit_s = run.config.distributed.step_timeout_s
    with Watchdog(limit_s, team, first_s=0.0, remedy=_REMEDY) as watchdog:
        watchdog.step(0)
        axis_findings = latencies(program.mesh, devices.simulated)
        with watchdog.resting():
            yield axis_findings
            yield _room(program, devices)
            began = time.perf_counter()
            try:
                with explain_oom(run, devices):
                    compiled = program.compile_step()
            except ValueError as error:
                yield [Finding("compile", FAILS, str(error))]
                return
            yield [Finding("compile", FINE, f"the step, in {time.perf_counter() - began:.1f} s")]
        with explain_oom(run, devices):
            metrics, seconds, state = _steps(program, compiled, steps, watchdog)
        with watchdog.resting():
            yield [_steps_finding(program, metrics, seconds, devices)]
            names, leaves = leaf_names(state.parameters), jax.tree.leaves(state.parameters)
            yield [equal_replicas(dict(zip(names, leaves, strict=True)), team)]


def _room(program: StepProgram, devices: Devices) -> list[Finding]:
    """Return findings about the devices' memory, or none if it is enough."""
    notes: list[str] = []
    try:
        check_room(program, devices, say=notes.append)
    except ValueError as error:
        return [Finding("memory", FAILS, str(error))]
    return [Finding("memory", WARNING, note) for note in notes]


def _steps(
    program: StepProgram, compiled: Any, steps: int, watchdog: Watchdog
) -> tuple[list[dict[str, np.ndarray]], list[float], TrainState]:
    """Return the metrics and the seconds of each step, and the last state."""
    run, metrics, seconds = program.run, [], []
    config, state = run.config, program.init(run.config.seed)
    for step in range(steps):
        watchdog.step(step + 1)
        rows = program.task.random_batch(
            config.batch, config.seq, run.model.vocab_size, config.seed + step, program.places
        )
        batch = program.place(rows)
        began = time.perf_counter()
        state, new = compiled(state, batch)
        metrics.append(jax.device_get(new))
        seconds.append(time.perf_counter() - began)
    return metrics, seconds, state


def _steps_finding(
    program: StepProgram, metrics: list[dict[str, np.ndarray]], seconds: list[float], devices: Devices
) -> Finding:
    """Report the first step with a loss or gradient that is not finite, or else the losses and the step time."""
    for step, values in enumerate(metrics, 1):
        if not (math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])):
            bad = np.flatnonzero(~np.isfinite(values["leaf_norms"]))
            where = f", first in the gradient of {program.parameter_names[bad[0]]}" if bad.size else ""
            text = f"step {step}: loss {float(values['loss'])}, gradient norm {float(values['grad_norm'])}{where}"
            remedy = "Lower optimizer.learning_rate, or find the operation with debug=nans."
            return Finding("steps", FAILS, text, remedy)
    losses = " to ".join(f"{float(values['loss']):.3f}" for values in (metrics[0], metrics[-1]))
    took = duration(statistics.median(seconds[1:] or seconds)) + " simulated" * devices.simulated
    text = f"{len(metrics)} of {len(metrics)} with finite loss and gradients: loss {losses} on random tokens; "
    return Finding("steps", FINE, f"{text}a step takes {took}")


def equal_replicas(parameters: Mapping[str, jax.Array], team: Team) -> Finding:
    """Compare the copies of parameters on several devices bit for bit."""
    copied = {name: array for name, array in parameters.items() if _is_copied(array)}
    own = {name: _checksums(array) for name, array in copied.items()}
    merged: dict[str, dict[str, dict[str, int]]] = {}
    for found in team.exchange("checksums of parameters", own):
        for name, parts in found.items():
            for part, by_device in parts.items():
                merged.setdefault(name, {}).setdefault(part, {}).update(by_device)
    wrong = {name: odd for name, parts in merged.items() if (odd := _odd(parts))}
    if not copied:
        return Finding("replicas", FINE, "no parameter has copies on several devices")
    if wrong:
        name, odd = next(iter(wrong.items()))
        text = f"{name} differs on device{'s' * (len(odd) > 1)} {', '.join(odd[:8])} from its copies on the others"
        more = f" ({len(wrong)} of {len(copied)} parameters do)" if len(wrong) > 1 else ""
        remedy = "Run it again: if the same device differs, leave its host out; else report it with this table."
        return Finding("replicas", FAILS, text + more, remedy)
    return Finding("replicas", FINE, f"{len(copied)} of {len(parameters)} parameters have copies, equal bit for bit")


def _is_copied(array: jax.Array) -> bool:
    parts = array.sharding.devices_indices_map(array.shape)
    return len({_part(index) for index in parts.values()}) < len(parts)


def _checksums(array: jax.Array) -> dict[str, dict[str, int]]:
    """Checksums of an array's parts on the devices of this process, by part and device."""
    checksums: dict[str, dict[str, int]] = {}
    for shard in array.addressable_shards:
        bits = np.ascontiguousarray(np.asarray(shard.data)).view(np.uint8).data
        checksums.setdefault(_part(shard.index), {})[str(shard.device.id)] = zlib.crc32(bits)
    return checksums


def _part(index: tuple[slice, ...]) -> str:
    return ",".join(f"{part.start or 0}:{part.stop}" for part in index)


def _odd(parts: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return the devices with a checksum other than the most common one of a part."""
    odd = []
    for by_device in parts.values():
        common = statistics.mode(by_device.values())
        odd += [device for device, value in by_device.items() if value != common]
    return sorted(odd, key=int)


def latencies(mesh: Any, simulated: bool) -> list[Finding]:
    """Time one sum of a few bytes over each mesh axis, and check its result."""
    findings = []
    for axis, size in mesh.shape.items():
        if size == 1:
            continue
        seconds, right = _summed(mesh, axis)
        finding = Finding(f"axis {axis}", FINE, f"a sum over {axis}={size} takes {duration(seconds)}")
        if simulated:
            finding = finding._replace(text=f"{finding.text} simulated")
        elif seconds > _SLOW_S:
            finding = finding._replace(verdict=WARNING, remedy="Within a slice it takes well under a millisecond.")
        if not right:
            text = f"a sum of ones over {axis}={size} is not {size}"
            finding = Finding(f"axis {axis}", FAILS, text, "A link or a chip is at fault: use another slice.")
        findings.append(finding)
    return findings


def _summed(mesh: Any, axis: str) -> tuple[float, bool]:
    """Return the median seconds of a sum of ones over an axis, and whether every device here has the right sum."""
    names = tuple(mesh.axis_names)
    whole, rest = PartitionSpec(*names), PartitionSpec(*(None if name == axis else name for name in names))
    shape = tuple(mesh.shape[name] for name in names)
    ones = jax.jit(lambda: jnp.ones(shape), out_shardings=NamedSharding(mesh, whole))()

    def total(part: jax.Array) -> jax.Array:
        return jax.lax.psum(part, axis)

    summed = jax.jit(jax.shard_map(total, mesh=mesh, in_specs=whole, out_specs=rest))
    result = jax.block_until_ready(summed(ones))
    seconds = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        jax.block_until_ready(summed(ones))
        seconds.append(time.perf_counter() - began)
    right = all(np.all(np.asarray(shard.data) == mesh.shape[axis]) for shard in result.addressable_shards)
    return statistics.median(seconds), right
