"""Reports sweeps to W&B: a group with a run for each trial, and a parent run with the table and plots.

The id of a run is derived from the sweep's folder and the trial's key, so that a repeated trial updates its run. The
reported content is stored in the run's W&B folder, so that unchanged trials are not reported again. Does not
import JAX.
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
from valkyrie.runs.folder import RUN_FILE
from valkyrie.runs.wandb_writer import (
    OFFLINE_SUFFIX,
    TAG_GROUPS,
    TrackingConfig,
    WandbMode,
    WandbWriter,
    group_tag,
    wandb_config,
)
from valkyrie.sweep.columns import WANDB_RUN_COLUMNS, WANDB_TABLE_COLUMNS
from valkyrie.sweep.rows import Row, make_row, with_predictions
from valkyrie.sweep.table import NO_RESULT_STATUSES
from valkyrie.sweep.trial import Status, Trial, TrialLog

REPORTED_FILE = "reported.json"
"""Name of the file in a run's W&B folder that stores the last reported content."""

_MINIMAL_SETTINGS = {
    "x_save_requirements": False,  # listing the packages takes most of the 0.2 s that a run needs to start
    "x_disable_stats": True,
    "x_disable_meta": True,
    "x_disable_machine_info": True,
    "disable_git": True,
    "disable_code": True,
}
"""W&B settings that turn off recording this process and machine, because the trial ran in another process."""

_MAX_TAGS = 20
_PLOT_KEYS = ("label", "tokens_per_second")


