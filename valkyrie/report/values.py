"""Converts ranked rows to the data of the report's figures, as JSON values for Vega-Lite."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from valkyrie.axes import axes_text
from valkyrie.config.modes import METRICS_FILE
from valkyrie.parts import PART_LABELS, PartKind, describe_part
from valkyrie.report.rank import chip_price, pareto_ids, peak_memory
from valkyrie.runs.goodput import TIME_KINDS
from valkyrie.runs.tracking import read_metrics
from valkyrie.sweep.rows import Row, pair_predictions
from valkyrie.sweep.trial import Status
from valkyrie.units import duration_text, memory_text, percent_text

Values = list[dict[str, Any]]

MAX_CURVES, MAX_POINTS = 8, 300
"""Maximum numbers of training runs with a loss curve, and of evenly spaced points per curve."""
MAX_BARS = 40
"""Maximum number of layouts in a bar chart, which shows the best ones."""
_LONG_UNITS = (("days", 1 / 86400), ("hours", 1 / 3600), ("minutes", 1 / 60), ("s", 1.0))
LETTER_WIDTH, LINE_HEIGHT, MAX_NAMES = 0.008, 0.06, 12
"""Width of a letter and height of a line, as shares of a chart's width and height, and maximum number of its names."""
MAX_LIMIT_RATIO = 4
"""The usable memory is not drawn if it is more than this many times the largest peak."""


def label_rows(rows: Sequence[Row]) -> dict[str, str]:
    """Return a dict from row ids to labels: the layout, followed by the workload settings that differ between rows.

    If rows of one kind of speed still have equal labels, the sweep's name, its folder and the trial's name are added in
    parentheses, one after another until the labels differ.
    """
    workload_texts = {row.id: _workload_texts(row) for row in rows}
    is_varying = [len(set(column)) > 1 for column in zip(*workload_texts.values(), strict=True)]
    shows_precision = len({(row.speed_kind, row.work.precision) for row in rows}) > len(
        {row.speed_kind for row in rows}
    )
    row_labels: dict[str, str] = {}
    for row in rows:
        extra_texts = [text for text, is_shown in zip(workload_texts[row.id], is_varying, strict=True) if is_shown]
        extra_texts += [row.work.precision] * shows_precision
        row_labels[row.id] = " ".join([row.layout, *extra_texts, *row.work.varied_settings])
    for get_suffix in (lambda row: row.trial.sweep, lambda row: str(row.source), lambda row: row.trial.name):
        counts: Counter[tuple[str, object]] = Counter((row_labels[row.id], row.speed_kind) for row in rows)
        ambiguous_rows = [row for row in rows if counts[(row_labels[row.id], row.speed_kind)] > 1]
        if len({get_suffix(row) for row in ambiguous_rows}) > 1:
            row_labels |= {row.id: f"{row_labels[row.id]} ({get_suffix(row)})" for row in ambiguous_rows}
    return row_labels


def _workload_texts(row: Row) -> tuple[str, str, str]:
    return row.work.model, f"batch {row.work.batch}", f"seq {row.work.seq}"


def bars(rows: Sequence[Row]) -> Values:
    """Return the data of the bar chart: one record for each of the best `MAX_BARS` rows, with its rate in tokens/s.

    The error bar runs from `low`, the rate at the 90th-percentile step time, to `high`, the rate of the fastest step.
    Both equal the rate if these times are unknown.
    """
    row_labels = label_rows(rows)
    values: Values = []
    for row in [row for row in rows if row.has_speed][:MAX_BARS]:
        assert row.tokens_per_second is not None and row.step_s is not None
        has_spread = row.step.p90_s is not None and row.step.min_s is not None
        tokens = row.tokens_per_second * row.step_s
        low, high = (
            (tokens / (row.step.p90_s or 1), tokens / (row.step.min_s or 1))
            if has_spread
            else (row.tokens_per_second, row.tokens_per_second)
        )
        values.append(
            {
                "label": row_labels[row.id],
                "partition": row.about.partition,
                "rate": round_digits(row.tokens_per_second),
                "per_chip": round_digits(row.tokens_per_second_per_chip),
                "low": round_digits(low),
                "high": round_digits(high),
                "end": round_digits(max(high, row.tokens_per_second)),
                "step": duration_text(row.step_s),
                "spread": f"{duration_text(row.step.min_s or 0.0)} to {duration_text(row.step.p90_s or 0.0)}"
                if has_spread
                else "none: predicted",
            }
        )
    return values


