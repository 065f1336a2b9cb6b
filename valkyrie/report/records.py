"""A trial as one flat row, from `trials.jsonl` and the trial's run folder alone; a training, from its run folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from valkyrie.hardware.chips import known_chips
from valkyrie.report.trainings import TRAIN, find_trainings, training
from valkyrie.report.varied import target_of, varied_of
from valkyrie.runs.goodput import Goodput
from valkyrie.runs.layout_record import LayoutRecord
from valkyrie.runs.tracking import bytes_by_axes
from valkyrie.sweep.trial import TRIALS, Status, Trial, TrialLog

DEPTH = 2
"""How many folders below a given path a sweep is looked for."""

COLLECTIVES = "collectives"
"""What stands before the mesh axes in a part of a measured step: waiting included, hidden behind compute or not."""
REST = "rest"
"""The part of a measured step that is no collective."""

STAGES = {"measure": "measured", "compile": "predicted", "train": "trained"}
"""What the speeds of each stage are called."""
AT_HAND = "auto"
"""The target that is whatever devices there are."""
_SIMULATED = (AT_HAND, "cpu")


class Group(NamedTuple):
    """Trials whose speeds are of one kind: from one stage, on one target, simulated or not.

    `target` has the topology and the slices where these were given, and is the devices themselves where a
    measurement took those at hand.
    """

    stage: str
    target: str
    simulated: bool

    @property
    def label(self) -> str:
        """Return it in words: `predicted for v5e-8`, `measured on simulated devices`."""
        verb = STAGES.get(self.stage, self.stage)
        if self.stage == "compile":
            return f"{verb} for {self.target}"
        if not self.simulated:
            return f"{verb} on {'the devices at hand' if self.target == AT_HAND else self.target}"
        which = "" if self.target in _SIMULATED else f" ({self.target})"
        return f"{verb} on simulated devices{which}"


class Work(NamedTuple):
    """What a step does, whatever the layout: two speeds are compared in words only where this is the same.

    `varied` is what the sweep varies beside the layout and the other fields: `("layers=12", "state_size=1024")`.
    """

    model: str
    batch: int | None
    seq: int | None
    precision: str
    varied: tuple[str, ...]

    @property
    def label(self) -> str:
        """Return it in a few words, without the precision."""
        return ", ".join(
            [self.model, f"{self.batch} x {self.seq} tokens", *([" ".join(self.varied)] * bool(self.varied))]
        )

    @property
    def step(self) -> tuple[object, ...]:
        """What is computed, in whatever precision: by this a prediction and a measurement meet."""
        return self.model, self.batch, self.seq, self.varied


@dataclass(frozen=True)
class Row:
    """A trial, flat. Seconds, bytes of one device, tokens a second; None where it is not known.

    `peak` is the peak memory of one device, or what it would need where it does not fit; `seconds` are the parts of a
    step, of a measured one what its collectives took and the rest; `sent` the bytes that one device sends in a step, by
    mesh axes; `goodput` what the wall time of a training went to, `data_wait` the share of its steps' time in which
    devices waited for data; `price` the dollars of a chip in an hour, and
    `per_million` those of a million tokens, on demand. `source` is the folder of its sweep; `folder` its run
    folder where there is one.
    """

    trial: Trial
    source: Path
    group: Group
    work: Work
    layout: str
    mesh: str
    partition: str
    chips: int | None
    degrees: dict[str, int]
    step_s: float | None
    p90_s: float | None
    min_s: float | None
    rate: float | None
    rate_per_chip: float | None
    mfu: float | None
    peak: int | None
    usable: int | None
    seconds: dict[str, float]
    sent: dict[str, float]
    exposed_s: float | None
    price: float | None
    per_million: float | None
    goodput: Goodput | None
    data_wait: float | None
    reason: str | None
    folder: Path | None

    @property
    def id(self) -> str:
        """A name that no other row has."""
        return f"{self.source}:{self.trial.key}"

    @property
    def sweep(self) -> str:
        """The name of its sweep."""
        return self.trial.sweep

    @property
    def status(self) -> str:
        """What became of it, in words."""
        return self.trial.status.value.replace("_", " ")

    @property
    def is_training(self) -> bool:
        """Whether it is a training of its own, in no sweep."""
        return self.trial.stage == TRAIN and not self.trial.overrides

    @property
    def sharding(self) -> str | None:
        """A name that rows of a model share where every array is split alike; None in a record without it."""
        return None if self.trial.about is None else self.trial.about.sharding

    @property
    def ok(self) -> bool:
        """Whether it has a speed to be ranked by."""
        return self.trial.status is Status.ok and None not in (self.rate_per_chip, self.rate, self.step_s)

    @property
    def step(self) -> dict[str, Any]:
        """What the stage says of the step's speed."""
        return self.trial.results.get("step") or {}


