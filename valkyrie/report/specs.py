"""Vega-Lite specifications of the figures as JSON values, without their data.

They are not Altair charts, because importing Altair takes longer than writing a page, and every chart would contain a
copy of the configuration and of an empty data set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from valkyrie.report.colours import partition_colour
from valkyrie.report.values import Values

Spec = dict[str, Any]

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
"""Name of the language of the specifications. It is never fetched."""

_INK = {"labelColor": "currentColor", "titleColor": "currentColor", "labelFontSize": 12}
CONFIG: Spec = {
    "background": None,
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "axis": {
        **_INK,
        "gridColor": "currentColor",
        "gridOpacity": 0.12,
        "domainColor": "currentColor",
        "domainOpacity": 0.4,
        "tickColor": "currentColor",
        "tickOpacity": 0.4,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
        "labelLimit": 320,
    },
    "legend": {**_INK, "labelLimit": 260},
    "header": {**_INK, "titleFontSize": 12},
    "text": {"color": "currentColor", "fontSize": 12},
    "title": {"color": "currentColor", "fontSize": 12},
}
"""Style of the figures. Text and lines have the colour of the page's text, light or dark."""

_WHITE_FROM = 0.74
"""Share of the fastest rate from which text on a cell is white instead of black. Both have a contrast of 4.5 there."""
_RED = "#e05a5a"


def _text(field: str, **more: Any) -> Spec:
    return {"field": field, "type": "nominal", **more}


def _number(field: str, **more: Any) -> Spec:
    return {"field": field, "type": "quantitative", **more}


def _tip(*fields: tuple[str, str] | tuple[str, str, str]) -> list[Spec]:
    """Return a tooltip of fields: name, title, and for numbers their format."""
    return [
        _number(name, title=title, format=form[0]) if form else _text(name, title=title)
        for name, title, *form in fields
    ]


def _shapes(field: str, shapes: dict[str, str], legend: Spec | None) -> Spec:
    return _text(field, title=None, scale={"domain": [*shapes], "range": [*shapes.values()]}, legend=legend)


def _points(encoding: Spec) -> Spec:
    return {"mark": {"type": "point", "filled": True, "size": 90, "opacity": 0.9}, "encoding": encoding}


def _front(x: Spec, y: Spec) -> Spec:
    """Return the Pareto front of each work."""
    mark = {"type": "line", "interpolate": "step-after", "strokeDash": [4, 3], "stroke": "currentColor"}
    encoding = {"x": x, "y": y, "detail": _text("work")}
    return {"transform": [{"filter": "datum.front"}], "mark": mark, "encoding": encoding}


def _once(mark: Spec, encoding: Spec) -> Spec:
    """Return a mark that is drawn once, whatever the data."""
    return {"data": {"values": [{}]}, "mark": mark, "encoding": encoding}


def _chart(height: int, *layers: Spec, title: str = "") -> Spec:
    chart = layers[0] if len(layers) == 1 else {"layer": [*layers]}
    return {"width": "container", "height": height, **chart} | ({"title": {"text": title}} if title else {})


_BARS = _text("label", sort=None, title=None, axis={"ticks": False, "domain": False})
_BAR: Spec = {"type": "bar", "height": 15}
_FITS = _shapes("status", {"fits": "circle", "does not fit": "cross"}, None)
_KINDS = _shapes("kind", {"measured": "circle", "simulated": "triangle-up"}, {"orient": "top"})


def _partition(data: Values) -> Spec:
    """Return the encoding of partitions by colour, the same colour in every figure."""
    names = list(dict.fromkeys(v["partition"] for v in data))
    scale = {"domain": names, "range": [partition_colour(name) for name in names]}
    return _text("partition", scale=scale, legend={"orient": "top", "title": None})


def _height(data: Values) -> int:
    return 22 * len({v["label"] for v in data})


def bars(data: Values) -> Spec:
    """Return bars of tokens/s with the spread of measured steps."""
    tip = _tip(
        ("label", "layout"),
        ("partition", "partition"),
        ("rate", "tokens/s", ",.0f"),
        ("per_chip", "tokens/s/chip", ",.0f"),
        ("step", "step"),
        ("spread", "spread"),
    )
    x = _number("rate", title="tokens/s", axis={"format": "~s", "tickCount": 6})
    spread = {"type": "rule", "strokeWidth": 1.5, "stroke": "currentColor"}
    layers = [
        {"mark": _BAR, "encoding": {"x": x, "color": _partition(data), "tooltip": tip}},
        {"mark": spread, "encoding": {"x": _number("low"), "x2": {"field": "high"}}},
        {
            "mark": {"type": "text", "align": "left", "dx": 6},
            "encoding": {"x": _number("end"), "text": _number("rate", format=".3~s")},
        },
    ]
    padding = {"left": 5, "top": 5, "right": 24, "bottom": 5}
    return _chart(_height(data), *layers) | {"padding": padding, "encoding": {"y": _BARS}}


