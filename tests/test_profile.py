"""Tests of collective times from a trace: every run of every collective is found once, on every device."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

import jax
import pytest

from helpers import compose_run, make_batch, make_program
from runs import TINY_ARGUMENTS
from valkyrie.compiled.collectives import collective_uses
from valkyrie.compiled.communication import CollectiveTime
from valkyrie.compiled.hlo import Module, parse_module
from valkyrie.search.measure import profile
from valkyrie.search.measure.profile import (
    TRACED_STEPS,
    Event,
    collectives_by_operation,
    read_events,
    sum_collective_times,
    trace_collectives,
)
from valkyrie.train.program import serialised_module

AXES = {"x": 2, "y": 2, "z": 2}

TWO_GROUPS = """HloModule jit_step, is_scheduled=true, num_partitions=8

add { a = f32[] parameter(0)  b = f32[] parameter(1)  ROOT c = f32[] add(a, b) }

ENTRY main {
  p = f32[64] parameter(0)
  all-reduce-start.1 = f32[64] all-reduce-start(p), channel_id=1, use_global_device_ids=true, to_apply=add,
    replica_groups={{0,4},{1,5},{2,6},{3,7}}
  all-reduce-done.1 = f32[64] all-reduce-done(all-reduce-start.1)
  ROOT all-gather.2 = f32[128] all-gather(all-reduce-done.1), channel_id=2, use_global_device_ids=true, dimensions={0},
    replica_groups={{0,1},{2,3},{4,5},{6,7}}
}
"""
"""An all-reduce over x and an all-gather over z, in the form of GPU programs."""


def write_trace(folder: Path, *devices: dict[str, list[tuple[str, str | None, int]]]) -> Path:
    """Write an XPlane trace and return its path.

    Each device maps line names to events `(name, hlo_op or None, microseconds)`.
    """
    planes = [_plane(number, lines) for number, lines in enumerate(devices)]
    file = folder / "host.xplane.pb"
    file.write_bytes(jax.profiler.ProfileData.text_proto_to_serialized_xspace(" ".join(planes)))
    return file


def _plane(number: int, lines: dict[str, list[tuple[str, str | None, int]]]) -> str:
    ids = {name: i for i, name in enumerate(sorted({e[0] for events in lines.values() for e in events}), start=1)}
    body = f'id: {number} name: "/device:GPU:{number}" '
    for line, events in lines.items():
        body += f'lines {{ name: "{line}" '
        start = 0
        for name, op, micros in events:
            stats = 'stats { metadata_id: 2 str_value: "jit_step" } '
            stats += "" if op is None else f'stats {{ metadata_id: 1 str_value: "{op}" }} '
            times = f"offset_ps: {start * 10**6} duration_ps: {micros * 10**6}"
            body += f"events {{ metadata_id: {ids[name]} {times} {stats} }} "
            start += micros
        body += "} "
    for name, i in ids.items():
        body += f'event_metadata {{ key: {i} value {{ id: {i} name: "{name}" }} }} '
    for i, name in ((1, "hlo_op"), (2, "hlo_module")):
        body += f'stat_metadata {{ key: {i} value {{ id: {i} name: "{name}" }} }} '
    return f"planes {{ {body} }}"


@pytest.mark.slow  # `test_measure` has a real trace in the default part
def test_a_real_trace_has_every_run_of_every_collective():
    run = compose_run(*TINY_ARGUMENTS, "mesh=2x2x2", "partition=2d_tp", "model.layers=2")
    program = make_program(run)
    compiled = program.lower_step().compile()
    module, state, batch = parse_module(serialised_module(compiled)), program.init(0), program.place(make_batch(run))

    def step() -> object:
        nonlocal state
        state, metrics = compiled(state, batch)
        return metrics

    with tempfile.TemporaryDirectory() as folder:
        times = trace_collectives(step, module, AXES, Path(folder))
        (file,) = Path(folder).rglob("*.xplane.pb")
        events = list(read_events(file, module))
    collectives = collectives_by_operation(module, AXES)
    seen: Counter[tuple[str, str]] = Counter()
    for event in events:
        if event.op in collectives:
            seen[collectives[event.op].label, collectives[event.op].kind] += 1
    expected: Counter[tuple[str, str]] = Counter()
    for use in collective_uses(module, AXES):
        expected[",".join(use.mesh_axes), use.kind] += round(use.calls * 8 * TRACED_STEPS)
    assert seen == expected and len(expected) > 3
    assert {event.device for event in events} == {f"/host:CPU/{i}" for i in range(8)}
    assert len({event.run_id for event in events}) == TRACED_STEPS
    assert times.times is not None and times.step_s is not None
    assert sum(time.seconds for time in times.times) <= times.step_s
    assert {(",".join(time.mesh_axes), time.kind) for time in times.times} == set(expected)


def times_of(**seconds: float) -> list[CollectiveTime]:
    """Return collective times of `TWO_GROUPS`: `x` seconds of the all-reduce, and `z` seconds of the all-gather."""
    kinds = {"x": "all-reduce", "z": "all-gather"}
    return [CollectiveTime(kinds[axis], (axis,), value) for axis, value in seconds.items()]


def test_collective_times_are_medians_over_runs_and_means_over_devices():
    collectives = collectives_by_operation(parse_module(TWO_GROUPS), AXES)
    reduce, gather = "all-reduce-start.1", "all-gather.2"
    times = {"0": (1.0, 2.0, 30.0), "1": (3.0, 4.0, 50.0)}
    events = [Event(reduce, device, run, 0.0, s) for device, runs in times.items() for run, s in enumerate(runs)]
    events += [Event("p", "0", 0, 0.0, 100.0), *(Event("all-reduce-done.1", "1", run, 60.0, 1.0) for run in range(3))]
    events += [Event(gather, "1", run, 70.0, 0.5) for run in range(3)]
    assert sum_collective_times(events, collectives) == times_of(x=3.5, z=0.25)


def test_collectives_that_overlap_count_once():
    collectives = collectives_by_operation(parse_module(TWO_GROUPS), AXES)
    reduce, gather = "all-reduce-start.1", "all-gather.2"
    times = [(reduce, 0.0, 4.0), (reduce, 1.0, 2.0), (gather, 2.0, 4.0)]
    events = [Event(op, "0", 0, start, seconds) for op, start, seconds in times]
    assert sum_collective_times(events, collectives) == times_of(x=3.0, z=3.0)
    untold = [event._replace(run_id=None) for event in events]
    assert sum_collective_times(untold, collectives) == times_of(x=1.0, z=1.0)


def test_gpu_kernels_are_matched_to_operations_without_run_numbers(tmp_path: Path):
    module = parse_module(TWO_GROUPS)
    kernels = [("ncclDevKernel_AllReduce", "all-reduce-start.1", 30), ("gemm", "p", 99), ("memset", None, 7)]
    stream = {"Stream #14(Compute)": kernels * TRACED_STEPS}
    times = sum_collective_times(
        list(read_events(write_trace(tmp_path, stream, stream), module)), collectives_by_operation(module, AXES)
    )
    (time,) = times
    assert time.mesh_axes == ("x",) and time.seconds == pytest.approx(30e-6)


def test_only_the_line_of_operations_is_read(tmp_path: Path):
    module = parse_module(TWO_GROUPS)
    operations = [("%all-gather.2 = f32[128] all-gather(f32[64] %x)", None, 12)] * TRACED_STEPS
    lines = {"XLA Ops": operations, "Async XLA Ops": operations}
    times = sum_collective_times(
        list(read_events(write_trace(tmp_path, lines), module)), collectives_by_operation(module, AXES)
    )
    (time,) = times
    assert time.mesh_axes == ("z",) and time.seconds == pytest.approx(12e-6)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("profiler", "no trace: Profile has already been started"),
        ("empty", "no trace: the profiler recorded no operation of the step"),
        ("nameless", "no trace: the profiler recorded the step without the names of its collectives"),
    ],
)
def test_the_reason_is_reported_if_there_is_no_trace(monkeypatch: pytest.MonkeyPatch, fault: str, message: str):
    def events(_: object, module: Module) -> list[Event]:
        return [] if fault == "empty" else [Event("p", "0", 0, 0.0, 1.0)]

    monkeypatch.setattr(profile, "read_events", events)
    if fault == "profiler":
        jax.profiler.start_trace(tempfile.mkdtemp())
    try:
        result = trace_collectives(lambda: None, parse_module(TWO_GROUPS), AXES, None)
    finally:
        if fault == "profiler":
            jax.profiler.stop_trace()
    assert result.times is None and result.note is not None and result.note.startswith(message)
