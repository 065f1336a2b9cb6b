"""Decides what is drawn: Vega-Lite specifications as plain data, and the values that each takes from rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from valkyrie.report import values
from valkyrie.report.records import Row

Spec = dict[str, Any]

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
"""What the specifications are written in; a name, never fetched."""
PALETTE = ["#4c8fd0", "#f0883e", "#4fae5a", "#e05a5a", "#43b3ae", "#b47fc7", "#d6a928", "#a9795b", "#f08fa4", "#8b98a5"]
"""Colours that are told apart on white and on black."""
PARTS = {"matmul": 0, "kernel": 4, "compute": 2, "memory": 9}
"""Colours of the parts of a step; what is exposed of communication has the others."""

_WARM = [1, 3, 6, 8, 5, 7]


@dataclass(frozen=True)
class Figure:
    """A figure: `words` say what is seen to somebody who never saw one; `values` takes its data from ranked rows.

    `empty` is said where there is nothing to draw. `spec` gets whether the speeds are simulated, and the values.
    """

    id: str
    title: str
    words: str
    empty: str
    values: Callable[[Sequence[Row]], list[dict[str, Any]]]
    spec: Callable[[bool, Sequence[dict[str, Any]]], Spec]


def specification(figure: Figure, rows: Sequence[Row]) -> Spec | None:
    """Return the complete Vega-Lite specification of a figure of ranked rows of one group; None with nothing to draw."""
    found = figure.values(rows)
    if not found:
        return None
    spec = figure.spec(any(row.group.simulated for row in rows), found)
    return {"$schema": SCHEMA, "config": CONFIG, "description": figure.title, **spec, "data": {"values": found}}


CONFIG: Spec = {
    "background": None,
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "range": {"category": PALETTE},
    "axis": {
        "labelColor": "currentColor",
        "titleColor": "currentColor",
        "gridColor": "currentColor",
        "gridOpacity": 0.12,
        "domainColor": "currentColor",
        "domainOpacity": 0.4,
        "tickColor": "currentColor",
        "tickOpacity": 0.4,
        "labelFontSize": 12,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
        "labelLimit": 320,
    },
    "legend": {"labelColor": "currentColor", "titleColor": "currentColor", "labelFontSize": 12, "labelLimit": 260},
    "header": {"labelColor": "currentColor", "titleColor": "currentColor", "labelFontSize": 12, "titleFontSize": 12},
    "text": {"color": "currentColor", "fontSize": 12},
}
"""How figures look, light or dark: text and lines take the colour of the page around them."""

_LABELS: Spec = {"field": "label", "type": "nominal", "sort": None, "title": None}
_PARTITION: Spec = {"field": "partition", "type": "nominal", "title": "partition", "legend": {"orient": "top"}}


def _word(simulated: bool) -> str:
    return " (simulated)" if simulated else ""


def _tip(*fields: tuple[str, str] | tuple[str, str, str]) -> list[Spec]:
    """Return a tooltip of fields: name, title, and for numbers their format."""
    found = []
    for name, title, *form in fields:
        number = {"type": "quantitative", "format": form[0]} if form else {"type": "nominal"}
        found.append({"field": name, "title": title, **number})
    return found


def _bars(simulated: bool, _: Sequence[dict[str, Any]]) -> Spec:
    word = _word(simulated)
    tip = _tip(
        ("label", "layout"),
        ("partition", "partition"),
        ("rate", f"tokens/s{word}", ",.0f"),
        ("per_chip", f"tokens/s/chip{word}", ",.0f"),
        ("step", f"step{word}"),
        ("spread", "spread"),
    )
    x = {"field": "rate", "type": "quantitative", "title": f"tokens/s{word}", "axis": {"format": "~s", "tickCount": 6}}
    return {
        "width": "container",
        "height": {"step": 22},
        "encoding": {"y": {**_LABELS, "axis": {"ticks": False, "domain": False}}},
        "layer": [
            {"mark": {"type": "bar", "height": 15}, "encoding": {"x": x, "color": _PARTITION, "tooltip": tip}},
            {
                "mark": {"type": "rule", "strokeWidth": 1.5, "stroke": "currentColor"},
                "encoding": {"x": {"field": "low", "type": "quantitative"}, "x2": {"field": "high"}},
            },
            {
                "mark": {"type": "text", "align": "left", "dx": 6},
                "encoding": {
                    "x": {"field": "end", "type": "quantitative"},
                    "text": {"field": "rate", "type": "quantitative", "format": ".3~s"},
                },
            },
        ],
    }


def _heat(simulated: bool, found: Sequence[dict[str, Any]]) -> Spec:
    word = _word(simulated)
    tip = _tip(
        ("layout", "best layout"), ("text", f"tokens/s/chip{word}"), ("tried", "layouts tried"), ("said", "why none")
    )
    middle = sum(sorted(v["rate"] for v in found if v["rate"] is not None)[-1:]) / 2
    missing = "datum.rate === null"
    axis = {"labelAngle": 0, "ticks": False, "domain": False}
    colour = {"field": "rate", "type": "quantitative", "scale": {"scheme": "blues", "zero": True}, "legend": None}
    return {
        "facet": {"field": "data", "type": "ordinal", "title": "parts of the batch (DP)", "header": {"labelExpr": _DP}},
        "columns": 5,
        "resolve": {"scale": {"x": "independent", "y": "independent"}},
        "spec": {
            "width": {"step": 62},
            "height": {"step": 40},
            "encoding": {
                "x": {"field": "mp1", "type": "ordinal", "title": "MP1", "axis": axis},
                "y": {"field": "mp2", "type": "ordinal", "title": "MP2", "axis": axis},
                "tooltip": tip,
            },
            "layer": [
                {
                    "mark": {"type": "rect", "cornerRadius": 3, "stroke": "currentColor", "strokeOpacity": 0.35},
                    "encoding": {"color": {"condition": {"test": missing, "value": "transparent"}, **colour}},
                },
                {
                    "mark": {"type": "text", "fontSize": 11},
                    "encoding": {
                        "text": {"field": "text", "type": "nominal"},
                        "color": {
                            "condition": [
                                {"test": missing, "value": "currentColor"},
                                {"test": f"datum.rate > {middle}", "value": "white"},
                            ],
                            "value": "black",
                        },
                    },
                },
            ],
        },
    }


_DP = "'DP = ' + datum.label"


def _memory(simulated: bool, found: Sequence[dict[str, Any]]) -> Spec:
    word, unit, usable = _word(simulated), found[0]["unit"], found[0]["usable"]
    tip = _tip(
        ("label", "layout"),
        ("partition", "partition"),
        ("held", f"memory of a device, {unit}", ",.2f"),
        ("rate", f"tokens/s/chip{word}", ",.0f"),
        ("status", "status"),
    )
    x = {
        "field": "held",
        "type": "quantitative",
        "title": f"memory of one device at its peak, {unit}",
        "scale": {"zero": False, "padding": 14, "nice": True},
    }
    y = {"field": "rate", "type": "quantitative", "title": f"tokens/s/chip{word}", "axis": {"format": "~s"}}
    points = {
        "mark": {"type": "point", "filled": True, "size": 90, "opacity": 0.9},
        "encoding": {"x": x, "y": y, "color": _PARTITION, "tooltip": tip, "shape": _SHAPES},
    }
    line = {
        "transform": [{"filter": "datum.front"}],
        "mark": {"type": "line", "interpolate": "step-after", "strokeDash": [4, 3], "stroke": "currentColor"},
        "encoding": {"x": x, "y": y},
    }
    layers: list[Spec] = [line, points]
    if usable is not None:
        end = max(usable * 1.15, *(v["held"] * 1.03 for v in found))
        edge: Spec = {"datum": usable, "type": "quantitative"}
        region: Spec = {"mark": {"type": "rect", "color": "#e05a5a", "opacity": 0.14}}
        label: Spec = {"type": "text", "align": "left", "dx": 6, "y": 12, "text": "does not fit", "color": "#e05a5a"}
        layers = [
            region | {"encoding": {"x": edge, "x2": {"datum": end}}},
            {"mark": {"type": "rule", "color": "#e05a5a", "strokeWidth": 1.5}, "encoding": {"x": edge}},
            {"data": {"values": [{}]}, "mark": label, "encoding": {"x": edge}},
            *layers,
        ]
    return {"width": "container", "height": 300, "layer": layers}


_SHAPES: Spec = {
    "field": "status",
    "type": "nominal",
    "title": None,
    "scale": {"domain": ["fits", "does not fit"], "range": ["circle", "cross"]},
    "legend": None,
}


def _stack(title: str, part: str, colours: Callable[[Sequence[str]], list[str]]) -> Callable[..., Spec]:
    def spec(_: bool, found: Sequence[dict[str, Any]]) -> Spec:
        unit, domain = found[0]["unit"], list(dict.fromkeys(v["part"] for v in found))
        scale = {"domain": domain, "range": colours(domain)}
        return {
            "width": "container",
            "height": {"step": 22},
            "mark": {"type": "bar", "height": 15},
            "encoding": {
                "y": {**_LABELS, "axis": {"ticks": False, "domain": False}},
                "x": {"field": "amount", "type": "quantitative", "title": f"{title}, {unit}", "stack": "zero"},
                "color": {
                    "field": "part",
                    "type": "nominal",
                    "title": part,
                    "scale": scale,
                    "legend": {"orient": "top", "columns": 4, "symbolType": "square"},
                },
                "order": {"field": "order", "type": "quantitative"},
                "tooltip": _tip(("label", "layout"), ("part", part), ("amount", unit, ",.3~f"), ("share", "share")),
            },
        }

    return spec


def _part_colours(parts: Sequence[str]) -> list[str]:
    named = {values.PART_NAMES[name]: PALETTE[colour] for name, colour in PARTS.items()}
    warm = iter([PALETTE[i] for i in _WARM] * len(parts))
    return [named.get(part) or next(warm) for part in parts]


def _axes_colours(parts: Sequence[str]) -> list[str]:
    return [PALETTE[i % len(PALETTE)] for i in range(len(parts))]


def _pairs(_: bool, found: Sequence[dict[str, Any]]) -> Spec:
    simulated = found[0]["simulated"]
    tip = _tip(
        ("label", "layout"),
        ("partition", "partition"),
        ("told", "predicted"),
        ("ran", f"measured{_word(simulated)}"),
        ("target", "predicted for"),
        ("on", "measured on"),
    )
    scale = {"type": "log", "nice": False, "padding": 16}
    axis = {"tickCount": 5, "format": "~r"}
    x = {"field": "x", "type": "quantitative", "title": "predicted step, ms", "scale": scale, "axis": axis}
    y = {
        "field": "y",
        "type": "quantitative",
        "title": f"measured step, ms{_word(simulated)}",
        "scale": scale,
        "axis": axis,
    }
    points: Spec = {
        "mark": {"type": "point", "filled": True, "size": 90, "opacity": 0.9},
        "encoding": {"x": x, "y": y, "color": _PARTITION, "tooltip": tip},
    }
    if simulated:
        return {"width": "container", "height": 300, **points}
    low, high = min(min(v["x"], v["y"]) for v in found), max(max(v["x"], v["y"]) for v in found)
    same: Spec = {
        "data": {"values": [{"x": low, "y": low}, {"x": high, "y": high}]},
        "mark": {"type": "line", "stroke": "currentColor", "strokeDash": [4, 3], "opacity": 0.6},
        "encoding": {"x": x, "y": y},
    }
    return {"width": "container", "height": 300, "layer": [same, points]}


def _price(_: bool, __: Sequence[dict[str, Any]]) -> Spec:
    tip = _tip(
        ("label", "layout"),
        ("target", "target"),
        ("price", "dollars a chip and hour", ".2f"),
        ("per_million", "dollars for a million tokens", ".3g"),
        ("rate", "tokens/s/chip", ",.0f"),
    )
    x = {
        "field": "price",
        "type": "quantitative",
        "title": "dollars of a chip in an hour, on demand",
        "scale": {"zero": False, "padding": 20},
    }
    y = {"field": "rate", "type": "quantitative", "title": "tokens/s/chip", "axis": {"format": "~s"}}
    colour = {"field": "target", "type": "nominal", "title": "target", "legend": {"orient": "top"}}
    points: Spec = {
        "mark": {"type": "point", "filled": True, "size": 80, "opacity": 0.85},
        "encoding": {"x": x, "y": y, "color": colour, "tooltip": tip},
    }
    line: Spec = {
        "transform": [{"filter": "datum.front"}],
        "mark": {"type": "line", "interpolate": "step-after", "strokeDash": [4, 3], "stroke": "currentColor"},
        "encoding": {"x": x, "y": y},
    }
    return {"width": "container", "height": 260, "layer": [line, points]}


def timeline_spec() -> Spec:
    """Return the specification of one layout's timeline; its values are put in by the page."""
    x = {"field": "start", "type": "quantitative", "title": "ms from the start of the step", "scale": {"nice": False}}
    tip = _tip(("name", "operation"), ("kind", "kind"), ("ms", "ms", ",.4~f"), ("count", "operations joined"))
    return {
        "$schema": SCHEMA,
        "config": CONFIG,
        "description": "timeline of one step",
        "width": "container",
        "height": {"step": 34},
        "data": {"values": []},
        "params": [{"name": "zoom", "select": {"type": "interval", "encodings": ["x"]}, "bind": "scales"}],
        "mark": {"type": "rect", "clip": True, "height": 24},
        "encoding": {
            "y": {"field": "track", "type": "nominal", "sort": None, "title": None, "axis": {"domain": False}},
            "x": x,
            "x2": {"field": "end"},
            "color": {
                "field": "kind",
                "type": "nominal",
                "title": None,
                "legend": {"orient": "top", "columns": 5, "symbolType": "square"},
            },
            "tooltip": tip,
        },
    }