def read_rows(paths: Sequence[Path]) -> list[Row]:
    """Return the trials under these paths, sweep by sweep; ValueError where there is none, or a file is damaged."""
    folders = find_sweeps(paths)
    sweeps = {folder: TrialLog(folder).read() for folder in folders if (folder / TRIALS).is_file()}
    trainings = {folder: [training(folder)] for folder in folders if folder not in sweeps}
    varied, rows = varied_of(sweeps | trainings), []
    for folder, (one,) in trainings.items():
        rows.append(row_of(one, folder.parent, _is_simulated(one, None), None, varied[folder, one.key]))
    for folder, trials in sweeps.items():
        simulated, devices = _by_kind(trials, "simulated"), _by_kind(trials, "devices")
        for trial in trials:
            kind = _kind(trial)
            taken = trial.results.get("devices", devices.get(kind))
            is_simulated = _is_simulated(trial, simulated.get(kind))
            rows.append(row_of(trial, folder, is_simulated, taken, varied[folder, trial.key]))
    if not rows:
        raise ValueError(f"{', '.join(map(str, paths))}: there is no trial yet. Wait until the first one has ended.")
    return rows


def find_sweeps(paths: Sequence[Path]) -> list[Path]:
    """Return the folders of sweeps, and of trainings beside them, that these paths are or hold, each once.

    ValueError says where there is none.
    """
    folders: dict[Path, Path] = {}
    for path in paths:
        if not path.exists():
            raise ValueError(f"{path} does not exist. {_ADVICE}")
        if path.is_file():
            sweeps = [path.parent] if path.name == TRIALS else []
        else:
            patterns = ("/".join(["*"] * depth + [TRIALS]) for depth in range(DEPTH + 1))
            sweeps = sorted(file.parent for pattern in patterns for file in path.glob(pattern))
            sweeps += find_trainings(path, DEPTH, sweeps)
        if not sweeps:
            where = f"{path} is a file" if path.is_file() else f"no {TRIALS} in {path} or the folders in it"
            raise ValueError(f"{where}. {_ADVICE}")
        folders |= {folder.resolve(): folder for folder in sweeps}
    return list(folders.values())


_ADVICE = (
    "A report is made of a training's or a sweep's folder, or of a folder of them, such as runs. "
    "A sweep writes it: valkyrie-train -m mode=measure mesh=2x2x2,8x1x1 partition=fsdp,1d_tp"
)


def row_of(trial: Trial, folder: Path, simulated: bool, devices: str | None, varied: tuple[str, ...]) -> Row:
    """Return a trial of this sweep folder as a row; `simulated` says that its devices are no accelerators.

    `devices` are what a measurement on whatever devices there are took: `8 x NVIDIA H100`; `varied` is what its sweep
    varies beside the layout.
    """
    about, results, target = (
        trial.about or LayoutRecord("?", "?", "?", "unknown target"),
        trial.results,
        target_of(trial),
    )
    step, memory = results.get("step") or {}, results.get("memory") or {}
    sent = results.get("communication") or {}
    rate = _number(step.get("tokens_per_second"))
    price = _price(trial, simulated)
    run_folder = None if trial.folder is None else folder / trial.folder
    return Row(
        trial=trial,
        source=folder,
        group=Group(trial.stage, target if simulated or target != AT_HAND else devices or target, simulated),
        work=Work(
            model=about.model,
            batch=about.batch,
            seq=about.seq,
            precision=about.precision or "",
            varied=varied,
        ),
        layout=trial.name if trial.about is None else about.name,
        mesh=about.mesh,
        partition=about.partition,
        chips=about.chips,
        degrees=about.degrees or {},
        step_s=_number(step.get("step_s")) or _step_of(about, rate),
        p90_s=_number(step.get("p90_s")),
        min_s=_number(step.get("min_s")),
        rate=rate,
        rate_per_chip=_number(step.get("tokens_per_second_per_chip")),
        mfu=_number(step.get("mfu")),
        peak=memory.get("peak") or memory.get("needed"),
        usable=memory.get("usable"),
        seconds=_numbers(results.get("seconds")) or _measured_parts(sent, step.get("step_s")),
        sent=bytes_by_axes(sent),
        exposed_s=_number(sent.get("exposed_s")) if results.get("seconds") else None,
        price=price,
        per_million=1e6 * price * about.chips / (3600 * rate) if price and about.chips and rate else None,
        goodput=_goodput(results.get("goodput") or {}),
        data_wait=_number((results.get("goodput") or {}).get("data_wait")),
        reason=_reason(trial),
        folder=run_folder if run_folder is not None and run_folder.is_dir() else None,
    )


