"""Types that the Python API returns for predictions, training runs, searches and sweeps, with reprs for notebooks.

Import them from `valkyrie`: `valkyrie.Result`. `str(result)` is the text that the command prints, and the last
expression of a notebook's cell is shown as a table or a page.
"""

from __future__ import annotations

import dataclasses
import io
import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from valkyrie.config.modes import METRICS_FILE
from valkyrie.config.run import Run
from valkyrie.paths import require_suffix, write_atomic
from valkyrie.runs.columns import Column, html_facts, html_table
from valkyrie.search.compile.fault import Fault
from valkyrie.search.compile.prediction import CompileStatus, Measurement, Prediction
from valkyrie.units import GIB, duration_text

if TYPE_CHECKING:
    from rich.console import Console

    from valkyrie.machine.replay import Replay
    from valkyrie.search.answer_record import SearchAnswer
    from valkyrie.search.explain.difference import Difference
    from valkyrie.train.trained_model import TrainedModel
    from valkyrie.train.trainer import FitResult


@dataclass(frozen=True)
class Result:
    """The prediction or measurement of a training step.

    `print(result)` prints the report of `mode=compile` or `mode=measure`. `record` has the same content as their JSON
    files. `replay` is the simulated timeline of a predicted step, or None. Properties are None if unknown, such as the
    step time of a layout that does not fit.
    """

    record: Prediction | Measurement
    replay: Replay | None = dataclasses.field(default=None, repr=False)

    @property
    def status(self) -> str:
        """`ok`, `does_not_fit`, `failed` or `timeout`."""
        return self.record.status.value

    @property
    def reason(self) -> str | None:
        """Reason why the status is not `ok`, or None."""
        return self.record.reason

    @property
    def fits(self) -> bool | None:
        """Whether a step fits into the memory of one device, or None if unknown."""
        memory, status = self.record.memory, self.record.status
        if status is CompileStatus.ok and memory is not None and memory.peak is None:
            return None
        return {CompileStatus.ok: True, CompileStatus.does_not_fit: False}.get(status)

    @property
    def step_s(self) -> float | None:
        """Step time in seconds: predicted for a compile, the median for a measurement."""
        return None if self.record.step is None else self.record.step.step_s

    @property
    def interval_s(self) -> tuple[float, float] | None:
        """Range of a predicted step time in seconds, derived from the prediction errors of comparable runs.

        These are published runs or, after `mode=calibrate`, your own; `record.step.interval` describes them. None for a
        measured step, or if too few runs are comparable.
        """
        interval = getattr(self.record.step, "interval", None)
        return None if interval is None else (interval.low_s, interval.high_s)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens (or what `record.unit` counts) per second on all devices."""
        return None if self.record.step is None else self.record.step.tokens_per_second

    @property
    def tokens_per_second_per_chip(self) -> float | None:
        """Throughput in tokens per second per chip, predicted or measured like `step_s`, or None if unknown."""
        return None if self.record.step is None else self.record.step.tokens_per_second_per_chip

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation: FLOP/s of the model relative to the peak of the chips, from 0 to 1."""
        return None if self.record.step is None else self.record.step.mfu

    @property
    def faults(self) -> tuple[Fault, ...]:
        """Faults in the sharding of a jitted or lowered function, the most expensive first. Empty for other results."""
        return getattr(self.record, "faults", ())

    @property
    def peak_bytes(self) -> int | None:
        """Peak memory of one device in bytes. For a layout that does not fit, the memory that it would need."""
        memory = self.record.memory
        if memory is None:
            return None
        fits = self.record.status is CompileStatus.ok
        return memory.peak if fits or memory.peak is not None else memory.needed

    @property
    def peak_gib(self) -> float | None:
        """`peak_bytes` in GiB (2^30 bytes)."""
        return None if self.peak_bytes is None else self.peak_bytes / GIB

    def __repr__(self) -> str:
        step = "no step time" if self.step_s is None else duration_text(self.step_s)
        peak = "" if self.peak_gib is None else f", {self.peak_gib:.1f} GiB"
        return f"<Result {self._title}: {self.status}, {step}{peak}>"

    def __str__(self) -> str:
        from valkyrie.search.compile.show import print_record

        return _print_to_text(lambda console: print_record(self.record, console))

    def timeline(self, path: str | Path) -> Path:
        """Write the predicted step as a timeline for https://ui.perfetto.dev, and return its path.

        Raises ValueError if the name does not end in `.json`, or if no step was predicted, for example for a
        measurement, a CPU target or a failed compile.
        """
        from valkyrie.machine.timeline import write_timeline

        file = require_suffix(path, ".json")
        write_timeline(file, self._require_replay().spans, self._title, "another path")
        return file

    def html(self, path: str | Path) -> Path:
        """Write a standalone HTML page with the report and a drawing of the step's timeline. Returns its path.

        Raises ValueError if the name does not end in `.html`.
        """
        from valkyrie.report.program import program_page

        file, spans = require_suffix(path, ".html"), self.replay.spans if self.replay else []
        return write_atomic(file, program_page(self.record, self._title, spans), "another path")

    def _repr_html_(self) -> str:
        """Return the page of `html` in an iframe, for notebooks."""
        from valkyrie.report.program import program_page

        page = program_page(self.record, self._title, self.replay.spans if self.replay else [])
        return f'<iframe srcdoc="{escape(page)}" style="width: 100%; height: 640px; border: 0"></iframe>'

    @property
    def _title(self) -> str:
        if isinstance(self.record, Prediction) and self.record.program is not None:
            return self.record.program.name
        return f"{self.record.layout.model} {self.record.layout.name}"

    def _require_replay(self) -> Replay:
        if self.replay is None:
            reason = (self.reason or "no step was predicted").rstrip(".")
            raise ValueError(f"This result has no timeline: {reason}.")
        return self.replay


