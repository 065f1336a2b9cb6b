"""Runs at W&B: how they start, and the names of their settings and numbers."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from valkyrie.paths import cache_problem

TRAFFIC = "communication"
"""Key of a training's traffic in its summary."""
FLUSH_S = 1.0
"""Seconds until a record is in W&B's file. A killed run loses records of at most that time, and the last one."""
AGAIN = "-offline"
"""Suffix of the id of a run that did not start online, because W&B reserves the id of a failed start."""
TAGGED = ("mesh", "partition", "model", "target")
"""Groups whose names are tags of a run."""
_GROUPS = ("model", "mesh", "partition", "target", "precision")
"""Groups with names that describe a run."""


class WandbMode(Enum):
    """How W&B is used: `auto` obeys `WANDB_MODE`, else is online with an API key in the environment."""

    auto = "auto"
    online = "online"
    offline = "offline"
    off = "off"


@dataclass
class TrackingConfig:
    """Where metrics go in addition to `metrics.jsonl`. `wandb=auto` does not wait for a network unless a key is set.

    `group` is W&B's group of the run, or None to group by model and target. `id` is W&B's id of the run, or None to
    derive it from its name and folder.
    """

    name: str = "wandb"
    wandb: WandbMode = WandbMode.auto
    project: str = "valkyrie"
    entity: str | None = None
    group: str | None = None
    id: str | None = None
    init_timeout: int = 10


class WandbWriter:
    """Starts W&B runs in `folder/wandb`: online, else offline, else not at all.

    After a run that does not start online, all runs are offline. `mode` is the mode of the next run, and `note` reports
    the failure of the last one, or is None.
    """

    def __init__(self, config: TrackingConfig, folder: Path) -> None:
        self.config, self.folder, self.mode = config, folder, resolve(config.wandb)
        self.note: str | None = None

    def start(
        self, *, name: str, run_id: str, group: str, job_type: str, fields: Mapping[str, object], **more: Any
    ) -> Any:
        """Start a run and return it. Returns None on failure, because a tracker must never end a training.

        `fields` are the run's config, nested as W&B filters it: `optimizer.learning_rate`, `model.name`. `more` is
        passed to `wandb.init`, its `settings` to `wandb.Settings`. `resume` is passed only if the run is online.
        """
        self.note, notes, mode = None, [], self.mode
        if mode is WandbMode.off:
            return None
        for self.mode in dict.fromkeys((mode, WandbMode.offline)):
            own_id = f"{run_id}{AGAIN}" if notes else run_id
            try:
                run = self._init(name, own_id, group, job_type, dict(fields), **more)
            except Exception as error:
                online = " online" if self.mode is WandbMode.online else ""
                reason = " ".join(str(error).split())
                notes.append(f"W&B did not start{online} ({type(error).__name__}: {reason})")
            else:
                later = f"; it is offline. Upload it later: wandb sync {self.folder}/wandb/offline-run-*"
                self.note = notes[0] + later if notes else None
                return run
        self.mode, self.note = WandbMode.off, "; ".join(notes)
        return None

    def _init(self, name: str, run_id: str, group: str, job_type: str, fields: dict[str, Any], **more: Any) -> Any:
        _keep_logs_off_the_screen(self.folder)
        import wandb

        settings = {"silent": True, "init_timeout": self.config.init_timeout, "console": "off"}
        settings |= {"x_transaction_log_flush_interval": FLUSH_S, **more.pop("settings", {})}
        if self.mode is not WandbMode.online:
            more.pop("resume", None)
        tags = more.pop("tags", None) or [tag(key, fields[key]["name"]) for key in TAGGED if key in fields]
        return wandb.init(
            mode=self.mode.value,  # pyright: ignore[reportArgumentType]
            project=self.config.project,
            entity=self.config.entity,
            dir=self.folder.resolve(),
            name=name,
            id=re.sub(r"[/\\#?%:]", "-", run_id),  # W&B refuses these
            group=group,
            job_type=job_type,
            tags=tags,
            config=fields,
            settings=wandb.Settings(**settings),
            **more,
        )


def tag(key: str, name: object) -> str:
    """Return the tag of a group's name: `mesh=4x4x2`. W&B refuses more than 64 characters."""
    return f"{key}={name}"[:64]


def config_of(about: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, object]:
    """Return W&B's config of a run: its settings, nested, and the facts of `about` (layout, roles, chips, ...).

    Names of groups in `about` (`mesh`: `4x4x2`) are moved into the groups (`mesh.name`), so that a key has one meaning.
    """
    names = {key: {"name": about[key]} for key in _GROUPS if key in about}
    derived = {key: value for key, value in about.items() if key not in _GROUPS and value is not None}
    groups: dict[str, object] = {key: {**group, **(settings.get(key) or {})} for key, group in names.items()}
    return {**derived, **settings, **groups}


def wandb_summary(values: Mapping[str, Any]) -> dict[str, object]:
    """Return the known values of a run's summary under W&B's names.

    Adds the step in milliseconds, and the traffic as `comm_bytes/x,y` by mesh axes and `comm_bytes/total`.
    """
    summary = {key: value for key, value in values.items() if key != TRAFFIC}
    traffic, step_s = values.get(TRAFFIC), values.get("step_s")
    if step_s is not None:
        summary["step_ms"] = 1e3 * step_s
    if traffic is not None:
        summary["comm_bytes/total"] = traffic.get("bytes")
        summary |= {f"comm_bytes/{axes}": size for axes, size in traffic["bytes_by_mesh_axes"].items()}
    return {key: value for key, value in summary.items() if value is not None}


def resolve(mode: WandbMode) -> WandbMode:
    """Resolve `auto` to another mode, by `WANDB_MODE`, else by whether there is an API key."""
    if mode is not WandbMode.auto:
        return mode
    known = {"online": WandbMode.online, "offline": WandbMode.offline, "disabled": WandbMode.off}
    chosen = known.get(os.environ.get("WANDB_MODE", ""))
    return chosen or (WandbMode.online if os.environ.get("WANDB_API_KEY") else WandbMode.offline)


def _keep_logs_off_the_screen(folder: Path) -> None:
    """Move W&B's cache into `folder` if the default cannot be written, because W&B would log that to our stderr."""
    if "WANDB_CACHE_DIR" not in os.environ:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "wandb"
        if cache_problem(cache):
            os.environ["WANDB_CACHE_DIR"] = str(folder.resolve() / "wandb" / "cache")
