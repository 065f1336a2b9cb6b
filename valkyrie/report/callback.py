"""Hydra callback that writes the page of a multirun at its end, in the process that the user started."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from valkyrie.config.modes import has_results
from valkyrie.runs.folder import command_name
from valkyrie.sweep.trial import PAGE, Status, TrialLog


class SweepPage(Callback):
    """Writes `report.html` into the sweep's folder, unless no trial there has numbers."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Write the page. On failure, remove the stale page and report the error."""
        folder = Path(config.hydra.sweep.dir)
        if not any(has_results(t.stage) and t.status is not Status.refused for t in TrialLog(folder).read()):
            return
        try:
            from valkyrie.report.page import write_report

            write_report(folder)
        except Exception as error:  # Hydra would only warn, and the stale page would remain
            problem = f"the page could not be written ({type(error).__name__}: {error})"
            print(
                f"{problem}{_remove(folder / PAGE)}. To try again: {command_name('valkyrie-report')} {folder}",
                file=sys.stderr,
            )


def _remove(page: Path) -> str:
    """Remove the stale page and return a clause that reports it."""
    if not page.exists():
        return ""
    try:
        page.unlink()
    except OSError:
        return f"; the earlier {page} remains and lacks the newest trials"
    return "; the earlier page, which lacks the newest trials, was removed"
