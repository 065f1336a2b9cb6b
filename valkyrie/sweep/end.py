"""The end of a multirun: prints the table, the folder and the next steps, and returns the exit status.

Runs in the process that the user started, with any launcher. It runs after Hydra has returned, because Hydra turns
errors of a callback into warnings.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf

from valkyrie.config.modes import has_results
from valkyrie.runs.wandb_writer import TrackingConfig
from valkyrie.sweep.table import NO_RESULT, ending, table
from valkyrie.sweep.tracking import SweepTracker
from valkyrie.sweep.trial import Status, Trial, TrialLog
from valkyrie.train.screen import make_console

NO_RESULT_STATUS = 1
"""Exit status if a trial has no result."""
ALL_REFUSED = 2
"""Exit status if no trial was legal."""
STOPPED = "stopped: what is done is kept; the same command does the rest"
_FAILED = "it went wrong: what is done is kept; the same command does the rest"

_begun: ContextVar[list[SweepEnd]] = ContextVar("_begun")
"""Multiruns started inside `multirun_ends`. Hydra creates the callbacks, and drops them when it is interrupted."""


def end_of(context: HydraContext) -> SweepEnd | None:
    """Return the callback of the current multirun, or None if its configuration has none."""
    return next((c for c in context.callbacks.callbacks if isinstance(c, SweepEnd)), None)


class SweepEndError(Exception):
    """The table of a sweep could not be printed. Its trials are recorded."""


@contextmanager
def multirun_ends() -> Iterator[None]:
    """Print the table of the multirun that Hydra runs inside this context when it finishes, is stopped or fails.

    Raises SystemExit with the status of the sweep if that is not 0, and SweepEndError if printing fails. Exceptions
    from inside propagate.
    """
    _begun.set([])
    try:
        yield
    except BaseException as error:
        _finish(STOPPED if isinstance(error, KeyboardInterrupt) else _FAILED)
        raise
    if status := _finish():
        sys.exit(status)


def _finish(note: str | None = None) -> int:
    status = 0
    for end in _begun.get():
        try:
            status = max(status, end.finish(note))
        except BrokenPipeError:
            raise
        except Exception as error:
            raise SweepEndError(
                f"the end of the sweep cannot be shown ({type(error).__name__}: {error}); its trials are recorded in "
                f"{end.folder}. HYDRA_FULL_ERROR=1 shows where."
            ) from error
    return status


class SweepEnd(Callback):
    """Collects the trials of a multirun for its table, and reports them to W&B.

    Our launcher adds trials as they end. With another launcher they are read from the sweep's folder.
    """

    def __init__(self) -> None:
        self.folder = Path()
        self._trials: dict[str, Trial] = {}
        self._tracker: SweepTracker | None = None
        self._complete = False

    def __getstate__(self) -> dict[str, object]:
        """Drop the tracker for workers of another launcher: only the process that the user started reports to W&B."""
        return {**self.__dict__, "_tracker": None}

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Begin a sweep in its folder."""
        if (begun := _begun.get(None)) is not None:
            begun.append(self)
        self.folder = Path(config.hydra.sweep.dir)
        tracking = OmegaConf.to_object(config.tracking)
        assert isinstance(tracking, TrackingConfig)
        self._tracker = SweepTracker(tracking, self.folder, self.folder.resolve().name)

    def has_all(self) -> None:
        """Declare that every trial will be added, so that the folder is not read."""
        self._complete = True

    def add(self, trial: Trial) -> None:
        """Add a recorded trial, from our launcher or refused by a sweeper."""
        self._trials[trial.key] = trial
        if self._tracker is not None and has_results(trial.stage):
            self._tracker.log(trial)

    def finish(self, note: str | None = None) -> int:
        """Print the table of the trials and the next steps, and return the exit status.

        `note` is the reason if the sweep was interrupted. In that case nothing is printed for a sweep without trials.
        """
        try:
            if not self._complete:
                for trial in TrialLog(self.folder).read():
                    self.add(trial)
            trials = list(self._trials.values())
            if trials or note is None:
                self._print(trials, note)
        finally:
            if self._tracker is not None:
                self._tracker.close()
        if any(trial.status in NO_RESULT for trial in trials):
            return NO_RESULT_STATUS
        return ALL_REFUSED if trials and all(trial.status is Status.refused for trial in trials) else 0

    def _print(self, trials: list[Trial], note: str | None) -> None:
        console = make_console()
        if any(trial.status is not Status.refused for trial in trials):
            console.print(table(trials, self.folder), soft_wrap=False)
        for line in [*([note] if note else []), *ending(trials, self.folder, complete=note is None)]:
            console.print(line, markup=False, highlight=False)
