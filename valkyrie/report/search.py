"""The sections of the HTML report that show the answer of a search: question, best layouts, figures and exclusions."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from valkyrie.report import specs
from valkyrie.report.specs import CHART_CONFIG, SCHEMA, Spec
from valkyrie.report.tables import ColumnHead, TextTable
from valkyrie.report.words import Summary, summarise_search
from valkyrie.sweep.trial import Status
from valkyrie.units import number_text, parameters_text, share_text

if TYPE_CHECKING:
    from valkyrie.search.answer_record import RankedLayout, SearchAnswer

MIN_DRAWN_SHARE = 0.05
"""The figure of memory is shown only if a layout needs at least this share of the usable memory."""
_HEADS = {"place": "#", "rate": "tokens/s/chip", "memory": "peak memory per device"}
"""Headings that differ from those on a terminal, by column name."""
_OUTCOMES = {
    Status.ok.value: "compiled, and fit",
    Status.does_not_fit.value: "compiled, but too large for a device's memory",
    Status.timeout.value: "not compiled within the time limit",
    Status.failed.value: "not compiled, because the compiler failed",
    Status.killed.value: "not compiled, because the compiler was killed",
    Status.refused.value: "refused, so not compiled",
}


class AnswerFigure(NamedTuple):
    """A figure of a search's best layouts."""

    id: str
    title: str
    caption: str
    spec: Spec


@dataclass(frozen=True)
class SearchPage:
    """Content of the page of a search.

    Args:
        title: The page's title.
        question: The request as a sentence.
        facts: Precision, hardware and date, by name.
        best: The numbers of the best layout.
        table: The best layouts.
        figures: Figures of the best layouts.
        counts: Numbers of layouts by outcome: excluded for each reason, compiled, and measured.
        refused: The number of illegal layouts by reason, the most frequent first.
        stop_reason: Why no more layouts were compiled. Empty if unknown.
    """

    title: str
    question: str
    facts: dict[str, str]
    best: Summary
    table: TextTable
    figures: list[AnswerFigure]
    counts: TextTable
    refused: dict[str, int]
    stop_reason: str


def search_page(answer: SearchAnswer) -> SearchPage:
    """Return the content of the page of a search."""
    facts = {"hardware": " · ".join(answer.hardware), "precision": answer.precision, "date": _date_text(answer.date)}
    facts["prices"] = " · ".join(answer.prices) if any(row.usd_per_million_tokens for row in answer.best) else ""
    return SearchPage(
        title=f"{_superlative(answer).capitalize()} layout of {answer.model or 'a model'} on {_targets_text(answer)}",
        question=_question(answer),
        facts={name: text for name, text in facts.items() if text},
        best=summarise_search(answer),
        table=_best_table(answer),
        figures=[f for f in (_price_figure(answer), _memory_figure(answer), *_batch_figures(answer)) if f is not None],
        counts=_counts_table(answer),
        refused=answer.refused,
        stop_reason=answer.why,
    )


def _superlative(answer: SearchAnswer) -> str:
    return "cheapest" if answer.ranked_by == "dollars" else "fastest"


def _targets_text(answer: SearchAnswer) -> str:
    *others, last = answer.targets or ["a slice"]
    return f"{', '.join(others)} or {last}" if others else last


def _question(answer: SearchAnswer) -> str:
    size = "" if answer.parameters is None else f" ({parameters_text(answer.parameters)})"
    text = f"Which layout trains {answer.model or 'the model'}{size} "
    text += "at the lowest price" if answer.ranked_by == "dollars" else "fastest"
    text += f" on {_targets_text(answer)}"
    if answer.seq is not None and answer.batch is not None:
        text += f", with a batch of {answer.batch:,} sequences of {answer.seq:,} tokens"
    elif answer.seq is not None:
        text += f", and with which batch size, at {answer.seq:,} tokens per sequence"
    text += "?"
    if answer.tokens is not None:
        text += f" It is trained on {number_text(answer.tokens / 1e9)} billion tokens."
    if answer.budget_usd is not None:
        text += f" The budget is ${number_text(answer.budget_usd)}."
    return text


