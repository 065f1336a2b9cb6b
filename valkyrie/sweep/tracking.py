"""Decides what W&B is told of a sweep: one group, a run for every trial, and a parent run with the table and plots.

What was told is kept in `wandb.jsonl` of the sweep's folder: its first line is the identity by which the ids of runs
are made, so that a trial has the same id whenever it is told, and every other line is one telling. Imports no JAX.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from valkyrie.hardware import GIB
from valkyrie.sweep.trial import Status, Trial, TrialLog
from valkyrie.tracking import TrackingConfig, WandbMode, compared, cut_torn_line, resolve, start_wandb

TOLD = "wandb.jsonl"
"""The file of a sweep's folder that says what W&B was told."""

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
    """Tells W&B of trials as they end, in a thread of its own; a W&B that fails is said once and then left out.

    `say` prints that one line; stderr by default. Nothing here raises for W&B's sake.
    """

    def __init__(
        self, config: TrackingConfig, folder: Path, sweep: str, say: Callable[[str], None] | None = None
    ) -> None:
        self._config, self._folder, self._sweep = config, folder, sweep
        self._say = say or (lambda line: print(line, file=sys.stderr))
        self._mode = resolve(config.wandb)
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="wandb")
        self._told: dict[str, dict[str, Any]] | None = None
        self._identity = ""

    def log(self, trial: Trial) -> None:
        """Make one finished run of a trial, unless it was made before or its training made one; returns at once."""
        if self._mode is not WandbMode.off and not _trained(trial, self._folder):
            self._worker.submit(self._guarded, self._tell_trial, trial)

    def close(self) -> None:
        """Write the parent run of all trials in `trials.jsonl`, unless it stands, and wait until W&B has everything."""
        if self._mode is not WandbMode.off:
            self._worker.submit(self._guarded, self._tell_sweep)
        self._worker.shutdown()

    def _guarded(self, tell: Callable[..., None], *arguments: Any) -> None:
        if self._mode is WandbMode.off:
            return
        try:
            tell(*arguments)
        except Exception as error:  # a tracker must never end a sweep: say it, keep trials.jsonl
            self._mode = WandbMode.off
            self._say(
                f"W&B did not take the sweep ({type(error).__name__}: {error}); trials.jsonl is written all the same."
            )

    def _tell_trial(self, trial: Trial) -> None:
        fields = {**trial.about, "stage": trial.stage, "sweep": self._sweep, "simulated": _simulated(trial)}
        fields |= {"overrides": trial.overrides, "started": trial.started, "trial": trial.key}

        def fill(run: Any) -> None:
            run.summary.update(summary_of(trial))

        self._tell(
            hashlib.sha256(trial.key.encode()).hexdigest()[:12],
            trial.to_json(),
            fill,
            name=trial.name,
            job_type=trial.stage,
            fields=fields,
            notes=trial.reason,
            exit_code=int(trial.status in _ENDED_BADLY),
        )

    def _tell_sweep(self) -> None:
        trials = TrialLog(self._folder).read()
        if not trials:
            return
        rows = [_row(trial) for trial in trials]

        def fill(run: Any) -> None:
            run.log(_table_and_plots(rows))
            run.summary.update(_totals(trials))

        fields = {"sweep": self._sweep, "folder": str(self._folder), "trials": len(trials)}
        self._tell("sweep", json.dumps(rows), fill, name=self._sweep, job_type="sweep", fields=fields)

    def _tell(self, suffix: str, body: str, fill: Callable[[Any], None], *, exit_code: int = 0, **about: Any) -> None:
        """Make a run, unless this very body was told there before, and note that it was told."""
        told = self._read()
        config = self._config
        run_id = f"{self._identity}-{suffix}"
        where = [self._mode.value, config.entity, config.project, self._sweep]
        digest = hashlib.sha256(json.dumps([*where, body]).encode()).hexdigest()[:16]
        before = told.get(run_id)
        if before is not None and before["digest"] == digest:
            return
        if before is not None:
            _forget(Path(before["folder"]))
        settings = {**_QUICK, "finish_timeout": 6.0 * config.init_timeout}
        run = start_wandb(
            config,
            self._mode,
            self._folder,
            run_id=run_id,
            group=self._sweep,
            reinit="create_new",
            settings=settings,
            **about,
        )
        try:
            fill(run)
        finally:
            run.finish(exit_code=exit_code)
        told[run_id] = {"run": run_id, "digest": digest, "folder": str(Path(run.dir).parent)}
        with (self._folder / TOLD).open("a") as file:
            file.write(json.dumps(told[run_id]) + "\n")

    def _read(self) -> dict[str, dict[str, Any]]:
        """Return what was told before, by run id; the first call finds or makes the identity of this folder."""
        if self._told is None:
            path = self._folder / TOLD
            self._folder.mkdir(parents=True, exist_ok=True)
            try:
                with path.open("x") as file:
                    file.write(json.dumps({"identity": secrets.token_hex(4)}) + "\n")
            except FileExistsError:
                pass
            cut_torn_line(path)
            first, *lines = [json.loads(line) for line in path.read_text().splitlines()]
            self._identity = first["identity"]
            self._told = {line["run"]: line for line in lines}
        return self._told


