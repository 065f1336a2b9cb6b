"""Trials as flat rows for tables, figures and W&B. Imports no JAX."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from valkyrie.compiled.communication import measured_parts
from valkyrie.hardware.chips import known_chips
from valkyrie.parts import StepPart
from valkyrie.runs.goodput import Goodput
from valkyrie.runs.layout_record import LayoutRecord
from valkyrie.sweep.noise import places
from valkyrie.sweep.trial import Status, StepResult, Trial
from valkyrie.sweep.varied import target_of, varied_settings

STAGES = {"measure": "measured", "compile": "predicted", "train": "trained"}
"""Adjective for the speeds of each stage."""
AT_HAND = "auto"
"""Name of the target that means the devices of this machine."""
_SIMULATED = (AT_HAND, "cpu")
_UNKNOWN = LayoutRecord("?", "?", "?", "unknown target")


class SpeedKind(NamedTuple):
    """Trials whose speeds are of one kind: from one stage, on one target, simulated or not.

    `target` includes topology and slices if they were given. For a measurement on this machine it names the devices.
    """

    stage: str
    target: str
    simulated: bool

    @property
    def devices(self) -> str:
        """The devices of a measurement, such as `simulated devices`."""
        if not self.simulated:
            return "the devices at hand" if self.target == AT_HAND else self.target
        return "simulated devices" + ("" if self.target in _SIMULATED else f" ({self.target})")

    @property
    def label(self) -> str:
        """The kind of speed: `predicted for v5e-8`, `measured on simulated devices`."""
        verb = STAGES.get(self.stage, self.stage)
        return f"{verb} for {self.target}" if self.stage == "compile" else f"{verb} on {self.devices}"


class Workload(NamedTuple):
    """The computation of a step, independent of the layout. Sentences compare only speeds of the same work.

    `varied` are further settings that the sweep varies: `("layers=12", "state_size=1024")`.
    """

    model: str
    batch: int | None
    seq: int | None
    precision: str
    varied: tuple[str, ...]

    @property
    def label(self) -> str:
        """Model, batch, length and varied settings, without the precision."""
        return ", ".join(
            [self.model, f"{self.batch} x {self.seq} tokens", *([" ".join(self.varied)] * bool(self.varied))]
        )

    @property
    def step(self) -> tuple[object, ...]:
        """The computation in any precision, as the key that pairs predictions with measurements."""
        return self.model, self.batch, self.seq, self.varied


@dataclass(frozen=True)
class Row:
    """A trial as a row. Units are seconds, bytes of one device and tokens per second. None means unknown.

    Args:
        source: Folder of its sweep.
        about: Its layout, with question marks if its configuration makes no run.
        peak: Peak memory of one device, or the memory needed if it does not fit.
        parts: Time of a step by part. A measured step is split into collectives and the rest.
        sent: Bytes that one device sends in a step, by mesh axes.
        exposed_s: Seconds that a predicted step waits for communication.
        price: Dollars per hour of a chip, on demand.
        per_million: Dollars per million tokens.
        goodput: Wall time of a training by kind.
        folder: Its run folder, if there is one.
        rank: Its rank in a table, equal within the noise.
        label: Name that distinguishes it from the other rows of a table.
        alike: A simpler partition that shards every array in the same way.
        front: Whether it is on the Pareto front of speed and memory among rows of its work.
        prediction: A prediction of the same layout and work, for a measured row.
    """

    trial: Trial
    source: Path
    group: SpeedKind
    work: Workload
    about: LayoutRecord
    layout: str
    step_s: float | None
    peak: int | None
    parts: tuple[StepPart, ...]
    exposed_s: float | None
    price: float | None
    per_million: float | None
    goodput: Goodput | None
    reason: str | None
    folder: Path | None
    rank: int | None = None
    label: str = ""
    alike: str = ""
    front: bool = False
    prediction: Row | None = None

    @property
    def id(self) -> str:
        """A name that no other row has."""
        return f"{self.source}:{self.trial.key}"

    @property
    def status(self) -> str:
        """Its status, for display."""
        return self.trial.status.value.replace("_", " ")

    @property
    def is_training(self) -> bool:
        """Whether it is a training that belongs to no sweep."""
        return self.trial.stage == "train" and not self.trial.overrides

    @property
    def ok(self) -> bool:
        """Whether it has a speed to be ranked by."""
        return self.trial.status is Status.ok and None not in (self.rate_per_chip, self.rate, self.step_s)

    @property
    def degrees(self) -> dict[str, int]:
        """Number of parts into which each kind of role splits its work."""
        return self.about.degrees or {}

    @property
    def step(self) -> StepResult:
        """The speed of its step as the stage recorded it."""
        return self.trial.results.step

    @property
    def rate(self) -> float | None:
        """Tokens a second of the whole slice."""
        return self.step.tokens_per_second

    @property
    def rate_per_chip(self) -> float | None:
        """Tokens a second and chip."""
        return self.step.tokens_per_second_per_chip

    @property
    def sent(self) -> dict[str, float]:
        """Bytes that one device sends in a step, by mesh axes."""
        return self.trial.results.sent

    @property
    def sent_bytes(self) -> float | None:
        """Bytes that one device sends in a step over all axes, or None if unknown."""
        traffic = self.trial.results.communication
        return None if traffic is None else sum(self.sent.values()) if self.sent else traffic.bytes

    @property
    def verdict(self) -> str:
        """Kind of its speed, or the reason why it has none: `predicted`, `refused: batch=7 is odd`."""
        if self.trial.status is not Status.ok:
            return f"{self.status}: {self.trial.short_reason}"
        return self.trial.kind if self.ok else ""

    @property
    def data_wait(self) -> float | None:
        """Share of a training's steps in which devices wait for data."""
        spent = self.trial.results.goodput
        return None if spent is None else spent.data_wait


