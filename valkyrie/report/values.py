"""Data of the figures, made from ranked rows as JSON values for Vega-Lite."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from valkyrie.axes import axes_text
from valkyrie.parts import PartKind
from valkyrie.report.rank import chip_price, pareto_ids, peak_memory
from valkyrie.runs.goodput import KINDS
from valkyrie.sweep.rows import Row, predicted_and_measured
from valkyrie.sweep.trial import Status
from valkyrie.units import duration, memory_text, percent

Values = list[dict[str, Any]]

BARS = 40
"""Maximum number of layouts in a bar chart, the best ones."""
PART_NAMES = {
    PartKind.matmul: "matrix products",
    PartKind.kernel: "kernels",
    PartKind.compute: "other arithmetic",
    PartKind.memory: "memory-bound",
    PartKind.copies: "waiting for copies",
    PartKind.rest: "compute",
}
"""Labels of the parts of a step without mesh axes."""
_BY_AXES = {PartKind.exposed: "waiting for ", PartKind.collectives: "collectives over "}
"""Labels of the other parts, before their mesh axes."""
_LONG_UNITS = (("days", 1 / 86400), ("hours", 1 / 3600), ("minutes", 1 / 60), ("s", 1.0))
LETTER, LINE, NAMES = 0.008, 0.06, 12
"""Share of a chart's width that a letter takes, of its height that a line takes, and the maximum number of names."""
FAR = 4
"""Multiple of the largest peak beyond which the usable memory is not drawn."""


def labels(rows: Sequence[Row]) -> dict[str, str]:
    """Return labels by row id: the layout, and the settings that distinguish it from rows of the same layout."""
    described = {row.id: _described(row) for row in rows}
    varies = [len(set(column)) > 1 for column in zip(*described.values(), strict=True)]
    precise = len({(row.group, row.work.precision) for row in rows}) > len({row.group for row in rows})
    named: dict[str, str] = {}
    for row in rows:
        more = [text for text, shown in zip(described[row.id], varies, strict=True) if shown]
        more += [row.work.precision] * precise
        named[row.id] = " ".join([row.layout, *more, *row.work.varied])
    for more in (lambda row: row.trial.sweep, lambda row: str(row.source), lambda row: row.trial.name):
        counts: Counter[tuple[str, object]] = Counter((named[row.id], row.group) for row in rows)
        twice = [row for row in rows if counts[(named[row.id], row.group)] > 1]
        if len({more(row) for row in twice}) > 1:
            named |= {row.id: f"{named[row.id]} ({more(row)})" for row in twice}
    return named


def _described(row: Row) -> tuple[str, str, str]:
    return row.work.model, f"batch {row.work.batch}", f"{row.work.seq} long"


def bars(rows: Sequence[Row]) -> Values:
    """Return the speed of the best rows; `low` and `high` are the rates of the 90th percentile and the fastest step."""
    named = labels(rows)
    bars: Values = []
    for row in [row for row in rows if row.ok][:BARS]:
        assert row.rate is not None and row.step_s is not None
        spread = row.step.p90_s is not None and row.step.min_s is not None
        tokens = row.rate * row.step_s
        low, high = (tokens / (row.step.p90_s or 1), tokens / (row.step.min_s or 1)) if spread else (row.rate, row.rate)
        bars.append(
            {
                "label": named[row.id],
                "partition": row.about.partition,
                "rate": short(row.rate),
                "per_chip": short(row.rate_per_chip),
                "low": short(low),
                "high": short(high),
                "end": short(max(high, row.rate)),
                "step": duration(row.step_s),
                "spread": f"{duration(row.step.min_s or 0.0)} to {duration(row.step.p90_s or 0.0)}"
                if spread
                else "none: predicted",
            }
        )
    return bars


