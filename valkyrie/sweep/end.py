"""Decides how a multirun ends: the table, where everything is, what to do next, and the exit status.

Hydra calls it in the process that the user started, whatever launcher ran the trials.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from hydra.experimental.callback import Callback
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf

from valkyrie.sweep.names import NUMBERED
from valkyrie.sweep.table import NO_RESULT, ending, table
from valkyrie.sweep.tracking import SweepTracker
from valkyrie.sweep.trial import Status, Trial, TrialLog
from valkyrie.tracking import TrackingConfig
from valkyrie.train.screen import make_console

NO_RESULT_STATUS = 1
"""Exit status where a trial was left without a result."""
ALL_REFUSED = 2
"""Exit status where no trial was legal."""


@runtime_checkable
class Tracker(Protocol):
    """Who else is told of trials."""

    def log(self, trial: Trial) -> None:
        """Take a trial that is recorded."""
        ...

    def close(self) -> None:
        """Write what is said of the whole sweep."""
        ...


def end_of(context: HydraContext) -> SweepEnd | None:
    """Return the end of the multirun that Hydra carries out; None where its configuration has none."""
    return next((c for c in context.callbacks.callbacks if isinstance(c, SweepEnd)), None)


class SweepEnd(Callback):
    """Gathers the trials of a multirun and tells of them at its end.

    Our launcher hands them over as they come. After another launcher they are all that the folder has, and those that
    `trials.jsonl` has gained are told to the trackers.
    """

    def __init__(self) -> None:
        self._folder = Path()
        self._before: set[tuple[str, str]] = set()
        self._trials: dict[str, Trial] = {}
        self._trackers: list[Tracker] = []
        self._launched = False

    def __getstate__(self) -> dict[str, Any]:
        """Return what a worker of another launcher may have: trackers stay in the process that the user started."""
        return self.__dict__ | {"_trackers": []}

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Remember what the sweep's folder has already."""
        self._folder = Path(config.hydra.sweep.dir)
        tracking = OmegaConf.to_object(config.tracking)
        assert isinstance(tracking, TrackingConfig)
        self._trackers = [SweepTracker(tracking, self._folder, self._folder.resolve().name)]
        self._before = {(trial.key, trial.started) for trial in TrialLog(self._folder).read()}

    def noted(self, trial: Trial) -> None:
        """Take a trial of this sweep that our launcher has recorded."""
        self._launched = True
        self.take(trial)

    def take(self, trial: Trial) -> None:
        """Take a trial that is recorded, such as one that a sweeper refused before any launcher saw it."""
        self._trials[trial.key] = trial
        for tracker in self._trackers if trial.stage in NUMBERED else ():
            tracker.log(trial)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Print the table and leave with the status of the sweep, if it is not 0."""
        if not self._launched:
            for trial in TrialLog(self._folder).read():
                if (trial.key, trial.started) in self._before:
                    self._trials[trial.key] = trial
                else:
                    self.take(trial)
        status = self.finish()
        if status:
            sys.exit(status)

    def finish(self, note: str | None = None) -> int:
        """Print the table of this sweep's trials and what there is to say, and return the exit status."""
        console, trials = make_console(), list(self._trials.values())
        if any(trial.status is not Status.refused for trial in trials):
            console.print(table(trials), soft_wrap=False)
        for line in [*([note] if note else []), *ending(trials, self._folder, complete=note is None)]:
            console.print(line, markup=False, highlight=False)
        for tracker in self._trackers:
            tracker.close()
        if any(trial.status in NO_RESULT for trial in trials):
            return NO_RESULT_STATUS
        return ALL_REFUSED if trials and all(trial.status is Status.refused for trial in trials) else 0