@dataclass(frozen=True)
class RowPair:
    """Two rows of one layout. `ratio` is the speed of `b` over that of `a`, or None if either is unknown."""

    a: Row
    b: Row

    @property
    def ratio(self) -> float | None:
        """Speed of `b` relative to `a`, or None if unknown."""
        return self.b.rate_per_chip / self.a.rate_per_chip if self.a.rate_per_chip and self.b.rate_per_chip else None


def rows_of(
    sweeps: Mapping[Path, Sequence[Trial]], trainings: Mapping[Path, Sequence[Trial]] = MappingProxyType({})
) -> list[Row]:
    """Return trainings by run folder, then the trials of sweeps by folder, as rows.

    The devices of a trial without a result are those of others of its sweep, stage and target.
    """
    varied, rows = varied_settings({**sweeps, **trainings}), []
    for folder, trials in itertools.chain(trainings.items(), sweeps.items()):
        simulated = {_kind(t): t.results.simulated for t in trials if t.results.simulated is not None}
        devices = {_kind(t): t.results.devices for t in trials if t.results.devices is not None}
        for trial in trials:
            kind = _kind(trial)
            is_simulated = _is_simulated(trial, simulated.get(kind))
            taken = trial.results.devices or devices.get(kind)
            source = folder.parent if folder in trainings else folder
            rows.append(row_of(trial, source, is_simulated, taken, varied[folder, trial.key]))
    return rows


def row_of(trial: Trial, folder: Path, simulated: bool, devices: str | None, varied: tuple[str, ...]) -> Row:
    """Return a trial of a sweep's folder as a row.

    Args:
        trial: The trial.
        folder: Folder of its sweep.
        simulated: Whether its devices are simulated.
        devices: Devices of a measurement on this machine, such as `8 x NVIDIA H100`, or None.
        varied: Settings that its sweep varies in addition to the layout.
    """
    about, results, target = trial.about or _UNKNOWN, trial.results, target_of(trial)
    step, memory, spent = results.step, results.memory, results.goodput
    rate, price = step.tokens_per_second, _price(trial, simulated)
    tokens = about.batch * about.seq if about.batch and about.seq else None
    step_s = step.step_s or (tokens / rate if tokens and rate else None)  # a training may record its rate alone
    run_folder = None if trial.folder is None else folder / trial.folder
    return Row(
        trial=trial,
        source=folder,
        group=SpeedKind(trial.stage, target if simulated or target != AT_HAND else devices or target, simulated),
        work=Workload(about.model, about.batch, about.seq, about.precision or "", varied),
        about=about,
        layout=trial.name if trial.about is None else about.name,
        step_s=step_s,
        peak=memory.required or None,
        parts=results.parts or measured_parts(results.trace, step.step_s),
        exposed_s=results.communication.exposed_s if results.parts and results.communication else None,
        price=price,
        per_million=1e6 * price * about.chips / (3600 * rate) if price and about.chips and rate else None,
        goodput=None if spent is None else Goodput(spent.wall_s, spent.seconds, spent.restarts),
        reason=_reason(trial),
        folder=run_folder if run_folder is not None and run_folder.is_dir() else None,
    )


