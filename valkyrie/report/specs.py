"""Vega-Lite specifications of the figures as JSON values, without their data.

Altair is not used, because importing it takes longer than writing a page, and each of its charts would contain a copy
of the configuration and an empty data set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from valkyrie.report.colours import partition_colour
from valkyrie.report.values import Values

Spec = dict[str, Any]

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
"""Identifier of the Vega-Lite version. The URL is never fetched."""

_TEXT_STYLE = {"labelColor": "currentColor", "titleColor": "currentColor", "labelFontSize": 12}
CHART_CONFIG: Spec = {
    "background": None,
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "axis": {
        **_TEXT_STYLE,
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
    "legend": {**_TEXT_STYLE, "labelLimit": 260},
    "header": {**_TEXT_STYLE, "titleFontSize": 12},
    "text": {"color": "currentColor", "fontSize": 12},
    "title": {"color": "currentColor", "fontSize": 12},
}
"""Style of all figures. Text and lines use the colour of the page's text, which is light or dark."""

_WHITE_TEXT_SHARE = 0.74
"""The text in a cell is white if the rate exceeds this share of the highest rate, else black.

At this share, both colours have a contrast of 4.5 against the cell.
"""
_RED, _BLUE, _ORANGE = "#e05a5a", "#3f7fc9", "#ef8a35"
MAX_BATCH_TICKS = 8
"""Maximum number of batches for which a figure has a tick at each batch."""


def _nominal(field: str, **options: Any) -> Spec:
    return {"field": field, "type": "nominal", **options}


def _quantitative(field: str, **options: Any) -> Spec:
    return {"field": field, "type": "quantitative", **options}


def _tooltip(*fields: tuple[str, str] | tuple[str, str, str]) -> list[Spec]:
    """Return the encoding of a tooltip. Each field is (name, title), or (name, title, format) for a number."""
    return [
        _quantitative(name, title=title, format=format_spec[0]) if format_spec else _nominal(name, title=title)
        for name, title, *format_spec in fields
    ]


def _shape_encoding(field: str, shapes: dict[str, str], legend: Spec | None) -> Spec:
    return _nominal(field, title=None, scale={"domain": [*shapes], "range": [*shapes.values()]}, legend=legend)


def _point_layer(encoding: Spec) -> Spec:
    return {"mark": {"type": "point", "filled": True, "size": 90, "opacity": 0.9}, "encoding": encoding}


def _point_name(is_left: str) -> Spec:
    """Return a text mark for the name of a point.

    The name is on the left of the point where the Vega expression `is_left` is true, else on its right.
    """
    align, dx = {"expr": f"{is_left} ? 'right' : 'left'"}, {"expr": f"{is_left} ? -9 : 9"}
    return {"type": "text", "align": align, "dx": dx, "dy": -7, "fontSize": 11}


def _pareto_line(x: Spec, y: Spec) -> Spec:
    """Return a layer with the Pareto front of each workload."""
    mark = {"type": "line", "interpolate": "step-after", "strokeDash": [4, 3], "stroke": "currentColor"}
    encoding = {"x": x, "y": y, "detail": _nominal("work")}
    return {"transform": [{"filter": "datum.front"}], "mark": mark, "encoding": encoding}


def _single_mark(mark: Spec, encoding: Spec) -> Spec:
    """Return a layer with a single mark that does not depend on the data."""
    return {"data": {"values": [{}]}, "mark": mark, "encoding": encoding}


def _chart(height: int, *layers: Spec, title: str = "") -> Spec:
    chart = layers[0] if len(layers) == 1 else {"layer": [*layers]}
    return {"width": "container", "height": height, **chart} | ({"title": {"text": title}} if title else {})


_BAR_LABELS = _nominal("label", sort=None, title=None, axis={"ticks": False, "domain": False, "labelPadding": 6})
_BAR: Spec = {"type": "bar", "height": 15}
_FIT_SHAPES = _shape_encoding("status", {"fits": "circle", "does not fit": "cross"}, None)
_SOURCE_SHAPES = {
    "estimated": "circle",
    "corrected estimate": "circle",
    "compiled": "square",
    "measured": "diamond",
}
_KIND_SHAPES = _shape_encoding("kind", {"measured": "circle", "simulated": "triangle-up"}, {"orient": "top"})


