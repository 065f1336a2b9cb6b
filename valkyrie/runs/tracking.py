"""Metrics: one JSON line per record in the run folder, and W&B where it is on."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from valkyrie.axes import UNATTRIBUTED
from valkyrie.paths import cache_trouble, is_full, why, write_whole
from valkyrie.problems import Problem, ProblemCode, ProblemError


class WandbMode(Enum):
    """How W&B is used: `auto` obeys `WANDB_MODE`, else is online with an API key in the environment."""

    auto = "auto"
    online = "online"
    offline = "offline"
    off = "off"


@dataclass
class TrackingConfig:
    """Where metrics go beside `metrics.jsonl`. `wandb=auto` never waits for a network unless a key is set.

    `group` is W&B's group of the run; None groups by model and target. `id` is W&B's id of the run; None makes one of
    its name and folder.
    """

    name: str = "wandb"
    wandb: WandbMode = WandbMode.auto
    project: str = "valkyrie"
    entity: str | None = None
    group: str | None = None
    id: str | None = None
    init_timeout: int = 10


def profile_window(asked: str) -> tuple[int, int]:
    """Return the first and the last step of `profile=100-105`. Raises ProblemError for any other form."""
    first, dash, last = asked.partition("-")
    if not (dash and first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        text = f"profile={asked}: write the first and the last step to trace, such as profile=100-105."
        raise ProblemError([Problem(ProblemCode.malformed, "profile", asked, text)])
    return int(first), int(last)


def profile_problems(asked: str | None, steps: int) -> list[Problem]:
    """Return why a window of steps cannot be traced in a training of so many steps."""
    try:
        last = 0 if asked is None else profile_window(asked)[1]
    except ProblemError as error:
        return [*error.problems]
    text = f"profile={asked}: the training ends with step {steps} (steps={steps})."
    return [Problem(ProblemCode.conflict, "profile", asked, text)] if last > steps else []


_GROUPS = ("model", "mesh", "partition", "target", "precision")
"""Groups whose names describe a run."""

FLUSH_S = 1.0
"""Seconds after which a record is in W&B's file: a run that is killed loses no more than that, and its last record."""


class Tracker:
    """Writes records to `metrics.jsonl` and to W&B, offline where its server does not answer.

    A W&B that does not start at all is reported once and left out. `start` is the step from which a run goes on:
    records of later steps, which are done again, are dropped.
    """

    def __init__(
        self,
        config: TrackingConfig,
        folder: Path,
        *,
        run_name: str,
        fields: dict[str, Any],
        group: str,
        start: int | None = None,
    ):
        self.folder, self.file = folder, folder / "metrics.jsonl"
        cut_torn_line(self.file)
        if start is not None:
            drop_after(self.file, start)
        self._file = self.file.open("ab", buffering=0)
        self._unwritten = b""
        self.note: str | None = None
        self._open_step: int | None = None
        self._wandb = self._start_wandb(config, folder, run_name, fields, group)

    @property
    def gone(self) -> bool:
        """Whether the file was deleted, with its folder or its disk."""
        return not self.file.is_file()

    def log(self, record: dict[str, Any], step: int) -> str | None:
        """Append one record of scalars, stamped with its step.

        Returns a line to show where the disk stops taking records, and one where it has taken those that waited.
        """
        line = self._write({"step": step, **record})
        if self._wandb is not None:
            self._wandb.log(_known(record), step=step)
            self._open_step = step
        return line

    def summary(self, values: dict[str, Any]) -> None:
        """Set values of the whole run: in W&B's summary, and as a last JSON line without a step.

        They outlast records of the same keys: W&B keeps a step open for more records, and puts them into the summary
        when it is closed, so the last step is closed first.
        """
        self._write({"summary": values})
        if self._wandb is not None:
            if self._open_step is not None:
                self._wandb.log({}, step=self._open_step, commit=True)
                self._open_step = None
            self._wandb.summary.update(_known(values) | compared(values))

    @property
    def lost(self) -> str | None:
        """What is missing in the file because the disk has not taken it; None where nothing is."""
        lines = self._unwritten.count(b"\n")
        return f"{self.file} lacks its last {lines} lines: the disk did not take them" if lines else None

    def close(self, exit_code: int = 0) -> None:
        """Flush and close both sinks."""
        self._file.close()
        if self._wandb is not None:
            self._wandb.finish(exit_code=exit_code)

    def _write(self, values: dict[str, Any]) -> str | None:
        """Append a line and those that a full disk did not take before; half a line is finished by the next."""
        waited = bool(self._unwritten)
        self._unwritten += json.dumps(values).encode() + b"\n"
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError as error:
            remedy = "; free some room there" if is_full(error) else ""
            return None if waited else f"{self.file} cannot be written ({why(error)}): its lines wait{remedy}"
        return f"{self.file} is written again, with the lines that waited" if waited else None

    def _start_wandb(
        self, config: TrackingConfig, folder: Path, run_name: str, fields: dict[str, Any], group: str
    ) -> Any:
        mode = resolve(config.wandb)
        if mode is WandbMode.off:
            return None
        run_id = config.id or f"{run_name}-{folder.resolve().stat().st_ino}"

        def start(attempt: WandbMode, again: bool) -> Any:
            return start_wandb(
                config,
                attempt,
                folder,
                name=run_name,
                run_id=f"{run_id}-offline" if again else run_id,  # W&B keeps an id whose start has failed
                group=config.group or group,
                job_type="train",
                fields=fields,
                resume="allow" if attempt is WandbMode.online else None,
            )

        started, _, self.note = start_or_offline(mode, folder, start)
        if started is None:
            self.note = f"{self.note}; metrics.jsonl is written all the same."
        return started


