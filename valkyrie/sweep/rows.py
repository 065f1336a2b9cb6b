"""Converts trials to rows for tables, figures and W&B. Does not import JAX."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from valkyrie.compiled.communication import measured_parts
from valkyrie.hardware.chips import known_chips
from valkyrie.hardware.target import AUTO_TARGET
from valkyrie.parts import StepPart
from valkyrie.runs.goodput import Goodput
from valkyrie.runs.layout_record import LayoutRecord
from valkyrie.sweep.noise import tied_ranks
from valkyrie.sweep.trial import Status, StepResult, Trial
from valkyrie.sweep.varied import target_text, varied_settings

STAGE_ADJECTIVES = {"measure": "measured", "compile": "predicted", "train": "trained"}
"""Adjective that describes the speeds of each stage."""
_SIMULATED_TARGETS = (AUTO_TARGET, "cpu")
_UNKNOWN_LAYOUT = LayoutRecord("?", "?", "?", "unknown target")


class SpeedKind(NamedTuple):
    """The stage and the target that a speed comes from. Only speeds of the same kind are ranked together.

    `target` includes the topology and slices if the user set them. For a measurement on this machine, it names the
    devices instead.
    """

    stage: str
    target: str
    simulated: bool

    @property
    def devices(self) -> str:
        """The devices of a measurement or training run, such as `simulated devices`."""
        if not self.simulated:
            return "this machine" if self.target == AUTO_TARGET else self.target
        return "simulated devices" + ("" if self.target in _SIMULATED_TARGETS else f" ({self.target})")

    @property
    def label(self) -> str:
        """The kind as text, such as `predicted for v5e-8` or `measured on simulated devices`."""
        verb = STAGE_ADJECTIVES.get(self.stage, self.stage)
        return f"{verb} for {self.target}" if self.stage == "compile" else f"{verb} on {self.devices}"


class Workload(NamedTuple):
    """The computation of a step, independent of the layout. Only speeds of the same workload are compared.

    `varied_settings` lists other settings that the sweep varies, such as `("layers=12", "state_size=1024")`.
    """

    model: str
    batch: int | None
    seq: int | None
    precision: str
    varied_settings: tuple[str, ...]

    @property
    def label(self) -> str:
        """Model, batch, sequence length and varied settings as text. Omits the precision."""
        return ", ".join(
            [
                self.model,
                f"{self.batch} x {self.seq} tokens",
                *([" ".join(self.varied_settings)] * bool(self.varied_settings)),
            ]
        )

    @property
    def step_key(self) -> tuple[object, ...]:
        """Key that pairs predictions with measurements of the same step, in any precision."""
        return self.model, self.batch, self.seq, self.varied_settings


@dataclass(frozen=True)
class Row:
    """A trial as a row of a table or figure. Units are seconds, bytes per device and tokens/s. None means unknown.

    Args:
        trial: The trial.
        source: Folder of the sweep. For a training run outside a sweep, the parent of its run folder.
        speed_kind: Stage and target that its speed comes from.
        work: Workload of its step.
        about: The layout, with question marks if the configuration does not compose.
        layout: Name of the layout, or of the trial if the configuration does not compose.
        step_s: Step time.
        peak_bytes: Peak memory per device, or the memory needed if the trial does not fit.
        parts: Step time by part. A measured step has two parts: collectives, and everything else.
        exposed_s: Seconds of a predicted step spent waiting for communication.
        price: On-demand price of a chip in dollars per hour.
        dollars_per_million_tokens: Dollars per million tokens.
        goodput: Wall time of a training run by kind.
        reason: Why the trial has no speed.
        folder: The run folder, or None if it does not exist.
        rank: Rank in a table. Rows within noise of each other share a rank.
        label: Name that distinguishes the row from others in a table.
        equivalent_partition: A simpler partition that shards every array in the same way, or empty.
        settings: Settings other than the layout in which the rows of a table differ, such as `batch=16 seed=1`.
        on_pareto_front: Whether the row is on the Pareto front of speed and memory among rows of the same workload.
        prediction: For a measured or trained row, a prediction of the same layout and workload, in any precision.
    """

    trial: Trial
    source: Path
    speed_kind: SpeedKind
    work: Workload
    about: LayoutRecord
    layout: str
    step_s: float | None
    peak_bytes: int | None
    parts: tuple[StepPart, ...]
    exposed_s: float | None
    price: float | None
    dollars_per_million_tokens: float | None
    goodput: Goodput | None
    reason: str | None
    folder: Path | None
    rank: int | None = None
    label: str = ""
    equivalent_partition: str = ""
    settings: str = ""
    on_pareto_front: bool = False
    prediction: Row | None = None

    @property
    def id(self) -> str:
        """Unique identifier: the folder of the sweep and the key of the trial, joined by a colon."""
        return f"{self.source}:{self.trial.key}"

    @property
    def status(self) -> str:
        """The status for display, with spaces instead of underscores."""
        return self.trial.status.value.replace("_", " ")

    @property
    def is_training(self) -> bool:
        """Whether this is a training run that does not belong to a sweep."""
        return self.trial.stage == "train" and not self.trial.overrides

    @property
    def has_speed(self) -> bool:
        """Whether the trial is ok or interrupted, and has a speed, so that it can be ranked."""
        return self.trial.status in (Status.ok, Status.interrupted) and None not in (
            self.tokens_per_second_per_chip,
            self.tokens_per_second,
            self.step_s,
        )

    @property
    def degrees(self) -> dict[str, int]:
        """Number of devices over which each kind of role splits the work (`{"FSDP": 4}`). Empty if unknown."""
        return self.about.degrees or {}

    @property
    def step(self) -> StepResult:
        """The recorded step time and speed."""
        return self.trial.results.step

    @property
    def tokens_per_second(self) -> float | None:
        """Recorded training throughput of all chips, in tokens per second, or None if unknown."""
        return self.step.tokens_per_second

    @property
    def tokens_per_second_per_chip(self) -> float | None:
        """Recorded training throughput per chip, in tokens per second, or None if unknown."""
        return self.step.tokens_per_second_per_chip

    @property
    def bytes_by_axes(self) -> dict[str, float]:
        """Bytes sent by each device per step, by mesh axes such as `x,y`. Empty if unknown."""
        return self.trial.results.bytes_by_axes

    @property
    def sent_bytes(self) -> float | None:
        """Bytes sent by each device per step over all axes, or None if unknown."""
        traffic = self.trial.results.communication
        return None if traffic is None else sum(self.bytes_by_axes.values()) if self.bytes_by_axes else traffic.bytes

    @property
    def result_text(self) -> str:
        """The status and the reason if the trial is not ok, else `predicted` or `simulated`, or empty.

        Empty means that the speed was measured on real devices, or that there is no speed.
        """
        if self.trial.status is not Status.ok:
            return f"{self.status}: {self.trial.short_reason}"
        return self.trial.speed_label if self.has_speed else ""

    @property
    def data_wait(self) -> float | None:
        """Share of a training run's step time spent waiting for data, or None if unknown."""
        goodput = self.trial.results.goodput
        return None if goodput is None else goodput.data_wait