def _partition_colours(data: Values) -> Spec:
    """Return the encoding of partitions as colours. A partition has the same colour in every figure."""
    names = list(dict.fromkeys(v["partition"] for v in data))
    scale = {"domain": names, "range": [partition_colour(name) for name in names]}
    return _nominal("partition", scale=scale, legend={"orient": "top", "title": None})


def _height(data: Values) -> int:
    return 22 * len({v["label"] for v in data})


def bars(data: Values) -> Spec:
    """Return a bar chart of tokens/s with the spread of measured steps."""
    tooltip = _tooltip(
        ("label", "layout"),
        ("partition", "partition"),
        ("rate", "tokens/s", ",.0f"),
        ("per_chip", "tokens/s/chip", ",.0f"),
        ("step", "step"),
        ("spread", "spread"),
    )
    x = _quantitative("rate", title="tokens/s", axis={"format": "~s", "tickCount": 6})
    spread = {"type": "rule", "strokeWidth": 1.5, "stroke": "currentColor"}
    layers = [
        {"mark": _BAR, "encoding": {"x": x, "color": _partition_colours(data), "tooltip": tooltip}},
        {"mark": spread, "encoding": {"x": _quantitative("low"), "x2": {"field": "high"}}},
        {
            "mark": {"type": "text", "align": "left", "dx": 6},
            "encoding": {"x": _quantitative("end"), "text": _quantitative("rate", format=".3~s")},
        },
    ]
    padding = {"left": 5, "top": 5, "right": 24, "bottom": 5}
    return _chart(_height(data), *layers) | {"padding": padding, "encoding": {"y": _BAR_LABELS}}


def heat(data: Values) -> Spec:
    """Return one heat map for each degree of DP. Its cells show the best tokens/s/chip by the degrees of MP1 and MP2.

    Cells without a speed have no colour and show the status. Their tooltip shows the reason.
    """
    no_rate_expr = "datum.rate === null"
    tooltip = _tooltip(
        ("label", "best layout"), ("text", "tokens/s/chip"), ("tried", "layouts tried"), ("reason", "why no speed")
    )
    highest_rate = max(v["rate"] for v in data if v["rate"] is not None)
    fill = _quantitative("rate", scale={"scheme": "blues", "domain": [0, highest_rate]}, legend=None)
    fill["condition"] = {"test": no_rate_expr, "value": "transparent"}
    text_colours = [
        {"test": no_rate_expr, "value": "currentColor"},
        {"test": f"datum.rate > {_WHITE_TEXT_SHARE * highest_rate}", "value": "white"},
    ]
    cell = {"type": "rect", "cornerRadius": 3, "stroke": "currentColor", "strokeOpacity": 0.35, "invalid": None}
    layers = [
        {"mark": cell, "encoding": {"fill": fill}},
        {
            "mark": {"type": "text", "fontSize": 11},
            "encoding": {"text": _nominal("text"), "color": {"condition": text_colours, "value": "black"}},
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
            "encoding": {"x": x, "y": y, "tooltip": tooltip},
            "layer": layers,
        }
        for degree in sorted({v["data"] for v in data})
    ]
    heading = {"text": "tokens/s/chip", "anchor": "start", "fontWeight": "normal"}
    return {"title": heading, "concat": maps, "columns": 4, "spacing": 28}


