"""Hydra finds `hydra/launcher=trials` here. Thin on purpose: every Hydra program of an environment imports it."""

from collections.abc import Sequence
from typing import Any

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class TrialLauncher(Launcher):
    """Carries trials out, each in a process of its own, `jobs` at a time."""

    def __init__(self, jobs: int = 1) -> None:
        self.jobs = jobs
        self.config: Any = None
        self.hydra_context: Any = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep what Hydra gives. The task function is `run_trial`, whose parts the launcher uses itself."""
        self.config, self.hydra_context = config, hydra_context

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Return what each job came to."""
        from valkyrie.sweep.launcher import launch

        return launch(self.hydra_context, self.config, job_overrides, initial_job_idx, self.jobs)
