"""Writes the texts of reports on sweeps and searches: the fastest layout and why it is fastest, prices and totals."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import date, datetime
from typing import TYPE_CHECKING, NamedTuple

from valkyrie.parts import label_record_name
from valkyrie.records import encode
from valkyrie.report.rank import UNKNOWN_REASON, concordance, describe_simplest, same_layout, simplest_partitions
from valkyrie.search.compile.prediction import CompileStatus, Prediction
from valkyrie.search.explain.difference import compare_layouts, compared_quantities
from valkyrie.sweep.noise import has_spread, within_noise
from valkyrie.sweep.rows import Row, SpeedKind, Workload, group_by_kind, pair_predictions
from valkyrie.sweep.trial import Status
from valkyrie.units import (
    count_text,
    decimal_bytes_text,
    duration_text,
    memory_text,
    number_text,
    percent_text,
    share_text,
)

if TYPE_CHECKING:
    from valkyrie.search.answer_record import SearchAnswer

SIMULATED_NOTE = (
    "Speeds on simulated devices were measured on CPU devices that simulate accelerators. Neither these speeds nor "
    "their order applies to accelerators. Losses, bytes sent and compiled memory are real."
)
_WITHOUT_PROGRAM = (Status.failed, Status.killed, Status.timeout, Status.refused)
"""Outcomes of compiles that show neither the time nor the memory of a layout."""
MAX_FACT_VALUES = 4
"""Maximum number of values listed for each fact at the top of a report."""
MAX_WORKLOADS = 3
"""Maximum number of workloads for which a report explains speeds, and names the cheapest layout."""
EQUAL_RATIO = 1.02
"""Ratio below which two speeds are called equal."""
MAX_EXPLAINED = 12
"""Number of predicted layouts, best first, for which the HTML report explains the difference of each pair."""


class BigNumber(NamedTuple):
    """A number in large print, with a label, and a note in small print.

    In a sentence, the label comes before the value, or after it if `is_unit`.
    """

    label: str
    value: str
    note: str = ""
    is_unit: bool = False

    @property
    def phrase(self) -> str:
        """The number as part of a sentence, such as `1,000 tokens/s/chip` or `step 128.0 ms (MFU 30%)`."""
        text = f"{self.value} {self.label}" if self.is_unit else f"{self.label} {self.value}"
        return f"{text} ({self.note})" if self.note else text


@dataclass(frozen=True)
class Summary:
    """The best layout of a search, or of the trials with one kind of speed, and why other partitions are slower.

    Args:
        head: The number of layouts and the kind of speed, or the reason why there are no speeds.
        winner_numbers: The best layout, followed by its main numbers, such as speed and memory. Empty if there are no
            speeds.
        remarks: Sentences about the best layout: a simpler equivalent one, and others that are equally fast. For a
            search, `SearchAnswer.remarks`.
        reasons: Sentences that explain why other partitions are slower or have no speed. Empty for a search.
    """

    head: str
    winner_numbers: tuple[BigNumber, ...] = ()
    remarks: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        """The head, the numbers of the fastest layout and the remarks as a paragraph."""
        first = f"{self.head}."
        if self.winner_numbers:
            layout, *numbers = self.winner_numbers
            name = f"{layout.value} of {layout.note}" if layout.note else layout.value
            first = f"{self.head}: {', '.join([name, *(number.phrase for number in numbers)])}."
        return " ".join([first, *self.remarks])


def summarise_kind(group: SpeedKind, rows: Sequence[Row]) -> Summary:
    """Summarise the rows with one kind of speed: the fastest layout, and why other partitions are slower.

    `rows` are sorted with the fastest first. Explains the first `MAX_WORKLOADS` workloads separately. If no row has a
    speed, the summary only has a `head`.
    """
    fastest_row = next((row for row in rows if row.has_speed), None)
    if fastest_row is None:
        return Summary(_describe_missing_speeds(group, rows).rstrip("."))
    ranked_count = sum(row.has_speed for row in rows)
    head = (
        f"Fastest of {ranked_count} {group.label}" if ranked_count > 1 else f"{group.label[0].upper()}{group.label[1:]}"
    )
    workloads = list(dict.fromkeys(row.work for row in rows if row.has_speed))
    reasons: list[str] = []
    for work in workloads[:MAX_WORKLOADS]:
        label = f"{work.label}: " if len(workloads) > 1 else ""
        reasons += [label + line for line in _explain_workload([row for row in rows if row.work == work])]
    return Summary(head, _winner_numbers(fastest_row, len(workloads) > 1), _remarks(fastest_row, rows), tuple(reasons))


def summarise_search(search: SearchAnswer) -> Summary:
    """Return the main numbers of the best layout of a search, including its cost if the search computed it."""
    best = search.best[0]
    low, high = (duration_text(seconds) for seconds in (best.low_s, best.high_s))
    layout = f"{best.candidate.mesh} {best.candidate.partition}"
    settings = [o for o in best.overrides if not o.startswith(("mesh=", "partition=", "batch="))]
    step_label = f"step, {best.stage.adjective}"
    mfu = "" if best.mfu is None else f"MFU {percent_text(best.mfu)}"
    numbers = [
        BigNumber("layout", layout, " ".join([best.candidate.target, *settings[1:]])),
        BigNumber("tokens/s/chip", f"{best.tokens_per_second_per_chip:,.0f}", mfu, True),
        BigNumber(step_label, duration_text(best.step_s), f"{low} to {high}" if best.interval else "interval unknown"),
    ]
    if best.memory is not None:
        of_usable = f"of {memory_text(best.usable)} usable" if best.usable else ""
        numbers.append(BigNumber("peak memory per device", memory_text(best.memory), of_usable))
    if best.candidate.batch is not None:
        tokens = "" if search.seq is None else f"{best.candidate.batch * search.seq:,} tokens"
        numbers.insert(1, BigNumber("sequences in a batch", f"{best.candidate.batch:,}", tokens, is_unit=True))
    if best.tokens_for_budget is not None:
        budget = f"tokens for ${number_text(search.budget_usd or 0)}"
        fewest, most = (best.tokens_for_budget * best.step_s / seconds / 1e9 for seconds in (best.high_s, best.low_s))
        token_range = f"{number_text(fewest)} to {number_text(most)}" if best.interval else ""
        billions = f"{number_text(best.tokens_for_budget / 1e9)} billion"
        numbers.append(BigNumber(budget, billions, token_range, is_unit=True))
    if best.dollars is not None and best.hours is not None:
        tokens = f"{number_text((search.tokens or 0) / 1e9)} billion tokens"
        numbers.append(
            BigNumber(
                "price on demand", f"${number_text(best.dollars)}", f"{number_text(best.hours)} hours for {tokens}"
            )
        )
    compiled = search.compiled - sum(search.compile_outcomes.get(status.value, 0) for status in _WITHOUT_PROGRAM)
    counted = f"{compiled} compiled, the others estimated" if compiled else "estimated, none compiled"
    if compiled == search.layouts and search.batch is not None:
        counted = "all compiled"
    return Summary(
        f"The best of {count_text(search.layouts, 'layout')}: {counted}", tuple(numbers), tuple(search.remarks)
    )


def _describe_missing_speeds(group: SpeedKind, rows: Sequence[Row]) -> str:
    """Return sentences for rows without speeds: the reason, the least memory and the fewest bytes sent, if known."""
    ok_rows = [row for row in rows if row.trial.status is Status.ok]
    if not ok_rows:
        return f"No layout {group.label} has a speed. The reasons are below."
    text = f"No layout {group.label} has a speed: {(ok_rows[0].reason or 'the step time is unknown').rstrip('.')}."
    has_several_workloads = len({row.work for row in ok_rows}) > 1
    least_memory_row = min(
        (row for row in ok_rows if row.peak_bytes), key=lambda row: row.peak_bytes or 0, default=None
    )
    if least_memory_row is not None:
        layout = _layout_text(least_memory_row, has_several_workloads)
        text += f" Least memory: {layout}, {memory_text(least_memory_row.peak_bytes)} per device."
    fewest_sent_row = min(
        (row for row in ok_rows if row.bytes_by_axes), key=lambda row: sum(row.bytes_by_axes.values()), default=None
    )
    if fewest_sent_row is not None:
        size = decimal_bytes_text(sum(fewest_sent_row.bytes_by_axes.values()))
        text += (
            f" Fewest bytes sent: {_layout_text(fewest_sent_row, has_several_workloads)}, {size} per device and step."
        )
    return text


def _layout_text(row: Row, has_several_workloads: bool) -> str:
    """Return a row's layout, and its workload if there are several."""
    return f"{row.layout} of {row.work.label}" if has_several_workloads else row.layout