def heat(data: Values) -> Spec:
    """Return a map of MP1 x MP2 for each DP. Cells without a speed are empty, with the reason as tooltip."""
    missing = "datum.rate === null"
    tip = _tip(("label", "best layout"), ("text", "tokens/s/chip"), ("tried", "layouts tried"), ("reason", "why none"))
    top = max(v["rate"] for v in data if v["rate"] is not None)
    fill = _number("rate", scale={"scheme": "blues", "domain": [0, top]}, legend=None)
    fill["condition"] = {"test": missing, "value": "transparent"}
    ink = [
        {"test": missing, "value": "currentColor"},
        {"test": f"datum.rate > {_WHITE_FROM * top}", "value": "white"},
    ]
    cell = {"type": "rect", "cornerRadius": 3, "stroke": "currentColor", "strokeOpacity": 0.35, "invalid": None}
    layers = [
        {"mark": cell, "encoding": {"fill": fill}},
        {
            "mark": {"type": "text", "fontSize": 11},
            "encoding": {"text": _text("text"), "color": {"condition": ink, "value": "black"}},
        },
    ]
    axis = {"labelAngle": 0, "ticks": False, "domain": False}
    x, y = ({"field": name.lower(), "type": "ordinal", "title": name, "axis": axis} for name in ("MP1", "MP2"))
    maps = [
        {
            "title": {"text": f"DP = {degree}", "fontWeight": "normal"},
            "transform": [{"filter": f"datum.data === {degree}"}],
            "width": {"step": 62},
            "height": {"step": 38},
            "encoding": {"x": x, "y": y, "tooltip": tip},
            "layer": layers,
        }
        for degree in sorted({v["data"] for v in data})
    ]
    shown = {"text": "tokens/s/chip", "anchor": "start", "fontWeight": "normal"}
    return {"title": shown, "concat": maps, "columns": 4, "spacing": 28}


def memory(data: Values) -> Spec:
    """Return points of memory and speed, the front of each work, and the region that does not fit.

    The axis starts at 0. The region takes at most a quarter of it, so points may be to the left of their memory.
    Without speeds, returns bars of memory.
    """
    unit, usable, far = data[0]["unit"], data[0]["usable"], data[0]["far"]
    x = _number("peak", title=f"peak memory of one device, {unit}", axis={"tickCount": 8})
    edge: Spec = {"datum": usable, "type": "quantitative"}
    line = _once({"type": "rule", "color": _RED, "strokeWidth": 1.5}, {"x": edge})
    color = _partition(data)
    if data[0]["rate"] is None:
        tip = _tip(("label", "layout"), ("partition", "partition"), ("peak", unit, ",.2f"), ("status", "status"))
        peaks: Spec = {"mark": _BAR, "encoding": {"y": _BARS, "x": x, "color": color, "tooltip": tip}}
        layer = [peaks] if usable is None else [peaks, line]
        return _chart(_height(data), {"layer": layer}, title=far)
    tip = _tip(
        ("label", "layout"),
        ("partition", "partition"),
        ("work", "work"),
        ("peak", f"peak memory, {unit}", ",.2f"),
        ("rate", "tokens/s/chip", ",.0f"),
        ("status", "status"),
    )
    y, limit, end = _number("rate", title="tokens/s/chip", axis={"format": "~s", "tickCount": 6}), [], None
    x["scale"] = {"zero": True, "nice": True}
    if usable is not None:
        end = min(max(usable * 1.15, *(v["peak"] * 1.03 for v in data)), usable * 4 / 3)
        x["scale"] = {"domain": [0, end], "nice": False}
        region = {"x": {**edge, "scale": x["scale"]}, "x2": {"datum": end}}
        text: Spec = {"type": "text", "align": "left", "dx": 6, "y": 12, "text": "does not fit", "color": _RED}
        limit = [_once({"type": "rect", "color": _RED, "opacity": 0.16}, region), line, _once(text, {"x": edge})]
    points = _points({"x": x, "y": y, "color": color, "tooltip": tip, "shape": _FITS})
    if end is not None:
        points["transform"] = [{"calculate": f"min(datum.peak, {end})", "as": "drawn"}]
        points["encoding"]["x"] = {**x, "field": "drawn"}
    name: Spec = {"type": "text", "align": "left", "dx": 9, "dy": -7, "fontSize": 11}
    names = {"mark": name, "encoding": {"x": x, "y": y, "text": _text("name")}}
    return _chart(300, *limit, _front(x, y), points, names, title=far)


