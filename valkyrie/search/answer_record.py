"""Records of a search's answer (`search.json`), and the columns of its table. Does not import JAX."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from valkyrie.runs.columns import Column
from valkyrie.search.estimate.space import Candidate
from valkyrie.units import number_text


class Stage(Enum):
    """Source of a step time, from the cheapest to the most accurate."""

    estimate = "estimate"
    compile = "compile"
    measure = "measure"

    @property
    def adjective(self) -> str:
        """The adjective for a step time of this stage, such as `compiled`."""
        return f"{self.value.removesuffix('e')}ed"


@dataclass(frozen=True)
class Bottleneck:
    """The resource that takes the largest part of a step, and its share of the step from 0 to 1.

    `near_memory_limit` is True if the peak exceeds the share `NEAR_LIMIT_SHARE` of the usable memory. `is_replayed` is
    True if the share is that of a compiled step. An estimate counts more of a step as memory traffic, so its share is
    not comparable with that of a compiled step.
    """

    resource: str
    share: float
    near_memory_limit: bool
    is_replayed: bool = False

    def describe(self, *, has_share: bool) -> str:
        """Return the resource, with its share if `has_share`: `compute 82%, near memory limit`."""
        share = f" {100 * self.share:.0f}%" if has_share else ""
        return f"{self.resource}{share}" + (", near memory limit" if self.near_memory_limit else "")


@dataclass(frozen=True)
class TriedBatch:
    """A batch of a layout: its tokens/s/chip, peak memory per device in bytes, and whether it fits.

    `stage` is the source of the speed, and of whether it fits.
    """

    batch: int
    tokens_per_second_per_chip: float
    memory: int | None
    fits: bool
    stage: Stage


@dataclass(frozen=True)
class RankedLayout:
    """One layout of a search's answer. Values are None if unknown or not requested.

    Args:
        candidate: The layout.
        overrides: Command-line overrides that select it. The first one is `target=`.
        stage: Source of the step time.
        step_s: Seconds per step.
        low_s, high_s: Interval of the step time: the typical errors of a prediction, or the minimum and 90% quantile of
            a measurement. Both equal `step_s` if the interval is unknown.
        compiled_ratios: 5% and 95% quantiles of the compiled time of an estimated layout, relative to `step_s`. They
            are known even if the interval is not, because they leave out the error of compiled times.
        memory, usable: Peak and usable memory per device, in bytes.
        bottleneck: The resource that takes most of the step.
        parts_s: Seconds of the estimated step by part, with the keys of `EstimatedTimes.parts`.
        hours, dollars: Hours to train on the requested tokens, and their price on demand.
        spot_dollars: Price of these hours on interruptible chips.
        tokens_for_budget: Number of tokens that can be trained on for the requested dollars.
        expected_s: Predicted step time of a measured layout.
        as_fast_on: Names of other slices with as many chips, on which the layout is equally fast by estimate.
        batches: The layout with each batch, the smallest first. Empty if the search does not vary the batch.
        compile, train: Commands that compile and train the layout. `compile` is empty if this machine has no compiler
            for it.
    """

    candidate: Candidate
    overrides: list[str]
    stage: Stage
    step_s: float
    low_s: float
    high_s: float
    memory: int | None
    usable: int | None
    tokens_per_second_per_chip: float
    mfu: float | None
    usd_per_million_tokens: float | None
    bottleneck: Bottleneck
    parts_s: dict[str, float]
    hours: float | None = None
    dollars: float | None = None
    spot_dollars: float | None = None
    tokens_for_budget: float | None = None
    expected_s: float | None = None
    as_fast_on: list[str] = field(default_factory=list)
    batches: list[TriedBatch] = field(default_factory=list)
    compiled_ratios: tuple[float, float] = (1.0, 1.0)
    compile: str = ""
    train: str = ""

    @property
    def interval(self) -> tuple[float, float] | None:
        """Ends of the interval relative to the step time, such as (-0.1, 0.2), or None if both ends are equal."""
        low, high = self.low_s / self.step_s - 1, self.high_s / self.step_s - 1
        return None if low == high else (low, high)

    def with_step_time(self, step_s: float) -> RankedLayout:
        """Return a copy with another step time. Scales the interval, rates and costs accordingly."""
        ratio = step_s / self.step_s

        def scaled(value: float | None, factor: float) -> float | None:
            return None if value is None else value * factor

        return replace(
            self,
            step_s=step_s,
            low_s=self.low_s * ratio,
            high_s=self.high_s * ratio,
            tokens_per_second_per_chip=self.tokens_per_second_per_chip / ratio,
            mfu=scaled(self.mfu, 1 / ratio),
            usd_per_million_tokens=scaled(self.usd_per_million_tokens, ratio),
            hours=scaled(self.hours, ratio),
            dollars=scaled(self.dollars, ratio),
            spot_dollars=scaled(self.spot_dollars, ratio),
            tokens_for_budget=scaled(self.tokens_for_budget, 1 / ratio),
        )


@dataclass(frozen=True)
class MeasuredLayout:
    """Predicted and measured seconds per step of a layout. `step_s` is None if the measurement failed.

    `overrides` select the layout. `status` is that of the measurement, such as `ok`.
    """

    overrides: list[str]
    expected_s: float
    step_s: float | None
    status: str


@dataclass(frozen=True)
class MeasureReport:
    """The measured layouts, and how well their step times were predicted.

    `agreement` is Spearman's rank correlation of predicted and measured step times. It is None for fewer than three
    layouts, or if all predictions or all measurements are equal. `regret` is the relative slowdown of the predicted
    best layout over the fastest one (0.1 for 10%), or None if none was measured. `why` is the reason why no more were
    measured.
    """

    layouts: list[MeasuredLayout] = field(default_factory=list)
    agreement: float | None = None
    regret: float | None = None
    why: str = ""


@dataclass(frozen=True)
class SearchAnswer:
    """Content of `search.json`.

    Args:
        command: Arguments of the search.
        question: Digest of the request.
        layouts: Number of layouts that were estimated.
        refused: Number of illegal layouts by reason, which is the first problem of each. Lower bounds: see
            `LayoutSpace.refused`.
        duplicates: Number of meshes that were skipped because they shard like another one, summed over slices and
            partition variants (ZeRO-1, pipeline schedules).
        compiled: Number of compiled layouts, including those that do not fit or failed.
        why: Reason why no more layouts were compiled.
        measured: The measured layouts.
        best: The best layouts, in order.
        options: Overrides of the first layout in `best` that tuning found, or without which it does not fit.
        title: Model, batch and precision, for display.
        targets: Names of the requested slices.
        model, parameters: Name of the model, and the number of its parameters.
        batch: Sequences of the global batch, or None if the search varied it.
        seq: Tokens of a sequence.
        precision: Name of the precision.
        hardware: Descriptions of the requested slices.
        ranked_by: What the layouts are ordered by: `dollars`, `tokens/s/chip` or `step time`.
        date: Day when the search ended, as `YYYY-MM-DD`.
        too_large: Number of layouts that need more memory than a device has, by estimate, and were not compiled.
        compile_outcomes: Number of compiled layouts by status.
        remarks: Sentences that compare the best layout with the baselines, or suggest another model.
        explain: Command that explains the difference between the first two layouts, or None if there is only one.
        tokens: Tokens to train on, if requested.
        budget_usd: Dollars to spend, if requested.
        train: Command that trains the first layout in `best`.
        launch: Command that rents the slices of the first layout in `best` and trains it. None if this machine has the
            devices, or if Valkyrie cannot rent several slices of this platform.
        prices: Price of a chip-hour with its kind (on demand or spot) and source, for each kind of chip that has one.
        warning: Line above the table with the slices (or all of them) that have only estimates because the budget
            ended first, and the command to continue. Empty if there are none.
        certainty: Sentences on how sure the order is: the layouts that may be better than the first one, and the
            commands that would settle it.
    """

    command: list[str]
    question: str
    layouts: int
    refused: dict[str, int]
    duplicates: int
    compiled: int
    why: str
    measured: MeasureReport
    best: list[RankedLayout]
    options: list[str]
    title: str = ""
    targets: list[str] = field(default_factory=list)
    model: str = ""
    parameters: int | None = None
    batch: int | None = None
    seq: int | None = None
    precision: str = ""
    hardware: list[str] = field(default_factory=list)
    ranked_by: str = "step time"
    date: str = ""
    too_large: int | None = None
    compile_outcomes: dict[str, int] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    explain: str | None = None
    tokens: float | None = None
    budget_usd: float | None = None
    train: str | None = None
    launch: str | None = None
    prices: list[str] = field(default_factory=list)
    warning: str = ""
    certainty: list[str] = field(default_factory=list)
    schema: int = 1
    unknown: dict[str, Any] = field(default_factory=dict)

    def describe_bottleneck(self, row: RankedLayout) -> str:
        """Describe the bottleneck of a row. If some rows are compiled, only those have its share of the step."""
        is_alone = not any(other.bottleneck.is_replayed for other in self.best)
        return row.bottleneck.describe(has_share=row.bottleneck.is_replayed or is_alone)


def answer_columns(answer: SearchAnswer) -> list[Column[RankedLayout]]:
    """Return the columns of an answer's table.

    The slice appears only if several were requested, hours and dollars only for a requested number of tokens, and
    tokens only for a requested budget. Spot prices appear with the dollars if one is known. If some rows are compiled,
    only those have the share of the bottleneck.
    """
    column, rows = Column[RankedLayout], answer.best
    longest_word = max((len(override) for row in rows for override in row.overrides[1:]), default=0)
    slice_column = column(
        "slice", "slice", "text", lambda r: " or ".join([r.candidate.target, *r.as_fast_on]), min_width=8
    )
    cost = [
        column("hours", "hours", "amount", lambda r: r.hours, unknown_text="?"),
        column("dollars", "dollars", "amount", lambda r: r.dollars, unknown_text="?"),
    ]
    if any(row.spot_dollars is not None for row in rows):
        cost.append(column("spot_dollars", "dollars,\nspot", "amount", lambda r: r.spot_dollars, unknown_text="?"))
    head = f"billion\ntokens for\n${number_text(answer.budget_usd or 0.0)}"
    budget = column(
        "tokens", head, "amount", lambda r: r.tokens_for_budget and r.tokens_for_budget / 1e9, unknown_text="?"
    )
    return [
        column("place", "#", "count", lambda r: rows.index(r) + 1, min_width=0),
        *([slice_column] if len(answer.targets) > 1 else []),
        column("layout", "layout", "text", lambda r: " ".join(r.overrides[1:]), min_width=max(16, longest_word)),
        column("step_s", "step", "seconds", lambda r: r.step_s),
        column("interval", "interval", "range", lambda r: r.interval, unknown_text="unknown"),
        column("memory", "peak", "bytes", lambda r: r.memory, unknown_text="?"),
        column("rate", "tokens/s\na chip", "speed", lambda r: r.tokens_per_second_per_chip),
        column("mfu", "MFU", "percent", lambda r: r.mfu, unknown_text="?"),
        *(cost if answer.tokens is not None else []),
        *([budget] if answer.budget_usd is not None else []),
        column("bottleneck", "bound by", "text", answer.describe_bottleneck, min_width=0),
        column("stage", "source", "text", lambda r: r.stage.adjective, min_width=0),
    ]
