"""Reports sweeps to W&B: a group with a run for every trial, and a parent run with the table and plots.

The id of a run is derived from the sweep's folder and the trial's key, so that a repeated trial updates its run. The
reported content is stored in W&B's folder of the run and is not reported again. Imports no JAX.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from valkyrie.checksums import digest
from valkyrie.config.modes import get_mode
from valkyrie.paths import open_to_append, write_atomic
from valkyrie.processes.locks import lock
from valkyrie.records import encode
from valkyrie.runs.folder import RUN
from valkyrie.runs.wandb_writer import AGAIN, TAGGED, TrackingConfig, WandbMode, WandbWriter, config_of, tag
from valkyrie.sweep.columns import WANDB_RUN, WANDB_TABLE
from valkyrie.sweep.rows import Row, row_of, with_predictions
from valkyrie.sweep.trial import Status, Trial, TrialLog

REPORTED = "reported.json"
"""File in W&B's folder of a run with the content that was reported."""

_ENDED_BADLY = {Status.failed, Status.killed, Status.timeout}
_QUICK = {
    "x_save_requirements": False,  # listing the packages takes most of the 0.2 s that a run begins with
    "x_disable_stats": True,
    "x_disable_meta": True,
    "x_disable_machine_info": True,
    "disable_git": True,
    "disable_code": True,
}
"""Settings that record nothing about this process or machine, because the trial ran in another process."""

_MOST_TAGS = 20
_PLOTTED = ("label", "tokens_per_second")


class SweepTracker:
    """Reports trials to W&B as they end, in a separate thread.

    A failure of W&B is printed once with `say` (stderr by default), and then W&B is off. It never ends a sweep.
    """

    def __init__(
        self, config: TrackingConfig, folder: Path, sweep: str, say: Callable[[str], None] | None = None
    ) -> None:
        self._folder, self._sweep = folder, sweep
        self._say = say or (lambda line: print(line, file=sys.stderr))
        self._writer = WandbWriter(config, folder)
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="wandb")

    def log(self, trial: Trial) -> None:
        """Queue the run of a trial, unless W&B has it or its training made one.

        If the training made one, the offline run of an earlier failed attempt is removed, unless it is uploaded.
        """
        if self._writer.mode is not WandbMode.off:
            self._worker.submit(self._guarded, self._log_trial, trial)

    def close(self) -> None:
        """Write the parent run of all trials in `trials.jsonl` unless it exists, and wait until W&B has everything."""
        if self._writer.mode is not WandbMode.off:
            self._worker.submit(self._guarded, self._log_sweep)
        self._worker.shutdown()

    def _guarded(self, report: Callable[..., None], *arguments: Any) -> None:
        if self._writer.mode is WandbMode.off:
            return
        try:
            with self._alone():
                report(*arguments)
        except Exception as error:  # a tracker must never end a sweep
            self._writer.mode = WandbMode.off
            self._say(f"W&B refused the sweep ({type(error).__name__}: {error}); trials.jsonl is written in any case.")

    def _log_trial(self, trial: Trial) -> None:
        run_id = trial_id(self._writer.config, self._folder, trial.key)
        if _trained(trial, self._folder):
            _remove_offline(self._runs(run_id))
            return
        about = {
            **encode(trial.about or {}),
            "stage": trial.stage,
            "sweep": self._sweep,
            "simulated": bool(trial.results.simulated),
        }
        about |= {"overrides": trial.overrides, "started": trial.started, "trial_key": trial.key}
        self._log_run(
            run_id,
            trial.to_json(),
            lambda run: run.summary.update(summary_of(self._with_prediction(trial))),
            name=trial.name,
            job_type=trial.stage,
            fields=config_of(about, _settings(trial, self._folder)),
            notes=trial.reason,
            exit_code=int(trial.status in _ENDED_BADLY),
        )

    def _with_prediction(self, trial: Trial) -> Row:
        """Return a trial as a row, with the prediction of its layout if its sweep has one and the trial is measured."""
        predicted = (other for other in TrialLog(self._folder).read() if other.stage == "compile")
        others = predicted if trial.stage != "compile" else ()
        return with_predictions(_row(one, self._folder) for one in (trial, *others))[0]

    def _log_sweep(self) -> None:
        trials = TrialLog(self._folder).read()
        if not trials:
            return
        rows = with_predictions(_row(trial, self._folder) for trial in trials)
        cells = [table_cells(row) for row in rows]

        def fill(run: Any) -> None:
            run.log(_table_and_plots(cells))
            run.summary.update(_totals(rows))

        self._log_run(
            trial_id(self._writer.config, self._folder, "sweep"),
            json.dumps(cells),
            fill,
            name=self._sweep,
            job_type="sweep",
            fields={"sweep": self._sweep, "folder": str(self._folder), "trials": len(trials)},
            tags=_tags(rows),
        )

    def _log_run(
        self, run_id: str, content: str, fill: Callable[[Any], None], *, exit_code: int = 0, **about: Any
    ) -> None:
        """Create a run, unless the newest of this id has the same content."""
        before = self._runs(run_id)
        if before and (before[-1] / REPORTED).is_file() and (before[-1] / REPORTED).read_text() == content:
            return
        _remove_offline(before)
        settings = {**_QUICK, "finish_timeout": 6.0 * self._writer.config.init_timeout}
        run = self._writer.start(run_id=run_id, group=self._sweep, reinit="create_new", settings=settings, **about)
        if (note := self._writer.note) is not None:
            self._say(note if run is not None else f"{note}; trials.jsonl is written in any case.")
        if run is None:
            return
        try:
            fill(run)
        finally:
            run.finish(exit_code=exit_code)
        write_atomic(Path(run.dir).parent / REPORTED, content)

    def _runs(self, run_id: str) -> list[Path]:
        """Return W&B's folders of a run in this mode, the newest last."""
        offline = "offline-" if self._writer.mode is WandbMode.offline else ""
        return sorted(file for end in ("", AGAIN) for file in self._folder.glob(f"wandb/{offline}run-*-{run_id}{end}"))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Lock out other sweeps in the folder, so that no trial is reported twice."""
        (self._folder / "wandb").mkdir(parents=True, exist_ok=True)
        with open_to_append(self._folder / "wandb" / ".lock") as file:
            lock(file)
            yield


def trial_id(config: TrackingConfig, folder: Path, key: str) -> str:
    """Return W&B's id of a trial in a sweep's folder, the same each time."""
    where = (config.entity, config.project, folder.resolve().name, folder.stat().st_ino, key)
    return digest(repr(where))[:16]


def summary_of(row: Row) -> dict[str, object]:
    """Return the known numbers of a trial under W&B's names, including the bytes sent by mesh axes."""
    summary = {column.key: column.scaled(row) for column in WANDB_RUN}
    summary |= {f"comm_bytes/{axes}": size for axes, size in row.sent.items()}
    return {key: value for key, value in summary.items() if value is not None}