class Silent:
    """The tracker of a process that is not the first of its run: it writes nothing."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.note, self.lost, self.gone = folder, None, None, False

    def log(self, record: dict[str, Any], step: int) -> str | None:
        """Drop a record: process 0 has the same."""

    def summary(self, values: dict[str, Any]) -> None:
        """Drop the values: process 0 has the same."""

    def close(self, exit_code: int = 0) -> None:
        """Do nothing."""


def start_or_offline(
    mode: WandbMode, folder: Path, start: Callable[[WandbMode, bool], Any]
) -> tuple[Any, WandbMode, str | None]:
    """Return a W&B run that `start` makes in a mode, else offline, with its mode and a line of what failed.

    `start` gets the mode, and whether it is called again. The run is None where W&B does not start at all.
    """
    notes: list[str] = []
    for attempt in dict.fromkeys((mode, WandbMode.offline)):
        try:
            run = start(attempt, bool(notes))
        except Exception as error:  # a tracker must never end a run: report it, keep the run folder's records
            online = " online" if attempt is WandbMode.online else ""
            reason = " ".join(str(error).split())
            notes.append(f"W&B did not start{online} ({type(error).__name__}: {reason})")
        else:
            later = f"; it is offline. Upload it later: wandb sync {folder}/wandb/offline-run-*"
            return run, attempt, notes[0] + later if notes else None
    return None, WandbMode.off, "; ".join(notes)


def start_wandb(
    config: TrackingConfig,
    mode: WandbMode,
    folder: Path,
    *,
    name: str,
    run_id: str,
    group: str,
    job_type: str,
    fields: dict[str, Any],
    **more: Any,
) -> Any:
    """Return a W&B run that lies in `folder/wandb`, silent, with the tags that all our runs bear.

    `fields` are its config, nested as W&B filters it: `optimizer.learning_rate`, `model.name`.
    `more` goes to `wandb.init`, `settings` in it to `wandb.Settings`. Raises what W&B raises when it does not start.
    """
    _keep_logs_off_the_screen(folder)
    import wandb

    settings = {"silent": True, "init_timeout": config.init_timeout, "console": "off"}
    settings |= {"x_transaction_log_flush_interval": FLUSH_S, **more.pop("settings", {})}
    return wandb.init(
        mode=mode.value,  # pyright: ignore[reportArgumentType]
        project=config.project,
        entity=config.entity,
        dir=folder.resolve(),
        name=name,
        id=re.sub(r"[/\\#?%:]", "-", run_id),  # W&B refuses these
        group=group,
        job_type=job_type,
        tags=[f"{k}={fields[k]['name']}"[:64] for k in ("mesh", "partition", "model", "target") if k in fields],
        config=fields,
        settings=wandb.Settings(**settings),
        **more,
    )


def config_of(about: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return W&B's config of a run: all its settings, nested, and what they come to (layout, roles, chips, ...).

    `about` has the names of groups (`mesh`: `4x4x2`), which stand inside them (`mesh.name`): a key is one thing.
    """
    names = {key: {"name": about[key]} for key in _GROUPS if key in about}
    derived = {key: value for key, value in about.items() if key not in _GROUPS}
    groups = {key: {**group, **(settings.get(key) or {})} for key, group in names.items()}
    return derived | dict(settings) | groups


