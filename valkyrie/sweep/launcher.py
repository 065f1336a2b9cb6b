"""The launcher `hydra/launcher=trials`, and the task function that other launchers call for each job."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus, configure_log, setup_globals
from hydra.types import HydraContext
from omegaconf import DictConfig, open_dict

from valkyrie.config.arguments import parse_run
from valkyrie.config.modes import get_mode, reads_run
from valkyrie.config.run import Run
from valkyrie.config.unread import mode_notes
from valkyrie.problems import suggest
from valkyrie.processes.interrupt import signals_as_exceptions
from valkyrie.runs.folder import key_values
from valkyrie.sweep.composer import Composer
from valkyrie.sweep.end import SweepEnd, find_sweep_end
from valkyrie.sweep.members import current_members
from valkyrie.sweep.plan import SweepContext, TrialPlan, job_environment, plan_run, refused_plan
from valkyrie.sweep.process import TrialProcess
from valkyrie.sweep.run import run_trials
from valkyrie.sweep.screen import LineScreen, LiveScreen
from valkyrie.sweep.trial import Trial
from valkyrie.train.screen import make_console
from valkyrie.units import count_text

CONCURRENCY_WARNING = (
    "CONCURRENT MEASUREMENTS: hydra.launcher.jobs={jobs} runs {jobs} trials at a time on this machine, so they slow "
    "each other down. For comparable times, omit hydra.launcher.jobs."
)
"""Warning printed before a sweep that runs several timed trials at once."""
_REPORT_EVERY_S = 10.0
"""Seconds between progress lines while a long sweep is planned and the output is not a terminal."""


def run_trial(config: DictConfig) -> float:
    """Run and record the job that Hydra has composed. Returns tokens/s/chip, or 0.0 if unknown.

    This is the task function of a multirun. Launchers may call it in any process. Raises the errors of `plan_run` and
    `run_trials`. Other ValueErrors of the configuration are recorded as a refused trial.
    """
    hydra = HydraConfig.get()
    sweep = replace(SweepContext.from_hydra(hydra), environment=job_environment(hydra))
    overrides = [str(override) for override in hydra.overrides.task]
    try:
        run = _compose_from_trained_run(overrides, sweep) or Run.from_config(config)
    except ValueError as error:
        plan = refused_plan(error, str(config.mode.name), sweep, overrides)
    else:
        plan = plan_run(run, sweep, overrides)
    with signals_as_exceptions():
        return run_trials([plan], 1, LineScreen())[plan.key].results.objective


def launch(
    context: HydraContext,
    config: DictConfig,
    job_overrides: Sequence[Sequence[str]],
    first_number: int,
    parallel_jobs: int,
    runs: Sequence[Run] | None = None,
) -> list[JobReturn]:
    """Run jobs and return a `JobReturn` for each. Its `return_value` is the trial's tokens/s/chip, or 0.0 if unknown.

    Args:
        context: Hydra's context, with its callbacks and config loader.
        config: The configuration of the multirun.
        job_overrides: The overrides of each job.
        first_number: Hydra's number of the first job.
        parallel_jobs: Number of trials to run at the same time.
        runs: The composed run of each job, or None to compose them here.

    Raises:
        ValueError: There is no job, `parallel_jobs` is below 1, or above 1 in a multirun on several hosts, or a job
            sets `resume` in a mode that would continue that run.
        OSError: A record cannot be written.
        KeyboardInterrupt: The user pressed Ctrl-C. Finished trials are recorded.
    """
    sweep_end = find_sweep_end(context)
    if sweep_end is not None:
        sweep_end.expect_all_trials()
    if not job_overrides:
        raise ValueError(_no_trials_message(config, context))
    if parallel_jobs < 1:
        raise ValueError(f"hydra.launcher.jobs={parallel_jobs}: must be at least 1.")
    if parallel_jobs > 1 and current_members() is not None:
        raise ValueError(
            f"hydra.launcher.jobs={parallel_jobs}: a sweep on several hosts runs one trial at a time. Omit "
            "hydra.launcher.jobs."
        )
    setup_globals()
    configure_log(config.hydra.hydra_logging, config.hydra.verbose)
    console, composer = make_console(), Composer(config, context.config_loader)
    plans: list[TrialPlan] = []
    total = len(job_overrides)
    last_report = time.monotonic()
    planning = f"planning {count_text(total, 'trial')}"
    with console.status(planning) as status:
        for i, overrides in enumerate(job_overrides):
            plans.append(_plan_job(composer, overrides, first_number + i, runs[i] if runs else None))
            progress = f"{planning}: {i + 1} done"
            status.update(progress)
            if not console.is_terminal and time.monotonic() - last_report > _REPORT_EVERY_S:
                console.print(progress, highlight=False)
                last_report = time.monotonic()
    arguments = [str(override) for override in config.hydra.overrides.task]
    notes = [note for plan in plans if plan.run is not None for note in mode_notes(plan.run.config.mode, arguments)]
    for note in dict.fromkeys(notes) if first_number == 0 else ():  # Optuna launches once per batch
        print(f"note: {note}", file=sys.stderr)
    name = plans[0].folder.resolve().name if plans else ""
    if min(parallel_jobs, total) > 1 and any(plan.mode.timed for plan in plans):
        console.print(CONCURRENCY_WARNING.format(jobs=parallel_jobs), style="bold yellow", highlight=False)
    screen = LiveScreen(console, total, parallel_jobs, name) if console.is_terminal else LineScreen(console, total)
    with signals_as_exceptions(), screen:
        trials = run_trials(plans, parallel_jobs, _ScreenAndSweepEnd(screen, sweep_end))
    values = [trials[plan.key].results.objective for plan in plans]
    return [_job_return(overrides, value) for overrides, value in zip(job_overrides, values, strict=True)]


class _ScreenAndSweepEnd:
    """Passes progress to the screen, and ended trials also to the `SweepEnd` callback."""

    def __init__(self, screen: LineScreen, sweep_end: SweepEnd | None) -> None:
        self._screen, self._sweep_end = screen, sweep_end

    def show_running(self, processes: Sequence[TrialProcess], waiting_count: int) -> None:
        self._screen.show_running(processes, waiting_count)

    def show_ended(self, plan: TrialPlan, trial: Trial, *, recorded_earlier: bool) -> None:
        self._screen.show_ended(plan, trial, recorded_earlier=recorded_earlier)
        if self._sweep_end is not None:
            self._sweep_end.add(trial)


def _no_trials_message(config: DictConfig, context: HydraContext) -> str:
    """Return the error message for a sweep without trials. Suggests a choice if a glob matches none."""
    for override in config.hydra.overrides.task:
        if match := re.fullmatch(r"([\w/]+)=glob\((.*)\)", override):
            choices = context.config_loader.get_group_options(match[1])
            nearest = suggest(match[2].strip("*'\""), choices, 0.3)
            hint = f" Did you mean {match[1]}={nearest}?" if nearest else ""
            return f"{override} matches no choice.{hint} Choices: {', '.join(choices)}."
    return "nothing to run: the sweep has no trials."


def _plan_job(composer: Composer, overrides: Sequence[str], number: int, run: Run | None) -> TrialPlan:
    config = composer.config
    with open_dict(config):
        config.hydra.job.id = config.hydra.job.num = number
    sweep = replace(SweepContext.from_hydra(config.hydra), environment=job_environment(config.hydra))
    try:
        run = run or _compose_from_trained_run(overrides, sweep) or composer.compose_run(overrides)
    except ValueError as error:
        mode = key_values(overrides).get("mode")
        mode = mode if mode is not None and get_mode(mode) else str(config.mode.name)
        return refused_plan(error, mode, sweep, overrides)
    return plan_run(run, sweep, overrides)


def _compose_from_trained_run(overrides: Sequence[str], sweep: SweepContext) -> Run | None:
    """Return the run of a job that reads the trained run named by `resume` or `name`, or None for other jobs."""
    values_by_key = key_values(overrides)
    if not reads_run(values_by_key.get("mode")) or not {"resume", "name"} & values_by_key.keys():
        return None
    return parse_run([*sweep.flags, *overrides])


def _job_return(overrides: Sequence[str], value: float) -> JobReturn:
    returned = JobReturn(overrides=list(overrides), status=JobStatus.COMPLETED)
    returned.return_value = value
    return returned
