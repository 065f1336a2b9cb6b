"""A layout's timeline and its drawing on the torus, small enough for a page of many layouts."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from valkyrie.axes import axes_text
from valkyrie.config.modes import SUMMARY, TIMELINE
from valkyrie.hardware.chips import known_chips
from valkyrie.hardware.position import Position
from valkyrie.hardware.target import Topology, topology_of
from valkyrie.parts import read_category
from valkyrie.records import RecordError
from valkyrie.report.records import read_json
from valkyrie.report.values import part_name
from valkyrie.runs.layout_record import LayoutRecord
from valkyrie.search.compile.prediction import read_prediction, short_cause, short_source
from valkyrie.sweep.rows import Row

SPANS = 400
"""Maximum number of spans in a drawn timeline."""
CHIPS = 256
"""Maximum number of chips in a drawn torus."""


@dataclass(frozen=True)
class Timeline:
    """The timeline of a step, for drawing. `step_us` is the end of the last span, in microseconds.

    A span is (track, start, duration, category, name, joined operations). Times are in microseconds, and texts are
    indices into `tracks` and `names`. `axes` are the mesh axes (`x,y`) of categories and tracks that have some.
    """

    tracks: list[str]
    names: list[str]
    step_us: float
    spans: list[tuple[int, float, float, int, int, int]]
    axes: dict[str, str]


@dataclass(frozen=True)
class TorusDrawing:
    """A mesh on the first slice of a torus.

    Args:
        wrap: Whether each axis of the torus is a ring.
        shifts: Chips by which each ring is shifted when it closes, or None if none is.
        axes: Names and sizes of mesh axes.
        at: Mesh index of each chip's first device. Chips are in row-major order.
    """

    shape: tuple[int, ...]
    wrap: tuple[bool, ...]
    shifts: tuple[tuple[int, ...], ...] | None
    slices: int
    axes: list[tuple[str, int]]
    at: list[int | None]


def read_timeline(row: Row, limit: int = SPANS) -> Timeline | None:
    """Return the timeline in a row's run folder, or None if it has none or the file is damaged."""
    trace = read_json(row, TIMELINE)
    try:
        return timeline([event for event in (trace or {}).get("traceEvents", []) if isinstance(event, dict)], limit)
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def timeline(events: Sequence[Mapping[str, Any]], limit: int = SPANS) -> Timeline | None:
    """Join the events of a trace into about `limit` spans at most. None if there are none."""
    spans = [event for event in events if event.get("ph") == "X"]
    if not spans:
        return None
    named = {e["tid"]: e["args"]["name"] for e in events if e.get("ph") == "M" and e.get("name") == "thread_name"}
    tracks = list(dict.fromkeys(_track(name) for name in named.values()))
    by_track: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for event in sorted(spans, key=lambda e: e["ts"]):
        by_track[tracks.index(_track(named[event["tid"]]))].append(event)
    step_us = max(event["ts"] + event["dur"] for event in spans)
    gap, joined = step_us / 2000, _joined(by_track, 0.0)
    while len(joined) > limit:
        joined, gap = _joined(by_track, gap), 2 * gap
    names = list(dict.fromkeys(text for span in joined for text in (_category_name(span[3]), span[4])))
    index = {name: i for i, name in enumerate(names)}
    drawn = [(t, round(s, 2), round(d, 2), index[_category_name(c)], index[n], k) for t, s, d, c, n, k in joined]
    parts = [part for span in joined if (part := read_category(span[3])) is not None and part[0].by_axes]
    axes = {part_name(*part): axes_text(part[1]) for part in parts}
    return Timeline(tracks, names, round(step_us, 2), drawn, axes | _axes_of_tracks(events))


def read_torus(row: Row) -> TorusDrawing | None:
    """Return the drawing of a row's mesh on the torus of its target, or None if unknown or too large to draw."""
    about, topology = row.about, torus_of(row.about)
    if topology is None:
        return None
    places = _positions(row)
    if topology.chips > CHIPS or len(places) != topology.devices or not about.axes:
        return None
    least = [min(place.coords[i] for place in places) for i in range(len(topology.shape))]
    at: list[int | None] = [None] * topology.chips
    for device, place in enumerate(places):
        if place.slice == 0 and place.core == 0:
            chip = 0
            for coordinate, low, side in zip(place.coords, least, topology.shape, strict=False):
                chip = chip * side + coordinate - low
            at[chip] = device
    shifts = topology.shifts if topology.twisted else None
    return TorusDrawing(topology.shape, topology.wrap, shifts, topology.slices, list(about.axes.items()), at)


def torus_of(about: LayoutRecord) -> Topology | None:
    """Return the torus of a layout's target, or None if it has none or its chip is unknown."""
    target = about.hardware.config(known_chips()) if about.hardware is not None else None
    return None if target is None or target.problems() else topology_of(target)


def _positions(row: Row) -> tuple[Position, ...]:
    """Return the positions in a row's `compile.json`. Empty if the file cannot be read."""
    if row.folder is None:
        return ()
    try:
        return read_prediction(row.folder / SUMMARY).positions
    except (OSError, RecordError):
        return ()


def _axes_of_tracks(events: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    about = [event["args"] for event in events if event.get("ph") == "M" and event.get("name") == "thread_name"]
    return {_track(track["name"]): track["mesh_axes"] for track in about if "mesh_axes" in track}


def _track(name: str) -> str:
    """Return the name of a track without the number of its lane."""
    return re.sub(r" \([0-9]+\)$", "", name)


def _joined(
    by_track: Mapping[int, Sequence[Mapping[str, Any]]], gap: float
) -> list[tuple[int, float, float, str, str, int]]:
    """Return spans. Joins neighbours of a category if they and the time between them are shorter than `gap`."""
    joined: list[tuple[int, float, float, str, str, int]] = []
    for track, events in sorted(by_track.items()):
        for event in events:
            start, length = event["ts"], event["dur"]
            if gap and joined and joined[-1][0] == track:
                _, before, lasted, category, name, count = joined[-1]
                near = start - before - lasted < gap and length < 4 * gap
                if near and (category == event["cat"] or (lasted < gap and length < gap)):
                    category = category if lasted >= length else event["cat"]
                    name = name if lasted >= length else _name(event)
                    joined[-1] = (track, before, max(lasted, start + length - before), category, name, count + 1)
                    continue
            joined.append((track, start, length, event["cat"], _name(event), 1))
    return joined


def _category_name(category: str) -> str:
    part = read_category(category)
    return category if part is None else part_name(*part)


def _name(event: Mapping[str, Any]) -> str:
    args = event.get("args") or {}
    name = short_cause(args["op_name"]) if args.get("op_name") else event["name"]
    source = short_source(args.get("source"))
    return f"{name} ({source})" if source else name
