"""Prints the results of a multirun when it ends: the ranked table, the folder and the next steps. Sets the exit status.

Runs in the process that the user started, whatever the launcher. It runs after Hydra has returned, because Hydra turns
errors in callbacks into warnings.
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
from valkyrie.sweep.table import NO_RESULT_STATUSES, closing_lines, sweep_table
from valkyrie.sweep.tracking import SweepTracker
from valkyrie.sweep.trial import Status, Trial, TrialLog
from valkyrie.train.screen import make_console
from valkyrie.units import count_text

NO_RESULT_EXIT = 1
"""Exit status of a sweep if any trial failed, was killed or timed out."""
ALL_REFUSED_EXIT = 2
"""Exit status of a sweep if all its trials were refused."""

_sweep_ends: ContextVar[list[SweepEnd]] = ContextVar("_sweep_ends")
"""The `SweepEnd` callbacks of the multirun inside `print_results_at_end`.

They are stored here because Hydra drops its own list of callbacks if the multirun is interrupted.
"""


def find_sweep_end(context: HydraContext) -> SweepEnd | None:
    """Return the `SweepEnd` callback of a multirun, or None if its configuration has none."""
    return next((c for c in context.callbacks.callbacks if isinstance(c, SweepEnd)), None)


class SweepEndError(Exception):
    """Raised if the results of a sweep cannot be printed. All its finished trials are recorded nevertheless."""


@contextmanager
def print_results_at_end(command: str) -> Iterator[None]:
    """Print a multirun's results at the end of this context.

    If the multirun failed or was interrupted, also prints `command`, which does the remaining trials.

    Raises SystemExit if the multirun completed but its exit status is not 0, and SweepEndError if printing fails.
    Exceptions raised inside the context propagate.
    """
    _sweep_ends.set([])
    try:
        yield
    except BaseException as error:
        _finish_sweeps("interrupted" if isinstance(error, KeyboardInterrupt) else "failed", command)
        raise
    if status := _finish_sweeps(None, command):
        sys.exit(status)


def _finish_sweeps(early_end: str | None, command: str) -> int:
    status = 0
    for sweep_end in _sweep_ends.get():
        try:
            status = max(status, sweep_end.finish(early_end, command))
        except BrokenPipeError:
            raise
        except Exception as error:
            raise SweepEndError(
                f"the results of the sweep could not be printed ({type(error).__name__}: {error}). The trials are "
                f"recorded in {sweep_end.folder}. For a traceback, set HYDRA_FULL_ERROR=1."
            ) from error
    return status


class SweepEnd(Callback):
    """Hydra callback that collects the trials of a multirun for its table, and reports them to W&B.

    Valkyrie's launcher adds trials as they end. With other launchers, `finish` reads them from the sweep's folder.
    """

    def __init__(self) -> None:
        self.folder = Path()
        self._trials: dict[str, Trial] = {}
        self._tracker: SweepTracker | None = None
        self._has_all_trials = False

    def __getstate__(self) -> dict[str, object]:
        """Drop the tracker when a launcher pickles this: only the process that the user started reports to W&B."""
        return {**self.__dict__, "_tracker": None}

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Store the sweep's folder, start its W&B tracker, and register this callback with `print_results_at_end`."""
        if (sweep_ends := _sweep_ends.get(None)) is not None:
            sweep_ends.append(self)
        self.folder = Path(config.hydra.sweep.dir)
        tracking = OmegaConf.to_object(config.tracking)
        assert isinstance(tracking, TrackingConfig)
        self._tracker = SweepTracker(tracking, self.folder, self.folder.resolve().name)

    def expect_all_trials(self) -> None:
        """Make `finish` skip reading the folder, because the caller passes every trial to `add`."""
        self._has_all_trials = True

    def add(self, trial: Trial) -> None:
        """Add a recorded trial to the table, and report it to W&B if trials of its mode have results."""
        self._trials[trial.key] = trial
        if self._tracker is not None and has_results(trial.stage):
            self._tracker.log(trial)

    def finish(self, early_end: str | None, command: str) -> int:
        """Print the table of the trials and the next steps, wait for W&B, and return the exit status.

        The exit status is 0, `NO_RESULT_EXIT` or `ALL_REFUSED_EXIT`.

        Args:
            early_end: `interrupted` or `failed`, or None if all trials have ended. Nothing is printed if the sweep
                failed before any trial ended.
            command: The command that does the remaining trials.
        """
        try:
            if not self._has_all_trials:
                for trial in TrialLog(self.folder).read():
                    self.add(trial)
            trials = list(self._trials.values())
            if trials or early_end != "failed":
                self._print(trials, early_end, command)
        finally:
            if self._tracker is not None:
                self._tracker.close()
        if any(trial.status in NO_RESULT_STATUSES for trial in trials):
            return NO_RESULT_EXIT
        return ALL_REFUSED_EXIT if trials and all(trial.status is Status.refused for trial in trials) else 0

    def _print(self, trials: list[Trial], early_end: str | None, command: str) -> None:
        console = make_console()
        if any(trial.status is not Status.refused for trial in trials):
            console.print(sweep_table(trials, self.folder), soft_wrap=False)
        lines = closing_lines(trials, self.folder, is_complete=early_end is None)
        if early_end is not None:
            recorded_text = f"{count_text(len(trials), 'trial')} recorded"
            lines = [
                f"sweep {early_end}: {recorded_text}. To run the remaining trials: {command}",
                *(lines if trials else []),
            ]
        for line in lines:
            console.print(line, highlight=False, soft_wrap=True)
