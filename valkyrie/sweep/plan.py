"""Plans trials before any process starts. Does not import JAX.

A plan has the trial's key, name, run and time limit, or the reason why it is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from valkyrie.checksums import digest
from valkyrie.config.modes import MODES, ModeConfig, Needs
from valkyrie.config.run import Run
from valkyrie.config.saved import SAVED_RUN, SETTINGS_VARIABLE
from valkyrie.hardware.platforms import get_platform
from valkyrie.paths import conf_dir
from valkyrie.problems import Problem
from valkyrie.processes.child import module_command
from valkyrie.runs.folder import RUN_FILE, find_run, package_versions
from valkyrie.runs.layout_record import LayoutRecord
from valkyrie.search.compile.cache import package_digest
from valkyrie.sweep.composer import search_path
from valkyrie.sweep.names import folder_name, trial_key, trial_name
from valkyrie.sweep.results import OUTCOME_FILE, Outcome
from valkyrie.sweep.tracking import wandb_run_id
from valkyrie.sweep.trial import Status, Trial
from valkyrie.train.devices import machine_problems


@dataclass(frozen=True)
class SweepContext:
    """Settings shared by all trials of a sweep.

    Args:
        folder: Folder of the sweep.
        flags: Command-line flags and overrides that let another process find the same configuration files.
        environment: Environment variables to set in the processes of the trials.
    """

    folder: Path
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def from_hydra(hydra: Any) -> SweepContext:
        """Return the context of a multirun, given the `hydra` node of its configuration.

        Leaves `environment` empty: it may depend on `hydra.job.num`, so `job_environment` reads it for each job.
        """
        return SweepContext(Path(hydra.sweep.dir), _config_flags(hydra))


def job_environment(hydra: Any) -> dict[str, str]:
    """Return the environment variables of a job (`hydra.job.env_set`), given the `hydra` node of its configuration."""
    return {str(key): str(value) for key, value in hydra.job.env_set.items()}


@dataclass(frozen=True)
class TrialPlan:
    """A trial before it runs.

    Args:
        key: Digest that identifies the trial, see `trial_key`.
        name: Name of the trial's folder.
        stage: Name of the mode.
        folder: Folder of the sweep.
        overrides: Command-line overrides, for the trial's record.
        about: The layout, for the trial's record, or None if the configuration does not compose.
        refusal: The reason why the trial cannot run, or None if it can.
        problems: Problems of the run.
        run: The run that the trial's process executes. May be None if the trial is refused.
        environment: Environment variables to set in the trial's process.
        limit_s: Time limit of the trial's process in seconds, or None for no limit.
        retry: Whether to repeat the trial if an earlier attempt failed, was killed or timed out.
        files: Files that the run writes in addition to its results.
        values: Settings that determine what a step computes, for the trial's record.
        flags: Command-line flags and overrides that locate the configuration, for the trial's record.
    """

    key: str
    name: str
    stage: str
    folder: Path
    overrides: tuple[str, ...]
    about: LayoutRecord | None
    refusal: str | None = None
    problems: tuple[Problem, ...] = ()
    run: Run | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    limit_s: float | None = None
    retry: bool = False
    files: tuple[str, ...] = ()
    values: dict[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()

    @property
    def mode(self) -> type[ModeConfig]:
        """Config class of the trial's mode."""
        return MODES.config_class(self.stage)

    @property
    def trial_folder(self) -> Path:
        """The run folder of the trial."""
        return self.folder / self.name

    @property
    def command(self) -> tuple[str, ...]:
        """The command that starts the trial's process, which reads `run.yaml` in the trial's folder."""
        return module_command("valkyrie.sweep.child", str(self.trial_folder))

    def write(self) -> None:
        """Write `run.yaml` into the trial's folder, and remove `outcome.json` and JSON results of earlier attempts."""
        folder = self.trial_folder
        for name in (OUTCOME_FILE, self.mode.results or OUTCOME_FILE):
            if name.endswith(".json"):
                (folder / name).unlink(missing_ok=True)
        assert self.run is not None, "a refused trial has no process"
        run = self.run
        if self.mode.tracked:  # the training and the sweep report to the same W&B run
            tracking = replace(run.config.tracking, id=wandb_run_id(run.config.tracking, self.folder, self.key))
            run = run.changed(tracking=tracking)
        run.save(folder / RUN_FILE)

    def to_trial(self, outcome: Outcome, start_timestamp: str, wall_s: float) -> Trial:
        """Return the record of this trial after it has ended.

        Args:
            outcome: How the trial ended.
            start_timestamp: UTC time in ISO 8601.
            wall_s: Seconds that the trial's process ran.
        """
        return Trial(
            key=self.key,
            name=self.name,
            sweep=self.folder.resolve().name,
            stage=self.stage,
            status=outcome.status,
            reason=outcome.reason,
            overrides=list(self.overrides),
            about=self.about,
            started=start_timestamp,
            wall_s=round(wall_s, 3),
            folder=None if outcome.status is Status.refused and not wall_s else self.name,
            results=outcome.results,
            values=self.values,
            flags=list(self.flags),
            problems=outcome.problems,
        )

    def is_settled_by(self, trial: Trial | None) -> bool:
        """Return whether `trial`, an earlier record of this trial, makes a new run unnecessary. False if it is None.

        Refused trials are always checked again, because the machine may have changed. Predictions are repeated if the
        code or the compiler has changed, and trials that lack a requested file are repeated. Trials that did not fit
        are repeated with `force=true`, and other trials without a result with `trial.retry=true`. Trials of modes
        without results are always repeated.
        """
        if trial is None or trial.status is Status.refused or self.mode.results is None:
            return False
        predictor_digests = [about and about.predicted_by for about in (trial.about, self.about)]
        if predictor_digests[0] != predictor_digests[1]:
            return False
        if trial.status is Status.ok and not all((self.trial_folder / name).exists() for name in self.files):
            return False
        if trial.status is Status.does_not_fit:
            return self.run is None or not self.run.config.force
        return not self.retry or trial.status is Status.ok


