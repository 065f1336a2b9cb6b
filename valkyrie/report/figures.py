"""Decides what is drawn: each figure's words for a newcomer, its values of ranked rows, and its specification."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from valkyrie.report import specs, values
from valkyrie.report.records import Row
from valkyrie.report.specs import CONFIG, SCHEMA, Spec


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
    """Return the complete Vega-Lite specification of a figure of ranked rows; None where there is nothing to draw."""
    found = figure.values(rows)
    if not found:
        return None
    spec = figure.spec(any(row.group.simulated for row in rows), found)
    return {"$schema": SCHEMA, "config": CONFIG, "description": figure.title, **spec, "data": {"values": found}}


SPEED = Figure(
    "speed",
    "How fast each layout is",
    "Longer is faster. A bar is how many tokens of text the whole slice works through in a second. The thin line at "
    "its end goes from the slowest of ten steps (the 90th percentile) to the fastest one; a prediction has none.",
    "No layout here has a speed.",
    values.bars,
    specs.bars,
)
HEAT = Figure(
    "heat",
    "How the devices are best shared out",
    "N devices are split three ways: MP1 splits the width of every matrix, MP2 the vectors between them, DP the batch "
    "(fully sharded data counts as DP: it splits the batch too). A cell is the best layout with those three numbers, "
    "in tokens/s/chip; darker is faster.",
    "No layout here has a speed and says how it splits the devices.",
    values.cells,
    specs.heat,
)
MEMORY = Figure(
    "memory",
    "Memory against speed",
    "Up is faster, left needs less memory. The dashed line joins the layouts that no other of the same "
    "work beats in both. Right of the "
    "red line a program needs more than a device has: crosses there are layouts that do not fit. Where there is no "
    "speed, bars are the memory alone.",
    "No layout here that fits says its peak of memory.",
    values.memory,
    specs.memory,
)
PARTS_OF_STEP = Figure(
    "parts",
    "Where the time of a step goes",
    "A predicted step is products of matrices, other arithmetic, operations that memory bounds, and waiting for other "
    "devices over mesh axes: communication that nothing hides. A good layout is mostly matrix products. Of a measured "
    "step a trace tells its collectives, waiting included.",
    "Predictions for a TPU take a step apart (valkyrie-train mode=compile target=v5e-8), and mode=measure where the "
    "profiler tells collectives.",
    values.parts,
    specs.stack("one step", "part", specs.part_colours, times=True),
)
SENT = Figure(
    "sent",
    "What each device sends, by mesh axis",
    "Every split costs messages between the devices along that axis of the mesh, in every step. x,y means over both "
    "axes at once. Bytes are exact: they stand in the compiled program.",
    "No layout here sends anything between devices, or none says what.",
    values.sent,
    specs.stack("sent by one device in a step", "mesh axes", specs.axes_colours, times=False),
)
PAIRS = Figure(
    "pairs",
    "Predicted against measured",
    "One point for each layout that was both compiled for a time and run. If the prediction puts layouts into the "
    "right order, points rise from left to right; on the dashed line they would agree to the millisecond.",
    "No layout was both predicted and run here. The same sweep with mode=compile target=v5e-8 adds predictions.",
    values.pairs,
    specs.pairs,
)
PRICE = Figure(
    "price",
    "Price against speed",
    "Up is faster, left is cheaper. The dashed line joins what no other of the same work beats in both.",
    "All layouts with a price cost the same an hour, so the fastest is also the cheapest.",
    values.prices,
    specs.price,
)
OF_A_GROUP = [SPEED, HEAT, PARTS_OF_STEP, SENT, MEMORY]
"""Figures of trials whose speeds are of one kind."""


def of_all(rows: Sequence[Row]) -> list[Figure]:
    """Return the figures of all trials together; that of prices only where there is a price."""
    return [PAIRS, PRICE] if any(row.ok and row.price for row in rows) else [PAIRS]
