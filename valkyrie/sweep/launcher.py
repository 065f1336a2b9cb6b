"""`hydra/launcher=trials`, and the task function that other launchers call for a job of a multirun."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus, configure_log, setup_globals
from hydra.types import HydraContext
from omegaconf import DictConfig, open_dict

from valkyrie.config.arguments import parse_run
from valkyrie.config.modes import get_mode, reads_run
from valkyrie.config.run import Run
from valkyrie.problems import suggest
from valkyrie.processes.interrupt import signals_as_exceptions
from valkyrie.runs.folder import key_values
from valkyrie.sweep.composer import Composer
from valkyrie.sweep.end import SweepEnd, end_of
from valkyrie.sweep.members import members
from valkyrie.sweep.plan import SweepContext, TrialPlan, job_environment, plan_run, plan_wrong
from valkyrie.sweep.process import TrialProcess
from valkyrie.sweep.run import carry_out
from valkyrie.sweep.screen import Lines, LiveScreen
from valkyrie.sweep.trial import Trial
from valkyrie.train.screen import make_console

SIDE_BY_SIDE = (
    "MEASURED SIDE BY SIDE: hydra.launcher.jobs={jobs} trials at a time share this machine and disturb each other's "
    "times. For times to compare, leave hydra.launcher.jobs out."
)
"""Warning for timed trials that run at the same time."""


def run_trial(config: DictConfig) -> float:
    """Run and record the job that Hydra has composed. Returns tokens/s/chip, or 0.0 if unknown.

    This is the task function of a multirun, in any process that a launcher calls it in. Raises as `carry_out`.
    """
    hydra = HydraConfig.get()
    sweep = replace(SweepContext.from_hydra(hydra), environment=job_environment(hydra))
    overrides = [str(override) for override in hydra.overrides.task]
    try:
        run = _trained_run(overrides, sweep) or Run.from_config(config)
    except ValueError as error:
        plan = plan_wrong(error, str(config.mode.name), sweep, overrides)
    else:
        plan = plan_run(run, sweep, overrides)
    with signals_as_exceptions():
        return carry_out([plan], 1, Lines())[plan.key].results.objective


def launch(
    context: HydraContext,
    config: DictConfig,
    job_overrides: Sequence[Sequence[str]],
    first: int,
    jobs: int,
    runs: Sequence[Run] | None = None,
) -> list[JobReturn]:
    """Run jobs and return their results, with tokens/s/chip as the return value.

    `runs` are the composed runs of the jobs, or None. Raises ValueError if `jobs` is below 1, and KeyboardInterrupt
    after Ctrl-C; finished trials are then recorded.
    """
    end = end_of(context)
    if end is not None:
        end.has_all()
    if not job_overrides:
        raise ValueError(_nothing_to_run(config, context))
    if jobs < 1:
        raise ValueError(f"hydra.launcher.jobs={jobs}: at least 1 trial at a time is needed.")
    if jobs > 1 and members() is not None:
        raise ValueError(f"hydra.launcher.jobs={jobs}: on several hosts trials take turns. Leave it out.")
    setup_globals()
    configure_log(config.hydra.hydra_logging, config.hydra.verbose)
    console, composer = make_console(), Composer(config, context.config_loader)
    with console.status(f"planning {len(job_overrides)} trials"):
        plans = [
            _plan(composer, overrides, first + i, runs[i] if runs else None)
            for i, overrides in enumerate(job_overrides)
        ]
    name = plans[0].folder.resolve().name if plans else ""
    total = len(plans)
    if min(jobs, total) > 1 and any(plan.mode.timed for plan in plans):
        console.print(SIDE_BY_SIDE.format(jobs=jobs), style="bold yellow", highlight=False)
    screen = LiveScreen(console, total, jobs, name) if console.is_terminal else Lines(console, total)
    with signals_as_exceptions(), screen:
        trials = carry_out(plans, jobs, _Both(screen, end))
    values = [trials[plan.key].results.objective for plan in plans]
    return [_returned(overrides, value) for overrides, value in zip(job_overrides, values, strict=True)]


class _Both:
    """Passes events to the screen and to the end of the sweep."""

    def __init__(self, screen: Lines, end: SweepEnd | None) -> None:
        self._screen, self._end = screen, end

    def running(self, processes: Sequence[TrialProcess], waiting: int) -> None:
        self._screen.running(processes, waiting)

    def ended(self, plan: TrialPlan, trial: Trial, *, earlier: bool) -> None:
        self._screen.ended(plan, trial, earlier=earlier)
        if self._end is not None:
            self._end.add(trial)


def _nothing_to_run(config: DictConfig, context: HydraContext) -> str:
    """Return the message for a sweep without trials, with the choice nearest to a glob that matches none."""
    for override in config.hydra.overrides.task:
        if match := re.fullmatch(r"([\w/]+)=glob\((.*)\)", override):
            choices = context.config_loader.get_group_options(match[1])
            near = suggest(match[2].strip("*'\""), choices, 0.3)
            hint = f" Did you mean {match[1]}={near}?" if near else ""
            return f"{override} matches no choice.{hint} Choices: {', '.join(choices)}."
    return "nothing to run: the sweep has no trial."


def _plan(composer: Composer, overrides: Sequence[str], number: int, run: Run | None) -> TrialPlan:
    config = composer.config
    with open_dict(config):
        config.hydra.job.id = config.hydra.job.num = number
    sweep = replace(SweepContext.from_hydra(config.hydra), environment=job_environment(config.hydra))
    try:
        run = run or _trained_run(overrides, sweep) or composer.run(overrides)
    except ValueError as error:
        mode = key_values(overrides).get("mode")
        mode = mode if mode is not None and get_mode(mode) else str(config.mode.name)
        return plan_wrong(error, mode, sweep, overrides)
    return plan_run(run, sweep, overrides)


def _trained_run(overrides: Sequence[str], sweep: SweepContext) -> Run | None:
    """Return the run of a job that names a trained run to read, or None for other jobs."""
    given = key_values(overrides)
    if not reads_run(given.get("mode")) or not {"resume", "name"} & given.keys():
        return None
    return parse_run([*sweep.flags, *overrides])


def _returned(overrides: Sequence[str], value: float) -> JobReturn:
    returned = JobReturn(overrides=list(overrides), status=JobStatus.COMPLETED)
    returned.return_value = value
    return returned
