"""Writes a replayed step as a timeline: a file in the Chrome trace-event format, which Perfetto opens.

One track for what the chip computes, one for the collectives of every set of mesh axes, one for copies between memory
spaces. The format is described in "Trace Event Format" (Chromium project); only complete events (`ph: X`) and names
(`ph: M`) are used.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from valkyrie.paths import write_whole

if TYPE_CHECKING:
    from valkyrie.machine.replay import TimelineSpan

COMPUTE, COPIES = "compute", "copies"
"""The tracks that are not collectives over mesh axes; the first is above them, the last below."""

_MICROSECONDS = 1e6


def write_timeline(path: Path, spans: Sequence[TimelineSpan], title: str) -> None:
    """Write the spans of a replayed step as `timeline.json`; `title` names the process in the viewer."""
    write_whole(path, json.dumps({"displayTimeUnit": "ms", "traceEvents": trace_events(spans, title)}) + "\n")


def trace_events(spans: Sequence[TimelineSpan], title: str) -> list[dict[str, Any]]:
    """Return trace events, names of tracks first; times in microseconds from the start of the step.

    Events of one track never overlap: where two collectives of the same axes are in flight, the later one goes to a
    further track of that name.
    """
    names: dict[str, str] = {}
    events = []
    for track in sorted({span.track for span in spans}, key=_rank):
        lanes: list[float] = []
        for span in sorted((s for s in spans if s.track == track), key=lambda s: (s.start_s, -s.duration_s)):
            lane = next((i for i, busy_until in enumerate(lanes) if busy_until <= span.start_s + 1e-12), len(lanes))
            if lane == len(lanes):
                lanes.append(0.0)
            lanes[lane] = span.start_s + span.duration_s
            label = _label(track) + (f" ({lane + 1})" if lane else "")
            names.setdefault(label, track)
            events.append(_event(span, list(names).index(label)))
    head: list[dict[str, Any]] = [{"ph": "M", "pid": 0, "tid": 0, "name": "process_name", "args": {"name": title}}]
    for tid, (name, track) in enumerate(names.items()):
        axes = {} if track in (COMPUTE, COPIES) else {"mesh_axes": track}
        head.append({"ph": "M", "pid": 0, "tid": tid, "name": "thread_name", "args": {"name": name, **axes}})
        head.append({"ph": "M", "pid": 0, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}})
    return head + events


def _event(span: TimelineSpan, tid: int) -> dict[str, Any]:
    about = {"op_name": span.op_name, "source": span.source}
    return {
        "ph": "X",
        "pid": 0,
        "tid": tid,
        "name": span.name,
        "cat": span.category,
        "ts": round(span.start_s * _MICROSECONDS, 3),
        "dur": round(span.duration_s * _MICROSECONDS, 3),
        "args": {key: value for key, value in about.items() if value},
    }


def _label(track: str) -> str:
    return track if track in (COMPUTE, COPIES) else f"collectives over {track}"


def _rank(track: str) -> tuple[int, str]:
    return {COMPUTE: 0, COPIES: 2}.get(track, 1), track