def summary_of(trial: Trial) -> dict[str, Any]:
    """Return what a trial came to, flat, without what is unknown.

    `hbm_gib` is the peak of one device as the compiler counts it, of a layout that does not fit what it would need;
    `comm_bytes/<axes>` what one device sends in a step over those mesh axes.
    """
    memory, sent = trial.results.get("memory", {}), trial.results.get("communication", {})
    peak = memory.get("peak", memory.get("needed"))
    found = {
        "status": trial.status.value,
        "reason": trial.reason,
        "stage": trial.stage,
        "wall_s": trial.wall_s,
        "simulated": _simulated(trial),
        **compared(trial.results.get("step", {})),
        "hbm_gib": None if peak is None else peak / GIB,
        "loss": trial.results.get("loss"),
        "comm_bytes/total": sent.get("bytes"),
        **{f"comm_bytes/{axes}": count for axes, count in sent.get("bytes_by_mesh_axes", {}).items()},
    }
    return {key: value for key, value in found.items() if value is not None}


def _simulated(trial: Trial) -> bool:
    return bool(trial.results.get("simulated", False))


def _trained(trial: Trial, folder: Path) -> bool:
    """Return whether a trial's own training told W&B everything: its run lies in the trial's folder."""
    if trial.stage != "train" or trial.status is not Status.ok or trial.folder is None:
        return False
    return any((folder / trial.folder).glob("wandb/*run-*"))


def _row(trial: Trial) -> list[Any]:
    found = {**trial.about, **summary_of(trial), "name": trial.name}
    layout = found.get("layout", trial.name)
    word = "simulated " if found["simulated"] else ""
    found |= {"layout": layout, "label": f"{layout} ({word}{trial.stage})"}
    return [found.get(column) for column in COLUMNS]


def _table_and_plots(rows: list[list[Any]]) -> dict[str, Any]:
    """Return the parent run's record: the table of all trials, and the plots of those that have the figures."""
    import wandb

    found: dict[str, Any] = {"trials": wandb.Table(columns=[*COLUMNS], data=rows, allow_mixed_types=True)}
    rated = [dict(zip(COLUMNS, row, strict=True)) for row in rows]
    rated = [row for row in rated if row["tokens_per_second"] is not None]
    word = " (simulated)" if any(row["simulated"] for row in rated) else ""
    if rated:
        table = wandb.Table(columns=[*_PLOTTED], data=[[row[key] for key in _PLOTTED] for row in rated])
        found["tokens_per_second_per_layout"] = wandb.plot.bar(
            table, "label", "tokens_per_second", title=f"tokens/s per layout{word}"
        )
    held = [row for row in rated if row["hbm_gib"] is not None]
    if held:
        columns = [*_PLOTTED, "hbm_gib"]
        table = wandb.Table(columns=[*columns], data=[[row[key] for key in columns] for row in held])
        found["memory_against_throughput"] = wandb.plot.scatter(
            table, "hbm_gib", "tokens_per_second", title=f"memory against tokens/s{word}"
        )
    return found


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


def _forget(folder: Path) -> None:
    """Remove an offline run that a newer one replaces, unless it was uploaded already."""
    if folder.name.startswith("offline-run-") and not list(folder.glob("*.synced")):
        shutil.rmtree(folder, ignore_errors=True)
