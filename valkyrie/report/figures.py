"""The figures of the page, each with its title, caption, data and Vega-Lite specification."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from valkyrie.report import colours, specs, values
from valkyrie.report.specs import CONFIG, SCHEMA, Spec
from valkyrie.report.values import Values
from valkyrie.sweep.rows import Row


@dataclass(frozen=True)
class Figure:
    """A figure of the page.

    Args:
        words: Caption, for a first-time reader.
        values: Returns the data, given ranked rows.
        spec: Returns the specification, given the data.
    """

    id: str
    title: str
    words: str
    values: Callable[[Sequence[Row]], Values]
    spec: Callable[[Values], Spec]


def specification(figure: Figure, rows: Sequence[Row]) -> Spec | None:
    """Return the complete Vega-Lite specification of a figure of ranked rows, or None if it would show one row."""
    data = figure.values(rows)
    if len({v["label"] for v in data}) < 2:
        return None
    about = {"$schema": SCHEMA, "config": CONFIG, "description": figure.title}
    return {**about, **figure.spec(data), "data": {"values": data}}


SPEED = Figure(
    "speed",
    "How fast each layout is",
    "Longer is faster. A bar is the tokens per second of the whole slice. The thin line at its end goes from "
    "the 90th percentile of step times to the fastest step; a prediction has none.",
    values.bars,
    specs.bars,
)
HEAT = Figure(
    "heat",
    "How best to split the devices",
    "N devices are split three ways: MP1 splits the width of every matrix, MP2 the vectors between them, DP the batch "
    "(fully sharded data counts as DP: it splits the batch too). A cell is the best layout with those three numbers, "
    "in tokens/s/chip; darker is faster.",
    values.cells,
    specs.heat,
)
MEMORY = Figure(
    "memory",
    "Memory against speed",
    "Up is faster, left needs less memory. The dashed line is the Pareto front: layouts that no other of the same work "
    "beats in both. Right of the red line a program needs more memory than a device has: crosses there do not fit. "
    "Where there is no speed, bars show the memory alone.",
    values.memory,
    specs.memory,
)
PARTS_OF_STEP = Figure(
    "parts",
    "Where the time of a step goes",
    "A predicted step is matrix products, other arithmetic, memory-bound operations, and waiting for communication "
    "over mesh axes that no compute hides. A good layout is mostly matrix products. Collective times of measured steps "
    "come from a profiler trace and include waiting.",
    values.parts,
    specs.stack("one step", "part", lambda v: colours.part_colour(v["part"], v.get("axes"))),
)
SENT = Figure(
    "sent",
    "What each device sends, by mesh axis",
    "Every split costs communication along its mesh axis in every step. x,y means over both "
    "axes at once. Bytes are exact: they are read from the compiled program.",
    values.sent,
    specs.stack("sent by one device in a step", "mesh axes", lambda v: colours.axes_colour(v["part"])),
)
WALL_TIME = Figure(
    "walltime",
    "Where the wall time of a training goes",
    "From the first start of a training to its end, or to its last record. Steps that count are first. The rest is "
    "starting, saving, evaluating, waiting, and steps repeated after a restart.",
    values.wall_times,
    specs.stack("wall time", "spent on", lambda v: colours.time_colour(v["part"])),
)
PAIRS = Figure(
    "pairs",
    "Predicted against measured",
    "One point for each layout with both a predicted and a measured step time. If predictions rank layouts right, "
    "points rise from left to right; on the dashed line the two are equal.",
    values.pairs,
    specs.pairs,
)
PRICE = Figure(
    "price",
    "Price against speed",
    "Up is faster, left is cheaper. The dashed line is the Pareto front of each work.",
    values.prices,
    specs.price,
)
OF_A_GROUP = [SPEED, PARTS_OF_STEP, SENT, MEMORY, HEAT]
"""Figures of one kind of speed."""
OF_ALL = [PAIRS, PRICE]
"""Figures of all trials together."""
