"""Defines the figures of the HTML report: titles, captions, data and Vega-Lite specifications."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from valkyrie.report import colours, specs, values
from valkyrie.report.specs import CHART_CONFIG, SCHEMA, Spec
from valkyrie.report.values import Values
from valkyrie.sweep.rows import Row


@dataclass(frozen=True)
class Figure:
    """A figure of the HTML report.

    Args:
        id: HTML id.
        title: Title above the figure.
        caption: Explanation for a first-time reader.
        values: Returns the data, given ranked rows.
        spec: Returns the Vega-Lite specification, given the data.
        min_labels: Minimum number of different labels (layouts or training runs) in the data. With fewer, the figure is
            omitted.
    """

    id: str
    title: str
    caption: str
    values: Callable[[Sequence[Row]], Values]
    spec: Callable[[Values], Spec]
    min_labels: int = 2


def figure_spec(figure: Figure, rows: Sequence[Row]) -> Spec | None:
    """Return the complete Vega-Lite specification of a figure, or None if its data has too few labels."""
    data = figure.values(rows)
    if len({v["label"] for v in data}) < figure.min_labels:
        return None
    common = {"$schema": SCHEMA, "config": CHART_CONFIG, "description": figure.title}
    return {**common, **figure.spec(data), "data": {"values": data}}


SPEED = Figure(
    "speed",
    "How fast each layout is",
    "Longer is faster. Each bar shows the tokens per second on all chips. The thin line at its end is the spread, from "
    "the 90th percentile of step times to the fastest step. Predictions have no spread.",
    values.bars,
    specs.bars,
)
HEAT = Figure(
    "heat",
    "How to divide the devices among roles",
    "MP1 shards the width of every matrix, MP2 the residual stream, and DP the batch. FSDP and SP count as DP, because "
    "they shard the tokens of the batch too. Each cell shows the best layout with those degrees of MP1, MP2 and DP, in "
    "tokens/s/chip. Darker is faster.",
    values.cells,
    specs.heat,
)
MEMORY = Figure(
    "memory",
    "Memory against speed",
    "Higher is faster, further left needs less memory. The dashed line is the Pareto front: no other layout with the "
    "same workload is better in both. Crosses to the right of the red line need more memory than a device has, so they "
    "do not fit. If there are no speeds, bars show only the memory.",
    values.memory,
    specs.memory,
)
PARTS_OF_STEP = Figure(
    "parts",
    "Where the step time goes",
    "A predicted step consists of matrix products, kernels, other arithmetic, memory-bound operations, and waiting for "
    "copies between memories and for communication that compute does not hide. In a good layout, matrix products take "
    "most of the time. For measured steps, the time in collectives comes from a profiler trace and includes waiting.",
    values.parts,
    specs.stacked_bars("step time", "part", lambda v: colours.part_colour(v["part"], v.get("axes"))),
)
SENT_BYTES = Figure(
    "sent",
    "Bytes that each device sends, by mesh axis",
    "Sharding over a mesh axis requires communication along that axis in every step. x,y means over both axes at once. "
    "Bytes are exact: they are read from the compiled program.",
    values.sent_bytes,
    specs.stacked_bars("sent per device and step", "mesh axes", lambda v: colours.axes_colour(v["part"])),
)
LOSS = Figure(
    "loss",
    "Loss by step",
    "Training loss of the recorded steps, and validation loss (dashed) where it was evaluated. Shows at most "
    f"{values.MAX_CURVES} training runs, the first ones of the table. Long runs show {values.MAX_POINTS} evenly spaced "
    "steps.",
    values.losses,
    specs.losses,
    min_labels=1,
)
WALL_TIME = Figure(
    "walltime",
    "Where the wall time of a training run goes",
    "Wall time from the first start of a run to its end or last record. Overhead is all time "
    "not spent on new training steps: startup, compilation, saving, evaluation, downtime, and repeated steps.",
    values.wall_times,
    specs.stacked_bars("wall time", "spent on", lambda v: colours.time_colour(v["part"])),
)
PAIRS = Figure(
    "pairs",
    "Predicted against measured",
    "Each point is a layout with both a predicted and a measured step time. If predictions rank layouts correctly, "
    "points rise from left to right. On the dashed line, both times are equal.",
    values.pairs,
    specs.pairs,
)
PRICE = Figure(
    "price",
    "Price against speed",
    "Higher is faster, further left is cheaper. The dashed line is the Pareto front of each workload.",
    values.prices,
    specs.price,
)
GROUP_FIGURES = [SPEED, PARTS_OF_STEP, SENT_BYTES, MEMORY, HEAT]
"""Figures drawn separately for each kind of speed (`SpeedKind`)."""
OVERALL_FIGURES = [PAIRS, PRICE]
"""Figures that show all trials together."""
TRAINING_FIGURES = [LOSS, WALL_TIME]
"""Figures of training runs."""
