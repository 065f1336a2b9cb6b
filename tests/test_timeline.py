"""Tests of the timeline file: it follows the Chrome trace-event format, and events of a track never overlap."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from valkyrie.machine.replay import TimelineSpan
from valkyrie.machine.timeline import trace_events, write_timeline
from valkyrie.paths import DiskError
from valkyrie.report.trace import make_timeline


def span(track: str, start: float, duration: float, name: str = "fusion.1") -> TimelineSpan:
    return TimelineSpan(track, name, "matmul", "jit(step)/dot", "model.py:3", start, duration)


def test_the_remedy_for_a_timeline_that_cannot_be_written_is_the_caller_s(tmp_path: Path):
    with pytest.raises(DiskError, match="elsewhere with another path"):
        write_timeline(tmp_path / "none" / "timeline.json", [], "a step", "another path")


def test_the_file_follows_the_trace_event_format(tmp_path: Path):
    write_timeline(tmp_path / "timeline.json", [span("x", 1e-3, 2e-3), span("compute", 0.0, 1e-3)], "a step")
    written = json.loads((tmp_path / "timeline.json").read_text())
    assert set(written) == {"displayTimeUnit", "traceEvents"}
    names = [e["args"]["name"] for e in written["traceEvents"] if e["name"] in ("process_name", "thread_name")]
    assert names == ["a step", "compute", "collectives over x"]
    compute, collective = [e for e in written["traceEvents"] if e["ph"] == "X"]
    assert (compute["tid"], compute["ts"], compute["dur"]) == (0, 0.0, 1000.0)
    assert (collective["tid"], collective["ts"], collective["dur"]) == (1, 1000.0, 2000.0)
    assert collective["args"] == {"op_name": "jit(step)/dot", "source": "model.py:3"}


span_arguments = st.lists(
    st.tuples(st.sampled_from(["compute", "x", "x,y"]), st.floats(0, 1), st.floats(1e-6, 1)), min_size=1, max_size=40
)


@given(span_arguments)
def test_events_of_a_track_never_overlap_and_none_is_lost(entries: list[tuple[str, float, float]]):
    events = [e for e in trace_events([span(*entry) for entry in entries], "") if e["ph"] == "X"]
    assert len(events) == len(entries)
    lanes = defaultdict(list)
    for event in events:
        lanes[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for lane in lanes.values():
        lane.sort()
        assert all(after[0] >= before[1] - 0.01 for before, after in zip(lane, lane[1:], strict=False))


@pytest.mark.timeout(10)
def test_a_timeline_of_spans_without_a_duration_ends() -> None:
    thread = {"ph": "M", "name": "thread_name", "tid": 0, "args": {"name": "compute"}}
    spans = [{"ph": "X", "name": "dot", "cat": "products", "ts": 0.0, "dur": 0.0, "tid": 0} for _ in range(5)]
    timeline = make_timeline([thread, *spans], limit=2)
    assert timeline is not None and len(timeline.spans) == 5