def cells(rows: Sequence[Row]) -> Values:
    """Return the best row of every MP1 x MP2 x DP; `rate` is None if no row of a cell has a speed.

    DP counts every split of the batch, fully sharded or not, times the splits of the sequence. Empty unless some DP has
    several cells to compare.
    """
    named = labels(rows)
    by_cell: dict[tuple[int, int, int], list[Row]] = defaultdict(list)
    for row in rows:
        if row.degrees:
            of = {"DP": 1, "FSDP": 1, "MP1": 1, "MP2": 1, "SP": 1, **row.degrees}
            by_cell[(of["DP"] * of["FSDP"] * of["SP"], of["MP1"], of["MP2"])].append(row)
    cells: Values = []
    for (data, mp1, mp2), members in sorted(by_cell.items()):
        best = members[0]
        rate = best.rate_per_chip if best.ok else None
        why = "" if best.ok else best.reason or best.status
        text = f"{_si(rate)}" if rate is not None else best.status.replace("does not fit", "no fit")
        cells.append(
            {"data": data, "mp1": mp1, "mp2": mp2, "rate": short(rate), "text": text, "label": named[best.id]}
            | {"tried": str(len(members)), "reason": why[:200]}
        )
    several = len({cell["data"] for cell in cells}) < len(cells)
    return cells if several and any(cell["rate"] is not None for cell in cells) else []


def memory(rows: Sequence[Row]) -> Values:
    """Return the peak memory and speed of rows that fit, and the memory needed by the others, with speed 0.

    If no row has a speed, `rate` is None in all values, and the smallest peak comes first. `usable` is the memory of
    one device, the same in every value. It is None if unknown or far beyond all rows, which `far` then explains.
    """
    named, best = labels(rows), pareto_ids(rows, peak_memory)
    timed = any(row.ok and row.peak for row in rows)
    fit = [row for row in rows if row.peak and (row.ok if timed else row.trial.status is Status.ok)]
    shown = fit + [row for row in rows if row.peak and row.trial.status is Status.does_not_fit]
    if not fit:
        return []
    if not timed:
        shown = sorted(shown, key=lambda row: row.peak or 0)[:BARS]
    largest, usable = (
        max(row.peak or 0 for row in shown),
        min((row.trial.results.memory.usable for row in shown if row.trial.results.memory.usable), default=None),
    )
    far = ""
    if usable is not None and usable > FAR * largest:
        far = f"Everything fits easily: the limit, {memory_text(usable)} of a device, is far to the right."
        usable = None
    unit, scale = ("GiB", 2**30) if largest > 2**30 / 10 else ("MiB", 2**20)
    with_name = _with_room(fit, named, max(largest, usable or 0)) if timed else set()
    return [
        {
            "label": named[row.id],
            "partition": row.about.partition,
            "work": row.work.label,
            "peak": short((row.peak or 0) / scale),
            "rate": (short(row.rate_per_chip) if row.ok else 0.0) if timed else None,
            "status": "does not fit" if row.trial.status is Status.does_not_fit else "fits",
            "front": row.id in best,
            "unit": unit,
            "usable": None if usable is None else short(usable / scale),
            "far": far,
            "name": named[row.id] if row.id in with_name else "",
        }
        for row in shown
    ]


def _with_room(rows: Sequence[Row], named: dict[str, str], widest: float) -> set[str]:
    """Return the ids of rows with room for a name next to their point, the best rows first.

    `widest` is the largest memory of the chart, in bytes.
    """
    highest = max(row.rate_per_chip or 0.0 for row in rows)
    places: dict[str, tuple[float, float]] = {}
    for row in rows:
        x, y = (row.peak or 0) / widest, (row.rate_per_chip or 0.0) / highest
        length = LETTER * max(map(len, named.values()))
        if all(abs(x - other_x) > length or abs(y - other_y) > LINE for other_x, other_y in places.values()):
            places[row.id] = (x, y)
    return set(places) if len(places) <= NAMES else set()


def parts(rows: Sequence[Row]) -> Values:
    """Return the parts of a step of the best rows, matrix products first. Communication has `axes` and comes last."""
    shown = [row for row in rows if row.ok and row.parts][:BARS]
    by_axes = {(p.kind.value, axes_text(p.mesh_axes)): p for row in shown for p in row.parts if p.kind.by_axes}
    order = [*PART_NAMES.values(), *(part_name(p.kind, p.mesh_axes) for _, p in sorted(by_axes.items()))]
    unit, scale = _time_unit([row.step_s or 0.0 for row in shown])
    taken = [(row, {part_name(p.kind, p.mesh_axes): p.seconds for p in row.parts}, row.step_s or 1.0) for row in shown]
    axes = {part_name(p.kind, p.mesh_axes): {"axes": axes_text(p.mesh_axes)} for p in by_axes.values()}
    return [value | axes.get(value["part"], {}) for value in _stacked(labels(rows), taken, order, {}, unit, scale)]


