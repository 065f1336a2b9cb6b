"""Sentences about a sweep: the fastest layout, and the reasons, from the numbers of its trials."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import date, datetime
from typing import TYPE_CHECKING, NamedTuple

from valkyrie.records import encode
from valkyrie.report.rank import UNKNOWN, agreement, describe_simplest, same_layout, simplest_partitions
from valkyrie.report.values import PART_NAMES
from valkyrie.search.compile.prediction import CompileStatus, Prediction
from valkyrie.search.explain.difference import compare_layouts, compared_quantities
from valkyrie.sweep.noise import has_spread, within_noise
from valkyrie.sweep.rows import Row, SpeedKind, Workload, groups, predicted_and_measured
from valkyrie.sweep.trial import Status
from valkyrie.units import duration, memory_text, number_text, percent, share_text, traffic_text

if TYPE_CHECKING:
    from valkyrie.search.answer_record import SearchAnswer

SIMULATED = (
    "Speeds on simulated devices were taken on CPU devices that stand in for accelerators. Losses, bytes sent and "
    "compiled memory are real; those speeds, and their order, are not those of any accelerator."
)
_BY = {"estimate": "estimated", "compile": "compiled", "measure": "measured"}
"""Adjective for a step time by the stage of a search that it comes from."""
LISTED = 4
"""Number of values of a fact at the top of a page."""
WORKS = 3
"""Number of works (models, batches and lengths) with sentences."""
SAME = 1.02
"""Ratio below which two speeds are called the same."""
EXPLAINED = 12
"""Number of layouts, the best first, with sentences for each pair on the page."""


class BigNumber(NamedTuple):
    """A number of the fastest layout in large print, with its label and a note in small print.

    In a sentence the label comes first, or last with `is_unit`.
    """

    label: str
    value: str
    note: str = ""
    is_unit: bool = False

    @property
    def phrase(self) -> str:
        """The number in a sentence: `1,000 tokens/s/chip`, `step 128.0 ms (MFU 30%)`."""
        text = f"{self.value} {self.label}" if self.is_unit else f"{self.label} {self.value}"
        return f"{text} ({self.note})" if self.note else text


@dataclass(frozen=True)
class Answer:
    """The answer for one kind of speed.

    Args:
        head: The number of layouts and the kind of speed, or the reason why there is no speed.
        winner: Layout, speed, step time and memory of the fastest layout. Empty if there is no speed.
        remarks: Sentences about the fastest layout: a simpler one that it equals, others that are as fast.
        reasons: Sentences on why the best layout of each other partition is slower.
    """

    head: str
    winner: tuple[BigNumber, ...] = ()
    remarks: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        """The head, the numbers of the winner and the remarks as a paragraph."""
        first = f"{self.head}."
        if self.winner:
            layout, *numbers = self.winner
            name = f"{layout.value} of {layout.note}" if layout.note else layout.value
            first = f"{self.head}: {', '.join([name, *(number.phrase for number in numbers)])}."
        return " ".join([first, *self.remarks])


def answer(group: SpeedKind, rows: Sequence[Row]) -> Answer:
    """Explain one kind of speed: the fastest layout, and why the best of each other partition is slower.

    `rows` are sorted by speed, the fastest first.
    """
    fast = next((row for row in rows if row.ok), None)
    if fast is None:
        return Answer(_without_speeds(group, rows).rstrip("."))
    timed = sum(row.ok for row in rows)
    head = f"Fastest of {timed} {group.label}" if timed > 1 else f"{group.label[0].upper()}{group.label[1:]}"
    works = list(dict.fromkeys(row.work for row in rows if row.ok))
    reasons: list[str] = []
    for work in works[:WORKS]:
        label = f"{work.label}: " if len(works) > 1 else ""
        reasons += [label + line for line in _explain_work([row for row in rows if row.work == work])]
    return Answer(head, _winner(fast, len(works) > 1), _remarks(fast, rows), tuple(reasons))


def search_answer(search: SearchAnswer) -> Answer:
    """Return the head and the large numbers of a search's best layout, with its cost if that was requested."""
    best = search.best[0]
    low, high = (duration(seconds) for seconds in (best.low_s, best.high_s))
    layout = f"{best.candidate.mesh} {best.candidate.partition}"
    numbers = [
        BigNumber("layout", layout, " ".join([best.candidate.target, *best.overrides[3:]])),
        BigNumber("tokens/s/chip", f"{best.tokens_per_second_per_chip:,.0f}", f"MFU {percent(best.mfu or 0)}", True),
        BigNumber(f"step, {_BY[best.stage.value]}", duration(best.step_s), f"{low} to {high}" if best.interval else ""),
        BigNumber(
            "peak memory per device",
            memory_text(best.memory or 0),
            f"of {memory_text(best.usable)} usable" if best.usable else "",
        ),
    ]
    if best.tokens_for_budget is not None:
        budget = f"tokens for ${number_text(search.budget_usd or 0)}"
        numbers.append(BigNumber(budget, f"{number_text(best.tokens_for_budget / 1e9)} billion", is_unit=True))
    if best.dollars is not None and best.hours is not None:
        tokens = f"{number_text((search.tokens or 0) / 1e9)} billion tokens"
        numbers.append(
            BigNumber("price", f"${number_text(best.dollars)}", f"{number_text(best.hours)} hours for {tokens}")
        )
    layouts = f"The best of {search.layouts:,} layouts: {search.compiled} compiled, the others estimated"
    return Answer(layouts, tuple(numbers), tuple(filter(None, [search.why and f"Stopped: {search.why}."])))


