"""Decides what a job of a multirun is before anything starts: its key, its name, its command, or why it is refused."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from valkyrie import search
from valkyrie.parallel.topology import libtpu_missing
from valkyrie.paths import conf_dir
from valkyrie.run import Run
from valkyrie.search.child import MODULE, TEXT
from valkyrie.search.compile import source_digest
from valkyrie.search.modes import TRACE
from valkyrie.sweep.names import (
    FULL_ERROR,
    GIVEN_FULL_ERROR,
    NUMBERED,
    READS_A_RUN,
    folder_name,
    trial_key,
    trial_name,
    unread_key,
    without_place,
)
from valkyrie.sweep.trial import Status, Trial
from valkyrie.train.devices import missing_devices
from valkyrie.train.folder import find_run, key_value, versions

LIMIT_S = 3600.0
"""The seconds a trial may take where `trial.limit_s` does not say; a training may take as long as it needs."""
MARGIN_S = 300.0
"""The seconds a trial has beyond the compiler's own limit, to start and to tell of it."""

PREDICTED_BY = "predicted_by"
"""The key of `Trial.about` that tells a prediction from one of other code or another compiler."""


@dataclass(frozen=True)
class Plan:
    """A trial before it runs. `refusal` says why it cannot; `folder` is the sweep's, `command` its process.

    `leaves` are files that it was asked to leave in its folder beside its numbers; `values` and `flags` are those of
    its record.
    """

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
    leaves: tuple[str, ...] = ()
    values: dict[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()

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
            values=self.values,
            flags=list(self.flags),
        )

    def settled_by(self, trial: Trial | None) -> bool:
        """Return whether an earlier record leaves nothing to do.

        What was refused is looked at again, for the machine may have changed: at once where this plan refuses it, else
        by another process. What other code or another compiler has predicted is predicted again.
        """
        if trial is None or self.stage not in NUMBERED or trial.status is Status.refused:
            return False
        if trial.about.get(PREDICTED_BY) != self.about.get(PREDICTED_BY):
            return False
        if trial.status is Status.ok and not all((self.trial_folder / name).exists() for name in self.leaves):
            return False
        return not self.retry or trial.status in (Status.ok, Status.does_not_fit)


def plan_trial(config: DictConfig) -> Plan:
    """Return the plan of the job that Hydra has composed; a wrong or illegal run comes back as a refused plan.

    ValueError where the whole multirun asks for what only one run can do.
    """
    hydra = HydraConfig.get()
    overrides = tuple(str(o) for o in hydra.overrides.task)
    try:
        run = Run.from_config(config)
    except ValueError as error:
        key, stage = unread_key(overrides), str(config.mode.name)
        name = f"{folder_name(stage)}-{key[:6]}"
        return Plan(key, name, stage, Path(hydra.sweep.dir), overrides, {}, str(error), flags=config_flags(hydra))
    return plan_run(run, hydra, overrides)


def plan_run(run: Run, hydra: Any, overrides: Sequence[str]) -> Plan:
    """Return the plan of a job's run, an illegal one refused; `hydra` is the configuration's part of that name.

    ValueError where the whole multirun asks for what only one run can do.
    """
    config, folder = run.config, Path(hydra.sweep.dir)
    if config.resume is not None and config.mode.name not in READS_A_RUN:
        raise ValueError(_not_in_a_multirun(config.resume, config.mode.name))
    if illegal := run.problems():
        return illegal_plan(run, illegal, folder, overrides, config_flags(hydra))
    stage, key = config.mode.name, trial_key(run)
    refusals, own, about, flags = _missing(run), [], run.about(), config_flags(hydra)
    name = trial_name(run, key, about["layout"])
    try:
        own = _own_overrides(run, overrides, folder_name(folder.resolve().name))
    except ValueError as error:
        refusals.append(str(error))
    return Plan(
        key=key,
        name=name,
        stage=stage,
        folder=folder,
        overrides=tuple(overrides),
        about=about | ({PREDICTED_BY: _predictor()} if stage == "compile" else {}),
        refusal=" ".join(refusals) or None,
        command=(*child_program(), *flags, *own, "hydra.mode=RUN", f"runs={_quoted(folder)}", f"name={name}"),
        environment={str(k): str(v) for k, v in hydra.job.env_set.items()},
        limit_s=_limit_s(run),
        retry=config.trial.retry,
        leaves=_leaves(run),
        values=run.values(),
        flags=flags,
    )


