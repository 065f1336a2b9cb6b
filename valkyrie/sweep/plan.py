"""Decides what a job of a multirun is before anything starts: its key, its name, its command, or why it is refused."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from valkyrie.paths import conf_dir
from valkyrie.run import Run
from valkyrie.sweep.names import NUMBERED, READS_A_RUN, folder_name, trial_key, trial_name, unread_key
from valkyrie.sweep.trial import Status, Trial
from valkyrie.train.devices import missing_devices
from valkyrie.train.folder import find_run

LIMIT_S = 3600.0
"""The seconds a trial may take where `trial.limit_s` does not say; a training may take as long as it needs."""


@dataclass(frozen=True)
class Plan:
    """A trial before it runs. `refusal` says why it cannot; `folder` is the sweep's, `command` its process."""

    key: str
    name: str
    stage: str
    folder: Path
    overrides: tuple[str, ...]
    about: dict[str, Any]
    refusal: str | None = None
    command: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    limit_s: float | None = LIMIT_S
    retry: bool = False

    @property
    def trial_folder(self) -> Path:
        """The run folder of the trial."""
        return self.folder / self.name

    def ended(
        self, status: Status, reason: str | None, started: str, wall_s: float, results: dict[str, Any] | None = None
    ) -> Trial:
        """Return the record of this trial with what became of it."""
        return Trial(
            key=self.key,
            name=self.name,
            sweep=self.folder.resolve().name,
            stage=self.stage,
            status=status,
            reason=reason,
            overrides=list(self.overrides),
            about=self.about,
            started=started,
            wall_s=round(wall_s, 3),
            folder=None if status is Status.refused and not wall_s else self.name,
            results=results or {},
        )

    def settled_by(self, trial: Trial | None) -> bool:
        """Return whether an earlier record leaves nothing to do.

        What was refused is looked at again: it takes no time, and the machine may have changed.
        """
        if trial is None or self.stage not in NUMBERED or trial.status is Status.refused:
            return False
        return not self.retry or trial.status in (Status.ok, Status.does_not_fit)


def plan_trial(config: DictConfig) -> Plan:
    """Return the plan of the job that Hydra has composed; a wrong or illegal run comes back as a refused plan."""
    hydra = HydraConfig.get()
    overrides = tuple(str(o) for o in hydra.overrides.task)
    folder = Path(hydra.sweep.dir)
    try:
        run = Run.from_config(config)
    except ValueError as error:
        key = unread_key(overrides)
        stage = str(config.mode.name)
        return Plan(key, f"{folder_name(stage)}-{key[:6]}", stage, folder, overrides, {}, str(error))
    stage, key, limit = run.config.mode.name, trial_key(run), run.config.trial.limit_s
    name, illegal = trial_name(run, key), run.problems()
    refusals = illegal or ([] if stage in ("show", "compile") else missing_devices(run))
    own = []
    try:
        own = _own_overrides(run, overrides, folder_name(folder.resolve().name))
    except ValueError as error:
        refusals.append(str(error))
    return Plan(
        key=key,
        name=name,
        stage=stage,
        folder=folder,
        overrides=overrides,
        about=run.asked() if illegal else run.about(),
        refusal=" ".join(refusals) or None,
        command=(*child_program(), *_flags(hydra), *own, "hydra.mode=RUN", f"runs={_quoted(folder)}", f"name={name}"),
        environment={str(k): str(v) for k, v in hydra.job.env_set.items()},
        limit_s=(None if stage == "train" else LIMIT_S) if limit is None else limit,
        retry=run.config.trial.retry,
    )


def child_program() -> tuple[str, ...]:
    """Return the program of a trial's process."""
    return (sys.executable, "-m", "valkyrie.cli.train")


def child_environment(plan: Plan) -> dict[str, str]:
    """Return the environment of a trial's process: ours, without Hydra's wish for tracebacks, and the job's own."""
    return {k: v for k, v in os.environ.items() if k != "HYDRA_FULL_ERROR"} | plan.environment


def _own_overrides(run: Run, overrides: Sequence[str], sweep: str) -> list[str]:
    """Return a job's overrides for its process, in which `runs` is the sweep's folder and a run it reads has a path.

    A training tells W&B of itself, in the group of the sweep unless it has one.
    """
    kept = [o for o in overrides if o.partition("=")[0].lstrip("+~") not in ("name", "runs", "resume")]
    config = run.config
    resume = config.resume
    if config.mode.name in READS_A_RUN:
        resume = resume or config.name or "latest"
    if resume is not None:
        kept.append(f"resume={_quoted(find_run(Path(config.runs), resume).resolve())}")
    if config.mode.name == "train" and config.tracking.group is None:
        kept.append(f"tracking.group={sweep}")
    return kept


def _flags(hydra: Any) -> list[str]:
    """Return the flags by which the configuration was found, for another process to find it by."""
    flags = []
    for source in hydra.runtime.config_sources:
        if source.provider == "command-line":
            flags += ["--config-dir", source.path]
        elif source.provider == "main" and Path(source.path) != conf_dir():
            flags += ["--config-path", source.path]
    name = hydra.job.config_name
    return flags if name in (None, "train") else [*flags, "--config-name", name]


def _quoted(path: Path) -> str:
    escaped = str(path).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