def cells(rows: Sequence[Row]) -> Values:
    """Return the data of the heat map: one cell for each combination of DP, MP1 and MP2 degrees, with its best row.

    Here DP is the product of the degrees of DP, FSDP, EP and SP. `rate` is None if no row of a cell has a speed.
    Returns an empty list if no cell has a speed, or if every cell has a different DP, so that there is nothing to
    compare.
    """
    row_labels = label_rows(rows)
    by_cell: dict[tuple[int, int, int], list[Row]] = defaultdict(list)
    for row in rows:
        if row.degrees:
            degrees = {"DP": 1, "FSDP": 1, "EP": 1, "MP1": 1, "MP2": 1, "SP": 1, **row.degrees}
            dp = degrees["DP"] * degrees["FSDP"] * degrees["EP"] * degrees["SP"]
            by_cell[(dp, degrees["MP1"], degrees["MP2"])].append(row)
    values: Values = []
    for (dp, mp1, mp2), members in sorted(by_cell.items()):
        best = members[0]
        rate = best.tokens_per_second_per_chip if best.has_speed else None
        reason = "" if best.has_speed else best.reason or best.status
        text = _si_text(rate) if rate is not None else best.status.replace("does not fit", "no fit")
        values.append(
            {
                "data": dp,
                "mp1": mp1,
                "mp2": mp2,
                "rate": round_digits(rate),
                "text": text,
                "label": row_labels[best.id],
            }
            | {"tried": str(len(members)), "reason": reason[:200]}
        )
    is_comparable = len({value["data"] for value in values}) < len(values)
    return values if is_comparable and any(value["rate"] is not None for value in values) else []


def memory(rows: Sequence[Row]) -> Values:
    """Return the data of the memory chart: `peak` memory and speed (`rate`) of rows with a known peak.

    Includes rows with a speed, and rows that do not fit, with speed 0. If no row has a speed, `rate` is None, and
    the records are the `MAX_BARS` rows with the least memory, sorted by memory. Returns an empty list if no row fits.

    All records have the same `usable`: the smallest usable memory per device, or None if unknown. If it is more than
    `MAX_LIMIT_RATIO` times the largest peak, `usable` is None too, and `far` is a sentence that explains why. `peak`
    and `usable` are in `unit`, which is GiB or MiB for all rows.
    """
    row_labels, pareto_front = label_rows(rows), pareto_ids(rows, peak_memory)
    has_speeds = any(row.has_speed and row.peak_bytes for row in rows)
    fitting_rows = [
        row for row in rows if row.peak_bytes and (row.has_speed if has_speeds else row.trial.status is Status.ok)
    ]
    shown_rows = fitting_rows + [row for row in rows if row.peak_bytes and row.trial.status is Status.does_not_fit]
    if not fitting_rows:
        return []
    if not has_speeds:
        shown_rows = sorted(shown_rows, key=lambda row: row.peak_bytes or 0)[:MAX_BARS]
    largest, usable = (
        max(row.peak_bytes or 0 for row in shown_rows),
        min((row.trial.results.memory.usable for row in shown_rows if row.trial.results.memory.usable), default=None),
    )
    limit_note = ""
    if usable is not None and usable > MAX_LIMIT_RATIO * largest:
        limit_note = f"All layouts fit easily: the limit of {memory_text(usable)} per device is outside the chart."
        usable = None
    unit, scale = ("GiB", 2**30) if largest > 2**30 / 10 else ("MiB", 2**20)
    named_ids = _find_named_ids(fitting_rows, row_labels, max(largest, usable or 0, 1)) if has_speeds else set()
    return [
        {
            "label": row_labels[row.id],
            "partition": row.about.partition,
            "work": row.work.label,
            "peak": round_digits((row.peak_bytes or 0) / scale),
            "rate": (round_digits(row.tokens_per_second_per_chip) if row.has_speed else 0.0) if has_speeds else None,
            "status": "does not fit" if row.trial.status is Status.does_not_fit else "fits",
            "front": row.id in pareto_front,
            "unit": unit,
            "usable": None if usable is None else round_digits(usable / scale),
            "far": limit_note,
            "name": row_labels[row.id] if row.id in named_ids else "",
        }
        for row in shown_rows
    ]


