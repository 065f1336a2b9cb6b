"""Hydra finds `hydra/sweeper=` here. Thin on purpose: every Hydra program of an environment imports it."""

from collections.abc import Sequence

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper  # Hydra's own sweeper has no public name
from hydra.core.utils import JobReturn
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class GridSweeper(BasicSweeper):
    """Every combination of the lists on the command line, as Hydra's own sweeper, with composing left to our launcher.

    Hydra composes each job before the first is launched, to find mistakes early. So does our launcher, of which one
    composing serves many jobs.
    """

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Raise what composing a job raises, unless the launcher will before it starts any."""
        from hydra_plugins.valkyrie_launcher import TrialLauncher

        if not isinstance(self.launcher, TrialLauncher):
            super().validate_batch_is_legal(batch)


class LayoutSweeper(Sweeper):
    """Enumerates the legal layouts of a space (`conf/hydra/sweeper/layouts.yaml`) and hands them to the launcher."""

    def __init__(self, space: DictConfig, limit: int | None) -> None:
        self.space = space
        self.limit = limit

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Make the launcher that the configuration names."""
        from hydra.core.plugins import Plugins

        self.config = config
        self.hydra_context = hydra_context
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> list[Sequence[JobReturn]]:
        """Return what the launcher returned for the legal cells."""
        from valkyrie.sweep.layouts import sweep_layouts

        assert self.config is not None and self.hydra_context is not None and self.launcher is not None
        return sweep_layouts(self.hydra_context, self.config, arguments, self.space, self.limit, self.launcher)