SPEED = Figure(
    "speed",
    "How fast each layout is",
    "Longer is faster. A bar is how many tokens of text the whole slice works through in a second. The thin line at its "
    "end goes from the slowest of ten steps (the 90th percentile) to the fastest one; a prediction has none.",
    "No layout here has a speed.",
    values.bars,
    _bars,
)
HEAT = Figure(
    "heat",
    "How the devices are best shared out",
    "N devices are split three ways: MP1 splits the width of every matrix, MP2 the vectors between them, DP the batch "
    "(fully sharded data counts as DP: it splits the batch too). A cell is the best layout with those three numbers, "
    "in tokens/s/chip; darker is faster.",
    "No layout here says how it splits the devices.",
    values.cells,
    _heat,
)
MEMORY = Figure(
    "memory",
    "Memory against speed",
    "Up is faster, left needs less memory. The dashed line joins the layouts that no other beats in both. Right of the "
    "red line a program needs more than a device has: crosses there are layouts that do not fit.",
    "No layout here has both a speed and a peak of memory.",
    values.memory,
    _memory,
)
PARTS_OF_STEP = Figure(
    "parts",
    "Where the time of a step goes",
    "A step is products of matrices, other arithmetic, waiting for memory, and waiting for other devices: exposed "
    "communication, which nothing hides. A good layout is mostly matrix products.",
    "Only predictions for a TPU take a step apart: valkyrie-train mode=compile target=v5e-8.",
    values.parts,
    _stack("one step", "part", _part_colours),
)
SENT = Figure(
    "sent",
    "What each device sends, by mesh axis",
    "Every split costs messages between the devices along that axis of the mesh, in every step. x,y means over both axes "
    "at once. Bytes are exact: they stand in the compiled program.",
    "No layout here sends anything between devices, or none says what.",
    values.sent,
    _stack("sent by one device in a step", "mesh axes", _axes_colours),
)
PAIRS = Figure(
    "pairs",
    "Predicted against measured",
    "One point for each layout that was both compiled for a time and run. If the prediction puts layouts into the right "
    "order, points rise from left to right; on the dashed line they would agree to the millisecond.",
    "No layout was both predicted and run here. The same sweep with mode=compile target=v5e-8 adds predictions.",
    values.pairs,
    _pairs,
)
PRICE = Figure(
    "price",
    "Price against speed",
    "Up is faster, left is cheaper. The dashed line joins what no other beats in both.",
    "All layouts with a price cost the same an hour, so the fastest is also the cheapest.",
    values.prices,
    _price,
)
OF_A_GROUP = [SPEED, HEAT, MEMORY, PARTS_OF_STEP, SENT]
"""Figures of trials whose speeds are of one kind."""
OF_ALL = [PAIRS, PRICE]
"""Figures of all trials together."""