_LOSSES = ("loss", "eval_loss")


@dataclass(frozen=True, repr=False)
class Trained:
    """A finished training run.

    Args:
        run: The run.
        folder: The run folder.
        summary: The summary in `metrics.jsonl`, a dict with `steps`, losses, seconds, rates and status.
        fitted: The step program and the last state.
    """

    run: Run
    folder: Path
    summary: dict[str, Any]
    fitted: FitResult = dataclasses.field(repr=False)

    @property
    def parameters(self) -> Any:
        """The trained parameters on their devices, as a tree of arrays. With `ema_decay`, their moving average."""
        return self.fitted.parameters

    @cached_property
    def model(self) -> TrainedModel:
        """The trained language model: `trained.model(tokens)` returns logits. Raises ValueError for other models."""
        from valkyrie.train.prepare import load_run_tokenizer
        from valkyrie.train.trained_model import TrainedModel

        step, program = self.summary["steps"], self.fitted.program
        return TrainedModel(self.run, step, self.parameters, load_run_tokenizer(self.run), program)

    def __repr__(self) -> str:
        losses = "".join(f", {key} {self.summary[key]:.4f}" for key in _LOSSES if self.summary.get(key) is not None)
        return f"<Trained {self.run.model.name}: {self.summary['steps']:,} steps{losses}, {self.folder}>"

    def _repr_html_(self) -> str:
        numbers = {key: self.summary.get(key) for key in ("steps", *_LOSSES, "tokens_per_second", "mfu", "goodput")}
        facts = {key: f"{value:,.4g}" for key, value in numbers.items() if value is not None}
        losses = [(line["step"], line["loss"]) for line in self.metrics if line.get("loss") is not None]
        return html_facts({"folder": self.folder, **facts}) + _loss_chart(losses)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Entries of `metrics.jsonl`: logged steps (`step`, `loss`, `learning_rate`, ...) and evaluations."""
        from valkyrie.runs.tracking import read_metrics

        return [line for line in read_metrics(self.folder / METRICS_FILE) if "step" in line]


@dataclass(frozen=True)
class FoundLayout:
    """A layout of a search. The fields are named as in the CSV file of a sweep. None means unknown or not requested.

    Args:
        rank: Position in the answer, from 1.
        target: Name of the slice.
        layout: Overrides that select the layout, such as `mesh=2x4x1 partition=fsdp`.
        status: Source of the step time: `estimated`, `compiled` or `measured`.
        step_s: Seconds per step.
        low_s, high_s: Interval of the step time: the usual errors of a prediction, or the minimum and 90% quantile of a
            measurement. None if unknown.
        tokens_per_second_per_chip: Throughput of a chip.
        mfu: Model FLOPs utilisation, from 0 to 1.
        peak_bytes, usable_bytes: Peak and usable memory per device.
        bound_by: The resource that takes most of the step, with its share.
        dollars_per_million_tokens: Dollars per million tokens, on demand.
        hours, dollars, spot_dollars: Time of training on the requested tokens, and its cost on demand and on
            interruptible chips.
        tokens_for_budget: Tokens that the requested dollars pay for.
        predicted_step_s: Predicted step time of a measured layout.
    """

    rank: int
    target: str
    layout: str
    status: str
    step_s: float
    low_s: float | None
    high_s: float | None
    tokens_per_second_per_chip: float
    mfu: float | None
    peak_bytes: int | None
    usable_bytes: int | None
    bound_by: str
    dollars_per_million_tokens: float | None
    hours: float | None
    dollars: float | None
    spot_dollars: float | None
    tokens_for_budget: float | None
    predicted_step_s: float | None

    def __repr__(self) -> str:
        return f"<FoundLayout {self.rank}: {self.layout} on {self.target}, {duration_text(self.step_s)} {self.status}>"


@dataclass(frozen=True, repr=False)
class Answer:
    """The fastest layouts that `search` found for a run. `print(answer)` prints the table of `mode=search`.

    `record` has the same content as `search.json`, and `folder` is the folder of the search.
    """

    record: SearchAnswer
    folder: Path

    @property
    def rows(self) -> list[FoundLayout]:
        """The best layouts, the best first. `pandas.DataFrame(answer.rows)` converts them to a data frame."""
        return [
            FoundLayout(
                rank=rank,
                target=row.candidate.target,
                layout=" ".join(row.overrides[1:]),
                status=row.stage.adjective,
                step_s=row.step_s,
                low_s=row.low_s if row.interval else None,
                high_s=row.high_s if row.interval else None,
                tokens_per_second_per_chip=row.tokens_per_second_per_chip,
                mfu=row.mfu,
                peak_bytes=row.memory,
                usable_bytes=row.usable,
                bound_by=self.record.describe_bottleneck(row),
                dollars_per_million_tokens=row.usd_per_million_tokens,
                hours=row.hours,
                dollars=row.dollars,
                spot_dollars=row.spot_dollars,
                tokens_for_budget=row.tokens_for_budget,
                predicted_step_s=row.expected_s,
            )
            for rank, row in enumerate(self.record.best, 1)
        ]

    @property
    def best(self) -> FoundLayout:
        """The first of `rows`."""
        return self.rows[0]

    @property
    def command(self) -> str:
        """The `valkyrie-train` command that trains the best layout."""
        return self.record.train or ""

    @property
    def overrides(self) -> list[str]:
        """The arguments of `command`: `valkyrie.compose(*answer.overrides)` is the run of the best layout."""
        return shlex.split(self.command)[1:]

    def run(self, row: FoundLayout) -> Run:
        """Return the run of one of `rows`, to predict or explain its layout: `predict(answer.run(answer.rows[1]))`.

        Raises ValueError for a row of another answer.
        """
        from valkyrie.config.arguments import parse_run
        from valkyrie.search.request import shared_arguments

        if row not in self.rows:
            raise ValueError(f"answer.run takes one of answer.rows, not {row!r}.")
        overrides = self.record.best[row.rank - 1].overrides[1:]
        options = self.record.options if row.rank == 1 else []  # without which the best layout may not fit
        arguments = [*shared_arguments(self.record.command), f"target={row.target}", *overrides, *options]
        return parse_run(arguments, in_python=True)

    def __repr__(self) -> str:
        best = self.best
        return f"<Answer {best.layout} on {best.target}: {duration_text(best.step_s)} {best.status}, {self.folder}>"

    def __str__(self) -> str:
        from valkyrie.search.answer import print_answer

        text = _print_to_text(lambda console: print_answer(self.record, console))
        return f"{text}train it: {self.command}"

    def _repr_html_(self) -> str:
        from valkyrie.search.answer_record import answer_columns

        table = html_table(answer_columns(self.record), self.record.best)
        return f"<p>{escape(self.record.title)}</p>{table}<p>train it: <code>{escape(self.command)}</code></p>"


@dataclass(frozen=True, repr=False)
class Explanation:
    """Why one of two layouts is faster. `print(explanation)` prints the report of `mode=explain`.

    `record` has the same content as `explain.json`: the difference of every part of the step, and the sentences.
    """

    record: Difference

    @property
    def sentences(self) -> tuple[str, ...]:
        """A headline that names the faster layout, then the reasons."""
        return self.record.sentences

    def __repr__(self) -> str:
        a, b = self.record.names
        return f"<Explanation A: {a}, B: {b}. {self.sentences[0]}>"

    def __str__(self) -> str:
        from valkyrie.search.explain.mode import print_difference

        return _print_to_text(lambda console: print_difference(self.record, console))

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


@dataclass(frozen=True)
class TrialRow:
    """A trial with its results. The fields are the columns of a sweep's CSV file. None means unknown.

    Args:
        sweep, name, key: Name of the sweep, name of the trial and digest of everything that determines its result.
        stage: Mode of the trial, such as `measure`.
        status: `ok`, `refused`, `does_not_fit`, `failed`, `killed` or `timeout`.
        simulated: Whether the devices are simulated on a CPU, in which case speeds are not meaningful.
        target, chips: Slice or devices, and their number of chips.
        model, batch, seq, precision: The computation of a step.
        varied: Other settings that the sweep varies, such as `model.layers=12`.
        parameters: Number of parameters of the model.
        layout, mesh, partition, microbatches, remat: The layout.
        step_s, p90_s, min_s: Step time (the median if measured), its 90% quantile and its minimum.
        tokens_per_second, tokens_per_second_per_chip: Throughput.
        mfu: Model FLOPs utilisation, from 0 to 1.
        peak_bytes, usable_bytes: Peak memory of a device, or the memory needed if it does not fit, and usable memory.
        sent_bytes: Bytes that a device sends per step.
        exposed_s: Seconds of a predicted step spent waiting for communication.
        loss, eval_loss: Last training loss and evaluation loss.
        goodput: Share of a training run's wall time spent on steps that were not repeated.
        restarts: Number of restarts of a training run.
        data_wait: Share of a training run's step time spent waiting for data.
        dollars_per_million_tokens: Dollars per million tokens, at the on-demand price.
        wall_s: Seconds that the trial ran.
        reason: Why the trial has no step time.
        folder: Run folder of the trial.
    """

    sweep: str
    name: str
    key: str
    stage: str
    status: str
    simulated: bool
    target: str
    chips: float | None
    model: str
    batch: int | None
    seq: int | None
    precision: str
    varied: str
    parameters: int | None
    layout: str
    mesh: str
    partition: str
    microbatches: int | None
    remat: str | None
    step_s: float | None
    p90_s: float | None
    min_s: float | None
    tokens_per_second: float | None
    tokens_per_second_per_chip: float | None
    mfu: float | None
    peak_bytes: int | None
    usable_bytes: int | None
    sent_bytes: float | None
    exposed_s: float | None
    loss: float | None
    eval_loss: float | None
    goodput: float | None
    restarts: int | None
    data_wait: float | None
    dollars_per_million_tokens: float | None
    wall_s: float
    reason: str | None
    folder: str | None

    def __repr__(self) -> str:
        speed = "" if self.step_s is None else f", {duration_text(self.step_s)} a step"
        return f"<TrialRow {self.model} {self.layout} {self.stage} on {self.target}: {self.status}{speed}>"


class Trials(list[TrialRow]):
    """The trials of sweeps: a list of `TrialRow`, shown as a table in notebooks."""

    def __repr__(self) -> str:
        counts = Counter(row.status for row in self)
        return f"<Trials {len(self)}: {', '.join(f'{count} {status}' for status, count in counts.items())}>"

    def _repr_html_(self) -> str:
        from valkyrie.sweep.columns import COLUMNS

        names = ("layout", "target", "model", "varied", "tokens_per_second_per_chip", "tokens_per_second", "step_s")
        columns = [
            Column[TrialRow](name, COLUMNS[name].label, COLUMNS[name].unit, attrgetter(name))
            for name in (*names, "mfu", "peak_bytes", "loss", "stage", "status")
        ]
        return html_table([c for c in columns if any(c.text(row) for row in self)], self)


def _loss_chart(losses: Sequence[tuple[int, float]]) -> str:
    """Return an SVG chart of the loss by step, or an empty string for fewer than two steps."""
    if len(losses) < 2:
        return ""
    steps, values = zip(*losses, strict=True)
    first, last, low, high = steps[0], steps[-1], min(values), max(values)
    width, height = 320, 80
    points = " ".join(
        f"{width * (step - first) / (last - first):.1f},{height * (high - value) / ((high - low) or 1):.1f}"
        for step, value in losses
    )
    title = f"loss {values[0]:.4f} at step {first:,}, {values[-1]:.4f} at step {last:,}"
    return (
        f'<svg width="{width}" height="{height + 8}" viewBox="0 -4 {width} {height + 8}"><title>{title}</title>'
        f'<polyline points="{points}" fill="none" stroke="#3f7fc9" stroke-width="2"/></svg><br><small>{title}</small>'
    )


def _print_to_text(show: Callable[[Console], None]) -> str:
    """Return the text that a function prints on a console."""
    from valkyrie.train.screen import make_console

    show(make_console(text := io.StringIO()))
    return text.getvalue()