class SweepTracker:
    """Reports trials to W&B as they end, in a separate thread.

    If W&B does not start online, runs are offline from then on. If it does not start offline either, or fails later, it
    is off for the rest of the sweep. Each of these changes is reported once with `say`, by default to stderr.
    """

    def __init__(
        self, config: TrackingConfig, folder: Path, sweep: str, say: Callable[[str], None] | None = None
    ) -> None:
        self._folder, self._sweep = folder, sweep
        self._say = say or (lambda line: print(line, file=sys.stderr))
        self._writer = WandbWriter(config, folder, has_several_runs=True)
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="wandb")

    def log(self, trial: Trial) -> None:
        """Queue a trial to be reported, unless the same content was reported before.

        A successful training run that reported itself is not reported again. Instead, the offline W&B runs that this
        sweep created for its failed attempts are removed, unless they were uploaded.
        """
        if self._writer.mode is not WandbMode.off:
            self._executor.submit(self._report_safely, self._log_trial, trial)

    def close(self) -> None:
        """Report the sweep's parent run, a summary of all trials in `trials.jsonl`, unless it is up to date.

        Waits until all reports are sent to W&B.
        """
        if self._writer.mode is not WandbMode.off:
            self._executor.submit(self._report_safely, self._log_sweep)
        self._executor.shutdown()

    def _report_safely(self, report: Callable[..., None], *arguments: Any) -> None:
        if self._writer.mode is WandbMode.off:
            return
        try:
            with self._lock_folder():
                report(*arguments)
        except Exception as error:  # an error in W&B must not end the sweep
            self._writer.mode = WandbMode.off
            self._say(
                f"W&B failed ({type(error).__name__}: {error}) and is off for the rest of the sweep. trials.jsonl is "
                "still written."
            )

    def _log_trial(self, trial: Trial) -> None:
        run_id = wandb_run_id(self._writer.config, self._folder, trial.key)
        if _reported_itself(trial, self._folder):
            _remove_offline(self._run_folders(run_id))
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
            lambda run: run.summary.update(trial_summary(self._row_with_prediction(trial))),
            name=trial.name,
            job_type=trial.stage,
            fields=wandb_config(about, _settings(trial, self._folder)),
            notes=trial.reason,
            exit_code=int(trial.status in NO_RESULT_STATUSES),
        )

    def _row_with_prediction(self, trial: Trial) -> Row:
        """Convert a trial to a row.

        The row of a measured or trained trial includes the prediction for its layout, if the sweep has one.
        """
        recorded = [] if trial.stage == "compile" else TrialLog(self._folder).read()
        predictions = [t for t in recorded if t.stage == "compile"]
        return with_predictions(_row(t, self._folder) for t in (trial, *predictions))[0]

    def _log_sweep(self) -> None:
        trials = TrialLog(self._folder).read()
        if not trials:
            return
        rows = with_predictions(_row(trial, self._folder) for trial in trials)
        cells = [table_cells(row) for row in rows]

        def fill_run(run: Any) -> None:
            run.log(_table_and_plots(cells))
            run.summary.update(_totals(rows))

        self._log_run(
            wandb_run_id(self._writer.config, self._folder, "sweep"),
            json.dumps(cells),
            fill_run,
            name=self._sweep,
            job_type="sweep",
            fields={"sweep": self._sweep, "folder": str(self._folder), "trials": len(trials)},
            tags=_tags(rows),
        )

    def _log_run(
        self, run_id: str, content: str, fill_run: Callable[[Any], None], *, exit_code: int = 0, **run_arguments: Any
    ) -> None:
        """Create a W&B run and write to it with `fill_run`, unless the newest run with this id has the same content.

        Earlier offline runs with this id are removed first, unless they were uploaded.
        """
        earlier_folders = self._run_folders(run_id)
        if (
            earlier_folders
            and (earlier_folders[-1] / REPORTED_FILE).is_file()
            and (earlier_folders[-1] / REPORTED_FILE).read_text() == content
        ):
            return
        _remove_offline(earlier_folders)
        settings = {**_MINIMAL_SETTINGS, "finish_timeout": 6.0 * self._writer.config.init_timeout}
        run = self._writer.start(
            run_id=run_id, group=self._sweep, reinit="create_new", settings=settings, **run_arguments
        )
        if (note := self._writer.note) is not None:
            self._say(note if run is not None else f"{note}; trials.jsonl is still written.")
        if run is None:
            return
        try:
            fill_run(run)
        finally:
            run.finish(exit_code=exit_code)
        write_atomic(Path(run.dir).parent / REPORTED_FILE, content)

    def _run_folders(self, run_id: str) -> list[Path]:
        """Return the W&B folders of a run in the current mode, newest last."""
        offline = "offline-" if self._writer.mode is WandbMode.offline else ""
        return sorted(
            file
            for suffix in ("", OFFLINE_SUFFIX)
            for file in self._folder.glob(f"wandb/{offline}run-*-{run_id}{suffix}")
        )

    @contextmanager
    def _lock_folder(self) -> Iterator[None]:
        """Lock the sweep's `wandb` folder, so that two processes do not report the same trial at the same time."""
        (self._folder / "wandb").mkdir(parents=True, exist_ok=True)
        with open_to_append(self._folder / "wandb" / ".lock") as file:
            lock(file)
            yield


def wandb_run_id(config: TrackingConfig, folder: Path, key: str) -> str:
    """Return the id of a trial's W&B run, or of the sweep's parent run if `key` is `sweep`.

    All attempts of a trial have the same id.
    """
    identity = (config.entity, config.project, folder.resolve().name, folder.stat().st_ino, key)
    return digest(repr(identity))[:16]


def trial_summary(row: Row) -> dict[str, object]:
    """Return the W&B summary of a trial as a dict: its status and metrics (`WANDB_RUN_COLUMNS`), and the bytes sent.

    Bytes sent have one key for each set of mesh axes, such as `comm_bytes/x`. Unknown values are omitted.
    """
    summary = {column.key: column.wandb_value(row) for column in WANDB_RUN_COLUMNS}
    summary |= {f"comm_bytes/{axes}": size for axes, size in row.bytes_by_axes.items()}
    return {key: value for key, value in summary.items() if value is not None}


def table_cells(row: Row) -> list[Any]:
    """Return the row of a trial in the sweep's W&B table: one cell for each column in `WANDB_TABLE_COLUMNS`."""
    prefix = "simulated " * bool(row.trial.results.simulated)
    labelled_row = replace(row, label=f"{row.layout} ({prefix}{row.trial.stage})")
    return [column.wandb_value(labelled_row) for column in WANDB_TABLE_COLUMNS]


