"""Decides what `hydra/launcher=trials` does: compose every job, carry them out, and hand the objectives back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus, configure_log, setup_globals
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict

from valkyrie.sweep.end import SweepEnd, end_of
from valkyrie.sweep.names import overrides_of_read_run
from valkyrie.sweep.plan import Plan, plan_trial
from valkyrie.sweep.process import TrialProcess
from valkyrie.sweep.results import objective
from valkyrie.sweep.run import carry_out, signals_interrupt
from valkyrie.sweep.screen import Lines, LiveScreen
from valkyrie.sweep.trial import Trial
from valkyrie.train.screen import make_console

SIDE_BY_SIDE = (
    "MEASURED SIDE BY SIDE: hydra.launcher.jobs={jobs} trials at a time share this machine and disturb each other's "
    "times. For times to compare, leave hydra.launcher.jobs out."
)
"""The loud line over a sweep whose times tell of the contention of trials too."""


def launch(
    context: HydraContext, config: DictConfig, job_overrides: Sequence[Sequence[str]], first: int, jobs: int
) -> list[JobReturn]:
    """Return what each job came to, its tokens/s/chip as the return value; ValueError for `jobs` below 1.

    KeyboardInterrupt after Ctrl-C, with everything done so far recorded.
    """
    end = end_of(context)
    if end is not None:
        end.is_given_all()
    if jobs < 1:
        raise ValueError(f"hydra.launcher.jobs={jobs}: at least 1 trial at a time is needed.")
    setup_globals()
    configure_log(config.hydra.hydra_logging, config.hydra.verbose)
    console = make_console()
    with console.status(f"composing {len(job_overrides)} trials"):
        composed = [_composed(context, config, overrides, first + i) for i, overrides in enumerate(job_overrides)]
        plans = [_plan(job) for job in composed]
    name = plans[0].folder.resolve().name if plans else ""
    total = len(plans)
    if min(jobs, total) > 1 and any(plan.stage == "measure" for plan in plans):
        console.print(SIDE_BY_SIDE.format(jobs=jobs), style="bold yellow", highlight=False)
    screen = LiveScreen(console, total, jobs, name) if console.is_terminal else Lines(console, total)
    with signals_interrupt(), screen:
        trials = carry_out(plans, jobs, _Both(screen, end))
    return [_returned(job, trials[plan.key]) for job, plan in zip(composed, plans, strict=True)]


class _Both:
    """Tells the screen and the end of the sweep."""

    def __init__(self, screen: Lines, end: SweepEnd | None) -> None:
        self._screen, self._end = screen, end

    def running(self, processes: Sequence[TrialProcess], waiting: int) -> None:
        self._screen.running(processes, waiting)

    def ended(self, plan: Plan, trial: Trial, *, earlier: bool) -> None:
        self._screen.ended(plan, trial, earlier=earlier)
        if self._end is not None:
            self._end.take(trial)


def _composed(context: HydraContext, config: DictConfig, overrides: Sequence[str], number: int) -> DictConfig:
    job = context.config_loader.load_sweep_config(config, overrides_of_read_run(overrides))
    with open_dict(job):
        job.hydra.job.id = job.hydra.job.num = number
    return job


def _plan(job: DictConfig) -> Plan:
    before = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(job)
    try:
        return plan_trial(job)
    finally:
        HydraConfig.instance().cfg = before


def _returned(job: DictConfig, trial: Trial) -> JobReturn:
    overrides: Any = OmegaConf.to_container(job.hydra.overrides.task)
    task = OmegaConf.masked_copy(job, [str(key) for key in job if key != "hydra"])
    returned = JobReturn(overrides=overrides, cfg=task, status=JobStatus.COMPLETED)
    returned.return_value = objective(trial)
    return returned
