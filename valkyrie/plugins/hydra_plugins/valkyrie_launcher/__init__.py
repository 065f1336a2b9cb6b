"""The Hydra plugin `hydra/launcher=trials`. It is small because every Hydra program in the environment imports it."""

from collections.abc import Sequence
from typing import Any

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class TrialLauncher(Launcher):
    """Runs each trial in a separate process, `jobs` at a time."""

    def __init__(self, jobs: int = 1) -> None:
        self.jobs = jobs
        self.config: Any = None
        self.hydra_context: Any = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Store Hydra's context and the config. The task function is unused: the launcher runs trials itself."""
        self.config, self.hydra_context = config, hydra_context

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run a trial for each list of overrides and return the results.

        Raises ValueError if `jobs` is not a positive integer, or is above 1 in a multirun on several hosts.
        """
        from valkyrie.sweep.launcher import launch

        if type(self.jobs) is not int:
            raise ValueError(f"hydra.launcher.jobs={self.jobs}: must be a whole number, at least 1.")
        return launch(self.hydra_context, self.config, job_overrides, initial_job_idx, self.jobs)
