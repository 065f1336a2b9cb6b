"""What W&B has of a sweep: one group, a run for every trial, and a parent run with the table and plots.

The id of a run follows from the sweep's folder and the trial's key: a trial that is carried out again updates its run.
What was reported of a run lies in the folder that W&B keeps of it, and is not reported again. Imports no JAX.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from valkyrie.config.modes import MODES
from valkyrie.paths import write_whole
from valkyrie.processes.locks import lock
from valkyrie.records import encode
from valkyrie.runs.folder import RUN
from valkyrie.runs.tracking import (
    TrackingConfig,
    WandbMode,
    comm_bytes,
    compared,
    config_of,
    resolve,
    start_or_offline,
    start_wandb,
)
from valkyrie.sweep.trial import Status, Trial, TrialLog
from valkyrie.units import GIB

REPORTED = "reported.json"
"""The file of W&B's folder of a run with what the run was made of."""

_AGAIN = "-offline"
"""The end of the id of a run that did not start online."""
_ENDED_BADLY = {Status.failed, Status.killed, Status.timeout}
_QUICK = {
    "x_save_requirements": False,  # listing the packages takes most of the 0.2 s that a run begins with
    "x_disable_stats": True,
    "x_disable_meta": True,
    "x_disable_machine_info": True,
    "disable_git": True,
    "disable_code": True,
}
"""A run of a trial says nothing of this process or machine: the trial ran elsewhere."""

COLUMNS = (
    *("label", "layout", "stage", "status", "tokens_per_second", "tokens_per_second_per_chip", "mfu", "step_ms"),
    *("hbm_gib", "comm_bytes/total", "simulated", "mesh", "partition", "microbatches", "remat", "model", "target"),
    *("chips", "wall_s", "reason", "name"),
)
"""The columns of the parent run's table."""

_PLOTTED = ("label", "tokens_per_second")