def _without_speeds(group: SpeedKind, rows: Sequence[Row]) -> str:
    """Return a sentence for rows without speeds: the reason, and the least memory and bytes sent if they are known."""
    done = [row for row in rows if row.trial.status is Status.ok]
    if not done:
        return f"No layout {group.label} has a speed: the reasons are below."
    text = f"No layout {group.label} has a speed: {(done[0].reason or 'no step time is known').rstrip('.')}."
    several = len({row.work for row in done}) > 1
    least_memory = min((row for row in done if row.peak), key=lambda row: row.peak or 0, default=None)
    if least_memory is not None:
        text += f" Least memory: {_named(least_memory, several)}, {memory_text(least_memory.peak)} a device."
    least = min((row for row in done if row.sent), key=lambda row: sum(row.sent.values()), default=None)
    if least is not None:
        text += (
            f" Least sent: {_named(least, several)}, {traffic_text(sum(least.sent.values()))} by a device in a step."
        )
    return text


def _named(row: Row, several: bool) -> str:
    """Return a row's layout, and its work if there are several."""
    return f"{row.layout} of {row.work.label}" if several else row.layout


def _explain_work(rows: Sequence[Row]) -> list[str]:
    """Explain why the first row is faster than the best of each other partition, and list partitions without a speed.

    A row with a partition that equals a simpler one on its mesh counts as the simpler one.
    """
    counted, best = simplest_partitions(rows), {}
    for row in sorted((row for row in rows if row.ok), key=lambda row: row.about.partition != counted[row.id]):
        best.setdefault(counted[row.id], row)
    best = {row.id: row for row in best.values()}
    fast, *others = [row for row in rows if row.id in best]
    if not others:
        others = [row for row in rows if row.ok and not same_layout(row, fast)][-1:]
    lines = [because(fast, row) for row in others]
    for partition in dict.fromkeys(row.about.partition for row in rows):
        members = [row for row in rows if row.about.partition == partition]
        timed = [row for row in members if row.ok]
        if not timed and partition != "?":
            lines.append(_without(partition, members))
        elif timed and all(counted[row.id] != partition for row in timed):
            lines.append(_describe_equal(partition, timed, counted))
    return lines


def _describe_equal(partition: str, rows: Sequence[Row], counted: dict[str, str]) -> str:
    """Explain that each row of a partition equals another partition."""
    meshes = [f"{row.about.mesh} ({describe_simplest(counted[row.id])})" for row in rows]
    return f"{partition} is compared as another partition, because no mesh here uses all its axes: {'; '.join(meshes)}."


def because(fast: Row, slow: Row) -> str:
    """Return the ratio of two speeds in a sentence, with the parts of the steps that make the difference."""
    assert fast.rate_per_chip and slow.rate_per_chip
    ratio, (a, b) = fast.rate_per_chip / slow.rate_per_chip, names(fast, slow)
    if within_noise(fast.trial, slow.trial) and (noise := _noise(fast, slow)):
        return f"No difference beyond noise between {a} and {b}: {noise}."
    if ratio < SAME:
        return f"{a} is as fast as {b}, within {percent(SAME - 1)}."
    head = f"{a} is {ratio:.{2 if ratio < 1.1 else 1 if ratio < 10 else 0}f}x as fast as {b}."
    return " ".join([head, *compare_layouts(_prediction(fast), _prediction(slow), labels=(a, b)).reasons])


def _prediction(row: Row) -> Prediction:
    """Convert a row with a step time to the record that `compare_layouts` compares."""
    results, about = row.trial.results, replace(row.about, layout=row.layout)
    shared = Prediction(about, CompileStatus.ok, memory=results.memory, communication=results.communication)
    return replace(shared, parts=row.parts, step=replace(results.step, step_s=row.step_s))