def _date_text(text: str) -> str:
    if not text:
        return ""
    day = date.fromisoformat(text)
    return f"{day.day} {day:%B %Y}"


def _best_table(answer: SearchAnswer) -> TextTable:
    # Imported here, because it needs NumPy, which other reports do not.
    from valkyrie.search.answer_record import answer_columns

    columns = answer_columns(answer)
    css_classes = {column.name: "number" if column.is_number else "" for column in columns} | {"layout": "work"}
    heads = [
        ColumnHead(_HEADS.get(column.name, " ".join(column.label.split("\n"))), css_classes[column.name])
        for column in columns
    ]
    rows = [[column.text(row) for column in columns] for row in answer.best]
    memory_index = next((i + 1 for i, column in enumerate(columns) if column.name == "memory"), None)
    if memory_index is not None and any(_memory_share(row) is not None for row in answer.best):
        heads.insert(memory_index, ColumnHead("of usable", "number"))
        for cells, row in zip(rows, answer.best, strict=True):
            memory_share = _memory_share(row)
            cells.insert(memory_index, "" if memory_share is None else share_text(memory_share))
    return TextTable("The best layouts", heads, rows)


def _memory_share(row: RankedLayout) -> float | None:
    return None if row.memory is None or not row.usable else row.memory / row.usable


def _figure(id: str, title: str, caption: str, spec: Spec, values: Sequence[dict[str, object]]) -> AnswerFigure:
    common = {"$schema": SCHEMA, "config": CHART_CONFIG, "description": title}
    return AnswerFigure(id, title, caption, {**common, **spec, "data": {"values": [*values]}})


def _price_figure(answer: SearchAnswer) -> AnswerFigure | None:
    """Return the figure of price against time.

    Returns None if the best layouts have a single target, or if a price, a batch or the sequence length is unknown.
    """
    if len({row.candidate.target for row in answer.best}) < 2:
        return None
    values, labelled_targets = list[dict[str, object]](), set[str]()
    for place, row in enumerate(answer.best, start=1):
        batch = row.candidate.batch or answer.batch
        if row.usd_per_million_tokens is None or batch is None or answer.seq is None:
            return None
        target = row.candidate.target
        values.append(
            {
                "name": "" if target in labelled_targets else target,
                "target": target,
                "layout": f"#{place} {' '.join(row.overrides[1:])}",
                "time": 1e3 * row.step_s if answer.batch is not None else row.step_s / (batch * answer.seq) * 1e6,
                "price": row.usd_per_million_tokens,
            }
        )
        labelled_targets.add(target)
    time_title = "step time, ms" if answer.batch is not None else "seconds per million tokens"
    caption = "Further left is faster, lower is cheaper. Each point is one of the best layouts, at its on-demand price."
    title = "Price against step time" if answer.batch is not None else "Price against time"
    return _figure("costs", title, caption, specs.costs(values, time_title), values)


def _memory_figure(answer: SearchAnswer) -> AnswerFigure | None:
    """Return the figure of memory against the limit.

    Returns None if there is only one layout, if a layout's memory is unknown, or if all are far below the limit.
    """
    # Imported here, because they need NumPy, which other reports do not.
    from valkyrie.search.answer_record import Stage
    from valkyrie.search.shortlist import estimate_errors

    shares = [_memory_share(row) for row in answer.best]
    if (
        len(shares) < 2
        or any(share is None for share in shares)
        or max(share or 0 for share in shares) < MIN_DRAWN_SHARE
    ):
        return None
    values: list[dict[str, object]] = [
        {
            "label": f"#{place}",
            "share": share,
            "layout": " ".join(row.overrides),
            "stage": row.stage.adjective,
        }
        for place, (row, share) in enumerate(zip(answer.best, shares, strict=True), start=1)
    ]
    caption = (
        "Peak memory per device as a share of the usable memory, by place in the table. Beyond the red line, a layout "
        "does not fit."
    )
    if any(row.stage is Stage.estimate for row in answer.best):
        errors = estimate_errors()
        caption += (
            f" On TPUs, half of the compiled peaks are {errors.memory_low:.2f} to {errors.memory_high:.2f} times their "
            "estimates."
        )
    return _figure("limits", "Memory against the limit", caption, specs.memory_shares(values), values)


