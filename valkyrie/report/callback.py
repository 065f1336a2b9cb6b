"""Decides when a multirun's page is written: at its end, in the process that the user started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from valkyrie.sweep.names import NUMBERED
from valkyrie.sweep.trial import Status, TrialLog


class SweepPage(Callback):
    """Writes `report.html` into the sweep's folder, unless no trial there has numbers."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Write the page."""
        folder = Path(config.hydra.sweep.dir)
        if any(t.stage in NUMBERED and t.status is not Status.refused for t in TrialLog(folder).read()):
            from valkyrie.report.page import write_report

            write_report(folder)