def _explain_workload(rows: Sequence[Row]) -> list[str]:
    """Return sentences about partitions that are slower than the fastest one, have no speed, or equal a simpler one.

    `rows` have the same workload and are sorted with the fastest first. Compares the fastest row of each partition. If
    a row's partition is equivalent to a simpler one on its mesh, the row represents the simpler one, but only if that
    has no row with a speed itself. If one partition remains, compares its row with the slowest row of another layout.
    """
    simplest_by_id, best = simplest_partitions(rows), {}
    for row in sorted(
        (row for row in rows if row.has_speed), key=lambda row: row.about.partition != simplest_by_id[row.id]
    ):
        best.setdefault(simplest_by_id[row.id], row)
    best = {row.id: row for row in best.values()}
    fastest_row, *others = [row for row in rows if row.id in best]
    if not others:
        others = [row for row in rows if row.has_speed and not same_layout(row, fastest_row)][-1:]
    lines = [explain_ratio(fastest_row, row) for row in others]
    for partition in dict.fromkeys(row.about.partition for row in rows):
        members = [row for row in rows if row.about.partition == partition]
        ranked_rows = [row for row in members if row.has_speed]
        if not ranked_rows and partition != "?":
            lines.append(_describe_failed_partition(partition, members))
        elif ranked_rows and all(simplest_by_id[row.id] != partition for row in ranked_rows):
            lines.append(_describe_equivalents(partition, ranked_rows, simplest_by_id))
    return lines