def _row(trial: Trial, folder: Path) -> Row:
    return make_row(trial, folder, bool(trial.results.simulated), trial.results.devices, ())


def _settings(trial: Trial, folder: Path) -> dict[str, object]:
    """Return all settings of a trial's run as nested dicts, or those in its record if the trial never ran."""
    file = None if trial.folder is None else folder / trial.folder / RUN_FILE
    if file is not None and file.is_file():
        values = OmegaConf.to_container(OmegaConf.load(file))
        assert isinstance(values, dict)
        return {str(key): value for key, value in values.items() if key != "hydra"}
    nested: dict[str, Any] = {}
    for key, text in trial.values.items():
        *groups, last = key.split(".")
        node = nested
        for name in groups:
            node = node.setdefault(name, {})
        node[last] = yaml.safe_load(text)
    return nested


def _reported_itself(trial: Trial, folder: Path) -> bool:
    """Return whether a trial is a successful training run that reported itself to W&B."""
    mode = get_mode(trial.stage)
    if mode is None or not mode.tracked or trial.status is not Status.ok or trial.folder is None:
        return False
    return any((folder / trial.folder).glob("wandb/*run-*"))


def _table_and_plots(rows: list[list[Any]]) -> dict[str, object]:
    """Return the records of the parent run: the table of all trials, and plots of speeds and memory."""
    import wandb

    keys = [column.key for column in WANDB_TABLE_COLUMNS]
    record: dict[str, object] = {"trials": wandb.Table(columns=[*keys], data=rows, allow_mixed_types=True)}
    rows_with_speed = [dict(zip(keys, row, strict=True)) for row in rows]
    rows_with_speed = [row for row in rows_with_speed if row["tokens_per_second"] is not None]
    suffix = " (simulated)" if any(row["simulated"] for row in rows_with_speed) else ""
    if rows_with_speed:
        table = wandb.Table(columns=[*_PLOT_KEYS], data=[[row[key] for key in _PLOT_KEYS] for row in rows_with_speed])
        record["tokens_per_second_per_layout"] = wandb.plot.bar(
            table, "label", "tokens_per_second", title=f"tokens/s per layout{suffix}"
        )
    rows_with_memory = [row for row in rows_with_speed if row["hbm_gib"] is not None]
    if rows_with_memory:
        columns = [*_PLOT_KEYS, "hbm_gib"]
        table = wandb.Table(columns=[*columns], data=[[row[key] for key in columns] for row in rows_with_memory])
        record["memory_against_throughput"] = wandb.plot.scatter(
            table, "hbm_gib", "tokens_per_second", title=f"memory against tokens/s{suffix}"
        )
    return record


def _tags(rows: Sequence[Row]) -> list[str]:
    """Return the tags of the parent run: the distinct tags of its trials, at most `_MAX_TAGS`."""
    layouts = [encode(row.about) for row in rows if row.trial.about is not None]
    return list(dict.fromkeys(group_tag(key, about[key]) for key in TAG_GROUPS for about in layouts))[:_MAX_TAGS]


def _totals(rows: Sequence[Row]) -> dict[str, object]:
    """Return the summary of the parent run: trials by status, and the name and speed of each stage's fastest trial."""
    totals: dict[str, object] = {f"trials/{s.value}": sum(row.trial.status is s for row in rows) for s in Status}
    for stage in sorted({row.trial.stage for row in rows}):
        rows_with_speed = [
            row for row in rows if row.trial.stage == stage and row.tokens_per_second_per_chip is not None
        ]
        if rows_with_speed:
            best = max(rows_with_speed, key=lambda row: row.trial.results.objective)
            totals |= {f"best/{stage}": best.trial.name}
            totals |= {f"best/{stage}/tokens_per_second_per_chip": best.tokens_per_second_per_chip}
    return totals


def _remove_offline(folders: list[Path]) -> None:
    """Remove offline runs that a newer run replaces. Keeps uploaded ones."""
    for folder in folders:
        if folder.name.startswith("offline-run-") and not list(folder.glob("*.synced")):
            shutil.rmtree(folder, ignore_errors=True)
