"""Vega-Lite specifications of the figures as plain data, without the values that they draw."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from valkyrie.report.colours import PALETTE

Spec = dict[str, Any]

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
"""What the specifications are written in; a name, never fetched."""

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
    "title": {"color": "currentColor", "fontSize": 12},
}
"""How figures look, light or dark: text and lines take the colour of the page around them."""

_LABELS: Spec = {"field": "label", "type": "nominal", "sort": None, "title": None}
_BARS: Spec = {**_LABELS, "axis": {"ticks": False, "domain": False}}
_WORK: Spec = {"field": "work", "type": "nominal"}
_PARTITION: Spec = {"field": "partition", "type": "nominal", "legend": {"orient": "top", "columns": 4}}


_WHITE_FROM = 0.74
"""From this share of the fastest, white is read better on a cell of the map than black; both have a contrast of 4.5."""


def _word(simulated: bool) -> str:
    return " (simulated)" if simulated else ""


def _tip(*fields: tuple[str, str] | tuple[str, str, str]) -> list[Spec]:
    """Return a tooltip of fields: name, title, and for numbers their format."""
    encodings = []
    for name, title, *form in fields:
        number = {"type": "quantitative", "format": form[0]} if form else {"type": "nominal"}
        encodings.append({"field": name, "title": title, **number})
    return encodings


def _height(data: Sequence[dict[str, Any]]) -> int:
    return 22 * len({v["label"] for v in data})


def bars(simulated: bool, data: Sequence[dict[str, Any]]) -> Spec:
    """Return bars of tokens/s with the spread of measured steps."""
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
        "height": _height(data),
        "padding": {"left": 5, "top": 5, "right": 24, "bottom": 5},
        "encoding": {"y": _BARS},
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


def heat(simulated: bool, data: Sequence[dict[str, Any]]) -> Spec:
    """Return a map of MP1 x MP2 for each DP; cells without a speed are empty and say why."""
    word = _word(simulated)
    tip = _tip(
        ("layout", "best layout"), ("text", f"tokens/s/chip{word}"), ("tried", "layouts tried"), ("reason", "why none")
    )
    top = max(v["rate"] for v in data if v["rate"] is not None)
    middle = _WHITE_FROM * top
    missing = "datum.rate === null"
    axis = {"labelAngle": 0, "ticks": False, "domain": False}
    colour = {"field": "rate", "type": "quantitative", "scale": {"scheme": "blues", "domain": [0, top]}, "legend": None}
    layers: list[Spec] = [
        {
            "mark": {
                "type": "rect",
                "cornerRadius": 3,
                "stroke": "currentColor",
                "strokeOpacity": 0.35,
                "invalid": None,
            },
            "encoding": {"fill": {"condition": {"test": missing, "value": "transparent"}, **colour}},
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
    ]
    maps = [
        {
            "title": {"text": f"DP = {data}", "fontWeight": "normal"},
            "transform": [{"filter": f"datum.data === {data}"}],
            "width": {"step": 62},
            "height": {"step": 38},
            "encoding": {
                "x": {"field": "mp1", "type": "ordinal", "title": "MP1", "axis": axis},
                "y": {"field": "mp2", "type": "ordinal", "title": "MP2", "axis": axis},
                "tooltip": tip,
            },
            "layer": layers,
        }
        for data in sorted({v["data"] for v in data})
    ]
    shown = {"text": f"tokens/s/chip{word}", "anchor": "start", "fontWeight": "normal"}
    return {"title": shown, "concat": maps, "columns": 4, "spacing": 28}


def memory(simulated: bool, data: Sequence[dict[str, Any]]) -> Spec:
    """Return points of memory and speed, the front of each work, and the region in which nothing fits.

    Without speeds they are bars of memory.
    """
    if data[0]["rate"] is None:
        return _peaks(data)
    word, unit, usable = _word(simulated), data[0]["unit"], data[0]["usable"]
    tip = _tip(
        ("label", "layout"),
        ("partition", "partition"),
        ("work", "work"),
        ("peak", f"peak memory, {unit}", ",.2f"),
        ("rate", f"tokens/s/chip{word}", ",.0f"),
        ("status", "status"),
    )
    x = {
        "field": "peak",
        "type": "quantitative",
        "title": f"peak memory of one device, {unit}",
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
        "encoding": {"x": x, "y": y, "detail": _WORK},
    }
    layers: list[Spec] = [line, points]
    if usable is not None:
        end = max(usable * 1.15, *(v["peak"] * 1.03 for v in data))
        start = min(v["peak"] for v in data)
        x["scale"] = {"domain": [max(0, start - 0.1 * (end - start)), end], "nice": False}
        edge: Spec = {"datum": usable, "type": "quantitative"}
        once: Spec = {"data": {"values": [{}]}}
        region: Spec = {"type": "rect", "color": "#e05a5a", "opacity": 0.16}
        label: Spec = {"type": "text", "align": "left", "dx": 6, "y": 12, "text": "does not fit", "color": "#e05a5a"}
        layers = [
            {**once, "mark": region, "encoding": {"x": {**edge, "scale": x["scale"]}, "x2": {"datum": end}}},
            {**once, "mark": {"type": "rule", "color": "#e05a5a", "strokeWidth": 1.5}, "encoding": {"x": edge}},
            {**once, "mark": label, "encoding": {"x": edge}},
            *layers,
        ]
    far = data[0]["far"]
    return {"width": "container", "height": 300, "layer": layers} | ({"title": {"text": far}} if far else {})


def _peaks(data: Sequence[dict[str, Any]]) -> Spec:
    """Return bars of memory, with a line at what a device has where that is near."""
    unit, usable, far = data[0]["unit"], data[0]["usable"], data[0]["far"]
    tip = _tip(("label", "layout"), ("partition", "partition"), ("peak", unit, ",.2f"), ("status", "status"))
    x = {"field": "peak", "type": "quantitative", "title": f"peak memory of one device, {unit}"}
    bars: Spec = {
        "mark": {"type": "bar", "height": 15},
        "encoding": {"y": _BARS, "x": x, "color": _PARTITION, "tooltip": tip},
    }
    edge: Spec = {
        "data": {"values": [{}]},
        "mark": {"type": "rule", "color": "#e05a5a", "strokeWidth": 1.5},
        "encoding": {"x": {"datum": usable, "type": "quantitative"}},
    }
    layers = [bars] if usable is None else [bars, edge]
    return {"width": "container", "height": _height(data), "layer": layers} | ({"title": {"text": far}} if far else {})


_SHAPES: Spec = {
    "field": "status",
    "type": "nominal",
    "title": None,
    "scale": {"domain": ["fits", "does not fit"], "range": ["circle", "cross"]},
    "legend": None,
}


def stack(
    title: str, part: str, colours: Callable[[Sequence[str]], list[str]], *, times: bool
) -> Callable[[bool, Sequence[dict[str, Any]]], Spec]:
    """Return a function to the specification of stacked bars: `title` is the axis, `part` what a colour is.

    `times` says that bars are times, which may be simulated; bytes never are.
    """

    def spec(simulated: bool, data: Sequence[dict[str, Any]]) -> Spec:
        unit, word = data[0]["unit"], _word(simulated and times)
        domain = list(dict.fromkeys(v["part"] for v in sorted(data, key=lambda v: v["order"])))
        scale = {"domain": domain, "range": colours(domain)}
        columns = 2 if max(map(len, domain)) > 16 else 3
        return {
            "width": "container",
            "height": _height(data),
            "mark": {"type": "bar", "height": 15},
            "encoding": {
                "y": _BARS,
                "x": {"field": "amount", "type": "quantitative", "title": f"{title}, {unit}{word}", "stack": "zero"},
                "color": {
                    "field": "part",
                    "type": "nominal",
                    "title": part,
                    "scale": scale,
                    "legend": {"orient": "top", "columns": columns, "symbolType": "square"},
                },
                "order": {"field": "order", "type": "quantitative"},
                "tooltip": _tip(
                    ("label", "layout"), ("part", part), ("amount", f"{unit}{word}", ",.3~f"), ("share", "share")
                ),
            },
        }

    return spec


def pairs(_: bool, data: Sequence[dict[str, Any]]) -> Spec:
    """Return points of predicted and measured steps; the line of equal ones where any measured one is real."""
    real = [v for v in data if v["kind"] != "simulated"]
    word, some = _word(not real), 0 < len(real) < len(data)
    tip = _tip(
        ("label", "layout"),
        ("partition", "partition"),
        ("predicted", "predicted"),
        ("measured", "measured"),
        ("target", "predicted for"),
        ("on", "measured on"),
    )
    scale = {"type": "log", "nice": False, "padding": 16}
    axis = {"tickCount": 5, "format": "~r"}
    x = {"field": "x", "type": "quantitative", "title": "predicted step, ms", "scale": scale, "axis": axis}
    y = {"field": "y", "type": "quantitative", "title": f"measured step, ms{word}", "scale": scale, "axis": axis}
    points: Spec = {
        "mark": {"type": "point", "filled": True, "size": 90, "opacity": 0.9},
        "encoding": {"x": x, "y": y, "color": _PARTITION, "tooltip": tip} | ({"shape": _KINDS} if some else {}),
    }
    if not real:
        return {"width": "container", "height": 300, **points}
    low, high = min(min(v["x"], v["y"]) for v in real), max(max(v["x"], v["y"]) for v in real)
    same: Spec = {
        "data": {"values": [{"x": low, "y": low}, {"x": high, "y": high}]},
        "mark": {"type": "line", "stroke": "currentColor", "strokeDash": [4, 3], "opacity": 0.6},
        "encoding": {"x": x, "y": y},
    }
    return {"width": "container", "height": 300, "layer": [same, points]}


_KINDS: Spec = {
    "field": "kind",
    "type": "nominal",
    "title": None,
    "scale": {"domain": ["measured", "simulated"], "range": ["circle", "triangle-up"]},
    "legend": {"orient": "top"},
}


def price(_: bool, __: Sequence[dict[str, Any]]) -> Spec:
    """Return points of price and speed, and the front of each work."""
    tip = _tip(
        ("label", "layout"),
        ("target", "target"),
        ("work", "work"),
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
        "encoding": {"x": x, "y": y, "detail": _WORK},
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