def stack(title: str, part: str, colour: Callable[[Mapping[str, Any]], str]) -> Callable[[Values], Spec]:
    """Return a function that makes the specification of stacked bars.

    Args:
        title: Title of the axis.
        part: Name of the coloured parts.
        colour: Returns the colour of a value.
    """

    def spec(data: Values) -> Spec:
        unit = data[0]["unit"]
        coloured = {v["part"]: colour(v) for v in sorted(data, key=lambda v: v["order"])}
        domain, colours = list(coloured), list(coloured.values())
        legend = {"orient": "top", "symbolType": "square"}
        encoding = {
            "y": _BARS,
            "x": _number("amount", title=f"{title}, {unit}", stack="zero", axis={"tickCount": 8}),
            "color": _text("part", title=None, scale={"domain": domain, "range": colours}, legend=legend),
            "order": _number("order"),
            "tooltip": _tip(("label", "layout"), ("part", part), ("amount", unit, ",.3~f"), ("share", "share")),
        }
        return _chart(_height(data), {"mark": _BAR, "encoding": encoding})

    return spec


def pairs(data: Values) -> Spec:
    """Return points of predicted and measured steps, and the line of equality unless all are simulated."""
    real = [v for v in data if v["kind"] != "simulated"]
    tip = _tip(
        ("label", "layout"),
        ("partition", "partition"),
        ("predicted", "predicted"),
        ("measured", "measured"),
        ("target", "predicted for"),
        ("on", "measured on"),
    )
    shared = {"scale": {"type": "log", "nice": False, "padding": 16}, "axis": {"tickCount": 5, "format": "~r"}}
    x = _number("x", title="predicted step, ms", **shared)
    y = _number("y", title="measured step, ms", **shared)
    mixed = {"shape": _KINDS} if 0 < len(real) < len(data) else {}
    points = _points({"x": x, "y": y, "color": _partition(data), "tooltip": tip} | mixed)
    if not real:
        return _chart(300, points)
    low, high = min(min(v["x"], v["y"]) for v in real), max(max(v["x"], v["y"]) for v in real)
    same: Spec = {
        "data": {"values": [{"x": low, "y": low}, {"x": high, "y": high}]},
        "mark": {"type": "line", "stroke": "currentColor", "strokeDash": [4, 3], "opacity": 0.6},
        "encoding": {"x": x, "y": y},
    }
    return _chart(300, same, points)


def price(_: Values) -> Spec:
    """Return points of price and speed, and the front of each work."""
    tip = _tip(
        ("label", "layout"),
        ("target", "target"),
        ("work", "work"),
        ("price", "dollars a chip and hour", ".2f"),
        ("per_million", "dollars for a million tokens", ".3g"),
        ("rate", "tokens/s/chip", ",.0f"),
    )
    x = _number("price", title="dollars of a chip in an hour, on demand", scale={"zero": False, "padding": 20})
    y = _number("rate", title="tokens/s/chip", axis={"format": "~s"})
    target = {"shape": _text("target", title=None, legend={"orient": "top"}), "color": {"value": "currentColor"}}
    return _chart(260, _front(x, y), _points({"x": x, "y": y, "tooltip": tip} | target))


def timeline_spec() -> Spec:
    """Return the specification of one layout's timeline. The page adds its values."""
    legend = {"orient": "top", "symbolType": "square"}
    return {
        "$schema": SCHEMA,
        "config": CONFIG,
        "description": "timeline of one step",
        "width": "container",
        "data": {"values": []},
        "params": [{"name": "zoom", "select": {"type": "interval", "encodings": ["x"]}, "bind": "scales"}],
        "mark": {"type": "rect", "clip": True, "height": 24},
        "encoding": {
            "y": _text("track", sort=None, title=None, axis={"domain": False}),
            "x": _number("start", title="ms from the start of the step", scale={"nice": False}, axis={"tickCount": 10}),
            "x2": {"field": "end"},
            "color": _text("kind", title=None, legend=legend),
            "tooltip": _tip(
                ("name", "operation"), ("kind", "kind"), ("ms", "ms", ",.4~f"), ("count", "operations joined")
            ),
        },
    }