class SweepTracker:
    """Reports trials to W&B as they end, in a thread of its own; a W&B that fails is reported once and then left out.

    `say` prints that one line; stderr by default. Nothing here raises for W&B's sake.
    """

    def __init__(
        self, config: TrackingConfig, folder: Path, sweep: str, say: Callable[[str], None] | None = None
    ) -> None:
        self._config, self._folder, self._sweep = config, folder, sweep
        self._say = say or (lambda line: print(line, file=sys.stderr))
        self._mode = resolve(config.wandb)
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="wandb")

    def log(self, trial: Trial) -> None:
        """Make the run of a trial, unless W&B has it or its training made one; returns at once.

        Where a training made one, the offline run of an earlier attempt that failed is removed, unless it is uploaded.
        """
        if self._mode is not WandbMode.off:
            self._worker.submit(self._guarded, self._log_trial, trial)

    def close(self) -> None:
        """Write the parent run of all trials in `trials.jsonl`, unless it stands, and wait until W&B has everything."""
        if self._mode is not WandbMode.off:
            self._worker.submit(self._guarded, self._log_sweep)
        self._worker.shutdown()

    def _guarded(self, report: Callable[..., None], *arguments: Any) -> None:
        if self._mode is WandbMode.off:
            return
        try:
            with self._alone():
                report(*arguments)
        except Exception as error:  # a tracker must never end a sweep: say it, keep trials.jsonl
            self._mode = WandbMode.off
            self._say(
                f"W&B did not take the sweep ({type(error).__name__}: {error}); trials.jsonl is written all the same."
            )

    def _log_trial(self, trial: Trial) -> None:
        run_id = trial_id(self._config, self._folder, trial.key)
        if _trained(trial, self._folder):
            _remove_offline(self._runs(run_id))
            return
        about = {
            **encode(trial.about or {}),
            "stage": trial.stage,
            "sweep": self._sweep,
            "simulated": _simulated(trial),
        }
        about |= {"overrides": trial.overrides, "started": trial.started, "trial_key": trial.key}
        self._log_run(
            run_id,
            trial.to_json(),
            lambda run: run.summary.update(summary_of(trial)),
            name=trial.name,
            job_type=trial.stage,
            fields=config_of(about, _settings(trial, self._folder)),
            notes=trial.reason,
            exit_code=int(trial.status in _ENDED_BADLY),
        )

    def _log_sweep(self) -> None:
        trials = TrialLog(self._folder).read()
        if not trials:
            return
        rows = [_row(trial) for trial in trials]

        def fill(run: Any) -> None:
            run.log(_table_and_plots(rows))
            run.summary.update(_totals(trials))

        self._log_run(
            trial_id(self._config, self._folder, "sweep"),
            json.dumps(rows),
            fill,
            name=self._sweep,
            job_type="sweep",
            fields={"sweep": self._sweep, "folder": str(self._folder), "trials": len(trials)},
        )

    def _log_run(
        self, run_id: str, content: str, fill: Callable[[Any], None], *, exit_code: int = 0, **about: Any
    ) -> None:
        """Make a run, unless the newest of this id was made of the same content."""
        before = self._runs(run_id)
        if before and (before[-1] / REPORTED).is_file() and (before[-1] / REPORTED).read_text() == content:
            return
        _remove_offline(before)
        run = self._start(run_id, about)
        if run is None:
            return
        try:
            fill(run)
        finally:
            run.finish(exit_code=exit_code)
        write_whole(Path(run.dir).parent / REPORTED, content)

    def _start(self, run_id: str, about: dict[str, Any]) -> Any:
        """Return a started run; from the first that does not start online, all are offline."""

        def start(mode: WandbMode, again: bool) -> Any:
            return start_wandb(
                self._config,
                mode,
                self._folder,
                run_id=f"{run_id}{_AGAIN}" if again else run_id,  # W&B keeps an id whose start has failed
                group=self._sweep,
                reinit="create_new",
                settings={**_QUICK, "finish_timeout": 6.0 * self._config.init_timeout},
                **about,
            )

        run, self._mode, note = start_or_offline(self._mode, self._folder, start)
        if note:
            self._say(note if run is not None else f"{note}; trials.jsonl is written all the same.")
        return run

    def _runs(self, run_id: str) -> list[Path]:
        """Return the folders that W&B keeps of a run in this mode, the newest last."""
        offline = "offline-" if self._mode is WandbMode.offline else ""
        return sorted(file for end in ("", _AGAIN) for file in self._folder.glob(f"wandb/{offline}run-*-{run_id}{end}"))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Let no other sweep in the folder report at the same time: what it has reported is then seen."""
        (self._folder / "wandb").mkdir(parents=True, exist_ok=True)
        with (self._folder / "wandb" / ".lock").open("ab") as file:
            lock(file)
            yield


def trial_id(config: TrackingConfig, folder: Path, key: str) -> str:
    """Return W&B's id of a trial in a sweep's folder, the same each time."""
    where = (config.entity, config.project, folder.resolve().name, folder.stat().st_ino, key)
    return hashlib.sha256(repr(where).encode()).hexdigest()[:16]


def summary_of(trial: Trial) -> dict[str, Any]:
    """Return what a trial came to, flat, without what is unknown.

    `hbm_gib` is the peak of one device as the compiler counts it, of a layout that does not fit what it would need;
    `comm_bytes/<axes>` what one device sends in a step over those mesh axes; of a training also `goodput`, `restarts`
    and `data_wait`, as its own run has them.
    """
    spent = trial.results.get("goodput", {})
    memory, sent = trial.results.get("memory", {}), trial.results.get("communication", {})
    peak = memory.get("peak", memory.get("needed"))
    summary = {
        "status": trial.status.value,
        "reason": trial.reason,
        "stage": trial.stage,
        "wall_s": trial.wall_s,
        "simulated": _simulated(trial),
        **compared(trial.results.get("step", {})),
        "hbm_gib": None if peak is None else peak / GIB,
        "loss": trial.results.get("loss"),
        **comm_bytes(sent),
        "goodput": spent.get("share"),
        "restarts": spent.get("restarts"),
        "data_wait": spent.get("data_wait"),
    }
    return {key: value for key, value in summary.items() if value is not None}


def _settings(trial: Trial, folder: Path) -> dict[str, Any]:
    """Return all settings of a trial's run, nested; those of its record where it never ran."""
    file = None if trial.folder is None else folder / trial.folder / RUN
    if file is not None and file.is_file():
        values = OmegaConf.to_container(OmegaConf.load(file))
        assert isinstance(values, dict)
        return {str(key): value for key, value in values.items() if key != "hydra"}
    nested: dict[str, Any] = {}
    for key, text in trial.values.items():
        *groups, last = key.split(".")
        place = nested
        for name in groups:
            place = place.setdefault(name, {})
        place[last] = yaml.safe_load(text)
    return nested