def _keep_logs_off_the_screen(folder: Path) -> None:
    """Let W&B's process log beside its runs where its cache cannot be written: else it logs to our stderr."""
    if "WANDB_CACHE_DIR" not in os.environ:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "wandb"
        if cache_trouble(cache):
            os.environ["WANDB_CACHE_DIR"] = str(folder.resolve() / "wandb" / "cache")


def compared(step: dict[str, Any]) -> dict[str, float]:
    """Return the figures by which W&B compares runs, of a step's figures: those that are known, the step in ms."""
    metrics = {key: step.get(key) for key in ("tokens_per_second", "tokens_per_second_per_chip", "mfu")}
    metrics["step_ms"] = None if step.get("step_s") is None else 1e3 * step["step_s"]
    return _known(metrics)


def comm_bytes(communication: Mapping[str, Any]) -> dict[str, float]:
    """Return what one device sends in a step as W&B shows it: `comm_bytes/x,y` over those mesh axes, and in all."""
    by_axes = {f"comm_bytes/{axes}": count for axes, count in bytes_by_axes(communication).items()}
    return {"comm_bytes/total": communication["bytes"], **by_axes} if "bytes" in communication else by_axes


def sent_over(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the communication that `comm_bytes` made the entries of a summary of: `bytes` and `bytes_by_mesh_axes`."""
    by_axes = {key.removeprefix("comm_bytes/"): size for key, size in summary.items() if key.startswith("comm_bytes/")}
    return {"bytes": by_axes.pop("total", None), "bytes_by_mesh_axes": by_axes}


def bytes_by_axes(communication: Mapping[str, Any]) -> dict[str, float]:
    """Return what one device sends in a step by mesh axes; older records have `?` for those that are not known."""
    sent = communication.get("bytes_by_mesh_axes") or {}
    return {UNATTRIBUTED if axes == "?" else axes: float(count) for axes, count in sent.items()}


def resolve(mode: WandbMode) -> WandbMode:
    """Return what a mode comes to here: `auto` becomes one of the others, by `WANDB_MODE`, else by the API key."""
    if mode is not WandbMode.auto:
        return mode
    known = {"online": WandbMode.online, "offline": WandbMode.offline, "disabled": WandbMode.off}
    chosen = known.get(os.environ.get("WANDB_MODE", ""))
    return chosen or (WandbMode.online if os.environ.get("WANDB_API_KEY") else WandbMode.offline)


def _known(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def cut_torn_line(path: Path) -> None:
    """Remove the half of a line that a crash left at the end, so that the next record begins a line."""
    if not path.is_file():
        return
    whole = path.read_bytes().rfind(b"\n") + 1
    if whole < path.stat().st_size:
        os.truncate(path, whole)


def drop_after(path: Path, step: int) -> None:
    """Remove the records of steps beyond one: of steps that were done after the checkpoint from which a run goes on."""
    if not path.is_file():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if _step_of(line, step) <= step]
    if len(kept) < len(lines):
        write_whole(path, b"".join(kept))


def _step_of(line: bytes, otherwise: int) -> int:
    """Return the step of a record; another number for one without a step, and for a damaged one, which is kept."""
    try:
        return int(json.loads(line).get("step", otherwise))
    except (ValueError, AttributeError, TypeError):
        return otherwise


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the records of a `metrics.jsonl`, oldest first; a damaged line, or one torn by a crash, is left out."""
    records = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records
