"""Measures the time in collectives: traces a few steps and matches their events with the compiled module."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import jax

from valkyrie.compiled.collectives import Collective, CollectiveReader, collective_kind, fused_kind, inner_collectives
from valkyrie.compiled.communication import CollectiveTime, CollectiveTrace
from valkyrie.compiled.hlo import Instruction, Module
from valkyrie.problems import first_line
from valkyrie.train.profile import tracing

TRACED_STEPS = 3
"""Number of traced steps. The result is their median."""

TRACE_NOTE = (
    "seconds of a traced step that a device spends in collectives, including waiting for other devices; median traced "
    "step, mean over devices; overlapping collectives share the time equally"
)


class Event(NamedTuple):
    """One execution of an operation.

    Args:
        op: Name of the operation in the module.
        device: Name of the device.
        run_id: Id of the execution of the program, or None if unknown.
        start: Start in seconds, on the clock of the trace.
        duration_s: Duration in seconds.
    """

    op: str
    device: str
    run_id: int | None
    start: float
    duration_s: float


def trace_collectives(
    step: Callable[[], object], module: Module, mesh_axes: dict[str, int], trace_folder: Path | None
) -> CollectiveTrace:
    """Trace `TRACED_STEPS` calls of `step`, which must be warmed up, and return the time spent in collectives.

    If the profiler fails or does not record the names of collectives, the result has no times and its note gives the
    reason.

    Args:
        step: Runs one training step.
        module: The compiled module of the step.
        mesh_axes: Size of each mesh axis.
        trace_folder: Where to keep the trace, or None to discard it.
    """
    collectives = collectives_by_operation(module, mesh_axes)
    try:
        with nullcontext(trace_folder) if trace_folder is not None else tempfile.TemporaryDirectory() as folder:
            files, step_s = _trace_steps(step, Path(folder))
            events = [event for file in files for event in read_events(file, module)]
    except (RuntimeError, OSError) as error:  # the measurement works without a trace
        return _no_trace(first_line(error))
    if not events:
        return _no_trace("the profiler recorded no operation of the step")
    if collectives and not any(event.op in collectives for event in events):
        return _no_trace("the profiler recorded the step without the names of its collectives")
    times = sum_collective_times(events, collectives)
    return CollectiveTrace(tuple(times), TRACE_NOTE, step_s)


def read_events(file: Path, module: Module) -> Iterator[Event]:
    """Yield the executions of a module's operations in a trace (`*.xplane.pb`), for all devices of this process.

    CPU devices share one plane, and the stats of each event have its device and run. Each accelerator has its own
    plane. On a TPU, the line `XLA Ops` of this plane has the operations. On a GPU, each line is a stream, and the stats
    of each kernel have the name of its operation.
    """
    trace = jax.profiler.ProfileData.from_file(str(file))  # the planes do not keep this object alive
    for plane in trace.planes:
        lines = list(plane.lines)
        for line in [line for line in lines if line.name == _OPERATIONS] or lines:
            for event in line.events:
                stats = {key: value for key, value in event.stats if key in _STATS}
                op = str(stats.get("hlo_op") or event.name.partition(" = ")[0]).lstrip("%")
                name = str(stats.get("hlo_module", module.name)).partition("(")[0]
                if op in module.instructions and name == module.name:
                    device = f"{plane.name}/{stats.get('device_ordinal', 0)}"
                    yield Event(op, device, stats.get("run_id"), event.start_ns / 1e9, event.duration_ns / 1e9)


_OPERATIONS = "XLA Ops"
_STATS = {"hlo_op", "hlo_module", "device_ordinal", "run_id"}


def collectives_by_operation(module: Module, mesh_axes: dict[str, int]) -> dict[str, Collective]:
    """Return the collectives that cross mesh axes, by name of the operation that executes, starts or ends them."""
    reader = CollectiveReader(module, mesh_axes)
    collectives: dict[str, Collective] = {}
    for name, instruction in module.instructions.items():
        collective = _find_collective(instruction)
        if collective is not None:
            collectives[name] = reader.read(collective)
        elif instruction.opcode in ("fusion", "async-start"):
            inner = [i for computation in instruction.called_computations for i in inner_collectives(computation)]
            if inner:
                kind = fused_kind(instruction, inner[0]) if instruction.opcode == "fusion" else None
                collectives[name] = reader.read(inner[0], kind)
    return {name: collective for name, collective in collectives.items() if collective.mesh_axes}


def sum_collective_times(events: list[Event], collectives: dict[str, Collective]) -> list[CollectiveTime]:
    """Return the seconds per step in collectives, by mesh axes and kind.

    Takes the median step of each device and averages over devices. The time of events without a `run_id` is divided by
    the number of traced steps. The results add up to the time during which any collective is running. They are sorted
    by the total of the mesh axes and then by the time of the kind, the longest first.
    """
    events_by_device: dict[str, dict[int | None, list[Event]]] = defaultdict(lambda: defaultdict(list))
    for event in events:
        if event.op in collectives:
            events_by_device[event.device][event.run_id].append(event)
    seconds_by_kind: dict[tuple[str, ...], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for device_runs in events_by_device.values():
        unassigned = _device_seconds(device_runs.pop(None, []), collectives)
        run_seconds = sorted(
            (_device_seconds(run, collectives) for run in device_runs.values()), key=lambda s: sum(s.values())
        )
        median_run = run_seconds[(len(run_seconds) - 1) // 2] if run_seconds else {}
        for (axes, kind), seconds in [*((key, s / TRACED_STEPS) for key, s in unassigned.items()), *median_run.items()]:
            seconds_by_kind[axes][kind] += seconds / len(events_by_device)
    return [
        CollectiveTime(kind, axes, seconds)
        for axes, kinds in sorted(seconds_by_kind.items(), key=lambda item: -sum(item[1].values()))
        for kind, seconds in sorted(kinds.items(), key=lambda item: -item[1])
    ]


_AxesAndKind = tuple[tuple[str, ...], str]


def _device_seconds(events: list[Event], collectives: dict[str, Collective]) -> dict[_AxesAndKind, float]:
    """Return the seconds of one device by (mesh axes, kind).

    While collectives of several kinds or mesh axes overlap, each (mesh axes, kind) gets an equal share of the time.
    """
    edges: list[tuple[float, int, _AxesAndKind]] = []
    for event in events:
        axes_and_kind = collectives[event.op].mesh_axes, collectives[event.op].kind
        edges += [(event.start, 1, axes_and_kind), (event.start + event.duration_s, -1, axes_and_kind)]
    seconds: dict[_AxesAndKind, float] = defaultdict(float)
    in_progress: Counter[_AxesAndKind] = Counter()
    previous_s = 0.0
    for now_s, change, axes_and_kind in sorted(edges):
        for key in in_progress:
            seconds[key] += (now_s - previous_s) / len(in_progress)
        in_progress[axes_and_kind] += change
        if not in_progress[axes_and_kind]:
            del in_progress[axes_and_kind]
        previous_s = now_s
    return seconds


def _trace_steps(step: Callable[[], object], folder: Path) -> tuple[list[Path], float]:
    """Run and trace `TRACED_STEPS` steps. Return the files that the profiler wrote, and the median seconds per step."""
    seconds = []
    with tracing(folder) as files:
        for _ in range(TRACED_STEPS):
            start_time = time.perf_counter()
            jax.block_until_ready(step())
            seconds.append(time.perf_counter() - start_time)
    return files, statistics.median(seconds)


def _no_trace(reason: str) -> CollectiveTrace:
    return CollectiveTrace(None, f"no trace: {reason}")


def _find_collective(instruction: Instruction) -> Instruction | None:
    """Return the collective that an instruction executes, starts or ends, or None."""
    if collective_kind(instruction.opcode):
        return instruction
    if (
        instruction.opcode.endswith("-done")
        and instruction.operands
        and collective_kind(instruction.operands[0].opcode)
    ):
        return instruction.operands[0]
    return None
