"""Time in collectives of a real run: traces a few steps and joins their events with the compiled module."""

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

from valkyrie.compiled.collectives import Collective, Collectives, fused_kind, inner_collectives, kind_of
from valkyrie.compiled.communication import CollectiveTime, CollectiveTrace
from valkyrie.compiled.hlo import Instruction, Module
from valkyrie.problems import first_line
from valkyrie.train.profile import tracing

STEPS = 3
"""Number of traced steps. The median is reported."""

MEANING = (
    "seconds of a traced step in which a device is in a collective, waiting for the other devices included; the median "
    "traced step, mean over devices; where collectives overlap, the time counts once and is divided between them"
)


class Event(NamedTuple):
    """One operation that ran: its name in the module, the device, the run it belongs to (None if unknown), its times.

    `start` is in seconds of the trace's clock, `seconds` is the duration.
    """

    op: str
    device: str
    run: int | None
    start: float
    seconds: float


def collective_times(
    step: Callable[[], object], module: Module, mesh_axes: dict[str, int], keep: Path | None
) -> CollectiveTrace:
    """Trace `STEPS` calls of a warm step and return its time in collectives.

    `keep` is the folder for the trace, or None to delete it.
    """
    collectives = known_collectives(module, mesh_axes)
    try:
        with nullcontext(keep) if keep is not None else tempfile.TemporaryDirectory() as folder:
            files, step_s = _trace(step, Path(folder))
            events = [event for file in files for event in read_events(file, module)]
    except (RuntimeError, OSError) as error:  # a measurement does not need the profiler
        return _none(first_line(error))
    if not events:
        return _none("the profiler recorded no operation of the step")
    if collectives and not any(event.op in collectives for event in events):
        return _none("the profiler recorded the step without the names of its collectives")
    found = seconds_by_use(events, collectives)
    return CollectiveTrace(tuple(found), MEANING, step_s)


def read_events(file: Path, module: Module) -> Iterator[Event]:
    """Yield the operations of a module in a trace (`*.xplane.pb`), for every device of this process.

    CPU devices share a plane, and their events name device and run. Each accelerator has a separate plane: on a TPU,
    one of its lines has the operations; on a GPU, its lines are streams, and kernels name the operation that they
    belong to.
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


def known_collectives(module: Module, mesh_axes: dict[str, int]) -> dict[str, Collective]:
    """Return the collectives that cross mesh axes, by the name of an operation that is, starts, ends or has one."""
    reader = Collectives(module, mesh_axes)
    found: dict[str, Collective] = {}
    for name, instruction in module.instructions.items():
        started = _started(instruction)
        if started is not None:
            found[name] = reader.read(started)
        elif instruction.opcode in ("fusion", "async-start"):
            inner = [i for computation in instruction.called for i in inner_collectives(computation)]
            if inner:
                kind = fused_kind(instruction, inner[0]) if instruction.opcode == "fusion" else None
                found[name] = reader.read(inner[0], kind)
    return {name: collective for name, collective in found.items() if collective.mesh_axes}


def seconds_by_use(events: list[Event], collectives: dict[str, Collective]) -> list[CollectiveTime]:
    """Return seconds of a step by mesh axes and kind: the median run, mean over devices.

    Mesh axes with the most time come first, and within them the kind with the most. The times add up to the time during
    which any collective is running. Events that do not name their run are divided evenly among the traced steps.
    """
    runs: dict[str, dict[int | None, list[Event]]] = defaultdict(lambda: defaultdict(list))
    for event in events:
        if event.op in collectives:
            runs[event.device][event.run].append(event)
    found: dict[tuple[str, ...], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for of_device in runs.values():
        untold = _seconds_each(of_device.pop(None, []), collectives)
        each = sorted((_seconds_each(run, collectives) for run in of_device.values()), key=lambda s: sum(s.values()))
        middle = each[(len(each) - 1) // 2] if each else {}
        for (axes, kind), seconds in [*((use, s / STEPS) for use, s in untold.items()), *middle.items()]:
            found[axes][kind] += seconds / len(runs)
    return [
        CollectiveTime(kind, axes, seconds)
        for axes, kinds in sorted(found.items(), key=lambda item: -sum(item[1].values()))
        for kind, seconds in sorted(kinds.items(), key=lambda item: -item[1])
    ]


_Use = tuple[tuple[str, ...], str]


def _seconds_each(events: list[Event], collectives: dict[str, Collective]) -> dict[_Use, float]:
    """Return the seconds of one device by mesh axes and kind. Collectives that overlap share the time evenly."""
    edges: list[tuple[float, int, _Use]] = []
    for event in events:
        use = collectives[event.op].mesh_axes, collectives[event.op].kind
        edges += [(event.start, 1, use), (event.start + event.seconds, -1, use)]
    seconds: dict[_Use, float] = defaultdict(float)
    under_way: Counter[_Use] = Counter()
    before = 0.0
    for now, change, use in sorted(edges):
        for one in under_way:
            seconds[one] += (now - before) / len(under_way)
        under_way[use] += change
        if not under_way[use]:
            del under_way[use]
        before = now
    return seconds


def _trace(step: Callable[[], object], folder: Path) -> tuple[list[Path], float]:
    """Run the traced steps. Return the files that the profiler wrote to the folder, and the median step in seconds."""
    seconds = []
    with tracing(folder) as files:
        for _ in range(STEPS):
            began = time.perf_counter()
            jax.block_until_ready(step())
            seconds.append(time.perf_counter() - began)
    return files, statistics.median(seconds)


def _none(reason: str) -> CollectiveTrace:
    return CollectiveTrace(None, f"no trace: {reason}")


def _started(instruction: Instruction) -> Instruction | None:
    """Return the collective that an instruction is or ends, or None."""
    if kind_of(instruction.opcode):
        return instruction
    if instruction.opcode.endswith("-done") and instruction.operands and kind_of(instruction.operands[0].opcode):
        return instruction.operands[0]
    return None
