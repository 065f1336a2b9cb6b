"""Hydra finds `hydra/sweeper=` here. Thin on purpose: every Hydra program of an environment imports it."""

from collections.abc import Sequence

from hydra.core.utils import JobReturn
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


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
        from valkyrie.sweep.end import end_of
        from valkyrie.sweep.layouts import Sweep

        assert self.config is not None and self.hydra_context is not None and self.launcher is not None
        return Sweep(self.config, self.hydra_context.config_loader, arguments).run(
            self.space, self.limit, self.launcher, end_of(self.hydra_context)
        )