def ranked(rows: Iterable[Row]) -> list[Row]:
    """Sort rows by tokens/s/chip, the fastest first; rows without a speed last, by status and name."""
    order = list(Status)
    return sorted(rows, key=lambda r: (not r.ok, -(r.rate_per_chip or 0.0), order.index(r.trial.status), r.layout))


def groups(rows: Iterable[Row]) -> dict[SpeedKind, list[Row]]:
    """Return rows by kind of speed: real measurements first, then predictions, then simulated ones; best rows first."""
    by_group: dict[SpeedKind, list[Row]] = defaultdict(list)
    for row in rows:
        by_group[row.group].append(row)
    order = sorted(by_group, key=lambda g: (g.simulated, g.stage == "compile", g.stage == "train", g.target))
    return {group: ranked(by_group[group]) for group in order}


def with_ranks(rows: Sequence[Row]) -> list[Row]:
    """Return ranked rows of one kind of speed with their ranks, equal within the noise; None without a speed."""
    ranks = places([row.trial for row in rows])
    return [replace(row, rank=rank if row.ok else None) for rank, row in zip(ranks, rows, strict=True)]


def predicted_and_measured(rows: Iterable[Row]) -> list[RowPair]:
    """Return pairs of a prediction and a run of one layout and work, in any precision.

    A run on a named target is paired with predictions for that target; a run on simulated devices or on those at hand
    with all of them.
    """
    predictions: dict[tuple[object, ...], list[Row]] = defaultdict(list)
    rows = [row for row in rows if row.ok]
    for row in rows:
        if row.group.stage == "compile":
            predictions[(row.layout, row.work.step)].append(row)
    ran = (row for row in rows if row.group.stage != "compile")
    pairs = [RowPair(prediction, row) for row in ran for prediction in predictions[(row.layout, row.work.step)]]
    return [p for p in pairs if _may_meet(p)]


def with_predictions(rows: Iterable[Row]) -> list[Row]:
    """Return rows, each measured one with the first prediction of its layout and work, if there is one."""
    rows = list(rows)
    predictions = {pair.b.id: pair.a for pair in reversed(predicted_and_measured(rows))}
    return [replace(row, prediction=predictions.get(row.id)) for row in rows]


def _price(trial: Trial, simulated: bool) -> float | None:
    """Return the price of a chip in dollars per hour, as recorded or else from the chip's file. None if unknown."""
    step, about = trial.results.step, trial.about
    per_dollar = step.tokens_per_dollar.get("on_demand")
    if about is None:
        return None
    if per_dollar and about.chips and step.tokens_per_second:
        return step.tokens_per_second * 3600 / per_dollar / about.chips
    chip = known_chips().get(about.chip or "")
    return None if chip is None or simulated or step == StepResult() else chip.usd_per_hour


def _kind(trial: Trial) -> tuple[str, str]:
    return trial.stage, (trial.about or _UNKNOWN).target


def _is_simulated(trial: Trial, others: bool | None) -> bool:
    """Return whether a trial's devices are simulated, judged by `others` of its target if it has no result."""
    if trial.stage == "compile":
        return False
    recorded = others if trial.results.simulated is None else trial.results.simulated
    return (trial.about or _UNKNOWN).chip is None if recorded is None else recorded


def _reason(trial: Trial) -> str | None:
    memory = trial.results.memory
    if trial.status is Status.does_not_fit and memory.needed and memory.usable:
        return f"needs {memory.needed / 2**30:.1f} GiB of {memory.usable / 2**30:.1f} GiB usable"
    if trial.status is Status.ok and trial.stage == "compile" and trial.results.step == StepResult():
        return "CPU target: memory and bytes per axis only; choose a TPU slice for step time"
    return trial.reason


def _may_meet(pair: RowPair) -> bool:
    """Return whether a run may be compared with a prediction: of the same target, or of no named one."""
    at_hand = pair.b.about.target == AT_HAND
    return pair.b.group.simulated or at_hand or pair.b.group.target == pair.a.group.target