def _describe_equivalents(partition: str, rows: Sequence[Row], simplest_by_id: dict[str, str]) -> str:
    """Explain that all rows of a partition are equivalent to rows of simpler partitions."""
    meshes = [f"{row.about.mesh} ({describe_simplest(simplest_by_id[row.id])})" for row in rows]
    return f"{partition} is equivalent to another partition on each mesh here: {'; '.join(meshes)}."


def explain_ratio(faster_row: Row, slower_row: Row) -> str:
    """Return a sentence with the ratio of two speeds, followed by sentences that explain the difference.

    If the speeds differ only by noise, or their ratio is below `EQUAL_RATIO`, only says that they are equal.
    """
    assert faster_row.tokens_per_second_per_chip and slower_row.tokens_per_second_per_chip
    ratio, (a, b) = (
        faster_row.tokens_per_second_per_chip / slower_row.tokens_per_second_per_chip,
        distinguishing_names(faster_row, slower_row),
    )
    if within_noise(faster_row.trial, slower_row.trial) and (noise := _describe_noise(faster_row, slower_row)):
        return f"No difference beyond noise between {a} and {b}: {noise}."
    if ratio < EQUAL_RATIO:
        return f"{a} is as fast as {b}, within {percent_text(EQUAL_RATIO - 1)}."
    head = f"{a} is {ratio:.{2 if ratio < 1.1 else 1 if ratio < 10 else 0}f}x as fast as {b}."
    return " ".join(
        [head, *compare_layouts(_as_prediction(faster_row), _as_prediction(slower_row), labels=(a, b)).reasons]
    )


def _as_prediction(row: Row) -> Prediction:
    """Convert a row with a step time, even a measured one, to the record that `compare_layouts` takes."""
    results, about = row.trial.results, replace(row.about, layout=row.layout)
    shared = Prediction(about, CompileStatus.ok, memory=results.memory, communication=results.communication)
    return replace(shared, parts=row.parts, step=replace(results.step, step_s=row.step_s))


@dataclass(frozen=True)
class PairedRows:
    """Comparisons of predicted rows for the HTML report: the quantities of each row, and sentences about pairs.

    Args:
        quantities: Maps row indices to the fields of `ComparedQuantities`, and to the model, varied settings and
            precision as text under the key `work`.
        explanations: Maps the indices of two rows (`0,2`) to sentences that explain the difference. They call the first
            row A.
    """

    quantities: dict[int, dict[str, object]] = field(default_factory=dict)
    explanations: dict[str, list[str]] = field(default_factory=dict)


