"""The page of one predicted step: its printed report, and a drawing of its timeline."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.metadata import version
from typing import TYPE_CHECKING

from valkyrie.machine.timeline import COMPUTE, trace_events
from valkyrie.report.colours import axes_colour, part_colour
from valkyrie.report.trace import Timeline, timeline
from valkyrie.units import duration

if TYPE_CHECKING:
    from valkyrie.machine.replay import TimelineSpan

WIDTH, LANE, LABEL = 1200, 26, 230
"""Pixels of the drawing: the time of a step, the height of a track, and the width of its name."""
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 14px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: {width}px; padding: 0 1em; }}
pre {{ font: 12px/1.4 ui-monospace, monospace; overflow-x: auto; }}
svg {{ width: 100%; height: auto; }} text {{ font: 12px system-ui, sans-serif; fill: currentColor; }}
:root {{ color-scheme: light dark; }}
</style></head><body><h1>{title}</h1>
{drawing}
<pre>{report}</pre>
<p>valkyrie {version}</p></body></html>
"""


def program_page(report: str, title: str, spans: Sequence[TimelineSpan]) -> str:
    """Return a self-contained HTML page with a report and a drawing of the spans."""
    drawn = timeline([dict(event) for event in trace_events(spans, title)])
    picture = "" if drawn is None else _picture(drawn)
    return _PAGE.format(
        title=escape(title),
        width=WIDTH + LABEL,
        drawing=picture,
        report=escape(report),
        version=escape(version("valkyrie-jax")),
    )


def _picture(drawn: Timeline) -> str:
    """Return an SVG drawing of a step: a track for compute, then one for each set of mesh axes, then copies."""
    tracks, names, step_us = drawn.tracks, drawn.names, drawn.step_us
    height = LANE * (len(tracks) + 1)
    shapes = [f'<text x="0" y="{LANE * i + 17}">{escape(track)}</text>' for i, track in enumerate(tracks)]
    for track, start, length, part, name, joined in drawn.spans:
        colour = _colour(drawn, tracks[track], names[part])
        more = f" and {joined - 1} more" if joined > 1 else ""
        tooltip = escape(f"{names[part]}: {names[name]}{more}, {duration(length * 1e-6)}")
        left, wide = LABEL + WIDTH * start / step_us, max(WIDTH * length / step_us, 0.3)
        shapes.append(
            f'<rect x="{left:.1f}" y="{LANE * track + 3}" width="{wide:.1f}" height="{LANE - 6}" fill="{colour}">'
            f"<title>{tooltip}</title></rect>"
        )
    end = f'<text x="{LABEL + WIDTH}" y="{height - 8}" text-anchor="end">{duration(step_us * 1e-6)}</text>'
    return f'<svg viewBox="0 0 {LABEL + WIDTH} {height}">{"".join(shapes)}{end}</svg>'


def _colour(drawn: Timeline, track: str, part: str) -> str:
    if track in drawn.axes:
        return axes_colour(drawn.axes[track])
    return part_colour(part, drawn.axes.get(part)) if track == COMPUTE else "#8b98a5"
