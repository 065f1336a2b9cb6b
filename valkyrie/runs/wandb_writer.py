"""Starts W&B runs, and defines the keys of their config and their summary."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from valkyrie.paths import cache_problem
from valkyrie.problems import Problem, ProblemCode

COMMUNICATION_KEY = "communication"
"""Key in a training run's summary for the bytes that a device sends per step."""
FLUSH_S = 1.0
"""Seconds between W&B's writes to its log file. A killed run loses all records since the last write, and always at
least the newest record."""
OFFLINE_SUFFIX = "-offline"
"""Appended to the id of a run that falls back to offline mode, because W&B may have reserved the id when it started
online."""
TAG_GROUPS = ("mesh", "partition", "model", "target")
"""Config groups that become tags of the run in W&B (`group_tag`)."""
_GROUPS = ("model", "mesh", "partition", "target", "precision")
"""Config groups that are recorded as `GROUP.name` in a run's config."""


class WandbMode(Enum):
    """Whether W&B is used, and how.

    `auto` follows the environment variable `WANDB_MODE`. Without it, `auto` is `online` if `WANDB_API_KEY` is set, else
    `offline`.
    """

    auto = "auto"
    online = "online"
    offline = "offline"
    off = "off"


_ENVIRONMENT_MODES = {
    "online": WandbMode.online,
    "shared": WandbMode.online,
    "offline": WandbMode.offline,
    "disabled": WandbMode.off,
    "run": WandbMode.online,
    "dryrun": WandbMode.offline,
}
"""Modes by value of `WANDB_MODE`. The last two are W&B's earlier names.

In `shared`, several processes write to one online run.
"""
_FORBIDDEN_CHARACTERS = r"[/\\#?%:]"
"""Regular expression that matches each character that W&B rejects in run ids and project names."""


@dataclass
class TrackingConfig:
    """Settings of W&B, which records metrics in addition to `metrics.jsonl`.

    Args:
        name: Name of this choice of the config group.
        wandb: Whether W&B is used online, offline or not at all.
        project: W&B project.
        entity: W&B user or team, or None for the default.
        group: W&B group of the run, or None to group by model and target.
        id: W&B id of the run, or None to derive it from the run's name and folder.
        init_timeout: Seconds to wait for W&B's server.
    """

    name: str = "wandb"
    wandb: WandbMode = WandbMode.auto
    project: str = "valkyrie"
    entity: str | None = None
    group: str | None = None
    id: str | None = None
    init_timeout: int = 10

    def problems(self, key: str = "tracking.project") -> list[Problem]:
        """Return a problem of `key` if `project` has a character that W&B rejects. Empty if W&B is off."""
        forbidden_character = re.search(_FORBIDDEN_CHARACTERS, self.project)
        if self.wandb is WandbMode.off or forbidden_character is None:
            return []
        text = (
            f"{key}={self.project}: {forbidden_character[0]} is not allowed in the name of a W&B project. "
            "Use letters, digits, ., _ or -."
        )
        return [Problem(ProblemCode.malformed, key, self.project, text)]

    def environment_problems(self) -> list[Problem]:
        """Return a problem if the environment variable `WANDB_MODE` has an unknown value. Empty if W&B is off."""
        mode = os.environ.get("WANDB_MODE", "")
        if self.wandb is WandbMode.off or mode in ("", *_ENVIRONMENT_MODES):
            return []
        return [Problem(ProblemCode.unknown_name, text=f"WANDB_MODE={mode}: must be online, offline or disabled.")]


