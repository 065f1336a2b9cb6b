"""Decides what `hydra/launcher=trials` does: compose every job, carry them out, and hand the objectives back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus, configure_log, setup_globals
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict

from valkyrie.run import Run
from valkyrie.sweep.end import SweepEnd, end_of
from valkyrie.sweep.names import NUMBERED, overrides_of_read_run
from valkyrie.sweep.plan import Plan, plan_run, plan_trial
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
    context: HydraContext,
    config: DictConfig,
    job_overrides: Sequence[Sequence[str]],
    first: int,
    jobs: int,
    runs: Mapping[tuple[str, ...], Run],
) -> list[JobReturn]:
    """Return what each job came to, its tokens/s/chip as the return value; ValueError for `jobs` below 1.

    `runs` are those that a sweeper has at hand, by their overrides: composing one takes Hydra a quarter of a second.
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
        made = [
            _planned(context, config, overrides, number, runs.get(tuple(overrides)))
            for number, overrides in enumerate(job_overrides, first)
        ]
    plans = [plan for plan, _ in made]
    name = plans[0].folder.resolve().name if plans else ""
    total = len(plans)
    if min(jobs, total) > 1 and any(plan.stage == "measure" for plan in plans):
        console.print(SIDE_BY_SIDE.format(jobs=jobs), style="bold yellow", highlight=False)
    screen = LiveScreen(console, total, jobs, name) if console.is_terminal else Lines(console, total)
    with signals_interrupt(), screen:
        trials = carry_out(plans, jobs, _Both(screen, end))
    for plan, returned in made:
        returned.return_value = objective(trials[plan.key])
    return [returned for _, returned in made]


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


def _planned(
    context: HydraContext, config: DictConfig, overrides: Sequence[str], number: int, run: Run | None
) -> tuple[Plan, JobReturn]:
    """Return the plan of a job, and what is returned of it; of a run at hand without its configuration."""
    returned = JobReturn(overrides=list(overrides), status=JobStatus.COMPLETED)
    if run is not None and run.config.mode.name in NUMBERED:
        _number(config, number)
        return plan_run(run, config.hydra, overrides), returned
    job = context.config_loader.load_sweep_config(config, overrides_of_read_run(overrides))
    _number(job, number)
    returned.cfg = OmegaConf.masked_copy(job, [str(key) for key in job if key != "hydra"])
    before = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(job)
    try:
        return plan_trial(job), returned
    finally:
        HydraConfig.instance().cfg = before


def _number(config: DictConfig, number: int) -> None:
    with open_dict(config):
        config.hydra.job.id = config.hydra.job.num = number