@dataclass(frozen=True)
class RowPair:
    """Two rows to compare, such as a prediction `a` and a measurement `b` of the same layout."""

    a: Row
    b: Row

    @property
    def ratio(self) -> float | None:
        """Speed of `b` divided by that of `a`, or None if either is unknown."""
        return (
            self.b.tokens_per_second_per_chip / self.a.tokens_per_second_per_chip
            if self.a.tokens_per_second_per_chip and self.b.tokens_per_second_per_chip
            else None
        )


def make_rows(
    sweeps: Mapping[Path, Sequence[Trial]], trainings: Mapping[Path, Sequence[Trial]] = MappingProxyType({})
) -> list[Row]:
    """Convert trials to rows, training runs first.

    `sweeps` maps the folders of sweeps to their trials. `trainings` maps run folders to the training runs in them that
    do not belong to a sweep. If a trial did not record its devices, they are taken from other trials with the same
    folder, stage and target.
    """
    settings_by_trial, rows = varied_settings({**sweeps, **trainings}), []
    for folder, trials in itertools.chain(trainings.items(), sweeps.items()):
        simulated_by_kind = {
            _stage_and_target(t): t.results.simulated for t in trials if t.results.simulated is not None
        }
        devices_by_kind = {_stage_and_target(t): t.results.devices for t in trials if t.results.devices is not None}
        for trial in trials:
            kind = _stage_and_target(trial)
            is_simulated = _is_simulated(trial, simulated_by_kind.get(kind))
            trial_devices = trial.results.devices or devices_by_kind.get(kind)
            source = folder.parent if folder in trainings else folder
            rows.append(make_row(trial, source, is_simulated, trial_devices, settings_by_trial[folder, trial.key]))
    return rows


