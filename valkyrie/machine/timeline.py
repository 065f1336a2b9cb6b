"""Writes a replayed step as a timeline in the Chrome trace-event format, which Perfetto opens.

There is a track for computation, one for the collectives of each set of mesh axes, and one for copies between memory
spaces. The format is described in "Trace Event Format" (Chromium project). Only complete events (`ph: X`) and names
(`ph: M`) are used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from valkyrie.paths import write_atomic

if TYPE_CHECKING:
    from valkyrie.machine.replay import TimelineSpan

COMPUTE, COPIES = "compute", "copies"
"""Names of the first and the last track. The tracks of collectives are in between, named by their mesh axes."""

_MICROSECONDS_PER_SECOND = 1e6


class TraceEvent(TypedDict, total=False):
    """A Chrome trace event. `ts` and `dur` are in microseconds."""

    ph: str
    pid: int
    tid: int
    name: str
    cat: str
    ts: float
    dur: float
    args: Mapping[str, str | int]


def write_timeline(path: Path, spans: Sequence[TimelineSpan], title: str, alternative: str | None = None) -> None:
    """Write the spans of a replayed step to a JSON file of Chrome trace events.

    `title` names the process in the viewer. `alternative` is the setting that selects another path, for the message of
    a DiskError.
    """
    text = json.dumps({"displayTimeUnit": "ms", "traceEvents": trace_events(spans, title)}) + "\n"
    write_atomic(path, text, alternative)


def trace_events(spans: Sequence[TimelineSpan], title: str) -> list[TraceEvent]:
    """Return the Chrome trace events of `spans`, after metadata events that name the process and its tracks.

    Times are relative to the start of the step. Events of one track never overlap: if two collectives over the same
    axes are in flight, the later one goes to a track of its own, such as `collectives over x (2)`.
    """
    track_by_label: dict[str, str] = {}
    events: list[TraceEvent] = []
    for track in sorted({span.track for span in spans}, key=_rank):
        lane_ends: list[float] = []
        for span in sorted((s for s in spans if s.track == track), key=lambda s: (s.start_s, -s.duration_s)):
            lane = next(
                (i for i, busy_until in enumerate(lane_ends) if busy_until <= span.start_s + 1e-12), len(lane_ends)
            )
            if lane == len(lane_ends):
                lane_ends.append(0.0)
            lane_ends[lane] = span.start_s + span.duration_s
            label = _label(track) + (f" ({lane + 1})" if lane else "")
            track_by_label.setdefault(label, track)
            events.append(_event(span, list(track_by_label).index(label)))
    metadata: list[TraceEvent] = [{"ph": "M", "pid": 0, "tid": 0, "name": "process_name", "args": {"name": title}}]
    for tid, (name, track) in enumerate(track_by_label.items()):
        axes = {} if track in (COMPUTE, COPIES) else {"mesh_axes": track}
        metadata.append({"ph": "M", "pid": 0, "tid": tid, "name": "thread_name", "args": {"name": name, **axes}})
        metadata.append({"ph": "M", "pid": 0, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}})
    return metadata + events


def _event(span: TimelineSpan, tid: int) -> TraceEvent:
    details = {"op_name": span.op_name, "source": span.source}
    return {
        "ph": "X",
        "pid": 0,
        "tid": tid,
        "name": span.name,
        "cat": span.category,
        "ts": round(span.start_s * _MICROSECONDS_PER_SECOND, 3),
        "dur": round(span.duration_s * _MICROSECONDS_PER_SECOND, 3),
        "args": {key: value for key, value in details.items() if value},
    }


def _label(track: str) -> str:
    return track if track in (COMPUTE, COPIES) else f"collectives over {track}"


def _rank(track: str) -> tuple[int, str]:
    return {COMPUTE: 0, COPIES: 2}.get(track, 1), track