def memory(data: Values) -> Spec:
    """Return a scatter plot of memory and speed, with Pareto fronts. If there are no speeds, a bar chart of memory.

    The region beyond the usable memory is shaded and takes at most a quarter of the memory axis. Points beyond the end
    of the axis are drawn at its end.
    """
    unit, usable, chart_title = data[0]["unit"], data[0]["usable"], data[0]["far"]
    x = _quantitative("peak", title=f"peak memory per device, {unit}", axis={"tickCount": 8})
    limit_position: Spec = {"datum": usable, "type": "quantitative"}
    line = _single_mark({"type": "rule", "color": _RED, "strokeWidth": 1.5}, {"x": limit_position})
    color = _partition_colours(data)
    if data[0]["rate"] is None:
        tooltip = _tooltip(
            ("label", "layout"), ("partition", "partition"), ("peak", unit, ",.2f"), ("status", "status")
        )
        peaks: Spec = {"mark": _BAR, "encoding": {"y": _BAR_LABELS, "x": x, "color": color, "tooltip": tooltip}}
        layer = [peaks] if usable is None else [peaks, line]
        return _chart(_height(data), {"layer": layer}, title=chart_title)
    tooltip = _tooltip(
        ("label", "layout"),
        ("partition", "partition"),
        ("work", "workload"),
        ("peak", f"peak memory, {unit}", ",.2f"),
        ("rate", "tokens/s/chip", ",.0f"),
        ("status", "status"),
    )
    y, limit, end = _quantitative("rate", title="tokens/s/chip", axis={"format": "~s", "tickCount": 6}), [], None
    x["scale"] = {"zero": True, "nice": True}
    if usable is not None:
        end = min(max(usable * 1.15, *(v["peak"] * 1.03 for v in data)), usable * 4 / 3)
        x["scale"] = {"domain": [0, end], "nice": False}
        region = {"x": {**limit_position, "scale": x["scale"]}, "x2": {"datum": end}}
        text: Spec = {"type": "text", "align": "left", "dx": 6, "y": 12, "text": "does not fit", "color": _RED}
        limit = [
            _single_mark({"type": "rect", "color": _RED, "opacity": 0.16}, region),
            line,
            _single_mark(text, {"x": limit_position}),
        ]
    points = _point_layer({"x": x, "y": y, "color": color, "tooltip": tooltip, "shape": _FIT_SHAPES})
    if end is not None:
        points["transform"] = [{"calculate": f"min(datum.peak, {end})", "as": "drawn"}]
        points["encoding"]["x"] = {**x, "field": "drawn"}
    middle = 0.6 * (end or max(v["peak"] for v in data))
    names = {"mark": _point_name(f"datum.peak > {middle}"), "encoding": {"x": x, "y": y, "text": _nominal("name")}}
    return _chart(300, *limit, _pareto_line(x, y), points, names, title=chart_title)


def stacked_bars(title: str, part: str, colour: Callable[[Mapping[str, Any]], str]) -> Callable[[Values], Spec]:
    """Return a function that converts data to a chart of stacked bars.

    Args:
        title: Title of the axis.
        part: Title of the coloured parts in tooltips.
        colour: Returns the colour of a data value.
    """

    def spec(data: Values) -> Spec:
        unit = data[0]["unit"]
        colour_by_part = {v["part"]: colour(v) for v in sorted(data, key=lambda v: v["order"])}
        domain, colours = list(colour_by_part), list(colour_by_part.values())
        legend = {"orient": "top", "symbolType": "square"}
        encoding = {
            "y": _BAR_LABELS,
            "x": _quantitative("amount", title=f"{title}, {unit}", stack="zero", axis={"tickCount": 8}),
            "color": _nominal("part", title=None, scale={"domain": domain, "range": colours}, legend=legend),
            "order": _quantitative("order"),
            "tooltip": _tooltip(("label", "layout"), ("part", part), ("amount", unit, ",.3~f"), ("share", "share")),
        }
        return _chart(_height(data), {"mark": _BAR, "encoding": encoding})

    return spec


def pairs(data: Values) -> Spec:
    """Return a scatter plot of predicted and measured step times.

    Draws the line of equality unless all measurements are on simulated devices.
    """
    real_values = [v for v in data if v["kind"] != "simulated"]
    tooltip = _tooltip(
        ("label", "layout"),
        ("partition", "partition"),
        ("predicted", "predicted"),
        ("measured", "measured"),
        ("target", "predicted for"),
        ("on", "measured on"),
    )
    shared = {"scale": {"type": "log", "nice": False, "padding": 16}, "axis": {"tickCount": 5, "format": "~r"}}
    x = _quantitative("x", title="predicted step, ms", **shared)
    y = _quantitative("y", title="measured step, ms", **shared)
    mixed = {"shape": _KIND_SHAPES} if 0 < len(real_values) < len(data) else {}
    points = _point_layer({"x": x, "y": y, "color": _partition_colours(data), "tooltip": tooltip} | mixed)
    if not real_values:
        return _chart(300, points)
    min_ms, max_ms = min(min(v["x"], v["y"]) for v in real_values), max(max(v["x"], v["y"]) for v in real_values)
    equality_line: Spec = {
        "data": {"values": [{"x": min_ms, "y": min_ms}, {"x": max_ms, "y": max_ms}]},
        "mark": {"type": "line", "stroke": "currentColor", "strokeDash": [4, 3], "opacity": 0.6},
        "encoding": {"x": x, "y": y},
    }
    return _chart(300, equality_line, points)