def _find_named_ids(rows: Sequence[Row], row_labels: dict[str, str], max_memory: float | int) -> set[str]:
    """Return the ids of rows whose name fits next to their point without overlap. Better rows take precedence.

    Returns an empty set if more than `MAX_NAMES` names fit. `max_memory` is the largest memory in the chart, in bytes.
    """
    max_rate = max(row.tokens_per_second_per_chip or 0.0 for row in rows) or 1.0
    name_positions: dict[str, tuple[float, float]] = {}
    for row in rows:
        x, y = (row.peak_bytes or 0) / max_memory, (row.tokens_per_second_per_chip or 0.0) / max_rate
        length = LETTER_WIDTH * max(map(len, row_labels.values()))
        if all(
            abs(x - other_x) > length or abs(y - other_y) > LINE_HEIGHT for other_x, other_y in name_positions.values()
        ):
            name_positions[row.id] = (x, y)
    return set(name_positions) if len(name_positions) <= MAX_NAMES else set()


def parts(rows: Sequence[Row]) -> Values:
    """Return the data of the step-time chart: the step parts of the best `MAX_BARS` rows.

    Parts are ordered as in `PART_LABELS`, followed by communication. Records of communication also have `axes`, their
    mesh axes. Amounts are in `unit`, which is s, ms or µs for all rows.
    """
    shown_rows = [row for row in rows if row.has_speed and row.parts][:MAX_BARS]
    by_axes = {
        (p.kind.value, axes_text(p.mesh_axes)): p for row in shown_rows for p in row.parts if p.kind.has_mesh_axes
    }
    order = [
        *(label for kind, label in PART_LABELS.items() if not kind.has_mesh_axes),
        *(part_name(p.kind, p.mesh_axes) for _, p in sorted(by_axes.items())),
    ]
    unit, scale = _time_unit([row.step_s or 0.0 for row in shown_rows])
    entries = [
        (row, {part_name(p.kind, p.mesh_axes): p.seconds for p in row.parts}, row.step_s or 1.0) for row in shown_rows
    ]
    axes = {part_name(p.kind, p.mesh_axes): {"axes": axes_text(p.mesh_axes)} for p in by_axes.values()}
    return [
        value | axes.get(value["part"], {})
        for value in _stacked_bar_values(label_rows(rows), entries, order, {}, unit, scale)
    ]


def part_name(kind: PartKind, mesh_axes: tuple[str, ...] = ()) -> str:
    """Return the label of a step part in figures: `matrix products`, `waiting over x,y`."""
    return describe_part(kind, axes_text(mesh_axes), short=True)


def sent_bytes(rows: Sequence[Row]) -> Values:
    """Return the bytes that each device sends per step over each set of mesh axes, for the best `MAX_BARS` rows.

    Amounts are in `unit`, which is GB, MB or kB for all rows.
    """
    shown_rows = [row for row in rows if row.bytes_by_axes][:MAX_BARS]
    order = sorted({axes for row in shown_rows for axes in row.bytes_by_axes}, key=lambda axes: (axes.count(","), axes))
    largest = max((sum(row.bytes_by_axes.values()) for row in shown_rows), default=0.0)
    unit, scale = ("GB", 1e-9) if largest >= 1e9 else ("MB", 1e-6) if largest >= 1e6 else ("kB", 1e-3)
    entries = [(row, row.bytes_by_axes, sum(row.bytes_by_axes.values()) or 1.0) for row in shown_rows]
    return _stacked_bar_values(label_rows(rows), entries, order, {}, unit, scale)