def plan_run(
    run: Run, sweep: SweepContext, overrides: Sequence[str], problems: Sequence[Problem] | None = None
) -> TrialPlan:
    """Return the plan for the trial of a run. The plan is refused if the run is illegal or cannot run here.

    Args:
        run: The run of the trial.
        sweep: The sweep it belongs to.
        overrides: The overrides to store in its record.
        problems: Problems of the run, or None to search for them here.

    Raises:
        ValueError: The run sets `resume`, but its mode does not read a trained run.
    """
    config = run.config
    problems = run.problems() if problems is None else problems
    mode, key = config.mode, trial_key(run)
    if config.resume is not None and not mode.reads_run:
        raise ValueError(_resume_refusal(config.resume, mode.name))
    about = run.request_record() if problems else run.layout_record()
    plan = TrialPlan(
        key=key,
        name=trial_name(run, key, about.layout),
        stage=mode.name,
        folder=sweep.folder,
        overrides=tuple(overrides),
        about=about,
        refusal=" ".join(map(str, problems)) or None,
        problems=tuple(problems),
        values=run.values(),
        flags=sweep.flags,
    )
    if problems:
        return plan
    refusals, resume, group = _missing_requirements(run), config.resume, config.tracking.group
    if mode.reads_run:
        try:
            resume = str(find_run(Path(config.runs), resume or config.name or "latest").resolve())
        except ValueError as error:  # there is no such trained run
            return replace(plan, refusal=" ".join([*refusals, str(error)]))
    if mode.tracked and group is None:  # a training run reports to W&B itself: put it in the group of the sweep
        group = folder_name(sweep.folder.resolve().name)
    tracking = replace(config.tracking, group=group)
    return replace(
        plan,
        about=replace(about, predicted_by=_predictor_digest(run) if mode.predicts else None),
        refusal=" ".join(refusals) or None,
        run=run.changed(runs=str(sweep.folder), name=plan.name, resume=resume, tracking=tracking),
        environment=sweep.environment,
        limit_s=mode.limit_s() if config.trial.limit_s is None else config.trial.limit_s,
        retry=config.trial.retry,
        files=mode.requested_files(),
    )


def refused_plan(error: ValueError, mode: str, sweep: SweepContext, overrides: Sequence[str]) -> TrialPlan:
    """Return a refused plan for a job with an invalid configuration, with the error as the reason."""
    key = digest(sorted(overrides))[:16]
    name = f"{folder_name(mode)}-{key[:6]}"
    return TrialPlan(key, name, mode, sweep.folder, tuple(overrides), None, str(error), flags=sweep.flags)


def _config_flags(hydra: Any) -> tuple[str, ...]:
    flags = []
    for source in hydra.runtime.config_sources:
        if source.provider == "command-line":
            flags += ["--config-dir", source.path]
        elif source.provider == "main" and Path(source.path) != conf_dir():
            flags += ["--config-path", source.path]
    name = hydra.job.config_name
    if SETTINGS_VARIABLE in hydra.job.env_set:
        file = Path(hydra.job.env_set[SETTINGS_VARIABLE])
        flags += ["--config-path", str(file.parent), "--config-name", file.stem]
    elif name not in (None, "train", SAVED_RUN):
        flags += ["--config-name", name]
    return (*flags, *search_path(hydra))


def _missing_requirements(run: Run) -> list[str]:
    """Return an error message for each requirement of the run's mode (compiler or devices) that this machine lacks.

    Does not initialize JAX.
    """
    needs, target = run.config.mode.needs, run.config.target
    if needs is Needs.compiler:
        missing = get_platform(target.platform).compile_refusal(target, run.config.precision.compute.value)
        return [missing] if missing else []
    return [str(problem) for problem in machine_problems(run)] if needs is Needs.devices else []


def _predictor_digest(run: Run) -> str:
    """Return a digest of the package versions and of the code that a prediction depends on."""
    return digest([package_versions(), package_digest(run)])[:12]


def _resume_refusal(resume: str, mode: str) -> str:
    """Return the error message for `resume` in a multirun, where all trials would write to the folder of that run."""
    return (
        f"resume={resume}: with -m and mode={mode}, all trials would write to the folder of that run. To continue a "
        "sweep, repeat it without resume=: it skips finished trials. To continue the run, omit -m: "
        f"valkyrie-train resume={resume}."
    )