def price(_: Values) -> Spec:
    """Return a scatter plot of price and speed, with the Pareto front of each workload."""
    tooltip = _tooltip(
        ("label", "layout"),
        ("target", "target"),
        ("work", "workload"),
        ("price", "dollars per chip-hour", ".2f"),
        ("per_million", "dollars per million tokens", ".3g"),
        ("rate", "tokens/s/chip", ",.0f"),
    )
    x = _quantitative("price", title="on-demand price, dollars per chip-hour", scale={"zero": False, "padding": 20})
    y = _quantitative("rate", title="tokens/s/chip", axis={"format": "~s"})
    target = {"shape": _nominal("target", title=None, legend={"orient": "top"}), "color": {"value": "currentColor"}}
    return _chart(260, _pareto_line(x, y), _point_layer({"x": x, "y": y, "tooltip": tooltip} | target))


def costs(data: Values, time_title: str) -> Spec:
    """Return a scatter plot of price against time. `time_title` is the title of the time axis, with the unit."""
    tooltip = _tooltip(
        ("layout", "layout"),
        ("target", "slice"),
        ("time", time_title, ",.3~g"),
        ("price", "dollars per million tokens", ".3g"),
    )
    scale: Spec = {"zero": False, "padding": 24}
    x = _quantitative("time", title=time_title, scale=scale, axis={"tickCount": 6, "format": "~r"})
    y = _quantitative("price", title="dollars per million tokens", scale=scale, axis={"tickCount": 6, "format": "~r"})
    color = _nominal("target", title=None, legend={"orient": "top"})
    middle = sum(extreme(v["time"] for v in data) for extreme in (min, max)) / 2
    names = {"mark": _point_name(f"datum.time > {middle}"), "encoding": {"x": x, "y": y, "text": _nominal("name")}}
    return _chart(280, _point_layer({"x": x, "y": y, "color": color, "tooltip": tooltip}), names)


def losses(data: Values) -> Spec:
    """Return a line chart of losses by step, with a colour for each training run and dashes for validation losses."""
    has_several_runs = len({v["label"] for v in data}) > 1
    encoding = {
        "x": _quantitative("step", title="step", axis={"tickCount": 8, "format": "~s"}),
        "y": _quantitative("loss", title="loss", scale={"zero": False}),
        "color": _nominal("label", title=None, legend={"orient": "top"} if has_several_runs else None),
        "strokeDash": _nominal(
            "kind",
            scale={"domain": ["training", "validation"], "range": [[1, 0], [5, 3]]},
            legend={
                "orient": "top",
                "title": None,
                "symbolType": "stroke",
                "symbolSize": 300,
                "symbolStrokeColor": "currentColor",
            },
        ),
        "tooltip": _tooltip(("label", "training"), ("kind", "loss of"), ("step", "step", ",d"), ("loss", "loss")),
    }
    point = {"filled": True, "size": 20}
    return _chart(280, {"mark": {"type": "line", "strokeWidth": 1.6, "point": point}, "encoding": encoding})