def illegal_plan(
    run: Run, problems: Sequence[str], folder: Path, overrides: Sequence[str], flags: tuple[str, ...]
) -> Plan:
    """Return the plan of a run that is refused for its problems, in a sweep's folder."""
    key = trial_key(run)
    return Plan(
        key=key,
        name=trial_name(run, key),
        stage=run.config.mode.name,
        folder=folder,
        overrides=tuple(overrides),
        about=run.asked(),
        refusal=" ".join(problems),
        values=run.values(),
        flags=flags,
    )


def child_program() -> tuple[str, ...]:
    """Return the program of a trial's process."""
    return (sys.executable, "-m", "valkyrie.cli.train")


def child_environment(plan: Plan) -> dict[str, str]:
    """Return the environment of a trial's process: the user's, and the job's own."""
    kept = {k: v for k, v in os.environ.items() if k not in (FULL_ERROR, GIVEN_FULL_ERROR)}
    if GIVEN_FULL_ERROR in os.environ:
        kept[FULL_ERROR] = os.environ[GIVEN_FULL_ERROR]
    return kept | plan.environment


def _missing(run: Run) -> list[str]:
    """Return what this machine lacks for a legal run, as far as files tell."""
    stage = run.config.mode.name
    if stage == "compile":
        missing = libtpu_missing(run.config.target)
        return [missing] if missing else []
    return [] if stage == "show" else missing_devices(run)


def _limit_s(run: Run) -> float | None:
    mode, given = run.config.mode, run.config.trial.limit_s
    if given is not None or mode.name == "train":
        return given
    return max(LIMIT_S, mode.time_limit_s + MARGIN_S) if mode.name == "compile" else LIMIT_S


def _leaves(run: Run) -> tuple[str, ...]:
    mode = run.config.mode
    if mode.name == "compile" and mode.hlo:
        return (MODULE, TEXT)
    return (TRACE,) if mode.name == "measure" and mode.trace else ()


@cache
def _predictor() -> str:
    """Return a digest of what decides a prediction beside what is asked: versions, the program, and the replay."""
    digest = hashlib.sha256(json.dumps([versions(), source_digest()]).encode())
    for file in sorted(Path(search.__path__[0]).glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def _not_in_a_multirun(resume: str, mode: str) -> str:
    """Return the refusal of trials that would all work in the folder of the one run that they continue."""
    return (
        f"resume={resume}: a multirun with mode={mode} would carry out every trial in the folder of that run, and "
        "damage it. Leave resume out: each trial has a folder of its own, and what is done already is not done again. "
        f"To continue the run, leave out -m: valkyrie-train resume={resume}. Only mode=eval and mode=generate read one "
        "run in many trials."
    )


def _own_overrides(run: Run, overrides: Sequence[str], sweep: str) -> list[str]:
    """Return a job's overrides for its process, in which `runs` is the sweep's folder and a run it reads has a path.

    A training tells W&B of itself, in the group of the sweep unless it has one.
    """
    kept = without_place(overrides)
    config = run.config
    if config.mode.name in READS_A_RUN:
        resume = config.resume or config.name or "latest"
        kept.append(f"resume={_quoted(find_run(Path(config.runs), resume).resolve())}")
    if config.mode.name == "train" and config.tracking.group is None:
        kept.append(f"tracking.group={sweep}")
    return kept


def config_flags(hydra: Any) -> tuple[str, ...]:
    """Return the flags and overrides by which the configuration was found, for another process to find it by."""
    flags = []
    for source in hydra.runtime.config_sources:
        if source.provider == "command-line":
            flags += ["--config-dir", source.path]
        elif source.provider == "main" and Path(source.path) != conf_dir():
            flags += ["--config-path", source.path]
    name = hydra.job.config_name
    flags += [] if name in (None, "train") else ["--config-name", name]
    given = OmegaConf.to_container(hydra.overrides.hydra, resolve=False)
    assert isinstance(given, list)
    return (*flags, *(o for o in map(str, given) if key_value(o)[0] == "hydra.searchpath"))


def _quoted(path: Path) -> str:
    escaped = str(path).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