class WandbWriter:
    """Starts W&B runs in `folder/wandb`. A run that cannot start online starts offline, as do all later runs.

    `mode` is the mode of the next run. It becomes `off` if a run cannot start offline either. `note` describes the
    failures of the last start, or is None. With `has_several_runs`, its command uploads all runs of the folder.
    """

    def __init__(self, config: TrackingConfig, folder: Path, *, has_several_runs: bool = False) -> None:
        self.config, self.folder, self.mode = config, folder, resolve_mode(config.wandb)
        self.has_several_runs = has_several_runs
        self.note: str | None = None

    def start(
        self, *, name: str, run_id: str, group: str, job_type: str, fields: Mapping[str, object], **options: Any
    ) -> Any:
        """Start a W&B run and return it (a `wandb.Run`), or None if W&B is off or cannot start.

        A failure is described in `note` and raises no error, because it must not stop the training run.

        Args:
            name: Name of the run.
            run_id: Id of the run. Characters that W&B rejects become `-`. A run that falls back to offline mode gets
                the suffix `OFFLINE_SUFFIX`.
            group: Group of the run.
            job_type: Job type of the run.
            fields: The run's config, as nested dicts, so that W&B can filter by `optimizer.learning_rate`.
            options: Further arguments of `wandb.init`. `settings` are passed to `wandb.Settings`. `resume` applies only
                online. `tags` default to the `group_tag` of each of `TAG_GROUPS` that `fields` has.
        """
        self.note, notes, mode = None, [], self.mode
        if mode is WandbMode.off:
            return None
        for self.mode in dict.fromkeys((mode, WandbMode.offline)):
            attempt_id = f"{run_id}{OFFLINE_SUFFIX}" if notes else run_id
            try:
                run = self._init(name, attempt_id, group, job_type, dict(fields), **options)
            except Exception as error:
                online_note = " online" if self.mode is WandbMode.online else ""
                reason = " ".join(str(error).split())
                notes.append(f"W&B did not start{online_note} ({type(error).__name__}: {reason})")
            else:
                runs = shlex.quote(str(self.folder / "wandb" / Path(run.dir).parent.name))
                if self.has_several_runs:  # a quoted * would match no run
                    runs = f"{shlex.quote(str(self.folder))}/wandb/offline-run-*"
                advice = f"; the run is offline. To upload it later: wandb sync {runs}"
                self.note = notes[0] + advice if notes else None
                return run
        self.mode, self.note = WandbMode.off, "; ".join(notes)
        return None

    def _init(self, name: str, run_id: str, group: str, job_type: str, fields: dict[str, Any], **options: Any) -> Any:
        _ensure_writable_cache(self.folder)
        import wandb

        settings = {"silent": True, "init_timeout": self.config.init_timeout, "console": "off"}
        settings |= {"x_transaction_log_flush_interval": FLUSH_S, **options.pop("settings", {})}
        if self.mode is not WandbMode.online:
            options.pop("resume", None)
        tags = options.pop("tags", None) or [group_tag(key, fields[key]["name"]) for key in TAG_GROUPS if key in fields]
        return wandb.init(
            mode=self.mode.value,  # pyright: ignore[reportArgumentType]
            project=self.config.project,
            entity=self.config.entity,
            dir=self.folder.resolve(),
            name=name,
            id=re.sub(_FORBIDDEN_CHARACTERS, "-", run_id),
            group=group,
            job_type=job_type,
            tags=tags,
            config=fields,
            settings=wandb.Settings(**settings),
            **options,
        )


def group_tag(key: str, name: object) -> str:
    """Return the tag for the choice of a config group, such as `mesh=4x4x2`. Cut to 64 characters, W&B's limit."""
    return f"{key}={name}"[:64]


def wandb_config(layout_fields: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, object]:
    """Return the config of a W&B run: nested settings, and the fields of the layout (layout, roles, chips, ...).

    `layout_fields` also has the names of config groups, such as `4x4x2` for `mesh`. These are stored as `mesh.name`,
    because the key `mesh` holds the settings of the group. Other layout fields are left out if they are None, and
    replaced if `settings` has the same key.
    """
    group_names = {key: {"name": layout_fields[key]} for key in _GROUPS if key in layout_fields}
    other_fields = {key: value for key, value in layout_fields.items() if key not in _GROUPS and value is not None}
    groups: dict[str, object] = {key: {**group, **(settings.get(key) or {})} for key, group in group_names.items()}
    return {**other_fields, **settings, **groups}


def wandb_summary(values: Mapping[str, Any]) -> dict[str, object]:
    """Convert a run's summary to W&B's keys, without unknown values (None).

    Adds the step time in milliseconds (`step_ms`). Replaces `communication` by the bytes that a device sends per step:
    `comm_bytes/x,y` over the mesh axes x and y, and `comm_bytes/total`.
    """
    summary = {key: value for key, value in values.items() if key != COMMUNICATION_KEY}
    traffic, step_s = values.get(COMMUNICATION_KEY), values.get("step_s")
    if step_s is not None:
        summary["step_ms"] = 1e3 * step_s
    if traffic is not None:
        summary["comm_bytes/total"] = traffic.get("bytes")
        summary |= {f"comm_bytes/{axes}": size for axes, size in traffic["bytes_by_mesh_axes"].items()}
    return {key: value for key, value in summary.items() if value is not None}


def resolve_mode(mode: WandbMode) -> WandbMode:
    """Replace `auto` by the mode that the environment variables `WANDB_MODE` and `WANDB_API_KEY` select."""
    if mode is not WandbMode.auto:
        return mode
    environment_mode = _ENVIRONMENT_MODES.get(os.environ.get("WANDB_MODE", ""))
    return environment_mode or (WandbMode.online if os.environ.get("WANDB_API_KEY") else WandbMode.offline)


def _ensure_writable_cache(folder: Path) -> None:
    """Set `WANDB_CACHE_DIR` to a subfolder of `folder` if it is unset and W&B's default cache is not usable.

    Otherwise, W&B would print an error to stderr.
    """
    if "WANDB_CACHE_DIR" not in os.environ:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "wandb"
        if cache_problem(cache):
            os.environ["WANDB_CACHE_DIR"] = str(folder.resolve() / "wandb" / "cache")