@dataclass(frozen=True)
class PairedRows:
    """Comparisons of predicted rows, by their index.

    `sides` holds the fields of `ComparedQuantities` and the `work` of each row. `why` holds sentences by two indices,
    such as `0,2`. In them, the first row is A.
    """

    sides: dict[int, dict[str, object]] = field(default_factory=dict)
    why: dict[str, list[str]] = field(default_factory=dict)


def compare_rows(rows: Sequence[Row]) -> PairedRows:
    """Compare predicted rows of equal work, with any batch. Empty if fewer than two rows have parts of a step."""
    predicted = {
        i: _prediction(row)
        for i, row in enumerate(rows)
        if row.trial.status is Status.ok and row.group.stage == "compile" and row.parts and row.step_s is not None
    }
    if len(predicted) < 2:
        return PairedRows()
    works = {
        i: ", ".join([" ".join([rows[i].work.model, *rows[i].work.varied]), rows[i].work.precision]) for i in predicted
    }
    why: dict[str, list[str]] = {}
    for i, j in itertools.permutations(list(predicted)[:EXPLAINED], 2):
        if works[i] == works[j]:
            with contextlib.suppress(ValueError):  # the same layout twice
                why[f"{i},{j}"] = list(compare_layouts(predicted[i], predicted[j]).sentences)
    return PairedRows({i: _side(prediction) | {"work": works[i]} for i, prediction in predicted.items()}, why)


def _side(prediction: Prediction) -> dict[str, object]:
    """Return the quantities of a layout that are compared, with the names of parts that the figures use."""
    names, side = {kind.value: name for kind, name in PART_NAMES.items()}, encode(compared_quantities(prediction))
    return side | {"seconds": {names.get(part, part): seconds for part, seconds in side["seconds"].items()}}


def _noise(fast: Row, slow: Row) -> str:
    """Return the step times of two rows with their ranges; empty for predictions, which have no range."""
    if fast.step.p90_s is None or slow.step.p90_s is None:
        return ""
    of_each = [f"{duration(row.step_s or 0.0)} ({_steps(row)})" for row in (fast, slow)]
    return f"a step takes {of_each[0]} and {of_each[1]}"


def _steps(row: Row) -> str:
    least = row.step_s if row.step.min_s is None else row.step.min_s
    return f"from {duration(least or 0.0)} to {duration(row.step.p90_s or 0.0)}"


def names(one: Row, other: Row) -> tuple[str, str]:
    """Name two rows by what differs: their partitions, with the meshes if these differ too, or the layouts."""
    if one.about.partition == other.about.partition and one.about.mesh == other.about.mesh:
        return one.layout, other.layout
    if one.about.mesh == other.about.mesh:
        return one.about.partition, other.about.partition
    return f"{one.about.partition} on {one.about.mesh}", f"{other.about.partition} on {other.about.mesh}"


def price_lines(rows: Sequence[Row]) -> list[str]:
    """Return the price of a million tokens under the cheapest layout of each work, if it is not the fastest one."""
    by_work: dict[Workload, list[Row]] = {}
    for row in sorted((row for row in rows if row.ok and row.per_million), key=lambda row: row.per_million or 0.0):
        by_work.setdefault(row.work, []).append(row)
    lines = []
    for members in by_work.values():
        cheapest, fastest = members[0], max(members, key=lambda row: row.rate_per_chip or 0.0)
        if cheapest.price != fastest.price:
            lines.append(
                f"Cheapest: {_named(cheapest, len(by_work) > 1)} on {cheapest.group.target}, "
                f"{cheapest.per_million:.3g} dollars for a million tokens."
            )
    return lines[:WORKS]


def agreement_line(rows: Sequence[Row]) -> str | None:
    """Return how often predictions and measurements agree on the faster of two layouts, or None without such pairs."""
    pairs = predicted_and_measured(rows)
    share = agreement(pairs)
    if share is None:
        return None
    line = f"Of two of these layouts, predictions name the faster one in {percent(share)} of cases (chance: 50%)."
    if any(pair.b.group.simulated for pair in pairs):
        line += " Simulated devices are threads of one processor, without links: expect little of this comparison."
    return line


