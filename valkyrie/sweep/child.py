"""The process of a trial: `python -m valkyrie.sweep.child FOLDER` runs FOLDER/run.yaml and writes outcome.json.

With a second argument, `beside`, it is not process 0 of its trial and writes no outcome. Errors are logged with their
traceback and summarised in `outcome.json`. The file also has the reason if the process ends itself: at a signal, by the
watchdog, or because another process is lost. If the system or the compiler ends the process, there is no file.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from valkyrie.config.run import Run
from valkyrie.foreign_errors import is_out_of_memory
from valkyrie.processes.ending import records_ending
from valkyrie.processes.interrupt import exit_on_ctrl_c
from valkyrie.runs.folder import saved_config
from valkyrie.search import NOT_COMPILED
from valkyrie.sweep.members import BESIDE
from valkyrie.sweep.results import Outcome, ending, failure, results_of
from valkyrie.sweep.trial import Status
from valkyrie.train.room import DoesNotFit


def main() -> None:
    """Run the trial in the folder given as the first argument. Exits with status 1 unless the trial is ok."""
    folder = Path(sys.argv[1])
    with records_ending(lambda status, reason: _write(ending(status, reason), folder)), exit_on_ctrl_c("trial"):
        outcome = outcome_of(lambda: _carry_out(folder))
    _write(outcome, folder)
    sys.exit(int(outcome.status is not Status.ok))


def outcome_of(work: Callable[[], Outcome], log: TextIO | None = None) -> Outcome:
    """Return what `work` returns, or the outcome of what it raises.

    The traceback is printed to `log`, or to stderr if that is None.
    """
    try:
        return work()
    except Exception as error:
        traceback.print_exc(file=log)
        if isinstance(error, DoesNotFit):
            return Outcome(Status.does_not_fit, str(error))
        if isinstance(error, ValueError | OSError):  # mistakes of the user, as for the command
            return Outcome(Status.refused, " ".join(line.strip() for line in str(error).splitlines()))
        failed = failure(f"{type(error).__name__}: {error}")
        return replace(failed, status=Status.does_not_fit) if is_out_of_memory(str(error)) else failed


def _carry_out(folder: Path) -> Outcome:
    run = Run.from_config(saved_config(folder))
    status = run.config.mode.run(run)
    if status not in (0, NOT_COMPILED):
        return ending(status, f"its process ended with status {status}")
    return Outcome(Status.ok) if sys.argv[2:] == [BESIDE] else results_of(folder, run.config.mode)


def _write(outcome: Outcome, folder: Path) -> None:
    if sys.argv[2:] != [BESIDE]:
        outcome.write(folder)


if __name__ == "__main__":
    main()