def make_row(trial: Trial, folder: Path, simulated: bool, devices: str | None, varied_settings: tuple[str, ...]) -> Row:
    """Convert a trial to a row.

    Args:
        trial: The trial.
        folder: Folder of the sweep. For a training run outside a sweep, the parent of its run folder.
        simulated: Whether the devices are simulated.
        devices: Devices of a measurement on this machine, such as `8 x NVIDIA H100`, or None if unknown.
        varied_settings: Settings that the sweep varies in addition to the layout.
    """
    about, results, target = trial.about or _UNKNOWN_LAYOUT, trial.results, target_text(trial)
    step, memory, goodput = results.step, results.memory, results.goodput
    rate, price = step.tokens_per_second, _price(trial, simulated)
    tokens = about.batch * about.seq if about.batch and about.seq else None
    step_s = step.step_s or (
        tokens / rate if tokens and rate else None
    )  # a training run may record only its tokens per second
    run_folder = None if trial.folder is None else folder / trial.folder
    return Row(
        trial=trial,
        source=folder,
        speed_kind=SpeedKind(
            trial.stage, target if simulated or target != AUTO_TARGET else devices or target, simulated
        ),
        work=Workload(about.model, about.batch, about.seq, about.precision or "", varied_settings),
        about=about,
        layout=trial.name if trial.about is None else about.name,
        step_s=step_s,
        peak_bytes=memory.required or None,
        parts=results.parts or measured_parts(results.trace, step.step_s),
        exposed_s=results.communication.exposed_s if results.parts and results.communication else None,
        price=price,
        dollars_per_million_tokens=1e6 * price * about.chips / (3600 * rate)
        if price and about.chips and rate
        else None,
        goodput=None if goodput is None else Goodput(goodput.wall_s, goodput.seconds, goodput.restarts),
        reason=_reason(trial),
        folder=run_folder if run_folder is not None and run_folder.is_dir() else None,
    )


def sort_by_speed(rows: Iterable[Row]) -> list[Row]:
    """Sort rows by tokens/s/chip, fastest first. Rows without a speed come last, sorted by status and name."""
    order = list(Status)
    return sorted(
        rows,
        key=lambda r: (not r.has_speed, -(r.tokens_per_second_per_chip or 0.0), order.index(r.trial.status), r.layout),
    )


def group_by_kind(rows: Iterable[Row]) -> dict[SpeedKind, list[Row]]:
    """Group rows by kind of speed, and sort each group by speed.

    Real measurements come first, then training runs, predictions, and finally simulated devices. Within these, the
    target with the lowest price per token comes first, and targets without a price last.
    """
    by_group: dict[SpeedKind, list[Row]] = defaultdict(list)
    for row in rows:
        by_group[row.speed_kind].append(row)

    def place(group: SpeedKind) -> tuple[object, ...]:
        prices = [p for row in by_group[group] if (p := row.dollars_per_million_tokens) is not None]
        best_price = min(prices, default=math.inf)
        return group.simulated, group.stage == "compile", group.stage == "train", best_price, group.target

    order = sorted(by_group, key=place)
    return {group: sort_by_speed(by_group[group]) for group in order}


def with_ranks(rows: Sequence[Row]) -> list[Row]:
    """Add ranks to sorted rows of one kind of speed. Rows within noise share a rank; rows without a speed get None."""
    ranks = tied_ranks([row.trial for row in rows])
    return [replace(row, rank=rank if row.has_speed else None) for rank, row in zip(ranks, rows, strict=True)]