def memory_shares(data: Values) -> Spec:
    """Return a bar chart of the shares of usable memory, with a line at the limit."""
    end = max(1.1, *(1.05 * v["share"] for v in data))
    axis = {"format": ".0%", "tickCount": 6}
    x = _quantitative(
        "share", title="peak memory per device, share of the usable memory", scale={"domain": [0, end]}, axis=axis
    )
    tooltip = _tooltip(("layout", "layout"), ("share", "share of usable memory", ".0%"), ("stage", "source"))
    limit = _single_mark(
        {"type": "rule", "color": _RED, "strokeWidth": 1.5}, {"x": {"datum": 1, "type": "quantitative"}}
    )
    text_fits_expr = "datum.share > 0.2"
    bar = {"mark": {**_BAR, "color": _BLUE}, "encoding": {"y": _BAR_LABELS, "x": x, "tooltip": tooltip}}
    text = {
        "mark": {
            "type": "text",
            "align": {"expr": f"{text_fits_expr} ? 'right' : 'left'"},
            "dx": {"expr": f"{text_fits_expr} ? -6 : 6"},
        },
        "encoding": {
            "y": _BAR_LABELS,
            "x": x,
            "text": _quantitative("share", format=".0%"),
            "color": {"condition": {"test": text_fits_expr, "value": "white"}, "value": "currentColor"},
        },
    }
    return _chart(_height(data), bar, text, limit)


def batches(data: Values, field: str, title: str, limit: float | None = None) -> Spec:
    """Return a chart of a field by batch, with a shape and colour for each source, and a rule at any `limit`.

    Lines connect points with the same `run`. A line between estimates that passes by a compiled batch would make this
    batch look like an outlier.
    """
    marked_batches = [v["batch"] for v in data] if len(data) <= MAX_BATCH_TICKS else None
    x = _quantitative(
        "batch",
        title="sequences in a batch",
        scale={"type": "log", "base": 2, "nice": False, "padding": 16},
        axis={"format": ",d", "tickCount": MAX_BATCH_TICKS, "values": marked_batches},
    )
    y = _quantitative(field, title=title, scale={"zero": True}, axis={"tickCount": 5, "format": "~s"})
    tooltip = _tooltip(
        ("batch", "sequences in a batch", ",d"),
        ("rate", "tokens/s/chip", ",.0f"),
        ("memory", "GiB per device at the peak", ".1f"),
        ("source", "source"),
    )
    sources = {v["source"] for v in data}
    shapes = {s: shape for s, shape in _SOURCE_SHAPES.items() if s in sources}
    legend = {"orient": "top"}
    shape = _shape_encoding("source", shapes, legend)
    colours = {s: _BLUE if shape == "circle" else _ORANGE for s, shape in shapes.items()}
    colour = _nominal("source", title=None, scale={"domain": [*colours], "range": [*colours.values()]}, legend=legend)
    line = {
        "mark": {"type": "line", "strokeWidth": 1.6},
        "encoding": {"x": x, "y": y, "detail": _nominal("run"), "color": colour},
    }
    point = {"type": "point", "filled": True, "size": 80, "opacity": 1}
    points = {"mark": point, "encoding": {"x": x, "y": y, "tooltip": tooltip, "shape": shape, "color": colour}}
    names = {"mark": {"type": "text", "dy": -13}, "encoding": {"x": x, "y": y, "text": _nominal("name")}}
    rule = {"type": "rule", "color": _RED, "strokeWidth": 1.5}
    limits = [] if limit is None else [_single_mark(rule, {"y": {"datum": limit, "type": "quantitative"}})]
    return _chart(200, *limits, line, points, names)


def timeline_spec() -> Spec:
    """Return the specification of a layout's timeline. `page.js` adds the data."""
    legend = {"orient": "top", "symbolType": "square"}
    return {
        "$schema": SCHEMA,
        "config": CHART_CONFIG,
        "description": "timeline of one step",
        "width": "container",
        "data": {"values": []},
        "params": [{"name": "zoom", "select": {"type": "interval", "encodings": ["x"]}, "bind": "scales"}],
        "mark": {"type": "rect", "clip": True, "height": 24},
        "encoding": {
            "y": _nominal("track", sort=None, title=None, axis={"domain": False}),
            "x": _quantitative(
                "start", title="ms since the start of the step", scale={"nice": False}, axis={"tickCount": 10}
            ),
            "x2": {"field": "end"},
            "color": _nominal("kind", title=None, legend=legend),
            "tooltip": _tooltip(
                ("name", "operation"), ("kind", "kind"), ("ms", "ms", ",.4~f"), ("count", "merged operations")
            ),
        },
    }
