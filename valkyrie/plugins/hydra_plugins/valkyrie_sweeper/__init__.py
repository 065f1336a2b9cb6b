"""The Hydra plugins for `hydra/sweeper=`.

Every Hydra program in the environment imports this module, so Valkyrie itself is imported only inside functions.
"""

from collections.abc import Sequence

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper  # Hydra's own sweeper has no public name
from hydra.core.override_parser.types import Override
from hydra.core.utils import JobReturn
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class GridSweeper(BasicSweeper):
    """Runs every combination of the comma-separated values on the command line, like Hydra's basic sweeper.

    The basic sweeper composes every job before it launches the first, to find mistakes early. This sweeper skips that
    step for `TrialLauncher`, which checks the jobs itself and composes once for many of them.
    """

    @staticmethod
    def split_arguments(overrides: list[Override], max_batch_size: int | None) -> list[list[list[str]]]:
        """Return the arguments of every job. Raises ValueError for an interval."""
        from valkyrie.sweep.space import refuse_interval

        for override in overrides:
            refuse_interval(override)
        return BasicSweeper.split_arguments(overrides, max_batch_size)

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Compose every job and raise its errors. Does nothing for a `TrialLauncher`, which checks jobs itself."""
        from hydra_plugins.valkyrie_launcher import TrialLauncher

        if not isinstance(self.launcher, TrialLauncher):
            super().validate_batch_is_legal(batch)


class LayoutSweeper(Sweeper):
    """Enumerates the legal layouts of a space (`conf/hydra/sweeper/layouts.yaml`) and hands them to the launcher."""

    def __init__(self, space: DictConfig, limit: int | None) -> None:
        self.space = space
        self.limit = limit

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Create the launcher that the configuration names."""
        from hydra.core.plugins import Plugins

        self.config = config
        self.hydra_context = hydra_context
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> list[Sequence[JobReturn]]:
        """Launch the legal layouts and return their results."""
        from valkyrie.sweep.layouts import sweep_layouts

        assert self.config is not None and self.hydra_context is not None and self.launcher is not None
        return sweep_layouts(self.hydra_context, self.config, arguments, self.space, self.limit, self.launcher)