def table_cells(row: Row) -> list[Any]:
    """Return a trial's row of the sweep's table at W&B."""
    word = "simulated " * bool(row.trial.results.simulated)
    labelled = replace(row, label=f"{row.layout} ({word}{row.trial.stage})")
    return [column.scaled(labelled) for column in WANDB_TABLE]


def _row(trial: Trial, folder: Path) -> Row:
    return row_of(trial, folder, bool(trial.results.simulated), trial.results.devices, ())


def _settings(trial: Trial, folder: Path) -> dict[str, object]:
    """Return all settings of a trial's run, nested, or those in its record if it never ran."""
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


def _trained(trial: Trial, folder: Path) -> bool:
    """Return whether a trial reported itself to W&B, and so has a W&B folder."""
    mode = get_mode(trial.stage)
    if mode is None or not mode.tracked or trial.status is not Status.ok or trial.folder is None:
        return False
    return any((folder / trial.folder).glob("wandb/*run-*"))


def _table_and_plots(rows: list[list[Any]]) -> dict[str, object]:
    """Return the parent run's record: the table of all trials, and plots of speeds and memory."""
    import wandb

    keys = [column.key for column in WANDB_TABLE]
    record: dict[str, object] = {"trials": wandb.Table(columns=[*keys], data=rows, allow_mixed_types=True)}
    rated = [dict(zip(keys, row, strict=True)) for row in rows]
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


def _tags(rows: Sequence[Row]) -> list[str]:
    """Return the tags of the parent run: the values that its trials have, by key as for a trial."""
    abouts = [encode(row.about) for row in rows if row.trial.about is not None]
    return list(dict.fromkeys(tag(key, about[key]) for key in TAGGED for about in abouts))[:_MOST_TAGS]


def _totals(rows: Sequence[Row]) -> dict[str, object]:
    """Return the number of trials by status, and the fastest layout of each stage."""
    totals: dict[str, object] = {f"trials/{s.value}": sum(row.trial.status is s for row in rows) for s in Status}
    for stage in sorted({row.trial.stage for row in rows}):
        timed = [row for row in rows if row.trial.stage == stage and row.rate_per_chip is not None]
        if timed:
            best = max(timed, key=lambda row: row.trial.results.objective)
            totals |= {f"best/{stage}": best.trial.name}
            totals |= {f"best/{stage}/tokens_per_second_per_chip": best.rate_per_chip}
    return totals


def _remove_offline(folders: list[Path]) -> None:
    """Remove offline runs that a newer one replaces, unless they are uploaded."""
    for folder in folders:
        if folder.name.startswith("offline-run-") and not list(folder.glob("*.synced")):
            shutil.rmtree(folder, ignore_errors=True)