def _simulated(trial: Trial) -> bool:
    return bool(trial.results.get("simulated", False))


def _trained(trial: Trial, folder: Path) -> bool:
    """Return whether a trial reported to W&B itself: W&B's folder lies in the trial's."""
    if not MODES[trial.stage].tracked or trial.status is not Status.ok or trial.folder is None:
        return False
    return any((folder / trial.folder).glob("wandb/*run-*"))


def _row(trial: Trial) -> list[Any]:
    row = {**encode(trial.about or {}), **summary_of(trial), "name": trial.name}
    layout = row.get("layout") or trial.name
    word = "simulated " if row["simulated"] else ""
    row |= {"layout": layout, "label": f"{layout} ({word}{trial.stage})"}
    return [row.get(column) for column in COLUMNS]


def _table_and_plots(rows: list[list[Any]]) -> dict[str, Any]:
    """Return the parent run's record: the table of all trials, and the plots of those that have the figures."""
    import wandb

    record: dict[str, Any] = {"trials": wandb.Table(columns=[*COLUMNS], data=rows, allow_mixed_types=True)}
    rated = [dict(zip(COLUMNS, row, strict=True)) for row in rows]
    rated = [row for row in rated if row["tokens_per_second"] is not None]
    word = " (simulated)" if any(row["simulated"] for row in rated) else ""
    if rated:
        table = wandb.Table(columns=[*_PLOTTED], data=[[row[key] for key in _PLOTTED] for row in rated])
        record["tokens_per_second_per_layout"] = wandb.plot.bar(
            table, "label", "tokens_per_second", title=f"tokens/s per layout{word}"
        )
    sized = [row for row in rated if row["hbm_gib"] is not None]
    if sized:
        columns = [*_PLOTTED, "hbm_gib"]
        table = wandb.Table(columns=[*columns], data=[[row[key] for key in columns] for row in sized])
        record["memory_against_throughput"] = wandb.plot.scatter(
            table, "hbm_gib", "tokens_per_second", title=f"memory against tokens/s{word}"
        )
    return record


def _totals(trials: list[Trial]) -> dict[str, Any]:
    """Return how many trials came to each status, and the fastest layout of each stage."""
    totals: dict[str, Any] = {f"trials/{s.value}": sum(t.status is s for t in trials) for s in Status}
    for stage in sorted({trial.stage for trial in trials}):
        rates = {t.name: summary_of(t).get("tokens_per_second_per_chip") for t in trials if t.stage == stage}
        known = {name: rate for name, rate in rates.items() if rate is not None}
        if known:
            best = max(known, key=lambda name: known[name])
            totals |= {f"best/{stage}": best, f"best/{stage}/tokens_per_second_per_chip": known[best]}
    return totals


def _remove_offline(folders: list[Path]) -> None:
    """Remove offline runs that a newer one replaces, unless they are uploaded."""
    for folder in folders:
        if folder.name.startswith("offline-run-") and not list(folder.glob("*.synced")):
            shutil.rmtree(folder, ignore_errors=True)
