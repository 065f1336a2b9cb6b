"""Decides how a multirun ends: the table, where everything is, what to do next, and the exit status.

It is told in the process that the user started, whatever launcher ran the trials, and after Hydra has returned: what
goes wrong in a callback, Hydra makes a warning of.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
STOPPED = "stopped: what is done is kept; the same command does the rest"
_FAILED = "it went wrong: what is done is kept; the same command does the rest"

_begun: list[SweepEnd] = []
"""The multirun that Hydra carries out in this process, once it has begun."""


def end_of(context: HydraContext) -> SweepEnd | None:
    """Return the end of the multirun that Hydra carries out; None where its configuration has none."""
    return next((c for c in context.callbacks.callbacks if isinstance(c, SweepEnd)), None)


class SweepEndError(Exception):
    """What a sweep came to could not be told; its trials are recorded all the same."""


@contextmanager
def multirun_ends() -> Iterator[None]:
    """Tell of the multirun that Hydra carries out inside, once it is over, stopped or broken.

    SystemExit with the status of the sweep, if that is not 0. Whatever is raised inside goes on. SweepEndError in one
    line where the telling itself fails.
    """
    _begun.clear()
    try:
        yield
    except BaseException as error:
        _finish(STOPPED if isinstance(error, KeyboardInterrupt) else _FAILED)
        raise
    if status := _finish():
        sys.exit(status)


def _finish(note: str | None = None) -> int:
    status = 0
    for end in _begun:
        try:
            status = max(status, end.finish(note))
        except BrokenPipeError:
            raise
        except Exception as error:
            raise SweepEndError(
                f"what the sweep came to cannot be told ({type(error).__name__}: {error}); its trials are recorded in "
                f"{end.folder}. HYDRA_FULL_ERROR=1 shows where."
            ) from error
    return status


class SweepEnd(Callback):
    """Gathers the trials of a multirun, to tell of them at its end.

    Our launcher hands them over as they come. After another launcher they are all that the folder has: W&B is told of
    those that it does not know yet. `folder` is the sweep's.
    """

    def __init__(self) -> None:
        self.folder = Path()
        self._trials: dict[str, Trial] = {}
        self._tracker: SweepTracker | None = None
        self._has_all = False

    def __getstate__(self) -> dict[str, Any]:
        """Return what a worker of another launcher may have: W&B stays with the process that the user started."""
        return self.__dict__ | {"_tracker": None}

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Begin a sweep in its folder."""
        _begun.append(self)
        self.folder = Path(config.hydra.sweep.dir)
        tracking = OmegaConf.to_object(config.tracking)
        assert isinstance(tracking, TrackingConfig)
        self._tracker = SweepTracker(tracking, self.folder, self.folder.resolve().name)

    def is_given_all(self) -> None:
        """Know that every trial of this sweep is handed over: the folder need not be searched for them."""
        self._has_all = True

    def take(self, trial: Trial) -> None:
        """Take a trial that is recorded, by our launcher or by a sweeper that refused it before any launcher saw it."""
        self._trials[trial.key] = trial
        if self._tracker is not None and trial.stage in NUMBERED:
            self._tracker.log(trial)

    def finish(self, note: str | None = None) -> int:
        """Print the table of this sweep's trials and what there is to say, and return the exit status.

        `note` says why it did not come to its own end; then nothing is printed where there is no trial to tell of.
        """
        try:
            if not self._has_all:
                for trial in TrialLog(self.folder).read():
                    self.take(trial)
            trials = list(self._trials.values())
            if trials or note is None:
                self._tell(trials, note)
        finally:
            if self._tracker is not None:
                self._tracker.close()
        if any(trial.status in NO_RESULT for trial in trials):
            return NO_RESULT_STATUS
        return ALL_REFUSED if trials and all(trial.status is Status.refused for trial in trials) else 0

    def _tell(self, trials: list[Trial], note: str | None) -> None:
        console = make_console()
        if any(trial.status is not Status.refused for trial in trials):
            console.print(table(trials), soft_wrap=False)
        for line in [*([note] if note else []), *ending(trials, self.folder, complete=note is None)]:
            console.print(line, markup=False, highlight=False)