def part_name(kind: PartKind, mesh_axes: tuple[str, ...] = ()) -> str:
    """Return the label of a part of a step."""
    return _BY_AXES[kind] + axes_text(mesh_axes) if kind.by_axes else PART_NAMES[kind]


def sent(rows: Sequence[Row]) -> Values:
    """Return the bytes that one device sends by mesh axes, for the best rows and for rows without a speed."""
    shown = [row for row in rows if row.sent][:BARS]
    order = sorted({axes for row in shown for axes in row.sent}, key=lambda axes: (axes.count(","), axes))
    largest = max((sum(row.sent.values()) for row in shown), default=0.0)
    unit, scale = ("GB", 1e-9) if largest >= 1e9 else ("MB", 1e-6) if largest >= 1e6 else ("kB", 1e-3)
    taken = [(row, row.sent, sum(row.sent.values()) or 1.0) for row in shown]
    return _stacked(labels(rows), taken, order, {}, unit, scale)


def wall_times(rows: Sequence[Row]) -> Values:
    """Return the wall time of trainings by kind, the longest first. They are labelled by name if the names differ."""
    spent = [(row, row.goodput.seconds, row.goodput.wall_s) for row in rows if row.goodput and row.goodput.wall_s]
    spent = sorted(spent, key=lambda entry: -entry[2])[:BARS]
    names = {row.id: row.trial.name for row, *_ in spent}
    named = names if len(set(names.values())) == len(names) else labels(rows)
    longest = max((wall_s for *_, wall_s in spent), default=0.0)
    unit, scale = next((unit, scale) for unit, scale in _LONG_UNITS if longest * scale >= 2 or unit == "s")
    return _stacked(named, spent, list(KINDS), KINDS, unit, scale)


def pairs(rows: Sequence[Row]) -> Values:
    """Return steps predicted and measured of the same layout, in milliseconds."""
    named = labels(rows)
    return [
        {
            "label": named[pair.a.id],
            "partition": pair.a.about.partition,
            "x": short(1e3 * (pair.a.step_s or 0.0)),
            "y": short(1e3 * (pair.b.step_s or 0.0)),
            "predicted": duration(pair.a.step_s or 0.0),
            "measured": duration(pair.b.step_s or 0.0),
            "kind": "simulated" if pair.b.group.simulated else "measured",
            "target": pair.a.group.target,
            "on": pair.b.group.devices,
        }
        for pair in predicted_and_measured(rows)
    ]


def prices(rows: Sequence[Row]) -> Values:
    """Return price and speed of rows that have both; empty if all prices are the same."""
    named = labels(rows)
    priced = [row for row in rows if row.ok and row.price]
    if len({short(row.price) for row in priced}) < 2:
        return []
    best = pareto_ids(priced, chip_price)
    return [
        {
            "label": named[row.id],
            "target": row.group.target,
            "work": row.work.label,
            "price": short(row.price),
            "per_million": short(row.per_million),
            "rate": short(row.rate_per_chip),
            "front": row.id in best,
        }
        for row in priced
    ]


def _stacked(
    named: dict[str, str],
    taken: Sequence[tuple[Row, dict[str, float], float]],
    order: Sequence[str],
    words: dict[str, str],
    unit: str,
    scale: float,
) -> Values:
    """Return a value for every part of every row. `taken` are rows with their amounts by part and their total."""
    parts: Values = []
    for part in order:
        for row, amounts, whole in taken:
            if amounts.get(part):
                parts.append(
                    {
                        "label": named[row.id],
                        "part": words.get(part, part),
                        "order": order.index(part),
                        "amount": short(amounts[part] * scale),
                        "share": percent(amounts[part] / whole),
                        "unit": unit,
                    }
                )
    ranks = {named[row.id]: i for i, (row, _, _) in enumerate(taken)}
    return sorted(parts, key=lambda v: ranks[v["label"]])


def _time_unit(seconds: Sequence[float]) -> tuple[str, float]:
    longest = max(seconds, default=0.0)
    return ("s", 1.0) if longest >= 10 else ("ms", 1e3) if longest >= 1e-3 else ("µs", 1e6)


def short(value: float | None, digits: int = 5) -> float | None:
    """Round a number to a few digits, because a page of many trials has little room."""
    return None if value is None else float(f"{value:.{digits}g}")


def _si(value: float) -> str:
    for unit, scale in (("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{value / scale:.3g}{unit}"
    return f"{value:.3g}"