def losses(rows: Sequence[Row]) -> Values:
    """Return the losses of training runs: one record per recorded step, with its `step`, `loss` and `kind`.

    `kind` is `training` or `validation`. Shows the first `MAX_CURVES` training runs of `rows`. Each curve has at most
    `MAX_POINTS` evenly spaced points, and the last point. Omits losses that are not finite.
    """
    values: Values = []
    shown_rows = [row for row in rows if row.is_training and row.folder is not None][:MAX_CURVES]
    row_labels = _training_labels(shown_rows)
    for row in shown_rows:
        assert row.folder is not None
        file = row.folder / METRICS_FILE
        records = read_metrics(file) if file.is_file() else []
        for kind, key in (("training", "loss"), ("validation", "eval_loss")):
            points = [(r.get("step"), r.get(key)) for r in records]
            points = [point for point in points if all(isinstance(n, int | float) and math.isfinite(n) for n in point)]
            stride = -(-len(points) // MAX_POINTS) or 1
            last = points[-1:] if (len(points) - 1) % stride else []
            shown = [*points[::stride], *last]
            values += [
                {"label": row_labels[row.id], "kind": kind, "step": x, "loss": round_digits(y)} for x, y in shown
            ]
    return values


def _training_labels(rows: Sequence[Row]) -> dict[str, str]:
    """Return a dict from row ids to names of training runs. Equal names are followed by the folder."""
    counts = Counter(row.trial.name for row in rows)
    return {
        row.id: f"{row.trial.name} ({row.source})" if counts[row.trial.name] > 1 else row.trial.name for row in rows
    }


def wall_times(rows: Sequence[Row]) -> Values:
    """Return the wall time of training runs by kind (steps, compile, saving, ...), longest run first.

    Shows at most `MAX_BARS` runs. Amounts are in `unit`, which is days, hours, minutes or seconds for all runs.
    """
    entries = [(row, row.goodput.seconds, row.goodput.wall_s) for row in rows if row.goodput and row.goodput.wall_s]
    entries = sorted(entries, key=lambda entry: -entry[2])[:MAX_BARS]
    row_labels = _training_labels([row for row, *_ in entries])
    longest = max((wall_s for *_, wall_s in entries), default=0.0)
    unit, scale = next((unit, scale) for unit, scale in _LONG_UNITS if longest * scale >= 2 or unit == "s")
    return _stacked_bar_values(row_labels, entries, list(TIME_KINDS), TIME_KINDS, unit, scale)


def pairs(rows: Sequence[Row]) -> Values:
    """Return the predicted (`x`) and measured (`y`) step time of each layout that has both, in milliseconds."""
    row_labels = label_rows(rows)
    return [
        {
            "label": row_labels[pair.a.id],
            "partition": pair.a.about.partition,
            "x": round_digits(1e3 * (pair.a.step_s or 0.0)),
            "y": round_digits(1e3 * (pair.b.step_s or 0.0)),
            "predicted": duration_text(pair.a.step_s or 0.0),
            "measured": duration_text(pair.b.step_s or 0.0),
            "kind": "simulated" if pair.b.speed_kind.simulated else "measured",
            "target": pair.a.speed_kind.target,
            "on": pair.b.speed_kind.devices,
        }
        for pair in pair_predictions(rows)
    ]


def prices(rows: Sequence[Row]) -> Values:
    """Return the price (dollars per chip-hour) and speed (tokens/s/chip) of each row for which both are known.

    Returns an empty list if all prices are equal.
    """
    row_labels = label_rows(rows)
    priced = [row for row in rows if row.has_speed and row.price]
    if len({round_digits(row.price) for row in priced}) < 2:
        return []
    pareto_front = pareto_ids(priced, chip_price)
    return [
        {
            "label": row_labels[row.id],
            "target": row.speed_kind.target,
            "work": row.work.label,
            "price": round_digits(row.price),
            "per_million": round_digits(row.dollars_per_million_tokens),
            "rate": round_digits(row.tokens_per_second_per_chip),
            "front": row.id in pareto_front,
        }
        for row in priced
    ]


def _stacked_bar_values(
    row_labels: dict[str, str],
    entries: Sequence[tuple[Row, dict[str, float], float]],
    order: Sequence[str],
    part_labels: dict[str, str],
    unit: str,
    scale: float,
) -> Values:
    """Return the data of a stacked bar chart: one record per row and part, in the order of `entries`, then `order`.

    Omits parts with amount 0.

    Args:
        row_labels: Labels by row id.
        entries: Rows, with their amounts by part and their total.
        order: All parts, in order.
        part_labels: Labels of parts. A part without one is its own label.
        unit: Unit of the chart.
        scale: Factor from amounts to `unit`.
    """
    values: Values = []
    for part in order:
        for row, amounts, total in entries:
            if amounts.get(part):
                values.append(
                    {
                        "label": row_labels[row.id],
                        "part": part_labels.get(part, part),
                        "order": order.index(part),
                        "amount": round_digits(amounts[part] * scale),
                        "share": percent_text(amounts[part] / total),
                        "unit": unit,
                    }
                )
    ranks = {row_labels[row.id]: i for i, (row, _, _) in enumerate(entries)}
    return sorted(values, key=lambda v: ranks[v["label"]])


def _time_unit(times_s: Sequence[float]) -> tuple[str, float]:
    longest = max(times_s, default=0.0)
    return ("s", 1.0) if longest >= 10 else ("ms", 1e3) if longest >= 1e-3 else ("µs", 1e6)


def round_digits(value: float | None, digits: int = 5) -> float | None:
    """Round a number to a few significant digits, to keep a page with many trials small."""
    return None if value is None else float(f"{value:.{digits}g}")


def _si_text(value: float) -> str:
    for unit, scale in (("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{value / scale:.3g}{unit}"
    return f"{value:.3g}"