def read_json(row: Row, name: str) -> dict[str, Any] | None:
    """Return a JSON file of the row's run folder; None where there is none, or only a part of one."""
    if row.folder is None:
        return None
    try:
        value = json.loads((row.folder / name).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return value if isinstance(value, dict) else None


def _goodput(told: dict[str, Any]) -> Goodput | None:
    if not told:
        return None
    return Goodput(float(told["wall_s"]), _numbers(told["seconds"]), int(told["restarts"]))


def _price(trial: Trial, simulated: bool) -> float | None:
    """Return the dollars of a chip in an hour: as the stage counted, else as the chip's file says."""
    step, about = trial.results.get("step") or {}, trial.about
    per_dollar = (step.get("tokens_per_dollar") or {}).get("on_demand")
    if per_dollar and about is not None and about.chips:
        return step["tokens_per_second"] * 3600 / per_dollar / about.chips
    chip = None if about is None else known_chips().get(about.chip or "")
    return None if chip is None or simulated or not step else chip.usd_per_hour


def _number(value: int | float | None) -> float | None:
    return None if value is None else float(value)


def _step_of(about: LayoutRecord, rate: float | None) -> float | None:
    """Return the seconds of a step from its tokens and its rate, which is what a training records."""
    return about.batch * about.seq / rate if rate and about.batch and about.seq else None


def _numbers(values: dict[str, int | float] | None) -> dict[str, float]:
    return {name: float(value) for name, value in (values or {}).items()}


def _measured_parts(communication: dict[str, Any], step_s: float | None) -> dict[str, float]:
    """Return the parts of a measured step by its traced collectives; nothing where there is no trace, or no collective.

    The trace is of a few steps of its own, which it slows down: their shares are taken of the timed step. Records
    without the seconds of the traced steps counted what overlaps twice; they tell nothing.
    """
    by_axes, traced_s = communication.get("collective_s"), communication.get("traced_step_s")
    if not by_axes or not traced_s or step_s is None:
        return {}
    shares = {f"{COLLECTIVES} {axes}": sum(kinds.values()) / traced_s for axes, kinds in by_axes.items()}
    whole = max(1.0, sum(shares.values()))
    taken = {name: share / whole * step_s for name, share in shares.items()}
    return taken | {REST: max(0.0, step_s - sum(taken.values()))}


def _by_kind(trials: Sequence[Trial], key: str) -> dict[tuple[str, str], Any]:
    """Return the last result under this key of the trials of each stage and target."""
    return {_kind(trial): trial.results[key] for trial in trials if key in trial.results}


def _kind(trial: Trial) -> tuple[str, str]:
    return trial.stage, "" if trial.about is None else trial.about.target


def _is_simulated(trial: Trial, others: bool | None) -> bool:
    """Return whether a trial's devices are simulated; of one without a result, as `others` of its target were."""
    if trial.stage == "compile":
        return False
    recorded = trial.results.get("simulated", others)
    return (trial.about is None or trial.about.chip is None) if recorded is None else bool(recorded)


def _reason(trial: Trial) -> str | None:
    memory = trial.results.get("memory") or {}
    if trial.status is Status.does_not_fit and memory.get("needed") and memory.get("usable"):
        return f"needs {memory['needed'] / 2**30:.1f} GiB of {memory['usable'] / 2**30:.1f} GiB usable"
    if trial.status is Status.ok and trial.stage == "compile" and not trial.results.get("step"):
        return "CPU target: memory and bytes per axis only; choose a TPU slice for step time"
    return trial.reason
