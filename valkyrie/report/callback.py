"""Hydra callback that writes the HTML report of a sweep. Hydra calls it in the launching process, not in the trials."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from valkyrie.config.modes import has_results
from valkyrie.runs.folder import command_name
from valkyrie.sweep.trial import PAGE_FILE, Status, TrialLog


class SweepPage(Callback):
    """Writes `report.html` to the folder of a sweep when its multirun ends.

    Skips the report if every trial was refused or has a mode without a results file.
    """

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Write the report. On failure, print the error and remove the existing report, which is outdated."""
        folder = Path(config.hydra.sweep.dir)
        if not any(has_results(t.stage) and t.status is not Status.refused for t in TrialLog(folder).read()):
            return
        try:
            from valkyrie.report.page import write_report

            write_report(folder)
        except Exception as error:  # Hydra would only warn, and the outdated page would remain
            message = f"the report could not be written ({type(error).__name__}: {error})"
            message += _remove_outdated_page(folder / PAGE_FILE)
            command = f"{command_name('valkyrie-report')} {shlex.quote(str(folder))}"
            print(f"{message}. To try again: {command}", file=sys.stderr)


def _remove_outdated_page(page: Path) -> str:
    """Remove an outdated report. Returns a suffix for the error message, or "" if there was no report."""
    if not page.exists():
        return ""
    try:
        page.unlink()
    except OSError:
        return f"; {page} is outdated and could not be removed"
    return "; the outdated report was removed"