def compare_rows(rows: Sequence[Row]) -> PairedRows:
    """Return the quantities of all predicted rows, and explain the differences among the first `MAX_EXPLAINED`.

    Only explains pairs with the same model, varied settings and precision. Rows without step parts are skipped. The
    result is empty if fewer than two rows remain.
    """
    predictions = {
        i: _as_prediction(row)
        for i, row in enumerate(rows)
        if row.trial.status is Status.ok and row.speed_kind.stage == "compile" and row.parts and row.step_s is not None
    }
    if len(predictions) < 2:
        return PairedRows()
    workloads = {
        i: ", ".join([" ".join([rows[i].work.model, *rows[i].work.varied_settings]), rows[i].work.precision])
        for i in predictions
    }
    explanations: dict[str, list[str]] = {}
    for i, j in itertools.permutations(list(predictions)[:MAX_EXPLAINED], 2):
        if workloads[i] == workloads[j]:
            with contextlib.suppress(ValueError):  # both rows have the same layout
                explanations[f"{i},{j}"] = list(compare_layouts(predictions[i], predictions[j]).sentences)
    row_quantities = {
        i: _labelled_quantities(prediction) | {"work": workloads[i]} for i, prediction in predictions.items()
    }
    return PairedRows(row_quantities, explanations)


def _labelled_quantities(prediction: Prediction) -> dict[str, object]:
    """Return the `compared_quantities` of a layout (seconds, bytes sent, memory, tokens per step) as a dict.

    `seconds` has display labels as keys instead of the names of step parts.
    """
    quantities = encode(compared_quantities(prediction))
    return quantities | {"seconds": {label_record_name(name): s for name, s in quantities["seconds"].items()}}


def _describe_noise(faster_row: Row, slower_row: Row) -> str:
    """Return the step times of two rows with their ranges. Empty for predictions, which have no range."""
    if faster_row.step.p90_s is None or slower_row.step.p90_s is None:
        return ""
    step_times = [f"{duration_text(row.step_s or 0.0)} ({_step_range(row)})" for row in (faster_row, slower_row)]
    return f"their steps take {step_times[0]} and {step_times[1]}"


def _step_range(row: Row) -> str:
    fastest = row.step_s if row.step.min_s is None else row.step.min_s
    return f"from {duration_text(fastest or 0.0)} to {duration_text(row.step.p90_s or 0.0)}"


def distinguishing_names(first: Row, second: Row) -> tuple[str, str]:
    """Return the shortest names that distinguish two rows.

    These are the partitions if the meshes are equal, the partitions and meshes if the meshes differ, and the whole
    layouts if both are equal.
    """
    if first.about.partition == second.about.partition and first.about.mesh == second.about.mesh:
        return first.layout, second.layout
    if first.about.mesh == second.about.mesh:
        return first.about.partition, second.about.partition
    return f"{first.about.partition} on {first.about.mesh}", f"{second.about.partition} on {second.about.mesh}"


def price_lines(rows: Sequence[Row]) -> list[str]:
    """Return a sentence with the cheapest layout of each workload, for at most `MAX_WORKLOADS` of them.

    Omits a workload if its cheapest and its fastest layout run on chips of the same price.
    """
    by_work: dict[Workload, list[Row]] = {}
    for row in sorted(
        (row for row in rows if row.has_speed and row.dollars_per_million_tokens),
        key=lambda row: row.dollars_per_million_tokens or 0.0,
    ):
        by_work.setdefault(row.work, []).append(row)
    lines = []
    for members in by_work.values():
        cheapest, fastest = members[0], max(members, key=lambda row: row.tokens_per_second_per_chip or 0.0)
        if cheapest.price != fastest.price:
            lines.append(
                f"Cheapest: {_layout_text(cheapest, len(by_work) > 1)} on {cheapest.speed_kind.target}, "
                f"{cheapest.dollars_per_million_tokens:.3g} dollars per million tokens."
            )
    return lines[:MAX_WORKLOADS]


def agreement_line(rows: Sequence[Row]) -> str | None:
    """Return a sentence on how often predictions pick the layout that measures faster.

    Returns None if no two layouts have both predictions and measurements that differ (see `concordance`).
    """
    pairs = pair_predictions(rows)
    share = concordance(pairs)
    if share is None:
        return None
    line = f"Predictions pick the faster of two layouts in {percent_text(share)} of the pairs (chance: 50%)."
    if any(pair.b.speed_kind.simulated for pair in pairs):
        line += " Simulated devices are threads of one CPU, so this share says little about accelerators."
    return line