def _batch_figures(answer: SearchAnswer) -> list[AnswerFigure]:
    """Return the figures of speed and of memory by batch, for the best layout.

    Returns an empty list if the search did not vary the batch, or fewer than two batches fit.
    """
    best, shown = answer.best[0], [tried for tried in answer.best[0].batches if tried.fits]
    if len(shown) < 2:
        return []
    values: list[dict[str, Any]] = [
        {
            "batch": tried.batch,
            "rate": tried.tokens_per_second_per_chip,
            "memory": None if tried.memory is None else tried.memory / 2**30,
            "source": tried.stage.adjective,
            "name": "#1" if tried.batch == best.candidate.batch else "",
            "run": run,
        }
        for run, (_, group) in enumerate(groupby(shown, lambda tried: tried.stage))
        for tried in group
    ]
    rates = values
    if best.stage.adjective != "estimated":
        rates = [v | {"source": v["source"].replace("estimated", "corrected estimate")} for v in values]
    usable = None if best.usable is None else best.usable / 2**30
    scope = "The layout of #1 with other batches, up to the largest that fits by estimate. "
    rate_caption = (
        f"{scope}Estimates are multiplied by the ratio of #1's time to its estimate. Lines connect neighbouring "
        "batches with the same source. Where the curve is flat, a larger batch trains no faster."
    )
    memory_caption = f"{scope}Estimates are not corrected. The red line is the usable memory of a device."
    rate, memory = specs.batches(rates, "rate", "tokens/s/chip"), specs.batches(values, "memory", "GiB", usable)
    return [
        _figure("batch_rates", "Speed by batch", rate_caption, rate, rates),
        _figure("batch_memory", "Peak memory per device by batch", memory_caption, memory, values),
    ]


def _counts_table(answer: SearchAnswer) -> TextTable:
    """Return the table of the numbers of layouts by outcome: excluded for each reason, compiled, and measured."""
    compiled = sum(answer.compile_outcomes.values())
    counts = {"cannot be built, for the reasons below": sum(answer.refused.values())}
    if answer.too_large is not None:
        counts["too large for a device's memory, by estimate"] = answer.too_large
        label = "estimated, not compiled" + (f": {answer.why}" if compiled and answer.why else "")
        counts[label] = answer.layouts - answer.too_large - compiled
    for outcome, count in answer.compile_outcomes.items():
        counts[_OUTCOMES.get(outcome, f"compiled, but {outcome.replace('_', ' ')}")] = count
    measured = sum(layout.step_s is not None for layout in answer.measured.layouts)
    counts["measured on the devices"] = measured
    rows = [[f"{count:,}", text] for text, count in counts.items() if count > 0]
    total = f"{answer.layouts + sum(answer.refused.values()):,}"
    heads = [ColumnHead("layouts", "number"), ColumnHead("outcome", "work")]
    return TextTable("How many layouts were excluded, and why", heads, [[total, "considered"], *rows])


def split_command(remark: str) -> tuple[str, str]:
    """Split a remark into its text and the command at its end, or "" if there is none."""
    for program in ("valkyrie-train", "valkyrie-launch"):
        text, separator, arguments = remark.partition(f": {program} ")
        if separator:
            return f"{text}:", f"{program} {arguments}"
    return remark, ""


def explain_command(arguments: Sequence[str], first: Sequence[str], second: Sequence[str]) -> str:
    """Return the shell command that explains the difference between two layouts, given the overrides of each.

    `arguments` are the overrides of the search, which both layouts share.
    """
    sides = [f"{side}={' '.join(overrides)}" for side, overrides in (("first", first), ("second", second))]
    return f"valkyrie-train {shlex.join(['mode=explain', *arguments, *sides])}"
