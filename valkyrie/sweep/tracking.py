"""Decides what W&B is told of a sweep: one group, a run for every trial, and a parent run with the table and plots.

What was told is kept in `wandb.jsonl` of the sweep's folder: its first line is the identity by which the ids of runs
are made, so that a trial has the same id whenever it is told, and every other line is one telling, or says that a
telling no longer counts. Whoever tells holds a lock on the file from reading it to adding to it, so that of two sweeps
in one folder one tells. Imports no JAX.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

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
        self._told: dict[str, dict[str, Any]] = {}
        self._identity = ""
        self._read_to = 0

    def log(self, trial: Trial) -> None:
        """Make one finished run of a trial, unless it was made before or its training made one; returns at once.

        Where a training made one, the run of an earlier attempt that failed is removed. If it is at W&B by then,
        uploaded or made online, it stays there beside the training's: nothing is deleted at W&B.
        """
        if self._mode is not WandbMode.off:
            tell = self._leave_to_training if _trained(trial, self._folder) else self._tell_trial
            self._worker.submit(self._guarded, tell, trial)

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

        with self._notes() as file:
            self._tell(
                file,
                _suffix(trial),
                trial.to_json(),
                fill,
                name=trial.name,
                job_type=trial.stage,
                fields=fields,
                notes=trial.reason,
                exit_code=int(trial.status in _ENDED_BADLY),
            )

    def _leave_to_training(self, trial: Trial) -> None:
        """Remove what was told of a trial before its training made a run, and note that it no longer counts."""
        with self._notes() as file:
            before = self._told.get(f"{self._identity}-{_suffix(trial)}")
            if before is not None:
                _forget(Path(before["folder"]))
                _note(file, {"run": before["run"], "digest": None})

    def _tell_sweep(self) -> None:
        log = TrialLog(self._folder)
        if not log.read():
            return

        with self._notes() as file:
            trials = log.read()  # under the lock, so that whoever tells last tells of all
            rows = [_row(trial) for trial in trials]

            def fill(run: Any) -> None:
                run.log(_table_and_plots(rows))
                run.summary.update(_totals(trials))

            fields = {"sweep": self._sweep, "folder": str(self._folder), "trials": len(trials)}
            self._tell(file, "sweep", json.dumps(rows), fill, name=self._sweep, job_type="sweep", fields=fields)

    def _tell(
        self,
        file: IO[bytes],
        suffix: str,
        body: str,
        fill: Callable[[Any], None],
        *,
        exit_code: int = 0,
        **about: Any,
    ) -> None:
        """Make a run, unless this very body was told there before, and note that it was told."""
        config = self._config
        run_id = f"{self._identity}-{suffix}"
        where = [self._mode.value, config.entity, config.project, self._sweep]
        digest = hashlib.sha256(json.dumps([*where, body]).encode()).hexdigest()[:16]
        before = self._told.get(run_id)
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
        _note(file, {"run": run_id, "digest": digest, "folder": str(Path(run.dir).parent)})

    @contextmanager
    def _notes(self) -> Iterator[IO[bytes]]:
        """Yield `wandb.jsonl` to add to, locked, once the identity and everything told before are known."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / TOLD
        with path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            cut_torn_line(path)
            self._read(file)
            if not self._identity:
                _note(file, {"identity": secrets.token_hex(4)})
                self._read(file)
            yield file

    def _read(self, file: IO[bytes]) -> None:
        """Take in the lines that were added since the last reading, by whomever."""
        file.seek(self._read_to)
        for line in map(json.loads, file.read().splitlines()):
            if "identity" in line:
                self._identity = line["identity"]
            elif line["digest"] is None:
                self._told.pop(line["run"], None)
            else:
                self._told[line["run"]] = line
        self._read_to = file.tell()


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


def _suffix(trial: Trial) -> str:
    return hashlib.sha256(trial.key.encode()).hexdigest()[:12]


def _note(file: IO[bytes], line: dict[str, Any]) -> None:
    file.write(json.dumps(line).encode() + b"\n")
    file.flush()


def _forget(folder: Path) -> None:
    """Remove an offline run that a newer one replaces, unless it was uploaded already."""
    if folder.name.startswith("offline-run-") and not list(folder.glob("*.synced")):
        shutil.rmtree(folder, ignore_errors=True)