def _winner(row: Row, several: bool) -> tuple[BigNumber, ...]:
    """Return the large numbers of the fastest layout, with its work if there are several."""
    assert row.rate_per_chip is not None and row.rate is not None and row.step_s is not None
    usable, dollars = row.trial.results.memory.usable, row.per_million
    numbers = [
        BigNumber("layout", row.layout, row.work.label if several else ""),
        BigNumber("tokens/s/chip", f"{row.rate_per_chip:,.0f}", f"{row.rate:,.0f} tokens/s on all chips", True),
        BigNumber("step", duration(row.step_s), "" if row.step.mfu is None else f"MFU {share_text(row.step.mfu)}"),
    ]
    if row.peak is not None:
        of_usable = "" if usable is None else f"of {memory_text(usable)} usable"
        numbers.append(BigNumber("peak memory per device", memory_text(row.peak), of_usable))
    if row.group.stage == "train" and row.trial.results.loss is not None:
        numbers.append(
            BigNumber("loss", f"{row.trial.results.loss:.4f}", f"after {row.trial.results.steps or 0:,} steps")
        )
    if dollars:
        numbers.append(BigNumber("dollars for a million tokens", f"{dollars:.3g}", is_unit=True))
    return tuple(numbers)


def _remarks(row: Row, rows: Sequence[Row]) -> tuple[str, ...]:
    partition = simplest_partitions(rows)[row.id]
    equal = f"On this mesh {row.about.partition} is {describe_simplest(partition)}."
    return tuple(filter(None, [equal if partition != row.about.partition else "", _equally_fast(row, rows)]))


def _equally_fast(row: Row, rows: Sequence[Row]) -> str:
    others = [r for r in rows if r.ok and r.work == row.work and r is not row]
    within = f"{percent(SAME - 1)}"
    if has_spread(row.trial):
        others, within = [r for r in others if within_noise(row.trial, r.trial)], "the spread of the timed steps"
    else:
        others = [r for r in others if (r.rate_per_chip or 0.0) >= (row.rate_per_chip or 0.0) / SAME]
    if not others:
        return ""
    more = f" and {len(others) - 3} more" if len(others) > 3 else ""
    return f"As fast, within {within}: {', '.join(r.layout for r in others[:3])}{more}."


def _without(partition: str, rows: Sequence[Row]) -> str:
    status = " or ".join(dict.fromkeys("no time" if row.status == "ok" else row.status for row in rows))
    reason = (rows[0].reason or UNKNOWN).splitlines()[0].rstrip(".")
    return f"{partition} has no speed ({status}): {reason}."


def title(rows: Sequence[Row], search: SearchAnswer | None) -> str:
    """Return the title of a page: the model and slices of a search, or the names of sweeps."""
    if search is not None and search.targets:
        return f"{rows[0].work.model} on {' or '.join(search.targets)}"
    sweeps = list(dict.fromkeys(row.trial.sweep for row in rows))
    return ", ".join(sweeps[:3]) + (f" and {len(sweeps) - 3} more" if len(sweeps) > 3 else "")


def facts(rows: Sequence[Row]) -> dict[str, str]:
    """Return facts for the top of a page, each with its different values: model, batch, precision, hardware, date."""
    sizes = {row.work.model: row.trial.results.parameters for row in rows if row.trial.results.parameters}
    models = {row.work.model: "" for row in rows} | {model: f", {size:,} parameters" for model, size in sizes.items()}
    batches = [f"{row.work.batch} x {row.work.seq:,} tokens" for row in rows if row.work.batch and row.work.seq]
    dates = sorted(day for row in rows if (day := _date(row.trial.started)) is not None)
    values = {
        "model": [f"{model}{size}" for model, size in models.items()],
        "batch": batches,
        "precision": [row.work.precision for row in rows],
        "hardware": [row.about.described for row in rows],
        "date": [f"{day.day} {day:%B %Y}" for day in dates[:1] + dates[-1:]],
    }
    distinct = {name: [*dict.fromkeys(filter(None, texts))] for name, texts in values.items()}
    more = {name: " ..." * (len(texts) > LISTED) for name, texts in distinct.items()}
    return {name: " · ".join(texts[:LISTED]) + more[name] for name, texts in distinct.items() if texts}


def _date(started: str) -> date | None:
    """Parse the day of a start in ISO 8601, or None if a file has something else."""
    try:
        return datetime.fromisoformat(started).date()
    except ValueError:
        return None


def summary(rows: Sequence[Row]) -> str:
    """Return the number of trials, of each status and of each kind of speed, in one sentence."""
    parts = [f"{count} {word}" for word, count in Counter(row.status for row in rows).items()]
    kinds = [f"{sum(r.ok for r in members)} {group.label}" for group, members in groups(rows).items()]
    trials = f"{len(rows)} trial{'s' * (len(rows) != 1)}"
    return f"{trials} ({', '.join(parts)}); with a speed: {', '.join(kinds)}."