def pair_predictions(rows: Iterable[Row]) -> list[RowPair]:
    """Return pairs of a prediction and a run with the same layout and workload, in any precision.

    A run on a named target is paired with predictions for that target. A run on simulated devices or on this machine is
    paired with predictions for any target.
    """
    predictions: dict[tuple[object, ...], list[Row]] = defaultdict(list)
    rows = [row for row in rows if row.has_speed]
    for row in rows:
        if row.speed_kind.stage == "compile":
            predictions[(row.layout, row.work.step_key)].append(row)
    runs = (row for row in rows if row.speed_kind.stage != "compile")
    pairs = [RowPair(prediction, row) for row in runs for prediction in predictions[(row.layout, row.work.step_key)]]
    return [p for p in pairs if _is_comparable(p)]


def with_predictions(rows: Iterable[Row]) -> list[Row]:
    """Return rows with `prediction` set on each measured or trained row that `pair_predictions` pairs with one.

    If there are several predictions, the first is used.
    """
    rows = list(rows)
    predictions = {pair.b.id: pair.a for pair in reversed(pair_predictions(rows))}
    return [replace(row, prediction=predictions.get(row.id)) for row in rows]


def with_settings(rows: Sequence[Row]) -> list[Row]:
    """Return rows with `settings` set to `Workload.varied_settings`, after batch, seq and precision if these differ."""
    values = {key: {getattr(row.work, key) for row in rows} - {None, ""} for key in ("batch", "seq", "precision")}
    keys = [key for key in values if len(values[key]) > 1]
    return [
        replace(row, settings=" ".join([*_known_settings(row.work, keys), *row.work.varied_settings])) for row in rows
    ]


def _known_settings(work: Workload, keys: Iterable[str]) -> list[str]:
    return [f"{key}={value}" for key in keys if (value := getattr(work, key))]


def _price(trial: Trial, simulated: bool) -> float | None:
    """Return the price of a chip in dollars per hour, or None if unknown.

    The price follows from the recorded tokens per dollar. If these are not recorded, it is the price in the chip's
    file, or None for simulated devices and for trials without a speed.
    """
    step, about = trial.results.step, trial.about
    per_dollar = step.tokens_per_dollar.get("on_demand")
    if about is None:
        return None
    if per_dollar and about.chips and step.tokens_per_second:
        return step.tokens_per_second * 3600 / per_dollar / about.chips
    chip = known_chips().get(about.chip or "")
    return None if chip is None or simulated or step == StepResult() else chip.usd_per_hour


def _stage_and_target(trial: Trial) -> tuple[str, str]:
    return trial.stage, (trial.about or _UNKNOWN_LAYOUT).target


def _is_simulated(trial: Trial, others_simulated: bool | None) -> bool:
    """Return whether a trial's devices are simulated. False for predictions.

    If the trial did not record it, returns `others_simulated`: whether other trials with the same stage and target used
    simulated devices. If that is None (unknown), the devices count as simulated unless the record names their chip.
    """
    if trial.stage == "compile":
        return False
    simulated = others_simulated if trial.results.simulated is None else trial.results.simulated
    return (trial.about or _UNKNOWN_LAYOUT).chip is None if simulated is None else simulated


def _reason(trial: Trial) -> str | None:
    memory = trial.results.memory
    if trial.status is Status.does_not_fit and memory.needed and memory.usable:
        return f"needs {memory.needed / 2**30:.1f} GiB of {memory.usable / 2**30:.1f} GiB usable"
    if trial.status is Status.ok and trial.stage == "compile" and trial.results.step == StepResult():
        return (
            "compiling for a CPU target predicts memory and bytes sent, but no step time. Use a TPU slice as the target"
        )
    return trial.reason


def _is_comparable(pair: RowPair) -> bool:
    """Return whether a run has the target of the prediction, or used simulated devices or `target=auto`."""
    is_local = pair.b.about.target == AUTO_TARGET
    return pair.b.speed_kind.simulated or is_local or pair.b.speed_kind.target == pair.a.speed_kind.target