def _winner_numbers(row: Row, has_several_workloads: bool) -> tuple[BigNumber, ...]:
    """Return the main numbers of the fastest layout, and its workload if there are several."""
    assert row.tokens_per_second_per_chip is not None and row.tokens_per_second is not None and row.step_s is not None
    usable, dollars = row.trial.results.memory.usable, row.dollars_per_million_tokens
    numbers = [
        BigNumber("layout", row.layout, row.work.label if has_several_workloads else ""),
        BigNumber(
            "tokens/s/chip",
            f"{row.tokens_per_second_per_chip:,.0f}",
            f"{row.tokens_per_second:,.0f} tokens/s on all chips",
            True,
        ),
        BigNumber("step", duration_text(row.step_s), "" if row.step.mfu is None else f"MFU {share_text(row.step.mfu)}"),
    ]
    if row.peak_bytes is not None:
        of_usable = "" if usable is None else f"of {memory_text(usable)} usable"
        numbers.append(BigNumber("peak memory per device", memory_text(row.peak_bytes), of_usable))
    if row.speed_kind.stage == "train" and row.trial.results.loss is not None:
        numbers.append(
            BigNumber("loss", f"{row.trial.results.loss:.4f}", f"after {row.trial.results.steps or 0:,} steps")
        )
    if dollars:
        numbers.append(BigNumber("dollars per million tokens", f"{dollars:.3g}", is_unit=True))
    return tuple(numbers)


def _remarks(row: Row, rows: Sequence[Row]) -> tuple[str, ...]:
    partition = simplest_partitions(rows)[row.id]
    equal = f"On this mesh {row.about.partition} is {describe_simplest(partition)}."
    return tuple(filter(None, [equal if partition != row.about.partition else "", _describe_ties(row, rows)]))


def _describe_ties(row: Row, rows: Sequence[Row]) -> str:
    others = [r for r in rows if r.has_speed and r.work == row.work and r is not row]
    tolerance = f"{percent_text(EQUAL_RATIO - 1)}"
    if has_spread(row.trial):
        others, tolerance = [r for r in others if within_noise(row.trial, r.trial)], "the spread of the step times"
    else:
        others = [
            r
            for r in others
            if (r.tokens_per_second_per_chip or 0.0) >= (row.tokens_per_second_per_chip or 0.0) / EQUAL_RATIO
        ]
    if not others:
        return ""
    suffix = f" and {len(others) - 3} more" if len(others) > 3 else ""
    return f"Equally fast, within {tolerance}: {', '.join(r.layout for r in others[:3])}{suffix}."


def _describe_failed_partition(partition: str, rows: Sequence[Row]) -> str:
    first = rows[0]
    status = "" if first.status == "ok" else f"{first.status}, "
    reason = (first.reason or UNKNOWN_REASON).splitlines()[0].rstrip(".")
    return f"No layout with partition={partition} has a step time. For example, {first.layout}: {status}{reason}."


def title(rows: Sequence[Row]) -> str:
    """Return the title of a report: the names of its sweeps."""
    sweeps = list(dict.fromkeys(row.trial.sweep for row in rows))
    return ", ".join(sweeps[:3]) + (f" and {len(sweeps) - 3} more" if len(sweeps) > 3 else "")


def facts(rows: Sequence[Row]) -> dict[str, str]:
    """Return the facts at the top of a report, by name: distinct models, batches, precisions and hardware, and dates.

    Dates are those of the first and the last trial. Facts without a known value are omitted.
    """
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
    suffix = {name: " ..." * (len(texts) > MAX_FACT_VALUES) for name, texts in distinct.items()}
    return {name: " · ".join(texts[:MAX_FACT_VALUES]) + suffix[name] for name, texts in distinct.items() if texts}


def _date(started: str) -> date | None:
    """Parse the date of an ISO 8601 time. Returns None if the text is something else."""
    try:
        return datetime.fromisoformat(started).date()
    except ValueError:
        return None


def describe_counts(rows: Sequence[Row]) -> str:
    """Return the numbers of trials by status, and of step times by kind, as two sentences."""
    parts = [f"{count} {word}" for word, count in Counter(row.status for row in rows).items()]
    kinds = [f"{sum(r.has_speed for r in members)} {group.label}" for group, members in group_by_kind(rows).items()]
    return f"{count_text(len(rows), 'trial')} ({', '.join(parts)}). Step times: {', '.join(kinds)}."
