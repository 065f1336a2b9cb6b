"""Reads a layout's timeline and the positions of its mesh on the torus, to be drawn in the HTML report.

Neighbouring spans of a timeline are merged, because a report has many layouts.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from valkyrie.axes import axes_text
from valkyrie.config.modes import COMPILE_FILE, TIMELINE_FILE
from valkyrie.hardware.chips import known_chips
from valkyrie.hardware.position import Position
from valkyrie.hardware.target import Topology, build_topology
from valkyrie.parts import parse_category
from valkyrie.records import RecordError
from valkyrie.report.records import read_json
from valkyrie.report.values import part_name
from valkyrie.runs.layout_record import LayoutRecord
from valkyrie.search.compile.prediction import read_prediction, short_cause, short_source
from valkyrie.sweep.rows import Row

MAX_SPANS = 400
"""Maximum number of spans in a drawn timeline."""
MAX_CHIPS = 256
"""Maximum number of chips in a drawn torus."""


@dataclass(frozen=True)
class Timeline:
    """The timeline of a step, for drawing. Times are in microseconds.

    Args:
        tracks: Names of the tracks.
        names: Distinct labels of categories and operations.
        step_us: End of the last span.
        spans: (track, start, duration, category, name, number of merged operations) of each span. `track` is an index
            into `tracks`, and `category` and `name` are indices into `names`.
        axes: Maps names of communication categories and tracks to mesh axes, such as `x,y`.
    """

    tracks: list[str]
    names: list[str]
    step_us: float
    spans: list[tuple[int, float, float, int, int, int]]
    axes: dict[str, str]


@dataclass(frozen=True)
class TorusDrawing:
    """A mesh on the torus of its first slice, for drawing.

    Args:
        shape: Number of chips along each axis of the torus.
        wrap: Whether each axis of the torus is a ring.
        shifts: `shifts[i][j]` is the number of chips by which a step past the end of axis `i` shifts coordinate `j`.
            None if the torus is not twisted.
        slices: Number of slices.
        axes: Names and sizes of the mesh axes.
        devices_by_chip: Index in the mesh of each chip's first device, or None if it is not in the mesh. Chips are in
            row-major order.
    """

    shape: tuple[int, ...]
    wrap: tuple[bool, ...]
    shifts: tuple[tuple[int, ...], ...] | None
    slices: int
    axes: list[tuple[str, int]]
    devices_by_chip: list[int | None]


def read_timeline(row: Row, limit: int = MAX_SPANS) -> Timeline | None:
    """Read the timeline in a row's run folder. Returns None if there is none or the file is damaged."""
    trace = read_json(row, TIMELINE_FILE)
    try:
        return make_timeline(
            [event for event in (trace or {}).get("traceEvents", []) if isinstance(event, dict)], limit
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def make_timeline(events: Sequence[Mapping[str, Any]], limit: int = MAX_SPANS) -> Timeline | None:
    """Convert Chrome trace events to a timeline, merging neighbouring spans until at most `limit` remain.

    Returns None if there are no events.
    """
    spans = [event for event in events if event.get("ph") == "X"]
    if not spans:
        return None
    thread_names = {
        e["tid"]: e["args"]["name"] for e in events if e.get("ph") == "M" and e.get("name") == "thread_name"
    }
    tracks = list(dict.fromkeys(_track_name(name) for name in thread_names.values()))
    by_track: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for event in sorted(spans, key=lambda e: e["ts"]):
        by_track[tracks.index(_track_name(thread_names[event["tid"]]))].append(event)
    step_us = max(event["ts"] + event["dur"] for event in spans)
    gap, merged_spans = step_us / 2000, _merge_spans(by_track, 0.0)
    while len(merged_spans) > limit and 0 < gap < 2 * step_us:  # beyond, each track is one span
        merged_spans, gap = _merge_spans(by_track, gap), 2 * gap
    names = list(dict.fromkeys(text for span in merged_spans for text in (_category_name(span[3]), span[4])))
    name_indices = {name: i for i, name in enumerate(names)}
    indexed_spans = [
        (t, round(s, 2), round(d, 2), name_indices[_category_name(c)], name_indices[n], k)
        for t, s, d, c, n, k in merged_spans
    ]
    parts = [part for span in merged_spans if (part := parse_category(span[3])) is not None and part[0].has_mesh_axes]
    axes = {part_name(*part): axes_text(part[1]) for part in parts}
    return Timeline(tracks, names, round(step_us, 2), indexed_spans, axes | _axes_of_tracks(events))


def read_torus(row: Row) -> TorusDrawing | None:
    """Read the positions of a row's mesh on the target's torus.

    Returns None if they are unknown or a slice has more than `MAX_CHIPS` chips.
    """
    about, topology = row.about, target_torus(row.about)
    if topology is None:
        return None
    positions = _read_positions(row)
    if topology.chips > MAX_CHIPS or len(positions) != topology.devices or not about.axes:
        return None
    lowest = [min(position.coords[i] for position in positions) for i in range(len(topology.shape))]
    devices_by_chip: list[int | None] = [None] * topology.chips
    for device, position in enumerate(positions):
        if position.slice_index == 0 and position.core == 0:
            chip = 0
            for coordinate, low, side in zip(position.coords, lowest, topology.shape, strict=False):
                chip = chip * side + coordinate - low
            devices_by_chip[chip] = device
    shifts = topology.wrap_shifts if topology.twisted else None
    return TorusDrawing(
        topology.shape, topology.wrap, shifts, topology.slices, list(about.axes.items()), devices_by_chip
    )


def target_torus(about: LayoutRecord) -> Topology | None:
    """Return the torus of a layout's target, or None if the target has no torus or its chip is unknown."""
    target = about.hardware.to_config(known_chips()) if about.hardware is not None else None
    return None if target is None or target.problems() else build_topology(target)


def _read_positions(row: Row) -> tuple[Position, ...]:
    """Read the device positions in a row's `compile.json`. Empty if the file cannot be read."""
    if row.folder is None:
        return ()
    try:
        return read_prediction(row.folder / COMPILE_FILE).positions
    except (OSError, RecordError):
        return ()


def _axes_of_tracks(events: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    track_arguments = [
        event["args"] for event in events if event.get("ph") == "M" and event.get("name") == "thread_name"
    ]
    return {_track_name(track["name"]): track["mesh_axes"] for track in track_arguments if "mesh_axes" in track}


def _track_name(name: str) -> str:
    """Return the name of a track without its lane number."""
    return re.sub(r" \([0-9]+\)$", "", name)


def _merge_spans(
    by_track: Mapping[int, Sequence[Mapping[str, Any]]], gap: float
) -> list[tuple[int, float, float, str, str, int]]:
    """Convert events to spans, merging short events with the preceding span on their track.

    A span is (track, start, duration, category, name, number of merged events), with times in microseconds.

    An event is merged if it is shorter than `4 * gap` and starts less than `gap` microseconds after the end of the
    preceding span. If the categories differ, the event and the span must also be shorter than `gap`. The merged span
    has the name and category of the longer of the two. With `gap=0`, nothing is merged.
    """
    merged_spans: list[tuple[int, float, float, str, str, int]] = []
    for track, events in sorted(by_track.items()):
        for event in events:
            start, length = event["ts"], event["dur"]
            if gap and merged_spans and merged_spans[-1][0] == track:
                _, previous_start, previous_length, category, name, count = merged_spans[-1]
                is_near = start - previous_start - previous_length < gap and length < 4 * gap
                if is_near and (category == event["cat"] or (previous_length < gap and length < gap)):
                    category = category if previous_length >= length else event["cat"]
                    name = name if previous_length >= length else _operation_name(event)
                    merged_spans[-1] = (
                        track,
                        previous_start,
                        max(previous_length, start + length - previous_start),
                        category,
                        name,
                        count + 1,
                    )
                    continue
            merged_spans.append((track, start, length, event["cat"], _operation_name(event), 1))
    return merged_spans


def _category_name(category: str) -> str:
    part = parse_category(category)
    return category if part is None else part_name(*part)


def _operation_name(event: Mapping[str, Any]) -> str:
    args = event.get("args") or {}
    name = short_cause(args["op_name"]) if args.get("op_name") else event["name"]
    source = short_source(args.get("source"))
    return f"{name} ({source})" if source else name
